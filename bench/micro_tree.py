"""``python bench/micro_tree.py``: the speed of the tree, which lives in ``radixkv.bench.micro_tree``."""

from __future__ import annotations

import sys

from radixkv.bench.micro_tree import main

if __name__ == "__main__":
    sys.exit(main())
