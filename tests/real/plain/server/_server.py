"""What the reproducers of this folder share: a llama-server on a port of its own, what is posted to it, the verdict.

Python's standard library only. A script is called as `NAME.py LLAMA_SERVER MODEL.gguf [DRAFT.gguf] [--control]`; it
prints what must be and what is, and exits with 1 where they differ and 0 where they do not. With `--control` the
trigger is left out.
"""

import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time

ARGS = [a for a in sys.argv[1:] if a != "--control"]
BINARY, MODEL = ARGS[:2]
DRAFT = ARGS[2] if len(ARGS) > 2 else None
CONTROL = "--control" in sys.argv
NOISE = 1e-3  # of a logarithm of a probability; other batches change it by 1e-5 on these models

STRICT = "--threads 1 --threads-batch 1 --fit off --no-warmup --batch-size 64 --ubatch-size 32 --flash-attn off"
STRICT += " --cache-type-k f32 --cache-type-v f32 --ctx-size 512 --host 127.0.0.1 --port 0 --verbosity 4"


class Server:
    """A running llama-server; a context manager, which ends it."""

    def __init__(self, flags):
        self.saves = tempfile.TemporaryDirectory()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `__exit__`)
        command = [BINARY, "--model", MODEL, "--slot-save-path", self.saves.name + "/", *STRICT.split(), *flags.split()]
        env = os.environ | {"GGML_NO_BACKTRACE": "1"}
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, env=env)
        while not (found := re.search(r"listening on http://127\.0\.0\.1:(\d+)", self.said())):
            assert self.process.poll() is None, self.said()
            time.sleep(0.005)
        self.port = int(found[1])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.log.close()
        self.saves.cleanup()

    def said(self):
        """Its log."""
        return os.pread(self.log.fileno(), 1 << 26, 0).decode("utf-8", "replace")

    def post(self, path, body):
        """Send a request; the connection that its response comes over."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def slot(self, action, file):
        """Save slot 0 into a file of the folder, or restore it from there; the HTTP status, None for no answer."""
        try:
            return self.post(f"/slots/0?action={action}", {"filename": file}).getresponse().status
        except (ConnectionError, http.client.HTTPException):
            return None

    def begin(self, prompt, predict=4, **more):
        """Post a prompt of token ids; greedy, with the ten most probable tokens of each. The connection."""
        body = {"prompt": prompt, "n_predict": predict, "temperature": 0.0, "n_probs": 10, "return_tokens": True}
        return self.post("/completion", body | more)

    def ask(self, prompt, predict=4, **more):
        """The whole answer: (tokens, for each {token: log-probability})."""
        return answer([json.load(self.begin(prompt, predict, **more).getresponse())])

    def last_words(self):
        """How the server ends after a request that it does not survive: its signal, and what it said."""
        self.process.wait(10)
        said = [line for line in self.said().splitlines() if "GGML_ASSERT" in line or "pos_min ==" in line]
        return f"signal {-self.process.returncode}: {said[-1] if said else ''}"


def answer(documents):
    """(tokens, for each {token: log-probability}) of an answer that came in one part or more."""
    assert all("tokens" in d for d in documents), documents
    told = [p for d in documents for p in d.get("completion_probabilities", [])]
    tops = [{top["id"]: top["logprob"] for top in p["top_logprobs"]} for p in told]
    return [t for d in documents for t in d["tokens"]], tops


def parts(response):
    """The parts of a streamed answer, as they come."""
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def cold(flags, prompt, predict=4):
    """The answer of a server that was asked nothing before."""
    with Server(flags) as server:
        return server.ask(prompt, predict)


def judge(is_, must):
    """Print both answers and by how much they differ; the end of the script."""
    same = 0
    while same < min(len(is_[0]), len(must[0])) and is_[0][same] == must[0][same]:
        same += 1
    off = 0.0
    for a, b in list(zip(is_[1], must[1], strict=False))[: same + 1]:
        off = max([off, *(abs(a[t] - b[t]) for t in a.keys() & b.keys())])
    wrong = is_[0] != must[0] or off > NOISE
    first = max(0, same - 3)  # long answers agree for long
    print(f"from token {first} on, must be {must[0][first : first + 8]}")
    print(f"{' ' * len(str(first))}                   is {is_[0][first : first + 8]}")
    print(f"log-probabilities of the tokens up to where they part differ by up to {off:.2g}")
    sys.exit(1 if wrong else 0)


def ends(how):
    """Print how the server ended, None where it lives; the end of the script."""
    print("must be alive")
    print(f"is      {how or 'alive'}")
    sys.exit(1 if how else 0)
