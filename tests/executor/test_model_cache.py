"""The cache of converted models: complete or not there, whoever else is at it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from radixkv.errors import ModelLoadError
from radixkv.executor.model_cache import ModelCache


def test_what_a_killed_conversion_left_is_swept_up_later(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    old, young = tmp_path / "models" / ".key-v1.old", tmp_path / "models" / ".key-v1.young"
    for folder in (old, young):
        folder.mkdir(parents=True)
    hour_ago = time.time() - 3700
    os.utime(old, (hour_ago, hour_ago))
    cache.folder("key", 1, lambda folder: None)
    assert not old.exists()
    assert young.exists()


def test_processes_that_convert_at_once_all_succeed(tmp_path: Path) -> None:
    code = """
import os, sys, time
from pathlib import Path
from radixkv.executor.model_cache import ModelCache

def make(folder):
    (folder / "model.safetensors").write_bytes(b"weights")
    here = Path(sys.argv[2])
    (here / str(os.getpid())).touch()
    while len(list(here.iterdir())) < 3:  # until all are at it
        time.sleep(0.01)

ModelCache(Path(sys.argv[1])).folder("key", 1, make)
"""
    (tmp_path / "here").mkdir()
    command = [sys.executable, "-c", code, str(tmp_path / "cache"), str(tmp_path / "here")]
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    folders = list((tmp_path / "cache" / "models").iterdir())
    assert [folder.name for folder in folders] == ["key-v1"]
    assert (folders[0] / "model.safetensors").read_bytes() == b"weights"


def test_the_first_of_two_conversions_stays(tmp_path: Path) -> None:
    """Somebody may be reading it already. Fault seen: replacing whatever stands in the way."""
    cache = ModelCache(tmp_path)

    def slower(folder: Path) -> None:
        (folder / "who").write_text("second")
        cache.folder("key", 1, lambda other: (other / "who").write_text("first"))

    place, _ = cache.folder("key", 1, slower)
    assert (place / "who").read_text() == "first"
    assert list(place.parent.iterdir()) == [place]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelLoadError, match=r"cannot write to the cache folder .*RADIXKV_CACHE"):
        ModelCache(tmp_path / "file").folder("key", 1, lambda folder: None)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RADIXKV_CACHE", str(tmp_path / "own"))
    assert ModelCache().root == tmp_path / "own"
    monkeypatch.delenv("RADIXKV_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert ModelCache().root == tmp_path / "xdg" / "radixkv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert ModelCache().root == tmp_path / "home" / ".cache" / "radixkv"
