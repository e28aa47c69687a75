"""Plans rows of a table of published runs: seconds, memory, whether it fits, and a band.

    row  ->  `setting` (what its columns say)  ->  model and work  ->  the schedule of its own system  ->  seconds
                                               ->  `memory`        ->  GiB, and whether they fit

`zero plan`'s simulator runs all schedules, with its constants for all rows. A row that cannot be planned has
an error instead of numbers; others are planned.

Knows: what is computed again, and what a compiler saves. Does not know: the files that rows come from, or what was
measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from zero.planning.hardware import presets
from zero.planning.model import Model, Transformer, UnitWork
from zero.planning.models.shapes import model_of
from zero.planning.models.works import ReferenceModel, count_transformer
from zero.planning.seconds.compute import CONSTANTS, Compute, PassSeconds, Wires
from zero.planning.seconds.simulate import simulate

from .memory import USABLE, RowBytes, row_bytes
from .setting import Columns, RowSetting, read_row
from .systems import SYSTEMS, UnitLoad, program_of_system

GIB = float(1 << 30)
QUIET = "good"
"""The fabric on which published runs are planned: of the three it is nearest to those of 16 to 128 GPUs."""

BAND = 0.05
"""The share by which the band is wider than the difference of fabrics: four of five runs of the fit are inside."""

FUSED_LOSS_BYTES = 4.0
"""Bytes moved in a forward for each token and class of a fused loss: the product writes 2, the loss reads 2. A backward
moves twice as many: the gradient is written, and read by two products."""

REPEATED_BY_OPERATIONS = 0.5
"""The share of a block's products that is computed again if cheap operations are: every second one (torchtitan,
`_apply_op_sac`)."""

_FUSED_KERNELS = 0.3  # of a block's operations, those that a compiler launches: products, attention, and a few between


@dataclass(frozen=True)
class RowPlan:
    """The plan of a row. Numbers are None if ``error`` says why there are none.

    Attributes:
        id: of the row.
        tokens_s_gpu: tokens a second and GPU.
        step_s: seconds of a step.
        mem_gib: the most that a rank holds.
        fits: whether it fits into the GPU's memory.
        margin_gib: what is left; below zero: what is missing.
        band_low, band_high: tokens a second and GPU between which a run is expected.
        error: what is missing or unknown, and the remedy; empty if there is a plan.
    """

    id: str
    tokens_s_gpu: float | None = None
    step_s: float | None = None
    mem_gib: float | None = None
    fits: bool | None = None
    margin_gib: float | None = None
    band_low: float | None = None
    band_high: float | None = None
    error: str = ""


@dataclass(frozen=True)
class CountedRow:
    """A row, read and counted: what does not change with a constant. ``wires``: the links by the name of the fabric."""

    setting: RowSetting
    model: Model
    works: tuple[UnitWork, ...]
    memory: RowBytes
    wires: Mapping[str, Wires]


class RowCounter:
    """Reads and counts rows. A model, and its work, that several rows have is counted once."""

    def __init__(self) -> None:
        self._hardware = presets()
        self._models: dict[Transformer, Model] = {}
        self._works: dict[tuple[Transformer, int, int, torch.dtype], tuple[UnitWork, ...]] = {}

    def count(self, row: Columns) -> CountedRow:
        """Return a row, read and counted. Raises `ValueError` if it cannot be planned."""
        setting = read_row(row, self._hardware)
        model, works = self._counted(setting)
        wires = {fabric: Wires(setting.cluster(self._hardware, fabric)) for fabric in self._hardware.fabrics}
        return CountedRow(setting, model, works, row_bytes(setting, works, model.unit_numels()), wires)

    def _counted(self, setting: RowSetting) -> tuple[Model, tuple[UnitWork, ...]]:
        numbers = setting.model
        if numbers not in self._models:
            self._models[numbers] = from_numbers(numbers, "a row")
        model = self._models[numbers]
        key = (numbers, setting.micro, setting.sequence, setting.precision.activations)
        if key not in self._works:
            self._works[key] = count_transformer(model, *key[1:])
        return model, self._works[key]


def from_numbers(numbers: Transformer, name: str) -> Model:
    """Return the model of a transformer's numbers, with the parameters of `ReferenceModel`."""
    with torch.device("meta"):
        model = model_of(ReferenceModel(numbers), name)
    return replace(model, transformer=numbers)


def plan_rows(rows: Iterable[Columns]) -> list[RowPlan]:
    """Return the plan of each row, in their order.

    ``rows``: by the names of the columns of ``points.csv``; what was measured may be missing.
    """
    counter, constants = RowCounter(), CONSTANTS
    return [plan_row(row, counter, constants) for row in rows]


def plan_row(row: Columns, counter: RowCounter, constants: Mapping[str, float]) -> RowPlan:
    """Return the plan of a row. It never raises for what the row says."""
    name = (row.get("id") or "").strip()
    try:
        counted = counter.count(row)
        seconds = {fabric: row_seconds(counted, constants, fabric) for fabric in counted.wires}
    except ValueError as error:
        return RowPlan(name, error=str(error))
    except (ArithmeticError, RuntimeError, TypeError) as error:  # torch's, for a tensor beyond its integers
        reason = str(error).partition("\n")[0]
        return RowPlan(
            name, error=f"its sizes cannot be counted: check hidden, ffn, vocab, seq, micro_batch ({reason})"
        )
    setting, total = counted.setting, counted.memory.total
    speeds = {fabric: setting.tokens / each for fabric, each in seconds.items()}
    return RowPlan(
        name,
        tokens_s_gpu=speeds[QUIET],
        step_s=seconds[QUIET],
        mem_gib=total / GIB,
        fits=total <= USABLE * setting.capacity,
        margin_gib=(USABLE * setting.capacity - total) / GIB,
        band_low=min(speeds.values()) * (1 - BAND),
        band_high=max(speeds.values()) * (1 + BAND),
    )


def row_seconds(counted: CountedRow, constants: Mapping[str, float], fabric: str = QUIET) -> float:
    """Return the seconds of a step."""
    setting, wires, numels = counted.setting, counted.wires[fabric], counted.model.unit_numels()
    seconds = _PassEquations(setting, wires, constants)
    known: dict[tuple[int, UnitWork | None], PassSeconds] = {}
    loads = []
    for number, work in enumerate(counted.works):
        if number == 0 and setting.has_fused_loss:
            logits = float(setting.micro * setting.sequence * setting.model.vocabulary)
            work = replace(work, moved_bytes=min(work.moved_bytes, FUSED_LOSS_BYTES * logits))
        again = _repeated(setting, work, number)
        key = (min(number, 1) and id(work), again)
        if key not in known:
            known[key] = seconds.passes(work, again, is_root=number == 0)
        loads.append(UnitLoad(known[key], numels[number]))
    program = program_of_system(
        loads,
        wires,
        SYSTEMS[setting.schedule],
        seconds.wide,
        setting.precision.dtypes,
        factor=setting.factor,
        reshard=setting.reshard,
        micro_batches=setting.micro_batches,
    )
    return simulate(program).seconds


class _PassEquations:
    """The seconds of a row's units: in 8 bits only the products of blocks are, and a compiler fuses operations."""

    def __init__(self, setting: RowSetting, wires: Wires, constants: Mapping[str, float]) -> None:
        products = setting.precision.products
        self.setting = setting
        self.narrow = Compute(wires.cluster, products, constants)
        self.wide = Compute(wires.cluster, "bfloat16", constants) if products == "float8" else self.narrow
        self.bytes_left = constants["compiled"] if setting.is_compiled else 1.0
        self.kernels_left = _FUSED_KERNELS if setting.is_compiled else 1.0

    def passes(self, work: UnitWork, again: UnitWork | None, *, is_root: bool) -> PassSeconds:
        """Return the seconds of a unit. ``again``: what of its forward the backward repeats."""
        narrow = self.wide if is_root else self.narrow
        hidden = self.setting.model.hidden
        products, rest = self._split(work)
        first, second = narrow.passes(products, hidden=hidden), self.wide.passes(rest)
        recompute, repeats = 0.0, 0
        if again is not None:
            products, others = self._split(again)
            recompute, repeats = narrow.forward(products, hidden) + self.wide.forward(others), others.kernels
        launch = self.wide.calls.launch
        return PassSeconds(
            first.forward + second.forward,
            first.backward + second.backward,
            recompute,
            second.host,
            second.host_backward + repeats * launch,
        )

    def _split(self, work: UnitWork) -> tuple[UnitWork, UnitWork]:
        """Return the products of a unit, and the rest of its work."""
        rest = replace(
            work,
            matmul_flops=0.0,
            moved_bytes=self.bytes_left * work.moved_bytes,
            kernels=round(self.kernels_left * work.kernels),
        )
        return UnitWork(matmul_flops=work.matmul_flops), rest


def _repeated(setting: RowSetting, work: UnitWork, number: int) -> UnitWork | None:
    """Return what of a unit's forward the backward repeats: of a block in "half" every second one."""
    if number == 0 or setting.recompute == "none" or (setting.recompute == "half" and not number % 2):
        return None
    if setting.recompute == "op":
        return replace(work, matmul_flops=REPEATED_BY_OPERATIONS * work.matmul_flops, attention_flops=0.0)
    if not setting.precision.stops_early:
        return work
    last = (
        2.0 * setting.model.ffn * setting.model.hidden * setting.micro * setting.sequence
    )  # no backward needs its output
    return replace(work, matmul_flops=work.matmul_flops - last)
