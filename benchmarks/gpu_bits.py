"""`python -m benchmarks.gpu_bits`: the bits of a device, on which the library's promise depends.

Knows: the command's flags, the tables. Does not know: how anything is compared.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as absent:
    sys.exit(f"error: this benchmark needs {absent.name}: python -m pip install -e '.[cli]'")

from . import bits_alignment, bits_device, bits_norm, bits_optimizers, tables
from .bits_job import Compared
from .bits_norm import NormTime
from .gpu_device import checked_device, in_words
from .report import Report

SHAPES, QUICK_SHAPES = 200, 6
ELEMENTS, QUICK_ELEMENTS = 1_000_000_000, 1_000_000
TITLES = {
    bits_alignment.GROUP: "F.linear, forward and backward, by the addresses of weight and bias: shapes with other bits "
    "than at a multiple of 1024 bytes",
    bits_optimizers.GROUP: f"{bits_optimizers.STEPS} steps of an optimizer on pieces, and on whole parameters",
    bits_device.GROUP: "Operations on this device, and on the CPU",
}


def compare(device: torch.device, quick: bool, console: Console) -> Iterator[Compared | NormTime]:
    """Yield all results, those that matter most first."""
    with console.status("F.linear by addresses"):
        yield from bits_alignment.compare(device, QUICK_SHAPES if quick else SHAPES, quick)
    with console.status("optimizers on pieces"):
        yield from bits_optimizers.compare(device, quick)
    with console.status("operations as on the CPU"):
        yield from bits_device.compare(device, quick)
    with console.status("the norm"):
        yield from bits_norm.measure(device, QUICK_ELEMENTS if quick else ELEMENTS)


def read(parts: Sequence[dict[str, Any]]) -> tuple[list[Compared], list[NormTime]]:
    """Return the results of a report."""
    compared = [Compared(**part) for part in parts if "group" in part]
    return compared, [NormTime(**part) for part in parts if "norm" in part]


def found(compared: Sequence[Compared], norms: Sequence[NormTime]) -> Iterator[tables.Table]:
    """Yield the tables."""
    for group in dict.fromkeys(each.group for each in compared):
        members = [each for each in compared if each.group == group]
        dtypes = list(dict.fromkeys(each.dtype for each in members))
        rows = [
            _row([each for each in members if each.what == what], dtypes)
            for what in dict.fromkeys(each.what for each in members)
        ]
        columns = ["operation", *(dtype or "–" for dtype in dtypes), "needed", "holds", "the first that differs"]
        yield tables.Table(TITLES[group], columns, rows)
    rows = [
        [
            each.norm,
            f"{each.elements / 1e6:g}",
            tables.milliseconds(each.seconds),
            f"{tables.milliseconds(each.low)}–{tables.milliseconds(each.high)}",
            each.value,
        ]
        for each in norms
    ]
    yield tables.Table("The norm of fp32 numbers", ["norm", "million elements", "ms", "quartiles", "value"], rows)


def _row(of_operation: Sequence[Compared], dtypes: Sequence[str]) -> list[str]:
    """Return the row of an operation: how many cases differ in each dtype, and the first of them."""
    by_dtype = {each.dtype: each for each in of_operation}
    cells = [_cell(by_dtype[dtype]) if dtype in by_dtype else "–" for dtype in dtypes]
    needed = any(each.needed for each in of_operation)
    holds = not any(each.is_broken for each in of_operation)
    told = next((f"{each.dtype} {each.error or each.first}" for each in of_operation if each.error or each.first), "–")
    return [of_operation[0].what, *cells, _yes(needed), _yes(holds) if needed else "–", told]


def _cell(each: Compared) -> str:
    if each.error:
        return "error"
    return f"{each.different} of {each.cases}" if each.cases else "none"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def verdict(compared: Sequence[Compared]) -> str:
    """Return whether the promise holds, in one line."""
    broken = [each for each in compared if each.is_broken]
    if not broken:
        return f"all {sum(each.needed for each in compared)} comparisons that the promise needs have equal bits"
    first = broken[0]
    return f"{len(broken)} comparisons that the promise needs differ; the first: {first.what}, {first.dtype}"


def main(
    device: Annotated[str, typer.Option(help="cuda, cuda:1, ... or cpu.")] = "cuda",
    quick: Annotated[bool, typer.Option("--quick", help="Few and small cases: to see that it works.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for gpu_bits.json.")] = Path("zero-bench"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables as Markdown.")] = False,
    show_only: Annotated[Path | None, typer.Option("--show", help="Compare nothing: show this JSON.")] = None,
) -> None:
    """Bits on a device: products by address, optimizers on pieces, and operations beside the CPU's.

    It ends with code 1 if bits differ that the library's promise needs.
    """
    console = tables.console(stderr=markdown)
    if show_only is not None:
        report = Report.read(show_only)
    else:
        where = checked_device(device)
        torch.set_num_threads(1)  # on the CPU a sum's bits depend on their number
        parts = [asdict(each) for each in compare(where, quick, console)]
        report = Report.of_this_machine("benchmarks.gpu_bits", parts, in_words(where))
        report.write(out / "gpu_bits.json")
    compared, norms = read(report.parts)
    tables.show(report.line(), found(compared, norms), markdown, console)
    console.print(verdict(compared), markup=False)
    if any(each.is_broken for each in compared):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
