"""A request for a slot that is busy changes what the slot holds, in the middle of its answer.

server-context.cpp, get_available_slot: with id_slot the slot is taken whether or not it is processing, and goes through
the update of the prompt cache: what the slot holds is saved, and a prompt that fits the request better is loaded in its
place. Only then the request is deferred, as the slot is busy. The answer that is under way goes on behind the K/V of
the other conversation. The second request is sent when the log says that the first one has its slot; should the answer
be done before it comes, all is done again.
"""

import json
import re

from _server import CONTROL, Server, answer, cold, judge

FLAGS = "--parallel 2 --ctx-size 1024 --cache-ram 1 --no-cache-idle-slots --no-kv-unified"
FIRST = [(11 * i * i + 7 * i + 5) % 62 for i in range(24)]
SECOND = [(13 * i * i + 3 * i + 40) % 62 for i in range(8)]
N = 480

for _ in range(50):
    with Server(FLAGS) as server:
        server.ask(SECOND, 1, id_slot=0)
        first = server.begin(FIRST, N, id_slot=0, ignore_eos=True)
        while len(re.findall(r"\| new prompt", server.said())) < 2:
            pass
        second = server.begin(SECOND, 1, id_slot=1 if CONTROL else 0)
        is_ = answer([json.load(first.getresponse())])
        second.getresponse()
        said = server.said()
    if CONTROL or re.search(r"task \d+ \| selected slot by id", said):
        break
judge(is_, cold(FLAGS, FIRST, N))
