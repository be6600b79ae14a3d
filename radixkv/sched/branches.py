"""Branches: the cached prefixes of waiting requests as a tree, from their token ids alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from radixkv.sched.sharing import common_prefix
from radixkv.sequence import Sequence
from radixkv.types import TokenIds

_ABOVE_ALL = -1
"""Depth of the root, which is above the first token of every namespace."""


@dataclass(eq=False)
class Branch:
    """A prefix at which the hits of waiting requests part or end."""

    depth: int
    """Its tokens."""
    members: list[Sequence] = field(default_factory=list)
    """Requests whose hit ends here; those of the root have none."""
    children: list[Branch] = field(default_factory=list)
    weight: int = 0
    """Requests here and below; known once the branch hangs in its parent."""
    earliest: int = 0
    """The lowest number of arrival among them."""

    def adopt(self, child: Branch) -> None:
        """Hang a finished branch below this one."""
        child.weight = len(child.members) + sum(below.weight for below in child.children)
        numbers = [seq.number for seq in child.members] + [below.earliest for below in child.children]
        child.earliest = min(numbers)
        self.children.append(child)


def branches_of(waiting: Iterable[Sequence], hits: Mapping[int, int]) -> Branch:
    """The root over the hits (tokens, by request id) of ``waiting``. Sorts their bytes, so that the next of
    each is the one that shares most with it: O(n log n) comparisons, and one look at each hit's tokens."""
    root = Branch(_ABOVE_ALL)
    spaces: dict[object, int] = {}
    found: list[tuple[int, bytes, Sequence]] = []
    for seq in waiting:
        hit = hits[seq.request.request_id]
        if hit == 0:
            root.members.append(seq)
            continue
        space = spaces.setdefault(seq.request.namespace, len(spaces))
        found.append((space, seq.token_ids[:hit].tobytes(), seq))
    found.sort(key=lambda entry: entry[:2])
    path = [root]
    before: tuple[int, TokenIds] = (-1, np.empty(0, np.int32))
    for space, key, seq in found:
        ids: TokenIds = np.frombuffer(key, np.int32)
        length = min(len(ids), len(before[1]))
        shared = common_prefix(ids[:length], before[1][:length]) if space == before[0] else _ABOVE_ALL
        _climb(path, shared)
        if path[-1].depth < len(ids):
            path.append(Branch(len(ids)))
        path[-1].members.append(seq)
        before = (space, ids)
    _climb(path, _ABOVE_ALL)
    return root


def _climb(path: list[Branch], depth: int) -> None:
    """Finish the branches of ``path`` below ``depth``, so that it ends in one of exactly that depth."""
    while path[-1].depth > depth:
        done = path.pop()
        if path[-1].depth < depth:
            path.append(Branch(depth))
        path[-1].adopt(done)
