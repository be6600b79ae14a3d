"""What ``LLM`` gives back. Frozen."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.kv.manager import Pin
from radixkv.sched.batch import Usage
from radixkv.sequence import FinishReason
from radixkv.token_logprobs import TokenLogprobs

__all__ = [
    "Beam",
    "BeamOutput",
    "Delta",
    "Output",
    "PrefillInfo",
    "PromptExplanation",
    "Sample",
    "Score",
    "Usage",
]


@dataclass(frozen=True)
class Output:
    """One prompt's result."""

    text: str
    """``token_ids`` as text, special tokens left out, up to a stop string; empty where there is no
    tokenizer."""
    token_ids: tuple[int, ...]
    """Every sampled token: an end token included, and those of a stop string."""
    finish_reason: FinishReason
    """``stop``: an end token or a stop string; ``length``: ``max_tokens``; ``abort``: somebody aborted
    it; ``timeout``: it waited too long in the queue."""
    usage: Usage
    """``prompt_tokens``, ``cached_tokens`` of them found in the cache, ``completion_tokens``."""
    stop_reason: str | int | None = None
    """With ``stop``: the stop string, or the id of the end token, that ended it."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of ``token_ids`` where ``SamplingParams.logprobs`` asks for them."""
    cumulative_logprob: float | None = None
    """Their sum; also where ``best_of`` ranks samples by it."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt, where ``SamplingParams.prompt_logprobs`` asks for them: from ``prompt_logprobs_start``,
    at least 1, on."""
    samples: tuple[Sample, ...] = ()
    """All ``n`` of them, best first where ``best_of`` is larger than ``n``. The fields above are the first
    one's; ``usage`` is that of all samples that ran, the prompt counted once."""


@dataclass(frozen=True)
class Sample:
    """One of the ``n`` samples of a prompt. The fields are those of ``Output``."""

    sample_index: int
    """Its place in ``Output.samples``."""
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    """The prompt's, and the sample's own output."""
    logprobs: tuple[TokenLogprobs, ...]
    cumulative_logprob: float | None


@dataclass(frozen=True)
class Delta:
    """What is new about a sample that is still being written. The texts of all deltas of a sample, joined,
    are its text, and so with the token ids.

    With ``best_of`` above ``n`` only the end tells which samples are returned: then there is one delta for
    each of those, at the end.
    """

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
    sample_index: int = 0
    """Which of the ``n`` samples this is."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """New ones, where they are asked for."""


def delta_of(sample: Sample) -> Delta:
    """All of a sample as its only delta."""
    return Delta(
        text=sample.text,
        token_ids=sample.token_ids,
        finish_reason=sample.finish_reason,
        usage=sample.usage,
        stop_reason=sample.stop_reason,
        sample_index=sample.sample_index,
        logprobs=sample.logprobs,
    )


@dataclass(frozen=True)
class Beam:
    """One result of a beam search."""

    text: str
    """``token_ids`` as text; empty where there is no tokenizer."""
    token_ids: tuple[int, ...]
    """The output, an end token included."""
    cumulative_logprob: float
    score: float
    """``cumulative_logprob / len(token_ids) ** length_penalty``."""
    finish_reason: FinishReason
    """``stop``: an end token; ``length``: ``max_tokens``."""


@dataclass(frozen=True)
class BeamOutput:
    """One prompt's beam search."""

    beams: tuple[Beam, ...]
    """Best first; ``beam_width`` of them, unless there are not as many outputs."""
    usage: Usage
    """The prompt once, and the tokens of all ``beams``."""


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
