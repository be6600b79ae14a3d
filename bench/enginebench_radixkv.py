"""radixkv as an engine of enginebench, a harness that runs whole engines side by side.

Give this file to that harness in ``ENGINEBENCH_PLUGINS``. The model is ``ENGINEBENCH_HF_MODEL``, the threads
are the harness's, and ``ENGINEBENCH_RADIXKV_ARGS`` may hold settings of ``EngineConfig`` as JSON.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from typing import Any

from enginebench import THREADS, Engine  # type: ignore[import-not-found]

from radixkv.config import EngineConfig
from radixkv.engine import Engine as RadixEngine
from radixkv.executor.hf import HFExecutor
from radixkv.executor.loader import load_model
from radixkv.sampling import SamplingParams
from radixkv.sequence import Request

NUM_TOKENS = 49_152
"""Room for K/V: more than any of the harness's workloads needs without sharing."""


class RadixKV(Engine):  # type: ignore[misc]
    """The engine as it comes: lpm, pages of 16 tokens, chunks of 1,024."""

    name = "radixkv"
    family = "RADIXKV"
    exact = True
    prefix_cache = True

    def load(self) -> None:
        settings: dict[str, Any] = json.loads(os.environ.get("ENGINEBENCH_RADIXKV_ARGS", "{}"))
        page_size = settings.setdefault("page_size", 16)
        loaded = load_model(os.environ["ENGINEBENCH_HF_MODEL"])
        executor = HFExecutor(
            loaded, num_pages=NUM_TOKENS // page_size, page_size=page_size, num_threads=THREADS
        )
        config = EngineConfig(num_pages=executor.num_pages, prefix_cache=self.prefix_cache, **settings)
        self.settings = settings
        self.executor = executor
        self.engine = RadixEngine.build(config, executor)
        self.num_added = 0

    def info(self) -> dict[str, Any]:
        return {"version": f"radixkv {importlib.metadata.version('radixkv')}", "args": self.settings}

    def run(self, workload: Any, tracker: Any) -> None:
        engine = self.engine
        nodes: dict[int, Any] = {}
        outputs: dict[int, list[int]] = {}

        def submit(ready: list[Any]) -> None:
            for node in ready:
                sampling = SamplingParams(
                    max_tokens=node.max_new,
                    temperature=node.temperature,
                    seed=node.seed if node.temperature > 0 else None,
                    ignore_eos=True,
                )
                request_id = self.num_added
                self.num_added += 1
                nodes[request_id], outputs[request_id] = node, []
                engine.add(
                    Request(request_id=request_id, prompt_ids=tracker.prompt[node.id], sampling=sampling)
                )

        submit(tracker.start())
        while engine.has_work:
            for output in engine.step():
                node, tokens = nodes[output.request_id], outputs[output.request_id]
                tokens.extend(output.new_token_ids)
                if tokens:
                    tracker.first(node)
                if output.finish_reason is None:
                    continue
                if output.error is not None:
                    raise output.error
                submit(tracker.done(node, tokens, output.usage.cached_tokens))

    def reset(self) -> None:
        self.engine.kv.flush()


class RadixKVNoCache(RadixKV):
    """The same kernels and scheduler over the null tree."""

    name = "radixkv-nocache"
    prefix_cache = False


ENGINES = [RadixKV, RadixKVNoCache]
