"""The README's command help comes from the commands; REDRAFT_UPDATE_GOLDEN=1 writes it anew."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from fuzz import programs
from fuzz.cli import VERBS, parser
from fuzz.server.fit import valid
from fuzz.server.flags import FLAG_SETS
from subjects.server.scenario import REQUEST_NAMES, REQUEST_TYPES, Flags, ServerScenario

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


def test_the_program_for_the_server_can_be_run_and_all_of_its_words_are_told() -> None:
    text = README.read_text()
    section = text[text.index("### A conversation of your own") : text.index("## Malformed states")]
    example = re.search(r"```json\n(.*?)```", section, re.DOTALL)
    assert example
    program = programs.loads(example[1])
    assert isinstance(program, ServerScenario) and not valid(program)
    fields = {f for kind in (*REQUEST_TYPES, Flags) for f in kind.__struct_fields__}
    assert not [name for name in (*REQUEST_NAMES, *fields) if f"`{name}`" not in section]
    assert not [name for name in FLAG_SETS if f"| `{name}` |" not in text]


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
        "ci/soundness",
    ):
        assert script in text and (ROOT / script).exists()
