"""What a real llama-server says of what it does is read: a version that words it otherwise is noticed here.

The oracles need none of it; what is said of a finding, and which answers known faults may have spoilt, does.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.models import Model, from_pair, from_recipe
from fuzz.server.models import SERVED
from subjects import pairs, recipes
from subjects.builds import cache_dir
from subjects.scenario import BlobEdit
from subjects.server.build import ServerBuild
from subjects.server.runner import run
from subjects.server.scenario import (
    AnyRequest,
    Chat,
    Cut,
    DamageFile,
    EraseSlot,
    Flags,
    Restart,
    RestoreSlot,
    SaveSlot,
    ServerScenario,
    Together,
    Turn,
)
from subjects.server.trace import Event, Reply, ServerTrace

NEW = Cut("start")
HYBRID = Flags(checkpoints=2, spacing=4, batch=32, ubatch=16, cache_ram=8)


def model(name: str) -> Model:
    if name in recipes.names():
        return from_recipe(recipes.get(name), cache_dir() / "models", form=SERVED)
    return from_pair(pairs.get(name), cache_dir() / "models", form=SERVED)


def served(server: ServerBuild, name: str, flags: Flags, *requests: AnyRequest) -> ServerTrace:
    m = model(name)
    program = ServerScenario(model=m.ref, driver=m.driver, flags=flags, requests=requests)
    trace = run(program, server.path, Path(m.path), Path(m.draft) if m.draft else None)
    assert trace.end.how == "ok", trace.end
    return trace


def deeds(reply: Reply) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for e in reply.events:
        found.setdefault(e.what, []).append(e.n)
    return found


def test_every_deed_of_a_hybrid_model_is_read(server_build: ServerBuild) -> None:
    trace = served(
        server_build, "qwen35", HYBRID,
        Turn(conv=0, keep=NEW, n=40),
        Turn(conv=0, n=10),
        Turn(conv=0, keep=Cut("prompt", -3), n=4, stream=3),
        Turn(conv=1, keep=NEW, n=30, stream=7),
        Turn(conv=0, n=4),
        Turn(conv=0, keep=Cut("start", 5), n=6, stream=9),
    )  # fmt: skip
    begins, on, edited, other, back, reset = (deeds(r) for r in trace.replies)
    assert [r.task >= 0 for r in trace.replies] == [True] * 6
    assert begins == {"kept": [0], "checkpoint": [20, 36]}
    assert on == {"kept": [47], "erased": [20, 36], "checkpoint": [47, 54]}
    assert edited["restored"] == edited["kept"] == [54]
    assert other["cached"] == [66]
    assert other["kept"] == [0]
    assert back["cached"] == [37]
    assert "loaded" in back
    assert back["kept"] == [66]
    assert "reset" in reset
    assert reset["kept"] == [0]
    # what the log says is kept is what the answer says
    assert [deeds(r)["kept"][0] for r in trace.replies] == [r.cached for r in trace.replies]


def test_rounds_of_drafting_are_read(server_build: ServerBuild) -> None:
    trace = served(
        server_build, "qwen35-mtp", Flags(checkpoints=2, spacing=4),
        Turn(conv=0, keep=NEW, n=20, predict=16), Turn(conv=0, n=4, predict=16),
    )  # fmt: skip
    for reply in trace.replies:
        assert reply.rounds()
        assert sum(n for n, _ in reply.rounds()) == reply.accepted
        assert sum(of for _, of in reply.rounds()) == reply.drafted


def test_a_slot_that_is_idle_goes_into_the_prompt_cache(server_build: ServerBuild) -> None:
    flags = Flags(parallel=2, cache_ram=8, idle_slots=True)
    trace = served(
        server_build,
        "llama",
        flags,
        Turn(conv=0, keep=NEW, n=20, slot=1),
        Turn(conv=1, keep=NEW, n=9, stream=5, slot=0),
    )
    assert not {"cached", "cleared"} & set(deeds(trace.replies[0]))
    cached = [e for e in trace.replies[1].events if e.what == "cached"]
    assert cached == [Event("cached", 1, 27)]


def test_slot_actions_and_damage_are_answered_with_what_they_did(server_build: ServerBuild) -> None:
    trace = served(
        server_build, "llama", Flags(parallel=2),
        Turn(conv=0, keep=NEW, n=20, slot=0),
        SaveSlot(slot=0, file=0),
        EraseSlot(slot=0),
        RestoreSlot(slot=1, file=0),
        Turn(conv=0, slot=1),
        RestoreSlot(slot=1, file=5),
        DamageFile(file=0, edits=(BlobEdit(how="cut", nth=200),)),
        DamageFile(file=5, edits=(BlobEdit(how="cut", nth=200),)),
        RestoreSlot(slot=0, file=0),
        Restart(),
        Turn(conv=0, slot=1, n=1),
    )  # fmt: skip
    first, saved, erased, restored, on, missing, cut, nothing, refused, restart, last = trace.replies
    assert saved.n == erased.n == restored.n == 27
    assert on.cached == 27
    assert first.slot == 0
    assert on.slot == 1
    assert missing.status == 400
    assert missing.error
    assert cut.n > 0
    assert nothing.n == 0
    assert refused.status == 400
    assert (restart.status, last.cached) == (200, 0)
    assert (last.task, last.slot) == (0, 1)


def test_requests_at_the_same_time_and_chats_have_tasks_of_their_own(server_build: ServerBuild) -> None:
    trace = served(
        server_build, "gemma3", Flags(parallel=3, ctx=768, checkpoints=8),
        Together(asks=(Turn(conv=0, keep=NEW, n=20), Turn(conv=1, keep=NEW, n=9, stream=4), Chat(conv=0, words=3))),
        Together(asks=(Turn(conv=0), Turn(conv=1), Chat(conv=0))),
        Chat(conv=0, predict=16, cancel=2),
        Chat(conv=0),
    )  # fmt: skip
    tasks = [r.task for r in trace.replies]
    assert len({*tasks}) == len(tasks) == 8
    assert min(tasks) >= 0
    assert {r.slot for r in trace.replies[:3]} == {0, 1, 2}
    assert all(r.cached for r in trace.replies[3:6])
    cancelled, after = trace.replies[6:]
    assert (cancelled.cancelled, cancelled.answered) == (True, False)
    assert after.answered
    for reply in trace.replies:
        kept = deeds(reply)["kept"][0]
        # what is cancelled does not say how much it kept
        assert reply.cancelled or kept == reply.cached


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_a_run_is_the_same_every_time(name: str, server_build: ServerBuild) -> None:
    requests = (Turn(conv=0, keep=NEW, n=20), Turn(conv=0, n=4), Turn(conv=0, keep=Cut("end", -5)), Chat(conv=0))
    one, two = (served(server_build, name, Flags(checkpoints=4), *requests) for _ in range(2))
    assert one.replies == two.replies
