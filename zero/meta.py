"""Models that were built under ``torch.device("meta")``: their tensors get memory and values module by module.

Knows: modules in order of registration, and where their values come from. Does not know: ranks, or who keeps what then.

    values of a module     its own `reset_parameters()`, or the user's function of the module
    on top of them         what a state dict has, read tensor by tensor
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

InitFunction = Callable[[nn.Module], Any]
StateDict = Mapping[str, Tensor] | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def is_meta(tensor: Tensor) -> bool:
    """True where a tensor has no memory yet."""
    return tensor.device.type == "meta"


@dataclass(frozen=True)
class _Unborn:
    """A module with tensors of its own that have no memory: these, each with the names that it has, its own first."""

    name: str
    module: nn.Module
    tensors: tuple[tuple[tuple[str, ...], Tensor], ...]


class Materializer:
    """Gives a module's meta tensors memory and values, once."""

    def __init__(
        self, module: nn.Module, device: torch.device, init: InitFunction | None, state_dict: StateDict | None
    ) -> None:
        """``device``: where tensors go. Raises `ValueError` naming what has no values to come, or what the state dict
        has and the module has not."""
        self.device, self._init = device, init
        self._values: Mapping[str, Tensor] = {} if state_dict is None else _mapping(state_dict)
        self._given = frozenset(self._values)  # to ask a mapping whether it has a name may read the tensor
        self._unborn = list(_unborn(module))
        if state_dict is not None:
            _check_keys(module, list(self._values), may_miss=init is not None)
        for unborn in self._unborn:
            missing = [names[0] for names, _ in unborn.tensors if self._name(names) is None]
            if missing and init is None and not hasattr(unborn.module, "reset_parameters"):
                raise ValueError(
                    f"{missing[0]!r} is on the meta device, and its module {unborn.name or 'the model'!r} "
                    f"({type(unborn.module).__name__}) has no reset_parameters(): pass param_init_fn, or a state dict "
                    "that has it"
                )
            for names, tensor in unborn.tensors:
                name = self._name(names)
                found = None if name is None else _shape(self._values, name)
                if found is not None and found != tuple(tensor.shape):
                    raise ValueError(f"{name!r} has shape {tuple(tensor.shape)}, but {found} in the state dict")

    def _name(self, names: Sequence[str]) -> str | None:
        """By which of its names the state dict has a tensor; None where it has not."""
        return next((name for name in names if name in self._given), None)

    def steps(self) -> Iterator[None]:
        """Give one module after the other its values, in order of registration; each time it has them, go on."""
        while self._unborn:
            self._materialize(self._unborn.pop(0))
            yield

    def finish(self) -> None:
        """Give all that are left their values."""
        for _ in self.steps():
            pass

    def _materialize(self, unborn: _Unborn) -> None:
        tensors = [(self._name(names), tensor) for names, tensor in unborn.tensors if is_meta(tensor)]
        if not tensors:  # they came with a module that they are tied to
            return
        for _, tensor in tensors:
            _give_memory(tensor, self.device)
        with torch.no_grad():
            if any(name is None for name, _ in tensors):
                if self._init is not None:
                    self._init(unborn.module)
                else:
                    reset: Any = unborn.module.reset_parameters
                    reset()
            for name, tensor in tensors:
                if name is not None:
                    tensor.copy_(self._values[name])


def materializer_of(
    module: nn.Module | None, parameters: Sequence[Tensor], init: InitFunction | None, state_dict: StateDict | None
) -> Materializer | None:
    """What gives meta tensors values; None where there are none. Raises `ValueError` where there can be none."""
    unborn = [parameter for parameter in parameters if is_meta(parameter)]
    if module is not None:
        unborn += [tensor for tensor in (*module.parameters(), *module.buffers()) if is_meta(tensor)]
    if not unborn:
        if init is not None or state_dict is not None:
            raise ValueError(
                "param_init_fn and init_state_dict are for models on the meta device, and this one has values: build "
                'it under torch.device("meta")'
            )
        return None
    if module is None:
        raise ValueError("parameters on the meta device need their module: pass module=model")
    device = torch.get_default_device()
    if device.type == "meta":
        raise ValueError('build the optimizer outside of torch.device("meta"): it gives the model memory')
    return Materializer(module, device, init, state_dict)


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers by each of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _check_keys(module: nn.Module, given: Sequence[str], *, may_miss: bool) -> None:
    """Raise `ValueError`, as a strict `load_state_dict` does, where names do not fit: what is not found would be
    initialised, and nobody would notice. ``may_miss``: somebody says what becomes of it."""
    aliases: dict[int, list[str]] = {}
    for name, tensor in _named(module):
        aliases.setdefault(id(tensor), []).append(name)
    known = {name for names in aliases.values() for name in names}
    for name in given:
        if name not in known:
            raise ValueError(f"init_state_dict has {name!r}, which the model has not")
    if may_miss:
        return
    kept, there = set(module.state_dict(keep_vars=True)), set(given)
    for names in aliases.values():
        if not there.intersection(names) and kept.intersection(names):
            raise ValueError(
                f"init_state_dict has no {names[0]!r}, which the model has: pass param_init_fn, too, to say what it is"
            )


def _unborn(module: nn.Module) -> Iterator[_Unborn]:
    aliases: dict[int, list[str]] = {}
    for name, tensor in _named(module):
        aliases.setdefault(id(tensor), []).append(name)
    for prefix, part in module.named_modules():
        named = (*part.named_parameters(prefix, recurse=False), *part.named_buffers(prefix, recurse=False))
        tensors = tuple(
            ((name, *(other for other in aliases[id(tensor)] if other != name)), tensor)
            for name, tensor in named
            if is_meta(tensor)
        )
        if tensors:
            yield _Unborn(prefix, part, tensors)


def _give_memory(tensor: Tensor, device: torch.device) -> None:
    """Undefined values; the tensor stays the object that modules and groups hold."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        made = type(tensor)._make_subclass(type(tensor), made, tensor.requires_grad)
        vars(made).update(vars(tensor))
    torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]


def _shape(values: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    """What a tensor's shape will be, where that can be told without reading it."""
    if isinstance(values, _Files):
        return values.shape(name)
    return tuple(values[name].shape) if isinstance(values, dict) and name in values else None


def _mapping(state_dict: StateDict) -> Mapping[str, Tensor]:
    if isinstance(state_dict, Mapping):
        return state_dict
    one = isinstance(state_dict, (str, os.PathLike))
    return _Files([state_dict] if one else list(state_dict))  # type: ignore[list-item,arg-type]


class _Files(Mapping[str, Tensor]):
    """The tensors of safetensors files, each read when it is asked for."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        try:
            from safetensors import safe_open  # type: ignore[import-not-found, unused-ignore]
        except ModuleNotFoundError as absent:
            raise ValueError("init_state_dict: to read files, python -m pip install safetensors") from absent
        self._files: dict[str, Any] = {}
        for path in paths:
            try:
                file: Any = safe_open(os.fspath(path), framework="pt", device="cpu")
            except Exception as error:
                raise ValueError(f"init_state_dict: {os.fspath(path)} cannot be read ({error})") from error
            self._files |= dict.fromkeys(file.keys(), file)

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = self._files[name].get_tensor(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of a tensor that is there."""
        return tuple(self._files[name].get_slice(name).get_shape()) if name in self._files else None
