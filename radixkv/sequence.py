"""Request (what was asked, frozen) and Sequence (how far it has come)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias

import numpy as np

from radixkv.kv.page_table import PageTable
from radixkv.sampling import SamplingParams
from radixkv.types import Namespace, TokenIds

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]


class Status(Enum):
    """A sequence is in exactly one of these (D1)."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One prompt and what is wanted of it. The ids are copied here and made read-only."""

    request_id: int
    prompt_ids: TokenIds
    sampling: SamplingParams = field(default_factory=SamplingParams)
    namespace: Namespace = ()
    logprob_start: int | None = None
    """Prompt positions from here on get the log-probability of their token; ``None``: none does."""

    def __post_init__(self) -> None:
        ids = np.array(self.prompt_ids, dtype=np.int32)  # a copy: the caller may write his own
        ids.flags.writeable = False
        object.__setattr__(self, "prompt_ids", ids)

    @property
    def max_hit_tokens(self) -> int:
        """How much of the prompt may come from the cache: at least one token is computed (M3), and with
        ``logprob_start`` so is the one before each position whose log-probability is wanted."""
        limit = len(self.prompt_ids) - 1
        if self.logprob_start is not None:
            limit = min(limit, max(self.logprob_start - 1, 0))
        return limit


class Sequence:
    """A request's state. Written by scheduler and manager only (S2).

    S1: ``num_committed_pages * page_size <= num_computed < num_tokens`` until it has finished.
    ``token_ids`` is a view of one growable int32 buffer: prompt, then outputs.
    """

    __slots__ = (
        "_buffer", "arrival", "finish_reason", "logprobs", "namespace", "num_cached", "num_committed_pages",
        "num_computed", "num_preemptions", "num_tokens", "page_table", "request", "status",
    )  # fmt: skip

    def __init__(self, request: Request, page_size: int, arrival: float = 0.0) -> None:
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
