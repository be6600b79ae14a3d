"""Beam search over full recomputation, written plainly: the oracle of the paged one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from engine_kit import Harness
from numpy.typing import NDArray


@dataclass(frozen=True)
class Found:
    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float


def plain_beam_search(
    logprobs_of: Callable[[list[int]], NDArray[np.float32]],
    prompt: list[int],
    *,
    width: int,
    max_tokens: int,
    end_ids: frozenset[int] = frozenset(),
    length_penalty: float = 1.0,
    early_stopping: bool = False,
) -> list[Found]:
    """``logprobs_of(ids)``: ``[vocab_size]`` log-probabilities of the token after ``ids``. Every step ranks
    the whole vocabulary after every beam; nothing is shared and nothing is remembered."""
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    done: list[Found] = []
    for length in range(1, max_tokens + 1):
        everything = []
        for beam, (output, before) in enumerate(live):
            after = logprobs_of([*prompt, *output])
            order = np.lexsort((np.arange(len(after)), -after))  # likeliest first, of equals the lower id
            for rank, token_id in enumerate(order.tolist()):
                everything.append((-(before + float(after[token_id])), beam, rank, token_id, output))
        everything.sort(key=lambda one: one[:3])
        live = []
        for place, (minus, _, _, token_id, output) in enumerate(everything):
            if token_id in end_ids or length == max_tokens:
                if place < width:
                    done.append(Found((*output, token_id), -minus, -minus / length**length_penalty))
            elif len(live) < width:
                live.append(((*output, token_id), -minus))
            if place >= width and len(live) == width:
                break
        done = sorted(done, key=lambda one: -one.score)[:width]
        if not live or (
            len(done) == width and (early_stopping or live[0][1] / length**length_penalty <= done[-1].score)
        ):
            break
    return done


def expected_beams(h: Harness, request_id: int) -> list[Found]:
    request = h.requests[request_id]
    vocab_size = h.executor.spec.vocab_size

    def logprobs_of(ids: list[int]) -> NDArray[np.float32]:
        top = h.executor.expected_token_logprobs([*ids, 0], len(ids), vocab_size)[0].top
        after = np.empty(vocab_size, np.float32)
        after[[token_id for token_id, _ in top]] = [logprob for _, logprob in top]
        return after

    assert request.beam is not None
    ends = () if request.sampling.ignore_eos else h.executor.spec.eos_token_ids
    return plain_beam_search(
        logprobs_of,
        request.prompt_ids.tolist(),
        width=request.beam.width,
        max_tokens=request.sampling.max_tokens,
        end_ids=frozenset((*ends, *request.sampling.stop_token_ids)),
        length_penalty=request.beam.length_penalty,
        early_stopping=request.beam.early_stopping,
    )


def assert_beams_as_oracle(h: Harness, *request_ids: int) -> None:
    for request_id in request_ids:
        found = expected_beams(h, request_id)
        request = h.requests[request_id]
        assert request.beam is not None
        for place in range(request.beam.width):
            (final,) = h.sample_finals[request_id, place]
            if place >= len(found):
                assert final.new_token_ids == () and final.cumulative_logprob == -np.inf
                continue
            assert final.new_token_ids == found[place].token_ids, f"beam {place} of request {request_id}"
            assert final.cumulative_logprob == found[place].cumulative_logprob
    h.assert_as_oracle()
