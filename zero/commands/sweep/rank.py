"""One rank of one run of `zero sweep`: trains a GPT under one system, and leaves what it saw in a file.

Knows: steps, clocks, the memory of this process. Does not know: which runs there are, or what the others saw.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ... import Offload, ZeroOptimizer
from ..runner import barrier, process_group, run_rank
from ..train.data import Corpus, load_corpus
from ..train.memory_stats import parameters_sha256, proportional_set_size
from ..train.model import build_model, loss_fn
from .baselines import baselines

__all__ = ["RankResult", "RunSpec", "result_path", "work"]

LEARNING_RATE = 1e-3
WARMUP_STEPS = 2  # the first step makes the optimizer's states
SAMPLED_STEPS = 2
SAMPLING_INTERVAL = 0.005


@dataclass(frozen=True)
class RunSpec:
    """What to train: ``peer`` by name, or ZeroOptimizer with these dials."""

    preset: str
    batch: int
    sequence: int
    steps: int
    seed: int
    threads: int
    bucket_cap_mb: float
    peer: str | None = None
    stage: int = 0
    sharding_factor: int | None = None
    reshard: bool | int = True
    offload: bool = False
    offload_parameters: bool = False


@dataclass(frozen=True)
class RankResult:
    """One rank's. ``seconds``: of each timed step; ``peak``: the most bytes that it held above its start, a page that n
    processes share counting 1/n, during further steps; None where the system does not tell. ``sha256``: of the trained
    parameters, where all are at hand."""

    seconds: list[float]
    peak: int | None
    sha256: str | None


def result_path(folder: Path, rank: int) -> Path:
    """The file that this rank leaves."""
    return folder / f"rank{rank}.json"


def work(settings: dict[str, Any]) -> None:
    """Train a `RunSpec`, the ``job``. All ranks. Each writes its `RankResult` to ``folder``, where the file of an
    offload goes, too."""
    job, folder = RunSpec(**settings["job"]), Path(settings["folder"])
    torch.set_num_threads(job.threads)
    with process_group():
        result = _train(job, folder)
    result_path(folder, int(os.environ["RANK"])).write_text(json.dumps(asdict(result)))


def _train(job: RunSpec, folder: Path) -> RankResult:
    corpus = load_corpus(None, job.sequence)
    by_name = {peer.name: peer for peer in baselines(int(os.environ["WORLD_SIZE"]))}
    arguments: dict[str, Any] = {"lr": LEARNING_RATE, "fused": True}
    small = build_model("tiny", job.sequence, job.seed)
    _exhaust(_steps(corpus, replace(job, batch=1), small, torch.optim.AdamW(small.parameters(), **arguments), range(1)))
    del small  # what torch itself takes for a first step is there now
    start = _common_start()
    model = build_model(job.preset, job.sequence, job.seed)
    forward: nn.Module = model
    optimizer: Any
    if job.peer is None:
        optimizer = _zero_optimizer(job, folder, model, arguments)
    else:
        forward, optimizer = by_name[job.peer].build(model, model.blocks, arguments)

    timed = WARMUP_STEPS + job.steps
    _exhaust(_steps(corpus, job, forward, optimizer, range(WARMUP_STEPS)))
    seconds = list(_steps(corpus, job, forward, optimizer, range(WARMUP_STEPS, timed)))
    with _sampled() as sizes:
        _exhaust(_steps(corpus, job, forward, optimizer, range(timed, timed + SAMPLED_STEPS)))
    barrier()  # a rank that ends leaves the others its share of the pages of libraries
    peak = None if start is None or not sizes else max(sizes) - start
    if not isinstance(optimizer, ZeroOptimizer):
        return RankResult(seconds, peak, None)
    optimizer.close()
    return RankResult(seconds, peak, parameters_sha256(model))


def _zero_optimizer(job: RunSpec, folder: Path, model: nn.Module, arguments: dict[str, Any]) -> ZeroOptimizer:
    return ZeroOptimizer(
        model,
        torch.optim.AdamW,
        stage=job.stage,
        bucket_cap_mb=job.bucket_cap_mb,
        sharding_factor=job.sharding_factor,
        reshard_after_forward=job.reshard,
        offload=Offload(folder, job.offload_parameters) if job.offload else None,
        **arguments,
    )


def _steps(corpus: Corpus, job: RunSpec, forward: nn.Module, optimizer: Any, numbers: range) -> Iterator[float]:
    """Seconds of each step: of a micro-batch for each rank."""
    for number in numbers:
        batch = corpus.micro_batch(job.seed, number, int(os.environ["RANK"]), job.batch, job.sequence)
        begin = time.perf_counter()
        loss: Tensor = loss_fn(forward(batch.inputs), batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        yield time.perf_counter() - begin


def _common_start() -> int | None:
    """What this process holds, without what was freed, while every rank stands still. All ranks."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)
    barrier()
    start = proportional_set_size()
    barrier()
    return start


def _exhaust(steps: Iterable[float]) -> None:
    for _ in steps:
        pass


@contextmanager
def _sampled() -> Iterator[list[int]]:
    """What this process holds: at the beginning, every few milliseconds, at the end. Empty where the system does not
    tell."""
    sizes: list[int] = []
    over = threading.Event()

    def take_sample() -> None:
        size = proportional_set_size()
        if size is not None:
            sizes.append(size)

    def keep_sampling() -> None:
        while not over.wait(SAMPLING_INTERVAL):
            take_sample()

    take_sample()
    sampler = threading.Thread(target=keep_sampling, daemon=True)
    sampler.start()
    try:
        yield sizes
    finally:
        over.set()
        sampler.join()
        take_sample()


if __name__ == "__main__":
    sys.exit(run_rank(work))
