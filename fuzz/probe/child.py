"""Runs one route in a process of its own: contexts, driver, checkpoint, other work, restore, and a few tokens further.

Started by `fuzz.probe.table` with an Order on standard input; says what it does as JSON lines and leaves each run in a
file. Every run has new contexts and a new driver; only the models are loaded once.
"""

from __future__ import annotations

import functools
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from fuzz.probe.measure import FLAGS, Arm, Order, Plan, Run, Said, run_file, top
from subjects.drivers import DraftAsk, Tap
from subjects.drivers.native import DriverLib, Native
from subjects.processes import end_with_parent
from subjects.scenario import PARTIAL
from subjects.shim import Shim
from subjects.trace import Row

SHARED = (
    "the draft context has no memory of its own (it reads the target's), so no session file of it is written: "
    "llama_state_seq_load_file refuses one"
)
Emit = Callable[[Said], None]
_STEP = 512
"""Tokens after which a child says that it is still at work."""


class Unfit(Exception):
    """The route does not apply to this model; the message says why."""


class Failed(Exception):
    """A call of a run was refused; the message says which."""


class DriverFailed(Failed):
    """The driver's process() was false."""


class Subject:
    """The loaded models."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.tell: Callable[[int], None] = lambda tokens: None
        self.shim = Shim(Path(plan.shim))
        self.lib = DriverLib(Path(plan.drivers)) if plan.drivers else None
        self.model = self._load(plan.model)
        self.draft_model = self._load(plan.draft) if plan.draft else self.model
        self.facts = self.shim.model_facts(self.model)
        self.n_vocab = self.facts["n_vocab"]
        kind = plan.driver.kind if plan.driver else ""
        self.mtp = kind == "draft-mtp"
        self.drafts = kind.startswith("draft-")
        draft = self.shim.model_facts(self.draft_model)
        # an MTP context has attention layers only, whatever its model has
        self.draft_recurs = self.drafts and not self.mtp and bool(draft["recurrent"] or draft["hybrid"])

    def _load(self, path: str) -> int:
        load = self.lib.load_model if self.lib else self.shim.load_model
        handle = load(Path(path), self.plan.n_gpu_layers)
        if handle is None:
            raise Failed(f"the library does not load {Path(path).name}: {self.said()}")
        return handle

    def said(self) -> str:
        """What the library has logged last."""
        return "; ".join(self.shim.take_log()[-3:]) or "it logs nothing"


class Contexts:
    """New contexts of target and draft, and a driver between them."""

    def __init__(self, subject: Subject, n_rs_seq: int, *, beside: bool = False):
        self.s, self.plan, self.shim = subject, subject.plan, subject.shim
        self.drivers: list[Native] = []
        self.files: list[tuple[str, int]] = []
        self.draft = 0
        params = msgspec.structs.replace(self.plan.params, n_rs_seq=n_rs_seq)
        if beside:  # room for another sequence in the same cells
            params = msgspec.structs.replace(params, n_ctx=2 * params.n_ctx, n_seq_max=2, kv_unified=True)
        self.params = params
        target = self.shim.new_context(subject.model, params)
        if target is None:
            raise Failed(f"the library gives no context: {subject.said()}")
        self.target = target
        if subject.drafts and subject.lib:
            draft = subject.lib.new_draft_context(subject.draft_model, params, target, mtp=subject.mtp)
            if draft is None:
                raise Failed(f"the library gives no draft context: {subject.said()}")
            self.draft = draft
        self.driver = self.new_driver() if self.plan.driver else None
        # a draft that reads the target's memory has none of its own, whatever it has processed
        self._empty = self.shim.seq_size(self.draft, 0, 0) if self.draft else 0
        self.log = self.shim.take_log()

    def new_driver(self) -> Native:
        """One more driver on the same contexts."""
        assert self.plan.driver is not None and self.s.lib is not None
        try:
            driver = Native(self.s.lib, self.plan.driver, self.target, self.draft, self.params.n_seq_max)
        except ValueError as e:
            raise Failed(f"{e}: {self.s.said()}") from None
        self.drivers.append(driver)
        return driver

    def close(self) -> list[str]:
        """Free all; what was logged."""
        log = self.log + [line for d in self.drivers for line in d.log()] + self.shim.take_log()
        for d in self.drivers:
            d.close()
        if self.draft:
            self.shim.free_context(self.draft)
        self.shim.free_context(self.target)
        return [re.sub("0x[0-9a-f]+", "0x...", line) for line in log]

    @property
    def memories(self) -> list[tuple[str, int]]:
        """Name and handle of each context."""
        return [("target", self.target), *([("draft", self.draft)] if self.draft else [])]

    def feed(self, tokens: Sequence[int], start: int, driver: Native | None, seq: int = 0) -> bytes:
        """Decode tokens from a position on, and have the driver process them: the last one's logits."""
        n_batch = self.plan.params.n_batch
        for at in range(0, len(tokens), n_batch):
            part = tokens[at : at + n_batch]
            last = at + len(part) == len(tokens)
            rows = [Row(seq, start + at + i, t, last and i == len(part) - 1) for i, t in enumerate(part)]
            rc = self.shim.decode(
                self.target, part, [r.pos for r in rows], [seq] * len(rows), [int(r.out) for r in rows]
            )
            if rc != 0:
                raise Failed(f"decoding {len(part)} tokens at position {rows[0].pos} gives {rc}: {self.s.said()}")
            if driver and not driver.process(rows):
                # without what differs from position to position
                said = dict.fromkeys(re.sub(r" \([^()]*=[^()]*\)", "", " ".join(x.split())) for x in driver.log())
                raise DriverFailed(f"the driver's process() fails: {'; '.join(said) or 'it logs nothing'}")
            if (at + len(part)) // _STEP > at // _STEP:
                self.s.tell(start + at + len(part))
        return self.logits(len(part) - 1)

    def logits(self, row: int) -> bytes:
        """Logits of a row of the target's last batch."""
        logits = self.shim.logits(self.target, row, self.s.n_vocab)
        if logits is None:
            raise Failed("the library gives no logits for the last row")
        return logits

    def propose(self, driver: Native, last: int, at: int, before: list[int]) -> tuple[list[int], list[Tap]]:
        """A draft behind `last` at a position, with what went through the draft context; its rows are removed again."""
        kept = self._get(self.draft, 0) if self.s.draft_recurs else b""
        driver.take()
        tokens = driver.draft([DraftAsk(0, at, last, self.plan.depth, before)])[0]
        taps = driver.take()
        if self.draft and not self.shim.seq_rm(self.draft, 0, at, -1):
            # a recurrent draft cannot go back, so its caller puts back what was there
            if not kept:
                raise Failed(f"seq_rm of the draft memory from position {at} on returns false")
            self._set("draft", self.draft, 0, kept)
        return tokens, taps

    def _get(self, ctx: int, flags: int) -> bytes:
        size = self.shim.seq_size(ctx, 0, flags)
        n, blob = self.shim.seq_get(ctx, 0, flags, size)
        if n == 0 or n > size:
            raise Failed(f"saving gives {n} of {size} bytes: {self.s.said()}")
        return blob[:n]

    def _set(self, name: str, ctx: int, flags: int, blob: bytes) -> None:
        if self.shim.seq_set(ctx, 0, flags, blob) == 0:
            raise Failed(f"the {name}'s restore is refused: {self.s.said()}")

    def cut(self, at: int) -> None:
        """Remove what lies at and behind a position from both memories."""
        for name, ctx in self.memories:
            if not self.shim.seq_rm(ctx, 0, at, -1):
                raise Failed(f"seq_rm of the {name}'s memory from position {at} on returns false")

    def wipe(self) -> None:
        """Remove the whole sequence."""
        self.cut(-1)

    def save(self, flags: int) -> list[bytes]:
        """The sequence in every memory."""
        return [self._get(ctx, flags) for _, ctx in self.memories]

    def restore(self, flags: int, blobs: list[bytes]) -> None:
        """Put back what `save` gave."""
        for (name, ctx), blob in zip(self.memories, blobs, strict=True):
            self._set(name, ctx, flags, blob)

    @property
    def shared(self) -> bool:
        """Whether the draft context, which has processed something, has no memory of its own."""
        return bool(self.draft) and self.shim.seq_size(self.draft, 0, 0) == self._empty

    def save_files(self, folder: Path, tokens: list[int]) -> list[int]:
        """The sequence in every memory as session files; their sizes."""
        sizes = []
        self.files = self.memories[:1] if self.shared else self.memories
        for name, ctx in self.files:
            if self.shim.seq_save_file(ctx, folder / f"{name}.session", 0, tokens) == 0:
                raise Failed(f"the {name}'s session file is not written: {self.s.said()}")
            sizes.append((folder / f"{name}.session").stat().st_size)
        return sizes

    def load_files(self, folder: Path, room: int) -> None:
        """Put back what `save_files` wrote."""
        for name, ctx in self.files:
            if self.shim.seq_load_file(ctx, folder / f"{name}.session", 0, room)[0] == 0:
                raise Failed(f"the {name}'s session file is refused: {self.s.said()}")


def rest(subject: Subject, position: int, arm: Arm, text: list[int]) -> Run:
    """A run of the baseline."""
    c = Contexts(subject, subject.plan.params.n_rs_seq, beside=arm == "cells")
    prompt = subject.plan.prompt[:position]
    try:
        if arm == "cells":
            c.feed(subject.plan.other, 0, c.driver, seq=1)
        if arm == "split":
            c.feed(prompt[:-1], 0, c.driver)
            row = c.feed(prompt[-1:], position - 1, c.driver)
        else:
            row = c.feed(prompt, 0, c.driver)
        run = Run(text=text or [top(row)])
        _go_on(c, position, run, grow=not text)
    finally:
        log = c.close()
    run.log = log
    return run


def _go_on(c: Contexts, position: int, run: Run, *, grow: bool) -> None:
    """Some rounds of drafting along the text, and the target's rows that verify them."""
    plan, driver = c.plan, c.driver
    prompt = plan.prompt[:position]
    if driver:
        driver.begin(0, prompt)
    for i in range(plan.rounds + plan.depth - 1 if plan.driver else plan.rounds):
        if driver and i < plan.rounds:
            tokens, taps = c.propose(driver, run.text[i], position + i, prompt + run.text[:i])
            if i == 0 and taps:
                run.hidden = next((r.hidden for r in taps[0].rows if r.hidden), b"")
            run.drafts.append(tokens)
            run.vectors.append([v for t in taps for v in _vectors(t)])
        else:
            run.drafts.append([])
            run.vectors.append([])
        try:
            row = c.feed(run.text[i : i + 1], position + i, driver)
        except DriverFailed as e:  # the target has decoded its row; it goes on alone
            run.trouble, driver = f"at token {i + 1} after the restore {e}", None
            row = c.logits(0)
        run.target.append(row)
        if grow:
            run.text.append(top(row))


def _vectors(tap: Tap) -> list[bytes]:
    n = sum(r.out for r in tap.rows)
    width = len(tap.logits) // n if n else 0
    return [tap.logits[i * width : (i + 1) * width] for i in range(n)] if width else []


def check_fit(subject: Subject, route: str) -> None:
    """See whether a route says anything about this model. Raises Unfit."""
    c = Contexts(subject, subject.plan.params.n_rs_seq)
    try:
        if route in FLAGS and FLAGS[route] & PARTIAL:
            c.feed(subject.plan.prompt[:2], 0, None)
            if subject.shim.seq_size(c.target, 0, PARTIAL) == subject.shim.seq_size(c.target, 0, 0):
                raise Unfit("the partial state is the whole state here: no recurrent part and no window beside a rest")
    finally:
        c.close()
    if route == "rollback" and (subject.facts["recurrent"] or subject.facts["hybrid"]):
        c = Contexts(subject, subject.plan.depth)
        n = subject.shim.context_facts(c.target)["n_rs_seq"]
        c.close()
        if n < subject.plan.depth:
            raise Unfit(f"the context keeps {n} earlier recurrent states (n_rs_seq), {subject.plan.depth} are needed")


def after(subject: Subject, route: str, position: int, arm: Arm, text: list[int], folder: Path) -> Run:
    """A run by a route: to the position, past it, back, and on along the text."""
    plan = subject.plan
    depth = max(plan.params.n_rs_seq, plan.depth) if route == "rollback" else plan.params.n_rs_seq
    c = Contexts(subject, depth)
    run = Run(text=list(text))
    try:
        if route == "rollback":
            _roll_back(c, position, arm, run)
        elif route == "replay":
            _replay(c, position, arm, run)
        else:
            _restore(c, route, position, arm, run, folder)
    finally:
        log = c.close()
    run.log = log
    return run


def _pollute(c: Contexts, before: list[int], driver: Native | None) -> None:
    """Other work behind `before`, with a draft."""
    history = before + c.plan.other
    c.feed(history[len(before) : -1], len(before), driver)
    if driver:
        c.propose(driver, history[-1], len(history) - 1, history[:-1])
    c.feed(history[-1:], len(history) - 1, driver)


def _restore(c: Contexts, route: str, position: int, arm: Arm, run: Run, folder: Path) -> None:
    plan, flags, driver = c.plan, FLAGS[route], c.driver
    prompt = plan.prompt[:position]
    partial = bool(flags & PARTIAL)
    c.feed(prompt, 0, driver)
    blobs: list[bytes] = []
    for _ in range(plan.repeat):
        began = time.perf_counter()
        if route == "file":
            sizes = c.save_files(folder, prompt)
        else:
            blobs = c.save(flags)
        state = driver.state(0) if driver else None
        run.save_ms.append(1e3 * (time.perf_counter() - began))
    if route != "file":
        sizes = [len(b) for b in blobs]
    elif c.shared:
        run.notes.append(SHARED)
    run.sizes = sizes[0], sizes[1] if len(sizes) > 1 else 0, -1 if state is None else len(state)
    busy = driver
    if driver and arm == "restored":
        run.how = "kept" if state is None else "native"
        busy = c.new_driver() if state is None else driver
    if not partial:
        c.wipe()
    _pollute(c, prompt if partial else [], busy)

    def back() -> None:
        began = time.perf_counter()
        if route == "file":
            c.load_files(folder, position)
        else:
            c.restore(flags, blobs)
        if partial:
            c.cut(position)
        if driver and state is not None and arm == "restored":
            driver.restore(0, state)
        run.restore_ms.append(1e3 * (time.perf_counter() - began))

    back()
    _go_on(c, position, run, grow=False)
    # measured once it cannot disturb any more
    for _ in range(plan.repeat - 1):
        back()


def _replay(c: Contexts, position: int, arm: Arm, run: Run) -> None:
    prompt = c.plan.prompt[:position]
    c.feed(prompt, 0, c.driver)
    c.wipe()
    _pollute(c, [], c.driver)
    began = time.perf_counter()
    c.wipe()
    if c.driver and arm == "restored":
        run.how = "new driver"
        c.driver = c.new_driver()
    c.feed(prompt, 0, c.driver)
    run.restore_ms.append(1e3 * (time.perf_counter() - began))
    _go_on(c, position, run, grow=False)


def _roll_back(c: Contexts, position: int, arm: Arm, run: Run) -> None:
    plan, driver = c.plan, c.driver
    prompt = plan.prompt[:position]
    c.feed(prompt[:-1], 0, driver)
    if driver:  # accept does nothing before the first draft
        c.propose(driver, prompt[-1], position - 1, prompt[:-1])
    c.feed([prompt[-1], *plan.other[: plan.depth]], position - 1, driver)
    began = time.perf_counter()
    if driver and arm == "restored":
        run.how = "accept(0)"
        driver.accept(0, 0)
    c.cut(position)
    run.restore_ms.append(1e3 * (time.perf_counter() - began))
    _go_on(c, position, run, grow=False)


def serve(order: Order, emit: Emit) -> None:
    """Run all that was ordered."""
    folder = Path(order.folder)
    try:
        subject = Subject(order.plan)
        if order.route:
            check_fit(subject, order.route)
        else:
            emit(Said("facts", facts={**subject.facts, **_context_facts(subject)}))
    except (Unfit, Failed) as e:
        emit(Said("unfit" if isinstance(e, Unfit) else "failed", text=str(e)))
        return
    for position, arm in order.todo:
        emit(Said("begin", position, arm))
        subject.tell = functools.partial(_at, emit, position, arm)
        try:
            text = order.texts.get(position, [])
            if order.route:
                run = after(subject, order.route, position, arm, text, folder)
            else:
                run = rest(subject, position, arm, text)
                order.texts.setdefault(position, run.text)
        except Failed as e:
            emit(Said("failed", position, arm, str(e)))
            continue
        (folder / run_file(order.route, position, arm)).write_bytes(msgspec.msgpack.encode(run))
        emit(Said("run", position, arm))


def _at(emit: Emit, position: int, arm: Arm, tokens: int) -> None:
    emit(Said("at", position, arm, tokens=tokens))


def _context_facts(subject: Subject) -> dict[str, int]:
    c = Contexts(subject, subject.plan.params.n_rs_seq)
    facts = subject.shim.context_facts(c.target)
    if c.driver:
        facts["n_draft_max"] = c.driver.n_max
    c.close()
    return facts


def main() -> None:
    """Entry."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    # what backends print must not get between the lines
    with os.fdopen(os.dup(1), "wb", buffering=0) as out:
        os.dup2(2, 1)

        def emit(said: Said) -> None:
            out.write(msgspec.json.encode(said) + b"\n")

        serve(order, emit)


if __name__ == "__main__":
    main()
