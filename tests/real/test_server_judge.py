"""The judge on a real llama-server: programs with everything in them, in which nothing is wrong, on every kind of
memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.models import from_pair, from_recipe
from fuzz.server.models import SERVED
from oracles.server.account import Held
from oracles.server.band import cold_flags
from oracles.server.cold import Cold
from oracles.server.judge import ServerJudge, ServerJudgement
from subjects import pairs, recipes
from subjects.builds import cache_dir
from subjects.scenario import BlobEdit, DriverParams
from subjects.server.build import ServerBuild
from subjects.server.process import ServerError
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

ALL: tuple[AnyRequest, ...] = (
    Turn(conv=0, n=40),
    Turn(conv=0, n=10),
    Turn(conv=0, keep=Cut("prompt"), n=0),
    Turn(conv=1, n=30, stream=5),
    Turn(conv=0, keep=Cut("start", 30), n=8, stream=2),
    Together(asks=(Turn(conv=0), Turn(conv=1), Chat(conv=0))),
    Chat(conv=0),
    Chat(conv=1, cancel=2),
    Turn(conv=1, cancel=3),
    SaveSlot(slot=0, file=0),
    RestoreSlot(slot=1, file=0),
    Turn(conv=0, keep=Cut(d=-2)),
    RestoreSlot(slot=1, file=3),
    DamageFile(file=0, edits=(BlobEdit(how="cut", nth=1),)),
    RestoreSlot(slot=0, file=0),
    Turn(conv=1),
    EraseSlot(slot=1),
    Restart(),
    Turn(conv=0),
)
FLAGS = Flags(parallel=2, checkpoints=8, spacing=16, cache_ram=8, idle_slots=True)


def judged(
    server: ServerBuild,
    name: str,
    folder: Path,
    *requests: AnyRequest,
    flags: Flags = FLAGS,
    binary: Path | None = None,
) -> ServerJudgement:
    models = cache_dir() / "models"
    if name in recipes.names():
        model = from_recipe(recipes.get(name), models, form=SERVED)
    else:
        model = from_pair(pairs.get(name), models, form=SERVED)
    build = server if binary is None else ServerBuild(binary, server.fingerprint, server.name, server.version)
    program = ServerScenario(model=model.ref, flags=flags, driver=model.driver, requests=requests)
    draft = Path(model.draft) if model.draft else None
    with ServerJudge(build, model.ref, Path(model.path), draft, folder, model.traits.memory) as judge:
        return judge.judge(program, variants=True)


def parts(h: Held) -> tuple[int, int]:
    return h.reply.request, h.reply.part


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen35", "lfm2", "mamba2", "qwen35-mtp"])
def test_a_program_with_everything_in_it_has_no_violation(name: str, server_build: ServerBuild, tmp_path: Path) -> None:
    found = judged(server_build, name, tmp_path, *ALL)
    assert [v.because for v in found.violations] == []
    assert found.trace.end.how == "ok"
    # fourteen completions, and five slot actions that are known to be done or refused
    assert found.checked >= 17
    assert {parts(h) for h in found.account.held} == {*found.cold} >= {(5, 0), (5, 1), (5, 2), (18, 0)}
    assert [o.what for o in found.account.others] == ["history"]
    assert max(h.error for h in found.account.held) <= found.account.held[0].band
    # it was cut so short that it is refused by all
    assert found.unknown == ["a changed slot file may be taken or refused"]
    assert found.account.tainted == frozenset()
    (by,) = (v for v in found.verdicts if v.oracle == "server-drafting")
    assert (by.compared > 0) is (name == "qwen35-mtp")


@pytest.mark.parametrize("flags", [Flags(), Flags(flash_attn=True, type_k="f16", type_v="f16", batch=16, ubatch=4)])
def test_arithmetic_that_differs_more_has_its_own_band(flags: Flags, server_build: ServerBuild, tmp_path: Path) -> None:
    found = judged(server_build, "gemma3", tmp_path, *ALL[:5], flags=flags)
    assert not found.violations
    assert found.checked == 5


def test_a_server_that_refuses_its_flags_is_not_judged(server_build: ServerBuild, tmp_path: Path) -> None:
    # a quantised V needs flash attention
    found = judged(server_build, "llama", tmp_path, *ALL[:2], flags=Flags(type_v="q8_0"))
    assert not found.violations
    assert not found.judged
    assert any(reason.startswith("not started: ") for reason in found.unknown)


def test_a_server_that_is_not_there_is_not_judged(server_build: ServerBuild, tmp_path: Path) -> None:
    found = judged(server_build, "llama", tmp_path, *ALL[:2], binary=tmp_path / "llama-server")
    assert not found.violations
    assert not found.judged
    assert found.trace.end.how == "error"


def test_a_cold_server_answers_alike_whatever_it_was_asked_before(server_build: ServerBuild) -> None:
    model = from_recipe(recipes.get("qwen35"), cache_dir() / "models", form=SERVED)
    found = judged(server_build, "qwen35", cache_dir(), *ALL[:5])
    cold = Cold(server_build.path, Path(model.path), None)
    try:
        flags = cold_flags(FLAGS)
        replies = [h.cold for h in found.account.held]
        mine = [cold.reply(r, flags) for r in replies]
        cold.forget()
        theirs = [cold.reply(r, flags) for r in reversed(replies)][::-1]
        assert [(r.tokens, r.tops) for r in mine] == [(r.tokens, r.tops) for r in theirs]
        assert not any(r.cached for r in mine)
        with pytest.raises(ServerError):
            cold.reply(replies[0], Flags(ctx=512, type_v="q8_0"), DriverParams(kind="draft-mtp"))
    finally:
        cold.close()


def test_a_streamed_chat_leaves_out_tokens_that_have_no_text(server_build: ServerBuild, tmp_path: Path) -> None:
    # the second token is a marker, for which the server sends no part
    chat = Chat(conv=0, words=2, stream=1, predict=5, cancel=2)
    found = judged(server_build, "llama", tmp_path, chat, flags=Flags())
    assert [v.because for v in found.violations] == []
    (reply,) = found.trace.replies
    assert reply.tokens == found.cold[0, 0].tokens[:1]
    assert found.cold[0, 0].tokens[:2] == (62, 62)
