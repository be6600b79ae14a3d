"""Request (what was asked, frozen) and Sequence (how far it has come)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias

import numpy as np

from radixkv.errors import InvalidRequestError
from radixkv.kv.page_table import PageTable
from radixkv.sampling import SamplingParams
from radixkv.types import Namespace, TokenIds

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]
MAX_TOKEN_ID = 2**31 - 1


class Status(Enum):
    """A sequence is in exactly one of these (D1)."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One prompt and what is wanted of it. The ids are copied here and made read-only.

    Raises ``InvalidRequestError`` where the prompt is not a non-empty flat run of whole numbers that fit a
    token id, or ``logprob_start`` lies outside it.
    """

    request_id: int
    prompt_ids: TokenIds
    sampling: SamplingParams = field(default_factory=SamplingParams)
    namespace: Namespace = ()
    logprob_start: int | None = None
    """Prompt positions from here on get the log-probability of their token; ``None``: none does. Position
    0 has no token before it and gets none, so that 0 and 1 ask for the same."""
    sample_index: int = 0
    """Which of several samples of one prompt this is; part of the key of its random draws."""

    def __post_init__(self) -> None:
        ids = token_ids_of(self.prompt_ids)
        ids.flags.writeable = False
        object.__setattr__(self, "prompt_ids", ids)
        if self.logprob_start is not None and not 0 <= self.logprob_start < len(ids):
            raise InvalidRequestError(
                f"logprob_start must lie in 0..{len(ids) - 1} (the prompt's positions), "
                f"got {self.logprob_start}"
            )

    @property
    def max_hit_tokens(self) -> int:
        """How much of the prompt may come from the cache: at least one token is computed (M3), and with
        ``logprob_start`` so is the one before each position whose log-probability is wanted."""
        limit = len(self.prompt_ids) - 1
        if self.logprob_start is not None:
            limit = min(limit, max(self.logprob_start - 1, 0))
        return limit

    @property
    def max_computed_tokens(self) -> int:
        """Tokens whose K/V may ever be needed: the last sampled token is never computed."""
        return len(self.prompt_ids) + max(self.sampling.max_tokens - 1, 0)


def token_ids_of(values: object) -> TokenIds:
    """A fresh ``[num_tokens]`` int32 array of a non-empty flat run of whole numbers, or
    ``InvalidRequestError``."""
    try:
        array = np.asarray(values)
    except ValueError as error:  # lists of unequal lengths
        raise InvalidRequestError(f"a prompt is a flat list of token ids: {error}") from None
    if array.ndim != 1:
        raise InvalidRequestError(
            f"a prompt is a flat list of token ids, got {type(values).__name__} of {array.ndim} dimensions"
        )
    if array.size == 0:
        raise InvalidRequestError("the prompt is empty; at least 1 token is needed")
    if array.dtype.kind not in "iu":
        raise InvalidRequestError(f"token ids must be whole numbers, got {array.tolist()[0]!r}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > MAX_TOKEN_ID:
        raise InvalidRequestError(f"token ids must lie in 0..{MAX_TOKEN_ID}, got {low if low < 0 else high}")
    return array.astype(np.int32)  # a copy: the caller may write his own


class Sequence:
    """A request's state. Written by scheduler and manager only (S2).

    S1: ``num_committed_pages * page_size <= num_computed < num_tokens`` until it has finished.
    ``token_ids`` is a view of one growable int32 buffer: prompt, then outputs.
    """

    __slots__ = (
        "_buffer", "arrival", "finish_reason", "logprobs", "namespace", "num_cached", "num_committed_pages",
        "num_computed", "num_preemptions", "num_tokens", "number", "page_table", "request", "status",
    )  # fmt: skip

    def __init__(self, request: Request, page_size: int, arrival: float = 0.0, number: int = 0) -> None:
        self.request = request
        prompt = request.prompt_ids
        self._buffer = np.empty(max(16, len(prompt) + min(request.sampling.max_tokens, 64)), np.int32)
        self._buffer[: len(prompt)] = prompt
        self.num_tokens = len(prompt)
        self.num_computed = 0
        """Tokens whose K/V is in the store, hit included."""
        self.num_cached: int | None = None
        """Prompt tokens found at first admission; ``None`` until then. Never changed afterwards."""
        self.num_committed_pages = 0
        """Leading pages of the table that the tree is known to hold."""
        self.page_table = PageTable(page_size)
        self.namespace: Namespace = request.namespace
        """Set by ``acquire``: the request's namespace with the cache epoch of that moment."""
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.arrival = arrival
        """Clock time of ``add``, seconds."""
        self.number = number
        """Place in the order of arrival: later arrivals have higher numbers."""
        self.num_preemptions = 0
        self.logprobs: list[float] = []
        """Log-probabilities of prompt tokens from ``logprob_start`` on, in position order."""

    @property
    def token_ids(self) -> TokenIds:
        """Prompt and output so far, ``[num_tokens]`` int32; a view, do not keep it."""
        return self._buffer[: self.num_tokens]

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def max_hit_tokens(self) -> int:
        """How many of the tokens so far may come from the cache at the next ``acquire``: all but the last,
        and none past the one before the next prompt position to be scored. Before anything was sampled or
        scored it equals the request's."""
        limit = self.num_tokens - 1
        if self.request.logprob_start is not None and self.next_scored < self.num_prompt:
            limit = min(limit, self.next_scored - 1)
        return limit

    @property
    def next_scored(self) -> int:
        """The first prompt position that still wants its log-probability; ``num_prompt`` if none does."""
        start = self.request.logprob_start
        return self.num_prompt if start is None else max(start, 1) + len(self.logprobs)

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def output_ids(self) -> TokenIds:
        return self._buffer[self.num_prompt : self.num_tokens]

    def append(self, token_id: int) -> None:
        """Append one sampled token (not yet computed)."""
        if self.num_tokens == len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.empty_like(self._buffer)])
        self._buffer[self.num_tokens] = token_id
        self.num_tokens += 1

    def truncate(self, num_tokens: int) -> None:
        """Forget tokens from the end of the output; the manager's ``truncate`` lowers the rest."""
        assert self.num_prompt <= num_tokens <= self.num_tokens
        self.num_tokens = num_tokens
