"""Programs of whole steps, run by the plain loop and by W ranks side by side; `machine` has programs of all kinds.

A program is a list of steps. A step is a list of rounds (each rank runs one backward, or none if it has run out of
micro-batches), then clips, then perhaps a step, then one of the ways to clear gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import Offload, ZeroOptimizer

from .machine.classes import BY_PARAMETER, CLASSES
from .models import build, odd_batches, odd_loss
from .plain import Clear, assert_same_bits, assert_same_model, assert_same_states
from .sides import AsPlain, OnRank, Side


@dataclass(frozen=True)
class Round:
    """One backward on each of the first ``ranks`` ranks (on all if None); the other ranks run none.

    ``sync``: outside `no_sync`.
    """

    sync: bool = True
    ranks: int | None = None


@dataclass(frozen=True)
class Step:
    rounds: tuple[Round, ...] = (Round(), Round())
    clips: tuple[tuple[float, float], ...] = ()
    divisor: float | None = None
    toggle: tuple[str, ...] = ()
    step: bool = True
    clear: Clear = "zero_grad"


@dataclass(frozen=True)
class Program:
    world_size: int
    stage: int
    optimizer: str = "adamw"
    bucket_cap_mb: float | Literal["auto"] = 0.0005
    collective: str = "auto"
    sharding_factor: int | None = None
    reshard: bool | int = True
    offload: Offload | None = None
    precision: Any = None  # what `ZeroOptimizer` takes as `mixed_precision`
    scaled: bool = False
    steps: tuple[Step, ...] = field(default_factory=lambda: (Step(), Step(), Step()))

    def optimizer_class(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        return (CLASSES | BY_PARAMETER)[self.optimizer]


def scaler_of(program: Program) -> torch.amp.GradScaler:
    """Return a scaler that grows often; a disabled one if losses are not scaled."""
    return torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=program.scaled)


def scaled_loss(
    program: Program, scaler: torch.amp.GradScaler, step: int, round_: int, model: nn.Module, rank: int
) -> Tensor:
    """Run the forward of a micro-batch. Ranks use different parameters, except at stage 3, where that is an error."""
    tokens = odd_batches(1, 1000 * step + 10 * round_ + rank)[0][0]
    extra = (step + round_ + (rank if program.stage < 3 else 0)) % 3 == 1
    return scaler.scale(odd_loss(model, (tokens, extra)))


def follow(
    program: Program, side: Side, scaler: torch.amp.GradScaler, take_step: Callable[[], object]
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Run a program on a side. Return the norms with the scales, and the parameters after each step."""
    norms, trace = list[Tensor](), list[list[Tensor]]()
    for number, step in enumerate(program.steps):
        for parameter in map(side.model.get_parameter, step.toggle):
            parameter.requires_grad_(not parameter.requires_grad)
        side.divisor = step.divisor if step.divisor is not None else program.world_size
        for count, round_ in enumerate(step.rounds):
            ranks = None if round_.ranks is None else range(round_.ranks)
            side.train(partial(scaled_loss, program, scaler, number, count), sync=round_.sync, ranks=ranks)
        if isinstance(side, AsPlain):
            side.settle()
        scaler.unscale_(side.optimizer)
        norms += [side.clip(max_norm, norm_type) for max_norm, norm_type in step.clips]
        if step.step:
            take_step()
            scaler.update()
        norms.append(torch.tensor(scaler.get_scale()))
        side.clear(step.clear)
        with side.gathered():
            trace.append([p.detach().clone() for p in side.model.parameters()])
    return norms, trace


class Plain(AsPlain):
    """The plain loop of a program."""

    def __init__(self, program: Program) -> None:
        cls, arguments = program.optimizer_class()
        super().__init__(build(), lambda updated: cls(updated, **arguments), program.world_size, program.precision)
        self.program = program

    def run(self) -> None:
        scaler = scaler_of(self.program)
        self.norms, self.trace = follow(self.program, self, scaler, lambda: self.step(scaler))


locked_build = build


def run_rank(
    program: Program, transport: Any
) -> tuple[nn.Module, list[Tensor], list[list[Tensor]], dict[str, Any] | None]:
    """Run the program on one rank of a transport or a process group.

    Return the model, the norms, the parameters after each step, and on rank 0 the states.
    """
    cls, arguments = program.optimizer_class()
    rank = transport.rank if isinstance(transport, Transport) else torch.distributed.get_rank(transport)
    model = build(rank)
    optimizer = ZeroOptimizer(
        model,
        cls,
        process_group=transport,
        sharding_factor=program.sharding_factor,
        stage=program.stage,
        bucket_cap_mb=program.bucket_cap_mb,
        collective=program.collective,
        reshard_after_forward=program.reshard,
        offload=program.offload,
        mixed_precision=program.precision,
        partition="parameter" if program.optimizer in BY_PARAMETER else "element",
        **arguments,
    )
    assert optimizer.rank == rank
    scaler = scaler_of(program)
    norms, trace = follow(program, OnRank(model, optimizer), scaler, lambda: scaler.step(optimizer))
    optimizer.check_replicas()
    optimizer.consolidate_state_dict(0)
    states = optimizer.state_dict() if rank == 0 else None
    optimizer.close()
    return model, norms, trace, states


def compare(program: Program, results: list[tuple[nn.Module, list[Tensor], list[list[Tensor]], Any]]) -> Plain:
    """Assert that every rank has the plain loop's bits after every step and in every norm. Return the plain loop."""
    plain = Plain(program)
    plain.run()
    names = [name for name, _ in plain.model.named_parameters()]
    for rank, (model, norms, trace, _) in enumerate(results):
        for number, (ours, theirs) in enumerate(zip(trace, plain.trace, strict=True)):
            for name, a, b in zip(names, ours, theirs, strict=True):
                assert_same_bits(a, b, f"rank {rank}, step {number}, {name}")
        for number, (a, b) in enumerate(zip(norms, plain.norms, strict=True)):
            assert_same_bits(a, b, f"rank {rank}, norm {number}")
        assert_same_model(model, plain.model)
    return plain


def check(program: Program, timeout: float = 20.0, run: Callable[..., Any] = on_threads) -> None:
    """Run a program on ranks that are threads; assert the plain loop's bits also in states and master weights."""
    results = run(program.world_size, lambda transport: run_rank(program, transport), timeout=timeout)
    plain, states = compare(program, results), results[0][3]
    assert states is not None
    theirs = plain.optimizer.state_dict()
    # a class may leave empty ones
    theirs["state"] = {index: state for index, state in theirs["state"].items() if state}
    assert_same_states(states, theirs)
    for index, master in states.get("masters", {}).items():
        assert_same_bits(master, plain.numbers.updated[index], f"master weights of parameter {index}")
