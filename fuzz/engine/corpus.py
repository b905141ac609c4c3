"""The corpora of a campaign: a folder for each target, which its jobs share, with the seeds to begin with."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

SEEDS = Path(__file__).resolve().parents[2] / "corpora" / "blobs"
"""A folder for each target."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def folder_of(out: Path, target: str) -> Path:
    """Where a target's corpus is."""
    return out / "corpus" / target


def count(folder: Path) -> int:
    """Inputs in a corpus."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as inside:
        return sum(1 for _ in inside)
    return 0


def begin(folder: Path, seeds: Path) -> None:
    """Make the folder with the seeds, where there are any, or take away what a kill left of a minimisation. Only while
    nobody writes into it."""
    shutil.rmtree(_beside(folder), ignore_errors=True)
    if folder.is_dir():
        return
    folder.mkdir(parents=True)
    for seed in sorted(seeds.iterdir()) if seeds.is_dir() else []:
        if seed.is_file():
            data = seed.read_bytes()
            (folder / name_of(data)).write_bytes(data)


def name_of(data: bytes) -> str:
    """What libFuzzer calls an input."""
    return hashlib.sha1(data).hexdigest()


def whole(folder: Path) -> bool:
    """Whether every input that libFuzzer wrote is there to its end."""
    return all(name_of(path.read_bytes()) == path.name for path in folder.iterdir())


def remove(folder: Path, data: bytes) -> None:
    """Take an input out: one that ends the target would end it at every start."""
    (folder / name_of(data)).unlink(missing_ok=True)


def minimise(folder: Path, merge: Callable[[Path, Path], bool]) -> bool:
    """Put fewer inputs in place of a corpus' that reach the same, in one step; False where it stays as it is.

    `merge(into, from)` fills the empty folder `into` and says whether it could. Others may write into the corpus
    meanwhile, and nothing that they write is lost. A second minimisation of the same corpus does nothing.
    """
    new = _beside(folder)
    with _alone(folder) as alone:
        before = set(os.listdir(folder)) if alone else set[str]()
        if not before:
            return False
        try:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            if not merge(new, folder) or not 0 < count(new) <= len(before) or not _exchange(new, folder):
                return False
            for name in os.listdir(new):
                if name not in before:  # written meanwhile
                    (new / name).rename(folder / name)
            return True
        finally:
            shutil.rmtree(new, ignore_errors=True)


def _beside(folder: Path) -> Path:
    return folder.with_name(f".new-{folder.name}")


def _exchange(a: Path, b: Path) -> bool:
    """Two folders take each other's names; False where the system cannot."""
    if sys.platform != "linux":
        return False
    names = os.fsencode(a), os.fsencode(b)
    try:
        return bool(ctypes.CDLL(None).renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)
    except AttributeError:  # an old libc
        return False


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    fd = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except BlockingIOError:
            alone = False
        yield alone
    finally:
        os.close(fd)
