"""What a request gives without a cache: token by token by hand; beams from a fresh engine that has none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fuzz_program import NUM_ADAPTERS

from radixkv.config import EngineConfig
from radixkv.engine import Engine
from radixkv.sched.batch import SequenceOutput
from radixkv.sched.draws import draws_of
from radixkv.sequence import Request
from radixkv.testing.canary_store import PrefixHasher
from radixkv.testing.fake_executor import FakeExecutor
from radixkv.token_logprobs import TokenLogprobs

_PAGE_SIZE = 16


@dataclass
class Sample:
    """What one sample (or beam) of a request gave."""

    tokens: list[int] = field(default_factory=list)
    entries: list[TokenLogprobs] = field(default_factory=list)
    final: SequenceOutput | None = None

    def take(self, output: SequenceOutput) -> None:
        self.tokens += output.new_token_ids
        self.entries += output.token_logprobs
        if output.finish_reason is not None:
            self.final = output

    @property
    def last(self) -> SequenceOutput:
        assert self.final is not None, "it has not ended"
        return self.final


def fake_executor(fake: dict[str, Any], *, num_pages: int, page_size: int) -> FakeExecutor:
    """With all its adapters."""
    executor = FakeExecutor(num_pages=num_pages, page_size=page_size, **fake)
    for number in range(NUM_ADAPTERS):
        executor.load_adapter(number)
    return executor


class Oracle:
    """Answers for the executors that ``fake`` describes."""

    def __init__(self, fake: dict[str, Any]) -> None:
        self._fake = fake
        self._executor = fake_executor(fake, num_pages=1, page_size=1)
        self._hasher = PrefixHasher()

    def beams(self, request: Request) -> list[Sample]:
        """Each beam of ``request``, best first, from an engine of its own."""
        num_tokens = (len(request.prompt_ids) + request.sampling.max_tokens) * request.num_samples
        num_pages = 4 * request.num_samples + num_tokens // _PAGE_SIZE
        config = EngineConfig(num_pages=num_pages, page_size=_PAGE_SIZE, prefix_cache=False)
        engine = Engine.build(config, fake_executor(self._fake, num_pages=num_pages, page_size=_PAGE_SIZE))
        engine.add(request)
        samples = [Sample() for _ in range(request.num_samples)]
        while engine.has_work:
            for output in engine.step():
                samples[output.sample_index].take(output)
        return samples

    def sample(self, request: Request, index: int) -> tuple[list[int], str]:
        """One sample without any engine: its tokens and why they end. The draws are counted from what the
        request says, the end tokens from what its sampling says."""
        sampling = request.sampling
        ends = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends.update(self._executor.spec.eos_token_ids)
        prefix = int(self._hasher.extend(FakeExecutor.seed_of(request.adapter), request.prompt_ids)[-1])
        tokens: list[int] = []
        while len(tokens) < sampling.max_tokens:
            draw = 0.0
            if sampling.temperature:
                assert sampling.seed is not None, "the program gives a seed to whoever draws"
                key = (sampling.seed, request.sample_index + index, len(tokens))
                draw = float(draws_of(*(np.array([word], np.uint64) for word in key))[0])
            barred = ends if len(tokens) < sampling.min_tokens else ()
            tokens.append(self._executor._choose(prefix, barred, draw))
            if tokens[-1] in ends:
                return tokens, "stop"
            prefix = int(self._hasher.extend(prefix, np.array(tokens[-1:], np.int32))[-1])
        return tokens, "length"

    def scores(self, request: Request) -> list[float]:
        """The log-probabilities of its prompt."""
        return [entry.logprob for entry in self._prompt_entries(request, 0)]

    def prompt_entries(self, request: Request) -> list[TokenLogprobs]:
        num_top = request.sampling.prompt_logprobs
        return [] if num_top is None else self._prompt_entries(request, num_top)

    def _prompt_entries(self, request: Request, num_top: int) -> list[TokenLogprobs]:
        if request.logprob_start is None:
            return []
        start = max(request.logprob_start, 1)
        return self._executor.expected_token_logprobs(
            request.prompt_ids, start, num_top, adapter=request.adapter
        )

    def entries(self, request: Request, tokens: list[int]) -> list[TokenLogprobs]:
        num_top = request.sampling.logprobs
        if num_top is None:
            return []
        ids = request.prompt_ids.tolist()
        return self._executor.expected_token_logprobs(
            ids + tokens, len(ids), num_top, adapter=request.adapter
        )
