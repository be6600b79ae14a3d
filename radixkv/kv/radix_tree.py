"""RadixTree: which pages hold the K/V of which token prefix. Knows no pool.

The idea of a radix tree over token ids that maps prefixes to K/V is RadixAttention's (Zheng et al.,
"SGLang: Efficient Execution of Structured Language Model Programs", 2024). Here an edge carries a list of
pages, recency belongs to pages rather than nodes, and nobody outside ever holds a node.

The file is long because ``Node`` may not leave it: walking, changing, evicting and checking all touch it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sortedcontainers import SortedDict

from radixkv.config import EVICTION_POLICIES, EvictionPolicyName
from radixkv.errors import ConfigError, MisuseError
from radixkv.kv.arguments import as_page_size
from radixkv.kv.events import Cleared, EventLog, RemovalReason, Removed, Stored
from radixkv.kv.eviction_memory import Anchor, EvictionMemory
from radixkv.kv.eviction_order import EvictionOrder
from radixkv.kv.explanation import Explanation, Reason
from radixkv.kv.finding import ChangeLog, Finding
from radixkv.kv.invariant import require
from radixkv.kv.match import Insertion, Match
from radixkv.kv.page_pool import has_twice
from radixkv.kv.token_bytes import TOKEN_BYTES, agreement, joined, key_of, page_agreement, tokens_of
from radixkv.plain import plain_whole, shown
from radixkv.types import Namespace, PageIds, TokenIds

_ID_BYTES = 4
_UINT32 = np.dtype(np.uint32)
_MERGED_BYTES = 4096 * TOKEN_BYTES
"""Appending and merging stop at this edge length, so that neither costs more with the prompt's length."""

_MANY_CHILDREN = 1024


class Node:
    """An edge and what hangs below it. A root's edge is empty; only a root has a namespace of meaning."""

    __slots__ = ("children", "ids", "namespace", "parent", "tokens")

    def __init__(self, tokens: bytes, ids: bytes, parent: Node | None, namespace: Namespace = ()) -> None:
        self.tokens = tokens
        """The edge's token ids as int32 bytes."""
        self.ids = ids
        """The edge's page ids as int32 bytes: whole pages, but for a leaf's last one, which may hold fewer
        tokens. Bytes rather than an array: a walk over many nodes joins them at a tenth of the cost."""
        self.children: Any = None
        """Children by the bytes of their first page, ordered; ``None`` when there are none."""
        self.parent = parent
        self.namespace = namespace

    @property
    def pages(self) -> PageIds:
        """The edge's page ids, a read-only view."""
        return np.frombuffer(self.ids, np.int32)

    @property
    def num_pages(self) -> int:
        return len(self.ids) // _ID_BYTES

    @property
    def last_page(self) -> int:
        return int.from_bytes(self.ids[-_ID_BYTES:], sys.byteorder)

    def add_child(self, key: bytes, child: Node) -> None:
        if self.children is None:
            self.children = SortedDict()
        self.children[key] = child
        child.parent = self

    def drop_child(self, key: bytes) -> None:
        del self.children[key]
        if not self.children:
            self.children = None


class _Spot(NamedTuple):
    """Where a walk ended: ``node``'s first ``used`` pages agree, after them ``agree`` tokens of the page
    ``next_node.pages[next_index]``, where there is one."""

    node: Node
    used: int
    num_bytes: int
    path: list[bytes]
    next_node: Node | None
    next_index: int
    agree: int


class RadixTree:
    """A forest, one tree per namespace, from token prefixes to pages.

    T1: an edge holds whole pages, except that a leaf's last page may hold fewer tokens. A fuller page with
        the same beginning replaces it. A partial page is never written while the tree holds it.
    T2: siblings differ within their first page; none is another's beginning.
    T3: a page is in the tree at most once.
    T4: ``match`` changes nothing but recency, ``peek`` and ``lookup`` nothing at all. No node leaves this
        file, so nodes may be split, trimmed and merged at any time.
    T5: use is kept per page (``EvictionOrder``) and never rises along a path; the order of eviction is
        exactly that of a tree with one page per node, whatever the policy.
    T6: what enters or leaves is noted (``ChangeLog``) before anybody asks whether a finding still holds.

    The tree holds one reference to each of its pages, which the manager counts. It frees nothing itself:
    ``evict`` and ``clear`` only say which pages it let go.
    """

    def __init__(self, page_size: int, eviction_policy: EvictionPolicyName = "lru") -> None:
        """Raises ``ConfigError`` unless ``page_size`` is a power of two up to 256 and the policy has one of
        the names that there are."""
        self.page_size = page_size = as_page_size(page_size)
        if eviction_policy not in EVICTION_POLICIES:
            names = ", ".join(EVICTION_POLICIES)
            raise ConfigError(f"eviction_policy must be one of {names}, got {shown(eviction_policy)}")
        self.version = 0
        """Changes whenever the content changed."""
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[Namespace, Node] = {}
        self._order = EvictionOrder(eviction_policy, page_size)
        self._memory = EvictionMemory(0)
        self._changes = ChangeLog()
        self._events: EventLog | None = None
        self._is_claimed = False
        self._next_serial = 1
        self._num_nodes = 0
        self._counters = dict.fromkeys(
            (
                "num_splits", "num_merges", "num_evicted", "num_trims_beside_held", "num_replaced",
                "num_taken", "num_cleared",
            ),
            0,
        )  # fmt: skip
        self._evicted_bytes = 0
        # By page id; a serial of 0 says that the page is not in the tree.
        self._serial = np.zeros(0, np.int64)
        self._mark = np.zeros(0, np.int32)  # scratch of the T3 test, no state
        self._node_of: NDArray[np.object_] = np.empty(0, np.object_)

    def claim(self) -> None:
        """A manager begins to work with it. Raises ``MisuseError`` where one does already, for two would
        count the same pages apart."""
        if self._is_claimed:
            raise MisuseError("a manager works with this tree already: two cannot share it")
        self._is_claimed = True

    # ---- looking ----------------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """Pages that the tree holds."""
        return int(np.count_nonzero(self._serial))

    @property
    def num_nodes(self) -> int:
        """Nodes with an edge; roots are not counted."""
        return self._num_nodes

    @property
    def held_pages(self) -> PageIds:
        """The pages that the tree holds, ascending."""
        return np.flatnonzero(self._serial).astype(np.int32)

    def num_idle(self, ref_count: NDArray[np.int32]) -> int:
        """Pages that nobody but the tree holds: what ``evict`` could give at most."""
        num = min(len(self._serial), len(ref_count))
        return int(np.count_nonzero((ref_count[:num] == 1) & (self._serial[:num] != 0)))

    def peek(self, token_ids: TokenIds, namespace: Namespace = ()) -> int:
        """How many tokens ``match`` would find; changes nothing, recency included."""
        spot = self._find(key_of(token_ids), namespace)
        return 0 if spot is None else spot.num_bytes // TOKEN_BYTES + spot.agree

    def find(self, token_ids: TokenIds, namespace: Namespace = ()) -> Finding:
        """What ``peek`` returns, with what it depends on: see ``still_finds``. Changes nothing."""
        key = key_of(token_ids)
        spot = self._find(key, namespace)
        version, moment = self.version, self._changes.now
        if spot is None or not spot.path:
            num_tokens = 0 if spot is None else spot.agree
            return Finding(num_tokens, version, moment, namespace, 0, key[: self._page_bytes])
        page = int.from_bytes(spot.path[-1][-_ID_BYTES:], sys.byteorder)
        end = spot.num_bytes
        return Finding(
            end // TOKEN_BYTES + spot.agree, version, moment, self._serial.item(page), page,
            key[end : end + self._page_bytes],
        )  # fmt: skip

    def still_finds(self, found: Finding) -> bool:
        """Whether ``find`` would find as many tokens as it did then. ``False`` may mean that it is not known.
        Changes nothing but the finding's own date; costs O(1)."""
        if found.version == self.version:
            return True
        anchor = found.anchor
        if anchor.__class__ is not tuple and self._serial.item(found.page) != anchor:
            return False
        if self._changes.has_changed(anchor, found.rest, found.moment):
            return False
        found.version, found.moment = self.version, self._changes.now
        return True

    def lookup(self, token_ids: TokenIds, namespace: Namespace = ()) -> Match:
        """What ``match`` would return; changes nothing, recency included."""
        return self._match_of(self._find(key_of(token_ids), namespace))

    def match(
        self, token_ids: TokenIds, namespace: Namespace = (), priority: int = 0, *, is_retry: bool = False
    ) -> Match:
        """The longest known beginning of ``token_ids``, to the token. Changes recency only: the caller
        must hold the pages before anything else happens. ``priority`` is the user's, for the policy of that
        name; with ``is_retry`` the hit is not counted, since it was before."""
        match = self._match_of(self._find(key_of(token_ids), namespace))
        self._order.matched(match.page_ids, match.partial_page, priority, is_retry=is_retry)
        return match

    def num_tokens_of(self, page: int) -> int:
        """Tokens for which the tree holds ``page``; 0 when it does not hold it."""
        if page >= len(self._serial) or self._serial[page] == 0:
            return 0
        node: Node = self._node_of[page]
        return self._tokens_in(node, self._index_of(node, page))

    def _find(self, key: bytes, namespace: Namespace) -> _Spot | None:
        root = self._root(namespace)
        return None if root is None else self._walk(key, root, 0, 0)

    def _root(self, namespace: Namespace) -> Node | None:
        try:
            return self._roots.get(namespace)
        except TypeError:
            raise MisuseError(f"a namespace is a tuple of text and numbers, got {shown(namespace)}") from None

    def _match_of(self, spot: _Spot | None) -> Match:
        if spot is None:
            return Match(joined([]), None, 0, 0)
        pages = joined(spot.path)
        num_tokens = spot.num_bytes // TOKEN_BYTES + spot.agree
        if spot.agree == 0 or spot.next_node is None:
            return Match(pages, None, 0, num_tokens)
        return Match(pages, int(spot.next_node.pages[spot.next_index]), spot.agree, num_tokens)

    def _walk(self, key: bytes, node: Node, used: int, num_bytes: int) -> _Spot:
        """Follow ``key`` from byte ``num_bytes`` on, starting behind ``node``'s first ``used`` pages."""
        page_bytes = self._page_bytes
        path: list[bytes] = []
        while True:
            ids = node.ids
            if used * _ID_BYTES < len(ids):
                agree = agreement(node.tokens, used * page_bytes, key, num_bytes)
                whole = agree // self.page_size
                if whole:
                    path.append(ids[used * _ID_BYTES : (used + whole) * _ID_BYTES])
                    used += whole
                    num_bytes += whole * page_bytes
                if used * _ID_BYTES < len(ids):
                    return _Spot(node, used, num_bytes, path, node, used, agree % self.page_size)
            children = node.children
            child: Node | None = None
            if children is not None:
                child = children.get(key[num_bytes : num_bytes + page_bytes])
            if child is None or len(child.tokens) < page_bytes:
                neighbour, agree = self._neighbour(node, key, num_bytes)
                return _Spot(node, used, num_bytes, path, neighbour, 0, agree)
            if len(child.ids) == _ID_BYTES:  # one page, which the look-up compared
                path.append(child.ids)
                used = 1
                num_bytes += page_bytes
            else:
                used = 0
            node = child

    def _neighbour(self, node: Node, key: bytes, num_bytes: int) -> tuple[Node | None, int]:
        """The child whose first page agrees longest with the rest of ``key``: one of the two between which
        the rest would stand in order."""
        if node.children is None:
            return None, 0
        rest = key[num_bytes : num_bytes + self._page_bytes]
        children = node.children
        above = children.bisect_left(rest)
        best: Node | None = None
        best_agree = 0
        for index in range(above, above - 2, -1):
            if 0 <= index < len(children):
                near, child = children.peekitem(index)
                agree = page_agreement(near, rest)
                if best is None or agree > best_agree:
                    best, best_agree = child, agree
        return best, best_agree

    def _agree_beside(self, node: Node) -> int:
        """How many of the edge's first tokens a sibling begins with, too: one of the two beside it. 0, which
        may be too few, where there are so many that finding those two would cost more with their number."""
        assert node.parent is not None
        children = node.parent.children
        if not 1 < len(children) <= _MANY_CHILDREN:
            return 0
        key = node.tokens[: self._page_bytes]
        above = next(children.irange(key, None, (False, False)), b"")
        below = next(children.irange(None, key, (False, False), True), b"")
        return max(page_agreement(above, key), page_agreement(below, key))

    def _index_of(self, node: Node, page: int) -> int:
        if node.last_page == page:
            return node.num_pages - 1
        return int(np.flatnonzero(node.pages == page)[0])

    def _tokens_in(self, node: Node, index: int) -> int:
        return min(self.page_size, len(node.tokens) // TOKEN_BYTES - index * self.page_size)

    # ---- changing ---------------------------------------------------------------------------------------

    def insert(
        self,
        token_ids: TokenIds,
        pages: PageIds,
        num_known: int = 0,
        namespace: Namespace = (),
        priority: int = 0,
    ) -> Insertion:
        """Make ``pages`` known as the K/V of ``token_ids``; the last page may be partial.

        The caller knows that the tree holds the first ``num_known`` of ``pages`` for these tokens: the
        walk starts behind them. Pages whose tokens are known already are not adopted. The whole path
        counts as used now. Raises ``MisuseError``, having changed nothing.
        """
        key = key_of(token_ids)
        self._check_call(key, pages, num_known)
        serials = self._serials_of(pages)
        node, used = self._start(key, pages, num_known, namespace)
        spot = self._walk(key, node, used, num_known * self._page_bytes)
        known = spot.num_bytes // self._page_bytes
        canonical = np.array(pages[: len(key) // self._page_bytes], np.int32)
        if known > num_known:
            canonical[num_known:known] = joined(spot.path)
        adopted, replaced = np.array(pages[known:], np.int32), None
        partial: int | None = None
        if len(adopted):
            mine = min(self.page_size, len(key) // TOKEN_BYTES - known * self.page_size)
            if spot.agree == mine and spot.next_node is not None:  # a partial page that is known already
                partial, adopted = int(spot.next_node.pages[spot.next_index]), adopted[:0]
            else:
                self._check_new(adopted, serials[known:], spot, namespace)
                if spot.agree and spot.next_node is not None:
                    replaced = self._replace_partial(spot, int(adopted[0]))
                if spot.used < spot.node.num_pages:
                    self._split(spot.node, spot.used)
                self._extend(spot.node, key[spot.num_bytes :], adopted, spot.agree, namespace)
                self.version += 1
                if len(canonical) < len(pages):
                    partial = adopted.item(-1)
        self._drop_empty_root(namespace)
        self._order.inserted(canonical, partial, len(adopted), priority)
        if len(adopted):
            self._order.opened(adopted.item(-1))
        return Insertion(canonical, adopted, replaced)

    def _check_call(self, key: bytes, pages: PageIds, num_known: int) -> None:
        if not isinstance(pages, np.ndarray) or pages.dtype != np.int32 or pages.ndim != 1:
            raise MisuseError(f"page ids are a flat int32 array, got {shown(pages)}")
        if len(pages) != -(-len(key) // self._page_bytes):
            raise MisuseError(f"{len(key) // TOKEN_BYTES} tokens do not fill exactly {len(pages)} pages")
        num_whole = len(key) // self._page_bytes
        is_whole = num_known.__class__ is int or plain_whole(num_known) is not None
        if not is_whole or not 0 <= num_known <= num_whole:
            raise MisuseError(
                f"num_known must lie in 0..{num_whole}, the whole pages, got {shown(num_known)}"
            )

    def _start(self, key: bytes, pages: PageIds, num_known: int, namespace: Namespace) -> tuple[Node, int]:
        if num_known == 0:
            root = self._root(namespace)
            if root is None:
                root = self._roots[namespace] = Node(b"", b"", None, namespace)
            return root, 0
        page = pages.item(num_known - 1)
        if self._serial.item(page) == 0:
            raise MisuseError(f"page {page} is said to be known, but the tree does not hold it")
        node: Node = self._node_of.item(page)
        used = self._index_of(node, page) + 1
        width = self._page_bytes
        if node.tokens[(used - 1) * width : used * width] != key[(num_known - 1) * width : num_known * width]:
            raise MisuseError(f"page {page} is said to be known, but the tree holds it for other tokens")
        return node, used

    def _check_new(
        self, pages: PageIds, serials: NDArray[np.int64], spot: _Spot, namespace: Namespace
    ) -> None:
        """T3: none stands twice in ``pages``, and the tree holds none of them yet, as their ``serials`` say,
        but for a partial page that got fuller where it is."""
        if has_twice(pages, self._mark):
            self._drop_empty_root(namespace)
            raise MisuseError(f"T3: a page stands twice in one call: {pages[:16].tolist()}")
        if np.count_nonzero(serials) == 0:
            return
        clash = pages[serials != 0]
        node, index = spot.next_node, spot.next_index
        grows = node is not None and spot.agree == self._tokens_in(node, index)
        if node is not None and grows and len(clash) == 1 and clash[0] == pages[0] == node.pages[index]:
            return
        self._drop_empty_root(namespace)
        raise MisuseError(f"T3: the tree holds these pages already: {clash[:16].tolist()}")

    def _replace_partial(self, spot: _Spot, new_page: int) -> tuple[int, int] | None:
        """Let go the partial page at ``spot`` if all of its tokens begin the new one (T1)."""
        node = spot.next_node
        if node is None or spot.agree < self._tokens_in(node, spot.next_index):
            return None
        old = int(node.pages[spot.next_index])
        self._cut(node, spot.next_index, "replaced")
        if spot.next_index == 0:
            self._unlink(node)
        self._counters["num_replaced"] += 1
        return old, new_page

    def _extend(self, node: Node, tokens: bytes, pages: PageIds, agree: int, namespace: Namespace) -> None:
        """Hang new pages behind the whole edge of ``node``; ``agree``: how many of their tokens something
        that hangs there begins with."""
        anchor: Anchor = namespace if node.parent is None else self._serial.item(node.last_page)
        self._changes.note(anchor, tokens[: (agree + 1) * TOKEN_BYTES])
        first = self._next_serial
        self._next_serial += len(pages)
        if self._events is not None:
            self._events.add(self._stored(namespace, node, range(first, self._next_serial), tokens))
        is_leaf = node.children is None and node.parent is not None
        if is_leaf:
            self._order.closed(node.last_page)
        if is_leaf and len(node.tokens) + len(tokens) <= _MERGED_BYTES:
            node.tokens += tokens
            node.ids += pages.tobytes()
            leaf = node
        else:
            leaf = Node(tokens, pages.tobytes(), node)
            node.add_child(tokens[: self._page_bytes], leaf)
            self._num_nodes += 1
        self._node_of[pages] = leaf
        self._serial[pages] = np.arange(first, first + len(pages))

    def _split(self, node: Node, num_pages: int) -> None:
        """Cut an edge behind its first ``num_pages`` pages; the rest becomes the only child."""
        at = num_pages * self._page_bytes
        rest = Node(node.tokens[at:], node.ids[num_pages * _ID_BYTES :], node)
        rest.children = node.children
        for child in rest.children.values() if rest.children is not None else ():
            child.parent = rest
        node.children = None
        node.tokens, node.ids = node.tokens[:at], node.ids[: num_pages * _ID_BYTES]
        node.add_child(rest.tokens[: self._page_bytes], rest)
        self._node_of[rest.pages] = rest
        self._num_nodes += 1
        self._counters["num_splits"] += 1

    def _merge(self, node: Node) -> None:
        """Join ``node`` with its only child, unless the edge would get too long to be worth it."""
        if node.parent is None or node.children is None or len(node.children) != 1:
            return
        child: Node = node.children.peekitem(0)[1]
        if len(node.tokens) + len(child.tokens) > _MERGED_BYTES:
            return
        parent, key = node.parent, node.tokens[: self._page_bytes]
        child.tokens = node.tokens + child.tokens
        child.ids = node.ids + child.ids
        self._node_of[node.pages] = child
        parent.add_child(key, child)
        self._num_nodes -= 1
        self._counters["num_merges"] += 1

    def _cut(self, leaf: Node, num_pages: int, reason: RemovalReason) -> None:
        """Keep only the first ``num_pages`` pages of a leaf; the rest is no longer in the tree."""
        begin = num_pages * self._page_bytes
        tokens = leaf.tokens[begin:] if begin else leaf.tokens
        anchor = self._anchor(leaf, num_pages)
        agree = 0 if num_pages else self._agree_beside(leaf)
        self._changes.note(anchor, tokens[: (agree + 1) * TOKEN_BYTES])
        last_page = leaf.last_page
        if len(leaf.ids) == (num_pages + 1) * _ID_BYTES:  # a common case, at a third of the cost
            serials = [self._serial.item(last_page)]
            self._serial[last_page] = 0
            self._node_of[last_page] = None
        else:
            pages = np.frombuffer(leaf.ids, np.int32, -1, num_pages * _ID_BYTES)
            serials = self._serial[pages].tolist()
            self._serial[pages] = 0
            self._node_of[pages] = None
        self._order.closed(last_page)
        if reason == "evicted":
            self._memory.record(anchor, tokens, serials)
        if self._events is not None:
            self._events.add(Removed(page_keys=tuple(reversed(serials)), reason=reason))
        if num_pages:
            leaf.tokens = leaf.tokens[:begin]
            leaf.ids = leaf.ids[: num_pages * _ID_BYTES]
        self.version += 1

    def _unlink(self, leaf: Node) -> None:
        """Take a leaf without pages off its parent."""
        assert leaf.parent is not None
        leaf.parent.drop_child(leaf.tokens[: self._page_bytes])
        self._num_nodes -= 1

    def _after_loss(self, node: Node) -> None:
        """``node`` lost its last page or a child: give it its place again as leaf, chain or empty root."""
        if node.parent is None:
            self._drop_empty_root(node.namespace)
        elif node.children is None:
            self._order.opened(node.last_page)
        else:
            self._merge(node)

    def _drop_empty_root(self, namespace: Namespace) -> None:
        root = self._roots.get(namespace)
        if root is not None and root.children is None:
            del self._roots[namespace]

    def _serials_of(self, pages: PageIds) -> NDArray[np.int64]:
        """The serial of each page; 0 of those that the tree does not hold. There is room for all then."""
        try:
            return self._serial[pages.view(_UINT32)]  # unsigned: none counts from behind
        except IndexError:
            self._make_room(pages)
            return self._serial[pages]

    def _make_room(self, pages: PageIds) -> None:
        """For ids that are beyond those so far, or below 0, which they may not be."""
        need = int(pages.view(np.uint32).max(initial=0)) + 1
        if need > 2**31:
            raise MisuseError(f"page ids must be at least 0, got {int(pages.min())}")
        more = max(need, 2 * len(self._serial)) - len(self._serial)
        self._serial = np.concatenate((self._serial, np.zeros(more, np.int64)))
        self._order.make_room(len(self._serial))
        self._mark = np.concatenate((self._mark, np.zeros(more, np.int32)))
        self._node_of = np.concatenate((self._node_of, np.empty(more, np.object_)))

    def take(self, page: int) -> None:
        """Give a partial page to its only other holder, who will write on it. It leaves the tree."""
        num_tokens = self.num_tokens_of(page)
        if not 0 < num_tokens < self.page_size:
            raise MisuseError(f"page {page} is not a partial page of the tree ({num_tokens} tokens)")
        leaf: Node = self._node_of[page]
        self._counters["num_taken"] += 1
        self._remove_tail(leaf, 1, "taken_over")

    def _remove_tail(self, leaf: Node, num_pages: int, reason: RemovalReason) -> None:
        """Take the last ``num_pages`` pages off a leaf."""
        left = leaf.num_pages - num_pages
        self._cut(leaf, left, reason)
        if left:
            self._after_loss(leaf)
        else:
            self._unlink(leaf)
            assert leaf.parent is not None
            self._after_loss(leaf.parent)

    # ---- evicting ---------------------------------------------------------------------------------------

    def became_idle(self, pages: PageIds) -> None:
        """``pages`` are held by the tree alone from now on. Pages that it does not hold, and pages that are
        not the last of a leaf, are passed over."""
        self._order.became_idle(pages)

    def evict(self, num_pages: int, ref_count: NDArray[np.int32]) -> PageIds:
        """Let go up to ``num_pages`` idle pages, as the policy says, always from a leaf's end.

        ``ref_count[page]`` is 1 for an idle page. Returns the pages in that order: exactly ``num_pages`` of
        them, or all that are idle. The pages are not freed here.
        """
        out: list[bytes] = []
        left = num_pages
        order, page_bytes = self._order, self._page_bytes
        while left > 0:
            page = order.next_victim(ref_count)
            if page is None:
                break
            leaf: Node = self._node_of.item(page)
            there = len(leaf.ids) // _ID_BYTES
            if left > 1 and there > 1:
                tail = np.frombuffer(leaf.ids, np.int32, -1, max(there - left, 0) * _ID_BYTES)[::-1]
                num = order.num_victims(tail, ref_count)
                gone = tail[:num]
                order.evicted(gone)
                out.append(gone.tobytes())
            else:
                num = 1
                order.evicted_one(page)
                out.append(leaf.ids[-_ID_BYTES:])
            kept = there - num
            self._counters["num_evicted"] += num
            self._evicted_bytes += len(leaf.tokens) - kept * page_bytes
            self._remove_tail(leaf, num, "evicted")
            if kept and ref_count.item(leaf.last_page) != 1:
                self._counters["num_trims_beside_held"] += 1
            left -= num
        return joined(out)

    def _anchor(self, node: Node, index: int) -> Anchor:
        """What the page at ``index`` of ``node``'s edge hangs under."""
        if index:
            before = node.ids[(index - 1) * _ID_BYTES : index * _ID_BYTES]
            return self._serial.item(int.from_bytes(before, sys.byteorder))
        assert node.parent is not None
        return (
            node.parent.namespace if node.parent.parent is None else self._serial.item(node.parent.last_page)
        )

    def clear(self) -> PageIds:
        """Let go everything; returns the pages that were held. They are not freed here."""
        pages = self.held_pages
        if self._events is not None:
            self._events.add(Cleared(num_pages=len(pages)))
        self._counters["num_cleared"] += len(pages)
        self._roots.clear()
        self._order.clear()
        self._memory.clear()
        self._changes.forget()
        self._serial[:] = 0
        self._node_of[:] = None
        self._num_nodes = 0
        self.version += 1
        return pages

    # ---- telling others ---------------------------------------------------------------------------------

    def record_events(self, log: EventLog) -> None:
        """Tell ``log`` from now on what enters and leaves."""
        self._events = log

    def content(self) -> Iterator[Stored]:
        """Everything that the tree holds, as if it entered now; parents before children."""
        todo = [(namespace, root) for namespace, root in self._roots.items()]
        while todo:
            namespace, node = todo.pop()
            if node.parent is not None:
                keys = self._serial[node.pages].tolist()
                yield self._stored(namespace, node.parent, keys, node.tokens)
            if node.children is not None:
                todo.extend((namespace, child) for child in node.children.values())

    def _stored(self, namespace: Namespace, before: Node, keys: Iterable[int], tokens: bytes) -> Stored:
        parent = None if before.parent is None else int(self._serial[before.last_page])
        return Stored(namespace=namespace, parent=parent, page_keys=tuple(keys), token_ids=tokens_of(tokens))

    # ---- explaining -------------------------------------------------------------------------------------

    def remember_evictions(self, max_pages: int) -> None:
        """Keep the last ``max_pages`` evicted pages in mind for ``explain``; forgets those so far."""
        self._memory = EvictionMemory(max_pages, self._page_bytes)

    def explain(
        self,
        token_ids: TokenIds,
        namespace: Namespace = (),
        *,
        visible: Callable[[Namespace], bool] | None = None,
    ) -> Explanation:
        """How long the hit is and why it stops there. Other namespaces are looked into only where ``visible``
        allows it (``None``: all of them). Changes nothing; costs O(pages)."""
        key = key_of(token_ids)
        spot = self._find(key, namespace)
        hit = 0 if spot is None else spot.num_bytes // TOKEN_BYTES + spot.agree
        if hit == len(key) // TOKEN_BYTES:
            return Explanation(hit_tokens=hit, reason="whole", position=hit)
        cached_token: int | None = None
        if spot is not None and spot.next_node is not None:
            offset = spot.next_index * self.page_size + spot.agree
            if spot.agree < self._tokens_in(spot.next_node, spot.next_index):
                cached_token = int(tokens_of(spot.next_node.tokens)[offset])
        path = self._serial[joined([] if spot is None else spot.path)].tolist()
        evicted = self._memory.evictions_ago(namespace, path, key, hit)
        other: Namespace | None = None
        longest = hit
        for name in self._roots:
            if name == namespace or (visible is not None and not visible(name)):
                continue
            if (length := self.peek(token_ids, name)) > longest:
                other, longest = name, length
        reason: Reason = "absent" if cached_token is None else "differs"
        if other is not None:
            reason = "other_namespace"
        if evicted is not None:
            reason = "evicted"
        return Explanation(
            hit_tokens=hit, reason=reason, position=hit, cached_token=cached_token, evictions_ago=evicted,
            other_namespace=other,
        )  # fmt: skip

    # ---- verifying --------------------------------------------------------------------------------------

    def _nodes(self) -> Iterator[Node]:
        """All nodes, roots included; iterative."""
        todo = list(self._roots.values())
        while todo:
            node = todo.pop()
            yield node
            if node.children is not None:
                todo.extend(node.children.values())

    def check(self, ref_count: NDArray[np.int32] | None = None) -> None:
        """Verify T1 to T5, and with ``ref_count`` also M2 and that every idle page can be evicted, from
        scratch. Raises ``InternalError``."""
        seen: list[bytes] = []
        num_nodes = 0
        for node in self._nodes():
            if node.parent is None:
                require(node.children is not None, "T1", f"empty root of namespace {node.namespace}")
                require(self._roots.get(node.namespace) is node, "T1", "a root stands under another name")
            else:
                num_nodes += 1
                seen.append(node.ids)
                self._check_edge(node)
                if ref_count is not None:
                    self._check_counts(node, ref_count)
            self._check_siblings(node)
        pages = np.sort(joined(seen))
        require(bool((pages[1:] != pages[:-1]).all()), "T3", "a page is in the tree twice:", pages)
        require(np.array_equal(pages, self.held_pages), "T3", "serials and nodes disagree")
        require(num_nodes == self._num_nodes, "T4", f"{num_nodes} nodes, counted {self._num_nodes}")
        tails = np.sort(
            np.array([n.last_page for n in self._nodes() if n.parent and not n.children], np.int32)
        )
        self._order.check_tails(tails)
        self._changes.check()

    def _check_edge(self, node: Node) -> None:
        state = ("pages", node.pages, "bytes of tokens", len(node.tokens))
        require(len(node.pages) > 0, "T1", "a node without pages")
        require(len(node.pages) == -(-len(node.tokens) // self._page_bytes), "T1", *state)
        require(len(node.tokens) % self._page_bytes == 0 or node.children is None, "T1", *state)
        require(all(self._node_of[page] is node for page in node.pages), "T4", "node_of_page:", *state)
        assert node.parent is not None
        before = None if node.parent.parent is None else node.parent.last_page
        self._order.check_path(node.pages, before)

    def _check_counts(self, node: Node, ref_count: NDArray[np.int32]) -> None:
        counts = ref_count[node.pages]
        state = ("pages", node.pages, "counts", counts)
        require(bool((counts >= 1).all()), "M1", "the tree holds a page that is free:", *state)
        require(bool((counts[1:] <= counts[:-1]).all()), "M2", *state)
        assert node.parent is not None
        if node.parent.parent is not None:
            require(ref_count[node.parent.pages[-1]] >= counts[0], "M2", *state)
        if node.children is None and counts[-1] == 1:
            self._order.check_candidate(node.last_page)

    def _check_siblings(self, node: Node) -> None:
        if node.children is None:
            return
        before: bytes | None = None
        for key, child in node.children.items():
            require(child.parent is node, "T4", "a child does not know its parent")
            require(key == child.tokens[: self._page_bytes], "T2", "a child stands under another key")
            # In byte order, what begins with a key follows it directly.
            require(before is None or not key.startswith(before), "T2", "a sibling begins with another")
            before = key

    def stats(self) -> dict[str, Any]:
        """Sizes, counters since the beginning, and ``EvictionOrder``'s histograms."""
        return {
            "num_pages": self.num_pages,
            "num_nodes": self._num_nodes,
            "num_namespaces": len(self._roots),
            "num_candidates": len(self._order),
            "version": self.version,
            "num_evicted_tokens": self._evicted_bytes // TOKEN_BYTES,
            **self._counters,
            **self._order.stats(),
        }
