"""Asks for a device's events while another thread captures a CUDA graph.

In CUDA's default mode of a capture no thread may ask for an event, and one that does spoils the capture. A thread whose
own mode is "thread local" may: torch's watchdog of NCCL changes its mode in this way, too.

Knows: the CUDA driver's call for this mode. Does not know: what the events are for.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


def _loaded() -> Any:
    """Return the library of the CUDA driver; None if there is none."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


_DRIVER = _loaded()


def has_ended(event: torch.Event) -> bool:
    """Return whether the device has reached an event, whatever other threads capture. The host does not wait."""
    if _DRIVER is None or event.device.type != "cuda":
        return event.query()
    mode = ctypes.c_int(_THREAD_LOCAL)
    _DRIVER.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        return event.query()
    finally:
        _DRIVER.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # the mode that it was
