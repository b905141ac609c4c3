"""The journal: what a kill at any moment leaves is what was noted, and nothing half-written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import MODEL, IdealSandbox

from fuzz import job as jobs
from fuzz import loop
from fuzz.journal import Journal, Progress, read_json, sweep, write_atomically
from fuzz.models import Model
from fuzz.state import traits_of
from oracles.judge import Judge, Judgement
from oracles.observe import observe
from oracles.registry import OBSERVATIONS
from subjects.recipes import get
from subjects.sandbox import SandboxError
from subjects.scenario import ENCODER, Decode, ModelRef, Part, Scenario, dumps, loads

ROOT = Path(__file__).resolve().parents[2]


def program(n: int) -> Scenario:
    return Scenario(model=MODEL, ops=(Decode(parts=(Part(seq=0, n=n),)),), note=f"{n}")


def killed(out: Path, body: str) -> None:
    """Run statements with a journal `j`, in a process that is gone at their end without any clean-up."""
    code = (
        "import os, sys\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests/unit')!r}]\n"
        "from pathlib import Path\n"
        "from fuzz.journal import Journal, Progress\n"
        "from test_journal import program\n"
        f"j = Journal(Path({str(out)!r}), 0)\n"
        f"{body}\n"
        "os._exit(9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 9, done.stderr


def left(out: Path, job: int = 0) -> list[int]:
    """Which programs an earlier process was at."""
    journal = Journal(out, job)
    found = [int(s.note) for s in journal.left_over]
    assert all(s == program(int(s.note)) for s in journal.left_over)
    journal._map.close()
    os.close(journal._fd)
    return found


def test_a_new_job_starts_from_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out", 3)
    assert journal.left_over == []
    assert journal.progress() == Progress()
    journal.close()
    assert {p.name for p in (tmp_path / "out" / "state").iterdir()} == {"inflight-3.bin"}


def test_what_was_in_flight_survives_a_kill(tmp_path: Path) -> None:
    killed(tmp_path, "for n in (300, 5, 12): j.in_flight(program(n))")
    assert left(tmp_path) == [12]
    assert left(tmp_path) == [12]  # looking does not clear it
    assert left(tmp_path, 1) == []  # another job's


def test_pending_comes_first_and_both_survive(tmp_path: Path) -> None:
    killed(tmp_path, "j.in_flight(program(1)); j.pending(program(2)); j.in_flight(program(3))")
    assert left(tmp_path) == [2, 3]


def test_what_is_settled_is_not_tried_again(tmp_path: Path) -> None:
    killed(tmp_path, "j.pending(program(2)); j.in_flight(program(3)); j.settled()")
    assert left(tmp_path) == [3]
    killed(tmp_path, "j.settled(); j.settled()")  # nothing pending is no error


def test_a_good_end_leaves_nothing_in_flight(tmp_path: Path) -> None:
    killed(tmp_path, "j.in_flight(program(3)); j.close()")
    assert left(tmp_path) == []


def test_progress_is_kept(tmp_path: Path) -> None:
    killed(tmp_path, "j.save(Progress(slices=4, scenarios=400, symptoms={'a|b|c': 2}, avoiding=['x']))")
    journal = Journal(tmp_path, 0)
    assert journal.progress() == Progress(slices=4, scenarios=400, symptoms={"a|b|c": 2}, avoiding=["x"])
    journal.close()


def test_a_program_too_large_for_the_file_leaves_no_note(tmp_path: Path) -> None:
    huge = Scenario(model=MODEL, ops=tuple(Decode(parts=(Part(seq=0, n=1),)) for _ in range(6000)))
    assert len(ENCODER.encode(huge)) > 1 << 18
    journal = Journal(tmp_path, 0)
    journal.in_flight(program(7))
    journal.in_flight(huge)
    again = Journal(tmp_path, 0)
    assert again.left_over == [], "the program before it, which ended well"
    journal.in_flight(program(8))
    assert left(tmp_path) == [8]
    journal.close()
    again.close()


def test_a_large_program_is_pending_whole(tmp_path: Path) -> None:
    huge = Scenario(model=MODEL, ops=tuple(Decode(parts=(Part(seq=0, n=1),)) for _ in range(6000)))
    journal = Journal(tmp_path, 0)
    journal.pending(huge)
    assert Journal(tmp_path, 0).left_over == [huge]


@pytest.mark.parametrize(
    "data",
    [b"", b"\x05", b"\xff\xff\xff\xff", b"\x04\x00\x00\x00{}{}", b"\x04\x00\x00\x00\xff\xff\xff\xff", bytes(64)],
)
def test_a_spoilt_in_flight_file_is_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "inflight-0.bin").write_bytes(data)
    assert left(tmp_path) == []


@pytest.mark.parametrize("data", [b"", b"{", dumps(program(1)).encode()[:-9], b"\xff\xfe", b"null"])
def test_a_spoilt_pending_file_is_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "pending-0.json").write_bytes(data)
    assert left(tmp_path) == []


@pytest.mark.parametrize("data", [b"", b"[]", b'{"slices": "1"}', b"{"])
def test_spoilt_progress_starts_anew(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "job-0.json").write_bytes(data)
    journal = Journal(tmp_path, 0)
    assert journal.progress() == Progress()
    journal.close()


def test_a_half_written_note_is_not_taken(tmp_path: Path) -> None:
    """While it is being written the length is zero, so a kill in between leaves nothing, never a mixture."""
    journal = Journal(tmp_path, 0)
    journal.in_flight(program(200))
    seen: list[bytes] = []

    class Watched:
        def __init__(self, inner: object) -> None:
            self.inner = inner

        def __setitem__(self, where: slice, data: bytes) -> None:
            self.inner[where] = data  # type: ignore[index]
            seen.append((tmp_path / "state" / "inflight-0.bin").read_bytes()[:4])

    real = journal._map
    journal._map = Watched(real)  # type: ignore[assignment]
    journal.in_flight(program(3))
    journal._map = real
    assert seen[:-1] == [b"\0\0\0\0"] * (len(seen) - 1)
    assert len(seen) >= 3
    assert left(tmp_path) == [3]
    journal.close()


def test_files_appear_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "file.json"
    write_atomically(path, b"one")
    assert path.read_bytes() == b"one"
    assert path.stat().st_mode & 0o777 == 0o644
    inode = path.stat().st_ino
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert path.stat().st_ino != inode, "written in place"

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="disk full") as e:
        write_atomically(path, b"three")
    assert e.value.filename == str(path), "a full disk says no name"
    assert path.read_bytes() == b"two"
    assert [p.name for p in path.parent.iterdir()] == ["file.json"]


def test_a_kill_between_writing_and_renaming_leaves_the_old_file(tmp_path: Path) -> None:
    killed(tmp_path, "j.pending(program(2))")
    killed(tmp_path, "import pathlib; pathlib.Path.replace = lambda *_: os._exit(9); j.pending(program(5))")
    assert list((tmp_path / "state").glob(".new-*"))
    assert left(tmp_path) == [2]
    assert list((tmp_path / "state").glob(".new-*")), "a job that starts must not take what another one is writing"
    sweep(tmp_path / "state")
    assert not list((tmp_path / "state").glob(".new-*"))
    assert left(tmp_path) == [2]
    sweep(tmp_path / "none")


def test_small_files(tmp_path: Path) -> None:
    assert read_json(tmp_path / "none.json") is None
    (tmp_path / "a.json").write_text('{"x": 1}')
    assert read_json(tmp_path / "a.json") == {"x": 1}
    assert loads(dumps(program(1))) == program(1)


class Box(IdealSandbox):
    """Runs a job's programs on the ideal library."""

    def __init__(self, *_: object, driver: Path | None, drafts: dict[ModelRef, Path]) -> None:
        assert (driver, drafts) == (None, {}), "there is no driver"
        super().__init__("dense")

    def peak_kb(self) -> int:
        return 0

    def close(self) -> None:
        pass


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What jobs in this process say; their signals are left alone."""
    said: list[dict[str, object]] = []
    monkeypatch.setattr(jobs, "Sandbox", Box)
    monkeypatch.setattr(loop.signal, "signal", lambda *_: None)
    for module in (jobs, loop):
        monkeypatch.setattr(module, "emit", lambda event, **fields: said.append({"event": event, **fields}))
    return said


def job(out: Path) -> tuple[jobs.Job, Model]:
    model = Model(MODEL, "none", traits_of(get("llama")))
    config = loop.JobConfig(
        models=[model], shim="", build="b", cache=str(out / "cache"), out=str(out), seed=1, job=0, jobs=1, scenarios=1
    )
    return jobs.Job(config), model


def test_a_fault_of_ours_in_judging_costs_one_program(
    tmp_path: Path, told: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, model = job(tmp_path)
    executed = observe(program(5), OBSERVATIONS, variety=int(program(5).key(), 16))

    def breaks(*_: object, **__: object) -> Judgement:
        raise KeyError("ours")

    monkeypatch.setattr(Judge, "judge", breaks)
    made._examine(program(5), model)
    assert (made.progress.scenarios, made.progress.unjudged) == (1, 1)
    (text,) = [str(e["text"]) for e in told if e["event"] == "trouble"]
    assert "could not be judged" in text
    assert "KeyError: 'ours'" in text
    (kept,) = (tmp_path / "state").glob("trouble-*.json")
    assert loads(kept.read_bytes()) == executed

    def gone(*_: object, **__: object) -> Judgement:
        raise SandboxError("no sandbox any more")

    monkeypatch.setattr(Judge, "judge", gone)
    with pytest.raises(SandboxError):
        made._examine(program(5), model)
    made.journal.close()


def test_what_is_noted_is_the_program_and_none_of_its_references(tmp_path: Path, told: list[dict[str, object]]) -> None:
    made, model = job(tmp_path)
    made._examine(program(5), model)
    assert not [e for e in told if e["event"] == "trouble"]
    box = made.sandbox
    assert isinstance(box, Box)
    assert len(box.programs) > 1, "bands are measured"
    again = Journal(tmp_path, 0)
    assert again.left_over == [observe(program(5), OBSERVATIONS, variety=int(program(5).key(), 16))]
    again.close()
    made.journal.close()


def test_what_is_left_over_is_tried_as_it_was_and_with_its_variants(
    tmp_path: Path, told: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(tmp_path, "j.pending(program(2)); j.in_flight(program(3))")
    asked: list[tuple[str, object, object]] = []
    real = Judge.judge

    def judge(self: Judge, scenario: Scenario, **how: object) -> Judgement:
        asked.append((scenario.note, how["observed"], how["variants"]))
        return real(self, scenario, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(Judge, "judge", judge)
    made, _ = job(tmp_path)
    made.run()
    assert asked == [("2", False, True), ("3", False, True)]
    assert told[-1]["event"] == "done"
