"""The long run: replays, a canary, a campaign over all recipes that steps round known faults, and one that does not.

  ci/nightly
  ci/nightly 240 --out out/night --build ~/llama.cpp

replay   what corpora/scenarios shows against what corpora/known says of it
canary   a planted fault must be found, otherwise nothing that the run says can be believed;
         canary-driver: with a driver; canary-server: in llama-server
avoid    most of the time: known faults are found once and then stepped round
never    nothing is stepped round, and every known fault must be found again; one that is not is news
drivers, drivers-never   the same with speculative drivers, on all pairs
coverage the coverage-guided engine, where its build is in the cache (`redraft build`); left out with --build
server, server-drivers   llama-server, without and with speculative drafting, where it is in the cache (`redraft build
         --server`); left out with --build

Writes nightly.json, junit.xml and the campaigns into --out. Exit 0 nothing new, 1 new findings (or a known fault that
is not there any more: in the replay, or in a campaign when MINUTES is at least 30, with drivers 120), 2 usage or
configuration or a canary that was not found, 3 nothing could be judged, 130 interrupted (Ctrl-C or SIGTERM: the part
that runs is ended and everything found so far is written).
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from fuzz import programs
from fuzz.drivers.avoid import DRIVER_AVOIDANCES
from fuzz.found import size_of
from fuzz.known import BadKnown, KnownFault, load_all
from fuzz.repro.phrases import count
from subjects import instrument
from subjects.planted import CANARY
from subjects.scenario import BadScenario
from subjects.server.build import find_server
from subjects.server.planted import CANARY as SERVER_CANARY
from subjects.shimcache import BadBuild

ROOT = Path(__file__).resolve().parent.parent
REDRAFT = [str(Path(sys.executable).with_name("redraft"))]
SCENARIOS = ROOT / "corpora" / "scenarios"
SHARE = {
    "avoid": 0.35,
    "never": 0.18,
    "drivers": 0.13,
    "drivers-never": 0.09,
    "coverage": 0.08,
    "server": 0.08,
    "server-drivers": 0.04,
}
# A shorter run may miss a known fault by chance. The part with drivers has half the share, and many of its faults show
# on one or two pairs of eleven only.
SURE_FROM = {"never": 30.0, "drivers-never": 120.0}
# Planted in the shim, as the other is. The pair is one whose restores no known fault makes everything step round.
DRIVER_CANARY = "logits-drift"
# llama-server has all drivers of the library; these keep a state of their own, which it restores
SERVER_PAIRS = ["--driver", "draft-mtp", "--driver", "draft-eagle3", "--driver", "draft-simple"]
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


class Run:
    """The parts one after the other, and what they showed."""

    def __init__(self, args: argparse.Namespace, out: Path, known: list[KnownFault], console: Console):
        self.args, self.out, self.known, self.console = args, out, known, console
        self.seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1 << 31)
        self.began = time.time()
        self.stopped = False
        self.child: subprocess.Popen[bytes] | None = None
        self.parts: list[dict[str, Any]] = []
        self.cases: list[dict[str, Any]] = []
        for s in (signal.SIGINT, signal.SIGTERM):
            signal.signal(s, self._stop)

    def _stop(self, *_: object) -> None:
        self.stopped = True
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(signal.SIGINT)

    # --- running ------------------------------------------------------------------------------------------------------

    def all(self) -> None:
        """Every part that there is time for."""
        minutes = self.args.minutes
        everything, pairs = ["--model", "all"], ["--driver", "all"]
        short = ["--scenarios", "300", "--minutes", "1"]
        steps: dict[str, Callable[[], object]] = {
            "replay": self.replay,
            # by count, on one model: a minute is plenty
            "canary": lambda: self.canary("canary", CANARY, ["--model", "llama", *short]),
            "canary-driver": lambda: self.canary("canary-driver", DRIVER_CANARY, ["--driver", "llama-simple", *short]),
            "canary-server": self.server_canary,
            "avoid": lambda: self.campaign("avoid", "auto", [*everything, *_minutes(minutes * SHARE["avoid"])]),
            "never": lambda: self.never("never", [*everything, *_minutes(minutes * SHARE["never"])]),
            "drivers": lambda: self.campaign("drivers", "auto", [*pairs, *_minutes(minutes * SHARE["drivers"])]),
            "drivers-never": lambda: self.never("drivers-never", [*pairs, *_minutes(minutes * SHARE["drivers-never"])]),
            "coverage": self.coverage,
            "server": lambda: self.server("server", []),
            "server-drivers": lambda: self.server("server-drivers", SERVER_PAIRS),
        }
        for name, step in steps.items():
            if self.stopped:
                self.parts.append({"name": name, "exit": None, "seconds": 0.0, "text": "not run: interrupted"})
                self.case("part", name, SKIPPED, "interrupted before it began")
                continue
            step()
            self.save()

    def call(self, name: str, arguments: list[str]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Run `redraft`; a new part, and its document (None when it gave none)."""
        command = [*REDRAFT, *arguments, "--json"]
        command += ["--build", str(self.args.build.resolve())] if self.args.build else []
        self.say(f"== {name}: redraft {' '.join(command[1:])}", "bold")
        began = time.monotonic()
        errors = self.out / f"{name}.log"
        with errors.open("wb") as log:
            # on a terminal people see the campaign's own display
            stderr = None if sys.stderr.isatty() else log
            self.child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr)
            if self.stopped:  # the signal came while the child was being started
                self.child.send_signal(signal.SIGINT)
            text, _ = self.child.communicate()
        part = {"name": name, "exit": self.child.returncode, "seconds": round(time.monotonic() - began, 1), "text": ""}
        self.parts.append(part)
        try:
            document = json.loads(text)
        except ValueError:
            part["text"] = errors.read_text(errors="replace").strip()[-2000:] or "no document and no message"
            if self.stopped:
                part["exit"], part["text"] = 130, "interrupted"
            return part, None
        if not errors.stat().st_size:
            errors.unlink()
        return part, document

    def campaign(self, name: str, avoid: str, arguments: list[str]) -> dict[str, Any] | None:
        """A part that is a campaign: a test case of its own, and one for each finding."""
        command = ["fuzz", "--avoid", avoid, "--out", str(self.out / name), "--seed", str(self.seed), *arguments]
        command += ["--jobs", str(self.args.jobs)] if self.args.jobs else []
        part, document = self.call(name, command)
        if document is None:
            self.case("part", name, SKIPPED if part["exit"] == 130 else FAILED, part["text"], part["seconds"])
            return None
        part |= {
            k: document[k] for k in ("scenarios", "per_second", "unknown", "unreproduced", "findings", "memory_kb")
        }
        part["text"] = (
            f"{document['scenarios']} scenarios, {document['per_second']:.0f}/s, {document['unknown']} unknown"
        )
        broken = {2: "a job ended before its time", 3: "nothing could be judged"}.get(part["exit"])
        state = FAILED if broken else SKIPPED if part["exit"] == 130 else PASSED
        self.case("part", name, state, f"{broken}; {part['text']}" if broken else part["text"], part["seconds"])
        if name.startswith("canary"):
            return document
        for f in document["findings"]:
            n, m = f["reproduced"]
            size = count(*size_of(f))
            label = f"{f['title']} ({size}, {n} of {m}), {f['path']}"
            # two known faults, or a known and a new one, may have one signature
            title = f"{f['signature']} ({f['known'] or 'new'})"
            self.case(f"finding.{name}", title, PASSED if f["known"] else FAILED, label)
        return document

    def left_out(self, name: str, why: str) -> None:
        """A part for which something is not there."""
        self.parts.append({"name": name, "exit": None, "seconds": 0.0, "text": f"not run: {why}"})
        self.case("part", name, SKIPPED, why)

    def no_server(self) -> str:
        """Why llama-server is not tested; empty where it is."""
        if self.args.build:
            return "llama-server is none of --build"
        try:
            find_server()
        except BadBuild as e:
            return str(e).splitlines()[0]
        return ""

    def server_canary(self) -> None:
        """By count as well: the planted fault shows in most programs. Nothing is cached but in the slot, and no state
        is restored, so that other faults do not stand for it."""
        if why := self.no_server():
            self.left_out("canary-server", why)
            return
        short = ["--model", "llama", "--flags", "plain", "--scenarios", "60", "--minutes", "2"]
        self.canary("canary-server", SERVER_CANARY, ["--subject", "server", *short])

    def server(self, name: str, arguments: list[str]) -> None:
        """Conversations with llama-server."""
        if why := self.no_server():
            self.left_out(name, why)
            return
        self.campaign(name, "auto", ["--subject", "server", *arguments, *_minutes(self.args.minutes * SHARE[name])])

    def coverage(self) -> None:
        """The other engine; without its build there is nothing to run."""
        if self.args.build or not self.guided():
            self.left_out(
                "coverage",
                "it has no build of --build" if self.args.build else "no build with counters (`redraft build`)",
            )
            return
        minutes = _minutes(self.args.minutes * SHARE["coverage"])
        self.campaign("coverage", "auto", ["--engine", "coverage", *minutes])

    def guided(self) -> bool:
        """Whether the build for the coverage-guided engine is there."""
        return instrument.ready("fuzzer", instrument.SANITIZERS) is not None

    def canary(self, name: str, fault: str, arguments: list[str]) -> None:
        """A planted fault must be found, as a finding that is none of the known faults."""
        document = self.campaign(name, "always", ["--plant", fault, *arguments])
        part = self.parts[-1]
        new = [f for f in document["findings"] if f["known"] is None] if document else []
        # what is planted in llama-server's answers ends no server
        found = [f for f in new if not f["signature"].startswith("server-alive")]
        part["found"] = bool(found)
        if found:
            self.say(f"{name} {fault} found: {found[0]['signature']}")
        elif part["exit"] != 130:
            part["text"] = f"the planted fault {fault} was not found: do not believe this run. {part['text']}"
            self.case("part", f"{name}-found", FAILED, part["text"])
            self.say(f"{name.upper()} NOT FOUND: {part['text']}", "bold red")

    def never(self, name: str, arguments: list[str]) -> None:
        """Nothing is avoided, so every known fault, of drivers or not, must turn up."""
        document = self.campaign(name, "never", arguments)
        part = self.parts[-1]
        found = {f["known"] for f in document["findings"]} if document else set()
        library = [k for k in self.known if k.subject == "library"]
        mine = [k for k in library if (k.avoidance in DRIVER_AVOIDANCES) == (name != "never")]
        part["known_found"] = sorted(k.name for k in mine if k.name in found)
        part["known_missing"] = sorted(k.name for k in mine if k.name not in found)
        whole = document is not None and part["exit"] in (0, 1)
        for k in mine:
            if k.name in found:
                self.case("known", k.name, PASSED, k.title)
            elif whole and self.args.minutes >= SURE_FROM[name]:
                self.case("known", k.name, FAILED, f"fixed? Not found again: {k.title}")
            else:
                why = "the run was too short to tell" if whole else "the part did not end well"
                self.case("known", k.name, SKIPPED, f"fixed? Not found again, but {why}: {k.title}")

    def replay(self) -> None:
        """Every stored scenario: a known fault must still show, all else must not."""
        if not any(SCENARIOS.glob("*.json")):
            self.parts.append({"name": "replay", "exit": 0, "seconds": 0.0, "text": "corpora/scenarios is empty"})
            self.case("part", "replay", SKIPPED, "corpora/scenarios is empty")
            return
        stored = sorted(SCENARIOS.glob("*.json"))
        why = self.no_server() if any(map(_served, stored)) else ""
        left_out = [p for p in stored if why and _served(p)]
        part, document = self.call("replay", ["replay", *(str(p) for p in stored if p not in left_out)])
        if document is None:
            self.case("part", "replay", SKIPPED if part["exit"] == 130 else FAILED, part["text"], part["seconds"])
            return
        shows: dict[str, list[str]] = {}
        for k in self.known:
            shows.setdefault(k.scenario, []).append(k.name)
        for path in left_out:
            shows.pop(path.name, None)
            self.case("replay", path.name, SKIPPED, why)
        part["results"] = []
        for r in document["results"]:
            name = Path(r["path"]).name
            known = shows.pop(name, [])
            state, text = expected(r, known)
            part["results"].append({"scenario": name, "known": known, "verdict": r["verdict"], "state": state})
            self.case("replay", name, state, text)
        for name, known in shows.items():
            self.case("replay", name, FAILED, f"the scenario of {', '.join(known)} is not in corpora/scenarios")
        wrong = sum(c["class"] == "replay" and c["state"] == FAILED for c in self.cases)
        part["text"] = f"{len(document['results'])} scenarios, {wrong} not as corpora/known says"
        self.case("part", "replay", PASSED, part["text"], part["seconds"])

    # --- telling ------------------------------------------------------------------------------------------------------

    def say(self, text: str, style: str | None = None) -> None:
        """A line for people."""
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def case(self, kind: str, name: str, state: str, text: str, seconds: float = 0.0) -> None:
        """A test case."""
        self.cases.append({"class": kind, "name": name, "state": state, "text": text, "seconds": seconds})

    def exit_code(self) -> int:
        """As that of `redraft fuzz`, for all parts together."""
        exits = [p["exit"] for p in self.parts]
        if self.stopped or 130 in exits:
            return 130
        if any(p["name"].startswith("canary") and not p.get("found", p["exit"] is None) for p in self.parts):
            return 2
        if any(c["state"] == FAILED and c["class"] != "part" for c in self.cases):
            return 1
        fuzzed = [p["exit"] for p in self.parts if p["name"] in SHARE]
        if any(p["exit"] not in (0, 1, 3) for p in self.parts if not p["text"].startswith("not run")):
            return 2
        return 3 if 3 in fuzzed else 0

    def document(self) -> dict[str, Any]:
        """nightly.json, and what --json prints."""
        counts = {s: sum(c["state"] == s for c in self.cases) for s in (PASSED, FAILED, SKIPPED)}
        return {
            "began": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(self.began)),
            "minutes": self.args.minutes,
            "seed": self.seed,
            "build": str(self.args.build) if self.args.build else None,
            "exit": self.exit_code(),
            "seconds": round(time.time() - self.began, 1),
            "cases": counts,
            "not_passed": [c for c in self.cases if c["state"] != PASSED],
            "parts": self.parts,
        }

    def save(self) -> None:
        """Write both files, as far as the run has come."""
        (self.out / "nightly.json").write_text(json.dumps(self.document(), indent=2) + "\n")
        (self.out / "junit.xml").write_bytes(junit(self.cases, time.time() - self.began))

    def summary(self) -> None:
        """The end, for people."""
        self.say("")
        for p in self.parts:
            code = "not run" if p["exit"] is None else f"exit {p['exit']}"
            self.say(f"{p['name']:14} {code:8} {p['seconds']:7.0f} s  {p['text'].splitlines()[0] if p['text'] else ''}")
        for c in self.cases:
            if c["state"] != PASSED and c["class"] != "part":
                self.say(
                    f"{c['state']:8} {c['class']}: {c['name']}: {c['text']}",
                    "red" if c["state"] == FAILED else "yellow",
                )
        ended: int = self.exit_code()
        exits = {
            0: "nothing new",
            1: "news, see above",
            2: "broken",
            3: "nothing could be judged",
            130: "interrupted",
        }
        self.say(f"{exits[ended]} (exit {ended}); {self.out / 'nightly.json'}, {self.out / 'junit.xml'}", "bold")


def _served(path: Path) -> bool:
    """Whether a stored scenario is of llama-server; what is none is for the replay to tell."""
    try:
        return programs.subject_of(programs.loads(path.read_bytes())) == "server"
    except BadScenario:
        return False


def _minutes(minutes: float) -> list[str]:
    return ["--minutes", f"{minutes:.4f}"]


def expected(result: dict[str, Any], known: list[str]) -> tuple[str, str]:
    """State and text of a replayed scenario, against whether a known fault says that it must fail."""
    verdict, shown = result["verdict"], f"{result['verdict']} {result['shown']} of {result['runs']}"
    shown += f"; {result['text']}" if result["text"] else ""
    if verdict == "ERROR":
        return FAILED, shown
    if known:
        if verdict == "FIXED":
            return FAILED, f"fixed? {', '.join(known)} does not show any more; {shown}"
        return PASSED, f"{', '.join(known)}: {shown}"
    return (PASSED if verdict == "FIXED" else FAILED), shown


def junit(cases: list[dict[str, Any]], seconds: float) -> bytes:
    """JUnit XML, one suite."""
    counts = {s: str(sum(c["state"] == s for c in cases)) for s in (FAILED, SKIPPED)}
    root = ET.Element("testsuites", name="redraft nightly")
    totals = {"tests": str(len(cases)), "failures": counts[FAILED], "errors": "0", "skipped": counts[SKIPPED]}
    suite = ET.SubElement(root, "testsuite", {"name": "redraft nightly", "time": f"{seconds:.1f}", **totals})
    for c in cases:
        attributes = {"classname": f"redraft.{c['class']}", "name": _xml(c["name"]), "time": f"{c['seconds']:.1f}"}
        case = ET.SubElement(suite, "testcase", attributes)
        text = _xml(c["text"])
        first = text.splitlines()[0] if text else ""
        if c["state"] == FAILED:
            ET.SubElement(case, "failure", message=first).text = text
        elif c["state"] == SKIPPED:
            ET.SubElement(case, "skipped", message=first)
        elif text:
            ET.SubElement(case, "system-out").text = text
    ET.indent(root)
    document: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def _xml(text: str) -> str:
    """Without the characters that XML 1.0 cannot hold."""
    return "".join(
        c if c in "\t\n\r" or " " <= c <= "\ud7ff" or "\ue000" <= c <= "\ufffd" or c > "\uffff" else "?" for c in text
    )


def _positive(text: str) -> float:
    if not 0 < (x := float(text)) < 1e5:
        raise argparse.ArgumentTypeError("must be greater than 0")
    return x


def main() -> int:
    """Entry."""
    p = argparse.ArgumentParser(
        prog="ci/nightly", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("minutes", metavar="MINUTES", nargs="?", type=_positive, default=60.0, help="in all (default 60)")
    p.add_argument("--out", type=Path, metavar="DIR", help="where everything goes (default: out/nightly-DATE)")
    p.add_argument("--build", type=Path, metavar="DIR", help="another llama.cpp, as for `redraft fuzz`")
    p.add_argument("--seed", type=int, metavar="S", help="with --jobs fixes what is generated (default: random)")
    p.add_argument("--jobs", type=int, metavar="J", help="processes side by side (default: one for each core)")
    p.add_argument("--json", action="store_true", help="one JSON document on standard output, for machines")
    args = p.parse_args()
    out = (args.out or ROOT / "out" / time.strftime("nightly-%Y%m%d-%H%M%S")).resolve()
    if out.exists() and any(out.iterdir()):
        print(f"ci/nightly: {out} is not empty; give another --out", file=sys.stderr)
        return 2
    try:
        known = load_all()
    except BadKnown as e:
        print(f"ci/nightly: {e}", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    run = Run(args, out, known, Console(stderr=args.json))
    run.all()
    run.save()
    run.summary()
    if args.json:
        print(json.dumps(run.document(), indent=2))
    return run.exit_code()


if __name__ == "__main__":
    sys.exit(main())
