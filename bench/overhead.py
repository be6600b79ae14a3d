"""``python bench/overhead.py``: scheduler and ledger alone, which ``radixkv.bench.overhead`` measures."""

from __future__ import annotations

import sys

from radixkv.bench.overhead import main

if __name__ == "__main__":
    sys.exit(main())
