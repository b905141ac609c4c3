"""Reads what llama-server did out of its log: one line a deed, by slot and task.

The wording is that of tools/server/server-context.cpp, server-task.cpp and server-common.h (SLT_*, SRV_*) at trace
level. A line that another version words differently is not read; the oracles need none of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from subjects.server.trace import Deed, Event

_SLOT = re.compile(r"^\w slot\s+\S+: id\s+(\d+) \| task (-?\d+) \| (.*)$")
_SERVER = re.compile(r"^\w srv\s+(\S+): (.*)$")
_BEGIN = "processing task, is_child"
_IDLE = "saving idle slot to prompt cache"
_CHOICE = "selected slot by"
_END = "stop processing"
_DECODING = re.compile(r"purging slot|failed to (?:find free space|decode|process)")
_PROMPT = re.compile(r"new prompt, .*task\.n_tokens = (\d+)")
_N = r"n_tokens = (\d+)"

_SAID: list[tuple[Deed, re.Pattern[str]]] = [
    ("checkpoint", re.compile(rf"created context checkpoint .*{_N}")),
    ("restored", re.compile(rf"restored context checkpoint .*{_N}, n_past = (\d+)")),
    ("erased", re.compile(rf"(?:erased invalidated|erasing (?:old )?)\s*context checkpoint.*{_N}")),
    ("reset", re.compile(r"forcing full prompt re-processing")),
    ("kept", re.compile(r"cached n_tokens = (\d+), memory_seq_rm")),
    ("cleared", re.compile(r"clearing prompt with (\d+) tokens")),
    ("replay", re.compile(r"accepted\s+(\d+)/\s*(\d+) draft tokens \(restore checkpoint\)")),
    ("round", re.compile(r"accepted\s+(\d+)/\s*(\d+) draft tokens$")),
    ("refused", re.compile(r"(?:failed to (?:load prompt from cache|process|find free space).*)")),
]
_SERVER_SAID: list[tuple[Deed, re.Pattern[str]]] = [
    ("cached", re.compile(r"- saving prompt with length (\d+)")),
    ("loaded", re.compile(r"- found better prompt with f_keep")),
    ("refused", re.compile(r"failed to (?:restore state|find free space|decode|process).*")),
]


@dataclass
class Told:
    """What the log says of one task: its number, slot and length of prompt (-1: not begun), what was done for it."""

    task: int
    slot: int
    events: list[Event]
    prompt: int = -1

    def add(self, event: Event) -> None:
        """Note a deed; how much is kept is said again with every batch of the prompt, and only the first one counts."""
        if event.what != "kept" or all(e.what != "kept" for e in self.events):
            self.events.append(event)


def read(log: str) -> list[Told]:
    """Every task that a slot took, in order, with what was done for it: from the choice of its slot, which comes
    before the task is named, to its end. What befalls a batch names no task: all that are under way have it."""
    tasks: list[Told] = []
    by_number: dict[int, Told] = {}
    running: dict[int, Told] = {}
    """by slot"""
    before: list[Event] | None = None
    """what is done for the task whose slot has been chosen, None where none has"""
    idle = -1
    """the slot that is put into the prompt cache because it is idle, in the name of the task that has just begun"""
    for slot, task, text in _lines(log):
        mine = by_number.get(task)
        if text.startswith(_BEGIN):
            told = Told(task, slot, [e for e in before or () if e.slot in (-1, slot)])
            tasks.append(told)
            by_number[task] = running[slot] = told
            before, idle = None, -1
            continue
        if text.startswith(_CHOICE):
            # of a slot that is busy: what is done to it is done to the task under way, and the new one is put off
            before, idle = mine.events if mine else [], -1
        elif text.startswith(_IDLE):
            before, idle = None, slot
        elif task >= 0 or _DECODING.match(text):
            before, idle = None, -1
        if mine is not None and (found := _PROMPT.search(text)):
            mine.prompt = int(found[1])
        if text.startswith(_END):
            running.pop(slot, None)
        for event in _events(slot, text):
            if mine is not None:
                mine.add(event)
            elif before is not None:
                before.append(event)
            elif idle < 0:
                for told in running.values():
                    told.add(event)
            elif tasks:
                tasks[-1].add(msgspec.structs.replace(event, slot=idle))
    return tasks


def _lines(log: str) -> Iterator[tuple[int, int, str]]:
    for line in log.splitlines():
        if found := _SLOT.match(line):
            yield int(found[1]), int(found[2]), found[3]
        elif found := _SERVER.match(line):
            yield -1, -1, found[2]


def _events(slot: int, text: str) -> Iterator[Event]:
    for what, pattern in _SAID if slot >= 0 else _SERVER_SAID:
        if found := pattern.search(text):
            numbers = [int(x) for x in found.groups()]
            n, of = [*numbers, 0, 0][:2]
            if what == "restored":  # from a checkpoint of n tokens; what is kept of it
                n, of = of, n
            yield Event(what, slot, n, of, text.strip() if what == "refused" else "")
            return
