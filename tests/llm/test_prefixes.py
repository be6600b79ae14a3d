"""prefill, pins, score, explain, flush, stats."""

from __future__ import annotations

import numpy as np
import pytest
from fronts import assert_idle, fake_llm, word_tokenizer, words

from radixkv import LLM, ConfigError, EngineConfig, PinBudgetExceeded, SamplingParams
from radixkv.testing import FakeExecutor

FOUR = SamplingParams(max_tokens=4)
PREFIX = list(range(10, 37))  # 27 tokens: 6 pages of 4 and 3 tokens


def rows_computed(executor: FakeExecutor, since: int = 0) -> int:
    return sum(batch.num_rows for batch in executor.batches[since:])


def test_prefill_computes_a_prefix_once_and_samples_nothing() -> None:
    llm, executor = fake_llm()
    info = llm.prefill(PREFIX)
    assert (info.num_tokens, info.cached_tokens, info.pin) == (27, 0, None)
    assert rows_computed(executor) == 27
    assert sum(len(batch.sample_rows) for batch in executor.batches) == 0
    assert llm.prefill(words(*PREFIX)).cached_tokens == 26
    output = llm.generate([*PREFIX, 50], FOUR)
    assert output.usage.cached_tokens == 27
    assert_idle(llm)


def test_a_pinned_prefix_survives_what_evicts_an_unpinned_one() -> None:
    """Fault seen: prefill that forgets to pin."""
    hits = {}
    for pin in (True, False):
        llm, _ = fake_llm(num_pages=16, max_pinned_pages=8)
        info = llm.prefill(PREFIX, pin=pin)
        for start in range(40, 190, 10):
            llm.generate(list(range(start, start + 10)) * 2, FOUR)
        assert llm.stats()["kv"]["tree_num_evicted"] > 0
        hits[pin] = llm.generate([*PREFIX, 5], SamplingParams(max_tokens=1)).usage.cached_tokens
        assert_idle(llm)
        if info.pin is not None:
            assert info.pin.num_tokens == 27
            assert llm.stats()["kv"]["num_pages_pinned"] == 7
            llm.unpin(info.pin)
            llm.unpin(info.pin)
            assert llm.stats()["kv"]["num_pages_used"] == 0
    assert hits == {True: 27, False: 0}


def test_a_pin_over_the_budget_is_refused_before_any_work() -> None:
    llm, executor = fake_llm(max_pinned_pages=6)
    with pytest.raises(PinBudgetExceeded, match="needs 7 more pages, the pin budget has 6 left"):
        llm.prefill(PREFIX, pin=True)
    assert executor.batches == []
    assert llm.prefill(PREFIX[:24], pin=True).pin is not None
    with pytest.raises(PinBudgetExceeded, match="needs 1 more pages, the pin budget has 0 left"):
        llm.prefill([5], pin=True)
    assert_idle(llm)


def test_without_a_cache_there_is_nothing_to_pin() -> None:
    llm, executor = fake_llm(prefix_cache=False)
    with pytest.raises(ConfigError, match="prefix_cache=False"):
        llm.prefill(PREFIX, pin=True)
    assert executor.batches == []


def test_score_gives_each_token_its_log_probability() -> None:
    llm, executor = fake_llm()
    continuations = [[50, 51, 52], [60], [50, 51, 53]]
    scores = llm.score(PREFIX, continuations)
    for score, continuation in zip(scores, continuations, strict=True):
        expected = executor.expected_logprobs(np.array([*PREFIX, *continuation]), len(PREFIX))
        assert score.token_ids == tuple(continuation)
        assert list(score.logprobs) == expected
        assert score.total == pytest.approx(sum(expected))
    # The prompt once, and its last token again for each continuation; a continuation's last token counts
    # too, though only the row before it is wanted.
    assert rows_computed(executor) <= 26 + (1 + 3) + (1 + 1) + (1 + 3)
    assert_idle(llm)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("num_prompt", [1, 2, 4, 5, 27])
def test_scores_do_not_depend_on_the_cache(warm: bool, num_prompt: int) -> None:
    llm, executor = fake_llm()
    prompt, continuations = PREFIX[:num_prompt], [[50, 51, 52, 53, 54], [50, 51, 52, 53, 55], [50]]
    if warm:
        llm.generate([[*prompt, *c] for c in continuations], FOUR)
    scores = llm.score(prompt, continuations)
    for score, continuation in zip(scores, continuations, strict=True):
        ids = np.array([*prompt, *continuation])
        assert list(score.logprobs) == executor.expected_logprobs(ids, num_prompt)
    assert llm.score(prompt, []) == []


def test_b121_a_continuation_has_no_beginning_of_its_own() -> None:
    """Fault seen: encoding the continuations with the tokens that begin a text."""
    llm, executor = fake_llm(tokenizer=word_tokenizer(adds_bos=True))
    texts = ["w50", "w50 w51", " w50", "oops"]
    scores = llm.score("w10 w11", texts)
    assert [score.token_ids for score in scores] == [(50,), (50, 51), (50,), (2,)]
    for score in scores:
        ids = np.array([1, 10, 11, *score.token_ids])
        assert list(score.logprobs) == executor.expected_logprobs(ids, 3)


def test_explain_says_how_far_and_why() -> None:
    llm, executor = fake_llm()
    absent = llm.explain(words(*PREFIX))
    assert (absent.hit_tokens, absent.reason, absent.position) == (0, "absent", 0)
    llm.generate(PREFIX, FOUR)
    before = len(executor.batches)
    differs = llm.explain([*PREFIX[:9], 150, 151])
    assert (differs.hit_tokens, differs.num_tokens) == (9, 11)
    assert differs.reason == "differs"
    assert str(differs).splitlines()[0] == "9 of 11 tokens are in the cache."
    assert "At position 9 the prompt has 'w150' (token 150), the cache 'w19' (token 19)." in str(differs)
    assert differs.text == f"{words(*PREFIX[:9])!r} ▶ 'w150 w151'"
    assert str(llm.explain([199])).splitlines()[1] == "Nothing that begins like this is in the cache."
    whole = llm.explain(PREFIX)
    assert (whole.hit_tokens, whole.reason) == (27, "whole")
    assert "whole prompt is in the cache" in str(whole)
    assert len(executor.batches) == before


def test_explain_remembers_evictions() -> None:
    llm, _ = fake_llm(num_pages=12)
    llm.generate(PREFIX[:12], FOUR)
    for start in range(40, 90, 10):
        llm.generate(list(range(start, start + 10)) * 2, FOUR)
    found = llm.explain(PREFIX[:12])
    assert (found.reason, found.hit_tokens) == ("evicted", 0)
    assert "was evicted" in str(found)


def test_explain_without_a_tokenizer_gives_ids() -> None:
    llm, executor = fake_llm()
    bare = LLM.from_executor(executor, config=llm.config)
    bare.generate([3, 4, 5], FOUR)
    found = bare.explain([3, 9])
    assert found.text == ""
    assert str(found).endswith("At position 1 the prompt has token 9, the cache token 4.")


def test_flush_forgets_everything_and_reports_pins() -> None:
    llm, _ = fake_llm(max_pinned_pages=10)
    pin = llm.prefill(PREFIX, pin=True).pin
    report = llm.flush()
    assert report.pins_dropped == (pin,)
    assert report.num_pages_freed == 7
    assert llm.generate([*PREFIX, 5], FOUR).usage.cached_tokens == 0
    assert_idle(llm)


def test_stats_name_every_part() -> None:
    llm, _ = fake_llm(max_pinned_pages=10, min_wait_tokens=4)
    llm.generate([PREFIX, PREFIX], FOUR)
    stats = llm.stats()
    assert set(stats) >= {"model", "load", "store", "scheduler", "kv", "executor"}
    assert stats["store"]["num_tokens"] == 256
    assert stats["store"]["max_pinned_tokens"] == 40
    assert stats["scheduler"]["prompt_tokens"] == 54
    assert stats["scheduler"]["cached_tokens"] == 24  # the whole pages of a twin that is still running


def test_the_executor_must_fit_the_configuration() -> None:
    executor = FakeExecutor(num_pages=8, page_size=4)
    with pytest.raises(ConfigError, match="num_pages is 9, the executor's store has 8"):
        LLM.from_executor(executor, config=EngineConfig(num_pages=9, page_size=4))
