"""What identifies a crash: read out of how a process ended and what it said on standard error.

Read are gcc's and GGML's aborts, libc's assertions, uncaught exceptions, the reports of AddressSanitizer and
UndefinedBehaviorSanitizer, libFuzzer's own (timeout, memory, signal), Python's, and plain signals. What identifies a
crash holds no line number, address, folder or number of the run: all of them move.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from oracles.names import plain
from subjects.trace import End

# assertion: GGML_ASSERT, GGML_ABORT, assert. exception: C++. address, undefined: a sanitizer's report. hang: it took
# too long. memory: it took too much. signal, exit: nothing was said. python: redraft's own code failed. tool: a
# sanitizer or the fuzzer did.
Kind = Literal["assertion", "exception", "address", "undefined", "hang", "memory", "signal", "exit", "python", "tool"]

# How many frames tell crashes with one text apart.
FRAMES = 3

_FILE = r"(?:[^:]*/)?([\w.+-]+\.(?:cpp|cc|c|h|hpp|cu|cuh)):\d+(?::\d+)?"
# "file:line: message", with the program's name before it (libc's assert) or a column (UBSan)
_PLACE = re.compile(rf"^(?:[\w.+-]+: )?{_FILE}: (.+)$")
_SUMMARY = re.compile(r"^SUMMARY: (?!Undefined)\w+Sanitizer: ([\w-]+)")
_SUMMARY_PLACE = re.compile(rf"^SUMMARY: \w+Sanitizer: [\w-]+ {_FILE}")
_SANITIZER = re.compile(r"^==\d+==\s?(?:ERROR|WARNING): (?!Undefined)\w+Sanitizer: (?:attempting )?([\w-]+)")
_CHECK = re.compile(r"^(?:==\d+==)?\s?\w+Sanitizer: CHECK failed: (?:[^:]*/)?([\w.]+):\d+")
_LIBFUZZER = re.compile(r"^==\d+==\s?ERROR: libFuzzer: ([\w -]+?)(?: after \d+ seconds| \(.*\))?$")
_LIBCXX = re.compile(r"^libc\+\+abi: terminating (?:due to|with) uncaught exception of type ([^:\s]\S*?)(?:: (.*))?$")
_NUMBER = re.compile(r"0x[0-9a-f]+|-?\b\d+(?:\.\d+)?(?:e[+-]?\d+)?\b")
_FRAME = re.compile(r"^\s*#(\d+) 0x[0-9a-f]+ (?:in )?(.*)$")
# where a frame is: an absolute path, which may have spaces, or a relative one
_WHERE = re.compile(r"(?:^|\s)(?:\w:)?/.*$|\s\S+\.\w+:\d+(?::\d+)?\s*$")
_PYTHON = "=== Uncaught Python exception: ==="
# That a C++ exception left a call: Atheris catches it behind Python's back, and Python falls over that at once.
_THROWN = "the function must be called with the GIL held, but the GIL is released"
# how names of reports begin: out-of-memory, "out of memory", allocation-size-too-big, "requested allocation size"
_TOO_LARGE = ("out", "allocation-size", "calloc-overflow", "requested")
# What UBSan says and goes on: the second is where what was broken is declared.
_SAID_BY_UBSAN = ("runtime error", "note: ")
# What a signal says of itself, where the reason stands somewhere else.
_BARE = ("ABRT", "deadly signal")

# A frame is llama.cpp's by its file or, where there is none, by its name; these are where it ends itself.
_OURS_FILE = re.compile(r"(?:^|/)(?:ggml/src/|src/llama|src/unicode|src/models/|common/|tools/)[\w./+-]*:\d+")
_OURS_NAME = re.compile(r"^(?:llama|ggml|gguf|common|unicode|quantize|dequantize)_")
_ENDS = re.compile(r"^ggml_(?:abort|print_backtrace|uncaught)")


@dataclass(frozen=True)
class Crash:
    """text: what identifies it, one line. frames: the first functions of llama.cpp on the stack, innermost first,
    where a stack was printed."""

    kind: Kind
    text: str
    frames: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Tells crashes apart more finely than the text: by the way that led there too."""
        return " < ".join((self.text, *self.frames))


def crash_text(end: End, stderr: str) -> str:
    """What identifies a crash: see `read`."""
    return read(end, stderr).text


def read(end: End, stderr: str) -> Crash:
    """The crash that a process ended with; of one that UBSan let go on, what ended it."""
    lines = stderr.strip().splitlines()
    frames = stack(lines)
    said = _libfuzzer(lines)
    if end.how == "hang" or said == "timeout":
        return Crash("hang", "hang", frames)
    if any(line.strip() == _PYTHON for line in lines):
        return Crash("python", _python(lines))
    if said == "out-of-memory":
        return Crash("memory", "out of memory", frames)
    return (
        _reported(lines, frames)
        or _thrown(lines, frames)
        or _undefined(lines, frames)
        or _signalled(lines, frames, said)
        or Crash(*_bare(end))
    )


def undefined(stderr: str) -> list[Crash]:
    """Every place of undefined behaviour that UBSan tells of, each once; the process may have gone on."""
    lines = stderr.splitlines()
    found = {c.text: c for i in range(len(lines)) if (c := _undefined(lines[i : i + 1], ())) is not None}
    for i, line in enumerate(lines):
        c = _undefined([line], ())
        if c is not None and not found[c.text].frames:
            found[c.text] = Crash(c.kind, c.text, stack(lines[i + 1 :], at_once=True))
    return list(found.values())


def stack(lines: list[str], *, at_once: bool = False) -> tuple[str, ...]:
    """The first functions of llama.cpp in the first stack that is printed, innermost first; at_once: only a stack
    that begins with the first line."""
    found: list[str] = []
    seen = -1
    for line in lines:
        frame = _FRAME.match(line)
        if frame is None:
            if seen >= 0 or (at_once and line.strip() and ": note: " not in line):
                break
            continue
        if int(frame[1]) < seen:
            break  # another stack, of where the memory was allocated, say
        seen = int(frame[1])
        name = function(frame[2])
        if name and _is_ours(frame[2], name) and not _ENDS.match(name):
            found.append(name)
            if len(found) == FRAMES:
                break
    return tuple(found)


def function(frame: str) -> str:
    """The function's name in a frame, without parameters, templates' arguments and anonymous namespaces."""
    return plain(_WHERE.sub("", frame)).replace("{anonymous}::", "").rstrip(":")


def _is_ours(frame: str, name: str) -> bool:
    if name.startswith(("std::", "__gnu_cxx::", "operator new", "rd_", "_")):
        return False
    return bool(_OURS_FILE.search(frame) or _OURS_NAME.match(name))


def _file_of(lines: list[str], name: str) -> str:
    """The file that a function of the stack is in, empty where it is not said."""
    for line in lines:
        frame = _FRAME.match(line)
        if frame and function(frame[2]) == name and (file := re.search(r"([\w.+-]+\.\w+):\d+(?::\d+)?\s*$", frame[2])):
            return file[1]
    return ""


def _libfuzzer(lines: list[str]) -> str:
    return next((found[1] for line in lines if (found := _LIBFUZZER.match(line))), "")


def _python(lines: list[str]) -> str:
    at = next(i for i, line in enumerate(lines) if line.strip() == _PYTHON)
    what = next((line.strip() for line in lines[at + 1 :] if line.strip()), "")
    return f"Python: {without_numbers(what)}"


def _reported(lines: list[str], frames: tuple[str, ...]) -> Crash | None:
    """An assertion, or what AddressSanitizer and its like say; whichever comes first."""
    for i, line in enumerate(lines):
        if found := _CHECK.match(line):
            return Crash("tool", f"sanitizer: CHECK failed: {found[1]}", frames)
        if (found := _PLACE.match(line)) and not found[2].startswith(_SAID_BY_UBSAN):
            return Crash("assertion", f"{found[1]}: {without_numbers(found[2].strip())}", frames)
        if (found := _SANITIZER.match(line) or _SUMMARY.match(line)) and found[1] not in _BARE:
            return _address(lines[i:], found[1], frames)
    return None


def _address(lines: list[str], kind: str, frames: tuple[str, ...]) -> Crash:
    if kind.startswith(_TOO_LARGE):
        return Crash("memory", "out of memory", frames)
    # the summary has the short name: bad-free
    kind = next((found[1] for line in lines if (found := _SUMMARY.match(line))), kind)
    if frames:
        # two, because the innermost is often one that reads and writes for all
        file, where = _file_of(lines, frames[0]), " < ".join(frames[:2])
        return Crash("address", f"{file}: {kind} in {where}" if file else f"{kind} in {where}", frames)
    place = next((found[1] for line in lines if (found := _SUMMARY_PLACE.match(line))), "")
    return Crash("address", f"{place}: {kind}" if place else kind)


def _thrown(lines: list[str], frames: tuple[str, ...]) -> Crash | None:
    for i, line in enumerate(lines):
        if line.startswith("terminate called"):
            what = next((x.split("what():")[1].strip() for x in lines[i:] if "what():" in x), "")
            kind = re.search(r"instance of '([^']+)'", line)
            return Crash("exception", f"uncaught {kind[1] if kind else 'exception'}: {what}", frames)
        if found := _LIBCXX.match(line):
            return Crash("exception", f"uncaught {found[1]}: {found[2] or ''}", frames)
        if line.startswith("Fatal Python error") and _THROWN in line:
            return Crash("exception", "uncaught exception: ", frames)
    return None


def _undefined(lines: list[str], frames: tuple[str, ...]) -> Crash | None:
    for line in lines:
        if (found := _PLACE.match(line)) and found[2].startswith("runtime error"):
            return Crash("undefined", f"{found[1]}: {_NUMBER.sub('N', found[2].strip())}", frames)
    return None


def _signalled(lines: list[str], frames: tuple[str, ...], said: str) -> Crash | None:
    """libFuzzer or a sanitizer tell of a signal, and nobody says why it was sent."""
    if said == "fuzz target exited":
        return Crash("tool", "the fuzz target exited")
    if said:
        where = _file_of(lines, frames[0]) if frames else ""
        text = f"{said} in {frames[0]}" if frames else said
        return Crash("signal", f"{where}: {text}" if where else text, frames)
    return None


def _bare(end: End) -> tuple[Kind, str]:
    if end.how != "signal":
        return "exit", f"exit {end.code}"
    try:
        return "signal", signal.Signals(end.code).name
    except ValueError:
        return "signal", f"signal {end.code}"


def without_numbers(text: str) -> str:
    """A message that was formatted, without the numbers of this run; those of assertions say what it is."""
    return text if text.startswith("GGML_ASSERT") else re.sub(r"\b\d+\b", "N", text)


def condensed(stderr: str) -> Iterator[str]:
    """The lines of a log that a person reads: without the fuzzer's and Python's own frames, which are the most."""
    for line in stderr.splitlines():
        frame = _FRAME.match(line)
        if frame is None or _is_ours(frame[2], function(frame[2])) or int(frame[1]) < FRAMES:
            yield line
