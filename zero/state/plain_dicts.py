"""Turns optimizer states into plain torch.optim dicts and back, at every stage and number of ranks.

Completes a state dict that an older version of its class has saved, as `torch.optim.Optimizer.load_state_dict` does.

Knows: the format of torch.optim's dicts, also of older versions of a class; with several classes, there is one for
each, by its name. Does not know: how states travel (`gather`).
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from collectives import Kind, Tag, Transport
from collectives.torch_internals import is_traceable_wrapper_subclass

from ..core.bits import copied, in_stride_order
from ..core.grain import WHOLE
from ..core.layout import ParameterSpec
from ..core.parameter_specs import MASTERS, known_as, remark_on_prefix
from ..core.rounding import STEPS
from ..core.runs import PieceState, Rules, lies_flat, misfit, part_of
from ..core.stage import Placement, Stage, step_device
from ..core.statetree import rebuilt
from ..parameters.storage import ParameterStorage
from ..runtime.bucket import Bucket
from ..runtime.flat_states import Options
from ..step.classes import UserOptimizers
from ..step.partition import check_classes
from ..step.user_optimizer import NO_OPTIONS, UserOptimizer
from .gather import gather

_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")


def completed(
    state_dict: Mapping[str, Any],
    groups: Sequence[Options],
    user_optimizers: UserOptimizers,
    listed: Sequence[ParameterSpec],
) -> dict[str, Any]:
    """Return a plain dict with what the classes of its param groups add to it. Changes nothing, of the dict neither.

    Each class is given its groups and their states once, on an instance whose parameters have no memory. Of a tensor of
    more than one element it sees the shape alone, so one on the meta device serves, too. If a class refuses what it is
    given, its groups stay as they are; `plain_dicts.fitted` names what they lack.

    Args:
        state_dict: one of all param groups, with as many parameters in each as this optimizer has.
        groups: the live param groups.
        user_optimizers: their classes.
        listed: their parameters.

    Raises:
        ValueError: the dict belongs to another class, or a class makes other large states of those that it is given.
    """
    saved, states = list(state_dict["param_groups"]), dict(state_dict["state"])
    members: dict[int, list[ParameterSpec]] = {place: [] for place in range(len(groups))}
    for spec in sorted(listed, key=lambda spec: spec.index):
        members[spec.group].append(spec)
    for number, inner in user_optimizers.used():
        if inner.optimizer_class.__setstate__ is torch.optim.Optimizer.__setstate__:
            continue
        places = list(user_optimizers.groups_of(number, groups))
        throw_away = _ThrowAway(inner, [(saved[place], members[place]) for place in places], states)
        try:
            found = throw_away.complete()
        except Exception:  # these are not its states, or it cannot load what it saves itself
            continue
        for place, options in zip(places, found, strict=True):
            _check_options(inner, place, saved[place], options, groups[place])
            saved[place] = {**saved[place], **options}
        for index, added in throw_away.added():
            states[index] = {**states[index], **added}
    return {**state_dict, "state": states, "param_groups": saved}


def _check_options(inner: UserOptimizer, place: int, saved: Options, after: Options, live: Options) -> None:
    """Raise `ValueError` if the class has added options to a group that has others, which it does not know."""
    added = live.keys() & after.keys() - saved.keys()
    unknown = saved.keys() - live.keys() - {*inner.defaults, *NO_OPTIONS, *_OF_SCHEDULERS, STEPS}
    if added and unknown:
        raise ValueError(
            f"param group {place}: the state dict has no {min(added)!r}, but {min(unknown)!r}, which {inner.name} does "
            f"not know: it belongs to another class, or {min(unknown)!r} is yours: then put it into the param group"
        )


class _ThrowAway:
    """A throw-away instance of a class, and what it is given of a state dict."""

    def __init__(
        self,
        inner: UserOptimizer,
        groups: Sequence[tuple[Options, Sequence[ParameterSpec]]],
        states: Mapping[int, Mapping[str, Any]],
    ) -> None:
        """``groups``: of the dict, with their parameters. ``states``: by the dict's indices."""
        self._inner, self._instance = inner, inner.instance(None)
        self._groups: list[Options] = []
        self._parameters: dict[int, tuple[Tensor, ParameterSpec]] = {}  # by the dict's index
        self._given: dict[int, dict[str, Any]] = {}
        memo: dict[int, Any] = {}  # groups may share a tensor
        for group, specs in groups:
            options = {key: copy.deepcopy(value, memo) for key, value in group.items() if key not in NO_OPTIONS}
            made = [_zeros(spec.shape, spec.dtypes.master_dtype, step_device(spec)) for spec in specs]
            self._groups.append({**options, "params": made})
            for index, parameter, spec in zip(group["params"], made, specs, strict=True):
                self._parameters[index] = (parameter, spec)
                if states.get(index):
                    self._given[index] = {
                        name: _copied(value, step_device(spec)) for name, value in states[index].items()
                    }

    def complete(self) -> list[Options]:
        """Let the class complete what was added, and return the options of each group."""
        state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        state.update((self._parameters[index][0], dict(given)) for index, given in self._given.items())
        self._instance.__setstate__({"state": state, "param_groups": self._groups})
        return [{key: group[key] for key in group if key != "params"} for group in self._instance.param_groups]

    def added(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the states that the class has added or replaced, by the dict's index. Call `complete` before."""
        found = []
        for index, given in self._given.items():
            parameter, spec = self._parameters[index]
            after = self._instance.state[parameter]
            added = {name: value for name, value in after.items() if name not in given or value is not given[name]}
            for name, value in added.items():
                if isinstance(value, Tensor) and value.numel() > 1:
                    raise ValueError(
                        f"{self._inner.name} makes the state {name!r} of {spec.name!r} anew when it loads a dict: load "
                        "the dict into the plain class, and give what its state_dict() returns then"
                    )
            found.append((index, added))
        return found


def _copied(value: Any, device: str) -> Any:
    """Return a copy of a state; of a tensor of more than one element its shape, on the device of its parameter."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    return value.detach().clone() if value.numel() <= 1 else _zeros(value.shape, value.dtype, device)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """Return zeros of which all share the memory of one."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape))


class PlainDicts:
    """Saves and loads the plain dicts of one optimizer on one rank."""

    def __init__(
        self,
        stage: Stage,
        storage: ParameterStorage,
        user_optimizers: UserOptimizers,
        transport: Transport,
        shard_group: Transport,
    ) -> None:
        """``shard_group``: the transport of the ranks that share one copy of the states."""
        self._stage, self._storage, self._user_optimizers = stage, storage, user_optimizers
        self._transport, self._shard_group = transport, shard_group
        self._consolidated: tuple[dict[int, Any], dict[int, Tensor]] | None = None  # states, master weights

    def consolidate(self, to: int | None, purpose: str) -> None:
        """Send all states to rank ``to``, or to every rank. Collective. ``purpose`` names the call in errors."""
        whole_here = self._stage.states is Placement.WHOLE or self._shard_group.world_size == 1
        tag = Tag(Kind.EXCHANGE, purpose)
        kinds, rules = [inner.kinds for inner in self._user_optimizers], self._user_optimizers.rules_of
        found = gather(self._storage.buckets, self._transport, self._shard_group, to, whole_here, tag, kinds, rules)
        if found is not None:
            self._consolidated = found

    def forget(self) -> None:
        """Drop the consolidated states, which are those of an earlier step."""
        self._consolidated = None

    def dict_of(self, groups: Sequence[Options]) -> dict[str, Any]:
        """Return the plain dict, or one of each class by its name, if there are several.

        Raises `RuntimeError` if this rank has no consolidated states.
        """
        if self._consolidated is None:
            raise RuntimeError(
                f"rank {self._transport.rank} holds a shard of the states: call "
                "optimizer.consolidate_state_dict(to=rank) on all ranks, after the last step, and then state_dict() on "
                "that rank (to=None: on every rank)"
            )
        states, masters = self._consolidated
        result: dict[str, Any] = {
            "state": {index: dict(state) for index, state in states.items()},
            "param_groups": packed_groups(groups, self._storage.listed()),
        }
        if any(bucket.spec.dtypes.has_master for bucket in self._storage.buckets):
            result[MASTERS] = dict(masters)
        classes = self._class_names(groups)
        return split(result, classes) if len(set(classes)) > 1 else result

    def _class_names(self, groups: Sequence[Options]) -> list[str]:
        return [self._user_optimizers.of(number).qualified_name for number in range(len(groups))]

    def load(self, state_dict: Mapping[str, Any], groups: Sequence[Options]) -> None:
        """Load this rank's pieces and the options of the param groups from a plain dict. Local.

        Nothing changes unless the whole dict fits; `ValueError` names the first misfit.
        """
        classes = self._class_names(groups)
        state_dict = merged(state_dict, classes) if len(set(classes)) > 1 else by_index(state_dict)
        buckets, user_optimizers = self._storage.buckets, self._user_optimizers
        state_dict, names, mapping = fitted(state_dict, groups, user_optimizers, self._storage)
        found = [{k: v for k, v in saved.items() if k not in NO_OPTIONS} for saved in state_dict["param_groups"]]
        for group, options in zip(groups, copy.deepcopy(found), strict=True):  # groups may share a tensor
            group.pop(STEPS, None)  # a dict that has none is that of a training without rounding
            group.update(options)
        for bucket in buckets:
            with bucket.states.writing():
                scatter(state_dict["state"], mapping, groups, bucket, names, user_optimizers.rules_of)
                if MASTERS in state_dict and bucket.spec.dtypes.has_master:
                    scatter_masters(state_dict[MASTERS], mapping, bucket)
        for number, elementwise in names.items():
            user_optimizers[number].note_elementwise(elementwise)
        self._consolidated = None


def packed_groups(groups: Sequence[Options], listed: Sequence[ParameterSpec]) -> list[Options]:
    """Return the param groups as torch.optim packs them: with indices for parameters.

    If all parameters of a group have names, the group has these, too; one without parameters, if all others have.
    """
    by_group: dict[int, list[Any]] = {}
    for spec in sorted(listed, key=lambda spec: spec.index):
        by_group.setdefault(spec.group, []).append(spec)
    options = [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in groups]
    result = copy.deepcopy(options)  # at once: groups may share a tensor
    for number, packed in enumerate(result):
        members = by_group.get(number, [])
        if all(spec.names for spec in members or listed):
            packed["param_names"] = [spec.name for spec in members]
        packed["params"] = [spec.index for spec in members]
    return result


def split(whole: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the plain dict of each class, by its name, whose indices begin at 0. ``names``: of each group's class."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(names):
        groups = [group for group, of in zip(whole["param_groups"], names, strict=True) if of == name]
        indices = {index: place for place, index in enumerate(index for group in groups for index in group["params"])}
        found[name] = {
            **_renumbered(whole, indices),
            "param_groups": [
                {**group, "optimizer_class": name, "params": [indices[index] for index in group["params"]]}
                for group in groups
            ],
        }
    return found


def merged(dicts: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return one dict of the plain dicts of each class: what `split` was given. ``names``: of each group's class.

    Raises `ValueError` if there is not one for each class, with as many groups as it has.
    """
    if not isinstance(dicts, Mapping) or dicts.keys() != set(names):
        raise ValueError(
            f"the state dict must hold one dict for each class, by its name: {', '.join(sorted(set(names)))}; it has "
            f"{', '.join(map(repr, dicts)) or 'nothing'}"
        )
    for name, plain in dicts.items():
        if not isinstance(plain, Mapping) or not {"state", "param_groups"} <= plain.keys():
            raise ValueError(f"the dict of {name} must be one of torch.optim, with 'state' and 'param_groups'")
    whole: dict[str, Any] = {"state": {}, "param_groups": []}
    groups: dict[str, Iterator[Any]] = {}
    indices: dict[str, dict[int, int]] = {name: {} for name in dicts}
    for name, plain in dicts.items():
        if len(plain["param_groups"]) != names.count(name):
            raise ValueError(
                f"the state dict has {len(plain['param_groups'])} param groups of {name}, this optimizer "
                f"{names.count(name)}"
            )
        groups[name] = iter(plain["param_groups"])
    count = 0
    for name in names:
        group = next(groups[name])
        for index in group["params"]:
            indices[name][index] = count
            count += 1
        whole["param_groups"].append({**group, "params": [indices[name][index] for index in group["params"]]})
    for name, plain in dicts.items():
        for key, values in _renumbered(plain, indices[name]).items():
            whole.setdefault(key, {}).update(values)
    return whole


def _renumbered(plain: Mapping[str, Any], indices: Mapping[int, int]) -> dict[str, dict[int, Any]]:
    """Return what a dict has by index, with other indices."""
    return {
        key: {indices[index]: value for index, value in plain[key].items() if index in indices}
        for key in ("state", MASTERS)
        if key in plain
    }


def by_index(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a dict whose keys are indices, given one whose keys are the parameters' names, as of FSDP2's.

    Any other dict is returned as it is.
    """
    groups = state_dict.get("param_groups", ()) if isinstance(state_dict, Mapping) else ()
    names = [name for group in groups for name in group["params"]]
    if not names or not all(isinstance(name, str) for name in names):
        return state_dict
    indices = {name: index for index, name in enumerate(names)}
    named = [
        {**group, "param_names": list(group["params"]), "params": [indices[name] for name in group["params"]]}
        for group in groups
    ]
    states = {indices.get(name, name): states for name, states in state_dict.get("state", {}).items()}
    return {**state_dict, "state": states, "param_groups": named}


def fitted(
    state_dict: Mapping[str, Any], groups: Sequence[Options], user_optimizers: UserOptimizers, storage: ParameterStorage
) -> tuple[dict[str, Any], dict[int, frozenset[str]], dict[int, int]]:
    """Return a plain dict with what its classes add to it, if it fits this optimizer. Changes nothing.

    Also returns the names of the states that are as large as their parameter, by the number of the class, and this
    optimizer's index -> the dict's index. Raises `ValueError` that names the first difference.
    """
    listed = storage.listed()
    _check_form(state_dict, groups, listed)
    found = completed(state_dict, groups, user_optimizers, listed)
    with user_optimizers.unchanged_on_error():
        elementwise = check_classes(user_optimizers, found["param_groups"], storage.layout.parameters)
        return found, elementwise, _check(found, groups, listed, elementwise, user_optimizers.rules_of)


def _check_form(state_dict: Mapping[str, Any], groups: Sequence[Options], listed: Sequence[ParameterSpec]) -> None:
    """Raise `ValueError` unless a plain dict has the param groups of this optimizer: their classes, and how many
    parameters each has."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise ValueError("a torch.optim state dict is needed, with 'state' and 'param_groups'")
    ours, theirs = packed_groups(groups, listed), state_dict["param_groups"]
    if len(ours) != len(theirs):
        raise ValueError(f"the state dict has {len(theirs)} param groups, this optimizer {len(ours)}")
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if len(mine["params"]) != len(other["params"]):
            raise ValueError(
                f"param group {number}: the state dict has {len(other['params'])} parameters, this optimizer "
                f"{len(mine['params'])}: it belongs to another model"
            )
        of_class, saved_class = mine.get("optimizer_class"), other.get("optimizer_class")
        if of_class and saved_class and of_class != saved_class:
            raise ValueError(
                f"param group {number}: the state dict is that of {saved_class}, this optimizer {of_class}"
            )


def _check(
    state_dict: Mapping[str, Any],
    groups: Sequence[Options],
    listed: Sequence[ParameterSpec],
    elementwise: Mapping[int, frozenset[str]],
    rules: Callable[[ParameterSpec], Rules],
) -> dict[int, int]:
    """Check a plain dict that has passed `_check_form`, and return this optimizer's index -> the dict's index."""
    mapping: dict[int, int] = {}
    by_index = {spec.index: spec for spec in listed}
    masters: Mapping[int, Tensor] = state_dict.get(MASTERS, {})
    _check_masters(masters)
    for number, (mine, other) in enumerate(zip(packed_groups(groups, listed), state_dict["param_groups"], strict=True)):
        missing = sorted(set(mine) - set(other) - {"param_names", "optimizer_class", STEPS})
        if missing:
            raise ValueError(f"param group {number}: the state dict has no {missing[0]!r}: it belongs to another class")
        known, saved = mine.get("param_names"), other.get("param_names")
        all_known = frozenset(known or ())
        for position, index in enumerate(mine["params"]):
            if known and saved and known[position] != known_as(saved[position], all_known):
                raise ValueError(
                    f"param group {number}, parameter {position}: the state dict has {saved[position]!r}, this "
                    f"optimizer {known[position]!r}: it belongs to another model{remark_on_prefix(saved, all_known)}"
                )
            mapping[index] = other["params"][position]
            master = masters.get(mapping[index])
            if master is not None and tuple(master.shape) != by_index[index].shape:
                raise ValueError(
                    f"the master weights of {by_index[index].name!r} have shape {tuple(master.shape)} in the state "
                    f"dict, but the parameter has {by_index[index].shape}: it belongs to another model"
                )
            for name, value in state_dict["state"].get(mapping[index], {}).items():
                spec, shape = by_index[index], by_index[index].shape
                if value is None or spec.grain == WHOLE:  # a whole parameter may have states of any shape
                    continue
                large = name in elementwise.get(spec.optimizer_class, ())
                if spec.grain.divided and (found := misfit({name: value}, spec.numel, rules(spec))):
                    of = f"elements than {spec.numel:,}"
                    if spec.grain.stack:
                        of = (
                            f"blocks than {len(spec.grain.stack)}: the dict is that of other blocks=, or of none. "
                            "Build the optimizer with the same, or load the parameters alone"
                        )
                    raise ValueError(f"state {found!r} of {spec.name!r} is that of another number of {of}")
                if large and tuple(value.shape) != shape:
                    raise ValueError(
                        f"state {name!r} of {by_index[index].name!r} has shape {tuple(value.shape)} in the state dict, "
                        f"but the parameter has {shape}: it belongs to another model"
                    )
                if not (large or spec.grain.divided) and isinstance(value, Tensor) and value.numel() != 1:
                    raise ValueError(f"state {name!r} of {by_index[index].name!r} belongs to another optimizer class")
    return mapping


def _check_masters(masters: Any) -> None:
    whole = isinstance(masters, Mapping) and all(isinstance(index, int) for index in masters)
    if not whole or not all(isinstance(value, Tensor) for value in masters.values()):
        raise ValueError("'masters' of a state dict must hold tensors by the parameters' indices, as it was saved")


def scatter(
    state: Mapping[int, Mapping[str, Any]],
    mapping: Mapping[int, int],
    groups: Sequence[Options],
    bucket: Bucket,
    elementwise: Mapping[int, frozenset[str]],
    rules: Callable[[ParameterSpec], Rules],
) -> None:
    """Copy this rank's pieces of a bucket out of whole states. Local. The dict must have been checked."""
    states, device, dtype = bucket.states, step_device(bucket.spec), bucket.spec.dtypes.master_dtype
    states.flat.clear()
    flat_values: dict[tuple[int, str], Tensor] = {}
    for number, piece in enumerate(states.pieces):
        spec = bucket.specs[piece.slot]
        values = state.get(mapping[spec.index])
        if not values:
            states.set_state(number, None)
            continue
        fused = bool(groups[spec.group].get("fused") or groups[spec.group].get("capturable"))
        scalars: dict[str, Any] = {}
        names = []
        for name, value in values.items():
            large = lies_flat(name, value, spec, elementwise)
            if not large or (spec.grain.alone and tuple(value.stride()) != spec.stride):
                if spec.grain.divided:
                    value = part_of({name: value}, bucket.spec.within(piece), spec.numel, rules(spec))[name]
                scalars[name] = scalar_state(name, value.to(dtype) if large else value, fused, device)
                continue
            names.append(name)
            key = (piece.slot, name)
            if key not in flat_values:
                flat_values[key] = in_stride_order(value.detach().to(device, dtype), spec.stride)
            target = states.allocate(name, dtype)
            target.piece(piece).copy_(flat_values[key][bucket.spec.within(piece)])
        states.set_state(number, PieceState(tuple(names), scalars))


def scalar_state(name: str, value: Any, on_device: bool, device: str) -> Any:
    """Return a copy of a state that does not lie flat, on the device where the class expects it, with its strides.

    A step count on a device becomes fp32, as the class keeps it. Every other dtype stays, so that nothing depends on a
    reload. Tensors without dimensions stay where they are.
    """
    if isinstance(value, dict):
        kind = type(value) if type(value) in (OrderedDict, Counter) else dict
        return kind({key: scalar_state("", inside, on_device, device) for key, inside in value.items()})
    if type(value) in (list, tuple):
        return type(value)([scalar_state("", inside, on_device, device) for inside in value])
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if is_traceable_wrapper_subclass(value):
        return rebuilt(value, lambda part: scalar_state("", part, on_device, device))
    if name == "step" and on_device:
        return value.detach().clone().to(device=device, dtype=torch.float32)
    return copied(value.detach().to(device if value.dim() else value.device))


def scatter_masters(masters: Mapping[int, Tensor], mapping: Mapping[int, int], bucket: Bucket) -> None:
    """Copy this rank's pieces of a bucket out of whole master weights. Local. The dict must have been checked.

    Those that it lacks were never updated: they will be made from the parameters.
    """
    states, device, dtype = bucket.states, step_device(bucket.spec), bucket.spec.dtypes.master_dtype
    states.master.forget()
    for piece in states.pieces:
        spec = bucket.specs[piece.slot]
        whole = masters.get(mapping[spec.index])
        if whole is not None:
            values = in_stride_order(whole.detach().to(device, dtype), spec.stride)
            states.over(states.weights).piece(piece).copy_(values[bucket.spec.within(piece)])
    states.master.loaded()
