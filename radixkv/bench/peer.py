"""TransformersPeer: the same prompts through transformers' own continuous batching, ``generate_batch``."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from radixkv.bench.workloads import Workload
from radixkv.errors import InternalError


@dataclass(frozen=True, eq=False)
class PeerResult:
    """Times count from the moment the requests were handed over; setting up is not part of them."""

    outputs: tuple[tuple[int, ...], ...]
    ttft_s: tuple[float, ...]
    finished_s: tuple[float, ...]
    wall_s: float


class TransformersPeer:
    """Keeps a second copy of the model as transformers made it: no packed weights, its SDPA attention.

    Its cache shares whole pages of ``PAGE_SIZE`` tokens (the library's default) between prompts.
    """

    PAGE_SIZE = 256

    def __init__(self, model: Any, *, max_batch_tokens: int, max_requests: int) -> None:
        from transformers.utils import logging

        logging.set_verbosity_error()
        self._model = model
        self._max_batch_tokens = max_batch_tokens
        self._max_requests = max_requests
        model.set_attn_implementation("sdpa")

    def run(self, workload: Workload) -> PeerResult:
        """Greedy, to full length. Raises ``InternalError`` where a request fails or ends early."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        prompts = [prompt.tolist() for prompt in workload.prompts]
        per_request = -(-(max(map(len, prompts)) + workload.max_tokens) // self.PAGE_SIZE) + 1
        results = self._model.generate_batch(
            prompts,
            generation_config=GenerationConfig(
                do_sample=False, max_new_tokens=workload.max_tokens, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                **_named_by_version(ContinuousBatchingConfig, self.PAGE_SIZE),
                num_blocks=per_request * len(prompts),
                max_batch_tokens=self._max_batch_tokens,
                max_requests_per_batch=self._max_requests,
                seed=0,
            ),
            record_timestamps=True,
        )
        done = list(results.values())
        for number, result in enumerate(done):
            if result.error is not None or len(result.generated_tokens) != workload.max_tokens:
                raise InternalError(f"transformers: request {number} failed: {result.error}")
        if len(done) != len(prompts):
            raise InternalError(f"transformers answered {len(done)} of {len(prompts)} requests")
        start = min(result.created_time for result in done)
        finished = tuple(result.timestamps[-1] - start for result in done)
        return PeerResult(
            outputs=tuple(tuple(map(int, result.generated_tokens)) for result in done),
            ttft_s=tuple(result.timestamps[0] - start for result in done),
            finished_s=finished,
            wall_s=max(finished),
        )


def _named_by_version(config: Any, page_size: int) -> dict[str, Any]:
    """Settings whose names depend on transformers' version: older ones call a page a block, and never change
    the attention by themselves."""
    known = inspect.signature(config).parameters
    if "page_size" not in known:
        return {"block_size": page_size}
    return {"page_size": page_size, "auto_switch_to_flash": False}
