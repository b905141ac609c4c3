"""Generated models: the same bytes everywhere, readable by the gguf package, small, and found by name."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from subjects import recipes
from subjects.ggufwriter import model_bytes, tensor_values, uniform_ints, write_model

NAMES = recipes.names(drivers=True)

# Stored scenarios name a model by recipe, version and seed. A hash may change here only together with the version.
GOLDEN = {
    ("deepseek4", 1): "db2c6097c54039eb7940063b15f429d605362a0f0dca06ff3750c37294c4368e",
    ("eagle3-llama", 1): "c550a9dbd9551df295ff1ff83e5d03f2b73b515afad7b3555f78f9a9747545aa",
    ("eagle3-qwen35", 1): "834afee0d23f49a28d5014e6eb49d9036b18a2048c8fa46a6d62ab4f534e9ddc",
    ("falcon-h1", 1): "ccf386383eb345703be21b879f16013c252e47f7038f0991e88115edbffb9ad1",
    ("gemma3", 1): "f96c46f382574afc02879e780a74035fe08434b36720aa295f45413a26554aac",
    ("gemma4", 1): "052df4b6ab7f40b41eb933caa037884abca90b50ab7dcac3b2b78fba9aaf0d12",
    ("gemma4-assistant", 1): "d161de181b0b675387747dc355d0549718f19acd64fd9a42581da7a59b5ffc11",
    ("granitehybrid", 1): "2d405f4e40d01bb04b640084da8a5ecff40cbb9bf5eab1ca3d760fb57955ce73",
    ("jamba", 1): "6c3f3da459a9657c29b3a7af0ed9d64588f3a3b71939c1577351fc320ade941e",
    ("lfm2", 1): "f40931ad7407aaf7d641b65bf67271aa31a30bd608a0fe31191e04a71da80d86",
    ("lfm2-swa", 1): "827603a3ded0a284292e376545cb5eaf3d81abcede1732805e1d0a33bb0d5eea",
    ("llama", 1): "06df2cf3545552d0ba52182b66d91923e8c8d5738bcb9399b49e9b28d51b6454",
    ("llama-draft", 1): "f3a60f1643f0b3e515aefc52862a57c55ae3b51d5fbdcb6f07c4bac6cad71f4a",
    ("llama-h64", 1): "e66b560751381604770726d508f291b82d5b1bfa20771b16f746bae2c9141779",
    ("llama-loop", 1): "60c699781f868f9d0bb68c1c2224ba2025d76d086f16f1a1c14582587be53d67",
    ("llama-words", 1): "915bd6410a65de0d047bdede73eaeec29853acef150a17dc5a15d57e64cf32c5",
    ("mamba2", 1): "3d0a46ad0a5ff2b7a90e8af3d7125364b9b003e9f2ee295ee6e225f0f87433bd",
    ("nemotron_h", 1): "04e1a6e1791d7db3e702a86e6dba9c44c24c461ed3cddc4477405f26efcff6ac",
    ("qwen35", 1): "953717f6c6ddbc0f71f38cd6385acf43b21560543f94e503059f929209c88b6c",
    ("qwen3next", 1): "2513065d5fdcb24816062769d01b59e8339ab1cc04fe6067d4dfbba1ce5cc62b",
    ("qwen4exp", 1): "3642116e7c2e28d4dfcc45e9b9cf675324277db61cc1e238e967e6b286bf135c",
    ("rwkv7", 1): "4d05b60135078e356d0d6ce48ef8831dcfe69233872f7b4815c95a7b34544e9f",
    ("step35", 1): "8b618df344eb3a256fe05e4cff9fabce98e7eac28c99bc95a7e7f327a568de56",
}

KEY = [["general.architecture", "str", "llama"]]


def written(name: str, seed: int = 0) -> bytes:
    return model_bytes(*recipes.get(name).build(), seed)


def test_every_recipe_has_a_golden_hash() -> None:
    assert sorted((r.name, r.version) for r in recipes.all_recipes(drivers=True)) == sorted(GOLDEN)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_pinned(name: str) -> None:
    data = written(name)
    assert hashlib.sha256(data).hexdigest() == GOLDEN[name, recipes.get(name).version]
    assert len(data) < 500_000


@pytest.mark.parametrize("name", NAMES)
def test_another_seed_gives_other_bytes_of_the_same_length(name: str) -> None:
    assert written(name, 1) != written(name)
    assert len(written(name, 1)) == len(written(name))


@pytest.mark.parametrize("name", NAMES)
def test_data_survives_json(name: str) -> None:
    data = recipes.get(name).data()
    again = json.loads(json.dumps(data))
    assert again == data
    assert model_bytes(again["metadata"], again["tensors"], 0) == written(name)


@pytest.mark.parametrize("name", NAMES)
def test_the_gguf_package_reads_the_file(name: str, tmp_path: Path) -> None:
    recipe = recipes.get(name)
    recipe.write(tmp_path / "model.gguf", seed=3)
    metadata, tensors = recipe.build()
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    for key, _, value in metadata:
        got = reader.fields[key].contents()
        assert got == (pytest.approx(value) if isinstance(value, float) else value), key
    inits = {tensor: (shape, init) for tensor, shape, init in tensors}
    assert [tensor.name for tensor in reader.tensors] == list(inits)
    for tensor in reader.tensors:
        shape, init = inits[tensor.name]
        assert list(tensor.shape) == shape[::-1]
        expected = tensor_values(init, shape, tensor.name, inits, 3).astype(np.float32)
        assert np.array_equal(tensor.data, expected)


@pytest.mark.parametrize("name", NAMES)
def test_facts_agree_with_the_metadata(name: str) -> None:
    recipe = recipes.get(name)
    values = {key.removeprefix(f"{recipe.arch}."): value for key, _, value in recipe.build()[0]}
    assert values["general.architecture"] == recipe.arch
    assert values["vocab_size"] == recipe.n_vocab
    assert values["embedding_length"] == recipe.n_embd
    assert values.get("attention.sliding_window", 0) == recipe.window
    assert values.get("expert_used_count") == values.get("expert_count")


def test_names_are_unique_and_sorted() -> None:
    assert sorted(set(NAMES)) == NAMES
    assert [recipe.name for recipe in recipes.all_recipes(drivers=True)] == NAMES


def test_recipes_for_drivers_are_not_among_the_plain_ones() -> None:
    plain = recipes.all_recipes()
    assert [recipe.name for recipe in plain] == recipes.names()
    assert {recipe.role for recipe in plain} == {"plain"}
    others = set(NAMES) - set(recipes.names())
    assert others == {
        "eagle3-llama",
        "eagle3-qwen35",
        "gemma4",
        "gemma4-assistant",
        "llama-draft",
        "llama-loop",
        "llama-words",
        "step35",
    }
    assert {recipes.get(name).role for name in others} == {"driver"}


def test_unknown_name_lists_near_ones() -> None:
    with pytest.raises(KeyError, match=r"no recipe is called 'qwen36'; did you mean qwen35"):
        recipes.get("qwen36")
    with pytest.raises(KeyError, match=r"did you mean deepseek4, eagle3-llama, .*step35"):
        recipes.get("@@@@")


def test_uniform_integers_are_pinned() -> None:
    key = int.from_bytes(hashlib.sha256(b"k").digest()[:8], "little")
    expected = []
    for counter in (1, 2):  # splitmix64 as published, in Python's unbounded integers
        mask = 2**64 - 1
        z = (key + counter * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        expected += [z & 0xFFFFFFFF, z >> 32]
    assert uniform_ints("k", 3).tolist() == expected[:3]


def test_normals_have_mean_0_and_variance_1() -> None:
    values = tensor_values(["normal", 1.0], [200, 100], "x", {}, 0)
    assert abs(values.mean()) < 0.03
    assert abs(values.std() - 1.0) < 0.03


def test_init_forms() -> None:
    inits = {"e": ([4, 2], ["normal", 1.0])}

    def values(init: list[object], shape: list[int]) -> np.ndarray:
        return tensor_values(init, shape, "x", inits, 0)

    e = tensor_values(["normal", 1.0], [4, 2], "e", inits, 0)
    cycle = values(["cycle", "e", 1, 3, 0.5], [4, 2])
    assert np.array_equal(cycle[[3, 0, 1, 2]], 0.5 * e)
    assert values(["eye", 1.0, 2.0], [2, 4]).tolist() == [[1, 0, 2, 0], [0, 1, 0, 2]]
    assert values(["sum", ["const", 1.0], ["const", 2.0]], [2]).tolist() == [3, 3]
    assert (values(["negative_abs", 0.5, 0.3, 0.05], [100]) <= -0.05).all()
    uniform = values(["uniform", -1.0, 2.0], [1000])
    assert uniform.min() >= -1.0
    assert uniform.max() < 2.0
    assert np.array_equal(values(["fan_in", 3.0], [5, 9]), values(["normal", 1.0], [5, 9]))
    parts = values(["sum", ["normal", 1.0], ["normal", -1.0]], [8])
    assert np.abs(parts).min() > 0, "the parts of a sum must not share their random numbers"


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        (KEY, [["a", [2], ["nope"]]], "unknown init form 'nope' of tensor 'a'"),
        (KEY, [["a", [2], ["const", 0.0]], ["a", [2], ["const", 0.0]]], "two tensors have the same name"),
        (KEY, [["a", [2, 5], ["eye", 1.0, 1.0]]], "init 'eye' of tensor 'a' gives 8 values for shape"),
        (KEY * 2, [], "two metadata entries have the same key"),
        ([["k", "u9", 1]], [], "unknown metadata type 'u9' of key 'k'"),
    ],
)
def test_bad_data_is_refused_and_leaves_no_file(
    metadata: list[list[object]], tensors: list[list[object]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        write_model(tmp_path / "model.gguf", metadata, tensors, 0)
    assert list(tmp_path.iterdir()) == []


def test_writing_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"old")
    recipes.get("llama").write(path)
    assert path.read_bytes() == written("llama")
    assert list(tmp_path.iterdir()) == [path]


def test_failed_replacement_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.mkdir()
    with pytest.raises(OSError):
        recipes.get("llama").write(path)
    assert list(tmp_path.iterdir()) == [path]


def test_writer_can_be_pasted_into_a_script(tmp_path: Path) -> None:
    recipe = recipes.get("mamba2")
    data = recipe.data()
    source = Path(recipes.__file__).parents[1].joinpath("ggufwriter.py").read_text()
    script = tmp_path / "script.py"
    script.write_text(
        f"import json\n{source}\ndata = json.loads({json.dumps(data)!r})\n"
        "write_model('model.gguf', data['metadata'], data['tensors'], 0)\n"
    )
    subprocess.run([sys.executable, "-I", str(script)], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "model.gguf").read_bytes() == written("mamba2")
