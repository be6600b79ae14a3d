"""``python bench/no_reuse.py``: the no-reuse benchmark, which lives in ``radixkv.bench.no_reuse``."""

from __future__ import annotations

import sys

from radixkv.bench.no_reuse import main

if __name__ == "__main__":
    sys.exit(main())
