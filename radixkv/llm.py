"""LLM: the blocking front. Text or token ids in, outputs back, in order."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, TypeAlias, overload

import numpy as np

from radixkv.config import EngineConfig, PolicyName
from radixkv.engine import Engine
from radixkv.errors import (
    ConfigError,
    EngineDeadError,
    InternalError,
    InvalidRequestError,
    MisuseError,
    PinBudgetExceeded,
)
from radixkv.executor.attention import BACKENDS
from radixkv.executor.base import ModelExecutor
from radixkv.executor.loaded_model import LoadedModel
from radixkv.executor.loader import load_model, refuse_other_kind
from radixkv.explain import explain_prompt
from radixkv.kv.manager import FlushReport, Pin
from radixkv.outputs import Output, PrefillInfo, PromptExplanation, Score
from radixkv.plain import shown
from radixkv.prompts import Prompt, is_one_prompt, params_list, prompt_ids, with_index
from radixkv.run import run_to_end
from radixkv.sampling import SamplingParams
from radixkv.sched.batch import SequenceOutput
from radixkv.sched.limits import refuse_unfit
from radixkv.sequence import Request
from radixkv.settings import pin_budget_pages, pin_tokens, whole_or_none
from radixkv.text import Tokenizer
from radixkv.turns import Turns
from radixkv.types import TokenIds

Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model, its tokenizer, and a cache of every prefix it has seen.

    Any thread may call any method; one call runs at a time, the others wait (a call from inside another,
    as from a signal handler, raises ``MisuseError``). Ctrl-C during a call aborts what it had asked for and
    leaves the LLM usable. After ``close`` every call raises ``EngineDeadError``. In a forked child every call
    raises ``MisuseError``: start processes by ``spawn``, and open an LLM in each.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LoadedModel,
        *,
        revision: str | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        page_size: int = 16,
        num_tokens: int | None = None,
        policy: PolicyName = "lpm",
        prefix_cache: bool = True,
        max_running: int = 64,
        max_batch_tokens: int = 1024,
        max_pinned_tokens: int | None = None,
        attention: str = "cpu",
        num_threads: int | None = None,
        progress: bool | None = None,
    ) -> None:
        """Load ``model`` (see ``load_model``; or a ``LoadedModel``, which several LLMs may share).

        ``num_tokens``: size of the K/V store; ``None`` takes half of the memory that is left, at most
        8 GiB (``stats()["store"]`` says which). ``max_pinned_tokens``: how much of it pins may hold (whole
        pages, at least one or 0), which no request can count on; ``None`` is a quarter, or nothing without a
        prefix cache. ``progress``: ``None`` shows bars on a terminal only.

        Raises ``ConfigError``, ``ModelLoadError``, ``UnsupportedModelError``.
        """
        config = EngineConfig(  # checked before anything is loaded; the number of pages comes last
            num_pages=1,
            page_size=page_size,
            policy=policy,
            prefix_cache=prefix_cache,
            max_running=max_running,
            max_batch_tokens=max_batch_tokens,
        )
        num_tokens = whole_or_none("num_tokens", num_tokens, 1)
        num_threads = whole_or_none("num_threads", num_threads, 1)
        max_pinned_tokens = pin_tokens(max_pinned_tokens, config.page_size, prefix_cache)
        if attention not in BACKENDS:
            raise ConfigError(f"attention must be one of {', '.join(BACKENDS)}, got {attention!r}")
        if isinstance(model, LoadedModel):
            refuse_other_kind(model, revision, dtype, device)
            loaded = model
        else:
            loaded = load_model(model, revision=revision, dtype=dtype, device=device, progress=progress)
        from radixkv.executor.sizing import build_executor  # loads torch, whose time load_model reports

        executor, sizing = build_executor(
            loaded,
            num_tokens=num_tokens,
            page_size=config.page_size,
            attention=attention,
            num_threads=num_threads,
        )
        pinned = pin_budget_pages(max_pinned_tokens, executor.num_pages, config.page_size, prefix_cache)
        config = replace(config, num_pages=executor.num_pages, max_pinned_pages=pinned)
        tokenizer = Tokenizer(loaded.tokenizer) if loaded.tokenizer is not None else None
        load = {f"{phase}_s": seconds for phase, seconds in loaded.load_report.items()}
        self._set_up(executor, tokenizer, config, load=load, sizing=sizing, progress=progress)

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
        if not isinstance(config, EngineConfig):
            raise ConfigError(f"config must be an EngineConfig, got {shown(config)}")
        llm = cls.__new__(cls)
        if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
            tokenizer = Tokenizer(tokenizer)
        llm._set_up(executor, tokenizer, config, load={}, sizing={"sized_by": "config"}, progress=progress)
        return llm

    def _set_up(
        self,
        executor: ModelExecutor,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        *,
        load: Mapping[str, float],
        sizing: Mapping[str, Any],
        progress: bool | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.spec = executor.spec
        self.config = config
        self._engine: Engine | None = Engine.build(config, executor)
        self._load = dict(load)
        self._sizing = dict(sizing)
        self._progress = progress
        self._request_ids = itertools.count()
        self._turns = Turns("this LLM")

    @property
    def engine(self) -> Engine:
        """The step loop underneath. Raises ``EngineDeadError`` after ``close``."""
        if self._engine is None:
            raise EngineDeadError("this LLM is closed")
        return self._engine

    # generate

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        return_exceptions: Literal[False] = False,
        progress: bool | None = None,
    ) -> Output: ...

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        return_exceptions: Literal[True],
        progress: bool | None = None,
    ) -> Output | BaseException: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params = None,
        *,
        return_exceptions: Literal[False] = False,
        progress: bool | None = None,
    ) -> list[Output]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params = None,
        *,
        return_exceptions: Literal[True],
        progress: bool | None = None,
    ) -> list[Output | BaseException]: ...

    def generate(
        self,
        prompts: Any,
        sampling_params: Params = None,
        *,
        return_exceptions: bool = False,
        progress: bool | None = None,
    ) -> Any:
        """Run every prompt to its end; one ``Output`` for one prompt, a list in order for a list.

        A prompt is text or token ids. ``sampling_params``: one for all, or a list with one for each.
        A bad prompt raises before any work is done for any of them, naming its index and the limit:
        ``InvalidRequestError`` (empty, an id outside the vocabulary, no number, nested too deep) or
        ``RequestTooLargeError`` (over the model's positions or over the store). With
        ``return_exceptions`` the exception stands in its place instead, and the others run; this holds
        for an error while the model runs, too.
        """
        with self._call():
            one = is_one_prompt(prompts)
            items = [prompts] if one else list(prompts)
            params = params_list(sampling_params, len(items), one)
            results: list[Output | BaseException] = []
            jobs: dict[int, tuple[int, Request]] = {}
            for index, (item, sampling) in enumerate(zip(items, params, strict=True)):
                try:
                    request = self._request(item, sampling, "prompt", None if one else index)
                except InvalidRequestError as error:
                    if not return_exceptions:
                        raise
                    results.append(error)
                    continue
                jobs[request.request_id] = (index, request)
                results.append(InternalError("no output"))  # replaced below, by construction
            finals = run_to_end(
                self.engine,
                [request for _, request in jobs.values()],
                keep_going=return_exceptions,
                show=self._progress if progress is None else progress,
            )
            for request_id, (tokens, final) in finals.items():
                results[jobs[request_id][0]] = self._output(tokens, final)
            return results[0] if one else results

    # prefixes

    def prefill(self, prefix: Prompt, pin: bool = False) -> PrefillInfo:
        """Compute a prefix now, so that prompts that begin with it find it.

        ``pin=True`` holds its pages until ``unpin`` (``PinBudgetExceeded`` where the budget does not
        allow it). Text is encoded on its own: the last tokens of a text may differ from those of the same
        text with more behind it, so end a prefix where tokens end anyway, as after a line break.
        """
        with self._call():
            if pin and not self.config.prefix_cache:
                raise ConfigError("there is nothing to pin: this LLM was opened with prefix_cache=False")
            request = self._request(prefix, SamplingParams(max_tokens=0), "prefix", None)
            num_pages = -(-len(request.prompt_ids) // self.config.page_size)
            if pin and num_pages > self.config.max_pinned_pages:
                raise PinBudgetExceeded(num_pages, self.config.max_pinned_pages)
            _, final = run_to_end(self.engine, [request])[request.request_id]
            held = self.engine.kv.pin(request.prompt_ids) if pin else None
            if held is not None and self._turns.interrupted:  # the receipt would never arrive
                self.engine.kv.unpin(held)
            return PrefillInfo(final.usage.prompt_tokens, final.usage.cached_tokens, held)

    def unpin(self, pin: Pin) -> None:
        """Let go of what ``prefill(..., pin=True)`` held: give back its ``pin``. A second call does nothing;
        what is no receipt of this LLM raises ``MisuseError``."""
        with self._call():
            if isinstance(pin, PrefillInfo):
                raise MisuseError("unpin takes the pin of what prefill returned (info.pin), not all of it")
            self.engine.kv.unpin(pin)

    def score(self, prompt: Prompt, continuations: Sequence[Prompt]) -> list[Score]:
        """Log-probabilities of each continuation's tokens after ``prompt``, in order.

        The prompt is computed once, whatever the number of continuations. A continuation's text is encoded
        on its own, without special tokens, and its ids follow the prompt's. Bad input raises before any
        work and names the continuation's index.
        """
        with self._call():
            if isinstance(continuations, str) or not isinstance(continuations, (list, tuple)):
                raise InvalidRequestError(
                    f"continuations must be a list of texts or token ids, got {type(continuations).__name__}"
                )
            head = self._request(prompt, SamplingParams(max_tokens=0), "prompt", None)
            requests = [
                self._continuation(head.prompt_ids, continuation, index)
                for index, continuation in enumerate(continuations)
            ]
            if len(requests) > 1 and len(head.prompt_ids) > 1:
                # All but its last token, which every continuation computes for its own first logits.
                run_to_end(self.engine, [replace(head, prompt_ids=head.prompt_ids[:-1])])
            finals = run_to_end(self.engine, requests)
            scores = []
            for request in requests:
                ids = request.prompt_ids[len(head.prompt_ids) :]
                logprobs = finals[request.request_id][1].logprobs
                scores.append(Score(tuple(ids.tolist()), logprobs))
            return scores

    def explain(self, prompt: Prompt) -> PromptExplanation:
        """How much of a prompt the cache holds right now, and why not more. Computes nothing and changes
        nothing; ``print`` the result."""
        with self._call():
            request = self._request(prompt, SamplingParams(max_tokens=0), "prompt", None)
            return explain_prompt(self.engine.kv, request.prompt_ids, self.tokenizer)

    def flush(self) -> FlushReport:
        """Forget every prefix; pins are dropped, and the report says so."""
        with self._call():
            return self.engine.kv.flush()

    # life

    def stats(self) -> dict[str, Any]:
        """Counters by part: ``load`` (seconds by phase), ``store`` (its size and why), and the engine's
        ``scheduler``, ``kv`` and ``executor``."""
        with self._call():
            store = {
                "num_pages": self.config.num_pages,
                "page_size": self.config.page_size,
                "num_tokens": self.config.num_pages * self.config.page_size,
                "max_pinned_tokens": self.config.max_pinned_pages * self.config.page_size,
                **self._sizing,
            }
            return {"model": self.spec.name, "load": dict(self._load), "store": store, **self.engine.stats()}

    def check(self) -> None:
        """Raise ``InternalError`` where an invariant of engine or ledger does not hold."""
        with self._call():
            self.engine.check()

    def close(self) -> None:
        """Let go of model and store. A second call does nothing."""
        if self._turns.is_forked:  # nobody may ever let go of its lock
            self._engine = None
            return
        with self._turns.take():
            self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # inside one call

    @contextmanager
    def _call(self) -> Iterator[None]:
        with self._turns.take():
            _ = self.engine  # raises when closed
            yield

    def _request(self, prompt: object, sampling: SamplingParams, what: str, index: int | None) -> Request:
        """A request that is known to fit, or an error that names ``what`` and ``index``."""
        self._turns.raise_if_interrupted()
        try:
            return self._fitting(prompt_ids(prompt, self.tokenizer, self.spec.vocab_size), sampling)
        except InvalidRequestError as error:
            raise with_index(error, what, index) from error.__cause__

    def _continuation(self, head: TokenIds, continuation: object, index: int) -> Request:
        self._turns.raise_if_interrupted()
        try:
            tail = prompt_ids(continuation, self.tokenizer, self.spec.vocab_size, add_special_tokens=False)
            return self._fitting(
                np.concatenate([head, tail]), SamplingParams(max_tokens=0), logprob_start=len(head)
            )
        except InvalidRequestError as error:
            raise with_index(error, "continuation", index) from error.__cause__

    def _fitting(
        self, ids: TokenIds, sampling: SamplingParams, *, logprob_start: int | None = None
    ) -> Request:
        request = Request(
            request_id=next(self._request_ids), prompt_ids=ids, sampling=sampling, logprob_start=logprob_start
        )
        try:
            refuse_unfit(request, self.config, self.spec)
        except InvalidRequestError as error:
            name = f"request {request.request_id}"  # the caller knows an index, not this number
            raise type(error)(str(error).removeprefix(name).lstrip(": ")) from None
        return request

    def _output(self, tokens: list[int], final: SequenceOutput) -> Output | BaseException:
        if final.error is not None:
            return final.error
        assert final.finish_reason is not None
        text = self.tokenizer.decode(tokens) if self.tokenizer is not None else ""
        return Output(text, tuple(tokens), final.finish_reason, final.usage)
