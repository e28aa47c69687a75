"""Materialization of models that were built under ``torch.device("meta")``: memory and values, module by module.

    values of a module                its own `reset_parameters()`, or the user's function of the module
    over them                         the values of a state dict, read tensor by tensor
    tensors that have values already  (tied to an earlier module, or never on the meta device): unchanged, unless the
                                      state dict has them

State dicts whose tensors are read, and computed, when they are asked for.

    ReadTensors           what can say a tensor's shape without reading it
      TensorFiles         the tensors of safetensors files
      LazyStateDict       another state dict under other names, several tensors as one

Knows: modules in order of registration, and the sources of their values. Does not know: ranks, or which shards a rank
keeps afterwards.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from collectives.torch_internals import make_subclass

from ..core.parameter_specs import (
    Rename,
    by_known_name,
    child_name,
    has_own_dispatch,
    is_copied,
    is_released,
    known_as,
    named_parts,
    named_tensors,
    remark_on_prefix,
    renamed,
)
from ..core.units import Ignored

StateDict = Mapping[str, Tensor] | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Shape = tuple[int, ...]
Fuse = Mapping[str, tuple[Sequence[str], Callable[[list[Tensor]], Tensor]]]


class ReadTensors(Mapping[str, Tensor]):
    """Tensors by name; each is read on access."""

    @abstractmethod
    def shape(self, name: str) -> Shape | None:
        """Return the shape of a tensor; None if only its values tell it, or if there is no such name."""


def tensors_of(state_dict: StateDict, purpose: str = "init_state_dict") -> Mapping[str, Tensor]:
    """Return a mapping as it is, and files as a mapping. ``purpose``: what the user wrote, for errors.

    Raises `ValueError` if a file cannot be read, and `TypeError` for anything else.
    """
    if isinstance(state_dict, Mapping):
        return state_dict
    one = isinstance(state_dict, (str, os.PathLike))
    given: list[Any] = [state_dict] if one or not isinstance(state_dict, Iterable) else list(state_dict)
    if not all(isinstance(path, (str, os.PathLike)) for path in given):
        raise TypeError(
            f"{purpose}: a state dict is a mapping from names to tensors, or the path or paths of safetensors files, "
            f"not a {type(state_dict).__name__}"
        )
    return TensorFiles(given, purpose)


def shape_of(values: Mapping[str, Tensor], name: str) -> Shape | None:
    """Return the shape of a value, or None if it is unknown without reading the tensor."""
    if isinstance(values, ReadTensors):
        return values.shape(name)
    return tuple(values[name].shape) if isinstance(values, dict) and name in values else None


class TensorFiles(ReadTensors):
    """The tensors of safetensors files."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]], purpose: str) -> None:
        try:
            from safetensors import safe_open  # type: ignore[import-not-found, unused-ignore]
        except ModuleNotFoundError as absent:
            raise ValueError(f"{purpose}: to read files, python -m pip install safetensors") from absent
        self._files: dict[str, Any] = {}
        for path in paths:
            try:
                file: Any = safe_open(os.fspath(path), framework="pt", device="cpu")
            except Exception as error:
                why = "it is a folder: list its files" if os.path.isdir(path) else error
                raise ValueError(f"{purpose}: {os.fspath(path)!r} cannot be read ({why})") from error
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                if name in self._files:
                    raise ValueError(f"{purpose}: {os.fspath(path)} has {name!r}, which another file has, too")
                self._files[name] = file

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = self._files[name].get_tensor(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def shape(self, name: str) -> Shape | None:
        return tuple(self._files[name].get_slice(name).get_shape()) if name in self._files else None


class LazyStateDict(ReadTensors):
    """A state dict under other names, with several tensors as one: for ``ZeroOptimizer(init_state_dict=...)``.

    A tensor is read, or computed from those that it needs, when it is asked for. So a rank never holds more of the
    state dict than one tensor and its sources. Nothing is kept. Each rank that builds the optimizer builds its own.

    Args:
        source: a mapping, or the path or paths of safetensors files.
        rename: saved name -> the model's name, or None to leave it out: a mapping, which has only the names that
            change, or a function.
        fuse: the model's name -> saved names, and a function that gets their tensors as a list, in this order, and
            returns one tensor: ``{"qkv.weight": (("q.weight", "k.weight", "v.weight"), torch.cat)}``. These saved names
            are not renamed, and stand for nothing else. Several of the model's names may have one source, to cut it
            into parts.

    Raises:
        ValueError: a file cannot be read, a saved name is missing, ``rename`` raises, or two tensors would get one
            name.
        TypeError: a new name is no text, or an argument is of another kind.
    """

    def __init__(self, source: StateDict, *, rename: Rename | None = None, fuse: Fuse | None = None) -> None:
        self._source = tensors_of(source, "LazyStateDict")
        self._fused = {} if fuse is None else _checked(fuse)
        names, taken = dict.fromkeys(self._source), set[str]()
        for name, (given, _) in self._fused.items():
            for saved in given:
                if saved not in names:
                    raise ValueError(f"fuse: the state dict has no {saved!r}, of which {name!r} is to be made")
            taken.update(given)
        if isinstance(rename, Mapping):
            for saved in rename:
                if saved in taken:
                    raise ValueError(f"rename: {saved!r} of the state dict is in fuse, too: leave it out of rename")
        left = [name for name in names if name not in taken]
        self._plain = {new: saved for saved, new in renamed(rename, left, (), "the state dict").items()}
        for name in self._fused:
            if name in self._plain:
                raise ValueError(f"fuse: {name!r} is to be made, but {self._plain[name]!r} would have that name, too")

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor of a name of the model, read or computed now."""
        if name in self._plain:
            return self._source[self._plain[name]]
        given, make = self._fused[name]
        try:
            found = make([self._source[saved] for saved in given])
        except Exception as error:
            raise ValueError(
                f"fuse: {name!r} could not be made of {', '.join(given)}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(found, Tensor):
            raise ValueError(f"fuse: the function of {name!r} must return one tensor, not a {type(found).__name__}")
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._plain or name in self._fused  # without reading it

    def __iter__(self) -> Iterator[str]:
        yield from self._plain
        yield from self._fused

    def __len__(self) -> int:
        return len(self._plain) + len(self._fused)

    def shape(self, name: str) -> Shape | None:
        return shape_of(self._source, self._plain[name]) if name in self._plain else None


def _checked(fuse: Fuse) -> dict[str, tuple[tuple[str, ...], Callable[[list[Tensor]], Tensor]]]:
    """Return a copy of ``fuse``. Raises `TypeError` naming an entry of another form."""
    if not isinstance(fuse, Mapping):
        raise TypeError(f"fuse must be a mapping from names of the model, not a {type(fuse).__name__}")
    for name, entry in fuse.items():
        given, make = entry if isinstance(entry, (tuple, list)) and len(entry) == 2 else ((), None)
        if not given or isinstance(given, str) or not callable(make):
            raise TypeError(f"fuse: {name!r} needs a pair of a list of saved names and a function, not {entry!r:.200}")
    return {name: (tuple(given), make) for name, (given, make) in fuse.items()}


InitFunction = Callable[[nn.Module], Any]
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def is_meta(tensor: Tensor) -> bool:
    """Return True if a tensor has no memory yet."""
    return tensor.device.type == "meta"


@dataclass(frozen=True)
class _OwnedTensor:
    """A tensor that a module itself registers: where it is registered, and with which geometry it was made."""

    registry: dict[str, Any]  # the module's `_parameters` or `_buffers`
    key: str
    names: tuple[str, ...]  # all names of the tensor in the model; in this module's first
    tensor: Tensor
    made: Tensor  # on the meta device: shape, strides, dtype

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class _MetaModule:
    """A module with all tensors that it registers itself."""

    name: str
    module: nn.Module
    own: tuple[_OwnedTensor, ...]
    meta: frozenset[int]  # ids of the tensors that had no memory, without what is ignored


class Materializer:
    """Gives the meta tensors of a model memory and values, once."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        init: InitFunction | None,
        state_dict: StateDict | None,
        ignored: Ignored,
    ) -> None:
        """Check the model and the sources of its values; change nothing.

        Args:
            module: the whole model.
            device: where tensors get memory.
            init: the user's function that initialises one module; None: `reset_parameters()` of each module.
            state_dict: values that replace those; None: no such values.
            ignored: what keeps its values, or has none.

        Raises:
            ValueError: a meta tensor has no source of values, or the state dict does not fit the model.
        """
        self.device, self._init = device, init
        self._values: Mapping[str, Tensor] = {} if state_dict is None else tensors_of(state_dict)
        # by the model's names, those of the state dict; `in` on a mapping may read the tensor
        self._given = by_known_name({name: name for name in self._values}, {name for name, _ in named_tensors(module)})
        if state_dict is not None:
            _check_keys(module, list(self._given), ignored, may_miss=init is not None)
        self._ignored, parts = ignored, list(_parts(module, ignored))
        self._without_memory = [part for part in parts if part.meta]
        self._there = [own for part in parts for own in part.own if not is_meta(own.tensor)]  # the ignored are not read
        for part in self._without_memory:
            self._check(part)
        for own in (own for part in parts for own in part.own):
            name = self._given_as(own)
            found = None if name is None else shape_of(self._values, name)
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
                f"({type(part.module).__name__}) has no reset_parameters(): pass param_init_fn, which for a model of "
                "transformers is zero.integrations.transformers.init_of(model), or a state dict that has it"
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
        """Return the name under which the state dict has a tensor; None if it has none of its names, or is ignored."""
        names = () if own.tensor in self._ignored else own.names
        return next((self._given[name] for name in names if name in self._given), None)

    def steps(self) -> Iterator[None]:
        """Return an iterator that materializes one module per step, in order of registration.

        Tensors that have memory already get the state dict's values before this returns.
        """
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
        """Materialize all remaining modules."""
        for _ in self.steps():
            pass

    def _materialize(self, part: _MetaModule) -> None:
        fresh = [own for own in part.own if id(own.tensor) in part.meta and is_meta(own.tensor)]  # else tied, and there
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
        """Initialise a module. While it runs, temporary copies replace its tensors that have values already.

        Raises `ValueError` if the initialisation replaces a tensor.
        """
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
                        f"{self._what()} replaced parameter or buffer {own.name!r}: initialise it in place instead"
                    )
        finally:
            for own in part.own:
                own.registry[own.key] = own.tensor

    def _temporary_copy(self, own: _OwnedTensor) -> Tensor:
        """Return a copy that the initialisation may overwrite in the tensor's place.

        It consumes as many random numbers as the tensor itself, so that later draws are those of plain construction.
        """
        if has_own_dispatch(own.tensor):
            values = own.tensor.detach().clone()
        else:
            values = torch.zeros_like(own.made, device=self.device)
            if not (is_released(own.tensor) or is_meta(own.tensor)):
                values.copy_(own.tensor.detach())
        return nn.Parameter(values, own.made.requires_grad) if isinstance(own.made, nn.Parameter) else values

    def _read(self, own: _OwnedTensor) -> None:
        """Copy the state dict's value into a tensor, if it has one."""
        name = self._given_as(own)
        if name is None:
            return
        value = self._values[name]
        _check_shape(own, name, tuple(value.shape))
        if is_meta(value):
            raise ValueError(f"init_state_dict has {name!r} on the meta device: give it values")
        with torch.no_grad():
            own.tensor.copy_(value)


def materializer_of(
    module: nn.Module | None,
    parameters: Sequence[Tensor],
    init: InitFunction | None,
    state_dict: StateDict | None,
    default_device: Callable[[], torch.device],
    ignored: Ignored,
) -> Materializer | None:
    """Return the materializer of a model's meta tensors, without those ``ignored``; None if it has none.

    ``default_device`` returns the device on which they get memory. Raises `ValueError` if meta tensors cannot get
    values, or if there are none although ``init`` or ``state_dict`` is given.
    """
    tensors = [*parameters, *(() if module is None else (*module.parameters(), *module.buffers()))]
    if not any(is_meta(tensor) and tensor not in ignored for tensor in tensors):
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
    device = default_device()
    if device.type == "meta":
        raise ValueError('build the optimizer outside of torch.device("meta"): it gives the model memory')
    return Materializer(module, device, init, state_dict, ignored)


def _check_keys(module: nn.Module, given: Sequence[str], ignored: Ignored, *, may_miss: bool) -> None:
    """Raise `ValueError` if the names of the state dict do not fit the model, as a strict `load_state_dict` does.

    A missing tensor would otherwise be initialised without notice. ``may_miss``: names may be missing, because the user
    passed a function that initialises them. Those of what is ``ignored`` may, too, and are not read.
    """
    aliases: dict[int, list[str]] = {}
    for name, tensor in named_tensors(module):
        if tensor not in ignored:
            aliases.setdefault(id(tensor), []).append(name)
    known = {name for name, _ in named_tensors(module)}
    for name in given:
        if name not in known:
            raise ValueError(f"init_state_dict has {name!r}, which the model lacks{remark_on_prefix(given, known)}")
    if may_miss:
        return
    kept, there = {known_as(name, known) for name in module.state_dict(keep_vars=True)}, set(given)
    for names in aliases.values():
        if not there.intersection(names) and kept.intersection(names):
            raise ValueError(
                f"init_state_dict has no {names[0]!r}, which the model has: pass param_init_fn, too, to say what it is"
            )


def _parts(module: nn.Module, ignored: Ignored) -> Iterator[_MetaModule]:
    """Yield each module that registers tensors itself, in order of registration."""
    aliases: dict[int, list[str]] = {}
    for name, known in named_tensors(module):
        aliases.setdefault(id(known), []).append(name)
    for prefix, part in named_parts(module):
        own = []
        for registry in (part._parameters, part._buffers):
            for key, tensor in registry.items():
                if tensor is not None and not is_lazy(tensor):
                    name = child_name(prefix, key)
                    names = (name, *(other for other in aliases[id(tensor)] if other != name))
                    made = _as_made(tensor)
                    made = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
                    own.append(_OwnedTensor(registry, key, names, tensor, made))
        if own:
            meta = frozenset(id(each.tensor) for each in own if is_meta(each.tensor) and each.tensor not in ignored)
            yield _MetaModule(prefix, part, tuple(own), meta)


def _as_made(tensor: Tensor) -> Tensor:
    if has_own_dispatch(tensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return tensor.detach().to("meta")


def _give_memory(own: _OwnedTensor, device: torch.device) -> None:
    """Give a tensor memory with undefined values. It stays the object that modules and param groups reference."""
    tensor = own.tensor
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        made = make_subclass(type(tensor), made, tensor.requires_grad)
    vars(made).update(vars(tensor))
    try:
        torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ValueError(
            f"{own.name!r} is on the meta device and cannot be given memory: {error} (a ScriptModule's never can, so "
            "script it when it has some)"
        ) from error


def _fill_sentinel(tensor: Tensor) -> None:
    """Fill a tensor with a value that no initialisation leaves everywhere: NaN, or the largest integer."""
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
