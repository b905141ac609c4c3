"""Where builds are looked for, what names them, and how words of compilers and linkers become advice."""

import importlib.machinery
import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from subjects import builds, shimcache, sources
from subjects.builds import BadBuild, NoDrivers, find_build
from subjects.shimcache import Ours, load_message, what_moved

pytestmark = pytest.mark.skipif(not shutil.which("c++"), reason="no compiler, whose version is part of a fingerprint")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("REDRAFT_CACHE", str(cache))
    monkeypatch.delenv("CXX", raising=False)
    return cache


def put(*paths: Path, text: str | None = None) -> None:
    """Stub files."""
    for p in paths:
        p.parent.mkdir(parents=True, exist_ok=True)
        p.write_text(text if text is not None else f"stub {p.name}")


def headers(include: Path, ggml: Path) -> None:
    put(include / "llama.h", ggml / "ggml.h")


def libraries(lib: Path, suffix: str = ".so") -> None:
    put(*(lib / f"{n}{suffix}" for n in ("libllama", "libggml", "libggml-base", "libggml-cpu")))


def tree(at: Path, build: str | None = "build", lib: str = "bin") -> Path:
    """A llama.cpp source tree, with a build inside unless `build` is None."""
    headers(at / "include", at / "ggml/include")
    put(at / "CMakeLists.txt")
    if build:
        put(
            at / build / "CMakeCache.txt",
            text=f"llama.cpp_SOURCE_DIR:STATIC={at}\nCMAKE_HOME_DIRECTORY:INTERNAL={at}\n",
        )
        libraries(at / build / lib)
    return at


# -- layouts


def test_source_tree(tmp_path: Path) -> None:
    at = tree(tmp_path / "llama.cpp")
    put(
        at / "build/llama-config.cmake",
        text="set(LLAMA_VERSION      0.5.0-dev)\nset(LLAMA_BUILD_COMMIT 0c1e570)\nset(LLAMA_BUILD_NUMBER 1)\n",
    )
    b = find_build(at)
    assert (b.name, b.kind, b.version) == ("llama.cpp/build", "tree", "llama.cpp 0.5.0-dev 0c1e570")
    assert b.include == (at / "include", at / "ggml/include")
    assert b.libdirs == (at / "build/bin",)
    assert b.libllama == at / "build/bin/libllama.so"
    assert [p.name for p in b.linked()] == ["libllama.so", "libggml.so", "libggml-base.so"]
    assert {p.name for p in b.libraries()} == {"libllama.so", "libggml.so", "libggml-base.so", "libggml-cpu.so"}


def test_source_tree_with_another_build_name(tmp_path: Path) -> None:
    assert find_build(tree(tmp_path / "t", "build-asan")).name == "t/build-asan"


def test_source_tree_of_before_bin(tmp_path: Path) -> None:
    at = tree(tmp_path / "t", lib="src")
    (at / "build/ggml/src").mkdir(parents=True)
    for p in (at / "build/src").glob("libggml*"):
        p.rename(at / "build/ggml/src" / p.name)
    b = find_build(at)
    assert b.libdirs == (at / "build/src", at / "build/ggml/src")
    assert [p.parent.name for p in b.linked()] == ["src", "src", "src"]
    assert len(b.linked()) == 3


def test_source_tree_with_several_builds(tmp_path: Path) -> None:
    at = tree(tmp_path / "t")
    libraries(at / "build-cuda/bin")
    with pytest.raises(BadBuild, match=r"several builds: \S+/build, \S+/build-cuda; name the one to test"):
        find_build(at)


def test_build_directory_elsewhere(tmp_path: Path) -> None:
    at = tree(tmp_path / "src", None)
    out = tmp_path / "out"
    put(out / "CMakeCache.txt", text=f"CMAKE_HOME_DIRECTORY:INTERNAL={at}\n")
    libraries(out / "bin")
    b = find_build(out)
    assert (b.name, b.include[0]) == ("out", at / "include")


def test_build_directory_of_a_project_around_it(tmp_path: Path) -> None:
    at = tree(tmp_path / "vendor/llama.cpp", None)
    out = tmp_path / "out"
    put(out / "CMakeCache.txt", text=f"CMAKE_HOME_DIRECTORY:INTERNAL={tmp_path}\nllama.cpp_SOURCE_DIR:STATIC={at}\n")
    libraries(out / "bin")
    assert find_build(out).include[0] == at / "include"


def test_build_directory_that_was_moved_with_its_sources(tmp_path: Path) -> None:
    at = tree(tmp_path / "t")
    at.rename(tmp_path / "moved")
    assert find_build(tmp_path / "moved/build").include[0] == tmp_path / "moved/include"


@pytest.mark.parametrize("lib", ["lib", "lib64", "lib/x86_64-linux-gnu"])
def test_install_prefix(tmp_path: Path, lib: str) -> None:
    headers(tmp_path / "include", tmp_path / "include")
    libraries(tmp_path / lib)
    b = find_build(tmp_path)
    assert (b.kind, b.include, b.libdirs) == ("prefix", (tmp_path / "include",), (tmp_path / lib,))


def test_install_prefix_with_versioned_names_only(tmp_path: Path) -> None:
    headers(tmp_path / "include", tmp_path / "include")
    libraries(tmp_path / "lib", ".so.0")
    assert [p.name for p in find_build(tmp_path).linked()] == ["libllama.so.0", "libggml.so.0", "libggml-base.so.0"]


def test_macos(tmp_path: Path) -> None:
    headers(tmp_path / "include", tmp_path / "include")
    libraries(tmp_path / "lib", ".dylib")
    assert [p.name for p in find_build(tmp_path).linked()] == ["libllama.dylib", "libggml.dylib", "libggml-base.dylib"]


def site_packages(at: Path) -> Path:
    headers(at / "include", at / "include")
    libraries(at / "llama_cpp/lib")
    libraries(at / "lib")
    put(at / "llama_cpp/__init__.py", text="raise SystemExit('imported')\n")
    return at


def test_site_packages(tmp_path: Path) -> None:
    at = site_packages(tmp_path / "site-packages")
    b = find_build(at)
    assert (b.name, b.libllama.parent) == ("site-packages", at / "llama_cpp/lib")


def test_installed_is_found_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = site_packages(tmp_path)
    spec = importlib.util.spec_from_file_location(
        "llama_cpp", at / "llama_cpp/__init__.py", submodule_search_locations=[str(at / "llama_cpp")]
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    b = find_build(None)
    assert (b.kind, b.libllama, b.include) == ("package", at / "llama_cpp/lib/libllama.so", (at / "include",))
    assert b.name.startswith("llama-cpp-python")


# -- what is missing


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: None, r"is neither a llama.cpp tree.*looked for libllama.so .*/lib.*-DBUILD_SHARED_LIBS=ON"),
        (
            lambda p: tree(p, None),
            r"is a llama.cpp tree without a build: looked for .*/build/bin.*-DBUILD_SHARED_LIBS=ON",
        ),
        (lambda p: headers(p / "include", p / "include"), r"has llama.h but no libllama.*-DBUILD_SHARED_LIBS=ON"),
        (lambda p: libraries(p / "lib"), r"has libllama.so, but no llama.h and ggml.h: looked in .*/include"),
        (lambda p: put(p / "CMakeCache.txt"), r"is a build directory without libllama.*/bin"),
        (lambda p: put(p / "CMakeCache.txt", p / "bin/libllama.so"), r"llama.h and ggml.h of its sources are gone"),
        (
            lambda p: put(tree(p, None) / "build/bin/libllama.a"),
            r"only the static .*libllama.a.*build the target llama with -DBUILD_SHARED_LIBS=ON",
        ),
    ],
)
def test_message(tmp_path: Path, make: Callable[[Path], object], said: str) -> None:
    make(tmp_path)
    with pytest.raises(BadBuild, match=said):
        find_build(tmp_path)


def test_message_for_a_file_and_for_nothing(tmp_path: Path) -> None:
    put(tmp_path / "libllama.so")
    with pytest.raises(BadBuild, match="is a file; name a directory"):
        find_build(tmp_path / "libllama.so")
    with pytest.raises(BadBuild, match="is not there; name a directory"):
        find_build(tmp_path / "nowhere")


def test_message_without_llama_cpp_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadBuild, match=r"llama-cpp-python is not installed.*ci/setup"):
        find_build(None)
    spec = importlib.machinery.ModuleSpec("llama_cpp", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "llama_cpp")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(BadBuild, match=r"has no libllama: looked in .*llama_cpp/lib"):
        find_build(None)


def test_message_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O0")
    with pytest.raises(BadBuild, match="CXX=no-such-compiler -O0: no such command"):
        find_build(tree(tmp_path))
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadBuild, match="no C\\+\\+ compiler: looked for"):
        find_build(tmp_path)


# -- fingerprints


@pytest.mark.parametrize(
    "file",
    [
        "include/llama.h",
        "ggml/include/ggml.h",
        "build/bin/libllama.so",
        "build/bin/libggml.so",
        "build/bin/libggml-base.so",
        "build/bin/libggml-cpu.so",
    ],
)
def test_fingerprint_knows_each_file(tmp_path: Path, file: str) -> None:
    at = tree(tmp_path / "t")
    before = find_build(at).fingerprint
    assert find_build(at).fingerprint == before
    data = (at / file).read_bytes()
    (at / file).write_bytes(bytes(reversed(data)))
    assert find_build(at).fingerprint != before
    (at / file).write_bytes(data)
    assert find_build(at).fingerprint == before


def test_fingerprint_knows_a_new_backend(tmp_path: Path) -> None:
    at = tree(tmp_path / "t")
    before = find_build(at).fingerprint
    put(at / "build/bin/libggml-vulkan.so")
    assert find_build(at).fingerprint != before


def test_fingerprint_knows_a_replacement_with_kept_times(tmp_path: Path) -> None:
    at = tree(tmp_path / "t")
    lib = at / "build/bin/libllama.so"
    before, st = find_build(at).fingerprint, lib.stat()
    lib.write_bytes(bytes(reversed(lib.read_bytes())))
    os.utime(lib, ns=(st.st_atime_ns, st.st_mtime_ns))
    assert find_build(at).fingerprint != before


def test_fingerprint_knows_shim_and_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = tree(tmp_path / "t")
    before = find_build(at)
    source = tmp_path / "shim.cpp"
    source.write_bytes(shimcache.SOURCE.read_bytes())
    assert builds._fingerprint(before.include, before.libraries(), source) == before.fingerprint
    source.write_bytes(shimcache.SOURCE.read_bytes() + b"\n")
    assert builds._fingerprint(before.include, before.libraries(), source) != before.fingerprint

    header = tmp_path / "shim_params.h"
    header.write_bytes(shimcache.PARAMS.read_bytes() + b"\n")
    with monkeypatch.context() as m:
        m.setattr(shimcache, "PARAMS", header)
        assert find_build(at).fingerprint != before.fingerprint

    fake = tmp_path / "other-c++"
    fake.write_text("#!/bin/sh\necho other 1.0\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    assert find_build(at).fingerprint != before.fingerprint


def test_fingerprint_does_not_know_the_place(tmp_path: Path) -> None:
    a, b = find_build(tree(tmp_path / "a")), find_build(tree(tmp_path / "b"))
    assert a.fingerprint == b.fingerprint
    assert builds.shim_path(a) != builds.shim_path(b)
    assert builds.shim_path(a) == builds.shim_path(replace(a, name="x"))


# -- drivers


def drivers(at: Path) -> Path:
    """A source tree with what the drivers need: sources of common/, and a build of it."""
    tree(at)
    libraries(at / "build/bin")
    put(at / "build/bin/libllama-common.so", at / "common/speculative.cpp", at / "common/ngram-map.cpp")
    put(at / "common/speculative.h", at / "common/common.h", at / "src/llama-ext.h")
    return at


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Ours, dict[str, str]]]:
    """What would have been compiled, and the text of what would have been compiled in."""
    seen: list[tuple[Ours, dict[str, str]]] = []

    def made(ours: Ours) -> Path:
        seen.append((ours, {p.name: p.read_text() for p in ours.more}))
        return ours.place

    monkeypatch.setattr(Ours, "made", made)
    return seen


def test_driver_library_of_a_tree(tmp_path: Path, wanted: list[tuple[Ours, dict[str, str]]]) -> None:
    at = drivers(tmp_path / "t")
    b = find_build(at)
    assert builds.driver_library(b).parent.name == "drivers"
    said: list[str] = []
    place = builds.driver_library(b, compiling=lambda: said.append("now"))
    put(place)
    assert builds.driver_library(b, compiling=lambda: said.append("again")) == place
    place.unlink()
    assert said == ["now"], "what is in the cache is not compiled"
    del wanted[1:]
    ((ours, texts),) = wanted
    assert ours.include == (at / "common", at / "include", at / "ggml/include", at / "vendor")
    assert [p.name for p in ours.link] == ["libllama-common.so", "libllama.so", "libggml.so", "libggml-base.so"]
    assert (ours.source, texts) == (builds.DRIVER, {})


def test_what_a_checkout_and_a_patch_compile_in(tmp_path: Path, wanted: list[tuple[Ours, dict[str, str]]]) -> None:
    b = find_build(drivers(tmp_path / "t"))
    src = drivers(tmp_path / "src")
    patch = tmp_path / "p"
    patch.write_text("@@ -1 +1 @@\n-line\n+other\n")
    for tree in ("t", "src"):
        put(tmp_path / tree / "common/speculative.cpp", text="line\n")
    builds.driver_library(b, src)
    builds.driver_library(b, patch=patch)
    builds.driver_library(b, src, patch)
    line, n = '#line 1 "common/{0}"\n{1}', "ngram-map.cpp"
    assert [texts for _, texts in wanted] == [
        {"speculative.cpp": line.format("speculative.cpp", "line\n"), n: line.format(n, f"stub {n}")},
        {"speculative.cpp": line.format("speculative.cpp", "other\n")},
        {"speculative.cpp": line.format("speculative.cpp", "other\n"), n: line.format(n, f"stub {n}")},
    ]
    assert wanted[0][0].include[0] == src / "common"


@pytest.mark.parametrize(
    ("file", "src", "counts"),
    [
        ("t/common/common.h", False, True),
        ("t/src/llama-ext.h", False, True),
        ("t/build/bin/libllama-common.so", False, True),
        ("t/build/bin/libllama.so", False, True),
        ("t/common/speculative.cpp", False, False),
        ("src/common/speculative.cpp", True, True),
        ("src/common/ngram-map.cpp", True, True),
        ("src/common/common.h", True, True),
        ("t/common/common.h", True, False),
    ],
)
def test_driver_fingerprint_knows_each_file(
    tmp_path: Path, wanted: list[tuple[Ours, dict[str, str]]], file: str, src: bool, counts: bool
) -> None:
    drivers(tmp_path / "t")
    given = drivers(tmp_path / "src") if src else None

    def fingerprint() -> str:
        builds.driver_library(find_build(tmp_path / "t"), given)
        return wanted[-1][0].fingerprint

    before = fingerprint()
    assert fingerprint() == before
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[::-1])
    assert (fingerprint() != before) == counts


def test_driver_fingerprint_knows_source_and_patch(
    tmp_path: Path, wanted: list[tuple[Ours, dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    b = find_build(drivers(tmp_path / "t"))
    put(tmp_path / "t/common/speculative.cpp", text="line\n")
    builds.driver_library(b)
    for i in range(2):
        put(tmp_path / "p", text=f"@@ -1 +1 @@\n-line\n+other {i}\n")
        builds.driver_library(b, patch=tmp_path / "p")
    put(tmp_path / "driver.cpp")
    monkeypatch.setattr(builds, "DRIVER", tmp_path / "driver.cpp")
    builds.driver_library(b)
    assert len({ours.fingerprint for ours, _ in wanted}) == 4


def test_messages_without_drivers(tmp_path: Path) -> None:
    at = drivers(tmp_path / "t")
    b = find_build(at)
    with pytest.raises(NoDrivers, match=r"the patch is no unified diff"):
        put(tmp_path / "p")
        builds.driver_library(b, patch=tmp_path / "p")
    with pytest.raises(NoDrivers, match=r"sources of the drivers cannot be read: .*nowhere"):
        builds.driver_library(b, patch=tmp_path / "nowhere")
    with pytest.raises(NoDrivers, match=r"sources of the drivers cannot be read: .*src/common/speculative\.cpp"):
        drivers(tmp_path / "src").joinpath("common/speculative.cpp").unlink()
        builds.driver_library(b, tmp_path / "src")
    with pytest.raises(NoDrivers, match=r"is no llama\.cpp checkout"):
        builds.driver_library(b, tmp_path)
    (at / "src/llama-ext.h").unlink()
    with pytest.raises(NoDrivers, match=r"sources of the drivers cannot be read: .*llama-ext\.h"):
        builds.driver_library(b)
    (at / "build/bin/libllama-common.so").unlink()
    with pytest.raises(
        NoDrivers, match=r"t/build has no libllama-common.*/build/bin; build the target llama-common too"
    ):
        builds.driver_library(b)

    prefix = tmp_path / "prefix"
    headers(prefix / "include", prefix / "include")
    libraries(prefix / "lib")
    put(prefix / "lib/libllama-common.so")
    with pytest.raises(NoDrivers, match=r"prefix brings no headers of common/.*--llama-src"):
        builds.driver_library(find_build(prefix))


def test_sources_of_an_installed_release(
    tmp_path: Path, wanted: list[tuple[Ours, dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = site_packages(tmp_path / "site-packages")
    put(at / "lib/libllama-common.so", at / "lib/libllama.so")
    put(at / "llama_cpp_python-9.9.dist-info/METADATA", text="Name: llama-cpp-python\nVersion: 9.9\n")
    src = drivers(tmp_path / "src")
    asked: list[str] = []
    monkeypatch.setattr(sources, "fetched", lambda version: [asked.append(version), src][1])
    builds.driver_library(find_build(at))
    assert asked == ["9.9"]
    ((ours, _),) = wanted
    assert ours.link[:2] == (at / "lib/libllama-common.so", at / "llama_cpp/lib/libllama.so")
    command = ours.command(tmp_path / "x.so")
    homes = [command[i + 2] for i, x in enumerate(command) if x == "-rpath"]
    assert homes == [str(at / "llama_cpp/lib"), str(at / "lib")], "copies of libllama lie in the other"


def test_hashes_are_remembered(tmp_path: Path, own_cache: Path) -> None:
    put(tmp_path / "f")
    digest = shimcache.file_hash(tmp_path / "f")
    (memo,) = (own_cache / "hashes").iterdir()
    memo.write_text("0" * 64)
    assert shimcache.file_hash(tmp_path / "f") == "0" * 64
    memo.write_text("not a hash")
    assert shimcache.file_hash(tmp_path / "f") == digest


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "file")
    monkeypatch.setenv("REDRAFT_CACHE", str(tmp_path / "file"))
    with pytest.raises(BadBuild, match=r"cannot be used.*set REDRAFT_CACHE"):
        builds.compile_shim(find_build(tree(tmp_path / "t")))


def test_cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert builds.cache_dir() == Path(os.environ["REDRAFT_CACHE"])
    monkeypatch.delenv("REDRAFT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert builds.cache_dir() == tmp_path / "redraft"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert builds.cache_dir() == tmp_path / ".cache/redraft"


# -- words of compilers and linkers, recorded from g++ 12.2 and clang 22.1 on one doctored llama.h

GCC = """\
/x/subjects/shim.cpp:46:1: error: 'llama_memory_t' does not name a type; did you mean 'llama_memory_i'?
   46 | llama_memory_t  K(void * p) { return llama_get_memory(C(p)); }
      | ^~~~~~~~~~~~~~
/x/subjects/shim.cpp: In function 'void rd_model_facts(void*, int32_t*)':
/x/subjects/shim.cpp:84:32: error: invalid conversion from 'const llama_model*' to 'int' [-fpermissive]
/x/subjects/shim.cpp:84:31: error: too few arguments to function 'int32_t llama_model_n_swa(int, const llama_model*)'
/x/subjects/shim.cpp:96:7: error: 'struct llama_context_params' has no member named 'n_rs_seq'; did you mean \
'n_rs_seqs'?
/x/subjects/shim.cpp:100:33: error: 'LLAMA_FLASH_ATTN_TYPE_ENABLED' was not declared in this scope; did you mean \
'LLAMA_FLASH_ATTN_TYPE_DISABLED'?
/x/subjects/shim.cpp:122:37: error: 'K' was not declared in this scope
/x/subjects/shim.cpp:180:77: error: 'llama_state_seq_get_size_ext' was not declared in this scope; did you mean \
'llama_state_seq_get_size_ext2'?
"""

CLANG = """\
/x/subjects/shim.cpp:46:1: error: unknown type name 'llama_memory_t'
/x/subjects/shim.cpp:46:38: error: cannot initialize return object of type 'int' with an rvalue of type 'llama_mem_t' \
(aka 'struct llama_memory_i *')
/x/subjects/shim.cpp:84:14: error: no matching function for call to 'llama_model_n_swa'
./llama.h:604:23: note: candidate function not viable: requires 2 arguments, but 1 was provided
/x/subjects/shim.cpp:96:7: error: no member named 'n_rs_seq' in 'llama_context_params'
/x/subjects/shim.cpp:100:33: error: use of undeclared identifier 'LLAMA_FLASH_ATTN_TYPE_ENABLED'
/x/subjects/shim.cpp:180:77: error: use of undeclared identifier 'llama_state_seq_get_size_ext'
6 errors generated.
"""


def test_words_of_gcc() -> None:
    assert [str(m) for m in what_moved(GCC)] == [
        "llama.h of this build has no type llama_memory_t; shim.cpp:46 uses it (the compiler suggests llama_memory_i)",
        "llama_model_n_swa of this build takes more arguments; shim.cpp:84 calls it",
        "llama_context_params of this build has no member n_rs_seq; shim.cpp:96 uses it "
        "(the compiler suggests n_rs_seqs)",
        "llama.h of this build has no LLAMA_FLASH_ATTN_TYPE_ENABLED; shim.cpp:100 uses it (the compiler suggests "
        "LLAMA_FLASH_ATTN_TYPE_DISABLED)",
        "llama.h of this build has no llama_state_seq_get_size_ext; shim.cpp:180 uses it (the compiler suggests "
        "llama_state_seq_get_size_ext2)",
    ]


def test_words_of_clang() -> None:
    assert [str(m) for m in what_moved(CLANG)] == [
        "llama.h of this build has no type llama_memory_t; shim.cpp:46 uses it",
        "llama_model_n_swa of this build takes other arguments; shim.cpp:84 calls it",
        "llama_context_params of this build has no member n_rs_seq; shim.cpp:96 uses it",
        "llama.h of this build has no LLAMA_FLASH_ATTN_TYPE_ENABLED; shim.cpp:100 uses it",
        "llama.h of this build has no llama_state_seq_get_size_ext; shim.cpp:180 uses it",
    ]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            "shim.cpp:5:9: error: too many arguments to function 'bool llama_memory_seq_rm(llama_memory_t, int)'",
            "llama_memory_seq_rm of this build takes fewer arguments; shim.cpp:5 calls it",
        ),
        (
            "shim.cpp:5:9: error: too few arguments to function call, expected 3, have 2\n"
            "llama.h:9:1: note: 'llama_log_set' declared here",
            "llama_log_set of this build takes more arguments; shim.cpp:5 calls it",
        ),
        (
            "shim.cpp:5:9: error: 'llama_x' was not declared in this scope\n"
            "shim.cpp:9:9: error: 'llama_x' was not declared in this scope",
            "llama.h of this build has no llama_x; shim.cpp:5, 9 use it",
        ),
        (
            "llama.h:3:10: fatal error: ggml-cpu.h: No such file or directory",
            "the headers of this build lack ggml-cpu.h",
        ),
        ("llama.h:3:10: fatal error: 'ggml-cpu.h' file not found", "the headers of this build lack ggml-cpu.h"),
        (
            "x/shim_params.h:9:1: error: 'struct llama_context_params' has no member named 'n_rs_seq'",
            "llama_context_params of this build has no member n_rs_seq; shim_params.h:9 uses it",
        ),
        ("shim.cpp:7:1: error: something new about 'llama_y'", "something new about 'llama_y'; shim.cpp:7 needs it"),
    ],
)
def test_words(error: str, said: str) -> None:
    assert [str(m) for m in what_moved(error)] == [said]


def test_words_about_common() -> None:
    said = what_moved(
        "driver.cpp:201:21: error: 'struct common_params_speculative_draft' has no member named 'ctx_dft'\n"
        "driver.cpp:217:55: error: 'COMMON_SPECULATIVE_TYPE_NGRAM_MOD' was not declared in this scope\n"
        "driver.cpp:239:5: error: 'common_batch' was not declared in this scope; did you mean 'common_batches'?\n"
        "driver.cpp:241:9: error: 'b' was not declared in this scope\n"
        "driver.cpp:260:9: error: 'llama_process' was not declared in this scope\n"
        "driver.cpp:9:10: fatal error: speculative.h: No such file or directory",
        "driver.cpp",
    )
    assert [str(m) for m in said] == [
        "common_params_speculative_draft of this build has no member ctx_dft; driver.cpp:201 uses it",
        "common/*.h of this build has no COMMON_SPECULATIVE_TYPE_NGRAM_MOD; driver.cpp:217 uses it",
        "common/*.h of this build has no common_batch; driver.cpp:239 uses it (the compiler suggests common_batches)",
        "llama.h of this build has no llama_process; driver.cpp:260 uses it",
        "the headers of this build lack speculative.h; driver.cpp:9 needs it",
    ]


def test_words_about_an_edit_that_does_not_compile() -> None:
    ours = Ours("", (), (), builds.DRIVER, (Path("x/common/speculative.cpp"),), "driver")
    said = shimcache.compile_message("common/speculative.cpp:7:1: error: expected ';'", ours, "c++ ...")
    assert said.startswith("the driver does not compile, because speculative.cpp does not:\nMend it, or")
    assert "  common/speculative.cpp:7:1: error: expected ';'" in said
    moved = "driver.cpp:1:1: error: 'common_batch' was not declared"
    said = shimcache.compile_message(moved, ours, "c++ ...")
    assert said.startswith("the driver does not compile against the headers of this build:\n  - common/*.h of this")
    assert "or adapt subjects/driver.cpp." in said


def test_words_that_name_nothing() -> None:
    assert (
        what_moved("cc1plus: error: unrecognized option '-std=c++17'\nother.cpp:1:1: error: 'llama_x' was not declared")
        == []
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("/x/shim.so: undefined symbol: llama_foo", "libllama lacks llama_foo: headers and library are from different"),
        (
            "/x/libllama.so.0: undefined symbol: ggml_foo",
            "libggml lacks ggml_foo, which libllama.so.0 needs: libraries of",
        ),
        ("Error relocating /x/shim.so: llama_foo: symbol not found", "libllama lacks llama_foo: headers and library"),
        (
            "dlopen(x, 6): symbol not found in flat namespace '_llama_foo'",
            "libllama lacks llama_foo: headers and library",
        ),
        (
            "libcudart.so.13: cannot open shared object file: No such file or directory",
            "libcudart.so.13 cannot be found: the build is incomplete",
        ),
        ("dlopen(x): Library not loaded: @rpath/libggml.0.dylib\n Reason", "libggml.0.dylib cannot be found"),
        (
            "/x/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by",
            "was built with a newer C or C++ library",
        ),
        (
            "/x/driver.so: undefined symbol: _Z24common_speculative_beginP18common_speculativei",
            "libllama-common lacks common_speculative_begin: headers and library are from different",
        ),
        (
            "/x/libllama-common.so.0: undefined symbol: _ZN12common_batch3addEiiib",
            "libllama-common lacks common_batch::add, which libllama-common.so.0 needs: libraries of",
        ),
        (
            "/x/driver.so: undefined symbol: _Z30llama_get_embeddings_nextn_ithP13llama_contexti",
            "libllama lacks llama_get_embeddings_nextn_ith: headers and library",
        ),
        ("invalid ELF header", "the shim does not load\nThe dynamic linker said: invalid ELF header"),
    ],
)
def test_words_of_the_dynamic_linker(error: str, said: str) -> None:
    assert said in load_message(error)


def test_words_about_a_dead_child() -> None:
    asan = "==1==ASan runtime does not come first in initial library list; you should either link runtime ..."
    assert "set LD_PRELOAD" in shimcache.death_message(1, asan)
    assert "another CPU" in shimcache.death_message(-4, "")
    assert "killed by SIGKILL" in shimcache.death_message(-9, "")
    assert "ended with 3\nIt said:\n  oh" in shimcache.death_message(3, "oh\n")
