"""Sections c and d: several ranks.

In section c this process is the last of several ranks, whose peers answer at once (`peers`): ours beside FSDP2.

    narrow   the host's time of each phase, of all systems in turn: 1/32 of the width, so that the calls decide
    wide     seven billion parameters on the device: steps in a row, then one under torch's profiler

FSDP2 and ours compute in bf16, with fp32 master weights. The plain loop has bf16 parameters.

Section d runs tests of bits among ranks that share the GPU over NCCL, by pytest in a process of its own. Torch is
deterministic there, unlike in section b: whether attention's backward adds in any order is seen by comparing.

Knows: steps, clocks, the profiler, tests by name. Does not know: how peers answer, what the tests do.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from collectives.kernels import DeviceKernels
from zero import MixedPrecision, ZeroOptimizer
from zero.core.buckets import DEFAULT_CAP_MB

from ..systems import fully_sharded
from .clock import Host, clock, freed_memory_is_kept
from .cpu_kernels import Launcher, compiled, put_in
from .job import ROOT, Row, ShortJob
from .peers import (
    NARROW,
    NARROWER,
    SEVEN_BILLION,
    TINY,
    Llama,
    answered,
    build,
    device_paths,
    join_fake_group,
    tokens,
)

PLAIN, FSDP2, OURS = "plain", "FSDP2", "zero 3"
FEWEST, SMALL = 1 << 20, DEFAULT_CAP_MB * NARROWER  # MiB: a bucket for each unit or the model; as many as of 25 in wide
SETTINGS = {OURS: (3, FEWEST), "zero 3, 25 MiB": (3, SMALL), "zero 2": (2, FEWEST), "zero 2, 25 MiB": (2, SMALL)}
MAX_NORM, PRECISION = 1.0, torch.bfloat16
ADAMW: dict[str, Any] = {"lr": 1e-4, "fused": True}
PHASES = ("forward", "backward", "clip", "step")
NARROW_TOKENS, WIDE_TOKENS = 4, 2048
WARM, IN_A_ROW, NAMED_KERNELS = 3, 5, 12
PROCESSORS = 2  # for which the kernels choose their blocks
FILE, GPU = "tests/ci/gpu/test_nccl.py", "cuda:0"  # as the tests call it
PROGRAMS = ("W2 stage 3, mixed", "W4 in replicas of 2, stage 3", "W2 stage 0")
STAGES = (1, 3)  # of the tests with attention
TEST_LIMIT = 100  # seconds of a test; those of attention compile nothing, and take ten
ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories of a trace
LOOKS = re.compile(r"DtoH|Device -> Pageable|Device -> Pinned")  # copies that the host waits for


@dataclass(frozen=True)
class _Loop:
    """A model under a system. The phases of a step are called in their order, and then ``clear``."""

    forward: Callable[[Tensor], Tensor]
    clip: Callable[[], Tensor]
    step: Callable[[], object]
    clear: Callable[[], object]
    parameters: int
    close: Callable[[], object] = lambda: None
    buckets: Callable[[], int] = lambda: 0
    messages: Callable[[], int] = lambda: 0

    def run(self, batch: Tensor) -> None:
        """Run a step."""
        torch.autograd.backward(self.forward(batch))
        self.clip()
        self.step()
        self.clear()


def _loop(system: str, shape: Llama, device: str) -> _Loop:
    """Put a system around a new model."""
    model = build(shape, torch.device(device))
    count = len(list(model.parameters()))
    if system == PLAIN:
        return _torch_loop(model.to(PRECISION), count)
    if system == FSDP2:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy = MixedPrecisionPolicy(param_dtype=PRECISION)
        return _torch_loop(fully_sharded(model, model.blocks, mp_policy=policy), count)
    stage, cap_mb = SETTINGS[system]
    optimizer = ZeroOptimizer(
        model,
        torch.optim.AdamW,
        stage=stage,
        process_group=answered(),
        collective="all_to_all",  # what "auto" chooses among the GPUs of a host
        mixed_precision=MixedPrecision(PRECISION),
        bucket_cap_mb=cap_mb,
        **ADAMW,
    )
    return _Loop(
        model,
        lambda: optimizer.clip_grad_norm_(MAX_NORM),
        optimizer.step,
        optimizer.zero_grad,
        count,
        optimizer.close,
        lambda: len(optimizer._storage.buckets),
        lambda: optimizer.traffic.messages,
    )


def _torch_loop(model: nn.Module, count: int) -> _Loop:
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    clip = partial(nn.utils.clip_grad_norm_, list(model.parameters()), MAX_NORM)
    return _Loop(model, clip, optimizer.step, optimizer.zero_grad, count)


def one_of_many(job: ShortJob) -> Iterator[Row]:
    """Yield the host's times by the number of ranks, and then what the device did."""
    timer = clock(job.device)
    for world_size in job.worlds:
        join_fake_group(world_size)
        try:
            with _host_of_a_device() if job.device == "cpu" else nullcontext(timer) as host:
                yield from _hosts(job, host, world_size)
        finally:
            gc.collect()
            dist.destroy_process_group()
    if job.device == "cpu" and not job.quick:
        return  # seven billion parameters are for a GPU
    join_fake_group(8)
    try:
        for system in (FSDP2, OURS):
            yield from _on_device(job, timer, system)
            gc.collect()
    finally:
        dist.destroy_process_group()


# -- the host's time ---------------------------------------------------------------------------------------------------


class _WithoutKernels(Host):
    """The clock of the CPU, on which the kernels of `cpu_kernels` take no longer than their launches."""

    def __init__(self, launcher: Launcher) -> None:
        super().__init__()
        self._launcher = launcher

    def processor_time(self) -> float:
        return super().processor_time() - self._launcher.beyond_launches


@contextmanager
def _host_of_a_device() -> Iterator[Host]:
    """Let the CPU do as the host of a GPU does: it takes the library's paths for devices, kernels among them, and gets
    back memory that was freed without the help of the operating system. Yield its clock."""
    launcher = Launcher(compiled())
    with device_paths(), put_in(DeviceKernels(launcher, PROCESSORS)), freed_memory_is_kept():
        yield _WithoutKernels(launcher)


def _hosts(job: ShortJob, timer: Host, world_size: int) -> Iterator[Row]:
    """Time the phases of a step of each system, a step of each in turn. Each phase begins when the device is idle, so
    that no call waits for it."""
    shape = TINY if job.quick else NARROW
    loops = {system: _loop(system, shape, job.device) for system in (PLAIN, FSDP2, *SETTINGS)}
    batch = tokens(shape, NARROW_TOKENS, torch.device(job.device))
    seconds: dict[str, list[list[float]]] = {system: [] for system in loops}
    messages = dict.fromkeys(loops, 0)
    for number in range(-WARM, job.pairs):
        first = number % len(loops)
        for system in (*loops, *loops)[first : first + len(loops)]:
            before = loops[system].messages()
            found = _phases(loops[system], timer, batch)
            messages[system] = loops[system].messages() - before
            if number >= 0:
                seconds[system].append(found)
    plain = median(map(sum, seconds[PLAIN]))
    for system, loop in loops.items():
        totals = [sum(phases) for phases in seconds[system]]
        peers = [sum(phases) for phases in seconds[FSDP2]]
        yield {
            "ranks": world_size,
            "system": system,
            **{phase: median(values) for phase, values in zip(PHASES, zip(*seconds[system], strict=True), strict=True)},
            "total": median(totals),
            "of_fsdp2": median(mine / theirs for mine, theirs in zip(totals, peers, strict=True)),
            "us_a_parameter": (median(totals) - plain) / loop.parameters * 1e6,
            "buckets": loop.buckets(),
            "headers": messages[system],
        }
        loop.close()


def _phases(loop: _Loop, timer: Host, batch: Tensor) -> list[float]:
    """Run a step; return the processor time of each phase."""
    losses: list[Tensor] = []
    calls: tuple[Callable[[], object], ...] = (
        lambda: losses.append(loop.forward(batch)),
        lambda: torch.autograd.backward(losses[0]),
        loop.clip,
        loop.step,
    )
    found = []
    for call in calls:
        timer.finish()
        started = timer.processor_time()
        call()
        found.append(timer.processor_time() - started)
    losses.clear()
    loop.clear()
    return found


# -- the device --------------------------------------------------------------------------------------------------------


def _on_device(job: ShortJob, timer: Host, system: str) -> Iterator[Row]:
    """Yield a row for the steps of a system, and one for each kernel that takes most of the device's time."""
    shape, count = (TINY, 16) if job.quick else (SEVEN_BILLION, WIDE_TOKENS)
    gc.collect()
    timer.restart()
    start = timer.held()
    loop = _loop(system, shape, job.device)
    batch = tokens(shape, count, torch.device(job.device))
    for _ in range(WARM):
        loop.run(batch)
    timer.restart()
    begin = time.perf_counter()
    for _ in range(IN_A_ROW):
        loop.run(batch)
    timer.finish()
    in_a_row = (time.perf_counter() - begin) / IN_A_ROW
    peak, kept = timer.most() - start, timer.held() - start
    events = _profiled(loop, timer, batch)
    kernels, busy = busy_of(events)
    yield {
        "on_device": system,
        "ranks": 8,
        "tokens": count,
        "in_a_row": in_a_row,
        "kernels": kernels,
        "busy": busy,
        "looks": sum(1 for event in events if LOOKS.search(event["name"])),
        "peak": peak,
        "kept": kept,
    }
    for name, (times, seconds) in by_name(events).items():
        yield {"kernel": name, "of": system, "times": times, "seconds": seconds}
    loop.close()


def _profiled(loop: _Loop, timer: Host, batch: Tensor) -> list[dict[str, Any]]:
    """Return what ran on the device in a step."""
    on_gpu = timer.device.type == "cuda"
    timer.finish()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        loop.run(batch)
        timer.finish()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("cat") in ON_DEVICE]


def busy_of(events: Iterable[dict[str, Any]]) -> tuple[int, float]:
    """Return how many events of a trace ran on the device, and the seconds in which at least one did."""
    spans = sorted((float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in events)
    seconds, until = 0.0, float("-inf")
    for begin, end in spans:
        seconds += max(0.0, end - max(begin, until))
        until = max(until, end)
    return len(spans), seconds / 1e6


def by_name(events: Iterable[dict[str, Any]]) -> dict[str, tuple[int, float]]:
    """Return, for the names that take most of the time, how many events they have, and their seconds."""
    times, seconds = Counter[str](), Counter[str]()
    for event in events:
        name = re.sub(r"<.*|\(.*", "", event["name"])[:80]
        times[name] += 1
        seconds[name] += float(event["dur"]) / 1e6  # type: ignore[assignment]
    return {name: (times[name], float(found)) for name, found in seconds.most_common(NAMED_KERNELS)}


# -- tests of bits ----------------------------------------------------------------------------------------------------


def shared_gpu(job: ShortJob) -> Iterator[Row]:
    """Yield a row for each test."""
    device = "cpu" if job.device == "cpu" else GPU
    chosen = [f"test_programs_give_the_bits_of_the_plain_loop_on_the_same_device[{device}-{name}]" for name in PROGRAMS]
    chosen += [f"test_so_does_attention[{device}-{stage}]" for stage in STAGES]
    tests = [f"{FILE}::{name}" for name in chosen[: 1 if job.quick else None]]
    # The project's own options are not for all places: they need pytest-xdist.
    options = ["-o", "addopts=", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_LIMIT}"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *tests],
            cwd=ROOT,
            env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
            capture_output=True,
            text=True,
        )
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
        if len(cases) != len(tests):  # a test that is not there keeps all others from running
            raise RuntimeError((done.stdout + done.stderr).strip()[-500:])
        for case in cases:
            problem = next((each.get("message", each.tag) for each in case if each.tag != "system-out"), "")
            yield {"test": case.get("name"), "passed": not problem, "took": case.get("time"), "problem": problem[:300]}
