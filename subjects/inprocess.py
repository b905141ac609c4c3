"""A sandbox that is none: scenarios run in this very process, that of a fuzzer's target. What ends the library ends it;
what comes back is read as a sandbox's answers are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from subjects import child
from subjects.child import Job, Replay
from subjects.drivers.native import DriverLib
from subjects.sandbox import Limits, Sandbox, Stats
from subjects.scenario import ModelRef
from subjects.shim import Shim
from subjects.trace import Trace


class InProcess(Sandbox):
    """See the module. shim, driver: our libraries, loaded into this process by this."""

    def __init__(self, shim: Shim, driver: Path | None = None, drafts: dict[ModelRef, Path] | None = None):
        self.driver, self.drafts = driver, drafts or {}
        self.limits, self.stats = Limits(), Stats()
        self._fd = os.memfd_create("redraft-answers")
        os.ftruncate(self._fd, child.ANSWERS_BYTES)
        self._recorder = child.Recorder(self._fd)
        self._map, self._number = self._recorder.map, 0
        self._worker_here = child.Worker(shim, {}, DriverLib(driver) if driver else None, self._recorder)

    def close(self) -> None:
        """Nothing to end."""
        os.close(self._fd)

    def _attempt(self, requests: Sequence[Job | Replay], patience: float = 1.0) -> list[Trace]:
        self._number += 1
        self._recorder.clear(self._number)
        for request in requests:
            if isinstance(request, Job):
                self._worker_here.run(request)
            else:
                self._worker_here.replay(request)
        return self._collect(None, len(requests))
