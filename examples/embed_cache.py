"""Somebody's own engine over ``radixkv.kv``: no torch, one screen.

Its "model" is a running sum: the K/V row of a token is one number that depends on its whole prefix, so a
wrong page would give wrong tokens. Run it: ``python examples/embed_cache.py``.
"""

from __future__ import annotations

import sys

import numpy as np

from radixkv.kv import KVCacheManager, PagePool, RadixTree, Request, Sequence

PAGE_SIZE, NUM_PAGES, VOCABULARY = 16, 64, 1000


class TinyEngine:
    """One request at a time; every prompt reuses whatever an earlier one computed."""

    def __init__(self) -> None:
        self.kv = KVCacheManager(PagePool(NUM_PAGES), RadixTree(PAGE_SIZE), max_pinned_pages=NUM_PAGES // 2)
        self.rows = np.zeros((NUM_PAGES, PAGE_SIZE), np.int64)  # the K/V store

    def generate(self, prompt: list[int], num_tokens: int) -> tuple[list[int], int]:
        """Greedy output, and how many tokens of the prompt came from the cache."""
        seq = Sequence(Request(request_id=0, prompt_ids=np.array(prompt, np.int32)), PAGE_SIZE)
        self.kv.acquire(seq)  # match and hold
        try:
            for _ in range(num_tokens):
                self.kv.reserve(seq, seq.num_tokens - seq.num_computed)  # room; evicts when short
                for copy in self.kv.take_copies():  # before anything is written
                    self.rows[copy.dst, : copy.num_tokens] = self.rows[copy.src, : copy.num_tokens]
                seq.append(self._forward(seq))
                self.kv.commit(seq)  # full pages are known to others from here on
        finally:
            self.kv.release(seq)
        return [int(token) for token in seq.output_ids], seq.num_cached or 0

    def _forward(self, seq: Sequence) -> int:
        """Compute what is not computed yet; returns the next token."""
        rows = self.rows.reshape(-1)
        slots = seq.page_table.slot_mapping(0, seq.num_tokens)
        state = int(rows[slots[seq.num_computed - 1]]) if seq.num_computed else 1
        for position in range(seq.num_computed, seq.num_tokens):
            state = (31 * state + int(seq.token_ids[position])) % 1_000_003
            rows[slots[position]] = state
        seq.num_computed = seq.num_tokens
        return state % VOCABULARY


def main() -> None:
    engine = TinyEngine()
    system_prompt = list(range(100, 150))
    engine.generate(system_prompt, 1)
    engine.kv.pin(system_prompt)
    for question in ([1, 2, 3], [4, 5], [1, 2, 3, 9]):
        output, num_cached = engine.generate(system_prompt + question, 4)
        num_prompt = len(system_prompt) + len(question)
        print(f"{num_cached:2} of {num_prompt} prompt tokens from the cache, output {output}")
    print(engine.kv.explain([*system_prompt, 7]))
    engine.kv.check([])
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main()
