"""Model files and names that loaded and answered wrongly, or failed with a raw error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixkv.errors import ConfigError, ModelLoadError, UnsupportedModelError
from radixkv.executor.loaded_model import spec_from_config
from radixkv.executor.loader import MAX_LAYERS, find_source, load_model
from radixkv.testing.tiny_models import tiny_model

REFUSED = (ModelLoadError, UnsupportedModelError)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama").model.save_pretrained(tmp_path)
    return tmp_path


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    content = load_file(folder / "model.safetensors")
    change(content)
    save_file(content, folder / "model.safetensors", metadata={"format": "pt"})


# config.json


@pytest.mark.parametrize("text", ["[]", '"x"', "null", "3", "", "[" * 100_000], ids=range(6))
def test_a_config_that_is_no_object(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json (holds|cannot be read)"):
        load_model(folder)


@pytest.mark.parametrize(
    ("value", "method"), [("gptq", "gptq"), ([], "an unnamed"), ({"quant_method": 5}, "an unn")]
)
def test_a_quantisation_of_any_form(folder: Path, value: Any, method: str) -> None:
    edit(folder, quantization_config=value)
    with pytest.raises(UnsupportedModelError, match=rf"quantised \({method}"):
        load_model(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", ["a"]),
        ("model_type", None),
        ("vocab_size", "97"),
        ("vocab_size", 0),
        ("vocab_size", 2**40),
        ("num_attention_heads", 3),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 0),
        ("num_key_value_heads", 3),
        ("head_dim", 0),
        ("hidden_size", -32),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", MAX_LAYERS + 1),
        ("max_position_embeddings", 0),
        ("max_position_embeddings", -4),
        ("max_position_embeddings", 2.5),
        ("eos_token_id", "a"),
        ("eos_token_id", [1, None]),
        ("eos_token_id", 1.5),
        ("rope_parameters", "a"),
        ("hidden_act", 5),
    ],
)
def test_a_config_with_a_senseless_field(folder: Path, field: str, value: Any) -> None:
    """Raw errors of four kinds; no layer broke the store, no position refused every prompt, 1.5 became 1."""
    edit(folder, **{field: value})
    with pytest.raises(REFUSED, match=str(folder)):
        load_model(folder)


def test_architectures_of_another_type(folder: Path) -> None:
    """radixkv does not read the field: the kind of model follows from ``model_type``. Older transformers
    check it all the same."""
    edit(folder, architectures=5)
    try:
        outcome = load_model(folder).spec.family
    except REFUSED as error:
        outcome = str(error)
    assert outcome == "llama" or (str(folder) in outcome and "architectures" in outcome)


def test_a_spec_is_never_made_of_senseless_numbers() -> None:
    """Also where no loader stood before it."""
    config = tiny_model("llama").model.config
    config.max_position_embeddings = 0
    with pytest.raises(
        UnsupportedModelError, match=r"max_position_embeddings = 0, not a whole number in 1\.\."
    ):
        spec_from_config(config)


@pytest.mark.parametrize("text", ["garbage", "[]", '{"eos_token_id": "a"}', '{"eos_token_id": [1, null]}'])
def test_end_tokens_are_not_lost_with_damaged_generation_settings(folder: Path, text: str) -> None:
    """transformers goes on without the file, and the model never stops."""
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(REFUSED, match=str(folder)):
        load_model(folder)


# Weights


def test_a_config_with_fewer_layers_than_the_file(folder: Path) -> None:
    """It loaded, and its answers were those of another model."""
    edit(folder, num_hidden_layers=1)
    with pytest.raises(
        ModelLoadError, match=r"has no use for 18 weights of the files, .*'model\.layers\.1\."
    ):
        load_model(folder)


def test_a_weight_that_the_model_does_not_have(folder: Path) -> None:
    weights(folder, lambda content: content.update({"model.layers.0.mlp.extra.weight": torch.ones(2)}))
    with pytest.raises(ModelLoadError, match=r"no use for 1 weights .*mlp\.extra"):
        load_model(folder)


def test_buffers_that_older_files_carry_are_harmless(folder: Path) -> None:
    names = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
    weights(folder, lambda content: content.update({name: torch.ones(4) for name in names}))
    assert load_model(folder).spec.num_layers == 3


def test_a_tied_head_may_stand_in_the_file(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True).model
    model.save_pretrained(tmp_path)

    def add_head(content: dict[str, torch.Tensor]) -> None:
        assert "lm_head.weight" not in content
        content["lm_head.weight"] = content["model.embed_tokens.weight"].clone()

    weights(tmp_path, add_head)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path).model(ids).logits, model(ids).logits)


def test_gpt2_files_with_masks_and_head(tmp_path: Path) -> None:
    tiny_model("gpt2").model.save_pretrained(tmp_path)

    def add(content: dict[str, torch.Tensor]) -> None:
        for layer in range(2):
            content[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 8, 8)
            content[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

    weights(tmp_path, add)
    assert load_model(tmp_path).spec.family == "gpt2"


# Names and settings


@pytest.mark.parametrize(
    "name", ["a" * 5000, "/" + "a" * 5000, "~nosuchuser/x", "\0", "\udc80"], ids=range(5)
)
def test_a_name_that_no_file_system_takes(name: str) -> None:
    with pytest.raises(ModelLoadError, match="no such file or folder") as caught:
        load_model(name)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("name", [None, 5, b"/tmp", ["a"]])
def test_a_name_of_another_type(name: Any) -> None:
    with pytest.raises(ConfigError, match="the model must be given as text or a path, got"):
        load_model(name)
    if name is not None:
        with pytest.raises(ConfigError, match="cache_dir must be given as text or a path, got"):
            load_model("./nothing", cache_dir=name)


def test_what_is_neither_file_nor_folder() -> None:
    if sys.platform != "win32":
        with pytest.raises(ModelLoadError, match="neither a folder nor"):
            find_source("/dev/null")


@pytest.mark.parametrize("device", ["cpu:7", "cpu:0", "cuda:-1", "", None, 10**5000], ids=range(6))
def test_devices_that_are_none(folder: Path, device: Any) -> None:
    """ "cpu:7" was taken and ran on the one CPU there is."""
    with pytest.raises(ConfigError, match="device must be 'cpu', 'cuda' or 'cuda:N', got"):
        load_model(folder, device=device)


@pytest.mark.parametrize("settings", [{"revision": 5}, {"dtype": ["float32"]}, {"dtype": None}])
def test_settings_of_another_type(folder: Path, settings: Any) -> None:
    with pytest.raises(ConfigError, match="must be"):
        load_model(folder, **settings)
