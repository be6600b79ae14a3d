"""KVCacheManager: the life of a sequence's pages. The only caller of the pool's three verbs.

The file is long because no other may call ``allocate``, ``incref`` and ``decref``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import ConfigError, InternalError, MisuseError, OutOfPages
from radixkv.kv.arguments import as_namespace, as_num_tokens, as_setting, as_timeout_s, as_token_ids
from radixkv.kv.events import Event, EventLog, Stored
from radixkv.kv.explanation import Explanation as Explanation
from radixkv.kv.finding import Finding
from radixkv.kv.hold import Hold
from radixkv.kv.invariant import require
from radixkv.kv.null_tree import NullTree
from radixkv.kv.page_copy import PageCopy
from radixkv.kv.page_pool import PagePool
from radixkv.kv.page_table import PageTable, slots_of
from radixkv.kv.pins import FlushReport as FlushReport
from radixkv.kv.pins import Pin as Pin
from radixkv.kv.pins import PinBook
from radixkv.kv.radix_tree import RadixTree
from radixkv.kv.slot_logprobs import SlotLogprobs
from radixkv.kv.tail_copy import CopyState, TailCopy
from radixkv.plain import plain_whole, shown
from radixkv.types import Namespace, PageIds, SlotMapping, TokenIds

if TYPE_CHECKING:
    from radixkv.sequence import Request, Sequence


class KVCacheManager:
    """Five verbs are a sequence's whole life: ``acquire reserve commit fork release``.

    M1: a page's count = tables that hold it + pins + copy sources of the batch being built + 1 if the tree
        holds it.
    M2: along any path from a root counts never rise, so every idle page can be evicted, leaf first.
    M3: only computed tokens are inserted, and at least one token is always left to compute.
    M4: match and hold are one call.
    M5: ``_idle_at_least`` is not above the number of idle pages; it spares counting them where they are many.
    W1: every slot written in a step is on a page whose count is 1; ``reserve`` copies where it is not.
    L1: a slot's log-probability is not known, or belongs to its token and prefix (see ``SlotLogprobs``).

    A partial page that a hit ends in is copied, so that the next one finds it too. Only when the pool has
    no page left for that copy is it taken over from the tree (nobody else may hold it, and all of its
    tokens must have matched) or, where it cannot be, the partial match dropped: so a hit never needs more
    pages than a miss. Not safe for several threads.

    A sequence that another manager holds, that nobody acquired, that has another one's page table, or whose
    ``num_computed`` was lowered by hand is refused with ``MisuseError``, before anything was changed.
    """

    def __init__(
        self,
        pool: PagePool,
        tree: RadixTree | NullTree,
        *,
        max_pinned_pages: int = 0,
        eviction_memory: int = 1024,
        max_event_pages: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _refuse_no_parts(pool, tree, clock)
        max_pinned_pages = as_setting("max_pinned_pages", max_pinned_pages, pool.num_pages - 1)
        eviction_memory = as_setting("eviction_memory", eviction_memory)
        max_event_pages = as_setting("max_event_pages", max_event_pages)
        pool.claim()
        tree.claim()
        self.pool = pool
        self.tree = tree
        self.page_size = tree.page_size
        self.epoch = 0
        """Raised by ``flush``; the last field of every namespace in the tree."""
        self.slot_logprobs = SlotLogprobs(pool.num_pages, self.page_size)
        self._clock = clock
        self._book = PinBook(max_pinned_pages)
        self._copies: dict[Sequence, TailCopy] = {}
        self._admitting: set[Sequence] = set()
        self._counters = dict.fromkeys(
            (
                "num_partial_copies", "num_forked_copies", "num_takeovers", "num_partials_dropped",
                "num_copies_cancelled", "num_repointed", "num_out_of_pages", "num_pins_expired",
                "num_flushes",
            ),
            0,
        )  # fmt: skip
        self._idle_at_least = 0
        tree.remember_evictions(eviction_memory)
        self._events = EventLog(max_event_pages) if max_event_pages else None
        if self._events is not None:
            tree.record_events(self._events)

    # ---- looking ----------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Changes whenever the tree's content changed: a ``peek`` is good for as long as it does not."""
        return self.tree.version

    @property
    def num_available(self) -> int:
        """Pages that a ``reserve`` could get now: free ones and idle ones."""
        self._idle_at_least = self.tree.num_idle(self.pool.ref_count)
        return self.pool.num_free + self._idle_at_least

    def has_available(self, num_pages: int) -> bool:
        """Whether ``num_available`` is at least ``num_pages``; counts only where that is not plain to see."""
        return num_pages <= self.pool.num_free + self._idle_at_least or num_pages <= self.num_available

    def num_available_without(self, sequences: Iterable[Sequence]) -> int:
        """What ``num_available`` would be after the release of ``sequences``, all of which are held. Changes
        nothing. Costs O(pages)."""
        counts = self.pool.ref_count.copy()
        for seq in sequences:
            counts[seq.page_table.pages] -= 1
            copy = self._copies.get(seq)
            if copy is not None and copy.state is not CopyState.TAKEN:
                counts[copy.source] -= 1
        return int(np.count_nonzero(counts == 0)) + self.tree.num_idle(counts)

    @property
    def num_pinned_pages(self) -> int:
        """Distinct pages that pins hold."""
        return self._book.num_pages

    @property
    def pins(self) -> tuple[Pin, ...]:
        """Live pins with the pages that they hold now."""
        return self._book.pins

    def peek(self, request: Request) -> int:
        """How many of the prompt's tokens ``acquire`` would find now; changes nothing."""
        return self.find(request).num_tokens

    def find(self, request: Request) -> Finding:
        """What ``peek`` returns, with what it depends on: see ``still_finds``. Changes nothing."""
        try:
            limit = request.max_hit_tokens
        except AttributeError:
            raise MisuseError(f"only what a Request asks for can be found, got {shown(request)}") from None
        namespace = self._namespace(request.namespace)
        if limit < len(request.prompt_ids) - 1:  # of what is to be scored, some may be known
            assert request.logprob_start is not None
            first = max(request.logprob_start, 1)
            known = self._known_logprobs(request, first, namespace)
            limit = min(len(request.prompt_ids), first + len(known)) - 1
        return self.tree.find(request.prompt_ids[: max(limit, 0)], namespace)

    def still_finds(self, request: Request, found: Finding) -> bool:
        """Whether ``find`` would find as many of the prompt's tokens as it did then. ``False`` may mean that
        it is not known. Costs O(1)."""
        if request.logprob_start is not None:  # which positions are scored counts, too
            return found.version == self.tree.version
        return self.tree.still_finds(found)

    def explain(
        self,
        token_ids: TokenIds | Iterable[int],
        namespace: Namespace = (),
        *,
        visible: Callable[[Namespace], bool] | None = None,
    ) -> Explanation:
        """How long the hit of these tokens is, and why it stops there. Changes nothing.

        ``visible``: which other namespaces, as requests name them, may be looked into; ``None`` allows all.
        Whoever asks can guess token by token what those hold that he is told of, so a front that serves
        strangers to each other must leave theirs out.
        """
        may_see = None if visible is None else lambda name: visible(name[:-1])
        full = self._namespace(as_namespace(namespace))
        found = self.tree.explain(as_token_ids(token_ids), full, visible=may_see)
        if found.other_namespace is None:
            return found
        return Explanation(
            hit_tokens=found.hit_tokens, reason=found.reason, position=found.position,
            cached_token=found.cached_token, evictions_ago=found.evictions_ago,
            other_namespace=found.other_namespace[:-1],
        )  # fmt: skip

    def _known_logprobs(self, request: Request, first: int, namespace: Namespace) -> list[float]:
        """Log-probabilities of the prompt's tokens from position ``first`` on, as far as they stand beside
        the tree without a gap. Those who want alternatives, which are not kept, get none."""
        if self.slot_logprobs.is_empty or request.num_prompt_alternatives:
            return []
        return self.slot_logprobs.known_run(self._slots_found(request.prompt_ids, first, namespace))

    def _slots_found(self, token_ids: TokenIds, first: int, namespace: Namespace) -> SlotMapping:
        """Slots of the tokens from position ``first`` on, as far as the tree knows them; changes nothing."""
        found = self.tree.lookup(token_ids, namespace)
        pages = found.page_ids
        if found.partial_page is not None:
            pages = np.append(pages, np.int32(found.partial_page))
        return slots_of(pages, np.arange(first, max(found.num_tokens, first), dtype=np.int64), self.page_size)

    def _namespace(self, namespace: Namespace) -> Namespace:
        return (*namespace, self.epoch)

    def _is_stale(self, seq: Sequence) -> bool:
        return seq.namespace[-1:] != (self.epoch,)

    # ---- holding: every change of a count goes through these ---------------------------------------------

    def _hold(self, pages: PageIds) -> None:
        self.pool.incref(pages)
        if self._idle_at_least:
            self._idle_at_least = max(self._idle_at_least - len(pages), 0)

    def _let_go(self, pages: PageIds) -> None:
        self.pool.decref(pages)
        counts = self.pool.ref_count
        if len(pages) == 1 and counts.item(pages.item()) != 1:
            return
        self.tree.became_idle(pages[counts[pages] == 1])

    def _allocate(self, num_pages: int) -> PageIds:
        """``num_pages`` pages, evicting what is short. The caller knows that there are enough."""
        short = num_pages - self.pool.num_free
        if short > 0:
            evicted = self.tree.evict(short, self.pool.ref_count)
            self.pool.decref(evicted)
            self._idle_at_least = max(self._idle_at_least - len(evicted), 0)
            if len(evicted) < short:
                raise InternalError(f"M2: {short} pages should be idle, {len(evicted)} were: {self.stats()}")
            self._publish()
        pages = self.pool.allocate(num_pages)
        self.slot_logprobs.forget(pages)
        return pages

    # ---- acquire ----------------------------------------------------------------------------------------

    def acquire(self, seq: Sequence) -> None:
        """Match the sequence's tokens and hold what was found, in one call (M4).

        Sets ``page_table``, ``num_computed`` (the hit, to the token), ``num_committed_pages``,
        ``namespace`` and, at first admission, ``num_cached``. Needs no free page and evicts nothing. At
        least one token is left to compute (M3), and at most ``seq.max_hit_tokens`` are hit. Where prompt
        positions are to be scored, those whose number is known are scored here, and so may be hit.
        """
        self._check_empty(seq)
        namespace = self._namespace(seq.request.namespace)
        if seq.namespace != namespace:
            seq.num_old_logprobs = len(seq.logprobs)
        if seq.next_scored < seq.num_prompt:
            known = self._known_logprobs(seq.request, seq.next_scored, namespace)
            seq.logprobs += known
            self.slot_logprobs.num_reused += len(known)
        table = seq.page_table
        tokens = seq.token_ids[: seq.max_hit_tokens]
        match = self.tree.match(tokens, namespace, seq.request.priority, is_retry=table.is_hit_counted)
        table.is_hit_counted = True
        self._hold(match.page_ids)
        seq.namespace = namespace
        seq.page_table.hold = Hold(self, namespace, match.num_tokens, seq)
        seq.page_table.extend(match.page_ids)
        if match.partial_page is not None:
            self._hold(_page(match.partial_page))
            self._copies[seq] = TailCopy(
                match.partial_page, len(match.page_ids), match.partial_tokens, CopyState.MATCHED
            )
        seq.num_committed_pages = len(match.page_ids)
        seq.num_computed = match.num_tokens
        if seq.num_cached is None:
            seq.num_cached = match.num_tokens
            self._admitting.add(seq)

    def _check_empty(self, seq: Sequence) -> None:
        table = _table_of(seq, "acquire")
        if table.page_size != self.page_size:
            raise MisuseError(f"the table's pages are of {table.page_size}, not {self.page_size} tokens")
        if seq.page_table.hold is not None:
            self._check_manager(seq.page_table.hold, seq, "acquire")
        if seq.page_table.hold is not None or seq.page_table.num_pages or seq.num_computed:
            raise MisuseError(
                f"acquire of a sequence that holds {seq.page_table.num_pages} pages and has computed "
                f"{seq.num_computed} tokens: release it first"
            )

    def _check_held(self, seq: Sequence, verb: str) -> Hold:
        """This manager holds the sequence, and what is computed has not become less, nor more than there is
        room for. Costs O(1)."""
        hold = _table_of(seq, verb).hold
        if hold is None:
            raise MisuseError(
                f"{verb} of request {seq.request.request_id}, which holds nothing: acquire it first"
            )
        self._check_manager(hold, seq, verb)
        if seq.namespace != hold.namespace:
            raise MisuseError(
                f"{verb} of a sequence of namespace {seq.namespace}, whose pages are of {hold.namespace}"
            )
        num_computed, num_committed = plain_whole(seq.num_computed), plain_whole(seq.num_committed_pages)
        if num_computed is None:
            raise MisuseError(f"num_computed must be a whole number, got {shown(seq.num_computed)}")
        if num_committed is None:
            wrong = shown(seq.num_committed_pages)
            raise MisuseError(f"num_committed_pages must be a whole number, got {wrong}")
        committed = num_committed * self.page_size
        if num_computed < max(hold.num_computed, committed):
            raise MisuseError(
                f"{verb}: num_computed fell from {max(hold.num_computed, committed)} to {num_computed}; "
                "only truncate may lower it"
            )
        self._check_progress(seq)
        return hold

    def _check_manager(self, hold: Hold, seq: Sequence, verb: str) -> None:
        if hold.manager is not self:
            raise MisuseError(f"{verb} of request {seq.request.request_id}, which another manager holds")
        if hold.owner is None:
            hold.owner = seq
        elif hold.owner is not seq:
            raise MisuseError(
                f"{verb} of request {seq.request.request_id}, whose page table is another sequence's"
            )

    # ---- reserve ----------------------------------------------------------------------------------------

    def reserve(self, seq: Sequence, num_tokens: int) -> None:
        """Room to write positions ``num_computed .. num_computed + num_tokens - 1``.

        Evicts when pages are short. A last page that others hold too is replaced by a copy (W1), listed in
        ``take_copies``. If the page for a copy of a partial match is all that lacks, the page is taken over
        or the match dropped; then ``num_computed`` (and ``num_cached`` at admission) fall back to whole
        pages, and the room reaches as far as was asked for. Raises ``OutOfPages`` having changed and
        evicted nothing.
        """
        num_tokens = as_num_tokens("reserve", num_tokens)
        hold = self._check_held(seq, "reserve")
        if num_tokens == 0:
            return
        copy = self._open_copy(seq, "reserve")
        hold.num_computed = seq.num_computed
        if copy is not None and copy.state is CopyState.PENDING:
            copy = None
        # A source that the tree let go meanwhile and nobody else holds: nobody loses a hit by it.
        alone = copy is not None and bool(self.pool.ref_count[copy.source] == 1)
        grow = -(-(seq.num_computed + num_tokens) // self.page_size) - seq.page_table.num_pages
        shared = self._shared_page(seq)
        need = max(grow, 0) + (shared is not None) - alone
        if need > self.pool.num_free and not self.has_available(need):
            need = self._do_without_copy(seq, need, self.num_available)
            shared = self._shared_page(seq)
        elif copy is not None and alone:
            self._take_over(seq, copy)
        self._admitting.discard(seq)
        seq.page_table.is_hit_counted = False
        if need == 0:
            return
        new = self._allocate(need)
        if shared is not None:
            self._replace_shared(seq, shared, int(new[0]))
            new = new[1:]
        seq.page_table.extend(new)
        copy = self._copies.get(seq)
        if copy is not None and copy.state is CopyState.MATCHED:
            copy.state = CopyState.PENDING
            self._counters["num_partial_copies"] += 1

    def _shared_page(self, seq: Sequence) -> int | None:
        """Index of the table's page that would be written next, if it is begun and others hold it too."""
        index, begun = divmod(seq.num_computed, self.page_size)
        if begun == 0 or index >= seq.page_table.num_pages:
            return None
        return index if self.pool.ref_count[seq.page_table.pages[index]] > 1 else None

    def _replace_shared(self, seq: Sequence, index: int, new_page: int) -> None:
        """Copy-on-write: the table's reference on the old page becomes the copy's."""
        old = int(seq.page_table.pages[index])
        seq.page_table.replace(index, _page(new_page))
        self._copies[seq] = TailCopy(old, index, seq.num_computed % self.page_size, CopyState.PENDING)
        seq.num_committed_pages = min(seq.num_committed_pages, index)
        self._counters["num_forked_copies"] += 1

    def _do_without_copy(self, seq: Sequence, need: int, available: int) -> int:
        """Pages are short: spare the page of a partial match. Returns how many are needed then."""
        copy = self._copies.get(seq)
        if copy is not None and copy.state is CopyState.MATCHED and need - 1 <= available:
            if self._can_take_over(copy):
                self._take_over(seq, copy)
                return need - 1
            if self.pool.ref_count[copy.source] <= 2 and self.tree.num_tokens_of(copy.source):
                self._drop_partial(seq, copy)
                return need
        index = self._shared_page(seq)
        if index is not None and need - 1 <= available:
            page = int(seq.page_table.pages[index])
            if self.pool.ref_count[page] == 2 and self._is_tail_of_tree(page, seq.num_computed):
                self.tree.take(page)
                self.pool.decref(_page(page))
                self._publish()
                self.slot_logprobs.forget(_page(page), seq.num_computed % self.page_size)
                self._counters["num_takeovers"] += 1
                return need - 1
        self._counters["num_out_of_pages"] += 1
        raise OutOfPages(need, available)

    def _is_tail_of_tree(self, page: int, num_computed: int) -> bool:
        """Whether the tree holds ``page`` for no more tokens than a sequence with this many has on it. Then a
        fork that ended before the sequence wrote has left it there."""
        return 0 < self.tree.num_tokens_of(page) <= num_computed % self.page_size

    def _can_take_over(self, copy: TailCopy) -> bool:
        if self.pool.ref_count[copy.source] != 2:
            return False
        return self.tree.num_tokens_of(copy.source) == copy.num_tokens < self.page_size

    def _take_over(self, seq: Sequence, copy: TailCopy) -> None:
        """The tree's partial page becomes the sequence's own; the hold on it becomes the table's."""
        if self.tree.num_tokens_of(copy.source):
            self.tree.take(copy.source)
            self.pool.decref(_page(copy.source))
            self._publish()
        seq.page_table.extend(_page(copy.source))
        self.slot_logprobs.forget(_page(copy.source), copy.num_tokens)
        del self._copies[seq]
        self._counters["num_takeovers"] += 1

    def _drop_partial(self, seq: Sequence, copy: TailCopy) -> None:
        del self._copies[seq]
        self._let_go(_page(copy.source))
        self._set_computed(seq, copy.page_index * self.page_size)
        if seq in self._admitting:
            seq.num_cached = seq.num_computed
        self._counters["num_partials_dropped"] += 1

    def _set_computed(self, seq: Sequence, num_computed: int) -> None:
        assert seq.page_table.hold is not None
        seq.num_computed = seq.page_table.hold.num_computed = num_computed

    # ---- copies -----------------------------------------------------------------------------------------

    def take_copies(self) -> tuple[PageCopy, ...]:
        """All copies that the batch being built must do first. Call once per batch; the sources are let go,
        so nothing may be reserved between this and the batch's execution."""
        out: list[PageCopy] = []
        for seq, copy in self._copies.items():
            if copy.state is CopyState.PENDING:
                destination = int(seq.page_table.pages[copy.page_index])
                out.append(PageCopy(copy.source, destination, copy.num_tokens))
                copy.state = CopyState.TAKEN
                self._let_go(_page(copy.source))
        self.slot_logprobs.copy(out)
        return tuple(out)

    def _is_done(self, seq: Sequence, copy: TailCopy) -> bool:
        """A copy is known to be done when its sequence has computed beyond it."""
        copied = copy.page_index * self.page_size + copy.num_tokens
        return copy.state is CopyState.TAKEN and seq.num_computed > copied

    def _open_copy(self, seq: Sequence, verb: str) -> TailCopy | None:
        """The sequence's copy, if it has one that is not done; one that is done is forgotten here."""
        copy = self._copies.get(seq)
        if copy is None or copy.state is not CopyState.TAKEN:
            return copy
        if not self._is_done(seq, copy):
            raise MisuseError(f"{verb} of a sequence whose batch is in flight: compute and commit it first")
        del self._copies[seq]
        return None

    def _end_copy(self, seq: Sequence) -> None:
        """Forget the sequence's copy. If it is not known to be done, the page it was for holds nothing."""
        copy = self._copies.pop(seq, None)
        if copy is None or self._is_done(seq, copy):
            return
        if copy.state is not CopyState.TAKEN:
            self._let_go(_page(copy.source))
        self._set_computed(seq, copy.page_index * self.page_size)
        self._counters["num_copies_cancelled"] += 1

    # ---- commit -----------------------------------------------------------------------------------------

    def commit(self, seq: Sequence) -> None:
        """The scheduler raised ``num_computed``: make the newly full pages known.

        Pages whose tokens another sequence committed first are repointed to that one's before they are
        freed. After a flush, a sequence of the old epoch inserts nothing.
        """
        hold = self._check_held(seq, "commit")
        hold.num_computed = seq.num_computed
        copy = self._copies.get(seq)
        if copy is not None and self._is_done(seq, copy):
            del self._copies[seq]
        num_full = seq.num_computed // self.page_size
        if num_full > seq.num_committed_pages and not self._is_stale(seq):
            self._insert(seq, num_full * self.page_size)
            self._publish()

    def _check_progress(self, seq: Sequence) -> None:
        copy = self._copies.get(seq)
        if copy is not None and copy.state is not CopyState.TAKEN:
            if seq.num_computed > copy.page_index * self.page_size + copy.num_tokens:
                raise MisuseError("computed beyond a copy that no batch has taken: call take_copies first")
        elif seq.num_computed > seq.page_table.num_slots:
            raise MisuseError(f"{seq.num_computed} tokens computed, room for {seq.page_table.num_slots}")
        if seq.num_computed > seq.num_tokens:
            raise MisuseError(f"{seq.num_computed} tokens computed, the sequence has {seq.num_tokens}")

    def _insert(self, seq: Sequence, num_tokens: int) -> None:
        """Insert the first ``num_tokens`` tokens with their pages, the last one maybe partial."""
        known = seq.num_committed_pages
        mine = seq.page_table.pages[: -(-num_tokens // self.page_size)]
        done = self.tree.insert(seq.token_ids[:num_tokens], mine, known, seq.namespace, seq.request.priority)
        self._hold(done.adopted)
        if done.replaced is not None:
            self._follow_replacement(*done.replaced)
        mine = mine[: len(done.canonical)]
        if done.canonical.tobytes() != mine.tobytes():
            self._repoint(seq, int((done.canonical != mine).argmax()), done.canonical)
        seq.num_committed_pages = num_tokens // self.page_size

    def _repoint(self, seq: Sequence, start: int, canonical: PageIds) -> None:
        """Let the table hold the tree's pages in place of its own duplicates, then free those (M2)."""
        mine = seq.page_table.pages[start : len(canonical)].copy()
        differ = mine != canonical[start:]
        self._hold(canonical[start:][differ])
        seq.page_table.replace(start, canonical[start:])
        self._let_go(mine[differ])
        self._counters["num_repointed"] += int(differ.sum())

    def _follow_replacement(self, old: int, new: int) -> None:
        """The tree replaced a partial page by a fuller one: pins go with it, so they lose no hit."""
        for _ in range(self._book.follow(old, new)):
            self._hold(_page(new))
            self._let_go(_page(old))
        self._let_go(_page(old))  # the tree's own reference

    # ---- fork, truncate, release ------------------------------------------------------------------------

    def fork(self, seq: Sequence) -> PageTable:
        """A table for a second sequence with the same computed tokens; all of its pages are shared.

        The caller sets the new sequence's ``page_table`` to it, and copies ``num_computed``,
        ``num_committed_pages`` and ``namespace`` after this call. Full pages are committed first: one of two
        that hold a page can not be repointed without the other (M2). Whoever writes to the shared last page
        first copies it, in ``reserve``. Pages reserved beyond the computed tokens are not shared. Raises
        ``MisuseError`` for a sequence that is not held.
        """
        hold = self._check_held(seq, "fork")
        copy = self._open_copy(seq, "fork")
        if seq.num_computed // self.page_size > seq.num_committed_pages:
            self.commit(seq)
        pages = seq.page_table.pages[: -(-seq.num_computed // self.page_size)].copy()
        if copy is not None:  # what the copy would bring stands on its source
            pages = np.append(pages[: copy.page_index], np.int32(copy.source))
        self._hold(pages)
        hold.num_computed = seq.num_computed
        table = PageTable(self.page_size, pages)
        table.hold = Hold(self, seq.namespace, seq.num_computed)
        return table

    def truncate(self, seq: Sequence, num_tokens: int) -> None:
        """Forget all tokens from position ``num_tokens`` on, and let their pages go.

        At least one token is left to compute, so ``num_computed`` is ``num_tokens - 1`` at most. Pages
        that were committed stay in the tree; a page that is cut in its middle is copied at the next write.
        """
        num_tokens = as_num_tokens("truncate to", num_tokens)
        _table_of(seq, "truncate")
        if not seq.num_prompt <= num_tokens <= seq.num_tokens:
            raise MisuseError(
                f"cannot truncate to {num_tokens} tokens: the prompt has {seq.num_prompt}, "
                f"the sequence {seq.num_tokens}"
            )
        self._check_held(seq, "truncate")
        copy = self._open_copy(seq, "truncate")
        seq.truncate(num_tokens)
        num_computed = min(seq.num_computed, num_tokens - 1)
        if copy is not None:
            begin = copy.page_index * self.page_size
            if num_computed <= begin:
                self._end_copy(seq)
            else:
                copy.num_tokens = min(copy.num_tokens, num_computed - begin)
        self._set_computed(seq, num_computed)
        seq.num_committed_pages = min(seq.num_committed_pages, num_computed // self.page_size)
        keep = min(-(-num_computed // self.page_size), seq.page_table.num_pages)
        self._let_go(seq.page_table.pop_from(keep))

    def release(self, seq: Sequence) -> None:
        """Let everything go: at the end, at an abort and at a preemption alike.

        What was computed and is not in the tree yet is inserted first, the partial last page too; a copy
        that was not done is cancelled. Afterwards the table is empty and nothing is computed. A second call
        does nothing.
        """
        table = _table_of(seq, "release")
        if table.hold is None and table.num_pages == 0:
            return
        self._check_held(seq, "release")
        self._end_copy(seq)
        if seq.num_computed > seq.num_committed_pages * self.page_size and not self._is_stale(seq):
            self._insert(seq, seq.num_computed)
        if seq.logprobs and not self._is_stale(seq):
            self._leave_logprobs(seq)
        self._let_go(seq.page_table.pop_from(0))
        self._publish()
        seq.page_table.hold = None
        seq.num_computed = 0
        seq.num_committed_pages = 0
        if seq in self._admitting:  # never got its pages: that was no admission
            self._admitting.discard(seq)
            seq.num_cached = None
            seq.logprobs.clear()  # taken from beside the tree, and to be looked at anew

    def _leave_logprobs(self, seq: Sequence) -> None:
        """The numbers of the sequence's scored positions go beside the pages that the tree has for them; not
        those that it brought from before a flush, which may be another model's."""
        known = seq.logprobs[seq.num_old_logprobs :]
        first = seq.next_scored - len(known)
        slots = self._slots_found(
            seq.token_ids[: min(seq.num_computed, seq.next_scored)], first, seq.namespace
        )
        self.slot_logprobs.note(slots, known[: len(slots)])

    # ---- pins and flush ---------------------------------------------------------------------------------

    def pin(
        self,
        token_ids: TokenIds | Iterable[int],
        namespace: Namespace = (),
        *,
        timeout_s: float | None = None,
    ) -> Pin:
        """Hold what is cached of ``token_ids``, to the token, until ``unpin`` or the deadline.

        The page that the prefix ends in is held too. If a fuller page with the same beginning replaces it,
        the pin goes over to that one. Nothing is computed: see ``Pin.num_tokens`` for what is held. Raises
        ``PinBudgetExceeded``, having changed nothing but recency.
        """
        timeout_s = as_timeout_s(timeout_s)
        match = self.tree.match(as_token_ids(token_ids), self._namespace(as_namespace(namespace)))
        pages = match.page_ids
        if match.partial_page is not None:
            pages = np.append(pages, np.int32(match.partial_page))
        deadline = None if timeout_s is None else self._clock() + timeout_s
        pin = self._book.add(tuple(pages.tolist()), match.num_tokens, deadline)
        self._hold(pages)
        return pin

    def unpin(self, pin: Pin) -> None:
        """Let the pin's pages go; a second call, or one after expiry or a flush, does nothing. Raises
        ``MisuseError`` for what is no receipt of this manager."""
        self._book.refuse_foreign(pin)
        held = self._book.remove(pin.pin_id)
        if held is not None:
            self._let_go(np.array(held.pages, np.int32))

    def expire_pins(self) -> list[Pin]:
        """Unpin those whose deadline has come; returns them."""
        expired = self._book.expired(self._clock())
        for pin in expired:
            self.unpin(pin)
        self._counters["num_pins_expired"] += len(expired)
        return expired

    def flush(self) -> FlushReport:
        """Empty the tree and drop all pins. Running sequences keep their pages and go on, but nothing that
        they compute is inserted: the epoch in their namespace is over."""
        dropped = self.pins
        for pin in dropped:
            self.unpin(pin)
        pages = self.tree.clear()
        self._idle_at_least = 0
        self.pool.decref(pages)
        self._publish()
        self.epoch += 1
        self._counters["num_flushes"] += 1
        num_freed = int(np.count_nonzero(self.pool.ref_count[pages] == 0))
        return FlushReport(
            num_pages_freed=num_freed, num_pages_held=len(pages) - num_freed, pins_dropped=dropped
        )

    # ---- events -----------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """The pages that the tree let go are freed: others may hear of it."""
        if self._events is not None:
            self._events.publish()

    def take_events(self) -> tuple[Event, ...]:
        """What entered and left the tree since the last call, in order; namespaces as the requests named
        them. Applied to the content before them they give exactly the content now (``radixkv.kv.replay``).
        Raises ``MisuseError`` where events are off (``max_event_pages`` is 0)."""
        if self._events is None:
            raise MisuseError("events are off: nothing was recorded")
        return tuple(_without_epoch(event) for event in self._events.take())

    def content(self) -> Iterator[Stored]:
        """Everything that the tree holds now, as if it entered now; parents before children. Read it to its
        end before anything else is called."""
        for event in self.tree.content():
            yield replace(event, namespace=event.namespace[:-1])

    # ---- verifying --------------------------------------------------------------------------------------

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Verify every invariant from scratch; ``sequences`` are all that may hold pages. Raises
        ``InternalError`` with its name and the state."""
        sequences = list(sequences)
        for seq in sequences:
            _table_of(seq, "check")
        self.pool.check()
        self.tree.check(self.pool.ref_count)
        if self._events is not None:
            self._events.check()
        self.slot_logprobs.check()
        expected = np.zeros(self.pool.num_pages, np.int64)
        expected[self.tree.held_pages] += 1
        for pin in self.pins:
            expected[list(pin.pages)] += 1
        for copy in self._copies.values():
            if copy.state is not CopyState.TAKEN:
                expected[copy.source] += 1
        for seq in sequences:
            seq.page_table.check()
            expected[seq.page_table.pages] += 1
        wrong = np.flatnonzero(expected != self.pool.ref_count)
        require(len(wrong) == 0, "M1", lambda: self._held_wrongly(expected))
        require(set(self._copies) <= set(sequences), "M1", "a copy for a sequence that nobody knows")
        require(self.num_pinned_pages <= self._book.max_pages, "M1", "pins exceed their budget")
        num_idle = self.tree.num_idle(self.pool.ref_count)
        require(0 <= self._idle_at_least <= num_idle, "M5", self._idle_at_least, "of", num_idle)
        for seq in sequences:
            self._check_sequence(seq)

    def _held_wrongly(self, expected: NDArray[np.integer]) -> str:
        wrong = np.flatnonzero(expected != self.pool.ref_count)
        state = [(int(p), int(self.pool.ref_count[p]), int(expected[p])) for p in wrong[:16]]
        return f"(page, count, holders): {state}"

    def _check_sequence(self, seq: Sequence) -> None:
        state = partial(_described, seq)
        copy = self._copies.get(seq)
        committed = seq.num_committed_pages * self.page_size
        require(committed <= seq.num_computed, "S1", state)
        require(seq.num_computed < seq.num_tokens or seq.status.value == "finished", "S1", state)
        has_room = seq.num_computed <= seq.page_table.num_slots
        require(has_room or (copy is not None and copy.state is CopyState.MATCHED), "B1", state)
        own = seq.page_table.pages[-(-seq.num_computed // self.page_size) :]
        require(bool((self.pool.ref_count[own] == 1).all()), "W1", "a page to be written is shared:", state)
        if not self._is_stale(seq) and isinstance(self.tree, RadixTree):
            known = self.tree.lookup(seq.token_ids[:committed], seq.namespace).page_ids
            same = np.array_equal(known, seq.page_table.pages[: seq.num_committed_pages])
            require(same, "M2", "committed pages are not the tree's,", known, state)
        hold = seq.page_table.hold
        is_mine = hold.manager is self if hold is not None else seq.page_table.num_pages == 0
        require(is_mine, "M1", "pages that this manager did not give:", state)
        is_own = hold is None or hold.owner is None or hold.owner is seq
        require(is_own, "M1", "the page table is another sequence's:", state)

    def check_idle(self) -> None:
        """Verify M1 where no sequence holds anything: each page is free, or the tree's, or pinned. Raises
        ``InternalError``. Costs a few passes over an array of the pool's pages."""
        expected = np.zeros(self.pool.num_pages, np.int32)
        expected[self.tree.held_pages] = 1
        for pin in self.pins:
            expected[list(pin.pages)] += 1
        wrong = np.flatnonzero(expected != self.pool.ref_count)
        require(len(wrong) == 0, "M1", "idle, but", lambda: self._held_wrongly(expected))
        require(
            not self._copies and not self._admitting, "M1", f"idle, but {len(self._copies)} copies are open"
        )
        num_live = int(np.count_nonzero(expected))
        require(self.pool.num_free == self.pool.num_pages - num_live, "P1", self.pool.stats)

    def check_writes(self, seq: Sequence, num_tokens: int) -> None:
        """Verify W1 for the next ``num_tokens`` positions after their ``reserve``."""
        start, stop = seq.num_computed, seq.num_computed + num_tokens
        require(stop <= seq.page_table.num_slots, "W1", "no room to write", range(start, stop))
        pages = seq.page_table.pages[start // self.page_size : -(-stop // self.page_size)]
        counts = self.pool.ref_count[pages]
        alone = num_tokens == 0 or bool((counts == 1).all())
        require(alone, "W1", range(start, stop), "on pages", pages, "with counts", counts)

    def stats(self) -> dict[str, Any]:
        """Page numbers now, counters since the beginning, and the tree's with its histograms.
        ``num_pages_used`` excludes idle pages."""
        num_idle = self.tree.num_idle(self.pool.ref_count)
        return {
            "num_pages": self.pool.num_pages,
            "num_pages_free": self.pool.num_free,
            "num_pages_idle": num_idle,
            "num_pages_used": self.pool.num_pages - self.pool.num_free - num_idle,
            "num_pages_pinned": self.num_pinned_pages,
            "num_pins": len(self.pins),
            "num_copies_open": len(self._copies),
            "epoch": self.epoch,
            **self._counters,
            **({} if self._events is None else self._events.stats()),
            **self.slot_logprobs.stats(),
            **{f"tree_{name}": value for name, value in self.tree.stats().items()},
        }


def _refuse_no_parts(pool: object, tree: object, clock: object) -> None:
    if not isinstance(pool, PagePool):
        raise ConfigError(f"pool must be a PagePool, got {shown(pool)}")
    if not isinstance(tree, (RadixTree, NullTree)):
        raise ConfigError(f"tree must be a RadixTree or a NullTree, got {shown(tree)}")
    if not callable(clock):
        raise ConfigError(f"clock must be a function that gives seconds, got {shown(clock)}")


def _table_of(seq: object, verb: str) -> PageTable:
    table = getattr(seq, "page_table", None)
    if not isinstance(table, PageTable):
        raise MisuseError(f"cannot {verb} what is no Sequence: {shown(seq)}")
    return table


def _without_epoch(event: Event) -> Event:
    return replace(event, namespace=event.namespace[:-1]) if isinstance(event, Stored) else event


def _described(seq: Sequence) -> str:
    return (
        f"request {seq.request.request_id}: {seq.num_tokens} tokens, {seq.num_computed} computed, "
        f"{seq.num_committed_pages} pages committed, pages {seq.page_table.pages.tolist()}"
    )


def _page(page: int) -> PageIds:
    return np.array([page], np.int32)
