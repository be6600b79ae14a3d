"""``python bench/few_shot.py``: the few-shot benchmark, which lives in ``radixkv.bench.few_shot``."""

from __future__ import annotations

import sys

from radixkv.bench.few_shot import main

if __name__ == "__main__":
    sys.exit(main())
