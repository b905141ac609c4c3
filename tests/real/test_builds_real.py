"""Finding a build, compiling the shim and the doctor's proof, on the installed llama-cpp-python."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fuzz import doctor
from subjects import builds, shimcache
from subjects.builds import BadBuild, Build, NoDrivers

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    cache.mkdir()
    # not fetched again for each test
    (cache / "sources").symlink_to(shimcache.cache_dir() / "sources")
    monkeypatch.setenv("REDRAFT_CACHE", str(cache))
    return cache


@pytest.fixture
def installed() -> Build:
    return builds.find_build(None)


def build_directory(installed: Build, at: Path, header: str | None = None) -> Path:
    """A source tree with a build inside that are links to what is installed; `header` replaces llama.h."""
    for d in ("include", "ggml/include", "build/bin"):
        (at / d).mkdir(parents=True)
    (at / "CMakeLists.txt").write_text('project("llama.cpp")\n')
    (at / "build/CMakeCache.txt").write_text(f"CMAKE_HOME_DIRECTORY:INTERNAL={at}\n")
    for p in installed.include[0].iterdir():
        (at / ("include" if p.name.startswith("llama") else "ggml/include") / p.name).symlink_to(p)
    for p in installed.libdirs[0].iterdir():
        (at / "build/bin" / p.name).symlink_to(p)
    if header is not None:
        (at / "include/llama.h").unlink()
        (at / "include/llama.h").write_text(header)
    return at


def test_installed_llama_cpp_python(installed: Build) -> None:
    assert installed.name.startswith("llama-cpp-python ")
    assert installed.kind == "package"
    assert installed.libllama.is_file()
    assert (installed.include[0] / "llama.h").is_file()
    assert installed.version is not None and installed.version.startswith("llama.cpp ")
    assert len(installed.fingerprint) == 16
    assert "libggml-base" in {p.name.split(".")[0] for p in installed.linked()}


def test_compiled_once(installed: Build, own_cache: Path) -> None:
    shim = builds.compile_shim(installed)
    before = shim.stat()
    started = time.perf_counter()
    assert builds.compile_shim(builds.find_build(None)) == shim
    assert time.perf_counter() - started < 0.25
    assert shim.stat().st_ino == before.st_ino
    assert list((own_cache / "shims").iterdir()) == [shim]


def test_compiled_by_many_at_once(installed: Build, own_cache: Path) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from subjects import builds; "
        "print(builds.compile_shim(builds.find_build(None)))"
    )

    def one(_: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    with ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(one, range(4)))
    assert {r.returncode for r in runs} == {0}, runs[0].stderr
    assert len({r.stdout for r in runs}) == 1
    assert len(list((own_cache / "shims").iterdir())) == 1


def test_tree_build_directory_prefix_and_site_packages(installed: Build, tmp_path: Path) -> None:
    tree = build_directory(installed, tmp_path / "llama.cpp")
    found = builds.find_build(tree)
    assert found.name == "llama.cpp/build"
    assert found.libllama == tree / "build/bin" / installed.libllama.name
    assert found.fingerprint == installed.fingerprint, "equal contents have equal fingerprints"
    assert builds.find_build(tree / "build") == found
    shim = builds.compile_shim(found)
    assert shim != builds.shim_path(installed), "the place of the libraries is burnt into a shim"
    builds.check_loads(shim, found.linked())

    prefix = tmp_path / "prefix"
    prefix.mkdir()
    (prefix / "include").symlink_to(installed.include[0])
    (prefix / "lib64").symlink_to(installed.libdirs[0])
    assert builds.find_build(prefix).kind == "prefix"
    builds.compile_shim(builds.find_build(prefix))

    site = builds.find_build(installed.include[0].parent)
    assert (site.name, site.libllama, site.fingerprint) == ("site-packages", installed.libllama, installed.fingerprint)


def without_search_path(library: bytes) -> bytes:
    """What `cmake --install` does to a library: its DT_RUNPATH is gone (here: an entry that nobody knows)."""
    runpath, unknown = 0x1D, 0x6000000E
    out = bytearray(library)
    headers_at = struct.unpack_from("<Q", out, 32)[0]
    size, count = struct.unpack_from("<HH", out, 54)
    for h in range(headers_at, headers_at + size * count, size):
        kind, _, at, _, _, length = struct.unpack_from("<IIQQQQ", out, h)
        for entry in range(at, at + length, 16) if kind == 2 else ():
            if struct.unpack_from("<Q", out, entry)[0] == runpath:
                struct.pack_into("<Q", out, entry, unknown)
    return bytes(out)


@pytest.mark.skipif(sys.platform != "linux" or sys.maxsize < 2**32, reason="patches 64-bit ELF files")
def test_installed_without_search_path(installed: Build, tmp_path: Path) -> None:
    lib = tmp_path / "lib"
    lib.mkdir()
    (tmp_path / "include").symlink_to(installed.include[0])
    for p in installed.libdirs[0].glob("lib*"):
        (lib / p.name).write_bytes(without_search_path(p.read_bytes()))
    build = builds.find_build(tmp_path)
    assert build.fingerprint != installed.fingerprint
    builds.check_loads(builds.compile_shim(build), build.linked())


def test_another_library_in_front_is_noticed(installed: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shim = builds.compile_shim(installed)
    other = tmp_path / "other"
    shutil.copytree(installed.libdirs[0], other)
    # The shim's own search path goes first for what it links, LD_LIBRARY_PATH for what these link.
    monkeypatch.setenv("LD_LIBRARY_PATH", str(other))
    with pytest.raises(BadBuild, match=r"other/libggml-cpu.*not of this build.*LD_LIBRARY_PATH"):
        builds.check_loads(shim, installed.linked())


def test_renamed_function_is_named(installed: Build, tmp_path: Path) -> None:
    text = (installed.include[0] / "llama.h").read_text()
    text = text.replace("llama_state_seq_get_size_ext", "llama_state_seq_size_v9")
    tree = build_directory(installed, tmp_path / "llama.cpp", text)
    with pytest.raises(BadBuild) as e:
        builds.compile_shim(builds.find_build(tree))
    said = str(e.value)
    line = next(
        i for i, x in enumerate(shimcache.SOURCE.read_text().splitlines(), 1) if "llama_state_seq_get_size_ext(" in x
    )
    assert f"llama.h of this build has no llama_state_seq_get_size_ext; shim.cpp:{line} uses it" in said
    assert "The compiler said:" in said
    assert not list((shimcache.cache_dir() / "shims").iterdir()), "nothing half-made is kept"


def test_header_that_promises_more_than_the_library_has(installed: Build, tmp_path: Path) -> None:
    text = (installed.include[0] / "llama.h").read_text()
    text += "\n#define llama_memory_seq_keep llama_memory_seq_keep_v9\n"
    text += '\nextern "C" void llama_memory_seq_keep_v9(llama_memory_t mem, llama_seq_id seq_id);\n'
    tree = build_directory(installed, tmp_path / "llama.cpp", text)
    with pytest.raises(
        BadBuild, match="libllama lacks llama_memory_seq_keep_v9: headers and library are from different"
    ):
        builds.compile_shim(builds.find_build(tree))


def test_environment_has_no_paths_and_no_names(installed: Build) -> None:
    env = builds.environment(installed)
    text = json.dumps(env)
    assert env["fingerprint"] == installed.fingerprint
    assert "CPU" in str(env["system_info"])
    for secret in (str(ROOT), str(Path.home()), os.uname().nodename, "site-packages"):
        assert secret not in text
    assert any(x.startswith("llama-cpp-python ") for x in env["packages"])  # type: ignore[union-attr]


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(None, as_json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is True
    assert [c["name"] for c in document["checks"]][-len(doctor.STEPS) :] == list(doctor.STEPS)
    assert {c["state"] for c in document["checks"]} == {"ok"}
    assert document["facts"]["shim_from_cache"] is False
    assert Path(document["facts"]["drivers"]).is_file()
    assert doctor.run(None, as_json=False) == 0
    text = capsys.readouterr().out
    assert "logits after the restore are those before" in text
    assert "FAILED" not in text
    # a line each, to be pasted before the commands of a finding
    places = dict(re.findall(r"^(?:headers|libraries): ([SL])=(.+)$", text, re.M))
    assert all((Path(places["S"]) / d).is_file() for d in ("common/speculative.h", "include/llama.h"))
    libraries = [p.stem for d in places["L"].split(":") for p in Path(d).glob("*.so")]
    assert {"libllama", "libllama-common", "libggml", "libggml-base"} <= set(libraries)


def test_doctor_without_drivers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor.run(None, as_json=False, llama_src=tmp_path) == 2
    text = capsys.readouterr().out
    assert f"FAILED speculative drivers compile and load  {tmp_path} is no llama.cpp checkout" in text
    assert "can be tested" not in text, "they were asked for"

    def none(*_: object) -> Path:
        raise NoDrivers("no headers")

    monkeypatch.setattr(builds, "driver_library", none)
    assert doctor.run(None, as_json=False) == 0
    text = capsys.readouterr().out
    assert "warning speculative drivers compile and load  no headers" in text
    assert "no driver can be tested, everything else can" in text
    assert "This build can be tested." in text


def test_doctor_on_a_build_that_cannot_be_tested(
    installed: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (installed.include[0] / "llama.h").read_text().replace("n_rs_seq;", "n_rs_seqs;")
    tree = build_directory(installed, tmp_path / "llama.cpp", text)
    assert doctor.run(tree, as_json=False) == 2
    said = capsys.readouterr().out
    assert "FAILED" in said
    assert "llama_context_params of this build has no member n_rs_seq" in said


@pytest.mark.parametrize(
    ("right", "wrong", "step", "detail"),
    [
        ("return llama_state_seq_set_data_ext(C(ctx), src, n, s, flags);", "return n;", 7, "largest difference"),
        ("return llama_state_seq_get_data_ext(C(ctx), dst, n, s, flags);", "abort();", 4, "SIGABRT"),
        ("return llama_state_seq_get_data_ext(C(ctx), dst, n, s, flags);", "return 0;", 4, "0 of"),
    ],
    ids=["restores nothing", "aborts", "saves nothing"],
)
def test_doctor_sees_a_restore_that_does_not_work(
    installed: Build, tmp_path: Path, right: str, wrong: str, step: int, detail: str
) -> None:
    text = shimcache.SOURCE.read_text()
    assert right in text
    source = tmp_path / "shim.cpp"
    source.write_text(
        text.replace(right, wrong).replace("#include <cstring>", "#include <cstring>\n#include <cstdlib>")
    )
    checks = doctor.prove(shimcache.compile_into_cache("faulty", installed.include, installed.linked(), source))
    failed = [c for c in checks if c.state == "FAILED"]
    assert failed[0].name == doctor.STEPS[step]
    assert detail in failed[0].detail
    assert failed[0].advice
