"""The contract table: its ids are the ones that the checks use, its quotes are in the header, and it can be printed."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import pytest

from fuzz import logical, state
from fuzz.drivers import state as driver_state
from subjects.contracts import CLAUSES, CONTRACTS, render
from subjects.scenario import OP_NAMES


def test_one_entry_an_operation() -> None:
    assert set(CONTRACTS) == set(OP_NAMES)


def test_ids_are_unique_and_named_after_their_operation() -> None:
    ids = [clause.id for c in CONTRACTS.values() for clause in (*c.owes, *c.gets)]
    assert len(ids) == len(set(ids))
    assert all(clause.id.startswith(f"{c.op}.") for c in CONTRACTS.values() for clause in (*c.owes, *c.gets))


def test_what_is_checked_is_what_the_table_says() -> None:
    source = Path(state.__file__).read_text() + Path(driver_state.__file__).read_text()
    checked = set(re.findall(rf'"((?:{"|".join(OP_NAMES)})\.[a-z_-]+)"', source))
    checked |= {f"{name}.ids" for name in re.findall(r'ids\("(\w+)"', source)}
    owed = {clause.id for c in CONTRACTS.values() for clause in c.owes}
    assert checked == owed
    assert "broken" not in vars(logical)


def test_quotes_are_in_the_header() -> None:
    header = Path(sysconfig.get_paths()["purelib"]) / "include" / "llama.h"
    if not header.exists():
        pytest.skip("llama.h is not installed here")
    text = squeeze(re.sub(r"^\s*//", " ", header.read_text(), flags=re.M))
    for clause in CLAUSES.values():
        if clause.says == "header":
            quote = clause.source.removeprefix('llama.h: "').removesuffix('"')
            for part in re.split(r" \.\.\. |; ", quote):
                assert squeeze(part) in text, clause.id


def squeeze(text: str) -> str:
    return re.sub(r"[\s/]+", "", text)


def test_it_can_be_printed() -> None:
    text = render()
    assert all(c.calls in text for c in CONTRACTS.values())
    assert all(clause.id in text for clause in CLAUSES.values())
    assert max(map(len, text.splitlines())) <= 150
