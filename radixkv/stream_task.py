"""StreamTask: one prompt on its way through the engine thread, delta by delta to its receiver."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from radixkv.answer import Answer, take_output
from radixkv.mailbox import Mailbox
from radixkv.namespace import NO_SCOPE, Scope
from radixkv.outputs import Delta, Output, delta_of
from radixkv.sampling import SamplingParams
from radixkv.sched.batch import SequenceOutput
from radixkv.sequence import Request
from radixkv.service import Service
from radixkv.urgency import NO_URGENCY, Urgency


class Receiver(Protocol):
    """Is called on its loop's thread only."""

    def receive(self, delta: Delta) -> None: ...

    def finish(self, output: Output) -> None: ...

    def fail(self, error: BaseException) -> None: ...


class StreamTask:
    """Its methods are called by the engine thread, between two steps."""

    def __init__(
        self,
        mailbox: Mailbox,
        receiver: Receiver,
        prompt: object,
        sampling: SamplingParams,
        request_id: int,
        scope: Scope = NO_SCOPE,
        urgency: Urgency = NO_URGENCY,
    ) -> None:
        self.mailbox = mailbox
        self.is_cancelled = False
        self.request_id = request_id
        self._receiver = receiver
        self._prompt = prompt
        self._sampling = sampling
        self._scope = scope
        self._urgency = urgency
        self._answer: Answer | None = None

    def start(self, service: Service) -> Sequence[Request]:
        """The one request. Text is encoded here, so that no loop waits for a tokenizer and no two threads
        ever use it at once."""
        request = service.request(
            self._prompt,
            self._sampling,
            "prompt",
            request_id=self.request_id,
            scope=self._scope,
            urgency=self._urgency,
        )
        self._answer = Answer(request, service.tokenizer)
        return [request]

    def awaits(self, request_id: int) -> bool:
        """Whether more is to come from this request."""
        return self._answer is None or not self._answer.is_done

    def take(self, service: Service, output: SequenceOutput) -> Sequence[Request]:
        """Pass on what is new. No further requests. An error in making text is raised."""
        answer = self._answer
        assert answer is not None
        delta = take_output(service.engine, answer, output)
        if answer.error is not None:
            self.fail(answer.error)
            return ()
        if delta is not None and not answer.is_ranked_at_its_end:
            self._receive(delta)
        if answer.is_done:
            whole = answer.output()
            for sample in whole.samples if answer.is_ranked_at_its_end else ():
                self._receive(delta_of(sample))
            self.mailbox.put(partial(self._receiver.finish, whole), self._receiver.fail)
        return ()

    def _receive(self, delta: Delta) -> None:
        if delta.text or delta.token_ids or delta.finish_reason is not None:
            self.mailbox.put(partial(self._receiver.receive, delta), self._receiver.fail)

    def fail(self, error: BaseException) -> None:
        """Tell the receiver; nothing follows."""
        self.mailbox.put(partial(self._receiver.fail, error), _nobody_left)

    @property
    def holds_something(self) -> bool:
        """An output holds nothing."""
        return False

    def close(self) -> None:
        """Nobody waits any more."""


def _nobody_left(error: BaseException) -> None:
    """The receiver cannot even be told of an error."""
    raise error
