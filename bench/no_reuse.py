"""``python bench/no_reuse.py``: what the cache costs where nothing repeats, from ``radixkv.bench.no_reuse``."""

from __future__ import annotations

import sys

from radixkv.bench.no_reuse import main

if __name__ == "__main__":
    sys.exit(main())
