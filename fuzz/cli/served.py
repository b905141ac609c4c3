"""What the verbs share that start llama-server: its options, which one it is, and a judge for a program."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fuzz.campaign import Plan
from fuzz.cli.common import Usage, bench
from fuzz.loop import ServerPart
from fuzz.models import BadModel, Model
from fuzz.server.fit import valid
from fuzz.server.flags import FLAG_SETS
from fuzz.server.models import of_program, resolve
from oracles.server.judge import ServerJudge, ServerJudgement
from subjects.builds import cache_dir, cpu_model
from subjects.sandbox import SandboxError
from subjects.server.build import ServerBuild, find_server
from subjects.server.scenario import ServerScenario
from subjects.shimcache import BadBuild

SERVER_OPTIONS = ("server_bin", "src")
LIBRARY_OPTIONS = ("build", "llama_src", "driver_patch")


def add_server(p: argparse.ArgumentParser) -> None:
    """The options that say which llama-server is tested."""
    p.add_argument(
        "--server-bin",
        metavar="PATH",
        type=Path,
        help="for programs of llama-server: the llama-server to test (default: the one that `redraft build --server` "
        "made of the installed llama-cpp-python's sources)",
    )
    p.add_argument(
        "--src",
        metavar="DIR",
        type=Path,
        help="for programs of llama-server: the checkout whose server `redraft build --server --src DIR` made",
    )


def add(p: argparse.ArgumentParser) -> None:
    """The options of a campaign over llama-server."""
    add_server(p)
    p.add_argument(
        "--flags",
        metavar="NAME",
        action="append",
        default=[],
        help=f"with --subject server: {', '.join(FLAG_SETS)}; repeatable (default: drawn for every few programs)",
    )


def refused(args: argparse.Namespace) -> None:
    """Raises Usage for options of llama-server where the library is tested."""
    for option in ("server_bin", "src", "flags"):
        if getattr(args, option):
            raise Usage(f"--{option.replace('_', '-')} goes with --subject server; add it, or leave this out")


def check(args: argparse.Namespace) -> None:
    """Raises Usage for options that llama-server has no use for."""
    for option in ("engine", "target", "misuse", "driver_impl", "llama_src", "driver_patch", "gpu_layers"):
        if getattr(args, option):
            raise Usage(f"--{option.replace('_', '-')} goes with --subject library; leave it out")
    if args.build:
        raise Usage("--build names a libllama; the server is named with --server-bin PATH, or --src CHECKOUT")
    for name in args.flags:
        if name not in FLAG_SETS:
            raise Usage(f"no flag set {name!r}; there are {', '.join(FLAG_SETS)}")


def build(args: argparse.Namespace) -> ServerBuild:
    """The llama-server that the options name. Raises Usage where it is not there."""
    try:
        return find_server(args.server_bin, args.src)
    except BadBuild as e:
        raise Usage(str(e)) from None


def part(found: ServerBuild, flags: list[str]) -> ServerPart:
    """What jobs are told of it."""
    return ServerPart(
        path=str(found.path), fingerprint=found.fingerprint, name=found.name, version=found.version, flags=flags
    )


def named(args: argparse.Namespace) -> str:
    """The option that named the server, as findings say it: without paths of this machine."""
    if args.server_bin:
        return "--server-bin PATH/TO/llama-server"
    return "--src DIR" if args.src else ""


def go_on(args: argparse.Namespace, before: dict[str, Any]) -> None:
    """Take the server of the campaign that goes on where none is named."""
    if args.server_bin or args.src:
        return
    args.server_bin = Path(before["server_bin"]) if before.get("server_bin") else None
    args.src = Path(before["server_src"]) if before.get("server_src") else None


def check_fits(args: argparse.Namespace, *, server: bool) -> None:
    """Refuse options that name what a program cannot run on. Raises Usage."""
    if server:
        given = [o for o in LIBRARY_OPTIONS if getattr(args, o)]
        if given:
            how = "name it with --server-bin PATH or --src DIR"
            raise Usage(f"this program is of llama-server: {how}, not {_as(given)}")
        return
    given = [o for o in SERVER_OPTIONS if getattr(args, o)]
    if given:
        raise Usage(f"this program is of the library: name a build of it with --build DIR, not {_as(given)}")


def _as(options: list[str]) -> str:
    return " and ".join(f"--{o.replace('_', '-')}" for o in options)


def environment(found: ServerBuild, options: str = "") -> dict[str, str | int | list[str]]:
    """What findings say of where they were seen; no paths. options: see `named`."""
    return {
        **({"options": options} if options else {}),
        "build": found.name,
        "kind": "server",
        "fingerprint": found.fingerprint,
        "llama_cpp": found.version or "unknown",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1),
    }


def told(plan: Plan) -> dict[str, Any]:
    """What --json says beside of what was asked of a campaign over llama-server. flags: empty for all."""
    if plan.subject != "server":
        return {}
    return {
        "models": [m.label for m in plan.models],
        "drivers": list(dict.fromkeys(m.driver.kind for m in plan.models if m.driver)),
        "flags": plan.flags,
    }


def models(args: argparse.Namespace) -> list[Model]:
    """The models, or pairs, that the options of a campaign name. Raises BadModel."""
    return resolve(args.model, args.driver, args.draft, cache_dir() / "models", _shim)


def _shim() -> Path:
    """What files are looked at with."""
    return bench(None).shim


@contextmanager
def judge_of(found: ServerBuild, program: ServerScenario) -> Iterator[tuple[ServerJudge, Model]]:
    """A judge for the model of a stored program. Raises Usage."""
    try:
        model = of_program(program, cache_dir() / "models", _shim)
    except (BadModel, SandboxError) as e:
        raise Usage(str(e)) from None
    draft = Path(model.draft) if model.draft else None
    with ServerJudge(found, model.ref, Path(model.path), draft, cache_dir(), model.traits.memory) as judge:
        yield judge, model


def check_duties(program: ServerScenario) -> None:
    """Refuse a program whose requests do not mean anything. Raises Usage."""
    if wrong := valid(program):
        raise Usage("; ".join(wrong))


def stopped(j: ServerJudgement) -> str:
    """Why a run says nothing of what it was to show: the server could not be started or asked. Empty where it did, or
    the server ended by itself, which is an answer."""
    end = j.trace.end
    return end.text or end.how if end.how in ("error", "start") and not j.violations else ""
