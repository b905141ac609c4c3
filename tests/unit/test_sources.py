"""Where the sources of the drivers come from: archives are taken apart strictly, once, and what is missing is said."""

import io
import subprocess
import sys
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from subjects import sources
from subjects.shimcache import BadBuild
from subjects.sources import WHOLE, NoDrivers, check_match, extract, fetched, patched

TOP = "llama_cpp_python-9.9/vendor/llama.cpp"
TREE = {
    f"{TOP}/common/speculative.h": "// speculative",
    f"{TOP}/common/jinja/x.h": "// deeper",
    f"{TOP}/include/llama.h": "// llama",
    f"{TOP}/ggml/include/ggml.h": "// ggml",
    f"{TOP}/src/llama-ext.h": "// ext",
    f"{TOP}/vendor/nlohmann/json.hpp": "// json",
    f"{TOP}/LICENSE": "license",
    f"{TOP}/src/llama.cpp": "not wanted",
    f"{TOP}/ggml/src/ggml.c": "not wanted",
    f"{TOP}/models/big.gguf": "not wanted",
    f"{TOP}/vendor/stb/x.c": "not wanted",
    "llama_cpp_python-9.9/llama_cpp/__init__.py": "not wanted",
    "llama_cpp_python-9.9/vendor/other/common/speculative.h": "not wanted",
}
BUILT = {
    **{f"{TOP}/{x}": "built" for x in (*sources.WHOLE.markers, "src/llama.cpp", "ggml/src/ggml.c", "vendor/stb/x.c")},
    **{f"{TOP}/{x}": "built" for x in ("cmake/x.cmake", "tests/t.cpp", "tools/mtmd/CMakeLists.txt", "LICENSE")},
    **{f"{TOP}/{x}": "not built" for x in ("models/big.gguf", "docs/x.md", "tools/ui/x.js", ".git/HEAD", "README.md")},
    "llama_cpp_python-9.9/CMakeLists.txt": "not built",
}
"""What an instrumented build takes."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def archive(to: Path, files: dict[str, str], *more: tarfile.TarInfo) -> Path:
    with tarfile.open(to, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
        for info in more:
            tar.addfile(info, io.BytesIO(b"x" * info.size))
    return to


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, size
    return info


def names(at: Path) -> set[str]:
    return {str(p.relative_to(at)) for p in at.rglob("*") if not p.is_dir()}


# -- archives


def test_only_what_is_needed_is_kept(tmp_path: Path) -> None:
    extract(archive(tmp_path / "a.tar.gz", TREE), tmp_path / "out")
    wanted = {name.removeprefix(f"{TOP}/") for name, text in TREE.items() if text != "not wanted"}
    assert names(tmp_path / "out") == wanted
    assert (tmp_path / "out/common/speculative.h").read_text() == "// speculative"


@pytest.mark.parametrize(
    "name",
    [
        f"{TOP}/common/../../../../../evil.h",
        "../evil.h",
        "/tmp/evil.h",
        f"{TOP}/include/..",
        f"{TOP}/common/a\\..\\b.h",
        f"/{TOP}/common/x.h",
    ],
)
def test_names_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(NoDrivers, match="leads out of it"):
        extract(archive(tmp_path / "a.tar.gz", TREE, member(name)), tmp_path / "in/out")
    assert not list(tmp_path.rglob("evil.h"))
    assert names(tmp_path) - {"a.tar.gz"} == {f"in/out/{x}" for x in names(tmp_path / "in/out")}


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_only_plain_files_are_written(tmp_path: Path, kind: bytes) -> None:
    inside = archive(tmp_path / "a.tar.gz", TREE, member(f"{TOP}/common/evil.h", kind, "/etc/passwd"))
    extract(inside, tmp_path / "out")
    assert "common/evil.h" not in names(tmp_path / "out")
    assert not any(p.is_symlink() for p in (tmp_path / "out").rglob("*"))


def test_a_file_below_a_link_lands_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = member(f"{TOP}/common/d", tarfile.SYMTYPE, str(tmp_path / "elsewhere"))
    extract(archive(tmp_path / "a.tar.gz", TREE, link, member(f"{TOP}/common/d/x.h", size=1)), tmp_path / "out")
    assert (tmp_path / "out/common/d/x.h").is_file()
    assert not names(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([member(f"{TOP}/common/big.cpp", size=sources._MOST_BYTES)], "more than 64 MiB"),
        ([member(f"{TOP}/common/speculative.h")], "damaged: .*exists"),
        ([member(f"{TOP}/common/speculative.h/x.h")], "damaged"),
        ([member(f"{TOP}/common/jinja")], "damaged"),
    ],
    ids=["far too much", "twice", "below a file", "in place of a folder"],
)
def test_dishonest_archives(tmp_path: Path, more: list[tarfile.TarInfo], said: str) -> None:
    with pytest.raises(NoDrivers, match=said):
        extract(archive(tmp_path / "a.tar.gz", TREE, *more), tmp_path / "out")


def test_damaged_archives(tmp_path: Path) -> None:
    whole = archive(tmp_path / "a.tar.gz", TREE).read_bytes()
    for i, data in enumerate((b"", b"no gzip", whole[: len(whole) // 2], whole[:40] + b"xxxx" + whole[44:])):
        (tmp_path / "b.tar.gz").write_bytes(data)
        with pytest.raises(NoDrivers, match=r"b\.tar\.gz (is damaged|has no vendor)"):
            extract(tmp_path / "b.tar.gz", tmp_path / f"out{i}")
    none = {k: v for k, v in TREE.items() if not k.endswith("llama.cpp/common/speculative.h")}
    with pytest.raises(NoDrivers, match=r"has no vendor/llama\.cpp/common/speculative\.h: .*too old or too new"):
        extract(archive(tmp_path / "c.tar.gz", none), tmp_path / "out")


def test_all_that_is_built_is_kept(tmp_path: Path) -> None:
    extract(archive(tmp_path / "a.tar.gz", BUILT), tmp_path / "out", WHOLE)
    assert names(tmp_path / "out") == {name.removeprefix(f"{TOP}/") for name, text in BUILT.items() if text == "built"}
    with pytest.raises(NoDrivers, match=r"has no vendor/llama\.cpp/CMakeLists\.txt: .*too old or too new"):
        extract(archive(tmp_path / "b.tar.gz", TREE), tmp_path / "out2", WHOLE)


# -- fetching


def test_fetched_once_by_many(own_cache: Path) -> None:
    asked: list[str] = []
    lock = threading.Lock()

    def fetch(version: str, folder: Path) -> Path:
        with lock:
            asked.append(version)
        return archive(folder / "x.tar.gz", TREE)

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda _: fetched("9.9", fetch), range(8)))
    assert set(got) == {own_cache / "sources/llama-cpp-python-9.9"}
    assert asked == ["9.9"]
    assert {p.name for p in (own_cache / "sources").iterdir()} == {".lock", "llama-cpp-python-9.9"}


def test_both_parts_lie_side_by_side(own_cache: Path) -> None:
    both = {**BUILT, **TREE}
    asked: list[str] = []

    def fetch(version: str, folder: Path) -> Path:
        asked.append(version)
        return archive(folder / "x.tar.gz", both)

    for _ in range(2):
        assert fetched("9.9", fetch) == own_cache / "sources/llama-cpp-python-9.9"
        assert fetched("9.9", fetch, WHOLE) == own_cache / "sources/llama-cpp-python-9.9-whole"
    assert asked == ["9.9", "9.9"]
    (own_cache / "sources/llama-cpp-python-9.9-whole/src/CMakeLists.txt").unlink()
    assert (fetched("9.9", fetch, WHOLE) / "src/CMakeLists.txt").is_file()
    assert len(asked) == 3


def test_what_is_incomplete_is_fetched_again(own_cache: Path) -> None:
    left = own_cache / "sources/.tmp-killed"
    (own_cache / "sources/llama-cpp-python-9.9/common").mkdir(parents=True)
    left.mkdir()
    got = fetched("9.9", lambda _, folder: archive(folder / "x.tar.gz", TREE))
    assert (got / "common/speculative.h").is_file()
    assert not left.exists()


def test_nothing_half_made_stays(own_cache: Path) -> None:
    with pytest.raises(NoDrivers):
        fetched("9.9", lambda _, folder: archive(folder / "x.tar.gz", {}))
    assert [p.name for p in (own_cache / "sources").iterdir()] == [".lock"]


def test_cache_that_cannot_be_written(own_cache: Path) -> None:
    own_cache.write_text("a file")
    with pytest.raises(NoDrivers, match=r"cannot be used.*set REDRAFT_CACHE"):
        fetched("9.9", lambda _, folder: archive(folder / "x.tar.gz", TREE))


def test_without_a_network(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    def run(command: list[str], *_: object) -> subprocess.CompletedProcess[str]:
        seen.extend(command)
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: no matching distribution\n")

    monkeypatch.setattr(sources, "run_quietly", run)
    with pytest.raises(NoDrivers) as e:
        fetched("9.9")
    said = str(e.value)
    assert said.startswith("the sources of llama-cpp-python 9.9, which the speculative drivers need, cannot be fetched")
    assert "--llama-src" in said
    assert "  ERROR: no matching distribution" in said
    assert isinstance(e.value, BadBuild)
    with pytest.raises(NoDrivers, match=r"which an instrumented build needs, cannot be fetched: .* with --src\n"):
        fetched("9.9", part=WHOLE)
    assert {"download", "--no-deps", "--no-binary"} <= set(seen)
    assert "fetching the sources of llama-cpp-python 9.9" in capsys.readouterr().err


def test_a_download_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], *_: object) -> None:
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(sources, "run_quietly", run)
    with pytest.raises(NoDrivers, match="no end after"):
        fetched("9.9")


def test_the_pinned_release_is_checked_against_the_lock() -> None:
    lock = (Path(__file__).parents[2] / "requirements.lock").read_text()
    pinned = lock.partition("\nllama-cpp-python==")[2].partition(" ")[0]
    (option,) = sources._locked(pinned)
    assert option in lock
    assert sources._locked("0.0.1") == []


def test_release_of(tmp_path: Path) -> None:
    lib = tmp_path / "llama_cpp/lib/libllama.so"
    assert sources.release_of(lib) is None
    info = tmp_path / "llama_cpp_python-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: 9.9\n")
    assert sources.release_of(lib) == "9.9"
    assert sources.release_of(tmp_path / "lib/libllama.so") is None


def test_as_a_command(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    command = [sys.executable, "-m", "subjects.sources"]
    p = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert p.returncode == 2
    assert "set REDRAFT_CACHE" in p.stderr
    assert "Traceback" not in p.stderr


# -- checkouts


def checkout(at: Path, header: str) -> Path:
    for name, text in (("common/speculative.h", ""), ("include/llama.h", header), ("ggml/include/ggml.h", "int g;\n")):
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        (at / name).write_text(text)
    return at


def test_checkout_that_matches(tmp_path: Path) -> None:
    a = checkout(tmp_path / "a", "int x;\n")
    check_match(checkout(tmp_path / "b", "/* another\n   comment */\nint   x; // here\n\n"), (a / "include",), "b")


def test_checkout_of_another_release(tmp_path: Path) -> None:
    a = checkout(tmp_path / "a", "int x;\n")
    b = checkout(tmp_path / "b", "int y;\n" + "".join(f"int z{i};\n" for i in range(9)))
    with pytest.raises(NoDrivers) as e:
        check_match(b, (a / "include", a / "ggml/include"), "llama.cpp 1.2 abc")
    lines = str(e.value).splitlines()
    assert lines[0].startswith(f"{b} does not match the build (llama.cpp 1.2 abc): llama.h differs; take a checkout")
    assert lines[1:3] == ["  -int x;", "  +int y;"]
    assert lines[-1] == "  ... 5 more"


def test_no_checkout(tmp_path: Path) -> None:
    with pytest.raises(NoDrivers, match=r"is no llama\.cpp checkout: it has no common/speculative\.h"):
        check_match(tmp_path, (), "b")


# -- patches

TEXT = "".join(f"line {i}\n" for i in range(1, 21))
PATCH = """\
What it is for.

--- a/x.cpp
+++ b/x.cpp
@@ -2,3 +2,4 @@ in a function
 line 2
-line 3
+line three
+and more
 line 4
@@ -19,2 +20 @@
 line 19
-line 20
"""


def test_patched() -> None:
    want = TEXT.replace("line 3\n", "line three\nand more\n", 1).replace("line 20\n", "")
    assert patched(TEXT, PATCH) == want
    assert patched("moved\n" + TEXT, PATCH) == "moved\n" + want
    assert patched("a\n\nb\n", "@@ -1,3 +1,3 @@\n a\n\n-b\n+c\n") == "a\n\nc\n", "an empty line without its space"


@pytest.mark.parametrize(
    ("text", "patch", "said"),
    [
        (TEXT.replace("line 4", "line 4 "), PATCH, "its part for line 2 finds other lines"),
        (TEXT, PATCH.replace("-line 20\n", ""), "its part for line 19 ends too soon"),
        (TEXT, "", "is no unified diff of one file"),
        (TEXT, PATCH + "--- a/y.cpp\n+++ b/y.cpp\n", "is no unified diff of one file"),
    ],
)
def test_patch_that_does_not_fit(text: str, patch: str, said: str) -> None:
    with pytest.raises(NoDrivers, match=said):
        patched(text, patch)
