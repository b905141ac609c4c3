"""Whether what is reported of llama-server is a fault: many requests with each set of flags, known faults avoided.

  ci/soundness
  ci/soundness --requests 500 --flags ram-cache --keep out/soundness

For each set of flags campaigns (`redraft fuzz --subject server --avoid always`) check at least so many requests, a
third each on a dense, a sliding-window and a hybrid recipe; programs that are begun are checked to their end. What it
reports as new is shown: each must have a reproducer that a person wrote, and be a fault, or there must be none. What
could not be judged is counted by its reason, and what the server did beside: a set of flags under which nothing is
restored says nothing.

Exit 0 when nothing new was reported, 1 when something was, 2 when a campaign could not be run, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fuzz.measure.stopping import like_ctrl_c
from fuzz.server.flags import FLAG_SETS
from subjects.server.build import find_server
from subjects.shimcache import BadBuild

ROOT = Path(__file__).resolve().parents[2]
REDRAFT = str(Path(sys.executable).with_name("redraft"))
MODELS = ("llama", "gemma3", "qwen35")
_NO_END = "10000"
"""minutes: requests end a campaign"""


class Stop(Exception):
    """A campaign could not be run; the message says why."""


def main() -> int:
    """Entry."""
    p = argparse.ArgumentParser(
        prog="ci/soundness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--requests", type=int, default=10_000, metavar="N", help="at least N with each set of flags (default 10000)"
    )
    p.add_argument("--flags", action="append", choices=[*FLAG_SETS], metavar="NAME", help="this set only; repeatable")
    p.add_argument("--model", action="append", metavar="NAME|PATH", help=f"instead of {', '.join(MODELS)}; repeatable")
    p.add_argument("--jobs", type=int, metavar="J", help="processes of each campaign (default: one for each core)")
    p.add_argument("--seed", type=int, default=1, metavar="S", help="of all campaigns (default 1)")
    p.add_argument("--keep", type=Path, metavar="DIR", help="keep the campaigns there (default: removed at the end)")
    p.add_argument("--json", action="store_true", help="one JSON document on standard output, for machines")
    args = p.parse_args()
    if args.requests < 1:
        p.error("--requests takes a number from 1")
    like_ctrl_c()
    console = Console(stderr=args.json, highlight=False, soft_wrap=True)
    scratch = Path(tempfile.mkdtemp(prefix="redraft-soundness-")) if args.keep is None else args.keep.resolve()
    sets: list[dict[str, Any]] = []
    try:
        name = find_server().name
        for flags in args.flags or FLAG_SETS:
            models = args.model or MODELS
            share = math.ceil(args.requests / len(models))
            sets.append(summary(flags, {m: checked(args, flags, m, share, scratch) for m in models}))
            console.print(line(sets[-1]))
    except (Stop, BadBuild) as e:
        print(f"ci/soundness: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        if args.keep is None:
            shutil.rmtree(scratch, ignore_errors=True)
    result = {
        "server": name,
        "models": args.model or [*MODELS],
        "requests": sum(s["requests"] for s in sets),
        "seed": args.seed,
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "new": sorted({f["signature"] for s in sets for f in s["new"]}),
        "sets": sets,
    }
    show(result, console)
    if args.json:
        print(json.dumps(result, indent=2))
    return 1 if result["new"] else 0


def checked(args: argparse.Namespace, flags: str, model: str, requests: int, out: Path) -> dict[str, Any]:
    """The document of one campaign. Raises Stop."""
    folder = out / flags / Path(model).stem
    command = [REDRAFT, "fuzz", "--subject", "server", "--flags", flags, "--model", model, "--json"]
    command += ["--requests", str(requests), "--minutes", _NO_END, "--avoid", "always", "--seed", str(args.seed)]
    command += ["--out", str(folder)]
    command += ["--jobs", str(args.jobs)] if args.jobs else []
    # in a session of its own: Ctrl-C is ours to hand on
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        text, said = process.communicate()
    except BaseException:
        process.terminate()
        process.communicate()
        raise
    name = f"the campaign with {flags} on {model}"
    if process.returncode not in (0, 1) or not text:
        last = said.strip().splitlines()[-1:]
        raise Stop(f"{name} ended with {process.returncode}: {' '.join(last)}")
    document: dict[str, Any] = json.loads(text)
    if document["requests"] < requests:
        raise Stop(f"{name} checked {document['requests']} requests of {requests}")
    return document


def summary(flags: str, campaigns: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What counts of the campaigns with a set of flags, by model."""
    all_ = campaigns.values()
    findings = [{k: f[k] for k in ("signature", "title", "known", "path")} for d in all_ for f in d["findings"]]
    return {
        "flags": flags,
        "requests": sum(d["requests"] for d in all_),
        "shares": {model: d["requests"] for model, d in campaigns.items()},
        "programs": sum(d["scenarios"] for d in all_),
        "seconds": round(sum(d["seconds"] for d in all_), 1),
        "unknown": _added(d["reasons"] for d in all_),
        "new": [f for f in findings if f["known"] is None],
        "known": [f for f in findings if f["known"] is not None],
        "unreproduced": sum(d["unreproduced"] for d in all_),
        "asked": _added(d["coverage"] for d in all_),
        "deeds": _added(d["deeds"] for d in all_),
    }


def _added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for c in counts:
        total.update(c)
    return dict(total.most_common())


def line(s: dict[str, Any]) -> str:
    """A set of flags in one line, as soon as it is over."""
    return (
        f"{s['flags']}: {s['requests']} requests of {s['programs']} programs, {len(s['new'])} new findings, "
        f"{sum(s['unknown'].values())} programs with something that could not be judged; {s['seconds']:.0f} s"
    )


def show(result: dict[str, Any], console: Console) -> None:
    """The table: a row for each set of flags."""
    table = Table(title=f"{result['server']}, on {', '.join(result['models'])}", title_justify="left")
    table.add_column("flags", no_wrap=True)
    for name in ("checked", "unknown", "new"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what the server did")
    for s in result["sets"]:
        deeds = ", ".join(f"{n} {name}" for name, n in s["deeds"].items())
        counts = (s["requests"], sum(s["unknown"].values()), len(s["new"]))
        table.add_row(s["flags"], *map(str, counts), deeds)
    console.print(table)
    for reason in sorted({r for s in result["sets"] for r in s["unknown"]}):
        n = sum(s["unknown"].get(reason, 0) for s in result["sets"])
        console.print(f"not judged in {n} programs: {reason}", markup=False)
    for s in result["sets"]:
        for f in s["new"]:
            console.print(f"new with {s['flags']}: {f['title']}  ({f['signature']})", style="red", markup=False)
    console.print(
        "new findings" if result["new"] else "nothing new", style="bold red" if result["new"] else "bold green"
    )


if __name__ == "__main__":
    sys.exit(main())
