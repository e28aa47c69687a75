"""`benchmarks.fused_ptx` counts the operations of both loops of a kernel, and finds elements with other arithmetic."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ptx import Loops, counted, differing, kernels

typer = pytest.importorskip("typer")
from typer.testing import CliRunner  # noqa: E402

from benchmarks import fused_ptx  # noqa: E402
from benchmarks.report import Report  # noqa: E402

FUSED = "fma.rn.f32 %f{0}, %f{0}, %f9, %f8;"
APART = "mul.f32 %f7, %f{0}, %f9; add.f32 %f{0}, %f7, %f8;"


def _run(module: Any, *arguments: object) -> Any:
    application = typer.Typer()
    application.command()(module.main)
    return CliRunner().invoke(application, [str(argument) for argument in arguments])


def _kernel(vectorised: list[str], ragged: list[str]) -> str:
    """Return a kernel that multiplies elements by its argument 1 and adds a sum that depends on its flag 2."""
    guarded = [
        f"mov.f32 %f{i}, 0f00000000;\n@%p9 bra $L_{i};\nld.global.f32 %f{i}, [%rd3+{i}];\n$L_{i}:" for i in range(4)
    ]
    return "\n".join(
        [
            ".visible .entry scaled(",
            ".param .u64 scaled_param_0)",
            "{",
            "ld.param.u64 %rd1, [%rd9+8];",
            "ld.param.f32 %f9, [scaled_param_1];",
            "ld.param.u8 %rs1, [scaled_param_2];",
            "mov.f32 %f8, 0f3F800000;",
            "setp.eq.s16 %p1, %rs1, 0;",
            "@%p1 bra $L_off;",
            "add.f32 %f8, %f8, %f9;",
            "$L_off:",
            "mov.u32 %r1, %tid.x;",
            "add.s64 %rd3, %rd1, %r1;",
            "setp.lt.s64 %p9, %rd3, 64;",
            "@%p9 bra $L_ragged;",
            "$L_vectorised:",
            "ld.global.v4.f32 {%f0, %f1, %f2, %f3}, [%rd3];",
            *(line.format(i) for i, line in enumerate(vectorised)),
            "st.global.v4.f32 [%rd3], {%f0, %f1, %f2, %f3};",
            "@%p8 bra $L_vectorised;",
            "bra.uni $L_end;",
            "$L_ragged:",
            *guarded,
            *(line.format(i) for i, line in enumerate(ragged)),
            *(f"st.global.f32 [%rd3+{i}], %f{i};" for i in range(4)),
            "@%p8 bra $L_ragged;",
            "$L_end:",
            "ret;",
            "}",
        ]
    ).replace("; ", ";\n")


def _loops(text: str) -> Loops:
    ((name, body),) = kernels(text)
    assert name == "scaled"
    return Loops(body)


@pytest.mark.parametrize("flag", [0, 1])
def test_operations_of_both_loops_are_counted(flag: int) -> None:
    vectorised, ragged = _loops(_kernel([FUSED] * 4, [APART] * 4)).stored({2: flag})
    none = dict.fromkeys(fused_ptx.OPERATIONS, 0) | {"fusable": 0}
    assert counted(vectorised) == none | {"fma": 4}, "what all elements share counts nowhere"
    assert counted(ragged) == none | {"mul": 4, "add": 4, "fusable": 4}


def test_elements_with_other_arithmetic_are_found_between_loops_and_within_one() -> None:
    for vectorised, ragged, where in (
        ([FUSED] * 4, [FUSED] * 4, ""),
        ([APART] * 4, [APART] * 4, ""),
        ([FUSED] * 4, [APART] * 4, "between the loops"),
        ([APART, FUSED, FUSED, FUSED], [APART, FUSED, FUSED, FUSED], "within a loop"),
        ([FUSED] * 4, [FUSED.replace("%f9, %f8", "%f8, %f9")] * 4, "between the loops"),  # the same counts
    ):
        assert differing(*_loops(_kernel(vectorised, ragged)).stored({})) == where


def test_a_kernel_without_two_loops_is_refused() -> None:
    text = _kernel([FUSED] * 4, [FUSED] * 4).replace(".v4.f32 {%f0, %f1, %f2, %f3}", ".f32 %f0")
    with pytest.raises(ValueError, match="no vectorised and ragged loop"):
        _loops(text.replace("{%f0, %f1, %f2, %f3};", "%f0;")).stored({})


def test_without_nvcc_one_line_says_what_is_missing(tmp_path: Path) -> None:
    done = _run(fused_ptx, "--nvcc", tmp_path / "nvcc", "--out", tmp_path)
    assert done.exit_code == 2
    (line,) = done.output.splitlines()
    assert line.startswith("error: ")
    assert "needs the CUDA compiler" in line


@pytest.mark.full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.timeout(400)
def test_torchs_kernels_are_compiled_and_compared(tmp_path: Path) -> None:
    done = _run(fused_ptx, "--arch", "sm_90", "--out", tmp_path, "--markdown")
    compared = [fused_ptx.Compared(**part) for part in Report.read(tmp_path / "fused_ptx.json").parts]
    assert done.exit_code == any(each.different for each in compared), done.output
    names = re.findall(r"\w+\((\w+)_##dtype", fused_ptx.KERNELS.read_text())
    assert [each.kernel for each in compared] == [f"{name}_{dtype}" for dtype in ("fp32", "bf16") for name in names]
    for each in compared:
        assert min(each.vectorised["fma"], each.ragged["fma"]) >= 4
        assert not (each.different and each.kernel.startswith("adamw")), each.first
    again = _run(fused_ptx, "--show", tmp_path / "fused_ptx.json", "--markdown")
    assert (again.stdout, again.exit_code) == (done.stdout, done.exit_code)
