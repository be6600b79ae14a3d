"""SamplingParams: how the next token is chosen and when to stop. Frozen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from radixkv.errors import InvalidRequestError

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Greedy by default. Random draws are a pure function of (seed, sample index, output position).

    Raises ``InvalidRequestError``, naming the field, its value and the limit.
    """

    max_tokens: int = 256
    """Output tokens at most; 0 computes the prompt and samples nothing."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this (Holtzman et al., 2020)."""
    top_k: int | None = None
    """Keep this many most probable tokens; ``None`` keeps all."""
    min_p: float = 0.0
    """Drop tokens below this share of the most probable one's probability (Nguyen et al., 2024)."""
    repetition_penalty: float = 1.0
    """Over 1 makes tokens of prompt and output less likely (Keskar et al., 2019)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it is in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    seed: int | None = None
    """``None``: a fresh seed is drawn when the request is added."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop after one of these; it stays at the end of ``token_ids``."""
    ignore_eos: bool = False
    """True: the model's own end tokens do not stop the request."""

    def __post_init__(self) -> None:
        _whole("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _real("temperature", self.temperature, 0.0, math.inf)
        _real("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequestError("top_p must be above 0, got 0.0")
        if self.top_k is not None:
            _whole("top_k", self.top_k, 1, 2**31 - 1)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, math.inf)
        if self.repetition_penalty == 0.0:
            raise InvalidRequestError("repetition_penalty must be above 0, got 0.0")
        _real("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _real("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        if self.seed is not None:
            _whole("seed", self.seed, 0, MAX_SEED)
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequestError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        for token_id, bias in self.logit_bias.items():
            _whole("logit_bias token id", token_id, 0, 2**31 - 1)
            _real(f"logit_bias[{token_id}]", bias, -1e9, 1e9)
        if not isinstance(self.stop_token_ids, tuple):
            object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids", token_id, 0, 2**31 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")

    @property
    def has_penalties(self) -> bool:
        """Whether sampling needs the tokens seen so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be a whole number, got {value!r}")
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must lie in {low}..{high}, got {value}")


def _real(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequestError(f"{name} must be a number, got {value!r}")
    if not low <= value <= high or not math.isfinite(value):
        raise InvalidRequestError(f"{name} must be finite and lie in {low}..{high}, got {value}")
