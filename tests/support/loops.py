"""The blocks of zero/recipes, their inputs, and the plain loops with which they are compared."""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .machine.classes import InBlocks, PlainClasses
from .models import seeded as seeded
from .plain import PlainRanks

ROOT = Path(__file__).resolve().parents[2]

Batch = Any
LossOf = Callable[[nn.Module, Batch], Tensor]
SchedulerOf = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


def blocks_of(text: str) -> dict[str, str]:
    """Return the Python block below each heading, of which there is one at most."""
    blocks: dict[str, str] = {}
    heading = ""
    for found in re.finditer(r"^```python\n(.*?)^```$|^#+ ([^\n]*)$", text, flags=re.MULTILINE | re.DOTALL):
        if found[1] is None:
            heading = found[2]
        else:
            assert heading not in blocks, f"two blocks below {heading!r}"
            blocks[heading] = found[1]
    return blocks


BLOCKS = blocks_of("\n".join(page.read_text() for page in sorted((ROOT / "zero" / "recipes").glob("*.md"))))


def code_of(heading: str) -> Any:
    return compile(BLOCKS[heading], f"recipe {heading!r}", "exec")


WIDTH, CLASSES, SAMPLES = 6, 3, 4


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))


class TextOrImage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Linear(WIDTH, 16)
        self.image = nn.Sequential(nn.Conv2d(1, 16, 2), nn.Flatten(), nn.Linear(16, 16))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        tower = self.text if inputs.ndim == 2 else self.image
        logits: Tensor = self.head(tower(inputs))
        return logits


class Halves(nn.Module):
    """`two_layers` in two parts of the hidden features, as a tensor-parallel model adds them up."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        for place in range(2):
            cut = {"up": model[0].weight.chunk(2)[place], "up_bias": model[0].bias.chunk(2)[place]}
            cut["down"] = model[2].weight.chunk(2, 1)[place]
            self.add_module(str(place), nn.ParameterDict({name: part.detach().clone() for name, part in cut.items()}))
        self.bias = nn.Parameter(model[2].bias.detach().clone())

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = []
        for part in (self.get_submodule("0"), self.get_submodule("1")):
            hidden = nn.functional.linear(inputs, part.get_parameter("up"), part.get_parameter("up_bias")).tanh()
            outputs.append(nn.functional.linear(hidden, part.get_parameter("down")))
        return outputs[0] + outputs[1] + self.bias


def with_norm_and_head() -> nn.Module:
    return nn.Sequential(OrderedDict(first=nn.Linear(WIDTH, 16), norm=nn.LayerNorm(16), head=nn.Linear(16, CLASSES)))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))


class WithExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 16, WIDTH) / 4)
        self.qkv, self.head = nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.qkv(torch.einsum("bi,eoi->bo", x, self.experts)).tanh())
        return found


class Block(nn.Module):
    """A block that uses twice the condition that it shares with other blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale, self.shift = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x) * self.scale(condition) + self.shift(condition))


class Conditioned(nn.Module):
    """Blocks that share a condition: compiling the whole model is another case than compiling each block."""

    def __init__(self) -> None:
        super().__init__()
        self.condition, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        condition = torch.tanh(self.condition(x))
        for block in self.blocks:
            x = block(x, condition)
        found: Tensor = self.head(x)
        return found


def even(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(SAMPLES, WIDTH, generator=generator), torch.randn(SAMPLES, CLASSES, generator=generator))
        for _ in range(count)
    ]


def uneven(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(x[: 1 + j % SAMPLES], y[: 1 + j % SAMPLES]) for j, (x, y) in enumerate(even(count))]


def text_and_images(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    images = [torch.randn(SAMPLES, 1, 2, 2, generator=generator) for _ in range(count)]
    return [(images[j] if j % 2 else x, y) for j, (x, y) in enumerate(even(count))]


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    outputs: Tensor = model(batch[0])
    return nn.functional.mse_loss(outputs.float(), batch[1])


def total_loss(model: nn.Module, batch: Batch) -> Tensor:
    outputs: Tensor = model(batch[0])
    return nn.functional.mse_loss(outputs.float(), batch[1], reduction="sum")


def sum_of_losses(model: nn.Module, batch: Batch) -> Tensor:
    return mean_loss(model, batch) + mean_loss(model, (-batch[0], -batch[1]))


def loss_in_chunks(model: Any, batch: Batch) -> Tensor:
    """Return the mean loss, of which the last module and the sum see two rows at a time."""
    chunks = zip(model[:-1](batch[0]).split(2), batch[1].split(2), strict=True)
    total: Any = sum(nn.functional.mse_loss(model[-1](rows), targets, reduction="sum") for rows, targets in chunks)
    return total / batch[1].numel()  # type: ignore[no-any-return]


def second_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Run a backward of the first loss, and return a second one."""
    mean_loss(model, batch).backward()  # type: ignore[no-untyped-call]
    return mean_loss(model, (-batch[0], -batch[1]))


def autocast_loss(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        outputs: Tensor = model(batch[0])
    return nn.functional.mse_loss(outputs.float(), batch[1])


def tokens_of(batches: Sequence[Batch]) -> float:
    return sum(batch[1].numel() for batch in batches)


def constant(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)


def resetting(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer that forgets the states of its first two parameters before its third step."""
    optimizer, taken = adamw(parameters), itertools.count()

    def forget(*_: Any) -> None:
        for parameter in parameters[:2] if next(taken) == 2 else ():
            del optimizer.state[parameter]

    optimizer.register_step_pre_hook(forget)
    return optimizer


def schedule_free(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer in train mode that changes to eval mode after its fourth step."""
    from schedulefree import AdamWScheduleFree

    optimizer = AdamWScheduleFree(parameters, lr=1e-2)
    optimizer.register_step_post_hook(lambda *_: optimizer.eval() if optimizer.param_groups[0]["k"] == 4 else None)
    optimizer.train()
    return optimizer  # type: ignore[no-any-return]


def mask_eight_rows(loop: PlainRanks) -> None:
    for parameter in loop.held[:2]:
        assert parameter.grad is not None
        parameter.grad[:8] = 0.0


MUON: dict[str, Any] = {"optimizer_class": torch.optim.Muon, "lr": 2e-2}


def muon_and_adamw(params: Sequence[Tensor]) -> torch.optim.Optimizer:
    named = [(str(number), p) for number, p in enumerate(params)]
    matrices, rest = ([(name, p) for name, p in named if (p.dim() == 2) is wide] for wide in (True, False))
    return PlainClasses(torch.optim.AdamW, {"lr": 1e-2}, [{"params": matrices, **MUON}, {"params": rest}])


def muon_in_blocks(params: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer of the parameters of `WithExperts`."""
    experts, projections, *rest = ((str(number), p) for number, p in enumerate(params))
    blocks = [{"params": [experts], "blocks": 0, **MUON}, {"params": [projections], "blocks": [8, 4, 4], **MUON}]
    return InBlocks(torch.optim.AdamW, {"lr": 1e-2}, [*blocks, {"params": rest}])


def adamw(params: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


@dataclass(frozen=True)
class PlainLoop:
    """A training loop in one process: ``together`` micro-batches in turn, one division, clip, step."""

    loss_of: LossOf = mean_loss
    together: int = 2
    divisor: Callable[[Sequence[Batch]], float] = len
    precision: Any = None
    scale: float | None = None
    rounding: Any = None
    scheduler: SchedulerOf = constant
    optimizer_of: Callable[[Sequence[Tensor]], torch.optim.Optimizer] = adamw
    max_norm: float = 1.0
    before_clip: Callable[[PlainRanks], None] = lambda _: None
    optimizer: torch.optim.Optimizer | None = None  # an existing optimizer of the model; a new AdamW by default

    def run(self, model: nn.Module, batches: Sequence[Batch]) -> torch.optim.Optimizer:
        """Train ``model``; return its optimizer."""
        numbers = {"precision": self.precision, "rounding": self.rounding}
        loop = PlainRanks(model, lambda updated: self.optimizer or self.optimizer_of(updated), **numbers)
        scheduler = self.scheduler(loop.optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=self.scale or 1.0, enabled=self.scale is not None)
        handle = model.register_forward_pre_hook(self._cast)
        for begin in range(0, len(batches), self.together):
            chosen = batches[begin : begin + self.together]
            for batch in chosen:
                loop.backward(0, lambda batch=batch: scaler.scale(self.loss_of(model, batch)).backward())  # type: ignore[misc]
            loop.divisor = self.divisor(chosen)
            loop.settle()
            self.before_clip(loop)
            scaler.unscale_(loop.optimizer)
            loop.clip(self.max_norm)
            loop.step(scaler)
            scaler.update()
            scheduler.step()
            loop.clear()
        handle.remove()
        return loop.optimizer

    def _cast(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        dtype = getattr(self.precision, "param_dtype", None)
        if dtype is None:  # or modules cast by themselves
            return inputs
        return tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)
