"""`zero plan --measure`: what this machine's processors, memory, ranks and disk do, as a file of hardware.

Knows: how many ranks measure, and what is printed. Does not know: what a rank does (`probe`), equations, units.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
from datetime import date
from pathlib import Path

from ...planning.hardware import read_hardware
from ...planning.measured import Measurement, Rates, TimedPasses
from ..console import Console
from ..runner import RankError, check_alone, check_output, launch_ranks
from .probe import DTYPES, NUMBERS, PRODUCT, Probed, result_path
from .settings import PlanConfig

__all__ = ["measure"]

FILE = "hardware.json"
SECONDS = 0.4
UPDATE_BYTES = 28  # of a fused Adam in fp32: it reads 4 numbers and writes 3
DTYPE_BYTES = 4


def measure(config: PlanConfig, seconds: float = SECONDS) -> int:
    """Measure this machine, and write `FILE` to ``--out``. Return the exit code. ``seconds``: of each measurement."""
    check_alone("zero plan --measure")
    check_output(config.out, FILE)
    console, ranks = Console(), _processors()
    console.line(f"{ranks} ranks measure, one for each processor: about half a minute in which nothing else should run")
    try:
        found = _combined(_probe(config.out, ranks, seconds), ranks)
    except RankError as error:
        raise RuntimeError(f"--measure: {error}") from None
    path = config.out / FILE
    path.write_text(json.dumps(found.to_json(), indent=1) + "\n")
    read_hardware(path)
    console.line(
        f"{found.machine}: a rank computes {found.products['float32'] / 1e9:.1f} GFLOP/s in products of {PRODUCT} "
        f"rows, copies {found.copied / 1e9:.1f} GB/s, updates {found.updated / 1e9:.1f} GB/s, and reads or "
        f"writes states on the disk beside an update at {found.disk / 1e9:.1f} GB/s"
    )
    console.line(f"wrote {path}; to plan with it: --hardware {path} --cluster cpu:{ranks}")
    return 0


def _processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _probe(out: Path, ranks: int, seconds: float) -> list[Probed]:
    with tempfile.TemporaryDirectory(dir=out) as name:
        folder = Path(name)
        launch_ranks("zero.commands.plan.probe", {"folder": str(folder), "seconds": seconds}, ranks)
        return [Probed(**json.loads(result_path(folder, rank).read_text())) for rank in range(ranks)]


def _combined(probed: list[Probed], ranks: int) -> Measurement:
    """Return what the ranks measured, in the mean."""

    def mean(name: str) -> float:
        return statistics.fmean(getattr(each, name) for each in probed)

    products = {name: 2 * PRODUCT**3 / statistics.fmean(each.products[name] for each in probed) for name in DTYPES}
    copied = 2 * DTYPE_BYTES * NUMBERS / mean("copy")
    timed = zip(*(each.timed() for each in probed), strict=True)
    return Measurement(
        machine=_machine(ranks),
        date=date.today().isoformat(),
        ranks=ranks,
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks,
        rates=Rates.fitted([_mean(passes) for passes in timed], products["float32"], copied),
        products=products,
        copied=copied,
        updated=UPDATE_BYTES * NUMBERS / mean("update"),
        message=mean("message"),
        disk=2 * DTYPE_BYTES * NUMBERS / max(mean("disk"), 2 * DTYPE_BYTES * NUMBERS / copied),  # no faster than a copy
    )


def _mean(of_ranks: tuple[TimedPasses, ...]) -> TimedPasses:
    first = of_ranks[0]
    forward = statistics.fmean(passes.forward for passes in of_ranks)
    backward = statistics.fmean(passes.backward for passes in of_ranks)
    return TimedPasses(first.work, first.weight_bytes, forward, backward)


def _machine(ranks: int) -> str:
    """Return the name of the processor, where the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {ranks} processors"
