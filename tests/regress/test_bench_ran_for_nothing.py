"""Benchmarks that ran to their end and then could not write, and exit statuses that differed."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixkv.bench import micro_tree
from radixkv.bench.command import check_writable
from radixkv.cli import main
from radixkv.errors import ConfigError


def refuse_work(*args: object) -> None:
    raise AssertionError("the benchmark began")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--json", "/nonexistent/o.json", "there is no folder /nonexistent"),
        ("--json", "/", "it is a folder"),
        ("--page-size", "0", "page_size must be at least 1, got 0"),
        ("--page-size", "3", "page_size must be a power of two"),
    ],
)
def test_micro_tree_refuses_before_it_begins(
    option: str,
    value: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(micro_tree, "by_nodes", refuse_work)
    assert main(["bench", "micro-tree", option, value]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("micro_tree: ") and message in captured.err


def test_a_file_that_must_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's answer is put in its place: root may write everywhere."""
    file = tmp_path / "o.json"
    file.write_text("old")
    check_writable(file)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for path in (file, tmp_path / "new.json"):
        with pytest.raises(ConfigError, match="permission denied"):
            check_writable(path)
    assert file.read_text() == "old"


def test_a_model_that_is_not_there_is_one_status(capsys: pytest.CaptureFixture[str]) -> None:
    commands = (
        ["generate", "/nope", "a"],
        ["bench", "few-shot", "--model", "/nope"],
        ["bench", "no-reuse", "--model", "/nope"],
    )
    for command in commands:
        assert main(command) == 1, command
        assert capsys.readouterr().err.endswith(": no such file or folder: '/nope'\n")
