"""A slot file that is cut ends the server that is to restore it.

llama_context::state_seq_load_file does not check how much the file holds before it reads the state; what is short of it
ends in llama-context.cpp: GGML_ASSERT(nread <= state_size) failed. An error is what must come.
"""

import os

from _server import CONTROL, Server, ends

with Server("--parallel 1 --cache-ram 0") as server:
    server.ask([(11 * i * i + 7 * i + 5) % 62 for i in range(10)])
    server.slot("save", "slot.bin")
    path = os.path.join(server.saves.name, "slot.bin")
    if not CONTROL:
        os.truncate(path, os.path.getsize(path) - 1)
    status = server.slot("restore", "slot.bin")
    print(f"HTTP {status}")
    ends(server.last_words() if status is None else None)
