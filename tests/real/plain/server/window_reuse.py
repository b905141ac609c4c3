"""With --swa-full and --kv-unified a conversation that goes back is answered wrongly (sliding window, two slots).

With --swa-full the cache keeps what has left the window, so that a prompt can go back, and the server makes no
checkpoints and takes the window for 0. But llama_kv_cache::find_slot takes cells outside of their sequence's window for
free in a cache of full size, too: the tokens of another slot go into them, while other cells are empty. The server goes
back behind what is gone. Here slot 1's 60 tokens take the 20 cells of its last prompt and then the first 40 of slot 0.
"""

from _server import CONTROL, Server, cold, judge

FLAGS = "--parallel 2 --swa-full --cache-ram 0" + (" --no-kv-unified" if CONTROL else " --kv-unified")
TEXTS = [[(11 * i * i + 7 * i + 5 + k * (17 + 3 * i)) % 62 for i in range(90)] for k in range(4)]
BACK = TEXTS[0][:50] + TEXTS[2][:16]

with Server(FLAGS) as server:
    server.ask(TEXTS[1][:20], 1, id_slot=1)
    server.ask(TEXTS[0], 1, id_slot=0)
    server.ask(TEXTS[3][:60], 1, id_slot=1)
    judge(server.ask(BACK, id_slot=0), cold(FLAGS, BACK))
