"""Log-probabilities over the engine: whatever the cache, evictions and preemptions do, they are those of a
cold run, one for each token.

"Fault seen" names the one-line fault that the test was seen to fail against.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
from engine_kit import PAGE_SIZES, Harness, random_ids

from radixkv.sched.batch import SequenceOutput
from radixkv.token_logprobs import TokenLogprobs


class LogprobHarness(Harness):
    """Collects what comes with the output tokens, too."""

    def take(self, outputs: Seq[SequenceOutput]) -> None:
        super().take(outputs)
        if not hasattr(self, "entries"):
            self.entries: dict[int, list[TokenLogprobs]] = {}
        for output in outputs:
            self.entries.setdefault(output.request_id, []).extend(output.token_logprobs)

    def assert_logprobs(self) -> None:
        """Of every request that ended well: full length, and what a pure function of the tokens says."""
        for request_id, final in self.finals.items():
            request = self.requests[request_id]
            sampling, prompt = request.sampling, request.prompt_ids
            everything = [*prompt.tolist(), *self.tokens[request_id]]
            if sampling.logprobs is not None:
                expected = self.executor.expected_token_logprobs(everything, len(prompt), sampling.logprobs)
                assert self.entries[request_id] == expected
            if final.finish_reason not in ("stop", "length") or sampling.prompt_logprobs is None:
                continue
            first = max(sampling.prompt_logprobs_start, 1)
            expected = self.executor.expected_token_logprobs(prompt, first, sampling.prompt_logprobs)
            assert list(final.prompt_logprobs) == expected
            assert final.logprobs == tuple(entry.logprob for entry in expected)
            assert not np.isnan(final.logprobs).any()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("num_top", [0, 3])
def test_b111_prompt_logprobs_of_a_warm_prompt_are_those_of_a_cold_one(page_size: int, num_top: int) -> None:
    """Fault seen: ``max_hit_tokens`` forgets ``logprob_start``."""
    h = LogprobHarness(num_pages=1024 // page_size, page_size=page_size)
    prompt = random_ids(1, 150)
    h.generate(prompt, 3)
    for start in (0, 100):
        final = h.generate(prompt, 3, prompt_logprobs=num_top, prompt_logprobs_start=start)
        assert len(final.prompt_logprobs) == 150 - max(start, 1)
        # Never scored, or with alternatives, which are not kept: all before the first row that is needed.
        known = num_top == 0 and start == 100
        assert final.usage.cached_tokens == (149 if known else max(start - 1, 0))
    h.assert_logprobs()
    h.assert_as_oracle()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b112_numbers_that_are_not_known_never_come_out(page_size: int) -> None:
    """What is not known is NaN, in the ledger as in the executor's buffers. Faults seen: ``known_run``
    returns all of its numbers; ``take_copies`` does not copy them (they are then computed again)."""
    h = LogprobHarness(num_pages=1024 // page_size, page_size=page_size)
    prompt = random_ids(1, 150)
    h.generate(prompt, 2, prompt_logprobs=0, prompt_logprobs_start=100)
    for start, hit in ((90, 89), (95, 149), (20, 19), (0, 0), (0, 149)):
        final = h.generate(prompt, 2, prompt_logprobs=0, prompt_logprobs_start=start)
        assert final.usage.cached_tokens == hit
    h.generate([*prompt, *random_ids(3, 70)], 2)  # its pages take the place of the partial one
    assert h.generate(prompt, 2, prompt_logprobs=0).usage.cached_tokens == 149
    longer = h.generate([*prompt, *random_ids(2, 30)], 2, prompt_logprobs=0)
    assert longer.usage.cached_tokens == 149  # the row of position 149 scores position 150
    for again, num_tokens in ((prompt, 150), (prompt[:77], 77), ([*prompt, *random_ids(2, 30)], 180)):
        assert h.generate(again, 2, prompt_logprobs=0).usage.cached_tokens == num_tokens - 1
    h.assert_logprobs()
    h.assert_as_oracle()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_b073_a_preempted_request_has_one_entry_per_output_token(page_size: int) -> None:
    """Fault seen: ``Running.preempt`` forgets the output tokens, which are then sampled again."""
    tokens = 256
    h = LogprobHarness(num_pages=tokens // page_size, page_size=page_size, decode_reserve_tokens=0)
    for seed in range(4):
        h.add(random_ids(seed, 30), 60, logprobs=2, prompt_logprobs=seed % 2)
    h.run()
    assert h.stats["num_preemptions"] > 0
    assert {len(entries) for entries in h.entries.values()} == {60}
    h.assert_logprobs()
    h.assert_as_oracle()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_random_programs_give_the_logprobs_of_a_cold_run(page_size: int, long_run: bool) -> None:
    """Shared prefixes, chunks, aborts, flushes, small pools. Fault seen: ``_allocate`` does not forget."""
    counts: Counter[str] = Counter()
    for seed in range(400 if long_run else 5):
        _random_program(np.random.default_rng([seed, page_size]), page_size, counts)
    assert counts["reused"] > 20, counts
    assert counts["preemptions"] and counts["evicted"] > 0 and counts["copies"] + (page_size == 1) > 0
    assert counts["flushes"] > 0 and counts["aborts"] > 0


def _random_program(rng: np.random.Generator, page_size: int, counts: Counter[str]) -> None:
    num_pages = max(3, int(rng.integers(120, 260)) // page_size)
    chunk = int(rng.choice([5, 17, 64, 1024]))
    h = LogprobHarness(
        num_pages=num_pages, page_size=page_size, max_batch_tokens=chunk, decode_reserve_tokens=0,
        min_wait_tokens=int(rng.choice([0, 8])), check_every=10,
        fake={"eos_one_in": 40, "vocab_size": 50},
    )  # fmt: skip
    roots = [random_ids(int(rng.integers(3)), 60, 50) for _ in range(2)]
    for _ in range(40):
        match rng.choice(["add", "add", "step", "step", "step", "abort", "flush"], p=_EVENTS):
            case "add":
                root = roots[int(rng.integers(2))][: int(rng.integers(1, 61))]
                tail = rng.integers(1, 4, int(rng.integers(0, 12))).tolist()
                h.add([*root, *tail], int(rng.integers(0, 40)), **_wishes(rng, len(root) + len(tail)))
            case "abort" if h.requests:
                counts["aborts"] += h.abort(int(rng.integers(len(h.requests)))) is not None
            case "flush":
                h.engine.kv.flush()
                counts["flushes"] += 1
            case _:
                h.step()
    h.run()
    h.assert_logprobs()
    h.assert_as_oracle()
    kv = h.engine.kv.stats()
    counts["reused"] += kv["num_logprobs_reused"]
    counts["preemptions"] += int(h.stats["num_preemptions"])
    counts["evicted"] += kv["tree_num_evicted"]
    counts["copies"] += kv["num_partial_copies"]


_EVENTS = (0.3, 0.2, 0.18, 0.12, 0.1, 0.05, 0.05)


def _wishes(rng: np.random.Generator, num_prompt: int) -> dict[str, Any]:
    wishes: dict[str, Any] = {}
    if rng.random() < 0.7:
        wishes["prompt_logprobs"] = int(rng.choice([0, 0, 0, 2]))
        wishes["prompt_logprobs_start"] = int(rng.integers(num_prompt)) * int(rng.integers(2))
    if rng.random() < 0.5:
        wishes["logprobs"] = int(rng.choice([0, 1, 5]))
    return wishes
