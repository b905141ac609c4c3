"""The command line: `redraft VERB`. One file a verb; each has `add(parser)` and `run(args) -> exit code`."""

from __future__ import annotations

import argparse
import sys

from fuzz.cli import blob, build, coverage, doctor, explain, fuzz, known, models, oracles, pairs, probe, reduce, replay
from fuzz.cli import contracts as contracts_verb
from fuzz.cli.common import Usage

VERBS = {
    "fuzz": fuzz,
    "replay": replay,
    "reduce": reduce,
    "explain": explain,
    "probe": probe,
    "blob": blob,
    "models": models,
    "pairs": pairs,
    "oracles": oracles,
    "contracts": contracts_verb,
    "known": known,
    "build": build,
    "coverage": coverage,
    "doctor": doctor,
}


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="redraft",
        description=(
            "Finds wrong state restores in llama.cpp: makes up programs of save, pollute, restore, roll back and "
            "redraft, runs them on a real build in child processes, and says what came out wrong, with the smallest "
            "program that shows it."
        ),
        epilog=(
            "Exit codes: 0 nothing new, 1 new findings (or a replay that fails), 2 usage or configuration, 3 nothing "
            "could be judged, 130 interrupted. `redraft VERB --help` teaches a verb."
        ),
    )
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, module in VERBS.items():
        sub = verbs.add_parser(
            name, help=module.HELP, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add(sub)
    return top


def main(argv: list[str] | None = None) -> int:
    """Entry of the `redraft` command."""
    args = parser().parse_args(argv)
    try:
        return int(VERBS[args.verb].run(args))
    except Usage as e:
        print(f"redraft {args.verb}: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        # a reader that went away (a closed pipe) or a full disk; neither is a finding
        if not isinstance(e, BrokenPipeError):
            print(f"redraft {args.verb}: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
