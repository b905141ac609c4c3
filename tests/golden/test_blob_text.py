"""What `redraft blob` prints, of blobs made by hand: decoded ones differ between processors.

`REDRAFT_UPDATE_GOLDEN=1 pytest tests/golden/test_blob_text.py` writes the files anew; read the difference first.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from fuzz.cli import main

HERE = Path(__file__).parent
DATA = HERE / "data" / "blob"
B = SimpleNamespace(**runpy.run_path(str(HERE.parent / "unit" / "blob_builder.py")))
HYBRID = B.HYBRID
TEXT = [(p, p, 40 + p) for p in range(3)]
WHOLE = B.context(
    B.attention(B.stream(range(4)), B.stream([])),
    B.attention(B.stream([2, 3]), B.stream([])),
    arch="gemma3",
)
SHARED = B.session(
    B.attention(B.stream([0, 1, 1, 3, 0], [[0, 1], [0, 1], [0], [0], [2]], kinds=(B.F32, B.F16))),
    B.recurrent([3, 1], [[0], [1, 2]]),
    tokens=[7, 8, 9],
)
LATER = B.sequence(B.attention(B.stream([4, 0, 1, 2, 3]), B.stream([])), B.recurrent([4], start=1))
NAN = HYBRID[:92] + b"\x00\x00\xc0\x7f" * 4 + HYBRID[108:]
BLOBS = {
    "hybrid": HYBRID,
    "whole": WHOLE,
    "shared": SHARED,
    "ext": B.sequence_file(B.attention(B.stream(range(3), ext=TEXT)), tokens=[40, 41, 42]),
    "device": B.sequence(B.attention(B.stream(range(3), data=False)), seq=1),
    "driver": B.driver(),
    "later": LATER,
    "moved": B.sequence(B.attention(B.stream([3, 1, 0, 2]), B.stream([])), B.recurrent([3]), seq=5),
    "nan": NAN,
    "cut": HYBRID[:100],
    "count": HYBRID[:12] + B.u32(1 << 30) + HYBRID[16:],
    "magic": b"\xd9" + HYBRID[1:],
    "long": HYBRID + b"\x01\x00\x00\x00\xff\xff\xff\xff",
}


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        *((f"show-{name}", ["show", name]) for name in BLOBS if name not in ("later", "moved")),
        ("show-ext-cells", ["show", "ext", "--cells"]),
        ("show-hybrid-fields", ["show", "hybrid", "--fields"]),
        ("show-cut-fields", ["show", "cut", "--fields"]),
        ("show-hybrid-json", ["show", "hybrid", "--json"]),
        ("diff-same", ["diff", "hybrid", "hybrid"]),
        ("diff-moved", ["diff", "hybrid", "moved"]),
        ("diff-later", ["diff", "hybrid", "later"]),
        ("diff-nan", ["diff", "hybrid", "nan"]),
        ("diff-cut", ["diff", "hybrid", "cut"]),
        ("diff-device", ["diff", "ext", "device"]),
        ("diff-shared", ["diff", "shared", "whole"]),
        ("diff-one-of-many", ["diff", "hybrid", "shared"]),
        ("diff-later-json", ["diff", "hybrid", "later", "--json"]),
    ],
)
def test_text(
    name: str, argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for blob, data in BLOBS.items():
        Path(f"{blob}.bin").write_bytes(data)
    code = main(["blob", *(f"{x}.bin" if x in BLOBS else x for x in argv)])
    text = f"{capsys.readouterr().out}exit code {code}\n"
    golden = DATA / f"{name}.txt"
    if os.environ.get("REDRAFT_UPDATE_GOLDEN"):
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(text, "utf-8")
    assert text == golden.read_text("utf-8"), f"{golden.name} is another now"
    assert max(map(len, text.splitlines())) <= 200
