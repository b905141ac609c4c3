"""Builds llama.cpp with clang so that a fuzzer can follow it: with counters of edges, with sanitizers, or with the
coverage that llvm-cov reports. Takes minutes, once; what is built is kept in the cache.

  redraft build                                  for the fuzz targets: counters and both sanitizers
  redraft build --src ~/llama.cpp                the same of your checkout; again after an edit: only what it changed
  redraft build --coverage report                for a report of regions and branches
  redraft build --sanitize address               no counters: for `redraft fuzz --build`, as is printed

Standard output has the directory first, then how it is used. `ci/setup --fuzz` installs what this needs: clang and
atheris. Ctrl-C is safe: the next time goes on.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from fuzz.cli.common import Usage, add_json
from fuzz.probe.stopping import stoppable
from subjects import instrument
from subjects.shimcache import BadBuild

HELP = "build llama.cpp with coverage counters and sanitizers"


def add(p: argparse.ArgumentParser) -> None:
    """Options."""
    p.add_argument(
        "--src",
        metavar="DIR",
        type=Path,
        help="a llama.cpp checkout; a copy of it is built (default: that of the installed llama-cpp-python)",
    )
    p.add_argument(
        "--sanitize",
        metavar="NAME[,NAME]",
        type=_sanitizers,
        help="address, undefined, or both (default: both, where --coverage is not given)",
    )
    p.add_argument(
        "--coverage",
        choices=("fuzzer", "report"),
        help="fuzzer: counters that libFuzzer follows; report: what llvm-cov shows (default: fuzzer, where --sanitize "
        "is not given)",
    )
    p.add_argument("--driver", action="store_true", help="build libllama-common too: the speculative drivers")
    add_json(p)


def _sanitizers(text: str) -> tuple[str, ...]:
    names = tuple(x.strip() for x in text.split(",") if x.strip())
    if not names or not set(names) <= set(instrument.SANITIZERS):
        raise argparse.ArgumentTypeError(f"{text!r}: name {' or '.join(instrument.SANITIZERS)}, or both with a comma")
    return names


def run(args: argparse.Namespace) -> int:
    """Build, and say how it is used."""
    neither = args.coverage is None and args.sanitize is None
    coverage: instrument.Coverage | None = "fuzzer" if neither else args.coverage
    sanitize = instrument.SANITIZERS if neither else args.sanitize or ()
    targets = ("llama", "llama-common") if args.driver else ("llama",)
    try:
        with stoppable():
            build = instrument.made(coverage, sanitize, args.src, targets=targets, say=_say)
        variables = instrument.variables(build)
    except BadBuild as e:
        raise Usage(str(e)) from None
    if args.json:
        stamp = instrument.stamp_of(build)
        print(json.dumps({"build": str(build), "environment": variables, **_facts(stamp)}, indent=2))
        return 0
    print(build)
    for line in _uses(build, coverage, variables):
        print(f"  {line}")
    return 0


def _say(text: str) -> None:
    print(f"redraft build: {text}", file=sys.stderr, flush=True)


def _facts(stamp: instrument.Stamp | None) -> dict[str, object]:
    if stamp is None:  # taken away this moment
        return {}
    names = ("coverage", "sanitize", "targets", "sources", "seconds")
    return {name: getattr(stamp, name) for name in names}


def _uses(build: Path, coverage: instrument.Coverage | None, variables: dict[str, str]) -> list[str]:
    own = shlex.quote(str(build))
    loaded = shlex.join(["env", *(f"{k}={v}" for k, v in variables.items())])
    proof = [f"redraft doctor --build {own}"] if coverage == "fuzzer" else []
    return [*proof, f"{loaded} redraft fuzz --build {own}"]
