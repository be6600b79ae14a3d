"""Every error that radixkv raises, as one tree.

RadixKVError
├── InvalidRequestError (ValueError)   the caller's input; raised before any work
│   ├── RequestTooLargeError           can never fit: names what it needs and the limit
│   ├── DuplicateRequestError          a request id that is already in use
│   └── QueueFullError                 as many requests wait as may: names both numbers
├── QueueTimeoutError (TimeoutError)   a call of several requests waited too long for its start
├── RequestAbortedError                a call of several results was aborted by its request's id
├── MisuseError (ValueError)           a part of the ledger was called against its contract
├── ConfigError (ValueError)           a setting that makes no sense, with its value and the limit
├── UnsupportedModelError              the load-time check refused a model, and says why
├── ModelLoadError                     files missing, damaged or of an unknown kind
├── OutOfPages                         the pool cannot supply the pages, even after eviction
├── PinBudgetExceeded                  a pin would hold more pages than the budget allows
├── NonFiniteLogitsError               the model gave NaN or infinity; names the requests
├── EngineDeadError                    the engine has stopped for good; ``cause`` says why
└── InternalError                      an invariant broke: our fault, never the caller's
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class RadixKVError(Exception):
    """Base of everything that radixkv raises on purpose."""


class InvalidRequestError(RadixKVError, ValueError):
    """The request itself is wrong. Raised before any work; other requests are untouched."""


class RequestTooLargeError(InvalidRequestError):
    """The request can never fit; the message names what it needs and the limit."""


class DuplicateRequestError(InvalidRequestError):
    """A request with this id is already waiting or running."""


class QueueFullError(InvalidRequestError):
    """``num_waiting`` requests wait, and ``max_waiting`` may. Nothing is wrong with the request itself: send
    it again later."""

    def __init__(self, num_waiting: int, max_waiting: int) -> None:
        super().__init__(f"the queue is full: {num_waiting} requests wait, max_waiting is {max_waiting}")
        self.num_waiting = num_waiting
        self.max_waiting = max_waiting


class QueueTimeoutError(RadixKVError, TimeoutError):
    """A ``prefill``, ``score`` or ``beam_search`` waited longer than ``queue_timeout_s`` for its start, and
    was not computed. (``generate`` gives an ``Output`` with the finish reason ``timeout`` instead.)"""


class RequestAbortedError(RadixKVError):
    """A ``prefill``, ``score`` or ``beam_search`` was aborted by the id of one of its requests. (``generate``
    gives an ``Output`` with what there is, and the finish reason ``abort``, instead.)"""


class MisuseError(RadixKVError, ValueError):
    """The calling code broke a contract of the ledger (a page freed twice, a step out of order). Raised
    before anything was changed."""


class ConfigError(RadixKVError, ValueError):
    """A setting is out of range; the message names the setting, its value and the limit."""


class UnsupportedModelError(RadixKVError):
    """The model cannot be run exactly over the paged store; the message says why."""


class ModelLoadError(RadixKVError):
    """The model's files could not be read."""


class OutOfPages(RadixKVError):
    """The pool cannot supply ``needed`` pages; only ``available`` could be had, evictions included."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"needs {needed} pages, only {available} are available")
        self.needed = needed
        self.available = available


class PinBudgetExceeded(RadixKVError):
    """A pin needs ``needed`` more pages than pins already hold; the budget has ``left`` left."""

    def __init__(self, needed: int, left: int) -> None:
        super().__init__(f"pin needs {needed} more pages, the pin budget has {left} left")
        self.needed = needed
        self.left = left


class NonFiniteLogitsError(RadixKVError):
    """The model's logits, or the hidden states before them, are NaN or infinite for the requests in
    ``request_ids``, more precisely for the batch's sequences in ``seq_ids``. What the failed step computed is
    not kept."""

    def __init__(self, request_ids: tuple[int, ...], seq_ids: tuple[int, ...]) -> None:
        super().__init__(f"logits are not finite for requests {', '.join(map(str, request_ids))}")
        self.request_ids = request_ids
        self.seq_ids = seq_ids

    @classmethod
    def of(cls, request_ids: Iterable[int], seq_ids: Iterable[int]) -> NonFiniteLogitsError:
        """Of names that may be numpy's and may repeat."""
        names = (tuple(dict.fromkeys(map(int, ids))) for ids in (request_ids, seq_ids))
        return cls(*names)


class EngineDeadError(RadixKVError):
    """The engine has stopped for good. ``__cause__`` is what killed it. Everybody gets one of his own."""

    def again(self) -> EngineDeadError:
        """The same for one more caller: an error that is raised at many places collects the tracebacks of all
        of them, and keeps what their frames hold."""
        twin = EngineDeadError(*self.args)
        twin.__cause__ = self.__cause__
        return twin


class InternalError(RadixKVError):
    """An invariant does not hold. This is a bug in radixkv; the message carries the state."""
