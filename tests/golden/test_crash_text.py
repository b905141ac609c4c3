"""What identifies a crash, over recorded ugly logs: `data/crash/*.txt`.

The first lines of a file are `# end: HOW CODE` and `# text: EXPECTED`; everything after the first blank line is what
was on stderr, byte for byte. A log that was met in the wild and read wrongly becomes another file.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from fuzz.found import end_line
from oracles.crash import crash_text
from subjects.trace import End

LOGS = sorted((Path(__file__).parent / "data" / "crash").glob("*.txt"))


def parse(path: Path) -> tuple[End, str, str]:
    head, _, log = path.read_bytes().partition(b"\n\n")
    said = dict(line.removeprefix("# ").split(": ", 1) for line in head.decode().splitlines())
    how, _, code = said["end"].partition(" ")
    assert how in get_args(End.__annotations__["how"]) or how in ("signal", "exit", "hang")
    # as the sandbox reads it
    return End(how, int(code or 0)), log.decode("utf-8", "replace"), said["text"]  # type: ignore[arg-type]


@pytest.mark.parametrize("path", LOGS, ids=lambda p: p.stem)
def test_recorded_logs(path: Path) -> None:
    end, log, expected = parse(path)
    assert crash_text(end, log) == expected


def test_there_are_logs_of_every_kind() -> None:
    assert len(LOGS) >= 18
    assert {parse(p)[0].how for p in LOGS} == {"signal", "exit", "hang"}


@pytest.mark.parametrize("path", LOGS, ids=lambda p: p.stem)
def test_what_identifies_it_is_one_short_line_without_place_or_number(path: Path) -> None:
    end, log, _ = parse(path)
    text = crash_text(end, log)
    assert text
    assert "\n" not in text
    assert "/tmp/" not in text
    assert "/home/" not in text


@pytest.mark.parametrize("path", [p for p in LOGS if b"GGML_ASSERT" in p.read_bytes()], ids=lambda p: p.stem)
def test_another_line_number_and_another_folder_are_the_same_crash(path: Path) -> None:
    end, log, expected = parse(path)
    moved = log.replace("/tmp/build/", "/opt/elsewhere/x86/").replace(".cpp:1", ".cpp:9").replace(".c:1", ".c:9")
    assert moved != log
    assert crash_text(end, moved) == expected


@pytest.mark.parametrize(
    "end", [End("signal", 6), End("signal", 0), End("signal", 999), End("exit", 1), End("exit", 0)]
)
@pytest.mark.parametrize("log", ["", "\n", "\0\0", "::::", "a.cpp:1:", "what():", "terminate called", "\u2028\x85"])
def test_nothing_that_is_printed_makes_it_fail(end: End, log: str) -> None:
    assert isinstance(crash_text(end, log), str)


@pytest.mark.parametrize("path", LOGS, ids=lambda p: p.stem)
def test_a_report_shows_the_line_with_its_numbers(path: Path) -> None:
    end, log, what = parse(path)
    shown = end_line(end, log, what)
    assert shown == what or (shown in log and crash_text(end, shown) == what)
    assert shown != what or "N" not in what.split()


def test_numbers_of_a_run_are_shown_and_do_not_tell_crashes_apart() -> None:
    line = "/tmp/build/common/ngram-map.cpp:260: common_ngram_map_draft: map.idx_last_check > cur_len: 25 > 21"
    end = End("signal", 6)
    what = crash_text(end, f"warning: 1\n{line}\n")
    assert what == "ngram-map.cpp: common_ngram_map_draft: map.idx_last_check > cur_len: N > N"
    assert end_line(end, f"warning: 1\n{line}\n", what) == line
    assert end_line(End("signal", 11), "warning: 1\n", "SIGSEGV") == "SIGSEGV"
