"""Training programs as data, run by the plain loop and by W ranks side by side.

A program is a list of steps. A step is a list of rounds (each rank runs one backward, or none if it has run out of
micro-batches), then clips, then perhaps a step, then one of the ways to clear gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from collectives import Transport, on_threads
from zero import Offload, ZeroOptimizer

from .machine.classes import BY_PARAMETER, CLASSES, FOR_LOOP
from .models import build, odd_batches, odd_loss
from .plain import Clear, assert_same_bits, assert_same_model, assert_same_states
from .sides import AsPlain, OnRank, Side
from .two_modes import TWO_MODES


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
    lr: float | None = None
    toggle: tuple[str, ...] = ()
    step: bool = True
    clear: Clear = "zero_grad"
    overflow: tuple[int, int] | None = None  # the round and the rank whose gradient gets one element that is inf
    reset: tuple[str, ...] | None = ()  # parameters whose states are forgotten before the clips; None: all
    unscale: bool = True  # call the scaler's `unscale_` before the clips; otherwise its `step` does so


@dataclass(frozen=True)
class Program:
    world_size: int
    stage: int
    optimizer: str = "adamw"
    bucket_cap_mb: float | Literal["auto"] = 0.0005
    collective: str = "auto"
    partition: str = ""  # "": by parameters for classes of `BY_PARAMETER`, by elements for others
    sharding_factor: int | None = None
    reshard: bool | int = True
    offload: Offload | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    precision: Any = None  # what `ZeroOptimizer` takes as `mixed_precision`
    rounding: Any = None  # a `StochasticRounding`
    scaled: bool = False
    lends: bool = False  # the device between two steps
    steps: tuple[Step, ...] = field(default_factory=lambda: (Step(), Step(), Step()))
    seed: int = 0
    units: Mapping[str, Any] = field(default_factory=dict)  # arguments for how units are chosen and gathered

    def optimizer_class(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        return (CLASSES | FOR_LOOP | BY_PARAMETER | TWO_MODES)[self.optimizer]


def scaler_of(program: Program) -> torch.amp.GradScaler:
    """Return a scaler that grows often; a disabled one if losses are not scaled."""
    return torch.amp.GradScaler(program.device, init_scale=64.0, growth_interval=2, enabled=program.scaled)


def scaled_loss(
    program: Program, scaler: torch.amp.GradScaler, step: int, round_: int, model: nn.Module, rank: int
) -> Tensor:
    """Run the forward of a micro-batch."""
    if program.steps[step].overflow == (round_, rank):
        bias = model.get_parameter("last.bias")
        handle = bias.register_hook(lambda g: (handle.remove(), torch.cat([g[:3], g[3:4] / 0, g[4:]]))[1])
    return scaler.scale(odd_loss(model, batch_of(program, step, round_, rank)))


def batch_of(program: Program, step: int, round_: int, rank: int) -> tuple[Tensor, bool]:
    """Return a micro-batch. Ranks use different parameters, except at stage 3, where that would be an error."""
    tokens = odd_batches(1, program.seed + 1000 * step + 10 * round_ + rank)[0][0]
    return tokens.to(program.device), (step + round_ + (rank if program.stage < 3 else 0)) % 3 == 1


def follow(
    program: Program,
    side: Side,
    scaler: torch.amp.GradScaler,
    ready: Callable[[Step], None],
    take_step: Callable[[], object],
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Run a program on a side. Return the norms with the scales, and the parameters after each step.

    ``ready``: ends the gradients of a step, and forgets its states. ``take_step``: steps, with the scaler.
    """
    norms, trace = list[Tensor](), list[list[Tensor]]()
    modes: Sequence[str] = ("eval", "train") if program.optimizer in TWO_MODES else ()
    for number, step in enumerate(program.steps):
        for mode in modes[1:]:
            side.set_mode(mode)
        for parameter in map(side.model.get_parameter, step.toggle):
            parameter.requires_grad_(not parameter.requires_grad)
        for group in side.optimizer.param_groups if step.lr is not None else ():
            group["lr"] = step.lr
        side.divisor = step.divisor if step.divisor is not None else program.world_size
        for count, round_ in enumerate(step.rounds):
            ranks = None if round_.ranks is None else range(round_.ranks)
            side.train(partial(scaled_loss, program, scaler, number, count), sync=round_.sync, ranks=ranks)
        for mode in modes:  # an evaluation between the backward and the step
            side.set_mode(mode)
        ready(step)
        if step.unscale:
            scaler.unscale_(side.optimizer)
        norms += [side.clip(max_norm, norm_type) for max_norm, norm_type in step.clips]
        if step.step:
            take_step()
            scaler.update()
        norms.append(torch.tensor(scaler.get_scale()))
        side.clear(step.clear)
        if program.lends and isinstance(side, OnRank):
            side.optimizer.offload()
            side.optimizer.reload()
        for mode in modes[:1]:
            side.set_mode(mode)
            norms.append(odd_loss(side.model, batch_of(program, number, 0, 0)).detach().cpu())
        with side.gathered():
            trace.append([p.detach().clone().cpu() for p in side.model.parameters()])
    return norms, trace


class Plain(AsPlain):
    """The plain loop of a program."""

    def __init__(self, program: Program) -> None:
        cls, arguments = program.optimizer_class()
        model = build(program.seed, program.dtype).to(program.device)
        numbers = {"precision": program.precision, "rounding": program.rounding}
        super().__init__(model, lambda updated: cls(updated, **arguments), program.world_size, **numbers)
        self.program = program

    def run(self) -> None:
        scaler = scaler_of(self.program)
        self.norms, self.trace = follow(self.program, self, scaler, self._ready, lambda: self.step(scaler))

    def _ready(self, step: Step) -> None:
        """Forget the states of parameters: the class makes them anew in its next step."""
        self.settle()
        chosen = dict(self.model.named_parameters()) if step.reset is None else step.reset
        for p, updated in zip(self.parameters, self.numbers.updated, strict=True):
            if any(self.model.get_parameter(name) is p for name in chosen):
                self.optimizer.state.pop(updated, None)


locked_build = build


def run_rank(
    program: Program, transport: Any
) -> tuple[nn.Module, list[Tensor], list[list[Tensor]], dict[str, Any] | None]:
    """Run the program on one rank of a transport, a process group or a mesh.

    Return the model, the norms, the parameters after each step, and on rank 0 the states; all on the CPU.
    """
    cls, arguments = program.optimizer_class()
    if isinstance(transport, DeviceMesh):
        rank = transport.mesh.flatten().tolist().index(torch.distributed.get_rank())
        where: dict[str, Any] = {"mesh": transport}
    else:
        rank = transport.rank if isinstance(transport, Transport) else torch.distributed.get_rank(transport)
        where = {"process_group": transport, "sharding_factor": program.sharding_factor}
    model = locked_build(program.seed + rank, program.dtype).to(program.device)
    optimizer = ZeroOptimizer(
        model,
        cls,
        stage=program.stage,
        bucket_cap_mb=program.bucket_cap_mb,
        collective=program.collective,
        **{"reshard_after_forward": program.reshard, **program.units},
        offload=program.offload,
        mixed_precision=program.precision,
        **({"rounding": program.rounding} if program.rounding is not None else {}),
        partition=program.partition or ("parameter" if program.optimizer in BY_PARAMETER else "element"),
        **where,
        **arguments,
    )

    assert optimizer.rank == rank

    def ready(step: Step) -> None:
        if step.reset is None or step.reset:
            optimizer.reset_states(None if step.reset is None else map(model.get_parameter, step.reset))

    scaler = scaler_of(program)
    norms, trace = follow(program, OnRank(model, optimizer), scaler, ready, lambda: scaler.step(optimizer))
    optimizer.check_replicas()
    optimizer.consolidate_state_dict(0)
    states = optimizer.state_dict() if rank == 0 else None
    optimizer.close()
    return model.cpu(), norms, trace, states


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
    theirs["state"] = {
        index: state for index, state in theirs["state"].items() if state
    }  # a class may leave empty ones
    assert_same_states(states, theirs)
    for index, master in states.get("masters", {}).items():
        assert_same_bits(master, plain.numbers.updated[index], f"master weights of parameter {index}")
