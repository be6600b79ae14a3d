"""TaskBook: which task waits for which request, and on which event loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from radixkv.kv.invariant import require
from radixkv.mailbox import Mailbox
from radixkv.sched.batch import SequenceOutput
from radixkv.sequence import Request
from radixkv.service import Service


class Task(Protocol):
    """Somebody's call. Every method is called by the engine thread, between two steps; what it has for the
    caller goes into its mailbox."""

    mailbox: Mailbox
    is_cancelled: bool
    """Set by anybody, once; nothing is done for it from then on."""

    def start(self, service: Service) -> Sequence[Request]: ...

    def take(self, service: Service, output: SequenceOutput) -> Sequence[Request]: ...

    def awaits(self, request_id: int) -> bool: ...

    def fail(self, error: BaseException) -> None: ...

    @property
    def holds_something(self) -> bool:
        """Whether its result has to be let go of by ``close``, unless it arrives."""

    def close(self) -> None: ...


class TaskBook:
    """Y3: a request stands with its task, and a task with its requests, or neither does; a task is in the
    book as long as it has requests, or a result that has to arrive. All operations on one task or request
    cost what that one has, however many others there are.
    """

    def __init__(self) -> None:
        self._task_of: dict[int, Task] = {}
        self._by_mailbox: dict[Mailbox, dict[Task, set[int]]] = {}
        self._holding: dict[Task, None] = {}
        """Those without requests, whose results have to arrive."""

    def __len__(self) -> int:
        """Requests under way."""
        return len(self._task_of)

    def find(self, request_id: int) -> Task | None:
        return self._task_of.get(request_id)

    def tasks(self) -> list[Task]:
        return [task for tasks in self._by_mailbox.values() for task in tasks]

    def tasks_of(self, mailbox: Mailbox) -> list[Task]:
        return list(self._by_mailbox.get(mailbox, ()))

    def lost_tasks(self) -> list[Task]:
        """Those whose loop is closed: nobody waits for them any more."""
        closed = [mailbox for mailbox in self._by_mailbox if mailbox.loop.is_closed()]
        return [task for mailbox in closed for task in self._by_mailbox[mailbox]]

    def add(self, task: Task, request_id: int) -> None:
        self._task_of[request_id] = task
        self._ids_of(task).add(request_id)

    def remove(self, request_id: int) -> None:
        """``request_id`` has ended; does nothing where it is not in the book."""
        task = self._task_of.pop(request_id, None)
        if task is not None:
            self._ids_of(task).discard(request_id)
            self.settle(task)

    def settle(self, task: Task) -> None:
        """Put ``task`` in or out, by what it has."""
        if self._ids_of(task):
            return
        if task.holds_something:
            self._holding[task] = None
        else:
            self._forget(task)

    def take_requests(self, task: Task) -> list[int]:
        """The requests of ``task``, which leaves the book."""
        request_ids = sorted(self._ids_of(task))
        for request_id in request_ids:
            del self._task_of[request_id]
        self._forget(task)
        return request_ids

    def settle_all(self) -> None:
        """Let go of tasks whose results have arrived."""
        for task in list(self._holding):
            self.settle(task)

    def _ids_of(self, task: Task) -> set[int]:
        return self._by_mailbox.setdefault(task.mailbox, {}).setdefault(task, set())

    def _forget(self, task: Task) -> None:
        self._holding.pop(task, None)
        tasks = self._by_mailbox[task.mailbox]
        del tasks[task]
        if not tasks:
            del self._by_mailbox[task.mailbox]

    def stale_ids(self) -> list[int]:
        """Requests that their tasks do not wait for."""
        return [request_id for request_id, task in self._task_of.items() if not task.awaits(request_id)]

    def stats(self) -> dict[str, int]:
        """``num_live``: requests under way."""
        return {"num_live": len(self)}

    def check(self) -> None:
        """Y3. Raises ``InternalError``."""
        found = {
            request_id: task
            for mailbox, tasks in self._by_mailbox.items()
            for task, request_ids in tasks.items()
            for request_id in request_ids
            if task.mailbox is mailbox
        }
        require(found == self._task_of, "Y3", self.stats())
