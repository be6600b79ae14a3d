"""LLM: the blocking front. Text or token ids in, outputs back, in order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, TypeAlias, TypeVar, Unpack, overload

from radixkv.adapters import Adapter
from radixkv.beam_job import beam_job, beam_settings
from radixkv.chat import Chat, open_transcript
from radixkv.config import EngineConfig
from radixkv.engine import Engine
from radixkv.errors import EngineDeadError, InternalError, InvalidRequestError
from radixkv.executor.base import ModelExecutor, WeightUpdate
from radixkv.executor.loaded_model import LoadedModel
from radixkv.jobs import Job, prefill_job, score_job
from radixkv.kv.events import Event
from radixkv.kv.manager import FlushReport, Pin
from radixkv.namespace import Scope
from radixkv.opening import OpenOptions, open_service
from radixkv.outputs import BeamOutput, Output, PrefillInfo, PromptExplanation, Score
from radixkv.prompts import Prompt, is_one_prompt, params_list, scopes_of, urgencies_of
from radixkv.run import run_to_end
from radixkv.sampling import SamplingParams
from radixkv.sequence import Request
from radixkv.service import Service
from radixkv.turns import Turns

Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
OneOrEach: TypeAlias = str | Sequence[str | None] | None
T = TypeVar("T")


class LLM:
    """A model, its tokenizer, and a cache of every prefix it has seen.

    Any thread may call any method; one call runs at a time, the others wait (a call from inside another,
    as from a signal handler, raises ``MisuseError``). Ctrl-C during a call aborts what it had asked for and
    leaves the LLM usable. After ``close`` every call raises ``EngineDeadError``. In a forked child every call
    raises ``MisuseError``: start processes by ``spawn``, and open an LLM in each.
    """

    def __init__(self, model: str | os.PathLike[str] | LoadedModel, **options: Unpack[OpenOptions]) -> None:
        """Load ``model`` (see ``load_model``; or a ``LoadedModel``, which LLMs may share). The options
        stand in ``radixkv.OpenOptions``: ``help`` of it lists them with their defaults.

        Raises ``ConfigError``, ``ModelLoadError``, ``UnsupportedModelError``.
        """
        self._set_up(open_service("LLM", model, options), options.get("progress"))

    @classmethod
    def from_executor(
        cls,
        executor: ModelExecutor,
        tokenizer: Any | None = None,
        *,
        config: EngineConfig,
        progress: bool | None = None,
    ) -> LLM:
        """An LLM over an executor that exists already. ``tokenizer``: a ``Tokenizer`` or what it wraps.
        Raises ``ConfigError`` where ``config`` is none or does not fit the executor."""
        llm = cls.__new__(cls)
        llm._set_up(Service.over(executor, tokenizer, config), progress)
        return llm

    def _set_up(self, service: Service, progress: bool | None) -> None:
        self.tokenizer = service.tokenizer
        self.spec = service.spec
        self.config = service.config
        self._service: Service | None = service
        self._progress = progress
        self._turns = Turns("this LLM")
        service.pause = self._turns.raise_if_interrupted

    @property
    def engine(self) -> Engine:
        """The step loop underneath. Raises ``EngineDeadError`` after ``close``."""
        return self._open_service.engine

    @property
    def _open_service(self) -> Service:
        if self._service is None:
            raise EngineDeadError("this LLM is closed")
        return self._service

    # generate

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        adapter: str | None = None,
        priority: int = 0,
        queue_timeout_s: float | None = None,
        return_exceptions: Literal[False] = False,
        progress: bool | None = None,
    ) -> Output: ...

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        adapter: str | None = None,
        priority: int = 0,
        queue_timeout_s: float | None = None,
        return_exceptions: Literal[True],
        progress: bool | None = None,
    ) -> Output | BaseException: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params = None,
        *,
        cache_salt: OneOrEach = None,
        adapter: OneOrEach = None,
        priority: int | Sequence[int] = 0,
        queue_timeout_s: float | None = None,
        return_exceptions: Literal[False] = False,
        progress: bool | None = None,
    ) -> list[Output]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params = None,
        *,
        cache_salt: OneOrEach = None,
        adapter: OneOrEach = None,
        priority: int | Sequence[int] = 0,
        queue_timeout_s: float | None = None,
        return_exceptions: Literal[True],
        progress: bool | None = None,
    ) -> list[Output | BaseException]: ...

    def generate(
        self,
        prompts: Any,
        sampling_params: Params = None,
        *,
        cache_salt: OneOrEach = None,
        adapter: OneOrEach = None,
        priority: int | Sequence[int] = 0,
        queue_timeout_s: float | None = None,
        return_exceptions: bool = False,
        progress: bool | None = None,
    ) -> Any:
        """Run every prompt to its end; one ``Output`` for one prompt, a list in order for a list.

        A prompt is text or token ids. ``sampling_params``, ``cache_salt``, ``adapter`` and ``priority`` are
        for all, or a list has one for each. What is cached is shared only among requests with the same salt,
        and the same ``adapter`` (a name given to ``load_adapter``; ``None`` is the base model). ``priority``:
        higher goes first, with the policy or the eviction policy ``priority``. ``queue_timeout_s``: a prompt
        that has waited longer in the queue ends there, as ``timeout``; ``None``: what the option says. Where
        ``max_waiting`` is less than the prompts, they enter the queue as it has room.
        A bad prompt raises before any work is done for any of them, naming its index and the limit:
        ``InvalidRequestError`` (empty, an id outside the vocabulary, no number, nested too deep) or
        ``RequestTooLargeError`` (over the model's positions or over the store). With
        ``return_exceptions`` the exception stands in its place instead, and the others run; this holds
        for an error while the model runs, too.
        """
        with self._call() as service:
            one = is_one_prompt(prompts)
            items = [prompts] if one else list(prompts)
            params = params_list(sampling_params, len(items), one)
            scopes = scopes_of(cache_salt, adapter, len(items), one)
            urgencies = urgencies_of(priority, queue_timeout_s, len(items), one)
            results: list[Output | BaseException] = []
            jobs: dict[int, tuple[int, Request]] = {}
            for index, (item, sampling, scope, urgency) in enumerate(
                zip(items, params, scopes, urgencies, strict=True)
            ):
                place = None if one else index
                try:
                    request = service.request(item, sampling, "prompt", place, scope=scope, urgency=urgency)
                except InvalidRequestError as error:
                    if not return_exceptions:
                        raise
                    results.append(error)
                    continue
                jobs[request.request_id] = (index, request)
                results.append(InternalError("no output"))  # replaced below, by construction
            answers = run_to_end(
                service.engine,
                [request for _, request in jobs.values()],
                tokenizer=service.tokenizer,
                keep_going=return_exceptions,
                show=self._progress if progress is None else progress,
            )
            for request_id, answer in answers.items():
                results[jobs[request_id][0]] = answer.error if answer.error is not None else answer.output()
            return results[0] if one else results

    def beam_search(
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
        """Beam search: the ``beam_width`` outputs with the highest score that the search finds, best first;
        one ``BeamOutput`` for one prompt, a list in order for a list.

        The prompt is computed once; beams share the pages of what they have in common. The score is the
        cumulative log-probability over ``length ** length_penalty``. ``early_stopping``: stop as soon as
        ``beam_width`` beams have ended, instead of when none that runs scores better than those. Raises
        before any work as ``generate`` does.
        """
        params, sampling = beam_settings(
            beam_width, max_tokens, min_tokens, length_penalty, early_stopping, stop_token_ids, ignore_eos
        )
        with self._call() as service:
            results = self._drive(
                beam_job(service, prompts, params, sampling, Scope(cache_salt, adapter)), service
            )
            return results[0] if is_one_prompt(prompts) else results

    # prefixes

    def prefill(
        self,
        prefix: Prompt,
        pin: bool = False,
        *,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> PrefillInfo:
        """Compute a prefix now, so that prompts that begin with it find it.

        ``pin=True`` holds its pages until ``unpin`` (``PinBudgetExceeded`` where the budget does not
        allow it). Text is encoded on its own: the last tokens of a text may differ from those of the same
        text with more behind it, so end a prefix where tokens end anyway, as after a line break.
        """
        with self._call() as service:
            info = self._drive(prefill_job(service, prefix, pin, Scope(cache_salt, adapter)), service)
            if info.pin is not None and self._turns.interrupted:  # the receipt would never arrive
                service.unpin(info.pin)
            return info

    def unpin(self, pin: Pin) -> None:
        """Let go of what ``prefill(..., pin=True)`` held: give back its ``pin``. A second call does nothing;
        what is no receipt of this LLM raises ``MisuseError``."""
        with self._call() as service:
            service.unpin(pin)

    def score(
        self,
        prompt: Prompt,
        continuations: Sequence[Prompt],
        *,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> list[Score]:
        """Log-probabilities of each continuation's tokens after ``prompt``, in order.

        The prompt is computed once, whatever the number of continuations. A continuation's text is encoded
        on its own, without special tokens, and its ids follow the prompt's. Bad input raises before any
        work and names the continuation's index.
        """
        with self._call() as service:
            return self._drive(score_job(service, prompt, continuations, Scope(cache_salt, adapter)), service)

    def chat(
        self,
        system: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] = (),
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Chat:
        """A conversation by the model's chat template; ``messages``: what was said before. See ``Chat``.
        Raises ``InvalidRequestError`` where there is no template."""
        return Chat(self, open_transcript(self.tokenizer, system, messages), Scope(cache_salt, adapter))

    def explain(
        self, prompt: Prompt, *, cache_salt: str | None = None, adapter: str | None = None
    ) -> PromptExplanation:
        """How much of a prompt the cache holds right now, and why not more. Computes nothing and changes
        nothing; ``print`` the result. It tells nothing of what is cached under another ``cache_salt``, or
        under any where none is given."""
        with self._call() as service:
            return service.explain(prompt, Scope(cache_salt, adapter))

    def take_events(self) -> tuple[Event, ...]:
        """What entered and left the cache since the last call, oldest first (``radixkv.kv.replay`` applies
        it). Raises ``MisuseError`` unless opened with ``events=True``."""
        with self._call() as service:
            return service.take_events()

    def flush(self) -> FlushReport:
        """Forget every prefix; pins are dropped, and the report says so."""
        with self._call() as service:
            return service.flush()

    # adapters and weights

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> Adapter:
        """Read a LoRA adapter in peft's format from a folder; from then on ``adapter=name`` runs it. Loaded
        again under the same name it is a new version, which finds nothing that the old one computed. Needs
        peft (``radixkv[lora]``).

        Raises ``ModelLoadError`` for missing or damaged files, and ``UnsupportedModelError`` for what is more
        than plain LoRA, or does not fit the model.
        """
        with self._call() as service:
            return service.load_adapter(name, path)

    def unload_adapter(self, name: str) -> None:
        """Let go of an adapter. Raises ``MisuseError`` where there is none of that name."""
        with self._call() as service:
            service.unload_adapter(name)

    def update_weights(self, weights: WeightUpdate, *, revision: str | None = None) -> FlushReport:
        """Replace some of the model's weights: ``weights`` by name, as in its ``state_dict``, or a function
        that is given all of them, read-only, and returns those to replace. What was computed before is never
        found again; pins are dropped, and the report says so. ``revision`` names the new model. LLMs that
        share the model notice.

        Raises ``ConfigError``, having changed nothing, for an unknown name, another shape, or numbers that
        are not finite.
        """
        with self._call() as service:
            return service.update_weights(weights, revision)

    # life

    def stats(self) -> dict[str, Any]:
        """Counters by part: ``load`` (seconds by phase), ``store`` (its size and why), and the engine's
        ``scheduler``, ``kv`` and ``executor``."""
        with self._call() as service:
            return service.stats()

    def check(self) -> None:
        """Raise ``InternalError`` where an invariant of engine or ledger does not hold."""
        with self._call() as service:
            service.check()

    def close(self) -> None:
        """Let go of model and store. A second call does nothing."""
        if self._turns.is_forked:  # nobody may ever let go of its lock
            self._service = None
            return
        with self._turns.take():
            self._service = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def between_calls(self, call: Callable[[], T]) -> T:
        """``call`` while no other thread is in this LLM: there it may use the tokenizer."""
        with self._call():
            return call()

    # inside one call

    @contextmanager
    def _call(self) -> Iterator[Service]:
        with self._turns.take():
            yield self._open_service  # raises when closed

    @staticmethod
    def _drive(job: Job[T], service: Service) -> T:
        """Run a job's requests, round by round, to its return value."""
        try:
            requests = next(job)
            while True:
                answers = run_to_end(service.engine, requests)
                for answer in answers.values():
                    answer.raise_unless_answered()
                requests = job.send(answers)
        except StopIteration as end:
            value: T = end.value
            return value
