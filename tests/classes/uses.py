"""The optimizer classes of six libraries, and the arguments and parameters that each is documented to take.

Knows: which names of a library are optimizers. Does not know: what is tried with them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

LIBRARIES = {
    "torch": "torch.optim",
    "muon": "muon",
    "schedulefree": "schedulefree",
    "torchao": "torchao.optim",
    "bitsandbytes": "bitsandbytes.optim",
    "pytorch_optimizer": "pytorch_optimizer",
}
PACKAGES = {"muon": "muon-optimizer"}  # where a package's name is another one than its module's
RATE = {"lr": 1e-2}
IMAGES = torch.Size((4, 1, 6, 6))


class Shapes(nn.Module):
    """A model with parameters of no, one, two and four dimensions. The matrix is large enough for states in 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.kernels = nn.Conv2d(1, 6, 3)
        self.head = nn.Linear(6 * 4 * 4, 128)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.kernels(images)).flatten(1)) * self.scale
        return found


def matrices() -> nn.Module:
    """Return a model of matrices, for classes that take nothing else."""
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 128, bias=False), nn.Tanh(), nn.Linear(128, 64, bias=False))


MODELS: dict[str, Callable[[], nn.Module]] = {"of 0, 1, 2 and 4 dimensions": Shapes, "matrices": matrices}


def hidden_and_rest(key: str, model: nn.Module) -> list[dict[str, Any]]:
    """Return param groups as classes of Muon's kind take them: matrices, and all else, which AdamW steps."""
    found = list(model.parameters())
    return [
        {"params": [p for p in found if p.ndim >= 2], key: True},
        {"params": [p for p in found if p.ndim < 2], key: False},
    ]


@dataclass(frozen=True)
class Use:
    """The arguments of a class beside the parameters, and its param groups; None: the parameters of the model."""

    arguments: dict[str, Any] = field(default_factory=lambda: dict(RATE))
    steps: int = 12
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None


MUON = Use(groups=partial(hidden_and_rest, "use_muon"))
SLOW = Use(steps=3)
BASE = Use({"base_optimizer": torch.optim.SGD, **RATE})
MOMENTUM = Use({**RATE, "momentum": 0.9})
USES = {
    **{f"bitsandbytes.{name}{bits}": MOMENTUM for name in ("LARS", "SGD") for bits in ("", "8bit", "32bit")},
    "bitsandbytes.PytorchLARS": MOMENTUM,
    "muon.SingleDeviceMuon": SLOW,
    **{f"muon.{name}MuonWithAuxAdam": replace(MUON, arguments={}) for name in ("", "SingleDevice")},
    **{f"pytorch_optimizer.{name}": MUON for name in ("AdaGO", "AdaMuon", "DistributedMuon", "Muon", "NorMuon")},
    "pytorch_optimizer.MuonClip": MUON,
    **{f"pytorch_optimizer.{name}": BASE for name in ("SAM", "LookSAM", "FriendlySAM")},
    "pytorch_optimizer.ScalableShampoo": Use(steps=30),  # it preconditions from its 25th step on
    **{f"pytorch_optimizer.{name}": SLOW for name in ("Kron", "Shampoo", "SpectralSphere")},
    "pytorch_optimizer.BSAM": Use({**RATE, "num_data": 24}),
    "pytorch_optimizer.Ranger21": Use({**RATE, "num_iterations": 100}),
}


REFUSED = {  # words of each error, and the classes that are refused with them
    "alone gave different bits than stepping it with others (within": (
        *("ASGD", "AdaGC", "Adai", "AdamS", "AvaGrad", "DAdaptAdam", "DAdaptSGD", "Prodigy", "Ranger21"),
    ),
    "differently for one parameter than for several": ("DAdaptAdaGrad", "DAdaptAdan", "DAdaptLion"),
    "it draws random numbers": ("Alice", "DASH", "Gravity", "Kron"),
    "a step over several parameters failed": ("LoRARite",),  # it steps pairs of matrices
    "'total_step', which is no parameter": ("SPAM",),
    "closure": (
        *("torch.LBFGS", "AliG", "BSAM", "FriendlySAM", "LookSAM", "SAM"),
        *(f"schedulefree.{name}ScheduleFreeClosure" for name in ("AdamW", "RAdam", "SGD")),
    ),
    "does not require grad": ("AdaHessian", "SophiaH"),  # they differentiate gradients
    "does not support dense gradients": ("torch.SparseAdam",),
    "takes a model, so ranks cannot": ("AdaLOMO", "AdamMini", "GSAM", "LOMO", "WSAM"),
    "another optimizer": (
        *("Lookahead", "Magma", "OrthoGrad", "PCGrad", "SafeFP16Optimizer", "ScheduleFreeWrapper", "TRAC"),
        "torchao.CPUOffloadOptimizer",
    ),
    "not derived from torch.optim.Optimizer": (
        *("CPUOffloadOptimizer", "schedulefree.ScheduleFreeWrapper", "schedulefree.ScheduleFreeWrapperReference"),
    ),
    "of torch.distributed": ("DistributedMuon", "muon.Muon", "muon.MuonWithAuxAdam"),
    "`einops`": ("DeMo",),
    "0-dim tensor": ("bitsandbytes.AdEMAMix32bit", "bitsandbytes.PagedAdEMAMix32bit"),  # their step fails on the CPU
}


def reason_of(name: str) -> str | None:
    """Return words of the error with which a class is refused; None: it is not."""
    own = name.removeprefix("pytorch_optimizer.")
    return next((words for words, names in REFUSED.items() if own in names), None)


def use_of(name: str) -> Use:
    """Return how a class, given with its library, is used: with a rate alone, if nothing else is known."""
    return USES.get(name, Use())


def class_of(name: str) -> Any:
    """Return a class, given with its library."""
    library, _, own = name.partition(".")
    return getattr(importlib.import_module(LIBRARIES[library]), own)


def names_of(library: str) -> Iterator[str]:
    """Yield the names of a library's own optimizers, with the library: those that it exports and that can step."""
    module = importlib.import_module(LIBRARIES[library])
    for name in getattr(module, "__all__", dir(module)):
        found = getattr(module, name)
        own = isinstance(found, type) and found.__module__.startswith(LIBRARIES[library].partition(".")[0])
        steps = all(callable(getattr(found, call, None)) for call in ("step", "zero_grad"))
        if own and steps and found is not torch.optim.Optimizer and not inspect.isabstract(found):
            yield f"{library}.{name}"
