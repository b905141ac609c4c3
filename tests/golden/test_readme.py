"""The README's command help comes from the commands; REDRAFT_UPDATE_GOLDEN=1 writes it anew."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from fuzz.cli import VERBS, parser

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


def _help(monkeypatch: pytest.MonkeyPatch, verb: str | None) -> str:
    monkeypatch.setenv("COLUMNS", "100")
    top = parser()
    if verb is None:
        return top.format_help()
    sub = next(a for a in top._actions if isinstance(a.choices, dict))
    assert isinstance(sub.choices, dict)
    return str(sub.choices[verb].format_help())


@pytest.mark.parametrize("verb", [None, "fuzz"])
def test_help_in_readme_is_the_commands_own(monkeypatch: pytest.MonkeyPatch, verb: str | None) -> None:
    mark = "help" if verb is None else f"help:{verb}"
    wanted = f"<!-- {mark} -->\n```\n{_help(monkeypatch, verb).rstrip()}\n```\n<!-- /{mark} -->"
    text = README.read_text()
    pattern = re.compile(rf"<!-- {re.escape(mark)} -->.*?<!-- /{re.escape(mark)} -->", re.DOTALL)
    if os.environ.get("REDRAFT_UPDATE_GOLDEN"):
        README.write_text(pattern.sub(lambda _: wanted, text))
    assert pattern.search(README.read_text()).group(0) == wanted, "refresh with REDRAFT_UPDATE_GOLDEN=1"  # type: ignore[union-attr]


def test_readme_names_every_verb_and_script() -> None:
    text = README.read_text()
    for verb in VERBS:
        assert verb in text
    for script in (
        "ci/fuzz",
        "ci/test",
        "ci/nightly",
        "ci/smoke",
        "ci/bench",
        "ci/discovery",
        "ci/drivers",
        "ci/robustness",
    ):
        assert script in text and (ROOT / script).exists()
