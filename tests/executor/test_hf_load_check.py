"""What the checks at load refuse, by name or by trying, and what they let pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from radixkv.errors import UnsupportedModelError
from radixkv.executor import load_check
from radixkv.executor.attention.reference import ReferenceBackend
from radixkv.executor.hf import HFExecutor
from radixkv.executor.kv_store import KVStore
from radixkv.executor.loaded_model import LoadedModel, spec_from_config
from radixkv.testing.tiny_models import tiny_model

SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "initializer_range": 0.2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip


def random_model(model_type: str, **settings: Any) -> LoadedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**SMALL, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return LoadedModel(model=model, tokenizer=None, spec=spec_from_config(config, name="small"))


def run(loaded: LoadedModel) -> HFExecutor:
    return HFExecutor(loaded, num_pages=4, page_size=8, attention="reference")


LINEAR_LAYERS = {
    "layer_types": ["linear_attention", "full_attention"], "num_experts": 4, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("llama", {"rope_parameters": DYNAMIC}, "rope type dynamic"),
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}, "rope type longrope"),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}, "attention sinks"),
        ("qwen3_next", LINEAR_LAYERS, "layers of type linear_attention"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional attention"),
        ("gpt2", {"add_cross_attention": True}, "cross attention"),
    ],
    ids=["dynamic", "longrope", "sinks", "linear", "conv", "bidirectional", "cross"],
)  # fmt: skip
def test_b048_refused_by_name(model_type: str, settings: dict[str, Any], reason: str) -> None:
    """Fault seen: each check left out in turn (bidirectional attention is found by two)."""
    loaded = random_model(model_type, **settings)
    with pytest.raises(UnsupportedModelError, match=rf"small \(.*{reason}"):
        run(loaded)
    assert loaded.prepared is None, "nothing was changed"


def test_quantised_checkpoints_are_refused() -> None:
    loaded = tiny_model("llama")
    loaded.model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(UnsupportedModelError, match="quantised checkpoint"):
        run(loaded)


def test_float64_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"dtype torch\.float64 is none of float32"):
        run(tiny_model("llama", dtype="float64"))


def test_multimodal_models_are_refused() -> None:
    loaded = tiny_model("llama")
    text = loaded.model.config

    class Both(type(text)):  # type: ignore[misc]
        def get_text_config(self, *args: Any, **kwargs: Any) -> Any:
            return text

    loaded.model.config = Both()
    with pytest.raises(UnsupportedModelError, match="multimodal model"):
        run(loaded)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("granite", {"logits_scaling": 4.0, "attention_multiplier": 0.3}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
    ids=["linear rope", "llama3 rope", "scaled logits", "experts"],
)  # fmt: skip
def test_what_runs_exactly_is_let_through(model_type: str, settings: dict[str, Any]) -> None:
    executor = run(random_model(model_type, **settings))
    assert executor.spec.family == model_type


def test_a_model_that_never_asks_for_attention_is_refused() -> None:
    """Its layers do not go through transformers' interface, so the hook would never run."""
    loaded = tiny_model("llama")

    def identity(hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return hidden_states, None

    loaded.model.model.layers[1].self_attn.forward = identity
    with pytest.raises(UnsupportedModelError, match=r"layers \[0, 2\] reached .* each of 0\.\.2 once"):
        run(loaded)


def test_a_layer_that_attends_twice_is_refused() -> None:
    loaded = tiny_model("llama")
    loaded.model.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(UnsupportedModelError, match=r"layers \[0, 0, 2\] reached"):
        run(loaded)


def test_heads_that_the_spec_does_not_know_are_refused() -> None:
    loaded = random_model("gpt_neox")  # takes no notice of num_key_value_heads
    with pytest.raises(UnsupportedModelError, match="expected 4 and 2 heads of 8"):
        run(loaded)


def test_a_configuration_without_positions_is_refused() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("bloom", n_layer=2, n_head=4, hidden_size=32, vocab_size=97)
    with pytest.raises(
        UnsupportedModelError, match="bloom configuration does not say max_position_embeddings"
    ):
        spec_from_config(config)


@pytest.mark.parametrize(
    ("fault", "caught"),
    [(lambda out: out * 1.01, True), (lambda out: out.roll(1, 0), True), (lambda out: out + 1e-9, False)],
    ids=["scaled", "rows moved", "harmless"],
)
def test_a_paged_run_that_differs_is_refused(
    monkeypatch: pytest.MonkeyPatch, fault: Any, caught: bool
) -> None:
    class Faulty(ReferenceBackend):
        def run(self, *args: Any, **options: Any) -> torch.Tensor:
            out: torch.Tensor = fault(super().run(*args, **options))
            return out

    def make(name: str, store: KVStore) -> ReferenceBackend:
        return Faulty(store)

    monkeypatch.setattr(load_check, "make_backend", make)
    loaded = tiny_model("llama")
    if not caught:
        run(loaded)
        return
    with pytest.raises(
        UnsupportedModelError, match=r"differs from a plain one by .* the limit for float32 is 1e-04"
    ):
        run(loaded)
    monkeypatch.undo()
    run(loaded)  # the model itself is fine: it is checked again, not remembered as refused


def test_logits_that_are_no_numbers_are_refused() -> None:
    loaded = tiny_model("llama")
    with torch.no_grad():
        loaded.model.model.norm.weight[3] = float("nan")
    with pytest.raises(UnsupportedModelError, match="logits of random ids are not finite in float32"):
        run(loaded)


def test_errors_of_the_models_own_code_are_kept_as_cause() -> None:
    loaded = tiny_model("llama")

    def wants_a_cache(*args: Any, **kwargs: Any) -> Any:
        raise AttributeError("'NoneType' object has no attribute 'update'")

    loaded.model.model.layers[0].mlp.forward = wants_a_cache
    with pytest.raises(UnsupportedModelError, match="a paged forward failed with AttributeError") as caught:
        run(loaded)
    assert isinstance(caught.value.__cause__, AttributeError)


def test_positions_past_the_last_one_are_our_bug() -> None:
    """The scheduler refuses such a request; GPT-2 itself would end in a bare IndexError."""
    from radixkv.executor.probe_batch import ProbeSeq, probe_batch

    executor = HFExecutor(tiny_model("gpt2", n_positions=16), num_pages=4, page_size=8, attention="reference")
    seq = ProbeSeq(0, np.zeros(17, np.int32), 0, 17, np.array([0, 1, 2], np.int32))
    with pytest.raises(AssertionError, match="scheduler refuses"):
        executor.execute(probe_batch(8, [seq], vocab_size=97))
