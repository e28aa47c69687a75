"""The benchmarks for a first run on a GPU work without one, and find the differences that they are for."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bits_alignment, bits_optimizers
from benchmarks.bits_job import MODULUS, Compared, Tally, difference, guarded, placed
from benchmarks.host_job import FSDP2, OURS, PLAIN, UNIT, HeaderTime, HostTime, Traced, Variant, read
from benchmarks.llama import NARROW, SEVEN_BILLION
from benchmarks.ptx import Loops, counted, differing, kernels
from benchmarks.trace_rank import busy

typer = pytest.importorskip("typer")
pytest.importorskip("matplotlib")
from typer.testing import CliRunner  # noqa: E402

from benchmarks import fused_ptx, gpu_bits, gpu_first, gpu_host  # noqa: E402
from benchmarks.commands import Command, run  # noqa: E402
from benchmarks.report import Report  # noqa: E402

CPU = torch.device("cpu")


def _run(module: Any, *arguments: object) -> Any:
    application = typer.Typer()
    application.command()(module.main)
    return CliRunner().invoke(application, [str(argument) for argument in arguments])


# -- bits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, *bits_alignment.OFFSETS])
def test_a_tensor_is_placed_where_it_is_asked_to(offset: int) -> None:
    tensor = torch.randn(5, 7).bfloat16()
    copy = placed(tensor, offset)
    assert copy.data_ptr() % MODULUS == offset
    assert not difference("copy", copy, tensor)


def test_a_difference_is_one_of_bits() -> None:
    nan = torch.tensor([1.0, torch.nan, 0.0])
    assert not difference("x", nan, nan.clone())
    assert difference("x", torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0])) == (
        "x: 1 of 2 elements, first at 1: 0 and not -0"
    )


def test_an_error_is_a_broken_promise_and_the_rows_before_it_stay() -> None:
    def rows() -> Any:
        yield Tally().row("group", "first", "fp32", True)
        raise RuntimeError("no\nkernel")

    first, second = guarded("group", "all", "fp32", True, rows)
    assert not first.is_broken
    assert (second.error, second.is_broken) == ("RuntimeError: no kernel", True)


def _rows(rows: Any) -> dict[tuple[str, str], Compared]:
    return {(each.what, each.dtype): each for each in rows}


def test_a_product_that_depends_on_an_address_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = torch.nn.functional.linear

    def dependent(x: Any, weight: Any, bias: Any) -> Any:
        return linear(x, weight, bias) * (1 if weight.data_ptr() % 256 == 0 else 1 + 2**-7)

    monkeypatch.setattr(bits_alignment.functional, "linear", dependent)
    found = _rows(bits_alignment.compare(CPU, 3, True))
    for (what, _), row in found.items():
        wrong = ("weight at" in what or "both at" in what) and ("at 64 " in what or "at 128 " in what)
        assert row.cases == 3
        assert row.different == (3 if wrong else 0), what
        assert row.is_broken == wrong
        assert ("output: " in row.first) == wrong


def test_a_product_that_differs_from_itself_is_compared_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, calls = torch.nn.functional.linear, iter(range(1 << 20))

    def unsteady(*given: Any) -> Any:
        return linear(*given) + 2.0 ** next(calls)

    monkeypatch.setattr(bits_alignment.functional, "linear", unsteady)
    found = _rows(bits_alignment.compare(CPU, 1, True))
    assert found["F.linear, twice at one address", "fp32"].different == 1
    assert not any(row.is_broken for row in found.values())


class _Ragged(torch.optim.SGD):
    """Takes another path for the whole tensor if its number of elements is no multiple of 4."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                with torch.no_grad():
                    parameter.mul_(1.5 if parameter.numel() % 4 else 1.0)


class _Stray(torch.optim.SGD):
    """Adds the number that lies behind the parameter."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                with torch.no_grad():
                    parameter[0] += parameter.detach().as_strided(
                        (1,), (1,), parameter.storage_offset() + parameter.numel()
                    )[0]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_depends_on_the_number_of_elements_is_found(monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    made = torch.optim.SGD if fused else _Ragged
    monkeypatch.setattr(bits_optimizers, "CLASSES", {"SGD": (made, {"lr": 0.1, "momentum": 0.9})})
    monkeypatch.setattr(bits_optimizers, "DTYPES", (torch.float32,))
    found = _rows(bits_optimizers.compare(CPU, True))
    assert {what for what, _ in found} == {
        f"SGD, {how}, {as_}" for how in bits_optimizers.IMPLEMENTATIONS for as_ in ("cut", "merged")
    }
    for row in found.values():
        assert row.cases == 4
        assert row.different == (0 if fused else 3), "a number of elements that is a multiple of 4 is equal"


def test_a_step_that_reads_beyond_a_tensor_is_told_and_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits_optimizers, "CLASSES", {"stray": (_Stray, {"lr": 0.1, "momentum": 0.9})})
    monkeypatch.setattr(bits_optimizers, "IMPLEMENTATIONS", {"for-loop": {"foreach": False}})
    monkeypatch.setattr(bits_optimizers, "DTYPES", (torch.float32,))
    (row,) = bits_optimizers.compare(CPU, True)
    assert (row.cases, row.different, row.is_broken) == (4, 4, False)
    assert "reads beyond the end of a tensor" in row.first


def test_bits_are_compared_shown_again_and_a_difference_ends_with_code_1(tmp_path: Path) -> None:
    done = _run(gpu_bits, "--device", "cpu", "--quick", "--markdown", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    report = Report.read(tmp_path / "gpu_bits.json")
    compared, norms = gpu_bits.read(report.parts)
    assert {each.group for each in compared} == gpu_bits.TITLES.keys()
    assert all(each.cases for each in compared)
    assert [each.elements for each in norms] == [gpu_bits.QUICK_ELEMENTS] * 2
    again = _run(gpu_bits, "--show", tmp_path / "gpu_bits.json", "--markdown")
    assert again.stdout == done.stdout
    broken = Report(report.command, report.date, report.machine, report.versions, [dict(part) for part in report.parts])
    first = next(part for part in broken.parts if part.get("needed"))
    first["different"], first["first"] = 1, "somewhere"
    broken.write(tmp_path / "broken.json")
    ended = _run(gpu_bits, "--show", tmp_path / "broken.json", "--markdown")
    assert ended.exit_code == 1
    assert f"the first: {first['what']}, {first['dtype']}" in ended.output


# -- the arithmetic of kernels -----------------------------------------------------------------------------------------

FUSED = "fma.rn.f32 %f{0}, %f{0}, %f9, %f8;"
APART = "mul.f32 %f7, %f{0}, %f9; add.f32 %f{0}, %f7, %f8;"


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


# -- the host's work ---------------------------------------------------------------------------------------------------


def test_a_device_is_busy_where_at_least_one_kernel_runs() -> None:
    kernel: dict[str, Any] = {"ph": "X", "cat": "kernel"}
    events = [
        {**kernel, "ts": 10.0, "dur": 5.0},
        {**kernel, "ts": 12.0, "dur": 1.0},  # inside the first
        {"cat": "gpu_memcpy", "ts": 14.0, "dur": 3.0},  # two of three beyond it
        {"cat": "cpu_op", "ts": 0.0, "dur": 100.0},
        {"ph": "M", "name": "process_name"},
        {**kernel, "ts": "30", "dur": "2"},
    ]
    assert busy(events) == (4, pytest.approx(9e-6, rel=1e-12))
    assert busy([]) == (0, 0.0)
    step = Traced("zero3, unit", 8, "cuda:0", 1, 1, 1, in_a_row=2.0, kernels=3, busy=0.5)
    assert step.idle == 0.75
    assert Traced("zero3, unit", 8, "cpu", 1, 1, 1, in_a_row=2.0).idle is None


def test_a_narrow_model_has_the_buckets_of_the_wide_one() -> None:
    variant = Variant(OURS, "25")
    assert variant.cap_mb(SEVEN_BILLION) == 25
    assert variant.cap_mb(NARROW) == 25 / 1024
    assert Variant(OURS, UNIT).cap_mb(SEVEN_BILLION) * 2**20 > 2 * SEVEN_BILLION.width * SEVEN_BILLION.vocabulary * 4


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--ranks", "9", "--ranks takes 2 to 8"),
        ("--ranks", "1", "--ranks takes 2 to 8"),
        ("--cap", "25,all", "not 'all'"),
        ("--cap", "-1", "not '-1'"),
        ("--tokens", "many", "not 'many'"),
        ("--headers", "1", "from 2 to 64, not 1"),
        ("--system", "zero4", "'zero4' is no system"),
    ],
)
def test_a_wrong_option_is_named(option: str, value: str, words: str, tmp_path: Path) -> None:
    done = _run(gpu_host, option, value, "--device", "cpu", "--out", tmp_path)
    assert done.exit_code == 2
    assert words in " ".join(done.output.replace("│", " ").split())


@pytest.mark.full
def test_the_hosts_work_is_timed_with_every_system_and_steps_are_traced(tmp_path: Path) -> None:
    done = _run(gpu_host, "--device", "cpu", "--quick", "--tokens", 8, "--markdown", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    results = [read(part) for part in Report.read(tmp_path / "gpu_host.json").parts]
    hosts = {each.variant: each for each in results if isinstance(each, HostTime)}
    assert list(hosts) == [PLAIN, FSDP2, f"{OURS}, 25", f"{OURS}, unit"]
    for each in hosts.values():
        assert all(seconds > 0 for seconds in (each.forward, each.backward, each.clip, each.step))
        assert 0 < each.norm < float("inf"), "every sum is of numbers that were written"
    many, few = hosts[f"{OURS}, 25"], hosts[f"{OURS}, unit"]
    assert (many.buckets, few.buckets) == (2 * 8 + 3, 3), (
        "a bucket for each matrix and one for the norms; one for each unit"
    )
    assert many.messages > 4 * few.messages > 0
    steps = [each for each in results if isinstance(each, Traced)]
    assert [each.variant for each in steps] == [FSDP2, f"{OURS}, 25", f"{OURS}, unit"]
    for each in steps:
        assert each.in_a_row > 0 < each.peak
        assert (tmp_path / each.files).exists()
    again = _run(gpu_host, "--show", tmp_path / "gpu_host.json", "--markdown")
    assert again.stdout == done.stdout


@pytest.mark.full
def test_header_rounds_are_timed_over_both_carriers(tmp_path: Path) -> None:
    done = _run(gpu_host, "--quick", "--headers", 2, "--markdown", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    found = [read(part) for part in Report.read(tmp_path / "gpu_headers.json").parts]
    assert [(each.carrier, each.header_ranks) for each in found if isinstance(each, HeaderTime)] == [
        ("gloo", 2),
        ("the host's sockets", 2),
    ]
    assert "the host's sockets" in done.stdout


# -- all of it ---------------------------------------------------------------------------------------------------------

ENDS, FAILS = ["platform"], ["no_such_module_anywhere"]


def test_a_command_ends_at_its_limit_with_all_that_it_has_started(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    child = f"import pathlib, os, time; pathlib.Path({str(begun)!r}).write_text(str(os.getpid())); time.sleep(98)"
    call = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    ran = run(Command("hangs", ["timeit", "-n", "1", "-r", "1", call], 10.0), tmp_path, 10.0)
    assert ran.outcome == "time limit of 10 s"
    assert ran.failed
    assert ran.seconds < 60
    place, end = Path("/proc") / begun.read_text() / "cmdline", time.monotonic() + 20
    while str(begun).encode() in _bytes(place):  # not when it has ended
        assert time.monotonic() < end, "it still runs"
        time.sleep(0.05)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # it is gone


def test_after_a_failure_the_next_command_is_run_and_all_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = [
        Command("fails", FAILS, 60.0),
        Command("ends", ENDS, 60.0, {"A": "1"}),
        Command("gpu", ENDS, 60.0, needs_cuda=True),
        Command("ignored", ENDS, 60.0),
    ]
    monkeypatch.setattr(gpu_first, "commands", lambda device, quick: listed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_first, "in_words_apart", lambda device: "a device")
    chosen = [word for name in ("fails", "ends", "gpu") for word in ("--only", name)]
    done = _run(gpu_first, "--device", "cpu", "--quick", "--out", tmp_path, *chosen)
    assert done.exit_code == 1
    report = Report.read(tmp_path / "report.json")
    assert [(part["name"], part["outcome"]) for part in report.parts] == [
        ("fails", "1"),
        ("ends", "0"),
        ("gpu", "not run: there is no CUDA"),
    ]
    assert "No module named no_such_module_anywhere" in (tmp_path / "fails.log").read_text()
    page = (tmp_path / "report.md").read_text()
    assert "No module named no_such_module_anywhere" in page
    assert "`A=1 python -m platform`" in page
    assert "a device" in page


def test_the_whole_list_runs_on_the_cpu_and_on_a_gpu() -> None:
    for device, quick in (("cpu", True), ("cuda:0", False)):
        listed = gpu_first.commands(device, quick)
        assert [command.name for command in listed] == ["tests", "bits", "steps", "host", "headers", "sanitizer"]
        assert sum(command.limit for command in listed) <= 40 * 60
        assert all("--quick" in command.words for command in listed[1:5]) == quick


@pytest.mark.full
def test_what_is_not_for_the_cpu_is_refused_there(tmp_path: Path) -> None:
    done = _run(gpu_first, "--device", "cpu", "--out", tmp_path)
    assert done.exit_code == 2
    assert "--quick" in done.output
    assert not list(tmp_path.iterdir())
