"""The driver library is compiled, with the build's drivers, a checkout's and patched ones, and what was meant runs."""

import json
import shutil
import sys
import time
from pathlib import Path

import pytest

from fuzz.cli.common import Bench
from subjects import builds, shimcache
from subjects.builds import NoDrivers
from subjects.recipes import get

ROOT = Path(__file__).resolve().parents[2]
PATCH = ROOT / "tests/planted/mtp_state.patch"

# What a child does with a driver library: arguments SHIM DRIVER MODEL; one JSON document.
CHILD = """
import json, pathlib, sys
from typing import get_args
from subjects.drivers import DraftAsk
from subjects.drivers.native import DriverLib, Native
from subjects.driving import mangled
from subjects.scenario import ContextParams, DriverParams, Mangling, token
from subjects.shim import Shim
from subjects.trace import Row

shim, lib = Shim(pathlib.Path(sys.argv[1])), DriverLib(pathlib.Path(sys.argv[2]))
model = lib.load_model(pathlib.Path(sys.argv[3]))
params = ContextParams(n_seq_max=2)
target = shim.new_context(model, params)
draft = lib.new_draft_context(model, params, target, mtp=True)
driver = Native(lib, DriverParams(kind="draft-mtp"), target, draft, 2)
said = {}


def feed(start, n, stream, seq=0):
    rows = [Row(seq, start + i, token(stream, start + i, 64), True) for i in range(n)]
    rc = shim.decode(target, [r.token for r in rows], [r.pos for r in rows], [seq] * n, [1] * n)
    assert rc == 0 and driver.process(rows), rc
    return driver.take()[0].rows[0].hidden


def ask():
    drafts = driver.draft([DraftAsk(0, 8, 7, -1, [token(1, i, 64) for i in range(8)])])
    taps = driver.take()
    shim.seq_rm(draft, 0, 8, -1)
    return drafts[0], taps[0].rows[0].hidden, taps[0].logits


def memory(ctx):
    return shim.seq_get(ctx, 0, 0, shim.seq_size(ctx, 0, 0))[1]


feed(0, 8, 1)
state, kept = driver.state(0), (memory(target), memory(draft))
said["state"] = None if state is None else len(state)
before = ask()
for ctx in (target, draft):
    shim.seq_rm(ctx, 0, -1, -1)
said["new conversation begins with zeros"] = not any(feed(0, 8, 2))
for ctx, blob in zip((target, draft), kept):
    shim.seq_rm(ctx, 0, -1, -1)
    shim.seq_set(ctx, 0, 0, blob)
if state is not None:
    driver.restore(0, state)
    said["same state"] = driver.state(0) == state
after = ask()
said["drafts"] = before[0]
said["same row"], said["same logits"] = after[1] == before[1], after[2] == before[2]
said["log"] = driver.log()
said["refused"] = []
for bad in (
    b"",
    bytes(range(8)),
    state[:-1],
    state + b"x",
    b"X" + state[1:],  # magic
    state[:4] + b"X" + state[5:],  # version
    state[:6] + b"X" + state[7:],  # driver
    state[:8] + b"X" + state[9:],  # model
    state[:16] + b"X" + state[17:],  # width
    state[:28] + b"\\xff" * 4 + state[32:],  # rows
    state[:28] + b"\\xff\\xff\\xff\\x7f" + state[32:],
    state[:20] + b"\\xfe" + state[21:23] + b"\\xff" + state[24:],  # positions
    state[:24] + b"\\xff\\xff\\xff\\x7f" + state[28:],
    *[mangled(state, how, at) for how in get_args(Mangling) for at in range(8)],
) if state is not None else ():
    driver.restore(0, bad)
    said["refused"].append([driver.state(0) == state, driver.log()])
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "qwen35.gguf"
    get("qwen35").write(path)
    return path


def use(build: Bench, library: Path, model: Path, *, only_state: bool = False) -> dict[str, object]:
    program = CHILD.partition("before = ask()")[0] + "print(json.dumps(said))" if only_state else CHILD
    command = [sys.executable, "-c", program, str(build.shim), str(library), str(model)]
    env = {**shimcache.child_env(), "PYTHONPATH": str(ROOT)}
    p = shimcache.run_quietly(command, env, 120)
    assert p.returncode == 0, p.stderr
    answer = json.loads(p.stdout)
    assert isinstance(answer, dict)
    return answer


def test_driver_of_the_build_offers_no_state(build: Bench, model: Path) -> None:
    library = builds.driver_library(build.build)
    assert library == build.driver
    started = time.perf_counter()
    assert builds.driver_library(build.build) == library
    assert time.perf_counter() - started < 0.5
    builds.check_loads(library)
    said = use(build, library, model)
    assert said["state"] is None
    assert said["drafts"]
    assert not said["new conversation begins with zeros"], "the row that the last one left"
    assert not said["same row"] and not said["same logits"]


def test_patched_driver_keeps_its_state(build: Bench, model: Path) -> None:
    library = builds.driver_library(build.build, patch=PATCH)
    assert library != build.driver
    said = use(build, library, model)
    width = 32
    assert said["state"] == 32 + 4 * width * (1 + 8), "header, pending row, verification rows"
    for good in ("new conversation begins with zeros", "same state", "same row", "same logits", "drafts"):
        assert said[good], good
    assert said["log"] == []
    refused = said["refused"]
    assert isinstance(refused, list)
    assert len(refused) == 13 + 9 * 8
    for same, log in refused:
        assert same
        assert len(log) == 1 and "state refused: " in log[0]


@pytest.fixture
def checkout(build: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources, as a contributor has them, and a cache in which nothing is compiled."""
    at = tmp_path / "llama.cpp"
    shutil.copytree(builds.driver_sources(build.build), at)
    monkeypatch.setenv("REDRAFT_CACHE", str(tmp_path / "cache"))
    return at


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_an_edit_is_what_runs(build: Bench, model: Path, checkout: Path) -> None:
    head = "llama_seq_id seq_id, std::vector<uint8_t> & data) {\n    if (spec == nullptr) {"
    edit(checkout / "common/speculative.cpp", head, head.replace("{", "{ data.assign(77, 0); return true;", 1))
    started = time.perf_counter()
    library = builds.driver_library(build.build, checkout)
    assert time.perf_counter() - started < 60
    assert use(build, library, model, only_state=True)["state"] == 77


def test_an_edit_that_does_not_compile(build: Bench, checkout: Path) -> None:
    edit(checkout / "common/speculative.cpp", '#include "speculative.h"', '#include "speculative.h"\nint x = nothing;')
    with pytest.raises(NoDrivers) as e:
        builds.driver_library(build.build, checkout)
    assert "because speculative.cpp does not" in str(e.value)
    assert "common/speculative.cpp:2:" in str(e.value)


def test_what_moved_in_common_is_named(build: Bench, checkout: Path) -> None:
    for file in ("common.h", "speculative.h"):
        edit(checkout / "common" / file, "common_batch", "common_batch_v2")
    edit(checkout / "common/common.h", "ctx_dft", "ctx_draft")
    with pytest.raises(NoDrivers) as e:
        builds.driver_library(build.build, checkout)
    said = str(e.value)
    assert said.startswith("the driver does not compile against the headers of this build:\n")
    assert "common/*.h of this build has no common_batch; driver.cpp:" in said
    assert "common_params_speculative_draft of this build has no member ctx_dft; driver.cpp:" in said


def test_a_checkout_of_another_release(build: Bench, checkout: Path) -> None:
    edit(checkout / "include/llama.h", "llama_memory_seq_keep", "llama_memory_seq_hold")
    with pytest.raises(NoDrivers, match=r"does not match the build .*llama\.h differs"):
        builds.driver_library(build.build, checkout)


def test_a_promise_that_libllama_common_does_not_keep(build: Bench, checkout: Path) -> None:
    edit(
        checkout / "common/common.h",
        "llama_seq_id seq_id, bool output);",
        "llama_seq_id seq_id, bool output, int = 0);",
    )
    with pytest.raises(
        NoDrivers, match=r"libllama-common lacks common_batch::add: headers and library are from different"
    ):
        builds.driver_library(build.build, checkout)
