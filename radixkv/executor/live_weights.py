"""LiveWeights: a model's weights by name while it runs, packed or not; to look at and to replace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from radixkv.errors import ConfigError
from radixkv.plain import shown


class LiveWeights(Mapping[str, torch.Tensor]):
    """Names are those of the model's ``state_dict`` before its layers were replaced. What is read is a copy,
    ``replace`` is the only way to write. Tied weights change together, under any of their names."""

    def __init__(self, model: nn.Module) -> None:
        """``model`` before its linear layers are replaced."""
        weights = model.state_dict(keep_vars=True)
        self._model = model
        self._shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        self._tied: dict[str, list[str]] = {}
        by_identity: dict[int, list[str]] = {}
        for name, weight in weights.items():
            self._tied[name] = by_identity.setdefault(id(weight), [])
            self._tied[name].append(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._shapes:
            raise KeyError(name)
        module, leaf = self._place(name)
        if leaf == "weight" and hasattr(module, "plain_weight"):
            weight: torch.Tensor = module.plain_weight()
            return (weight.t() if module.is_transposed else weight).clone()
        other: torch.Tensor = getattr(module, leaf)
        return other.detach().clone()

    def _place(self, name: str) -> tuple[Any, str]:
        path, _, leaf = name.rpartition(".")
        return self._model.get_submodule(path), leaf

    def replace(self, weights: Mapping[str, Any]) -> None:
        """Write ``weights`` (tensors or arrays) over those of the same names; the others stay. Raises
        ``ConfigError``, having changed nothing, for an unknown name, another shape, numbers that are not
        finite, or tied weights that would part."""
        if not isinstance(weights, Mapping):
            raise ConfigError(f"weights must map names to tensors, got {shown(weights)}")
        checked = {name: self._checked(name, weight) for name, weight in weights.items()}
        for name, weight in checked.items():
            for other in self._tied[name]:
                if other in checked and not torch.equal(checked[other], weight):
                    raise ConfigError(f"{name} and {other} are one weight, and cannot become two")
        with torch.no_grad():
            for name, weight in checked.items():
                for each in self._tied[name]:
                    self._write(each, weight)

    def _checked(self, name: object, weight: object) -> torch.Tensor:
        if not isinstance(name, str) or name not in self._shapes:
            raise ConfigError(f"the model has no weight of the name {shown(name)}")
        try:
            tensor = torch.as_tensor(weight)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{name} must be a tensor or an array: {error}") from None
        if tuple(tensor.shape) != self._shapes[name]:
            raise ConfigError(f"{name} must be of shape {self._shapes[name]}, got {tuple(tensor.shape)}")
        if not bool(torch.isfinite(tensor).all()):
            raise ConfigError(f"{name} has numbers that are not finite")
        return tensor.detach().clone()

    def _write(self, name: str, weight: torch.Tensor) -> None:
        module, leaf = self._place(name)
        if leaf == "weight" and hasattr(module, "set_weight"):
            module.set_weight(weight.t() if module.is_transposed else weight)
        else:
            getattr(module, leaf).copy_(weight)
