"""Which of the cache's trees a request belongs to. The one place where that is decided."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.errors import InvalidRequestError
from radixkv.plain import shown
from radixkv.types import Namespace


@dataclass(frozen=True)
class Scope:
    """What a caller says about whose prefixes his are."""

    cache_salt: str | None = None
    """Only requests with the same salt share what is cached; ``None`` is the tree of all who give none."""
    adapter: str | None = None
    """Name of a LoRA adapter; ``None`` is the base model."""


NO_SCOPE = Scope()
_ADAPTER = "radixkv adapter"
"""The last field but one of every namespace under an adapter, and of no other."""


def namespace_of(
    *,
    model_revision: str | None = None,
    adapter: str | None = None,
    adapter_version: int = 0,
    cache_salt: str | None = None,
) -> Namespace:
    """A tuple of typed fields, each in its own place: whatever text stands in one, it never equals another
    combination, and nothing is joined or hashed into equality. ``None`` is "none given" and differs from
    ``""``. Where nothing at all is given it is ``()``, the default. The manager appends its epoch.

    Raises ``InvalidRequestError`` for a salt that is neither text nor ``None``.
    """
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise InvalidRequestError(f"cache_salt must be text or None, got {shown(cache_salt)}")
    if model_revision is None and adapter is None and cache_salt is None:
        return ()
    return (model_revision, adapter, adapter_version, cache_salt)


def under_adapter(namespace: Namespace, adapter: int) -> Namespace:
    """``namespace`` with two fields more that say under which adapter (its index; 0: the base model, and
    nothing is added). So whatever a caller puts into a namespace, what was computed under one adapter is
    never found under another. Where the fields stand already they are not added again.

    Raises ``InvalidRequestError`` where they name another adapter.
    """
    rest, named = _parted(namespace)
    if named not in (None, adapter):
        raise InvalidRequestError(
            f"the namespace ends as that of adapter {named}, and the request is of adapter {adapter}"
        )
    return (*rest, _ADAPTER, adapter) if adapter else namespace


def _parted(namespace: Namespace) -> tuple[Namespace, int | str | None]:
    """The namespace without what ``under_adapter`` added, and which adapter that names."""
    if len(namespace) >= 2 and namespace[-2] == _ADAPTER:
        return namespace[:-2], namespace[-1]
    return namespace, None


def has_salt(namespace: Namespace, cache_salt: str | None) -> bool:
    """Whether ``namespace``, made by ``namespace_of``, is one of this salt; ``None`` is that of no salt."""
    namespace, _ = _parted(namespace)
    if isinstance(cache_salt, str):
        cache_salt = str.__str__(cache_salt)  # of a kind that may compare as it likes
    if len(namespace) != 4:
        return not namespace and cache_salt is None
    return namespace[3] == cache_salt


def described(namespace: Namespace) -> str:
    """In words, without the salt, which may be a secret. Only those who gave the salt are to read it."""
    namespace, _ = _parted(namespace)
    if len(namespace) != 4:
        return "the default one" if not namespace else f"one of {len(namespace)} fields"
    revision, adapter, version, salt = namespace
    words = [] if revision is None else [f"model revision {revision!r}"]
    if adapter is not None:
        words.append(f"adapter {adapter!r}, version {version}")
    words.append("no cache_salt" if salt is None else "this cache_salt")
    return "that of " + ", ".join(words)
