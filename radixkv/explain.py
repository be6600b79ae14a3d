"""explain_prompt: the ledger's explanation of a hit, with the text around the place where it ends."""

from __future__ import annotations

from collections.abc import Callable

from radixkv.kv.manager import KVCacheManager
from radixkv.namespace import described
from radixkv.outputs import PromptExplanation
from radixkv.text import Tokenizer
from radixkv.types import Namespace, TokenIds

CONTEXT_TOKENS = 12
"""Tokens shown on each side of the place."""


def explain_prompt(
    kv: KVCacheManager,
    token_ids: TokenIds,
    tokenizer: Tokenizer | None,
    namespace: Namespace = (),
    *,
    visible: Callable[[Namespace], bool] | None = None,
) -> PromptExplanation:
    """Ask the ledger and put its answer into words. ``visible``: as for the ledger. Changes nothing."""
    found = kv.explain(token_ids, namespace, visible=visible)
    position = found.position
    text = _around(token_ids, position, tokenizer)
    here = _named(int(token_ids[position]), tokenizer) if position < len(token_ids) else "the end"
    reasons = {
        "whole": "The whole prompt is in the cache; its last token is computed again for its logits.",
        "differs": f"At position {position} the prompt has {here}, the cache "
        + ("something else." if found.cached_token is None else f"{_named(found.cached_token, tokenizer)}."),
        "evicted": f"What follows position {position} was in the cache and was evicted, "
        f"{found.evictions_ago} evictions ago.",
        "other_namespace": "More of it is in the cache under another namespace: "
        f"{described(found.other_namespace or ())}.",
        "absent": f"What follows position {position} was never computed, or that is forgotten: it was "
        "evicted long ago, or flushed.",
    }
    if found.reason == "differs" and found.hit_tokens == 0:
        reasons["differs"] = "Nothing that begins like this is in the cache."
    lines = [f"{found.hit_tokens} of {len(token_ids)} tokens are in the cache.", reasons[found.reason]]
    if text and found.reason != "whole":
        lines.append(f"There: {text}")
    return PromptExplanation(
        num_tokens=len(token_ids),
        hit_tokens=found.hit_tokens,
        reason=found.reason,
        position=position,
        text=text,
        message="\n".join(lines),
    )


def _named(token_id: int, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return f"token {token_id}"
    return f"{tokenizer.decode([token_id], skip_special_tokens=False)!r} (token {token_id})"


def _around(token_ids: TokenIds, position: int, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return ""
    before = tokenizer.decode(
        token_ids[max(0, position - CONTEXT_TOKENS) : position], skip_special_tokens=False
    )
    after = tokenizer.decode(token_ids[position : position + CONTEXT_TOKENS], skip_special_tokens=False)
    return f"{before!r} ▶ {after!r}"
