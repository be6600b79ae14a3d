"""Hold: what a manager knows of the sequence whose page table this is."""

from __future__ import annotations

from radixkv.types import Namespace


class Hold:
    """Stands in a page table between ``acquire`` (or ``fork``) and ``release``, written by the manager only.
    With it the manager sees, at O(1) per call, that a sequence is its own, that the table is this sequence's,
    and that nobody lowered what was computed."""

    __slots__ = ("manager", "namespace", "num_computed", "owner")

    def __init__(
        self, manager: object, namespace: Namespace, num_computed: int, owner: object | None = None
    ) -> None:
        self.manager = manager
        """Who counts the table's pages."""
        self.owner = owner
        """The sequence whose tokens the pages are for; ``None`` in a fork that nobody has used yet. Whoever
        uses it first has it."""
        self.namespace = namespace
        """The sequence's, cache epoch included: the tree that its pages belong to."""
        self.num_computed = num_computed
        """Computed tokens at the manager's last look; more may have been computed since, never fewer."""
