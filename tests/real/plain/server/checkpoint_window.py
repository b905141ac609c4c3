"""A context checkpoint of more tokens than the prompt has is restored (sliding window).

server-context.cpp, twice: checkpoints with `cur.pos_max > pos_next` are dropped, but one that holds a single token more
than the prompt has in common with the slot has pos_max == pos_next. It stays and is used. Here: the same prompt of 18
tokens twice leaves a checkpoint of 17 tokens; then its first 16 tokens are asked for. The window holds position 16
too, and lacks the first one that the prompt needs.
"""

from _server import CONTROL, Server, cold, judge

FLAGS = "--parallel 1 --ctx-checkpoints 1 --checkpoint-min-step 0 --cache-ram 0"
TEXT = [(11 * i * i + 7 * i + 5) % 62 for i in range(18)]

with Server(FLAGS) as server:
    server.ask(TEXT)
    if not CONTROL:
        server.ask(TEXT)
    judge(server.ask(TEXT[:16]), cold(FLAGS, TEXT[:16]))
