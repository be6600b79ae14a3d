"""How many threads may compute: affinity and the control group's quota, not the machine's cores."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

from radixkv.errors import ConfigError
from radixkv.plain import plain_whole, shown

THREADS_PER_CORE = 4
"""Most threads that may be asked for, per core."""


def set_num_threads(num_threads: int | None) -> int:
    """Set torch's threads for this process and return their number.

    ``None`` keeps torch's own number (which follows ``OMP_NUM_THREADS``) unless that is more than this
    process may use. Raises ``ConfigError`` for a number below 1 or above ``THREADS_PER_CORE`` times the
    cores that this process may use: so many threads only wait for each other, and where the system refuses
    to start one, OpenMP ends the process.
    """
    if num_threads is None:
        wanted = min(torch.get_num_threads(), usable_cores())
    else:
        number, most = plain_whole(num_threads), THREADS_PER_CORE * usable_cores()
        if number is None or not 1 <= number <= most:
            raise ConfigError(
                f"num_threads must be a whole number in 1..{most} ({THREADS_PER_CORE} for each core that "
                f"this process may use), got {shown(num_threads)}"
            )
        wanted = number
    if wanted != torch.get_num_threads():
        torch.set_num_threads(wanted)
    return wanted


def usable_cores(root: Path = Path("/")) -> int:
    """Cores of the affinity mask, or fewer where a control group's quota (version 1 or 2) is lower.
    A part of a core counts as one. ``root`` is where ``proc`` and ``sys`` are found."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else (os.cpu_count() or 1)
    return max(1, min([cores, *(math.ceil(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> list[float]:
    """Cores allowed by each control group with a quota, from the process's own up to the top."""
    quotas = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = root / "sys/fs/cgroup"
        elif "cpu" in controllers.split(","):
            mounts = (root / "sys/fs/cgroup" / name for name in ("cpu", controllers))
            top = next((mount for mount in mounts if mount.is_dir()), root / "sys/fs/cgroup")
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if top not in (folder, *folder.parents):
                break
            words = _text(folder / "cpu.max").split() or [
                *_text(folder / "cpu.cfs_quota_us").split(),
                *_text(folder / "cpu.cfs_period_us").split(),
            ]
            if len(words) == 2 and words[0].isdigit() and int(words[1]) > 0:  # "max" and -1 are no quota
                quotas.append(int(words[0]) / int(words[1]))
    return quotas


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
