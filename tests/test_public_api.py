"""The names that others may build on. Changing ``PUBLIC`` is changing a promise: say so in CHANGELOG.md."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import radixkv
from radixkv import errors

PUBLIC: dict[str, set[str]] = {
    "radixkv": {
        "Adapter",
        "AsyncChat",
        "AsyncLLM",
        "Beam",
        "BeamOutput",
        "Chat",
        "ChatStream",
        "ConfigError",
        "Delta",
        "DuplicateRequestError",
        "EngineConfig",
        "EngineDeadError",
        "Generation",
        "InternalError",
        "InvalidRequestError",
        "LLM",
        "MisuseError",
        "ModelLoadError",
        "ModelSpec",
        "NonFiniteLogitsError",
        "OpenOptions",
        "OutOfPages",
        "Output",
        "PinBudgetExceeded",
        "PrefillInfo",
        "PromptExplanation",
        "QueueFullError",
        "QueueTimeoutError",
        "RadixKVError",
        "RequestAbortedError",
        "RequestTooLargeError",
        "Sample",
        "SamplingParams",
        "Score",
        "TokenLogprobs",
        "Tokenizer",
        "UnsupportedModelError",
        "Usage",
    },
    "radixkv.kv": {
        "Cleared",
        "Event",
        "Explanation",
        "FlushReport",
        "Insertion",
        "KVCacheManager",
        "Lost",
        "Match",
        "NullTree",
        "PageCopy",
        "PagePool",
        "PageTable",
        "Pin",
        "RadixTree",
        "Removed",
        "ReplayedPage",
        "Request",
        "Sequence",
        "Stored",
        "replay",
    },
    "radixkv.testing": {
        "BatchError",
        "CanaryError",
        "CanaryStore",
        "check_batch",
        "FakeExecutor",
        "FAMILIES",
        "PageOracle",
        "PrefixHasher",
        "tiny_model",
    },
}


def public_objects() -> list[tuple[str, Any]]:
    return [
        (f"{module}.{name}", getattr(importlib.import_module(module), name))
        for module, names in PUBLIC.items()
        for name in sorted(names)
    ]


def is_documentable(item: Any) -> bool:
    return inspect.isclass(item) or inspect.isfunction(item)


@pytest.mark.parametrize("module", sorted(PUBLIC))
def test_names_are_the_promised_ones(module: str) -> None:
    found = importlib.import_module(module)
    assert set(found.__all__) == PUBLIC[module]
    assert len(set(found.__all__)) == len(found.__all__)
    assert set(dir(found)) >= PUBLIC[module]


def test_an_unknown_name_is_an_attribute_error() -> None:
    for module in PUBLIC:
        with pytest.raises(AttributeError, match="no_such_name"):
            importlib.import_module(module).no_such_name  # noqa: B018


@pytest.mark.parametrize(("name", "item"), public_objects())
def test_name_has_a_docstring(name: str, item: Any) -> None:
    if is_documentable(item):
        assert item.__doc__, f"{name} has no docstring"
        assert not item.__doc__.startswith(f"{item.__name__}("), f"{name} has only dataclass's own docstring"


@pytest.mark.parametrize(("name", "item"), public_objects())
def test_name_has_type_hints(name: str, item: Any) -> None:
    functions = [item] if inspect.isfunction(item) else []
    if inspect.isclass(item):
        for key, value in vars(item).items():
            if key.startswith("_") and key not in ("__init__", "__enter__", "__exit__"):
                continue
            value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if inspect.isfunction(value) and value.__module__ == item.__module__:
                functions.append(value)
    for function in functions:
        signature = inspect.signature(function)
        bare = [
            key
            for key, parameter in signature.parameters.items()
            if parameter.annotation is parameter.empty and key not in ("self", "cls")
        ]
        assert not bare, f"{name}: {function.__qualname__} has parameters without types: {bare}"
        assert signature.return_annotation is not signature.empty, f"{name}: {function.__qualname__} -> ?"


def test_py_typed_is_shipped() -> None:
    assert (Path(radixkv.__file__).parent / "py.typed").is_file()
    pyproject = (Path(__file__).parent.parent / "pyproject.toml").read_text("utf-8")
    assert re.search(r'^radixkv = \[.*"py\.typed".*\]$', pyproject, re.M)


def test_errors_are_drawn_as_they_are() -> None:
    """The tree at the top of errors.py equals the classes below it, parents and all."""
    drawn: dict[str, set[str]] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^([│├└─ ]*)(\w+)(?: \((\w+)\))?(?:  |$)", line)
        if not found or not found[2].isidentifier() or not hasattr(errors, found[2]):
            continue
        depth, name, builtin = len(found[1]), found[2], found[3]
        above = [(d, n) for d, n in above if d < depth]
        drawn[name] = ({above[-1][1]} if above else {"Exception"}) | ({builtin} if builtin else set())
        above.append((depth, name))
    classes = {
        name: {base.__name__ for base in item.__bases__}
        for name, item in vars(errors).items()
        if inspect.isclass(item) and item.__module__ == errors.__name__
    }
    assert drawn == classes


@pytest.mark.parametrize("name", [n for n, item in vars(errors).items() if inspect.isclass(item)])
def test_every_error_has_a_docstring_of_its_own(name: str) -> None:
    item = getattr(errors, name)
    assert "__doc__" in vars(item) and item.__doc__
