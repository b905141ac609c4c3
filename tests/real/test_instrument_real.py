"""A build with counters and sanitizers, where one is in the cache: libFuzzer follows it, and a sanitizer speaks up.

Nothing is built here: `redraft build` takes minutes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from fuzz.doctor import prove, prove_counters
from subjects import instrument
from subjects.builds import compile_shim, find_build
from subjects.instrument import SANITIZERS

ROOT = Path(__file__).resolve().parents[2]


def test_counters_move(built: Callable[..., Path]) -> None:
    check = prove_counters(built("fuzzer", SANITIZERS))
    assert check.state == "ok", check


def test_it_saves_and_restores(built: Callable[..., Path]) -> None:
    build = built("fuzzer", SANITIZERS)
    with instrument.loadable(build):
        found = find_build(build)
        assert found.name == build.name
        checks = prove(compile_shim(found))
    assert checks
    assert {c.state for c in checks} == {"ok"}, checks


def test_the_address_sanitizer_is_there(built: Callable[..., Path]) -> None:
    # a read beyond a buffer, by the C library on behalf of somebody
    code = "import ctypes; b = ctypes.create_string_buffer(64); ctypes.CDLL(None).memmove(b, b'x' * 16, 1 << 20)"
    env = {**instrument.environment(built("fuzzer", SANITIZERS)), "PYTHONMALLOC": "malloc"}
    p = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    assert p.returncode != 0
    assert "ERROR: AddressSanitizer: heap-buffer-overflow" in p.stderr


def test_a_report_build_needs_nothing_loaded(built: Callable[..., Path], tmp_path: Path) -> None:
    build = built("report", ())
    assert "LD_PRELOAD" not in instrument.variables(build)
    profile = tmp_path / "x.profraw"
    env = {**instrument.environment(build), "LLVM_PROFILE_FILE": str(profile)}
    code = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1]); sys.stdout.flush()"
    library = find_build(build).libllama
    subprocess.run([sys.executable, "-c", code, str(library)], env=env, check=True)
    assert profile.stat().st_size > 1000
