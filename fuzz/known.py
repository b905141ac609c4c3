"""Known faults: entries of corpora/known, and whether a finding is one of them.

An entry is a file: title, references, builds, a scenario that shows the fault, the signature it matches, and the name
of its avoidance in fuzz/avoid.py (of llama-server: fuzz/server/avoid.py). A finding is known only when its signature
matches and its reduced program contains the known trigger: what matches by signature alone is new.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from pathlib import Path

import msgspec

from fuzz.avoid import AVOIDANCES, triggered
from fuzz.drivers.avoid import DRIVER_AVOIDANCES
from fuzz.programs import AnyProgram, Subject
from fuzz.programs import loads as load_program
from fuzz.server.avoid import SERVER_AVOIDANCES, to_blame
from fuzz.state import Traits
from subjects.scenario import Record, Scenario
from subjects.server.scenario import ServerScenario
from subjects.server.trace import ServerTrace

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "corpora" / "known"


class KnownFault(Record, frozen=True):
    """One fault that is open upstream.

    signatures: shell patterns of the signatures it shows itself with. scenario: file in corpora/scenarios. avoidance:
    its name in fuzz/avoid.py. subject: what it shows in; a fault of the library that llama-server shows, too, has an
    entry for each.
    """

    name: str
    title: str
    about: str
    signatures: tuple[str, ...]
    scenario: str
    avoidance: str
    builds: tuple[str, ...]
    references: tuple[str, ...] = ()
    subject: Subject = "library"


class BadKnown(ValueError):
    """A malformed entry; the message names the file."""


def load_all(folder: Path = FOLDER) -> list[KnownFault]:
    """All entries, by name. Raises BadKnown."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            fault = msgspec.json.decode(path.read_bytes(), type=KnownFault, strict=True)
        except msgspec.DecodeError as e:
            raise BadKnown(f"{path.name}: {e}") from None
        names = (*SERVER_AVOIDANCES,) if fault.subject == "server" else (*AVOIDANCES, *DRIVER_AVOIDANCES)
        if fault.name != path.stem or fault.avoidance not in names:
            raise BadKnown(f"{path.name}: its name must be the file's, its avoidance one of {', '.join(names)}")
        found.append(fault)
    return found


def scenario_of(fault: KnownFault, folder: Path = FOLDER) -> AnyProgram:
    """The program that shows it."""
    return load_program((folder.parent / "scenarios" / fault.scenario).read_bytes())


def signed(fault: KnownFault, signature: str) -> bool:
    """Whether a fault shows itself with a signature."""
    return any(fnmatch.fnmatchcase(signature, p) for p in fault.signatures)


def match(
    signature: str, scenario: Scenario, traits: Traits, faults: list[KnownFault], culprit: int
) -> KnownFault | None:
    """The known fault that a reduced finding is, None when it is new. Its trigger must be the step to blame, or lie
    before it: what comes later cannot have caused the violation."""

    def blamed(name: str) -> bool:
        at = triggered(name, scenario, traits)
        return at is not None and at <= culprit

    return _matching(signature, "library", faults, blamed)


def match_server(
    signature: str, program: ServerScenario, trace: ServerTrace, faults: list[KnownFault], culprit: int
) -> KnownFault | None:
    """The same of a program for llama-server and its run, whose request `culprit` is answered wrongly."""
    return _matching(signature, "server", faults, lambda name: to_blame(name, program, trace, culprit))


def _matching(
    signature: str, subject: Subject, faults: list[KnownFault], blamed: Callable[[str], bool]
) -> KnownFault | None:
    """The first fault that shows itself so and may be to blame, which its avoidance tells."""
    mine = (f for f in faults if f.subject == subject and signed(f, signature))
    return next((f for f in mine if blamed(f.avoidance)), None)
