"""A slot file without the cells of its tokens is restored, and the next completion ends the server (mamba2).

A file that says 0 recurrent cells, and has none, is well formed for llama_state_seq_load_file, and the server answers
200 with the number of tokens in it. The completion that goes on behind them finds nothing in the memory:
server-context.cpp: "pos_min == -1, but n_past > 0 - should not happen". An error is what must come, as for a file with
more tokens than a slot holds.
"""

import os
import struct

from _server import CONTROL, Server, ends

PROMPT = [(11 * i * i + 7 * i + 5) % 62 for i in range(6)]


def without_cells(data):
    """The file with the count of cells 0, and without the cells and their rows in every tensor."""
    at = 12 + 4 * struct.unpack_from("<I", data, 8)[0]  # magic, version, tokens
    n_cells, _, _, _, n_layer = struct.unpack_from("<IiIII", data, at)
    assert n_cells == 1
    out = data[:at] + bytes(4) + data[at + 12 : at + 20]
    at += 20
    for _ in range(2 * n_layer):
        _, row = struct.unpack_from("<iQ", data, at)
        out += data[at : at + 12]
        at += 12 + row
    assert at == len(data)
    return out


with Server("--parallel 1 --cache-ram 0") as server:
    server.ask(PROMPT, 2)
    server.slot("save", "slot.bin")
    path = os.path.join(server.saves.name, "slot.bin")
    with open(path, "rb+") as file:
        data = file.read()
        if not CONTROL:
            file.seek(0)
            file.truncate()
            file.write(without_cells(data))
    print(f"restore: HTTP {server.slot('restore', 'slot.bin')}")
    try:
        server.ask([*PROMPT, 1, 2], 1)
        ends(None)
    except OSError:
        ends(server.last_words())
