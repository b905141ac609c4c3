"""Stepping round faults of llama-server that are known to be open upstream, by name (see fuzz/avoid.py, which does it
for the library)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from fuzz import harm
from fuzz.server.fit import crowded
from oracles.server.spoilt import SPOILERS
from subjects import recipes
from subjects.pairs import states_kept
from subjects.scenario import BlobEdit
from subjects.server.scenario import (
    AnyRequest,
    Chat,
    DamageFile,
    Restart,
    RestoreSlot,
    SaveSlot,
    ServerScenario,
    Together,
    Turn,
    asked,
    asks_of,
)
from subjects.server.trace import ServerTrace

replace = msgspec.structs.replace


@dataclass(frozen=True)
class ServerAvoidance:
    """One known fault. triggered: the first request that sets it off, None where none does; of a fault that is seen in
    a run only (`oracles.server.spoilt`) none does. repair: a program near by that does not set it off.
    """

    name: str
    about: str
    triggered: Callable[[ServerScenario], int | None]
    repair: Callable[[ServerScenario], ServerScenario]


def _rollback(program: ServerScenario) -> bool:
    """Whether the model may keep earlier recurrent states: of a given file nobody knows."""
    name = program.model.recipe
    return name is None or (name in recipes.names(drivers=True) and recipes.get(name).rollback)


def _states(program: ServerScenario) -> int:
    """Earlier recurrent states that the target keeps."""
    d = program.driver
    return states_kept(d.kind, d.n_max, _rollback(program)) if d else 0


def _small_ubatch(program: ServerScenario) -> int | None:
    if not crowded(program.flags, program.driver, _rollback(program)):
        return None
    return next((i for i, _ in asked(program)), None)


def _larger_ubatch(program: ServerScenario) -> ServerScenario:
    n = _states(program) + 2
    f = program.flags
    return replace(program, flags=replace(f, ubatch=max(n, f.ubatch), batch=max(n, f.batch)))


# --- more than one request at a time ----------------------------------------------------------------------------------


def _left(program: ServerScenario) -> list[list[Turn | Chat]]:
    """Before each request, what may still run because its client went away and the server has not noticed."""
    out: list[list[Turn | Chat]] = []
    left: list[Turn | Chat] = []
    for request in program.requests:
        if isinstance(request, Restart):
            left = []
        out.append(left)
        left = left + [a for a in asks_of(request) if a.cancel is not None]
    return out


def _busy_slot(program: ServerScenario) -> int | None:
    """get_available_slot() puts a prompt of the prompt cache into a slot that was asked for and is busy."""
    f = program.flags
    if not f.cache_ram or not f.similarity:  # without similarity a slot that is asked for is left as it is
        return None
    for i, (request, left) in enumerate(zip(program.requests, _left(program), strict=True)):
        asks = asks_of(request)
        for k, ask in enumerate(asks):
            others = [*left, *asks[:k], *asks[k + 1 :]]
            if ask.slot >= 0 and any(o.slot in (-1, ask.slot) for o in others):
                return i
    return None


def _without_pins(program: ServerScenario) -> ServerScenario:
    """Requests that may meet another one leave the slot to the server."""

    def free(asks: tuple[Turn | Chat, ...]) -> tuple[Turn | Chat, ...]:
        return tuple(replace(a, slot=-1) for a in asks)

    out: list[AnyRequest] = []
    for request, left in zip(program.requests, _left(program), strict=True):
        match request:
            case Together(asks=asks):
                out.append(Together(asks=free(asks)))
            case Turn() | Chat() if left:
                out.append(replace(request, slot=-1))
            case _:
                out.append(request)
    return replace(program, requests=tuple(out))


def _moved_rollback(program: ServerScenario) -> int | None:
    """llama_memory_recurrent::find_slot() moves the cell of a slot that lies between those of a micro-batch, without
    the states that it is to be rolled back to: three slots, two of which are busy."""
    if program.flags.parallel < 3 or not _states(program):
        return None
    for i, (request, left) in enumerate(zip(program.requests, _left(program), strict=True)):
        asks = asks_of(request)
        if asks and len(asks) + len(left) > 1:
            return i
    return None


def _one_by_one(program: ServerScenario) -> ServerScenario:
    asks = [r for request in program.requests for r in (asks_of(request) or (request,))]
    alone = [replace(r, cancel=None) if isinstance(r, Turn | Chat) else r for r in asks]
    return replace(program, requests=tuple(alone))


# --- slot files -------------------------------------------------------------------------------------------------------


def _restored(program: ServerScenario, bad: Callable[[list[BlobEdit]], bool]) -> int | None:
    """The first restore of a file whose edits since it was saved are bad."""
    edits: dict[int, list[BlobEdit]] = {}
    for i, request in enumerate(program.requests):
        match request:
            case SaveSlot(file=file):
                edits.pop(file, None)
            case DamageFile(file=file):
                edits.setdefault(file, []).extend(request.edits)
            case RestoreSlot(file=file) if bad(edits.get(file, [])):
                return i
            case _:
                pass
    return None


def _undamaged(bad: Callable[[list[BlobEdit]], bool]) -> Callable[[ServerScenario], ServerScenario]:
    """Without the edits that are bad by themselves; and without all edits where they are bad together."""

    def repair(program: ServerScenario) -> ServerScenario:
        out: list[AnyRequest] = []
        for request in program.requests:
            if isinstance(request, DamageFile):
                edits = tuple(e for e in request.edits if not bad([e]))
                if edits:
                    out.append(replace(request, edits=edits))
            else:
                out.append(request)
        repaired_ = replace(program, requests=tuple(out))
        if _restored(repaired_, bad) is None:
            return repaired_
        return replace(program, requests=tuple(r for r in out if not isinstance(r, DamageFile)))

    return repair


def _drops_cells(edits: list[BlobEdit]) -> bool:
    """Cells are dropped, or their count is changed."""
    return any(
        (e.how in ("drop", "take") and e.where.endswith((".cell", ".n_cells")))
        or (e.how in ("set", "add", "flip", "zero") and e.where.endswith(".n_cells"))
        for e in edits
    )


def _several_cells(program: ServerScenario) -> Callable[[list[BlobEdit]], bool]:
    """Whether edits claim several recurrent cells for a slot, as many as there are slots at most."""
    return lambda edits: harm.claims_several_recurrent_cells(edits, program.flags.parallel)


# --- drafting ---------------------------------------------------------------------------------------------------------


def _draft_file(program: ServerScenario) -> int | None:
    """The first request after a restore, where the draft has a context with positions of its own: a slot file has
    nothing of it. (draft-mtp decodes behind any; what it drafts then is server-draft-mtp-file.)"""
    driver = program.driver
    if driver is None or driver.kind not in ("draft-eagle3", "draft-simple"):
        return None
    restored = False
    for i, request in enumerate(program.requests):
        if restored and asks_of(request):
            return i
        restored = restored or isinstance(request, RestoreSlot)
    return None


def _eagle3_cache(program: ServerScenario) -> int | None:
    """draft-eagle3 keeps its memory a token short of the target's, and the row that makes up for it is not in the
    prompt cache: the first request that may come out of that."""
    driver = program.driver
    if driver is None or driver.kind != "draft-eagle3" or not program.flags.cache_ram:
        return None
    before = 0
    for i, request in enumerate(program.requests):
        if before > 1 and asks_of(request):
            return i
        before = 0 if isinstance(request, Restart) else before + len(asks_of(request))
    return None


def _without_cache(program: ServerScenario) -> ServerScenario:
    return replace(program, flags=replace(program.flags, cache_ram=0, idle_slots=False))


def _without_restore(program: ServerScenario) -> ServerScenario:
    return replace(program, requests=tuple(r for r in program.requests if not isinstance(r, RestoreSlot)))


def _full_window(program: ServerScenario) -> int | None:
    """What is saved of a sliding window is the window, also where --swa-full keeps more: the first request that may go
    back behind it."""
    if not program.flags.swa_full:
        return None
    lacks = False
    for i, request in enumerate(program.requests):
        if lacks and asks_of(request):
            return i
        lacks = lacks or isinstance(request, RestoreSlot) or bool(program.flags.cache_ram)
    return None


def _window(program: ServerScenario) -> ServerScenario:
    return replace(program, flags=replace(program.flags, swa_full=False))


def _window_reuse(program: ServerScenario) -> int | None:
    """find_slot() takes cells outside of their slot's window for free, also where --swa-full is to keep them; of a
    cache that slots share another slot takes them. The first request behind that of another slot, or at its time."""
    f = program.flags
    if not (f.swa_full and f.shared_cache):
        return None
    before = 0
    for i, request in enumerate(program.requests):
        before = 0 if isinstance(request, Restart) else before + len(asks_of(request))
        if before > 1 and asks_of(request):
            return i
    return None


def _cache_for_each(program: ServerScenario) -> ServerScenario:
    f = program.flags
    return replace(program, flags=replace(f, kv_unified=False, ctx=f.ctx * f.parallel))


# --- what is seen in a run only ---------------------------------------------------------------------------------------


def _never(program: ServerScenario) -> int | None:
    return None


def _same(program: ServerScenario) -> ServerScenario:
    return program


SERVER_AVOIDANCES: dict[str, ServerAvoidance] = {
    a.name: a
    for a in (
        ServerAvoidance(
            "server-ubatch",
            "ubatch <= draft n_max + 1 with draft-mtp or draft-eagle3 on a model with rollback",
            _small_ubatch,
            _larger_ubatch,
        ),
        ServerAvoidance(
            "server-busy-slot",
            "id_slot of a slot that may be busy, with a prompt cache: its content is replaced",
            _busy_slot,
            _without_pins,
        ),
        ServerAvoidance(
            "server-rollback",
            "three slots, several at once, with draft-mtp or draft-eagle3 on a model with rollback",
            _moved_rollback,
            _one_by_one,
        ),
        ServerAvoidance(
            "server-file-cut",
            "restore of a slot file that ends too early: assertion abort",
            lambda p: _restored(p, harm.reads_past_the_end),
            _undamaged(harm.reads_past_the_end),
        ),
        ServerAvoidance(
            "server-file-cells",
            "restore of a slot file without the cells of its tokens: the next completion aborts",
            lambda p: _restored(p, _drops_cells),
            _undamaged(_drops_cells),
        ),
        ServerAvoidance(
            "server-double-cell",
            "restore of a slot file that claims several recurrent cells: assertion abort",
            lambda p: _restored(p, _several_cells(p)),
            lambda p: _undamaged(_several_cells(p))(p),
        ),
        ServerAvoidance(
            "server-draft-file",
            "a slot restored from a file, where the draft has a memory of its own: it is not restored",
            _draft_file,
            _without_restore,
        ),
        ServerAvoidance(
            "server-eagle3-cache",
            "draft-eagle3 with a prompt cache: the row that its memory lacks is not cached",
            _eagle3_cache,
            _without_cache,
        ),
        ServerAvoidance(
            "server-swa-full",
            "--swa-full with a slot file or a prompt cache: what is saved is the window alone",
            _full_window,
            _window,
        ),
        ServerAvoidance(
            "server-window-reuse",
            "--swa-full with --kv-unified and several slots: one takes cells that another one is to keep",
            _window_reuse,
            _cache_for_each,
        ),
        ServerAvoidance(
            "server-brim",
            "drafting up to the end of a slot's context: the last tokens are not answered (seen in the run)",
            _never,
            _same,
        ),
        ServerAvoidance(
            "server-draft-mtp-file",
            "draft-mtp behind tokens restored from a file, of which its memory has nothing (seen in the run)",
            _never,
            _same,
        ),
        ServerAvoidance(
            "server-draft-row",
            "draft-mtp or draft-eagle3 drafts from the hidden row of what the slot held before (seen in the run)",
            _never,
            _same,
        ),
        ServerAvoidance(
            "server-checkpoint",
            "a context checkpoint of more tokens than the prompt has in common with the slot (seen in the run)",
            _never,
            _same,
        ),
        ServerAvoidance(
            "server-worn-checkpoint",
            "a context checkpoint made where another one was restored: it lacks a position (seen in the run)",
            _never,
            _same,
        ),
    )
}


def triggered(name: str, program: ServerScenario) -> int | None:
    """The first request that sets a known fault off; None of one that is seen in a run only."""
    return SERVER_AVOIDANCES[name].triggered(program)


def to_blame(name: str, program: ServerScenario, trace: ServerTrace, culprit: int) -> bool:
    """Whether a known fault may be why request `culprit` of a run is answered wrongly: it was set off there or before.
    One that is seen in a run only spoils some answers and not those behind them, so it must have spoilt this one."""
    if name in SPOILERS:
        return culprit in SPOILERS[name](program, trace)
    at = triggered(name, program)
    return at is not None and at <= culprit


def repaired(names: Iterable[str], program: ServerScenario) -> ServerScenario:
    """A program near by that sets none of these off."""
    for name in names:
        if triggered(name, program) is not None:
            program = SERVER_AVOIDANCES[name].repair(program)
    return program
