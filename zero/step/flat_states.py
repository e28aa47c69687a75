"""What one bucket's interval is stepped as: runs of neighbouring pieces, and the flat tensors of their states.

Knows: runs, and that a class keeps two kinds of state for a parameter: tensors as large as the parameter, which are
views of flat tensors here, and scalars (the step count). Does not know: when a class steps, ranks, gradients' origin.

    interval of a bucket   | a a a b b b b . . c c |       . is padding, b ends ragged
    present, equal state     x x x x x x x     x x
    runs                   [ a a a b b b b ]   [ c c ]     1-D views; the class sees each as a parameter

A run merges neighbouring pieces of one group whose scalars are equal, and ends where padding follows, so that the last
elements of a parameter stay the last ones of a tensor: the class then does the same arithmetic as on the parameters
themselves. For paths that loop over tensors a run is cut every `CUT` elements, which keeps it in the cache: on the CPU,
for on an accelerator a launch costs more than a cache saves.
"""

from __future__ import annotations

import bisect
import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.layout import Bucket, Piece
from .master_weights import MasterWeights
from .offload import OffloadedStates
from .staging import Staging

CUT = 1 << 16
Options = dict[str, Any]


@dataclass
class _FlatParam:
    """A 1-D view that the class steps as one parameter. ``pieces`` index the interval's pieces, first and last + 1;
    a cut run shares its piece with its neighbours."""

    parameter: Tensor
    begin: int
    end: int
    first: int
    last: int
    views: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class PieceState:
    """What the class keeps for a piece: the names of its flat tensors, and its scalars."""

    elementwise: tuple[str, ...]
    scalars: Mapping[str, Any]

    def same(self, other: PieceState | None) -> bool:
        return other is not None and self.elementwise == other.elementwise and _plain(self) == _plain(other)


def _plain(state: PieceState) -> dict[str, Any]:
    # host synchronisation: of step counts that lie on a device, only where other parameters were used than before
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in state.scalars.items()}


class BucketStates:
    """The optimizer states of one bucket's interval on this rank, and the runs over it."""

    def __init__(
        self,
        instance: torch.optim.Optimizer,
        bucket: Bucket,
        begin: int,
        end: int,
        parameters: Tensor,
        groups: Sequence[int],
        scalars: Sequence[bool],
        master: MasterWeights | None = None,
        store: OffloadedStates | None = None,
    ) -> None:
        """``instance``: of the class, for this bucket alone; ``parameters``: of the interval, 1-D; ``master``: what is
        updated instead, where that is something else; of each slot ``groups``, and ``scalars``: no dimensions;
        ``store``: where states are kept, if not beside the parameters."""
        self._store = store
        self.instance = instance
        self.scalars = scalars
        self.bucket, self.begin, self.end = bucket, begin, end
        self._parameters, self.master = parameters, master
        self.pieces: tuple[Piece, ...] = bucket.pieces(begin, end)
        self.groups = [groups[piece.slot] for piece in self.pieces]
        self.flat: dict[str, Tensor] = {}
        self._states: list[PieceState | None] = [None] * len(self.pieces)
        self._staging = Staging(parameters.device)
        self.stepped_groups: set[int] = set()  # of the runs
        self.runs: list[_FlatParam] = []
        self._key: tuple[Any, ...] | None = None

    @property
    def weights(self) -> Tensor:
        """What is updated, 1-D."""
        return self._parameters if self.master is None else self.master.master

    def synced_weights(self) -> Tensor:
        """The weights as the next step would begin with, 1-D, in the master's dtype. Changes nothing."""
        if self.master is None:
            return self._parameters
        return self.master.synced()

    def cast(self, present: Sequence[bool]) -> None:
        """Round the master weights of the pieces that were ``present`` in a step, neighbours at once."""
        if self.master is not None:
            for is_present, pieces in itertools.groupby(zip(self.pieces, present, strict=True), lambda pair: pair[1]):
                members = [piece for piece, _ in pieces]
                if is_present:
                    self.master.cast(members[0].begin - self.begin, members[-1].end - self.begin)

    def plan(self, present: tuple[bool, ...], cut: tuple[bool, ...]) -> None:
        """Make the runs over the pieces that are ``present``; ``cut``: of each group, whether long runs are cut."""
        key = (present, cut)
        if key == self._key:
            return
        self.snapshot()
        self._key = key
        self.stepped_groups = set()
        index = 0
        while index < len(self.pieces):
            last = index + 1
            if present[index]:
                while last < len(self.pieces) and present[last] and self._joins(last):
                    last += 1
                self._make_runs(index, last, cut[self.groups[index]])
                self.stepped_groups.add(self.groups[index])
            index = last

    def _joins(self, index: int) -> bool:
        """True when the piece continues the one before it."""
        before, state = self._states[index - 1], self._states[index]
        equal = state is None if before is None else before.same(state)
        if self._is_scalar(index) or self._is_scalar(index - 1):
            return False
        touching = self.pieces[index - 1].end == self.pieces[index].begin
        return touching and self.groups[index - 1] == self.groups[index] and equal

    def _is_scalar(self, index: int) -> bool:
        """True for a parameter without dimensions, which torch promotes as it promotes a number: it stays one."""
        return self.scalars[self.pieces[index].slot]

    def _make_runs(self, first: int, last: int, cut: bool) -> None:
        begin, end = self.pieces[first].begin - self.begin, self.pieces[last - 1].end - self.begin
        weights = self.weights
        step = CUT if cut and weights.device.type == "cpu" else max(1, end - begin)
        state = self._states[first]
        for low in range(begin, max(end, begin + 1), step):
            high = min(low + step, end)
            shape = () if self._is_scalar(first) else (high - low,)
            parameter = weights[low:high].detach().view(shape).requires_grad_()
            run = _FlatParam(parameter, low, high, first, last)
            if state is not None:
                run.views = {name: self.flat[name][low:high].view(shape) for name in state.elementwise}
                self.instance.state[parameter] = {**copy.deepcopy(dict(state.scalars)), **run.views}
            self.runs.append(run)

    def adopt_states(self, names: frozenset[str]) -> None:
        """Take states that the class made or replaced into the flat tensors."""
        for run in self.runs:
            state: dict[str, Any] = self.instance.state.get(run.parameter, {})
            for name, value in state.items():
                if value is run.views.get(name) or not is_elementwise(value, run.parameter):
                    continue
                if run.parameter.dim() == 0 and name not in names:
                    continue  # a scalar of the class, not of the parameter
                if name not in self.flat:
                    self.flat[name] = self._room(name, value.dtype)
                target = self._staging.tensors.get(name, self.flat[name])
                view = target[run.begin : run.end].view(run.parameter.shape)
                view.copy_(value)
                state[name] = run.views[name] = view

    def snapshot(self) -> None:
        """Note each piece's state and forget the runs."""
        for run in self.runs:
            state = self.instance.state.pop(run.parameter, None)
            if state:
                scalars = {name: value for name, value in state.items() if name not in run.views}
                noted = PieceState(tuple(run.views), scalars)
                self._states[run.first : run.last] = [noted] * (run.last - run.first)
        self.runs, self._key = [], None

    def state_of(self, piece: int) -> PieceState | None:
        """The state of a piece, live."""
        place = bisect.bisect_right(self.runs, piece, key=lambda run: run.first) - 1
        if place < 0 or piece >= self.runs[place].last:
            return self._states[piece]
        run = self.runs[place]
        state = self.instance.state.get(run.parameter)
        if not state:
            return None
        scalars = {name: value for name, value in state.items() if name not in run.views}
        return PieceState(tuple(run.views), scalars)

    def set_state(self, piece: int, state: PieceState | None) -> None:
        """Replace the state of a piece; `snapshot` must have been called."""
        self._states[piece] = state

    def allocate(self, name: str, dtype: torch.dtype) -> Tensor:
        """The flat tensor of a state, made where there is none yet or it is of another dtype."""
        if name not in self.flat or self.flat[name].dtype != dtype:
            self.flat[name] = self._room(name, dtype)
        return self.flat[name]

    def _room(self, name: str, dtype: torch.dtype) -> Tensor:
        if self._store is not None:
            return self._store.tensor(name, dtype)
        return torch.zeros(self.end - self.begin, dtype=dtype, device=self._parameters.device)

    # -- where states are kept elsewhere ------------------------------------------------------------------------------

    def kept(self) -> list[Tensor]:
        """The tensors that are kept elsewhere."""
        return [] if self._store is None else self._store.tensors()

    def prefetch(self) -> None:
        """The states will be needed soon."""
        if self._store is not None:
            self._store.prefetch()
            if self._store.is_copied_ahead:
                self._fetch()

    def evict(self) -> None:
        """The states will not be needed for a while."""
        if self._store is not None:
            self._store.evict()

    def stage(self) -> None:
        """Copy states that are kept on another device to that of the weights, where the class steps them."""
        if self.runs and not self._staging.tensors:
            self._fetch()
        self._staging.wait()
        self._point_to(self._staging.tensors)

    def _fetch(self) -> None:
        self._staging.fetch({name: flat for name, flat in self.flat.items() if self._is_elsewhere(flat)})

    def _is_elsewhere(self, flat: Tensor) -> bool:
        return flat.device != self._parameters.device

    def wait_for_copies(self) -> None:
        """Wait until what was copied back from a device can be read."""
        if self._store is not None and self._parameters.device.type != "cpu":
            torch.accelerator.synchronize(self._parameters.device)  # host synchronisation: who reads is on the host

    def unstage(self) -> None:
        """Begin to copy what was staged back. Until `let_go` the copies keep their memory."""
        self._staging.put_back(self.flat)
        self._point_to({name: self.flat[name] for name in self._staging.tensors})

    def let_go(self) -> None:
        """Give up the memory of what was staged."""
        self._staging.let_go()

    def _point_to(self, flats: Mapping[str, Tensor]) -> None:
        """Let the class see its states in these tensors."""
        for run in self.runs if flats else ():
            for name in run.views.keys() & flats.keys():
                view = flats[name][run.begin : run.end].view(run.parameter.shape)
                run.views[name] = self.instance.state[run.parameter][name] = view


def is_elementwise(value: Any, parameter: Tensor) -> bool:
    """True of a state that is as large as the parameter."""
    return isinstance(value, Tensor) and value.shape == parameter.shape
