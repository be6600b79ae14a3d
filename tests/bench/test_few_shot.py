"""The few-shot benchmark from command line to JSON, over FakeExecutor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_rig import VOCAB_SIZE, FakeRig, encode

from radixkv.bench.arm import Arm
from radixkv.bench.comparison import Comparison, summarise
from radixkv.bench.few_shot import main
from radixkv.bench.harness import Run, run_arm
from radixkv.bench.optimum import Replayed
from radixkv.bench.workloads import arithmetic_workload
from radixkv.errors import InternalError
from radixkv.testing.fake_executor import FakeExecutor

SMALL = ["--questions", "6", "--max-tokens", "4", "--prefix-tokens", "200"]


def _run(path: Path, *arguments: str, rig: FakeRig | None = None) -> tuple[int, dict[str, Any]]:
    code = main([*SMALL, "--json", str(path / "out.json"), *arguments], make_rig=rig or FakeRig())
    return code, json.loads((path / "out.json").read_text())


def test_json_has_its_keys_and_counts_are_exact(tmp_path: Path) -> None:
    code, result = _run(tmp_path)
    assert code == 0
    assert result["equal_outputs"] is True
    assert result["near_ties"] == 0
    workload = arithmetic_workload(encode, num_questions=6, max_tokens=4)
    total = 6 * 200 + sum(map(len, workload.question_ids))
    assert result["optimal_hit_tokens"] == 5 * 200
    assert result["optimal_hit_rate"] == 5 * 200 / total
    no_cache, radix = result["arms"]["no-cache"], result["arms"]["radix"]
    assert (no_cache["hit_rate"], no_cache["prompt_tokens_computed"]) == (0.0, total)
    assert radix["hit_tokens"] + radix["prompt_tokens_computed"] == total
    assert radix["hit_rate"] == radix["hit_tokens"] / total
    assert radix["share_of_optimum"] >= 0.99
    for arm in (no_cache, radix):
        for key in ("wall_s", "output_tokens_per_s", "ttft_p50_s", "ttft_p95_s", "cpu_s", "peak_bytes"):
            assert arm[key] > 0, key
        assert arm["wall_s_min"] <= arm["wall_s"] <= arm["wall_s_max"]
        assert sum(arm["shares"].values()) == pytest.approx(1.0)
    assert result["environment"]["versions"]["numpy"]


def test_the_table_names_every_arm_and_the_optimum(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--arms", "no-cache,radix,fcfs,radix-p1,radix-p64"], make_rig=FakeRig()) == 0
    text = capsys.readouterr().out
    for name in ("no-cache", "radix", "fcfs", "radix-p1", "radix-p64"):
        assert name in text
    assert "radix-p64 against no-cache: equal, 6 of 6 identical" in text
    assert "optimum hit rate" in text
    assert "wall time" in text
    assert "times as fast as no-cache" in text


def _plant(token_id_of: Any) -> FakeRig:
    """The radix arm's run (the fourth executor: two warm up) gives another second token to request 1."""

    def prepare(number: int, executor: FakeExecutor) -> None:
        if number == 3:
            workload = arithmetic_workload(encode, num_questions=6, max_tokens=4)
            prompt = np.concatenate([workload.prefix_ids[:200], workload.question_ids[1]])
            expected = executor.expected_output(prompt, 2)[1]
            executor.force(1, len(prompt) + 1, token_id_of(expected))

    return FakeRig(prepare)


def test_a_difference_stops_the_benchmark_before_any_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, result = _run(tmp_path, rig=_plant(lambda token_id: 1 + token_id % (VOCAB_SIZE - 2)))
    text = capsys.readouterr()
    assert code == 1
    assert result["equal_outputs"] is False
    assert "request 1 parts at output token 1" in text.out
    assert "NOT EQUAL, 5 of 6 identical" in text.out
    assert "no speed is shown" in text.err
    assert "wall" not in text.out
    for arm in result["arms"].values():
        assert not {"wall_s", "output_tokens_per_s", "ttft_p50_s", "cpu_s", "shares"} & set(arm)


def test_a_near_tie_is_excused_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # FakeExecutor scores tokens that are a multiple of 1000 apart alike.
    code, result = _run(
        tmp_path, rig=_plant(lambda token_id: 1 + (token_id + 1000 - 1) % (VOCAB_SIZE - 1000))
    )
    assert code == 0
    assert (result["equal_outputs"], result["near_ties"]) == (True, 1)
    assert "1 part at a near tie" in capsys.readouterr().out


def test_arms_run_in_turn_after_warming_up(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, int]] = []

    def noted(arm: Arm, workload: Any, *arguments: Any) -> Run:
        order.append((arm.name, workload.max_tokens))
        return run_arm(arm, workload, *arguments)

    monkeypatch.setattr("radixkv.bench.comparison.run_arm", noted)
    few = ["--questions", "2", "--max-tokens", "6", "--prefix-tokens", "40", "--repeats", "3"]
    assert main([*few, "--arms", "no-cache,radix,fcfs"], make_rig=FakeRig()) == 0
    names = ["no-cache", "radix", "fcfs"]
    assert order == [(name, 4) for name in names] + 3 * [(name, 6) for name in names]


def test_every_run_has_a_fresh_executor() -> None:
    rig = FakeRig()
    assert main([*SMALL, "--repeats", "2"], make_rig=rig) == 0
    assert len(rig.executors) == 2 + 4


def test_a_run_alone_has_nothing_to_be_equal_to(tmp_path: Path) -> None:
    code, result = _run(tmp_path, "--arms", "radix")
    assert code == 0
    assert result["equal_outputs"] is None


def test_residues_reach_the_optimum_at_every_page_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, result = _run(tmp_path, "--residues")
    assert code == 0, capsys.readouterr().out
    assert result["passed"] is True
    found = {(each["page_size"], each["remainder"]): each["prefix_tokens"] for each in result["residues"]}
    assert found == {
        (1, 0): 200,
        (16, 0): 192,
        (16, 1): 193,
        (16, 15): 191,
        (64, 0): 192,
        (64, 1): 193,
        (64, 63): 191,
    }


def test_residues_fail_without_partial_matches(tmp_path: Path) -> None:
    code, result = _run(tmp_path, "--residues", "--no-partial")
    assert code == 1
    assert result["passed"] is False
    assert result["partial_matches"] is False
    passed = {(each["page_size"], each["remainder"]): each["passed"] for each in result["residues"]}
    assert passed[64, 63] is False
    assert passed[1, 0] is True


def test_more_hits_than_the_optimum_are_a_fault() -> None:
    workload = arithmetic_workload(encode, num_questions=2, max_tokens=1)
    arm = Arm("radix", 16)
    run = Run(
        arm=arm,
        requests=tuple(Replayed(prompt, 0.0, (1,), 1.0) for prompt in workload.prompts),
        cached=(0, len(workload.prompts[1])),
        prompt_tokens=workload.num_prompt_tokens,
        prompt_tokens_computed=0,
        wall_s=1.0,
        cpu_s=1.0,
        ttft_s=(0.5, 0.5),
        peak_bytes=1,
    )
    with pytest.raises(InternalError, match="were counted as hits, but the optimum is"):
        summarise(Comparison((arm,), workload, {"radix": [run]}, ()), None)


def test_missing_data_is_skipped_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, result = _run(tmp_path, "--data", str(tmp_path / "nowhere"))
    assert code == 0
    assert "skipped" in capsys.readouterr().out
    assert "no GSM8K" in result["skipped"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "no-cache,lru"], "unknown arm 'lru'"),
        (["--repeats", "0"], "repeats must be at least 1, got 0"),
        (["--prefix-tokens", "100000"], "got 100000"),
        (["--questions", "0"], "questions must be at least 1, got 0"),
        (["--arms", "no-cache,transformers"], "needs a real model"),
        (["--arms", "radix-p3"], "page_size must be a power of two"),
        (["--json", "nowhere/out.json"], "there is no folder nowhere"),
        (["--plot", "out.bmpx"], "a plot ends in one of"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments, make_rig=FakeRig()) == 2
    assert message in capsys.readouterr().err


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "out.png"
    assert main([*SMALL, "--repeats", "2", "--plot", str(picture)], make_rig=FakeRig()) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["few_shot", "no_reuse"])
def test_the_scripts_start(name: str) -> None:
    script = Path(__file__).parents[2] / "bench" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--max-batch-tokens" in done.stdout
