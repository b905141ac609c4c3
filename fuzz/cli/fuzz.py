"""Makes up programs, runs them on a real libllama, judges them, and keeps what is wrong: confirmed, reduced, one
folder for each fault.

  redraft fuzz --minutes 2
  redraft fuzz --model qwen35 --model my.gguf --build ~/llama.cpp --scenarios 5000
  redraft fuzz --out out/night --minutes 60 --avoid never     later: ... --resume

A known fault (see `redraft known`) is found once, reported as known, and stepped round from then on; --avoid always
steps round from the start, --avoid never not at all.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from fuzz import campaign
from fuzz.cli.common import Bench, Usage, add_build, add_drivers, add_json, bench
from fuzz.cli.common import console as open_console
from fuzz.models import BadModel, Model, resolve, resolve_pairs, with_driver, with_impl
from fuzz.show import Progress, final
from subjects.builds import environment
from subjects.drivers.reference import LEAVE_OUT
from subjects.planted import FAULTS
from subjects.sandbox import SandboxError

HELP = "find wrong restores: generate, run, judge, reduce, report"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _positive(text: str) -> float:
    x = _number(text)
    if not 0 < x < 1e6:
        raise argparse.ArgumentTypeError("must be greater than 0")
    return x


def _count(text: str) -> int:
    n = int(x) if (x := _number(text)).is_integer() else 0
    if n < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return n


def _layers(text: str) -> int:
    n = int(text)
    if n < 0:
        raise argparse.ArgumentTypeError("must be at least 0")
    return n


def _jobs(text: str) -> int:
    n, most = _count(text), 8 * (os.cpu_count() or 1)
    if n > most:
        raise argparse.ArgumentTypeError(f"at most {most} here, eight for each core")
    return n


def add(p: argparse.ArgumentParser) -> None:
    """Options."""
    p.add_argument(
        "--minutes",
        metavar="M",
        type=_positive,
        help="stop after so many minutes (default 2 unless --scenarios is given)",
    )
    p.add_argument(
        "--scenarios", metavar="N", type=_count, help="stop after so many programs; whichever comes first ends it"
    )
    p.add_argument(
        "--jobs", metavar="J", type=_jobs, default=None, help="processes side by side (default: one for each core)"
    )
    p.add_argument(
        "--model",
        metavar="NAME|PATH",
        action="append",
        default=[],
        help="a recipe (`redraft models`), `all`, or a GGUF file; repeatable",
    )
    p.add_argument(
        "--gpu-layers",
        metavar="N",
        type=_layers,
        default=0,
        help="layers of each model that go to the GPU, with a --build that has one (default 0: no GPU is used)",
    )
    p.add_argument(
        "--driver",
        metavar="NAME",
        action="append",
        default=[],
        help="programs with a speculative driver: a pair (`redraft pairs`), `all`, or a kind such as draft-mtp; with "
        "--model the kind for that file; repeatable",
    )
    p.add_argument(
        "--draft", metavar="NAME|PATH", help="with --driver KIND --model FILE: the draft, a recipe or a GGUF"
    )
    p.add_argument(
        "--driver-impl",
        choices=("native", "reference"),
        help="llama.cpp's own drivers, or the draft-mtp in Python (default native)",
    )
    p.add_argument(
        "--all-variants",
        action="store_true",
        help="with --driver: hold every program against the draft-mtp in Python, not one in eight",
    )
    add_build(p)
    add_drivers(p)
    p.add_argument(
        "--seed", metavar="S", type=int, help="with --jobs fixes what is generated (default: random, printed)"
    )
    p.add_argument("--out", metavar="DIR", type=Path, help="where findings and state go (default: out/fuzz-DATE)")
    p.add_argument(
        "--resume",
        action="store_true",
        help="go on with the campaign in --out (default: the newest in out/); --minutes and --scenarios are totals",
    )
    p.add_argument(
        "--avoid",
        choices=("auto", "always", "never"),
        help="stepping round known faults (default auto)",
    )
    p.add_argument(
        "--misuse",
        action="store_true",
        help="break one of the caller's duties in every program (findings of kind misuse)",
    )
    p.add_argument(
        "--fail-on",
        choices=("new", "any", "never"),
        default="new",
        help="which findings make the exit code 1 (default new)",
    )
    p.add_argument(
        "--reduce-seconds", metavar="T", type=_positive, default=30.0, help="time for reducing one finding (default 30)"
    )
    p.add_argument(
        "--plant",
        metavar="FAULT",
        default="",
        help="plant a named fault, to prove that the tool finds it: in the shim, or a part that the driver in Python "
        "leaves out",
    )
    add_json(p)


def run(args: argparse.Namespace) -> int:
    """Run a campaign."""
    _check(args)
    faults = (*(LEAVE_OUT if args.driver or args.resume else ()), *sorted(FAULTS))
    if args.plant and args.plant not in faults:
        raise Usage(f"no planted fault {args.plant!r}; there are {', '.join(faults)}")
    out = args.out or _newest() if args.resume else args.out or Path("out") / time.strftime("fuzz-%Y%m%d-%H%M%S")
    minutes = args.minutes if args.minutes or args.scenarios else 2.0
    b = bench(args.build, args.llama_src, args.driver_patch)
    try:
        before = campaign.stored(out) if args.resume else {}
        # what is not given is taken from the campaign that goes on
        if args.resume and not args.model and not args.driver:
            models = msgspec.convert(before["models"], list[Model])
        else:
            models = _models(args, b, args.plant or before.get("fault", ""))
    except (BadModel, SandboxError, campaign.CampaignError, msgspec.ValidationError, KeyError) as e:
        raise Usage(str(e)) from None
    seed = args.seed if args.seed is not None else before.get("seed", random.SystemRandom().randrange(1 << 31))
    driver = b.driver if any(m.driver for m in models) else None
    if before:
        _same_subject(before, b, driver, args)
    jobs = args.jobs or before.get("jobs") or os.cpu_count() or 1
    plan = campaign.Plan(
        models=models,
        build=b.build.fingerprint,
        seed=seed,
        jobs=jobs,
        avoid=args.avoid or before.get("avoid", "auto"),
        misuse=args.misuse or before.get("misuse", False),
        fault=args.plant or before.get("fault", ""),
        driver=driver.name if driver else "",
        drivers=_driver_options(args) if driver else [],
        variants=args.all_variants or before.get("variants", False),
    )
    console = open_console(stderr=args.json)
    seen_on = environment(b.build) | (b.driver_origin() if driver else {})
    drivers = f", drivers {seen_on['drivers']}," if driver else ""
    try:
        with campaign.prepare(out, plan, resume=args.resume):
            if not args.json:
                console.print(
                    f"Testing {b.build.name} ({b.build.fingerprint}){drivers} with "
                    f"{', '.join(m.label for m in models)}; seed {seed}, {jobs} jobs, into {out}",
                    markup=False,
                )
            with Progress(console, quiet=args.json and not console.is_terminal) as listen:
                result = campaign.run(
                    plan,
                    out,
                    shim=b.shim,
                    driver=driver,
                    cache=b.cache,
                    environment=seen_on,
                    minutes=minutes,
                    scenarios=args.scenarios,
                    reduce_seconds=args.reduce_seconds,
                    listen=listen,
                )
    except campaign.CampaignError as e:
        raise Usage(str(e)) from None
    if args.json:
        sys.stdout.write(
            msgspec.json.format(
                msgspec.json.encode({"seed": seed, "jobs": jobs, "environment": seen_on, **result.document()}),
                indent=2,
            ).decode()
            + "\n"
        )
    else:
        final(result, console)
    return result.exit_code(args.fail_on)


def _check(args: argparse.Namespace) -> None:
    """Raises Usage for options that nothing would come of."""
    if args.driver:
        if args.misuse:
            raise Usage("--misuse breaks duties of programs without a driver; leave out --misuse or --driver")
        if args.gpu_layers and not args.model:
            raise Usage("--gpu-layers: pairs run on the CPU; name a file with --model, or leave out --gpu-layers")
        if args.draft and not args.model:
            raise Usage("--draft goes with a model of yours, a pair has its own draft; add --model FILE")
        return
    if args.draft:
        raise Usage("--draft goes with a driver; add --driver KIND and --model FILE")
    if args.driver_impl:
        raise Usage("--driver-impl goes with a driver; add --driver NAME")
    if args.resume and not args.model:
        if args.gpu_layers:
            raise Usage("--gpu-layers: the campaign that goes on has its models; leave it out, or name them (--model)")
    elif args.all_variants:
        raise Usage("--all-variants goes with a driver; add --driver NAME")


def _same_subject(before: dict[str, Any], b: Bench, driver: Path | None, args: argparse.Namespace) -> None:
    """What is tested is not kept in a campaign's folder, so it must be named again. Raises Usage."""
    if before.get("build") != b.build.fingerprint:
        again = "another --build" if args.build else "--build again"
        raise Usage(f"the campaign tests build {before.get('build')}, this is {b.build.fingerprint}: give {again}")
    was, now = before.get("driver", ""), driver.name if driver else ""
    if was and now and was != now:
        missing = [o for o in before.get("drivers", ()) if not getattr(args, o[2:].replace("-", "_"))]
        why = f"give {' and '.join(missing)} again" if missing else "these are compiled from other sources"
        raise Usage(f"the campaign tests the drivers {was}, these are {now}: {why}")


def _driver_options(args: argparse.Namespace) -> list[str]:
    """The options given that say whose drivers are tested."""
    return [o for o, given in (("--llama-src", args.llama_src), ("--driver-patch", args.driver_patch)) if given]


def _models(args: argparse.Namespace, b: Bench, fault: str) -> list[Model]:
    """What is asked for: models, pairs, or a file with a kind of driver."""
    if not args.driver:
        return resolve(args.model, b.models, b.shim, args.gpu_layers)
    if args.model:
        found = [
            with_driver(m, kind, args.draft or "", b.models)
            for m in resolve(args.model, b.models, b.shim, args.gpu_layers, drivers=True)
            for kind in args.driver
        ]
    else:
        found = resolve_pairs(args.driver, b.models)
    return [with_impl(m, "reference" if fault in LEAVE_OUT else args.driver_impl or "native") for m in found]


def _newest() -> Path:
    found = sorted(Path("out").glob("*/campaign.json"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise Usage("there is no campaign in out/ to resume; give its --out")
    return found[-1].parent
