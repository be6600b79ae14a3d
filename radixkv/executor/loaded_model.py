"""LoadedModel: a Hugging Face model in memory, its tokenizer and what the runtime needs to know of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from radixkv.config import MAX_SETTING, ModelSpec
from radixkv.errors import UnsupportedModelError
from radixkv.plain import plain_whole, shown

if TYPE_CHECKING:
    from radixkv.executor.prepared import PreparedModel

_NEEDED = (
    "vocab_size", "num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings",
)  # fmt: skip


@dataclass(eq=False)
class LoadedModel:
    """What the loader hands over. Several executors may share one; the first one prepares it."""

    model: Any
    """A causal language model of transformers, in evaluation mode, on its device."""
    tokenizer: Any | None
    spec: ModelSpec
    load_report: dict[str, float] = field(default_factory=dict)
    """Seconds by phase; preparing adds ``pack`` and ``check``."""
    prepared: PreparedModel | None = field(default=None, init=False, repr=False)
    """Set once by ``prepare``; nobody else writes it."""


def spec_from_config(
    config: Any,
    *,
    name: str | None = None,
    dtype: str = "float32",
    eos_token_ids: Iterable[int] | None = None,
) -> ModelSpec:
    """Read a transformers configuration, and refuse numbers that no model can have.

    ``eos_token_ids`` defaults to the configuration's own; a loader that knows the generation settings or
    the tokenizer passes the union. Fields that a configuration does not name fall back the way
    transformers' own models do: as many K/V heads as query heads, ``head_dim = hidden / heads``. Raises
    ``UnsupportedModelError`` when a field is missing that has no such rule, or when one is no whole number
    of at least 1.
    """
    text = config.get_text_config()
    what = f"{'' if name is None else name + ': '}a {text.model_type} configuration"
    missing = [field for field in _NEEDED if getattr(text, field, None) is None]
    if missing:
        raise UnsupportedModelError(f"{what} does not say {', '.join(missing)}")
    vocab_size, num_layers, num_heads, hidden_size, max_positions = (
        _number(what, field, getattr(text, field)) for field in _NEEDED
    )
    kv_heads, dim = getattr(text, "num_key_value_heads", None), getattr(text, "head_dim", None)
    num_kv_heads = num_heads if kv_heads is None else _number(what, "num_key_value_heads", kv_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(
            f"{what} has {num_heads} query heads, no multiple of {num_kv_heads} K/V heads"
        )
    head_dim = _number(what, "head_dim", hidden_size // num_heads if dim is None else dim)
    ends = getattr(text, "eos_token_id", None) if eos_token_ids is None else list(eos_token_ids)
    return ModelSpec(
        name=name or str(getattr(config, "_name_or_path", "") or text.model_type),
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_query_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        eos_token_ids=tuple(sorted(set(as_token_ids(what, ends)))),
        dtype=dtype,
        family=str(text.model_type),
    )


def as_token_ids(what: str, value: Any) -> tuple[int, ...]:
    """End tokens as ``what`` gives them: none, one, or several. Raises ``UnsupportedModelError`` for what is
    no whole number."""
    if value is None:
        return ()
    ids = [plain_whole(item) for item in (value if isinstance(value, (list, tuple)) else (value,))]
    if None in ids:
        raise UnsupportedModelError(f"{what} has eos_token_id = {shown(value)}, not whole numbers")
    return tuple(token_id for token_id in ids if token_id is not None)


def _number(what: str, field: str, value: object) -> int:
    number = plain_whole(value)
    if number is None or not 1 <= number <= MAX_SETTING:
        raise UnsupportedModelError(
            f"{what} has {field} = {shown(value)}, not a whole number in 1..{MAX_SETTING}"
        )
    return number
