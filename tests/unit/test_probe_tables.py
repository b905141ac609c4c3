"""What the probe measures and writes: comparison of runs, table, CSV, JSON, and children that end before their time."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from fuzz.probe import header, table
from fuzz.probe.measure import Compared, Error, Noise, Plan, Run, accepted, compare, error, largest, noise
from fuzz.probe.picture import draw
from fuzz.probe.table import Cell, ProbeError, Report, probe
from fuzz.probe.writers import csv_text, json_text, markdown, rows, show
from subjects.recipes import get
from subjects.scenario import ContextParams, DriverParams


def row(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


def run(**more: Any) -> Run:
    base: dict[str, Any] = {
        "text": [2, 1, 0],
        "hidden": row(1, 2),
        "vectors": [[row(0, 1, 0), row(1, 0, 0)]],
        "drafts": [[1, 0]],
        "target": [row(0, 1, 0), row(1, 0, 0)],
    }
    return Run(**{**base, **more})


# --- comparison -------------------------------------------------------------------------------------------------------


def test_error() -> None:
    assert error([row(1, 2)], [row(1, 4)]) == Error(2.0, 4 / 17)
    assert error([row(1, 4)], [row(1, 4)]) == Error(0.0, 0.0)
    assert error([b""], [b""]) is None
    for bad in (b"", row(1), row(1, float("nan"))):
        assert error([bad], [row(1, 4)]) == Error(float("inf"), float("inf"))
    assert error([row(1)], [row(0)]) == Error(1.0, float("inf"))


def test_an_equal_run_shows_no_change() -> None:
    c = compare(run(), run(), Noise())
    assert (c.changed, c.top1, c.target_changed, c.target_top1) == (0, 0, 0, 0)
    assert (c.vectors, c.rows, c.before, c.accepted, c.drafted) == (2, 2, 2, 2, 2)
    assert c.hidden == c.target == Error(0.0, 0.0)


def test_only_what_leaves_the_band_has_changed() -> None:
    off = run(vectors=[[row(0, 1, 0.5), row(1, 0, 0)]])
    assert compare(off, run(), Noise(draft=0.1)).changed == 0
    assert compare(off, run(), Noise(draft=0.01)).changed == 1
    assert compare(off, run(), Noise(draft=0.01)).top1 == 0


def test_vectors_that_are_missing_have_changed() -> None:
    c = compare(run(vectors=[[]], drafts=[[]]), run(), Noise())
    assert (c.changed, c.top1, c.accepted, c.before) == (2, 2, 0, 2)


def test_accepted_follows_the_runs_own_target_as_long_as_it_follows_the_text() -> None:
    assert accepted(run()) == 2
    assert accepted(run(drafts=[[1, 2]])) == 1
    assert accepted(run(drafts=[[2, 0]])) == 0
    # this target prefers 2 behind the text's 2, and what it would say behind that was never asked
    assert accepted(run(target=[row(0, 0, 1), row(1, 0, 0)], drafts=[[2, 0]])) == 1


def test_noise_counts_drafts_of_equal_tokens_only() -> None:
    honest = noise(run(), [run(drafts=[[2, 0]], vectors=[[row(0, 1, 0.25), row(9, 0, 0)]], hidden=row(1, 2.5))])
    assert (honest.draft, honest.hidden, honest.target) == (0.25, 0.5, 0.0)
    assert largest([honest, Noise(draft=1.0)]) == msgspec.structs.replace(honest, draft=1.0)


# --- writers ----------------------------------------------------------------------------------------------------------


def compared(hidden: Error | None, changed: int, accepted_after: int, target: float = 0.0) -> Compared:
    return Compared(
        hidden=hidden,
        vectors=12 if hidden else 0,
        changed=changed,
        top1=changed // 4,
        before=5,
        accepted=accepted_after,
        drafted=12 if hidden else 0,
        target=Error(target, target**2),
        target_changed=0,
        target_top1=0,
        rows=6,
    )


def cell(route: str, state: Any, c: Compared | None = None, **more: Any) -> Cell:
    sizes = {"target_bytes": 200, "draft_bytes": 30, "driver_bytes": 0, "save_ms": 0.5, "restore_ms": 0.25}
    return Cell(route=route, position=34, state=state, compared=c, **{**(sizes if c else {}), **more})


def report(cells: list[Cell], driver: str | None = "draft-mtp", **more: Any) -> Report:
    about = {
        "model": "tiny",
        "architecture": "qwen35",
        "model_bytes": 1000,
        "draft": None,
        "draft_bytes": None,
        "driver": driver,
        "rounds": 4,
        "n_max": 3,
        "prompt": "prompt of 34 pseudo-random tokens, seed 0",
        "params": msgspec.to_builtins(ContextParams(n_seq_max=1)),
        "n_gpu_layers": 0,
        "build": "a build (0123456789abcdef)",
        "llama_cpp": "llama.cpp 1",
        "command": "redraft probe --model tiny",
    }
    facts = {"hybrid": 1, "recurrent": 0, "n_swa": 0, "n_ctx": 256, "n_ubatch": 64, "n_rs_seq": 3, "n_draft_max": 3}
    base: dict[str, Any] = {
        "unfit": {"rollback": "there are no states"},
        "positions": [34],
        "noise": {"cells": Noise(target=1e-6, draft_scale=10.0), "split": Noise(draft=0.1, draft_scale=10.0)},
        "notes": ["a note"],
        "log": [],
    }
    return Report(about=about, facts=facts, cells=cells, **{**base, **more})


DRIVEN = [
    cell("host", "left out", compared(Error(2.5, 1.75), 12, 2)),
    cell("host", "restored", compared(Error(0.0, 0.0), 0, 5), how="kept"),
    cell("device", "left out", outcome="crashed", why="x.cpp: GGML_ASSERT(a | b) failed"),
    cell("device", "restored", outcome="left out", why="two children had ended"),
]
TABLE = """\
| route | position | hidden error, left out | hidden error, restored | draft logits changed | top-1 changed | accepted \
| target logits | bytes | save ms | restore ms |
| :-- | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: |
| host | 34 | 2.5 (1.8) | 0 | 12/0 of 12 | 3/0 | 5→2/5 of 12 | 0 | 200+30+0 | 0.5 | 0.25 |
| device | 34 | CRASHED | not run | CRASHED/not run | CRASHED/not run | CRASHED/not run | CRASHED/not run |  |  |  |

- device; position 34; driver state left out: CRASHED: x.cpp: GGML_ASSERT(a | b) failed
- device; position 34; driver state restored: not run: two children had ended
- rollback: does not apply: there are no states
"""


def test_markdown() -> None:
    text = markdown(report(DRIVEN))
    assert TABLE in text
    assert text.startswith(
        "### State restore of tiny with draft-mtp\n\nModel tiny (qwen35, hybrid memory, 1000 bytes);"
    )
    assert "- a note\n" in text and text.endswith("\n`redraft probe --model tiny`\n")
    assert "7.63e-05, or 0.8 for rollback" in text


def test_markdown_without_a_driver_has_no_columns_of_one() -> None:
    titles, lines = rows(report([cell("host", "only", compared(None, 0, 0, 0.5))], driver=None))
    assert titles == ["route", "position", "target logits", "top-1 changed", "bytes", "save ms", "restore ms"]
    assert lines == [["host", "34", "0.5 (0.25)", "0 of 6", "200", "0.5", "0.25"]]


def test_a_driver_that_drafts_less_than_n_max_says_both() -> None:
    found = report(DRIVEN)
    assert "driver draft-mtp, n_max 3;" in markdown(found)
    found.facts["n_draft_max"] = 2
    assert "driver draft-mtp, n_max 3 (drafts 2 at most);" in markdown(found)


def test_csv() -> None:
    found = list(csv.DictReader(io.StringIO(csv_text(report([*DRIVEN, cell("file", "only", compared(None, 0, 0))])))))
    assert [(r["route"], r["driver_state"], r["outcome"]) for r in found] == [
        ("host", "left out", "ok"),
        ("host", "restored", "ok"),
        ("device", "left out", "crashed"),
        ("device", "restored", "left out"),
        ("file", "", "ok"),
    ]
    assert (found[0]["hidden_max_abs"], found[0]["draft_vectors_changed"], found[0]["accepted_after"]) == (
        "2.5",
        "12",
        "2",
    )
    assert found[2]["why"] == "x.cpp: GGML_ASSERT(a | b) failed"
    assert all(found[4][k] == "" for k in ("hidden_max_abs", "hidden_nmse", "draft_vectors", "drafted"))
    assert found[4]["target_max_abs"] == "0.0"


def test_json_has_no_infinity() -> None:
    text = json_text(report([cell("host", "left out", compared(Error(float("inf"), float("inf")), 12, 0))]))
    document = json.loads(text, parse_constant=lambda x: pytest.fail(f"{x} is not JSON"))
    assert document["cells"][0]["compared"]["hidden"] == {"max_abs": None, "nmse": None}
    assert document["version"] == table.VERSION


def test_a_terminal_of_120_columns_shows_a_row_on_a_line() -> None:
    out = io.StringIO()
    wide = [
        cell("device-partial", "left out", compared(Error(2.55, 1.75), 12, 2, 2.62e-6), target_bytes=123_456_789),
        cell("device-partial", "restored", compared(Error(7.15e-7, 4.8e-14), 0, 5, 2.62e-6)),
    ]
    show(report(wide), Console(file=out, width=120, color_system=None))
    lines = [x for x in out.getvalue().splitlines() if x.startswith("device-partial")]
    assert len(lines) == 1 and "7.15e-07 (4.8e-14)" in lines[0] and "123M+30+0" in lines[0]


def test_picture(tmp_path: Path) -> None:
    png, svg = draw(report(DRIVEN), tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    root = ET.fromstring(svg.read_text("utf-8"))
    assert root.tag.endswith("svg")
    words = "".join(root.itertext())
    assert "driver state left out" in words and "host" in words and "device" not in words
    assert draw(report(DRIVEN[2:]), tmp_path) == []


def test_every_panel_of_the_picture_has_its_label(tmp_path: Path) -> None:
    cells = [cell(r, "only", compared(None, 0, 0, 0.5)) for r in ("host", "device", "replay", "file")]
    words = "".join(ET.fromstring(draw(report(cells, driver=None), tmp_path)[1].read_text("utf-8")).itertext())
    assert words.count("position (tokens)") == 4


# --- the header of a model's file -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen35", "llama-words", "gemma4-assistant", "eagle3-qwen35"])
def test_header_says_what_the_gguf_package_reads(name: str, tmp_path: Path) -> None:
    from gguf import GGUFReader

    path = tmp_path / "x.gguf"
    get(name).write(path)
    found = header.read(path)
    wanted = GGUFReader(path).fields
    assert set(found) == {k for k in wanted if not k.startswith("GGUF.")}
    for key, value in found.items():
        other = wanted[key].contents()
        if isinstance(value, header.Many):
            assert value.n == len(other)
            assert value.values in ((), tuple(other))
        else:
            assert value == other


def test_header_of_what_is_no_model(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.gguf", tmp_path / "x.gguf"
    get("llama").write(whole)
    head = whole.read_bytes()[:2000]
    assert header.read(whole)
    for data in (b"", b"GGUF", b"nothing of the kind", b"GGUF" + bytes(20), *(head[:n] for n in range(30, 400, 7))):
        path.write_bytes(data)
        with pytest.raises(header.BadHeader):
            header.read(path)


# --- children that end before their time ------------------------------------------------------------------------------

# takes the place of fuzz.probe.child: runs that are all alike, and what the route's name asks for
CHILD = """
import os, sys, time
import msgspec
from collections.abc import Iterator
from pathlib import Path
from fuzz.probe.measure import Order, Run, Said, run_file
order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
def say(*a, **k):
    print(msgspec.json.encode(Said(*a, **k)).decode(), flush=True)
if not order.route:
    say("facts", facts={"n_vocab": 3})
if order.route == "file":
    say("unfit", text="no")
    sys.exit()
for position, arm in order.todo:
    say("begin", position, arm, order.route)
    if order.route == "device" and (position, arm) == (34, "restored"):
        sys.stderr.write("/x/y.cpp:12: GGML_ASSERT(z) failed\\n")
        sys.stderr.flush()
        os.abort()
    if order.route == "device-partial":
        os.abort()
    if order.route == "rollback":
        time.sleep(60)
    if order.route == "replay":
        say("failed", position, arm, "refused")
        continue
    run = Run(text=[1], target=[b"\\0" * 12])
    (Path(order.folder) / run_file(order.route, position, arm)).write_bytes(msgspec.msgpack.encode(run))
    say("run", position, arm)
"""


def plan() -> Plan:
    return Plan(
        shim="",
        model="",
        params=ContextParams(),
        driver=DriverParams(kind="draft-mtp"),
        prompt=[],
        other=[],
        rounds=1,
        depth=1,
        repeat=1,
    )


def outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *routes: str) -> dict[Any, Any]:
    child = tmp_path / "child.py"
    child.write_text(CHILD, "utf-8")
    monkeypatch.setattr(table, "COMMAND", [sys.executable, str(child)])
    done: list[int] = []
    found = probe(plan(), [34, 35], routes, {"driver": "draft-mtp"}, lambda what, n: done.append(n))
    assert sum(done) == table.count(plan(), [34, 35], routes)
    return {
        **{(c.position, c.state): (c.outcome, c.why) for c in found.cells},
        **{r: why for r, why in found.unfit.items()},
    }


def test_a_crash_costs_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcomes(tmp_path, monkeypatch, "device") == {
        (34, "left out"): ("ok", ""),
        (34, "restored"): ("crashed", "y.cpp: GGML_ASSERT(z) failed"),
        (35, "left out"): ("ok", ""),
        (35, "restored"): ("ok", ""),
    }


def test_a_second_crash_ends_the_route(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcomes(tmp_path, monkeypatch, "device-partial") == {
        (34, "left out"): ("crashed", "SIGABRT"),
        (34, "restored"): ("crashed", "SIGABRT"),
        (35, "left out"): ("left out", "two children had ended"),
        (35, "restored"): ("left out", "two children had ended"),
    }


def test_a_hang_a_refusal_and_a_route_that_does_not_apply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = table._lines

    def impatient(fd: int, patience: float) -> Iterator[bytes | None]:
        """As if patience had ended at once behind the beginning of a run that hangs."""
        for line in lines(fd, patience):
            yield line
            if line and b'"rollback"' in line:
                yield None
                return

    monkeypatch.setattr(table, "_lines", impatient)
    hung = outcomes(tmp_path, monkeypatch, "rollback")
    assert hung[34, "left out"][0] == "hung" and hung[35, "restored"][0] == "left out"
    assert set(outcomes(tmp_path, monkeypatch, "replay").values()) == {("failed", "refused")}
    assert outcomes(tmp_path, monkeypatch, "file") == {"file": "no"}


def test_silence_ends_patience() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"one\ntwo")
    assert list(table._lines(reading, 0.0)) == [b"one", None]
    os.close(writing)
    assert list(table._lines(reading, 0.0)) == []
    os.close(reading)


def test_without_runs_to_compare_with_there_is_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = tmp_path / "child.py"
    child.write_text("import os\nos.abort()\n", "utf-8")
    monkeypatch.setattr(table, "COMMAND", [sys.executable, str(child)])
    with pytest.raises(ProbeError, match="SIGABRT"):
        probe(plan(), [34], ["host"], {"driver": None}, lambda what, n: None)
