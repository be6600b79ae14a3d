"""The job of a beam search: one request for each prompt, each with its beams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixkv.beam_params import BeamParams
from radixkv.jobs import Job
from radixkv.namespace import NO_SCOPE, Scope
from radixkv.outputs import Beam, BeamOutput
from radixkv.prompts import is_one_prompt
from radixkv.sampling import SamplingParams
from radixkv.sequence import Request
from radixkv.service import Service


def beam_settings(
    width: int,
    max_tokens: int,
    min_tokens: int,
    length_penalty: float,
    early_stopping: bool,
    stop_token_ids: Sequence[int],
    ignore_eos: bool,
) -> tuple[BeamParams, SamplingParams]:
    """What a caller passes, checked. Raises ``InvalidRequestError``."""
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,  # type: ignore[arg-type]
        ignore_eos=ignore_eos,
    )
    return BeamParams(width=width, length_penalty=length_penalty, early_stopping=early_stopping), sampling


def beam_job(
    service: Service,
    prompts: Any,
    params: BeamParams,
    sampling: SamplingParams,
    scope: Scope = NO_SCOPE,
) -> Job[list[BeamOutput]]:
    """The results in the order of ``prompts``, of which there is one or a list. Bad input raises before any
    work."""
    items = [prompts] if is_one_prompt(prompts) else list(prompts)
    named = len(items) != 1 or items[0] is not prompts
    requests: list[Request] = [
        service.request(item, sampling, "prompt", index if named else None, beam=params, scope=scope)
        for index, item in enumerate(items)
    ]
    answers = yield requests
    results = []
    for request in requests:
        output = answers[request.request_id].output()
        beams = []
        for sample in output.samples:
            if not sample.token_ids or sample.cumulative_logprob is None:
                continue  # there are fewer continuations than beams
            text = "" if service.tokenizer is None else service.tokenizer.decode(list(sample.token_ids))
            score = params.score(sample.cumulative_logprob, len(sample.token_ids))
            beams.append(Beam(text, sample.token_ids, sample.cumulative_logprob, score, sample.finish_reason))
        results.append(BeamOutput(tuple(beams), output.usage))
    return results
