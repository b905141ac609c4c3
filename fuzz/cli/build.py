"""Builds llama.cpp with clang so that a fuzzer can follow it: with counters of edges, with sanitizers, or with the
coverage that llvm-cov reports; or builds llama-server. Takes minutes, once; what is built is kept in the cache.

  redraft build                                  for the fuzz targets: counters and both sanitizers
  redraft build --src ~/llama.cpp                the same of your checkout; again after an edit: only what it changed
  redraft build --coverage report                for a report of regions and branches
  redraft build --sanitize address               no counters: for `redraft fuzz --build`
  redraft build --server                         llama-server, as people run it: for `redraft fuzz --subject server`
  redraft build --server --src ~/llama.cpp       the same of your checkout

Standard output has the directory first, then how it is used. `ci/setup --fuzz` installs what instrumented builds need:
clang and atheris; the server takes the ordinary compiler. Ctrl-C is safe: the next time goes on.
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
from subjects.server.build import find_server, made_server, ready_server
from subjects.shimcache import BadBuild

HELP = "build llama.cpp with coverage counters and sanitizers, or llama-server"


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
    p.add_argument("--server", action="store_true", help="build llama-server, uninstrumented, with the usual compiler")
    add_json(p)


def _sanitizers(text: str) -> tuple[str, ...]:
    names = tuple(x.strip() for x in text.split(",") if x.strip())
    if not names or not set(names) <= set(instrument.SANITIZERS):
        raise argparse.ArgumentTypeError(f"{text!r}: name {' or '.join(instrument.SANITIZERS)}, or both with a comma")
    return names


def run(args: argparse.Namespace) -> int:
    """Build, and say how it is used."""
    if args.server:
        return _server(args)
    neither = args.coverage is None and args.sanitize is None
    coverage: instrument.Coverage | None = "fuzzer" if neither else args.coverage
    sanitize = instrument.SANITIZERS if neither else args.sanitize or ()
    targets = ("llama", "llama-common") if args.driver else ("llama",)
    if coverage == "report" and sanitize:
        raise Usage("--sanitize: `redraft coverage` uses no sanitizer; leave out --sanitize, or --coverage report")
    try:
        with stoppable():
            if there := instrument.ready(coverage, sanitize, args.src, targets=targets):
                _say(f"it is there already, nothing is to be built: {there}")
            build = there or instrument.made(coverage, sanitize, args.src, targets=targets, say=_say)
        variables = instrument.variables(build)
    except BadBuild as e:
        raise Usage(str(e)) from None
    if args.json:
        stamp = instrument.stamp_of(build)
        print(json.dumps({"build": str(build), "environment": variables, **_facts(stamp)}, indent=2))
        return 0
    print(build)
    usual = coverage == "fuzzer" and set(sanitize) == set(instrument.SANITIZERS)
    for line in _uses(build, coverage, args.src, usual=usual):
        print(f"  {line}")
    return 0


def _server(args: argparse.Namespace) -> int:
    if args.coverage or args.sanitize or args.driver:
        raise Usage("--server: the server is built without instruments; leave out --coverage, --sanitize and --driver")
    try:
        with stoppable():
            if there := ready_server(args.src):
                _say(f"it is there already, nothing is to be built: {there}")
            build = there or made_server(args.src, say=_say)
        found = find_server(src=args.src)
    except BadBuild as e:
        raise Usage(str(e)) from None
    if args.json:
        about = {"server": str(found.path), "version": found.version, "fingerprint": found.fingerprint}
        print(json.dumps({"build": str(build), **about, **_facts(instrument.stamp_of(build))}, indent=2))
        return 0
    print(build)
    # the build of the installed release is the one that is taken where none is named
    named = f" --server-bin {shlex.quote(str(found.path))}" if args.src else ""
    print(f"  redraft fuzz --subject server{named}")
    return 0


def _say(text: str) -> None:
    print(f"redraft build: {text}", file=sys.stderr, flush=True)


def _facts(stamp: instrument.Stamp | None) -> dict[str, object]:
    if stamp is None:  # taken away this moment
        return {}
    names = ("coverage", "sanitize", "targets", "sources", "seconds")
    return {name: getattr(stamp, name) for name in names}


def _uses(build: Path, coverage: instrument.Coverage | None, src: Path | None, *, usual: bool) -> list[str]:
    """Commands that use a build. usual: it is of the kind that they take where none is named."""
    own = f" --build {shlex.quote(str(build))}"
    if coverage == "report":
        return ["redraft coverage" + (f" --src {shlex.quote(str(src))}" if src else "")]
    if coverage is None:
        return [f"redraft fuzz{own}"]
    named = "" if usual and src is None else own
    return [f"redraft doctor{named}", f"redraft fuzz --engine coverage{named}"]
