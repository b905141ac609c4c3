#!/usr/bin/env python3
"""States of a whole context. Takes libFuzzer's options; see `redraft fuzz --engine coverage`."""

from __future__ import annotations

from fuzz.targets.blobs import BlobTarget
from fuzz.targets.run import main

TARGET = BlobTarget("context_state", whole=True, medium="buffer")

if __name__ == "__main__":
    main(TARGET)
