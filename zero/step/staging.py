"""Copies, on the device that steps them, of states that are kept in the host's memory.

Knows: streams. Does not know: buckets, what a copy is for, when it is needed.

    fetch     the device begins to copy them, beside what it does for others
    wait      what the device is told from now on finds them there
    put_back  the device begins to copy them back, after what it was told so far, beside what it is told from now on
    let_go    what the device is told from now on may have their memory

The host waits for none of it where its memory is pinned. On the CPU a copy is done when the call returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class Staging:
    """Copies of some tensors, by name. Local."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.Stream | None = None
        self.tensors: dict[str, Tensor] = {}

    def fetch(self, kept: Mapping[str, Tensor]) -> None:
        if kept and self._stream is None:
            self._stream = _line_on(self._device)
        self.tensors = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device) for name, tensor in kept.items()
        }
        with self._beside():
            for name, tensor in kept.items():
                self.tensors[name].copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        if self.tensors and self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def put_back(self, kept: Mapping[str, Tensor]) -> None:
        with self._beside():
            for name, tensor in self.tensors.items():
                kept[name].copy_(tensor, non_blocking=True)

    def let_go(self) -> None:
        self.wait()
        self.tensors = {}

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Inside, the device is told things to do after all that it was told so far, in a line of their own."""
        if self._stream is None or not self.tensors:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield


def _line_on(device: torch.device) -> torch.Stream | None:
    """Work that a device does beside other; None on the CPU, where there is no such thing."""
    return None if device.type == "cpu" else torch.Stream(device)
