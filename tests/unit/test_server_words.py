"""Requests, answers and flags of llama-server in words; what repro.sh makes of two answers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fuzz.server import answers, model, words
from subjects.scenario import BlobEdit, DriverParams, ModelRef
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

ANSWERS = Path(answers.__file__)


def told(*pairs: tuple[AnyRequest, Reply | list[Reply]]) -> list[str]:
    replies: list[Reply] = []
    for i, (_, mine) in enumerate(pairs):
        for part, reply in enumerate(mine if isinstance(mine, list) else [mine]):
            reply.request, reply.part = i, part
            replies.append(reply)
    program = ServerScenario(model=ModelRef(recipe="llama"), requests=tuple(r for r, _ in pairs))
    return words.program(program, ServerTrace(replies=replies))


def reply(prompt: int, answer: int = 2, *events: Event, **more: Any) -> Reply:
    return Reply(request=0, status=200, prompt=(1,) * prompt, tokens=(2,) * answer, events=events, **more)


def test_a_conversation_is_told_from_its_beginning() -> None:
    assert told(
        (Turn(conv=0, n=40), reply(40, 12, Event("checkpoint", 0, 4), Event("checkpoint", 0, 36))),
        (Turn(conv=0, n=1), reply(53, 8, Event("restored", 0, 36, 36), cached=36)),
        (Turn(conv=0, keep=Cut("prompt"), n=0), reply(53, 8, cached=52)),
        (Turn(conv=0, keep=Cut("prompt"), n=4, slot=1, cache=False), reply(57, 8)),
        (Turn(conv=0, keep=Cut("end", -20), n=3), reply(48, 1, Event("reset", 0))),
        (Turn(conv=1, base=0, keep=Cut("end", -9), n=5), reply(45)),
        (Turn(conv=0, keep=Cut("start"), n=9), reply(9)),
    ) == [
        "conversation 0 begins: a prompt of 40 tokens, checkpoints at 4 and 36 made → 12 tokens",
        "conversation 0 goes on: 1 token more, a prompt of 53 tokens, 36 cached, a checkpoint restored at 36 tokens "
        "→ 8 tokens",
        "conversation 0 is asked the same again: a prompt of 53 tokens, 52 cached → 8 tokens",
        "conversation 0 is asked again without its answer: 4 tokens more, a prompt of 57 tokens, for slot 1, "
        "cache_prompt false → 8 tokens",
        "conversation 0 goes back to its first 45 tokens: 3 tokens more, a prompt of 48 tokens, all of it "
        "processed again for want of a checkpoint → 1 token",
        "conversation 1 branches off conversation 0 behind 40 tokens: 5 tokens more, a prompt of 45 tokens → 2 tokens",
        "conversation 0 begins anew: a prompt of 9 tokens → 2 tokens",
    ]


def test_chats_are_told_by_their_messages() -> None:
    def chat(n: int) -> Reply:
        roles = ("user", "assistant") * 5
        return Reply(request=0, status=200, messages=tuple((r, "x") for r in roles[:n]), tokens=(1,), length=7)

    assert told((Chat(conv=0), chat(1)), (Chat(conv=0, words=1), chat(3)), (Chat(conv=0, keep=2), chat(3))) == [
        "chat A begins: a message of 4 words, a prompt of 7 tokens → 1 token",
        "chat A goes on: a message of 1 word, a prompt of 7 tokens → 1 token",
        "chat A goes back to its first 2 messages: a message of 4 words, a prompt of 7 tokens → 1 token",
    ]


def test_slots_files_and_the_server() -> None:
    assert told(
        (SaveSlot(slot=0, file=1), Reply(request=0, status=200, n=12)),
        (DamageFile(file=1, edits=(BlobEdit(how="cut", nth=500),)), Reply(request=0, status=200, n=80)),
        (DamageFile(file=2, edits=(BlobEdit(how="cut", nth=500),)), Reply(request=0, status=200)),
        (RestoreSlot(slot=1, file=1), Reply(request=0, status=400, error="bad: /tmp/x/slot-1.bin")),
        (EraseSlot(slot=0), Reply(request=0, status=200, n=1)),
        (Restart(), Reply(request=0, status=200)),
        (Restart(), Reply(request=0)),
    ) == [
        "slot 0 is saved into slot-1.bin → 12 tokens",
        "slot-1.bin is changed: cut it at 50 % of its bytes → 80 bytes of it",
        "slot-2.bin is changed: cut it at 50 % of its bytes → nothing of it, or there is no such file",
        "slot 1 is restored from slot-1.bin → HTTP 400: bad: slot-1.bin",
        "slot 0 is erased → 1 token",
        "the server is ended and started again",
        "the server is ended and started again → **no answer**",
    ]


def test_what_comes_together_and_is_broken_off() -> None:
    asks = (Turn(conv=0, n=3), Turn(conv=1, n=4, cancel=2))
    assert told((Together(asks=asks), [Reply(request=0, prompt=(1, 2, 3)), reply(4, 2, cancelled=True)])) == [
        "at the same time: (0) conversation 0 begins: a prompt of 3 tokens → **no answer**; (1) conversation 1 begins: "
        "a prompt of 4 tokens → 2 tokens, then the client went away"
    ]


def test_what_was_not_reached_is_not_told() -> None:
    program = ServerScenario(model=ModelRef(recipe="llama"), requests=(Turn(conv=0), Turn(conv=0)))
    assert len(words.program(program, ServerTrace(replies=[reply(8)]))) == 1


def test_an_empty_prompt_is_not_told_of_and_chats_have_letters() -> None:
    said = words.deeds(reply(4, 1, Event("cleared", 0, 0), Event("cached", 0, 0), Event("cleared", 0, 1)))
    assert said == ["the slot's prompt of 1 token dropped"]
    assert [words.chat_name(i) for i in (0, 1, 25, 26, 53)] == ["A", "B", "Z", "AA", "BB"]


def test_the_probabilities_that_are_furthest_apart() -> None:
    clean = reply(4, 2, tops=(((5, -0.1), (6, -3.0)), ((7, -0.5), (8, -1.0))))
    assert words.worst(clean, clean, 1e-4) == []
    for row, said in (
        (((7, -0.5), (8, -2.0)), "token 1 of the answer: the log-probability of token 8 is -2 as served, -1 of the"),
        (((9, -0.5), (3, -2.0)), "none of the most probable tokens as served, 9 and 3, is one of the cold server's, 7"),
    ):
        (told,) = words.worst(reply(4, 2, tops=(clean.tops[0], row)), clean, 1e-4)
        assert said in told
    # behind a token that is another one nothing is compared
    other = Reply(request=0, status=200, tokens=(3, 2), tops=(clean.tops[0], ((7, -9.0),)))
    assert words.worst(other, clean, 1e-4) == []


def test_drafting() -> None:
    events = (Event("round", 0, 2, 3), Event("replay", 0, 2, 3))
    assert words.answer(reply(4, 8, *events, drafted=9, accepted=4)) == (
        "8 tokens, 4 of 9 drafted tokens accepted, the state before a draft restored in 1 round"
    )


def test_flags_are_those_that_differ() -> None:
    assert words.flags_text(Flags(), None) == ""
    assert words.flags_text(Flags(ubatch=4, swa_full=True), DriverParams(kind="draft-mtp", n_max=3)) == (
        "--ubatch-size 4 --swa-full --spec-type draft-mtp --spec-draft-n-max 3"
    )
    assert "--spec-ngram-mod-n-match 7" in words.flags_text(Flags(), DriverParams(kind="ngram-mod", ngram_n=7))


# --- answers.py -------------------------------------------------------------------------------------------------------


def written(path: Path, tokens: list[int], *tops: dict[int, float], **more: Any) -> Path:
    told = [
        {"id": t, "top_logprobs": [{"id": k, "logprob": p} for k, p in row.items()]}
        for t, row in zip(tokens, tops, strict=False)
    ]
    path.write_text(json.dumps({"tokens": tokens, "completion_probabilities": told, "timings": {}} | more), "utf-8")
    return path


def look(*args: str | Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, ANSWERS, *args], check=False, capture_output=True, text=True)
    assert not done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("got", "row", "code", "says"),
    [
        ([5, 6], {6: -0.1, 7: -3.0}, 0, "the answers are equal"),
        ([5, 6], {6: -0.1005, 7: -3.0}, 0, "the answers are equal, log-probabilities within 0.0005"),
        (
            [5, 6],
            {6: -0.2, 7: -3.0},
            1,
            "DIFFERENT: at token 1 of the answer the log-probability of token 6 is -0.2, and -0.1 of a cold server: "
            "0.1 apart, 100 times the band of 0.001",
        ),
        ([5, 7], {6: -3.0, 7: -0.1}, 1, "token 1 is 7, and 6 of a cold server, which prefers it by 2.9"),
        ([5, 8], {8: -0.1}, 1, "DIFFERENT"),
    ],
)
def test_two_answers(tmp_path: Path, got: list[int], row: dict[int, float], code: int, says: str) -> None:
    cold = written(tmp_path / "cold", [5, 6], {5: -0.1}, {6: -0.1, 7: -3.0})
    ours = written(tmp_path / "got", got, {5: -0.1}, row)
    found, text = look("compare", ours, cold, "0.001", "0.05")
    assert found == code and says in text


def test_what_is_no_number_differs(tmp_path: Path) -> None:
    cold = written(tmp_path / "cold", [6], {6: -0.1})
    ours = written(tmp_path / "got", [6], {})
    ours.write_text(
        '{"tokens": [6], "completion_probabilities": [{"id": 6, "top_logprobs": [{"id": 6, "logprob": null}]}]}',
        "utf-8",
    )
    assert look("compare", ours, cold, "0.001", "0.05") == (
        1,
        "DIFFERENT: at token 0 of the answer the log-probability of token 6 is nan, and -0.1 of a cold server: inf "
        "apart\n",
    )


def test_what_cannot_be_read_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "odd").write_text("<html>", "utf-8")
    assert look("compare", tmp_path / "odd", tmp_path / "odd", "0", "0")[0] == 2
    assert look("show", tmp_path / "nothing")[0] == 2


def test_a_near_tie_is_none(tmp_path: Path) -> None:
    cold = written(tmp_path / "cold", [6], {6: -0.7000, 7: -0.7010})
    assert look("compare", written(tmp_path / "got", [7], {7: -0.7}), cold, "0.001", "0.05")[0] == 0


def test_a_drafted_token_has_no_probabilities(tmp_path: Path) -> None:
    cold = written(tmp_path / "cold", [6, 5], {6: -0.1, 7: -3.0}, {5: -0.1})
    assert look("compare", written(tmp_path / "got", [6, 5], {}, {}), cold, "0.001", "0.05")[0] == 0
    assert look("compare", written(tmp_path / "got", [7, 5], {}, {}), cold, "0.001", "0.05")[0] == 1


def test_answers_that_are_none(tmp_path: Path) -> None:
    cold = written(tmp_path / "cold", [6], {6: -0.1})
    (tmp_path / "error").write_text('{"error": {"code": 500, "message": "odd"}}', "utf-8")
    (tmp_path / "empty").touch()
    code, text = look("compare", tmp_path / "error", cold, "0.001", "0.05")
    assert code == 1 and "error 500: odd" in text
    assert look("compare", cold, tmp_path / "error", "0.001", "0.05")[0] == 2
    assert look("compare", tmp_path / "empty", cold, "0.001", "0.05")[0] == 2


def test_a_stream_that_was_left(tmp_path: Path) -> None:
    parts = [f"data: {json.dumps({'tokens': [t], 'completion_probabilities': []})}\n\n" for t in (4, 5)]
    (tmp_path / "stream").write_text("".join(parts), "utf-8")
    assert look("show", tmp_path / "stream")[1] == "2 tokens: 4 5; then the client went away\n"


def test_drafts_and_slot_actions(tmp_path: Path) -> None:
    drafted = written(tmp_path / "got", [1], timings={"draft_n": 9, "draft_n_accepted": 4, "cache_n": 3})
    for n, code, says in ((4, 0, "not reproduced"), (5, 1, "FEWER: 4 of 9 drafted tokens accepted; a server that")):
        clean = written(tmp_path / "clean", [1], timings={"draft_n": 8, "draft_n_accepted": n})
        found, text = look("accepted", drafted, clean)
        assert found == code and text.startswith(says) and text.endswith(f"accepts {n} of 8\n")
    assert look("accepted", drafted, written(tmp_path / "clean", [2], timings={"draft_n_accepted": 9}))[0] == 2
    (tmp_path / "saved").write_text('{"n_saved": 5}', "utf-8")
    (tmp_path / "error").write_text('{"error": {"code": 400, "message": "odd"}}', "utf-8")
    assert [look("slot", tmp_path / "saved", x)[0] for x in ("done", "refused", "5", "6")] == [1, 0, 1, 0]
    assert [look("slot", tmp_path / "error", x)[0] for x in ("done", "refused", "5")] == [0, 1, 0]


def test_a_file_is_put_together_anew(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "b").write_bytes(b"abc")
    assert look("damage", tmp_path, "a", json.dumps([["a", 0, 3], "5a5a", ["b", 1, 3]]))[0] == 0
    assert (tmp_path / "a").read_bytes() == b"012ZZbc"


def test_a_recipe_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="version"):
        model.files(ServerScenario(model=ModelRef(recipe="llama", version=999), requests=()))
    assert model.files(ServerScenario(model=ModelRef(path="x.gguf"), requests=())) == {}
