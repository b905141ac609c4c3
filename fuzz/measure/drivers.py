"""Two figures of speculative drivers: llama.cpp's draft-mtp and the one in Python agree, and a campaign is silent on a
draft-mtp whose state is saved.

  ci/drivers
  ci/drivers agreement --programs 10000 --seed 5
  ci/drivers silence --programs 20000

agreement: every program runs with both drivers, without saved driver states (ours offers more of them), and every draft
must be the same tokens, for one head, chained heads and memory shared with the target.
silence: a campaign without avoidance on drivers built with tests/planted/mtp_state.patch, each pair its share; what
is a known fault of libllama's memory is shown apart.

Exit 0 when both hold, 1 when not, 2 when something could not be run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from fuzz.cli.common import Bench, Usage, bench
from fuzz.drivers.gen import strategy
from fuzz.loop import slice_seed
from fuzz.models import from_pair
from fuzz.strategies import generate
from oracles.account import Account
from oracles.ledger import Ledger
from oracles.two_drivers import TwoDrivers
from subjects import pairs
from subjects.sandbox import Sandbox

ROOT = Path(__file__).resolve().parents[2]
PATCH = ROOT / "tests" / "planted" / "mtp_state.patch"
MTP = ("qwen35-mtp", "step35-mtp", "gemma4-mtp")
SLICE = 100
ELSEWHERE = ("driver-purge",)
"""known faults of libllama's memory, met under a driver: not on account of its state, and no driver can mend them"""
PARTS = ("agreement", "silence")


def main() -> int:
    """Entry."""
    p = argparse.ArgumentParser(
        prog="ci/drivers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("part", nargs="?", choices=PARTS, help="only this one (default: both)")
    p.add_argument("--programs", type=int, metavar="N", help="programs (default 10000 for each pair, 20000 in all)")
    p.add_argument("--seed", type=int, default=1, metavar="S", help="of what is generated (default 1)")
    p.add_argument("--pair", action="append", choices=MTP, help="only this pair; repeatable")
    p.add_argument("--build", type=Path, metavar="DIR", help="another llama.cpp, as for `redraft fuzz`")
    p.add_argument("--json", action="store_true", help="one JSON document on standard output, for machines")
    args = p.parse_args()
    console = Console(stderr=True)
    names = tuple(args.pair or MTP)
    result: dict[str, Any] = {}
    try:
        if args.part != "silence":
            b = bench(args.build)
            result["agreement"] = [agreement(b, name, args.programs or 10000, args.seed, console) for name in names]
        if args.part != "agreement":
            result["silence"] = silence(names, args.programs or 20000, args.seed, args.build)
    except Usage as e:
        print(f"ci/drivers: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    reached = all(r["different"] == 0 and r["drafts"] for r in result.get("agreement", [])) and (
        not result.get("silence", {}).get("findings") and result.get("silence", {}).get("judged", 1) > 0
    )
    if args.json:
        print(json.dumps({"reached": reached, **result}, indent=2))
    for r in result.get("agreement", []):
        console.print(
            f"{r['pair']}: {r['programs']} programs, {r['drafts']} drafting calls compared, {r['different']} different "
            f"({r['seconds']:.0f} s)",
            highlight=False,
        )
    if s := result.get("silence"):
        console.print(
            f"patched drivers: {s['programs']} programs, {s['judged']} with judged comparisons, "
            f"{len(s['findings'])} findings {s['findings']}, {len(s['elsewhere'])} known of libllama's memory",
            highlight=False,
        )
    console.print("reached" if reached else "missed", style="bold green" if reached else "bold red")
    return 0 if reached else 1


def agreement(b: Bench, name: str, programs: int, seed: int, console: Console) -> dict[str, Any]:
    """Both drivers on the same programs."""
    model = from_pair(pairs.get(name), b.models)
    assert model.driver is not None
    path, oracle = Path(model.path), TwoDrivers()
    drafts = different = done = 0
    began = time.monotonic()
    first: str = ""
    with (
        Sandbox(b.shim, [(path, 0)], driver=b.driver, drafts=model.drafts()) as sandbox,
        Progress(console=console, transient=True) as bar,
    ):
        task = bar.add_task(name, total=programs)
        number = 0
        while done < programs:
            made = strategy(model.ref, model.driver, model.traits, model.n_rs)
            for program in generate(made, slice_seed(seed, 0, 1, number), SLICE)[: programs - done]:
                base, other = oracle.base(program), oracle.variant(program)
                done += 1
                bar.advance(task)
                assert base is not None and other is not None
                one = sandbox.run(base, path)
                two = sandbox.run(other, path, fault=oracle.variant_fault(one))
                verdict = oracle.compare(Account(Ledger(base, one)), Account(Ledger(other, two)))
                drafts += verdict.compared
                bad = bool(verdict.violations) or one.end != two.end
                different += bad
                if bad and not first:
                    first = program.key()
            number += 1
    return {
        "pair": name,
        "programs": done,
        "drafts": drafts,
        "different": different,
        "first": first,
        "seconds": time.monotonic() - began,
    }


def silence(names: tuple[str, ...], programs: int, seed: int, build: Path | None) -> dict[str, Any]:
    """A campaign on drivers that save their state."""
    with tempfile.TemporaryDirectory(prefix="redraft-drivers-") as scratch:
        command = [str(Path(sys.executable).with_name("redraft")), "fuzz", "--json", "--avoid", "never"]
        for name in names:
            command += ["--driver", name]
        command += ["--driver-patch", str(PATCH), "--scenarios", str(programs), "--seed", str(seed)]
        command += ["--out", f"{scratch}/out", *(["--build", str(build)] if build else [])]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        raise Usage(f"the campaign ended with {done.returncode}; try {' '.join(command)}")
    document = json.loads(done.stdout)
    return {
        "programs": document["scenarios"],
        "judged": document["scenarios"] - document["unknown"],
        "per_second": document["per_second"],
        "findings": [f["signature"] for f in document["findings"] if f["known"] not in ELSEWHERE],
        "elsewhere": [f["signature"] for f in document["findings"] if f["known"] in ELSEWHERE],
    }


if __name__ == "__main__":
    sys.exit(main())
