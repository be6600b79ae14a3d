"""What a number was measured on: versions, threads, commit, load, memory."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from radixkv.errors import ConfigError

LOAD_MARGIN = 0.5
_PACKAGES = ("radixkv", "torch", "transformers", "numpy")


def environment(*, num_threads: int | None, model: str, model_digest: str | None) -> dict[str, Any]:
    """Everything about machine and software that a later reader needs to judge a result."""
    return {
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "usable_cores": usable_cores(),
        "num_threads": num_threads,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "commit": _commit(),
        "model": model,
        "model_sha256": model_digest,
    }


def usable_cores() -> int:
    """Cores that this process may use, quotas respected."""
    from radixkv.executor.threads import usable_cores as cores  # loads torch, so only when asked

    return cores()


def load_average() -> float | None:
    """Runnable processes over the last minute; ``None`` where the system does not say."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def check_load(load: float | None, *, num_cores: int, record: bool) -> str | None:
    """A warning where others compute on this machine too; with ``record`` a ``ConfigError`` instead."""
    if load is None or load <= num_cores + LOAD_MARGIN:
        return None
    message = f"the load average is {load:.2f} on {num_cores} cores (limit {num_cores + LOAD_MARGIN})"
    if record:
        raise ConfigError(f"{message}: refusing to record")
    return f"{message}: times below mean little"


def reset_peak_memory() -> bool:
    """Give free memory back to the system and start a new high-water mark of resident memory; False where
    the system has no such mark."""
    with contextlib.suppress(OSError, AttributeError):  # glibc only; elsewhere the mark starts higher
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_memory_bytes() -> int:
    """Most resident memory since the mark was last reset (since the start where it cannot be)."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def file_digest(path: Path) -> str | None:
    """SHA-256 of one file, or of all ``*.safetensors`` of a folder in order of their names."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Commit of the checkout that holds this file, with ``+changes`` where files differ from it."""
    here = Path(__file__).resolve()
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    commit = _git(here.parent, "rev-parse", "HEAD")
    changes = _git(here.parents[2], "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if commit and changes else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
