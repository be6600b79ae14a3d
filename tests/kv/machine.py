"""LedgerMachine: the operations. Each says beforehand what must come of it, calls the manager, compares.

Two drivers use it: a seeded one (``driver.py``) and hypothesis (``test_machine.py``); the scenarios use it
too. The machine moves K/V as an executor would, so a wrong page, slot or copy is read as a wrong hash.
Each public method that does anything is one step, and ends with ``verify``. The file is long because every
verb of the manager stands here once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from ledger_model import EVICTION_MEMORY, LedgerModel, Row, prefix_of

from radixkv.errors import OutOfPages, PinBudgetExceeded
from radixkv.kv.page_copy import PageCopy
from radixkv.kv.pins import FlushReport, Pin
from radixkv.sampling import SamplingParams
from radixkv.sequence import Request, Sequence
from radixkv.testing.canary_store import PrefixHasher
from radixkv.testing.page_oracle import IsIdle, OracleNode, num_common
from radixkv.types import Namespace, PageIds, TokenIds


@dataclass(frozen=True)
class Plan:
    """What a ``reserve`` must do."""

    fits: bool
    num_new: int
    """Pages to allocate."""
    num_victims: int
    takes_over: bool
    drops: bool
    copies_tail: bool
    takes_tail: bool
    """The tree's partial page, which the table shows too, becomes the sequence's own."""


class LedgerMachine(LedgerModel):
    """The model with hands."""

    copies_come_late = False
    """A planted fault of the executor: the copies are done after the forward."""

    # ---- acquire --------------------------------------------------------------------------------------

    def start(
        self,
        token_ids: TokenIds,
        namespace: Namespace = (),
        logprob_start: int | None = None,
        priority: int = 0,
    ) -> Row:
        """A new request, admitted at once."""
        self.next_id += 1
        request = Request(
            request_id=self.next_id, prompt_ids=token_ids, namespace=namespace, logprob_start=logprob_start,
            priority=priority, sampling=SamplingParams(max_tokens=100_000),
        )  # fmt: skip
        row = Row(Sequence(request, self.page_size))
        self.rows.append(row)
        self.acquire(row)
        return row

    def acquire(self, row: Row) -> None:
        """First admission or resumption. The hit is the oracle's, capped by what may be taken."""
        seq, request = row.seq, row.seq.request
        limit = seq.num_tokens - 1
        if request.logprob_start is not None and seq.num_prompt > 1:  # this machine scores nothing
            limit = request.max_hit_tokens
        namespace = (*request.namespace, self.epoch)
        found = self.oracle.lookup(seq.token_ids[:limit], namespace)
        if seq.num_output == 0:
            assert self.kv.peek(request) == found.num_tokens
        cached = seq.num_cached
        self.kv.acquire(seq)
        row.held, row.stale, row.num_reserved, row.admitting = True, False, 0, cached is None
        assert seq.namespace == namespace
        assert seq.num_computed == found.num_tokens, f"hit {seq.num_computed}, oracle {found.num_tokens}"
        assert tuple(seq.page_table.pages.tolist()) == found.page_ids
        assert seq.num_cached == (found.num_tokens if cached is None else cached)
        assert seq.num_committed_pages == len(found.page_ids)
        self.oracle.touch(found.path, request.priority, is_hit=not row.is_hit_counted)
        row.is_hit_counted = True
        if found.partial is not None:
            row.source, row.source_tokens = found.partial.page_id, found.partial_tokens
            row.copy_of = "partial copy"
            if len(found.partial.token_ids) < self.page_size:
                self.counts["partial tail kept and hit"] += 1
        self.verify()

    # ---- reserve --------------------------------------------------------------------------------------

    def reserve(self, row: Row, num_tokens: int) -> bool:
        """Room for ``num_tokens`` more; false where the manager rightly says ``OutOfPages``."""
        seq = row.seq
        plan = self._plan_reserve(row, num_tokens)
        stop = seq.num_computed + num_tokens
        table, source = seq.page_table.pages.copy(), row.source
        num_available, num_cached = self.kv.num_available, seq.num_cached
        counts = self.holders()
        refusal: OutOfPages | None = None
        try:
            self.kv.reserve(seq, num_tokens)
        except OutOfPages as error:
            refusal = error
        if refusal is not None:
            assert not plan.fits, f"{refusal}, but {plan}"
            assert refusal.available == num_available
            assert np.array_equal(table, seq.page_table.pages) and seq.num_computed == stop - num_tokens
            self.counts["OutOfPages"] += 1
            self.verify()
            return False
        assert plan.fits, f"more pages than there are: {plan}"
        if plan.takes_tail:
            node = self._node_of(int(table[seq.num_computed // self.page_size]))
            assert node is not None
            self.oracle.remove(node)
            self.counts["takeover of a shared tail"] += 1
        if plan.takes_over:
            self._expect_takeover(row, table)
        elif plan.drops:
            seq_start = stop - num_tokens - row.source_tokens
            assert seq.num_computed == seq_start, f"{seq.num_computed} computed, {seq_start} expected"
            if row.admitting:
                num_cached = seq_start
            row.forget_copy()
            self.counts["partial match dropped"] += 1
        assert seq.num_cached == num_cached
        if plan.drops:
            counts[source] -= 1
        self._expect_victims(plan.num_victims, lambda page_id: bool(counts[page_id] == 1))
        self._expect_table(row, plan, table, stop)
        row.num_reserved = max(row.num_reserved, stop - seq.num_computed)
        row.admitting = row.is_hit_counted = False
        self.verify()
        self.kv.check_writes(seq, row.num_reserved)
        return True

    def _plan_reserve(self, row: Row, num_tokens: int) -> Plan:
        seq, counts = row.seq, self.holders()
        table = seq.page_table
        index, begun = divmod(seq.num_computed, self.page_size)
        copies_tail = bool(begun and index < table.num_pages and counts[table.pages[index]] > 1)
        num_new = -(-(seq.num_computed + num_tokens) // self.page_size) - table.num_pages
        num_new = max(num_new, 0) + copies_tail
        num_free = int(np.count_nonzero(counts == 0))
        num_idle = len(self.oracle.idle_pages(lambda page_id: bool(counts[page_id] == 1)))
        takes_over = drops = False
        if row.source is not None and row.copy is None:
            node = self._node_of(row.source)
            if node is None:  # the tree let it go: it is taken over whenever nobody else holds it
                takes_over = bool(counts[row.source] == 1)
            elif num_new == num_free + num_idle + 1 and counts[row.source] == 2:
                takes_over = row.source_tokens == len(node.token_ids) < self.page_size
                drops = not takes_over
        num_new -= takes_over
        takes_tail = False
        if copies_tail and num_new == num_free + num_idle + 1 and counts[table.pages[index]] == 2:
            node = self._node_of(int(table.pages[index]))
            takes_tail = node is not None and len(node.token_ids) <= begun
        num_new -= takes_tail
        fits = num_new <= num_free + num_idle + drops
        num_victims = max(0, num_new - num_free)
        return Plan(fits, num_new, num_victims, takes_over, drops, copies_tail and not takes_tail, takes_tail)

    def _node_of(self, page_id: int) -> OracleNode | None:
        return next((node for _, node in self.oracle.nodes() if node.page_id == page_id), None)

    def _expect_takeover(self, row: Row, table: PageIds) -> None:
        assert row.source is not None
        assert row.seq.page_table.pages[len(table)] == row.source, "the page was not taken over"
        node = self._node_of(row.source)
        if node is not None:
            self.oracle.remove(node)
        row.forget_copy()
        self.counts["takeover"] += 1

    def _expect_victims(self, num_victims: int, is_idle: IsIdle) -> None:
        """The oracle evicts the same number; ``verify`` then compares what is left."""
        for _ in range(num_victims):
            victim = self.oracle.next_victim(is_idle)
            assert victim is not None and victim.parent is not None
            namespace = next(n for n, node in self.oracle.nodes() if node is victim)
            self.evicted.append((namespace, prefix_of(victim)))
            head = victim.parent
            if head.page_id >= 0 and len(head.children) == 1 and not is_idle(head.page_id):
                self.counts["trim beside a held head"] += 1
            self.oracle.evict_one(victim)

    def _expect_table(self, row: Row, plan: Plan, table: PageIds, stop: int) -> None:
        pages = row.seq.page_table.pages
        expected = max(-(-stop // self.page_size), len(table))
        assert len(pages) == expected, f"{len(pages)} pages for {stop} tokens"
        kept = len(table)
        if plan.copies_tail:
            kept, begun = divmod(row.seq.num_computed, self.page_size)
            old, new = int(table[kept]), int(pages[kept])
            row.source, row.source_tokens, row.copy = old, begun, PageCopy(old, new, begun)
            others = [r for r in self.rows if r is not row and r.held and old in r.seq.page_table.pages]
            row.copy_of = "copy-on-write from a fork" if others else "copy-on-write of a committed page"
            assert np.array_equal(pages[kept + 1 : len(table)], table[kept + 1 :])
        elif row.source is not None and row.copy is None:
            row.copy = PageCopy(row.source, int(pages[len(table)]), row.source_tokens)
        assert np.array_equal(pages[:kept], table[:kept]), "reserve changed pages that it should keep"

    # ---- the forward ----------------------------------------------------------------------------------

    def forward(
        self, sampled: list[int], *, ends: tuple[int, ...] = (), rejects: int = 0, fails: bool = False
    ) -> None:
        """One step of all rows with room: copies, writes, then ``commit`` (or ``release`` for those that
        end). ``sampled`` gives the tokens to append, ``ends`` indices among these rows. ``rejects`` output
        tokens are cut off before the commit, as speculative decoding does. A forward that fails writes
        nothing that counts, and all of its rows are released."""
        rows = [row for row in self.rows if row.held and row.num_reserved]
        expected = {row.copy for row in self.rows if row.copy is not None}
        copies = self.kv.take_copies()
        assert len(copies) == len(expected) and set(copies) == expected, f"{copies}, expected {expected}"
        if not self.copies_come_late:
            self.store.copy_pages(copies)
        copied = {id(row): row.source_tokens for row in rows if row.copy is not None}
        for row in self.rows:
            if row.copy is not None:
                self.counts[row.copy_of] += 1
                row.forget_copy()
        if fails:
            for row in rows:
                self._release(row, undone=copied.get(id(row), 0))
            self.verify()
            return
        for row in rows:
            self._write(row)
        if self.copies_come_late:
            self.store.copy_pages(copies)
        for row in rows:
            self.read_row(row)
        for number, row in enumerate(rows):
            if row.seq.num_computed == row.seq.num_tokens:
                row.seq.append(sampled[number % len(sampled)])
            if rejects:
                self._truncate(row, max(row.seq.num_prompt, row.seq.num_tokens - rejects))
            if number in ends:
                self._release(row)
                self.rows.remove(row)
            else:
                self.commit(row)
        self.verify()

    def _write(self, row: Row) -> None:
        seq = row.seq
        num = min(row.num_reserved, seq.num_tokens - seq.num_computed)
        start, stop = seq.num_computed, seq.num_computed + num
        slots = seq.page_table.slot_mapping(start, stop)
        counts = self.kv.pool.ref_count[slots // self.page_size]
        assert np.all(counts == 1), f"W1: positions {start}..{stop - 1} are written on shared pages"
        hashes = self.hashes_of(seq.token_ids[:stop], seq.namespace)
        if start:  # what attention would read
            self.store.read_check_hashes(seq.page_table.slot_mapping(0, start), hashes[:start])
        self.store.write(
            slots,
            seq.token_ids[start:stop],
            int(hashes[start - 1]) if start else PrefixHasher.seed(*seq.namespace),
        )
        seq.num_computed = stop
        row.num_reserved = 0

    # ---- commit, fork, truncate, release --------------------------------------------------------------

    def commit(self, row: Row) -> None:
        """Part of ``forward``."""
        seq = row.seq
        num_full = seq.num_computed // self.page_size
        expected = seq.page_table.pages.copy()
        if num_full > seq.num_committed_pages and not row.stale:
            canonical = self._expect_insert(row, num_full * self.page_size)
            self.counts["repoint"] += int(np.count_nonzero(expected[:num_full] != canonical))
            expected[:num_full] = canonical
        self.kv.commit(seq)
        assert np.array_equal(seq.page_table.pages, expected), "the table does not hold the tree's pages"
        assert seq.num_committed_pages == (seq.num_committed_pages if row.stale else num_full)

    def _expect_insert(self, row: Row, num_tokens: int) -> PageIds:
        """The oracle inserts the first tokens of a sequence; returns the tree's pages."""
        seq = row.seq
        pages = seq.page_table.pages[: -(-num_tokens // self.page_size)].tolist()
        done = self.oracle.insert(seq.token_ids[:num_tokens], pages, seq.namespace, seq.request.priority)
        if done.replaced is not None:
            self._follow(*done.replaced)
        return np.array(done.canonical, np.int32)

    def _follow(self, old: int, new: int) -> None:
        """Pins go over to the fuller page."""
        self.counts["partial tail replaced"] += 1
        for pin_id, pin in self.pins.items():
            pages = tuple(new if page == old else page for page in pin.pages)
            self.pins[pin_id] = replace(pin, pages=pages)

    def fork(self, row: Row) -> Row:
        """A second sequence with the same tokens; all computed pages are shared."""
        seq = row.seq
        child = Row(Sequence(seq.request, self.page_size), held=True, stale=row.stale)
        for token in seq.output_ids.tolist():
            child.seq.append(token)
        expected = seq.page_table.pages[: -(-seq.num_computed // self.page_size)].tolist()
        if row.source is not None:
            expected = [*expected[: (seq.num_computed - 1) // self.page_size], row.source]
        child.seq.page_table = self.kv.fork(seq)
        child.seq.num_computed, child.seq.namespace = seq.num_computed, seq.namespace
        child.seq.num_committed_pages, child.seq.num_cached = seq.num_committed_pages, seq.num_cached
        assert child.seq.page_table.pages.tolist() == expected
        self.rows.append(child)
        if row.copy is None:
            row.num_reserved = 0  # its last page is shared now: it must reserve again
        self.counts["fork"] += 1
        self.verify()
        return child

    def append(self, row: Row, token_ids: list[int]) -> None:
        """Draft tokens, not computed yet."""
        for token in token_ids:
            row.seq.append(token)
        self.verify()

    def truncate(self, row: Row, num_tokens: int) -> None:
        self._truncate(row, num_tokens)
        self.verify()

    def _truncate(self, row: Row, num_tokens: int) -> None:
        seq, size = row.seq, self.page_size
        num_computed = min(seq.num_computed, num_tokens - 1)
        committed = seq.num_committed_pages * size
        if num_computed < committed and num_computed % size:
            self.counts["truncate into a committed page"] += 1
        if row.source is not None:
            begin = (seq.num_computed - 1) // size * size if row.copy is None else self._copy_begin(row)
            if num_computed <= begin:
                row.forget_copy()
            else:
                row.source_tokens = min(row.source_tokens, num_computed - begin)
                if row.copy is not None:
                    row.copy = PageCopy(row.copy.src, row.copy.dst, row.source_tokens)
        num_pages = min(seq.page_table.num_pages, -(-num_computed // size))
        self.kv.truncate(seq, num_tokens)
        assert seq.page_table.num_pages == num_pages, "truncate did not cut the table to what is computed"
        assert (seq.num_tokens, seq.num_computed) == (num_tokens, num_computed)
        assert seq.num_committed_pages == min(committed, num_computed // size * size) // size
        row.num_reserved = 0 if row.copy is None else seq.page_table.num_slots - num_computed

    def _copy_begin(self, row: Row) -> int:
        assert row.copy is not None
        return int(np.flatnonzero(row.seq.page_table.pages == row.copy.dst)[0]) * self.page_size

    def release(self, row: Row, *, keep_row: bool = False) -> None:
        """Abort, or (``keep_row``) preemption: the row can be acquired again."""
        if row.num_reserved and keep_row:
            self.counts["preempt after reserve"] += 1
        self._release(row, undone=row.source_tokens)
        if not keep_row:
            self.rows.remove(row)
        self.verify()
        self.kv.release(row.seq)  # a second call does nothing
        self.verify()

    def _release(self, row: Row, undone: int = 0) -> None:
        """``undone``: tokens that a copy was to bring and did not."""
        seq = row.seq
        num_tokens = seq.num_computed - undone
        if num_tokens > seq.num_committed_pages * self.page_size and not row.stale:
            self._expect_insert(row, num_tokens)
        cached = None if row.admitting else seq.num_cached
        self.kv.release(seq)
        row.forget_copy()
        row.held, row.num_reserved, row.admitting = False, 0, False
        assert (seq.num_computed, seq.num_committed_pages, seq.page_table.num_pages) == (0, 0, 0)
        assert seq.num_cached == cached

    # ---- pins, flush, looking -------------------------------------------------------------------------

    def pin(
        self, token_ids: TokenIds, namespace: Namespace = (), timeout_s: float | None = None
    ) -> Pin | None:
        """``None`` where the budget rightly forbids it."""
        found = self.oracle.lookup(token_ids, (*namespace, self.epoch))
        self.oracle.touch(found.path)  # even if the budget forbids the pin
        pages = tuple(node.page_id for node in found.path)
        held = {page for pin in self.pins.values() for page in pin.pages}
        needed, left = len(set(pages) - held), self.max_pinned_pages - len(held)
        pin: Pin | None = None
        refusal: PinBudgetExceeded | None = None
        try:
            pin = self.kv.pin(token_ids, namespace, timeout_s=timeout_s)
        except PinBudgetExceeded as error:
            refusal = error
        if refusal is not None or pin is None:
            assert refusal is not None and (refusal.needed, refusal.left) == (needed, left)
            assert needed > left, f"{needed} pages refused, {left} were left"
            self.counts["pin refused"] += 1
            self.verify()
            return None
        assert needed <= left, f"{needed} pages pinned, {left} were left"
        assert (pin.pages, pin.num_tokens) == (pages, found.num_tokens)
        assert pin.deadline == (None if timeout_s is None else self.clock.now + timeout_s)
        self.pins[pin.pin_id] = pin
        self.counts["pin"] += 1
        self.verify()
        return pin

    def unpin(self, pin: Pin) -> None:
        """Twice: the second call does nothing."""
        self.pins.pop(pin.pin_id, None)
        self.kv.unpin(pin)
        self.verify()
        self.kv.unpin(pin)
        self.verify()

    def pass_time(self, seconds: float) -> None:
        """The clock goes on, and pins whose deadline has come are let go."""
        self.clock.now += seconds
        due = [
            pin for pin in self.pins.values() if pin.deadline is not None and pin.deadline <= self.clock.now
        ]
        for pin in due:
            del self.pins[pin.pin_id]
        assert {pin.pin_id for pin in self.kv.expire_pins()} == {pin.pin_id for pin in due}
        self.counts["pin expiry"] += len(due)
        self.verify()

    def flush(self) -> FlushReport:
        """Empties the tree; running rows go on with their pages and insert nothing any more."""
        if any(row.held for row in self.rows):
            self.counts["flush while running"] += 1
        dropped = sorted(self.pins)
        self.pins.clear()
        pages = self.oracle.clear()
        num_held = int(np.count_nonzero(self.holders()[pages]))
        report = self.kv.flush()
        assert sorted(pin.pin_id for pin in report.pins_dropped) == dropped
        assert (report.num_pages_freed, report.num_pages_held) == (len(pages) - num_held, num_held)
        for row in self.rows:
            row.stale = row.stale or row.held
        self.evicted.clear()
        self.counts["flush"] += 1
        self.verify()
        return report

    def explain(self, token_ids: TokenIds, namespace: Namespace = ()) -> None:
        """Length, reason and how long ago it was evicted, all from what the machine remembers."""
        full = (*namespace, self.epoch)
        said = self.kv.explain(token_ids, namespace)
        found = self.oracle.lookup(token_ids, full)
        hit = found.num_tokens
        assert (said.hit_tokens, said.position) == (hit, hit)
        others = [self.oracle.lookup(token_ids, n).num_tokens for n in self.oracle.roots if n != full]
        ago = None if hit == len(token_ids) else self._evictions_ago(token_ids, full, len(found.nodes), hit)
        last = found.nodes[-1] if found.nodes else self.oracle.roots.get(full)
        next_tokens: set[int | None] = set()
        if last is not None and hit < len(token_ids):
            rest = token_ids[len(found.nodes) * self.page_size :].tolist()
            agree = found.partial_tokens
            ways = [c.token_ids for c in last.children.values() if num_common(c.token_ids, rest) == agree]
            next_tokens = {way[agree] for way in ways if len(way) > agree}
        reason = "absent" if not next_tokens else "differs"
        if max(others, default=0) > hit:
            reason = "other_namespace"
        if ago is not None:
            reason = "evicted"
        if hit == len(token_ids):
            reason = "whole"
        assert said.reason == reason, f"said {said}, expected {reason}"
        assert said.evictions_ago == ago
        assert said.cached_token in (next_tokens or {None})
        self.counts[f"explained: {reason}"] += 1
        self.verify()

    def _evictions_ago(self, token_ids: TokenIds, namespace: Namespace, whole: int, hit: int) -> int | None:
        """Age of the eviction that made the hit shorter: the longest, of equal ones the latest."""
        size, tokens = self.page_size, token_ids.tolist()
        best, age = hit, None
        remembered = self.evicted[-EVICTION_MEMORY:]
        for number, (name, prefix) in enumerate(remembered):
            if name != namespace or -(-len(prefix) // size) != whole + 1:
                continue
            length = num_common(prefix, tokens)
            if length > best or (age is not None and length == best):
                best, age = length, len(remembered) - number
        return age

    def drain(self) -> None:
        """The end of this machine: the whole order of eviction, page by page. Nothing may follow."""
        is_idle = self.is_idle()
        expected = [node.page_id for node in self.oracle.evict(self.num_pages, is_idle)]
        assert self.tree.evict(self.num_pages, self.kv.pool.ref_count).tolist() == expected
        self.kv._publish()
