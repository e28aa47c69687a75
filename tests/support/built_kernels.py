"""The kernels as built for the CPU by `benchmarks.gpu_short.cpu_kernels`; without a compiler the test is skipped."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable

import pytest

from benchmarks.gpu_short import cpu_kernels
from benchmarks.gpu_short.cpu_kernels import put_in as put_in
from collectives.kernels import DeviceKernels


def compiled() -> ctypes.CDLL:
    if shutil.which(cpu_kernels.COMPILER) is None:
        pytest.skip(f"there is no {cpu_kernels.COMPILER} to compile the kernels for the CPU")
    return cpu_kernels.compiled()


def built_kernels(noted: Callable[[str], object] | None = None) -> DeviceKernels:
    """Return kernels of the CPU; ``noted`` gets the name of each launch."""
    compiled()
    return cpu_kernels.built_kernels(noted)
