"""After a conversation went back, draft-mtp drafts from the hidden row of another position.

common_speculative_impl_draft_mtp carries the last hidden row of each slot (pending_h) to the next prompt. It offers no
state for it (get_state), so that a context checkpoint brings back the memories of target and draft and not the row, and
nothing tells it that the slot's tail was cut: the library's driver-cut. The answers are right, the drafts are not. Here
a conversation goes back to its first 12 tokens and on with others, 40 times; a server that was asked nothing before
drafts behind the same tokens, and as many of its drafts must be accepted.
"""

import json

from _server import CONTROL, Server

FLAGS = (
    "--parallel 1 --ctx-checkpoints 8 --checkpoint-min-step 0 --cache-ram 0 --spec-type draft-mtp --spec-draft-n-max 3"
)
TEXT = [(11 * i * i + 7 * i + 5) % 62 for i in range(16)]


def ask(server, prompt, predict=4):
    """The answer, and how many drafted tokens of it were accepted."""
    document = json.load(server.begin(prompt, predict).getresponse())
    return document["tokens"], document["timings"].get("draft_n_accepted", 0)


must, is_ = [], []
for k in range(40):
    with Server(FLAGS) as server:
        tokens, _ = ask(server, TEXT, 8)
        kept = [*TEXT, *tokens[:-1]] if CONTROL else TEXT[:12]
        prompt = [*kept, *[(13 * i * i + 3 * i + 5 * k) % 62 for i in range(4)]]
        warm = ask(server, prompt)
    with Server(FLAGS) as server:
        clean = ask(server, prompt)
    assert warm[0] == clean[0]
    must.append(clean[1])
    is_.append(warm[1])
print(f"must be {must} drafts accepted\nis      {is_}")
raise SystemExit(int(is_ != must))
