"""The real data sets, where ``--data FOLDER`` names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixkv.bench.optimum import Replayed, optimal_hits
from radixkv.bench.workloads import gsm8k_workload

pytestmark = pytest.mark.needs_data


def test_gsm8k_is_mostly_its_shared_examples(data_folder: Path) -> None:
    """With a byte for a token. All answers are known, and the best possible hit rate is high."""
    texts: list[str] = []

    def encode(text: str) -> list[int]:
        texts.append(text)
        return list(text.encode())

    workload = gsm8k_workload(data_folder, encode, num_questions=32, max_tokens=32)
    assert workload is not None
    assert texts[0].count("The answer is ") == 8
    assert not any("<<" in text or "####" in text for text in texts)
    assert all(answer is not None for answer in workload.answers)
    replayed = [Replayed(prompt, 0.0, (), 1.0) for prompt in workload.prompts]
    assert sum(optimal_hits(replayed)) > 0.8 * workload.num_prompt_tokens
