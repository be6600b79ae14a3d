"""Who shares what: salts, adapters, and weights that change under running requests.

"Fault seen" names the one-line fault that the test was seen to fail against.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from async_kit import Gate
from fronts import assert_async_idle, assert_idle, fake_async_llm, fake_llm, run, word_tokenizer

from radixkv import (
    LLM,
    ConfigError,
    EngineConfig,
    Generation,
    InvalidRequestError,
    MisuseError,
    Output,
    SamplingParams,
)
from radixkv.executor.hf import HFExecutor
from radixkv.namespace import described, namespace_of
from radixkv.testing import FakeExecutor, tiny_model

PAGE_SIZES = (1, 4, 16, 64)
PROMPT = list(range(3, 103))
IDS = np.array(PROMPT, np.int32)
ONE = SamplingParams(max_tokens=1)


def started(generation: Generation) -> asyncio.Task[Output]:
    async def whole() -> Output:
        return await generation

    return asyncio.create_task(whole())


def cached(llm: LLM, **scope: Any) -> int:
    output: Output = llm.generate(PROMPT, ONE, **scope)
    return output.usage.cached_tokens


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b079_each_salt_has_a_tree_of_its_own(page_size: int) -> None:
    """None and "" are two salts. Fault seen: ``namespace_of`` asks ``not cache_salt``."""
    llm, _ = fake_llm(page_size=page_size, num_pages=1024 // page_size)
    salts = ("a", "b", None, "")
    assert [cached(llm, cache_salt=salt) for salt in salts] == [0, 0, 0, 0]
    assert [cached(llm, cache_salt=salt) for salt in salts] == [99, 99, 99, 99]
    assert [llm.explain(PROMPT, cache_salt=salt).hit_tokens for salt in (*salts, "c")] == [100] * 4 + [0]
    both = llm.generate([PROMPT, PROMPT], ONE, cache_salt=["a", "d"])
    assert [output.usage.cached_tokens for output in both] == [99, 0]
    assert_idle(llm)


def test_explain_does_not_tell_another_users_salt() -> None:
    llm, _ = fake_llm(page_size=4, num_pages=256)
    cached(llm, cache_salt="secret")
    for salt in (None, "other"):
        found = llm.explain(PROMPT, cache_salt=salt)
        assert found.reason == "absent" and "secret" not in repr(found)


def test_b080_fields_of_a_namespace_never_stand_in_for_each_other() -> None:
    """Fault seen: ``namespace_of`` joins adapter and salt into one text."""
    names = [None, "", "x", "a", "ab", "b", "bc", "c"]
    made = {
        namespace_of(model_revision=revision, adapter=adapter, adapter_version=version, cache_salt=salt)
        for revision in (None, "x")
        for adapter, version in ((None, 0), *((name, 1) for name in names if name))
        for salt in names
    }
    assert len(made) == 2 * 7 * 8
    assert namespace_of() == ()
    assert described(namespace_of(cache_salt="s")) == "that of this cache_salt"
    assert described(namespace_of(model_revision="r", adapter="a", adapter_version=2)) == (
        "that of model revision 'r', adapter 'a', version 2, no cache_salt"
    )


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b085_every_adapter_and_version_computes_for_itself(page_size: int) -> None:
    """The pages are checked by the store: those of another adapter hold other hashes. Fault seen:
    ``namespace_of`` leaves out the version."""
    llm, executor = fake_llm(page_size=page_size, num_pages=4096 // page_size)
    params = SamplingParams(max_tokens=5)
    indices = [0, *(llm.load_adapter(name, "unused").index for name in ("A", "B", "A-scaled"))]
    names = [None, "A", "B", "A-scaled"]
    outputs = llm.generate([PROMPT] * 4, params, adapter=names)
    for output, index in zip(outputs, indices, strict=True):
        assert output.usage.cached_tokens == 0
        assert list(output.token_ids) == executor.expected_output(IDS, 5, adapter=index)
    assert len({output.token_ids for output in outputs}) == 4
    assert [cached(llm, adapter=name) for name in names] == [99] * 4
    assert [cached(llm, adapter=name, cache_salt="A") for name in names] == [0] * 4
    assert llm.load_adapter("A", "unused").version == 2
    assert [cached(llm, adapter=name) for name in names] == [99, 0, 99, 99]
    llm.unload_adapter("B")
    with pytest.raises(InvalidRequestError, match="adapter 'B' is not loaded; there are: 'A', 'A-scaled'"):
        cached(llm, adapter="B")
    assert llm.load_adapter("B", "unused").version == 2
    assert cached(llm, adapter="B") == 0
    assert llm.stats()["adapters"] == {"A": 2, "A-scaled": 1, "B": 2}
    assert_idle(llm)


def test_prefill_score_beams_and_pins_stay_in_their_namespace() -> None:
    llm, _ = fake_llm(page_size=4, num_pages=512, max_pinned_pages=64)
    llm.load_adapter("A", "unused")
    scope: dict[str, Any] = {"adapter": "A", "cache_salt": "s"}
    held = llm.prefill(PROMPT, pin=True, **scope).pin
    assert held is not None and held.num_tokens == 100
    assert llm.prefill(PROMPT).cached_tokens == 0
    assert cached(llm, **scope) == 99
    first, again, other = (
        llm.score(PROMPT, [[3, 4, 5]], **chosen)[0] for chosen in (scope, scope, {"cache_salt": "s"})
    )
    assert first == again != other
    assert llm.beam_search(PROMPT, beam_width=2, max_tokens=3, **scope).usage.cached_tokens == 99  # type: ignore[union-attr]
    chat = llm.chat(**scope)
    chat.send("w3 w4 w5", ONE)
    assert chat.explain("w6").hit_tokens > 0
    assert llm.explain("<s> w3 w4 w5").hit_tokens == 0
    llm.unpin(held)
    assert_idle(llm)


def test_scoring_the_same_again_is_a_hit() -> None:
    llm, _ = fake_llm(page_size=16, num_pages=64)
    before = llm.score(PROMPT, [[3, 4, 5, 6], [3, 4, 9]])
    computed = llm.stats()["scheduler"]["prompt_tokens_computed"]
    assert llm.score(PROMPT, [[3, 4, 5, 6], [3, 4, 9]]) == before
    assert llm.stats()["scheduler"]["prompt_tokens_computed"] - computed == 3  # the last token of each prompt


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b087_new_weights_find_nothing_and_keep_nothing_of_what_runs(page_size: int) -> None:
    """Faults seen: ``new_epoch`` does not flush; ``flush`` does not raise the epoch (what runs is then
    inserted)."""

    async def main() -> None:
        llm, executor = fake_async_llm(page_size=page_size, num_pages=2048 // page_size)
        async with llm:
            await llm.generate(PROMPT, ONE)
            gate = Gate(executor)
            running = started(llm.generate([7, *PROMPT], SamplingParams(max_tokens=20)))
            await gate.arrivals.get()
            update = asyncio.ensure_future(llm.update_weights({}, revision="second"))
            gate.open()
            report = await update
            assert report.num_pages_freed == -(-100 // page_size)
            output = await running
            assert len(output.token_ids) == 20
            for prompt in (PROMPT, [7, *PROMPT]):
                assert (await llm.generate(prompt, ONE)).usage.cached_tokens == 0
            assert (await llm.generate(PROMPT, ONE)).usage.cached_tokens == 99
            await assert_async_idle(llm)

    run(main())


def test_an_adapter_in_use_stays_and_a_new_version_waits_for_nobody() -> None:
    """Faults seen: ``unload`` does not ask who uses it; ``load`` drops the old version at once."""

    async def main() -> None:
        llm, executor = fake_async_llm(num_pages=512)
        async with llm:
            old = await llm.load_adapter("A", "unused")
            gate = Gate(executor)
            running = started(llm.generate(PROMPT, SamplingParams(max_tokens=20), adapter="A"))
            await gate.arrivals.get()
            unloading = asyncio.ensure_future(llm.unload_adapter("A"))
            loading = asyncio.ensure_future(llm.load_adapter("A", "unused"))
            gate.open()
            with pytest.raises(MisuseError, match="adapter 'A' is in use by 1 requests"):
                await unloading
            new = await loading
            assert (old.version, new.version) == (1, 2) and new.index != old.index
            output = await running
            assert list(output.token_ids) == executor.expected_output(IDS, 20, adapter=old.index)
            output = await llm.generate(PROMPT, SamplingParams(max_tokens=20), adapter="A")
            assert list(output.token_ids) == executor.expected_output(IDS, 20, adapter=new.index)
            await llm.unload_adapter("A")
            assert (await llm.stats())["num_adapters_retired"] == 0
            await assert_async_idle(llm)

    run(main())


def test_llms_that_share_a_model_notice_its_new_weights() -> None:
    """Fault seen: ``follow_weights`` does nothing."""
    loaded = tiny_model("llama")
    llms = [
        LLM.from_executor(
            HFExecutor(loaded, num_pages=32, page_size=4, num_threads=1),
            word_tokenizer(),
            config=EngineConfig(num_pages=32, page_size=4),
        )
        for _ in range(2)
    ]
    prompt = list(range(3, 43))
    before = [llm.generate(prompt, ONE, cache_salt="s").token_ids for llm in llms]
    assert before[0] == before[1]
    report = llms[0].update_weights(lambda weights: {"model.norm.weight": -weights["model.norm.weight"]})
    assert report.num_pages_freed == 10
    outputs = [llm.generate(prompt, ONE, cache_salt="s") for llm in llms]
    assert [output.usage.cached_tokens for output in outputs] == [0, 0]
    assert outputs[0].token_ids == outputs[1].token_ids != before[0]
    assert "revision 'third'" in _after(llms[0])


def _after(llm: LLM) -> str:
    llm.update_weights({}, revision="third")
    llm.generate(list(range(3, 43)), ONE)
    found = llm.engine.kv.explain(list(range(3, 43)), ("another",)).other_namespace
    assert found is not None
    return described(found)


@pytest.mark.parametrize(
    ("scope", "message"),
    [
        ({"cache_salt": 3}, "cache_salt must be text or None, got 3"),
        ({"cache_salt": ["a"]}, "cache_salt must be text or None, got"),
        ({"adapter": "none"}, "adapter 'none' is not loaded; there are: none"),
        ({"adapter": b"x"}, "adapter must be text or None"),
    ],
)
def test_odd_scopes_are_refused(scope: dict[str, Any], message: str) -> None:
    llm, _ = fake_llm()
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate([3, 4, 5], ONE, **scope)
    with pytest.raises(InvalidRequestError):
        llm.prefill([3, 4, 5], **scope)
    with pytest.raises(InvalidRequestError, match="got 1 of cache_salt for 2 prompts"):
        llm.generate([[3], [4]], ONE, cache_salt=["a"])
    with pytest.raises(InvalidRequestError, match="cache_salt 1: must be text or None, got 4"):
        llm.generate([[3], [4]], ONE, cache_salt=["a", 4])  # type: ignore[list-item]
    assert_idle(llm)


class Plain:
    """An executor that can do no more than execute."""

    def __init__(self) -> None:
        inner = FakeExecutor(num_pages=8, page_size=4)
        self.spec, self.num_pages, self.page_size = inner.spec, inner.num_pages, inner.page_size
        self.execute, self.stats = inner.execute, inner.stats


def test_odd_adapters_and_weights_are_refused(tmp_path: Path) -> None:
    llm, _ = fake_llm()
    for name in ("", 3, None):
        with pytest.raises(ConfigError, match="an adapter's name must be text"):
            llm.load_adapter(name, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="an adapter's path must be"):
        llm.load_adapter("A", 3)  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match="no adapter is loaded under the name 'A'"):
        llm.unload_adapter("A")
    with pytest.raises(ConfigError, match="revision must be text"):
        llm.update_weights({}, revision=3)  # type: ignore[arg-type]
    plain = LLM.from_executor(Plain(), config=EngineConfig(num_pages=8, page_size=4))
    with pytest.raises(ConfigError, match=r"\(Plain\) takes no adapters"):
        plain.load_adapter("A", tmp_path)
    with pytest.raises(ConfigError, match=r"\(Plain\) cannot be replaced"):
        plain.update_weights({})
    assert plain.generate([3, 4], ONE).usage.completion_tokens == 1
