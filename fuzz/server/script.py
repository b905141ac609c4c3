"""Prints a finding as repro.sh: a plain script that starts llama-server and asks it with curl, nothing of redraft."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuzz.repro.phrases import count
from fuzz.repro.text import WIDTH
from fuzz.server.model import made
from fuzz.server.words import seen_with, units
from oracles.band import FAR
from oracles.server.band import cold_flags
from subjects.scenario import DriverParams, ModelRef
from subjects.server.client import TIMEOUT
from subjects.server.process import argv
from subjects.server.runner import body_of
from subjects.server.scenario import (
    AnyRequest,
    Chat,
    DamageFile,
    EraseSlot,
    Flags,
    Restart,
    RestoreSlot,
    SaveSlot,
    ServerScenario,
    Together,
    Turn,
    file_name,
)
from subjects.server.trace import Reply, ServerTrace
from subjects.trace import Piece

if TYPE_CHECKING:
    from fuzz.server.finding import ServerFinding

_INDENT = "    "
# stand for what the script knows only when it runs
_SERVER, _MODEL, _DRAFT, _SAVES = "@server@", "@model@", "@draft@", "@saves@"
_VARIABLES = {_SERVER: '"$server"', _MODEL: '"$model"', _DRAFT: '"$draft"', f"{_SAVES}/": '"$work/saves/"'}

_HEAD = """\
#!/usr/bin/env bash
{doc}
#
#     ./repro.sh {usage}
#
# llama-server: its path; else $LLAMA_SERVER, else what is in PATH. Needs curl and python3{numpy}.
# Exit code: 1 reproduced, 0 not, 2 it could not be run.

set -u
"""

_SET_UP = """\
{given}if [ -z "$(command -v "$server")" ]; then
    echo "not found: $server" >&2
    exit 2
fi
for variable in "${{!LLAMA_@}}"; do # they would be flags
    unset "$variable"
done
export LLAMA_TRACE=1 GGML_NO_BACKTRACE=1
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d) || exit 2
mkdir "$work/saves"
pid=

stop() {{ # the server
    if [ -n "$pid" ]; then
        kill "$pid" 2> /dev/null
        for _ in $(seq 100); do
            kill -0 "$pid" 2> /dev/null || break
            sleep 0.05
        done
        kill -9 "$pid" 2> /dev/null
        wait "$pid" 2> /dev/null
        pid=
    fi
}}
leave() {{
    trap - EXIT
    stop
    rm -rf "$work"
}}
trap leave EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
"""

_WRITE = """\
python3 "$here/model.py" {paths} || exit 2
"""

_GIVEN = """\
if [ $# -lt {n} ]; then
    echo "usage: $0 {usage}" >&2
    exit 2
fi
"""

_FOUND = """\
if [ ! -f "${name}" ]; then
    echo "not found: ${name}" >&2
    exit 2
fi
"""

_FUNCTIONS = """\
exec 3>&2 2> /dev/null # without what bash itself says of a server that ends
answers() {{ python3 "$here/answers.py" "$@" 2>&3; }}

# start LOG COMMAND...: a server on a free port
start() {{
    log=$work/$1
    shift
    : > "$log"
    "$@" > "$log" 2>&1 3>&- &
    pid=$!
    for _ in $(seq 2400); do
        port=$(sed -n 's|.*listening on http://127.0.0.1:\\([0-9]*\\).*|\\1|p' "$log" | head -n 1)
        [ -n "$port" ] && return
        kill -0 "$pid" 2> /dev/null || break
        sleep 0.05
    done
    echo "the server does not start:"
    last
    exit {start}
}}

last() {{ # what the server said at its end: an assertion, or the last lines
    local said
    said=$(grep -E 'GGML_ASSERT|GGML_ABORT|terminate called|what\\(\\)|fatal error' "$log" | sed 's|/[^ :]*/||g')
    if [ -n "$said" ]; then echo "$said"; else tail -n 5 "$log"; fi
}}

# post LABEL PATH BODY: ask; the answer is in a file
post() {{
    curl -sS --max-time {hang} -o "$work/$1" -H 'Content-Type: application/json' --data-binary @- \\
        "http://127.0.0.1:$port$2" 2> "$work/$1.error" <<< "$3"
    echo $? > "$work/$1.code"
}}

# post_some LABEL PATH BODY N: ask, and go away after N parts of the answer, of a line and an empty one each
post_some() {{
    mkfifo "$work/$1.pipe"
    curl -sSN --max-time {hang} -H 'Content-Type: application/json' --data-binary @- "http://127.0.0.1:$port$2" \\
        > "$work/$1.pipe" 2> /dev/null <<< "$3" &
    local client=$!
    head -n $((2 * $4 - 1)) < "$work/$1.pipe" > "$work/$1"
    kill "$client" 2> /dev/null
    wait "$client" 2> /dev/null
    : > "$work/$1.error"
    if [ -s "$work/$1" ]; then echo 0; else echo 52; fi > "$work/$1.code"
}}

# told LABEL WHAT: what was answered, if the server lives
told() {{
    local code
    code=$(cat "$work/$1.code")
    if [ "$code" -eq 28 ]; then
        echo "$2: no answer within {hang} s"
        exit {hung}
    fi
    for _ in $(seq 100); do # an end may take a while
        if ! kill -0 "$pid" 2> /dev/null; then
            wait "$pid" 2> /dev/null
            echo "$2: THE SERVER DIED (status $?):"
            pid=
            last
            exit {died}
        fi
        [ "$code" -eq 0 ] && break
        sleep 0.05
    done
    if [ "$code" -ne 0 ]; then
        echo "$2: $(cat "$work/$1.error")"
        exit {broken}
    fi
    echo "$2: $(answers show "$work/$1")"
}}

ask() {{ post "$1" "$2" "$3"; told "$1" "request $1"; }}
ask_some() {{ post_some "$@"; told "$1" "request $1"; }}
"""


def repro_sh(finding: ServerFinding, trace: ServerTrace) -> str:
    """The script: 1 as exit code where the finding is there, 0 where it is not, 2 where it cannot tell."""
    program, check = finding.scenario, finding.check
    given = _given(program)
    usage = " ".join([*(f"{name.upper()}.gguf" for name in given), "[llama-server]"])
    alive = check.kind == "alive"
    head = _HEAD.format(doc=_doc(finding), usage=usage, numpy=" with numpy" if made(program) else "")
    names = [f"{name}=${{{i}:-}}" for i, name in enumerate(given, 1)]
    names.append(f"server=${{{len(given) + 1}:-${{LLAMA_SERVER:-llama-server}}}}")
    blocks = [head + "\n".join(names) + "\n" + _set_up(usage, given) + _write(program)]
    how = trace.end.how
    dead = {"start": how == "start", "died": alive, "broken": how == "broken", "hung": finding.hang}
    codes = {name: 1 if shown else 2 for name, shown in dead.items()}
    blocks.append(_FUNCTIONS.format(hang=int(TIMEOUT), **codes))
    blocks += [_Lines(program, trace).all(), _verdict(finding, trace)]
    return "\n".join(blocks)


def label(request: int, part: int, request_type: AnyRequest) -> str:
    """`3`, or `3.1` for the second of those that were sent together."""
    return f"{request}.{part}" if isinstance(request_type, Together) else str(request)


class _Lines:
    """The requests as lines of the script."""

    def __init__(self, program: ServerScenario, trace: ServerTrace):
        self.program, self.trace = program, trace

    def all(self) -> str:
        """From the start of the server to the last request that was sent."""
        p = self.program
        lines = [_array("server_command", p.flags, p.driver, saves=_saves(p)), 'start log "${server_command[@]}"']
        for i, request in enumerate(p.requests):
            if not self._reached(i):
                break
            lines += self._lines(i, request)
        return "\n".join(lines) + "\n"

    def _reached(self, i: int) -> bool:
        return any(r.request == i for r in self.trace.replies)

    def _lines(self, i: int, request: AnyRequest) -> list[str]:
        match request:
            case Turn() | Chat():
                ask = "ask_some" if request.cancel is not None else "ask"
                return [f"{ask} {self._arguments(i, 0, request)}"]
            case Together():
                return self._together(i, request)
            case SaveSlot() | RestoreSlot() | EraseSlot():
                action = str(request.__struct_config__.tag).split("_", maxsplit=1)[0]
                body = "{}" if isinstance(request, EraseSlot) else json.dumps({"filename": file_name(request.file)})
                return [f"ask {i} '/slots/{request.slot}?action={action}' {shlex.quote(body)}"]
            case DamageFile():
                return self._damage(i, request)
            case Restart():
                return ["stop", 'start log "${server_command[@]}"', f'echo "request {i}: started again"']

    def _together(self, i: int, request: Together) -> list[str]:
        lines = ["clients="]
        for part, a in enumerate(request.asks):
            post = "post_some" if a.cancel is not None else "post"
            lines += [f"{post} {self._arguments(i, part, a)} &", 'clients="$clients $!"']
        lines.append("wait $clients")
        return lines + [f'told {i}.{k} "request {i}, part {k}"' for k in range(len(request.asks))]

    def _arguments(self, i: int, part: int, ask: Turn | Chat) -> str:
        reply = self.trace.reply(i, part)
        assert reply is not None
        body = body_of(reply) | {"id_slot": ask.slot, "cache_prompt": ask.cache if isinstance(ask, Turn) else True}
        name = label(i, part, self.program.requests[i])
        text = f"{name} {_path(reply)} {_quoted(body if ask.cancel is None else body | {'stream': True})}"
        return text if ask.cancel is None else f"{text} {max(ask.cancel, 1)}"

    def _damage(self, i: int, request: DamageFile) -> list[str]:
        reply = self.trace.reply(i)
        pieces: Sequence[Piece] = getattr(reply, "pieces", ())
        if reply is None or not reply.n:
            return [f'echo "request {i}: nothing to change in {file_name(request.file)}"']
        listed = [
            p.data.hex() if p.slot == -1 else [file_name(request.file if p.slot < 0 else p.slot), p.start, p.end]
            for p in pieces
        ]
        return [
            f'answers damage "$work/saves" {file_name(request.file)} {_quoted(listed)} || exit 2',
            f'echo "request {i}: {file_name(request.file)} changed"',
        ]


# --- parts ------------------------------------------------------------------------------------------------------------


def _verdict(finding: ServerFinding, trace: ServerTrace) -> str:
    program, check = finding.scenario, finding.check
    if check.kind == "alive":
        return 'echo "it lives: not reproduced"\nexit 0\n'
    name = label(check.step, max(check.seq, 0), program.requests[check.step])
    if check.what == "slot":
        return f'answers slot "$work/{name}" {_wrong(finding)}\n'
    reply = trace.reply(check.step, max(check.seq, 0))
    assert reply is not None
    drafts = check.what == "acceptance"
    clean = cold_flags(program.flags)
    if drafts:
        what = "as many drafts must be accepted as by a server that has answered nothing before and keeps nothing"
        verdict = f'answers accepted "$work/{name}" "$work/cold"\n'
    else:
        what = "what must come out: the answer of a server that has answered nothing before and keeps nothing"
        verdict = f'answers compare "$work/{name}" "$work/cold" {check.band!r} {check.band * FAR!r}\n'
    return "\n".join(
        [
            f"# {what}",
            "stop",
            _array("cold_command", clean, program.driver if drafts else None, saves=False),
            'start cold-log "${cold_command[@]}"',
            f"post cold {_path(reply)} {_quoted(body_of(reply) | {'cache_prompt': False})}",
            'told cold "a cold server"',
            verdict,
        ]
    )


def _wrong(finding: ServerFinding) -> str:
    """What a slot action is answered and must not be."""
    status, n = finding.check.expected
    if status != 200:
        return "refused"
    return str(n) if finding.violation and finding.violation.key == "slot-count" else "done"


def _doc(finding: ServerFinding) -> str:
    lines = [finding.rule, "", f"{finding.title}. Seen with {seen_with(finding.build, finding.environment)}."]
    n, m = finding.reproduced
    if n < m:
        lines.append(f"It was seen in {n} of {count(m, 'run')}: it may take several to see it again.")
    for name, ref in _models(finding.scenario).items():
        if ref.recipe is None:
            known = f", SHA-256 {ref.sha256}" if ref.sha256 else ""
            lines.append(f"{name.upper()}.gguf is {ref.label()}, the file that was given{known}.")
    wrapped = [part for line in lines for part in (textwrap.wrap(line, WIDTH - 2) or [""])]
    return "\n".join(f"# {part}".rstrip() for part in wrapped)


def _models(program: ServerScenario) -> dict[str, ModelRef]:
    """The models by the name of their variable."""
    draft = program.driver.draft if program.driver else None
    return {"model": program.model} | ({"draft": draft} if draft is not None else {})


def _given(program: ServerScenario) -> list[str]:
    """Models that the caller must give."""
    return [name for name, ref in _models(program).items() if ref.recipe is None]


def _set_up(usage: str, given: Sequence[str]) -> str:
    checks = [_GIVEN.format(n=len(given), usage=usage)] if given else []
    return _SET_UP.format(given="".join([*checks, *(_FOUND.format(name=name) for name in given)]))


def _write(program: ServerScenario) -> str:
    names = [name for name, ref in _models(program).items() if ref.recipe is not None]
    if not names:
        return ""
    lines = [f"{name}=$work/{name}.gguf" for name in names]
    return "\n".join(["", *lines, ""]) + _WRITE.format(paths=" ".join(f'"${name}"' for name in names))


def _saves(program: ServerScenario) -> bool:
    return any(isinstance(r, SaveSlot | RestoreSlot | DamageFile) for r in program.requests)


def _array(name: str, flags: Flags, driver: DriverParams | None, *, saves: bool) -> str:
    """A command line as an array of the script, a flag with its value in one piece."""
    draft = Path(_DRAFT) if driver is not None and driver.draft is not None else None
    command = argv(Path(_SERVER), Path(_MODEL), flags, driver, draft, Path(_SAVES) if saves else None)
    pieces = [" ".join(_VARIABLES.get(word) or shlex.quote(word) for word in unit) for unit in units(command)]
    lines = [_INDENT]
    for piece in pieces:
        if len(lines[-1]) + len(piece) + 1 > WIDTH and lines[-1].strip():
            lines.append(_INDENT)
        lines[-1] += piece if lines[-1] == _INDENT else f" {piece}"
    return f"{name}=(\n" + "\n".join(lines) + "\n)"


def _path(reply: Reply) -> str:
    return "/v1/chat/completions" if reply.messages else "/completion"


def _quoted(value: Any) -> str:
    return shlex.quote(json.dumps(value, separators=(",", ":")))
