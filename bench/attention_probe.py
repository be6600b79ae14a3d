"""``python bench/attention_probe.py``: the attention probe, which lives in ``radixkv.bench``."""

from __future__ import annotations

import sys

from radixkv.bench.attention_probe import main

if __name__ == "__main__":
    sys.exit(main())
