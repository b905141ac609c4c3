#!/usr/bin/env python3
"""Session files of both formats. Takes libFuzzer's options; see `redraft fuzz --engine coverage`."""

from __future__ import annotations

from fuzz.targets.blobs import BlobTarget
from fuzz.targets.run import main

TARGET = BlobTarget("session_file", whole=False, medium="file")

if __name__ == "__main__":
    main(TARGET)
