"""The reference driver drafts what llama.cpp's own draft-mtp drafts, from equal rows to equal logits, bit for bit.

Both run random programs in one child process, each between a target and a draft context of its own. Whatever the
reference's state goes through on the way (saved, overwritten, put back, malformed blobs refused) must not show.
"""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from subjects import builds, pairs, recipes, shimcache
from subjects.drivers.reference import LEAVE_OUT
from subjects.sources import NoDrivers

ROOT = Path(__file__).resolve().parents[2]
PAIRS = ("qwen35-mtp", "step35-mtp", "gemma4-mtp")
N_PROGRAMS = 60
N_STEPS = 12

CHILD = r"""
import json, pathlib, random, sys, time
from collections import Counter
from typing import get_args
_, root, shim, driver, target_path, draft_path, name, n_rs_seq, first, last, n_steps, leave_out, restarts = sys.argv
sys.path.insert(0, root)
from subjects.drivers import DraftAsk
from subjects.drivers.native import DriverLib, Native
from subjects.drivers.reference import HEADER, Reference, State, _mapped, pack
from subjects.driving import mangled
from subjects.scenario import ContextParams, DriverParams, Mangling, token
from subjects.shim import Shim
from subjects.trace import Row

shim = Shim(pathlib.Path(shim))
lib = DriverLib(pathlib.Path(driver))
models = {p: lib.load_model(pathlib.Path(p)) for p in {target_path, draft_path}}
n_vocab = shim.model_facts(models[target_path])["n_vocab"]
seconds = Counter()

class Differs(Exception):
    pass

class Side:
    # target, draft and driver
    def __init__(self, params, make):
        self.target = shim.new_context(models[target_path], params)
        self.draft = lib.new_draft_context(models[draft_path], params, self.target, mtp=True)
        self.driver = make(self.target, self.draft)
        self.name = type(self.driver).__name__
    def timed(self, f, *args):
        t = time.perf_counter()
        value = f(*args)
        seconds[self.name] += time.perf_counter() - t
        return value
    def close(self):
        self.driver.close()
        shim.free_context(self.draft)
        shim.free_context(self.target)

class Program:
    def __init__(self, seed):
        self.rng = rng = random.Random(f"{name} {seed}")
        self.n_seq = rng.choice([1, 2, 2, 3])
        self.params = ContextParams(
            n_seq_max=self.n_seq, n_rs_seq=int(n_rs_seq), n_batch=48, n_ubatch=rng.choice([8, 16, 32]),
            kv_unified=name != "qwen35-mtp" and rng.random() < 0.5,
        )
        self.p = DriverParams(
            kind="draft-mtp", n_max=rng.choice([1, 2, 3, 3, 5]), n_min=rng.choice([0, 0, 0, 2]),
            p_min=rng.choice([0.0, 0.0, 0.3, 0.6]), backend_sampling=rng.random() < 0.1,
        )
        self.native = Side(self.params, lambda t, d: Native(lib, self.p, t, d, self.n_seq))
        self.reference = Side(self.params, lambda t, d: Reference(self.p, t, d, self.n_seq, leave_out))
        self.sides = self.native, self.reference
        self.text = [[] for _ in range(self.n_seq)]   # what the target holds
        self.used = set()                             # sequences that have held something
        self.seen = Counter()
        if self.native.driver.n_max != self.reference.driver.n_max:
            raise Differs("n_max")

    def same(self, what, values):
        if values[0] != values[1]:
            raise Differs(f"{what}: native {str(values[0])[:300]} reference {str(values[1])[:300]}")
        return values[0]

    def both(self, what, call):
        value = self.same(what, [call(s) for s in self.sides])
        taps = [s.driver.take() for s in self.sides]
        self.same(f"{what}, number of decodes", [len(t) for t in taps])
        for i, (a, b) in enumerate(zip(*taps, strict=True)):
            self.same(f"{what}, decode {i}, rows", [(a.rc, a.rows), (b.rc, b.rows)])
            self.same(f"{what}, decode {i}, logits", [a.logits, b.logits])
            self.seen["decodes"] += 1
            self.seen["failed decodes"] += a.rc != 0
            self.seen["logits"] += len(a.logits) // (4 * n_vocab)
            self.seen["hidden rows"] += sum(bool(r.hidden) for r in a.rows)
        self.same(f"{what}, something in the log", [bool(s.driver.log()) for s in self.sides])
        shim.take_log()
        return value

    def decode(self, parts):
        # parts: {sequence: tokens}; the target, then process. True when both did
        rows = [
            Row(s, len(self.text[s]) + i, t, True) for s, tokens in parts.items() for i, t in enumerate(tokens)
        ]
        columns = [[r.token for r in rows], [r.pos for r in rows], [r.seq for r in rows], [1] * len(rows)]
        rc = self.same("decode", [shim.decode(s.target, *columns) for s in self.sides])
        if rc != 0:
            return False
        self.same("target", [[shim.logits(s.target, i, n_vocab) for i in range(len(rows))] for s in self.sides])
        for s, tokens in parts.items():
            self.text[s] += tokens
            self.used.add(s)
        return self.both("process", lambda side: side.timed(side.driver.process, rows))

    def cut(self, s, at):
        # both contexts; the whole sequence where the target cannot
        rc = self.same("seq_rm", [shim.seq_rm(side.target, s, at, -1) for side in self.sides])
        if not rc:
            at = 0
            self.same("seq_rm of all", [shim.seq_rm(side.target, s, -1, -1) for side in self.sides])
        self.same("seq_rm of the draft", [shim.seq_rm(side.draft, s, at, -1) for side in self.sides])
        self.text[s] = self.text[s][:at]

    def append(self):
        free = [s for s in range(self.n_seq) if self.text[s] or s not in self.used or int(restarts)]
        if not free:
            return
        some = self.rng.sample(free, self.rng.randint(1, len(free)))
        parts = {}
        for s in some:
            n, stream, at = self.rng.randint(1, 12), self.rng.randrange(4), len(self.text[s])
            parts[s] = [token(stream, at + i, n_vocab) for i in range(n)]
        self.decode(parts)
        for s in some:
            if self.rng.random() < 0.3:
                self.both("begin", lambda side: side.driver.begin(s, self.text[s]))

    def propose(self, some):
        rng = self.rng
        asks = [
            DraftAsk(s, len(self.text[s]), rng.randrange(n_vocab), rng.choice([-1, -1, 0, 1, 2]), self.text[s])
            for s in some
        ]
        self.rng.shuffle(asks)
        drafts = self.both("draft", lambda side: side.timed(side.driver.draft, asks))
        for d in drafts:
            self.seen[f"drafts of {len(d)}"] += 1
        return {a.seq: [a.last, *d] for a, d in zip(asks, drafts, strict=True)}

    def clean(self, some):
        for s in some:
            at = len(self.text[s])
            self.same("seq_rm of the draft", [shim.seq_rm(side.draft, s, at, -1) for side in self.sides])

    def round(self):
        some = [s for s in range(self.n_seq) if self.text[s] and self.rng.random() < 0.8]
        if not some:
            return
        proposals = self.propose(some)
        if self.rng.random() < 0.1:
            # not cleaned: the next decode of the draft's memory may be refused
            self.propose(some)
        self.clean(some)
        self.shake()
        groups = [some] if self.rng.random() < 0.5 else [[s] for s in some]
        for group in groups:
            if not self.decode({s: proposals[s] for s in group}):
                continue
            self.shake()
            for s in group:
                n = len(proposals[s]) - 1
                k = self.rng.randint(0, n)
                self.both("accept", lambda side: side.timed(side.driver.accept, s, k if n else 0))
                self.seen[f"accepted {k}"] += 1
                if k < n:
                    self.cut(s, len(self.text[s]) - (n - k))

    def tail(self):
        s = self.rng.randrange(self.n_seq)
        if self.text[s]:
            self.cut(s, self.rng.randint(1, len(self.text[s])))

    def clear(self):
        self.cut(self.rng.randrange(self.n_seq), 0)

    def shake(self):
        # the reference's state out and in again, other states and rubbish between: nothing of it may show
        driver = self.reference.driver
        whole = [driver.state(s) for s in range(self.n_seq)]
        for s in range(self.n_seq):
            if self.rng.random() < 0.5:
                driver.restore(s, whole[self.rng.randrange(self.n_seq)])
            if self.rng.random() < 0.3:
                blob = driver.state(s)
                driver.restore(s, self.malformed(blob))
                if not driver.log():
                    raise Differs("a refusal without a line")
                if driver.state(s) != blob:
                    raise Differs("state after a refusal")
            if self.rng.random() < 0.1:
                width, model = HEADER.unpack_from(whole[s])[2:4]
                blob = pack(State(bytes(4 * width), 99, bytes(4 * width * 100), 0, True), model)
                driver.restore(s, blob)
                if driver.state(s) != blob:
                    raise Differs("a state of more rows than n_batch")
        for s in self.rng.sample(range(self.n_seq), self.n_seq):
            driver.restore(s, whole[s])
        if driver.log() or [driver.state(s) for s in range(self.n_seq)] != whole:
            raise Differs("state, restored and saved again")
        self.seen["states"] += 1

    def malformed(self, blob):
        how = self.rng.choice(get_args(Mangling))
        bad = mangled(blob, how, self.rng.randrange(8))
        return self.rng.choice([blob[:HEADER.size - 1], blob + b"\0", bad, bad, bad, bad])

    def run(self):
        self.append()
        ops = [self.append, self.round, self.round, self.round, self.tail] + [self.clear] * int(restarts)
        for _ in range(int(n_steps)):
            self.rng.choice(ops)()
            self.shake()

total, differences = Counter(), []
for seed in range(int(first), int(last)):
    program = Program(seed)
    try:
        program.run()
    except Differs as e:
        differences.append(f"program {seed}: {e}")
    for side in program.sides:
        side.close()
    total.update(program.seen)
print(json.dumps({"seen": total, "differences": differences, "seconds": seconds, "libllama": len(_mapped())}))
"""


@cache
def _libraries() -> tuple[Path, Path]:
    build = builds.find_build(None)
    try:
        return builds.compile_shim(build), builds.driver_library(build)
    except NoDrivers as e:
        pytest.skip(f"no native driver here: {e}")


def run(
    pair: str, tmp_path: Path, n: int = N_PROGRAMS, *, leave_out: str = "", restarts: bool = False, first: int = 0
) -> dict[str, Any]:
    """What `n` programs of a pair showed; `restarts`: sequences begin again after they were removed."""
    p = pairs.get(pair)
    target, draft = tmp_path / "target.gguf", tmp_path / "target.gguf"
    recipes.get(p.target).write(target)
    if p.draft:
        draft = tmp_path / "draft.gguf"
        recipes.get(p.draft).write(draft)
    shim, driver = _libraries()
    arguments = [
        ROOT, shim, driver, target, draft, pair, p.n_rs_seq, first, first + n, N_STEPS, leave_out, int(restarts),
    ]  # fmt: skip
    done = shimcache.run_quietly([sys.executable, "-c", CHILD, *map(str, arguments)], shimcache.child_env(), 600)
    assert done.returncode == 0, f"the child ended with {done.returncode}: {done.stderr[-3000:]}"
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert answer["libllama"] == 1, "two copies of the library in one process"
    return answer


@pytest.mark.parametrize("pair", PAIRS)
def test_reference_drafts_as_the_native_driver_does(pair: str, tmp_path: Path) -> None:
    answer = run(pair, tmp_path)
    assert answer["differences"] == []
    # Comparing proves something only where there is something.
    seen = answer["seen"]
    assert all(seen.get(f"drafts of {n}") and seen.get(f"accepted {n}") for n in range(4))
    assert seen["hidden rows"] > 5 * N_PROGRAMS
    assert seen["logits"] > 10 * N_PROGRAMS
    assert seen["states"] > 10 * N_PROGRAMS
    assert bool(seen["failed decodes"]) == (pair == "qwen35-mtp")


@pytest.mark.parametrize("pair", PAIRS)
def test_position_zero_is_the_one_difference(pair: str, tmp_path: Path) -> None:
    answer = run(pair, tmp_path, restarts=True, leave_out="stale-first-row")
    assert answer["differences"] == []
    # With shared memory nothing is decoded at position 0 of the draft but a draft from nothing.
    assert bool(run(pair, tmp_path, 20, restarts=True)["differences"]) != pairs.get(pair).shares_memory


@pytest.mark.parametrize("switch", LEAVE_OUT)
def test_every_switch_shows(switch: str, tmp_path: Path) -> None:
    pair = "step35-mtp" if switch == "first-head-only" else "qwen35-mtp"
    restarts = switch == "stale-first-row"
    found = run(pair, tmp_path, 20, leave_out="" if restarts else switch, restarts=restarts)["differences"]
    assert len(found) >= 5, found


BINDING = r"""
import pathlib, sys
_, root, shim, order = sys.argv
sys.path.insert(0, root)
if order == "first":
    import llama_cpp
from subjects.drivers.reference import WrongBinding, _mapped, binding
from subjects.shim import Shim
if order != "never":
    shim = Shim(pathlib.Path(shim))
if order == "between":
    import llama_cpp
try:
    api, ext = binding()
except WrongBinding as e:
    print(e)
    sys.exit()
assert len(_mapped()) == 1
assert shim.load_model(pathlib.Path("/nowhere")) is None
assert any("/nowhere" in line for line in shim.take_log()), "the shim's log is gone"
assert binding() == (api, ext)
if order == "struct":
    import subjects.drivers.reference as reference
    class Other:
        def __getattr__(self, name):
            return getattr(api, name)
        def llama_context_default_params(self):
            params = api.llama_context_default_params()
            params.type_k = 99
            return params
    print(reference._canary(Other()))
else:
    print("bound")
"""


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ("then", "bound"),
        ("first", "bound"),  # the shim then takes what is there
        ("between", "2 files of libllama in this process instead of one"),
        ("never", "0 files of libllama in this process instead of one"),
        ("struct", "llama_context_params.type_k is 99, not 1"),
    ],
)
def test_binding_reaches_the_library_under_test_or_says_why_not(order: str, says: str) -> None:
    command = [sys.executable, "-c", BINDING, str(ROOT), str(_libraries()[0]), order]
    done = shimcache.run_quietly(command, shimcache.child_env(), 120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith(says)
    assert not done.stderr
