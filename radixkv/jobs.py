"""Jobs: calls that need several rounds of requests, written once for the blocking and the asynchronous front.

A job is a generator. It yields requests, and gets back their answers, by request id, once all have ended; its
return value is the call's. It touches the service only between steps, because whoever drives it goes on with
it only there. Where a request fails, its error is raised inside the job.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

from radixkv.answer import Answer
from radixkv.errors import ConfigError, InvalidRequestError, MisuseError, PinBudgetExceeded
from radixkv.namespace import NO_SCOPE, Scope
from radixkv.outputs import PrefillInfo, Score
from radixkv.plain import shown
from radixkv.sampling import SamplingParams
from radixkv.sequence import Request
from radixkv.service import Service

T = TypeVar("T")
_MAX_TRIES = 3
Job: TypeAlias = Generator[Sequence[Request], Mapping[int, Answer], T]


def prefill_job(service: Service, prefix: object, pin: bool, scope: Scope = NO_SCOPE) -> Job[PrefillInfo]:
    """Compute ``prefix``; hold it where ``pin``. What a flush or new weights made the cache forget meanwhile
    is computed again, so that a pin holds the whole prefix.

    Raises ``PinBudgetExceeded`` before any work where the budget could never allow it, and ``MisuseError``
    where the prefix was forgotten ``_MAX_TRIES`` times."""
    if not isinstance(pin, bool):
        raise InvalidRequestError(f"pin must be True or False, got {shown(pin)}")
    if pin and not service.config.prefix_cache:
        raise ConfigError("there is nothing to pin: the model was opened with prefix_cache=False")
    request = service.request(prefix, SamplingParams(max_tokens=0), "prefix", scope=scope)
    num_pages = -(-len(request.prompt_ids) // service.config.page_size)
    if pin and num_pages > service.config.max_pinned_pages:
        raise PinBudgetExceeded(num_pages, service.config.max_pinned_pages)
    for _ in range(_MAX_TRIES):
        answers = yield [request]
        usage = answers[request.request_id].usage
        if not pin:
            return PrefillInfo(usage.prompt_tokens, usage.cached_tokens, None)
        service.engine.follow_weights()
        held = service.engine.kv.pin(request.prompt_ids, request.namespace)
        if held.num_tokens == len(request.prompt_ids):
            return PrefillInfo(usage.prompt_tokens, usage.cached_tokens, held)
        service.unpin(held)
        request = service.request(request.prompt_ids, request.sampling, "prefix", scope=scope)
    raise MisuseError(
        f"the prefix was forgotten {_MAX_TRIES} times before it could be pinned: do not flush, nor "
        "update the weights, all the while"
    )


def score_job(
    service: Service, prompt: object, continuations: object, scope: Scope = NO_SCOPE
) -> Job[list[Score]]:
    """Log-probabilities of each continuation after ``prompt``, which is computed once."""
    if isinstance(continuations, str) or not isinstance(continuations, (list, tuple)):
        raise InvalidRequestError(
            f"continuations must be a list of texts or token ids, got {type(continuations).__name__}"
        )
    head = service.request(prompt, SamplingParams(max_tokens=0), "prompt", scope=scope)
    requests = [
        service.continuation(head.prompt_ids, continuation, index, scope)
        for index, continuation in enumerate(continuations)
    ]
    if len(requests) > 1 and len(head.prompt_ids) > 1:
        # All but its last token, which every continuation computes for its own first logits.
        shared = replace(head, prompt_ids=head.prompt_ids[:-1])
        yield [shared]
        requests = [replace(request, num_shared=len(shared.prompt_ids)) for request in requests]
    answers = yield requests
    scores = []
    for request in requests:
        ids = request.prompt_ids[len(head.prompt_ids) :]
        scores.append(Score(tuple(ids.tolist()), answers[request.request_id].scores))
    return scores
