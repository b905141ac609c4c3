"""What redraft blames llama-server for, reproduced with Python's standard library alone.

Each row of the table is a script in `plain/server/` that uses nothing of redraft but its generated models; its first
comment says what is wrong and why. The same script without the trigger is the control.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from subjects import recipes
from subjects.server.build import find_server
from subjects.server.dress import dressed
from subjects.shimcache import BadBuild

PLAIN = Path(__file__).parent / "plain/server"
KNOWN = Path(__file__).parents[2] / "corpora/known"
SECONDS = 120


@dataclass(frozen=True)
class Row:
    script: str
    models: tuple[str, ...]
    """recipes: the model's and, where there is one, the draft's"""
    known: str
    """file in corpora/known"""
    says: str = ""
    """in the output, where the server dies"""


TABLE = (
    Row("checkpoint_window", ("gemma3",), "server-checkpoint"),
    Row("checkpoint_leak", ("qwen35",), "server-checkpoint"),
    Row("checkpoint_leak", ("mamba2",), "server-checkpoint"),
    Row("checkpoint_leak", ("lfm2",), "server-checkpoint"),
    Row("worn_checkpoint", ("gemma3",), "server-worn-checkpoint"),
    Row("busy_slot", ("llama",), "server-busy-slot"),
    Row("busy_slot", ("mamba2",), "server-busy-slot"),
    Row("busy_prompt", ("llama",), "server-busy-slot"),
    Row("moved_rollback", ("qwen35",), "server-rollback"),
    Row("file_cut", ("llama",), "server-file-cut", "GGML_ASSERT(nread <= state_size) failed"),
    Row("file_cells", ("mamba2",), "server-file-cells", "pos_min == -1, but n_past > 0"),
    Row("double_cell", ("mamba2",), "server-double-cell", "GGML_ASSERT(head + cell_count <= size) failed"),
    Row("swa_full", ("gemma3",), "server-swa-full"),
    Row("draft_row", ("qwen35",), "server-draft-row"),
    Row("eagle3_cache", ("llama", "eagle3-llama"), "server-eagle3-cache", "failed to process speculative batch"),
    Row("eagle3_cache", ("qwen35", "eagle3-qwen35"), "server-eagle3-cache", "failed to process speculative batch"),
    Row("draft_file", ("llama", "llama-draft"), "server-draft-file", "failed to process speculative batch"),
    Row("draft_file_mtp", ("qwen35",), "server-draft-mtp-file"),
    Row("brim", ("qwen35",), "server-brim"),
    Row("window_reuse", ("gemma3",), "server-window-reuse"),
    Row("window_reuse", ("step35",), "server-window-reuse"),
)
ROWS = pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.script}-{row.models[0]}")

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a row's script."""
    folder = tmp_path_factory.mktemp("models")
    try:
        server = find_server().path
    except BadBuild as e:
        pytest.skip(str(e))

    def model(name: str) -> Path:
        path = folder / f"{name}.gguf"
        if not path.exists():
            dressed(recipes.get(name)).write(path, seed=0)
        return path

    def call(row: Row, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, PLAIN / f"{row.script}.py", server, *map(model, row.models), *options],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )

    return call


@ROWS
def test_the_fault_shows(row: Row, run: Run) -> None:
    done = run(row)
    assert done.returncode == 1, "fixed? " + done.stdout + done.stderr
    assert "must be " in done.stdout and row.says in done.stdout, done.stdout + done.stderr


@ROWS
def test_without_the_trigger_it_does_not(row: Row, run: Run) -> None:
    done = run(row, "--control")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_script_is_in_the_table_and_every_fault_is_known() -> None:
    assert {p.stem for p in PLAIN.glob("[!_]*.py")} == {row.script for row in TABLE}
    assert all((KNOWN / f"{row.known}.json").is_file() for row in TABLE)
