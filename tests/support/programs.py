"""Training programs as data, run by the plain loop and by W ranks side by side.

A program is a list of steps. A step is a list of rounds (each rank runs one backward, or none if it has run out of
micro-batches), then clips, then perhaps a step, then one of the ways to clear gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import MixedPrecision, Offload, ZeroOptimizer

from .models import Odd, build, odd_batches, odd_loss
from .plain import Clear, PlainRanks, assert_same_bits, assert_same_model, assert_same_states, clear
from .shampoo import Shampoo

CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "adamw fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "adamw foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "adam amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "sgd fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.5, "centered": True}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "adamax": (torch.optim.Adamax, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "asgd": (torch.optim.ASGD, {}),
    "rprop": (torch.optim.Rprop, {}),
}

BY_PARAMETER: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {  # they step whole parameters alone
    "shampoo": (Shampoo, {"lr": 0.05}),
}
MATRICES = {"muon": (torch.optim.Muon, {"lr": 1e-2})}  # it takes matrices alone, and steps them whole
FOR_LOOP = {"adamw for-loop": (torch.optim.AdamW, {"lr": 1e-2, "foreach": False})}  # torch's default only on the CPU


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
    precision: MixedPrecision | None = None
    scaled: bool = False
    steps: tuple[Step, ...] = field(default_factory=lambda: (Step(), Step(), Step()))
    seed: int = 0

    def optimizer_class(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        return (CLASSES | FOR_LOOP | BY_PARAMETER)[self.optimizer]


def scaler_of(program: Program) -> torch.amp.GradScaler:
    """Return a scaler that grows often; a disabled one if losses are not scaled."""
    return torch.amp.GradScaler(program.device, init_scale=64.0, growth_interval=2, enabled=program.scaled)


def scaled_backward(
    model: nn.Module, program: Program, scaler: torch.amp.GradScaler, step: int, round_: int, rank: int
) -> None:
    """Run the backward of a micro-batch."""
    handle = None
    if program.steps[step].overflow == (round_, rank):
        handle = model.get_parameter("last.bias").register_hook(lambda g: torch.cat([g[:3], g[3:4] / 0, g[4:]]))
    scaler.scale(odd_loss(model, batch_of(program, step, round_, rank))).backward()
    if handle is not None:
        handle.remove()


def batch_of(program: Program, step: int, round_: int, rank: int) -> tuple[Tensor, bool]:
    """Return a micro-batch. Ranks use different parameters, except at stage 3, where that would be an error."""
    tokens = odd_batches(1, program.seed + 1000 * step + 10 * round_ + rank)[0][0]
    return tokens.to(program.device), (step + round_ + (rank if program.stage < 3 else 0)) % 3 == 1


class Plain(PlainRanks):
    """The plain loop of a program."""

    def __init__(self, program: Program) -> None:
        cls, arguments = program.optimizer_class()
        model = build(program.seed, program.dtype).to(program.device)
        super().__init__(model, lambda updated: cls(updated, **arguments), program.world_size, program.precision)
        self.program, self.scaler = program, scaler_of(program)
        self.norms: list[Tensor] = []
        self.trace: list[list[Tensor]] = []

    def run(self) -> None:
        for number, step in enumerate(self.program.steps):
            prepare(self.model, self.optimizer, step)
            self.divisor = step.divisor if step.divisor is not None else self.program.world_size
            for count, round_ in enumerate(step.rounds):
                for rank in range(self.world_size if round_.ranks is None else round_.ranks):
                    micro_batch = partial(scaled_backward, self.model, self.program, self.scaler, number, count, rank)
                    self.backward(rank, micro_batch, round_.sync)
            self.settle()
            self._reset(step)
            if step.unscale:
                self.scaler.unscale_(self.optimizer)
            self.norms += [self.clip(max_norm, norm_type) for max_norm, norm_type in step.clips]
            if step.step:
                self.step(self.scaler)
                self.scaler.update()
            self.norms.append(torch.tensor(self.scaler.get_scale()))
            self.clear(step.clear)
            self.trace.append([p.detach().clone().cpu() for p in self.model.parameters()])

    def _reset(self, step: Step) -> None:
        """Put the states of the class's constructor in place of those of parameters; most classes make none there."""
        cls, arguments = self.program.optimizer_class()
        chosen = dict(self.model.named_parameters()) if step.reset is None else step.reset
        for p, updated in zip(self.parameters, self.numbers.updated, strict=True):
            if any(self.model.get_parameter(name) is p for name in chosen):
                self.optimizer.state.pop(updated, None)
                self.optimizer.state.update(cls([updated], **arguments).state)


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer, step: Step) -> None:
    for name in step.toggle:
        parameter = model.get_parameter(name)
        parameter.requires_grad_(not parameter.requires_grad)
    if step.lr is not None:
        for group in optimizer.param_groups:
            group["lr"] = step.lr


_BUILDING = threading.Lock()  # all threads share torch's generator


def locked_build(seed: int, dtype: torch.dtype = torch.float32) -> Odd:
    with _BUILDING:
        return build(seed, dtype)


def run_rank(
    program: Program, transport: Any
) -> tuple[nn.Module, list[Tensor], list[list[Tensor]], dict[str, Any] | None]:
    """Run the program on one rank.

    Return the model, the norms, the parameters after each step, and on rank 0 the states; all on the CPU.
    """
    cls, arguments = program.optimizer_class()
    rank = transport.rank if isinstance(transport, Transport) else torch.distributed.get_rank(transport)
    model = locked_build(program.seed + rank, program.dtype).to(program.device)
    optimizer = ZeroOptimizer(
        model,
        cls,
        stage=program.stage,
        process_group=transport,
        bucket_cap_mb=program.bucket_cap_mb,
        collective=program.collective,
        sharding_factor=program.sharding_factor,
        reshard_after_forward=program.reshard,
        offload=program.offload,
        mixed_precision=program.precision,
        partition=program.partition or ("parameter" if program.optimizer in BY_PARAMETER else "element"),
        **arguments,
    )
    norms: list[Tensor] = []
    trace = []
    scaler = scaler_of(program)
    for number, step in enumerate(program.steps):
        prepare(model, optimizer, step)
        optimizer.divisor = step.divisor if step.divisor is not None else program.world_size
        for count, round_ in enumerate(step.rounds):
            if round_.ranks is not None and rank >= round_.ranks:
                continue
            with nullcontext() if round_.sync else optimizer.no_sync():
                scaled_backward(model, program, scaler, number, count, rank)
        if step.reset is None or step.reset:
            optimizer.reset_states(None if step.reset is None else map(model.get_parameter, step.reset))
        if step.unscale:
            scaler.unscale_(optimizer)
        norms += [optimizer.clip_grad_norm_(max_norm, norm_type) for max_norm, norm_type in step.clips]
        if step.step:
            scaler.step(optimizer)
            scaler.update()
        norms.append(torch.tensor(scaler.get_scale()))
        clear(model, optimizer, step.clear)
        with optimizer.gathered():
            trace.append([p.detach().clone().cpu() for p in model.parameters()])
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
    assert_same_states(states, plain.optimizer.state_dict())
    for index, master in states.get("masters", {}).items():
        assert_same_bits(master, plain.numbers.updated[index], f"master weights of parameter {index}")
