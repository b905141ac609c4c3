"""With --swa-full a slot that is restored from a file answers wrongly when the conversation goes back (sliding window).

With --swa-full the cache keeps what has left the window, so that a prompt can go back, and the server makes no
checkpoints. But llama_kv_cache::state_write leaves out the cells that are outside of the window; after a restore they
are missing, and the server, which takes the window for 0, goes on behind them. A prompt that comes out of the prompt
cache (--cache-ram) lacks them too. Here the same prompt is asked again, which takes its last token anew.
"""

from _server import CONTROL, Server, cold, judge

FLAGS = "--parallel 1 --swa-full --cache-ram 0"
TEXT = [(11 * i * i + 7 * i + 5) % 62 for i in range(16)]

with Server(FLAGS) as server:
    server.ask(TEXT, 3)
    server.slot("save", "slot.bin")
    if not CONTROL:
        server.slot("restore", "slot.bin")
    judge(server.ask(TEXT), cold(FLAGS, TEXT))
