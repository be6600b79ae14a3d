"""Prompts: their answers are right, their lengths exact, and a seed says it all."""

from __future__ import annotations

import gzip
import json
import random
import re
import zlib
from pathlib import Path

import numpy as np
import pytest

from radixkv.bench.optimum import Replayed, optimal_hits
from radixkv.bench.word_problems import as_example, as_question, make_problems
from radixkv.bench.workloads import (
    arithmetic_workload,
    cut_prefix,
    gsm8k_workload,
    says_answer,
    unrelated_workload,
)
from radixkv.errors import ConfigError


def encode(text: str) -> list[int]:
    return [zlib.crc32(word.encode()) % 40_000 for word in text.split()]


@pytest.mark.parametrize("seed", range(5))
def test_every_equation_in_a_working_holds_and_the_last_one_is_the_answer(seed: int) -> None:
    for problem in make_problems(80, random.Random(seed)):
        results = []
        for left, right in re.findall(r"((?:\d+ [-+*/] )+\d+) = (\d+)", problem.working):
            value = eval(left)  # digits and four operators only, by the pattern above
            assert value == int(right), problem
            results.append(int(right))
        assert results[-1] == problem.answer, problem
        assert problem.answer > 0
        assert str(problem.answer) in as_example(problem)
        assert as_question(problem).endswith("Answer:")


def test_a_seed_says_it_all() -> None:
    assert make_problems(20, random.Random(3)) == make_problems(20, random.Random(3))
    assert make_problems(20, random.Random(3)) != make_problems(20, random.Random(4))


def test_arithmetic_workload_has_one_prefix_and_questions_that_part_at_once() -> None:
    workload = arithmetic_workload(encode, num_questions=32, max_tokens=8)
    assert workload.num_requests == 32
    assert all(
        prompt[: len(workload.prefix_ids)].tolist() == workload.prefix_ids.tolist()
        for prompt in workload.prompts
    )
    assert workload.num_prompt_tokens == sum(map(len, workload.prompts))
    hits = optimal_hits([Replayed(prompt, 0.0, (), 1.0) for prompt in workload.prompts])
    assert hits == [0] + [len(workload.prefix_ids)] * 31


def test_a_cut_prefix_is_exact_and_never_clamped() -> None:
    workload = arithmetic_workload(encode, num_questions=2, max_tokens=8)
    cut = cut_prefix(workload, 17)
    assert cut.prompts[0][:17].tolist() == workload.prefix_ids[:17].tolist()
    assert cut.prompts[0][17:].tolist() == workload.question_ids[0].tolist()
    length = len(workload.prefix_ids)
    for wrong in (-1, length + 1):
        with pytest.raises(ConfigError, match=rf"0\.\.{length} tokens, got {wrong}"):
            cut_prefix(workload, wrong)


@pytest.mark.parametrize(("questions", "max_tokens"), [(0, 8), (2, 0)])
def test_numbers_below_one_are_refused(questions: int, max_tokens: int) -> None:
    with pytest.raises(ConfigError, match="must be at least 1, got 0"):
        arithmetic_workload(encode, num_questions=questions, max_tokens=max_tokens)


def test_unrelated_prompts_have_exact_lengths_and_share_nothing() -> None:
    workload = unrelated_workload(encode, num_prompts=64, num_tokens=256, max_tokens=8)
    assert [len(prompt) for prompt in workload.prompts] == [256] * 64
    assert optimal_hits([Replayed(prompt, 0.0, (), 1.0) for prompt in workload.prompts]) == [0] * 64


def test_too_many_unrelated_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="1000 are wanted"):
        unrelated_workload(encode, num_prompts=1000, num_tokens=4, max_tokens=1)


def _write_gsm8k(folder: Path) -> None:
    (folder / "gsm8k").mkdir()
    rows = [
        {
            "question": f"What is {n} + {n}?",
            "answer": f"It is {n}+{n}=<<{n}+{n}={2 * n}>>{2 * n}.\n#### {2 * n}",
        }
        for n in range(600, 620)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "gsm8k" / "fewshot_train_0.jsonl").write_text(lines)
    (folder / "gsm8k" / "test_0.jsonl.gz").write_bytes(gzip.compress(lines.encode()))


def test_gsm8k_is_read_without_the_calculator_notes(tmp_path: Path) -> None:
    _write_gsm8k(tmp_path)
    seen: list[str] = []

    def note(text: str) -> list[int]:
        seen.append(text)
        return encode(text)

    workload = gsm8k_workload(tmp_path, note, num_questions=3, max_tokens=4)
    assert workload is not None
    assert workload.answers == (1200, 1202, 1204)
    assert seen[0].count("Question:") == 9  # the last one leads each question
    assert "It is 600+600=1200. The answer is 1200.\n\n" in seen[0]
    assert "<<" not in seen[0]
    assert np.array_equal(workload.prompts[1][: len(workload.prefix_ids)], workload.prefix_ids)


def test_gsm8k_that_is_not_there_is_none_and_too_few_questions_are_an_error(tmp_path: Path) -> None:
    assert gsm8k_workload(tmp_path, encode, num_questions=3, max_tokens=4) is None
    _write_gsm8k(tmp_path)
    with pytest.raises(ConfigError, match="has 20 questions, 21 are wanted"):
        gsm8k_workload(tmp_path, encode, num_questions=21, max_tokens=4)


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        (" 3 + 4 = 7. The answer is 7.", 7, True),
        ("The answer is $1,200 in all", 1200, True),
        ("The answer is 8. The answer is 7.", 7, False),
        ("It may be 7", 7, False),
    ],
)
def test_says_answer(text: str, answer: int, right: bool) -> None:
    assert says_answer(text, answer) is right
