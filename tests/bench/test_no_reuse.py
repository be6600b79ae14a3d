"""The no-reuse benchmark over FakeExecutor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_rig import FakeRig

from radixkv.bench.arm import Arm
from radixkv.bench.harness import Run, run_arm
from radixkv.bench.no_reuse import main
from radixkv.testing.fake_executor import FakeExecutor

SMALL = ["--size", "0.0625", "--pairs", "2"]


def test_json_has_its_keys_and_small_runs_give_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    assert main([*SMALL, "--json", str(path)], make_rig=FakeRig()) == 0
    result = json.loads(path.read_text())
    assert result["equal_outputs"] is True
    assert (result["num_prompts"], result["prompt_tokens"], result["hit_tokens"]) == (4, 4 * 256, 0)
    assert result["pairs"] == 2
    assert result["passed"] is None
    assert result["wall_ratio_low"] <= result["wall_ratio"] <= result["wall_ratio_high"]
    for name in ("radix", "no-cache"):
        assert 0.0 < result["arms"][name]["bookkeeping_share_of_wall"] < 1.0
        assert len(result["arms"][name]["wall_s_all"]) == 2
    assert "no verdict" in capsys.readouterr().out


def test_the_order_within_pairs_alternates(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def noted(arm: Arm, *arguments: Any) -> Run:
        order.append(arm.name)
        return run_arm(arm, *arguments)

    monkeypatch.setattr("radixkv.bench.no_reuse.run_arm", noted)
    assert main(["--size", "0.016", "--pairs", "3"], make_rig=FakeRig()) == 0
    warm_up, on, off = ["radix", "no-cache"], "radix", "no-cache"
    assert order == [*warm_up, on, off, off, on, on, off]


def test_a_difference_fails_before_any_speed(capsys: pytest.CaptureFixture[str]) -> None:
    def prepare(number: int, executor: FakeExecutor) -> None:
        if number == 3:  # the first run with the cache off
            executor.force(0, 256, 5)

    assert main(SMALL, make_rig=FakeRig(prepare)) == 1
    text = capsys.readouterr()
    assert "NOT EQUAL" in text.out
    assert "wall" not in text.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--pairs", "0"], "pairs must be at least 1, got 0"), (["--size", "1.5"], "got 1.5")],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments, make_rig=FakeRig()) == 2
    assert message in capsys.readouterr().err
