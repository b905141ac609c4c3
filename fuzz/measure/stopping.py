"""SIGTERM, taken as Ctrl-C: what measures leave behind in between is taken away on both."""

from __future__ import annotations

import signal


def like_ctrl_c() -> None:
    """From now on SIGTERM raises KeyboardInterrupt, too."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
