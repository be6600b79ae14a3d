"""The C library keeps what a step frees: the same large block again costs no page faults."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SCRIPT = """
import resource, sys, torch
from radixkv.executor.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.empty(50 * 2**20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


def _num_faults(mode: str) -> int:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, mode], env=clean, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(not hasattr(os, "confstr") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""),
                    reason="only glibc has this setting")  # fmt: skip
def test_blocks_that_were_freed_are_not_faulted_in_again() -> None:
    # With transparent huge pages a fault may cover 2 MiB, so the plain number can be small, but not tiny.
    assert _num_faults("plain") > 200
    assert _num_faults("keep") < 100
