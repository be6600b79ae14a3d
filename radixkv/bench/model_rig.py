"""open_rig: a real model as a Rig."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from radixkv.bench.machine import file_digest
from radixkv.bench.peer import TransformersPeer
from radixkv.bench.rig import Floor, Rig
from radixkv.bench.workloads import Workload
from radixkv.errors import ConfigError
from radixkv.executor.base import ModelExecutor
from radixkv.executor.loaded_model import LoadedModel

DEFAULT_MODEL = "smollm2-135m-instruct"


def open_rig(
    name: str,
    *,
    num_threads: int | None,
    max_batch_tokens: int,
    max_running: int,
    attention: str = "cpu",
) -> Rig:
    """Load ``name`` (whatever ``load_model`` takes) in float32 and prepare it once for all arms.

    Raises what ``load_model`` and ``HFExecutor`` raise, and ``ConfigError`` for a model that has no
    tokenizer.
    """
    from radixkv.executor.loader import find_source, load_model

    loaded = load_model(name)
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise ConfigError(f"{name} has no tokenizer; the benchmark's prompts are text")

    def encode(text: str) -> Sequence[int]:
        ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids)))

    def open_peer(warm_up: Workload) -> TransformersPeer:
        model = load_model(name).model
        peer = TransformersPeer(model, max_batch_tokens=max_batch_tokens, max_requests=max_running)
        peer.run(warm_up)
        return peer

    source = find_source(name)
    rig = rig_of(loaded, encode, decode, num_threads=num_threads, attention=attention)
    digest = file_digest(source) if source is not None else None
    return replace(rig, digest=digest, open_peer=open_peer)


def rig_of(
    loaded: LoadedModel,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    *,
    num_threads: int | None = None,
    attention: str = "cpu",
) -> Rig:
    """A Rig over a model in memory. It is prepared here, so that no arm pays for it."""
    from radixkv.executor.floor import head_seconds, layer_seconds
    from radixkv.executor.hf import HFExecutor
    from radixkv.executor.prepared import prepare

    def make_executor(num_pages: int, page_size: int) -> ModelExecutor:
        executor = HFExecutor(
            loaded, num_pages=num_pages, page_size=page_size, attention=attention, num_threads=num_threads
        )
        executor.store.prefault()  # first touch is the system's work, not the arm's
        return executor

    def measure_floor(chunk_rows: int, step_rows: int) -> Floor:
        prepared = prepare(loaded, attention=attention)
        head_s = head_seconds(prepared, step_rows)
        step_s = layer_seconds(prepared, step_rows) + head_s
        return Floor(chunk_rows, layer_seconds(prepared, chunk_rows), step_rows, step_s, head_s)

    first = HFExecutor(loaded, num_pages=1, attention=attention, num_threads=num_threads)
    return Rig(
        name=loaded.spec.name,
        encode=encode,
        decode=decode,
        make_executor=make_executor,
        num_threads=first.num_threads,
        load_report=loaded.load_report,
        measure_floor=measure_floor,
    )
