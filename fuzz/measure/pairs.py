"""What the set-ups of speculative drivers (`subjects.pairs`) can show: accepted tokens, and how sensitive drafts are.

  python -m fuzz.measure.pairs
  python -m fuzz.measure.pairs qwen35-mtp gemma4-mtp --seed 100 --seed 200 --json

A round drafts for two sequences in one call, takes both drafts to the target in one batch and accepts what the target
would have said itself; what a draft left in both memories is removed. For the sensitivity every draft is made three
times from the same position: as it is, with the other sequence's hidden row in the driver (the other's history is
processed under this sequence, then both memories are put back), and with the other's draft memory (the target's, where
the draft has none of its own). Everything is deterministic: the same seed gives the same numbers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from subjects import pairs, recipes
from subjects.builds import BadBuild, compile_shim, driver_library, find_build
from subjects.drivers import DraftAsk
from subjects.drivers.native import DriverLib, Native
from subjects.scenario import ContextParams, DriverParams, ModelRef, token
from subjects.shim import Shim
from subjects.shimcache import child_env, run_quietly
from subjects.trace import Row

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (0, 100, 200)
ROUNDS = 40
PROMPT = 20
# The ngram kinds draft what came before, and ngram-cache learns next to nothing after the prompt: their prompts go on
# with what the target says.
LEAD = 60
SEQUENCES = 2
TIMEOUT = 3600.0


class Failed(RuntimeError):
    """The child that measures died, or the library refused what it was asked; the message says what it said."""


def main() -> int:
    """Entry."""
    p = argparse.ArgumentParser(
        prog="python -m fuzz.measure.pairs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("names", nargs="*", metavar="NAME", help=f"pairs (default: all): {', '.join(pairs.names())}")
    p.add_argument(
        "--seed", type=int, action="append", metavar="N", help="seed of the models, may be repeated (default 0 100 200)"
    )
    p.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"rounds of drafting (default {ROUNDS})")
    p.add_argument("--build", type=Path, metavar="DIR", help="another llama.cpp, as for `redraft fuzz`")
    p.add_argument("--json", action="store_true", help="one JSON document on standard output, for machines")
    args = p.parse_args()
    unknown = [name for name in args.names if name not in pairs.names()]
    if unknown:
        p.error(f"no pair is called {unknown[0]!r}; pairs are {', '.join(pairs.names())}")
    try:
        results = measure(args.names or pairs.names(), args.seed or SEEDS, args.rounds, args.build)
    except (Failed, BadBuild) as e:
        print(f"measure pairs: {e}", file=sys.stderr)
        return 2 if isinstance(e, BadBuild) else 1
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        show(results)
    return 0


def measure(
    names: list[str] | tuple[str, ...],
    seeds: list[int] | tuple[int, ...] = SEEDS,
    rounds: int = ROUNDS,
    build: Path | None = None,
) -> list[dict[str, Any]]:
    """Measure pairs in a child process, one result for each name and seed (see `_measure_one`).

    Raises:
        Failed: the child died or hung.
        BadBuild: no such build, or its drivers cannot be reached.
    """
    found = find_build(build)
    wanted = {
        "shim": str(compile_shim(found)),
        "driver": str(driver_library(found)),
        "names": list(names),
        "seeds": list(seeds),
        "rounds": rounds,
    }
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from fuzz.measure.pairs import child; child()"
    try:
        child = run_quietly([sys.executable, "-c", program, json.dumps(wanted)], child_env(), TIMEOUT)
    except subprocess.TimeoutExpired:
        raise Failed(f"the child took more than {TIMEOUT:.0f} s") from None
    lines = [line for line in child.stdout.splitlines() if line.startswith("RESULT ")]
    if child.returncode or len(lines) != len(names) * len(seeds):
        raise Failed(f"the child ended with {child.returncode}\n{child.stderr[-3000:]}")
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


def show(results: list[dict[str, Any]]) -> None:
    """The table: a row for each pair and seed."""
    samples = pairs.SAMPLES
    table = Table(
        title=f"Rounds by accepted tokens, and drafts of {samples} that change with another sequence's state",
        title_justify="left",
    )
    for name in ("pair", "seed", "accepted 0/1/2/...", "hidden row", "memory", "greedy text"):
        table.add_column(name, no_wrap=name in ("pair", "accepted 0/1/2/..."))
    for r in results:
        cells = ("-" if r[key] is None else str(r[key]) for key in ("hidden", "memory"))
        table.add_row(r["pair"], str(r["seed"]), "/".join(map(str, r["accepted"])), *cells, str(r["greedy"]).lower())
    Console(soft_wrap=True).print(table)


# ---------------------------------------------------------------------------------------------------------------------
# The child


def child() -> None:
    """Body of the child process: measures what its argument says and prints a line for each result."""
    wanted = json.loads(sys.argv[1])
    shim = Shim(Path(wanted["shim"]))
    lib = DriverLib(Path(wanted["driver"]))
    with tempfile.TemporaryDirectory(prefix="redraft-pairs-") as folder:
        for name in wanted["names"]:
            for seed in wanted["seeds"]:
                result = _measure_one(shim, lib, pairs.get(name), seed, wanted["rounds"], Path(folder))
                print("RESULT", json.dumps(result), flush=True)


def _measure_one(shim: Shim, lib: DriverLib, pair: pairs.Pair, seed: int, rounds: int, folder: Path) -> dict[str, Any]:
    models = Models(shim, lib, pair, seed, folder)
    accepted, greedy = _accepted(models, rounds)
    lag, offers_state = _facts(models)
    hidden, memory = _sensitivity(models) if pair.has_draft_context else (None, None)
    return {
        "pair": pair.name,
        "seed": seed,
        "rounds": rounds,
        "accepted": accepted,
        "hidden": hidden if pair.keeps_hidden_state else None,
        "memory": memory,
        "greedy": greedy,
        "lag": lag,
        "offers_state": offers_state,
    }


class Models:
    """The loaded files of a pair."""

    def __init__(self, shim: Shim, lib: DriverLib, pair: pairs.Pair, seed: int, folder: Path):
        self.shim, self.lib, self.pair, self.seed = shim, lib, pair, seed
        self.n_vocab = recipes.get(pair.target).n_vocab
        self.target = self._load(folder, pair.target)
        self.draft = self._load(folder, pair.draft) if pair.draft else self.target

    def _load(self, folder: Path, name: str) -> int:
        path = folder / f"{name}-{self.seed}.gguf"
        recipes.get(name).write(path, self.seed)
        model = self.lib.load_model(path)
        if model is None:
            raise Failed(f"{name} is refused: {self.shim.take_log()}")
        return model


class Setup:
    """Two contexts and the driver between them, driven in the order of llama.cpp's server."""

    def __init__(self, models: Models):
        self.models, self.shim, self.pair = models, models.shim, models.pair
        params = ContextParams(n_ctx=512 * SEQUENCES, n_seq_max=SEQUENCES, n_rs_seq=self.pair.n_rs_seq)
        self.target = self._made(self.shim.new_context(models.target, params))
        self.draft_context = 0
        if self.pair.has_draft_context:
            # before the target has decoded anything
            made = models.lib.new_draft_context(models.draft, params, self.target, mtp=self.pair.mtp)
            self.draft_context = self._made(made)
        ref = ModelRef(recipe=self.pair.draft, seed=models.seed) if self.pair.draft else None
        self.driver = Native(
            models.lib,
            DriverParams(kind=self.pair.kind, draft=ref, n_max=self.pair.n_max, ngram_m=self.pair.n_max),
            self.target,
            self.draft_context,
            SEQUENCES,
        )
        if self.driver.n_max != self.pair.n_max:
            raise Failed(f"{self.pair.name}: the driver drafts {self.driver.n_max} tokens, not {self.pair.n_max}")
        self.contexts = [c for c in (self.target, self.draft_context) if c]
        self.text: list[list[int]] = [[] for _ in range(SEQUENCES)]
        """of each sequence: what the target has decoded, and then one token that it has not"""

    def _made(self, ctx: int | None) -> int:
        if ctx is None:
            raise Failed(f"{self.pair.name}: no context: {self.shim.take_log()}")
        return ctx

    def decode(self, rows: list[Row]) -> list[int]:
        """Decode rows in the target and let the driver process them: the target's next token after each row."""
        args = ([r.token for r in rows], [r.pos for r in rows], [r.seq for r in rows], [1] * len(rows))
        rc = self.shim.decode(self.target, *args)
        if rc or not self.driver.process(rows):
            raise Failed(f"{self.pair.name}: decode gives {rc}: {self.shim.take_log() + self.driver.log()}")
        return [self._greedy(i) for i in range(len(rows))]

    def _greedy(self, i: int) -> int:
        row = array("f", self.shim.logits(self.target, i, self.models.n_vocab) or b"")
        return max(range(len(row)), key=row.__getitem__)

    def prompt(self, seq: int, tokens: list[int]) -> None:
        """Begin a sequence."""
        said = self.decode([Row(seq, i, t, True) for i, t in enumerate(tokens)])
        self.text[seq] = [*tokens, said[-1]]
        if not self.pair.has_draft_context:
            for _ in range(LEAD):
                self.step(seq)
        self.driver.begin(seq, self.text[seq][:-1])

    def step(self, seq: int) -> None:
        """Go on by one token, without drafting."""
        self.text[seq] += self.decode([Row(seq, len(self.text[seq]) - 1, self.text[seq][-1], True)])

    def cut(self, seq: int, pos: int) -> None:
        """Remove a sequence from `pos` on in both memories."""
        for ctx in self.contexts:
            if not self.shim.seq_rm(ctx, seq, pos, -1):
                raise Failed(f"{self.pair.name}: seq_rm refused")

    def drafts(self, seqs: list[int]) -> list[list[int]]:
        """Drafts for some sequences in one call; nothing of them stays in the draft memory."""
        asks = [DraftAsk(s, len(self.text[s]) - 1, self.text[s][-1], -1, self.text[s][:-1]) for s in seqs]
        drafts = self.driver.draft(asks)
        if self.draft_context and not self.pair.shares_memory:
            for ask in asks:
                self.shim.seq_rm(self.draft_context, ask.seq, ask.pos0, -1)
        return drafts

    def round(self) -> list[int]:
        """Draft, verify, accept, roll back: how many tokens were accepted of each sequence."""
        drafts = self.drafts(list(range(SEQUENCES)))
        rows = [
            Row(s, len(self.text[s]) - 1 + i, t, True)
            for s, draft in enumerate(drafts)
            for i, t in enumerate([self.text[s][-1], *draft])
        ]
        said = self.decode(rows)
        counts = []
        for s, draft in enumerate(drafts):
            k = 0
            while k < len(draft) and draft[k] == said[k]:
                k += 1
            if draft:
                self.driver.accept(s, k)
            self.text[s] += said[: k + 1]
            self.cut(s, len(self.text[s]) - 1)
            said = said[len(draft) + 1 :]
            counts.append(k)
        return counts

    def saved(self, ctx: int, seq: int) -> bytes:
        """The whole state of a sequence in a context."""
        return self.shim.seq_get(ctx, seq, 0, self.shim.seq_size(ctx, seq, 0))[1]

    def put(self, ctx: int, seq: int, blob: bytes) -> None:
        """Restore what `saved` gave, into whatever sequence."""
        if not self.shim.seq_set(ctx, seq, 0, blob):
            raise Failed(f"{self.pair.name}: state refused: {self.shim.take_log()}")

    def close(self) -> None:
        """Free the driver and its contexts."""
        self.driver.close()
        for ctx in reversed(self.contexts):
            self.shim.free_context(ctx)


def _tokens(models: Models, stream: int) -> list[int]:
    return [token(stream, i, models.n_vocab) for i in range(PROMPT)]


def _accepted(models: Models, rounds: int) -> tuple[list[int], bool]:
    """How often each count was accepted, and whether the text is the one that the target gives without drafts."""
    setup = Setup(models)
    for s in range(SEQUENCES):
        setup.prompt(s, _tokens(models, s))
    counts = [0] * (setup.driver.n_max + 1)
    for _ in range(rounds):
        for k in setup.round():
            counts[k] += 1
    text = setup.text
    setup.close()

    plain = Setup(models)
    for s in range(SEQUENCES):
        plain.prompt(s, text[s][:PROMPT])
        while len(plain.text[s]) < len(text[s]):
            plain.step(s)
    same = plain.text == text
    plain.close()
    return counts, same


def _facts(models: Models) -> tuple[int, bool]:
    """By how many positions the draft memory is behind after a prompt, and whether the driver offers state."""
    setup = Setup(models)
    setup.prompt(0, _tokens(models, 0))
    ends = [models.shim.positions(ctx, SEQUENCES)[0][1] for ctx in setup.contexts]
    offers = setup.driver.state(0) is not None
    setup.close()
    return ends[0] - ends[-1], offers


def _sensitivity(models: Models) -> tuple[int, int]:
    """How many of SAMPLES drafts change with the other sequence's hidden row, and with its memory."""
    hidden = memory = 0
    for sample in range(0, pairs.SAMPLES, SEQUENCES):
        setup = Setup(models)
        for s in range(SEQUENCES):
            setup.prompt(s, _tokens(models, 1000 + sample + s))
        draft_memory = setup.target if setup.pair.shares_memory else setup.draft_context
        texts = list(setup.text)
        before = [setup.drafts([s])[0] for s in range(SEQUENCES)]
        blobs = [{ctx: setup.saved(ctx, s) for ctx in setup.contexts} for s in range(SEQUENCES)]
        for s in range(SEQUENCES):
            other = 1 - s
            setup.put(draft_memory, s, blobs[other][draft_memory])
            memory += setup.drafts([s])[0] != before[s]
            for history in (other, s):
                # the row of one history beside the memories of the other; at last the right one again
                setup.cut(s, 0)
                setup.prompt(s, texts[history][:PROMPT])
                setup.text[s] = texts[s]
                for ctx in setup.contexts:
                    setup.put(ctx, s, blobs[s][ctx])
                drafts = setup.drafts([s])[0]
                hidden += drafts != before[s]
            if drafts != before[s]:
                raise Failed(f"{setup.pair.name}: a draft does not repeat")
        setup.close()
    return hidden, memory


if __name__ == "__main__":
    sys.exit(main())
