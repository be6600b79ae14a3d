"""GGUF files that state nothing, or nonsense, and caches in odd places: each failed with a raw error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from radixkv.errors import ModelLoadError
from radixkv.executor import gguf as our_gguf
from radixkv.executor.gguf import convert_once
from radixkv.executor.model_cache import MANIFEST, ModelCache, default_cache_dir


def write(path: Path, architecture: str | None = "llama", **fields: Any) -> Path:
    writer = gguf.GGUFWriter(str(path), architecture or "x")
    if architecture is None:
        writer.kv_data[0].pop("general.architecture")
    if "model" in fields:
        writer.add_tokenizer_model(fields["model"])
    if "tokens" in fields:
        writer.add_token_list(fields["tokens"])
    if "heads" in fields:
        writer.add_head_count(fields["heads"])
    writer.add_tensor("a", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("fields", "lacking"),
    [
        ({"architecture": None}, r"general\.architecture, tokenizer\.ggml\.model, tokenizer\.ggml\.tokens"),
        ({}, r"tokenizer\.ggml\.model, tokenizer\.ggml\.tokens"),
        ({"model": "gpt2"}, r"tokenizer\.ggml\.tokens"),
        ({"tokens": ["a"]}, r"tokenizer\.ggml\.model"),
    ],
)
def test_what_a_file_does_not_state_is_named(tmp_path: Path, fields: dict[str, Any], lacking: str) -> None:
    path = write(tmp_path / "m.gguf", **fields)
    with pytest.raises(ModelLoadError, match=rf"does not state {lacking}$"):
        convert_once(path, ModelCache(tmp_path / "cache"), progress=False)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_file_of_a_header_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    with pytest.raises(ModelLoadError, match=r"does not state general\.architecture"):
        convert_once(path, ModelCache(tmp_path / "cache"), progress=False)


def test_nonsense_in_a_file_is_a_model_load_error(tmp_path: Path) -> None:
    """Whatever transformers makes of it."""
    path = write(tmp_path / "m.gguf", model="gpt2", tokens=["a"], heads=0)
    with pytest.raises(ModelLoadError, match=r"m\.gguf cannot be converted; it may be damaged: "):
        convert_once(path, ModelCache(tmp_path / "cache"), progress=False)


def test_a_full_disk_while_converting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    path = write(tmp_path / "m.gguf")
    monkeypatch.setattr(our_gguf, "convert", no_space)
    with pytest.raises(ModelLoadError, match="No space left on device"):
        convert_once(path, ModelCache(tmp_path / "cache"), progress=False)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


@pytest.mark.parametrize("files", ['{"a": 5}', '{"a": {}}', '{"\\u0000": {"size": 1}}'])
def test_a_damaged_manifest_is_no_whole_folder(tmp_path: Path, files: str) -> None:
    cache = ModelCache(tmp_path)
    place, _ = cache.folder("key", 1, lambda folder: (folder / "a").write_text("x"))
    (place / MANIFEST).write_text('{"files": ' + files + "}")
    assert cache.folder("key", 1, lambda folder: (folder / "a").write_text("y")) == (place, True)
    assert (place / "a").read_text() == "y"


def test_a_cache_in_the_home_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXKV_CACHE", "~nosuchuser/cache")
    with pytest.raises(ModelLoadError, match=r"there is no cache folder: .*RADIXKV_CACHE names one"):
        default_cache_dir()
