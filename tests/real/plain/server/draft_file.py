"""A slot that is restored from a file answers 500, where the server drafts with a memory of its own (draft-simple).

The slot file has the target's state only: server-context.cpp, SERVER_TASK_TYPE_SLOT_RESTORE, leaves in the draft's
context what the slot's last conversation had there. The next completion is decoded in both, from where the file ends.
A conversation that was shorter leaves a gap in the draft's positions: "failed to process speculative batch". (One that
was longer leaves the draft with another conversation, and fewer drafts are accepted.)
"""

import json

from _server import CONTROL, DRAFT, Server

LONG = [(11 * i * i + 7 * i + 5) % 62 for i in range(40)]
SHORT = [(13 * i * i + 3 * i + 40) % 62 for i in range(20)]

with Server(
    f"--parallel 1 --cache-ram 0 --spec-type draft-simple --spec-draft-n-max 3 --spec-draft-model {DRAFT}"
) as server:
    server.ask(LONG, 1)
    server.slot("save", "slot.bin")
    server.ask(LONG[::-1] if CONTROL else SHORT, 1)
    print(f"restore: HTTP {server.slot('restore', 'slot.bin')}")
    response = server.begin([*LONG, 1, 2, 3]).getresponse()
    document = json.load(response)
    print("must be HTTP 200")
    print(f"is      HTTP {response.status} {document.get('error', {}).get('message', '')}")
    raise SystemExit(int(response.status != 200))
