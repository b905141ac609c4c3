"""What redraft blames the speculative drivers for, reproduced in plain C++ over llama.h and common/speculative.h.

Each row of the table is a program in `plain/drivers/` that uses nothing of redraft but its generated models; its first
comment says what is wrong and why, and what it prints on the pinned release. The same program without the trigger is
the control.
"""

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fuzz.models import from_pair
from subjects import builds, pairs

PLAIN = Path(__file__).parent / "plain/drivers"
PINNED = "0.3.36"

pytestmark = pytest.mark.skipif(
    importlib.metadata.version("llama-cpp-python") != PINNED, reason=f"the table describes llama-cpp-python {PINNED}"
)


@dataclass(frozen=True)
class Row:
    program: str
    pair: str
    known: str
    """file in corpora/known, empty where none has its cause"""
    faulty: int = 1
    """how the program ends with the trigger"""
    control: int = 0
    says: str = "WRONG: "
    """how its line begins, or what is in the message of the abort"""


TABLE = (
    Row("mtp_unoffered", "qwen35-mtp", "driver-unoffered"),
    Row("mtp_fresh", "qwen35-mtp", "driver-fresh"),
    Row("mtp_cut", "step35-mtp", "driver-cut"),
    Row("eagle3_bridge", "qwen35-eagle3", "eagle3-bridge"),
    Row("eagle3_undrafted", "qwen35-eagle3", "eagle3-undrafted"),
    Row("eagle3_open", "qwen35-eagle3", "eagle3-open"),
    Row("eagle3_mangled", "qwen35-eagle3", "driver-mangled"),
    Row("eagle3_backend", "qwen35-eagle3", "eagle3-backend"),
    Row("ngram_begin", "llama-ngram-map-k", "ngram-begin", -signal.SIGABRT, says="idx_last_check > cur_len: 20 > 12"),
)

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a row's program, which is compiled when it is first wanted."""
    folder = tmp_path_factory.mktemp("plain")
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "no C++ compiler"
    build = builds.find_build()
    root = builds.driver_sources(build)
    flags: list[str | Path] = ["-std=c++17", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Werror"]
    for d in (root / "common", *build.include, root / "vendor"):
        flags += ["-isystem", d]
    # DT_RPATH holds for the libraries' own dependencies too. The order matters: beside an installed libllama-common lie
    # copies of libllama, which llama_cpp does not use.
    link: list[str | Path] = ["-Wl,--no-as-needed,--disable-new-dtags"]
    for d in (*build.libdirs, build.libllama.parents[2] / "lib"):
        link += ["-L", d, f"-Wl,-rpath,{d}"]
    link += ["-lllama-common", "-lllama", "-lggml", "-lggml-base"]

    def call(row: Row, *options: str) -> subprocess.CompletedProcess[str]:
        program = folder / row.program
        if not program.exists():
            source = PLAIN / f"{row.program}.cpp"
            subprocess.run([compiler, *flags, source, *link, "-o", program], check=True, timeout=300)
        model = from_pair(pairs.get(row.pair), folder / "models", seed=0)
        files = [model.path, *([model.draft] if model.draft else [])]
        env = os.environ | {"GGML_NO_BACKTRACE": "1", "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [program, *files, *options], env=env, cwd=folder, capture_output=True, text=True, timeout=120, check=False
        )

    return call


def tokens(line: str) -> str:
    """A line without its errors, which differ from one CPU to the next."""
    return re.sub(r"logits .*", "", line.removeprefix("//").strip())


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.program)
def test_the_pinned_release_does_what_the_program_says(row: Row, run: Run) -> None:
    done = run(row)
    everything = done.stdout + done.stderr
    assert done.returncode == row.faulty, everything
    if row.faulty < 0:
        assert row.says in done.stderr
    else:
        assert done.stdout.startswith(row.says), everything


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.program)
def test_without_the_trigger_the_same_calls_are_right(row: Row, run: Run) -> None:
    done = run(row, "control")
    assert done.returncode == row.control and done.stdout.startswith("right: "), done.stdout + done.stderr


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.program)
def test_the_comment_shows_what_is_printed(row: Row, run: Run) -> None:
    comment = {tokens(line) for line in (PLAIN / f"{row.program}.cpp").read_text("utf-8").splitlines()}
    for options in ((), ("control",)):
        for line in run(row, *options).stdout.splitlines():
            assert tokens(line) in comment


def test_every_program_is_in_the_table_and_every_fault_is_known() -> None:
    assert {path.stem for path in PLAIN.glob("*.cpp")} == {row.program for row in TABLE}
    known = Path(__file__).parents[2] / "corpora/known"
    assert all((known / f"{row.known}.json").is_file() for row in TABLE if row.known)
