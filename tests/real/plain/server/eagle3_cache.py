"""A prompt that comes out of the prompt cache answers 500, where draft-eagle3 drafts.

common_speculative_impl_draft_eagle3 keeps back the last token of what it has seen: the draft's memory ends one before
the target's, and the next call bridges that with a row that is carried for the slot. The prompt cache saves both
memories and not the row, so that what is loaded into another slot, or after another conversation, has a gap that nobody
bridges: "failed to process speculative batch". Here a conversation of slot 0 goes on in slot 1.
"""

import json

from _server import CONTROL, DRAFT, Server

FLAGS = "--parallel 2 --ctx-size 1024 --cache-ram 1 --no-cache-idle-slots --no-kv-unified"
FLAGS += f" --spec-type draft-eagle3 --spec-draft-n-max 3 --spec-draft-model {DRAFT}"
TEXT = [(11 * i * i + 7 * i + 5) % 62 for i in range(40)]
OTHER = [(13 * i * i + 3 * i + 40) % 62 for i in range(20)]

with Server(FLAGS) as server:
    status = []
    for k in range(8):
        prompt = [*TEXT[k:], *TEXT[:k]]
        answer, _ = server.ask(prompt, 4 + k, id_slot=0)
        if not CONTROL:
            server.ask(OTHER[k:], 1, id_slot=0)
        response = server.begin([*prompt, *answer, 1, 2, 3], id_slot=0 if CONTROL else 1).getresponse()
        document = json.load(response)
        status.append(response.status)
    print(f"must be HTTP 200\nis      HTTP {status} {document.get('error', {}).get('message', '')}")
    raise SystemExit(int(any(s != 200 for s in status)))
