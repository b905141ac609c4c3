"""A context checkpoint that is made where another one was restored lacks a position of the window (sliding window).

A checkpoint of n tokens holds the window behind its last one. Restored, it goes on from token n - 1, as a token must be
processed: for this its positions just suffice. The checkpoint that is made there, of n - 1 tokens, holds one position
less. It is taken all the same: server-context.cpp holds its pos_min against where the prompt goes on (pos_next), not
against where the checkpoint will put it. Each time another position is lost. The prompt cache leaves out what is
outside of the window, so that the checkpoint is needed.
"""

from _server import CONTROL, Server, cold, judge

FLAGS = "--parallel 1 --ctx-checkpoints 1 --checkpoint-min-step 0 --cache-ram 1"
TEXT = [(11 * i * i + 7 * i + 5) % 62 for i in range(21)]
OTHER = [(13 * i * i + 3 * i + 40) % 62 for i in range(6)]

with Server(FLAGS) as server:
    server.ask(TEXT, 1)
    if not CONTROL:
        server.ask(OTHER, 1)
        server.ask(TEXT[:20], 1)
    server.ask(OTHER, 1)
    judge(server.ask(TEXT[:20]), cold(FLAGS, TEXT[:20]))
