"""How many pages fit: from a token budget, or from the memory that this process may really use."""

from __future__ import annotations

from pathlib import Path

import torch

from radixkv.config import MAX_SETTING, ModelSpec
from radixkv.errors import ConfigError
from radixkv.executor.kv_store import bytes_per_page
from radixkv.plain import plain_whole, shown

DEFAULT_FRACTION = 0.5
"""Share of the available memory that K/V pages take when no budget is given."""


def num_pages_for(
    spec: ModelSpec,
    *,
    page_size: int,
    dtype: torch.dtype,
    num_tokens: int | None = None,
    available_bytes: int | None = None,
    fraction: float = DEFAULT_FRACTION,
) -> int:
    """Pages of the pool: ``num_tokens`` rounded up to whole pages, or what ``fraction`` of
    ``available_bytes`` (default: ``available_memory_bytes()``) holds beside the padding page.

    Raises ``ConfigError`` when a number is out of range, when ``num_tokens`` need more than
    ``available_bytes`` (if given), or when not even one page fits.
    """
    page_bytes = bytes_per_page(spec, page_size, dtype)
    if num_tokens is not None:
        number = plain_whole(num_tokens)
        if number is None or number < 1:
            raise ConfigError(f"num_tokens must be a whole number of at least 1, got {shown(num_tokens)}")
        num_pages = -(-number // page_size)
        if num_pages > MAX_SETTING:
            raise ConfigError(
                f"num_tokens must be at most {MAX_SETTING * page_size} (pages of {page_size} are numbered in "
                f"32 bits), got {shown(number)}"
            )
        needed = (num_pages + 1) * page_bytes
        if available_bytes is not None and needed > available_bytes:
            raise ConfigError(
                f"num_tokens={number} needs {needed} bytes of K/V store ({page_bytes} a page), "
                f"{available_bytes} are available"
            )
        return num_pages
    if not 0.0 < fraction <= 1.0:
        raise ConfigError(f"fraction must lie above 0 and up to 1, got {fraction}")
    available = available_memory_bytes() if available_bytes is None else available_bytes
    num_pages = min(int(available * fraction) // page_bytes - 1, MAX_SETTING)
    if num_pages < 1:
        raise ConfigError(
            f"{fraction:.0%} of {available} available bytes hold no page of {page_bytes} bytes beside the "
            "padding page"
        )
    return num_pages


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process can still take: the least of the machine's ``MemAvailable`` and what each
    control group above the process leaves (version 1 or 2; file cache that can be dropped is not counted
    as used). ``root`` is where ``proc`` and ``sys`` are found.

    Raises ``ConfigError`` when the system does not say; a token budget is needed then.
    """
    left = [*_machine(root), *_control_groups(root)]
    if not left:
        raise ConfigError("the available memory is unknown on this system: give num_tokens")
    return max(0, min(left))


def _machine(root: Path) -> list[int]:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return [int(line.split()[1]) * 1024]
    return []


def _control_groups(root: Path) -> list[int]:
    """What is left in every control group with a limit, from the process's own up to the top."""
    left = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, used, droppable = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            used, droppable = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = root / top / path.lstrip("/")
        # Inside a container the path may be the host's: then only the top, which is its own, exists.
        for folder in (group, *group.parents):
            if (root / top) not in (folder, *folder.parents):
                break
            limit_bytes, used_bytes = _number(folder / limit), _number(folder / used)
            if limit_bytes is not None and used_bytes is not None:
                left.append(limit_bytes - used_bytes + _statistic(folder / "memory.stat", droppable))
    return left


def _statistic(path: Path, name: str) -> int:
    for line in _lines(path):
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    """The number in a one-line file; ``None`` where there is no file or it says ``max``."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
