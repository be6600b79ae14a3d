"""Arguments that were taken for something else, or ended in an error of Python's own."""

from __future__ import annotations

from collections import UserList, namedtuple
from typing import Any

import pytest
from front_kit import FOUR, fake_async_llm, fake_llm, run, word_tokenizer

from radixkv import InvalidRequestError, SamplingParams

Pair = namedtuple("Pair", "first second")


class Named(list[int]):
    def __init__(self, name: str, ids: list[int]) -> None:
        super().__init__(ids)
        self.name = name


def test_lists_and_tuples_of_any_kind_are_prompts() -> None:
    async def main() -> None:
        llm, _ = fake_async_llm()
        async with llm:
            plain = await llm.generate([5, 6], FOUR)
            for prompt in (Pair(5, 6), Named("mine", [5, 6])):
                assert (await llm.generate(prompt, FOUR)).token_ids == plain.token_ids
            assert len(await llm.score([3], [Pair(5, 6), Named("mine", [5])])) == 2

    run(main())


def test_a_list_that_contains_itself_is_refused() -> None:
    loop: list[Any] = [[3], 4]
    loop[0] = loop

    async def main() -> None:
        llm, _ = fake_async_llm()
        async with llm:
            with pytest.raises(InvalidRequestError, match="nested too deep"):
                await llm.generate(loop, FOUR)
            with pytest.raises(InvalidRequestError):
                await llm.score([3], loop)

    run(main())


@pytest.mark.parametrize("messages", [None, 5, "hello", {"role": "user", "content": "w5"}, [5], [None]])
def test_what_is_no_list_of_messages_is_refused(messages: Any) -> None:
    for llm in (fake_llm()[0], fake_async_llm()[0]):
        with pytest.raises(InvalidRequestError, match="message"):
            llm.chat(messages=messages)
        llm.close()


@pytest.mark.parametrize("system", [5, [{"role": "user", "content": "w5"}], b"w5"])
def test_what_is_no_system_text_is_refused_at_once(system: Any) -> None:
    with pytest.raises(InvalidRequestError, match="system must be text or None"):
        fake_llm()[0].chat(system)


@pytest.mark.parametrize("ids", [None, 5, "w5", b"5", UserList])
def test_decode_of_what_is_no_list_is_refused(ids: Any) -> None:
    with pytest.raises(InvalidRequestError, match="must be a list"):
        word_tokenizer().decode(ids)


@pytest.mark.parametrize("pin", ["yes", 1, None])
def test_pin_is_true_or_false(pin: Any) -> None:
    llm, _ = fake_llm(max_pinned_pages=20)
    with pytest.raises(InvalidRequestError, match="pin must be True or False"):
        llm.prefill([3, 4], pin=pin)


def test_best_of_gives_no_log_probabilities_unasked() -> None:
    llm, _ = fake_llm()
    params = {"max_tokens": 3, "n": 2, "best_of": 4, "temperature": 1.0, "seed": 1}
    output = llm.generate([5, 6], SamplingParams(**params))  # type: ignore[arg-type]
    assert output.logprobs == () and all(sample.logprobs == () for sample in output.samples)
    assert output.cumulative_logprob is not None
    asked = llm.generate([5, 6], SamplingParams(**params, logprobs=0))  # type: ignore[arg-type]
    assert len(asked.logprobs) == 3 and asked.token_ids == output.token_ids

    async def main() -> None:
        other, _ = fake_async_llm()
        async with other:
            async for delta in other.generate([5, 6], SamplingParams(**params)):  # type: ignore[arg-type]
                assert delta.logprobs == ()

    run(main())
