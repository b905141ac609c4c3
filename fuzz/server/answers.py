"""Reads what llama-server answered; repro.sh calls it. Needs Python's standard library only.

show FILE                 what an answer says
compare GOT COLD BAND FAR the first place where two answers differ; logarithms of probability of honest ones do by BAND
                          at most, and beyond FAR it is a fault
accepted GOT CLEAN        whether as many drafted tokens were accepted as by a server that keeps nothing
slot GOT WRONG            whether a slot action is answered wrongly again: "done", "refused", or a number of tokens
damage FOLDER NAME PIECES put a file together anew, of pieces of the files there: [file, from, to], or bytes in hex

Exit code: 1 where it is not as it must be, 2 where an answer cannot be read.
"""

import json
import math
import sys
from collections.abc import Callable
from typing import Any


def read(path: str) -> dict[str, Any]:
    """An answer: whole, or the parts of one whose client went away."""
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read()
    parts = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    if parts:
        return {**parts[-1], "tokens": [t for part in parts for t in tokens(part)], "broken off": True}
    answer = json.loads(text) if text.strip() else {}
    return answer if isinstance(answer, dict) else {}


def number(value: float | None) -> float:
    """JSON has no NaN: null stands for it. What is less than float32 can tell of a probability is as little."""
    return math.nan if value is None else max(value, -80.0)


def tops(answer: dict[str, Any]) -> list[tuple[int, dict[int, float]]]:
    """For each token of an answer: its number, and the most probable ones with logarithms of probability. Of a token
    that was drafted there are none."""
    found = answer.get("completion_probabilities")
    if found is None:
        choice = (answer.get("choices") or [{}])[0]
        found = (choice.get("logprobs") or {}).get("content") or []
    return [(p["id"], {t["id"]: number(t["logprob"]) for t in p.get("top_logprobs", [])}) for p in found]


def tokens(answer: dict[str, Any]) -> list[int]:
    """The tokens of an answer."""
    found: list[int] = answer.get("tokens") or answer.get("__verbose", {}).get("tokens")
    return found or [number for number, _ in tops(answer)]


def count(n: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def show(path: str) -> str:
    """An answer in a line."""
    answer = read(path)
    if "error" in answer:
        return f"error {answer['error'].get('code')}: {answer['error'].get('message')}"
    for name in ("saved", "restored", "erased"):
        if f"n_{name}" in answer:
            return f"{count(answer[f'n_{name}'], 'token')} {name}"
    timings = answer.get("timings", {})
    said = [f"{count(len(tokens(answer)), 'token')}: {' '.join(map(str, tokens(answer)))}"]
    if "cache_n" in timings:
        said.append(f"{timings['cache_n']} of the prompt cached")
    if timings.get("draft_n"):
        said.append(f"{timings['draft_n_accepted']} of {count(timings['draft_n'], 'drafted token')} accepted")
    if answer.get("broken off"):
        said.append("then the client went away")
    return "; ".join(said)


def told(path: str) -> int:
    """Print an answer."""
    print(show(path))
    return 0


def difference(ours: dict[int, float], clean: dict[int, float]) -> tuple[float, str]:
    """How far the probabilities of two lists are apart at most, and which; lists with nothing in common, or with what
    is no number, are as far apart as can be."""
    both = ours.keys() & clean.keys()
    if ours and clean and not both:
        return math.inf, f"none of the most probable tokens, {[*ours]}, is one of a cold server's, {[*clean]}"
    found = 0.0, ""
    for t in both:
        a, b = ours[t], clean[t]
        apart = 0.0 if a == b else abs(a - b) if math.isfinite(a - b) else math.inf
        told = f"the log-probability of token {t} is {a:.4g}, and {b:.4g} of a cold server"
        found = max(found, (apart, told), key=lambda x: x[0])
    return found


def compare(got_path: str, cold_path: str, band: str, far: str) -> int:
    """1 where the answers differ, 0 where they do not, 2 where there is nothing to compare."""
    got, cold = read(got_path), read(cold_path)
    if "error" in got and tokens(cold):
        print(f"DIFFERENT: {show(got_path)}, and a cold server answers")
        return 1
    if not got or not tokens(cold):
        print(f"nothing to compare: {show(got_path)} / {show(cold_path)}")
        return 2
    probable = list(zip(tops(got), tops(cold), strict=False))
    most, worst = 0.0, ""
    parted = ""
    for i, (a, b) in enumerate(zip(tokens(got), tokens(cold), strict=False)):
        ours, clean = (probable[i][0][1], probable[i][1][1]) if i < len(probable) else ({}, {})
        apart, told = difference(ours, clean)
        if apart > most:
            most, worst = apart, f"at token {i} of the answer {told}"
        if a != b:
            gap = clean.get(b, 0.0) - clean.get(a, min(clean.values(), default=0.0))
            parted = (
                f"token {i} is {a}, and {b} of a cold server, which prefers it by {gap:.4g} (band {float(band):.2g})"
            )
            if gap > 2 * float(band):
                print(f"DIFFERENT: {parted}")
                return 1
            break
    if most > float(far):
        times = f", {ratio(most / float(band))} times the band of {float(band):.2g}" if float(band) > 0 else ""
        print(f"DIFFERENT: {worst}: {most:.4g} apart{times if math.isfinite(most) else ''}")
        return 1
    if parted:
        print(f"{parted}: a near tie, not reproduced")
        return 0
    if "broken off" not in got and len(tokens(got)) != len(tokens(cold)):
        ends = count(len(tokens(got)), "token")
        print(f"DIFFERENT: it ends behind {ends}, the cold server's behind {len(tokens(cold))}")
        return 1
    print(f"the answers are equal, log-probabilities within {most:.2g} (honest: {float(band):.2g}): not reproduced")
    return 0


def ratio(x: float) -> str:
    """Two digits, and as many noughts as it takes."""
    return f"{float(f'{x:.2g}'):,.0f}" if 10 <= x < 1e9 else f"{x:.2g}"


def accepted(got_path: str, clean_path: str) -> int:
    """1 where fewer drafted tokens were accepted than by a server that keeps nothing, 2 where the answers differ, so
    that nothing can be said of their drafts."""
    got, clean = read(got_path), read(clean_path)
    if not tokens(clean) or tokens(got) != tokens(clean):
        print(f"nothing to compare, the answers differ: {show(got_path)} / {show(clean_path)}")
        return 2
    (mine, of), (theirs, their_of) = drafts(got), drafts(clean)
    verdict = "FEWER" if mine < theirs else "not reproduced"
    print(
        f"{verdict}: {mine} of {count(of, 'drafted token')} accepted; a server that keeps nothing accepts {theirs} of "
        f"{their_of}"
    )
    return int(mine < theirs)


def drafts(answer: dict[str, Any]) -> tuple[int, int]:
    """How many drafted tokens were accepted, of how many."""
    timings = answer.get("timings", {})
    return timings.get("draft_n_accepted", 0), timings.get("draft_n", 0)


def slot(path: str, wrong: str) -> int:
    """1 where a slot action is answered as it must not be."""
    answer = read(path)
    n = next((str(answer[n]) for n in ("n_saved", "n_restored", "n_erased") if n in answer), "")
    again = wrong in ("refused" if "error" in answer else "done", n)
    print(f"{show(path)}: {'WRONG' if again else 'not reproduced'}")
    return int(again)


def damage(folder: str, name: str, pieces: str) -> int:
    """Write a file anew."""
    data = b""
    for piece in json.loads(pieces):
        if isinstance(piece, str):
            data += bytes.fromhex(piece)
        else:
            with open(f"{folder}/{piece[0]}", "rb") as file:
                data += file.read()[piece[1] : piece[2]]
    with open(f"{folder}/{name}", "wb") as file:
        file.write(data)
    return 0


if __name__ == "__main__":
    verb, *rest = sys.argv[1:]
    verbs: dict[str, Callable[..., int]]
    verbs = {"show": told, "compare": compare, "accepted": accepted, "slot": slot, "damage": damage}
    try:
        sys.exit(verbs[verb](*rest))
    except (OSError, ValueError, LookupError, TypeError) as e:
        print(f"cannot be read: {type(e).__name__}: {e}")
        sys.exit(2)
