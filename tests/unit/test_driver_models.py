"""Which target goes with which driver: pairs by name and kind, models with a driver, what a stored program names."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fuzz import models
from fuzz.models import BadModel, Model, from_pair, of_program, resolve_pairs, sha256, with_driver, with_impl
from fuzz.traits import traits_of
from subjects import pairs, recipes
from subjects.scenario import DriverKind, DriverParams, ModelRef, Scenario

NO_SHIM = Path("no shim is needed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def model(name: str = "qwen35") -> Model:
    return Model(ModelRef(recipe=name, sha256="00"), "nowhere.gguf", traits_of(recipes.get(name)))


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
    monkeypatch.setattr(models, "from_pair", lambda p, _: msgspec.structs.replace(model(), pair=p.name))

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
    with pytest.raises(BadModel, match=r"'qwen35' is neither a pair nor a kind of driver; pairs are qwen35-mtp, "):
        found("draft-mtp", "qwen35")


@pytest.mark.parametrize(
    ("name", "kind", "n_rs"),
    [
        ("qwen35", "draft-mtp", 3),
        ("qwen35", "ngram-mod", 0),  # the server asks for earlier states with a head of the model only
        ("llama", "draft-mtp", 0),
        ("mamba2", "draft-mtp", 0),
    ],
)
def test_a_model_with_a_driver_of_its_own(name: str, kind: DriverKind, n_rs: int) -> None:
    m = with_driver(model(name), kind, None, NO_SHIM)
    assert m.driver == DriverParams(kind=kind)
    assert (m.n_rs, m.draft, m.label) == (n_rs, "", f"{name} {kind}")
    assert (m.ref, m.path, m.traits) == (model(name).ref, "nowhere.gguf", model(name).traits)


def test_a_draft_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, never_opened: None) -> None:
    (tmp_path / "draft.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    m = with_driver(model("qwen35"), "draft-eagle3", Path("draft.gguf"), NO_SHIM)
    assert m.draft == str(tmp_path / "draft.gguf"), "children have a working directory of their own"
    assert m.driver is not None
    assert m.driver.draft == ModelRef(path=m.draft, sha256=sha256(tmp_path / "draft.gguf"))
    assert m.drafts() == {m.driver.draft: tmp_path / "draft.gguf"}
    assert m.n_rs == 3


@pytest.mark.parametrize(
    ("kind", "draft", "says"),
    [
        ("draft-magic", None, "'draft-magic' is no kind of driver; kinds are draft-mtp, draft-eagle3"),
        ("draft-simple", None, "draft-simple needs the draft's model: add --draft PATH"),
        ("draft-eagle3", None, "draft-eagle3 needs the draft's model"),
        ("draft-mtp", "gone.gguf", "gone.gguf: no such file"),
    ],
)
def test_what_no_driver_can_be_made_of(kind: str, draft: str | None, says: str) -> None:
    with pytest.raises(BadModel) as e:
        with_driver(model(), kind, Path(draft) if draft else None, NO_SHIM)
    assert says in str(e.value)


def test_the_implementation_in_python_is_draft_mtp_only() -> None:
    mtp = with_driver(model(), "draft-mtp", None, NO_SHIM)
    assert with_impl(mtp, "native") is mtp
    other = with_impl(mtp, "reference")
    assert other.driver == DriverParams(kind="draft-mtp", impl="reference")
    assert with_impl(other, "native") == mtp
    assert with_impl(model(), "reference") == model(), "there is no driver"
    ngram = with_driver(model(), "ngram-mod", None, NO_SHIM)
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
