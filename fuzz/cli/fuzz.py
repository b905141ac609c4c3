"""Makes up programs, runs them on a real libllama, judges them, and keeps what is wrong: confirmed, reduced, one
folder for each fault.

  redraft fuzz --minutes 2
  redraft fuzz --model qwen35 --model my.gguf --build ~/llama.cpp --scenarios 5000
  redraft fuzz --out out/night --minutes 60 --avoid never     later: ... --resume

  redraft build                                         once: a llama.cpp with counters and sanitizers
  redraft fuzz --engine coverage --minutes 60           libFuzzer makes up the inputs, by what they reach
  redraft fuzz --engine coverage --target seq_state     one of its targets

  redraft build --server                                once: llama-server
  redraft fuzz --subject server --minutes 10            conversations with it: turns, edits, branches, slots, restarts
  redraft fuzz --subject server --server-bin ~/llama.cpp/build/bin/llama-server --model qwen35 --model my.gguf
  redraft fuzz --subject server --driver draft-mtp --flags ram-cache --requests 10000

With --engine coverage the inputs are damaged and rebuilt states, mostly. What one meets is run, judged and reduced on
the ordinary library, so that `redraft replay` shows it again; what shows on the build with sanitizers alone says so.
With --build and what `redraft build --src CHECKOUT` made, all is judged on that build: it is what is tested.
The corpora are kept in --out and go on growing with --resume. Edges are branches of llama.cpp's code that were taken,
features tell them apart by how often one input took them, too; both are libFuzzer's.

With --subject server a program is a list of requests to a llama-server of its own, whose flags are part of it. Every
answer must be that of a cold server (no cache, no checkpoints, no drafting) to the same request. Checked requests are
those whose answers were held against one, and the slot actions that were judged.

A known fault (see `redraft known`) is found once, reported as known, and stepped round from then on; --avoid always
steps round from the start, --avoid never not at all.
"""

from __future__ import annotations

import argparse
import difflib
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fuzz import campaign, targets
from fuzz.cli import served
from fuzz.cli.common import Bench, Usage, add_drivers, add_json, bench
from fuzz.cli.common import console as open_console
from fuzz.engine import picture
from fuzz.loop import Coverage
from fuzz.models import BadModel, Model, resolve, resolve_pairs, with_driver, with_impl
from fuzz.repro.phrases import count
from fuzz.show import Progress, final
from subjects import instrument
from subjects.builds import (
    BadBuild,
    Build,
    NoDrivers,
    cache_dir,
    compile_shim,
    driver_library,
    driver_origin,
    environment,
    find_build,
)
from subjects.drivers.reference import LEAVE_OUT
from subjects.planted import FAULTS
from subjects.sandbox import SandboxError
from subjects.server.planted import PLANTED

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
        "--subject",
        choices=("library", "server"),
        help="what is tested: libllama through its own interface, or llama-server (default library)",
    )
    served.add(p)
    p.add_argument(
        "--requests",
        metavar="N",
        type=_count,
        help="with --subject server: stop after so many checked requests",
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
        help="with --driver: hold every program against the draft-mtp in Python, not one in eight; with --subject "
        "server: compare every program, not one in eight, with other histories",
    )
    p.add_argument(
        "--engine",
        choices=("hypothesis", "coverage"),
        help="what makes up programs: hypothesis, blindly, or libFuzzer, by the code that they reach (default "
        "hypothesis)",
    )
    p.add_argument(
        "--target",
        metavar="NAME",
        action="append",
        default=[],
        help=f"with --engine coverage: {', '.join(targets.NAMES)}; repeatable (default: all)",
    )
    p.add_argument(
        "--build",
        metavar="DIR",
        type=Path,
        help="a llama.cpp build tree or install directory to test (default: the installed llama-cpp-python); with "
        "--engine coverage one that `redraft build` made (default: the one that it makes without options); one made "
        "with --src is judged by itself, not by the installed llama-cpp-python",
    )
    add_drivers(p)
    p.add_argument(
        "--seed", metavar="S", type=int, help="with --jobs fixes what is generated (default: random, printed)"
    )
    p.add_argument("--out", metavar="DIR", type=Path, help="where findings and state go (default: out/fuzz-DATE)")
    p.add_argument(
        "--resume",
        action="store_true",
        help="go on with the campaign in --out (default: the newest in out/); --minutes, --scenarios and --requests "
        "are totals",
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
        help="plant a named fault, to prove that the tool finds it: in the shim, a part that the driver in Python "
        "leaves out, or between llama-server and its client",
    )
    add_json(p)


def run(args: argparse.Namespace) -> int:
    """Run a campaign."""
    _check(args)
    out = args.out or _newest() if args.resume else args.out or Path("out") / time.strftime("fuzz-%Y%m%d-%H%M%S")
    try:
        before = campaign.stored(out) if args.resume else {}
    except campaign.CampaignError as e:
        raise Usage(str(e)) from None
    subject = args.subject or before.get("subject", "library")
    if before and subject != before.get("subject", "library"):
        raise Usage(f"the campaign tests the {before.get('subject', 'library')}; leave out --subject")
    setup = _server(args, before) if subject == "server" else _library(args, before)
    return _campaign(args, out, setup)


@dataclass(frozen=True)
class Setup:
    """A campaign that is about to run. testing: what its first line says of it."""

    plan: campaign.Plan
    tested: campaign.Tested
    testing: str


def _campaign(args: argparse.Namespace, out: Path, setup: Setup) -> int:
    """Run it and say what was found."""
    plan, tested = setup.plan, setup.tested
    seed, jobs, coverage = plan.seed, plan.jobs, tested.coverage
    minutes = args.minutes if args.minutes or args.scenarios or args.requests else 2.0
    console = open_console(stderr=args.json)
    try:
        with campaign.prepare(out, plan, resume=args.resume):
            if not args.json:
                console.print(
                    f"Testing {setup.testing} with {', '.join(m.label for m in plan.models)}; {_targets_on(coverage)}"
                    f"seed {seed}, {count(jobs, 'job')}, into {out}",
                    markup=False,
                )
            with Progress(console, quiet=args.json and not console.is_terminal) as listen:
                result = campaign.run(
                    plan,
                    out,
                    tested,
                    minutes=minutes,
                    scenarios=args.scenarios,
                    requests=args.requests,
                    reduce_seconds=args.reduce_seconds,
                    listen=listen,
                )
            if coverage:
                _picture(result, out / "coverage.png")
    except campaign.CampaignError as e:
        raise Usage(str(e)) from None
    if args.json:
        where = {**tested.environment, **({"instrumented": _instrumented(coverage)} if coverage else {})}
        sys.stdout.write(
            msgspec.json.format(
                msgspec.json.encode(
                    {"seed": seed, "jobs": jobs, "environment": where, **served.told(plan), **result.document()}
                ),
                indent=2,
            ).decode()
            + "\n"
        )
    else:
        final(result, console)
    return result.exit_code(args.fail_on)


def _library(args: argparse.Namespace, before: dict[str, Any]) -> Setup:
    """A campaign over the library. Raises Usage."""
    served.refused(args)
    if args.requests:
        raise Usage("--requests counts answers of llama-server; add --subject server, or say --scenarios")
    faults = (*(LEAVE_OUT if args.driver or args.resume else ()), *sorted(FAULTS))
    _planted(args.plant, faults)
    engine = args.engine or before.get("engine", "hypothesis")
    if engine == "coverage":
        args.target = args.target or before.get("targets", [])
        _check_coverage(args)
    elif args.target:
        raise Usage("--target goes with --engine coverage")
    coverage: Coverage | None = None
    if engine == "coverage":
        b, coverage = _coverage(args)
    else:
        b = bench(args.build, args.llama_src, args.driver_patch)
    alone = coverage if coverage and coverage.alone else None
    try:
        # what is not given is taken from the campaign that goes on
        if args.resume and not args.model and not args.driver:
            models = msgspec.convert(before["models"], list[Model])
        else:
            fault = args.plant or before.get("fault", "")
            models = _covered(args, b, coverage) if coverage else _models(args, b, fault)
    except (BadModel, SandboxError, campaign.CampaignError, msgspec.ValidationError, KeyError) as e:
        raise Usage(str(e)) from None
    driver = None
    if any(m.driver for m in models):
        driver = Path(alone.driver) if alone else b.driver
    if before:
        _same_subject(before, b, driver, args)
    plan = campaign.Plan(
        models=models,
        build=b.build.fingerprint,
        **_asked(args, before),
        misuse=args.misuse or before.get("misuse", False),
        driver=driver.name if driver else "",
        drivers=_driver_options(args) if driver else [],
        variants=args.all_variants or before.get("variants", False),
        engine=engine,
        targets=coverage.targets if coverage else [],
        coverage_build=coverage.fingerprint if coverage else "",
    )
    seen_on = {**alone.environment} if alone else environment(b.build)
    if driver and not alone:
        seen_on |= b.driver_origin()
    drivers = f", drivers {seen_on['drivers']}," if driver else ""
    return Setup(
        plan,
        campaign.Tested(b.cache, seen_on, b.shim, driver, coverage),
        f"{b.build.name} ({b.build.fingerprint}){drivers}",
    )


def _server(args: argparse.Namespace, before: dict[str, Any]) -> Setup:
    """A campaign over llama-server. Raises Usage."""
    served.check(args)
    _planted(args.plant, tuple(PLANTED))
    again = "another" if args.server_bin or args.src else "its"
    served.go_on(args, before)
    try:  # names first: to have the server made takes minutes
        if args.resume and not args.model and not args.driver:
            models = msgspec.convert(before["models"], list[Model])
        else:
            models = served.models(args)
    except (BadModel, SandboxError, msgspec.ValidationError, KeyError) as e:
        raise Usage(str(e)) from None
    build = served.build(args)
    if before and before.get("build") != build.fingerprint:
        raise Usage(
            f"the campaign tests llama-server {before.get('build')}, this is {build.fingerprint}: give {again} "
            "--server-bin or --src"
        )
    flags = list(dict.fromkeys(args.flags)) or before.get("flags", [])
    plan = campaign.Plan(
        models=models, build=build.fingerprint, subject="server", flags=flags, **_asked(args, before),
        variants=args.all_variants or before.get("variants", False),
        server_bin=str(build.path) if args.server_bin else "", server_src=str(args.src.absolute()) if args.src else "",
    )  # fmt: skip
    tested = campaign.Tested(
        cache_dir(), served.environment(build, served.named(args)), server=served.part(build, flags)
    )
    return Setup(plan, tested, f"{build.name} ({build.fingerprint})")


def _planted(fault: str, faults: tuple[str, ...]) -> None:
    """Raises Usage for a fault that nothing can plant."""
    if fault and fault not in faults:
        raise Usage(f"no planted fault {fault!r}; there are {', '.join(faults)}")


def _asked(args: argparse.Namespace, before: dict[str, Any]) -> dict[str, Any]:
    """What every campaign is asked; what is not given is taken from the one that goes on."""
    return {
        "seed": args.seed if args.seed is not None else before.get("seed", random.SystemRandom().randrange(1 << 31)),
        "jobs": args.jobs or before.get("jobs") or os.cpu_count() or 1,
        "avoid": args.avoid or before.get("avoid", "auto"),
        "fault": args.plant or before.get("fault", ""),
    }


def _instrumented(coverage: Coverage) -> str:
    return f"{Path(coverage.build).name} ({coverage.fingerprint})"


def _targets_on(coverage: Coverage | None) -> str:
    """Where targets run, for the first line."""
    return f"targets {', '.join(coverage.targets)} on {_instrumented(coverage)}; " if coverage else ""


def _picture(result: campaign.Result, path: Path) -> None:
    """Draw the coverage; a full disk costs no more than the picture."""
    try:
        picture.draw(result.status.targets(), result.status.seconds, path)
    except OSError as e:
        text = f"cannot write {path}: {e.strerror}"
        result.status.troubles.append(text)
        print(f"redraft fuzz: {text}", file=sys.stderr)


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
    elif args.all_variants and args.subject != "server":
        raise Usage("--all-variants goes with a driver; add --driver NAME")


def _check_coverage(args: argparse.Namespace) -> None:
    """Raises Usage for options that the coverage-guided engine has no use for."""
    for option in ("scenarios", "misuse", "plant", "draft", "driver_impl", "all_variants", "gpu_layers"):
        if getattr(args, option):
            raise Usage(f"--{option.replace('_', '-')} goes with --engine hypothesis; leave it out")
    for name in args.target:
        if name not in targets.NAMES:
            near = difflib.get_close_matches(name, targets.NAMES)
            raise Usage(
                f"no target {name!r}; "
                + (f"did you mean {near[0]}?" if near else f"there are {', '.join(targets.NAMES)}")
            )
    if args.model and args.driver:
        raise Usage(
            f"--model and --driver: --driver names pairs (`redraft pairs`) for {', '.join(targets.DRIVEN)}, --model "
            "models for the other targets; give one of them here, or a model with a driver to --engine hypothesis"
        )
    if args.model and args.target and {*args.target} <= targets.DRIVEN:
        raise Usage(
            f"--model: {', '.join(dict.fromkeys(args.target))} runs on pairs (`redraft pairs`); name them with "
            "--driver, or add a target without a driver"
        )
    if args.driver and args.target and not targets.DRIVEN & {*args.target}:
        raise Usage(f"--driver goes with the target {', '.join(targets.DRIVEN)}; add it, or leave out --driver")


def _coverage(args: argparse.Namespace) -> tuple[Bench, Coverage]:
    """What is tested, and what the coverage-guided engine runs on: for an instrumented build of the installed
    llama-cpp-python's sources that and the library itself, for one of other sources the same build.

    Raises Usage where it is not there.
    """
    try:
        path = args.build or instrument.ready("fuzzer", instrument.SANITIZERS)
        stamp = instrument.stamp_of(path) if path else None
        if path is None:
            raise Usage("there is no build with counters yet: make it with `redraft build`, which takes minutes, once")
        if stamp is None or stamp.coverage != "fuzzer":
            raise Usage(f"{path} is no build with counters: make one with `redraft build`, or leave out --build")
        build = find_build(path)
        names = list(dict.fromkeys(args.target)) or list(targets.NAMES)
        with instrument.loadable(path):
            shim = compile_shim(build)
            driver = _driver_of(build, args) if targets.DRIVEN & {*names} else None
            own = environment(build)
            if driver:
                own |= driver_origin(build, driver, args.llama_src, args.driver_patch)
        alone = not instrument.of_release(stamp)
        if alone:
            b = Bench(build, shim, cache_dir(), args.llama_src, args.driver_patch)
        else:
            b = bench(None, args.llama_src, args.driver_patch)
            own["llama_cpp"] = b.build.version or "unknown"  # sources without git do not know their commit
        made = "redraft build --src" if stamp.of_checkout else "redraft build"
        return b, Coverage(
            targets=[n for n in names if driver or n not in targets.DRIVEN],
            build=str(path.resolve()),
            fingerprint=build.fingerprint,
            shim=str(shim),
            driver=str(driver or ""),
            variables=instrument.variables(path),
            environment={
                **own,
                "build": f"{build.name}, made by `{made}` of {instrument.origin(stamp)}, under whose printed "
                "environment it must be run",
            },
            alone=alone,
        )
    except BadBuild as e:
        raise Usage(str(e)) from None


def _driver_of(build: Build, args: argparse.Namespace) -> Path | None:
    """The drivers on the instrumented build; None, and a line that says so, where it has none and nobody asks for them.

    Raises Usage.
    """
    try:
        return driver_library(build, args.llama_src, args.driver_patch)
    except NoDrivers as e:
        left_out = ", ".join(targets.DRIVEN)
        if args.driver or targets.DRIVEN & {*args.target}:
            raise Usage(f"{e} (`redraft build --driver` does)") from None
        print(f"{left_out} is left out: the build has no drivers; `redraft build --driver` adds them", file=sys.stderr)
        return None


def _covered(args: argparse.Namespace, b: Bench, coverage: Coverage) -> list[Model]:
    """Models of the coverage-guided engine's targets: plain, and pairs for those with a driver. Raises BadModel."""
    driven = targets.DRIVEN & {*coverage.targets}
    with instrument.loadable(Path(coverage.build) if coverage.alone else None):
        plain = resolve(args.model, b.models, b.shim) if {*coverage.targets} - driven else []
    return plain + (resolve_pairs(args.driver or ["all"], b.models) if driven else [])


def _same_subject(before: dict[str, Any], b: Bench, driver: Path | None, args: argparse.Namespace) -> None:
    """What is tested is not kept in a campaign's folder, so it must be named again. Raises Usage."""
    if before.get("engine", "hypothesis") != (args.engine or before.get("engine", "hypothesis")):
        raise Usage(f"the campaign runs with --engine {before.get('engine', 'hypothesis')}; leave out --engine")
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
