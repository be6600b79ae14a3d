"""CanaryStore: a K/V store of hashes. Each slot holds the hash of the whole prefix that ends in it.

A real K/V row depends on every token before it, so a page that is right for one prefix is wrong for any
other. The canary keeps just that dependence: reading a slot that was written for another prefix, copied
too short or too far, or freed and used again, gives a wrong hash, and the position and page are named.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from radixkv.kv.page_copy import PageCopy
from radixkv.types import PageIds, SlotMapping, TokenIds

Hashes = NDArray[np.uint64]

UNWRITTEN = 0
"""What a slot holds before it is written."""
_BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2**64
_BASE_INVERSE = pow(_BASE, -1, 2**64)
_MIN_POWERS = 256


class CanaryError(AssertionError):
    """A slot does not hold the prefix it was read for. ``position`` counts from the start of the read."""

    def __init__(self, message: str, position: int, page_id: int) -> None:
        super().__init__(message)
        self.position = position
        self.page_id = page_id


class PrefixHasher:
    """Chained 64-bit hash of a token prefix: ``h[i] = BASE * h[i-1] + mix(token[i])`` modulo 2**64, which is
    a polynomial, so a whole run is one cumulative sum (Karp and Rabin, 1987)."""

    def __init__(self) -> None:
        self._grow(_MIN_POWERS)

    def _grow(self, num_powers: int) -> None:
        self._powers = np.multiply.accumulate(np.full(num_powers, _BASE, np.uint64))
        self._inverses = np.multiply.accumulate(np.full(num_powers, _BASE_INVERSE, np.uint64))

    def extend(self, prefix_hash: int, token_ids: TokenIds) -> Hashes:
        """Hashes ``[num_tokens]`` of ``prefix + token_ids[:1]``, ``prefix + token_ids[:2]`` and so on.

        ``prefix_hash`` is the hash of all tokens before, or ``seed(...)`` where there are none.
        """
        num_tokens = len(token_ids)
        if num_tokens > len(self._powers):
            self._grow(max(num_tokens, 2 * len(self._powers)))
        terms = _mix(np.asarray(token_ids, np.uint64)) * self._inverses[:num_tokens]
        return (np.cumsum(terms, dtype=np.uint64) + np.uint64(prefix_hash)) * self._powers[:num_tokens]

    @staticmethod
    def seed(*fields: str | int | None) -> int:
        """The hash of the empty prefix in a namespace; 0 without fields. Fields are typed: 1 is not "1"."""
        value = 0
        for field in fields:
            for byte in repr(field).encode() + b"\0":
                value = ((value ^ byte) * 0x100000001B3 + 1) % 2**64  # FNV-1a's prime
        return value


def _mix(values: Hashes) -> Hashes:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014); wraps around."""
    values = (values + np.uint64(1)) * np.uint64(_BASE)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class CanaryStore:
    """``num_pages`` pages, and one more for padding, like the K/V store it stands for.

    ``hashes`` and ``token_ids`` are ``[(num_pages + 1) * page_size]``, by slot. Owns no pages and counts
    nothing. V1: a slot is either unwritten or holds the hash of a prefix that ends in its token.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.hasher = PrefixHasher()
        num_slots = (num_pages + 1) * page_size
        self.hashes: Hashes = np.full(num_slots, UNWRITTEN, np.uint64)
        self.token_ids: TokenIds = np.full(num_slots, -1, np.int32)
        self.num_written = 0
        self.num_copied = 0
        self.num_read = 0

    def write(self, slots: SlotMapping, token_ids: TokenIds, prefix_hash: int = 0) -> int:
        """Write a run of consecutive tokens; returns the hash of the last one.

        ``slots`` and ``token_ids`` are ``[num_tokens]``; ``prefix_hash`` is the hash of all tokens before
        the run (``PrefixHasher.seed()`` = 0 where there are none).
        """
        if len(slots) != len(token_ids):
            raise ValueError(f"{len(slots)} slots for {len(token_ids)} tokens")
        if len(slots) == 0:
            return int(prefix_hash)
        run = self.hasher.extend(prefix_hash, token_ids)
        self.hashes[slots] = run
        self.token_ids[slots] = token_ids
        self.num_written += len(slots)
        return int(run[-1])

    def copy_pages(self, copies: Seq[PageCopy]) -> None:
        """Do all copies at once: every source is read before any destination is written (C2)."""
        destinations = [copy.dst for copy in copies]
        if len(set(destinations)) != len(destinations):
            raise ValueError(f"two copies write the same page: {destinations}")
        read = []
        for copy in copies:
            if not 0 <= copy.num_tokens <= self.page_size:
                raise ValueError(f"a copy of {copy.num_tokens} tokens, a page has {self.page_size}")
            source = slice(copy.src * self.page_size, copy.src * self.page_size + copy.num_tokens)
            read.append((self.hashes[source].copy(), self.token_ids[source].copy()))
        for copy, (hashes, token_ids) in zip(copies, read, strict=True):
            target = slice(copy.dst * self.page_size, copy.dst * self.page_size + copy.num_tokens)
            self.hashes[target] = hashes
            self.token_ids[target] = token_ids
            self.num_copied += copy.num_tokens

    def poison(self, pages: PageIds) -> None:
        """Forget what these pages hold, as if they had never been written: for freed pages."""
        for page_id in pages.tolist():
            self.hashes[page_id * self.page_size : (page_id + 1) * self.page_size] = UNWRITTEN

    def read_check(self, slots: SlotMapping, token_ids: TokenIds, prefix_hash: int = 0) -> int:
        """Check that ``slots`` hold exactly the prefixes of ``token_ids``; returns the last hash.

        Both are ``[num_tokens]`` from the position on whose prefix hashes to ``prefix_hash``; usually
        from position 0. Raises ``CanaryError`` with the first wrong position and its page.
        """
        if len(slots) != len(token_ids):
            raise ValueError(f"{len(slots)} slots for {len(token_ids)} tokens")
        if len(slots) == 0:
            return int(prefix_hash)
        return self.read_check_hashes(slots, self.hasher.extend(prefix_hash, token_ids))

    def read_check_hashes(self, slots: SlotMapping, expected: Hashes) -> int:
        """``read_check`` where the caller keeps the prefix hashes of his sequence, ``[num_tokens]``."""
        found = self.hashes[slots]
        self.num_read += len(slots)
        if not np.array_equal(found, expected):
            self._raise_first_difference(slots, found != expected)
        return int(expected[-1])

    def read_chain(self, slots: SlotMapping, prefix_hash: int = 0) -> int:
        """Check that ``slots``, ``[num_tokens]`` from position 0 on, hold one unbroken prefix, whatever its
        tokens are; returns its hash. For an executor, which sees pages but not the tokens of the prefix."""
        return self.read_check(slots, self.token_ids[slots], prefix_hash)

    def _raise_first_difference(self, slots: SlotMapping, wrong: NDArray[np.bool_]) -> None:
        position = int(np.argmax(wrong))
        slot = int(slots[position])
        page_id, offset = divmod(slot, self.page_size)
        what = "was never written" if self.hashes[slot] == UNWRITTEN else "holds another prefix"
        raise CanaryError(
            f"position {position}: slot {slot} (page {page_id}, offset {offset}) {what}; "
            f"its token is {int(self.token_ids[slot])}",
            position,
            page_id,
        )

    def check(self) -> None:
        """V1: a written slot has a token."""
        assert not np.any((self.hashes != UNWRITTEN) & (self.token_ids < 0)), "V1: a hash without its token"

    def stats(self) -> dict[str, int]:
        return {
            "num_written": self.num_written,
            "num_copied": self.num_copied,
            "num_read": self.num_read,
        }
