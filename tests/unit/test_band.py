"""Bands: floors, safety, kinds, and what is kept on disk; that honest programs really end alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fakes import MODEL, N_EMBD, N_VOCAB, Ideal, facts_of, run

from oracles.band import FAR, FLOOR_ULPS, PROMPTS, SAFETY, STEP, Bands, _honest, arithmetic
from oracles.ledger import History, read
from subjects.scenario import ContextParams, Scenario
from subjects.trace import Batch, End, Step, Trace

P = ContextParams()
EPS = float(np.finfo(np.float32).eps)
KINDS = [kind for kind, _ in _honest(0)]
SCALE = 4.0


class Subject:
    """A library whose rows differ from the base's by a fixed amount for each kind of composition change."""

    def __init__(self, by: dict[str, float], hidden: dict[str, float] | None = None) -> None:
        self.by, self.hidden, self.calls = by, hidden or {}, 0
        self.last: list[Scenario] = []

    def __call__(self, programs: Sequence[Scenario]) -> list[Trace]:
        self.calls += 1
        self.last = list(programs)
        assert len(programs) == PROMPTS * len(KINDS)
        made = []
        for i, s in enumerate(programs):
            kind = KINDS[i % len(KINDS)]
            rows = np.full((6, N_VOCAB), SCALE, np.float32)
            rows[-2] -= self.by.get(kind, 0.0)
            hidden = np.full((6, N_EMBD), 2 * SCALE, np.float32)
            hidden[-1] -= self.hidden.get(kind, 0.0)
            facts = [facts_of("dense", s.params)]
            data = hidden.tobytes() if s.params.embeddings else b""
            made.append(Trace([], facts, End("ok"), logits=rows.tobytes(), hidden=data, params=[s.params]))
        return made


def bands(by: dict[str, float], folder: Path | None = None, **hidden: float) -> Bands:
    return Bands(Subject(by, hidden), MODEL, "a build", folder)


@pytest.mark.parametrize(
    ("params", "floor"),
    [
        (P, FLOOR_ULPS * EPS),
        (ContextParams(type_k="f16"), STEP["f16"] / 4),
        (ContextParams(type_v="f16"), STEP["f16"] / 4),
        (ContextParams(type_k="bf16", type_v="f16"), STEP["bf16"] / 4),
        (ContextParams(type_k="q8_0"), STEP["q8_0"] / 4),
        (ContextParams(type_v="q4_0", flash_attn=True), STEP["q4_0"] / 4),
    ],
)
def test_the_floor_is_of_what_is_stored(params: ContextParams, floor: float) -> None:
    assert bands({}).band(params, ()) == pytest.approx(floor * SCALE)


def test_a_band_is_the_largest_of_its_kinds_with_some_safety() -> None:
    b = bands({"split": 0.125, "mixed": 0.5, "cells": 0.25})
    assert b.band(P, ()) == pytest.approx(SAFETY * 0.125)  # split always counts
    assert b.band(P, {"cells"}) == pytest.approx(SAFETY * 0.25)
    assert b.band(P, {"mixed"}) == pytest.approx(SAFETY * 0.5)
    assert b.band(P, {"cells", "mixed", "split"}) == pytest.approx(SAFETY * 0.5)
    assert b.band(P, {"edited"}) == pytest.approx(SAFETY * 4 * 0.5)
    assert b.band(P, {"no such kind"}) == pytest.approx(SAFETY * 0.125)


def test_hidden_rows_have_bands_of_their_own() -> None:
    params = ContextParams(embeddings=True)
    b = bands({"split": 0.125}, split=0.5, cells=1.0)
    assert b.band(params, (), hidden=True) == pytest.approx(SAFETY * 0.5)
    assert b.band(params, {"cells"}, hidden=True) == pytest.approx(SAFETY * 1.0)
    assert b.band(params, {"cells"}) == pytest.approx(SAFETY * 0.125)
    assert bands({}).band(params, (), hidden=True) == pytest.approx(FLOOR_ULPS * EPS * 2 * SCALE)


def test_what_is_measured() -> None:
    subject = Subject({"split": 0.125})
    m = Bands(subject, MODEL, "a build", None).measured(P)
    assert m.logits["split"] == pytest.approx(0.125)
    assert m.scale == pytest.approx(SCALE)
    assert m.runs == PROMPTS * (len(KINDS) - 1)
    assert all(s.params == arithmetic(P) for s in subject.last)


def test_numbers_that_are_none_do_not_widen_a_band() -> None:
    b = bands({"split": float("inf"), "mixed": float("nan"), "cells": 0.25})
    assert b.band(P, {"split", "mixed"}) == pytest.approx(FLOOR_ULPS * EPS * SCALE)
    assert b.band(P, {"cells"}) == pytest.approx(SAFETY * 0.25)


def test_hidden_numbers_that_are_none_do_not_widen_a_band() -> None:
    b = bands({}, split=float("inf"), mixed=float("nan"), cells=0.25)
    params = ContextParams(embeddings=True)
    assert np.isfinite(b.band(params, {"split", "mixed", "cells"}, hidden=True))


def test_programs_that_did_not_run_measure_nothing(tmp_path: Path) -> None:
    def dead(programs: Sequence[Scenario]) -> list[Trace]:
        return [Trace([], [], End("error", 0, "no context")) for _ in programs]

    b = Bands(dead, MODEL, "a build", tmp_path)
    assert b.measured(P).runs == 0
    assert not b.known(P)
    assert not (tmp_path / "bands").exists()
    again = Subject({"split": 0.125})
    later = Bands(again, MODEL, "a build", tmp_path)
    assert later.known(P)
    assert again.calls == 1


def test_only_programs_whose_decodes_were_taken_are_honest() -> None:
    def refusing(programs: Sequence[Scenario]) -> list[Trace]:
        made = Subject({"split": 0.5})(programs)
        for i, t in enumerate(made):
            if KINDS[i % len(KINDS)] == "split":
                t.steps = [Step(0, batches=[Batch([], 1)], done=True)]
        return made

    m = Bands(refusing, MODEL, "a build", None).measured(P)
    assert "split" not in m.logits
    assert m.runs == PROMPTS * sum(kind in ("mixed", "cells") for kind in KINDS)


def test_small_rows_have_a_small_scale() -> None:
    def small(programs: Sequence[Scenario]) -> list[Trace]:
        made = Subject({})(programs)
        for t in made:
            t.logits = np.full((6, N_VOCAB), 0.125, np.float32).tobytes()
        return made

    assert Bands(small, MODEL, "a build", None).measured(P).scale == pytest.approx(0.125)


def test_parameters_that_matter_are_measured_apart() -> None:
    subject = Subject({})
    b = Bands(subject, MODEL, "a build", None)
    b.band(P, ())
    b.band(ContextParams(n_batch=16, n_ubatch=8, n_seq_max=4, n_rs_seq=3, n_threads=2), ())
    assert subject.calls == 1
    for i, other in enumerate(({"kv_unified": True}, {"type_k": "f16"}, {"flash_attn": True}, {"swa_full": True})):
        b.band(ContextParams(**other), ())  # type: ignore[arg-type]
        assert subject.calls == 2 + i
    b.band(P, ())
    assert subject.calls == 5


def test_a_band_is_measured_once_for_a_build_and_model(tmp_path: Path) -> None:
    first = Subject({"split": 0.125})
    assert Bands(first, MODEL, "a build", tmp_path).band(P, ()) == pytest.approx(SAFETY * 0.125)
    again = Subject({"split": 1.0})
    assert Bands(again, MODEL, "a build", tmp_path).band(P, ()) == pytest.approx(SAFETY * 0.125)
    assert (first.calls, again.calls) == (1, 0)
    for model, build in (
        (MODEL, "another build"),
        (msgspec.structs.replace(MODEL, sha256="01"), "a build"),
        (msgspec.structs.replace(MODEL, n_gpu_layers=9), "a build"),
    ):
        other = Subject({"split": 1.0})
        assert Bands(other, model, build, tmp_path).band(P, ()) == pytest.approx(SAFETY)
        assert other.calls == 1
    assert not [p for p in (tmp_path / "bands").iterdir() if p.suffix != ".json"]


@pytest.mark.parametrize(
    "spoil",
    [b"", b"garbage", b"\xff\xfe\x00", b"[]", b'{"x": 1}', b'{"x": {"logits": {"split": null}}}', None],
)
def test_a_spoilt_cache_is_measured_again(tmp_path: Path, spoil: bytes | None) -> None:
    Bands(Subject({"split": 0.125}), MODEL, "a build", tmp_path).band(P, ())
    (file,) = (tmp_path / "bands").iterdir()
    file.write_bytes(file.read_bytes()[:-9] if spoil is None else spoil)
    again = Subject({"split": 0.25})
    assert Bands(again, MODEL, "a build", tmp_path).band(P, ()) == pytest.approx(SAFETY * 0.25)
    assert again.calls == 1
    third = Subject({})
    assert Bands(third, MODEL, "a build", tmp_path).band(P, ()) == pytest.approx(SAFETY * 0.25)
    assert third.calls == 0


@pytest.mark.parametrize("prompt", range(PROMPTS))
def test_honest_programs_end_with_the_same_history(prompt: int) -> None:
    seen = []
    kinds = set()
    for unified in (False, True):
        params = arithmetic(ContextParams(kv_unified=unified))
        for kind, ops in _honest(prompt):
            scenario = Scenario(model=MODEL, params=params, ops=ops)
            trace = run(scenario, Ideal())
            assert trace.end.how == "ok"
            assert all(s.rc in (0, 1) and not s.skipped for s in trace.steps)
            ledger = read(scenario, trace)
            end = ledger.moments[-1].after[0]
            assert isinstance(end, History)
            seen.append((end.tokens(), trace.logit_rows()[-4:].tobytes()))
            kinds.add(kind)
    assert len(set(seen)) == 1
    tokens = seen[0][0]
    assert tokens is not None
    assert len(tokens) >= 13
    assert kinds == {"base", "split", "mixed", "cells"}
    assert [kind for kind, _ in _honest(prompt)] == KINDS
    assert len({ops for _, ops in _honest(prompt)}) == len(KINDS)


def test_prompts_differ() -> None:
    assert len({_honest(p)[0][1] for p in range(PROMPTS)}) == PROMPTS


def test_there_is_room_between_noise_and_error() -> None:
    assert FAR > 1
    assert SAFETY > 1
