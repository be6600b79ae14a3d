"""``explain`` said that more of a prompt stood under another salt, so whoever asked could guess the prompts
of others token by token: exactly what a salt is there to prevent."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from radixkv import LLM, EngineConfig, PromptExplanation, SamplingParams
from radixkv.namespace import has_salt, namespace_of
from radixkv.sequence import Request
from radixkv.testing import FakeExecutor
from radixkv.types import Namespace

SECRET = [11, 22, 33, 44, 55, 66]
ONE = SamplingParams(max_tokens=1)


def make_llm(num_pages: int = 64) -> LLM:
    executor = FakeExecutor(num_pages=num_pages, page_size=4, vocab_size=97)
    return LLM.from_executor(executor, config=EngineConfig(num_pages=num_pages, page_size=4))


def guessed(llm: LLM, salt: str | None) -> list[int]:
    """What somebody with ``salt`` learns by asking: a token counts where the answer for it differs."""
    found: list[int] = []
    while len(found) < len(SECRET):
        if found:
            llm.prefill(found, cache_salt=salt)
        answers: dict[PromptExplanation, list[int]] = {}
        for token in range(97):
            # Where nothing is known of a token, only its own name in the text may differ.
            said = llm.explain([*found, token, 0], cache_salt=salt)
            key = PromptExplanation(said.num_tokens, said.hit_tokens, said.reason, said.position, "", "")
            answers.setdefault(key, []).append(token)
        odd = [tokens for tokens in answers.values() if len(tokens) == 1]
        if not odd:
            break
        found += odd[0]
    return found


@pytest.mark.parametrize(
    ("owner", "other"), [("ann", "bob"), ("ann", None), ("ann", ""), (None, "bob"), ("", None), (None, "")]
)
def test_nobody_guesses_what_stands_under_another_salt(owner: str | None, other: str | None) -> None:
    llm = make_llm()
    llm.generate(SECRET, ONE, cache_salt=owner)
    assert llm.explain(SECRET, cache_salt=owner).hit_tokens == len(SECRET)
    assert guessed(llm, other) == []
    assert llm.explain(SECRET, cache_salt="new") == make_llm().explain(SECRET, cache_salt="new")


def test_nobody_guesses_what_others_lost() -> None:
    """What was evicted elsewhere is remembered elsewhere."""
    llm = make_llm(num_pages=8)
    llm.generate(SECRET, ONE, cache_salt="ann")
    llm.generate(list(range(60, 88)), ONE, cache_salt="carl")
    assert llm.explain(SECRET, cache_salt="ann").reason == "evicted"
    assert guessed(llm, "bob") == []
    assert llm.explain(SECRET, cache_salt="bob").reason == "absent"


def test_the_ledger_looks_only_where_it_may() -> None:
    llm = make_llm()
    llm.engine.add(
        Request(request_id=0, prompt_ids=np.array(SECRET, np.int32), sampling=ONE, namespace=("a",))
    )
    while llm.engine.has_work:
        llm.engine.step()
    kv = llm.engine.kv
    asked: list[Namespace] = []

    def answer(value: bool) -> Callable[[Namespace], bool]:
        return lambda name: asked.append(name) or value  # type: ignore[func-returns-value]

    assert kv.explain(SECRET, ("b",)).other_namespace == ("a",)
    assert kv.explain(SECRET, ("b",), visible=answer(True)).other_namespace == ("a",)
    said = kv.explain(SECRET, ("b",), visible=answer(False))
    assert (said.reason, said.other_namespace, said.hit_tokens) == ("absent", None, 0)
    assert asked == [("a",), ("a",)]


def test_salts_of_namespaces() -> None:
    for salt in (None, "", "x"):
        for name in (namespace_of(cache_salt=salt), namespace_of(model_revision="x", cache_salt=salt)):
            assert [has_salt(name, other) for other in (None, "", "x")] == [
                other == salt for other in (None, "", "x")
            ]
    assert not has_salt(("x",), None) and not has_salt(("x",), "x")
