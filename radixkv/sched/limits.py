"""What a request must keep to, checked when it is added, before any work."""

from __future__ import annotations

from radixkv.config import EngineConfig, ModelSpec
from radixkv.errors import InvalidRequestError, RequestTooLargeError
from radixkv.sequence import Request


def refuse_unfit(request: Request, config: EngineConfig, spec: ModelSpec) -> None:
    """Raise where ``request`` could never be served; return where it can be, to its last token, if need be
    alone in the pool. Nothing is cut down to fit (D2)."""
    _refuse_outside_vocabulary(request, spec.vocab_size)
    _refuse_no_choice(request, spec)
    num_prompt = len(request.prompt_ids)
    max_tokens = request.sampling.max_tokens
    if num_prompt + max_tokens > spec.max_positions:
        raise RequestTooLargeError(
            f"request {request.request_id} needs {num_prompt + max_tokens} positions ({num_prompt} of "
            f"prompt, max_tokens {max_tokens}), the model has {spec.max_positions}"
        )
    _refuse_without_places(request, config)
    needed = _pages_needed(request, config.page_size)
    usable = config.num_pages - config.max_pinned_pages
    if needed > usable:
        raise RequestTooLargeError(
            f"request {request.request_id} needs {needed} pages of {config.page_size} tokens ({num_prompt} "
            f"of prompt, max_tokens {max_tokens}), the pool has {usable} ({config.num_pages} less the pin "
            f"budget of {config.max_pinned_pages}): a larger store or a smaller pin budget would take it"
        )


def _refuse_no_choice(request: Request, spec: ModelSpec) -> None:
    sampling = request.sampling
    if sampling.min_tokens == 0 or len(sampling.stop_token_ids) + len(spec.eos_token_ids) < spec.vocab_size:
        return
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else spec.eos_token_ids)}
    if len(ends) >= spec.vocab_size:
        raise InvalidRequestError(
            f"request {request.request_id}: min_tokens is {sampling.min_tokens}, but every token "
            "ends the text"
        )


def _refuse_without_places(request: Request, config: EngineConfig) -> None:
    """All samples of a request fork in one step, and from then on each computes a token in every step."""
    places = min(config.max_running, config.max_batch_tokens)
    if request.num_samples > places:
        what = "samples (n, best_of)" if request.beam is None else "beams"
        raise RequestTooLargeError(
            f"request {request.request_id} wants {request.num_samples} {what}, at most {places} sequences "
            f"may run at once (max_running {config.max_running}, max_batch_tokens {config.max_batch_tokens})"
        )


def _pages_needed(request: Request, page_size: int) -> int:
    """Pages without which ``request`` could not end, alone in the pool. Samples can be preempted down to one,
    so that only that one must fit. Beams run together. They share at least the whole pages of their prompt;
    and while several of them copy the last page of one parent, that page is there, too."""
    most = -(-request.max_computed_tokens // page_size)
    if request.beam is None:
        return most
    shared = len(request.prompt_ids) // page_size
    width = request.num_samples
    return shared + width * (most - shared) + width // 2


def _refuse_outside_vocabulary(request: Request, vocab_size: int) -> None:
    bad = int(request.prompt_ids.max())  # none is below 0: Request sees to that
    if bad >= vocab_size:
        position = int((request.prompt_ids == bad).argmax())
        raise InvalidRequestError(
            f"request {request.request_id}: token id {bad} at position {position} is outside the vocabulary, "
            f"0..{vocab_size - 1}"
        )
    sampling = request.sampling
    for name, num_top in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if num_top is not None and num_top > vocab_size:
            raise InvalidRequestError(
                f"request {request.request_id}: {name} asks for {num_top} alternatives, the vocabulary has "
                f"{vocab_size} tokens"
            )
    for name, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
        for token_id in ids:
            if token_id >= vocab_size:
                raise InvalidRequestError(
                    f"request {request.request_id}: {name} names token id {token_id}, outside the "
                    f"vocabulary, 0..{vocab_size - 1}"
                )
