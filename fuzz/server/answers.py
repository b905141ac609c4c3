"""Reads what llama-server answered; repro.sh calls it. Needs Python's standard library only.

show FILE                 what an answer says
compare GOT COLD BAND FAR the first place where two answers differ; logarithms of probability of honest ones do by BAND
                          at most, and beyond FAR it is a fault
accepted GOT LEAST        whether as many drafted tokens were accepted as must be
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


def show(path: str) -> str:
    """An answer in a line."""
    answer = read(path)
    if "error" in answer:
        return f"error {answer['error'].get('code')}: {answer['error'].get('message')}"
    for name in ("saved", "restored", "erased"):
        if f"n_{name}" in answer:
            return f"{answer[f'n_{name}']} tokens {name}"
    timings = answer.get("timings", {})
    said = [f"{len(tokens(answer))} tokens: {' '.join(map(str, tokens(answer)))}"]
    if "cache_n" in timings:
        said.append(f"{timings['cache_n']} of the prompt cached")
    if timings.get("draft_n"):
        said.append(f"{timings['draft_n_accepted']} of {timings['draft_n']} drafted tokens accepted")
    if answer.get("broken off"):
        said.append("then the client went away")
    return "; ".join(said)


def told(path: str) -> int:
    """Print an answer."""
    print(show(path))
    return 0


def difference(ours: dict[int, float], clean: dict[int, float]) -> float:
    """How far the probabilities of two lists are apart at most; lists with nothing in common, or with what is no
    number, are as far apart as can be."""
    both = ours.keys() & clean.keys()
    if ours and clean and not both:
        return math.inf
    apart = [abs(ours[t] - clean[t]) for t in both if ours[t] != clean[t]]
    return max((x if math.isfinite(x) else math.inf for x in apart), default=0.0)


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
    most = 0.0
    for i, (a, b) in enumerate(zip(tokens(got), tokens(cold), strict=False)):
        ours, clean = (probable[i][0][1], probable[i][1][1]) if i < len(probable) else ({}, {})
        apart = difference(ours, clean)
        if a != b:
            gap = clean.get(b, 0.0) - clean.get(a, min(clean.values(), default=0.0))
            tie = gap <= 2 * float(band) and apart <= float(far)
            print(
                f"token {i} is {a}, and {b} of a cold server, which prefers it by {gap:.4g} (band {float(band):.2g}): "
            )
            print("a near tie, not reproduced" if tie else "DIFFERENT")
            return int(not tie)
        if apart > float(far):
            print(f"DIFFERENT: log-probabilities of token {i} are {apart:.4g} apart (honest: {float(band):.2g})")
            return 1
        most = max(most, apart)
    if "broken off" not in got and len(tokens(got)) != len(tokens(cold)):
        print(f"DIFFERENT: it ends behind {len(tokens(got))} tokens, the cold server's behind {len(tokens(cold))}")
        return 1
    print(f"the answers are equal, log-probabilities within {most:.2g} (honest: {float(band):.2g}): not reproduced")
    return 0


def accepted(path: str, least: str) -> int:
    """1 where fewer drafted tokens were accepted than must be."""
    timings = read(path).get("timings", {})
    found = timings.get("draft_n_accepted", 0)
    print(f"{found} of {timings.get('draft_n', 0)} drafted tokens accepted; {least} must be")
    return int(found < int(least))


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
