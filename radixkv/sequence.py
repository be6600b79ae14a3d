"""Request (what was asked, frozen) and Sequence (how far it has come)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias

import numpy as np

from radixkv.beam_params import BeamParams
from radixkv.errors import InvalidRequestError, MisuseError
from radixkv.kv.eviction_policy import MAX_PRIORITY
from radixkv.kv.page_table import PageTable
from radixkv.namespace import under_adapter
from radixkv.plain import plain_real, plain_whole, shown
from radixkv.sampling import MAX_TOKEN_ID, SamplingParams, whole_within
from radixkv.token_logprobs import TokenLogprobs
from radixkv.types import Namespace, TokenIds

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error", "timeout"]
MIN_INT64, MAX_INT64 = -(2**63), 2**63 - 1


class Status(Enum):
    """A sequence is in exactly one of these (D1)."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One prompt and what is wanted of it. The ids are copied here and made read-only.

    ``request_id`` is any whole number of 64 bits. Raises ``InvalidRequestError`` where the prompt is not a
    non-empty flat run of whole numbers that fit a token id, or any other field is of another kind or outside
    of its range.
    """

    request_id: int
    prompt_ids: TokenIds
    sampling: SamplingParams = field(default_factory=SamplingParams)
    namespace: Namespace = ()
    logprob_start: int | None = None
    """Prompt positions from here on get the log-probability of their token; ``None``: what
    ``sampling.prompt_logprobs`` says, else none does. Position 0 has no token before it and gets none, so
    that 0 and 1 ask for the same."""
    sample_index: int = 0
    """Which of several samples of one prompt this is; part of the key of its random draws; 0 or more. Of
    several samples in one request it is the first one's."""
    priority: int = 0
    """Higher goes first where the policy is ``priority``, and is evicted last where the eviction policy is;
    the others do not look at it. Within ``-2**20..2**20``."""
    queue_timeout_s: float | None = None
    """Waiting longer than this for its first admission, it ends with ``timeout``, not computed; above 0.
    ``None``: what the engine's ``queue_timeout_s`` says."""
    adapter: int = 0
    """Index of a LoRA adapter, as the executor gave it out; 0 is the base model. Its K and V are other ones,
    so above 0 it becomes a part of ``namespace`` (see ``under_adapter``)."""
    num_shared: int = 0
    """So many tokens at the prompt's beginning belong to another request of the same call, which counts them
    for ``hit_rate``; they are not counted again."""
    beam: BeamParams | None = None
    """A beam search instead of samples; of ``sampling`` it uses what says when to stop."""

    def __post_init__(self) -> None:
        ids = token_ids_of(self.prompt_ids)
        ids.flags.writeable = False
        self._keep("prompt_ids", ids)
        self._keep("request_id", whole_within("request_id", self.request_id, MIN_INT64, MAX_INT64))
        self._keep("sample_index", whole_within("sample_index", self.sample_index, 0, MAX_INT64))
        self._keep("num_shared", whole_within("num_shared", self.num_shared, 0, len(ids)))
        self._keep("namespace", _namespace_of(self.namespace))
        self._keep("adapter", whole_within("adapter", self.adapter, 0, 2**31 - 1))
        self._keep("namespace", under_adapter(self.namespace, self.adapter))
        self._keep("priority", whole_within("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY))
        if self.queue_timeout_s is not None:
            timeout_s = plain_real(self.queue_timeout_s)
            if timeout_s is None or not timeout_s > 0:
                raise InvalidRequestError(
                    f"queue_timeout_s must be a number above 0 or None, got {shown(self.queue_timeout_s)}"
                )
            self._keep("queue_timeout_s", timeout_s)
        if not isinstance(self.sampling, SamplingParams):
            raise InvalidRequestError(f"sampling must be SamplingParams, got {shown(self.sampling)}")
        if self.logprob_start is None and self.sampling.prompt_logprobs is not None:
            self._keep("logprob_start", self.sampling.prompt_logprobs_start)
        if self.logprob_start is not None:
            start = whole_within("logprob_start", self.logprob_start, MIN_INT64, MAX_INT64)
            self._keep("logprob_start", start)
            if not 0 <= start < len(ids):
                raise InvalidRequestError(
                    f"logprob_start must lie in 0..{len(ids) - 1} (the prompt's positions), got {start}; "
                    "unless it is given, it is sampling's prompt_logprobs_start"
                )
        if self.beam is not None:
            self._refuse_unfit_beam()

    def _refuse_unfit_beam(self) -> None:
        """A beam search takes the likeliest tokens as the model has them."""
        if not isinstance(self.beam, BeamParams):
            raise InvalidRequestError(f"beam must be BeamParams, got {shown(self.beam)}")
        sampling = self.sampling
        if sampling.max_tokens == 0:
            raise InvalidRequestError("a beam search needs max_tokens of at least 1, got 0")
        unused = {
            name: value
            for name, value in (
                ("temperature", sampling.temperature), ("n", sampling.num_samples - 1),
                ("penalties", sampling.has_penalties), ("logit_bias", sampling.logit_bias),
                ("logprobs", sampling.num_logprobs),
            )
            if value
        }  # fmt: skip
        if unused:
            raise InvalidRequestError(f"a beam search does not go with {', '.join(unused)}")

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def max_hit_tokens(self) -> int:
        """How much of the prompt may come from the cache: at least one token is computed (M3), and with
        ``logprob_start`` so is the one before each position whose log-probability is wanted."""
        limit = len(self.prompt_ids) - 1
        if self.logprob_start is not None:
            limit = min(limit, max(self.logprob_start - 1, 0))
        return limit

    @property
    def num_prompt_alternatives(self) -> int:
        """How many alternatives each scored prompt position gets."""
        return self.sampling.prompt_logprobs or 0

    @property
    def num_samples(self) -> int:
        """Sequences that run at once, when the prompt is computed: samples, or beams."""
        return self.sampling.num_samples if self.beam is None else self.beam.width

    @property
    def max_computed_tokens(self) -> int:
        """Tokens whose K/V may ever be needed: the last sampled token is never computed."""
        return len(self.prompt_ids) + max(self.sampling.max_tokens - 1, 0)


def token_ids_of(values: object) -> TokenIds:
    """A fresh ``[num_tokens]`` int32 array of a non-empty flat run of whole numbers (a list, a tuple or an
    array), or ``InvalidRequestError``. A masked array is refused: what its mask means for a prompt is
    anybody's guess."""
    if isinstance(values, np.ma.MaskedArray):
        raise InvalidRequestError("token ids must not be a masked array: pass what is to be left of it")
    if isinstance(values, (list, tuple)) and not _is_plain(values):
        _refuse_unless_whole(values)
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidRequestError(f"a prompt is a flat list of token ids: {error}") from None
    if array.ndim != 1:
        raise InvalidRequestError(
            f"a prompt is a flat list of token ids, got {type(values).__name__} of {array.ndim} dimensions"
        )
    if array.size == 0:
        raise InvalidRequestError("the prompt is empty; at least 1 token is needed")
    if array.dtype.kind not in "iu":
        raise InvalidRequestError(f"token ids must be whole numbers, got an array of {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > MAX_TOKEN_ID:
        raise InvalidRequestError(f"token ids must lie in 0..{MAX_TOKEN_ID}, got {low if low < 0 else high}")
    return array.astype(np.int32)  # a copy: the caller may write his own


def _token_id_of(value: object) -> int:
    whole = plain_whole(value)
    if whole is None or not 0 <= whole <= MAX_TOKEN_ID:
        raise MisuseError(f"a token id is a whole number in 0..{MAX_TOKEN_ID}, got {shown(value)}")
    return whole


def _is_plain(values: list[object] | tuple[object, ...]) -> bool:
    """Whether all are Python's own whole numbers of 31 bits; quicker than to look at each."""
    return set(map(type, values)) == {int} and 0 <= min(values) <= max(values) <= MAX_TOKEN_ID  # type: ignore[type-var, operator]


def _refuse_unless_whole(values: list[object] | tuple[object, ...]) -> None:
    """Before numpy makes numbers of truth values, or an array of objects of what is too large."""
    for position, value in enumerate(values):
        whole = plain_whole(value)
        if whole is None:
            raise InvalidRequestError(
                f"token ids must be whole numbers in a flat list, got {shown(value)} at position {position}"
            )
        if not 0 <= whole <= MAX_TOKEN_ID:
            raise InvalidRequestError(
                f"token ids must lie in 0..{MAX_TOKEN_ID}, got {shown(whole)} at position {position}"
            )


def _namespace_of(fields: object) -> Namespace:
    """The fields as they are, text and numbers as Python's own, or ``InvalidRequestError``. No truth values:
    ``True`` would be the same namespace as ``1``."""
    if not isinstance(fields, tuple):
        raise InvalidRequestError(f"namespace must be a tuple, got {shown(fields)}")
    return tuple(
        field if field is None or type(field) is str else _plain_field(field, position)
        for position, field in enumerate(fields)
    )


def _plain_field(field: object, position: int) -> int | str:
    if isinstance(field, str):  # of a kind that may compare as it likes
        return str.__str__(field)
    if plain_whole(field) is None:
        raise InvalidRequestError(
            f"a namespace is of text, whole numbers and None, got {shown(field)} at position {position}"
        )
    return whole_within(f"namespace[{position}]", field, MIN_INT64, MAX_INT64)


class Sequence:
    """A request's state. Written by scheduler and manager only (S2).

    S1: ``num_committed_pages * page_size <= num_computed < num_tokens`` until it has finished.
    ``token_ids`` is a view of one growable int32 buffer: prompt, then outputs.
    """

    __slots__ = (
        "_buffer", "arrival", "cumulative_logprob", "finish_reason", "logprobs", "namespace", "num_cached",
        "num_committed_pages", "num_computed", "num_logprobs", "num_old_logprobs", "num_preemptions",
        "num_samples", "num_tokens", "number", "page_table", "prompt_entries", "request", "sample_index",
        "status",
    )  # fmt: skip

    def __init__(self, request: Request, page_size: int, arrival: float = 0.0, number: int = 0) -> None:
        if not isinstance(request, Request):
            raise InvalidRequestError(f"a sequence is of a Request, got {shown(request)}")
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
        """Place in the order of arrival: later arrivals have higher numbers. No two live ones have the same;
        those of one request stand together."""
        self.num_preemptions = 0
        self.logprobs: list[float] = []
        """Log-probabilities of prompt tokens from ``logprob_start`` on, in position order."""
        self.num_old_logprobs = 0
        """How many of the first of them are of an earlier cache epoch than ``namespace`` says."""
        self.prompt_entries: list[TokenLogprobs] = []
        """The same with alternatives, where the request wants those."""
        self.sample_index = 0
        """Which of its request's samples this is."""
        self.num_samples = request.num_samples
        """How many of the request's samples it stands for: all of them until the prompt is computed and they
        fork, then itself. It needs as many places among those that run."""
        self.num_logprobs = request.sampling.num_logprobs
        """Log-probabilities wanted of each output token: 0 none, 1 its own, 1 + k also the k highest."""
        self.cumulative_logprob = 0.0
        """Of the output so far, where ``num_logprobs`` is above 0."""

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

    def copy(self, number: int, sample_index: int) -> Sequence:
        """A second sequence of the same request, with the same tokens and history. It holds no pages."""
        other = Sequence(self.request, self.page_table.page_size, self.arrival, number)
        room = max(16, self.num_tokens + min(self.request.sampling.max_tokens - self.num_output, 64))
        other._buffer = np.empty(room, np.int32)
        other._buffer[: self.num_tokens] = self.token_ids
        other.num_tokens = self.num_tokens
        other.num_cached = self.num_cached
        other.num_preemptions = self.num_preemptions
        other.logprobs = list(self.logprobs)
        other.num_old_logprobs = self.num_old_logprobs
        other.prompt_entries = list(self.prompt_entries)
        other.sample_index = sample_index
        other.num_samples = 1
        other.num_logprobs = self.num_logprobs
        other.cumulative_logprob = self.cumulative_logprob
        return other

    def append(self, token_id: int) -> None:
        """Append one sampled token (not yet computed). Raises ``MisuseError`` for what is no token id."""
        if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
            token_id = _token_id_of(token_id)
        if self.num_tokens == len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.empty_like(self._buffer)])
        self._buffer[self.num_tokens] = token_id
        self.num_tokens += 1

    def truncate(self, num_tokens: int) -> None:
        """Forget tokens from the end of the output; the manager's ``truncate`` lowers the rest."""
        assert self.num_prompt <= num_tokens <= self.num_tokens
        self.num_tokens = num_tokens
