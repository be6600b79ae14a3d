"""What ``LLM`` gives back. Frozen."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.kv.manager import Pin
from radixkv.sched.batch import Usage
from radixkv.sequence import FinishReason

__all__ = ["Output", "PrefillInfo", "PromptExplanation", "Score", "Usage"]


@dataclass(frozen=True)
class Output:
    """One prompt's result."""

    text: str
    """``token_ids`` as text, special tokens left out; empty where the LLM has no tokenizer."""
    token_ids: tuple[int, ...]
    """Every sampled token, an end token included."""
    finish_reason: FinishReason
    """``stop``: an end token; ``length``: ``max_tokens``; ``abort``: somebody aborted it."""
    usage: Usage
    """``prompt_tokens``, ``cached_tokens`` of them found in the cache, ``completion_tokens``."""


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
