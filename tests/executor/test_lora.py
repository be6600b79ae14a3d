"""LoRA adapters: read from what peft wrote, run beside each other, compared with peft's own forward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lora_files import TARGETS, peft_logits, prompt_of, save_adapter

from radixkv import LLM, EngineConfig, SamplingParams
from radixkv.errors import MisuseError, ModelLoadError, UnsupportedModelError
from radixkv.executor.adapter_shelf import AdapterShelf, LoraPair
from radixkv.executor.hf import HFExecutor
from radixkv.executor.probe_batch import ProbeSeq, probe_batch
from radixkv.testing import tiny_model

needs_peft = pytest.mark.needs_peft
pytestmark = pytest.mark.filterwarnings("ignore")  # what peft and transformers say of each other


def executor_of(family: str, *, pack: bool = False) -> HFExecutor:
    return HFExecutor(tiny_model(family), num_pages=64, page_size=4, pack=pack, num_threads=1)


def logits_of(executor: HFExecutor, prompts: list[list[int]], adapters: list[int]) -> list[torch.Tensor]:
    """One batch, every sequence with its adapter, each on pages of its own."""
    pages = np.arange(64, dtype=np.int32).reshape(4, 16)
    seqs = [
        ProbeSeq(i, np.array(ids, np.int32), 0, len(ids), pages[i], adapter=adapter)
        for i, (ids, adapter) in enumerate(zip(prompts, adapters, strict=True))
    ]
    batch = probe_batch(4, seqs, vocab_size=executor.spec.vocab_size)
    return list(torch.split(executor.logits(batch), [len(ids) for ids in prompts]))


@needs_peft
@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("family", sorted(TARGETS))
def test_a_mixed_batch_gives_what_peft_gives_alone(family: str, pack: bool, tmp_path: Path) -> None:
    """Fault seen: ``AdapterShelf.add`` forgets the scale; ``rows`` are one row late."""
    folders = [
        save_adapter(tmp_path / "a", family, 1),
        save_adapter(tmp_path / "b", family, 2, r=3, lora_alpha=5, use_rslora=True),
    ]
    executor = executor_of(family, pack=pack)
    prompts = [prompt_of(seed, num_tokens) for seed, num_tokens in ((1, 9), (2, 5), (3, 30), (4, 7))]
    before = logits_of(executor, prompts, [0, 0, 0, 0])
    first, second = [executor.load_adapter(folder) for folder in folders]
    found = logits_of(executor, prompts, [0, first, first, second])
    for rows, ids, folder in zip(found, prompts, [None, folders[0], folders[0], folders[1]], strict=True):
        expected = peft_logits(folder, family, ids)
        assert float((rows - expected).abs().max()) <= 1e-4 * max(1.0, float(expected.abs().max()))
    assert torch.equal(before[0], found[0]), "a base row changed in some bit"
    assert not torch.allclose(before[1], found[1], atol=1e-2)
    executor.unload_adapter(first)
    again = logits_of(executor, prompts, [0, 0, 0, second])
    assert all(map(torch.equal, again[:3], before[:3])) and torch.equal(again[3], found[3])
    assert executor.stats()["num_adapters"] == 1
    with pytest.raises(MisuseError, match=f"no adapter of index {first}"):
        logits_of(executor, prompts[:1], [first])


@needs_peft
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern"),
        ({"lora_bias": True}, "lora_bias"),
        ({"target_modules": ["embed_tokens"]}, "lora_embedding_"),
        ({"target_modules": ["lm_head"], "save_embedding_layers": True}, "base_layer"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
    ],
)
def test_what_is_more_than_lora_is_refused_by_name(
    options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    save_adapter(tmp_path / "odd", "llama", 1, **options)
    executor = executor_of("llama")
    with pytest.raises(UnsupportedModelError, match=named):
        executor.load_adapter(tmp_path / "odd")
    assert executor.stats()["num_adapters"] == 0


@needs_peft
def test_ranks_may_differ_and_wrong_files_are_refused(tmp_path: Path) -> None:
    executor = executor_of("llama")
    folder = save_adapter(tmp_path / "ranks", "llama", 1, rank_pattern={"q_proj": 2})
    [rows] = logits_of(executor, [prompt_of(1, 6)], [executor.load_adapter(folder)])
    assert float((rows - peft_logits(folder, "llama", prompt_of(1, 6))).abs().max()) < 1e-4
    for missing in (tmp_path, tmp_path / "no-such-folder"):
        with pytest.raises(ModelLoadError, match="holds no adapter"):
            executor.load_adapter(missing)
    save_adapter(tmp_path / "other", "gpt2", 1)
    with pytest.raises(UnsupportedModelError, match="fits no linear layer"):
        executor.load_adapter(tmp_path / "other")
    config = json.loads((folder / "adapter_config.json").read_text())
    for changes, error in (({"peft_type": "IA3"}, "IA3"), ({"init_lora_weights": "pissa"}, "pissa")):
        changed = {**config, **changes}
        if "peft_type" in changes:
            changed = {"peft_type": "IA3", "task_type": "CAUSAL_LM"}
        (folder / "adapter_config.json").write_text(json.dumps(changed))
        with pytest.raises(UnsupportedModelError, match=error):
            executor.load_adapter(folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="no readable adapter"):
        executor.load_adapter(folder)
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 3, "rank_pattern": {}}))
    with pytest.raises(UnsupportedModelError, match="has rank"):
        executor.load_adapter(folder)


@needs_peft
def test_a_mixed_call_gives_what_separate_calls_give_and_shares_no_page(tmp_path: Path) -> None:
    """In chunks, with shared prefixes, hits and preemption. Faults seen: ``Service`` leaves the adapter out
    of the namespace; ``build_batch`` does not group by adapter."""
    names = [None, "a", "b", None, "b", "a", "a", None]
    root = prompt_of(1, 20)
    prompts = [[*root, *prompt_of(seed, seed)] for seed in range(1, 9)]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    folders = {name: save_adapter(tmp_path / name, "llama", seed) for name, seed in (("a", 1), ("b", 2))}
    mixed = llm_over(num_pages=40, folders=folders)
    alone = llm_over(num_pages=64, folders=folders, prefix_cache=False)
    outputs = mixed.generate(prompts, params, adapter=names)
    for prompt, name, output in zip(prompts, names, outputs, strict=True):
        assert output.token_ids == alone.generate(prompt, params, adapter=name).token_ids
    assert len({output.token_ids for output in outputs}) > 4
    again = mixed.generate([root] * 3, params, adapter=[None, "a", "b"])
    assert [output.usage.cached_tokens for output in again] == [19, 19, 19]
    assert len({output.token_ids for output in again}) == 3
    assert mixed.load_adapter("a", folders["b"]).version == 2
    assert mixed.generate(root, params, adapter="a").token_ids == again[2].token_ids
    assert mixed.stats()["executor"]["num_adapters"] == 2
    mixed.check()


def llm_over(*, num_pages: int, folders: dict[str, Path], prefix_cache: bool = True) -> LLM:
    executor = HFExecutor(tiny_model("llama"), num_pages=num_pages, page_size=4, num_threads=1)
    config = EngineConfig(
        num_pages=num_pages,
        page_size=4,
        prefix_cache=prefix_cache,
        max_batch_tokens=24,
        decode_reserve_tokens=0,
    )
    llm = LLM.from_executor(executor, config=config)
    for name, folder in folders.items():
        assert llm.load_adapter(name, folder).version == 1
    return llm


def test_only_rows_of_the_adapter_change_and_indices_are_never_given_twice() -> None:
    shelf = AdapterShelf()
    pair = LoraPair(torch.ones(1, 2), torch.ones(3, 1), 0.5)
    first = shelf.put({"layer": pair})
    shelf.drop(first)
    second = shelf.put({"layer": pair})
    assert second > first
    x, y = torch.ones(1, 4, 2), torch.zeros(1, 4, 3)
    with shelf.rows(np.array([0, second, second, 0], np.int32)):
        assert not shelf.is_idle
        shelf.add("layer", x, y)
        shelf.add("another", x, y)
        with pytest.raises(UnsupportedModelError, match="3 of 4 rows"):
            shelf.add("layer", x[:, :3], y[:, :3])
    assert shelf.is_idle
    assert y[0].tolist() == [[0.0] * 3, [1.0] * 3, [1.0] * 3, [0.0] * 3]
    with pytest.raises(MisuseError, match="no adapter of index 1"), shelf.rows(np.array([1], np.int32)):
        pass
