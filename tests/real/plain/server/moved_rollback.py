"""An answer that is drafted is wrong where other slots process prompts in the same batch (qwen35, draft-mtp).

The library's moved-rollback through the server, which keeps the last recurrent states to roll back to where a draft is
accepted in part. Slots 0, 2 and 1 have cells 0, 1 and 2. Slot 2 drafts, and slots 0 and 1 get prompts, as one request.
The batch is split: first as many tokens of each as slot 2 has, then the rest of the prompts, for which
llama_memory_recurrent::find_slot makes the cells of slots 0 and 1 neighbours and moves that of slot 2, but not the
states that slot 2 is to be rolled back to. The prompts are sent for as long as the answer takes; should the server be
so fast that none met a draft accepted in part, all is done again.
"""

import json

from _server import CONTROL, Server, answer, cold, judge

FLAGS = "--parallel 3 --ctx-size 1536 --cache-ram 0 --ctx-checkpoints 0"
DRAFTING = " --spec-type draft-mtp --spec-draft-n-max 3"
TEXTS = [[(11 * i * i + 7 * i + 5 + k * (17 + 3 * i)) % 62 for i in range(16)] for k in range(40)]
N = 400

must = cold(FLAGS, TEXTS[2], N)
for _ in range(20):
    with Server(FLAGS + DRAFTING) as server:
        for k in (0, 2, 1):
            server.ask(TEXTS[k], 1, id_slot=k)
        drafting = server.begin(TEXTS[2], N, id_slot=2, ignore_eos=True)
        for k in range(4, 40, 2):
            both = server.post("/completion", {"prompt": TEXTS[k : k + (1 if CONTROL else 2)], "n_predict": 1})
            both.getresponse().read()
        is_ = answer([json.load(drafting.getresponse())])
    if is_[0] != must[0]:
        break
judge(is_, must)
