"""Pin, PinBook, FlushReport: prefixes that must stay."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from uuid import uuid4

from radixkv.errors import MisuseError, PinBudgetExceeded
from radixkv.plain import shown


@dataclass(frozen=True, kw_only=True)
class Pin:
    """A receipt: these pages are held until ``unpin``, the deadline or a flush."""

    pin_id: int
    num_tokens: int
    """How many tokens of the prefix were cached, and are held now: to the token, not to the page."""
    pages: tuple[int, ...]
    """The pages held at the moment of this receipt, a partial last one included."""
    deadline: float | None
    """By the manager's clock; ``None``: no limit."""
    book_id: str = field(repr=False)
    """Of the ``PinBook`` that it is from: no two are alike, in no two processes."""


@dataclass(frozen=True, kw_only=True)
class FlushReport:
    """What a flush did."""

    num_pages_freed: int
    num_pages_held: int
    """Pages that left the tree but stay with running sequences until these end."""
    pins_dropped: tuple[Pin, ...]


class PinBook:
    """Which pins live, against a budget of distinct pages. Counts nothing in the pool itself."""

    def __init__(self, max_pages: int) -> None:
        self.max_pages = max_pages
        self._pins: dict[int, Pin] = {}
        self._next_id = 0
        self._book_id = uuid4().hex

    @property
    def pins(self) -> tuple[Pin, ...]:
        """Live pins with the pages that they hold now, oldest first."""
        return tuple(self._pins.values())

    @property
    def num_pages(self) -> int:
        """Distinct pages that pins hold."""
        return len(self._pages())

    def _pages(self) -> set[int]:
        return {page for pin in self._pins.values() for page in pin.pages}

    def add(self, pages: tuple[int, ...], num_tokens: int, deadline: float | None) -> Pin:
        """Raises ``PinBudgetExceeded``, having changed nothing."""
        held = self._pages()
        needed = len(set(pages) - held)
        if needed > self.max_pages - len(held):
            raise PinBudgetExceeded(needed, self.max_pages - len(held))
        pin = Pin(
            pin_id=self._next_id, num_tokens=num_tokens, pages=pages, deadline=deadline, book_id=self._book_id
        )
        self._next_id += 1
        self._pins[pin.pin_id] = pin
        return pin

    def refuse_foreign(self, pin: object) -> None:
        """Raise ``MisuseError`` unless ``pin`` is a receipt of this book, whether it lives or not."""
        if not isinstance(pin, Pin):
            raise MisuseError(f"not a pin: {shown(pin)}")
        if pin.book_id != self._book_id:
            raise MisuseError(f"pin {shown(pin.pin_id)} is not from here: another one gave this receipt")

    def remove(self, pin_id: int) -> Pin | None:
        """The pin with the pages that it holds now; ``None`` if it is gone already."""
        return self._pins.pop(pin_id, None)

    def expired(self, now: float) -> list[Pin]:
        """Pins whose deadline has come."""
        return [pin for pin in self._pins.values() if pin.deadline is not None and pin.deadline <= now]

    def follow(self, old: int, new: int) -> int:
        """Let every pin on ``old`` hold ``new`` in its place; returns how many did."""
        moved = [pin for pin in self._pins.values() if old in pin.pages]
        for pin in moved:
            pages = tuple(new if page == old else page for page in pin.pages)
            self._pins[pin.pin_id] = replace(pin, pages=pages)
        return len(moved)
