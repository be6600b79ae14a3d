"""What a result says of the machine, where the system tells it and where it does not."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from radixkv.bench import machine


def refuse(*arguments: Any, **options: Any) -> Any:
    raise OSError("not here")


def test_a_file_and_a_folder_of_weights_have_a_digest(tmp_path: Path) -> None:
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    second.write_bytes(b"second")
    first.write_bytes(b"first")
    (tmp_path / "config.json").write_text("{}")
    assert machine.file_digest(first) == hashlib.sha256(b"first").hexdigest()
    assert machine.file_digest(tmp_path) == hashlib.sha256(b"firstsecond").hexdigest()
    assert machine.file_digest(tmp_path / "missing") is None


def test_what_the_system_does_not_say_is_none_or_the_next_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", refuse)
    for name, as_ever in (("read_text", Path.read_text), ("write_text", Path.write_text)):

        def outside_proc(path: Path, *rest: Any, as_ever: Any = as_ever, **options: Any) -> Any:
            return (refuse if path.is_relative_to("/proc") else as_ever)(path, *rest, **options)

        monkeypatch.setattr(Path, name, outside_proc)
    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setattr(machine, "_PACKAGES", ("numpy", "no-such-package-of-ours"))
    assert machine.load_average() is None
    assert machine.reset_peak_memory() is False
    assert machine.peak_memory_bytes() > 1 << 20  # since the start
    about = machine.environment(num_threads=3, model="m", model_digest=None)
    assert about["commit"] is None
    assert about["versions"]["no-such-package-of-ours"] is None and about["versions"]["numpy"]
    assert about["cpu"] and about["num_threads"] == 3


@pytest.mark.parametrize(("changes", "commit"), [("", "c0ffee"), (" M file", "c0ffee+changes")])
def test_the_commit_says_whether_files_differ_from_it(
    changes: str, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"ls-files": "machine.py", "rev-parse": "c0ffee", "status": changes}
    monkeypatch.setattr(machine, "_git", lambda folder, verb, *rest: answers[verb])
    assert machine.environment(num_threads=None, model="m", model_digest=None)["commit"] == commit


def test_outside_a_checkout_there_is_no_commit(tmp_path: Path) -> None:
    assert machine._git(tmp_path, "no-such-verb") is None
