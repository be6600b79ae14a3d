"""What the cache forgets first, and what it tells: options of the fronts."""

from __future__ import annotations

from typing import get_args

import pytest
from fronts import fake_llm

from radixkv.config import EvictionPolicyName
from radixkv.errors import ConfigError, MisuseError
from radixkv.kv import replay
from radixkv.llm import LLM
from radixkv.sampling import SamplingParams

ONE = SamplingParams(max_tokens=1, ignore_eos=True)


def test_events_come_out_of_the_front_and_give_the_cache() -> None:
    """Fault seen: ``Engine.build`` does not look at ``events``."""
    llm, _ = fake_llm(num_pages=8, events=True)
    for start in (3, 50, 90):
        llm.generate(list(range(start, start + 12)), ONE)
    pages = replay(llm.take_events(), 4)
    assert pages == replay(llm.engine.kv.content(), 4) and len(pages) == llm.stats()["kv"]["tree_num_pages"]
    assert llm.take_events() == ()
    llm.flush()
    assert replay(llm.take_events(), 4, pages) == {}
    llm.close()


def test_events_are_off_unless_asked_for() -> None:
    llm, _ = fake_llm()
    with pytest.raises(MisuseError, match="events are off"):
        llm.take_events()
    llm.close()


@pytest.mark.parametrize("policy", get_args(EvictionPolicyName))
def test_a_policy_reaches_the_tree(policy: EvictionPolicyName) -> None:
    llm, _ = fake_llm(eviction_policy=policy)
    llm.generate([3, 4, 5, 6, 7], ONE)
    assert llm.config.eviction_policy == policy
    assert llm.engine.kv.tree._order.policy == policy  # type: ignore[union-attr]
    llm.close()


def test_options_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="eviction_policy must be one of"):
        LLM("no/such-model", eviction_policy="oldest")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="events must be True or False"):
        LLM("no/such-model", events=1)  # type: ignore[arg-type]
