"""What looks for leftovers of killed servers sees them."""

from __future__ import annotations

import socket

from fuzz.measure import server_starts


def test_a_port_that_is_listened_on() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
        assert port not in server_starts.listening(), "bound only"
        s.listen()
        assert port in server_starts.listening()
