"""EngineThread: the one thread that steps an engine, for callers on other threads and on event loops."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from radixkv.errors import EngineDeadError, MisuseError
from radixkv.kv.invariant import require
from radixkv.mailbox import Mailbox
from radixkv.sched.batch import SequenceOutput
from radixkv.sequence import Request
from radixkv.service import Service
from radixkv.task_book import Task, TaskBook


class EngineThread:
    """Runs commands and steps in turn: all commands that came in, then one step, then the mail of that step,
    one call for each event loop. With nothing to do it sleeps on a condition; nothing is polled.

    - Y1 between steps every request in the engine has exactly one task, and nothing else has work in it.
    - Y2 every task ends: with its result, with its error, by being cancelled, or with ``EngineDeadError``
      when the engine has died or the thread has ended. Nobody waits for ever.

    Whatever a task raises, in making text for one, ends this task and its requests, and no other: its caller
    gets it, ``SystemExit`` of his own function included.
    """

    def __init__(self, service: Service, owner: str) -> None:
        """``owner``: what the messages call it, as in "this AsyncLLM"."""
        self._service: Service | None = service
        self._owner = owner
        self._process_id = os.getpid()
        self._wake = threading.Condition()  # its lock may be taken again by a finalizer on the same thread
        self._commands: deque[tuple[Callable[[], None], Callable[[BaseException], None]]] = deque()
        self._is_stopping = False
        self._has_ended = False
        """The thread takes no more commands."""
        self._cause: BaseException | None = None
        """What ended it, if it was not ``stop``."""
        self._tasks = TaskBook()  # the thread's own, as the two below
        self._to_add: deque[tuple[Task, Request]] = deque()
        """Further requests of calls that have begun, for which the queue had no room yet."""
        self._with_mail: dict[Mailbox, None] = {}
        self._num_calls = 0
        self._num_wakeups = 0
        self._mailboxes: weakref.WeakValueDictionary[int, Mailbox] = weakref.WeakValueDictionary()
        self._thread = threading.Thread(target=self._run, name="radixkv-engine", daemon=True)
        self._thread.start()

    # From any thread

    def mailbox(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        """The one for all tasks of ``loop`` that are under way. Raises ``MisuseError`` in a forked copy."""
        self.refuse_fork()
        with self._wake:
            box = self._mailboxes.get(id(loop))
            if box is None or box.loop is not loop:
                box = self._mailboxes[id(loop)] = Mailbox(loop)
            return box

    def submit(self, task: Task) -> None:
        """Start ``task`` before the next step. Raises ``EngineDeadError`` after ``stop``, and ``MisuseError``
        in a forked copy."""
        self.refuse_fork()
        self._post(partial(self._start, task), partial(self._fail, task))

    def cancel(self, task: Task) -> None:
        """Nobody waits for ``task`` any more: abort its requests before the next step, and let go of a result
        that has to arrive. What has not begun never does. A second call, or one after its end, does
        nothing."""
        task.is_cancelled = True
        self._post_or_forget(partial(self._cancel, task))

    def abort(self, request_id: int) -> None:
        """End a request before the next step; its task gets the last output. Does nothing where the id is not
        in use. Raises ``MisuseError`` in a forked copy."""
        self.refuse_fork()
        self._post_or_forget(partial(self._abort, request_id))

    def stop(self) -> None:
        """End the thread after the step that runs; whoever still waits gets ``EngineDeadError``. Does not
        wait."""
        if os.getpid() != self._process_id:  # nobody may ever let go of the lock
            return
        with self._wake:
            self._is_stopping = True
            self._wake.notify()

    def join(self) -> None:
        """Wait for the thread's end (but not from the thread itself)."""
        if os.getpid() == self._process_id and threading.current_thread() is not self._thread:
            self._thread.join()

    def refuse_fork(self) -> None:
        if os.getpid() != self._process_id:
            raise MisuseError(
                f"{self._owner} belongs to process {self._process_id}, and this is its fork: open one here"
            )

    def _post(self, command: Callable[[], None], refuse: Callable[[BaseException], None]) -> None:
        with self._wake:
            if self._has_ended or self._is_stopping:
                raise self._dead_error()
            self._commands.append((command, refuse))
            self._wake.notify()

    def _post_or_forget(self, command: Callable[[], None]) -> None:
        if os.getpid() != self._process_id:
            return
        try:
            self._post(command, lambda error: None)
        except EngineDeadError:
            return  # everything has ended already

    # On the thread

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            while self._next_commands():
                self._step()
                self._send_mail()
        except BaseException as error:
            cause = error
        finally:
            self._shut_down(cause)

    @property
    def _open(self) -> Service:
        assert self._service is not None
        return self._service

    def _next_commands(self) -> bool:
        """Wait until there is something to do; do what was asked. False: it is time to end."""
        with self._wake:
            while not (self._commands or self._is_stopping or self._to_add or self._open.engine.has_work):
                self._wake.wait()
                self._num_wakeups += 1
            if self._is_stopping:
                return False
            commands, self._commands = self._commands, deque()
        self._tasks.settle_all()
        for task in self._tasks.lost_tasks():
            self._cancel(task)
        while commands:
            command, _ = commands[0]
            try:
                command()
            except BaseException:
                with self._wake:  # so that the others are told
                    self._commands.extendleft(reversed(commands))
                raise
            commands.popleft()
        return True

    def _step(self) -> None:
        engine = self._open.engine
        self._fill_queue()
        if not engine.has_work:
            return
        for output in engine.step():
            task = self._tasks.find(output.request_id)
            if task is not None:  # else it was cancelled, or failed, meanwhile
                self._hand(task, output)

    def _hand(self, task: Task, output: SequenceOutput) -> None:
        if task.is_cancelled:
            self._cancel(task)
            return
        try:
            more = task.take(self._open, output)
            self._add_later(task, more)
            if not task.awaits(output.request_id):
                self._tasks.remove(output.request_id)
        except BaseException as error:  # the caller's own functions raise what they like
            self._fail(task, error)
        self._with_mail[task.mailbox] = None

    def _start(self, task: Task) -> None:
        if task.is_cancelled:
            return
        try:
            requests = task.start(self._open)
            for request in requests[:1]:  # where the queue is full, the call is refused as a whole
                self._add(task, request)
            self._add_later(task, requests[1:])
            self._tasks.settle(task)
        except BaseException as error:
            self._fail(task, error)
        self._with_mail[task.mailbox] = None

    def _add(self, task: Task, request: Request) -> None:
        self._open.engine.add(request)
        self._tasks.add(task, request.request_id)

    def _add_later(self, task: Task, requests: Sequence[Request]) -> None:
        """Before the next step, or when the queue has room: its limit is against others who arrive."""
        for request in requests:
            self._tasks.add(task, request.request_id)
            self._to_add.append((task, request))

    def _fill_queue(self) -> None:
        while self._to_add and not self._open.engine.is_full:
            task, request = self._to_add.popleft()
            if self._tasks.find(request.request_id) is not task:
                continue  # it was cancelled, or failed, meanwhile
            try:
                self._open.engine.add(request)
            except Exception as error:
                self._fail(task, error)

    def _fail(self, task: Task, error: BaseException) -> None:
        self._abort_requests(task)
        task.fail(error)
        self._with_mail[task.mailbox] = None

    def _cancel(self, task: Task) -> None:
        self._abort_requests(task)
        task.close()

    def _abort_requests(self, task: Task) -> None:
        """Its requests leave the engine; their last outputs are let go."""
        for request_id in self._tasks.take_requests(task):
            if not self._open.engine.is_dead:
                self._open.engine.abort(request_id)

    def _abort(self, request_id: int) -> None:
        task = self._tasks.find(request_id)
        if task is not None:
            for output in self._open.engine.abort(request_id):
                self._hand(task, output)

    def _send_mail(self) -> None:
        with_mail, self._with_mail = self._with_mail, {}
        for mailbox in with_mail:
            self._num_calls -= mailbox.num_sent
            is_open = mailbox.send()
            self._num_calls += mailbox.num_sent
            if not is_open:  # the loop is gone, and with it all who waited there
                for task in self._tasks.tasks_of(mailbox):
                    self._cancel(task)

    def _dead_error(self) -> EngineDeadError:
        """A new one for everybody who is told: its traceback is his own."""
        if self._cause is None:
            return EngineDeadError(f"{self._owner} is closed")
        error = EngineDeadError(f"the engine thread has ended: {self._cause!r}")
        error.__cause__ = self._cause
        return error

    def _shut_down(self, cause: BaseException | None) -> None:
        """Tell everybody. ``cause``: what ended the thread, if it was not ``stop``."""
        with self._wake:
            self._has_ended, self._cause = True, cause
            commands, self._commands = self._commands, deque()
        for task in self._tasks.tasks():
            with suppress(Exception):  # what is broken already must not keep the others from being told
                self._abort_requests(task)
            task.fail(self._dead_error())
            self._with_mail[task.mailbox] = None
        for _, refuse in commands:
            refuse(self._dead_error())
        self._send_mail()
        self._service = None

    # Reports, on the thread

    def stats(self) -> dict[str, int]:
        """``num_wakeups``: how often it was woken; ``num_calls``: how often it called an event loop;
        ``num_live``: requests under way."""
        return {
            "num_wakeups": self._num_wakeups,
            "num_calls": self._num_calls,
            **self._tasks.stats(),
        }

    def check(self) -> None:
        """Y1 and Y3. Raises ``InternalError``."""
        self._tasks.check()
        to_add = any(self._tasks.find(request.request_id) is task for task, request in self._to_add)
        has_work = self._open.engine.has_work or to_add
        require(bool(len(self._tasks)) == has_work, "Y1", self.stats)
        stale = self._tasks.stale_ids()
        require(not stale, "Y1", f"nobody waits for requests {stale}")
