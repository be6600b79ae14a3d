"""Service: an engine with its tokenizer, and all that is done with them between two steps. ``LLM`` and
``AsyncLLM`` are two ways to drive one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from radixkv.adapters import Adapter, AdapterBook
from radixkv.beam_params import BeamParams
from radixkv.config import EngineConfig, ModelSpec
from radixkv.engine import Engine
from radixkv.errors import ConfigError, InvalidRequestError, MisuseError
from radixkv.executor.base import ModelExecutor, UpdatableExecutor, WeightUpdate
from radixkv.explain import explain_prompt
from radixkv.kv.events import Event
from radixkv.kv.manager import FlushReport, Pin
from radixkv.namespace import NO_SCOPE, Scope, has_salt, namespace_of
from radixkv.outputs import PrefillInfo, PromptExplanation
from radixkv.plain import shown
from radixkv.prompts import prompt_ids, with_index
from radixkv.sampling import SamplingParams
from radixkv.sched.limits import refuse_unfit
from radixkv.sequence import Request
from radixkv.text import Tokenizer
from radixkv.types import TokenIds
from radixkv.urgency import NO_URGENCY, Urgency


class Service:
    """Not thread-safe, and never called while a step runs: who drives it sees to that."""

    def __init__(
        self,
        executor: ModelExecutor,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        *,
        load: Mapping[str, float],
        sizing: Mapping[str, Any],
    ) -> None:
        """``load``: seconds by phase; ``sizing``: why the store is as large as it is. Both go into ``stats``.
        Raises ``ConfigError`` where ``config`` does not fit the executor."""
        self.tokenizer = tokenizer
        self.spec: ModelSpec = executor.spec
        self.config = config
        self.engine = Engine.build(config, executor)
        self.pause: Callable[[], None] = _no_pause
        """Called before each prompt that is looked at; may raise, to stop a long list of them."""
        self._adapters = AdapterBook(self.engine)
        self._revision: str | None = None
        self._load = dict(load)
        self._sizing = dict(sizing)
        self._request_ids = itertools.count()

    @classmethod
    def over(cls, executor: ModelExecutor, tokenizer: Any | None, config: EngineConfig) -> Service:
        """A service over an executor that exists already. ``tokenizer``: a ``Tokenizer`` or what it wraps.
        Raises ``ConfigError`` where ``config`` is none or does not fit the executor."""
        if not isinstance(config, EngineConfig):
            raise ConfigError(f"config must be an EngineConfig, got {shown(config)}")
        if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
            tokenizer = Tokenizer(tokenizer)
        return cls(executor, tokenizer, config, load={}, sizing={"sized_by": "config"})

    # Requests

    def next_request_id(self) -> int:
        return next(self._request_ids)

    def request(
        self,
        prompt: object,
        sampling: SamplingParams,
        what: str,
        index: int | None = None,
        request_id: int | None = None,
        beam: BeamParams | None = None,
        scope: Scope = NO_SCOPE,
        urgency: Urgency = NO_URGENCY,
    ) -> Request:
        """A request that is known to fit, or ``InvalidRequestError`` (or a kind of it) with ``what`` and
        ``index``."""
        self.pause()
        try:
            if sampling.stop and self.tokenizer is None:
                raise InvalidRequestError("stop strings need a tokenizer, and the model came without one")
            for stop in sampling.stop:
                if self.tokenizer is not None and stop in self.tokenizer.special_texts:
                    raise InvalidRequestError(
                        f"stop string {shown(stop)} is a special token, which the text leaves out: put its "
                        "id into stop_token_ids"
                    )
            ids = prompt_ids(prompt, self.tokenizer, self.spec.vocab_size)
            return self._fitting(
                ids, sampling, request_id=request_id, beam=beam, scope=scope, urgency=urgency
            )
        except InvalidRequestError as error:
            raise with_index(error, what, index) from error.__cause__

    def continuation(
        self, head: TokenIds, continuation: object, index: int, scope: Scope = NO_SCOPE
    ) -> Request:
        """A request that scores ``continuation`` behind ``head``; raises as ``request`` does."""
        self.pause()
        try:
            tail = prompt_ids(continuation, self.tokenizer, self.spec.vocab_size, add_special_tokens=False)
            return self._fitting(
                np.concatenate([head, tail]),
                SamplingParams(max_tokens=0),
                logprob_start=len(head),
                scope=scope,
            )
        except InvalidRequestError as error:
            raise with_index(error, "continuation", index) from error.__cause__

    def _fitting(
        self,
        ids: TokenIds,
        sampling: SamplingParams,
        *,
        logprob_start: int | None = None,
        request_id: int | None = None,
        beam: BeamParams | None = None,
        scope: Scope,
        urgency: Urgency = NO_URGENCY,
    ) -> Request:
        self.engine.follow_weights()
        adapter = None if scope.adapter is None else self._adapters.find(scope.adapter)
        request = Request(
            request_id=self.next_request_id() if request_id is None else request_id,
            prompt_ids=ids,
            sampling=sampling,
            logprob_start=logprob_start,
            beam=beam,
            priority=urgency.priority,
            queue_timeout_s=urgency.queue_timeout_s,
            adapter=0 if adapter is None else adapter.index,
            namespace=namespace_of(
                model_revision=self._revision,
                adapter=None if adapter is None else adapter.name,
                adapter_version=0 if adapter is None else adapter.version,
                cache_salt=scope.cache_salt,
            ),
        )
        try:
            refuse_unfit(request, self.config, self.spec)
        except InvalidRequestError as error:
            name = f"request {request.request_id}"  # the caller knows an index, not this number
            raise type(error)(str(error).removeprefix(name).lstrip(": ")) from None
        return request

    # What needs no step

    def unpin(self, pin: Pin) -> None:
        """Let go of a pin; what is no receipt of this service raises ``MisuseError``."""
        if isinstance(pin, PrefillInfo):
            raise MisuseError("unpin takes the pin of what prefill returned (info.pin), not all of it")
        self.engine.kv.unpin(pin)

    def explain(self, prompt: object, scope: Scope = NO_SCOPE) -> PromptExplanation:
        """How much of ``prompt`` the cache holds, and why not more. Nothing under another salt is looked at,
        nor under a salt by those who give none: they could guess what is there. Changes nothing."""
        request = self.request(prompt, SamplingParams(max_tokens=0), "prompt", scope=scope)
        return explain_prompt(
            self.engine.kv,
            request.prompt_ids,
            self.tokenizer,
            request.namespace,
            visible=lambda other: has_salt(other, scope.cache_salt),
        )

    def take_events(self) -> tuple[Event, ...]:
        """What entered and left the cache since the last call."""
        return self.engine.take_events()

    def flush(self) -> FlushReport:
        """Forget every prefix; pins are dropped."""
        return self.engine.kv.flush()

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> Adapter:
        """See ``AdapterBook.load``."""
        return self._adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """See ``AdapterBook.unload``."""
        self._adapters.unload(name)

    def update_weights(self, weights: WeightUpdate, revision: str | None = None) -> FlushReport:
        """Replace some weights and begin a new epoch. ``revision`` names the new model in the namespaces.
        Raises ``ConfigError``, having changed nothing."""
        if revision is not None and not isinstance(revision, str):
            raise ConfigError(f"revision must be text or None, got {shown(revision)}")
        executor = self.engine.executor
        if not isinstance(executor, UpdatableExecutor):
            raise ConfigError(f"the weights of this executor ({type(executor).__name__}) cannot be replaced")
        executor.update_weights(weights)
        self._revision = revision
        return self.engine.new_epoch()

    def check(self) -> None:
        """Raise ``InternalError`` where an invariant of engine or ledger does not hold."""
        self.engine.check()
        self._adapters.check()

    def stats(self) -> dict[str, Any]:
        """Counters by part: ``load`` (seconds by phase), ``store`` (its size and why), and the engine's
        ``scheduler``, ``kv`` and ``executor``."""
        store = {
            "num_pages": self.config.num_pages,
            "page_size": self.config.page_size,
            "num_tokens": self.config.num_pages * self.config.page_size,
            "max_pinned_tokens": self.config.max_pinned_pages * self.config.page_size,
            **self._sizing,
        }
        return {
            "model": self.spec.name,
            "load": dict(self._load),
            "store": store,
            **self._adapters.stats(),
            **self.engine.stats(),
        }


def _no_pause() -> None:
    """Nobody wants to stop in between."""
