"""A slot file that claims two recurrent cells ends the server that restores it (mamba2).

The library's recurrent-cells through the server: llama_memory_recurrent::state_read_meta() makes one cell in
find_slot() for all cells that a state claims for its sequence, and asserts that there are as many as are claimed. An
error is what must come, as for a file that claims more cells than there are. Here the cell of slot 0 is in the file
twice, and so is its row in every tensor.
"""

import os
import struct

from _server import CONTROL, Server, ends

PROMPT = [(11 * i * i + 7 * i + 5) % 62 for i in range(6)]


def doubled(data):
    """The file with its recurrent cell twice."""
    at = 12 + 4 * struct.unpack_from("<I", data, 8)[0]  # magic, version, tokens
    n_cells, pos, n_seq_id, _, n_layer = struct.unpack_from("<IiIII", data, at)
    assert (n_cells, n_seq_id) == (1, 0)
    cell = struct.pack("<iI", pos, 0)
    out = data[:at] + struct.pack("<I", 2) + 2 * cell + data[at + 12 : at + 20]
    at += 20
    for _ in range(2 * n_layer):
        _, row = struct.unpack_from("<iQ", data, at)
        out += data[at : at + 12] + 2 * data[at + 12 : at + 12 + row]
        at += 12 + row
    assert at == len(data)
    return out


with Server("--parallel 2 --ctx-size 1024 --cache-ram 0 --no-kv-unified") as server:
    server.ask(PROMPT, 2, id_slot=1)
    server.ask(PROMPT, 2, id_slot=0)
    server.slot("save", "slot.bin")
    path = os.path.join(server.saves.name, "slot.bin")
    with open(path, "rb+") as file:
        data = file.read()
        if not CONTROL:
            file.seek(0)
            file.truncate()
            file.write(doubled(data))
    status = server.slot("restore", "slot.bin")
    print(f"restore: HTTP {status}")
    ends(None if status else server.last_words())
