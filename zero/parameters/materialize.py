"""Models that were built under ``torch.device("meta")``: their tensors get memory and values module by module.

Knows: modules in order of registration, and where their values come from. Does not know: ranks, or who keeps what then.

    values of a module     its own `reset_parameters()`, or the user's function of the module
    on top of them         what a state dict has, read tensor by tensor
    what has values        (a tie with an earlier module, what was never on the meta device) stays as it is
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from collectives.torch_internals import DeviceContext, get_function_modes, make_subclass

from ..core.parameter_specs import has_own_dispatch, is_copied, is_released

InitFunction = Callable[[nn.Module], Any]
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
StateDict = Mapping[str, Tensor] | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def is_meta(tensor: Tensor) -> bool:
    """True where a tensor has no memory yet."""
    return tensor.device.type == "meta"


@dataclass(frozen=True)
class _OwnedTensor:
    """A tensor that a module holds itself: where, and as what it was made. ``names``: all that it has."""

    registry: dict[str, Any]
    key: str
    names: tuple[str, ...]
    tensor: Tensor
    made: Tensor  # on the meta device: shape, strides, dtype

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class _MetaModule:
    """A module, some of whose own tensors have no memory, with all of these tensors."""

    name: str
    module: nn.Module
    own: tuple[_OwnedTensor, ...]
    meta: frozenset[int]  # by id, those that had none


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
        if state_dict is not None:
            _check_keys(module, list(self._values), may_miss=init is not None)
        parts = list(_parts(module))
        self._without_memory = [part for part in parts if part.meta]
        self._there = [own for part in parts for own in part.own if not is_meta(own.tensor)]
        for part in self._without_memory:
            self._check(part)
        for own in (own for part in parts for own in part.own):
            name = self._given_as(own)
            found = None if name is None else _shape(self._values, name)
            if name is not None and found is not None:
                _check_shape(own, name, found)

    def _check(self, part: _MetaModule) -> None:
        for own in part.own:
            if id(own.tensor) in part.meta and not is_copied(own.tensor):
                raise ValueError(
                    f"{own.name!r} is a {type(own.tensor).__name__} on the meta device, which only its own class could "
                    "give memory and values: do that before the optimizer is built"
                )
        missing = [own.name for own in part.own if id(own.tensor) in part.meta and self._given_as(own) is None]
        if missing and self._init is None and not hasattr(part.module, "reset_parameters"):
            raise ValueError(
                f"{missing[0]!r} is on the meta device, and its module {part.name or 'the model'!r} "
                f"({type(part.module).__name__}) has no reset_parameters(): pass param_init_fn, or a state dict "
                "that has it"
            )
        for own in part.own:
            if id(own.tensor) in part.meta and (
                own.tensor._backward_hooks or getattr(own.tensor, "_post_accumulate_grad_hooks", None)
            ):
                raise ValueError(
                    f"{own.name!r} is on the meta device and has hooks, which it would lose when it gets memory: "
                    "register them when the optimizer is built"
                )

    def _given_as(self, own: _OwnedTensor) -> str | None:
        """By which of its names the state dict has a tensor; None where it has not."""
        return next((name for name in own.names if name in self._given), None)

    def steps(self) -> Iterator[None]:
        """Give one module after the other its values, in order of registration; each time it has them, go on. What had
        memory gets what the state dict has before this returns."""
        for own in self._there:
            self._read(own)
        self._there = []
        return self._one_by_one()

    def _one_by_one(self) -> Iterator[None]:
        while self._without_memory:
            self._materialize(self._without_memory.pop(0))
            yield
        self._values, self._init = {}, None

    def finish(self) -> None:
        """Give all that are left their values."""
        for _ in self.steps():
            pass

    def _materialize(self, part: _MetaModule) -> None:
        fresh = [own for own in part.own if is_meta(own.tensor)]  # others came with a module that they are tied to
        drawn = [own for own in part.own if id(own.tensor) in part.meta and self._given_as(own) is None]
        try:
            for own in fresh:
                _give_memory(own, self.device)
                _fill_sentinel(own.tensor)
            with torch.no_grad():
                if drawn:
                    self._initialize(part, frozenset(id(own.tensor) for own in fresh))
                for own in fresh:
                    self._read(own)
                    if self._given_as(own) is None and _is_marked(own.tensor):
                        raise ValueError(
                            f"{own.name!r} was on the meta device and has no value: neither the state dict nor "
                            f"{self._what()} gives it one"
                        )
        except Exception as error:
            for own in fresh:
                _give_memory(own, torch.device("meta"))
            if isinstance(error, ValueError):
                raise
            where = f"module {part.name!r}" if part.name else "the model"
            raise RuntimeError(f"while {where} got its values: {type(error).__name__}: {error}") from error

    def _what(self) -> str:
        return "param_init_fn" if self._init is not None else "its module's reset_parameters()"

    def _initialize(self, part: _MetaModule, fresh: Set[int]) -> None:
        """Let a module draw its values. What has some already is out of its reach: others stand there for a while."""
        expected = []
        for own in part.own:
            if id(own.tensor) not in fresh:
                own.registry[own.key] = self._temporary_copy(own)
            expected.append(own.registry[own.key])
        try:
            if self._init is not None:
                self._init(part.module)
            else:
                reset: Any = part.module.reset_parameters
                reset()
            for own, tensor in zip(part.own, expected, strict=True):
                if own.registry.get(own.key) is not tensor:
                    raise ValueError(
                        f"{self._what()} put another tensor in the place of {own.name!r}, which the optimizer would "
                        "not know: write values into the one that is there"
                    )
        finally:
            for own in part.own:
                own.registry[own.key] = own.tensor

    def _temporary_copy(self, own: _OwnedTensor) -> Tensor:
        """Drawn like the tensor itself, so that what is drawn later is as in plain construction."""
        if has_own_dispatch(own.tensor):
            values = own.tensor.detach().clone()
        else:
            values = torch.zeros_like(own.made, device=self.device)
            if not (is_released(own.tensor) or is_meta(own.tensor)):
                values.copy_(own.tensor.detach())
        return nn.Parameter(values, own.made.requires_grad) if isinstance(own.made, nn.Parameter) else values

    def _read(self, own: _OwnedTensor) -> None:
        """What the state dict has."""
        name = self._given_as(own)
        if name is None:
            return
        value = self._values[name]
        _check_shape(own, name, tuple(value.shape))
        if is_meta(value):
            raise ValueError(f"init_state_dict has {name!r} on the meta device: give it values")
        with torch.no_grad():
            own.tensor.copy_(value)


def landing(backend_of: Callable[[torch.device], str]) -> torch.device:
    """Where tensors of the meta device get memory: on the default device, where one was set; else on the current
    accelerator, where the group has NCCL for it. ``backend_of``: what moves a device's tensors in the group."""
    default, there = torch.get_default_device(), torch.accelerator.current_accelerator(check_available=True)
    modes = get_function_modes()
    was_set = default.type != "cpu" or any(isinstance(mode, DeviceContext) for mode in modes)
    if was_set or there is None or backend_of(there) != "nccl":
        return default
    return torch.device(there.type, torch.accelerator.current_device_index())


def materializer_of(
    module: nn.Module | None,
    parameters: Sequence[Tensor],
    init: InitFunction | None,
    state_dict: StateDict | None,
    landing: Callable[[], torch.device],
) -> Materializer | None:
    """What gives meta tensors values, where ``landing`` says; None where there are none. Raises `ValueError` where
    there can be none."""
    without_memory = [parameter for parameter in parameters if is_meta(parameter)]
    if module is not None:
        without_memory += [tensor for tensor in (*module.parameters(), *module.buffers()) if is_meta(tensor)]
    if not without_memory:
        if init is not None or state_dict is not None:
            raise ValueError(
                "param_init_fn and init_state_dict are for models on the meta device, and this one has values: build "
                'it under torch.device("meta")'
            )
        return None
    if module is None:
        raise ValueError("parameters on the meta device need their module: pass module=model")
    known = {id(parameter) for parameter in module.parameters()}
    for number, parameter in enumerate(parameters):
        if is_meta(parameter) and id(parameter) not in known:
            raise ValueError(
                f"parameter {number} of those listed is on the meta device and not in the module, so nothing gives it "
                "values: list parameters of the module"
            )
    device = landing()
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


def _parts(module: nn.Module) -> Iterator[_MetaModule]:
    """Each module that has tensors of its own, in order of registration."""
    aliases: dict[int, list[str]] = {}
    for name, tensor in _named(module):
        aliases.setdefault(id(tensor), []).append(name)
    for prefix, part in module.named_modules():
        own = []
        for registry in (part._parameters, part._buffers):
            for key, tensor in registry.items():
                if tensor is not None and not is_lazy(tensor):
                    name = f"{prefix}.{key}" if prefix else key
                    names = (name, *(other for other in aliases[id(tensor)] if other != name))
                    made = _as_made(tensor)
                    made = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
                    own.append(_OwnedTensor(registry, key, names, tensor, made))
        if own:
            meta = frozenset(id(entry.tensor) for entry in own if is_meta(entry.tensor))
            yield _MetaModule(prefix, part, tuple(own), meta)


def _as_made(tensor: Tensor) -> Tensor:
    if has_own_dispatch(tensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return tensor.detach().to("meta")


def _give_memory(own: _OwnedTensor, device: torch.device) -> None:
    """Undefined values; the tensor stays the object that modules and groups hold."""
    tensor = own.tensor
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        made = make_subclass(type(tensor), made, tensor.requires_grad)
    vars(made).update(vars(tensor))
    try:
        torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ValueError(f"{own.name!r} is on the meta device and cannot be given memory: {error}") from error


def _fill_sentinel(tensor: Tensor) -> None:
    """Values that no initialisation leaves everywhere."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype in _WHOLE:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
        else:
            tensor.zero_()


def _is_marked(tensor: Tensor) -> bool:
    if not tensor.numel():
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().all())
    return tensor.dtype in _WHOLE and bool((tensor == torch.iinfo(tensor.dtype).max).all())


def _check_shape(own: _OwnedTensor, name: str, found: tuple[int, ...]) -> None:
    if found != tuple(own.made.shape):
        raise ValueError(f"{name!r} has shape {tuple(own.made.shape)}, but {found} in the state dict")


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
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                if name in self._files:
                    raise ValueError(f"init_state_dict: {os.fspath(path)} has {name!r}, which another file has, too")
                self._files[name] = file

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
