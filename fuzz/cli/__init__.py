"""The command line: `redraft VERB`. One file a verb; each has `add(parser)` and `run(args) -> exit code`."""

from __future__ import annotations

import sys

try:
    import argparse
    import traceback

    from fuzz.cli import (
        blob,
        build,
        coverage,
        doctor,
        explain,
        fuzz,
        known,
        models,
        oracles,
        pairs,
        probe,
        reduce,
        replay,
    )
    from fuzz.cli import contracts as contracts_verb
    from fuzz.cli.common import Usage
except KeyboardInterrupt:  # it takes a second
    sys.exit(130)

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
    name = "redraft"
    try:
        for given in sys.argv[1:] if argv is None else argv:
            given.encode()  # names go into JSON and findings
        args = parser().parse_args(argv)
        name = f"redraft {args.verb}"
        return int(VERBS[args.verb].run(args))
    except Usage as e:
        print(f"{name}: {e}", file=sys.stderr)
    except UnicodeEncodeError as e:
        print(f"{name}: {_unwritable(e)}", file=sys.stderr)
    except MemoryError:
        print(f"{name}: out of memory", file=sys.stderr)
    except OSError as e:
        # a reader that went away (a closed pipe) or a full disk; neither is a finding
        if not isinstance(e, BrokenPipeError):
            print(f"{name}: {e}", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    except Exception as e:  # the exit code of a traceback would say that there are new findings
        traceback.print_exc()
        print(f"{name}: this is a fault of redraft's own: {type(e).__name__}: {e}", file=sys.stderr)
    return 2


def _unwritable(e: UnicodeEncodeError) -> str:
    text = ascii(e.object)[:200]
    if e.encoding.replace("-", "").lower() == "utf8":
        return f"{text} is not UTF-8, which names must be here"
    return f"{text} cannot be written in {e.encoding}: set PYTHONUTF8=1"


if __name__ == "__main__":
    sys.exit(main())
