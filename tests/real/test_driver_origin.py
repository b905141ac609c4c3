"""A finding of drivers that are not the build's can be seen again by what its README says, and only by that."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from subjects import builds

REDRAFT = Path(sys.executable).with_name("redraft")
KEPT = "verify_h[seq_id].data() + (size_t) (n_rows - 1) * n_embd, row_bytes);"


def redraft(*arguments: str | Path) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run([REDRAFT, *arguments, "--json"], capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr[-2000:]
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.fixture
def given(tmp_path: Path) -> list[str | Path]:
    """Options for a checkout's drivers, patched so that they keep the first row of a batch in place of the last."""
    tree = tmp_path / "mine"
    shutil.copytree(builds.driver_sources(builds.find_build()), tree)
    name = "common/speculative.cpp"
    good = (tree / name).read_text()
    assert KEPT in good
    bad = good.replace(KEPT, KEPT.replace("(n_rows - 1)", "0"))
    diff = difflib.unified_diff(good.splitlines(True), bad.splitlines(True), f"a/{name}", f"b/{name}")
    (tmp_path / "fault.diff").write_text("".join(diff))
    return ["--llama-src", tree, "--driver-patch", tmp_path / "fault.diff"]


def test_what_its_readme_says_shows_it_again(given: list[str | Path], tmp_path: Path) -> None:
    code, document, _ = redraft(
        "fuzz", "--driver", "qwen35-mtp", "--scenarios", "20", "--jobs", "1", "--seed", "5", "--out", tmp_path / "out",
        "--avoid", "always", *given,
    )  # fmt: skip
    new = [Path(f["path"]) for f in document["findings"] if f["known"] is None]
    assert code == 1 and new
    folder = new[0]
    readme = (folder / "README.md").read_text()
    environment = json.loads((folder / "environment.json").read_text())
    assert document["environment"] == environment
    assert re.fullmatch(r"common/speculative\.cpp [0-9a-f]{16}", environment["driver_sources"][0])
    assert environment["driver_checkout"] == "mine"
    assert re.fullmatch(r"fault\.diff [0-9a-f]{16}", environment["driver_patch"])
    for name in ("README.md", "environment.json", "repro.cpp"):
        text = (folder / name).read_text()
        assert environment["driver_fingerprint"] in text, name
        assert str(tmp_path) not in text and str(Path.home()) not in text, name

    assert "\nredraft replay . --llama-src DIR --driver-patch FILE\n" in readme
    code, replayed, said = redraft("replay", folder, "--runs", "1", *given)
    assert code == 1 and "warning" not in said and replayed["results"][0]["warning"] == ""
    code, replayed, said = redraft("replay", folder, "--runs", "1")
    assert code == 0, "the build's drivers have no such fault"
    assert len([x for x in said.splitlines() if x.startswith("warning: found with drivers ")]) == 1
    assert "--llama-src DIR --driver-patch FILE" in replayed["results"][0]["warning"]

    # the commands, pasted
    assert "`redraft doctor --llama-src DIR`" in readme
    told = subprocess.run([REDRAFT, "doctor", *given[:2]], capture_output=True, text=True, check=True).stdout
    places = dict(re.findall(r"^(?:headers|libraries): ([SL])=(.+)$", told, re.M))
    commands = readme.partition("With llama.h and common/speculative.h")[2].split("```")[1].strip()
    shutil.copy(given[3], folder)
    env = os.environ | places | {"PATH": f"{REDRAFT.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def pasted(text: str) -> tuple[int, str]:
        p = subprocess.run(
            ["bash", "-c", text], cwd=folder, env=env, capture_output=True, text=True, timeout=500, check=False
        )
        return p.returncode, p.stdout + p.stderr

    code, said = pasted(commands)
    assert code == 1 and ("WRONG DRAFT" in said or "AS WHEN IT WAS FOUND" in said), said
    # without what is compiled in, the build's drivers run
    code, said = pasted(re.sub(r" (?:\$S/common/[\w-]+|speculative)\.cpp(?= )(?!.*&& LIB)", "", commands))
    assert code == 0 and "not reproduced" in said, said
