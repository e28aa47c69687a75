"""The user's optimizer class, run over the flat pieces of parameters that this rank steps, by groups of buckets.

Which buckets an optimizer's class steps in one call.

    accelerator    stages 0, 3    one group for all buckets of a class, a device and a set of dtypes
                   stages 1, 2    four, in the layout's order: the first are gathered while the next is stepped
    CPU, offload                  each bucket by itself: what is stepped stays in the caches, and states in few buffers

Knows: the class's instances, their options, how a step changes these, and which buckets one call steps. Does not know:
how runs and states are laid out (`flat_states`), ranks, the origin of gradients, communication.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from collectives.torch_internals import foreach_copy_

from ..core.bits import is_launched
from ..core.grain import BY_BLOCK
from ..core.layout import BucketSpec, Layout, ParameterSpec
from ..core.rounding import steps_of
from ..core.runs import BlockRule, Rules, StackRule, merged
from ..core.stage import STATES_AHEAD, STATES_BEHIND, Stage, step_device
from ..core.statetree import Rebuild
from ..runtime.flat_buffer import FlatBuffer
from ..runtime.flat_states import BucketStates, Options, sync_from_params
from .arguments import check_takes_parameters

Mode = Literal["train", "eval"]
Call = Callable[[torch.optim.Optimizer], object]  # with an instance of the class, over the runs of its buckets

NO_OPTIONS = ("params", "param_names", "optimizer_class")  # keys of a param group that the class does not see


class BucketUpdate(NamedTuple):
    """A step of one bucket's interval.

    Attributes:
        states: of the interval.
        gradient: the mean over the interval; None if the bucket has none, or the call is no step.
        present: whether each piece is stepped, in a byte, 0 or 1.
        event: returns the context of the step; of a group's buckets, that of the first is used.
        done: called after the step; None: there is nothing to call.
        begin: called before it, likewise.
        optimizer_class: the number of the class that steps it.
    """

    states: BucketStates
    gradient: FlatBuffer | None
    present: bytes
    event: Callable[[], AbstractContextManager[Any]] = nullcontext
    done: Callable[[], object] | None = None
    begin: Callable[[], object] | None = None
    optimizer_class: int = 0


def unhooked_step(optimizer: torch.optim.Optimizer) -> None:
    """Call the class's own ``step``, without torch's step hooks, which belong to the user's object alone."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer)


class UserOptimizer:
    """The user's class: one instance for each group of buckets, whose parameters are the runs of these.

    So groups can be stepped one after the other, while counters that the class keeps for itself are as if it had been
    called once. `step_groups` says which buckets are a group; they have one instance. The ``groups`` given to the
    methods are the user's own param groups that have this class, by their numbers: their options are used, their
    parameters are not. ``arguments`` are those of the class's constructor.
    """

    def __init__(
        self, optimizer_class: type[torch.optim.Optimizer], defaults: Options, example: Options | None = None
    ) -> None:
        """``example``: options of a param group, for a class that takes no parameters without options (Muon's flags).

        Raises the class's own errors about the arguments, and `TypeError` if it takes no parameters.
        """
        self.optimizer_class, self.arguments, self._example = optimizer_class, defaults, dict[str, Any]()
        try:
            plain = self._over_one()
        except Exception as error:
            check_takes_parameters(optimizer_class, error)
            if not example:
                raise
            self._example = example
            plain = self._over_one()
        self.defaults: Options = dict(plain.defaults)
        # the names of the options that were given for param groups, or that the class has made of them
        self._own_options: set[str] = {*plain.param_groups[0]}
        self._begins_with_state = bool(plain.state)
        self._later_begin_with_state = self._begins_with_state and self._makes_later_states(plain)
        self.elementwise: frozenset[str] = frozenset()  # the names of the states that are as large as their parameter
        self.kinds: dict[str, Rebuild] = {}  # the tensor subclasses among states that a trial has made
        # whether it exchanges the weights between training and evaluation, as schedule-free classes do
        self.has_modes = all(callable(getattr(optimizer_class, mode, None)) for mode in ("train", "eval"))
        self._rules: dict[str, BlockRule] = {}  # of the states that have values for blocks of elements
        self._per_block: frozenset[str] = frozenset()  # names of states that each block of a stack has

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.optimizer_class.__name__

    @property
    def qualified_name(self) -> str:
        """The name of the class, with its module."""
        return f"{self.optimizer_class.__module__}.{self.optimizer_class.__qualname__}"

    def note_options(self, other: UserOptimizer) -> None:
        """Note that the options of param groups of an ``other`` one, of the same class, may be given to this one."""
        self._own_options = self._own_options | other._own_options

    def note_elementwise(self, names: frozenset[str]) -> None:
        """Note the names of further states that are as large as their parameter."""
        self.elementwise |= names

    def note_kinds(self, kinds: Mapping[str, Rebuild]) -> None:
        """Note the tensor subclasses among states."""
        self.kinds = {**self.kinds, **kinds}

    def note_rules(self, rules: Mapping[str, BlockRule]) -> None:
        """Note how the states of parameters that are cut between blocks are divided.

        Raises `ValueError` if those of other parameters are divided otherwise.
        """
        try:
            self._rules = merged(self._rules, rules)
        except ValueError as error:
            raise ValueError(
                f"{self.name} cannot be cut between blocks with these options: {error} with those that it has. Build "
                'the optimizer with these options, or leave out partition="block"'
            ) from error

    def note_per_block(self, names: frozenset[str]) -> None:
        """Record the names of states that each block of a stack has, apart from those as large as the block."""
        self._per_block |= names

    def rules_of(self, spec: ParameterSpec) -> Rules:
        """Return how the states of a parameter are divided; empty unless it is itself."""
        if spec.grain.stack:
            return dict.fromkeys(self.elementwise | self._per_block, StackRule(spec.shape, spec.grain))
        return self._rules if spec.grain == BY_BLOCK else {}

    def options_of(self, given: Options) -> Options:
        """Return the options that the class makes of those given for a param group: their defaults, and their kinds.

        A class may keep a learning rate as a tensor, whatever it is given.
        """
        (group,) = self.optimizer_class([{**given, "params": [torch.zeros(1, 1)]}], **self.arguments).param_groups
        self._own_options = self._own_options | {*given, *group}
        return {key: value for key, value in group.items() if key != "params"}

    def _over_one(self) -> torch.optim.Optimizer:
        """Return an instance over a throw-away parameter."""
        given = [torch.zeros(1, 1)]
        return self.optimizer_class([{**self._example, "params": given}] if self._example else given, **self.arguments)

    def plain(self, groups: Sequence[Options]) -> torch.optim.Optimizer:
        """Return an instance of the class over param groups, as in a plain loop.

        What was written into a live group later, as by a learning rate scheduler, is no argument of the constructor.
        """
        own = [{key: value for key, value in group.items() if key in self._own_options} for group in groups]
        made = self.optimizer_class(own, **copy.deepcopy(self.arguments))
        for group, given in zip(made.param_groups, groups, strict=True):
            group.update({key: value for key, value in given.items() if key not in self._own_options})
        return made

    def another(self, **changed: Any) -> UserOptimizer:
        """Return an empty `UserOptimizer` of the same class, with the arguments in ``changed`` replaced."""
        made = UserOptimizer(self.optimizer_class, {**copy.deepcopy(self.arguments), **changed}, self._example)
        made.note_options(self)
        return made

    def instance(self, other: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
        """Return an instance of the class without parameters, whose own counters equal those of an ``other``."""
        made = self._over_one()
        made.param_groups.clear()
        made.state.clear()
        if other is not None:
            kept = {"state", "param_groups", "defaults"}
            for key, value in vars(other).items():
                if key not in kept and not key.startswith("_optimizer_"):
                    vars(made)[key] = copy.deepcopy(value)
        return made

    def _makes_later_states(self, plain: torch.optim.Optimizer) -> bool:
        """Return whether a class that creates its states in the constructor has those of a later group before a step:
        it makes them when the group is added, or no step can make them. Adagrad's step does."""
        later = torch.zeros(1, 1)
        try:
            plain.add_param_group({**self._example, "params": [later]})
            made = later in plain.state
            later.grad = torch.ones(1, 1)
            unhooked_step(plain)
        except Exception:
            return True
        return made or later not in plain.state

    def create_states(
        self, states: BucketStates, groups: Mapping[int, Options], new: bytes | None = None, *, later: bool = False
    ) -> None:
        """Let a class that creates its states in the constructor (Adagrad) create those of the pieces that are ``new``,
        a byte each, 0 or 1. None: of all. ``later``: of an optimizer that has been constructed before."""
        if not (self._later_begin_with_state if later else self._begins_with_state):
            return
        late = states.master.is_missing
        states.plan(b"\1" * len(states.pieces) if new is None else new, frozenset())
        if states.runs:
            built = self.plain(_param_groups([states], {n: _OwnOptions(group).copied() for n, group in groups.items()}))
            states.instance.state.update(built.state)
        states.adopt_states(self.elementwise)
        if late:
            states.snapshot()  # drop the runs: they are views of master weights that may never be updated
            states.master.forget()

    def step(
        self, updates: Sequence[BucketUpdate], groups: Mapping[int, Options], call: Call = unhooked_step
    ) -> dict[int, Options]:
        """Step all pieces that are present, bucket by bucket.

        Each instance is stepped once, with all groups, also those without elements on this rank, so that the class's
        own counters are those of one call.

        Args:
            updates: of all buckets of the class.
            groups: the user's param groups of the class, by their numbers.
            call: what is called with each instance: its step, or another method that changes weights.

        Returns:
            The options that the class changed, by the group's number.
        """
        cut = frozenset(number for number, group in groups.items() if not group.get("fused"))
        rounded = {number: steps_of(group) for number, group in groups.items()}
        options = {number: _OwnOptions(group) for number, group in groups.items()}
        found: list[_Stepped] = []
        ahead = (update.states for update in updates if 1 in update.present)
        for states in itertools.islice(ahead, STATES_AHEAD):
            states.prefetch()
        behind: deque[BucketStates] = deque()  # their states may be copied back while the next bucket is stepped
        try:
            for together in _by_instance(updates):
                for update in together:
                    if 1 in update.present and (later := next(ahead, None)) is not None:
                        later.prefetch()
                    if update.begin is not None:
                        update.begin()
                with together[0].event():
                    found.append(_step(together, cut, options, call))
                    self._adopt(together, rounded)
                for update in together:
                    if 1 in update.present:
                        if len(behind) == STATES_BEHIND:
                            behind.popleft().free_copies()
                        behind.append(update.states)
                    if update.done is not None:
                        update.done()
        finally:
            for update in updates:
                update.states.free_copies()
        changed = {number: _changed(number, group, found) for number, group in groups.items()}
        return {number: replaced for number, replaced in changed.items() if replaced}

    def _adopt(self, together: Sequence[BucketUpdate], rounded: Mapping[int, int]) -> None:
        """Take the states that the class has made, and round the master weights into the parameters.

        ``rounded``: how many steps of each param group were rounded before.
        """
        casts: list[tuple[Tensor, Tensor]] = []
        for update in together:
            update.states.adopt_states(self.elementwise)
            update.states.round(rounded)
            casts += update.states.casts(update.present)
        if casts:
            foreach_copy_([parameter for parameter, _ in casts], [master for _, master in casts])
        for update in together:
            update.states.evict()


class _Stepped(NamedTuple):
    """A step of one instance.

    Attributes:
        groups: the numbers of the param groups of which it stepped a parameter.
        options: by each param group's number, its options after the step, and the copies that the instance was given.
    """

    groups: frozenset[int]
    options: Mapping[int, tuple[Options, Options]]


def _by_instance(updates: Sequence[BucketUpdate]) -> list[list[BucketUpdate]]:
    """Return the buckets that have one instance together, in the order of the first of each."""
    found: dict[int, list[BucketUpdate]] = {}
    for update in updates:
        found.setdefault(id(update.states.instance), []).append(update)
    return list(found.values())


def all_present(states: BucketStates) -> bytes:
    """Return which pieces a call changes that is no step, in a byte each, 0 or 1: all.

    None, if there are no master weights yet: the bucket is frozen, and was never stepped.
    """
    return bytes([not states.master.is_missing]) * len(states.pieces)


class NotElementwiseError(ValueError):
    """A class does not step pieces of parameters as it steps whole ones. ``why``: the difference that was found."""

    def __init__(self, optimizer_class: str, why: str) -> None:
        super().__init__(
            f'{optimizer_class} is not element-wise: {why}. With partition="element" a rank steps flat pieces of '
            "parameters, which needs a class whose update of an element depends on nothing but that element's gradient "
            'and state (SGD, Adam, AdamW, Adagrad, RMSprop, ...): leave out partition=, or use "parameter"'
        )
        self.why = why


def _step(
    together: Sequence[BucketUpdate], cut: frozenset[int], options: Mapping[int, _OwnOptions], call: Call
) -> _Stepped:
    """Step the buckets of one instance. The class may edit tensors among the copies of options in place."""
    groups, instance = {number: own.copied() for number, own in options.items()}, together[0].states.instance
    every = [update.states for update in together]
    try:
        sync_from_params([states.master for states in every])
        for update in together:
            _prepare(update, cut)
        instance.param_groups = param_groups = _param_groups(every, groups)
        call(instance)
    finally:
        for states in every:
            for run in states.runs:
                run.parameter.grad = None
        instance.param_groups = []
    pairs = {n: (after, given) for (n, given), after in zip(groups.items(), param_groups, strict=True)}
    return _Stepped(frozenset().union(*(states.stepped_groups for states in every)), pairs)


def _prepare(update: BucketUpdate, cut: frozenset[int]) -> None:
    """Make the runs of a bucket, and give them their gradients, if there are any."""
    states, gradient = update.states, update.gradient
    states.plan(update.present, cut)
    states.ready()
    if gradient is None:
        return
    # in the host's memory the gradient stays as it is until the step is over
    wide = gradient.data.to(step_device(states.bucket), states.bucket.dtypes.step_dtype, non_blocking=True)
    for run in states.runs:
        run.parameter.grad = run.of(wide)


def _changed(number: int, live: Options, found: Sequence[_Stepped]) -> Options:
    """Return the options that the class replaced in a group; copy tensors that it may have edited into ``live``.

    They are taken from an instance that stepped a parameter of the group, if there is one; else from the first.
    """
    if not found:
        return {}
    stepped = [each for each in found if number in each.groups]
    after, given = (stepped or found)[0].options[number]
    changed: Options = {}
    for key, value in after.items():
        if key != "params" and value is not given.get(key):
            changed[key] = value
        elif isinstance(value, Tensor):
            live[key].copy_(value)
    return changed


def _param_groups(every: Sequence[BucketStates], groups: Mapping[int, Options]) -> list[Options]:
    """Return the groups with the runs of these buckets as their parameters."""
    result = []
    for number, group in groups.items():
        runs = [run.parameter for states in every for run in states.runs if states.groups[run.first] == number]
        result.append({**group, "params": runs})
    return result


class _OwnOptions:
    """The options of a param group that the class sees, for the step of one bucket after the other."""

    def __init__(self, group: Options) -> None:
        self._options = {key: value for key, value in group.items() if key not in NO_OPTIONS}
        self._tensors = [(key, value) for key, value in self._options.items() if isinstance(value, Tensor)]

    def copied(self) -> Options:
        """Return a copy whose tensors a bucket's step may edit without an effect on the next bucket's step."""
        copy = self._options.copy()
        for key, tensor in self._tensors:
            copy[key] = tensor.clone()
        return copy


GROUPS_BESIDE_GATHERS = 4


def step_groups(layout: Layout, first: int, stage: Stage, *, offloads: bool) -> dict[int, Hashable]:
    """Return the group of each bucket from ``first`` on, by the bucket's index. ``offloads``: of the states.

    A bucket whose gradient is widened for the step, or its weights, is a group of its own, so that one such copy exists
    at a time.
    """
    found: dict[int, Hashable] = {}
    alike: dict[tuple[int, str, object], list[BucketSpec]] = {}
    for bucket in layout.buckets[first:]:
        dtypes = bucket.dtypes
        widened = not (dtypes.accumulate_dtype is dtypes.master_dtype is dtypes.step_dtype)
        if offloads or widened or not is_launched(torch.device(bucket.device)):
            found[bucket.index] = bucket.index
        else:
            optimizer_class = layout.members(bucket)[0].optimizer_class
            alike.setdefault((optimizer_class, bucket.device, dtypes), []).append(bucket)
    count = GROUPS_BESIDE_GATHERS if stage.parameters_are_gathered and layout.world_size > 1 else 1
    for key, buckets in alike.items():
        total, before = sum(bucket.numel for bucket in buckets), 0
        for bucket in buckets:
            found[bucket.index] = (*key, count * before // max(1, total))
            before += bucket.numel
    return found
