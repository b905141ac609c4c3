#!/usr/bin/env python3
"""States of one sequence, whole and partial, in host memory and on the device.

Takes libFuzzer's options; see `redraft fuzz --engine coverage`.
"""

from __future__ import annotations

from fuzz.targets.blobs import BlobTarget
from fuzz.targets.run import main

TARGET = BlobTarget("seq_state", whole=False, medium="buffer")

if __name__ == "__main__":
    main(TARGET)
