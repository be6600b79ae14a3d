"""Stop strings: the matcher against a plain search, then whole requests."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from fronts import assert_async_idle, assert_idle, fake_async_llm, fake_llm, run, word_tokenizer, words
from hypothesis import given
from hypothesis import strategies as st
from tokenizers_kit import byte_fallback, byte_level

from radixkv import LLM, EngineConfig, InvalidRequestError, SamplingParams
from radixkv.stop_strings import StopMatcher
from radixkv.testing import FakeExecutor
from radixkv.text_stream import TextStream

ABC = st.text("ABC", max_size=30)


def searched(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text up to the stop string that is complete first, the longest of those, by trying all."""
    for end in range(len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            hit = max(hits, key=len)
            return text[: end - len(hit)], hit
    return text, None


def fed(matcher: StopMatcher, pieces: list[str]) -> str:
    """All that is given out; at no time anything from a stop string on, nor more than need be held."""
    given_out = ""
    for piece in pieces:
        given_out += matcher.feed(piece)
    return given_out + matcher.end()


@given(
    stops=st.lists(st.text("AB", min_size=1, max_size=6), max_size=3),
    pieces=st.lists(st.text("AB", max_size=5), max_size=12),
)
def test_b116_the_matcher_finds_what_a_plain_search_finds(stops: list[str], pieces: list[str]) -> None:
    """Fault seen: forgetting how far another stop string had come, after a mismatch."""
    matcher = StopMatcher(stops)
    assert (fed(matcher, pieces), matcher.found) == searched("".join(pieces), stops)


@given(stops=st.lists(st.text("AB", min_size=1, max_size=5), min_size=1, max_size=3), text=ABC)
def test_b116_what_is_held_back_is_exactly_what_may_yet_be_a_stop_string(stops: list[str], text: str) -> None:
    """Fault seen: holding back one character less."""
    matcher = StopMatcher(stops)
    given_out = ""
    for at, char in enumerate(text, start=1):
        given_out += matcher.feed(char)
        if matcher.found is not None:
            return
        seen = text[:at]
        longest = max(
            n
            for n in range(at + 1)
            if any(stop.startswith(seen[at - n :]) and n < len(stop) for stop in stops)
        )
        assert given_out == seen[: at - longest]


def tokenisations(text: str) -> list[list[str]]:
    if not text:
        return [[]]
    return [[text[:i], *rest] for i in range(1, len(text) + 1) for rest in tokenisations(text[i:])]


@pytest.mark.parametrize("stops", [["DE", "DEF"], ["DEF", "DE"]])
def test_b116_de_and_def_in_all_tokenisations(stops: list[str]) -> None:
    """Fault seen: taking the first stop string of the list that is found in a piece."""
    for pieces in tokenisations("ABCDEF"):
        matcher = StopMatcher(stops)
        given_out = [matcher.feed(piece) for piece in pieces]
        assert "".join(given_out) == "ABC", pieces
        assert matcher.found == "DE" and matcher.end() == ""


def test_what_is_not_armed_is_plain_text() -> None:
    matcher = StopMatcher(["aba"])
    assert matcher.feed("xaba", armed=False) == "xab"  # the last a may begin another one
    assert matcher.feed("ba!") == "" and matcher.found == "aba"
    matcher = StopMatcher(["ab"])
    assert matcher.feed("ab", armed=False) + matcher.feed("ab!") == "ab" and matcher.found == "ab"


# Text streams over real tokenizers


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("includes", [False, True])
def test_b116_a_stop_string_in_mid_token_and_across_tokens(make: Any, includes: bool) -> None:
    """Every two characters of the text as a stop string, so wherever tokens begin and end. Fault seen:
    matching in each token's text alone."""
    tokenizer = make()
    text = "Hello there: 안녕, the dog \N{GRINNING FACE} sleeps. ABCDEF"
    ids = tokenizer.encode(text).tolist()
    assert tokenizer.decode(ids) == text
    for begin in range(len(text) - 1):
        stop = text[begin : begin + 2]
        params = SamplingParams(stop=stop, include_stop_str_in_output=includes)  # type: ignore[arg-type]
        stream = TextStream(tokenizer, params)
        out = ""
        for token_id in ids:
            out += stream.push(token_id)
            if stream.stopped_by is not None:
                break
        out += stream.end()
        assert stream.stopped_by == stop
        end = text.index(stop) + (2 if includes else 0)
        assert out == text[:end]


# Whole requests


def test_the_text_ends_before_the_stop_string_and_the_ids_are_what_was_sampled() -> None:
    llm, executor = fake_llm()
    ids = executor.expected_output(np.array([3, 4]), 20)
    for at in (0, 1, 7, 19):
        stop = f"w{ids[at]}"
        first = next(i for i, token_id in enumerate(ids) if f"w{token_id}".startswith(stop))
        output = llm.generate([3, 4], SamplingParams(max_tokens=20, stop=(stop, "nowhere")))
        before = words(*ids[:first])
        assert output.text == (before + " " if first else "")
        assert output.token_ids == tuple(ids[: first + 1])
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert output.usage.completion_tokens == first + 1
        included = llm.generate(
            [3, 4], SamplingParams(max_tokens=20, stop=(stop,), include_stop_str_in_output=True)
        )
        assert included.text == output.text + stop
    assert llm.stats()["scheduler"]["num_aborted"] == 0
    assert_idle(llm)


def test_what_was_held_back_comes_at_the_end_where_no_stop_string_does() -> None:
    llm, executor = fake_llm()
    ids = executor.expected_output(np.array([3, 4]), 5)
    output = llm.generate([3, 4], SamplingParams(max_tokens=5, stop=(f"w{ids[-1]} and more",)))
    assert output.text == words(*ids)
    assert (output.finish_reason, output.stop_reason) == ("length", None)


def test_the_reason_names_the_token_that_ended_it() -> None:
    llm, executor = fake_llm()
    ids = executor.expected_output(np.array([3, 4]), 8)
    output = llm.generate([3, 4], SamplingParams(max_tokens=8, stop_token_ids=(ids[2],)))
    assert (output.finish_reason, output.stop_reason) == ("stop", ids[2])
    executor.force(1, 4, 0)
    output = llm.generate([3, 4], SamplingParams(max_tokens=8))
    assert (output.finish_reason, output.stop_reason, output.token_ids[-1]) == ("stop", 0, 0)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_b040_after_a_stop_in_mid_token_only_what_was_computed_is_cached(page_size: int) -> None:
    """The follow-up with the raw ids hits all that was computed, under its own ids; the one with the visible
    text hits as far as its own ids agree. Fault seen: committing a finished request's last token, which was
    sampled and never computed."""
    executor = FakeExecutor(num_pages=4096 // page_size, page_size=page_size, vocab_size=200)
    llm, _ = fake_llm(executor=executor, num_pages=4096 // page_size, page_size=page_size)
    prompt = list(range(3, 80))
    ids = executor.expected_output(np.array(prompt), 70)
    first = next(i for i in range(40, 70) if f"w{ids[i]}" not in words(*ids[:i]) and ids[i] > 99)
    stop = f"{ids[first]}"[1:]  # the token's last digits: its w and first digit stay visible
    if stop in words(*ids[:first]):
        stop = f"{ids[first]}"
    output = llm.generate(prompt, SamplingParams(max_tokens=70, stop=(stop,)))
    assert output.finish_reason == "stop" and output.token_ids == tuple(ids[: len(output.token_ids)])
    computed = len(prompt) + len(output.token_ids) - 1
    raw = [*prompt, *output.token_ids, 190, 191]
    assert llm.explain(raw).hit_tokens == computed
    follow_up = llm.generate(raw, SamplingParams(max_tokens=5))
    assert follow_up.usage.cached_tokens == computed
    assert list(follow_up.token_ids) == executor.expected_output(np.array(raw), 5)
    assert llm.tokenizer is not None
    visible = [*prompt, *llm.tokenizer.encode(output.text).tolist(), 190]
    agree = next(i for i, (a, b) in enumerate(zip(raw, visible, strict=False)) if a != b)
    again = llm.generate(visible, SamplingParams(max_tokens=5))
    assert again.usage.cached_tokens == min(agree, len(visible) - 1)
    assert list(again.token_ids) == executor.expected_output(np.array(visible), 5)
    assert_idle(llm)


def test_many_requests_stop_at_their_own_strings_and_the_others_go_on() -> None:
    async def main() -> None:
        llm, executor = fake_async_llm(num_pages=512)
        assert llm.tokenizer is not None
        async with llm:
            prompts = [[*range(3, 20), 50 + i] for i in range(20)]
            wanted = [executor.expected_output(np.array(prompt), 30) for prompt in prompts]
            params = [
                SamplingParams(max_tokens=30, stop=(f" w{ids[i]} ",) if i % 2 else ())
                for i, ids in enumerate(wanted)
            ]
            outputs = await asyncio.gather(*map(llm.generate, prompts, params))
            for i, (output, ids) in enumerate(zip(outputs, wanted, strict=True)):
                assert output.token_ids == tuple(ids[: len(output.token_ids)])
                assert output.finish_reason == ("stop" if i % 2 else "length")
                assert output.text == searched(llm.tokenizer.decode(ids), list(params[i].stop))[0]
            await assert_async_idle(llm)

    run(main())


# min_tokens


@pytest.mark.parametrize("min_tokens", [0, 1, 5, 20])
def test_min_tokens_bars_end_tokens_and_takes_the_next_best(min_tokens: int) -> None:
    """The fake's next best token is the one its hash gives without the end token. Fault seen: barring one
    token too few."""
    executor = FakeExecutor(num_pages=64, page_size=4, vocab_size=200, eos_one_in=2)
    llm, _ = fake_llm(executor=executor)
    plain = executor.expected_output(np.array([7]), 20)
    assert len(plain) < 5
    output = llm.generate([7], SamplingParams(max_tokens=20, min_tokens=min_tokens))
    assert list(output.token_ids) == executor.expected_output(np.array([7]), 20, min_tokens=min_tokens)
    assert len(output.token_ids) > min_tokens or len(output.token_ids) == 20
    assert 0 not in output.token_ids[:min_tokens]


def test_min_tokens_bars_stop_tokens_and_stop_strings_too() -> None:
    llm, executor = fake_llm()
    ids = executor.expected_output(np.array([3, 4]), 8)
    barred = llm.generate([3, 4], SamplingParams(max_tokens=8, stop_token_ids=(ids[2],), min_tokens=4))
    assert ids[2] not in barred.token_ids[:4] and barred.token_ids[:2] == tuple(ids[:2])
    stop = f" w{ids[2]} "
    for min_tokens in range(1, 9):
        output = llm.generate([3, 4], SamplingParams(max_tokens=8, stop=(stop,), min_tokens=min_tokens))
        assert len(output.token_ids) >= min_tokens
        # The blank behind the third word comes with the fourth token.
        assert output.finish_reason == ("stop" if min_tokens <= 4 else "length")
        assert output.text == (words(*ids[:2]) if min_tokens <= 4 else words(*ids))


def test_with_ignore_eos_the_end_token_is_not_barred() -> None:
    executor = FakeExecutor(num_pages=64, page_size=4, vocab_size=200, eos_one_in=2)
    llm, _ = fake_llm(executor=executor)
    output = llm.generate([7], SamplingParams(max_tokens=20, min_tokens=10, ignore_eos=True))
    assert 0 in output.token_ids[:10] and len(output.token_ids) == 20


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop": ""}, "must be text that is not empty, got '' at position 0"),
        ({"stop": ["a", 3]}, "not empty, got 3 at position 1"),
        ({"stop": 3}, "stop must be text or a list of texts, got 3"),
        ({"stop": b"a"}, "stop must be text or a list of texts"),
        ({"min_tokens": -1}, r"min_tokens must lie in 0\.\."),
        ({"min_tokens": 5, "max_tokens": 4}, r"min_tokens must be at most max_tokens \(4\), got 5"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output must be True or False, got 1"),
    ],
)
def test_senseless_params_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**params)


def test_params_that_this_model_cannot_serve_are_refused() -> None:
    executor = FakeExecutor(num_pages=16, page_size=4, vocab_size=3)
    bare = LLM.from_executor(executor, config=EngineConfig(num_pages=16, page_size=4))
    with pytest.raises(InvalidRequestError, match=r"^prompt: stop strings need a tokenizer"):
        bare.generate([1, 2], SamplingParams(stop=("a",)))
    with pytest.raises(InvalidRequestError, match=r"^prompt: min_tokens is 2, but every token ends the text"):
        bare.generate([1, 2], SamplingParams(stop_token_ids=(1, 2), min_tokens=2))
    assert bare.generate([1, 2], SamplingParams(max_tokens=2)).text == ""
    assert SamplingParams(stop="a").stop == ("a",)  # type: ignore[arg-type]
    assert word_tokenizer().vocab_size == 200
