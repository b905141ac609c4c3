"""Asks a llama-server over HTTP: whole answers, answers that the client does not wait for, and slot actions."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any

TIMEOUT = 30.0
"""seconds without a byte of an answer, after which the server hangs"""
WHOLE = 4
"""times that long, a whole answer may take"""


class NoAnswer(Exception):
    """The connection broke, or nothing came in time (`hang`)."""

    def __init__(self, text: str, *, hang: bool = False):
        super().__init__(text)
        self.hang = hang


class Client:
    """Asks over a new connection each time: the server closes one that is kept after some requests, and what breaks
    then looks like its end. Not for several threads. patience: seconds that an answer may take longer than TIMEOUT."""

    def __init__(self, port: int, patience: float = 0.0):
        self._seconds = TIMEOUT + patience
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=self._seconds)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and document of an answer. Raises NoAnswer."""
        return self._ask("POST", path, json.dumps(body))

    def get(self, path: str) -> tuple[int, Any]:
        """The same, asked with GET. Raises NoAnswer."""
        return self._ask("GET", path, None)

    def _ask(self, method: str, path: str, body: str | None) -> tuple[int, Any]:
        try:
            self._send(method, path, body)
            response = self._connection.getresponse()
            data = self._all(response)
        except TimeoutError as e:
            raise NoAnswer(f"no answer within {self._seconds:.0f} s", hang=True) from e
        except (OSError, http.client.HTTPException) as e:
            raise NoAnswer(f"{type(e).__name__}: {e}") from e
        finally:
            self.close()
        return response.status, _document(data)

    def _all(self, response: http.client.HTTPResponse) -> bytes:
        """The body; one that comes in drops ends too. Raises TimeoutError."""
        deadline = time.monotonic() + WHOLE * self._seconds
        parts: list[bytes] = []
        while part := response.read1(1 << 16):
            parts.append(part)
            if time.monotonic() > deadline:
                raise TimeoutError
        return b"".join(parts)

    def stream(self, path: str, body: dict[str, Any], most: int) -> tuple[int, list[Any]]:
        """Status and the parts of a streamed answer, a token each, until there are `most` of them: then the client goes
        away, in the middle of the answer, or before it where `most` is 0. An error comes as its document alone. Raises
        NoAnswer."""
        parts: list[Any] = []
        deadline = time.monotonic() + WHOLE * self._seconds
        try:
            self._send("POST", path, json.dumps({**body, "stream": True}))
            response = self._connection.getresponse()
            if response.status != 200:
                return response.status, [_document(response.read())]
            while len(parts) < most and (line := response.readline()):
                if line.startswith(b"data: {"):
                    parts.append(_document(line[6:]))
                if time.monotonic() > deadline:
                    raise TimeoutError
        except TimeoutError as e:
            raise NoAnswer(f"no answer within {self._seconds:.0f} s", hang=True) from e
        except (OSError, http.client.HTTPException) as e:
            raise NoAnswer(f"{type(e).__name__}: {e}") from e
        finally:
            self.close()
        return 200, parts

    def _send(self, method: str, path: str, body: str | None) -> None:
        headers = {"Connection": "close", **({"Content-Type": "application/json"} if body is not None else {})}
        self._connection.request(method, path, body, headers)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


def _document(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return {"error": {"message": data[:200].decode("utf-8", "replace")}}
