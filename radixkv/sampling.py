"""SamplingParams: how the next token is chosen and when to stop. Frozen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from radixkv.errors import InvalidRequestError
from radixkv.plain import plain_real, plain_whole, shown

MAX_SEED = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_SAMPLES = 1024
"""Of one request."""
MAX_LOGPROBS = 20
"""Alternatives per token."""
SMALLEST_FACTOR, LARGEST_FACTOR = 1e-30, 1e30
"""Sampling computes in float32. Outside of these a temperature or a repetition penalty would become 0, or
turn a sound logit into infinity there."""
MAX_BIAS = 1e4
"""At this size float32 still tells logits 0.001 apart; at 1e9 it would forget them."""


class LogitBias(Mapping[int, float]):
    """A checked copy of a caller's mapping that nobody can change. Raises ``InvalidRequestError``."""

    __slots__ = ("_biases",)

    def __init__(self, biases: Mapping[int, float]) -> None:
        if not isinstance(biases, Mapping):
            raise InvalidRequestError(f"logit_bias must map token ids to numbers, got {shown(biases)}")
        self._biases: dict[int, float] = {}
        for key, bias in dict(biases).items():
            token_id = whole_within("logit_bias token id", key, 0, MAX_TOKEN_ID)
            self._biases[token_id] = real_within(f"logit_bias[{token_id}]", bias, -MAX_BIAS, MAX_BIAS)

    def __getitem__(self, token_id: int) -> float:
        return self._biases[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._biases)

    def __len__(self) -> int:
        return len(self._biases)

    def __hash__(self) -> int:
        return hash(frozenset(self._biases.items()))

    def __repr__(self) -> str:
        return repr(self._biases)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Greedy by default. Random draws are a pure function of (seed, sample index, output position).

    Numbers may be numpy's; they are kept as Python's own. What is passed in is copied, so that changing it
    later changes nothing here; equal params have equal hashes. Raises ``InvalidRequestError``, naming the
    field, its value and the limit.
    """

    max_tokens: int = 256
    """Output tokens at most; 0 computes the prompt and samples nothing."""
    temperature: float = 0.0
    """0 is greedy; else 1e-30 to 1e30."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this (Holtzman et al., 2020)."""
    top_k: int | None = None
    """Keep this many most probable tokens; ``None`` keeps all."""
    min_p: float = 0.0
    """Drop tokens below this share of the most probable one's probability (Nguyen et al., 2024)."""
    repetition_penalty: float = 1.0
    """Over 1 makes tokens of prompt and output less likely (Keskar et al., 2019); 1e-30 to 1e30."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already in the output; -100 to 100."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it is in the output; -100 to 100."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids; each -1e4 to 1e4, which is as good as a ban or a must."""
    seed: int | None = None
    """``None``: a fresh seed is drawn when the request is added."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop after one of these; it stays at the end of ``token_ids``."""
    ignore_eos: bool = False
    """True: the model's own end tokens do not stop the request."""
    min_tokens: int = 0
    """Nothing stops the request before it has this many output tokens: until then end tokens and
    ``stop_token_ids`` cannot be chosen, and stop strings are plain text. At most ``max_tokens``."""
    stop: tuple[str, ...] = ()
    """Stop strings; one ``str`` is taken as one. The text ends before the one that is complete first.
    Special tokens are no text: they belong into ``stop_token_ids``."""
    include_stop_str_in_output: bool = False
    """True: the text ends behind the stop string instead."""
    logprobs: int | None = None
    """Log-probabilities of output tokens, with this many alternatives each, 0 to 20; ``None``: none. They
    are of the model's raw logits, before temperature, penalties, bias and cuts."""
    prompt_logprobs: int | None = None
    """The same of prompt tokens. Alternatives are not cached: above 0, the prompt is computed anew from
    ``prompt_logprobs_start`` on."""
    prompt_logprobs_start: int = 0
    """Prompt position of the first one; what lies before it may come from the cache in any case."""
    n: int = 1
    """Samples to return. The prompt is computed once; each sample has draws of its own, so that greedy ones
    are equal."""
    best_of: int | None = None
    """Samples to run, of which the ``n`` with the highest mean log-probability per token are returned, best
    first; ``None``: ``n``."""

    def __post_init__(self) -> None:
        self._keep("max_tokens", whole_within("max_tokens", self.max_tokens, 0, 2**31 - 1))
        self._keep("temperature", _factor("temperature", self.temperature, or_zero=True))
        self._keep("top_p", real_within("top_p", self.top_p, 0.0, 1.0))
        if self.top_p == 0.0:
            raise InvalidRequestError("top_p must be above 0, got 0.0")
        if self.top_k is not None:
            self._keep("top_k", whole_within("top_k", self.top_k, 1, 2**31 - 1))
        self._keep("min_p", real_within("min_p", self.min_p, 0.0, 1.0))
        self._keep("repetition_penalty", _factor("repetition_penalty", self.repetition_penalty))
        for name in ("presence_penalty", "frequency_penalty"):
            self._keep(name, real_within(name, getattr(self, name), -100.0, 100.0))
        if self.seed is not None:
            self._keep("seed", whole_within("seed", self.seed, 0, MAX_SEED))
        if not isinstance(self.logit_bias, LogitBias):
            self._keep("logit_bias", LogitBias(self.logit_bias))
        self._keep("stop_token_ids", _stop_ids(self.stop_token_ids))
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be True or False, got {shown(getattr(self, name))}")
        self._keep("min_tokens", whole_within("min_tokens", self.min_tokens, 0, 2**31 - 1))
        if self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        self._keep("stop", _stop_strings(self.stop))
        self._keep("n", whole_within("n", self.n, 1, MAX_SAMPLES))
        if self.best_of is not None:
            self._keep("best_of", whole_within("best_of", self.best_of, 1, MAX_SAMPLES))
            if self.best_of < self.n:
                raise InvalidRequestError(f"best_of must be at least n ({self.n}), got {self.best_of}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._keep(name, whole_within(name, getattr(self, name), 0, MAX_LOGPROBS))
        start = whole_within("prompt_logprobs_start", self.prompt_logprobs_start, 0, MAX_TOKEN_ID)
        self._keep("prompt_logprobs_start", start)
        if start and self.prompt_logprobs is None:
            raise InvalidRequestError(
                f"prompt_logprobs_start is {start}, but prompt_logprobs is None: it asks for nothing"
            )

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def num_samples(self) -> int:
        """Samples that run."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_logprobs(self) -> int:
        """Log-probabilities that an output token needs: 0 none, 1 its own, 1 + k also the k highest."""
        if self.logprobs is not None:
            return 1 + self.logprobs
        return 1 if self.num_samples > self.n else 0

    @property
    def has_penalties(self) -> bool:
        """Whether sampling needs the tokens seen so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def whole_within(name: str, value: object, low: int, high: int) -> int:
    """``value`` as an ``int``, or ``InvalidRequestError`` where it is no whole number in ``low..high``."""
    whole = plain_whole(value)
    if whole is None:
        raise InvalidRequestError(f"{name} must be a whole number, got {shown(value)}")
    if not low <= whole <= high:
        raise InvalidRequestError(f"{name} must lie in {low}..{high}, got {shown(whole)}")
    return whole


def real_within(name: str, value: object, low: float, high: float) -> float:
    """``value`` as a ``float``, or ``InvalidRequestError`` where it is no finite number in ``low..high``."""
    real = plain_real(value)
    if real is None:
        raise InvalidRequestError(f"{name} must be a number, got {shown(value)}")
    if not low <= real <= high or not math.isfinite(real):
        raise InvalidRequestError(f"{name} must be finite and lie in {low}..{high}, got {shown(value)}")
    return float(real)


def _factor(name: str, value: object, *, or_zero: bool = False) -> float:
    if or_zero and plain_real(value) == 0:
        return 0.0
    try:
        return real_within(name, value, SMALLEST_FACTOR, LARGEST_FACTOR)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{error} (or be 0)" if or_zero else str(error)) from None


def _stop_ids(values: object) -> tuple[int, ...]:
    """A text, a mapping and bytes can be iterated too, but are no list of ids."""
    if isinstance(values, (str, bytes, bytearray, Mapping)) or not isinstance(values, Iterable):
        raise InvalidRequestError(f"stop_token_ids must be a list of token ids, got {shown(values)}")
    try:
        items = tuple(values)
    except TypeError:  # an array without dimensions
        raise InvalidRequestError(f"stop_token_ids must be a list, got {shown(values)}") from None
    return tuple(whole_within("stop_token_ids", item, 0, MAX_TOKEN_ID) for item in items)


def _stop_strings(values: object) -> tuple[str, ...]:
    """One text, or a list of texts, none of them empty."""
    if isinstance(values, str):
        values = (values,)
    if not isinstance(values, (list, tuple)):
        raise InvalidRequestError(f"stop must be text or a list of texts, got {shown(values)}")
    for position, value in enumerate(values):
        if not isinstance(value, str) or not value:
            raise InvalidRequestError(
                f"stop strings must be text that is not empty, got {shown(value)} at position {position}"
            )
    return tuple(map(str, values))
