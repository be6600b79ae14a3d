"""Finding: how far a look-up came, and what it depends on. ChangeLog: whether that has changed since."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.kv.eviction_memory import Anchor
from radixkv.kv.invariant import require


@dataclass(slots=True, eq=False)
class Finding:
    """``num_tokens`` of a prompt were found. That stays so for as long as the tree holds the last whole page
    of them, and nothing entered or left right behind it that could be more, or was more, than what else is
    there has in common with the rest of the prompt."""

    num_tokens: int
    version: int
    """The tree's, when it was looked up, or last seen to be as it was."""
    moment: int
    """The change log's, likewise."""
    anchor: Anchor
    """Serial of the last whole page found; the namespace where none was."""
    page: int
    """Its id, which another page may have by now; of no meaning where none was found."""
    rest: bytes
    """The prompt's tokens behind that page, as int32 bytes, up to a page of them."""


class ChangeLog:
    """What entered or left the tree lately, and right behind which page.

    A page enters or leaves among others, and some beginning ``b`` of it is the longest that it has in common
    with any of those. Then only prompts that go on with ``b`` and the page's next token can see a difference:
    all others share as much with one of those that stay. So ``b`` and that token are what is noted.

    What is not remembered any more counts as changed, so that memory is bounded.

    T6: no entry is of the future, none older than the log reaches back; the lengths are those of the entries.
    """

    def __init__(self, max_entries: int = 4096) -> None:
        assert max_entries >= 1
        self.now = 0
        """The number of the last change."""
        self._max_entries = max_entries
        self._since = 0
        self._last: dict[tuple[Anchor, bytes], int] = {}
        self._lengths: dict[Anchor, dict[int, int]] = {}
        """By anchor, how long its entries are in bytes, and the last change of each length."""

    def note(self, anchor: Anchor, beginning: bytes) -> None:
        """What has this ``beginning`` (one token at least) entered or left right behind ``anchor``."""
        if len(self._last) >= self._max_entries:
            self.forget()
        self.now = now = self.now + 1
        self._last[anchor, beginning] = now
        self._lengths.setdefault(anchor, {})[len(beginning)] = now

    def has_changed(self, anchor: Anchor, rest: bytes, moment: int) -> bool:
        """Whether something was noted after ``moment`` with whose beginning ``rest`` begins, or may have
        been."""
        if moment < self._since:
            return True
        lengths = self._lengths.get(anchor)
        if lengths is None:
            return False
        for length, latest in lengths.items():
            if latest > moment and self._last.get((anchor, rest[:length]), 0) > moment:
                return True
        return False

    def forget(self) -> None:
        """Everything may have changed until now."""
        self._last.clear()
        self._lengths.clear()
        self.now += 1
        self._since = self.now

    def check(self) -> None:
        """T6. Raises ``InternalError``."""
        lengths: dict[Anchor, dict[int, int]] = {}
        for (anchor, beginning), moment in self._last.items():
            require(self._since < moment <= self.now, "T6", anchor, beginning, moment, self.stats)
            of_anchor = lengths.setdefault(anchor, {})
            of_anchor[len(beginning)] = max(of_anchor.get(len(beginning), 0), moment)
        require(lengths == self._lengths, "T6", "lengths are", self._lengths, "not", lengths)

    def stats(self) -> dict[str, int]:
        return {"num_entries": len(self._last), "now": self.now, "since": self._since}
