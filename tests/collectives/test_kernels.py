"""Each kernel has the bits of torch's operators or of exact sums; elsewhere the operators run, with a warning."""

from __future__ import annotations

import ctypes
import math
import re
import shutil
import subprocess
import threading
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from collectives.algorithms.ordered_sum import ordered_sum
from collectives.kernels import LIMBS, DeviceKernels, found, kernels_of, nvrtc
from collectives.kernels import self_check as check
from collectives.kernels.device_kernels import source
from collectives.kernels.self_check import awkward, same
from zero.core.norm import PowerSum
from zero.step.clip import clip_factor

from ..dials.loops import steps
from ..dials.record import config_with
from ..support.built_kernels import built_kernels, compiled, put_in
from ..support.devices import DEVICES
from ..support.machine.run import run
from ..support.narrowed import PRECISIONS
from ..support.rows import only


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def kernels(device: torch.device) -> DeviceKernels:
    """The source as built for the CPU, and on a GPU the kernels themselves."""
    made = built_kernels() if device.type == "cpu" else kernels_of(device)
    assert made is not None
    return made


def test_each_kernel_has_the_bits_of_operators(kernels: DeviceKernels, device: torch.device) -> None:
    assert check.first_wrong(kernels, device) is None


def test_norm_and_factor_of_a_clip_are_those_of_exact_sums_on_the_host(
    kernels: DeviceKernels, device: torch.device
) -> None:
    bad = [(math.inf,), (math.nan,), (math.inf, math.nan), (3e38, 3e38)]
    cases = [[torch.tensor([1.0, *values], device=device)] for values in bad]
    for seed, tensors in enumerate([*(check.gradients(seed, device) for seed in range(5)), *cases]):
        copies = (1, 3, 8)[seed % 3]  # as if so many ranks had added theirs
        limbs = torch.zeros(LIMBS, dtype=torch.int64, device=device)
        kernels.norm_limbs(tensors, limbs)
        part = PowerSum.of(tensors, 2.0)
        if part.units:
            assert sum(limb << 32 * place for place, limb in enumerate(limbs[:-2].tolist())) == part.units
        expected = replace(part, units=part.units * copies).norm()
        for max_norm in ((1.0, 0.3, 5.0, 1e39)[seed % 4], math.inf):
            norm, factor = kernels.clip_factor(limbs * copies, max_norm)
            assert same(norm.cpu(), expected), seed
            assert same(factor.cpu(), clip_factor(expected, max_norm)), seed
            assert norm.shape == factor.shape == ()


def test_what_a_kernel_writes_has_its_version_raised_and_nothing_else_is_written(
    kernels: DeviceKernels, device: torch.device
) -> None:
    memory = torch.arange(64, dtype=torch.float32, device=device)
    kept, part, number = memory.clone(), torch.ones(23, device=device), torch.tensor(2.0, device=device)
    slot = memory[3:26]
    for call in (
        lambda: kernels.ordered_sum([part, part], slot),
        lambda: kernels.scale_([slot], number),
        lambda: kernels.follow([slot], [torch.full_like(slot, 5.0, dtype=torch.bfloat16)]),
    ):
        before = slot._version
        call()
        assert slot._version > before
        assert same(memory[:3], kept[:3])
        assert same(memory[26:], kept[26:])
    assert same(slot, torch.full_like(slot, 5.0))


def test_a_master_weight_that_is_nan_keeps_its_bits_beside_any_nan(
    kernels: DeviceKernels, device: torch.device
) -> None:
    for dtype, first in ((torch.bfloat16, 0x7F81), (torch.float16, 0x7C01)):
        params = torch.tensor([first, first - 0x8000, 0x7FFF, 0x3C00] * 4, dtype=torch.int16, device=device).view(dtype)
        masters = torch.full((16,), 0x7F812345, dtype=torch.int32, device=device).view(torch.float32)
        kernels.follow([masters], [params])
        assert masters.view(torch.int32).tolist() == ([0x7F812345] * 3 + [params.float()[3].view(torch.int32)]) * 4


def test_the_sum_of_more_parts_than_a_launch_adds_may_be_written_to_any_of_them(
    kernels: DeviceKernels, device: torch.device
) -> None:
    for place in (0, 64, 65):
        parts = [awkward(33, torch.float32, device, 3 * number) for number in range(66)]
        expected = torch.empty_like(parts[0])
        check.plain_sum(parts, expected)
        kernels.ordered_sum(parts, parts[place])
        assert same(parts[place], expected)


def test_a_part_of_two_dimensions_stands_for_its_rows() -> None:
    kernels, start, rows = built_kernels(), torch.rand(37), torch.rand(70, 37).bfloat16()
    total, expected = torch.empty(37), torch.empty(37)
    kernels.ordered_sum([start, *rows], expected)
    for add in (kernels.ordered_sum, ordered_sum):
        add([start, rows], total)
        assert same(total, expected)


def test_empty_tensors_launch_nothing_and_hundreds_are_read_or_written_in_three_launches() -> None:
    launched: list[str] = []
    kernels, empty = built_kernels(launched.append), torch.empty(0)
    kernels.ordered_sum([empty, empty], empty)
    for tensors in ([empty], [torch.ones(5) for _ in range(384)]):
        kernels.norm_limbs(tensors, torch.zeros(LIMBS, dtype=torch.int64))
        kernels.scale_(tensors, torch.tensor(2.0))
        kernels.follow(tensors, [tensor.bfloat16() for tensor in tensors])
    assert launched == ["norm_limbs"] * 3 + ["scale"] * 3 + ["follow"] * 3


@pytest.mark.first(0)
@pytest.mark.parametrize(("stage", "precision"), product(range(4), PRECISIONS))
def test_a_training_that_uses_the_kernels_has_the_bits_of_the_plain_loop(stage: int, precision: str) -> None:
    launched: list[str] = []
    with put_in(built_kernels(launched.append)):
        run(config_with({"stage": stage, "world_size": 3, "precision": precision}), *steps(2))
    assert any(name.startswith("ordered_sum") for name in launched)
    assert "follow" in launched or stage == 3 or precision.startswith("fp32"), "fp32 has no master weights"


class Wrong(DeviceKernels):
    def __init__(self, right: DeviceKernels, which: str) -> None:
        def wrong(*given: object) -> object:
            result = getattr(right, which)(*given)
            target = given[1] if which == "ordered_sum" else given[0][0] if which in ("scale_", "follow") else None
            if isinstance(target, Tensor):
                target[-1:].view(torch.uint8)[0] ^= 1
                return result
            return (result[0], result[1] * 0.5) if which == "clip_factor" else given[1][:1].add_(1)  # type: ignore[index]

        for name in ("ordered_sum", "norm_limbs", "clip_factor", "scale_", "follow"):
            setattr(self, name, wrong if name == which else getattr(right, name))


@pytest.mark.parametrize("which", ["ordered_sum", "norm_limbs", "clip_factor", "scale_", "follow"])
def test_a_kernel_of_other_bits_is_found_before_its_use(which: str) -> None:
    assert check.first_wrong(Wrong(built_kernels(), which), torch.device("cpu")) is not None


def test_wrong_kernels_and_a_failed_compile_leave_the_operators_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other devices than those of CUDA have none. `self_check` runs on the CPU in their place."""

    def fail(device: torch.device) -> DeviceKernels:
        raise OSError("there is no NVRTC")

    first_wrong, gpus = found.first_wrong, found.Found()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(found, "first_wrong", lambda made, device: first_wrong(made, torch.device("cpu")))
    wrong, other, right = (torch.device("cuda", index) for index in range(3))
    monkeypatch.setattr(found.nvrtc, "kernels", lambda device: Wrong(built_kernels(), "scale_"))
    with pytest.warns(UserWarning, match=r"kernel 'scale' has other bits than torch's operators.*same bits"):
        assert gpus.look_up(wrong) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gpus.look_up(wrong) is None, "asked again"
        monkeypatch.setattr(found.nvrtc, "kernels", fail)
        assert gpus.look_up(other) is None
        monkeypatch.setattr(found.nvrtc, "kernels", lambda device: built_kernels())
        made = gpus.look_up(right)
        assert made is not None
        assert gpus.look_up(right) is made
        assert gpus.look_up(torch.device("cpu")) is gpus.look_up(torch.device("xpu", 0)) is None
    monkeypatch.setattr(found.nvrtc, "kernels", fail)
    with pytest.warns(UserWarning, match=r"cannot be compiled or started: there is no NVRTC"):
        assert found.Found().look_up(wrong) is None
    monkeypatch.setattr(torch.version, "cuda", None)  # as for ROCm
    assert gpus.look_up(torch.device("cuda", 0)) is None


class Nvrtc:
    """An NVRTC that knows some architectures, and returns what it was asked for as the code."""

    def __init__(self, *known: int) -> None:
        self._known, self._asked = known, b""

    def __getattr__(self, name: str) -> Any:
        kind = b"PTX" if "PTX" in name else b"CUBIN"

        def answer(*given: Any) -> int:
            match name:
                case "nvrtcGetNumSupportedArchs":
                    given[0]._obj.value = len(self._known)
                case "nvrtcGetSupportedArchs":
                    given[0][:] = self._known
                case "nvrtcCompileProgram":
                    self._asked = given[2][0]
                case "nvrtcGetPTXSize" | "nvrtcGetCUBINSize":
                    given[1]._obj.value = 80
                case "nvrtcGetPTX" | "nvrtcGetCUBIN":
                    given[1].value = kind + b" of " + self._asked
            return 0

        return answer


@pytest.mark.parametrize(
    ("capability", "known", "code"),
    [
        ((9, 0), (80, 90, 100), "CUBIN of --gpu-architecture=sm_90"),
        ((10, 3), (80, 90, 100), "PTX of --gpu-architecture=compute_100"),
        ((12, 1), (80, 90), "PTX of --gpu-architecture=compute_90"),
        ((7, 0), (80, 90), "CUBIN of --gpu-architecture=sm_70"),
    ],
)
def test_a_device_newer_than_the_compiler_gets_ptx(capability: tuple[int, int], known: Any, code: str) -> None:
    library: Any = Nvrtc(*known)
    made = nvrtc.compiled("", nvrtc.architecture_for(capability, library), library)
    assert made.rstrip(b"\0").decode() == code


def test_the_driver_launches_them_from_any_thread_on_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is one that runs a kernel of the CPU at once, and returns an error without the device's context."""
    driver, cuda, stream = compiled(), torch.device("cuda", 0), 7 << 40
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(nvrtc, "nvrtc_library", lambda: Nvrtc(90))
    monkeypatch.setattr(nvrtc, "compiled", lambda text, architecture, compiler: b"code")
    for name, value in (
        ("get_device_capability", (9, 0)),
        ("get_device_properties", SimpleNamespace(multi_processor_count=3)),
        ("current_stream", SimpleNamespace(cuda_stream=stream)),
        ("synchronize", None),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    kernels = nvrtc.kernels(cuda)
    found: list[str | None] = []
    thread = threading.Thread(target=lambda: found.append(check.first_wrong(kernels, torch.device("cpu"))))
    thread.start()
    thread.join(60)
    assert found == [None]
    assert ctypes.c_void_p.in_dll(driver, "last_stream").value == stream
    monkeypatch.setattr(nvrtc, "compiled", lambda text, architecture, compiler: b"other code")
    with pytest.raises(RuntimeError, match=r"cuModuleLoadData: invalid device context \(201\)"):
        nvrtc.kernels(cuda)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
@pytest.mark.parametrize("architecture", only(("compute_80", "compute_90", "compute_100"), "compute_90"))
def test_no_operation_is_contracted_flushed_or_approximate(architecture: str, tmp_path: Path) -> None:
    (tmp_path / "kernels.cu").write_text(source())
    command = ["nvcc", "-ptx", f"-arch={architecture}", "kernels.cu", "-o", "kernels.ptx"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    code = (tmp_path / "kernels.ptx").read_text()
    assert {"add.rn.f32", "mul.rn.f32", "rcp.rn.f32", "add.rn.f64", "mul.rn.f64", "sqrt.rn.f64"} <= set(
        re.findall(r"[\w.]+", code)
    )
    assert not re.search(r"fma|ftz|approx", code)
    assert len(re.findall(r"\.entry", code)) == 8
