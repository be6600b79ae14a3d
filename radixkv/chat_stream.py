"""ChatStream: a reply on its way, piece by piece."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

from radixkv.errors import MisuseError
from radixkv.generation import Generation
from radixkv.outputs import Delta, Output
from radixkv.transcript import ChatPrompt


class ChatStream:
    """To be iterated over, once. The turn begins with the first piece that is asked for, and ends with the
    last one, with an error, with ``aclose``, when nobody refers to the stream any more, or when the task that
    has left it says something else to the chat. Ended before its last piece, it aborts the reply's request
    and leaves the conversation as it was.
    """

    def __init__(
        self,
        begin: Callable[[ChatStream], Awaitable[tuple[ChatPrompt, Generation]]],
        record: Callable[[ChatPrompt, Output], Awaitable[None]],
        end: Callable[[], None],
    ) -> None:
        """``begin`` takes the chat's turn, ``end`` gives it back, ``record`` makes the reply a part of the
        conversation."""
        self._begin = begin
        self._record = record
        self._end = end
        self._prompt: ChatPrompt | None = None
        self._generation: Generation | None = None
        self._has_turn = False
        self._is_over = False
        self._is_waiting = False
        self._is_superseded = False
        self._task: weakref.ref[asyncio.Task[Any]] | None = None

    def __aiter__(self) -> ChatStream:
        return self

    async def __anext__(self) -> Delta:
        if self._is_waiting:
            raise MisuseError("another task waits for this stream already")
        if self._is_superseded:
            raise MisuseError(
                "this stream is over: the task that read it has said something else to its chat"
            )
        if self._is_over:
            raise StopAsyncIteration
        self._is_waiting = True
        try:
            delta = await self._next()
        except BaseException:
            self._close()
            raise
        finally:
            self._is_waiting = False
        task = asyncio.current_task()
        self._task = None if task is None else weakref.ref(task)
        return delta

    async def _next(self) -> Delta:
        if self._prompt is None or self._generation is None:
            self._prompt, self._generation = await self._begin(self)
        delta = await self._generation.__anext__()
        if delta.finish_reason is not None:
            await self._record(self._prompt, await self._generation)
            self._close()
        return delta

    def takes_turn(self) -> None:
        """The chat's turn is this stream's from now on."""
        self._has_turn = True

    def leave(self) -> None:
        """The chat goes on to something else: where the task that runs now is the one that read this stream,
        it reads it no more, and the turn ends. Otherwise nothing changes."""
        task = asyncio.current_task()
        if self._has_turn and not self._is_waiting and self._task is not None and self._task() is task:
            self._is_superseded = True
            self._close()

    async def aclose(self) -> None:
        """End the turn, if it goes on. Called twice, or after the end, it does nothing."""
        self._close()

    def _close(self) -> None:
        self._is_over = True
        if self._generation is not None:
            self._generation.abandon()
        if self._has_turn:
            self._has_turn = False
            self._end()

    def __del__(self) -> None:
        if getattr(self, "_has_turn", False):
            self._close()
