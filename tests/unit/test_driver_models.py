"""Which target goes with which driver: pairs by name and kind, models with a driver, what a stored program names."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from fuzz import models
from fuzz.drivers import fit
from fuzz.models import (
    BadModel,
    Model,
    from_pair,
    from_recipe,
    of_program,
    resolve_pairs,
    sha256,
    with_driver,
    with_impl,
)
from subjects import pairs, recipes
from subjects.scenario import Begin, ContextParams, Decode, DriverKind, DriverParams, ModelRef, Part, Propose, Scenario

NO_SHIM = Path("no shim is needed")
FOLDER = Path(tempfile.mkdtemp(prefix="redraft-models-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


@pytest.fixture(scope="module")
def folder() -> Path:
    return FOLDER


def model(name: str = "qwen35") -> Model:
    return from_recipe(recipes.get(name), FOLDER)


@pytest.fixture
def never_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library is asked what a file is."""

    def opened(*_: object) -> Model:
        pytest.fail("a file was opened")

    monkeypatch.setattr(models, "from_file", opened)


@pytest.mark.parametrize("name", ["qwen35-mtp", "llama-simple", "llama-ngram-mod"])
def test_a_pair_is_written_and_described(name: str, folder: Path) -> None:
    pair = pairs.get(name)
    m = from_pair(pair, folder)
    assert (m.label, m.pair, m.n_rs) == (name, name, pair.n_rs_seq)
    assert m.driver is not None
    assert (m.driver.kind, m.driver.n_max, m.driver.impl) == (pair.kind, pair.n_max, "native")
    assert Path(m.path).is_file()
    assert m.ref.recipe == pair.target
    assert m.ref.sha256 == sha256(Path(m.path))
    if pair.draft is None:
        assert (m.driver.draft, m.draft, m.drafts()) == (None, "", {})
    else:
        assert m.driver.draft is not None
        assert m.driver.draft.recipe == pair.draft
        assert m.drafts() == {m.driver.draft: Path(m.draft)}
        assert sha256(Path(m.draft)) == m.driver.draft.sha256
    assert from_pair(pair, folder) == m, "what is there is not written again"


def test_target_and_draft_have_one_seed(folder: Path) -> None:
    m = from_pair(pairs.get("llama-simple"), folder, seed=7)
    assert m.driver is not None
    assert m.driver.draft is not None
    assert (m.ref.seed, m.driver.draft.seed) == (7, 7)


def test_pairs_by_name_kind_and_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "from_pair", lambda p, _, form: msgspec.structs.replace(model(), pair=p.name))

    def found(*wanted: str) -> list[str]:
        return [m.pair for m in resolve_pairs(list(wanted), folder)]

    assert found("qwen35-mtp") == ["qwen35-mtp"]
    assert found("draft-eagle3") == ["qwen35-eagle3", "llama-eagle3"]
    assert found("all") == pairs.names()
    assert found("llama-simple", "draft-mtp", "qwen35-mtp", "draft-simple") == [
        "llama-simple",
        "qwen35-mtp",
        "step35-mtp",
        "gemma4-mtp",
    ], "each one once, in the order asked for"
    assert found() == []
    with pytest.raises(BadModel, match=r"'qwen35' is neither a pair nor a kind of driver; did you mean qwen35-mtp, "):
        found("draft-mtp", "qwen35")


@pytest.mark.parametrize(
    ("name", "kind", "n_rs"),
    [
        ("qwen35", "draft-mtp", 3),
        ("qwen35", "ngram-mod", 0),  # the server asks for earlier states with a head of the model only
        ("step35", "draft-mtp", 0),
        ("llama", "ngram-simple", 0),
    ],
)
def test_a_model_with_a_driver_of_its_own(name: str, kind: DriverKind, n_rs: int, folder: Path) -> None:
    m = with_driver(model(name), kind, "", folder)
    assert m.driver == DriverParams(kind=kind, ngram_m=3 if kind.startswith("ngram") else 4)
    assert (m.n_rs, m.draft, m.label) == (n_rs, "", f"{name} {kind}")
    assert (m.ref, m.path, m.traits) == (model(name).ref, model(name).path, model(name).traits)


def test_n_max_is_what_an_ngram_kind_drafts() -> None:
    for kind in get_args(DriverKind):
        p = fit.sized(DriverParams(kind=kind, n_max=5))
        assert p.n_max == (8 if kind == "ngram-cache" else 5)
        assert (p.ngram_m == 5) == (kind.startswith("ngram") and kind != "ngram-cache")
        assert fit.sized(p) == p
        for pair in pairs.all_pairs():
            if pair.kind == kind:
                assert fit.sized(DriverParams(kind=kind, n_max=pair.n_max)).n_max == pair.n_max


def test_a_draft_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, never_opened: None) -> None:
    recipes.get("eagle3-qwen35").write(tmp_path / "draft.gguf")
    monkeypatch.chdir(tmp_path)
    m = with_driver(model("qwen35"), "draft-eagle3", "draft.gguf", tmp_path)
    assert m.draft == str(tmp_path / "draft.gguf"), "children have a working directory of their own"
    assert m.driver is not None
    assert m.driver.draft == ModelRef(path=m.draft, sha256=sha256(tmp_path / "draft.gguf"))
    assert m.drafts() == {m.driver.draft: tmp_path / "draft.gguf"}
    assert m.n_rs == 3


@pytest.mark.parametrize(
    ("name", "kind", "draft", "says"),
    [
        ("llama", "draft-magic", "", "'draft-magic' is no kind of driver; did you mean"),
        ("llama", "draft-simple", "", "draft-simple needs the draft's model: add --draft"),
        ("qwen35", "draft-eagle3", "", "draft-eagle3 needs the draft's model"),
        ("qwen35", "draft-mtp", "gone.gguf", "gone.gguf: no such file"),
        ("llama", "draft-mtp", "", "llama has no NextN layers (llama.nextn_predict_layers), and draft-mtp drafts with"),
        ("mamba2", "draft-mtp", "", "mamba2 has no NextN layers"),
        ("qwen35", "draft-mtp", "llama", "llama-v1-s0.gguf has no NextN layers"),
        ("llama", "draft-simple", "llama", "llama and llama-v1-s0.gguf have none (no_vocab)"),
        ("llama-words", "draft-simple", "llama", "llama-v1-s0.gguf ha"),
        ("qwen35", "draft-eagle3", "llama", "llama-v1-s0.gguf is llama, draft-eagle3 needs an eagle3 model"),
        ("llama", "ngram-mod", "llama", "ngram-mod drafts from the text alone and has no use for a --draft"),
        ("llama", "draft-simple", __file__, "test_driver_models.py cannot be read as a GGUF file"),
    ],
)
def test_what_no_driver_can_be_made_of(name: str, kind: str, draft: str, says: str, folder: Path) -> None:
    path = model(draft).path if draft in recipes.names() else draft
    with pytest.raises(BadModel) as e:
        with_driver(model(name), kind, path, folder)
    assert says in str(e.value)


@pytest.mark.parametrize("name", [p.name for p in pairs.all_pairs()])
def test_every_pair_fits(name: str, folder: Path) -> None:
    m = from_pair(pairs.get(name), folder)
    assert m.driver is not None
    found = with_driver(model(pairs.get(name).target), m.driver.kind, m.draft, folder)
    assert (found.n_rs, found.draft) == (m.n_rs, m.draft)


def test_the_implementation_in_python_is_draft_mtp_only(folder: Path) -> None:
    mtp = with_driver(model(), "draft-mtp", "", folder)
    assert with_impl(mtp, "native") is mtp
    other = with_impl(mtp, "reference")
    assert other.driver == DriverParams(kind="draft-mtp", impl="reference")
    assert with_impl(other, "native") == mtp
    assert with_impl(model(), "reference") == model(), "there is no driver"
    ngram = with_driver(model(), "ngram-mod", "", folder)
    assert with_impl(ngram, "native") is ngram
    with pytest.raises(BadModel, match="the driver in Python is draft-mtp, not ngram-mod"):
        with_impl(ngram, "reference")


def stored(m: Model, **driver: object) -> Scenario:
    assert m.driver is not None
    return Scenario(model=m.ref, driver=msgspec.structs.replace(m.driver, **driver), ops=())


@pytest.mark.parametrize("name", ["qwen35-mtp", "llama-simple"])
def test_a_stored_program_names_its_models(name: str, folder: Path, never_opened: None) -> None:
    m = from_pair(pairs.get(name), folder)
    found = of_program(stored(m, n_max=2, late=True), folder, NO_SHIM)
    assert m.driver is not None
    assert found.driver == msgspec.structs.replace(m.driver, n_max=2, late=True)
    assert (found.ref, found.path, found.draft) == (m.ref, m.path, m.draft)
    assert found.drafts() == m.drafts()
    plain = of_program(Scenario(model=m.ref, ops=()), folder, NO_SHIM)
    assert (plain.driver, plain.draft, plain.drafts()) == (None, "", {})


def test_a_draft_that_is_another_file_is_refused(folder: Path, tmp_path: Path, never_opened: None) -> None:
    m = from_pair(pairs.get("llama-simple"), folder)
    assert m.driver is not None
    assert m.driver.draft is not None
    other = msgspec.structs.replace(m.driver.draft, sha256="00")
    with pytest.raises(BadModel, match="is another file than the scenario was made with"):
        of_program(stored(m, draft=other), folder, NO_SHIM)
    no_recipe = ModelRef(recipe="no such recipe")
    with pytest.raises(BadModel, match="no such recipe"):
        of_program(stored(m, draft=no_recipe), folder, NO_SHIM)
    newer = msgspec.structs.replace(m.driver.draft, version=99)
    with pytest.raises(BadModel, match="wants version 99"):
        of_program(stored(m, draft=newer), folder, NO_SHIM)

    # by its path: it is looked at, never opened, since a draft is no model by itself
    path = tmp_path / "draft.gguf"
    path.write_bytes(b"GGUF")
    by_path = ModelRef(path=str(path), sha256=sha256(path))
    assert of_program(stored(m, draft=by_path), folder, NO_SHIM).draft == str(path)
    path.write_bytes(b"GGUF another")
    for _ in range(2):
        with pytest.raises(BadModel, match=r"draft\.gguf is another file than the scenario was made with, or gone"):
            of_program(stored(m, draft=by_path), folder, NO_SHIM)
        path.unlink(missing_ok=True)


def told(name: str, kind: DriverKind, draft: str = "", **changed: object) -> Scenario:
    driver = DriverParams(kind=kind, draft=ModelRef(recipe=draft) if draft else None)
    program = Scenario(model=ModelRef(recipe=name), ops=(Decode(parts=(Part(seq=0, n=4),)),), driver=driver)
    return msgspec.structs.replace(program, **changed)


def refused(program: Scenario) -> str:
    m = of_program(program, FOLDER, NO_SHIM)
    try:
        fit.check_program(program, Path(m.path), Path(m.draft) if m.draft else None)
    except fit.Misfit as e:
        return str(e)
    return ""


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (told("llama", "draft-mtp"), "llama has no NextN layers"),
        (told("qwen35", "draft-eagle3"), "draft-eagle3 needs the draft's model"),
        (told("qwen35", "draft-eagle3", "llama"), "llama is llama, draft-eagle3 needs an eagle3 model"),
        (told("gemma4", "draft-eagle3", "eagle3-llama"), "eagle3-llama takes 32 numbers a row, gemma4 gives 64"),
        (told("gemma4", "draft-mtp", "qwen35"), "draft-mtp hands hidden rows"),
        (told("qwen35", "draft-mtp", "gemma4-assistant"), "the memory of a gemma4 model, and qwen35 is none"),
        (told("qwen35", "draft-simple", "qwen35"), "and qwen35 has none (no_vocab)"),
        (told("qwen35", "draft-mtp", params=ContextParams(embeddings=True)), "params.embeddings; leave it out"),
        (told("llama", "ngram-mod", params=ContextParams(embeddings=True)), ""),
        (told("llama", "ngram-mod", driver=DriverParams(kind="ngram-mod", ngram_n=1 << 30)), "ngram_n is 1073741824"),
        (told("llama", "ngram-mod", driver=DriverParams(kind="ngram-mod", ngram_m=0)), "takes 1 to 1024"),
        (
            told("llama", "ngram-mod", driver=DriverParams(kind="ngram-mod", impl="reference")),
            "the driver in Python is draft-mtp, not ngram-mod",
        ),
        (told("llama", "ngram-mod", driver=None, ops=(Begin(seq=0),)), "operation 0 (begin) needs a driver"),
        (told("qwen35", "draft-mtp", ops=(Propose(seqs=(0,), last=(64,)),)), "token 64 is not in the vocabulary"),
        (told("qwen35", "draft-mtp", ops=(Propose(seqs=(0,), last=(-5,)),)), "of qwen35 (0 to 63)"),
        (told("qwen35", "draft-mtp", ops=(Propose(seqs=(0,), last=(63,)),)), ""),
        (told("qwen35", "draft-mtp", ops=(Propose(seqs=(0,), last=()),)), "last has 0 tokens for 1 sequences"),
        (told("qwen35", "draft-mtp", misuse=True, ops=(Propose(seqs=(0,), last=(64,)),)), ""),
        (
            told("qwen35", "draft-mtp", ops=(Decode(parts=(Part(seq=0, n=1, tokens=(1, 99)),)),)),
            "operation 0 (decode): token 99",
        ),
    ],
)
def test_a_stored_program_that_says_nothing_of_llama_cpp_is_refused(program: Scenario, says: str) -> None:
    said = refused(program)
    assert says in said
    assert bool(said) == bool(says)


@pytest.mark.parametrize("draft", ["gone.gguf", ".", __file__])
def test_a_stored_draft_that_is_no_model_is_refused(draft: str) -> None:
    program = told("llama-words", "draft-simple")
    driver = DriverParams(kind="draft-simple", draft=ModelRef(path=draft))
    said = refused(msgspec.structs.replace(program, driver=driver))
    assert "cannot be read as a GGUF file: " in said
    assert "Errno" not in said
    with pytest.raises(BadModel, match="names neither a recipe nor a file"):
        refused(msgspec.structs.replace(program, driver=DriverParams(kind="draft-simple", draft=ModelRef())))


def test_a_draft_by_its_recipe(folder: Path) -> None:
    m = with_driver(model("gemma4"), "draft-mtp", "gemma4-assistant", folder)
    assert m.driver is not None and m.driver.draft is not None
    assert m.driver.draft.recipe == "gemma4-assistant"
    assert m.drafts() == {m.driver.draft: Path(m.draft)}
