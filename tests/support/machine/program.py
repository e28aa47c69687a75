"""Training programs as data: a model, a number of ranks, and a list of commands.

Knows: the commands and their arguments; every object prints as the source text that makes it. Does not know: how a
program is executed. `Numbers` are indices into `list(model.parameters())`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

import zero

from ..models import seeded
from ..narrowed import PRECISIONS
from ..plain import Clear
from ..two_modes import TWO_MODES
from .classes import BY_PARAMETER, CLASSES, FOR_LOOP, MATRICES
from .trees import Batch, Part, Source, Tree, batch_of, build

Numbers: TypeAlias = tuple[int, ...] | None  # None: all
FOLDER = "a folder"  # stands for one that a run makes
Form = Literal[
    "one", "two forwards", "two losses", "retained", "autograd.grad before", "zeros", "autocast", "penalised",
    "with a graph",
]  # fmt: skip
AVERAGES: dict[str, dict[str, Any]] = {  # arguments of an average, by its kind
    "mean": {},
    "ema": {"multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(0.7)},
    "by tensor": {"avg_fn": lambda average, weights, count: average * 0.9 + weights * 0.1},
}


class Setting(Source):
    """The arguments that may change when a program is saved and loaded."""

    stage: int
    world_size: int
    bucket_cap_mb: float = 0.0005
    collective: Any = "auto"  # a name, or an algorithm
    sharding_factor: int | None = None
    reshard: bool | int = True
    offload: bool | str = False  # states are on disk, or what a key of `ranks.OFFLOADS` or `ranks.STATES` says
    units: str = ""  # at stage 3, a key of `ranks.UNIT_ARGUMENTS`
    mesh: bool = False  # ranks are those of a mesh, whose last dimension is the sharding factor
    host: bool = False  # threads connect as processes of one host do, and share memory


class Config(Source):
    """A program without its commands.

    ``shares``: the param group of parameter i is ``shares[i % len]``, -1 for none. ``options``: the options of each
    group. ``classes``: group i has the class ``classes[i % len]``, "" for the program's own; Muon takes the matrices of
    its group alone, and the rest has the program's class. ``wholes``: likewise, whether its parameters have one owner
    each although its class is element-wise. ``stacks``: likewise, whether the rows of matrices have.
    """

    setting: Setting
    parts: tuple[Part, ...] = ()
    width: int = 4
    integer: bool = False
    optimizer: str = "adamw"
    shares: tuple[int, ...] = (0,)
    options: tuple[tuple[tuple[str, Any], ...], ...] = ((),)
    seed: int = 0
    delays: bool = False
    precision: str = ""  # a key of `PRECISIONS`, `BY_MODULE` or `POLICIES`
    classes: tuple[str, ...] = ("",)
    wholes: tuple[bool, ...] = (False,)
    stacks: tuple[bool, ...] = (False,)
    rounded: bool = False  # what is in bf16 is rounded at random, by ``seed``
    empty: int | None = None  # the place of a param group without parameters
    inference: bool = False  # the optimizer is built in inference mode
    alias: str = ""  # first an optimizer is refused, since the first parameter shares memory with this
    dtype: str = ""  # of the whole model
    device: str = "cpu"
    meta: bool = False  # the model is built on the meta device, and has the values of a state dict

    @property
    def rounding(self) -> Any:
        return zero.StochasticRounding(self.seed) if self.rounded else None

    @property
    def mixed(self) -> Any:
        if not self.precision or self.precision in PRECISIONS:
            return PRECISIONS.get(self.precision)
        from ..by_module import BY_MODULE, POLICIES  # here: `tests.net` also runs on commits that lack them

        return {**BY_MODULE, **POLICIES}[self.precision]

    def model(self, seed: int) -> Tree:
        model = build(self.parts, self.width, self.integer, seed)
        model = model.to(getattr(torch, self.dtype)) if self.dtype else model
        return model if self.device == "cpu" else model.to(self.device)

    @property
    def optimizer_class(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        return (CLASSES | FOR_LOOP | BY_PARAMETER | TWO_MODES)[self.optimizer]

    def has_modes(self, model: nn.Module) -> bool:
        """Return whether the class of a param group has ``train()`` and ``eval()``."""
        own = self.optimizer_class[0]
        return any(hasattr(group.get("optimizer_class", own), "train") for group in self.groups(model))

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the param groups, in order; the first parameter is always in the first."""
        groups: list[list[tuple[str, nn.Parameter]]] = [[] for _ in self.options]
        for index, named in enumerate(model.named_parameters()):
            share = self.shares[index % len(self.shares)] if index else 0
            if share >= 0:
                groups[share % len(groups)].append(named)
        found: list[dict[str, Any]] = []
        for number, (members, options) in enumerate(zip(groups, self.options, strict=True)):
            name = self.classes[number % len(self.classes)]
            matrices = [(key, p) for key, p in members if p.dim() == 2] if name in MATRICES else []
            rest = [(key, p) for key, p in members if p.dim() != 2] if name in MATRICES else members
            own = "" if name in MATRICES else name
            stacked = self.stacks[number % len(self.stacks)] and (own or self.optimizer) in CLASSES
            stacks = [(key, p) for key, p in rest if stacked and self._may_be_rows(p)]
            rest = [(key, p) for key, p in rest if all(p is not q for _, q in stacks)]
            found += [self._group(*each, options, number) for each in ((rest, own), (matrices, name)) if each[0]]
            if stacks:
                group = self._group(stacks, own, options, number)
                found.append({**group, "partition": "parameter", "blocks": 0})
        if self.empty is not None:
            found.insert(self.empty % (len(found) + 1), {"params": []})
        return found

    def _may_be_rows(self, p: nn.Parameter) -> bool:
        """Return whether torch has the same bits for each row alone. Fused or in 16 bits, short rows have others."""
        kept = not self.precision and p.itemsize == 2
        return p.dim() > 1 and p.numel() > 0 and p.is_contiguous() and not kept and "fused" not in self.optimizer

    def _group(
        self, members: list[tuple[str, nn.Parameter]], name: str, options: tuple[tuple[str, Any], ...], number: int
    ) -> dict[str, Any]:
        """Return a param group. ``name``: of its class, "" for the program's own."""
        every = CLASSES | FOR_LOOP | BY_PARAMETER | MATRICES | TWO_MODES
        cls, arguments = every[name or self.optimizer]
        named = {} if cls is self.optimizer_class[0] else {"optimizer_class": cls, **arguments}
        known = cls([torch.zeros(1, 1)]).defaults
        by_element = (name or self.optimizer) in CLASSES | FOR_LOOP | TWO_MODES
        whole = not by_element or self.wholes[number % len(self.wholes)]
        chosen = {key: value for key, value in options if key in known}
        partition = "parameter" if whole else "element"
        return {"params": members, **named, **chosen, "partition": partition}


class Command(Source):
    """What a training loop does: a call, or a few."""


class Backward(Command):
    """Train each rank on one micro-batch."""

    seed: int
    form: Form = "one"
    mask: int = -1
    sync: bool = True


class Uneven(Command):
    """Train rank r on ``counts[r % len]`` micro-batches. Then synchronize all ranks, so that those behind catch up."""

    seed: int
    counts: tuple[int, ...]
    sync: bool = True

    def of(self, rank: int) -> list[Backward]:
        return [Backward(self.seed + turn, sync=self.sync) for turn in range(self.counts[rank % len(self.counts)])]


class Dropped(Command):
    """Run a backward after a clip or a step, and then clear gradients."""

    seed: int
    mask: int
    sync: bool
    how: Clear


class Keep(Command):
    """Run a forward and keep its graph for a later backward."""

    seed: int
    mask: int = -1


class BackwardOfKept(Command):
    """Run the backward of the graph that `Keep` kept."""

    sync: bool = True


class Fail(Command):
    """Run a forward that raises in its middle. ``in_block``: inside `no_sync`, after a whole micro-batch."""

    seed: int
    in_block: bool = False


class Clip(Command):
    max_norm: float
    norm_type: float = 2.0


class Divide(Command):
    """Set the divisor."""

    by: float


class Step(Command):
    """Call `step`. ``look``: read all parameters after it, which at stage 3 gathers them, and all states."""

    look: bool = True


class Measure(Command):
    """Run a whole step of so many micro-batches of each rank: all ranks together send what the formula says.

    Until then the ranks had no more memory in flight than the formula says.
    """

    seed: int
    turns: int = 2

    @property
    def commands(self) -> list[Command]:
        backwards = [Backward(self.seed + turn) for turn in range(self.turns)]
        return [*backwards, Step(), ZeroGrad()]


class Scaled(Command):
    """Run a whole step with a `GradScaler`: a micro-batch of each rank, unscaling, a clip, a step that may be skipped.

    ``overflow``: a rank (modulo their number) whose loss is infinite. ``beside``: each rank has a part of its own, too
    (`part_of`), whose loss is the infinite one. Parts are clipped with the model (`also=`) or by themselves (`over=`).
    ``unscale`` False: nothing is clipped, and the scaler's `step` unscales. ``further``: a backward that is dropped
    follows it. ``sets``: before all this a mean gradient is replaced.
    """

    seed: int
    scale: float = 64.0
    overflow: int | None = None
    beside: Literal["", "also", "over"] = ""
    unscale: bool = True
    further: bool = False
    sets: bool = False


class Joined(Command):
    """Run whole steps inside `join`: ``counts[r % len]`` of them on rank r. ``sets``: a mean gradient is replaced."""

    seed: int
    counts: tuple[int, ...]
    sets: bool = False

    def of(self, rank: int) -> int:
        return self.counts[rank % len(self.counts)]


class ZeroGrad(Command):
    how: Clear = "zero_grad"


class Freeze(Command):
    """Toggle ``requires_grad``."""

    numbers: tuple[int, ...]


class Change(Command):
    """Set an option of a param group, if the class has it."""

    group: int
    key: str
    value: Any


class Schedule(Command):
    """Call `step` of the learning rate scheduler."""


class Evaluate(Command):
    seed: int
    mask: int = -1
    inference: bool = False


class Read(Command):
    """Read parameters inside `gathered()`."""

    numbers: Numbers = None


class Write(Command):
    """Edit parameters inside `gathered(write=True)`, differently on each rank: the values of group rank 0 win.

    ``raises``: and leave the block by an exception, on all ranks or on all but the first, around another such block.
    """

    numbers: Numbers
    seed: int
    raises: Literal["", "all", "others"] = ""


class Edit(Command):
    """Edit a parameter outside `gathered()`, alike on every rank. At stage 3 this raises."""

    number: int
    factor: float


class FullGrad(Command):
    number: int


class SetGrad(Command):
    """Replace a mean gradient; by None if ``none``, or if the parameter is frozen."""

    number: int
    seed: int
    none: bool = False


class Describe(Command):
    """Call all methods that only inspect; they must change nothing. ``exact``: the bytes are those of the formulas."""

    exact: bool = False


class Consolidate(Command):
    to: int


class FullState(Command):
    """Read the model's whole state dict."""

    to: int
    masters: bool


class Modes(Command):
    """Change to eval mode, run a forward, and change back, if the class has modes."""

    seed: int


class Reset(Command):
    """Forget the states of parameters."""

    numbers: Numbers = None


class Lend(Command):
    """Take all memory from the device between two steps, and give it back."""


class Average(Command):
    """Update a running average of the weights, read it, and run a forward with it.

    The first such command makes it; checkpoints have it, and dicts do not. ``kind``: a key of `AVERAGES`.
    """

    kind: str = "mean"


class FailToAdd(Command):
    """Call `add_param_group`, which raises and changes nothing.

    ``why``: the parameter has a group, the class raises, on rank 0 alone, or so does the function of precisions, if
    there is one.
    """

    why: Literal["twice", "class", "class, rank 0", "precision"]


class Wrong(Command):
    """Make a call that is refused, and that changes nothing.

    ``call``: source text of a call of `model`, `optimizer` and what `ranks.Rank.refuse` adds; ``words``: parts of the
    error, in their order with " … " between them.
    """

    call: str
    words: str


class RollBack(Command):
    """Save, take a step, save, restore the first checkpoint, take another step, and save in place of the second one.

    ``folder``: of the checkpoints; `Run` makes one.
    """

    seed: int
    folder: str = FOLDER


class Load(Command):
    """Save, build new ranks with another setting, and load.

    ``full``: weights are those of a whole state dict. ``folder``: of a checkpoint, in place of dicts; `Run` makes one.
    """

    setting: Setting
    full: bool = False
    folder: str = ""


LATER: dict[type[Command], str] = {
    FullState: "full_state_dict",
    SetGrad: "set_full_grad",
    Modes: "train",
    Reset: "reset_states",
    Lend: "offload",
    Average: "ShardedAverage",
    RollBack: "CheckpointManager",
}
"""Commands that commits before them do not know, and the public name by which one sees whether a commit does."""


# -- shared by both sides ----------------------------------------------------------------------------------------------


def micro_batch(setting: Setting, seed: int, mask: int, rank: int, fails: bool = False) -> Batch:
    """Return a rank's micro-batch. ``mask``: the parts that it uses; at stage 3 all ranks use the same."""
    return batch_of(seed, rank, mask if setting.stage == 3 or mask == -1 else mask ^ (rank * 5), fails)


def loss_of(model: Tree, batch: Batch) -> Tensor:
    out: Tensor = model(batch)
    return out.sum() if model.integer else out.square().mean()


def backwards(model: Tree, setting: Setting, command: Backward, rank: int) -> list[Any]:
    """Return the backwards of a micro-batch, to be called one after another."""
    batch = micro_batch(setting, command.seed, command.mask, rank)
    batch = replace(batch, zeros=command.form == "zeros")
    if command.form == "two forwards":
        more = micro_batch(setting, command.seed + 500, command.mask, rank)
        total = loss_of(model, batch) + loss_of(model, more)
        return [total.backward]
    if command.form == "two losses":
        out = model(batch)
        first, second = (out.sum(), out.sum() * 2) if model.integer else (out.square().mean(), out.abs().sum())
        return [lambda: first.backward(retain_graph=True), second.backward]
    batch.x.requires_grad_(command.form in ("autograd.grad before", "penalised"))
    # torch has one cache of casts for all threads, and a rank that leaves empties it
    with torch.autocast("cpu", torch.bfloat16, command.form == "autocast", cache_enabled=False):
        loss = loss_of(model, batch)
    if command.form == "retained":
        return [lambda: loss.backward(retain_graph=True), loss.backward]
    if command.form == "with a graph":
        return [lambda: loss.backward(create_graph=True)]
    if command.form == "autograd.grad before":
        torch.autograd.grad(loss, batch.x, retain_graph=True, allow_unused=True)
    if command.form == "penalised":  # by the norm of a gradient, as in a WGAN
        (slope,) = torch.autograd.grad(loss, batch.x, create_graph=True, allow_unused=True)
        loss = loss if slope is None else loss + slope.square().sum()
    return [loss.backward]


def laid_out(value: Tensor) -> tuple[bool, Tensor]:
    """Return whether a matrix is transposed, and its values. Gaps in memory may have gone."""
    return value.dim() == 2 and not value.is_contiguous(), value


class ByRank(list[Any]):
    """The result that each rank must have, where they differ."""


def loss_to_scale(model: Tree, setting: Setting, command: Scaled, rank: int, part: nn.Module | None = None) -> Tensor:
    loss = loss_of(model, micro_batch(setting, command.seed, -1, rank)).float()
    own = loss if part is None else part(torch.ones(2, 3) + rank).square().mean()
    if command.overflow is not None and command.overflow % setting.world_size == rank:
        own = own / 0
    return own if part is None else loss + own


def part_of(command: Scaled, rank: int) -> nn.Module | None:
    return seeded(command.seed + rank, lambda: nn.Linear(3, 2)) if command.beside else None


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.75)


def replacement(parameter: nn.Parameter, command: SetGrad) -> Tensor | None:
    """Return the gradient that a parameter gets, in fp64."""
    if command.none or not parameter.requires_grad:
        return None
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(command.seed), dtype=torch.float64)


def values(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]
