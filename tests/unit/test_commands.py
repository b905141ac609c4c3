"""What a finding tells to type, by whose build, drivers and models it is of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fuzz.cli.common import Bench
from fuzz.cli.replay import _other_drivers
from fuzz.finding import Finding
from fuzz.repro import commands
from subjects.scenario import DriverParams, ModelRef, Scenario

STOCK = {"drivers": "of the build; library aa", "driver_fingerprint": "aa"}
CHECKOUT = {
    "drivers": "compiled from the given checkout mine (common/speculative.cpp 11); library bb",
    "driver_fingerprint": "bb",
    "driver_checkout": "mine",
    "driver_sources": ["common/speculative.cpp 11", "common/ngram-mod.cpp 22"],
}
PATCH = {
    "drivers": "patched with my fix.diff (33); library cc",
    "driver_fingerprint": "cc",
    "driver_patch": "my fix.diff 33",
    "driver_sources": ["common/speculative.cpp 44"],
}
RECIPE = ModelRef(recipe="qwen35", version=1)


def finding(*, model: ModelRef = RECIPE, driver: DriverParams | None = None, **environment: Any) -> Finding:
    scenario = Scenario(model=model, ops=(), driver=driver)
    return Finding(
        signature="s", slug="s", title="t", oracle="o", kind="fault", memory="hybrid", build="ff", reproduced=(3, 3),
        scenario=scenario, original=scenario, violation=None, environment=environment,
    )  # fmt: skip


MTP = DriverParams(kind="draft-mtp")


@pytest.mark.parametrize(
    ("environment", "options", "doctor"),
    [
        ({}, "", ""),
        (STOCK, "", ""),
        (CHECKOUT, " --llama-src DIR", " --llama-src DIR"),
        (PATCH, " --driver-patch FILE", ""),
        (CHECKOUT | PATCH, " --llama-src DIR --driver-patch FILE", " --llama-src DIR"),
        (STOCK | {"kind": "package"}, "", ""),
        (CHECKOUT | {"kind": "tree", "build": "t"}, " --build DIR --llama-src DIR", " --build DIR --llama-src DIR"),
    ],
)
def test_options_are_those_that_it_was_found_with(environment: dict[str, Any], options: str, doctor: str) -> None:
    f = finding(driver=MTP, **environment)
    assert commands.replay(f) == f"redraft replay .{options}"
    assert commands.doctor(f) == f"redraft doctor{doctor}"
    assert bool(commands.told(f)) == bool(options)


def test_what_was_compiled_in_is_compiled_in_again() -> None:
    assert "speculative.cpp" not in commands.compile_line(finding(driver=MTP, **STOCK))
    line = commands.compile_line(finding(driver=MTP, **CHECKOUT))
    assert " repro.cpp $S/common/speculative.cpp $S/common/ngram-mod.cpp -I" in line
    line = commands.compile_line(finding(driver=MTP, **PATCH))
    assert line.startswith("patch -o speculative.cpp $S/common/speculative.cpp 'my fix.diff' && LIBRARY_PATH=$L g++")
    assert " repro.cpp speculative.cpp -I" in line


def test_the_users_own_file_is_named() -> None:
    own = ModelRef(path="/home/me/q.gguf", sha256="ab")
    assert commands.compile_line(finding(model=own)).endswith("./repro q.gguf")
    assert commands.compile_line(finding(model=own, driver=MTP)).endswith("./repro q.gguf")
    pair = DriverParams(kind="draft-eagle3", draft=ModelRef(path="/home/me/d d.gguf"))
    assert commands.compile_line(finding(driver=pair)).endswith("./repro model.gguf 'd d.gguf'")
    assert commands.given(own) == "q.gguf is the file that was given, SHA-256 ab."


def test_the_build_is_named_by_its_version() -> None:
    assert commands.seen_with(finding()) == "ff"
    known = finding(build="llama-cpp-python 0.3.36", llama_cpp="llama.cpp 0.5.0 0c1e570", fingerprint="ff")
    assert commands.seen_with(known) == "llama-cpp-python 0.3.36 (llama.cpp 0.5.0 0c1e570, build ff)"
    assert commands.seen_with(finding(build="t", llama_cpp="unknown", fingerprint="ff")) == "t (build ff)"


def test_other_drivers_are_told_of() -> None:
    b: Bench = SimpleNamespace(driver_origin=lambda: STOCK)  # type: ignore[assignment]
    assert _other_drivers(finding(driver=MTP, **STOCK), b) == ""
    assert _other_drivers(finding(driver=MTP), b) == "", "found before findings told it"
    assert _other_drivers(finding(**STOCK), b) == ""
    said = _other_drivers(finding(driver=MTP, **PATCH), b)
    assert said == (
        "found with drivers patched with my fix.diff (33); library cc, replayed with drivers of the build; library aa; "
        "those that it was found with take --driver-patch FILE"
    )
