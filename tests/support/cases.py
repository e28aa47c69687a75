"""Training at stage 3 beside the plain loop, for all tests of units.

A `Case` is a model, and the forward and backward of one micro-batch. `check_rank` trains it on a rank, and compares
the bits of every parameter after every step with those of `plain_loop`. Between steps no unit may be gathered.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from collectives import Transport
from collectives.pool import holders
from zero import ZeroOptimizer
from zero.core.parameter_specs import FLOATS, is_released
from zero.parameters.gathered.units import State
from zero.parameters.sharded import ShardedStorage
from zero.parameters.unit_manager import UnitManager

from .errors import is_plain
from .models import seeded
from .parts import parts_of
from .plain import assert_same_bits, share

INPUTS, WIDTH, OUTPUTS, ROWS = 5, 6, 4, 3
TURNS = 2  # micro-batches of each rank in a step
LEARNING_RATE = 0.05
CAP_MB = 6e-4  # 600 bytes: two buckets a block


@dataclass(frozen=True)
class Batch:
    """A micro-batch, number turn of its rank in a step. gathered is the optimizer's, if there is one."""

    x: Tensor
    step: int
    turn: int
    gathered: Callable[[], AbstractContextManager[None]] = nullcontext


Run = Callable[[Any, Batch], "Iterator[None] | None"]


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width + 2)
        self.outer = nn.Linear(width + 2, width)

    def forward(self, x: Tensor) -> Any:
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))


class Net(nn.Module):
    """A stack of blocks between layers that belong to the root unit. Cases override `body`, or the class of a block."""

    block: Callable[[], nn.Module] = Block
    count = 3

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList([type(self).block() for _ in range(self.count)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.norm(self.body(self.embed(x))))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Fails(Block):
    """A block that raises in the middle of its forward or backward, as ``armed`` says."""

    armed = ""
    error: type[BaseException] = ZeroDivisionError

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(self.norm(x))
        if self.armed == "forward":
            raise self.error
        if self.armed == "backward":
            hidden.register_hook(self._raise)
        found: Tensor = x + self.outer(torch.tanh(hidden))
        return found

    def _raise(self, _: Tensor) -> None:
        raise self.error


def net_of(block: Callable[[], nn.Module], count: int = 3) -> type[Net]:
    return type("NetOf", (Net,), {"block": staticmethod(block), "count": count})


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(batch.x).square().mean()
    return loss


def one_backward(model: nn.Module, batch: Batch) -> None:
    loss_of(model, batch).backward()


def _nothing(*_: Any) -> None:
    return None


@dataclass(frozen=True)
class Case:
    """A model and the training of one micro-batch. The plain loop does everything that the ranks do."""

    build: Callable[[], nn.Module] = Net
    run: Run = one_backward  # on one micro-batch; with several backwards a generator that yields after each of them
    groups: Callable[[Any], Any] | None = None  # the parameters to optimize
    prepared: Callable[[Any], None] = _nothing  # is called with the new model
    built: Callable[[Any], None] = _nothing  # after the optimizer was built
    begin: Callable[[Any, int], None] = _nothing  # before each step
    units: Callable[[nn.Module], bool] | None = None
    lends: bool = False  # the case keeps memory of a weight beyond its forward, on purpose
    steps: int = 2
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the optimizer on the ranks alone

    def make(self) -> nn.Module:
        def prepared() -> nn.Module:
            model = self.build()
            self.prepared(model)
            return model

        return seeded(0, prepared)


def batches_of(step: int, world_size: int) -> list[Batch]:
    """Return the micro-batches of a step; j belongs to rank j mod ``world_size``."""
    generator = torch.Generator().manual_seed(step)
    turns = product(range(TURNS), range(world_size))
    return [Batch(torch.randn(ROWS, INPUTS, generator=generator), step, turn) for turn, _ in turns]


def in_rounds(run: Run, model: nn.Module, batches: Sequence[Batch]) -> None:
    """Run the micro-batches of all ranks by rounds: the first backward of each, then the second of each, ..."""
    under_way = [found for batch in batches if (found := run(model, batch)) is not None]
    while under_way:
        under_way = [each for each in under_way if next(each, "over") is None]


def plain_loop(case: Case, world_size: int) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """Train with the plain loop. Return the model, and its parameters after each step."""
    model = case.make()
    optimizer = torch.optim.AdamW(model.parameters() if case.groups is None else case.groups(model), lr=LEARNING_RATE)
    case.built(model)
    after: list[dict[str, Tensor]] = []
    for step in range(case.steps):
        case.begin(model, step)
        batches = batches_of(step, world_size)
        for first in range(0, len(batches), world_size):
            in_rounds(case.run, model, batches[first : first + world_size])
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(len(batches))
        optimizer.step()
        model.zero_grad()
        after.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return model, after


def sharded(case: Case, transport: Transport, **arguments: Any) -> tuple[Any, ZeroOptimizer]:
    """Build the model of a case and its stage-3 optimizer, on one rank."""
    model = case.make()
    given = model if case.groups is None else case.groups(model)
    divisor = TURNS * transport.world_size
    defaults = {"stage": 3, "lr": LEARNING_RATE, "bucket_cap_mb": CAP_MB, "divisor": divisor, "units": case.units}
    arguments = {**defaults, "module": model, "process_group": transport, **case.arguments, **arguments}
    optimizer = ZeroOptimizer(given, torch.optim.AdamW, **arguments)
    case.built(model)
    return model, optimizer


def train(case: Case, model: nn.Module, optimizer: ZeroOptimizer, step: int) -> None:
    """Run this rank's forwards and backwards of a step, without the step itself."""
    case.begin(model, step)
    for batch in share(batches_of(step, optimizer.world_size), optimizer.rank, optimizer.world_size):
        in_rounds(case.run, model, [replace(batch, gathered=optimizer.gathered)])


def check_rank(case: Case, transport: Transport, expected: Sequence[dict[str, Tensor]]) -> None:
    """Train on one rank: after every step it has the plain loop's bits, and no unit is gathered."""
    model, optimizer = sharded(case, transport)
    for step in range(case.steps):
        train(case, model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
        assert_nothing_is_here(model, optimizer, case.lends)
        with optimizer.gathered():
            assert_parameters(model, expected[step])
        assert_nothing_is_here(model, optimizer, case.lends)
    optimizer.close()
    assert_parameters(model, expected[-1])
    assert_plain(model)


def manager_of(optimizer: ZeroOptimizer) -> UnitManager:
    storage = parts_of(optimizer).storage
    assert isinstance(storage, ShardedStorage)
    return storage.manager


def assert_nothing_is_here(model: nn.Module, optimizer: ZeroOptimizer, lends: bool = False) -> None:
    """Assert that all units are resharded. Unless the case lends, no other object may hold a buffer."""
    manager = manager_of(optimizer)
    for unit in manager.units:
        assert (unit.installed, unit.held) == (False, False), unit
        assert (unit.gathered.state, unit.gathered.work) == (State.SHARDED, []), unit
        assert all(buffer.unsharded is None for buffer in unit.gathered.buffers), unit.name
    for name, parameter in model.named_parameters():
        assert is_released(parameter) == (parameter.dtype in FLOATS), name
    if not lends and externally_held(manager):
        gc.collect()
        assert not externally_held(manager)


def externally_held(manager: UnitManager) -> list[str]:
    buffers = [
        buffer
        for unit in manager.units
        for buffer in unit.gathered.buffers
        if buffer.externally_held is not None and holders(buffer.externally_held)
    ]
    return [buffer.name(slot) for buffer in buffers for slot in range(len(buffer.parameters))]


def assert_parameters(model: nn.Module, expected: dict[str, Tensor]) -> None:
    found = dict(model.named_parameters())
    assert set(found) == set(expected)
    for name, parameter in found.items():
        assert_same_bits(parameter, expected[name], name)


def assert_plain(model: nn.Module) -> None:
    """Assert that the library left no hook and no class of its own on a model."""
    assert is_plain(model)
    addresses = [p.untyped_storage().data_ptr() for p in model.parameters() if p.numel()]
    assert len(set(addresses)) == len(addresses)
    assert not any(is_released(p) for p in model.parameters())
