"""What a caller may pass as prompts, as checked token ids. Nothing is cut or dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import InvalidRequestError
from radixkv.namespace import Scope
from radixkv.plain import plain_whole, shown
from radixkv.sampling import SamplingParams
from radixkv.text import Tokenizer
from radixkv.types import TokenIds
from radixkv.urgency import Urgency

Prompt: TypeAlias = str | Sequence[int] | NDArray[np.integer[Any]]
"""One prompt: text, or token ids as a list, a tuple or a flat array of whole numbers."""
T = TypeVar("T")
Prompts: TypeAlias = Prompt | Sequence[Prompt]


def is_one_prompt(prompts: object) -> bool:
    """Whether this is one prompt rather than a list of them. A list that begins with anything but text, a
    list or an array is taken for token ids (and refused later if it is none); an empty list is no prompt.

    Raises ``InvalidRequestError`` for what is neither.
    """
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim <= 1
    if isinstance(prompts, (list, tuple)):
        return len(prompts) > 0 and not isinstance(prompts[0], (str, list, tuple, np.ndarray))
    raise InvalidRequestError(
        f"prompts must be text, token ids or a list of these, got {type(prompts).__name__}"
    )


def prompt_ids(
    prompt: object, tokenizer: Tokenizer | None, vocab_size: int, *, add_special_tokens: bool = True
) -> TokenIds:
    """``[num_tokens]`` int32 of one prompt, not empty, every id in ``0..vocab_size - 1``.

    Raises ``InvalidRequestError``, naming the first offending position and the limit. A text without
    tokens is refused; where the tokenizer adds a beginning-of-text token, that alone is a prompt.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequestError("got text, but the model came without a tokenizer: pass token ids")
        ids = tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    elif isinstance(prompt, np.ndarray):
        ids = _from_array(prompt)
    elif isinstance(prompt, (list, tuple)):
        ids = _from_list(prompt, vocab_size)
    else:
        raise InvalidRequestError(f"must be text or token ids, got {type(prompt).__name__}")
    if len(ids) == 0:
        raise InvalidRequestError("is empty; at least 1 token is needed")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        position = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
        raise _outside(int(ids[position]), position, vocab_size)
    return ids.astype(np.int32)


def copied(prompt: T) -> T:
    """A copy of a prompt, or of a list of them, for somebody who reads it later; other things as they are.
    Lists and tuples of any kind become plain ones."""
    result: Any = prompt
    if isinstance(prompt, (list, tuple)):
        nested = len(prompt) > 0 and isinstance(prompt[0], (str, list, np.ndarray, tuple))
        items = [_copied_ids(item) for item in prompt] if nested else list(prompt)
        result = items if isinstance(prompt, list) else tuple(items)
    else:
        result = _copied_ids(prompt)
    return cast(T, result)


def _copied_ids(prompt: object) -> object:
    """What is nested deeper is refused later, and not looked at here: it may contain itself."""
    if isinstance(prompt, np.ndarray):
        return prompt.copy()
    if isinstance(prompt, list):
        return list(prompt)
    return tuple(prompt) if isinstance(prompt, tuple) else prompt


def params_list(params: object, num_prompts: int, one: bool) -> list[SamplingParams]:
    """One ``SamplingParams`` for each prompt: the one given for all, the list given, or the defaults.
    Raises ``InvalidRequestError`` for another type, or a list of another length."""
    if params is None:
        return [SamplingParams()] * num_prompts
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if one or not isinstance(params, (list, tuple)):
        raise InvalidRequestError(
            f"sampling_params must be SamplingParams{'' if one else ' or a list of them'}, "
            f"got {type(params).__name__}"
        )
    if len(params) != num_prompts:
        raise InvalidRequestError(f"got {len(params)} sampling_params for {num_prompts} prompts")
    checked: list[SamplingParams] = []
    for index, item in enumerate(params):
        if not isinstance(item, SamplingParams):
            raise InvalidRequestError(f"sampling_params {index}: must be SamplingParams, got {shown(item)}")
        checked.append(item)
    return checked


def scopes_of(cache_salt: object, adapter: object, num_prompts: int, one: bool) -> list[Scope]:
    """One ``Scope`` for each prompt; a salt or an adapter is for all, or a list has one for each. Raises
    ``InvalidRequestError`` for another type, or a list of another length."""
    salts = _one_or_each("cache_salt", cache_salt, num_prompts, one)
    adapters = _one_or_each("adapter", adapter, num_prompts, one)
    return [Scope(*pair) for pair in zip(salts, adapters, strict=True)]


def urgencies_of(priority: object, queue_timeout_s: object, num_prompts: int, one: bool) -> list[Urgency]:
    """One ``Urgency`` for each prompt; a priority is for all, or a list has one for each. Raises
    ``InvalidRequestError`` for a list of another length; ``Request`` looks at the rest."""
    each: Any = [priority] * num_prompts
    if isinstance(priority, (list, tuple, np.ndarray)) and not one:
        if len(priority) != num_prompts:
            raise InvalidRequestError(f"got {len(priority)} of priority for {num_prompts} prompts")
        each = priority
    return [Urgency(item, cast(Any, queue_timeout_s)) for item in each]


def _one_or_each(name: str, value: object, num_prompts: int, one: bool) -> list[str | None]:
    if value is None or isinstance(value, str):
        return [value] * num_prompts
    if one or not isinstance(value, (list, tuple)):
        raise InvalidRequestError(
            f"{name} must be text or None{'' if one else ', or a list of these'}, got {shown(value)}"
        )
    if len(value) != num_prompts:
        raise InvalidRequestError(f"got {len(value)} of {name} for {num_prompts} prompts")
    for index, item in enumerate(value):
        if item is not None and not isinstance(item, str):
            raise InvalidRequestError(f"{name} {index}: must be text or None, got {shown(item)}")
    return list(value)


def with_index(error: InvalidRequestError, what: str, index: int | None) -> InvalidRequestError:
    """The same kind of error, its message led by ``what`` and the index among several (0 is the first)."""
    return type(error)(f"{what}: {error}" if index is None else f"{what} {index}: {error}")


def _from_array(prompt: NDArray[Any]) -> NDArray[Any]:
    if isinstance(prompt, np.ma.MaskedArray):
        raise InvalidRequestError("token ids must not be a masked array: pass what is to be left of it")
    if prompt.ndim != 1:
        raise InvalidRequestError(f"token ids must be flat, got an array of {prompt.ndim} dimensions")
    if prompt.size and prompt.dtype.kind not in "iu":
        raise InvalidRequestError(f"token ids must be whole numbers, got an array of {prompt.dtype}")
    return prompt


def _from_list(prompt: Sequence[Any], vocab_size: int) -> NDArray[Any]:
    if not set(map(type, prompt)) <= {int}:
        for position, value in enumerate(prompt):
            if isinstance(value, (list, tuple, np.ndarray)):
                raise InvalidRequestError(
                    f"is nested too deep: position {position} holds a {type(value).__name__}, not a token id"
                )
            if plain_whole(value) is None:
                raise InvalidRequestError(
                    f"token ids must be whole numbers, got {shown(value)} at position {position}"
                )
    try:
        return np.array(prompt, np.int64)
    except OverflowError:
        position = next(p for p, value in enumerate(prompt) if not 0 <= int(value) < vocab_size)
        raise _outside(prompt[position], position, vocab_size) from None


def _outside(token_id: int, position: int, vocab_size: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"token id {shown(token_id)} at position {position} is outside the vocabulary, 0..{vocab_size - 1}"
    )
