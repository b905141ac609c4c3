"""State of the reference driver as bytes: what is taken back, and what is refused."""

from __future__ import annotations

import struct
from typing import get_args

import pytest

from subjects.drivers.reference import HEADER, LEAVE_OUT, MAGIC, BadState, State, pack, unpack
from subjects.driving import HEADERS, mangled
from subjects.scenario import Mangling

WIDTH, MODEL, N_CTX = 8, 0xFEDCBA98, 8192
ROW = bytes(range(4 * WIDTH))
STATES = {
    "fresh": State(bytes(4 * WIDTH)),
    "one row": State(ROW, 19, ROW, 19, False),
    "accepted": State(ROW, 20, ROW[::-1] + ROW + ROW, 19, True),
    "many rows": State(ROW, N_CTX - 1, ROW * 5000, 7, True),
    "not finite": State(struct.pack("<8f", *[float("nan"), float("inf")] * 4), 3),
}
GOOD = pack(STATES["accepted"], MODEL)


def with_field(i: int, value: int) -> bytes:
    """GOOD with one number of its header replaced."""
    fields = list(HEADER.unpack_from(GOOD))
    fields[i] = value
    return HEADER.pack(*fields) + GOOD[HEADER.size :]


@pytest.mark.parametrize("name", STATES)
def test_states_come_back(name: str) -> None:
    assert unpack(pack(STATES[name], MODEL), MODEL, WIDTH, N_CTX) == STATES[name]


def test_the_layout_is_fixed() -> None:
    head = MAGIC + struct.pack("<4I3i", 1, WIDTH, MODEL, 1, 20, 19, 3)
    assert head + ROW + ROW[::-1] + ROW + ROW == GOOD
    assert 4 * HEADERS[MAGIC] == HEADER.size


@pytest.mark.parametrize(
    ("blob", "says"),
    [
        (b"", "0 bytes, shorter than a header"),
        (GOOD[: HEADER.size - 1], "shorter than a header"),
        (GOOD[: HEADER.size], "32 bytes instead of 160 for 3 verification rows"),
        (GOOD[:-1], "159 bytes instead of 160"),
        (GOOD + b"\0", "161 bytes instead of 160"),
        (GOOD + ROW, "192 bytes instead of 160"),
        (b"\0" + GOOD[1:], "magic 00444d54 instead of 52444d54"),
        (b"\0" * len(GOOD), "magic"),
        (with_field(1, 2), "version 2 instead of 1"),
        (with_field(2, WIDTH + 1), "rows of 9 floats instead of 8"),
        (with_field(2, 0), "rows of 0 floats"),
        (with_field(3, MODEL + 1), "another model"),
        (with_field(4, 2), "flag 2"),
        (with_field(5, -2), "pending position -2"),
        (with_field(6, -2), "from position -2"),
        (with_field(5, N_CTX), "position 8192 in a context of 8192"),
        (with_field(5, 2**31 - 1), "position 2147483647 in a context"),
        (with_field(6, 2**31 - 1), "position 2147483649 in a context"),
        (with_field(6, N_CTX - 2), "position 8192 in a context"),
        (with_field(7, -1), "-1 rows"),
        (with_field(7, -(2**31)), "-2147483648 rows"),
        (with_field(7, 2**31 - 1), "for 2147483647 verification rows"),
        (with_field(7, 2), "for 2 verification rows"),
        (struct.pack("<i", 19) + ROW, "magic"),  # what draft-eagle3 saves
    ],
)
def test_anything_else_is_refused(blob: bytes, says: str) -> None:
    with pytest.raises(BadState, match=says):
        unpack(blob, MODEL, WIDTH, N_CTX)


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("how", get_args(Mangling))
@pytest.mark.parametrize("name", STATES)
def test_every_malformed_state_of_a_campaign_is_refused(name: str, how: Mangling, at: int) -> None:
    blob = pack(STATES[name], MODEL)
    bad = mangled(blob, how, at)
    assert bad != blob
    with pytest.raises(BadState):
        unpack(bad, MODEL, WIDTH, N_CTX)


def test_no_prefix_and_no_extension_is_a_state() -> None:
    for n in range(len(GOOD)):
        with pytest.raises(BadState):
            unpack(GOOD[:n], MODEL, WIDTH, N_CTX)


def test_switches_have_names_of_their_own() -> None:
    assert len(set(LEAVE_OUT)) == len(LEAVE_OUT)
    assert all(name and name == name.lower() and " " not in name for name in LEAVE_OUT)
