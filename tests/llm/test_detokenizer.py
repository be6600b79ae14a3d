"""Detokenizer: whole characters only, joined equal to the whole, at the same cost for every token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fronts import word_tokenizer
from tokenizers_kit import TEXTS, byte_fallback, byte_level, pieces_of

from radixkv.detokenizer import CONTEXT_TOKENS, WINDOW_TOKENS, Detokenizer
from radixkv.text import Tokenizer

MakeTokenizer = Callable[[], Tokenizer]
FAMILIES: list[MakeTokenizer] = [byte_level, byte_fallback, word_tokenizer]


@pytest.mark.parametrize("make", FAMILIES)
def test_b118_any_tokens_in_any_order_joined_are_the_whole(make: MakeTokenizer) -> None:
    """Most such texts are broken in many places; special tokens and unknown ids are among them. Fault seen:
    without the context before what is new, a blank is lost at each cut (byte fallback)."""
    tokenizer = make()
    for seed in range(150):
        chooser = np.random.default_rng(seed)
        pieces_of(tokenizer, chooser.integers(0, tokenizer.vocab_size + 4, chooser.integers(0, 60)).tolist())


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_b118_any_texts_cut_anywhere(make: MakeTokenizer) -> None:
    """Characters of several tokens, with special tokens in their middle, begun and ended halfway.
    Fault seen: giving out a replacement character at the window's end (byte level); decoding inside a run of
    byte tokens (byte fallback)."""
    tokenizer = make()
    for seed in range(100):
        chooser = np.random.default_rng(seed)
        texts = [TEXTS[i] for i in chooser.integers(0, len(TEXTS), 3)]
        ids = [int(i) for text in texts for i in tokenizer.encode(text)]
        for _ in range(chooser.integers(0, 4)):
            ids.insert(int(chooser.integers(0, len(ids))), tokenizer.special_token_ids[-1])
        cut = int(chooser.integers(0, len(ids)))
        for some in (ids, ids[:cut], ids[cut:]):
            pieces_of(tokenizer, some)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", TEXTS)
def test_b118_no_piece_holds_half_a_character(make: MakeTokenizer, text: str) -> None:
    """Of a sound text every piece is sound, and as early as can be. Fault seen: pieces that end in a
    replacement character."""
    tokenizer = make()
    ids = tokenizer.encode(text).tolist()
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces).count("\N{REPLACEMENT CHARACTER}") == text.count("\N{REPLACEMENT CHARACTER}")
    if make is byte_level:
        for i in range(len(ids)):
            complete = tokenizer.decode(ids[: i + 1]).rstrip("\N{REPLACEMENT CHARACTER}")
            given_out = "".join(pieces[: i + 1])
            assert given_out.rstrip("\N{REPLACEMENT CHARACTER}") == complete


def test_b118_a_broken_tail_is_flushed_once_at_the_end() -> None:
    """Fault seen: ``end`` gives no replacement characters."""
    for tokenizer, broken in ((byte_level(), 1), (byte_fallback(), 3)):
        ids = tokenizer.encode("a\N{PILE OF POO}").tolist()[:-1]  # the emoji's last byte is missing
        pieces = pieces_of(tokenizer, ids)
        assert pieces[-1].count("\N{REPLACEMENT CHARACTER}") == broken
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces[:-1])


def test_special_tokens_marked_or_named_are_left_out() -> None:
    """``<hidden>`` is special, but none of the tokenizer's named ones. Fault seen: special ids from
    ``all_special_ids`` alone."""
    for tokenizer in (byte_level(), byte_fallback()):
        assert len(tokenizer.special_token_ids) == 2
        end, hidden = tokenizer.special_token_ids
        hello = tokenizer.encode("Hello").tolist()
        assert pieces_of(tokenizer, [hidden, *hello, end, hidden, *hello]) != []
        assert all(tokenizer.is_silent(i) for i in (end, hidden, tokenizer.vocab_size))


@pytest.mark.parametrize("make", FAMILIES)
def test_a_token_costs_the_same_however_many_came_before(
    make: MakeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in decoded tokens, on sound text and on nothing but broken bytes. Fault seen: a window that is
    never cut costs a thousand times as much."""
    tokenizer = make()
    plain = Tokenizer.decode_window
    counts: list[int] = []

    def counting(self: Tokenizer, ids: list[int], **options: Any) -> str:
        counts.append(len(ids))
        return plain(self, ids, **options)

    sound = tokenizer.encode(" w3 w4 w5".join(TEXTS[:5])).tolist() * 20
    broken = [tokenizer.encode("\N{PILE OF POO}").tolist()[-1]] * 2000  # a continuation byte, again and again
    for ids in (sound, broken):
        whole = tokenizer.decode(ids)
        monkeypatch.setattr(Tokenizer, "decode_window", counting)
        counts.clear()
        detokenizer = Detokenizer(tokenizer)
        text = "".join([detokenizer.push(i) for i in ids]) + detokenizer.end()
        monkeypatch.setattr(Tokenizer, "decode_window", plain)
        assert text == whole
        assert sum(counts) <= (WINDOW_TOKENS + CONTEXT_TOKENS) * len(ids)
