"""Beam search on tiny random models: equal to transformers', and to runs without sharing."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from radixkv.async_llm import AsyncLLM
from radixkv.config import EngineConfig
from radixkv.errors import InvalidRequestError, RequestTooLargeError
from radixkv.executor.hf import HFExecutor
from radixkv.llm import LLM
from radixkv.outputs import BeamOutput
from radixkv.testing.tiny_models import tiny_model

END_IDS = [1, *range(40, 60)]


def open_llm(family: str = "llama", page_size: int = 4, **config: object) -> LLM:
    executor = HFExecutor(tiny_model(family), num_pages=800 // page_size, page_size=page_size, pack=False)
    settings = EngineConfig(num_pages=800 // page_size, page_size=page_size, **config)  # type: ignore[arg-type]
    return LLM.from_executor(executor, config=settings)


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(3, 97, num_tokens).tolist()
    return ids


def theirs(
    family: str, prompt: list[int], width: int, max_tokens: int, length_penalty: float
) -> list[tuple[list[int], float]]:
    model = tiny_model(family).model
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=max_tokens,
        length_penalty=length_penalty,
        early_stopping=False,
        eos_token_id=END_IDS,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = []
    for ids, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        output = ids[len(prompt) :]
        ends = [place for place, token_id in enumerate(output) if token_id in END_IDS]
        if ends:  # what follows is padding
            output = output[: ends[0] + 1]
        found.append((output, score))
    return found


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_beams_equal_those_of_transformers(family: str, length_penalty: float) -> None:
    """Fault seen: beams that end are taken wherever they rank; the length does not count the end token."""
    llm = open_llm(family)
    ended = 0
    for seed in range(3):
        prompt = prompt_of(seed, 13 + seed)
        output = llm.beam_search(
            prompt, beam_width=3, max_tokens=9, length_penalty=length_penalty, stop_token_ids=END_IDS
        )
        assert isinstance(output, BeamOutput)
        expected = theirs(family, prompt, 3, 9, length_penalty)
        assert [list(beam.token_ids) for beam in output.beams] == [ids for ids, _ in expected]
        for beam, (_, score) in zip(output.beams, expected, strict=True):
            assert beam.score == pytest.approx(score, abs=1e-4)
            ended += beam.finish_reason == "stop"
    llm.check()
    assert ended > 0


def test_beams_share_the_prompt_and_free_everything() -> None:
    llm = open_llm(page_size=16)
    prompts = [prompt_of(1, 100), prompt_of(2, 37)]
    outputs = llm.beam_search(prompts, beam_width=4, max_tokens=12, ignore_eos=True)
    assert isinstance(outputs, list) and len(outputs) == 2
    stats = llm.stats()
    assert stats["scheduler"]["prompt_tokens_computed"] == 137
    assert stats["kv"]["num_pages_used"] == 0 and stats["kv"]["num_forked_copies"] > 0
    assert outputs[0].usage.prompt_tokens == 100 and outputs[0].usage.completion_tokens == 48
    for prompt, output in zip(prompts, outputs, strict=True):
        alone = open_llm(page_size=1, prefix_cache=False).beam_search(
            prompt, beam_width=4, max_tokens=12, ignore_eos=True
        )
        assert isinstance(alone, BeamOutput)
        assert [b.token_ids for b in alone.beams] == [b.token_ids for b in output.beams]
        scores = [llm.score(prompt, [list(beam.token_ids)])[0].total for beam in output.beams]
        assert scores == pytest.approx([beam.cumulative_logprob for beam in output.beams], abs=1e-3)


def test_the_asynchronous_front_finds_the_same() -> None:
    prompt = prompt_of(1, 30)
    expected = open_llm().beam_search(prompt, beam_width=3, max_tokens=6)

    async def run() -> list[BeamOutput | list[BeamOutput]]:
        executor = HFExecutor(tiny_model("llama"), num_pages=200, page_size=4, pack=False)
        async with AsyncLLM.from_executor(executor, config=EngineConfig(num_pages=200, page_size=4)) as llm:
            return list(
                await asyncio.gather(*(llm.beam_search(prompt, beam_width=3, max_tokens=6) for _ in range(3)))
            )

    for output in asyncio.run(run()):
        assert isinstance(output, BeamOutput) and isinstance(expected, BeamOutput)
        assert [beam.token_ids for beam in output.beams] == [beam.token_ids for beam in expected.beams]


def test_bad_settings_are_refused_before_any_work() -> None:
    llm = open_llm()
    with pytest.raises(InvalidRequestError, match=r"beam width must lie in 1..1024, got 0"):
        llm.beam_search([1, 2], beam_width=0)
    with pytest.raises(InvalidRequestError, match="length_penalty"):
        llm.beam_search([1, 2], beam_width=2, length_penalty=float("nan"))
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        llm.beam_search([1, 2], beam_width=2, max_tokens=0)
    with pytest.raises(InvalidRequestError, match="early_stopping"):
        llm.beam_search([1, 2], beam_width=2, early_stopping=1)  # type: ignore[arg-type]
    with pytest.raises(RequestTooLargeError, match=r"prompt 1.*pages"):
        llm.beam_search([[1, 2], [1] * 300], beam_width=4, max_tokens=150)
    assert llm.stats()["scheduler"]["num_added"] == 0
