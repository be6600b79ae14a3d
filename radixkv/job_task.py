"""JobTask: a call of several rounds of requests on its way through the engine thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from radixkv.answer import Answer, take_output
from radixkv.jobs import Job
from radixkv.mailbox import Mailbox
from radixkv.sched.batch import SequenceOutput
from radixkv.sequence import Request
from radixkv.service import Service

T = TypeVar("T")


class JobTask(Generic[T]):
    """Its methods are called by the engine thread, between two steps; ``future`` belongs to the loop."""

    def __init__(
        self,
        mailbox: Mailbox,
        future: asyncio.Future[T],
        make_job: Callable[[Service], Job[T]],
        undo: Callable[[Service, T], None] | None = None,
    ) -> None:
        """``undo`` lets go of a result that holds something, where it does not arrive."""
        self.mailbox = mailbox
        self.is_cancelled = False
        self._undo = undo
        self._let_go: Callable[[], None] | None = None
        """Set while the result is on its way, if it holds something."""
        self._future = future
        self._make_job = make_job
        self._job: Job[T] | None = None
        self._answers: dict[int, Answer] = {}

    def start(self, service: Service) -> Sequence[Request]:
        """The first round's requests."""
        self._job = self._make_job(service)
        return self._advance(service, lambda job: next(job))

    def awaits(self, request_id: int) -> bool:
        """Whether more is to come from this request."""
        answer = self._answers.get(request_id)
        return answer is not None and not answer.is_done

    def take(self, service: Service, output: SequenceOutput) -> Sequence[Request]:
        """The next round's requests, once this round has ended. A request's error is raised."""
        answer = self._answers[output.request_id]
        take_output(service.engine, answer, output)
        answer.raise_unless_answered()
        if not all(answer.is_done for answer in self._answers.values()):
            return ()
        return self._advance(service, lambda job: job.send(self._answers))

    def _advance(self, service: Service, step: Callable[[Job[T]], Sequence[Request]]) -> Sequence[Request]:
        """Go on to a round that has requests, or to the end."""
        assert self._job is not None
        try:
            requests = step(self._job)
            while not requests:
                requests = self._job.send({})
        except StopIteration as end:
            if self._undo is not None:
                self._let_go = partial(self._undo, service, end.value)
            self._tell(end.value, None)
            return ()
        self._answers = {request.request_id: Answer(request, None) for request in requests}
        return requests

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` where the result is awaited."""
        self.close()
        self._tell(None, error)

    def _tell(self, value: Any, error: BaseException | None) -> None:
        self.mailbox.put(partial(_settle, self._future, value, error), partial(_settle, self._future, None))

    @property
    def holds_something(self) -> bool:
        """Whether ``close`` has to let go of a result that has not arrived yet."""
        return self._let_go is not None

    def arrived(self) -> None:
        """The caller has the result, and answers for it from now on. Called on the loop's thread."""
        self._let_go = None

    def close(self) -> None:
        """Nobody waits any more."""
        if self._job is not None:
            self._job.close()
        let_go, self._let_go = self._let_go, None
        if let_go is not None:
            let_go()


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():  # cancelled meanwhile
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
