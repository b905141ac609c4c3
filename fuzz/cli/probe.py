"""Measures what a restore costs a speculative driver: at some positions of a prompt, by every route that the model has.

  redraft probe --model qwen35
  redraft probe --model my-model.gguf --positions 512,2048 --route host-partial,rollback --threads 16
  redraft probe --model target.gguf --draft eagle3.gguf --build ~/llama.cpp --out out/my-pr
  redraft probe --model gemma4 --draft gemma4-assistant

At each position it saves target and draft memory and what the driver offers of its state, does other work, restores,
and goes on for a few tokens with a draft at each. It does so twice, with the driver's state left out and put back, and
compares both with a run that went straight on: the hidden row that the next token is paired with, the draft's logits,
the tokens that the target accepts, the target's own logits; with bytes and times of the checkpoint. Where a driver
offers no state, "restored" is a driver that was kept from the other work, which a second driver did on the same
contexts.

A model is a recipe by name (`redraft models`) or a GGUF file. Without --driver, a model with NextN (MTP) layers drafts
for itself, a --draft decides by its architecture, and anything else is probed without a driver: then only the target's
own logits are compared. Each route runs in a child process: a crash costs its row in the table. What goes into --out:
probe.md (for a pull request), probe.csv, probe.json, probe.png and probe.svg.

Routes: host and host-partial (flags 0 and 1 of llama_state_seq_get_data_ext), device and device-partial (2 and 3), file
(llama_state_seq_save_file), rollback (seq_rm behind a verify batch), replay (the prompt once more).

Ctrl-C and SIGTERM end it with what was measured so far written.

Exit 0 when something was measured, 2 on wrong usage or where no route applies to the model, 3 when every run failed,
130 when it was stopped.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast, get_args

import msgspec

from fuzz.cli.common import Bench, Usage, add_build, add_drivers, add_json, bench
from fuzz.cli.common import console as open_console
from fuzz.drivers.fit import Gguf, Misfit, check, look, sized
from fuzz.models import from_recipe, sha256
from fuzz.probe.header import read
from fuzz.probe.measure import ROUTES, Plan
from fuzz.probe.progress import progress
from fuzz.probe.stopping import stoppable
from fuzz.probe.table import ProbeError, Report, count, probe
from subjects.pairs import states_kept
from subjects.recipes import get, names
from subjects.scenario import ContextParams, DriverKind, DriverParams, token

HELP = "a table of what a restore costs a speculative driver, by position and route"

KINDS: tuple[str, ...] = get_args(DriverKind)
_SMALL = 64 << 20


def _positions(text: str) -> list[int]:
    try:
        found = sorted({int(x) for x in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers like 34,35,59,76") from None
    if found[0] < 2 or found[-1] > 1 << 20:
        raise argparse.ArgumentTypeError("positions are numbers of tokens from 2 on")
    return found


def _routes(text: str) -> list[str]:
    wanted = text.split(",")
    for x in wanted:
        if x not in ROUTES:
            raise argparse.ArgumentTypeError(f"no route {x!r}; there are {', '.join(ROUTES)}")
    return wanted


def _number(least: int, most: int) -> Any:
    def parse(text: str) -> int:
        try:
            n = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not least <= n <= most:
            raise argparse.ArgumentTypeError(f"must be from {least} to {most}")
        return n

    return parse


def add(p: argparse.ArgumentParser) -> None:
    """Options."""
    p.add_argument("--model", metavar="NAME|PATH", required=True, help="the target: a recipe or a GGUF file")
    p.add_argument("--draft", metavar="NAME|PATH", help="the draft's model, where the target does not draft for itself")
    p.add_argument(
        "--driver", choices=[*KINDS, "none"], metavar="KIND", help=f"{', '.join(KINDS)}, or none (default: see above)"
    )
    p.add_argument(
        "--positions",
        metavar="N,N,...",
        type=_positions,
        default=[34, 35, 59, 76],
        help="tokens before the checkpoint (default 34,35,59,76)",
    )
    p.add_argument(
        "--route",
        metavar="ROUTE,...",
        type=_routes,
        action="append",
        help=f"only these of {', '.join(ROUTES)}; repeatable",
    )
    p.add_argument(
        "--rounds", metavar="N", type=_number(1, 64), default=4, help="tokens to go on for, a draft at each (default 4)"
    )
    p.add_argument(
        "--n-max",
        metavar="N",
        type=_number(1, 16),
        default=3,
        help="length of a draft, and of a rollback (default 3; ngram-cache drafts 8)",
    )
    p.add_argument(
        "--pollute", metavar="N", type=_number(2, 4096), default=24, help="tokens of the other work (default 24)"
    )
    p.add_argument("--seed", metavar="S", type=_number(0, 1 << 31), default=0, help="of prompt and weights (default 0)")
    p.add_argument(
        "--prompt-tokens",
        metavar="FILE",
        type=Path,
        help="token ids of the prompt, with spaces or commas between (default: pseudo-random ones)",
    )
    p.add_argument(
        "--repeat", metavar="N", type=_number(1, 99), default=3, help="saves and restores that are timed (default 3)"
    )
    p.add_argument("--kv", choices=("f32", "f16", "bf16", "q8_0"), default="f32", help="K and V (default f32)")
    p.add_argument("--flash-attn", action="store_true", help="flash attention (default off: honest noise is smaller)")
    p.add_argument("--ubatch", metavar="N", type=_number(8, 4096), default=64, help="n_batch and n_ubatch (default 64)")
    p.add_argument(
        "--threads",
        metavar="N",
        type=_number(1, 1024),
        help="threads (default: 1 for small models, otherwise all cores)",
    )
    p.add_argument(
        "--gpu-layers", metavar="N", type=_number(0, 9999), default=0, help="layers on the GPU (default 0: no GPU)"
    )
    p.add_argument(
        "--patience", metavar="S", type=_number(1, 1 << 20), default=600, help="silence that is a hang (default 600 s)"
    )
    p.add_argument("--out", metavar="DIR", type=Path, help="where the files go (default: out/probe-DATE)")
    add_build(p)
    add_drivers(p)
    add_json(p)


def run(args: argparse.Namespace) -> int:
    """Measure, write, print."""
    try:
        with stoppable() as ignore_signals:
            return _run(args, ignore_signals)
    except KeyboardInterrupt:
        print("redraft probe: stopped; nothing is written", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace, ignore_signals: Callable[[], None]) -> int:
    b = bench(args.build, args.llama_src, args.driver_patch)
    model = _open(args.model, b, args.seed)
    draft = _open(args.draft, b, args.seed) if args.draft else None
    kind = _kind(args.driver, model, draft)
    own = [o for o, given in (("--llama-src", args.llama_src), ("--driver-patch", args.driver_patch)) if given]
    if own and not kind:
        raise Usage(f"no driver is probed here, so {' and '.join(own)} would do nothing; name a --driver")
    try:
        drivers = str(b.driver) if kind else ""
    except Usage as e:
        without = f" (without {' and '.join(own)})" if own else ""
        raise Usage(f"{e}\n--driver none{without} probes the target without a driver") from None
    routes = list(dict.fromkeys(x for part in args.route or [list(ROUTES)] for x in part))
    plan = _plan(args, b, model, draft, kind, drivers)
    out = args.out or Path("out") / time.strftime("probe-%Y%m%d-%H%M%S")
    _check_out(out)
    report = _measure(args, plan, routes, _about(args, b, plan, model, draft, kind))
    if not report.cells and not report.stopped:
        raise Usage(f"no route applies to {model.label}: {'; '.join(f'{r}: {w}' for r, w in report.unfit.items())}")
    ignore_signals()
    written = _write(report, out)
    if args.json:
        from fuzz.probe.writers import json_text

        sys.stdout.write(json_text(report))
    else:
        from fuzz.probe.writers import show

        console = open_console()
        show(report, console)
        console.print(f"\nWritten to {out}: {', '.join(written)}", markup=False)
    if report.stopped:
        print(f"redraft probe: stopped; what was measured so far is in {out}", file=sys.stderr)
        return 130
    return 0 if any(c.compared for c in report.cells) else 3


def _measure(args: argparse.Namespace, plan: Plan, routes: list[str], about: dict[str, Any]) -> Report:
    runs = count(plan, args.positions, routes)
    with progress(open_console(stderr=True), runs, args.positions[-1]) as listen:
        try:
            return probe(plan, args.positions, routes, about, listen, args.patience)
        except ProbeError as e:
            raise Usage(str(e)) from None


def _check_out(out: Path) -> None:
    """See beforehand whether files can go there. The folder itself is made once there is something to put into it."""
    there = next((p for p in (out, *out.absolute().parents) if p.exists()), Path("/"))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise Usage(f"cannot write into {out}: {there} is {'write-protected' if there.is_dir() else 'no folder'}")


def _write(report: Report, out: Path) -> list[str]:
    """Names of the files."""
    from fuzz.probe.picture import draw
    from fuzz.probe.writers import files

    out.mkdir(parents=True, exist_ok=True)
    texts = files(report)
    for name, text in texts:
        (out / name).write_text(text, "utf-8")
    return [name for name, _ in texts] + [p.name for p in draw(report, out)]


def _open(wanted: str, b: Bench, seed: int) -> Gguf:
    if wanted in names(drivers=True):
        path = Path(from_recipe(get(wanted), b.models, seed).path)
    elif Path(wanted).is_file():
        path = Path(wanted).resolve()
    else:
        raise Usage(f"{wanted!r} is neither a file nor a recipe; recipes are {', '.join(names(drivers=True))}")
    try:
        found = look(path, wanted if wanted in names(drivers=True) else path.name)
    except Misfit as e:
        raise Usage(str(e)) from None
    if found.n_vocab < 2:
        raise Usage(f"{path.name} names neither tokens nor a {found.architecture}.vocab_size")
    return found


def _kind(asked: str | None, model: Gguf, draft: Gguf | None) -> DriverKind | None:
    """The driver's kind, None for none. Raises Usage where it cannot work with these models."""
    if asked is None:
        if draft is None:
            asked = "draft-mtp" if model.nextn else "none"
        elif draft.architecture == "eagle3":
            asked = "draft-eagle3"
        else:
            asked = "draft-mtp" if draft.nextn else "draft-simple"
    if asked == "none":
        if draft:
            raise Usage("--driver none uses no --draft")
        return None
    kind = cast(DriverKind, asked)
    try:
        check(kind, model, draft)
    except Misfit as e:
        raise Usage(f"{e}; --driver none probes the target without a driver") from None
    return kind


def _plan(
    args: argparse.Namespace, b: Bench, model: Gguf, draft: Gguf | None, kind: DriverKind | None, drivers: str
) -> Plan:
    n = args.positions[-1]
    driver = sized(DriverParams(kind=kind, n_max=args.n_max)) if kind else None
    n_max = driver.n_max if driver else args.n_max
    n_vocab = min(model.n_vocab, draft.n_vocab) if draft and kind == "draft-simple" else model.n_vocab

    def made(stream: int, length: int) -> list[int]:
        return [token(2 * args.seed + stream, i, n_vocab) for i in range(length)]

    prompt = _prompt(args.prompt_tokens, n, model) if args.prompt_tokens else made(0, n)
    rooms = n + max(args.pollute, args.rounds + 2 * n_max) + n_max + 8
    _check_room(model, n, rooms)
    # a rollback keeps n_max states, which a ubatch must be longer than by more than one
    ubatch = max(args.ubatch, n_max + 3)
    params = ContextParams(
        n_ctx=-(-rooms // 256) * 256,
        n_batch=ubatch,
        n_ubatch=ubatch,
        n_seq_max=1,
        # what llama-server sets
        n_rs_seq=states_kept(kind, n_max),
        type_k=args.kv,
        type_v=args.kv,
        flash_attn=args.flash_attn,
        offload_kqv=args.gpu_layers > 0,
        n_threads=args.threads or (1 if model.path.stat().st_size < _SMALL else os.cpu_count() or 1),
    )
    return Plan(
        shim=str(b.shim),
        drivers=drivers,
        model=str(model.path),
        draft=str(draft.path) if draft else "",
        n_gpu_layers=args.gpu_layers,
        params=params,
        driver=driver,
        prompt=prompt,
        other=made(1, args.pollute),
        rounds=args.rounds,
        depth=n_max,
        repeat=args.repeat,
    )


def _check_room(model: Gguf, position: int, rooms: int) -> None:
    most = read(model.path).get(f"{model.architecture}.context_length")
    if isinstance(most, int) and 0 < most < rooms:
        raise Usage(
            f"position {position} takes a context of {rooms} tokens with what comes behind it, and {model.label} is "
            f"made for {most} ({model.architecture}.context_length); name smaller --positions"
        )


def _prompt(path: Path, n: int, model: Gguf) -> list[int]:
    try:
        text = path.read_text("utf-8")
        tokens = [int(x) for x in text.replace("[", " ").replace("]", " ").replace(",", " ").split()]
    except (OSError, ValueError) as e:
        raise Usage(f"{path} holds no token ids: {e}") from None
    if len(tokens) < n:
        raise Usage(f"{path} has {len(tokens)} tokens, the last position needs {n}; name others with --positions")
    bad = next((t for t in tokens if not 0 <= t < model.n_vocab), None)
    if bad is not None:
        raise Usage(f"{path}: token {bad} is not in the vocabulary of {model.label} (0 to {model.n_vocab - 1})")
    return tokens[:n]


def _about(
    args: argparse.Namespace, b: Bench, plan: Plan, model: Gguf, draft: Gguf | None, kind: str | None
) -> dict[str, Any]:
    """What the results are of; file names, no paths."""
    made = f"{len(plan.prompt)} pseudo-random tokens, seed {args.seed}"
    prompt = f"{len(plan.prompt)} tokens of {args.prompt_tokens.name}" if args.prompt_tokens else made
    return {
        "model": model.label,
        "architecture": model.architecture,
        "model_bytes": model.path.stat().st_size,
        "model_sha256": sha256(model.path),
        "draft": draft.label if draft else None,
        "draft_bytes": draft.path.stat().st_size if draft else None,
        "draft_sha256": sha256(draft.path) if draft else None,
        "driver": kind,
        "rounds": plan.rounds,
        "n_max": plan.depth,
        "pollute": len(plan.other),
        "prompt": f"prompt of {prompt}",
        "seed": args.seed,
        "params": msgspec.to_builtins(plan.params),
        "n_gpu_layers": plan.n_gpu_layers,
        "build": f"{b.build.name} ({b.build.fingerprint}){_drivers_of(args, plan)}",
        "llama_cpp": b.build.version or "llama.cpp of unknown version",
        "command": _command(args, plan, kind),
    }


def _drivers_of(args: argparse.Namespace, plan: Plan) -> str:
    """Where the drivers are from, when they are not the build's; no folders. The hash is that of all that went in."""
    if not args.llama_src and not args.driver_patch:
        return ""
    made = "compiled from the given checkout" if args.llama_src else "of the build"
    words = f", drivers {made} (hash {Path(plan.drivers).name.partition('-')[0]})"
    return f"{words}, patched with {args.driver_patch.name}" if args.driver_patch else words


def _typed(path: Path) -> str:
    """A path as it was typed, or DIR in place of folders that only this machine has."""
    if not path.is_absolute():
        return str(path)
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return "DIR" if path.is_dir() else f"DIR/{path.name}"


def _command(args: argparse.Namespace, plan: Plan, kind: str | None) -> str:
    """The same again."""

    def named(model: str) -> str:
        return model if model in names(drivers=True) else _typed(Path(model))

    words = ["redraft", "probe", "--model", named(args.model)]
    words += ["--draft", named(args.draft)] if args.draft else []
    words += ["--driver", kind or "none", "--positions", ",".join(map(str, args.positions))]
    words += [w for part in args.route or [] for w in ("--route", ",".join(part))]
    words += ["--rounds", str(args.rounds), "--n-max", str(plan.depth), "--pollute", str(args.pollute)]
    words += ["--prompt-tokens", _typed(args.prompt_tokens)] if args.prompt_tokens else []
    words += ["--seed", str(args.seed), "--kv", args.kv, "--ubatch", str(args.ubatch)]
    words += ["--threads", str(plan.params.n_threads), "--repeat", str(args.repeat)]
    words += ["--build", _typed(args.build)] if args.build else []
    words += ["--llama-src", _typed(args.llama_src)] if args.llama_src else []
    words += ["--driver-patch", _typed(args.driver_patch)] if args.driver_patch else []
    words += ["--flash-attn"] if args.flash_attn else []
    words += ["--gpu-layers", str(args.gpu_layers)] if args.gpu_layers else []
    return shlex.join(words)
