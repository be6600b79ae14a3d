"""No help listed what an LLM may be opened with, a typo named an internal function, and the name of a model
that is not there did not say which names there are."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from radixkv import LLM, AsyncLLM, ConfigError, EngineConfig, ModelLoadError, OpenOptions
from radixkv.executor import loader
from radixkv.opening import open_service
from radixkv.testing import tiny_model


def test_help_lists_every_option_with_its_default() -> None:
    text = inspect.getdoc(OpenOptions) or ""
    for name in OpenOptions.__annotations__:
        assert f"``{name}`` (" in text, f"{name} is not in the help of OpenOptions"
    for front in (LLM, AsyncLLM):
        assert "OpenOptions" in str(inspect.signature(front))
    assert "OpenOptions" in (LLM.__init__.__doc__ or "")


def test_defaults_in_the_help_are_the_real_ones() -> None:
    text = inspect.getdoc(OpenOptions) or ""
    for name in ("page_size", "eviction_policy", "policy", "max_running", "max_batch_tokens", "events"):
        default = getattr(EngineConfig(num_pages=2), name)
        written = f'"{default}"' if isinstance(default, str) else str(default)
        assert f"``{name}`` ({written})" in text


@pytest.mark.parametrize("front", [LLM, AsyncLLM])
@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("num_token", "; did you mean 'num_tokens'?"),
        ("max_wait", "; did you mean 'max_waiting'?"),
        ("xyz", ""),
    ],
)
def test_a_typo_names_the_front_and_the_option(front: Any, option: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        front("./never looked at", **{option: 3})
    message = str(caught.value)
    assert message.startswith(f"{front.__name__} has no option {option!r}{hint} (options: attention, ")
    assert all(name in message for name in OpenOptions.__annotations__)


def test_every_option_reaches_its_place() -> None:
    options: dict[str, Any] = {
        "num_tokens": 256, "page_size": 4, "eviction_policy": "lfu", "events": True, "policy": "priority",
        "policy_seed": 5, "priority_preemption": False, "max_waiting": 9, "queue_timeout_s": 2.5,
        "max_running": 7, "max_batch_tokens": 99, "max_pinned_tokens": 40, "num_threads": 1,
        "progress": False,
    }  # fmt: skip
    config = open_service("LLM", tiny_model("llama"), options).config
    assert {name: getattr(config, name) for name in options if hasattr(config, name)} == {
        name: value for name, value in options.items() if hasattr(config, name)
    }
    assert (config.num_pages, config.max_pinned_pages) == (64, 10)
    plain = open_service("LLM", tiny_model("llama"), {"num_tokens": 256, "prefix_cache": False}).config
    assert (plain.prefix_cache, plain.max_pinned_pages) == (False, 0)


def test_a_name_that_is_not_there_says_which_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*args: object, **kwargs: object) -> None:
        raise ModelLoadError("cannot be fetched")

    monkeypatch.setattr(loader, "fetch_snapshot", fetch)
    with pytest.raises(ModelLoadError, match=r"fetched \(models inside packages: smollm2-135m-instruct\)"):
        LLM("smollm2")
    with pytest.raises(ModelLoadError, match=r"fetched$"):
        LLM("someone/smollm2")
