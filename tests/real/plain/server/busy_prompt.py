"""A request for a slot that is busy with a prompt makes the server work on that prompt for ever.

As in busy_slot.py, but the slot is not yet answering: its prompt of 300 tokens, two a batch, is replaced by the other
conversation's 400 tokens out of the prompt cache. The slot then holds more tokens than its prompt has, so that there is
nothing to add, and it never holds as many: the request is never answered, and the server goes round for as long as it
lives.
"""

import re

from _server import CONTROL, Server

FLAGS = (
    "--parallel 2 --ctx-size 1024 --cache-ram 1 --no-cache-idle-slots --no-kv-unified --batch-size 2 --ubatch-size 2"
)
FIRST = [(11 * i * i + 7 * i + 5) % 62 for i in range(300)]
SECOND = [(13 * i * i + 3 * i + 40) % 62 for i in range(400)]
ROUNDS = 5000

for _ in range(50):
    with Server(FLAGS) as server:
        server.ask(SECOND, 1, id_slot=0)
        server.begin(FIRST, 1, id_slot=0)
        while len(re.findall(r"\| new prompt", server.said())) < 2:
            pass
        server.begin(SECOND, 1, id_slot=1 if CONTROL else 0)
        while len(re.findall("stop processing", server.said())) < 3 and server.said().count("memory_seq_rm") < ROUNDS:
            pass
        stuck = server.said().count("memory_seq_rm") >= ROUNDS
    if CONTROL or stuck:
        break
print(f"must be done after some 350 rounds\nis      {'not done after' if stuck else 'done before'} {ROUNDS}")
raise SystemExit(int(stuck))
