"""Options of the cache on a whole engine: each eviction policy is started once, events come out, idleness is
checked."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from engine_kit import Harness

from radixkv.config import EVICTION_POLICIES, EngineConfig, EvictionPolicyName
from radixkv.errors import ConfigError, EngineDeadError, InternalError, MisuseError
from radixkv.kv.events import replay

NAMES: tuple[EvictionPolicyName, ...] = get_args(EvictionPolicyName)


def prompts_that_do_not_fit(seed: int) -> list[list[int]]:
    """Some share beginnings; together they need several times the pool."""
    rng = np.random.default_rng(seed)
    heads = [rng.integers(1, 500, 20).tolist() for _ in range(3)]
    return [
        [*heads[number % 3], *rng.integers(1, 500, int(rng.integers(1, 30))).tolist()] for number in range(24)
    ]


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_every_policy_serves_and_evicts(policy: EvictionPolicyName, page_size: int) -> None:
    h = Harness(
        num_pages=160 // page_size, page_size=page_size, max_running=3, eviction_policy=policy, events=True
    )
    for prompt in prompts_that_do_not_fit(page_size):
        h.add(prompt, 5)
    h.run()
    h.assert_as_oracle()
    stats = h.engine.kv.stats()
    assert stats["tree_num_evicted"] > 0
    assert (
        stats["tree_num_evicted"] <= stats["tree_num_evicted_tokens"] <= page_size * stats["tree_num_evicted"]
    )
    assert stats["tree_age_at_eviction_uses"]["count"] == stats["tree_num_evicted"]
    assert stats["tree_reuse_gap_uses"]["count"] > 0
    pages = replay(h.engine.take_events(), page_size)
    assert pages == replay(h.engine.kv.content(), page_size) and len(pages) == stats["tree_num_pages"]


def test_names_and_nothing_else() -> None:
    assert EVICTION_POLICIES == NAMES
    for value in ("LRU", "", None, 3):
        with pytest.raises(ConfigError, match="eviction_policy must be one of lru, lfu, slru, fifo"):
            EngineConfig(num_pages=4, eviction_policy=value)  # type: ignore[arg-type]
    for name in ("events", "check_when_idle"):
        with pytest.raises(ConfigError, match=f"{name} must be True or False, got 1"):
            EngineConfig(num_pages=4, **{name: 1})  # type: ignore[arg-type]


def test_events_are_off_unless_asked_for() -> None:
    h = Harness(num_pages=16, page_size=4)
    h.generate([1, 2, 3, 4, 5])
    with pytest.raises(MisuseError, match="events are off"):
        h.engine.take_events()


@pytest.mark.parametrize("check_when_idle", [False, True])
def test_an_engine_that_goes_idle_with_a_lost_page_says_so(check_when_idle: bool) -> None:
    """The outputs are delivered all the same. Fault seen: ``_check_idle`` returns at once."""
    h = Harness(num_pages=16, page_size=4, check_when_idle=check_when_idle, check_every=1000)
    h.generate([1, 2, 3, 4, 5])
    h.engine.kv.pool.allocate(1)
    request_id = h.add([1, 2, 3, 9], 3)
    h.run()
    with pytest.raises(EngineDeadError) as dead:
        h.engine.step()
    assert isinstance(dead.value.__cause__, InternalError) and "M1" in str(dead.value.__cause__)
    assert h.finals[request_id].finish_reason == "length" and h.tokens[request_id] == h.expected(request_id)


def test_damage_that_leaves_the_counts_right_is_found_where_asked_for() -> None:
    """Fault seen: ``_check_idle`` does not look at ``check_when_idle``."""
    for check_when_idle in (False, True):
        h = Harness(num_pages=16, page_size=4, check_when_idle=check_when_idle, check_every=1000)
        h.generate([1, 2, 3, 4, 5])
        h.engine.kv.tree._num_nodes += 1  # type: ignore[union-attr]
        h.generate([1, 2, 3, 9], 3)
        assert h.engine.is_dead == check_when_idle
