"""Cold servers: what one that keeps nothing answers to a prompt. They are pooled by their flags, since no answer of
theirs depends on another; a finding is confirmed with servers of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from subjects.scenario import DriverParams
from subjects.server.client import Client
from subjects.server.process import Server, ServerError, argv
from subjects.server.runner import DYING_SECONDS, body_of, complete
from subjects.server.scenario import Flags
from subjects.server.trace import End, Reply

POOL = 4
KNOWN = 4096
"""answers kept"""
_FRESH_AFTER = 500
"""answers of one server"""

Key = tuple[Flags, DriverParams | None, tuple[int, ...], tuple[tuple[str, str], ...], int]


class Cold:
    """Cold servers of one model. Raises ServerError where one does not start or ends."""

    def __init__(self, binary: Path, model: Path, draft: Path | None):
        self._binary, self._model, self._draft = binary, model, draft
        self._servers: OrderedDict[tuple[Flags, DriverParams | None], _Pooled] = OrderedDict()
        self._known: OrderedDict[Key, Reply] = OrderedDict()

    def reply(self, reply: Reply, flags: Flags, driver: DriverParams | None = None, *, alone: bool = False) -> Reply:
        """The answer of a server with these flags to the prompt of a reply. alone: of a server that has answered
        nothing before, since a driver may carry something from prompt to prompt that costs drafts."""
        key = (flags, driver, reply.prompt, reply.messages, reply.predict)
        found = None if alone else self._known.get(key)
        if found is None:
            asked = Reply(
                request=reply.request,
                part=reply.part,
                prompt=reply.prompt,
                messages=reply.messages,
                predict=reply.predict,
            )
            found = self._alone(flags, driver, asked) if alone else self._server(flags, driver).ask(asked)
            self._known[key] = found
            if len(self._known) > KNOWN:
                self._known.popitem(last=False)
        return found

    def _alone(self, flags: Flags, driver: DriverParams | None, asked: Reply) -> Reply:
        server = self._started(flags, driver)
        try:
            return server.ask(asked)
        finally:
            server.close()

    def _started(self, flags: Flags, driver: DriverParams | None) -> _Pooled:
        draft = self._draft if driver is not None else None
        return _Pooled(lambda _: argv(self._binary, self._model, flags, driver, draft, None), self._model)

    def _server(self, flags: Flags, driver: DriverParams | None) -> _Pooled:
        key = (flags, driver)
        pooled = self._servers.pop(key, None)
        if pooled is not None and (pooled.server.ended() is not None or pooled.asked >= _FRESH_AFTER):
            pooled.close()
            pooled = None
        if pooled is None:
            pooled = self._started(flags, driver)
        self._servers[key] = pooled
        if len(self._servers) > POOL:
            self._servers.popitem(last=False)[1].close()
        return pooled

    def forget(self) -> None:
        """Begin anew: no server and no answer is used again."""
        self.close()
        self._known.clear()

    def close(self) -> None:
        """End all servers."""
        while self._servers:
            self._servers.popitem()[1].close()


class _Pooled:
    def __init__(self, command: Callable[[Path | None], list[str]], model: Path):
        self.server = Server(command, model)
        self._client = Client(self.server.port, self.server.patience)
        self.asked = 0

    def ask(self, asked: Reply) -> Reply:
        self.asked += 1
        found = complete(self._client, {**body_of(asked), "cache_prompt": False}, asked)
        if found.status == 0:
            end = self.server.ended(DYING_SECONDS) or End(how="hang")
            log = self.server.log()
            raise ServerError(f"the cold server gave no answer: {found.error}", end, log)
        return found

    def close(self) -> None:
        self._client.close()
        self.server.close()
