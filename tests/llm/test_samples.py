"""n and best_of through both fronts: samples in order, text and stop strings of each, usage counted once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fronts import assert_async_idle, assert_idle, fake_async_llm, fake_llm, run, words

from radixkv import Delta, InvalidRequestError, SamplingParams
from radixkv.sched.batch import Batch, SequenceOutput, Usage
from radixkv.sequence import Request


def test_n_samples_have_their_text_and_the_prompt_counts_once() -> None:
    """The fake is greedy, so all samples are the same."""
    llm, executor = fake_llm()
    ids = executor.expected_output(np.array([3, 4, 5]), 6)
    output = llm.generate([3, 4, 5], SamplingParams(max_tokens=6, n=3))
    assert [sample.sample_index for sample in output.samples] == [0, 1, 2]
    for sample in output.samples:
        assert (sample.text, list(sample.token_ids)) == (words(*ids), ids)
        assert sample.usage == Usage(3, 0, 6)
    assert output.usage == Usage(3, 0, 18)
    one = llm.generate([3, 4, 5], SamplingParams(max_tokens=6))
    assert len(one.samples) == 1 and one.samples[0].text == one.text
    assert_idle(llm)


def test_each_sample_stops_at_its_own_stop_string() -> None:
    llm, executor = fake_llm()
    ids = executor.expected_output(np.array([3, 4, 5]), 9)
    output = llm.generate([3, 4, 5], SamplingParams(max_tokens=9, n=3, stop=(f" w{ids[4]}",)))
    for sample in output.samples:
        assert sample.text == words(*ids[:4])
        assert (sample.finish_reason, sample.stop_reason) == ("stop", f" w{ids[4]}")
    assert output.usage.completion_tokens == 15
    assert_idle(llm)


def test_the_best_are_chosen_by_their_mean_logprob() -> None:
    """Fault seen: by the sum, which favours short ones."""
    from radixkv.answer import Answer

    request = Request(
        request_id=0,
        prompt_ids=np.array([3], np.int32),
        sampling=SamplingParams(n=2, best_of=3, max_tokens=9),
    )
    answer = Answer(request, None)
    for index, (num_tokens, total) in enumerate([(2, -3.0), (4, -2.0), (6, -3.6)]):
        for at in range(num_tokens):
            answer.take(
                SequenceOutput(
                    request_id=0,
                    new_token_ids=(10 * index + at,),
                    finish_reason="length" if at == num_tokens - 1 else None,
                    usage=Usage(1, 0, at + 1),
                    sample_index=index,
                    cumulative_logprob=total * (at + 1) / num_tokens,
                )
            )
    output = answer.output()
    assert [sample.token_ids[0] for sample in output.samples] == [10, 20]
    assert [sample.sample_index for sample in output.samples] == [0, 1]
    assert output.usage == Usage(1, 0, 12)
    assert output.cumulative_logprob == -2.0


def test_deltas_of_several_samples_carry_their_index() -> None:
    """With best_of they come at the end, one for each that is returned."""

    async def main() -> None:
        llm, executor = fake_async_llm()
        ids = executor.expected_output(np.array([3, 4]), 8)
        async with llm:
            for best_of in (None, 4):
                texts: dict[int, str] = {}
                deltas: list[Delta] = []
                async for delta in llm.generate([3, 4], SamplingParams(max_tokens=8, n=2, best_of=best_of)):
                    texts[delta.sample_index] = texts.get(delta.sample_index, "") + delta.text
                    deltas.append(delta)
                assert texts == {0: words(*ids), 1: words(*ids)}
                assert sum(delta.finish_reason is not None for delta in deltas) == 2
                assert best_of is None or len(deltas) == 2
            await assert_async_idle(llm)

    run(main())


def test_logprobs_pass_through_both_fronts() -> None:
    async def main() -> None:
        llm, _ = fake_async_llm()
        blocking, _ = fake_llm()
        params = SamplingParams(max_tokens=5, logprobs=2, prompt_logprobs=1, stop="never")  # type: ignore[arg-type]
        wanted = blocking.generate([3, 4, 5], params)
        assert [entry.token_id for entry in wanted.logprobs] == list(wanted.token_ids)
        assert {len(entry.top) for entry in wanted.logprobs} == {2}
        assert [entry.token_id for entry in wanted.prompt_logprobs] == [4, 5]
        async with llm:
            generation = llm.generate([3, 4, 5], params)
            deltas = [delta async for delta in generation]
            assert tuple(entry for delta in deltas for entry in delta.logprobs) == wanted.logprobs
            assert (await generation).prompt_logprobs == wanted.prompt_logprobs

    run(main())


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_an_error_ends_all_samples_of_its_request(page_size: int) -> None:
    class Broken(Exception):
        pass

    async def main() -> None:
        llm, executor = fake_async_llm(num_pages=64, page_size=page_size)

        def break_it(batch: Batch) -> None:
            if len(executor.batches) == 3:
                raise Broken

        executor.before = break_it
        async with llm:
            with pytest.raises(Broken):
                await llm.generate([3, 4], SamplingParams(max_tokens=5, n=3))
            assert len((await llm.generate([3, 4], SamplingParams(max_tokens=5, n=3))).samples) == 3
            await assert_async_idle(llm)

    run(main())


def test_a_chat_has_one_reply() -> None:
    llm, _ = fake_llm()
    params: Any = SamplingParams(n=2)
    with pytest.raises(InvalidRequestError, match="a chat takes one reply: n must be 1, got 2"):
        llm.chat().send("w3", params)
