"""Imports point one way, fuzz to oracles to subjects, and native code is loaded by the shim and the drivers alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAY = {
    "subjects": {"subjects"},
    "oracles": {"oracles", "subjects"},
    "fuzz": {"fuzz", "oracles", "subjects"},
}
OURS = {"subjects", "oracles", "fuzz", "tests", "ci", "corpora"}
CHILDREN = {
    "subjects.child",
    "fuzz.doctor",
    "fuzz.measure.bench_child",
    "fuzz.measure.pairs",
    "fuzz.probe.child",
    "fuzz.targets.blobs",
    "fuzz.targets.judged",
    "subjects.inprocess",
}
"""Modules with the body of a child process, the only ones that may load a library through the shim."""
NATIVE = {"subjects.shim", "subjects.drivers.native", "subjects.drivers.reference"}
"""The modules that load native code, and nobody else: the shim; the driver library, which is compiled against the same
build; and the driver in Python, which looks at the libllama that the shim has loaded already."""
BINDING = {"subjects.drivers.reference"}
"""The one module over llama_cpp: a second way to reach the library is what makes it a reference."""
OPENERS = {"Shim": CHILDREN, "DriverLib": CHILDREN, "Reference": CHILDREN, "binding": CHILDREN | BINDING}
"""What loads native code when it is called, and where it may be."""
LOADERS = {"CDLL", "bound", "PyDLL", "WinDLL", "OleDLL", "LoadLibrary", "dlopen"}


def offences(source: str, module: str) -> list[str]:
    """What a module, by its dotted name, must not do."""
    room, found = module.split(".", maxsplit=1)[0], []
    native = module in NATIVE

    def imported(name: str) -> None:
        top = name.split(".", maxsplit=1)[0]
        if top in OURS and top not in MAY[room]:
            found.append(f"imports {name}")
        if top == "llama_cpp" and module not in BINDING:
            found.append("imports llama_cpp")
        if top in ("cffi", "_ctypes") or (name == "ctypes.cdll" and not native):
            found.append(f"imports {name}")

    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    imported(alias.name)
            case ast.ImportFrom(module=name, level=level, names=names):
                if level:
                    found.append("relative import")
                    continue
                imported(name or "")
                if name == "ctypes" and not native and {a.name for a in names} & {*LOADERS, "cdll", "pydll"}:
                    found.append("takes a loader out of ctypes")
            case ast.Call(func=func, args=args):
                name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
                first = args[0].value if args and isinstance(args[0], ast.Constant) else ...
                if name in ("import_module", "__import__") and isinstance(first, str):
                    imported(first)
                # CDLL(None) is the process itself, for prctl
                if name in LOADERS and not native and first is not None:
                    found.append(f"loads native code: {name}")
                if name in OPENERS and module not in OPENERS[name]:
                    found.append(f"makes a {name} outside of a child")
            case ast.Attribute(attr="cdll" | "pydll") if not native:
                found.append("loads native code: cdll")
    return found


def modules() -> list[tuple[str, Path]]:
    files = [p for room in MAY for p in sorted((ROOT / room).rglob("*.py"))]
    return [(".".join(p.relative_to(ROOT).with_suffix("").parts), p) for p in files]


def test_there_is_something_to_check() -> None:
    names = {name for name, _ in modules()}
    assert len(names) > 50
    assert {"subjects.shim", "subjects.child", "oracles.ledger", "fuzz.cli.fuzz", "subjects.recipes.llama"} <= names


@pytest.mark.parametrize("room", MAY)
def test_no_module_offends(room: str) -> None:
    bad = {name: offences(path.read_text(), name) for name, path in modules() if name.startswith(f"{room}.")}
    assert {name: found for name, found in bad.items() if found} == {}


@pytest.mark.parametrize("module", sorted(CHILDREN | NATIVE))
def test_every_exception_is_needed(module: str) -> None:
    source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
    room = module.partition(".")[0]
    assert offences(source, f"{room}.another") != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("subjects.x", "import oracles.ledger"),
        ("subjects.x", "def f():\n    from fuzz import avoid"),
        ("subjects.x", "from tests import conftest"),
        ("oracles.x", "from fuzz.state import State"),
        ("oracles.x", "import importlib\nimportlib.import_module('fuzz.state')"),
        ("fuzz.x", "import llama_cpp"),
        ("fuzz.x", "from llama_cpp import llama_cpp_ext"),
        ("fuzz.x", "__import__('llama_cpp')"),
        ("fuzz.x", "from . import avoid"),
        ("fuzz.x", "import ctypes\nctypes.CDLL('libllama.so')"),
        ("oracles.x", "import ctypes\nctypes.cdll.LoadLibrary('libllama.so')"),
        ("oracles.x", "from ctypes import CDLL"),
        ("subjects.x", "import ctypes as c\nc.PyDLL(path)"),
        ("fuzz.x", "from subjects.shim import Shim\nShim(path)"),
        ("fuzz.x", "from subjects import shim\nshim.Shim(path)"),
        ("fuzz.x", "from subjects.drivers.native import DriverLib\nDriverLib(path)"),
        ("oracles.x", "from subjects.drivers import reference\nreference.Reference(0, 0, 1, parameters)"),
        ("fuzz.x", "from subjects.drivers.reference import binding\nbinding()"),
        ("subjects.drivers.native", "import llama_cpp"),
        ("subjects.drivers.other", "import ctypes\nctypes.CDLL('libllama.so')"),
        ("subjects.shim", "from llama_cpp import llama_cpp_ext"),
        ("subjects.child", "import ctypes\nctypes.CDLL('libllama.so')"),
    ],
)
def test_an_offence_is_seen(module: str, source: str) -> None:
    assert offences(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fuzz.x", "import oracles.ledger, subjects.trace, ctypes\nctypes.CDLL(None).prctl(1)"),
        ("oracles.x", "from subjects.shim import Shim"),
        ("subjects.shim", "import ctypes as ct\nct.CDLL(path)"),
        ("subjects.drivers.native", "import ctypes as ct\nct.CDLL(path)"),
        ("subjects.drivers.reference", "import ctypes as ct\nct.CDLL(path)\nimport llama_cpp.llama_cpp"),
        ("fuzz.probe.child", "from subjects.drivers.native import DriverLib\nDriverLib(path)"),
        ("subjects.builds", "import importlib.util\nimportlib.util.find_spec('llama_cpp')"),
    ],
)
def test_what_is_allowed_is_no_offence(module: str, source: str) -> None:
    assert offences(source, module) == []


def test_importing_everything_loads_nothing_native() -> None:
    program = (
        "import importlib, pathlib, sys\n"
        f"for name in {[name for name, _ in modules()]!r}:\n"
        "    importlib.import_module(name.removesuffix('.__init__'))\n"
        "assert 'llama_cpp' not in sys.modules\n"
        "maps = pathlib.Path('/proc/self/maps')\n"
        "text = maps.read_text() if maps.exists() else ''\n"
        "print([x for x in ('libllama', 'libggml', 'shim') if x in text])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
