"""`python -m benchmarks.fused_ptx`: the arithmetic in the two loops of torch's optimizer kernels. Needs nvcc, no GPU.

Knows: nvcc, the kernels of fused_ptx.cu, the tables. Does not know: how PTX is read.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch

try:
    import typer
except ModuleNotFoundError as absent:
    sys.exit(f"error: this benchmark needs {absent.name}: python -m pip install -e '.[cli]'")

from . import tables
from .ptx import OPERATIONS, Loops, counted, differing, kernels
from .report import Report

KERNELS = Path(__file__).with_suffix(".cu")
NAME = re.compile(r"\d+((adam|sgd|foreach)\w*?_(?:fp32|bf16))E")  # in the mangled name of multi_tensor_apply_kernel
SETTINGS: Mapping[str, Mapping[str, tuple[int, float]]] = {  # arguments of the kernels by position, and another value
    "adam": {"no weight decay": (6, 0.0), "maximize": (8, 1), "grad_scale": (9, 1)},
    "sgd": {
        "no weight decay": (2, 0.0),
        "nesterov": (7, 1),
        "maximize": (8, 1),
        "first": (9, 1),
        "grad_scale": (10, 1),
    },
    "foreach": {"factor 1": (3, 1.0)},
}
HEADERS = {  # in place of the wheel's, which need cuSPARSE and cuBLAS, or are not in a wheel for the CPU
    "ATen/cuda/CUDAContext.h": "#pragma once\n#include <c10/cuda/CUDAStream.h>\n"
    "namespace at::cuda { using c10::cuda::getCurrentCUDAStream; }\n",
    "c10/cuda/impl/cuda_cmake_macros.h": "#pragma once\n",
}


@dataclass(frozen=True)
class Compared:
    """A kernel: operations on the four elements of a pass, with plain arguments, and settings in which they differ."""

    arch: str
    kernel: str
    vectorised: dict[str, int]
    ragged: dict[str, int]
    settings: int
    different: int
    first: str


def compile_ptx(nvcc: str, arch: str) -> str:
    """Return the PTX of the kernels. End the program with code 2 if they do not compile."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in HEADERS.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True)
            path.write_text(text)
        include = Path(torch.__file__).parent / "include"
        flags = ["-ptx", f"-arch={arch}", "-std=c++20", "--expt-relaxed-constexpr", "--expt-extended-lambda", "-o", "-"]
        ran = subprocess.run([nvcc, *flags, "-I", folder, "-I", include, KERNELS], capture_output=True, text=True)
    if ran.returncode:
        print(f"error: {nvcc} cannot compile {KERNELS.name} for {arch}:\n{ran.stderr[-2000:]}", file=sys.stderr)
        raise typer.Exit(2)
    return ran.stdout


def compare(arch: str, text: str) -> Iterator[Compared]:
    """Compare the loops of each kernel of a module, in each combination of settings."""
    for mangled, body in kernels(text):
        found = NAME.search(mangled)
        if found is None:
            raise ValueError(f"{mangled} is no kernel of {KERNELS.name}")
        loops, others = Loops(body), SETTINGS[found[2]]
        chosen = [each for size in range(len(others) + 1) for each in itertools.combinations(others, size)]
        where = {each: differing(*loops.stored(dict(others[name] for name in each))) for each in chosen}
        first = next((f"{', '.join(each) or 'plain'}: {place}" for each, place in where.items() if place), "")
        vectorised, ragged = map(counted, loops.stored({}))
        different = sum(map(bool, where.values()))
        yield Compared(arch, found[1], vectorised, ragged, len(chosen), different, first)


def found(compared: Sequence[Compared]) -> Iterator[tables.Table]:
    """Yield a table for each architecture."""
    columns = ["kernel", *OPERATIONS, "fusable", "settings that differ", "the first, and where"]
    for arch, group in itertools.groupby(compared, key=lambda each: each.arch):
        rows = []
        for each in group:
            counts = [f"{each.vectorised[name]} / {each.ragged[name]}" for name in (*OPERATIONS, "fusable")]
            rows.append([each.kernel, *counts, f"{each.different} of {each.settings}", each.first or "–"])
        yield tables.Table(f"{arch}: operations on four elements in the vectorised / ragged loop", columns, rows)


def main(
    nvcc: Annotated[str, typer.Option(help="The CUDA compiler.")] = "nvcc",
    arch: Annotated[str, typer.Option(help="Architectures, with commas.")] = "sm_80,sm_90,sm_100",
    out: Annotated[Path, typer.Option(help="Folder for fused_ptx.json.")] = Path("zero-bench"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables as Markdown.")] = False,
    show_only: Annotated[Path | None, typer.Option("--show", help="Compile nothing: show this JSON.")] = None,
) -> None:
    """The PTX of the kernels of torch's optimizers: is an element stepped alike in the vectorised and the ragged loop?

    It ends with code 1 if not.
    """
    console = tables.console(stderr=markdown)
    if show_only is not None:
        report = Report.read(show_only)
    else:
        compiler = shutil.which(nvcc)
        if compiler is None:
            print(f"error: {nvcc} is not found: this benchmark needs the CUDA compiler, 12.8 or later", file=sys.stderr)
            raise typer.Exit(2)
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
        with console.status("compiling"):
            parts = [asdict(each) for name in arch.split(",") for each in compare(name, compile_ptx(compiler, name))]
        released = re.search(r"V[\d.]+", version)
        report = Report.of_this_machine("benchmarks.fused_ptx", parts, f"nvcc {released[0] if released else '?'}")
        report.write(out / "fused_ptx.json")
    compared = [Compared(**part) for part in report.parts]
    tables.show(report.line(), found(compared), markdown, console)
    differ = [each for each in compared if each.different]
    print(
        f"{len(differ)} of {len(compared)} kernels differ"
        if differ
        else f"all {len(compared)} kernels: same arithmetic"
    )
    if differ:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
