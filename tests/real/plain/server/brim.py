"""With drafting on, an answer that reaches the end of the slot's context lacks its last tokens (qwen35, draft-mtp).

server-context.cpp puts all accepted tokens of a draft into slot.prompt.tokens and then calls process_token() for one
after the other. That stops where prompt.n_tokens() + 1 >= n_ctx, which counts the tokens of the draft that it has not
come to yet: of a draft that reaches the end of the context only the first token is answered. Here the context is full
behind 16 tokens and fewer; whether the last draft is accepted depends on the prompt, so there are 16 of them.
"""

from _server import CONTROL, Server

FLAGS = "--parallel 1 --cache-ram 0"
DRAFTING = " --spec-type draft-mtp --spec-draft-n-max 3"
TEXT = [(11 * i * i + 7 * i + 5) % 62 for i in range(512)]


def lengths(flags):
    """Of the answers to prompts of 496 to 511 tokens, in tokens."""
    with Server(flags) as server:
        return [len(server.ask(TEXT[:n], 32, cache_prompt=False)[0]) for n in range(496, 512)]


must, is_ = lengths(FLAGS), lengths(FLAGS + ("" if CONTROL else DRAFTING))
print(f"must be answers of {must} tokens\nis                 {is_}")
raise SystemExit(int(is_ != must))
