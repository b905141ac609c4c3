"""Branch and line coverage of llama.cpp's state code: by the programs in corpora/, by a campaign of M minutes over all
recipes, and, beside it, by upstream's two state tests. The build is made once, which takes minutes.

  redraft coverage --minutes 30 --out out/coverage
  redraft coverage --minutes 0 --corpus out/fuzz-...      what a campaign of the coverage-guided engine left
  redraft coverage --src ~/llama.cpp --upstream

What counts are the functions in fuzz/coverage/functions.txt: everything that saves, restores, removes, copies, shifts,
finds slots or answers positions. Failing sides of assertions and blocks that only log for debugging do not. Ctrl-C ends
what runs, and what was measured so far is shown.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from fuzz.cli.common import Bench, Usage, add_json, bench, judge_of
from fuzz.cli.common import console as open_console
from fuzz.coverage import engine, measure, page, table
from fuzz.coverage.functions import BadList
from fuzz.coverage.measure import CannotMeasure, NotRun, Source
from fuzz.probe.stopping import stoppable
from oracles.judge import Judge
from subjects import instrument
from subjects.scenario import Scenario
from subjects.shimcache import BadBuild

HELP = "what of llama.cpp's state code our programs reach"

_SCENARIOS = Path(__file__).resolve().parent.parent.parent / "corpora" / "scenarios"


def add(p: argparse.ArgumentParser) -> None:
    """Options."""
    p.add_argument("--minutes", metavar="M", type=_minutes, default=5.0, help="of a campaign; 0 for none (default 5)")
    p.add_argument("--seed", metavar="S", type=int, help="of the campaign (default: random, printed)")
    p.add_argument(
        "--corpus",
        metavar="OUT",
        type=Path,
        action="append",
        default=[],
        help="the folder of a campaign of the coverage-guided engine: its inputs are run as well; repeatable",
    )
    p.add_argument(
        "--scenarios",
        metavar="PATH",
        type=Path,
        action="append",
        default=[],
        help="programs to run in place of those in corpora/: files or folders; repeatable",
    )
    p.add_argument(
        "--upstream",
        action="store_true",
        help=f"print {' and '.join(measure.UPSTREAM)} beside it (built on first use)",
    )
    p.add_argument(
        "--src",
        metavar="DIR",
        type=Path,
        help="a llama.cpp checkout to measure (default: that of the installed llama-cpp-python)",
    )
    p.add_argument("--out", metavar="DIR", type=Path, help="write the report as HTML: index.html and pages of sources")
    add_json(p)


def _minutes(text: str) -> float:
    try:
        x = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= x < 1e6:
        raise argparse.ArgumentTypeError("must be at least 0")
    return x


def run(args: argparse.Namespace) -> int:
    """Measure and show."""
    # first: what is wrong is not found out after half an hour
    for path in args.scenarios:
        if not path.exists():
            raise Usage(f"--scenarios {path}: No such file or directory")
    if args.out:
        _writable(args.out)
    written = True
    try:
        tools = measure.tools()
        targets = ("llama", *((measure.GENERATOR, *measure.UPSTREAM) if args.upstream else ()))
        with stoppable():
            build = instrument.made("report", src=args.src, targets=targets, say=_say)
            b = bench(build)
        with tempfile.TemporaryDirectory(prefix="redraft-coverage-", ignore_cleanup_errors=True) as scratch:
            folder = Path(scratch)
            sources, interrupted = _measure(args, b, build, folder)
            report = measure.report(b.build.fingerprint, b.build.libllama, sources, tools, folder)
            if report is None:
                why = [n for s in sources for n in s.notes if n != measure.NOTHING]
                raise CannotMeasure("; ".join([measure.NOTHING, *why]))
            if args.json:
                document = msgspec.json.format(msgspec.json.encode(table.document(report)), indent=2)
                sys.stdout.write(document.decode() + "\n")
            else:
                table.show(report, open_console())
            sys.stdout.flush()
            if args.out:
                written = _page(report, tools, folder, args.out)
    except (BadBuild, BadList, CannotMeasure) as e:
        raise Usage(str(e)) from None
    return 130 if interrupted else 0 if written else 2


def _writable(out: Path) -> None:
    """Make the folder and write into it. Raises Usage."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out) as f:
            f.write(b"x")
    except OSError as e:
        raise Usage(f"cannot write into {out}: {e.strerror}") from None


def _page(report: measure.Report, tools: measure.Tools, folder: Path, out: Path) -> bool:
    """Write the report as HTML; False, and a line, where it cannot be: the table is there already."""
    try:
        _say(f"wrote {page.write(report, tools, folder / 'union.profdata', out)}")
    except (OSError, CannotMeasure) as e:
        _say(f"cannot write into {out}: {e}")
        return False
    return True


def _measure(args: argparse.Namespace, b: Bench, build: Path, folder: Path) -> tuple[list[Source], bool]:
    """Everything that was asked for, until somebody interrupts."""
    sources: list[Source] = []
    inputs = engine.of_campaigns(args.corpus)  # first: a wrong folder is not found out after half an hour

    def source(name: str, *, ours: bool = True) -> Source:
        sources.append(Source(name, ours, folder / f"source{len(sources)}"))
        return sources[-1]

    def corpora() -> None:
        s = source("corpora")
        programs, bad = measure.stored(args.scenarios or [_SCENARIOS])
        s.notes += bad
        if not args.scenarios:
            programs += engine.of_seeds(b.models)
        measure.run_programs(programs, lambda p: _judge(b, p), s, _say)

    def campaign() -> None:
        _say(f"campaign: {args.minutes:g} minutes over all recipes")
        measure.run_campaign(build, args.minutes, args.seed, source("campaign"), folder)

    def guided() -> None:
        measure.run_programs(inputs, lambda p: _judge(b, p), source("guided"), _say)

    steps: list[Callable[[], None]] = [corpora]
    steps += [campaign] if args.minutes else []
    steps += [guided] if args.corpus else []
    if args.upstream:
        steps.append(lambda: measure.run_upstream(build, source("upstream", ours=False), folder, _say))
    try:
        with stoppable():
            for step in steps:
                step()
    except KeyboardInterrupt:
        sources[-1].notes.append("interrupted")
        return sources, True
    return sources, False


@contextmanager
def _judge(b: Bench, program: Scenario) -> Iterator[Judge]:
    try:
        with judge_of(b, program) as (judge, _):
            yield judge
    except Usage as e:
        raise NotRun(str(e)) from None


def _say(text: str) -> None:
    print(f"redraft coverage: {text}", file=sys.stderr, flush=True)
