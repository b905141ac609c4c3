"""The llama-server that `redraft build --server` makes: it is found, it serves, and killing it leaves nothing behind.

Nothing is built here: it takes minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil

from fuzz.cli.common import Bench
from fuzz.models import from_recipe
from fuzz.server.models import SERVED
from subjects.recipes import get
from subjects.server import build as server
from subjects.server.build import ServerBuild, find_server
from subjects.server.client import Client
from subjects.server.process import Server, argv
from subjects.server.scenario import Flags
from subjects.shimcache import cache_dir, stem

ROOT = Path(__file__).resolve().parents[2]


def test_it_is_found_by_itself_and_by_its_path(server_build: ServerBuild) -> None:
    named = find_server(server_build.path)
    assert (named.fingerprint, named.version) == (server_build.fingerprint, server_build.version)
    assert named.name == f"llama-server {named.version}"
    assert server_build.name.startswith("llama-server of llama-cpp-python ")


def test_its_name_is_of_all_that_it_loads(server_build: ServerBuild) -> None:
    libraries = server._libraries(server_build.path)
    assert {"libllama", "libllama-common", "libllama-server-impl", "libggml-base", "libggml-cpu"} <= {
        stem(x) for x in libraries
    }
    # what an assertion says of its file goes into findings
    home = str(cache_dir()).encode()
    assert not [x.name for x in libraries if home in x.read_bytes()]


def test_it_serves(server_build: ServerBuild, build: Bench) -> None:
    model = Path(from_recipe(get("llama"), build.models, form=SERVED).path)
    running = Server(lambda saves: argv(server_build.path, model, Flags(), None, None, saves), model)
    try:
        client = Client(running.port)
        status, document = client.post("/completion", {"prompt": [1, 2, 3], "n_predict": 2, "return_tokens": True})
        client.close()
        assert status == 200
        assert len(document["tokens"]) == 2
    finally:
        running.close()


def test_what_a_wrapper_started_ends_with_it(server_build: ServerBuild, build: Bench, tmp_path: Path) -> None:
    model = Path(from_recipe(get("llama"), build.models, form=SERVED).path)
    wrapper = tmp_path / "llama-server"
    wrapper.write_text(f'#!/bin/sh\n"{server_build.path}" "$@"\n')
    wrapper.chmod(0o755)
    running = Server(lambda saves: argv(wrapper, model, Flags(), None, None, saves), model)
    inside = psutil.Process(running.process.pid).children(recursive=True)
    running.close()
    assert inside
    assert not psutil.wait_procs(inside, timeout=30)[1]


def test_starts_and_kills_leave_nothing(server_build: ServerBuild) -> None:
    # the whole figure is ci/robustness' --starts 200
    asked = ["--aborts", "0", "--kills", "0", "--starts", "16", "--server-bin", str(server_build.path), "--json"]
    p = subprocess.run(
        [sys.executable, "-m", "fuzz.measure.robustness", *asked], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert p.returncode == 0, p.stdout + p.stderr
    seen = json.loads(p.stdout)["starts"]
    assert seen["ways"] == {"server": 8, "starting": 3, "process": 3, "group": 2}
    assert seen["servers_seen"] >= 16
    assert seen["leaked"] == {"processes": 0, "descriptors": 0, "files": []}
