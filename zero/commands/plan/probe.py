"""One rank of `zero plan --measure`: times what the equations of a plan are made of, while all ranks do the same.

Knows: clocks, and the smallest program that shows each cost. Does not know: other ranks' results, files of hardware.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ... import Offload, ZeroOptimizer
from ...planning.measured import TimedPasses
from ...planning.models.meta_results import on_meta
from ...planning.models.works import count_module, together
from ...runtime.offload import backend_for
from ..runner import barrier, process_group, run_rank
from ..train.model import GPT, Shape, loss_fn

__all__ = ["Probed", "result_path", "work"]

MODELS = (
    *((width, micro, length) for width in (64, 128, 256, 512) for micro, length in ((1, 32), (1, 128), (4, 128))),
    *((width, 1, length) for width in (64, 128) for length in (512, 1024, 2048)),
)
LAYERS = 2
PRODUCT = 512  # rows and columns
NUMBERS = 8 << 20  # of a copy, an update, a bucket on disk: larger than caches
BUCKETS = 4  # on disk
DTYPES = ("float32", "float64", "bfloat16", "float16")
LONG = 10  # times that for the disk, which takes the first writes faster than it can go on
LEAST = 3  # times at least


@dataclass(frozen=True)
class Probed:
    """The seconds that one rank measured. ``passes``: (forward, backward) of each of `MODELS`; ``products``: of a
    product, by the name of the dtype; ``disk``: in which `NUMBERS` fp32 are read from the disk and written back."""

    passes: list[tuple[float, float]]
    products: dict[str, float]
    copy: float
    update: float
    message: float
    disk: float

    def timed(self) -> Iterator[TimedPasses]:
        """Yield the passes with what they do."""
        for (width, micro, length), (forward, backward) in zip(MODELS, self.passes, strict=True):
            with on_meta():
                model, tokens = _model(width, length), torch.empty(micro, length, dtype=torch.int64)
            works = count_module(model, partial(_loss, tokens))
            weights = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
            yield TimedPasses(together(works), weights, forward, backward)


@dataclass(frozen=True)
class _Stopwatch:
    """Measures each part for so many ``seconds``. All ranks are those of ``optimizer``."""

    seconds: float
    optimizer: ZeroOptimizer

    def times(self, *parts: Callable[[], object], longer: int = 1) -> list[float]:
        """Run the parts in turn, ``longer`` times as long as usual, and return the median seconds of each.

        All ranks begin at the same time, and run them equally often, since a part may be a collective.
        """
        for part in parts:
            part()
        barrier()
        begin = time.perf_counter()
        for part in parts:
            part()
        turns = max(int(longer * self.seconds / (time.perf_counter() - begin)), LEAST)
        turns = int(self.optimizer.exchange(str(turns).encode())[0])
        found: list[list[float]] = [[] for _ in parts]
        barrier()
        for _ in range(turns):
            for part, seconds in zip(parts, found, strict=True):
                begin = time.perf_counter()
                part()
                seconds.append(time.perf_counter() - begin)
        return [statistics.median(seconds) for seconds in found]


def result_path(folder: Path, rank: int) -> Path:
    """The file of a rank's `Probed`."""
    return folder / f"rank{rank}.json"


def work(settings: dict[str, Any]) -> None:
    """Measure, and write a `Probed` to ``folder``, in which the disk is measured, too. All ranks must call it."""
    folder = Path(settings["folder"])
    torch.set_num_threads(1)
    with process_group():
        optimizer = ZeroOptimizer(nn.Linear(1, 1), torch.optim.SGD)
        found = _probed(folder, _Stopwatch(settings["seconds"], optimizer))
        optimizer.close()
    result_path(folder, int(os.environ["RANK"])).write_text(json.dumps(asdict(found)))


def _probed(folder: Path, clock: _Stopwatch) -> Probed:
    (message,) = clock.times(lambda: clock.optimizer.exchange(b""))
    return Probed(
        passes=[_passes(clock, *sizes) for sizes in MODELS],
        products={name: _product(clock, getattr(torch, name)) for name in DTYPES},
        copy=_copy(clock),
        update=_update(clock),
        message=message,
        disk=_disk(clock, folder),
    )


def _model(width: int, length: int) -> nn.Module:
    return GPT(Shape(layers=LAYERS, heads=width // 32, width=width), length)


def _loss(tokens: Tensor, model: nn.Module) -> Tensor:
    return loss_fn(model(tokens), tokens)


def _passes(clock: _Stopwatch, width: int, micro: int, length: int) -> tuple[float, float]:
    """Return the seconds of a forward and of a backward."""
    model, tokens = _model(width, length), torch.randint(0, 256, (micro, length))
    loss = list[Tensor]()

    def forward() -> None:
        model.zero_grad()
        loss[:] = [_loss(tokens, model)]

    def backward() -> None:
        loss.pop().backward()  # type: ignore[no-untyped-call]

    first, second = clock.times(forward, backward)
    return first, second


def _product(clock: _Stopwatch, dtype: torch.dtype) -> float:
    left, right = torch.ones(PRODUCT, PRODUCT, dtype=dtype), torch.ones(PRODUCT, PRODUCT, dtype=dtype)
    (seconds,) = clock.times(lambda: torch.mm(left, right))
    return seconds


def _copy(clock: _Stopwatch) -> float:
    source, target = torch.ones(NUMBERS), torch.empty(NUMBERS)
    (seconds,) = clock.times(lambda: target.copy_(source))
    return seconds


def _update(clock: _Stopwatch) -> float:
    weights = nn.Parameter(torch.ones(NUMBERS))
    weights.grad = torch.ones(NUMBERS)
    optimizer = torch.optim.AdamW([weights], fused=True)
    (seconds,) = clock.times(optimizer.step)
    return seconds


def _disk(clock: _Stopwatch, folder: Path) -> float:
    """Return the seconds that a bucket on disk costs beside one in memory: it is read while the one before is changed,
    and written after."""
    backend = backend_for(Offload(folder), torch.device("cpu"))
    assert backend is not None
    backend.reserve([(NUMBERS, torch.float32)] * BUCKETS)
    on_disk = [backend.empty(NUMBERS, torch.float32) for _ in range(BUCKETS)]
    in_memory = [torch.zeros(NUMBERS) for _ in range(BUCKETS)]

    def step_in_memory() -> None:
        for bucket in in_memory:
            bucket.add_(1)

    def step_on_disk() -> None:
        backend.prefetch(on_disk[:1])
        for number, bucket in enumerate(on_disk):
            backend.prefetch(on_disk[number + 1 : number + 2])
            bucket.add_(1)
            backend.evict([bucket])

    there, here = clock.times(step_on_disk, step_in_memory, longer=LONG)
    backend.close()
    return max(there - here, 0.0) / BUCKETS


if __name__ == "__main__":
    sys.exit(run_rank(work))
