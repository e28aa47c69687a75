"""One rank of one run of `zero sweep`: trains a GPT under one system, and writes its measurements to a file.

Knows: steps, clocks, the memory of this process. Does not know: other runs, or the measurements of other ranks.
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
    """One run: a baseline, named by ``peer``, or ZeroOptimizer with these settings."""

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


@dataclass(frozen=True)
class RankResult:
    """The measurements of one rank. ``seconds``: of each timed step. ``peak``: the most bytes above its start during
    further steps, where a page that n processes share counts 1/n; None if the system does not report it. ``sha256``: of
    the trained parameters, for ZeroOptimizer."""

    seconds: list[float]
    peak: int | None
    sha256: str | None


def result_path(folder: Path, rank: int) -> Path:
    """The file of a rank's `RankResult`."""
    return folder / f"rank{rank}.json"


def work(settings: dict[str, Any]) -> None:
    """Train the `RunSpec` ``job``, and write a `RankResult` to ``folder``, which also takes the file of an offload. All
    ranks must call it."""
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
    del small  # now the memory that torch takes for a first step counts in the start
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
    barrier()  # when a rank ends, its share of the pages of libraries counts in the others
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
        offload=Offload(folder) if job.offload else None,
        **arguments,
    )


def _steps(corpus: Corpus, job: RunSpec, forward: nn.Module, optimizer: Any, numbers: range) -> Iterator[float]:
    """Take steps of one micro-batch for each rank, and yield the seconds of each."""
    for number in numbers:
        batch = corpus.micro_batch(job.seed, number, int(os.environ["RANK"]), job.batch, job.sequence)
        begin = time.perf_counter()
        loss: Tensor = loss_fn(forward(batch.inputs), batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        yield time.perf_counter() - begin


def _common_start() -> int | None:
    """Return the bytes of this process, without freed memory, while all ranks are idle. All ranks must call it."""
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
    """Give a list of the bytes of this process: at the start of the block, every few milliseconds, and at its end. The
    list stays empty if the system does not report them."""
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
