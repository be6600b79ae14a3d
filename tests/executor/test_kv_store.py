"""KVStore: views of one allocation, writes by slot, page copies that read before they write."""

from __future__ import annotations

import resource

import psutil
import pytest
import torch

from radixkv.config import ModelSpec
from radixkv.errors import ConfigError
from radixkv.executor.kv_store import KVStore, bytes_per_page
from radixkv.kv.page_copy import PageCopy

SPEC = ModelSpec(
    name="t", vocab_size=10, num_layers=3, num_query_heads=4, num_kv_heads=2, head_dim=8, max_positions=64
)


def make_store(page_size: int = 4, num_pages: int = 5) -> KVStore:
    return KVStore(SPEC, num_pages=num_pages, page_size=page_size, dtype=torch.float32)


def fill(store: KVStore) -> torch.Tensor:
    """Every value differs; returns a copy."""
    store.data.copy_(torch.arange(store.data.numel()).view(store.data.shape))
    return store.data.clone()


def test_shape_has_one_page_more_than_the_pool() -> None:
    store = make_store()
    assert store.data.shape == (3, 2, 6, 4, 2, 8)
    assert store.num_slots == 24
    assert store.padding_page == 5
    assert store.key(1).shape == store.value(1).shape == (24, 2, 8)
    store.check()


def test_key_and_value_are_views_with_equal_strides() -> None:
    store = make_store()
    for layer in range(3):
        store.key(layer).fill_(10 + layer)
        store.value(layer).fill_(20 + layer)
        assert store.key(layer).stride() == store.value(layer).stride() == (16, 8, 1)
        assert bool((store.data[layer, 0] == 10 + layer).all())
        assert bool((store.data[layer, 1] == 20 + layer).all())


def test_check_sees_a_view_of_something_else() -> None:
    store = make_store()
    store._keys = tuple(key.clone() for key in store._keys)
    with pytest.raises(AssertionError, match="key 0 is not the store's"):
        store.check()


def test_write_puts_rows_into_their_slots_and_nowhere_else() -> None:
    store = make_store()
    before = fill(store)
    key, value = torch.full((2, 2, 8), -1.0), torch.full((2, 2, 8), -2.0)
    store.write(1, torch.tensor([17, 3]), key, value)
    assert torch.equal(store.key(1)[[17, 3]], key)
    assert torch.equal(store.value(1)[[17, 3]], value)
    changed = store.data != before
    assert changed[1].sum() == changed.sum() == 2 * 2 * 2 * 8


def test_write_takes_rows_that_are_not_contiguous() -> None:
    store = make_store()
    key = torch.randn(2, 3, 8).transpose(0, 1)
    store.write(0, torch.tensor([4, 5, 6]), key, key * 2)
    assert torch.equal(store.key(0)[4:7], key)
    assert torch.equal(store.value(0)[4:7], key * 2)


def test_copy_takes_the_first_tokens_of_every_layer() -> None:
    store = make_store()
    before = fill(store)
    store.copy_pages([PageCopy(src=1, dst=4, num_tokens=3)])
    assert torch.equal(store.data[:, :, 4, :3], before[:, :, 1, :3])
    assert torch.equal(store.data[:, :, 4, 3:], before[:, :, 4, 3:]), "the rest of the page is left alone"
    others = [0, 1, 2, 3, 5]
    assert torch.equal(store.data[:, :, others], before[:, :, others])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_b048_copies_read_every_source_before_any_write(order: tuple[int, int]) -> None:
    """Page 2 is the source of one copy and the destination of the other (C2).

    Fault seen: ``read`` made a generator, so that each copy reads after the one before has written.
    """
    store = make_store()
    before = fill(store)
    copies = [PageCopy(src=1, dst=2, num_tokens=4), PageCopy(src=2, dst=3, num_tokens=4)]
    store.copy_pages([copies[i] for i in order])
    assert torch.equal(store.data[:, :, 2], before[:, :, 1])
    assert torch.equal(store.data[:, :, 3], before[:, :, 2])


def test_no_copies_change_nothing() -> None:
    store = make_store()
    before = fill(store)
    store.copy_pages([])
    assert torch.equal(store.data, before)


@pytest.mark.parametrize(
    "copies",
    [
        [PageCopy(0, 1, 2), PageCopy(2, 1, 2)],
        [PageCopy(0, 1, 5)],
        [PageCopy(0, 1, 0)],
        [PageCopy(0, 5, 1)],
        [PageCopy(6, 1, 1)],
        [PageCopy(-1, 1, 1)],
    ],
    ids=["same destination", "too many tokens", "no tokens", "into padding", "src too high", "src negative"],
)
def test_impossible_copies_are_our_bug_and_copy_nothing(copies: list[PageCopy]) -> None:
    store = make_store()
    before = fill(store)
    with pytest.raises(AssertionError):
        store.copy_pages(copies)
    assert torch.equal(store.data, before)


def test_stats_and_bytes_per_page_agree() -> None:
    store = make_store(page_size=16, num_pages=7)
    assert store.stats() == {
        "num_pages": 7,
        "page_size": 16,
        "num_bytes": 8 * 16 * 3 * 2 * 2 * 8 * 4,
        "dtype": "float32",
    }
    assert bytes_per_page(SPEC, 16, torch.float32) * 8 == store.stats()["num_bytes"]
    assert bytes_per_page(SPEC, 16, torch.bfloat16) * 2 == bytes_per_page(SPEC, 16, torch.float32)


@pytest.mark.parametrize(
    ("num_pages", "page_size", "message"), [(0, 4, "num_pages .* got 0"), (2, 0, "page_size .* got 0")]
)
def test_sizes_below_one_are_refused(num_pages: int, page_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_store(page_size=page_size, num_pages=num_pages)


def test_a_store_that_nobody_writes_takes_no_memory() -> None:
    resident = psutil.Process().memory_info().rss
    store = KVStore(SPEC, num_pages=200_000, page_size=16, dtype=torch.float32)
    assert store.data.numel() * 4 > 200 * 2**20
    assert psutil.Process().memory_info().rss - resident < 50 * 2**20


def test_prefault_takes_the_memory_now() -> None:
    """Counted in page faults: what other tests have freed may be part of the store, resident already."""
    store = KVStore(SPEC, num_pages=50_000, page_size=16, dtype=torch.float32)
    assert store.data.numel() * 4 > 250 * 2**20
    store.prefault()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    store.data.add_(1.0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 50
