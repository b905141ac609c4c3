"""Finds a build of llama.cpp to test, names it by its contents, and has the shim for it compiled.

llama_cpp is never imported: that would load native code under test into the process that orchestrates.
"""

from __future__ import annotations

import functools
import getpass
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from subjects import shimcache, sources
from subjects.shimcache import BadBuild, Ours, cache_dir, check_loads, compiler_line, stem
from subjects.sources import NoDrivers

__all__ = [
    "BadBuild",
    "Build",
    "NoDrivers",
    "cache_dir",
    "check_loads",
    "common_library",
    "compile_shim",
    "compiler_line",
    "driver_library",
    "driver_origin",
    "driver_sources",
    "environment",
    "find_build",
    "shim_path",
    "system_info",
]

Kind = Literal["package", "tree", "prefix"]

DRIVER = shimcache.SOURCE.with_name("driver.cpp")
COMPILED_IN = ("speculative.cpp", "ngram-cache.cpp", "ngram-map.cpp", "ngram-mod.cpp")
"""What of a checkout's common/ takes the place of the build's."""
SUFFIXES = (".dylib", ".so") if sys.platform == "darwin" else (".so", ".dylib")
PACKAGES = ("redraft", "llama-cpp-python", "gguf", "hypothesis", "msgspec", "numpy", "rich")
"""Distributions whose versions belong to a finding."""

_SHARED = (
    "build the target llama with -DBUILD_SHARED_LIBS=ON "
    "(cmake -B build -DBUILD_SHARED_LIBS=ON && cmake --build build --target llama)"
)


@dataclass(frozen=True)
class Build:
    """One build of llama.cpp: what to compile the shim against and what to link it with."""

    name: str
    """for people; holds no path"""
    kind: Kind
    """an installed llama-cpp-python, a source tree with a build, or an install prefix"""
    include: tuple[Path, ...]
    libdirs: tuple[Path, ...]
    libllama: Path
    version: str | None
    """llama.cpp's own version and commit, where the build tells"""
    fingerprint: str
    """16 hex digits over the contents of libraries, headers and shim and the compiler's version; the same anywhere"""

    def libraries(self) -> list[Path]:
        """libllama and everything of ggml beside it, one file a library."""
        return _libraries(self.libllama, self.libdirs)

    def linked(self) -> list[Path]:
        """What the shim is linked with: libllama, then the ggml libraries that libllama itself is linked with."""
        # Not the backends: those may be modules for other CPUs, which must not be loaded.
        return [self.libllama, *(p for p in self.libraries() if stem(p) in ("libggml", "libggml-base"))]


# ---------------------------------------------------------------------------------------------------------------------
# Finding


def find_build(path: Path | None = None) -> Build:
    """The build at `path`, or the installed llama-cpp-python.

    `path` may be a llama.cpp source tree with one build inside, a build directory, an install prefix, or a
    site-packages directory.

    Raises:
        BadBuild: nothing usable there; the message says what was looked for, where, and what to do.
    """
    return _installed() if path is None else _at(Path(path).expanduser().absolute())


def _installed() -> Build:
    # find_spec of a top-level name finds, and imports nothing.
    spec = importlib.util.find_spec("llama_cpp")
    places = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    if not places:
        raise BadBuild(
            "no build given and llama-cpp-python is not installed in this Python: run ci/setup (or pip install "
            "llama-cpp-python), or name a build of llama.cpp"
        )
    libdirs = [p / "lib" for p in places]
    libllama = _library_in(libdirs)
    if libllama is None:
        raise BadBuild(
            f"the installed llama-cpp-python has no libllama: looked in {_list(libdirs)}; install it again "
            "(pip install --force-reinstall --no-cache-dir llama-cpp-python), or name another build"
        )
    headers = [p.parent / "include" for p in places]
    version = None
    try:
        dist = importlib.metadata.distribution("llama-cpp-python")
        version = dist.version
        # The scheme that the installer used may have put headers elsewhere; its record knows.
        headers += [Path(str(f.locate())).parent for f in dist.files or () if f.parts[-2:] == ("include", "llama.h")]
    except importlib.metadata.PackageNotFoundError:
        pass
    include = _headers(headers)
    if include is None:
        raise BadBuild(
            f"the installed llama-cpp-python brings no llama.h and ggml.h: looked in {_list(headers)}; take a version "
            "that installs its headers (0.3.36 does), or name a build of llama.cpp"
        )
    name = f"llama-cpp-python {version}" if version else "llama-cpp-python"
    return _build(name, "package", include, libllama, [], [p.parent / "lib/cmake/llama" for p in places])


def _at(path: Path) -> Build:
    if not path.is_dir():
        raise BadBuild(
            f"{path} is {'a file' if path.exists() else 'not there'}; name a directory: a llama.cpp tree with a build "
            "inside, a build directory, or an install prefix"
        )
    if (path / "CMakeCache.txt").is_file():
        return _build_directory(path)
    if (path / "CMakeLists.txt").is_file() and (path / "include/llama.h").is_file():
        return _tree(path)
    return _prefix(path)


def _tree(path: Path) -> Build:
    candidates = sorted(p for p in path.glob("build*") if p.is_dir())
    built = [p for p in candidates if _library_in(_build_libdirs(p)) is not None]
    if len(built) > 1:
        raise BadBuild(f"{path} has several builds: {_list(built)}; name the one to test")
    if not built:
        looked = [d for p in candidates or [path / "build"] for d in _build_libdirs(p)]
        raise BadBuild(_no_library(f"{path} is a llama.cpp tree without a build", looked))
    return _build_directory(built[0], tree=path)


def _build_libdirs(path: Path) -> list[Path]:
    # bin is where llama.cpp puts everything; before the end of 2024 each library was left beside its objects.
    return [path / d for d in ("bin", "lib", "src", "ggml/src", ".")]


def _build_directory(path: Path, tree: Path | None = None) -> Build:
    libdirs = _build_libdirs(path)
    libllama = _library_in(libdirs)
    if libllama is None:
        raise BadBuild(_no_library(f"{path} is a build directory without libllama", libdirs))
    homes = [tree] if tree else _homes(path)
    dirs = [h / d for h in homes for d in ("include", "ggml/include")]
    include = _headers(dirs)
    if include is None:
        raise BadBuild(
            f"{path} has a libllama, but llama.h and ggml.h of its sources are gone: looked in {_list(dirs)}, after "
            "CMakeCache.txt; put the sources back, or install the build (cmake --install) and name the prefix"
        )
    owner = include[0].parent
    name = f"{_label(owner)}/{path.name}" if path.parent == owner else _label(path)
    return _build(name, "tree", include, libllama, libdirs, [path])


def _homes(build: Path) -> list[Path]:
    # llama.cpp may be a part of another project, and a build may have been moved together with its sources.
    cache = (build / "CMakeCache.txt").read_text("utf-8", "replace")
    said = dict(re.findall(r"^(llama\.cpp_SOURCE_DIR|CMAKE_HOME_DIRECTORY):\w+=(.+)$", cache, re.M))
    homes = [Path(said[k]) for k in ("llama.cpp_SOURCE_DIR", "CMAKE_HOME_DIRECTORY") if k in said]
    return list(dict.fromkeys([*homes, build.parent]))


def _prefix(path: Path) -> Build:
    # llama_cpp/lib first: in site-packages it is what llama_cpp itself loads.
    dirs = [path / d for d in ("llama_cpp/lib", "lib", "lib64", "bin")]
    libdirs = [*dirs, *sorted(path.glob("lib/*-linux-gnu*"))]
    libllama = _library_in(libdirs)
    include = _headers([path / "include"])
    if libllama is None:
        nothing = "is neither a llama.cpp tree, nor a build directory, nor an install prefix"
        what = "has llama.h but no libllama" if include else nothing
        builds = [d for p in sorted(path.glob("build*")) if p.is_dir() for d in _build_libdirs(p)[:1]]
        raise BadBuild(_no_library(f"{path} {what}", [*libdirs, *builds]))
    if include is None:
        raise BadBuild(
            f"{path} has {libllama.name}, but no llama.h and ggml.h: looked in {path / 'include'}; install the build "
            "with its headers (cmake --install), or name the source tree or the build directory"
        )
    name = "site-packages" if path.name == "site-packages" else _label(path)
    return _build(name, "prefix", include, libllama, [], [path / d / "cmake/llama" for d in ("lib", "lib64")])


def _no_library(what: str, libdirs: Sequence[Path]) -> str:
    static = next((d / "libllama.a" for d in libdirs if (d / "libllama.a").is_file()), None)
    wanted = " or ".join(f"libllama{s}" for s in SUFFIXES)
    if static:
        return f"{what} (only the static {static}): looked for {wanted}; {_SHARED}"
    return f"{what}: looked for {wanted} in {_list(d for d in libdirs if d.name)}; {_SHARED}"


def _list(paths: Iterable[Path]) -> str:
    return ", ".join(map(str, paths))


def _label(path: Path) -> str:
    # Labels go into findings, and a checkout right in somebody's home must not carry the name there.
    return "~" if path == Path.home() or path.name == _user() else (path.name or "/")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def _library_in(dirs: Iterable[Path], name: str = "libllama") -> Path | None:
    for d in dirs:
        for suffix in SUFFIXES:
            if (plain := d / f"{name}{suffix}").is_file():
                return plain
            if versioned := sorted(d.glob(f"{name}{suffix}.*")):
                return versioned[0]
    return None


def _headers(dirs: Iterable[Path]) -> tuple[Path, ...] | None:
    dirs = list(dict.fromkeys(dirs))
    first = next((d for d in dirs if (d / "llama.h").is_file()), None)
    second = next((d for d in dirs if (d / "ggml.h").is_file()), None)
    return tuple(dict.fromkeys((first, second))) if first and second else None


def _libraries(libllama: Path, libdirs: Iterable[Path]) -> list[Path]:
    found = {stem(libllama): libllama}
    for d in libdirs:
        # libggml.so before libggml.so.0: the names of one library, or copies of it
        for p in sorted(d.glob("libggml*"), key=lambda p: (len(p.name), p.name)):
            if re.search(r"\.(so|dylib)(\.|$)", p.name) and p.is_file():
                found.setdefault(stem(p), p)
    return list(found.values())


def _build(
    name: str, kind: Kind, include: tuple[Path, ...], libllama: Path, libdirs: Sequence[Path], cmake: Sequence[Path]
) -> Build:
    used = (libllama.parent, *(d for d in libdirs if d != libllama.parent and any(d.glob("libggml*.*"))))
    return Build(
        name=name,
        kind=kind,
        include=include,
        libdirs=used,
        libllama=libllama,
        version=_version(cmake),
        fingerprint=_fingerprint(include, _libraries(libllama, used)),
    )


def _version(dirs: Iterable[Path]) -> str | None:
    for d in dirs:
        for name in ("llama-config.cmake", "llama-version.cmake"):
            try:
                text = (d / name).read_text("utf-8", "replace")
            except OSError:
                continue
            facts = dict(re.findall(r"^set\((LLAMA_VERSION|LLAMA_BUILD_COMMIT)\s+\"?([\w.+-]+)\"?\)", text, re.M))
            if facts:
                known = [facts[k] for k in ("LLAMA_VERSION", "LLAMA_BUILD_COMMIT") if k in facts]
                return " ".join(["llama.cpp", *known])
    return None


def _fingerprint(include: Iterable[Path], libraries: Iterable[Path], source: Path = shimcache.SOURCE) -> str:
    h = hashlib.sha256()
    headers = {p.name: p for d in include for p in (*d.glob("llama.h"), *d.glob("ggml*.h"))}
    parts = [(stem(p), shimcache.file_hash(p)) for p in libraries]
    parts += [(name, shimcache.file_hash(p)) for name, p in headers.items()]
    for name, digest in sorted(parts):
        h.update(f"{name} {digest}\n".encode())
    for ours in (source, shimcache.PARAMS):
        h.update(f"ours {hashlib.sha256(ours.read_bytes()).hexdigest()}\n".encode())
    h.update(f"{compiler_line()}\n{' '.join(shimcache.SHIM_FLAGS)}\n".encode())
    return h.hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------------------
# Using


def shim_path(build: Build) -> Path:
    """Where the compiled shim for a build is, or will be."""
    return _shim(build).place


def compile_shim(build: Build) -> Path:
    """The compiled shim for a build, for `subjects.shim.Shim`; compiled when it is not in the cache.

    Raises:
        BadBuild: it does not compile or load; the message says what is different about this build.
    """
    return _shim(build).made()


def _shim(build: Build) -> Ours:
    return Ours(build.fingerprint, build.include, build.linked())


def driver_sources(build: Build, llama_src: Path | None = None) -> Path:
    """A llama.cpp tree, or the needed part of one, with the common/ of a build.

    That is `llama_src`, a checkout, where one is given; otherwise the build's own tree, or for a llama-cpp-python its
    source distribution, fetched through pip when it is not in the cache.

    Raises:
        NoDrivers: there are none, or they are of another release.
    """
    if llama_src is not None:
        root = Path(llama_src).expanduser().absolute()
    elif build.kind == "tree" and (tree := build.include[0].parent).joinpath("common").is_dir():
        root = tree
    elif release := sources.release_of(build.libllama):
        root = sources.fetched(release)
    else:
        raise NoDrivers(
            f"{build.name} brings no headers of common/, which the speculative drivers need: name the llama.cpp "
            "checkout that it was built from with --llama-src"
        )
    sources.check_match(root, build.include, build.version or build.name)
    return root


def common_library(build: Build) -> Path | None:
    """The build's libllama-common, which holds the speculative drivers."""
    # that of a llama-cpp-python lies in site-packages/lib
    return _library_in([*build.libdirs, build.libllama.parents[2] / "lib"], "libllama-common")


def driver_library(
    build: Build,
    llama_src: Path | None = None,
    patch: Path | None = None,
    compiling: Callable[[], None] = lambda: None,
) -> Path:
    """The compiled driver library of a build, for `subjects.drivers.native.DriverLib`; compiled when it is not in the
    cache.

    A checkout's own speculative.cpp (and what it counts n-grams with) is compiled in and takes the place of the
    build's; so does a patched one, where `patch` is a unified diff of common/speculative.cpp.
    `compiling` is called before a compiler is.

    Raises:
        NoDrivers: no sources, no libllama-common, or it does not compile or load; the message says what to do.
    """
    common = common_library(build)
    if common is None:
        raise NoDrivers(
            f"{build.name} has no libllama-common, which holds the speculative drivers: looked in "
            f"{_list(build.libdirs)}; build the target llama-common too (cmake --build build --target llama-common)"
        )
    root = driver_sources(build, llama_src)
    try:
        own = _compiled_in(root / "common", patch, everything=llama_src is not None)
        fingerprint = _driver_fingerprint(build, common, root, own)
    except (OSError, UnicodeError) as e:
        raise NoDrivers(f"the sources of the drivers cannot be read: {e}") from None
    include = (root / "common", *build.include, root / "vendor")
    link = (common, *build.linked())
    with tempfile.TemporaryDirectory(prefix="redraft-driver-") as tmp:
        # Copies: an editor may save while they are compiled. In a folder below, since ../src/llama-ext.h is included,
        # which must not be found elsewhere.
        folder = Path(tmp) / "common"
        folder.mkdir()
        for name, text in own.items():
            # What the compiler says, and assertions, name it so, wherever it lies.
            (folder / name).write_text(f'#line 1 "common/{name}"\n{text}', "utf-8")
        more = [folder / name for name in own]
        try:
            library = Ours(fingerprint, include, link, DRIVER, more, "driver", shimcache.FLAGS)
            if not library.place.is_file():
                compiling()
            return library.made()
        except BadBuild as e:
            raise NoDrivers(str(e)) from None


def _compiled_in(common: Path, patch: Path | None, *, everything: bool) -> dict[str, str]:
    """Sources of llama.cpp that are compiled into the driver library, by name."""
    wanted = COMPILED_IN if everything else COMPILED_IN[:1] if patch else ()
    own: dict[str, str] = {}
    for name in wanted:
        if (path := common / name).is_file() or name == COMPILED_IN[0]:
            own[name] = path.read_text("utf-8")
            if patch and name == COMPILED_IN[0]:
                own[name] = sources.patched(own[name], patch.read_text("utf-8"))
    return own


def _driver_fingerprint(build: Build, common: Path, root: Path, own: dict[str, str]) -> str:
    h = hashlib.sha256(f"{build.fingerprint}\n{stem(common)} {shimcache.file_hash(common)}\n".encode())
    for p in (DRIVER, *sorted((root / "common").glob("*.h")), root / "src/llama-ext.h"):
        h.update(f"{p.name} {hashlib.sha256(p.read_bytes()).hexdigest()}\n".encode())
    for name, text in own.items():
        h.update(f"{name} {hashlib.sha256(text.encode()).hexdigest()}\n".encode())
    return h.hexdigest()[:16]


def driver_origin(
    build: Build, library: Path, llama_src: Path | None = None, patch: Path | None = None
) -> dict[str, str | list[str]]:
    """What a finding says of a driver library: its fingerprint, and what was compiled into it. Holds no paths.

    Raises:
        NoDrivers: the sources are not there any more.
    """
    fingerprint = library.name.partition("-")[0]
    try:
        own = _compiled_in(driver_sources(build, llama_src) / "common", patch, everything=llama_src is not None)
        diff = hashlib.sha256(patch.read_bytes()).hexdigest()[:16] if patch else ""
    except (OSError, UnicodeError) as e:
        raise NoDrivers(f"the sources of the drivers cannot be read: {e}") from None
    hashes = [f"common/{name} {hashlib.sha256(text.encode()).hexdigest()[:16]}" for name, text in own.items()]
    told: list[str] = []
    origin: dict[str, str | list[str]] = {"driver_fingerprint": fingerprint}
    if own:
        origin["driver_sources"] = hashes
    if llama_src:
        origin["driver_checkout"] = _label(llama_src.expanduser().absolute())
        told.append(f"compiled from the given checkout {origin['driver_checkout']} ({hashes[0]})")
    if patch:
        origin["driver_patch"] = f"{patch.name} {diff}"
        told.append(f"patched with {patch.name} ({diff})")
    return {"drivers": f"{', '.join(told) or 'of the build'}; library {fingerprint}", **origin}


_SYSTEM_INFO = """
import json, pathlib, sys
sys.path.insert(0, sys.argv[1])
from subjects.shim import Shim
print(json.dumps(Shim(pathlib.Path(sys.argv[2])).system_info()))
"""


@functools.lru_cache
def system_info(shim: Path) -> str:
    """llama_print_system_info of the library behind a compiled shim, asked in a child.

    Raises:
        BadBuild: the child died or gave none.
    """
    command = [sys.executable, "-c", _SYSTEM_INFO, str(Path(__file__).resolve().parents[1]), str(shim)]
    try:
        p = shimcache.run_quietly(command, shimcache.child_env(), 120)
    except subprocess.TimeoutExpired:
        raise BadBuild("llama_print_system_info took more than 120 s") from None
    try:
        # The last line: backends may print while they start.
        return str(json.loads(p.stdout.strip().splitlines()[-1])).strip()
    except (ValueError, IndexError):
        raise BadBuild(shimcache.death_message(p.returncode, p.stderr)) from None


def environment(build: Build) -> dict[str, str | int | list[str]]:
    """What a finding says about where it was seen. Holds no paths, no user and no host names.

    Raises:
        BadBuild: the build cannot be loaded.
    """
    info = system_info(compile_shim(build))
    return {
        "build": build.name,
        "kind": build.kind,
        "fingerprint": build.fingerprint,
        "llama_cpp": build.version or "unknown",
        "libraries": [f"{stem(p)} {shimcache.file_hash(p)[:16]}" for p in build.libraries()],
        "system_info": info,
        "compiler": compiler_line(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1),
        "packages": [f"{name} {version}" for name in PACKAGES if (version := _package_version(name))],
    }


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """The CPU's name as the system gives it."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        text = ""
    # x86 has the first, ARM boards one of the others.
    for key in ("model name", "Model", "Hardware", "cpu model"):
        if m := re.search(rf"^{key}\s*:\s*(.+)$", text, re.M):
            return m[1].strip()
    return platform.processor() or platform.machine()
