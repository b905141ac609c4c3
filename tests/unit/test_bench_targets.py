"""ci/bench --targets: what is counted, and that the C++ harness has the numbers of ours."""

import argparse
import re
from array import array
from pathlib import Path

import pytest

from fuzz.measure import targets
from fuzz.measure.targets_counts import MOST_MODELS, OUTCOMES, TRIED, WORDS, Class, Counts, alike, at
from fuzz.models import Model, from_recipe
from fuzz.targets import draw, load
from fuzz.targets.blobs import BlobTarget
from subjects import recipes


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Model]:
    folder = tmp_path_factory.mktemp("models")
    return [from_recipe(recipes.get(name), folder) for name in ("gemma3", "mamba2")]


def counts(**classes: tuple[int, float]) -> Counts:
    made = Counts(wall=1.0)
    for name, (n, cpu) in classes.items():
        outcome = next(o for o in OUTCOMES if name.startswith(o))
        c = Class(int(name.removeprefix(outcome)), outcome)
        made.number[c], made.cpu[c] = n, cpu
    return made


def test_counts_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    Counts.blank(path)
    assert Counts.read(path) == Counts()
    words = array("q", path.read_bytes())
    assert len(words) == WORDS
    words[:5] = array("q", [30, 10**9, 3 * 10**9, 2, 5 * 10**8])
    place = at(MOST_MODELS - 1, OUTCOMES.index("taken"))
    assert place.cpu == WORDS - 1
    words[place.number], words[place.cpu] = 7, 10**9
    path.write_bytes(words.tobytes())
    c = Class(MOST_MODELS - 1, "taken")
    assert Counts.read(path) == Counts(30, 2.0, 2, 0.5, {c: 7}, {c: 1.0})


def test_rates_are_of_the_classes_that_are_asked_for() -> None:
    c = counts(skipped0=(100, 0.5), refused0=(60, 1.0), taken1=(20, 1.5))
    assert c.rate() == 60
    assert c.rate(outcomes=TRIED) == 32
    assert c.rate(model=0, outcomes=TRIED) == 60
    assert c.rate(model=2) == 0
    assert (c.share("skipped"), c.share("taken")) == (100 / 180, 0.25)
    c.add(c)
    assert c.of() == (360, 6.0)


def test_alike_takes_the_other_side_at_our_mix() -> None:
    ours = counts(refused0=(100, 1.0), taken0=(300, 6.0), taken1=(30, 9.0), skipped0=(500, 1.0))
    theirs = counts(refused0=(1000, 5.0), taken0=(20, 0.2), taken1=(19, 0.1), skipped0=(5, 9.0))
    # 5 ms and 10 ms of theirs for 10 ms and 20 ms of ours; of model 1 they had too few
    assert alike(ours, theirs) == pytest.approx((100 * 0.005 + 300 * 0.01) / 7.0)
    assert alike(ours, counts()) == 0


@pytest.mark.parametrize("name", targets.TARGETS)
def test_the_first_inputs_are_every_setting_once(name: str, models: list[Model]) -> None:
    target = load(name)
    assert isinstance(target, BlobTarget)
    first = list(targets.first_inputs(name, models))
    drawn = [target.draw(data, models) for data in first]
    assert len({(d.model.path, d.setting) for d in drawn}) == len(first)
    kinds = len(draw.SEQ_KINDS) if name == "seq_state" else len(draw.FILE_KINDS)
    formats = 2 if name == "session_file" else 1
    assert len(first) == formats * kinds * sum(len(draw.variants(m.traits)) for m in models)


def test_the_harness_is_told_of_models_and_parameters(models: list[Model]) -> None:
    lines = targets.settings("seq_state", models, 2.5, Path("counts")).splitlines()
    assert lines[:4] == ["target seq_state", f"warm {targets.WARM}", "seconds 2.5", "counts counts"]
    assert [x for x in lines if x.startswith("model")] == [f"model {i} {m.path}" for i, m in enumerate(models)]
    params = [x.split()[1:] for x in lines if x.startswith("params")]
    assert len(params) == sum(len(draw.variants(m.traits)) for m in models)
    assert {len(p) for p in params} == {13}


def test_the_harness_has_the_numbers_of_the_target() -> None:
    source = targets.SOURCE.read_text()
    for names in ("VICTIM NEIGHBOUR EMPTY", "SAVED MORE OTHER"):
        values = ", ".join(f"{n} = {getattr(draw, n)}" for n in names.split())
        assert f"{values};" in source
    for name, kinds in (("SEQ_KINDS", draw.SEQ_KINDS), ("FILE_KINDS", draw.FILE_KINDS)):
        found = re.search(rf"{name}\[\]\s+= \{{ (.*?) \}}", source)
        assert found and tuple(found[1].lower().replace("_", "-").split(", ")) == kinds
    assert f"MOST_MODELS = {MOST_MODELS};" in source
    found = re.search(r"enum Outcome \{ (.*?), N_OUTCOMES", source)
    assert found and tuple(found[1].lower().split(", ")) == OUTCOMES


def test_both_ratios_must_be_reached() -> None:
    def result(cpu: float, same: float) -> dict[str, object]:
        return {"targets": {"seq_state": {"ratio_cpu": {"median": cpu}, "ratio_alike_cpu": {"median": same}}}}

    assert targets.reached(result(0.5, 0.6))
    assert not targets.reached(result(0.4, 0.6))
    assert not targets.reached(result(0.6, 0.4))


def test_a_build_that_is_not_there_is_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(targets, "pin", lambda cpu: cpu)
    args = argparse.Namespace(cpu=None, build=tmp_path, seconds=1.0, repeat=1, seed=1, json=False, check=False)
    assert targets.run(args) == 2
    assert "ci/bench: " in capsys.readouterr().err
