"""The norm of a model whose parts are on several ranks: tensor, expert and pipeline parallelism by hand.

    tp 0   rank 0, rank 1 of one optimizer     own sum 0, sum of the replicated  \\
                                                                                  > own 0 + own 1 + replicated, once
    tp 1   rank 0, rank 1 of another one       own sum 1, sum of the replicated  /

Each optimizer forms its sums over its own ranks first. Then the ranks of the group that a clip was given, which have
one place in their optimizers, add up the parts: exact integers, so the norm is that of the whole model. Parameters that
every part has must have equal gradients, of which a digest is compared. A model that is cut in two ways has two groups,
which are added up in turn: along the second one nothing is replicated.

Knows: exact sums, digests, the group of a clip. Does not know: buckets, shards, what ranks agree on before.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from collectives import CollectiveError, Kind, MismatchError, Tag, Transport, as_a_whole

from ..config import transport_of
from ..core.layout import Layout
from ..core.norm import PowerSum
from ..runtime.joining import Joining

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # noqa: TID251 - the type alone
    from torch.distributed.device_mesh import DeviceMesh  # noqa: TID251 - the type alone

    Group = ProcessGroup | Transport | DeviceMesh
    """Ranks of a clip that hold the parts of a model."""

Replicated = Iterable[Tensor] | Callable[[str, Tensor], bool]
"""The parameters that every rank of the first group has: themselves, or a predicate of their names and themselves."""
Places = list[int] | None
"""Positions in the layout of an optimizer, in ascending order."""

_CALL = "clip_grad_norm_(over=...)"
_COUNT = "number of groups in over="
_SIZE = 1 << 64


@dataclass(frozen=True)
class NormPart:
    """What some gradients add to the norm of a whole model.

    Attributes:
        own: the sum over parameters that no other part has.
        shared: the sum over replicated parameters.
        digests: of each replicated parameter's gradient, of 64 bits; None if there is no gradient. Those of several
            ranks that share it add up.
    """

    own: PowerSum
    shared: PowerSum
    digests: tuple[int | None, ...]

    def pack(self) -> dict[str, Any]:
        """Return the part as JSON."""
        sums = {"own": self.own.to_bytes().hex(), "shared": self.shared.to_bytes().hex()}
        return {**sums, "digests": self.digests}

    @classmethod
    def unpack(cls, found: dict[str, Any]) -> NormPart:
        """Return the part that `pack` returned."""
        own, shared = (PowerSum.from_bytes(bytes.fromhex(found[key])) for key in ("own", "shared"))
        return cls(own, shared, tuple(found["digests"]))

    def add(self, other: NormPart) -> NormPart:
        """Return the part of two ranks of one optimizer, which hold different pieces of the same gradients."""
        digests = tuple(
            None if a is None or b is None else (a + b) % _SIZE
            for a, b in zip(self.digests, other.digests, strict=True)
        )
        return NormPart(self.own.merge(other.own), self.shared.merge(other.shared), digests)

    @property
    def total(self) -> PowerSum:
        """The sum over all parameters, each replicated one once."""
        return self.own.merge(self.shared)

    def of_a_part(self) -> NormPart:
        """Return the part of ranks that have no parameter in common with other ranks."""
        return NormPart(self.total, PowerSum(self.own.norm_type), ())


class _Listed(Protocol):
    """The parameters of an optimizer, as in a `ParameterStorage`."""

    layout: Layout

    @property
    def parameters(self) -> Sequence[Tensor]: ...

    def index(self, parameter: Tensor) -> int: ...


class _MeansInParts(Protocol):
    """The mean gradients of the shards that this rank owns, as in `ReducedGrads`."""

    def shards_of(self, positions: Set[int], *, inside: bool) -> list[Tensor]: ...

    def digests(self, positions: Iterable[int]) -> dict[int, int | None]: ...


class ModelPart:
    """The parameters of one optimizer as a part of a model, and the ranks of a clip that hold the other parts.

    ``replicated`` is, in every call, the positions in the layout of the parameters that all parts have, ascending.
    """

    def __init__(
        self,
        job_size: int,
        transport: Transport,
        shard_group: Transport,
        storage: _Listed,
        means: _MeansInParts,
        joining: Joining,
    ) -> None:
        self._others = job_size - transport.world_size  # processes of the job that are not in this optimizer
        self._transport, self._storage, self._means, self._joining = transport, storage, means, joining
        self._is_first_copy = transport.rank < shard_group.world_size  # among the ranks that hold the same shards
        self._known: list[tuple[object, Transport]] = []  # groups of earlier clips, which are few
        self._groups: list[Transport] = []  # inside a clip
        self._told = 0  # in this clip: groups whose ranks know how it went here
        self._token = os.urandom(8).hex()  # of this rank

    def warn_of_others(self) -> None:
        """Warn once, on rank 0, that the norm of a clip is that of a part, if the job has further processes. Local."""
        if self._others > 0 and self._transport.rank == 0:
            warnings.warn(
                f"clip_grad_norm_(): the norm is that of this optimizer's parameters alone, and {self._others} further "
                "processes of the job are not in its group: if they hold other parts of the same model, pass over=, "
                "the group of one rank of each part; if they train other models, filter this warning",
                stacklevel=3,
            )
        self._others = 0

    def chosen(self, replicated: Replicated, problem: Exception | None) -> dict[str, Any]:
        """Return the positions that the user's argument chooses, and an error text if it is invalid, or ``problem``.
        Local."""
        if problem is not None:
            return {"replicated": [], "problem": f"{type(problem).__name__}: {problem}"}
        try:
            if isinstance(replicated, nn.Module):  # which is callable, and not to be called here
                raise TypeError("a module is neither parameters nor a predicate: give module.parameters()")
            if callable(replicated):
                named = zip(self._storage.layout.parameters, self._storage.parameters, strict=True)
                found = [place for place, (spec, tensor) in enumerate(named) if replicated(spec.name, tensor)]
            else:
                tensors = [replicated] if isinstance(replicated, Tensor) else replicated
                found = sorted({self._storage.index(tensor) for tensor in tensors})
        except Exception as error:
            return {"replicated": [], "problem": f"replicated=: {type(error).__name__}: {error}"}
        return {"replicated": found}

    @contextmanager
    def over(self, groups: Group | Sequence[Group]) -> Iterator[Exception | None]:
        """Return a context in which `whole` is over the ranks of one or several groups, too. Collective among them.

        An error inside is one on all of these ranks. The context's value is an error if one of the groups cannot be
        used; the ranks of this optimizer do not know it yet. The other parts wait for this rank then: those of earlier
        clips get the error at once, others at their time limit.
        """
        several = groups if isinstance(groups, (list, tuple)) else [groups]
        self._groups, self._told, problem = [], 0, None
        try:
            if not several:
                raise ValueError("over=[] has no group: pass that of the ranks with the other parts of the model")
            for group in several:
                self._groups.append(self._connected(group))
        except (TypeError, ValueError) as error:
            problem = error
        try:
            yield problem
        except Exception as error:
            waiting = self._groups if problem is None else [known for _, known in reversed(self._known)]
            for group in waiting[self._told :]:
                if not group.broken:
                    with suppress(CollectiveError):  # the first error says more
                        self._exchange(group, {"problem": f"{type(error).__name__}: {error}"})
            raise
        finally:
            self._groups = []

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Return the context of a clip without groups. Local.

        If other ranks of this optimizer clip over groups, those of earlier clips, in which parts wait for this rank,
        get the error. If they do not either, nothing here shows that other parts wait: a clip without groups is legal.
        """
        try:
            yield
        except MismatchError as error:
            for _, group in self._known if _CALL in str(error) else ():
                if not group.broken:
                    with suppress(CollectiveError):  # the first error says more
                        self._exchange(group, {"problem": f"{type(error).__name__}: {error}"})
            raise

    def _connected(self, group: Any) -> Transport:
        found = next((transport for known, transport in self._known if known == group), None)  # mesh["tp"] is made anew
        if found is None or found.broken:
            found = transport_of(group).fork()
            self._known = [(group, found), *(entry for entry in self._known if entry[0] != group)]
        return found

    def _exchange(self, group: Transport, message: dict[str, Any]) -> list[dict[str, Any]]:
        self._told += 1
        with as_a_whole(self._transport, f"in {_CALL}", CollectiveError):
            tag = Tag(Kind.EXCHANGE, f"{_CALL}, which each rank of the group calls")
            told = group.exchange(json.dumps(message).encode(), tag)
        return [json.loads(data) for data in told]

    def whole(self, replicated: Sequence[int], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> PowerSum:
        """Return the sum over all gradients of the whole model. Collective; arguments: those of the clip.

        Inside `join` ranks that have run out of micro-batches follow the others' call without its group, so the others
        let them have the result.

        Raises:
            ValueError: on every rank, if arguments, names or the gradients of a replicated parameter differ, or if
                ranks have different places in their optimizers.
            RuntimeError: the same for ranks that failed before, with their reason.
        """
        arguments = {"max_norm": max_norm, "norm_type": norm_type, "error_if_nonfinite": error_if_nonfinite}
        if not self._joining.active:
            arguments[_COUNT] = len(self._groups)
        mine = self._part(replicated, arguments)
        if not self._joining.active:
            return self._merge(mine, replicated, arguments).total
        found: dict[str, Any] = {}
        if self._groups:
            try:
                found = self._merge(mine, replicated, arguments).pack()
            except (ValueError, RuntimeError) as error:
                found = {"problem": str(error)}
        told = self._transport.exchange(json.dumps(found).encode(), Tag(Kind.EXCHANGE, "the whole model's norm"))
        answers = [theirs for theirs in map(json.loads, told) if theirs]
        for theirs in answers:
            if "problem" in theirs:
                raise ValueError(theirs["problem"])
        return NormPart.unpack(answers[0]).total

    def _part(self, replicated: Sequence[int], arguments: dict[str, float]) -> NormPart:
        """Return what the gradients of this optimizer add. Collective among its ranks."""
        chosen, first = frozenset(replicated), self._is_first_copy
        own, shared = (
            PowerSum.of(self._means.shards_of(chosen, inside=inside) if first else [], arguments["norm_type"])
            for inside in (False, True)
        )  # host synchronisation: exact integers, which devices do not have
        digests = self._means.digests(replicated)
        held = tuple(digests[place] if first or digests[place] is None else 0 for place in replicated)
        part = NormPart(own, shared, held).pack()
        message = {"places": list(replicated), "arguments": arguments, **part}
        told = self._transport.exchange(json.dumps(message).encode(), Tag(Kind.EXCHANGE, "a part of a gradient norm"))
        found = [json.loads(data) for data in told]
        for rank, theirs in enumerate(found):
            _compare_arguments(rank, found[0], theirs, "rank 0")
            if theirs["places"] != found[0]["places"]:
                names = [self._names(each["places"]) for each in (found[0], theirs)]
                raise ValueError(f"{_CALL}: replicated= has {names[0]} on rank 0, and {names[1]} on rank {rank}")
        return reduce(NormPart.add, map(NormPart.unpack, found))

    def _names(self, places: Iterable[int]) -> list[str]:
        return [self._storage.layout.parameters[place].name for place in places]

    def _merge(self, part: NormPart, replicated: Sequence[int], arguments: dict[str, float]) -> NormPart:
        """Return the part of all ranks of the groups. Collective among them."""
        names, members = self._names(replicated), [self._token]
        for group in self._groups:
            place = [self._transport.rank, self._transport.world_size]
            mine = {"arguments": arguments, "place": place, "names": names, "members": members, **part.pack()}
            told = self._exchange(group, mine)
            for rank, theirs in enumerate(told):
                if "problem" in theirs:
                    raise RuntimeError(f"{_CALL}: rank {rank} of the group failed: {theirs['problem']}")
            for rank, theirs in enumerate(told):
                _compare(rank, told[0], theirs)
            part, names = _added(told), []
            members = [member for theirs in told for member in theirs["members"]]
            if len(set(members)) < len(members):
                raise ValueError(
                    f"{_CALL}: a rank is in two of the groups, beside this one, so its gradients would count twice: "
                    'pass groups along different dimensions, as [mesh["tp"], mesh["pp"]]'
                )
        return part


def _added(told: Sequence[dict[str, Any]]) -> NormPart:
    """Return the part of all ranks of a group. Raises `ValueError` if gradients of a replicated parameter differ."""
    orders = [dict(zip(theirs["names"], theirs["digests"], strict=True)) for theirs in told]
    for name, first in orders[0].items():
        for rank, theirs in enumerate(orders):
            if theirs[name] != first:
                raise ValueError(_differs(name, rank, first, theirs[name]))
    parts = [NormPart.unpack(theirs) for theirs in told]
    own = reduce(PowerSum.merge, (theirs.own for theirs in parts))
    return NormPart(own, parts[0].shared, ()).of_a_part()


def _compare(rank: int, first: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Raise `ValueError` if a rank of the group has made another call than rank 0."""
    if theirs["place"] != first["place"]:
        (a, of_a), (b, of_b) = first["place"], theirs["place"]
        raise ValueError(
            f"{_CALL}: rank 0 of the group is rank {a} of {of_a} in its optimizer, and rank {rank} is rank {b} of "
            f'{of_b}: pass the ranks that hold the other parts of the model for one place, as mesh["tp"] does'
        )
    _compare_arguments(rank, first, theirs, "rank 0 of the group")
    ours, others = set(first["names"]), set(theirs["names"])
    if ours != others:
        where, name = (0, min(ours - others)) if ours - others else (rank, min(others - ours))
        raise ValueError(
            f"{_CALL}: replicated= has {name!r} on rank {where} of the group, but not on rank {rank - where}: name a "
            "parameter on every rank of the group, or on none; where the model is cut in two ways, pass both groups, "
            'as over=[mesh["tp"], mesh["pp"]]: replicated parameters are those of all ranks of the first'
        )


def _compare_arguments(rank: int, first: dict[str, Any], theirs: dict[str, Any], where: str) -> None:
    """Raise `ValueError` if a rank has other arguments than rank 0, which is ``where``."""
    for key, value in first["arguments"].items():
        if (other := theirs["arguments"].get(key)) != value:
            raise ValueError(f"{_CALL}: {key} is {value} on {where}, and {other} on rank {rank}")


def _differs(name: str, rank: int, first: int | None, theirs: int | None) -> str:
    if first is None or theirs is None:
        has, lacks = (rank, 0) if first is None else (0, rank)
        return (
            f"{_CALL}: the replicated parameter {name!r} has a gradient on rank {has} of the group, and none on rank "
            f"{lacks}: use it on every rank of the group, or on none"
        )
    return (
        f"{_CALL}: the gradient of the replicated parameter {name!r} differs between ranks 0 and {rank} of the group: "
        "add up what their parts give in the backward, on every rank alike, or leave it out of replicated="
    )
