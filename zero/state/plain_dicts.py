"""Turns optimizer states into plain torch.optim dicts and back, at every stage and number of ranks.

Knows: the format of torch.optim's dicts, and which rank owns which piece. Bytes from a peer are never unpickled: names
and scalars travel as JSON, tensors as bytes.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from collectives import Kind, Tag, Transport, Work

from ..core.bits import flattened, strided
from ..core.cuts import Cuts
from ..core.layout import ParameterSpec
from ..core.stage import Placement, Stage
from ..parameters.storage import ParameterStorage
from ..runtime.bucket import Bucket
from ..runtime.flat_states import Options, PieceState
from ..step.elementwise import check_elementwise
from ..step.inner import InnerOptimizer

_DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)}

_MASTER = "(master weights)"  # a key among the flat tensors of a bucket's states


def _encoded(state: PieceState) -> dict[str, Any]:
    scalars = {
        name: {"dtype": str(value.dtype), "value": value.item()} if isinstance(value, Tensor) else {"value": value}
        for name, value in state.scalars.items()
    }
    return {"elementwise": list(state.elementwise), "scalars": scalars}


def _decoded(entry: Mapping[str, Any]) -> PieceState:
    scalars = {
        name: torch.tensor(value["value"], dtype=_DTYPES[value["dtype"]], device="cpu")
        if "dtype" in value
        else value["value"]
        for name, value in entry["scalars"].items()
    }
    return PieceState(tuple(entry["elementwise"]), scalars)


class PlainDicts:
    """Saves and loads the plain dicts of one optimizer on one rank."""

    def __init__(
        self, stage: Stage, storage: ParameterStorage, inner: InnerOptimizer, transport: Transport, shards: Transport
    ) -> None:
        """``shards``: the transport of the ranks that share one copy of the states."""
        self._stage, self._storage, self._inner = stage, storage, inner
        self._transport, self._shards = transport, shards
        self._consolidated: tuple[dict[int, Any], dict[int, Tensor]] | None = None  # states, master weights

    def consolidate(self, to: int | None, purpose: str) -> None:
        """Send all states to rank ``to``, or to every rank. Collective. ``purpose`` names the call in errors."""
        whole_here = self._stage.states is Placement.WHOLE or self._shards.world_size == 1
        tag = Tag(Kind.EXCHANGE, purpose)
        found = gather(self._storage.buckets, self._transport, self._shards, to, whole_here, tag)
        if found is not None:
            self._consolidated = found

    def forget(self) -> None:
        """Drop the consolidated states, which are those of an earlier step."""
        self._consolidated = None

    def dict_of(self, groups: Sequence[Options]) -> dict[str, Any]:
        """Return the plain dict. Raises `RuntimeError` if this rank has no consolidated states."""
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
        if masters:
            result["masters"] = dict(masters)
        return result

    def load(self, state_dict: Mapping[str, Any], groups: Sequence[Options]) -> None:
        """Load this rank's pieces and the options of the param groups from a plain dict. Local.

        Nothing changes unless the whole dict fits; `ValueError` names the first misfit.
        """
        state_dict = by_index(state_dict)
        saved_groups = state_dict.get("param_groups", [])
        buckets, inner = self._storage.buckets, self._inner
        known = [spec for spec in self._storage.layout.parameters if spec.group < len(saved_groups)]
        names = inner.elementwise | check_elementwise(inner, saved_groups, known)
        mapping = check(state_dict, groups, self._storage.listed(), names)
        for group, saved in zip(groups, state_dict["param_groups"], strict=True):
            options = {key: value for key, value in saved.items() if key not in ("params", "param_names")}
            group.update(copy.deepcopy(options))
        scatter(state_dict["state"], mapping, groups, buckets, names)
        scatter_masters(state_dict.get("masters", {}), mapping, buckets)
        inner.elementwise, self._consolidated = names, None


def gather(
    buckets: Sequence[Bucket],
    transport: Transport,
    shards: Transport,
    to: int | None,
    whole_here: bool,
    tag: Tag,
) -> tuple[dict[int, Any], dict[int, Tensor]] | None:
    """Gather whole states, and whole master weights if there are any, on rank ``to``. Collective.

    Args:
        buckets: all, with the states of this rank.
        transport: all ranks.
        shards: the ranks that share one copy. Those in the replica of ``to`` send.
        to: the rank that gets the result; None for every rank.
        whole_here: whether every rank holds whole states, so that nothing needs to travel.
        tag: the tag of the messages.

    Returns:
        (states, master weights), each by torch.optim's index; None on ranks that do not get them.
    """
    told = _state_facts(buckets)
    lists = [told] if whole_here else [json.loads(d) for d in transport.exchange(json.dumps(told).encode(), tag)]
    here, receivers = to in (None, transport.rank), range(shards.world_size)
    if to is not None:
        replica, place = divmod(to, shards.world_size)
        receivers = range(place, place + 1)
        if transport.rank // shards.world_size != replica or (whole_here and not here):
            return None
    result: dict[int, Any] = {}
    masters: dict[int, Tensor] = {}
    for bucket in buckets:
        spec, states = bucket.spec, bucket.states
        slots: dict[int, PieceState] = {}
        for entries in lists:
            for number, entry in entries[spec.index]["pieces"]:
                slots.setdefault(number, _decoded(entry))
        names: dict[str, str] = {}
        for entries in lists:
            names |= entries[spec.index]["flat"]
        if any(entries[spec.index]["master"] for entries in lists):
            names[_MASTER] = str(spec.dtypes.master_dtype)
        flats: dict[str, Tensor] = {}
        states.wait_for_copies()
        for number, (name, dtype) in enumerate(sorted(names.items())):
            if name == _MASTER:
                part = states.synced_weights()
            elif name in states.flat:
                part = states.flat[name].data
            else:
                part = torch.zeros(states.end - states.begin, dtype=_DTYPES[dtype], device=spec.device)
            if whole_here:
                flats[name] = part.cpu()
                continue
            one = Tag(Kind.GATHER, f"{tag.label}, {name}"[:70], tag.round, spec.index * 1000 + number)
            whole = gather_to(part, spec.cuts, shards, receivers, one)
            if whole is not None:
                flats[name] = whole.cpu()
        if here:
            for number, (slot, of) in enumerate(zip(spec.slots, bucket.specs, strict=True)):
                if number in slots:
                    values: dict[str, Any] = dict(slots[number].scalars)
                    for name in slots[number].elementwise:
                        values[name] = strided(flats[name], slot.offset, of.shape, of.stride).clone()
                    result[of.index] = values
                if _MASTER in flats:
                    masters[of.index] = strided(flats[_MASTER], slot.offset, of.shape, of.stride).clone()
        states.evict()
    return (dict(sorted(result.items())), dict(sorted(masters.items()))) if here else None


def _state_facts(buckets: Sequence[Bucket]) -> list[dict[str, Any]]:
    """Return the metadata of this rank's states by bucket: names, dtypes and scalars, but no tensors."""
    told = []
    for bucket in buckets:
        states, pieces = bucket.states, []
        for number, piece in enumerate(states.pieces):
            state = states.state_of(number)
            if state is not None:
                pieces.append((piece.slot, _encoded(state)))
        flat = {name: str(flat.data.dtype) for name, flat in states.flat.items()}
        has_master = states.master is not None and states.master.exists
        told.append({"pieces": pieces, "flat": flat, "master": has_master})
    return told


def gather_to(part: Tensor, cuts: Cuts, transport: Transport, receivers: Sequence[int], tag: Tag) -> Tensor | None:
    """Send every rank's ``part``, 1-D, to the ranks ``receivers``, and return the whole there, None elsewhere.

    Collective. ``cuts``: which elements of the whole each rank has.
    """
    whole: Tensor | None = None
    works: list[Work] = []
    if transport.rank in receivers:
        whole = torch.empty(cuts.bound(cuts.world_size), dtype=part.dtype, device=part.device)
        low, high = cuts.owned(transport.rank)
        whole[low:high].copy_(part)
        for source in transport.peers():
            low, high = cuts.owned(source)
            if low < high:
                works.append(transport.irecv(whole[low:high], source, tag, control=True, one_way=True))
    for receiver in receivers:
        if receiver != transport.rank and part.numel():
            works.append(transport.isend(part, receiver, tag, control=True, one_way=True))
    for work in works:
        work.wait()
    return whole


def packed_groups(groups: Sequence[Options], listed: Sequence[ParameterSpec]) -> list[Options]:
    """Return the param groups as torch.optim packs them: with indices for parameters.

    If all parameters of a group have names, the group has these, too.
    """
    by_group: dict[int, list[Any]] = {}
    for spec in sorted(listed, key=lambda spec: spec.index):
        by_group.setdefault(spec.group, []).append(spec)
    result = []
    for number, group in enumerate(groups):
        members = by_group.get(number, [])
        packed = {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
        if members and all(spec.names for spec in members):
            packed["param_names"] = [spec.name for spec in members]
        packed["params"] = [spec.index for spec in members]
        result.append(packed)
    return result


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


def check(
    state_dict: Mapping[str, Any],
    groups: Sequence[Options],
    listed: Sequence[ParameterSpec],
    elementwise: frozenset[str],
) -> dict[int, int]:
    """Check that a plain dict fits this optimizer, and return this optimizer's index -> the dict's index.

    Changes nothing. Raises `ValueError` that names the first difference.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise ValueError("a torch.optim state dict is needed, with 'state' and 'param_groups'")
    ours, theirs = packed_groups(groups, listed), state_dict["param_groups"]
    if len(ours) != len(theirs):
        raise ValueError(f"the state dict has {len(theirs)} param groups, this optimizer {len(ours)}")
    mapping: dict[int, int] = {}
    by_index = {spec.index: spec for spec in listed}
    masters: Mapping[int, Tensor] = state_dict.get("masters", {})
    _check_masters(masters)
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if len(mine["params"]) != len(other["params"]):
            raise ValueError(
                f"param group {number}: the state dict has {len(other['params'])} parameters, this optimizer "
                f"{len(mine['params'])}: it belongs to another model"
            )
        missing = sorted(set(mine) - set(other) - {"param_names"})
        if missing:
            raise ValueError(f"param group {number}: the state dict has no {missing[0]!r}: it belongs to another class")
        for position, index in enumerate(mine["params"]):
            known, saved = mine.get("param_names"), other.get("param_names")
            if known and saved and known[position] != saved[position]:
                raise ValueError(
                    f"param group {number}, parameter {position}: the state dict has {saved[position]!r}, this "
                    f"optimizer {known[position]!r}: it belongs to another model"
                )
            mapping[index] = other["params"][position]
            master = masters.get(mapping[index])
            if master is not None and tuple(master.shape) != by_index[index].shape:
                raise ValueError(
                    f"the master weights of {by_index[index].name!r} have shape {tuple(master.shape)} in the state "
                    f"dict, but the parameter has {by_index[index].shape}: it belongs to another model"
                )
            for name, value in state_dict["state"].get(mapping[index], {}).items():
                shape = by_index[index].shape
                if value is None:
                    continue
                if name in elementwise and tuple(value.shape) != shape:
                    raise ValueError(
                        f"state {name!r} of {by_index[index].name!r} has shape {tuple(value.shape)} in the state dict, "
                        f"but the parameter has {shape}: it belongs to another model"
                    )
                if name not in elementwise and isinstance(value, Tensor) and value.numel() != 1:
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
    buckets: Sequence[Bucket],
    elementwise: frozenset[str],
) -> None:
    """Copy this rank's pieces out of whole states. Local. The dict must have been checked."""
    for bucket in buckets:
        bucket.states.wait_for_copies()
        bucket.states.snapshot()
    for bucket in buckets:
        states, device, dtype = bucket.states, bucket.spec.device, bucket.spec.dtypes.master_dtype
        states.flat.clear()
        flat_values: dict[tuple[int, str], Tensor] = {}
        for number, piece in enumerate(states.pieces):
            slot, spec = bucket.spec.slots[piece.slot], bucket.specs[piece.slot]
            values = state.get(mapping[spec.index])
            if not values:
                states.set_state(number, None)
                continue
            fused = bool(groups[spec.group].get("fused") or groups[spec.group].get("capturable"))
            scalars: dict[str, Any] = {}
            names = []
            for name, value in values.items():
                if name not in elementwise or value is None:
                    scalars[name] = scalar_state(name, value, fused, device)
                    continue
                names.append(name)
                key = (piece.slot, name)
                if key not in flat_values:
                    flat_values[key] = flattened(value.detach().to(device, dtype), spec.stride)
                target = states.allocate(name, dtype)
                source = flat_values[key][piece.begin - slot.offset : piece.end - slot.offset]
                target.piece(piece).copy_(source)
            states.set_state(number, PieceState(tuple(names), scalars))
        states.evict()


def scalar_state(name: str, value: Any, on_device: bool, device: str) -> Any:
    """Return a copy of a scalar state, on the device where the class expects it.

    A step count on a device becomes fp32, as the class keeps it. Every other dtype stays, so that nothing depends on a
    reload.
    """
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if name == "step" and on_device:
        return value.detach().clone().to(device=device, dtype=torch.float32)
    return value.detach().clone()


def scatter_masters(masters: Mapping[int, Tensor], mapping: Mapping[int, int], buckets: Sequence[Bucket]) -> None:
    """Copy this rank's pieces out of whole master weights. Local. The dict must have been checked.

    Master weights that the dict lacks will be made from the parameters.
    """
    for bucket in buckets:
        states = bucket.states
        if states.master is None:
            continue
        states.master.forget()
        for piece in states.pieces:
            slot, spec = bucket.spec.slots[piece.slot], bucket.specs[piece.slot]
            whole = masters.get(mapping[spec.index])
            if whole is not None:
                values = flattened(whole.detach().to(bucket.spec.device, bucket.spec.dtypes.master_dtype), spec.stride)
                target = states.master.master[piece.begin - states.begin : piece.end - states.begin]
                target.copy_(values[piece.begin - slot.offset : piece.end - slot.offset])
        states.evict()
