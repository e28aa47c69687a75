"""Hypothesis drives the plain loop and the ranks side by side: every rule is a command of a random program.

Knows: which programs make sense, so which command may follow which. Does not know: how a command is executed. A failure
prints the program as source text: paste it into a test that imports from `tests.support.machine`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hypothesis import note
from hypothesis import settings as limits
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from ..programs import BY_PARAMETER, CLASSES
from . import program as p
from .backends import Backend
from .program import Command, Config, Setting
from .run import Run
from .trees import LEAVES, WRAPPERS, Part

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
LOOKS = (
    st.builds(p.Evaluate, SEEDS, MASKS, st.booleans())
    | st.builds(p.Read, SOME)
    | st.builds(p.FullGrad, NUMBERS)
    | st.builds(p.Consolidate, st.integers(0, 7))
    | st.just(p.Describe())
)


def parts(dtypes: tuple[str, ...]) -> st.SearchStrategy[tuple[Part, ...]]:
    sizes, names = st.sampled_from([1, 2, 3, 5, 7, 13, 31]), st.sampled_from(dtypes)
    leaf = st.builds(Part, st.sampled_from(LEAVES), sizes, names, st.sampled_from([False, False, False, True]))

    def wrap(inside: st.SearchStrategy[Part]) -> st.SearchStrategy[Part]:
        of = st.lists(inside, min_size=1, max_size=3).map(tuple)
        return st.builds(lambda kind, of: Part(kind, of=of), st.sampled_from(WRAPPERS), of)

    return st.lists(st.recursive(leaf, wrap, max_leaves=4), max_size=5).map(tuple)


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "lr": st.sampled_from([0.0, 1e-3, 0.03]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "betas": st.sampled_from([(0.5, 0.9), (0.9, 0.95)]),
    },
).map(lambda found: tuple(found.items()))


SECOND = ("", "", "", "", "muon", "shampoo", "sgd momentum", "adamw")  # classes of groups beside the program's own
STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Collectives:
    """The algorithms of a machine.

    ``exact`` add in rank order; ``in_any_order`` give the same bits only if sums are exact.
    """

    exact: tuple[str, ...]
    in_any_order: tuple[str, ...]

    def names(self, integer: bool) -> tuple[str, ...]:
        return (*self.exact, *self.in_any_order) if integer else self.exact


@st.composite
def settings(draw: st.DrawFn, stages: Sequence[int], most_ranks: int, collectives: tuple[str, ...]) -> Setting:
    stage, ranks = draw(st.sampled_from(stages)), draw(st.integers(1, most_ranks))
    factors = [None, *(factor for factor in range(1, ranks + 1) if stage and ranks % factor == 0)]
    factor = draw(st.sampled_from(factors))
    shared = ranks if factor is None else factor
    reshard = [True, *([False, *(n for n in range(2, shared) if shared % n == 0)] if stage == 3 else [])]
    return Setting(
        stage,
        ranks,
        draw(CAPS),
        draw(st.sampled_from(collectives)),
        factor,
        draw(st.sampled_from(reshard)),
        draw(st.booleans()),
    )


@st.composite
def configs(
    draw: st.DrawFn, stages: Sequence[int], most_ranks: int, collectives: Collectives, precisions: Sequence[str]
) -> Config:
    precision = draw(st.sampled_from(precisions))
    integer = not precision and draw(st.sampled_from([False, False, True]))
    return Config(
        draw(settings(stages, most_ranks, collectives.names(integer))),
        draw(parts(("float32", "float64") if integer else ("float32", "float32", "float64", "bfloat16"))),
        draw(st.sampled_from([1, 2, 4, 9, 17])),
        integer,
        draw(st.sampled_from(OPTIMIZERS)),
        tuple(draw(st.lists(st.sampled_from([0, 0, 1, 2, -1]), min_size=1, max_size=5))),
        tuple(draw(st.lists(OPTIONS, min_size=1, max_size=3))),
        draw(SEEDS),
        draw(st.sampled_from([False, False, False, True])),
        precision,
        tuple(draw(st.lists(st.sampled_from(SECOND), min_size=1, max_size=3))),
        tuple(draw(st.lists(st.sampled_from([False, False, False, True]), min_size=1, max_size=3))),
    )


class RandomPrograms(RuleBasedStateMachine):
    """One random program.

    Subclasses choose the backend, the number of ranks, the algorithms, and the stages of its beginning.
    """

    make_backend: Callable[[], Backend]
    most_ranks = 8
    collectives: Collectives
    precisions: Sequence[str] = ("",)
    begins: Sequence[int] = STAGES
    followed = 0  # the number of commands in all programs of the class
    trained = 0  # the number of steps that had a gradient

    def __init__(self) -> None:
        super().__init__()
        self.run: Run | None = None
        self.open = True  # a backward is allowed
        self.pending = False  # a `no_sync` block has gradients that are not reduced yet
        self.kept = False
        self.stepped = False  # a scheduler's step must follow an optimizer's
        self.uneven_pending = False  # `no_sync` gradients differ between ranks: freeze nothing before they are reduced

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        config = data.draw(configs(self.begins, self.most_ranks, self.collectives, self.precisions))
        self.run = Run(config, type(self).make_backend())

    @classmethod
    def check(cls, examples: int, commands: int) -> None:
        """Run so many programs of up to so many commands; a run in which too little is trained says nothing."""
        run_state_machine_as_test(cls, settings=limits(max_examples=examples, stateful_step_count=commands))
        assert cls.followed >= examples * commands, f"only {cls.followed} commands"
        assert cls.trained >= examples, f"only {cls.trained} steps with a gradient"

    def do(self, command: Command) -> None:
        assert self.run is not None
        type(self).followed += 1
        try:
            self.run.do(command)
            if isinstance(command, p.Step):
                type(self).trained += any(held.grad is not None for held in self.run.oracle.held)
        except BaseException:
            note(str(self.run))
            self.run = None
            raise

    @property
    def stage(self) -> int:
        assert self.run is not None
        return self.run.setting.stage

    def teardown(self) -> None:
        if self.run is not None:
            self.finish()
        run, self.run = self.run, None
        if run is not None:
            try:
                run.close()
            except BaseException:
                note(str(run))
                raise

    def finish(self) -> None:
        """Run two whole steps, which show any effect on the next update and on the states."""
        if self.kept:
            if not self.open:
                self.zero_grad("zero_grad")
            self.backward_of_kept(True)
        for number in range(2):
            self.whole_step([p.Backward(100 + number)], False)

    # -- gradients ----------------------------------------------------------------------------------------------------

    @rule(turn=TURNS)
    def backward(self, turn: p.Backward) -> None:
        if not self.open:
            self.zero_grad("zero_grad")
        self.do(turn)
        self.pending = not turn.sync

    @precondition(lambda self: self.open and self.stage < 3)  # at stage 3 all ranks run the same number
    @rule(seed=SEEDS, counts=st.lists(st.integers(0, 3), min_size=2, max_size=4).map(tuple), sync=SYNC)
    def uneven(self, seed: int, counts: tuple[int, ...], sync: bool) -> None:
        self.do(p.Uneven(seed, counts, sync))
        self.pending = self.pending or not sync
        self.uneven_pending = self.pending

    @precondition(lambda self: self.open)
    @rule(seed=SEEDS, mask=MASKS)
    def keep(self, seed: int, mask: int) -> None:
        self.do(p.Keep(seed, mask))
        self.kept = True

    @precondition(lambda self: self.open and self.kept)
    @rule(sync=SYNC)
    def backward_of_kept(self, sync: bool) -> None:
        self.do(p.BackwardOfKept(sync))
        self.kept, self.pending = False, not sync

    @precondition(lambda self: self.open)
    @rule(seed=SEEDS, in_block=st.booleans())
    def fail(self, seed: int, in_block: bool) -> None:
        self.do(p.Fail(seed, in_block))
        self.pending = self.pending or in_block

    @rule(
        max_norm=st.sampled_from([0.01, 0.5, 100.0, INFINITY]),
        norm_type=st.sampled_from([1.0, 2.0, 2.0, 3.0, INFINITY]),
    )
    def clip(self, max_norm: float, norm_type: float) -> None:
        self.do(p.Clip(max_norm, norm_type))
        self.open = self.pending = False

    @precondition(lambda self: self.open)
    @rule(by=st.sampled_from([1, 3, 7.5, 12]))
    def divide(self, by: float) -> None:
        self.do(p.Divide(by))

    @rule(look=st.booleans())
    def step(self, look: bool) -> None:
        self.drop_kept()
        self.do(p.Step(look))
        self.open, self.pending, self.stepped = False, False, True

    @rule(turns=st.lists(TURNS, min_size=1, max_size=3), look=st.booleans())
    def whole_step(self, turns: list[p.Backward], look: bool) -> None:
        """Run a usual step of a training loop."""
        for turn in turns:
            self.backward(turn)
        self.clip(1.0, 2.0)
        self.step(look)
        self.zero_grad("zero_grad")

    @rule(seed=SEEDS, scale=st.sampled_from([1.0, 64.0, 3.0]), overflow=st.none() | st.integers(0, 7))
    def scaled_step(self, seed: int, scale: float, overflow: int | None) -> None:
        self.drop_kept()
        self.do(p.Scaled(seed, scale, overflow))
        self.open, self.pending = True, False
        self.stepped = self.stepped or overflow is None

    @rule(seed=SEEDS, counts=st.lists(st.integers(0, 2), min_size=2, max_size=4).map(tuple))
    def joined_steps(self, seed: int, counts: tuple[int, ...]) -> None:
        self.drop_kept()
        assert self.run is not None
        command = p.Joined(seed, counts)
        self.do(command)
        self.open, self.pending = True, False
        self.stepped = self.stepped or any(command.of(rank) for rank in range(self.run.setting.world_size))

    @rule(how=st.sampled_from(["zero_grad", "zero_grad", "zeros", "module", "module zeros", "none"]))
    def zero_grad(self, how: p.Clear) -> None:
        self.do(p.ZeroGrad(how))
        self.open, self.pending = True, "zeros" in how  # which later backwards add to

    # -- changes between steps ----------------------------------------------------------------------------------------

    @precondition(lambda self: not self.kept and not (self.pending and self.uneven_pending))
    @rule(numbers=st.lists(st.integers(1, 30), min_size=1, max_size=3, unique=True).map(tuple))
    def freeze(self, numbers: tuple[int, ...]) -> None:
        assert self.run is not None
        count = len(self.run.oracle.parameters) - 1  # never freeze the first: the library would not notice a backward
        self.do(p.Freeze(tuple(dict.fromkeys(1 + number % count for number in numbers))))  # without any gradient

    @rule(
        group=st.integers(0, 2),
        change=st.sampled_from(
            [("lr", 0.0), ("lr", 0.02), ("weight_decay", 0.2), ("betas", (0.8, 0.9)), ("momentum", 0.5), ("eps", 1e-4)]
        ),
    )
    def change(self, group: int, change: tuple[str, object]) -> None:
        self.do(p.Change(group, *change))

    @precondition(lambda self: self.stepped)
    @rule()
    def schedule(self) -> None:
        self.do(p.Schedule())

    @precondition(lambda self: not self.kept)
    @rule(numbers=SOME, seed=SEEDS)
    def write(self, numbers: p.Numbers, seed: int) -> None:
        self.do(p.Write(numbers, seed))

    @precondition(lambda self: not self.kept)
    @rule(number=NUMBERS, factor=st.sampled_from([0.5, -1.5]))
    def edit(self, number: int, factor: float) -> None:
        self.do(p.Edit(number, factor))

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        assert self.run is not None
        self.drop_kept()
        if not self.stepped:  # there is no state to save yet
            self.whole_step([p.Backward(100)], False)
        names = self.collectives.names(self.run.config.integer)
        self.do(p.Load(data.draw(settings(STAGES, self.most_ranks, names))))
        self.open, self.pending, self.stepped = True, False, False

    def drop_kept(self) -> None:
        """Replace a kept graph, whose backward would now come too late."""
        if self.kept:
            self.do(p.Keep(0))
        self.kept = False

    # -- reads, which change nothing ----------------------------------------------------------------------------------

    @rule(looks=st.lists(LOOKS, min_size=1, max_size=3))
    def look(self, looks: list[p.Evaluate | p.Read | p.FullGrad | p.Consolidate | p.Describe]) -> None:
        assert self.run is not None
        for command in looks:
            match command:
                case p.FullGrad(number=number) if not self.pending:
                    oracle = self.run.oracle
                    listed = {id(parameter) for parameter in oracle.listed}
                    numbers = [index for index, parameter in enumerate(oracle.parameters) if id(parameter) in listed]
                    self.do(p.FullGrad(numbers[number % len(numbers)]))
                case p.FullGrad():
                    pass
                case p.Consolidate(to=to):
                    self.do(p.Consolidate(to % self.run.setting.world_size))
                case _:
                    self.do(command)
