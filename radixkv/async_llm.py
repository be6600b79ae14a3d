"""AsyncLLM: the asynchronous front. One thread steps the engine; event loops wait for what it says."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, Unpack

from radixkv.adapters import Adapter
from radixkv.async_chat import AsyncChat
from radixkv.beam_job import beam_job, beam_settings
from radixkv.chat import open_transcript
from radixkv.config import EngineConfig
from radixkv.engine_thread import EngineThread
from radixkv.errors import InvalidRequestError
from radixkv.executor.base import ModelExecutor, WeightUpdate
from radixkv.executor.loaded_model import LoadedModel
from radixkv.generation import Generation
from radixkv.job_task import JobTask
from radixkv.jobs import Job, prefill_job, score_job
from radixkv.kv.events import Event
from radixkv.kv.manager import FlushReport, Pin
from radixkv.namespace import Scope
from radixkv.opening import OpenOptions, open_service
from radixkv.outputs import BeamOutput, PrefillInfo, PromptExplanation, Score
from radixkv.plain import plain_whole, shown
from radixkv.prompts import Prompt, copied, is_one_prompt
from radixkv.sampling import SamplingParams
from radixkv.sequence import Request
from radixkv.service import Service
from radixkv.urgency import Urgency

T = TypeVar("T")


class AsyncLLM:
    """A model, its tokenizer and its cache, for many callers at once, on one event loop or several.

    ``await llm.generate(prompt)`` gives the whole ``Output``; ``async for delta in llm.generate(prompt)``
    gives it piece by piece. All that runs at a time shares the engine's steps. A loop is never held up:
    prompts are encoded, steps taken and texts made on the engine's own thread. Everything else that can be
    awaited here is done by that thread between two steps.

    A call that is cancelled before the thread came to it never begins; one that needs no step and has begun
    (``flush``, ``update_weights``) takes effect. What a function of the caller raises there, ``SystemExit``
    included, is raised to him, and hurts nobody else.

    If the engine dies, whoever waits gets ``EngineDeadError`` with the cause; so does every later call. Close
    it with ``async with``, ``await aclose()``, or ``close()``: the thread ends, and whoever still waits gets
    ``EngineDeadError``. Dropping the last reference, or leaving Python, closes it too. In a forked child
    every call raises ``MisuseError``.
    """

    def __init__(self, model: str | os.PathLike[str] | LoadedModel, **options: Unpack[OpenOptions]) -> None:
        """Load ``model``, as ``LLM`` does, with the same options. It returns when all is loaded; inside a
        coroutine, ``await asyncio.to_thread(AsyncLLM, model)``."""
        self._set_up(open_service("AsyncLLM", model, options))

    @classmethod
    def from_executor(
        cls, executor: ModelExecutor, tokenizer: Any | None = None, *, config: EngineConfig
    ) -> AsyncLLM:
        """An AsyncLLM over an executor that exists already. ``tokenizer``: a ``Tokenizer`` or what it wraps.
        Raises ``ConfigError`` where ``config`` is none or does not fit the executor."""
        llm = cls.__new__(cls)
        llm._set_up(Service.over(executor, tokenizer, config))
        return llm

    def _set_up(self, service: Service) -> None:
        self.tokenizer = service.tokenizer
        self.spec = service.spec
        self.config = service.config
        self._next_request_id = service.next_request_id
        self._thread = EngineThread(service, "this AsyncLLM")
        weakref.finalize(self, _close, self._thread)

    # Generate

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        adapter: str | None = None,
        priority: int = 0,
        queue_timeout_s: float | None = None,
    ) -> Generation:
        """One prompt, text or token ids; run several with ``asyncio.gather``. What is wrong with the prompt
        is raised where the result is awaited, and so is ``QueueFullError``. ``priority`` and
        ``queue_timeout_s`` as in ``LLM.generate``. See ``Generation``."""
        self._thread.refuse_fork()
        sampling = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(sampling, SamplingParams):
            raise InvalidRequestError(f"sampling_params must be SamplingParams, got {shown(sampling)}")
        scope = Scope(cache_salt, adapter)
        urgency = Urgency(priority, queue_timeout_s)
        return Generation(
            self._thread, self, copied(prompt), sampling, self._next_request_id(), scope, urgency
        )

    def abort(self, request_id: int) -> None:
        """End a generation (by its ``request_id``) before the next step; it gives what it has, with the
        finish reason ``abort``. From any thread. Does nothing where it has not begun, or has ended. Raises
        ``InvalidRequestError`` for what is no number."""
        whole = plain_whole(request_id)
        if whole is None:
            raise InvalidRequestError(f"request_id must be a whole number, got {shown(request_id)}")
        self._thread.abort(whole)

    async def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        beam_width: int,
        max_tokens: int = 256,
        min_tokens: int = 0,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> BeamOutput | list[BeamOutput]:
        """As ``LLM.beam_search``."""
        params, sampling = beam_settings(
            beam_width, max_tokens, min_tokens, length_penalty, early_stopping, stop_token_ids, ignore_eos
        )
        prompts = copied(prompts)
        results = await self._run(
            lambda service: beam_job(service, prompts, params, sampling, Scope(cache_salt, adapter))
        )
        return results[0] if is_one_prompt(prompts) else results

    # Prefixes

    async def prefill(
        self,
        prefix: Prompt,
        pin: bool = False,
        *,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> PrefillInfo:
        """As ``LLM.prefill``."""
        prefix = copied(prefix)
        return await self._run(
            lambda service: prefill_job(service, prefix, pin, Scope(cache_salt, adapter)), undo=_unpin
        )

    async def unpin(self, pin: Pin) -> None:
        """As ``LLM.unpin``."""
        await self._call(lambda service: service.unpin(pin))

    async def score(
        self,
        prompt: Prompt,
        continuations: Sequence[Prompt],
        *,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> list[Score]:
        """As ``LLM.score``."""
        prompt, continuations = copied(prompt), copied(continuations)
        return await self._run(
            lambda service: score_job(service, prompt, continuations, Scope(cache_salt, adapter))
        )

    async def explain(
        self, prompt: Prompt, *, cache_salt: str | None = None, adapter: str | None = None
    ) -> PromptExplanation:
        """As ``LLM.explain``."""
        prompt = copied(prompt)
        return await self._call(lambda service: service.explain(prompt, Scope(cache_salt, adapter)))

    async def take_events(self) -> tuple[Event, ...]:
        """As ``LLM.take_events``."""
        return await self._call(lambda service: service.take_events())

    async def flush(self) -> FlushReport:
        """As ``LLM.flush``. What runs goes on, and what it computed before is not found again."""
        return await self._call(lambda service: service.flush())

    async def load_adapter(self, name: str, path: str | os.PathLike[str]) -> Adapter:
        """As ``LLM.load_adapter``. Requests that run under the name keep the version that they began with."""
        return await self._call(lambda service: service.load_adapter(name, path))

    async def unload_adapter(self, name: str) -> None:
        """As ``LLM.unload_adapter``; ``MisuseError`` too while a request uses it."""
        await self._call(lambda service: service.unload_adapter(name))

    async def update_weights(self, weights: WeightUpdate, *, revision: str | None = None) -> FlushReport:
        """As ``LLM.update_weights``. What runs goes on with the new weights, over what it has computed with
        the old ones; nothing of that is found later."""
        return await self._call(lambda service: service.update_weights(weights, revision))

    # Life

    async def stats(self) -> dict[str, Any]:
        """As ``LLM.stats``, and ``front``: how often the thread was woken and called a loop."""
        return await self._call(lambda service: {**service.stats(), "front": self._thread.stats()})

    async def check(self) -> None:
        """Raise ``InternalError`` where an invariant of thread, engine or ledger does not hold."""

        def check(service: Service) -> None:
            service.check()
            self._thread.check()

        await self._call(check)

    def close(self) -> None:
        """End the thread after the step that runs, and wait for that. A second call does nothing."""
        _close(self._thread)

    async def aclose(self) -> None:
        """``close`` without holding up the loop."""
        self._thread.stop()
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def chat(
        self,
        system: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] = (),
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> AsyncChat:
        """As ``LLM.chat``."""
        return AsyncChat(self, open_transcript(self.tokenizer, system, messages), Scope(cache_salt, adapter))

    async def between_steps(self, call: Callable[[], T]) -> T:
        """``call`` on the engine's thread, between two steps: there it may use the tokenizer, which no two
        threads may use at once. What it raises is raised here."""
        return await self._call(lambda service: call())

    async def _call(self, call: Callable[[Service], T]) -> T:
        """``call`` on the engine's thread, between two steps."""
        return await self._run(partial(_job_of, call))

    async def _run(
        self, make_job: Callable[[Service], Job[T]], undo: Callable[[Service, T], None] | None = None
    ) -> T:
        """Run a job on the engine's thread. Where this coroutine ends before it has the result, however that
        comes about, the job is cancelled, and ``undo`` lets go of a result that was on its way."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        task = JobTask(self._thread.mailbox(loop), future, make_job, undo)
        self._thread.submit(task)
        try:
            result = await future
        except BaseException:  # also GeneratorExit, where no loop runs
            self._thread.cancel(task)
            raise
        task.arrived()
        return result


def _job_of(call: Callable[[Service], T], service: Service) -> Generator[Sequence[Request], Any, T]:
    """A call that needs no requests, as a job."""
    yield ()
    return call(service)


def _unpin(service: Service, info: PrefillInfo) -> None:
    if info.pin is not None:
        service.unpin(info.pin)


def _close(thread: EngineThread) -> None:
    thread.stop()
    thread.join()
