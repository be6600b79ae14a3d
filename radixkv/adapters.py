"""AdapterBook: the names by which callers know LoRA adapters."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from radixkv.engine import Engine
from radixkv.errors import ConfigError, InvalidRequestError, MisuseError
from radixkv.executor.base import AdapterExecutor
from radixkv.plain import shown


@dataclass(frozen=True)
class Adapter:
    """One loaded adapter. What was computed under another version is never found under this one."""

    name: str
    version: int
    """1 for the first that was ever loaded under this name, then 2, and so on."""
    index: int
    """The executor's."""


class AdapterBook:
    """Name to adapter. A name that is loaded again gets the next version; requests that run keep the old
    one, whose weights are let go once none of them is left."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loaded: dict[str, Adapter] = {}
        self._versions: dict[str, int] = {}  # also of names that are not loaded any more
        self._retired: list[Adapter] = []

    def load(self, name: str, path: str | os.PathLike[str]) -> Adapter:
        """Read an adapter from a folder, under ``name``. Raises ``ConfigError`` for what is no name, or where
        the executor takes no adapters, and what the executor raises; then nothing has changed."""
        if not isinstance(name, str) or not name:
            raise ConfigError(f"an adapter's name must be text, and not empty, got {shown(name)}")
        if not isinstance(path, (str, os.PathLike)):
            raise ConfigError(f"an adapter's path must be text or a path, got {shown(path)}")
        self._let_go_of_retired()
        index = self._executor.load_adapter(path)
        if name in self._loaded:
            self._retired.append(self._loaded.pop(name))
        version = self._versions[name] = self._versions.get(name, 0) + 1
        self._loaded[name] = Adapter(name, version, index)
        self._let_go_of_retired()
        return self._loaded[name]

    def unload(self, name: str) -> None:
        """Let go of an adapter. Raises ``MisuseError``, having changed nothing, where none has this name, or
        requests use it that have not ended."""
        self._let_go_of_retired()
        adapter = self._loaded.get(name) if isinstance(name, str) else None
        if adapter is None:
            raise MisuseError(f"no adapter is loaded under the name {shown(name)}")
        num_users = self._engine.scheduler.num_users_of(adapter.index)
        if num_users:
            raise MisuseError(f"adapter {name!r} is in use by {num_users} requests: end or abort them first")
        self._executor.unload_adapter(adapter.index)
        del self._loaded[name]

    def find(self, name: str) -> Adapter:
        """Raises ``InvalidRequestError``, with the names that there are."""
        adapter = self._loaded.get(name) if isinstance(name, str) else None
        if adapter is None:
            there = ", ".join(map(repr, sorted(self._loaded))) or "none"
            raise InvalidRequestError(f"adapter {shown(name)} is not loaded; there are: {there}")
        return adapter

    @property
    def _executor(self) -> AdapterExecutor:
        executor = self._engine.executor
        if not isinstance(executor, AdapterExecutor):
            raise ConfigError(f"this executor ({type(executor).__name__}) takes no adapters")
        return executor

    def _let_go_of_retired(self) -> None:
        for adapter in list(self._retired):
            if self._engine.scheduler.num_users_of(adapter.index) == 0:
                if self._executor.has_adapter(adapter.index):
                    self._executor.unload_adapter(adapter.index)
                self._retired.remove(adapter)
        self._engine.when_ended = self._let_go_of_retired if self._retired else None

    def check(self) -> None:
        """No index stands twice."""
        indices = [adapter.index for adapter in (*self._loaded.values(), *self._retired)]
        assert len(set(indices)) == len(indices), f"an adapter's index stands twice: {indices}"

    def stats(self) -> dict[str, Any]:
        """``adapters``: the version of each name that is loaded."""
        return {
            "adapters": {name: adapter.version for name, adapter in sorted(self._loaded.items())},
            "num_adapters_retired": len(self._retired),
        }
