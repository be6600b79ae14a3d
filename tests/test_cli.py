"""The ``radixkv`` command."""

from __future__ import annotations

import subprocess
import sys
import types
from importlib.metadata import version
from typing import Any

import pytest

from radixkv import ModelLoadError, Output, Usage
from radixkv.cli import BENCHMARKS, main


class FakeLLM:
    """Takes LLM's place: repeats what it is told."""

    opened: list[tuple[str, dict[str, Any]]]

    def __init__(self, model: str, **settings: Any) -> None:
        if model == "missing":
            raise ModelLoadError("no such file or folder: 'missing'")
        type(self).opened.append((model, settings))
        self.tokenizer = None

    def generate(self, prompts: list[str], sampling: Any) -> list[Output]:
        return [Output(f"{text} x {sampling.max_tokens}", (3,), "length", Usage(2, 1, 1)) for text in prompts]

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    FakeLLM.opened = []
    monkeypatch.setattr("radixkv.llm.LLM", FakeLLM)
    return FakeLLM


def test_generate_prints_one_text_a_line(fake_llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "some/model", "a", "b", "--max-tokens", "7", "--revision", "v1", "--usage"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "a x 7\nb x 7\n"
    assert captured.err == "prompt 2 tokens (1 cached), output 1, length\n" * 2
    ((model, settings),) = fake_llm.opened
    assert model == "some/model"
    assert settings["revision"] == "v1"


def test_our_errors_are_one_line_and_status_1(
    fake_llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "missing", "a"]) == 1
    assert capsys.readouterr().err == "radixkv: no such file or folder: 'missing'\n"
    assert main(["generate", "some/model", "a", "--max-tokens", "-1"]) == 1
    assert "max_tokens must lie in 0.." in capsys.readouterr().err
    assert main(["generate", "some/model", "a", "--chat"]) == 1
    assert "no chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [[], ["bench"], ["bench", "nothing"], ["fly"], ["generate"], ["generate", "m"]]
)
def test_wrong_arguments_are_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert "usage: radixkv" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_bench_hands_its_arguments_to_the_benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("fake")
    seen: list[list[str]] = []

    def fake_main(argv: list[str]) -> int:
        seen.append(argv)
        return 3

    module.main = fake_main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, BENCHMARKS[name][0], module)
    assert main(["bench", name, "--json", "out.json", "--help"]) == 3
    assert seen == [["--json", "out.json", "--help"]]


def test_bench_help_lists_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in BENCHMARKS)


def test_ctrl_c_is_status_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("radixkv.llm.LLM", interrupted)
    assert main(["generate", "some/model", "a"]) == 130
    assert capsys.readouterr().err == "radixkv: interrupted\n"


def test_the_module_is_the_command_and_loads_no_torch() -> None:
    code = (
        "import sys, runpy; sys.argv = ['radixkv', '--version']\n"
        "try: runpy.run_module('radixkv', run_name='__main__')\n"
        "finally: assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == (f"radixkv {version('radixkv')}\n", "", 0)
