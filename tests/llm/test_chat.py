"""Chats: no turn is encoded twice, the template decides what is said, and the past can be changed."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import numpy as np
import pytest
from async_kit import Gate
from fronts import assert_async_idle, assert_idle, run
from tokenizers_kit import byte_fallback, byte_level

from radixkv import LLM, AsyncLLM, EngineConfig, InvalidRequestError, MisuseError, SamplingParams
from radixkv.sched.batch import Batch
from radixkv.testing import FakeExecutor
from radixkv.text import Tokenizer

PLAIN = (
    "{% for m in messages %}<hidden>{{ m['role'] }}\n{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<hidden>assistant\n{% endif %}"
)
THINKING = PLAIN.replace("m['content']", "m['content'].split('</think>')[-1]")
PAGE_SIZES = [1, 4, 16, 64]
TWENTY = SamplingParams(max_tokens=20)


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    backend = copy.deepcopy(tokenizer.backend)
    backend.chat_template = template
    return Tokenizer(backend)


def parts(page_size: int, tokenizer: Tokenizer, **fake: Any) -> tuple[FakeExecutor, Tokenizer, EngineConfig]:
    """An executor whose end token is the template's, its tokenizer and a pool of 4096 tokens."""
    num_pages = 4096 // page_size
    executor = FakeExecutor(
        num_pages=num_pages,
        page_size=page_size,
        vocab_size=tokenizer.vocab_size,
        eos_token_id=tokenizer.special_token_ids[0],
        **fake,
    )
    return executor, tokenizer, EngineConfig(num_pages=num_pages, page_size=page_size)


def open_llm(
    page_size: int = 4, template: str = PLAIN, make: Any = byte_level, **fake: Any
) -> tuple[LLM, FakeExecutor]:
    executor, tokenizer, config = parts(page_size, with_template(make(), template), **fake)
    return LLM.from_executor(executor, tokenizer, config=config), executor


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("ends_by_itself", [False, True])
def test_b092_the_next_turn_begins_with_the_real_ids(page_size: int, make: Any, ends_by_itself: bool) -> None:
    """All that was computed of what was said is a hit, though the messages encoded anew are other tokens.
    Fault seen: encoding the whole template text in each turn."""
    llm, executor = open_llm(page_size, make=make, eos_one_in=8 if ends_by_itself else None)
    assert llm.tokenizer is not None
    chat = llm.chat(system="Be brief.")
    computed = 0
    ids: list[int] = []
    for turn in range(4):
        prompt = chat._transcript.prompt({"role": "user", "content": f"say {turn}"})
        assert prompt.token_ids[:computed].tolist() == ids[:computed]
        output = chat.send(f"say {turn}", TWENTY)
        assert output.usage.cached_tokens == computed
        assert list(output.token_ids) == executor.expected_output(prompt.token_ids, 20)
        ids = [*prompt.token_ids.tolist(), *output.token_ids]
        # The last sampled token has no K/V. A special token in mid-reply is in no message: it ends the hit.
        silent = [i for i in range(len(prompt.token_ids), len(ids)) if llm.tokenizer.is_silent(ids[i])]
        computed = min([len(ids) - 1, *silent])
    anew = llm.tokenizer.encode_chat(chat.messages).tolist()
    kept = chat._transcript.prompt({"role": "user", "content": ""}).token_ids.tolist()
    assert anew[: len(kept) - 20] != kept[: len(kept) - 20]
    assert [m["role"] for m in chat.messages] == ["system", *["user", "assistant"] * 4]
    assert_idle(llm)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b093_a_follow_up_hits_all_but_the_token_without_kv(page_size: int) -> None:
    """Fault seen: releasing a finished request without its last, partial page."""
    llm, _ = open_llm(page_size)
    prompt = np.random.default_rng(1).integers(0, 300, 64)
    first = llm.generate(prompt, SamplingParams(max_tokens=64))
    follow_up = [*prompt.tolist(), *first.token_ids, *range(8)]
    second = llm.generate(follow_up, SamplingParams(max_tokens=4))
    assert (second.usage.prompt_tokens, second.usage.cached_tokens) == (136, 127)
    assert_idle(llm)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b061_after_an_aborted_turn_the_next_one_reuses_what_came_before(page_size: int) -> None:
    """The second turn fails, then is aborted; the conversation stays as it was. Fault seen: recording an
    aborted turn."""
    llm, executor = open_llm(page_size)
    chat = llm.chat()
    first = chat.send("one", TWENTY)
    before = [dict(message) for message in chat.messages]
    computed = first.usage.prompt_tokens + 19

    def fail(batch: Batch) -> None:
        raise ZeroDivisionError

    executor.before = fail
    with pytest.raises(ZeroDivisionError):
        chat.send("two", TWENTY)
    num_steps = len(executor.batches)

    def abort(batch: Batch) -> None:
        if len(executor.batches) == num_steps + 5:
            llm.engine.abort(int(batch.seq_ids[0]))

    executor.before = abort
    assert chat.send("two", TWENTY).finish_reason == "abort"
    executor.before = None
    assert chat.messages == before
    third = chat.send("three", TWENTY)
    # Behind the first turn, what the second one shares with the third: the template's markup.
    assert computed <= third.usage.cached_tokens < third.usage.prompt_tokens
    assert [m["content"] for m in chat.messages if m["role"] == "user"] == ["one", "three"]
    assert_idle(llm)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b132_going_back_and_on_reuses_the_first_turn(page_size: int) -> None:
    """And what was left behind can be evicted. Fault seen: keeping only the last turn's border."""
    llm, executor = open_llm(page_size)
    chat = llm.chat()
    first = chat.send("one", TWENTY)
    computed = first.usage.prompt_tokens + 19
    for content in ("two", "three"):
        chat.send(content, TWENTY)
    del chat.messages[2:]
    prompt = chat._transcript.prompt({"role": "user", "content": "other"})
    assert prompt.num_kept == computed + 1
    again = chat.send("other", TWENTY)
    assert computed <= again.usage.cached_tokens <= prompt.num_kept + 20
    assert list(again.token_ids) == executor.expected_output(prompt.token_ids, 20)
    assert llm.engine.kv.num_available == llm.config.num_pages
    chat.messages.clear()
    assert chat.send("one", TWENTY).token_ids == first.token_ids
    assert_idle(llm)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b090_a_template_that_leaves_out_the_thinking_is_followed(page_size: int) -> None:
    """The hit reaches the thinking's beginning, and explain names that position. Fault seen: keeping the
    sampled ids whatever the template says."""
    llm, executor = open_llm(page_size, THINKING)
    assert llm.tokenizer is not None
    chat = llm.chat()
    prompt = chat._transcript.prompt({"role": "user", "content": "one"}).token_ids
    reply = llm.tokenizer.encode("<think>the quick fox</think>Hello world").tolist()
    for i, token_id in enumerate([*reply, llm.tokenizer.special_token_ids[0]]):
        executor.force(0, len(prompt) + i, token_id)
    first = chat.send("one", SamplingParams(max_tokens=100))
    assert first.text == "<think>the quick fox</think>Hello world" and first.finish_reason == "stop"
    found = chat.explain("two")
    assert (found.reason, found.position) == ("differs", len(prompt))
    assert "Hello" in found.message and "<" in found.message
    second_prompt = chat._transcript.prompt({"role": "user", "content": "two"})
    assert second_prompt.num_kept == len(prompt)
    assert "think" not in second_prompt.text
    second = chat.send("two", TWENTY)
    assert second.usage.cached_tokens == len(prompt)
    # The thinking is what nobody will ask for any more: under pressure it goes before the conversation.
    thought = [*prompt.tolist(), *reply]
    spoken = [*second_prompt.token_ids.tolist(), *second.token_ids]
    assert llm.explain([*thought, 1]).hit_tokens == len(thought)
    num_free = llm.config.num_pages - llm.stats()["kv"]["num_pages_idle"]
    llm.generate(np.arange(num_free * page_size + 1) % 250, SamplingParams(max_tokens=1))
    assert llm.explain([*thought, 1]).hit_tokens < len(thought)
    assert llm.explain([*spoken, 1]).hit_tokens == len(spoken) - 1
    assert_idle(llm)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_b040_a_turn_that_a_stop_string_ended_goes_on_from_the_visible_text(make: Any) -> None:
    """What the user has seen is what the model is told. Fault seen: keeping the ids of the stop string."""
    llm, executor = open_llm(make=make)
    assert llm.tokenizer is not None
    chat = llm.chat()
    prompt = chat._transcript.prompt({"role": "user", "content": "one"}).token_ids
    reply = llm.tokenizer.encode_behind("Hello there the dog sleeps.").tolist()
    for i, token_id in enumerate(reply):
        executor.force(0, len(prompt) + i, token_id)
    first = chat.send("one", SamplingParams(max_tokens=len(reply), stop=("e dog",)))
    assert first.text == "Hello there th" and first.stop_reason == "e dog"
    assert chat.messages[-1]["content"] == first.text
    second = chat._transcript.prompt({"role": "user", "content": "two"})
    text = llm.tokenizer.decode(second.token_ids[len(prompt) :])
    # The tokenizer with byte fallback puts blanks around every special token.
    assert text.split() == ["Hello", "there", "th", "user", "two", "assistant"]
    assert len(prompt) < second.num_kept < len(prompt) + len(first.token_ids)
    assert chat.send("two", TWENTY).usage.cached_tokens >= second.num_kept


def test_a_reply_sent_back_word_for_word_is_spliced_in() -> None:
    """A client that knows only texts: the same messages in a new list find the remembered ids."""
    llm, _ = open_llm()
    chat = llm.chat(messages=[{"role": "system", "content": "Be brief."}])
    chat.send("one", TWENTY)
    chat.messages[:] = [dict(message) for message in chat.messages]
    assert chat._transcript.prompt({"role": "user", "content": "two"}).num_kept > 0
    chat.messages[-1]["content"] += "!"
    kept = chat._transcript.prompt({"role": "user", "content": "two"})
    assert "!<end>" in kept.text and 0 < kept.num_kept < len(kept.token_ids)


def test_what_is_no_chat_is_refused() -> None:
    llm, executor = open_llm()
    bad: list[tuple[Any, str]] = [
        ([{"role": "user"}], "a message needs role and content"),
        ([{"role": "user", "content": 3}], "maps texts to texts"),
        (["hello"], "maps texts to texts"),
    ]
    for messages, message in bad:
        with pytest.raises(InvalidRequestError, match=message):
            llm.chat(messages=messages)
    without, _ = open_llm(template="")
    with pytest.raises(InvalidRequestError, match="a chat needs a tokenizer with a chat template"):
        without.chat()
    bare = LLM.from_executor(executor, config=llm.config)
    with pytest.raises(InvalidRequestError, match="a chat needs a tokenizer"):
        bare.chat()
    chat = llm.chat()
    executor.before = lambda batch: chat.send("again")  # type: ignore[assignment]
    with pytest.raises(MisuseError, match="waits for a reply already"):
        chat.send("one", TWENTY)
    executor.before = None
    assert chat.messages == []


def test_the_asynchronous_chat_says_the_same() -> None:
    """Sent, streamed, and cancelled in the middle."""
    llm, _ = open_llm()
    chat = llm.chat()
    wanted = [chat.send(content, TWENTY) for content in ("one", "two", "three")]

    async def main() -> None:
        executor, tokenizer, config = parts(4, with_template(byte_level(), PLAIN))
        async with AsyncLLM.from_executor(executor, tokenizer, config=config) as other:
            mine = other.chat()
            first = await mine.send("one", TWENTY)
            deltas = [delta async for delta in mine.stream("two", TWENTY)]
            assert "".join(delta.text for delta in deltas) == wanted[1].text
            gate = Gate(executor)
            task = asyncio.create_task(mine.send("never", TWENTY))
            await gate.arrivals.get()
            with pytest.raises(MisuseError, match="waits for a reply already"):
                await mine.send("three")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.open()
            async for _ in mine.stream("nor this", TWENTY):
                break
            await asyncio.sleep(0)
            found = await mine.explain("three")
            assert found.hit_tokens >= deltas[-1].usage.prompt_tokens + 19
            third = await mine.send("three", TWENTY)
            assert [first.token_ids, third.token_ids] == [wanted[0].token_ids, wanted[2].token_ids]
            assert mine.messages == chat.messages
            await assert_async_idle(other)

    run(main())
