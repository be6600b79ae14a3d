"""A GGUF file becomes a Hugging Face folder, once: config, tokenizer and float32 safetensors.

The file's weights are dequantised exactly as its format says; what the model then computes is what the
quantised weights mean, in float32. Names are mapped with the ``gguf`` package's own table, starting from
the parameters that the transformers model has, so that a missing or an unused tensor is found.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from radixkv.errors import ModelLoadError, RadixKVError, UnsupportedModelError
from radixkv.executor.model_cache import ModelCache

if TYPE_CHECKING:
    import torch

CONVERTER_VERSION = 1
SHARD_BYTES = 2 * 1024**3
GGUF_INSTALL = "pip install 'gguf>=0.16'"

Array = NDArray[np.float32]
Restore = Callable[[str, Array, Any], Array]


def _restore_llama(name: str, weight: Array, config: Any) -> Array:
    """The file keeps rotary pairs side by side, transformers keeps the two halves apart."""
    if ".attn_q." in name:
        heads = config.num_attention_heads
    elif ".attn_k." in name:
        heads = config.num_key_value_heads
    else:
        return weight
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _restore_gpt2(name: str, weight: Array, config: Any) -> Array:
    """transformers keeps the blocks' matrices as ``[inputs, outputs]``."""
    return np.ascontiguousarray(weight.T) if name.startswith("blk.") and weight.ndim == 2 else weight


def _as_it_is(name: str, weight: Array, config: Any) -> Array:
    return weight


RESTORE: dict[str, Restore] = {
    "llama": _restore_llama,
    "qwen2": _as_it_is,
    "qwen3": _as_it_is,
    "gpt2": _restore_gpt2,
}
"""How a weight of each ``general.architecture`` gets back to transformers' layout. Others are
refused, Gemma among them: such a file does not state its query scale nor which layers have a window."""

DIGIT_SPLITS = frozenset({"smollm", "starcoder", "refact", "command-r"})
"""``tokenizer.ggml.pre`` kinds that split every digit off, then split as GPT-2 does."""
REGEX_SPLITS = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "smaug-bpe", "dbrx", "tekken", "qwen2", "deepseek-r1-qwen"}
)
"""Kinds with an expression of their own, which transformers has to know."""
WHOLE_WORDS_FIRST = frozenset({"llama3", "llama-v3", "llama-bpe", "tekken"})
"""Kinds that take a piece that is a token as it is, whatever the merges would make of it."""
_NEEDED_FIELDS = ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.tokens")
GPT2_SPLITS = frozenset({"default", "gpt-2", "gpt2"})


def convert_once(path: Path, cache: ModelCache, *, progress: bool | None = None) -> tuple[Path, bool]:
    """The folder that holds ``path`` converted, and whether it was converted just now.

    Keyed by the file's sha256 and the converter's version. ``progress``: ``None`` shows a bar on a
    terminal only. Raises ``ModelLoadError`` (damaged file, ``gguf`` missing, cache not writable) and
    ``UnsupportedModelError`` (architecture, tokenizer or tensors that cannot be carried over exactly).
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelLoadError(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
        digest = cache.digest(path)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error

    def make(folder: Path) -> None:
        try:
            convert(path, folder, progress=progress)
        except (RadixKVError, MemoryError):
            raise
        except Exception as error:  # a damaged field can fail anywhere, in transformers too
            raise ModelLoadError(f"{path} cannot be converted; it may be damaged: {error!r}") from error

    return cache.folder(digest, CONVERTER_VERSION, make)


def convert(path: Path, folder: Path, *, progress: bool | None = None) -> None:
    """Write ``path`` as a Hugging Face folder into the existing, empty ``folder``."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelLoadError(f"reading a GGUF file needs the gguf package: {GGUF_INSTALL}") from error
    disable = None if progress is None else not progress
    with tqdm(total=4, desc=f"converting {path.name} (once)", disable=disable, unit="step") as bar:
        try:
            reader = GGUFReader(str(path))
        except Exception as error:
            raise ModelLoadError(f"{path} cannot be read as GGUF: {error}") from error
        fields = dict(reader.fields)
        if lacking := [name for name in _NEEDED_FIELDS if name not in fields]:
            raise ModelLoadError(f"{path} does not state {', '.join(lacking)}")
        architecture = str(fields["general.architecture"].contents())
        _refuse_unknown(path, architecture, fields)
        bar.update()
        config = _config(path, architecture, fields)
        bar.update()
        _write_tokenizer(path, folder, fields)
        bar.update()
        config.save_pretrained(folder)
        _write_generation_config(folder, fields)
        _write_weights(path, folder, config, architecture, reader.tensors, disable)
        bar.update()


def _refuse_unknown(path: Path, architecture: str, fields: dict[str, Any]) -> None:
    if architecture not in RESTORE:
        known = ", ".join(sorted(RESTORE))
        raise UnsupportedModelError(f"{path} has the architecture {architecture!r}; known are {known}")
    scaling = fields.get(f"{architecture}.rope.scaling.type")
    if scaling is not None and scaling.contents() != "none":
        raise UnsupportedModelError(f"{path} scales its rotary positions by {scaling.contents()!r}")
    window = fields.get(f"{architecture}.attention.sliding_window")
    if window is not None and window.contents():
        raise UnsupportedModelError(f"{path} has a sliding window of {window.contents()}, unknown here")
    sizes = {
        name: int(fields[f"{architecture}.{name}"].contents())
        for name in ("attention.key_length", "attention.value_length", "rope.dimension_count")
        if f"{architecture}.{name}" in fields
    }
    if len(set(sizes.values())) > 1:
        raise UnsupportedModelError(f"{path} has heads of unequal sizes: {sizes}")
    pre = fields.get("tokenizer.ggml.pre")
    byte_level = fields["tokenizer.ggml.model"].contents() == "gpt2"
    if byte_level and pre is not None and pre.contents() not in DIGIT_SPLITS | REGEX_SPLITS | GPT2_SPLITS:
        raise UnsupportedModelError(f"{path} splits its text by an unknown rule, {pre.contents()!r}")


def _config(path: Path, architecture: str, fields: dict[str, Any]) -> Any:
    """transformers' reading of the file, and what that leaves at its default though the file states it."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    config.dtype = "float32"
    context = fields.get(f"{architecture}.context_length")
    if context is not None:
        config.max_position_embeddings = int(context.contents())
    head_dim = fields.get(f"{architecture}.attention.key_length")
    if head_dim is not None:
        config.head_dim = int(head_dim.contents())
    return config


def _write_tokenizer(path: Path, folder: Path, fields: dict[str, Any]) -> None:
    """The tokenizer that the file describes, checked against the file's ids and chat template."""
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name)
    backend = tokenizer.backend_tokenizer
    byte_level = fields["tokenizer.ggml.model"].contents() == "gpt2"
    pre = fields["tokenizer.ggml.pre"].contents() if "tokenizer.ggml.pre" in fields else "default"
    if byte_level and pre in DIGIT_SPLITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif (
        byte_level and pre in REGEX_SPLITS and not isinstance(backend.pre_tokenizer, pre_tokenizers.Sequence)
    ):
        raise UnsupportedModelError(
            f"{path} splits its text by {pre!r}, which this version of transformers does not know"
        )
    if byte_level and pre in WHOLE_WORDS_FIRST:
        backend.model.ignore_merges = True
    for kind in ("bos", "eos"):  # the file decides; versions of transformers differ in their defaults
        field = fields.get(f"tokenizer.ggml.{kind}_token_id")
        if field is not None:
            token = str(fields["tokenizer.ggml.tokens"].contents(int(field.contents())))
            setattr(tokenizer, f"{kind}_token", token)
            if getattr(tokenizer, f"{kind}_token_id") != field.contents():
                got = getattr(tokenizer, f"{kind}_token_id")
                raise UnsupportedModelError(
                    f"{path}: {kind}_token_id is {field.contents()}, but {token!r} is token {got}"
                )
    add_bos = fields.get("tokenizer.ggml.add_bos_token")
    if add_bos is not None and bool(add_bos.contents()) != _adds_bos(tokenizer):
        raise UnsupportedModelError(f"{path}: add_bos_token is {add_bos.contents()}, the tokenizer differs")
    template = fields["tokenizer.chat_template"].contents() if "tokenizer.chat_template" in fields else None
    if template is not None:
        tokenizer.chat_template = template
    context = fields.get(f"{fields['general.architecture'].contents()}.context_length")
    if context is not None:
        tokenizer.model_max_length = int(context.contents())
    tokenizer.save_pretrained(folder)
    _drop_foreign_tokens(folder, len(fields["tokenizer.ggml.tokens"].data))
    got = len(PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True))
    if got > len(fields["tokenizer.ggml.tokens"].data):
        raise UnsupportedModelError(f"{path}: the tokenizer made of it has {got} tokens, more than the file")


def _drop_foreign_tokens(folder: Path, num_tokens: int) -> None:
    """transformers adds the end token of GPT-2 to byte-level vocabularies that have none, behind the last
    id that the model knows."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text("utf-8"))
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < num_tokens]
    file.write_text(json.dumps(content, ensure_ascii=False), "utf-8")


def _adds_bos(tokenizer: Any) -> bool:
    ids = tokenizer("a")["input_ids"]
    return bool(ids) and ids[0] == tokenizer.bos_token_id


def _write_generation_config(folder: Path, fields: dict[str, Any]) -> None:
    """Every token that ends a turn, not only the first: end of text, of turn, of message."""
    ends: list[int] = []
    for kind in ("eos", "eot", "eom"):
        field = fields.get(f"tokenizer.ggml.{kind}_token_id")
        if field is not None and int(field.contents()) not in ends:
            ends.append(int(field.contents()))
    content: dict[str, Any] = {"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}
    bos = fields.get("tokenizer.ggml.bos_token_id")
    if bos is not None:
        content["bos_token_id"] = int(bos.contents())
    (folder / "generation_config.json").write_text(json.dumps(content, indent=2))


def _write_weights(
    path: Path, folder: Path, config: Any, architecture: str, tensors: list[Any], disable: bool | None
) -> None:
    import torch
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    parameters = dict(model.named_parameters())
    source = {tensor.name: tensor for tensor in tensors}
    origin = {name: _gguf_name(path, names, name, source) for name in parameters}
    if unused := sorted(set(source) - set(origin.values())):
        raise UnsupportedModelError(f"{path} has tensors that its architecture has no use for: {unused[:8]}")

    shards = _shards({name: 4 * p.numel() for name, p in parameters.items()})
    index: dict[str, str] = {}
    with tqdm(total=len(origin), desc="dequantising", disable=disable, unit="tensor", leave=False) as bar:
        for number, shard in enumerate(shards, 1):
            file = (
                f"model-{number:05}-of-{len(shards):05}.safetensors"
                if len(shards) > 1
                else "model.safetensors"
            )
            content = {}
            for name in shard:
                content[name] = _weight(path, source[origin[name]], architecture, config, parameters[name])
                index[name] = file
                bar.update()
            save_file(content, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        total = sum(4 * p.numel() for p in parameters.values())
        index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
        (folder / "model.safetensors.index.json").write_text(index_text)


def _weight(path: Path, tensor: Any, architecture: str, config: Any, parameter: torch.Tensor) -> torch.Tensor:
    import torch
    from gguf import dequantize

    try:
        value = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise UnsupportedModelError(f"{path}: {tensor.name} is quantised as {kind}, unknown here") from error
    value = RESTORE[architecture](tensor.name, value, config)
    if value.shape != tuple(parameter.shape):
        raise ModelLoadError(
            f"{path}: {tensor.name} is {value.shape}, the model needs {tuple(parameter.shape)}"
        )
    return torch.from_numpy(np.array(value, np.float32, order="C"))  # a copy: the file is mapped read-only


def _gguf_name(path: Path, names: Any, parameter: str, source: dict[str, Any]) -> str:
    stem, _, suffix = parameter.rpartition(".")
    mapped = names.get_name(stem)
    for candidate in (f"{mapped}.{suffix}", f"{mapped}"):
        if candidate in source:
            return candidate
    raise ModelLoadError(f"{path} lacks the tensor {mapped}.{suffix} (the model's {parameter})")


def _shards(sizes: dict[str, int]) -> list[list[str]]:
    """Names in order, cut into files of at most ``SHARD_BYTES`` (a larger tensor gets its own)."""
    shards: list[list[str]] = [[]]
    room = SHARD_BYTES
    for name, size in sizes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= size
    return shards
