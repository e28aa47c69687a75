"""`python -m tests.event_cost`: the cost of the events of a step if no profiler runs and no logger is enabled.

One rank trains a deep model of small units, each with a bucket of its own: many events for little work. The number of
events is the number of lines that the logger ``zero`` writes at DEBUG in a step. Times are CPU times of this thread.
The least of several rounds is reported, so that a busy machine changes little.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from torch import nn

from zero import ZeroOptimizer
from zero.core.stage import STAGES
from zero.runtime.profiler_ranges import LOG, ProfilerRange

DEPTH, WIDTHS, BATCH, ROUNDS = 16, (32, 128, 512), 32, 15


class _Count(logging.Handler):
    """A log handler that counts lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += 1


def least(call: Callable[[], object], times: int) -> float:
    """Return the seconds of one call, the least of `ROUNDS` means over ``times`` calls."""
    found = []
    for _ in range(ROUNDS):
        begin = time.thread_time()
        for _ in range(times):
            call()
        found.append((time.thread_time() - begin) / times)
    return min(found)


def _one_event(event: ProfilerRange) -> None:
    with event():
        pass


def _events_of(step: Callable[[], object]) -> int:
    handler = _Count()
    LOG.addHandler(handler)
    LOG.setLevel(logging.DEBUG)
    step()
    LOG.setLevel(logging.NOTSET)
    LOG.removeHandler(handler)
    return handler.lines


def main() -> None:
    torch.set_num_threads(1)
    LOG.propagate = False
    event = ProfilerRange("update bucket 0", "rank 0")
    cost = least(lambda: _one_event(event), 10_000) - least(lambda: None, 10_000)
    print(f"torch {torch.__version__}, one event: {cost * 1e6:.2f} µs")
    print(f"{DEPTH} units of two linear layers, {BATCH} rows")
    for stage in sorted(STAGES):
        for width in WIDTHS:
            units = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(DEPTH)]
            model, rows = nn.Sequential(*units), torch.randn(BATCH, width)
            optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, bucket_cap_mb=8.8 * width * width / 2**20)

            def step(model: nn.Module = model, rows: torch.Tensor = rows, optimizer: ZeroOptimizer = optimizer) -> None:
                model(rows).square().mean().backward()
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()

            step()
            number, seconds = _events_of(step), least(step, 3)
            share = number * cost / seconds
            print(
                f"stage {stage}, width {width:3}: {len(optimizer.describe().buckets)} buckets, {number:3} events, "
                f"{number * cost * 1e6:5.1f} µs of a step of {seconds * 1e3:6.2f} ms: {share:.2%}"
            )
            optimizer.close()


if __name__ == "__main__":
    main()
