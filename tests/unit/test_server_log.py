"""The log of llama-server, in lines that it wrote: what is read of them, and for which task."""

import pytest

from subjects.server import log
from subjects.server.trace import Deed, Event

# As llama-server wrote it: a prompt goes on from a checkpoint, an older one makes room.
GOES_ON = """\
I srv  update_slots: all slots are idle
I slot get_availabl: id  0 | task -1 |  - checking sim = 0.932 (55/59) > 0.100
I slot get_availabl: id  0 | task -1 | selected slot by LCP similarity, f_sim_best = 0.932 (> 0.100 thold), f_keep = 0.846
I slot launch_slot_: id  0 | task -1 | sampler params: 
\trepeat_last_n = 64, repeat_penalty = 1.000, frequency_penalty = 0.000, presence_penalty = 0.000
I slot launch_slot_: id  0 | task 21 | processing task, is_child = 0
I slot   operator(): id  0 | task 21 | new prompt, n_ctx_slot = 512, n_keep = 0, task.n_tokens = 59
I slot   operator(): id  0 | task 21 | checking checkpoint with [53, 53] against 55...
I slot   operator(): id  0 | task 21 | restored context checkpoint (pos_min = 53, pos_max = 53, n_tokens = 54, n_past = 52, size = 0.006 MiB)
I slot   operator(): id  0 | task 21 | cached n_tokens = 54, memory_seq_rm [54, end)
W slot create_check: id  0 | task 21 | erasing old context checkpoint (pos_min = 46, pos_max = 46, n_tokens = 47, size = 0.006 MiB)
I slot create_check: id  0 | task 21 | superseding context checkpoint at n_tokens = 54
I slot create_check: id  0 | task 21 | created context checkpoint 1 of 2 (pos_min = 53, pos_max = 53, n_tokens = 54, size = 0.006 MiB)
I slot   operator(): id  0 | task 21 | cached n_tokens = 55, memory_seq_rm [55, end)
I slot print_timing: id  0 | task 21 | prompt eval time =       0.43 ms /     5 tokens (    0.09 ms per token, 11574.07 tokens per second)
I slot      release: id  0 | task 21 | stop processing: n_tokens = 66, truncated = 0
"""  # noqa: E501, W291
# A prompt goes into the prompt cache, and another one comes out of it.
COMES_BACK = """\
I slot get_availabl: id  0 | task -1 | selected slot by LRU, t_last = 35582301308
I srv  get_availabl: updating prompt cache
I srv   prompt_save:  - saving prompt with length 37, total state size = 0.025 MiB (draft: 0.000 MiB)
I srv          load:  - looking for better prompt, base f_keep = 0.000, f_sim = 0.000
I srv          load:    - prompt with length      66, lcp =      66, f_keep = 1.000, f_sim = 0.930
I srv          load:  - found better prompt with f_keep = 1.000, f_sim = 0.930
I srv        update:  - cache state: 1 prompts, 0.038 MiB (limits: 8.000 MiB, 512 tokens, 7892 est)
I slot launch_slot_: id  0 | task 42 | processing task, is_child = 0
I slot   operator(): id  0 | task 42 | new prompt, n_ctx_slot = 512, n_keep = 0, task.n_tokens = 71
I slot   operator(): id  0 | task 42 | cached n_tokens = 66, memory_seq_rm [66, end)
"""
# One slot is taken, and the other one, which is idle, goes into the prompt cache.
IDLE = """\
I slot launch_slot_: id  1 | task 7 | processing task, is_child = 0
I slot   operator(): id  1 | task 7 | new prompt, n_ctx_slot = 256, n_keep = 0, task.n_tokens = 32
I slot   operator(): id  1 | task 7 | accepted  3/ 3 draft tokens
I slot   operator(): id  1 | task 7 | accepted  1/ 3 draft tokens
I slot get_availabl: id  0 | task -1 | selected slot by LRU, t_last = -1
I srv  get_availabl: updating prompt cache
I slot launch_slot_: id  0 | task 18 | processing task, is_child = 0
I slot process_sing: id  1 | task -1 | saving idle slot to prompt cache
I srv   prompt_save:  - saving prompt with length 47, total state size = 0.043 MiB (draft: 0.013 MiB)
I slot   operator(): id  0 | task 18 | new prompt, n_ctx_slot = 256, n_keep = 0, task.n_tokens = 9
I slot   operator(): id  0 | task 18 | cached n_tokens = 0, memory_seq_rm [0, end)
"""
# Two tasks under way fill the cache that all slots share, and an idle slot is purged.
FULL = """\
I slot launch_slot_: id  0 | task 29 | processing task, is_child = 0
I slot   operator(): id  0 | task 29 | new prompt, n_ctx_slot = 256, n_keep = 0, task.n_tokens = 110
I slot   operator(): id  0 | task 29 | cached n_tokens = 0, memory_seq_rm [0, end)
I srv  server_strea: conv_id= (empty=1)
I slot get_availabl: id  1 | task -1 | selected slot by id (1)
I slot get_availabl: id  1 | task -1 |  - checking sim = 0.000 (0/110) > 0.100
I slot launch_slot_: id  1 | task 31 | processing task, is_child = 0
I slot   operator(): id  1 | task 31 | new prompt, n_ctx_slot = 256, n_keep = 0, task.n_tokens = 110
I slot   operator(): id  1 | task 31 | cached n_tokens = 0, memory_seq_rm [0, end)
W decode: failed to find a memory slot for batch of size 30
W srv  try_clear_id: purging slot 2 with 47 tokens
I slot prompt_clear: id  2 | task -1 | clearing prompt with 47 tokens
W srv        decode: failed to find free space in the KV cache, retrying with smaller batch size, off = 0, n_batch = 64, ret = 1
I slot      release: id  0 | task 29 | stop processing: n_tokens = 117, truncated = 0
I slot      release: id  1 | task 31 | stop processing: n_tokens = 117, truncated = 0
I srv  update_slots: all slots are idle
I slot get_availabl: id  2 | task -1 | selected slot by id (2)
I slot get_availabl: id  2 | task -1 |  - skipping, slot is empty
I slot launch_slot_: id  2 | task 40 | processing task, is_child = 0
I slot   operator(): id  2 | task 40 | new prompt, n_ctx_slot = 256, n_keep = 0, task.n_tokens = 9
I slot   operator(): id  2 | task 40 | cached n_tokens = 0, memory_seq_rm [0, end)
"""  # noqa: E501
LINES: list[tuple[str, Event]] = [
    ("created context checkpoint 1 of 2 (pos_min = 19, pos_max = 19, n_tokens = 20, size = 0.006 MiB)",
     Event("checkpoint", 0, 20)),
    ("erased invalidated context checkpoint (pos_min = 53, pos_max = 53, n_tokens = 54, n_swa = 0, pos_next = 0, "
     "size = 0.006 MiB)", Event("erased", 0, 54)),
    ("erasing context checkpoint too close to an earlier one (pos_min = 54, pos_max = 54, n_tokens = 55, size = 0.006 "
     "MiB)", Event("erased", 0, 55)),
    ("forcing full prompt re-processing due to lack of cache data (likely due to SWA or hybrid/recurrent memory, see "
     "https://github.com/ggml-org/llama.cpp/pull/13194#issuecomment-2868343055)", Event("reset", 0)),
    ("clearing prompt with 41 tokens", Event("cleared", 0, 41)),
    ("accepted  1/ 3 draft tokens (restore checkpoint)", Event("replay", 0, 1, 3)),
    ("accepted 12/16 draft tokens", Event("round", 0, 12, 16)),
]  # fmt: skip


def test_what_was_done_for_a_task_is_read_in_order() -> None:
    (told,) = log.read(GOES_ON)
    assert (told.task, told.slot, told.prompt) == (21, 0, 59)
    # of a checkpoint of 54 tokens 52 are used; how many are kept is said again with the next batch
    assert told.events == [
        Event("restored", 0, 52, 54),
        Event("kept", 0, 54),
        Event("erased", 0, 47),
        Event("checkpoint", 0, 54),
    ]


def test_what_is_done_before_a_task_is_named_is_for_it() -> None:
    (told,) = log.read(COMES_BACK)
    assert told.events == [Event("cached", -1, 37), Event("loaded"), Event("kept", 0, 66)]


def test_an_idle_slot_is_cached_by_the_task_that_has_begun() -> None:
    first, second = log.read(IDLE)
    assert first.events == [Event("round", 1, 3, 3), Event("round", 1, 1, 3)]
    assert second.events == [Event("cached", 1, 47), Event("kept", 0, 0)]
    assert [t.task for t in log.read(IDLE + COMES_BACK)] == [7, 18, 42]
    assert log.read(IDLE + COMES_BACK)[2].events == log.read(COMES_BACK)[0].events


def test_what_befalls_a_batch_is_told_of_all_that_are_under_way() -> None:
    full = "failed to find free space in the KV cache, retrying with smaller batch size, off = 0, n_batch = 64, ret = 1"
    befell = [Event("kept", 0, 0), Event("cleared", 2, 47), Event("refused", text=full)]
    first, second, next_ = log.read(FULL)
    assert first.events == befell
    assert second.events == [Event("kept", 1, 0), *befell[1:]]
    assert next_.events == [Event("kept", 2, 0)]


def test_one_that_has_ended_is_not_told_of_the_next_batch() -> None:
    at = FULL.index("W decode")
    end = FULL.index("I slot      release")
    first, second, next_ = log.read(
        FULL[:at] + FULL[end:].replace("I srv  update_slots", FULL[at:end] + "I srv  up", 1)
    )
    assert (
        [e.what for e in first.events] == [e.what for e in second.events] == [e.what for e in next_.events] == ["kept"]
    )
    early = FULL[end:].replace("I slot      release: id  1", FULL[at:end] + "I slot      release: id  1", 1)
    first, second, _ = log.read(FULL[:at] + early)
    assert [e.what for e in first.events] == ["kept"]
    assert [e.what for e in second.events] == ["kept", "cleared", "refused"]


def test_a_state_that_is_not_taken_is_told_of_the_task_whose_slot_was_chosen() -> None:
    # with --cache-ram a draft's state may not fit (server-task.cpp)
    failed = "W srv          load: failed to restore state with size 4242\n"
    at = COMES_BACK.index("I srv        update:")
    more = (
        "W slot  prompt_load: id  0 | task -1 | failed to load prompt from cache\n"
        "I slot prompt_clear: id  0 | task -1 | clearing prompt with 37 tokens\n"
    )
    (told,) = log.read(COMES_BACK[:at] + failed + more + COMES_BACK[at:])
    assert [e.what for e in told.events] == ["cached", "loaded", "refused", "refused", "cleared", "kept"]


def test_what_is_done_to_a_busy_slot_is_told_of_the_task_under_way() -> None:
    at = COMES_BACK.index("I slot launch_slot_")
    busy = COMES_BACK[:at].replace("task -1", "task 21")
    end = GOES_ON.index("I slot print_timing")
    under_way, later = log.read(GOES_ON[:end] + busy + GOES_ON[end:] + GOES_ON.replace("task 21", "task 23"))
    assert [e.what for e in under_way.events][-2:] == ["cached", "loaded"]
    assert later.events == log.read(GOES_ON)[0].events


def test_erasing_a_slot_is_told_of_no_task() -> None:
    erased = "I slot prompt_clear: id  0 | task -1 | clearing prompt with 66 tokens\n"
    assert [t.events for t in log.read(GOES_ON + erased + COMES_BACK)] == [
        t.events for t in log.read(GOES_ON + COMES_BACK)
    ]


@pytest.mark.parametrize(("text", "event"), LINES)
def test_each_deed_has_its_line(text: str, event: Event) -> None:
    begun = "I slot launch_slot_: id  0 | task 5 | processing task, is_child = 0\n"
    (told,) = log.read(f"{begun}W slot   operator(): id  0 | task 5 | {text}\n")
    assert told.events == [event]


@pytest.mark.parametrize("level", "IWED")
def test_a_refusal_is_told_in_the_server_s_words(level: str) -> None:
    lines = f"{level} srv  update_slots: failed to find free space in the KV cache, retrying with smaller batch size\n"
    begun = "I slot launch_slot_: id  0 | task 5 | processing task, is_child = 0\n"
    (told,) = log.read(begun + lines)
    (event,) = told.events
    what: Deed = "refused"
    assert event.what == what
    assert event.text == "failed to find free space in the KV cache, retrying with smaller batch size"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing of a server",
        "I slot operator(): id 0 | task 5 | made a checkpoint of the context (n = 20)",
        "slot 0: created context checkpoint 1 of 2 (n_tokens = 20)",
        GOES_ON.replace("I slot", "I Slot").replace("W slot", "W Slot"),
        GOES_ON.replace("processing task", "task begins"),
    ],
)
def test_other_wording_is_not_read(text: str) -> None:
    assert log.read(text) == []


def test_a_deed_in_other_words_is_left_out() -> None:
    (told,) = log.read(GOES_ON.replace("restored context checkpoint", "took a context checkpoint"))
    assert [e.what for e in told.events] == ["kept", "erased", "checkpoint"]


def test_numbers_of_tasks_begin_anew_after_a_restart() -> None:
    again = GOES_ON.replace("n_tokens = 59", "n_tokens = 60")
    assert [(t.task, t.prompt, len(t.events)) for t in log.read(GOES_ON + again)] == [(21, 59, 4), (21, 60, 4)]
