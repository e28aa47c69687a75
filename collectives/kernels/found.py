"""Which kernels a process has found on each of its devices.

Knows: that kernels are compiled and checked once a device. Does not know: how.
"""

from __future__ import annotations

import threading
import warnings

import torch

from . import nvrtc
from .device_kernels import DeviceKernels
from .self_check import first_wrong


class Found:
    """The kernels by device. A device without an entry was not asked for yet; None: it has none.

    A test that puts kernels of its own for the CPU here (`by_device`) lets the library use them there.
    """

    def __init__(self) -> None:
        self.by_device: dict[torch.device, DeviceKernels | None] = {}
        self._lock = threading.Lock()
        self._warned = False

    def look_up(self, device: torch.device) -> DeviceKernels | None:
        """Return the kernels of a device, compiled and checked at its first use.

        The first use on an NVIDIA GPU takes about a second, and waits for the device.
        """
        if device in self.by_device:
            return self.by_device[device]
        if device.type != "cuda" or torch.version.cuda is None:
            return None
        with self._lock:
            if device not in self.by_device:
                self.by_device[device] = self._make(device)
            return self.by_device[device]

    def _make(self, device: torch.device) -> DeviceKernels | None:
        try:
            made = nvrtc.kernels(device)
            wrong = first_wrong(made, device)
            if wrong is None:
                return made
            reason = f"kernel {wrong!r} has other bits than torch's operators"
        except Exception as error:  # of a compiler, a driver or a device; the operators need none of them
            reason = f"the kernels cannot be compiled or started: {error}"
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"on {device}, {reason}. Torch's operators are used instead: results have the same bits, and sums, "
                "clips and master weights take longer",
                stacklevel=4,
            )
        return None


FOUND = Found()


def kernels_of(device: torch.device) -> DeviceKernels | None:
    """Return the kernels of a device (one with an index, as tensors have it), or None: use torch's operators.

    They exist on NVIDIA GPUs alone. Each rank asks for itself, and may get another answer than its peers. See
    `Found.look_up` for the first use on a device: it must not be inside a capture of a CUDA graph.
    """
    return FOUND.look_up(device)
