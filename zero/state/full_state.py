"""The whole state dict of a model: brought to the host's memory, and loaded back, one bucket at a time.

While torch makes or reads a state dict, plain tensors on the host stand in for the module's parameters. So the names,
ties, hooks and errors are those of `torch.nn.Module`.

Knows: buckets, and what every rank has whole beside them. Does not know: steps, files.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from collectives import Kind, Tag, Transport

from ..consistency import broadcast
from ..core.bits import strided
from ..core.parameter_specs import (
    all_without_wrappers,
    is_copied,
    known_as,
    named_parameters,
    named_parts,
    remark_on_prefix,
    state_dict_tensors,
)
from ..core.stage import Stage
from ..core.units import Ignored
from ..gradients.reducer import Reducer
from ..parameters.storage import ParameterStorage
from ..runtime.bucket import Bucket, StoredBucket
from .gather import whole_of

_NO_MODULE = (
    "{call} needs the module whose parameters these are: build the optimizer over the module, or over parameters and "
    "module=model"
)
Hosts = dict[int, Tensor]  # id of a parameter or a buffer -> the tensor on the host that stands in for it


@dataclass(frozen=True)
class _Fitted:
    """A state dict that fits the model. ``wide``: the parameters, by index, that it has in a wider dtype."""

    values: Hosts
    wide: frozenset[int]


class FullState:
    """The state dict of the model of one optimizer. Every method is collective unless it is marked as local."""

    def __init__(
        self,
        module: nn.Module | None,
        stage: Stage,
        storage: ParameterStorage,
        reducer: Reducer,
        transport: Transport,
        shard_group: Transport,
    ) -> None:
        """``transport``: of all ranks; ``shard_group``: of those that share one copy."""
        self._module, self._stage, self._storage, self._reducer = module, stage, storage, reducer
        self._transport, self._shard_group = transport, shard_group

    def _module_for(self, call: str) -> nn.Module:
        """Return the module. Local."""
        if self._module is None:
            raise ValueError(_NO_MODULE.format(call=call))
        return self._module

    def _buckets(self) -> list[StoredBucket]:
        return [*self._storage.buckets, *self._storage.unlisted_buckets()]

    # -- to the host --------------------------------------------------------------------------------------------------

    def gather(self, to: int | None, problem: str | None, *, masters: bool) -> dict[str, Any] | None:
        """Return the state dict on rank ``to``, or on every rank if it is None; None elsewhere.

        ``problem``: an error that this rank found. ``masters``: parameters that have master weights are these.
        """
        purpose = f"full_state_dict(to={to}, masters={masters})"
        module = self._module_for("full_state_dict()")
        self._reducer.check_consistency(purpose, problem or self._storage.diagnose())
        values: Hosts = {}
        for number, bucket in enumerate(self._buckets()):
            whole = self._whole(bucket, to, Tag(Kind.GATHER, purpose, index=number), masters=masters)
            if whole is not None:
                for parameter, slot, spec in zip(bucket.parameters, bucket.spec.slots, bucket.specs, strict=True):
                    values[id(parameter)] = strided(whole, slot.offset, spec.shape, spec.stride).to("cpu", copy=True)
        return _state_dict(module, values, self._storage.ignored) if to in (None, self._transport.rank) else None

    def tensors(self, purpose: str, to: int | None, problem: str | None) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator over names and whole tensors on rank ``to``, or on every rank if it is None. It yields
        nothing on other ranks. The ranks agree at once, and exchange a bucket when their iterators come to it.

        ``problem``: an error that this rank found.
        """
        module = self._module_for("full_tensors()")
        self._reducer.check_consistency(purpose, problem or self._storage.diagnose())
        found = self._tensors(module, to, purpose)
        next(found)  # from now on its `close` takes part in what is left
        return found

    def _moment(self) -> tuple[int, ...]:
        """Return how many meetings, rounds and buckets there were. Local."""
        return self._reducer.agreement.number, self._reducer.schedule.number, len(self._storage.buckets)

    def _tensors(self, module: nn.Module, to: int | None, purpose: str) -> Iterator[tuple[str, Tensor]]:
        """See `tensors`. The first item stands for the agreement, and has no tensor of the model."""
        names = {id(tensor): name for name, tensor, _ in reversed([*state_dict_tensors(module)])}
        beside = [(names[id(tensor)], tensor) for _, tensor in self._beside_buckets() if id(tensor) in names]
        begun, thread, whole = self._moment(), threading.get_ident(), None
        buckets = enumerate(self._buckets())

        def check() -> None:
            if self._moment() != begun:
                raise RuntimeError(
                    f"{purpose}: a backward or another call of the optimizer came before the last tensor was read, so "
                    "the rest could be of other weights: finish the loop, or leave it, first"
                )

        try:
            yield "", torch.empty(0)
            for number, bucket in buckets:
                check()
                whole = self._whole(bucket, to, Tag(Kind.GATHER, purpose, index=number), masters=False)
                for parameter, slot, spec in zip(bucket.parameters, bucket.spec.slots, bucket.specs, strict=True):
                    if whole is not None and id(parameter) in names:
                        check()
                        value = strided(whole, slot.offset, spec.shape, spec.stride)
                        yield names[id(parameter)], value.to(bucket.spec.device, copy=True)
        except GeneratorExit:  # this rank has left the loop, and others may not have
            whole = None
            here = threading.get_ident() == thread and not sys.is_finalizing() and self._moment() == begun
            for number, bucket in buckets if here else ():
                self._whole(bucket, to, Tag(Kind.GATHER, purpose, index=number), masters=False)
            raise
        for name, tensor in beside if to in (None, self._transport.rank) else ():
            check()
            yield name, tensor.detach().clone()

    def _whole(self, bucket: StoredBucket, to: int | None, tag: Tag, *, masters: bool) -> Tensor | None:
        """Return a bucket's elements on the ranks that get them; None elsewhere."""
        held = bucket.widest if masters else bucket.weights.values
        return whole_of(held, bucket.spec, to, self._transport, self._shard_group, tag)

    # -- from the host ------------------------------------------------------------------------------------------------

    def agree(self, state_dict: Mapping[str, Any] | None, problem: str | None) -> Callable[[], None]:
        """Return a function that loads the state dict of the first rank that has one, if it fits the model. All ranks
        then call it.

        ``problem``: an error that this rank found. Raises the same error on every rank if one found one, or if none has
        a state dict.
        """
        purpose = "load_full_state_dict()"
        module, fitted = self._module_for(purpose), None
        if problem is None and state_dict is not None:
            try:
                fitted = self._fit(module, state_dict)
            except Exception as error:  # also of a hook of the user
                problem = f"{purpose}: {' '.join(str(error).split())}"
        message = b"" if fitted is None else json.dumps(sorted(fitted.wide)).encode()
        records = self._reducer.check_consistency(purpose, problem or self._storage.diagnose(), message=message)
        source = next((rank for rank, record in enumerate(records) if record.attachment), None)
        if source is None:
            raise ValueError(f"{purpose}: no rank has a state dict: give it on one rank at least, and None elsewhere")
        wide = frozenset(json.loads(records[source].attachment))
        return partial(self._load, fitted if source == self._transport.rank else None, source, wide)

    def _fit(self, module: nn.Module, state_dict: Mapping[str, Any]) -> _Fitted:
        """Return the values of a state dict, of which torch has found that it fits the module. Local."""
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"a state dict is a mapping of names to tensors, not a {type(state_dict).__name__}")
        for name, tensor in self._beside_buckets():
            if not is_copied(tensor):
                raise ValueError(
                    f"{name!r} is a {type(tensor).__name__}, which is not copied from one rank to another: load it "
                    "on every rank before the optimizer is built"
                )
        values = {id(tensor): tensor.detach().to("cpu", copy=True) for _, tensor in self._beside_buckets()}
        places: dict[int, tuple[StoredBucket, int]] = {}
        for bucket in self._buckets():
            for slot, (parameter, spec) in enumerate(zip(bucket.parameters, bucket.specs, strict=True)):
                places[id(parameter)] = bucket, slot
                values[id(parameter)] = torch.empty_strided(
                    spec.shape, spec.stride, dtype=bucket.spec.dtypes.master_dtype, device="cpu"
                )
        ignored = [each for each in (*module.parameters(), *module.buffers()) if each in self._storage.ignored]
        left = {id(each): torch.empty(each.shape, dtype=each.dtype, device="cpu") for each in ignored}
        given, names = _read(module, state_dict, {**values, **left}, left)
        wide = set[int]()
        for key, (bucket, slot) in places.items():
            value = given.get(names.get(key, ""))
            if isinstance(value, Tensor) and value.dtype.itemsize > bucket.spec.dtypes.param_dtype.itemsize:
                wide.add(bucket.spec.slots[slot].parameter)
        return _Fitted(values, frozenset(wide))

    def _load(self, fitted: _Fitted | None, source: int, wide: frozenset[int]) -> None:
        """Overwrite the model with a state dict, which rank ``source`` has."""
        for bucket in self._buckets():
            dtypes = bucket.spec.dtypes
            whole = torch.zeros(bucket.spec.numel, dtype=dtypes.master_dtype, device=bucket.spec.device)
            if fitted is not None:
                for parameter, slot, spec in zip(bucket.parameters, bucket.spec.slots, bucket.specs, strict=True):
                    strided(whole, slot.offset, spec.shape, spec.stride).copy_(fitted.values[id(parameter)])
            broadcast(self._transport, [whole], source)
            bucket.write(whole)
            if isinstance(bucket, Bucket):
                slots = {n for n, slot in enumerate(bucket.spec.slots) if slot.parameter in wide}
                bucket.states.write_masters(whole, slots)
        beside = self._beside_buckets()
        if fitted is not None:
            for _, tensor in beside:
                tensor.detach().copy_(fitted.values[id(tensor)])
        broadcast(self._transport, [tensor.detach() for _, tensor in beside], source)

    def _beside_buckets(self) -> list[tuple[str, Tensor]]:
        """Return what every rank has whole and beside the buckets: parameters and buffers. Local."""
        assert self._module is not None
        known = [*named_parameters(self._module), *self._storage.buffers()]
        in_buckets = {id(parameter) for bucket in self._buckets() for parameter in bucket.parameters}
        ignored = self._storage.ignored
        return [(name, tensor) for name, tensor in known if id(tensor) not in in_buckets and tensor not in ignored]


@contextmanager
def _standing_in(module: nn.Module, values: Hosts) -> Iterator[dict[int, int]]:
    """Let tensors stand in for the parameters and the buffers of a module inside the block. Ties are kept.

    Yields the id of that for which each stands in, by its own id.
    """
    made: dict[int, Tensor] = {}
    kept: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for _, part in named_parts(module):
            registries: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
            for registry in registries:
                for key, tensor in registry.items():
                    if tensor is not None and id(tensor) in values:
                        value = values[id(tensor)]
                        if isinstance(tensor, nn.Parameter) and id(tensor) not in made:
                            value = nn.Parameter(value, requires_grad=False)
                        kept.append((registry, key, tensor))
                        registry[key] = made.setdefault(id(tensor), value)
        yield {id(value): key for key, value in made.items()}
    finally:
        for registry, key, tensor in kept:
            registry[key] = tensor


def _read(
    module: nn.Module, state_dict: Mapping[str, Any], values: Hosts, left: Hosts
) -> tuple[dict[str, Any], dict[int, str]]:
    """Let the module load a state dict into ``values``, but for those that are ``left``. Local.

    Extra state is not loaded: it would change on this rank alone, and before the ranks agree.

    Returns the state dict by the names of the module, and the names by the ids of parameters. Raises `ValueError` if
    it does not fit.
    """
    with _standing_in(module, values) as made:
        expected: dict[str, Any] = module.state_dict(keep_vars=True)
        plain = dict(zip(all_without_wrappers(expected), expected, strict=True))
        known = {name: name if name in expected else plain.get(known_as(name, plain), name) for name in state_dict}
        extra = {name for name in expected if name.rpartition(".")[2] == "_extra_state"}
        given = {known[name]: value for name, value in state_dict.items() if known[name] not in extra}
        names = {made[id(value)]: name for name, value in expected.items() if id(value) in made}
        given |= {name: left[made[id(value)]] for name, value in expected.items() if made.get(id(value)) in left}
        try:
            found = module.load_state_dict(given, strict=False)
        except RuntimeError as error:
            raise ValueError(f"{error}{remark_on_prefix(state_dict, plain)}") from error
        missing = [name for name in found.missing_keys if name not in extra]
        for what, wrong in (("Missing", missing), ("Unexpected", found.unexpected_keys)):
            if wrong:
                names_of = ", ".join(f'"{name}"' for name in wrong)
                raise ValueError(
                    f"Error(s) in loading state_dict for {type(module).__name__}: {what} key(s) in state_dict: "
                    f"{names_of}{remark_on_prefix(state_dict, plain)}"
                )
    return given, names


def _state_dict(module: nn.Module, values: Hosts, ignored: Ignored) -> dict[str, Any]:
    """Return ``module.state_dict()``, with these values, on the host, without what is ``ignored``. Local.

    All that is not among the values is copied. Names are those of the module without the wrappers of torch.
    """
    copies: dict[int, Tensor] = {}
    with _standing_in(module, values) as made:
        found: dict[str, Any] = module.state_dict(keep_vars=True)
    for name, plain in zip(list(found), all_without_wrappers(found), strict=True):
        value = found.pop(name)
        if value in ignored:
            continue
        if isinstance(value, Tensor):
            if id(value) not in copies:
                copies[id(value)] = values[made[id(value)]] if id(value) in made else _copied(value)
            value = copies[id(value)]
        found[plain] = value
    return found


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy on the host. The tensor may be of a class of its own, whose ``cpu()`` is one of its numbers."""
    copy = tensor.detach().clone()
    return copy if copy.device.type == "cpu" else copy.cpu()
