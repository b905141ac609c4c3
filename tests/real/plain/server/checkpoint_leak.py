"""A context checkpoint of another conversation is restored (hybrid and recurrent memory).

The same comparison as in checkpoint_window.py. The first prompt leaves a checkpoint of its first token, [0, 0]. The
second has no token in common with it: pos_next is 0, and the checkpoint stays, since pos_max (0) is not above it. The
third shares its first token with the second and goes on from that checkpoint: with the state of the first conversation.
"""

from _server import CONTROL, Server, cold, judge

FLAGS = "--parallel 1 --ctx-checkpoints 4 --checkpoint-min-step 0 --cache-ram 0"
THIRD = [9, 13]

with Server(FLAGS) as server:
    if not CONTROL:
        server.ask([5, 23, 3, 19, 28], 1)
    server.ask([9, 40], 1)
    judge(server.ask(THIRD), cold(FLAGS, THIRD))
