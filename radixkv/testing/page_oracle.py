"""PageOracle: the prefix tree with one page per node, slow and obvious. It predicts what RadixTree does.

It keeps no counts: who else holds a page is told to it, as a function of the page id, where that matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from radixkv.config import EvictionPolicyName
from radixkv.types import Namespace, TokenIds

IsIdle = Callable[[int], bool]
"""Tells whether the tree is the only holder of a page."""


@dataclass(eq=False)
class OracleNode:
    """One page: its tokens (fewer than a page's worth in a partial leaf), and when it was last used."""

    token_ids: tuple[int, ...]
    page_id: int
    parent: OracleNode | None
    last_use: int = 0
    num_hits: int = 0
    priority: int | None = None
    """The highest of all who used it."""
    last_growth: int = 0
    """When the last page was added at or below it."""
    worth: int = 0
    """What it is worth to keep it, for the policy ``cost``."""
    children: dict[bytes, OracleNode] = field(default_factory=dict)

    @property
    def path(self) -> tuple[OracleNode, ...]:
        """From the first page of the prefix to this one; the root is left out."""
        nodes: list[OracleNode] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return tuple(reversed(nodes))


@dataclass(frozen=True)
class OracleMatch:
    """The whole pages of a hit, and the page that agrees best with what follows."""

    nodes: tuple[OracleNode, ...]
    partial: OracleNode | None
    """Agrees in ``partial_tokens`` tokens; ``None`` where that is 0. Of equally good pages it is the first
    in byte order from the query on, or else the last before it."""
    partial_tokens: int
    num_tokens: int

    @property
    def path(self) -> tuple[OracleNode, ...]:
        """All pages that the match uses."""
        return self.nodes if self.partial is None else (*self.nodes, self.partial)

    @property
    def page_ids(self) -> tuple[int, ...]:
        return tuple(node.page_id for node in self.nodes)


@dataclass(frozen=True)
class OracleInsertion:
    """``canonical``: the tree's page for each page inserted. ``adopted``: indices of those that were new.
    ``replaced``: ``(old, new)`` where a fuller page pushed a partial leaf out."""

    canonical: tuple[int, ...]
    adopted: tuple[int, ...]
    replaced: tuple[int, int] | None


class PageOracle:
    """O1: siblings differ, and none is the beginning of another (T2). O2: a page is here at most once (T3).
    O3: last use and the order of eviction never rise along a path (T5). O4: only leaves are partial (T1)."""

    def __init__(self, page_size: int, eviction_policy: EvictionPolicyName = "lru") -> None:
        self.page_size = page_size
        self.eviction_policy = eviction_policy
        self.roots: dict[Namespace, OracleNode] = {}
        self.clock = 0
        self.worthless = 0
        """Worth of what need not be kept: rises to that of each victim, and by 1 with each use."""

    def lookup(self, token_ids: TokenIds, namespace: Namespace = ()) -> OracleMatch:
        """The longest cached beginning of ``token_ids``. Changes nothing."""
        node = self.roots.get(namespace)
        nodes: list[OracleNode] = []
        start = 0
        while node is not None and start < len(token_ids):
            child = node.children.get(_key(token_ids[start : start + self.page_size]))
            if child is None or len(child.token_ids) < self.page_size:
                break
            nodes.append(child)
            start += self.page_size
            node = child
        partial = None if node is None else self._nearest(node, token_ids[start : start + self.page_size])
        agree = 0 if partial is None else num_common(partial.token_ids, token_ids[start:].tolist())
        return OracleMatch(tuple(nodes), partial, agree, start + agree)

    @staticmethod
    def _nearest(node: OracleNode, rest: TokenIds) -> OracleNode | None:
        """The child that shares most tokens with ``rest``; ``None`` if none shares any."""
        keys = sorted(node.children)
        ordered = [k for k in keys if k >= _key(rest)] + [k for k in reversed(keys) if k < _key(rest)]
        tokens = rest.tolist()
        best = max(ordered, key=lambda k: num_common(node.children[k].token_ids, tokens), default=None)
        if best is None or num_common(node.children[best].token_ids, tokens) == 0:
            return None
        return node.children[best]

    def touch(self, nodes: Seq[OracleNode], priority: int = 0, *, is_hit: bool = True) -> None:
        """Mark a path as used now, all of it at the same moment; a hit, or else an insert."""
        self.clock += 1
        self.worthless += bool(nodes)
        for node in nodes:
            node.last_use = self.clock
            node.num_hits += is_hit
            node.priority = priority if node.priority is None else max(node.priority, priority)
        worth = 0
        for index, node in reversed(list(enumerate(nodes))):
            cost = int(2**20 * (1 + index * self.page_size / 16384))  # attention: as much again at 16384
            worth = max(worth, self.worthless + cost * (1 + node.num_hits))
            node.worth = max(node.worth, worth)

    def rank(self, node: OracleNode) -> tuple[int, int, int]:
        """The smallest goes first. The last figure, the page, decides between equals."""
        assert node.priority is not None
        first, second = {
            "lru": (0, node.last_use),
            "fifo": (0, node.last_growth),
            "lfu": (node.num_hits, node.last_use),
            "slru": (int(node.num_hits >= 2), node.last_use),
            "priority": (node.priority, node.last_use),
            "cost": (0, node.worth),
        }[self.eviction_policy]
        return first, second, node.page_id

    def insert(
        self, token_ids: TokenIds, page_ids: Seq[int], namespace: Namespace = (), priority: int = 0
    ) -> OracleInsertion:
        """Add the pages of ``token_ids``; the last one may be partial. Known pages stay as they are.

        Counts as a use of the whole path.
        """
        size = self.page_size
        assert len(page_ids) == -(-len(token_ids) // size)
        node = self.roots.setdefault(namespace, OracleNode((), -1, None))
        canonical: list[int] = []
        adopted: list[int] = []
        replaced: tuple[int, int] | None = None
        path: list[OracleNode] = []
        for index, page_id in enumerate(page_ids):
            tokens = tuple(token_ids[index * size : (index + 1) * size].tolist())
            known = self._child_that_covers(node, tokens)
            if known is None:
                beginning = self._child_that_begins(node, tokens)
                if beginning is not None:
                    self._unlink(beginning)
                    replaced = (beginning.page_id, page_id)
                known = OracleNode(tokens, page_id, node)
                node.children[_key(np.array(tokens, np.int32))] = known
                adopted.append(index)
            canonical.append(known.page_id)
            path.append(known)
            node = known
        if not path:
            self._drop_empty(namespace)
        self.touch(path, priority, is_hit=False)
        for known in path if adopted else ():
            known.last_growth = self.clock
        return OracleInsertion(tuple(canonical), tuple(adopted), replaced)

    @staticmethod
    def _child_that_covers(node: OracleNode, tokens: tuple[int, ...]) -> OracleNode | None:
        """The child that holds all of ``tokens``, perhaps more of them; the first one in byte order."""
        covering = [(k, c) for k, c in node.children.items() if c.token_ids[: len(tokens)] == tokens]
        return min(covering, key=lambda item: item[0])[1] if covering else None

    @staticmethod
    def _child_that_begins(node: OracleNode, tokens: tuple[int, ...]) -> OracleNode | None:
        """The partial leaf that is the beginning of ``tokens``."""
        for child in node.children.values():
            if tokens[: len(child.token_ids)] == child.token_ids:
                return child
        return None

    def remove(self, node: OracleNode) -> int:
        """Take a leaf out; returns its page id."""
        assert not node.children, "only a leaf can go"
        self._unlink(node)
        for namespace in list(self.roots):
            self._drop_empty(namespace)
        return node.page_id

    @staticmethod
    def _unlink(node: OracleNode) -> None:
        assert node.parent is not None
        del node.parent.children[_key(np.array(node.token_ids, np.int32))]

    def _drop_empty(self, namespace: Namespace) -> None:
        if not self.roots[namespace].children:
            del self.roots[namespace]

    def nodes(self) -> Iterator[tuple[Namespace, OracleNode]]:
        """Every page of the tree, parents before children."""
        for namespace, root in self.roots.items():
            pending = list(root.children.values())
            while pending:
                node = pending.pop()
                yield namespace, node
                pending.extend(node.children.values())

    def next_victim(self, is_idle: IsIdle) -> OracleNode | None:
        """The idle leaf of the lowest rank; ``None`` where there is none."""
        leaves = [n for _, n in self.nodes() if not n.children and is_idle(n.page_id)]
        return min(leaves, key=self.rank, default=None)

    def evict_one(self, node: OracleNode) -> None:
        """Remove the next victim."""
        self.worthless = max(self.worthless, node.worth)
        self.remove(node)

    def evict(self, num_pages: int, is_idle: IsIdle) -> list[OracleNode]:
        """Remove up to ``num_pages`` victims one by one; returns them in order."""
        victims: list[OracleNode] = []
        while len(victims) < num_pages:
            victim = self.next_victim(is_idle)
            if victim is None:
                break
            self.evict_one(victim)
            victims.append(victim)
        return victims

    def idle_pages(self, is_idle: IsIdle) -> set[int]:
        """Every page that ``evict`` of everything would return: idle, and so is all that hangs from it."""
        idle: set[int] = set()
        for _, node in reversed(list(self.nodes())):
            if is_idle(node.page_id) and all(c.page_id in idle for c in node.children.values()):
                idle.add(node.page_id)
        return idle

    def content(self) -> dict[int, tuple[Namespace, int, tuple[int, ...]]]:
        """For each page: its namespace, the page before it (-1 for none), and its tokens."""
        found: dict[int, tuple[Namespace, int, tuple[int, ...]]] = {}
        for namespace, node in self.nodes():
            assert node.parent is not None
            found[node.page_id] = (namespace, node.parent.page_id, node.token_ids)
        return found

    def num_edges(self) -> int:
        """How many nodes a tree has that joins single-child chains."""
        return sum(_starts_edge(node) for _, node in self.nodes())

    def clear(self) -> list[int]:
        """Forget everything; returns the page ids."""
        page_ids = [node.page_id for _, node in self.nodes()]
        self.roots.clear()
        return page_ids

    def check(self) -> None:
        page_ids = [node.page_id for _, node in self.nodes()]
        assert len(page_ids) == len(set(page_ids)), f"O2: a page stands twice: {sorted(page_ids)}"
        for _, node in self.nodes():
            assert node.parent is not None
            if node.parent.parent is not None:
                assert node.last_use <= node.parent.last_use, f"O3: page {node.page_id} newer than its parent"
                ranks = self.rank(node)[:2], self.rank(node.parent)[:2]
                assert ranks[0] <= ranks[1], f"O3: page {node.page_id} outranks its parent: {ranks}"
            full = len(node.token_ids) == self.page_size
            assert full or not node.children, f"O4: partial page {node.page_id} has children"
            siblings = [n for n in node.parent.children.values() if n is not node]
            beginnings = [n.token_ids[: len(node.token_ids)] for n in siblings]
            assert node.token_ids not in beginnings, f"O1: page {node.page_id} begins a sibling"

    def stats(self) -> dict[str, int]:
        return {"num_pages": sum(1 for _ in self.nodes()), "num_namespaces": len(self.roots)}


def num_common(left: Seq[int], right: Seq[int]) -> int:
    """How many leading tokens agree."""
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


def _starts_edge(node: OracleNode) -> bool:
    """Whether a merged tree begins an edge here: below the root, or beside a sibling."""
    assert node.parent is not None
    return node.parent.parent is None or len(node.parent.children) > 1


def _key(token_ids: TokenIds) -> bytes:
    return np.ascontiguousarray(token_ids, np.int32).tobytes()
