"""What a request must keep to, checked when it is added, before any work."""

from __future__ import annotations

from radixkv.config import EngineConfig, ModelSpec
from radixkv.errors import InvalidRequestError, RequestTooLargeError
from radixkv.sequence import Request


def refuse_unfit(request: Request, config: EngineConfig, spec: ModelSpec) -> None:
    """Raise where ``request`` could never be served; return where it can be, to its last token, if need be
    alone in the pool. Nothing is cut down to fit (D2)."""
    _refuse_outside_vocabulary(request, spec.vocab_size)
    num_prompt = len(request.prompt_ids)
    max_tokens = request.sampling.max_tokens
    if num_prompt + max_tokens > spec.max_positions:
        raise RequestTooLargeError(
            f"request {request.request_id} needs {num_prompt + max_tokens} positions ({num_prompt} of "
            f"prompt, max_tokens {max_tokens}), the model has {spec.max_positions}"
        )
    needed = -(-request.max_computed_tokens // config.page_size)
    usable = config.num_pages - config.max_pinned_pages
    if needed > usable:
        raise RequestTooLargeError(
            f"request {request.request_id} needs {needed} pages of {config.page_size} tokens ({num_prompt} "
            f"of prompt, max_tokens {max_tokens}), the pool has {usable} ({config.num_pages} less the pin "
            f"budget of {config.max_pinned_pages}): a larger store or a smaller pin budget would take it"
        )


def _refuse_outside_vocabulary(request: Request, vocab_size: int) -> None:
    low, high = int(request.prompt_ids.min()), int(request.prompt_ids.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
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
