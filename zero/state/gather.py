"""Brings the states of all ranks to one rank, or to every rank.

Knows: which rank owns which piece. Does not know: torch.optim's dicts. Bytes from a peer are never unpickled: names and
scalars travel as JSON, tensors as bytes.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from collectives import Collective, Kind, Tag, Transport, Work

from ..core.bits import as_bytes, laid_out, noted_stride, strided
from ..core.layout import BucketSpec, Cuts, OwnerCuts, ParameterSpec
from ..core.runs import PieceState, Rules, joined
from ..core.stage import Placement
from ..core.statetree import DTYPES, NAMES, Rebuild, decode, encode, inline
from ..runtime.bucket import Bucket
from ..runtime.flat_buffer import FlatBuffer, gather_slot

_MASTER = "(master weights)"  # a key among the flat tensors of a bucket's states


@dataclass(frozen=True)
class _StateFacts:
    """The states of a bucket's pieces on one rank, as JSON. Of large tensors it has dtype and shape.

    Attributes:
        pieces: slot, names of flat states, the other states, dtypes and shapes of the large tensors in these by name,
            and strides that are not row-major.
        flat: the dtypes of the flat tensors, by name.
        has_master: whether there are master weights.
    """

    pieces: list[tuple[int, list[str], Any, dict[str, tuple[Any, ...]]]]
    flat: dict[str, str]
    has_master: bool

    def large_bytes(self) -> int:
        """Return the bytes of the large tensors."""
        return sum(_nbytes(*facts) for _, _, _, large in self.pieces for facts in large.values())

    def states(self, data: Tensor | None, kinds: Mapping[str, Rebuild]) -> Iterator[tuple[int, PieceState]]:
        """Yield (slot, state). ``data``: the bytes of the large tensors, one after the other; None: there are none.

        ``kinds``: of `decode`.
        """
        begin = 0
        for slot, names, others, large in self.pieces:
            tensors: dict[str, Tensor] = {}
            for name, (dtype, shape, *stride) in large.items():
                assert data is not None
                end = begin + _nbytes(dtype, shape)
                tensor = data[begin:end].clone().view(DTYPES[dtype]).view(shape)
                tensors[name] = laid_out(tensor, *stride) if stride else tensor
                begin = end
            yield slot, PieceState(tuple(names), decode(others, tensors, kinds))


def _nbytes(dtype: str, shape: Sequence[int], *_: object) -> int:
    return math.prod(shape) * DTYPES[dtype].itemsize


def gather(
    buckets: Sequence[Bucket],
    transport: Transport,
    shard_group: Transport,
    to: int | None,
    whole_here: bool,
    tag: Tag,
    kinds: Sequence[Mapping[str, Rebuild]],
    rules: Callable[[ParameterSpec], Rules],
) -> tuple[dict[int, Any], dict[int, Tensor]] | None:
    """Gather whole states, and whole master weights if there are any, on rank ``to``. Collective.

    Args:
        buckets: all, with the states of this rank.
        transport: all ranks.
        shard_group: the ranks that share one copy. Those in the replica of ``to`` send.
        to: the rank that gets the result; None for every rank.
        whole_here: whether every rank holds whole states, so that nothing needs to travel.
        tag: the tag of the messages.
        kinds: of `decode`, by the number of the class.
        rules: returns those of a parameter, of `joined`.

    Returns:
        (states, master weights), each by torch.optim's index; None on ranks that do not get them.
    """
    described, large, problem = _described(buckets, transport.rank_label)
    lists = [described]
    if not whole_here:
        found = [json.loads(data) for data in transport.exchange(json.dumps([described, problem]).encode(), tag)]
        problem = next((other for _, other in found if other), None)
        first = transport.rank // shard_group.world_size * shard_group.world_size
        lists = [facts for facts, _ in found[first : first + shard_group.world_size]]  # other replicas hold the same
    if problem is not None:
        raise TypeError(problem)
    here, receivers = to in (None, transport.rank), receivers_of(to, transport, shard_group)
    if not receivers or (whole_here and not here):
        return None

    def one(name: str, index: int) -> Tag:
        return Tag(Kind.GATHER, f"{tag.label}, {name}"[:70], tag.round, index)

    result: dict[int, Any] = {}
    masters: dict[int, Tensor] = {}
    for bucket in buckets:
        spec, states = bucket.spec, bucket.states
        facts = [_StateFacts(*rank[spec.index]) for rank in lists]
        ends = list(itertools.accumulate((each.large_bytes() for each in facts), initial=0))
        data: Tensor | None = None
        if ends[-1]:
            mine = torch.cat([as_bytes(tensor) for tensor in large[spec.index]] or [torch.empty(0, dtype=torch.uint8)])
            cuts = OwnerCuts(ends[-1], len(facts), tuple(range(len(facts))), tuple(ends[:-1]))
            large_tag = one("large states", spec.index * 1000 + 999)
            data = mine if whole_here else gather_to(mine.to(spec.device), cuts, shard_group, receivers, large_tag)
        names: dict[str, str] = {}
        for each in facts:
            names |= each.flat
        if any(each.has_master for each in facts):
            names[_MASTER] = NAMES[spec.dtypes.master_dtype]
        flats: dict[str, Tensor] = {}
        states.wait_for_copies()
        for number, (name, dtype) in enumerate(sorted(names.items())):
            if name == _MASTER:
                part = states.master.synced()
            elif name in states.flat:
                part = states.flat[name].data
            else:
                part = torch.zeros(states.end - states.begin, dtype=DTYPES[dtype], device=spec.device)
            of_name = one(name, spec.index * 1000 + number)
            whole = whole_of(partial(states.over, part), spec, to, transport, shard_group, of_name, control=True)
            if whole is not None:
                flats[name] = whole.cpu()
        if here:
            slots: dict[int, list[PieceState]] = {}  # of each piece that has states, in order
            of_class = bucket.specs[0].optimizer_class
            for each, begin, end in zip(facts, ends, ends[1:], strict=False):
                for number, state in each.states(None if data is None else data[begin:end].cpu(), kinds[of_class]):
                    slots.setdefault(number, []).append(state)
            for number, (slot, of) in enumerate(zip(spec.slots, bucket.specs, strict=True)):
                if number in slots:
                    values: dict[str, Any] = dict(slots[number][0].scalars)
                    if of.grain.divided:
                        values = joined([piece.scalars for piece in slots[number]], of.shape, rules(of))
                    for name in slots[number][0].elementwise:
                        values[name] = strided(flats[name], slot.offset, of.shape, of.stride).clone()
                    result[of.index] = values
                if _MASTER in flats:
                    masters[of.index] = strided(flats[_MASTER], slot.offset, of.shape, of.stride).clone()
        states.evict()
    return (dict(sorted(result.items())), dict(sorted(masters.items()))) if here else None


def _described(buckets: Sequence[Bucket], rank: str) -> tuple[list[Any], list[list[Tensor]], str | None]:
    """Return the facts of this rank's states by bucket, as JSON; the large tensors of each; and an error text, or None.

    Large are those of more than one element: states that whole parameters may have.
    """
    described: list[Any] = []
    tensors: list[list[Tensor]] = []
    problem: str | None = None
    for bucket in buckets:
        states, pieces = bucket.states, []
        tensors.append([])
        for number, piece in enumerate(states.pieces):
            state = states.state_of(number)
            if state is None:
                continue
            try:
                place = f"optimizer.state[{bucket.specs[piece.slot].name!r}]"
                others, found = encode(dict(state.scalars), place, wrappers=True)
            except TypeError as error:
                problem = f"{rank}: {error}"
                continue
            small = {name: value for name, value in found.items() if value.numel() <= 1}
            large = {name: value for name, value in found.items() if name not in small}
            tensors[-1] += [value.cpu().contiguous() for value in large.values()]
            shapes = {name: _facts(value) for name, value in large.items()}
            pieces.append((piece.slot, list(state.elementwise), inline(others, small), shapes))
        flat = {name: NAMES[flat.data.dtype] for name, flat in states.flat.items()}
        described.append((pieces, flat, bool(states.master.kept())))
    return described, tensors, problem


def gather_master(bucket: Bucket, number: int, rank: int, collective: Collective) -> Tensor:
    """Return a copy of the whole master weights of a slot, in its parameter's shape. Collective.

    ``rank``: among those that share one copy.
    """
    spec, states = bucket.specs[number], bucket.states
    tag = Tag(Kind.ALL_GATHER, f"full_master of {spec.name!r}", index=bucket.spec.index)
    whole = gather_slot(states.synced_weights(), bucket.spec.slots[number], bucket.spec, rank, collective, tag)
    return whole.as_strided(spec.shape, spec.stride)


def receivers_of(to: int | None, transport: Transport, shard_group: Transport) -> range:
    """Return which ranks of ``shard_group`` receive what is sent to rank ``to`` of ``transport``: one of them, none if
    that rank is in another replica, or all if it is None."""
    ranks = shard_group.world_size
    if to is None:
        return range(ranks)
    replica, place = divmod(to, ranks)
    return range(place, place + 1) if replica == transport.rank // ranks else range(0)


def whole_of(
    held: Callable[[], FlatBuffer],
    bucket: BucketSpec,
    to: int | None,
    transport: Transport,
    shard_group: Transport,
    tag: Tag,
    *,
    control: bool = False,
) -> Tensor | None:
    """Return all elements of a bucket on rank ``to``, or on every rank if it is None; None elsewhere. Collective.

    ``held`` returns what this rank has of them: if that is all, the result may be the same memory.
    """
    receivers = receivers_of(to, transport, shard_group)
    if not receivers:  # other ranks hold the same, and send it
        return None
    here = held()
    if here.placement is Placement.WHOLE or shard_group.world_size == 1:
        return here.data if shard_group.rank in receivers else None
    return gather_to(here.data, bucket.cuts, shard_group, receivers, tag, control=control)


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    """Return dtype and shape of a large tensor, and its strides if they are not row-major."""
    stride = noted_stride(tensor)
    return (NAMES[tensor.dtype], list(tensor.shape), *([] if stride is None else [stride]))


def gather_to(
    part: Tensor, cuts: Cuts, transport: Transport, receivers: Sequence[int], tag: Tag, *, control: bool = True
) -> Tensor | None:
    """Send every rank's ``part``, 1-D, to the ranks ``receivers``, and return the whole there, None elsewhere.

    Collective. ``cuts``: which elements of the whole each rank has; ``control``: as which bytes they count.
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
                works.append(transport.irecv(whole[low:high], source, tag, control=control, one_way=True))
    for receiver in receivers:
        if receiver != transport.rank and part.numel():
            works.append(transport.isend(part, receiver, tag, control=control, one_way=True))
    for work in works:
        work.wait()
    return whole
