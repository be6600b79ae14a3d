"""What tests of radixkv, and of programs over it, are made of. Names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixkv.testing.batch_check import BatchError as BatchError
    from radixkv.testing.batch_check import check_batch as check_batch
    from radixkv.testing.canary_store import CanaryError as CanaryError
    from radixkv.testing.canary_store import CanaryStore as CanaryStore
    from radixkv.testing.canary_store import PrefixHasher as PrefixHasher
    from radixkv.testing.fake_executor import FakeExecutor as FakeExecutor
    from radixkv.testing.page_oracle import PageOracle as PageOracle
    from radixkv.testing.tiny_models import FAMILIES as FAMILIES
    from radixkv.testing.tiny_models import tiny_model as tiny_model

_HOME_OF = {
    "BatchError": "batch_check",
    "CanaryError": "canary_store",
    "CanaryStore": "canary_store",
    "FAMILIES": "tiny_models",
    "FakeExecutor": "fake_executor",
    "PageOracle": "page_oracle",
    "PrefixHasher": "canary_store",
    "check_batch": "batch_check",
    "tiny_model": "tiny_models",
}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return __all__
