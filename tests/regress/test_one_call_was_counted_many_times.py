"""Each continuation of a ``score`` counted its prompt as a hit, each sample had a time to the first token,
and who waited too long was left out of the queue times: the worse it was, the better they looked."""

from __future__ import annotations

from typing import Any

from radixkv import LLM, EngineConfig, SamplingParams
from radixkv.testing import FakeExecutor

PROMPT = list(range(40))


def make_llm() -> LLM:
    executor = FakeExecutor(num_pages=256, page_size=4, vocab_size=97)
    return LLM.from_executor(executor, config=EngineConfig(num_pages=256, page_size=4))


def counts(llm: LLM) -> Any:
    return llm.stats()["scheduler"]


def test_a_score_counts_its_prompt_once() -> None:
    llm = make_llm()
    llm.score(PROMPT, [[1], [2], [3], [4]])
    found = counts(llm)
    assert (found["prompt_tokens"], found["cached_tokens"], found["hit_rate"]) == (39 + 4 * 2, 0, 0.0)
    assert found["num_added"] == 5
    llm.score(PROMPT, [[5], [6]])
    assert counts(llm)["prompt_tokens"] == 47 + 39 + 2 * 2
    assert 0 < counts(llm)["cached_tokens"] <= 39


def test_a_score_of_one_counts_as_any_request() -> None:
    llm = make_llm()
    llm.score(PROMPT, [[1, 2]])
    assert (counts(llm)["num_added"], counts(llm)["prompt_tokens"]) == (1, 42)


def test_samples_and_beams_are_one_request() -> None:
    llm = make_llm()
    llm.generate(PROMPT, SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=3, ignore_eos=True))
    found = counts(llm)
    assert (found["num_added"], found["prompt_tokens"], found["output_tokens"]) == (1, 40, 12)
    assert (found["queue_time_s"]["count"], found["ttft_s"]["count"]) == (1, 1)
    assert found["inter_token_s"]["count"] == 8
    llm.beam_search(list(range(50, 60)), beam_width=3, max_tokens=4)
    found = counts(llm)
    assert (found["num_added"], found["prompt_tokens"]) == (2, 50)
    assert (found["queue_time_s"]["count"], found["ttft_s"]["count"]) == (2, 1)


def test_who_waited_too_long_is_in_the_queue_times() -> None:
    llm = make_llm()
    assert llm.generate(PROMPT, queue_timeout_s=1e-12).finish_reason == "timeout"
    assert (counts(llm)["queue_time_s"]["count"], counts(llm)["num_timed_out"]) == (1, 1)
    assert counts(llm)["prompt_tokens"] == 0
