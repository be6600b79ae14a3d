"""What ``LLM`` gives back. Frozen."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.kv.manager import Pin
from radixkv.sched.batch import Usage
from radixkv.sequence import FinishReason

__all__ = ["Delta", "Output", "PrefillInfo", "PromptExplanation", "Score", "Usage"]


@dataclass(frozen=True)
class Output:
    """One prompt's result."""

    text: str
    """``token_ids`` as text, special tokens left out, up to a stop string; empty where there is no
    tokenizer."""
    token_ids: tuple[int, ...]
    """Every sampled token: an end token included, and those of a stop string."""
    finish_reason: FinishReason
    """``stop``: an end token or a stop string; ``length``: ``max_tokens``; ``abort``: somebody aborted it."""
    usage: Usage
    """``prompt_tokens``, ``cached_tokens`` of them found in the cache, ``completion_tokens``."""
    stop_reason: str | int | None = None
    """With ``stop``: the stop string, or the id of the end token, that ended it."""


@dataclass(frozen=True)
class Delta:
    """What is new about an answer that is still being written. The texts of all deltas, joined, are the
    output's text, and so with the token ids."""

    text: str
    """New text: whole characters, and nothing that may yet turn out to begin a stop string. Often empty: a
    token's text may have to wait for the next one's."""
    token_ids: tuple[int, ...]
    """New sampled tokens."""
    finish_reason: FinishReason | None
    """``None`` but in the last one."""
    usage: Usage
    """So far."""
    stop_reason: str | int | None = None
    """As in ``Output``."""


@dataclass(frozen=True)
class Score:
    """One continuation's log-probabilities (natural log, of the model's raw logits)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """``logprobs[i]`` belongs to ``token_ids[i]``, given the prompt and the tokens before it."""

    @property
    def total(self) -> float:
        """Their sum: the log-probability of the whole continuation."""
        return sum(self.logprobs)


@dataclass(frozen=True)
class PrefillInfo:
    """What ``prefill`` did."""

    num_tokens: int
    """Tokens of the prefix."""
    cached_tokens: int
    """Of these, found in the cache instead of computed."""
    pin: Pin | None
    """Holds the prefix until ``unpin``; ``None`` where no pin was asked for."""


@dataclass(frozen=True)
class PromptExplanation:
    """How much of a prompt the cache holds, and why not more. ``print`` it."""

    num_tokens: int
    hit_tokens: int
    """Tokens that would not be computed again, were the prompt sent now."""
    reason: str
    position: int
    """Position of the first token that is not found."""
    text: str
    """Text around ``position``, the place marked; empty where there is no tokenizer."""
    message: str

    def __str__(self) -> str:
        return self.message
