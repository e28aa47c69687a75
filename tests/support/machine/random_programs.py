"""Hypothesis draws programs, and runs each in the plain loop and on ranks side by side.

Knows: which programs make sense, so which command may follow which. Does not know: how a command is executed. A failure
prints the program as source text: paste it into a test that imports from `tests.support.machine`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hypothesis import given, note, seed
from hypothesis import settings as limits
from hypothesis import strategies as st

from . import program as p
from .backends import Backend
from .classes import BY_PARAMETER, CLASSES
from .program import Command, Config, Setting
from .ranks import UNIT_ARGUMENTS
from .run import Run
from .trees import GAPS, LEAVES, VIEWS, WRAPPERS, Kind, Part

INFINITY = float("inf")
OPTIMIZERS = [
    *sorted(set(CLASSES) - {"sgd fused"}),  # with momentum it fails if a parameter's first use is a later step
    *sorted(BY_PARAMETER),
]
CAPS = st.sampled_from([1e-6, 0.0001, 0.0005, 25.0])
SEEDS = st.integers(0, 99)
MASKS = st.sampled_from([-1, 0, 1, 2, 5])
NUMBERS = st.integers(0, 30)
FORMS = st.sampled_from(["one", "one", "two forwards", "two losses", "retained", "autograd.grad before"])
SYNC = st.sampled_from([True, True, False])
TURNS = st.builds(p.Backward, SEEDS, FORMS, MASKS, SYNC)
SOME = st.none() | st.lists(NUMBERS, min_size=1, max_size=2).map(tuple)
LOOKS = st.lists(
    st.builds(p.Evaluate, SEEDS, MASKS, st.booleans())
    | st.builds(p.Read, SOME)
    | st.builds(p.FullGrad, NUMBERS)
    | st.builds(p.Consolidate, st.integers(0, 7))
    | st.builds(p.FullState, st.integers(0, 7), st.booleans())
    | st.just(p.Describe()),
    min_size=1,
    max_size=3,
)
CHANGES = [("lr", 0.0), ("lr", 0.02), ("weight_decay", 0.2), ("betas", (0.8, 0.9)), ("momentum", 0.5), ("eps", 1e-4)]


def counts(most: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, most), min_size=2, max_size=4).map(tuple)


def whole_step(turns: Sequence[Command], look: bool = False) -> list[Command]:
    """Return a usual step of a training loop."""
    return [*turns, p.Clip(1.0), p.Step(look), p.ZeroGrad()]


CLEARS = st.sampled_from(["zero_grad", "zero_grad", "zeros", "module", "module zeros", "none"])
ALONE: tuple[st.SearchStrategy[Command], ...] = (
    st.builds(p.Schedule),
    TURNS,
    st.builds(p.Dropped, SEEDS, MASKS, SYNC, CLEARS),
    st.builds(p.Uneven, SEEDS, counts(3), SYNC),
    st.builds(p.Keep, SEEDS, MASKS),
    st.builds(p.BackwardOfKept, SYNC),
    st.builds(p.Fail, SEEDS, st.booleans()),
    st.builds(p.Clip, st.sampled_from([0.01, 0.5, 100.0, INFINITY]), st.sampled_from([1.0, 2.0, 2.0, 3.0, INFINITY])),
    st.builds(p.SetGrad, NUMBERS, SEEDS, st.sampled_from([False, False, True])),
    st.builds(p.Divide, st.sampled_from([1, 3, 7.5, 12])),
    st.builds(p.Step, st.booleans()),
    st.builds(p.Scaled, SEEDS, st.sampled_from([1.0, 64.0, 3.0]), st.none() | st.integers(0, 7)),
    st.builds(p.Joined, SEEDS, counts(2)),
    st.builds(p.ZeroGrad, CLEARS),
    st.builds(p.Freeze, st.lists(st.integers(1, 30), min_size=1, max_size=3, unique=True).map(tuple)),
    st.builds(lambda group, change: p.Change(group, *change), st.integers(0, 2), st.sampled_from(CHANGES)),
    st.builds(p.Write, SOME, SEEDS),
    st.builds(p.Edit, NUMBERS, st.sampled_from([0.5, -1.5])),
)
STEPS = st.builds(whole_step, st.lists(TURNS, min_size=1, max_size=3), st.booleans())


def parts(dtypes: tuple[str, ...], leaves: Sequence[Kind]) -> st.SearchStrategy[tuple[Part, ...]]:
    sizes, names = st.sampled_from([1, 2, 3, 5, 7, 13, 31]), st.sampled_from(dtypes)
    leaf = st.builds(Part, st.sampled_from(leaves), sizes, names, st.sampled_from([False, False, False, True]))

    def wrap(inside: st.SearchStrategy[Part]) -> st.SearchStrategy[Part]:
        of = st.lists(inside, min_size=1, max_size=3).map(tuple)
        return st.builds(lambda kind, of: Part(kind, of=of), st.sampled_from(WRAPPERS), of)

    return st.lists(st.recursive(leaf, wrap, max_leaves=4), max_size=5).map(tuple)


def kinds(parts: tuple[Part, ...]) -> set[str]:
    """Return the kinds of all parts."""
    return {kind for part in parts for kind in (part.kind, *kinds(part.of))}


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "lr": st.sampled_from([0.0, 1e-3, 0.03]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "betas": st.sampled_from([(0.5, 0.9), (0.9, 0.95)]),
    },
).map(lambda found: tuple(found.items()))


SECOND = ("", "", "", "", "muon", "shampoo", "sgd momentum", "adamw")  # classes of groups beside the program's own
MODES = ("schedule-free", "averaged")
STAGES = (0, 1, 2, 3)
UNITS = ("", "", *UNIT_ARGUMENTS)
ROUNDED = ("bf16", "bf16, sent in fp32", "bf16, added up in bf16", "by kind", "policy")


EDGES: tuple[str, ...] = (
    "views",
    "gaps",
    "zeros",
    "empty groups",
    "inference mode",
    "failing groups",
    "shared memory",
    "parts",
    "rollback",
    "modes",
    "resets",
    "lends",
    "averages",
    "checkpoints",
)
"""What few loops have. `tests.net`, whose other side is an older commit, draws none of it."""


STEPS_OF_EDGES: dict[str, st.SearchStrategy[list[Command]]] = {
    "zeros": st.builds(
        lambda seed, number: [p.Backward(seed, "zeros"), p.Clip(1.0), p.FullGrad(number), p.Step(), p.ZeroGrad()],
        SEEDS,
        NUMBERS,
    ),
    "parts": st.builds(
        lambda *drawn: [p.Scaled(*drawn)],
        SEEDS,
        st.sampled_from([1.0, 64.0]),
        st.none() | st.integers(0, 7),
        st.sampled_from(["also", "over"]),
    ),
    "rollback": st.builds(lambda seed: [p.ZeroGrad(), p.RollBack(seed)], SEEDS),
    "modes": st.builds(lambda seed: [p.Modes(seed)], SEEDS),
    "resets": st.builds(lambda numbers: [p.Reset(numbers)], SOME),
    "lends": st.just([p.ZeroGrad(), p.Lend()]),
    "averages": st.sampled_from(list(p.AVERAGES)).map(lambda kind: [p.ZeroGrad(), p.Average(kind)]),
    "failing groups": st.sampled_from(["twice", "class", "class, rank 0", "precision"]).map(
        lambda why: [p.ZeroGrad(), p.FailToAdd(why)]
    ),
}


@dataclass(frozen=True)
class Collectives:
    """The algorithms of a machine.

    ``exact`` add in rank order; ``in_any_order`` give the same bits only if sums are exact. ``units``: how units are
    chosen and gathered at stage 3, as keys of `ranks.UNIT_ARGUMENTS`. ``meshes``: ranks may be those of a mesh.
    ``stacks``: rows of parameters may have owners of their own. ``rounds``: what is in bf16 may be rounded at random.
    ``edges``: of `EDGES`, what is drawn, too.
    """

    exact: tuple[str, ...]
    in_any_order: tuple[str, ...]
    units: tuple[str, ...] = ("",)
    meshes: bool = False
    stacks: bool = False
    rounds: bool = False
    edges: tuple[str, ...] = ()

    def names(self, integer: bool) -> tuple[str, ...]:
        return (*self.exact, *self.in_any_order) if integer else self.exact


@st.composite
def settings(
    draw: st.DrawFn,
    stages: Sequence[int],
    most_ranks: int,
    collectives: Collectives,
    *,
    integer: bool,
) -> Setting:
    stage, ranks, units = draw(st.sampled_from(stages)), draw(st.integers(1, most_ranks)), collectives.units
    factors = [None, *(factor for factor in range(1, ranks + 1) if stage and ranks % factor == 0)]
    factor = draw(st.sampled_from(factors))
    shared = ranks if factor is None else factor
    reshard = [True, *([False, *(n for n in range(2, shared) if shared % n == 0)] if stage == 3 else [])]
    return Setting(
        stage,
        ranks,
        draw(CAPS),
        draw(st.sampled_from(collectives.names(integer))),
        factor,
        draw(st.sampled_from(reshard)),
        draw(st.booleans()),
        draw(st.sampled_from(units)) if stage == 3 and len(units) > 1 else units[0],
        collectives.meshes and draw(st.booleans()),
    )


@st.composite
def configs(
    draw: st.DrawFn, stages: Sequence[int], most_ranks: int, collectives: Collectives, precisions: Sequence[str]
) -> Config:
    precision = draw(st.sampled_from(precisions))
    rounded = collectives.rounds and precision in ROUNDED and draw(st.booleans())
    stacked = collectives.stacks and not rounded  # random bits are those of a parameter, and not of a block
    modes = MODES if "modes" in collectives.edges and not rounded else ()
    integer = not precision and draw(st.sampled_from([False, False, True]))
    optimizer = draw(st.sampled_from([*OPTIMIZERS, *modes]))
    leaves = (*LEAVES, *(VIEWS if "views" in collectives.edges else ()))
    if "gaps" in collectives.edges and optimizer in CLASSES and "fused" not in optimizer:
        leaves += GAPS
    drawn = draw(parts(("float32", "float64") if integer else ("float32", "float32", "float64", "bfloat16"), leaves))
    # the plain loop rounds no class that has numbers alone; Shampoo adds up
    second = ("",) if (rounded and "scalar" in kinds(drawn)) or "gaps" in kinds(drawn) else (*SECOND, *modes)
    return Config(
        draw(settings(stages, most_ranks, collectives, integer=integer)),
        drawn,
        draw(st.sampled_from([1, 2, 4, 9, 17])),
        integer,
        optimizer,
        tuple(draw(st.lists(st.sampled_from([0, 0, 1, 2, -1]), min_size=1, max_size=5))),
        tuple(draw(st.lists(OPTIONS, min_size=1, max_size=3))),
        draw(SEEDS),
        draw(st.sampled_from([False, False, False, True])),
        precision,
        tuple(draw(st.lists(st.sampled_from(second), min_size=1, max_size=3))),
        tuple(draw(st.lists(st.sampled_from([False, False, False, True]), min_size=1, max_size=3))),
        tuple(draw(st.lists(st.booleans(), min_size=1, max_size=3))) if stacked else (False,),
        rounded,
        # of an empty group of a class with modes `train()` does not change the mode
        draw(st.none() | st.integers(0, 3)) if "empty groups" in collectives.edges and optimizer not in modes else None,
        "inference mode" in collectives.edges and draw(st.sampled_from([False, False, False, True])),
        draw(st.sampled_from(["", "", "", "buffer", "frozen", "trained"]))
        if "shared memory" in collectives.edges and not rounded  # which may be refused first
        else "",
    )


class Written:
    """The commands of a program that make sense, with those that others need before them."""

    def __init__(self, config: Config) -> None:
        model, self.setting, self.commands = config.model(0), config.setting, list[Command]()
        listed = {id(parameter) for group in config.groups(model) for _, parameter in group["params"]}
        self.count, self.modes = len(list(model.parameters())), config.has_modes(model)
        self.listed = [index for index, parameter in enumerate(model.parameters()) if id(parameter) in listed]
        self.open = True  # a backward is allowed
        self.pending = False  # a `no_sync` block has gradients that are not reduced yet
        self.uneven = False  # they differ between ranks: freeze nothing before they are reduced
        self.kept = False
        self.stepped = False  # a scheduler's step must follow an optimizer's

    def fits(self, command: Command) -> bool:
        match command:
            case p.RollBack():
                return self.open and not self.kept and self.stepped
            case p.Modes():
                return self.modes and not self.kept
            case p.Evaluate() if self.modes:
                return not self.kept
            case p.Lend() | p.Average():
                return self.open and not self.kept
            case p.Keep() | p.Fail() | p.Divide():
                return self.open
            case p.Dropped():
                return not self.open
            case p.Uneven():
                return self.open and self.setting.stage < 3  # where all ranks run the same number
            case p.BackwardOfKept():
                return self.open and self.kept
            case p.Freeze():
                return not self.kept and not (self.pending and self.uneven)
            case p.Write() | p.Edit():
                return not self.kept
            case p.Schedule():
                return self.stepped
            case p.FullGrad():
                return not self.pending
        return True

    def add(self, command: Command) -> None:
        """Write a command, unless it makes no sense here."""
        if not self.fits(command):
            return
        if isinstance(command, (p.Step, p.Scaled, p.Joined, p.Load)):
            if self.kept:
                self.commands.append(p.Keep(0))  # the backward of the kept graph would now come too late
            self.kept = False
        match command:
            case p.Backward(sync=sync):
                if not self.open:
                    self.add(p.ZeroGrad())
                self.pending = not sync
            case p.Uneven(sync=sync):
                self.uneven = self.pending = self.pending or not sync
            case p.Keep():
                self.kept = True
            case p.BackwardOfKept(sync=sync):
                self.kept, self.pending = False, not sync
            case p.Fail(in_block=in_block):
                self.pending = self.pending or in_block
            case p.Clip():
                self.open = self.pending = False
            case p.SetGrad(number=number, seed=chosen, none=none):
                command = p.SetGrad(self.listed[number % len(self.listed)], chosen, none)
                self.open = self.pending = False
            case p.Step():
                self.open, self.pending, self.stepped = False, False, True
            case p.Scaled(seed=chosen, scale=scale, overflow=overflow, beside=beside):
                if beside == "over" and self.setting.mesh:
                    command = p.Scaled(chosen, scale, overflow, "also")  # a group of all ranks is needed
                self.open, self.pending, self.stepped = True, False, self.stepped or overflow is None
            case p.Joined():
                stepped = any(map(command.of, range(self.setting.world_size)))
                self.open, self.pending, self.stepped = True, False, self.stepped or stepped
            case p.ZeroGrad(how=how) | p.Dropped(how=how):
                self.open, self.pending = True, "zeros" in how  # which later backwards add to
            case p.Freeze(numbers=numbers):
                # never freeze the first: the library would not notice a backward without any gradient
                command = p.Freeze(tuple(dict.fromkeys(1 + number % (self.count - 1) for number in numbers)))
            case p.FullGrad(number=number):
                command = p.FullGrad(self.listed[number % len(self.listed)])
            case p.Consolidate(to=to):
                command = p.Consolidate(to % self.setting.world_size)
            case p.Evaluate(seed=chosen) if self.modes:
                command = p.Modes(chosen)  # else the weights are those of the other mode
            case p.FullState(to=to, masters=masters):
                command = p.FullState(to % self.setting.world_size, masters)
            case p.Load(setting=setting, folder=folder):
                if folder:
                    self.add(p.ZeroGrad())  # no gradient is saved
                for each in () if self.stepped else whole_step([p.Backward(100)]):  # else there is no state to save
                    self.add(each)
                self.setting, self.open, self.pending, self.stepped = setting, True, False, False
        self.commands.append(command)

    def finish(self) -> None:
        """Add two whole steps, which show any effect on the next update and on the states."""
        if self.kept and not self.open:
            self.add(p.ZeroGrad())
        self.add(p.BackwardOfKept())
        for number in range(2):
            for each in whole_step([p.Backward(100 + number)]):
                self.add(each)


@st.composite
def programs(
    draw: st.DrawFn,
    stages: Sequence[int],
    most_ranks: int,
    collectives: Collectives,
    precisions: Sequence[str],
    count: int,
) -> tuple[Config, list[Command]]:
    """Draw a program. ``count``: how many commands, whole steps and loads are drawn for it."""
    config = draw(configs(stages, most_ranks, collectives, precisions))
    loads = st.builds(
        p.Load,
        settings(STAGES, most_ranks, collectives, integer=config.integer),
        st.booleans(),
        st.sampled_from(["", p.FOLDER]) if "checkpoints" in collectives.edges else st.just(""),
    )
    edges = [commands for edge, commands in STEPS_OF_EDGES.items() if edge in collectives.edges]
    drawn = st.one_of(*(alone.map(lambda command: [command]) for alone in (*ALONE, loads)), STEPS, LOOKS, *edges)
    size = draw(st.sampled_from([1, count // 2, *[count] * 14]))  # the first ones are for a failure that is shortened
    written = Written(config)
    for some in draw(st.lists(drawn, min_size=size, max_size=size)):
        for command in some:
            written.add(command)
    written.finish()
    return config, written.commands


class RandomPrograms:
    """Random programs. Subclasses choose the backend, the number of ranks, the algorithms, and the first stages."""

    make_backend: Callable[[], Backend]
    most_ranks = 8
    collectives: Collectives
    precisions: Sequence[str] = ("",)
    begins: Sequence[int] = STAGES

    @classmethod
    def check(cls, examples: int, commands: int) -> None:
        """Run so many programs of up to so many drawn commands. Other settings have other programs. A run in which too
        little is trained says nothing, nor does one without a kind of command."""
        followed, trained = list[Command](), list[Command]()  # those that had a gradient

        kind = (cls.__name__, cls.begins, cls.most_ranks, cls.collectives, cls.precisions)

        @seed(zlib.crc32(repr(kind).encode()))
        @limits(max_examples=examples)
        @given(programs(cls.begins, cls.most_ranks, cls.collectives, cls.precisions, commands))
        def follow(program: tuple[Config, list[Command]]) -> None:
            run = Run(program[0], cls.make_backend())
            try:
                for command in program[1]:
                    run.do(command)
                    followed.append(command)
                    if isinstance(command, p.Step) and any(held.grad is not None for held in run.oracle.held):
                        trained.append(command)
                run.close()
            except BaseException:
                note(str(run))
                raise

        follow()
        assert len(followed) >= examples * commands, f"only {len(followed)} commands"
        assert len(trained) >= examples, f"only {len(trained)} steps with a gradient"
        assert len({*map(type, followed)}) >= 19, "of 30 kinds of commands"
