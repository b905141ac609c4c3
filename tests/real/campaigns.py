"""The command as people run it, in a process of its own, for tests of campaigns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REDRAFT = str(Path(sys.executable).with_name("redraft"))


class Command:
    """`redraft`. patience: seconds after which what must not take for ever does; nothing waits so long otherwise."""

    def __init__(self, patience: float):
        self.patience = patience

    def __call__(self, *args: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [REDRAFT, *map(str, args)], cwd=cwd, capture_output=True, text=True, check=False, timeout=self.patience
        )

    @contextmanager
    def running(self, *args: object) -> Iterator[subprocess.Popen[str]]:
        """A campaign that would go on for long; nothing of it is left afterwards."""
        process = subprocess.Popen(
            [REDRAFT, *map(str, args)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "COLUMNS": "2000"},
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(self.patience)
            if process.stdout is not None:
                process.stdout.close()


def document(done: subprocess.CompletedProcess[str], *codes: int) -> dict[str, Any]:
    """The one document on standard output."""
    assert done.returncode in codes, done.stdout[-2000:] + done.stderr[-2000:]
    value = json.loads(done.stdout)
    assert isinstance(value, dict)
    return value
