"""Ctrl-C and SIGTERM: both end a probe in order, with its temporary folder removed and its children ended."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stoppable() -> Iterator[Callable[[], None]]:
    """Either signal raises KeyboardInterrupt, once: a second one must not disturb what tidies up and writes. Gives a
    function that has both ignored from there on."""
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield lambda: None
        return

    def ignore() -> None:
        for s in _SIGNALS:
            signal.signal(s, signal.SIG_IGN)

    def stop(*_: object) -> None:
        ignore()
        raise KeyboardInterrupt

    old = {s: signal.signal(s, stop) for s in _SIGNALS}
    try:
        yield ignore
    finally:
        for s, handler in old.items():
            signal.signal(s, handler)
