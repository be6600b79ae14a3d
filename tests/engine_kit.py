"""A whole engine over FakeExecutor, checked after every step, for tests."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from radixkv.beam_params import BeamParams
from radixkv.config import EngineConfig
from radixkv.engine import Engine
from radixkv.sampling import SamplingParams
from radixkv.sched.batch import Batch, SequenceOutput
from radixkv.sequence import Request
from radixkv.testing.fake_executor import FakeExecutor
from radixkv.types import Namespace, TokenIds

PAGE_SIZES = (1, 4, 16, 64)


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Harness:
    """Collects outputs by request, checks all invariants after each ``check_every``-th step or abort, and
    knows what should come out."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        fake: dict[str, Any] | None = None,
        check_every: int = 1,
        **config: Any,
    ) -> None:
        self.check_every = check_every
        self._num_until_check = check_every
        self.clock = FakeClock()
        self.executor = FakeExecutor(num_pages=num_pages, page_size=page_size, **(fake or {}))
        settings = EngineConfig(num_pages=num_pages, page_size=page_size, **config)
        self.engine = Engine.build(settings, self.executor, self.clock)
        self.requests: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = {}
        self.finals: dict[int, SequenceOutput] = {}
        self.num_finals: dict[int, int] = {}
        # Of all samples, by request id and sample index; those above are of the first samples.
        self.sample_tokens: dict[tuple[int, int], list[int]] = {}
        self.sample_finals: dict[tuple[int, int], list[SequenceOutput]] = {}
        self.num_steps = 0

    def add(
        self,
        prompt: Seq[int] | TokenIds,
        max_tokens: int = 4,
        *,
        request_id: int | None = None,
        namespace: Namespace = (),
        logprob_start: int | None = None,
        sample_index: int = 0,
        beam: BeamParams | None = None,
        priority: int = 0,
        queue_timeout_s: float | None = None,
        **sampling: Any,
    ) -> int:
        chosen = len(self.requests) if request_id is None else request_id
        request = Request(
            request_id=chosen,
            prompt_ids=np.array(prompt, np.int32),
            sampling=SamplingParams(max_tokens=max_tokens, **sampling),
            namespace=namespace,
            logprob_start=logprob_start,
            sample_index=sample_index,
            beam=beam,
            priority=priority,
            queue_timeout_s=queue_timeout_s,
        )
        self.engine.add(request)
        self.requests[chosen] = request
        self.tokens[chosen] = []
        return chosen

    def take(self, outputs: Seq[SequenceOutput]) -> None:
        for output in outputs:
            key = (output.request_id, output.sample_index)
            self.sample_tokens.setdefault(key, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.sample_finals.setdefault(key, []).append(output)
            if output.sample_index > 0:
                continue
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.finals[output.request_id] = output
                self.num_finals[output.request_id] = self.num_finals.get(output.request_id, 0) + 1

    def step(self) -> list[SequenceOutput]:
        outputs = self.engine.step()
        self.num_steps += 1
        self.take(outputs)
        self.check_sometimes()
        return outputs

    def check_sometimes(self) -> None:
        self._num_until_check -= 1
        if self._num_until_check == 0:
            self._num_until_check = self.check_every
            self.engine.check()

    def abort(self, request_id: int) -> SequenceOutput | None:
        """The first sample's output, if any is left."""
        outputs = self.engine.abort(request_id)
        self.take(outputs)
        self.check_sometimes()
        return outputs[0] if outputs else None

    def run(self, max_steps: int = 5000) -> None:
        """Step until nothing is left; fails if that takes more than ``max_steps``."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps: {self.engine.stats()}")

    def generate(self, prompt: Seq[int] | TokenIds, max_tokens: int = 4, **kwargs: Any) -> SequenceOutput:
        """Add one request, run everything, and return its final output."""
        request_id = self.add(prompt, max_tokens, **kwargs)
        self.run()
        return self.finals[request_id]

    def expected(self, request_id: int, sample_index: int = 0) -> list[int]:
        request = self.requests[request_id]
        return self.executor.expected_output(
            request.prompt_ids,
            request.sampling.max_tokens,
            seed=request.sampling.seed,
            sample_index=request.sample_index + sample_index,
        )

    def assert_as_oracle(self) -> None:
        """Every finished sample gave what it gives without a cache, every ended one a beginning of it, and
        each got one final output. Nothing is held any more but by tree and pins."""
        for (request_id, sample_index), finals in self.sample_finals.items():
            (final,) = finals
            got = self.sample_tokens[request_id, sample_index]
            if self.requests[request_id].beam is not None:
                continue
            expected = self.expected(request_id, sample_index)
            name = f"request {request_id}, sample {sample_index}"
            if final.finish_reason in ("stop", "length"):
                assert got == expected, f"{name}: {got} instead of {expected}"
            else:
                assert got == expected[: len(got)], f"{name}: {got} does not begin {expected}"
            assert final.usage.completion_tokens == len(got)
        for request_id, request in self.requests.items():
            ended = [index for key, index in self.sample_finals if key == request_id]
            assert sorted(ended) == list(range(request.num_samples)), f"request {request_id}: {ended}"
        assert self.finals.keys() == self.requests.keys()
        self.assert_nothing_held()

    def assert_nothing_held(self) -> None:
        """Conservation at rest: what is not pinned is free or can be evicted."""
        assert not self.engine.has_work
        self.engine.check()
        stats = self.engine.kv.stats()
        assert stats["num_pages_used"] == stats["num_pages_pinned"], stats
        assert self.engine.kv.num_available == stats["num_pages"] - stats["num_pages_pinned"], stats

    @property
    def last_batch(self) -> Batch:
        return self.executor.batches[-1]

    @property
    def grants(self) -> dict[int, int]:
        """Tokens that each request computed in the last step."""
        return grants_of(self.last_batch)

    @property
    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.engine.stats()["scheduler"]
        return stats


def grants_of(batch: Batch) -> dict[int, int]:
    """Tokens that each request computes in ``batch``, in the order of the batch."""
    counts = np.diff(batch.query_indptr).tolist()
    return dict(zip(batch.request_ids.tolist(), counts, strict=True))


def random_ids(seed: int, num_tokens: int, vocab_size: int = 1000) -> list[int]:
    """Tokens without any prefix in common with those of another seed (but by chance)."""
    ids: list[int] = np.random.default_rng(seed).integers(1, vocab_size, num_tokens).tolist()
    return ids
