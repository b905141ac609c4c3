"""A slot that is restored from a file drafts worse, where the server drafts with a memory of its own (draft-mtp).

The slot file has the target's state only: server-context.cpp, SERVER_TASK_TYPE_SLOT_RESTORE, leaves in the draft's
context what is there: nothing, after the slot was erased or in a server that was started again. draft-mtp drafts all
the same, from the tokens behind those of the file. The answers are right, the drafts are not. A server that was asked
nothing before drafts behind the same tokens, and as many of its drafts must be accepted.
"""

import json

from _server import CONTROL, Server

FLAGS = "--parallel 1 --cache-ram 0 --spec-type draft-mtp --spec-draft-n-max 3"
TEXT = [(11 * i * i + 7 * i + 5) % 62 for i in range(40)]


def ask(server, prompt, predict=16):
    """The answer, and how many drafted tokens of it were accepted."""
    document = json.load(server.begin(prompt, predict).getresponse())
    return document["tokens"], document["timings"].get("draft_n_accepted", 0)


must, is_ = [], []
for k in range(16):
    text = [*TEXT[k:], *TEXT[:k]]
    with Server(FLAGS) as server:
        tokens, _ = ask(server, text, 2)
        prompt = [*text, tokens[0], 1, 2, 3]
        if not CONTROL:
            server.slot("save", "slot.bin")
            server.slot("erase", "slot.bin")
            server.slot("restore", "slot.bin")
        warm = ask(server, prompt)
    with Server(FLAGS) as server:
        clean = ask(server, prompt)
    assert warm[0] == clean[0]
    must.append(clean[1])
    is_.append(warm[1])
print(f"must be {must} drafts accepted\nis      {is_}\nin all, must be {sum(must)}, is {sum(is_)}")
raise SystemExit(int(sum(is_) < sum(must)))
