"""Pages from a budget or from memory, and threads: control groups count, the machine's size does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from radixkv.config import ModelSpec
from radixkv.errors import ConfigError
from radixkv.executor.kv_store import bytes_per_page
from radixkv.executor.memory import available_memory_bytes, num_pages_for
from radixkv.executor.threads import set_num_threads, usable_cores

SPEC = ModelSpec(
    name="t", vocab_size=10, num_layers=3, num_query_heads=4, num_kv_heads=2, head_dim=8, max_positions=64
)
GIB = 2**30


def system(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """A machine with 64 GiB available, the process's ``cgroup`` lines and some files."""
    everything = {
        "proc/meminfo": f"MemFree: 1 kB\nMemAvailable: {64 * 2**20} kB\n",
        "proc/self/cgroup": cgroup,
    }
    for name, text in {**everything, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("num_tokens", "page_size", "num_pages"), [(1, 16, 1), (16, 16, 1), (17, 16, 2), (1000, 1, 1000)]
)
def test_token_budget_is_rounded_up_to_pages(num_tokens: int, page_size: int, num_pages: int) -> None:
    assert num_pages_for(SPEC, page_size=page_size, dtype=torch.float32, num_tokens=num_tokens) == num_pages


def test_pages_from_memory_leave_room_for_the_padding_page() -> None:
    page_bytes = bytes_per_page(SPEC, 16, torch.float32)
    for num_pages in (1, 5):
        got = num_pages_for(
            SPEC,
            page_size=16,
            dtype=torch.float32,
            available_bytes=4 * page_bytes * (num_pages + 1),
            fraction=0.25,
        )
        assert got == num_pages
    with pytest.raises(ConfigError, match=f"hold no page of {page_bytes} bytes"):
        num_pages_for(
            SPEC, page_size=16, dtype=torch.float32, available_bytes=8 * page_bytes - 1, fraction=0.25
        )


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1, float("nan")])
def test_fraction_out_of_range(fraction: float) -> None:
    with pytest.raises(ConfigError, match="fraction must lie above 0"):
        num_pages_for(SPEC, page_size=16, dtype=torch.float32, available_bytes=GIB, fraction=fraction)


def test_num_tokens_below_one() -> None:
    with pytest.raises(ConfigError, match="num_tokens must be a whole number of at least 1, got 0"):
        num_pages_for(SPEC, page_size=16, dtype=torch.float32, num_tokens=0)


def test_without_control_groups_the_machine_counts(tmp_path: Path) -> None:
    assert available_memory_bytes(system(tmp_path, "0::/\n", {})) == 64 * GIB


def test_b048_version_2_limit_counts_not_the_machine(tmp_path: Path) -> None:
    """File cache that can be dropped is not used memory.

    Fault seen: ``_control_groups`` left out of ``left``.
    """
    group = "sys/fs/cgroup/jobs/one"
    files = {
        f"{group}/memory.max": f"{4 * GIB}\n",
        f"{group}/memory.current": f"{3 * GIB}\n",
        f"{group}/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    }
    assert available_memory_bytes(system(tmp_path, "0::/jobs/one\n", files)) == 2 * GIB


def test_a_lower_limit_further_up_counts(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/jobs/one/memory.max": "max\n",
        "sys/fs/cgroup/jobs/one/memory.current": "1000\n",
        "sys/fs/cgroup/jobs/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/jobs/memory.current": "1024\n",
    }
    assert available_memory_bytes(system(tmp_path, "0::/jobs/one\n", files)) == GIB - 1024


def test_version_1_limit(tmp_path: Path) -> None:
    """The path is the host's; inside the container only the top exists."""
    top = "sys/fs/cgroup/memory"
    files = {
        f"{top}/memory.limit_in_bytes": f"{2 * GIB}\n",
        f"{top}/memory.usage_in_bytes": f"{GIB}\n",
        f"{top}/memory.stat": "total_inactive_file 4096\n",
    }
    lines = "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n"
    assert available_memory_bytes(system(tmp_path, lines, files)) == GIB + 4096


def test_used_up_is_zero_not_negative(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": "100\n", "sys/fs/cgroup/memory.current": "200\n"}
    assert available_memory_bytes(system(tmp_path, "0::/\n", files)) == 0


def test_a_system_that_does_not_say(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give num_tokens"):
        available_memory_bytes(tmp_path)


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("0::/a\n", {"sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 2),
        ("0::/a\n", {"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ("0::/a\n", {"sys/fs/cgroup/a/cpu.max": "max 100000\n"}, 8),
        (
            "2:cpu,cpuacct:/b\n",
            {
                "sys/fs/cgroup/cpu,cpuacct/b/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/b/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        (
            "2:cpu:/\n",
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
            8,
        ),
        ("", {}, 8),
    ],
    ids=["v2", "v2 above", "v2 max", "v1", "v1 none", "no groups"],
)
def test_cores_follow_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert usable_cores(system(tmp_path, cgroup, files)) == cores


def test_cores_follow_the_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    root = system(tmp_path, "0::/\n", {"sys/fs/cgroup/cpu.max": "400000 100000\n"})
    assert usable_cores(root) == 1


def test_threads_can_be_set_and_are_left_alone_by_default() -> None:
    before = torch.get_num_threads()
    try:
        assert set_num_threads(3) == torch.get_num_threads() == 3
        assert set_num_threads(1) == torch.get_num_threads() == 1
        assert set_num_threads(None) == torch.get_num_threads() == 1
        with pytest.raises(ConfigError, match=r"num_threads must be a whole number in 1\.\.\d+ .*, got 0"):
            set_num_threads(0)
        torch.set_num_threads(usable_cores() + 1)
        assert set_num_threads(None) == usable_cores()
    finally:
        torch.set_num_threads(before)
