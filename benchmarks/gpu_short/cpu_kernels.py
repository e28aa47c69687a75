"""The kernels' source, compiled by a C++ compiler: kernels for tensors on the CPU, and a driver that launches them.

`put_in` lets the library use them, as it uses those of a GPU there.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from collectives.kernels import FOUND, DeviceKernels
from collectives.kernels.device_kernels import source

CPU = torch.device("cpu")
COMPILER = "g++"
LAUNCH = 5e-6  # seconds that the host takes for a launch by the driver of a GPU
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC")


class Launcher:
    """Runs a kernel at once. ``noted`` is called with the name of each launch. ``beyond_launches``: the processor
    seconds that kernels have run, less `LAUNCH` for each. A host with a GPU would not have spent them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.noted: Callable[[str], object] = lambda name: None
        self.beyond_launches = 0.0

    def __call__(self, name: str, blocks: int, arguments: ctypes.Structure) -> None:
        self.noted(name)
        begin = time.thread_time()
        getattr(self._library, f"run_{name}")(ctypes.byref(arguments), blocks)
        self.beyond_launches += time.thread_time() - begin - LAUNCH


@functools.cache
def compiled() -> ctypes.CDLL:
    """Compile the source, once a process. Raises `RuntimeError` if there is no compiler."""
    if shutil.which(COMPILER) is None:
        raise RuntimeError(f"there is no {COMPILER} to compile the kernels for the CPU")
    shim = Path(__file__).with_name("kernels.cpp")
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, "kernels.so")
        Path(folder, "kernels.cu").write_text(source())
        subprocess.run([COMPILER, *FLAGS, f"-I{folder}", str(shim), "-o", str(built), "-ldl"], check=True, timeout=60)
        return ctypes.CDLL(str(built))


def built_kernels(noted: Callable[[str], object] | None = None, processors: int = 2) -> DeviceKernels:
    """Return kernels of the CPU; ``noted`` gets the name of each launch."""
    launcher = Launcher(compiled())
    if noted is not None:
        launcher.noted = noted
    return DeviceKernels(launcher, processors)


@contextmanager
def put_in(kernels: DeviceKernels | None) -> Iterator[None]:
    """Let the library find these kernels for tensors on the CPU."""
    with mock.patch.dict(FOUND.by_device, {CPU: kernels}):
        yield
