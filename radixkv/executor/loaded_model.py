"""LoadedModel: a Hugging Face model in memory, its tokenizer and what the runtime needs to know of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from radixkv.config import ModelSpec
from radixkv.errors import UnsupportedModelError

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
    """Read a transformers configuration.

    ``eos_token_ids`` defaults to the configuration's own; a loader that knows the generation settings or
    the tokenizer passes the union. Fields that a configuration does not name fall back the way
    transformers' own models do: as many K/V heads as query heads, ``head_dim = hidden / heads``. Raises
    ``UnsupportedModelError`` when a field is missing that has no such rule.
    """
    text = config.get_text_config()
    missing = [field for field in _NEEDED if getattr(text, field, None) is None]
    if missing:
        raise UnsupportedModelError(f"a {text.model_type} configuration does not say {', '.join(missing)}")
    num_heads = int(text.num_attention_heads)
    ends = eos_token_ids if eos_token_ids is not None else _as_tuple(getattr(text, "eos_token_id", None))
    return ModelSpec(
        name=name or str(getattr(config, "_name_or_path", "") or text.model_type),
        vocab_size=int(text.vocab_size),
        num_layers=int(text.num_hidden_layers),
        num_query_heads=num_heads,
        num_kv_heads=int(getattr(text, "num_key_value_heads", None) or num_heads),
        head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // num_heads),
        max_positions=int(text.max_position_embeddings),
        eos_token_ids=tuple(sorted({int(token_id) for token_id in ends})),
        dtype=dtype,
        family=str(text.model_type),
    )


def _as_tuple(ids: Any) -> tuple[int, ...]:
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
