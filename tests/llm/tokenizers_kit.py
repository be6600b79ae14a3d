"""Tiny tokenizers of both great families, trained on the spot."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from radixkv.detokenizer import Detokenizer
from radixkv.text import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps.",
    "Hello world! Hello there: ABCDEF, DEF and DE.",
    "안녕하세요 세계, 你好世界, \N{GRINNING FACE} and more.",
] * 4
TEXTS = [
    "the quick brown fox",
    " leading and trailing  ",
    "\N{GRINNING FACE}\N{PILE OF POO} \N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}\N{ZERO WIDTH JOINER}\N{GIRL}!",
    "한국어 텍스트 안녕",
    "日本語と中文",
    "a\N{COMBINING ACUTE ACCENT}\n\n\ttab \N{REPLACEMENT CHARACTER} end",
    "e\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}f",
    "x",
]


@functools.cache
def byte_level() -> Tokenizer:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have it: a token may end in the middle of a character."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return _wrapped(backend)


@functools.cache
def byte_fallback() -> Tokenizer:
    """SentencePiece-like BPE with byte fallback, as Llama 2 and Mistral have it: characters without a token
    come as ``<0xE4>`` and so on, and a text's first blank is the tokenizer's own."""
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", *bytes_], limit_alphabet=40, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    plain = Backend.from_str(backend.to_str().replace('"special":true', '"special":false'))
    return _wrapped(plain)


def _wrapped(backend: Backend) -> Tokenizer:
    backend.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<hidden>", special=True)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    return Tokenizer(wrapped)


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """What comes at each token, and at the end; checked against the whole on the way."""
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    pieces.append(detokenizer.end())
    assert detokenizer.end() == ""
    assert "".join(pieces) == tokenizer.decode(ids)
    return pieces
