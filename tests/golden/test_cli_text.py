"""What the command prints that people read: every help text, the table at the end of a campaign, lists.

`REDRAFT_UPDATE_GOLDEN=1 pytest tests/golden/test_cli_text.py` writes the files anew; read the difference first.

Texts of argparse differ between versions of Python in how lines are broken, so that helps are compared word by word.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fuzz.campaign import Result, Status
from fuzz.cli import VERBS, main
from fuzz.journal import Progress
from fuzz.show import final, headline

DATA = Path(__file__).parent / "data" / "cli"


def compare(name: str, text: str, *, words: bool = False) -> None:
    golden = DATA / f"{name}.txt"
    if os.environ.get("REDRAFT_UPDATE_GOLDEN"):
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(text, "utf-8")
    wanted = golden.read_text("utf-8")
    if words:
        assert text.split() == wanted.split(), f"{golden.name} is another now"
    assert words or text == wanted, f"{golden.name} is another now"


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help(verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    with pytest.raises(SystemExit) as e:
        main([*([verb] if verb else []), "--help"])
    assert e.value.code == 0
    out = capsys.readouterr().out
    compare(f"help-{verb}" if verb else "help", out, words=True)
    assert max(map(len, out.splitlines())) <= 120
    assert '"\n"' not in out, "a docstring that was broken like a string"


def finding(signature: str, kind: str, known: str | None, n: int, operations: int) -> dict[str, Any]:
    return {
        "signature": signature,
        "title": "",
        "kind": kind,
        "oracle": signature.partition("/")[0],
        "memory": "hybrid",
        "known": known,
        "reproduced": [n, 3],
        "operations": operations,
        "path": f"/home/x/out/findings/{signature[:20]}",
    }


FOUND = (
    finding("removal/seq_rm/hybrid/tail", "fault", "stale-rollback", 3, 4),
    finding("liveness:llama-batch.cpp: GGML_ASSERT(n_ubatch > n_keep_tail) failed", "crash", "ubatch-rollback", 3, 1),
    finding("liveness:x.cpp: GGML_ASSERT(a[i] == [/red]) failed", "crash", None, 2, 2),
    finding("isolation/seq_keep/dense/split", "contract", None, 3, 3),
)


def campaign(*found: dict[str, Any]) -> Status:
    coverage = {"decode/dense": 1200, "decode/hybrid": 900, "save/dense": 40, "restore/hybrid": 7}
    jobs = {
        0: Progress(scenarios=1500, unjudged=3, unreproduced=1, seconds=30.0, coverage=coverage),
        1: Progress(scenarios=1400, unjudged=5, seconds=31.5, coverage={"decode/window": 12}),
    }
    return Status(Path("out/fuzz-1"), 2.0, None, jobs=jobs, findings=list(found))


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("final-findings", Result(campaign(*FOUND), False, [])),
        ("final-nothing", Result(campaign(), False, [])),
        ("final-interrupted", Result(campaign(*FOUND[:1]), True, [])),
        ("final-died", Result(campaign(), False, [0, 1])),
        ("final-empty", Result(Status(Path("out/fuzz-1"), 2.0, None), False, [])),
    ],
)
def test_the_table_at_the_end(name: str, result: Result) -> None:
    out = io.StringIO()
    final(result, Console(file=out, width=110, color_system=None))
    compare(name, out.getvalue())
    for f in result.status.findings:
        assert f["signature"][:20] in out.getvalue()


def test_a_line_of_progress() -> None:
    compare("headline", headline(campaign(*FOUND)) + "\n")


@pytest.mark.parametrize("verb", ["oracles", "contracts"])
def test_lists(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb]) == 0
    compare(f"list-{verb}", capsys.readouterr().out)
