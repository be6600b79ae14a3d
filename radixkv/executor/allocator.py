"""Let the C library keep the memory that a step frees for the next step."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_KEPT = 1 << 30


def keep_freed_memory() -> bool:
    """Tell glibc to serve blocks of up to 1 GiB from its heap and not to give freed memory back at once.

    By default every tensor over 128 KiB (which grows to 32 MiB at most) may be mapped afresh, and the
    system then zeroes each of its pages at first touch; a step makes hundreds of such tensors. Process-wide,
    like the number of threads. Returns whether the C library took both settings; others than glibc are left
    alone.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  (AttributeError: another C library)
        mallopt = libc.mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    trims = mallopt(_M_TRIM_THRESHOLD, _LARGEST_KEPT) == 1
    maps = mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT) == 1
    return bool(trims and maps)
