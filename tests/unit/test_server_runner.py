"""What is read of llama-server's documents, which task of the log a reply was, and what is left of a log."""

from __future__ import annotations

from typing import Any

import pytest

from subjects.server import runner
from subjects.server.client import NoAnswer
from subjects.server.planted import PLANTED, Stale
from subjects.server.runner import NO_ANSWER, NO_NUMBER, attribute, body_of, complete, error_of, session, words
from subjects.server.trace import Event, Reply, ServerTrace

ANSWER = {
    "tokens": [5, 6],
    "content": "0506",
    "id_slot": 1,
    "timings": {"cache_n": 7, "prompt_n": 3, "draft_n": 6, "draft_n_accepted": 2},
    "completion_probabilities": [
        {"id": 5, "top_logprobs": [{"id": 5, "logprob": -0.5}, {"id": 6, "logprob": None}]},
        {"id": 6, "top_logprobs": []},
    ],
}
CHAT = {
    "choices": [{
        "message": {"role": "assistant", "content": "north"},
        "logprobs": {"content": [{"id": 9, "top_logprobs": [{"id": 9, "logprob": -0.25}]}]},
    }],
    "usage": {"prompt_tokens": 12},
    "timings": {"cache_n": 4},
}  # fmt: skip


class FakeClient:
    """Answers with what it is given."""

    def __init__(self, answer: Any, status: int = 200):
        self.given, self.status = answer, status
        self.asked: list[tuple[str, dict[str, Any], int | None]] = []

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append((path, body, None))
        if isinstance(self.given, Exception):
            raise self.given
        return self.status, self.given

    def stream(self, path: str, body: dict[str, Any], most: int) -> tuple[int, list[Any]]:
        self.asked.append((path, body, most))
        return self.status, self.given[:most]


def ask(answer: Any, status: int = 200, *, cancel: int | None = None, **fields: Any) -> tuple[Reply, FakeClient]:
    asked = Reply(request=0, predict=2, **({"prompt": (1, 2, 3)} | fields))
    client = FakeClient(answer, status)
    return complete(client, body_of(asked), asked, cancel), client  # type: ignore[arg-type]


def test_a_completion_is_read() -> None:
    reply, client = ask(ANSWER)
    assert reply.answered
    assert (reply.tokens, reply.text, reply.slot) == ((5, 6), "0506", 1)
    assert reply.tops == (((5, -0.5), (6, NO_NUMBER)), ())
    assert (reply.cached, reply.processed, reply.drafted, reply.accepted, reply.length) == (7, 3, 6, 2, 3)
    ((path, body, _),) = client.asked
    assert path == "/completion"
    assert body["prompt"] == [1, 2, 3]
    assert (body["n_predict"], body["temperature"]) == (2, 0.0)


@pytest.mark.parametrize("answer", [None, [], "x", {"tokens": "abc"}, {"tokens": [1], "timings": [1]}, {"content": ""}])
def test_what_is_no_answer_is_told_as_a_status(answer: Any) -> None:
    reply, _ = ask(answer)
    assert reply.status == NO_ANSWER
    assert reply.error.startswith("the answer is none: ")


def test_a_chat_is_read() -> None:
    messages = (("user", "red"), ("assistant", "0A"), ("user", "blue"))
    reply, client = ask(CHAT, prompt=(), messages=messages)
    assert (reply.tokens, reply.text, reply.tops) == ((9,), "north", (((9, -0.25),),))
    assert (reply.cached, reply.length) == (4, 12)
    ((path, body, _),) = client.asked
    assert path == "/v1/chat/completions"
    assert [(m["role"], m["content"]) for m in body["messages"]] == [*messages]


@pytest.mark.parametrize(("cancel", "tokens"), [(0, ()), (1, (1,)), (2, (1, 2)), (9, (1, 2, 3))])
def test_a_client_goes_away_after_so_many_tokens(cancel: int, tokens: tuple[int, ...]) -> None:
    reply, client = ask([{"tokens": [t], "content": f"{t}"} for t in (1, 2, 3)], cancel=cancel)
    assert reply.cancelled
    assert not reply.answered
    assert reply.tokens == tokens
    assert client.asked[0][2] == cancel


def test_what_is_no_answer_is_told_as_an_error() -> None:
    refused, _ = ask({"error": {"message": "the request exceeds the available context size"}}, 400)
    assert (refused.status, refused.error) == (400, "the request exceeds the available context size")
    lost, _ = ask(NoAnswer("ConnectionResetError: gone"))
    assert (lost.status, lost.error) == (0, "ConnectionResetError: gone")
    # an error in the middle of a stream that began well
    late, _ = ask([{"tokens": [1]}, {"error": {"message": "decode failed"}}], cancel=5)
    assert (late.status, late.error, late.tokens) == (500, "decode failed", (1,))


@pytest.mark.parametrize(
    ("document", "text"),
    [({"error": {"message": "m"}}, "m"), ({"error": "e"}, "e"), ({"other": 1}, "{'other': 1}"), ("text", "text"),
     (None, "None"), ({"error": {"message": "x" * 999}}, "x" * 300)],
)  # fmt: skip
def test_an_error_s_message(document: Any, text: str) -> None:
    assert error_of(document) == text


def test_words_of_a_stream_are_the_same_every_time() -> None:
    assert words(3, 2, 4).split() == words(3, 0, 6).split()[2:]
    assert words(3, 0, 12) != words(4, 0, 12)


def test_of_a_log_is_kept_what_was_said_between_start_and_end() -> None:
    log = (
        "0.00.1 I srv  main: loading model\n"
        "0.00.2 I srv  main: server is listening on http://127.0.0.1:4711\n"
        "0.00.3 I slot launch_slot_: id  0 | task 0 | processing task, is_child = 0\n"
        "\tcontinued = 1\n"
        "0.00.4 I srv  main: cleaning up before exit...\n"
        "0.00.5 I said after it\n"
    )
    one = "I slot launch_slot_: id  0 | task 0 | processing task, is_child = 0\n\tcontinued = 1\n"
    assert session(log) == one
    assert session(log + log) == one + one
    # one that never came so far says why
    assert session("0.00.1 I srv  main: loading model\n") == "I srv  main: loading model\n"


def line(slot: int, task: int, text: str) -> str:
    return f"I slot   operator(): id  {slot} | task {task} | {text}\n"


def task(slot: int, number: int, length: int, kept: int) -> str:
    return (
        line(slot, number, "processing task, is_child = 0")
        + line(slot, number, f"new prompt, n_ctx_slot = 512, n_keep = 0, task.n_tokens = {length}")
        + line(slot, number, f"cached n_tokens = {kept}, memory_seq_rm [{kept}, end)")
    )


def completion(request: int, length: int, part: int = 0, slot: int = -1) -> Reply:
    return Reply(request=request, part=part, status=200, prompt=(1,) * length, length=length, slot=slot)


def test_replies_get_the_task_of_their_length_and_slot() -> None:
    trace = ServerTrace(
        replies=[
            completion(0, 9),
            Reply(request=1, status=200, slot=0),
            completion(2, 20, 0, slot=1),
            completion(2, 20, 1, slot=0),
            completion(2, 15, 2),
        ],
        log=task(0, 0, 9, 0) + task(0, 4, 20, 9) + task(2, 5, 15, 1) + task(1, 6, 20, 2),
    )
    attribute(trace)
    assert [(r.task, r.slot, r.events) for r in trace.replies] == [
        (0, 0, (Event("kept", 0, 0),)),
        (-1, 0, ()),
        (6, 1, (Event("kept", 1, 2),)),
        (4, 0, (Event("kept", 0, 9),)),
        (5, 2, (Event("kept", 2, 1),)),
    ]


def test_a_chat_that_was_cancelled_gets_the_next_task() -> None:
    chat = Reply(request=1, status=200, messages=(("user", "red"),), cancelled=True)
    refused = Reply(request=2, status=400, messages=(("user", "red"),))
    trace = ServerTrace(replies=[completion(0, 9), chat, refused, completion(3, 7)])
    trace.log = task(0, 0, 9, 0) + task(0, 4, 12, 2) + task(0, 9, 7, 3)
    attribute(trace)
    assert [r.task for r in trace.replies] == [0, 4, -1, 9]


def test_a_log_in_other_words_leaves_replies_as_they_are() -> None:
    trace = ServerTrace(replies=[completion(0, 9)], log="another version\n")
    attribute(trace)
    assert (trace.replies[0].task, trace.replies[0].events) == (-1, ())


def test_a_plant_changes_what_is_sent_where_a_beginning_was_sent_before() -> None:
    plant = Stale()
    first, again = Reply(request=0, prompt=(*range(12),)), Reply(request=1, prompt=(*range(12), 99))
    body = {"prompt": [*first.prompt]}
    assert plant.request(body, first, 50) is body
    assert plant.request({"prompt": [*again.prompt]}, again, 50)["prompt"] == [*range(6), 7, *range(7, 12), 99]
    assert "server-unverified" in PLANTED
    with pytest.raises(KeyError):
        runner.run(None, None, None, fault="server-other")  # type: ignore[arg-type]
