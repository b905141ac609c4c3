"""Commands that a finding is seen again with: redraft's own, and those that compile repro.cpp.

S is the llama.cpp tree that holds the headers, L the folders of the libraries, divided by colons.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from fuzz.repro.phrases import listed
from subjects.scenario import ModelRef

if TYPE_CHECKING:
    from fuzz.finding import Finding

PATCHED = "common/speculative.cpp"


def seen_with(finding: Finding) -> str:
    """The build for people: its name, llama.cpp's version, and the fingerprint."""
    env = finding.environment
    if "build" not in env:
        return finding.build
    version = [str(env["llama_cpp"])] if env.get("llama_cpp", "unknown") != "unknown" else []
    fingerprint = env.get("fingerprint", finding.build)
    return f"{env['build']} ({', '.join([*version, f'build {fingerprint}'])})"


def options(finding: Finding) -> str:
    """Options that give redraft the build and the drivers that it was found with; empty for the usual ones."""
    return _build(finding) + (" --driver-patch FILE" if _patch(finding) else "")


def told(finding: Finding) -> list[str]:
    """What stands for what in the options."""
    env = finding.environment
    words = []
    if _own_build(finding):
        words.append(f"--build: {env['build']}")
    if "driver_checkout" in env:
        words.append(f"--llama-src: the checkout {env['driver_checkout']} with {listed(_sources(finding))}")
    if _patch(finding):
        words.append(f"FILE: {' with SHA-256 '.join(str(env['driver_patch']).rsplit(' ', 1))}…")
    return words


def replay(finding: Finding) -> str:
    """How redraft runs it again."""
    return f"redraft replay .{options(finding)}"


def doctor(finding: Finding) -> str:
    """How redraft tells S and L."""
    return f"redraft doctor{_build(finding)}"


def model_file(ref: ModelRef, made: str = "model.gguf") -> str:
    """What a model is called on a command line: as a recipe's is written, or as the user's file is."""
    return made if ref.recipe is not None else shlex.quote(ref.label())


def given(ref: ModelRef) -> str:
    """A line on a model that no recipe writes."""
    return f"{ref.label()} is the file that was given" + (f", SHA-256 {ref.sha256}." if ref.sha256 else ".")


def compile_line(finding: Finding) -> str:
    """How repro.cpp is compiled and run."""
    d, model = finding.scenario.driver, model_file(finding.scenario.model)
    if d is None:
        return (
            "LIBRARY_PATH=$L g++ -std=c++17 repro.cpp -I $S/include -I $S/ggml/include -Wl,-rpath,$L -lllama "
            f"-lggml-base -o repro && ./repro {model}"
        )
    draft = f" {model_file(d.draft, 'draft.gguf')}" if d.draft is not None else ""
    patch = f"patch -o speculative.cpp $S/{PATCHED} {shlex.quote(_patch(finding))} && " if _patch(finding) else ""
    # what is compiled in goes before the same functions of libllama-common
    names = [x.rsplit(" ", 1)[0] for x in _sources(finding)]
    own = "".join(" speculative.cpp" if patch and name == PATCHED else f" $S/{name}" for name in names)
    return (
        f"{patch}LIBRARY_PATH=$L g++ -std=c++17 repro.cpp{own} -I $S/common -I $S/include -I $S/ggml/include "
        "-I $S/vendor -Wl,--no-as-needed,-rpath,$L -lllama-common -lllama -lggml -lggml-base -o repro && "
        f"./repro {model}{draft}"
    )


def places(finding: Finding) -> list[str]:
    """What S and L are, for somebody without redraft."""
    env = finding.environment
    driven = finding.scenario.driver is not None
    tree, libraries = "the llama.cpp tree of the build", "the folder of the build's libraries"
    if not _own_build(finding) and str(env.get("build", "")).startswith("llama-cpp-python"):
        tree = "vendor/llama.cpp of llama-cpp-python's source distribution" if driven else "site-packages"
        libraries = f"site-packages/llama_cpp/lib{':site-packages/lib' if driven else ''}"
    if "driver_checkout" in env:
        tree = f"the checkout {env['driver_checkout']}"
    lines = [f"S is {tree}, and L {libraries}."]
    return [*lines, f"Drivers: {env['drivers']}."] if "driver_sources" in env else lines


def _own_build(finding: Finding) -> bool:
    return finding.environment.get("kind", "package") != "package"


def _build(finding: Finding) -> str:
    checkout = " --llama-src DIR" if "driver_checkout" in finding.environment else ""
    return (" --build DIR" if _own_build(finding) else "") + checkout


def _patch(finding: Finding) -> str:
    return str(finding.environment.get("driver_patch", "")).rsplit(" ", 1)[0]


def _sources(finding: Finding) -> list[str]:
    """What was compiled in, a file with its hash each."""
    found = finding.environment.get("driver_sources", [])
    return found if isinstance(found, list) else []
