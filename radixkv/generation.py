"""Generation: one prompt's answer, to be iterated delta by delta or awaited as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator
from contextlib import suppress
from dataclasses import replace
from types import TracebackType

from radixkv.engine_thread import EngineThread
from radixkv.errors import MisuseError
from radixkv.namespace import NO_SCOPE, Scope
from radixkv.outputs import Delta, Output
from radixkv.sampling import SamplingParams
from radixkv.stream_task import StreamTask
from radixkv.urgency import NO_URGENCY, Urgency


class Generation:
    """``async for delta in generation`` gives what is new, piece by piece; ``await generation`` waits for the
    whole ``Output``, also inside such a loop. ``generation.output()`` is the same as a coroutine, as
    ``asyncio.create_task`` wants it. The work begins with the first of these, on the loop that runs then.

    A consumer that is slower than the model gets larger deltas, and never holds up the engine: what it has
    not taken yet is kept as one delta (one for each sample). Leaving the loop by ``break``, ``return`` or an
    error, cancelling the task that waits, ``aclose``, and letting go of the last reference all abort the
    request, once, before the engine's next step. Iterated on after that, or after its end or an error, it
    gives nothing more. One task waits at a time; a second raises ``MisuseError``.
    """

    def __init__(
        self,
        thread: EngineThread,
        owner: object,
        prompt: object,
        sampling: SamplingParams,
        request_id: int,
        scope: Scope = NO_SCOPE,
        urgency: Urgency = NO_URGENCY,
    ) -> None:
        self.request_id = request_id
        """For ``abort``."""
        self._thread = thread
        self._owner = owner  # lives as long as its generations
        self._prompt = prompt
        self._sampling = sampling
        self._scope = scope
        self._urgency = urgency
        self._inbox: _Inbox | None = None
        self._task: StreamTask | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __aiter__(self) -> AsyncIterator[Delta]:
        return _Loop(self)

    async def __anext__(self) -> Delta:
        """One delta. Unlike a loop that is left, this aborts nothing."""
        inbox = self._begin()
        while not inbox.deltas and not inbox.is_over:
            await self._more(inbox)
        if inbox.deltas:
            return inbox.deltas.pop(next(iter(inbox.deltas)))
        if inbox.error is not None and not inbox.error_told:
            inbox.error_told = True
            raise inbox.error.with_traceback(inbox.error_trace)
        raise StopAsyncIteration

    def __await__(self) -> Generator[object, None, Output]:
        return self.output().__await__()

    async def output(self) -> Output:
        """The whole of it."""
        inbox = self._begin()
        while not inbox.is_over:
            await self._more(inbox)
        if inbox.error is not None:
            inbox.error_told = True
            raise inbox.error.with_traceback(inbox.error_trace)
        if inbox.output is None:
            raise MisuseError("this generation was closed before its end")
        return inbox.output

    async def aclose(self) -> None:
        """Abort the request if it runs. A loop over it that waits in another task ends; whoever waits for the
        whole gets ``MisuseError``. Called twice, or after the end, it does nothing."""
        self.abandon()
        inbox, loop = self._inbox, self._loop
        if inbox is not None and loop is asyncio.get_running_loop():
            inbox.wake()
        elif inbox is not None and loop is not None:
            with suppress(RuntimeError):  # closed: nobody waits there
                loop.call_soon_threadsafe(inbox.wake)

    def _begin(self) -> _Inbox:
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop is not loop:
            raise MisuseError("this generation began on another event loop")
        if self._inbox is None:
            inbox = _Inbox()
            task = StreamTask(
                self._thread.mailbox(loop),
                inbox,
                self._prompt,
                self._sampling,
                self.request_id,
                self._scope,
                self._urgency,
            )
            self._thread.submit(task)
            self._inbox, self._task, self._loop = inbox, task, loop
        return self._inbox

    async def _more(self, inbox: _Inbox) -> None:
        if inbox.waiter is not None:
            raise MisuseError("another task waits for this generation already")
        inbox.waiter = asyncio.get_running_loop().create_future()
        try:
            await inbox.waiter
        except BaseException:
            self.abandon()
            raise
        finally:
            inbox.waiter = None

    def abandon(self) -> None:
        """``aclose``, without a coroutine."""
        inbox, task = self._inbox, self._task
        if inbox is None:  # never begun, and never will be
            self._inbox = inbox = _Inbox()
        if not inbox.is_over:
            inbox.is_over, inbox.deltas = True, {}
            if task is not None:
                self._thread.cancel(task)

    def __del__(self) -> None:
        if getattr(self, "_task", None) is not None:
            self.abandon()


class _Loop:
    """One ``async for`` over a generation. Nobody else refers to it, so that it ends when the loop is left,
    which Python tells nobody else: the generation itself may have a name that lives on."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def __aiter__(self) -> _Loop:
        return self

    async def __anext__(self) -> Delta:
        return await self._generation.__anext__()

    async def aclose(self) -> None:
        self._generation.abandon()

    def __del__(self) -> None:
        self._generation.abandon()


class _Inbox:
    """What has come and was not taken yet. Used on its loop's thread only."""

    def __init__(self) -> None:
        self.deltas: dict[int, Delta] = {}
        """One for each sample that has something new, in the order in which they began to wait."""
        self.output: Output | None = None
        self.error: BaseException | None = None
        self.error_trace: TracebackType | None = None
        """Where it came from. Others of the same step may be told of the same error: nobody's frames stay."""
        self.error_told = False
        self.is_over = False
        """Nothing more will come, or nobody wants it."""
        self.waiter: asyncio.Future[None] | None = None

    def receive(self, delta: Delta) -> None:
        if not self.is_over:
            waiting = self.deltas.get(delta.sample_index)
            self.deltas[delta.sample_index] = delta if waiting is None else _joined(waiting, delta)
            self.wake()

    def finish(self, output: Output) -> None:
        if not self.is_over:
            self.output, self.is_over = output, True
            self.wake()

    def fail(self, error: BaseException) -> None:
        if not self.is_over:
            self.error, self.error_trace, self.is_over = error, error.__traceback__, True
            self.wake()

    def wake(self) -> None:
        """Whoever waits looks again."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


def _joined(first: Delta, second: Delta) -> Delta:
    """Two deltas as one. The later one's counts and reasons hold."""
    return replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
    )
