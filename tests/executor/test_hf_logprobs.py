"""Log-probabilities of a tiny model: against plain forwards, warm and cold, and nothing left NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixkv import LLM, EngineConfig, Output, SamplingParams
from radixkv.executor.hf import HFExecutor
from radixkv.executor.logprobs import RowLogprobs
from radixkv.testing import tiny_model

PROMPT = list(range(3, 60))


def llm_of(page_size: int, **config: int) -> LLM:
    executor = HFExecutor(tiny_model("qwen2"), num_pages=512 // page_size, page_size=page_size, num_threads=1)
    settings = EngineConfig(num_pages=512 // page_size, page_size=page_size, **config)  # type: ignore[arg-type]
    return LLM.from_executor(executor, config=settings)


def plain_logprobs(token_ids: list[int]) -> torch.Tensor:
    """``[num_tokens, vocab]``: row ``p`` says what follows position ``p``."""
    with torch.inference_mode():
        logits = tiny_model("qwen2").model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), dim=1)


def assert_as_plain(output: Output, num_top: int, start: int) -> None:
    ids = [*PROMPT, *output.token_ids]
    plain = plain_logprobs(ids)
    entries = {max(start, 1) + i: entry for i, entry in enumerate(output.prompt_logprobs)}
    entries.update({len(PROMPT) + i: entry for i, entry in enumerate(output.logprobs)})
    assert list(entries) == list(range(max(start, 1), len(ids)))
    for position, entry in entries.items():
        row = plain[position - 1]
        assert entry.token_id == ids[position]
        assert entry.logprob == pytest.approx(float(row[ids[position]]), abs=1e-4)
        assert len(entry.top) == num_top
        best = torch.topk(row, num_top)
        assert [token_id for token_id, _ in entry.top] == best.indices.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert entry.rank == (1 + int((row > row[ids[position]]).sum()) if num_top else None)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_b111_numbers_are_those_of_a_plain_forward_warm_and_cold(page_size: int) -> None:
    """Before temperature, penalties and bias. Fault seen: they are computed from the adjusted logits."""
    llm = llm_of(page_size, max_batch_tokens=23)
    for num_top, start in ((0, 0), (0, 0), (3, 0), (0, 30), (2, 40)):
        params = SamplingParams(
            max_tokens=5, temperature=0.7, seed=3, presence_penalty=1.0, logit_bias={7: 2.0},
            logprobs=num_top, prompt_logprobs=num_top, prompt_logprobs_start=start,
        )  # fmt: skip
        assert_as_plain(llm.generate(PROMPT, params), num_top, start)
    assert llm.stats()["kv"]["num_logprobs_reused"] == 56 + 27


def test_b112_only_rows_that_ask_are_filled_and_all_of_those() -> None:
    """The buffers begin as NaN. Fault seen: ``fill`` sets the rows by their place among those that ask."""
    wanted = np.array([0, 1, 3, 0, 2], np.int32)
    found = RowLogprobs.blank(5, wanted)
    assert np.isnan(found.logprobs).all() and found.top_ids.shape == (5, 2)
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [1.0, 1.0, 1.0, 5.0], [3.0, 1.0, 2.0, 0.0]])
    rows = np.flatnonzero(wanted)
    found.fill(rows, logits, np.array([1, 2, 0], np.int32), wanted[rows])
    logs = torch.log_softmax(logits, dim=1)
    expected = [float(logs[0, 1]), float(logs[1, 2]), float(logs[2, 0])]
    assert found.logprobs[rows].tolist() == pytest.approx(expected, abs=1e-6)
    assert np.isnan(found.logprobs[[0, 3]]).all()
    assert found.ranks.tolist() == [0, 0, 2, 0, 1]
    assert found.top_ids[2].tolist() == [3, 0]  # of equals the lower id
    assert found.top_ids[4, 0] == 0 and np.isnan(found.top_logprobs[4, 1])
    assert found.top_logprobs[2].tolist() == pytest.approx([float(logs[1, 3]), float(logs[1, 0])], abs=1e-6)
    nothing = RowLogprobs.blank(4, np.zeros(4, np.int32))
    assert len(nothing.logprobs) == len(nothing.top_ids) == 0
