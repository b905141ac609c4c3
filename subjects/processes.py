"""What is asked of the system about processes, beside starting and ending them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
# before any fork: a new process must not wait for a lock of the loader that its parent held
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent(number: int = signal.SIGKILL, parent: int = 0) -> None:
    """This process gets a signal once its parent is no more, however that ended: no orphan survives a kill -9. parent:
    its number; a process whose parent is another by now ends at once (0: nobody looks). Linux only."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if parent and os.getppid() != parent:
            os._exit(1)


def peak_kb(pid: int) -> int:
    """Largest resident size that a live process has had, 0 where the system does not tell."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    return 0
