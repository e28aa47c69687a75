"""Makes a checkpoint of a file that `torch.save` has written.

Knows: the habits of such files. Does not know: the format of a checkpoint. Runs no code of the file: it is read by
``weights_only``.

    {"model": state_dict, "optimizer": dict of torch.optim, "state": {...}, anything else}

    With several classes "optimizer" has such a dict for each, by the class's name.

The first two may also be called "model_state_dict" and "optimizer_state_dict". All else becomes the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.write.whole import WholeContents, write_whole
from ...core.statetree import encode
from ...state.by_class import merged

__all__ = ["import_file"]

_MODEL, _OPTIMIZER = ("model", "model_state_dict"), ("optimizer", "optimizer_state_dict")


def import_file(source: Path, out: Path) -> str:
    """Write the checkpoint ``out`` from the file ``source``, and return its ``content``.

    Raises:
        FileNotFoundError: there is no ``source``.
        FileExistsError: there is an ``out``.
        ValueError, TypeError: the file holds something else; names it.
    """
    return write_whole(out, _contents(_load(source), source))


def _load(source: Path) -> dict[str, Any]:
    if not source.is_file():
        raise FileNotFoundError(f"{source}: there is no such file")
    try:
        found = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:
        why = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ValueError(
            f"{source} cannot be read: it is no file of torch.save, or what it holds would need full unpickling, which "
            f"runs code of the file ({why[0]})"
        ) from error
    if not isinstance(found, dict) or not any(name in found for name in _MODEL):
        raise ValueError(f"{source} has no 'model': {{'model': ..., 'optimizer': ...}} is needed")
    return found


def _contents(found: dict[str, Any], source: Path) -> WholeContents:
    rest = dict(found)
    model_name = next(name for name in _MODEL if name in rest)
    optimizer_name = next((name for name in _OPTIMIZER if name in rest), None)
    model, aliases = _model(rest.pop(model_name), model_name)
    optimizer = {"state": {}, "param_groups": []} if optimizer_name is None else rest.pop(optimizer_name)
    if isinstance(optimizer, dict) and optimizer and all(map(_is_optimizer_dict, optimizer.values())):
        classes = [name for name, plain in optimizer.items() for _ in plain["param_groups"]]
        optimizer = merged(optimizer, classes)
    if not _is_optimizer_dict(optimizer):
        raise ValueError(f"{source}: {optimizer_name!r} is no dict of torch.optim, with 'state' and 'param_groups'")
    names = _names(optimizer["param_groups"], [name for name in model if name not in aliases])
    for name in names.values():
        if name not in model:
            raise ValueError(f"{source}: the optimizer has {name!r}, which the model has not")
    for index in [*optimizer["state"], *optimizer.get("masters", {})]:
        if index not in names:
            raise ValueError(f"{source}: the optimizer has a state of parameter {index}, which is in no param group")
    if not _named(optimizer["param_groups"]):
        _check_shapes(optimizer["state"], names, model)
    state = rest.pop("state", {})
    if not isinstance(state, dict):
        raise ValueError(f"{source}: 'state' is a {type(state).__name__}, and must be a dict")
    return WholeContents(
        model={name: tensor for name, tensor in model.items() if name not in aliases},
        aliases=aliases,
        groups=[
            {
                **{key: value for key, value in group.items() if key not in ("params", "param_names")},
                "params": [_kept(names[index], aliases) for index in group["params"]],
            }
            for group in optimizer["param_groups"]
        ],
        states=_states(optimizer["state"], names, model, aliases),
        masters={
            _kept(names[index], aliases): _plain(tensor, f"optimizer['masters'][{index}]")
            for index, tensor in sorted(optimizer.get("masters", {}).items())
        },
        state={**state, **rest},
    )


def _is_optimizer_dict(found: Any) -> bool:
    """Return whether this has the form of a dict of torch.optim."""
    if not isinstance(found, dict) or not {"state", "param_groups"} <= found.keys():
        return False
    groups, states = found["param_groups"], found["state"]
    return (
        isinstance(groups, list)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
        and isinstance(states, dict)
        and all(isinstance(values, dict) and all(isinstance(key, str) for key in values) for values in states.values())
    )


def _plain(tensor: Any, place: str) -> Tensor:
    """Return a tensor as it is saved. Raises `TypeError` naming its place if it is none, or cannot be saved."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{place} is a {type(tensor).__name__}, and must be a tensor")
    return encode(tensor, place)[1].popitem()[1]


def _model(found: Any, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors by name, and of several names of one tensor the later ones with the first."""
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ValueError(f"{name!r} is no state dict, from names to tensors")
    plain = {key: _plain(tensor, f"{name}[{key!r}]") for key, tensor in found.items()}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    for key, tensor in found.items():
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and first.setdefault(place, key) != key:
            aliases[key] = first[place]
    return plain, aliases


def _kept(name: str, aliases: Mapping[str, str]) -> str:
    return aliases.get(name, name)


def _names(groups: Sequence[Mapping[str, Any]], model: Sequence[str]) -> dict[int, str]:
    """Return the name of each parameter, by torch.optim's index."""
    if _named(groups):
        for number, group in enumerate(groups):
            count, names = len(group["params"]), len(group["param_names"])
            if count != names:
                raise ValueError(f"param group {number} of the optimizer has {count} parameters, but {names} names")
        return {
            index: name for group in groups for index, name in zip(group["params"], group["param_names"], strict=True)
        }
    if len(groups) == 1 and len(groups[0]["params"]) == len(model):
        return dict(zip(groups[0]["params"], model, strict=True))
    count = sum(len(group["params"]) for group in groups)
    raise ValueError(
        f"the optimizer has {count} parameters in {len(groups)} param groups without names, and the model {len(model)} "
        "tensors, so it is unknown which is which: build the optimizer over model.named_parameters(), load its dict "
        "into it, and save it again"
    )


def _named(groups: Sequence[Mapping[str, Any]]) -> bool:
    return all("param_names" in group for group in groups)


def _check_shapes(
    found: Mapping[int, Mapping[str, Any]], names: Mapping[int, str], model: Mapping[str, Tensor]
) -> None:
    """Raise `ValueError` if a state shows that the parameters have another order than the model's tensors."""
    for index, values in found.items():
        for key, value in values.items():
            if isinstance(value, Tensor) and value.numel() > 1 and value.shape != model[names[index]].shape:
                raise ValueError(
                    f"the state {key!r} of parameter {index} has shape {tuple(value.shape)}, and {names[index]!r} has "
                    f"{tuple(model[names[index]].shape)}: the optimizer's order is not the model's; save it with names"
                )


def _states(
    found: Mapping[int, Mapping[str, Any]],
    names: Mapping[int, str],
    model: Mapping[str, Tensor],
    aliases: Mapping[str, str],
) -> dict[str, dict[str, Any]]:
    """Return the states by the name of the parameter, in the order of the model."""
    states: dict[str, dict[str, Any]] = {}
    for index, values in found.items():
        name = _kept(names[index], aliases)
        states[name] = {
            key: _plain(value, f"optimizer.state[{name!r}][{key!r}]") if isinstance(value, Tensor) else value
            for key, value in values.items()
        }
    return {name: states[name] for name in model if name in states}
