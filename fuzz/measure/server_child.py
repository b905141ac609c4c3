"""One job of ci/bench --server: it checks requests to llama-server as a job of a campaign does, or only sends them.

It reads what it is asked for (`Asked`) from standard input and writes one `Told` to standard output.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from fuzz.loop import slice_seed
from fuzz.measure.stopping import like_ctrl_c
from fuzz.models import Model
from fuzz.server.avoid import SERVER_AVOIDANCES, repaired
from fuzz.server.flags import palette
from fuzz.server.gen import programs
from fuzz.server.job import SLICE
from fuzz.strategies import generate
from oracles.server.band import cold_flags
from oracles.server.judge import ServerJudge
from subjects.scenario import DriverParams
from subjects.server.build import ServerBuild
from subjects.server.client import Client
from subjects.server.process import Server, argv
from subjects.server.runner import body_of, complete, run
from subjects.server.scenario import Flags, ServerScenario
from subjects.server.trace import Reply

POOL = 8
"""servers kept; a slice has a few sets of flags"""


@dataclass(frozen=True)
class Asked:
    """What a job is to do: how long, and of which job of a campaign the programs are. cache: where measured bands are
    kept."""

    how: Literal["checked", "plain"]
    server: str
    fingerprint: str
    model: Model
    cache: str
    seed: int
    job: int
    jobs: int
    seconds: float


class Told(msgspec.Struct):
    """requests: checked, or sent to both servers. seconds: that it took. violated: symptoms of what was wrong. unknown:
    what could not be judged, by reason."""

    requests: int = 0
    programs: int = 0
    seconds: float = 0.0
    violated: dict[str, int] = {}
    unknown: dict[str, int] = {}


class Servers:
    """Those that a plain client sends to, kept by their flags."""

    def __init__(self, asked: Asked):
        self._asked = asked
        self._kept: OrderedDict[tuple[Flags, DriverParams | None], tuple[Server, Client]] = OrderedDict()

    def client(self, flags: Flags, driver: DriverParams | None) -> Client:
        """The client of a server with these flags, which runs."""
        key = (flags, driver)
        if key not in self._kept:
            model = self._asked.model
            draft = Path(model.draft) if model.draft and driver else None
            command = argv(Path(self._asked.server), Path(model.path), flags, driver, draft, None)
            server = Server(lambda _: command, Path(model.path))
            self._kept[key] = server, Client(server.port)
            if len(self._kept) > POOL:
                self._kept.popitem(last=False)[1][0].close()
        self._kept.move_to_end(key)
        return self._kept[key][1]

    def close(self) -> None:
        """End all of them."""
        while self._kept:
            self._kept.popitem()[1][0].close()


def all_programs(asked: Asked) -> Iterator[ServerScenario]:
    """Those of a campaign's job that steps round known faults, for ever."""
    model, number = asked.model, 0
    while True:
        seed = slice_seed(asked.seed, asked.job, asked.jobs, number)
        for program in generate(programs(model, palette(model.traits, model.driver, seed)), seed, SLICE):
            yield repaired(SERVER_AVOIDANCES, program)
        number += 1


def check(asked: Asked) -> Told:
    """Run and judge programs. What is wrong is counted, and not followed up."""
    told, model = Told(), asked.model
    build = ServerBuild(Path(asked.server), asked.fingerprint, "", "")
    draft = Path(model.draft) if model.draft else None
    began = time.monotonic()
    with ServerJudge(build, model.ref, Path(model.path), draft, Path(asked.cache), model.traits.memory) as judge:
        for program in all_programs(asked):
            judgement = judge.judge(program, avoid=SERVER_AVOIDANCES)
            told.requests += judgement.checked
            told.programs += 1
            for symptom in {f"{v.oracle}: {v.key}" for v in judgement.violations[:1]}:
                told.violated[symptom] = told.violated.get(symptom, 0) + 1
            for reason in judgement.unknown:
                told.unknown[reason] = told.unknown.get(reason, 0) + 1
            told.seconds = time.monotonic() - began
            if told.seconds >= asked.seconds:
                break
    return told


def send(asked: Asked) -> Told:
    """Send the prompts of such programs to both servers. To know them a program is run first, which is not timed, nor
    are starts."""
    told, servers, model = Told(), Servers(asked), asked.model
    draft = Path(model.draft) if model.draft else None
    try:
        for program in all_programs(asked):
            trace = run(program, Path(asked.server), Path(model.path), draft)
            replies = [r for r in trace.replies if (r.prompt or r.messages) and r.status == 200]
            subject = servers.client(program.flags, program.driver)
            cold = servers.client(cold_flags(program.flags), None)
            began = time.monotonic()
            for reply in replies:
                body = body_of(reply)
                for client, cached in ((subject, True), (cold, False)):
                    answer = Reply(request=0, prompt=reply.prompt, messages=reply.messages, predict=reply.predict)
                    complete(client, {**body, "cache_prompt": cached}, answer)
            told.requests += len(replies)
            told.programs += 1
            told.seconds += time.monotonic() - began
            if told.seconds >= asked.seconds:
                break
    finally:
        servers.close()
    return told


def main() -> int:
    """Entry."""
    like_ctrl_c()
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Asked)
    try:
        told = check(asked) if asked.how == "checked" else send(asked)
    except KeyboardInterrupt:
        return 130
    sys.stdout.buffer.write(msgspec.json.encode(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
