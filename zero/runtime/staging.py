"""Copies of states that are offloaded to the host, on the device that steps them.

Knows: streams. Does not know: buckets, the use of a copy, when it is needed.

    fetch     launch the copies to the device, on a stream of their own
    wait      make the device's current stream wait for these copies
    put_back  launch the copies back to the host, after all work that the current stream has so far
    let_go    make the current stream wait for those, and release the memory on the device

If the host's memory is pinned, the host waits for none of these. On the CPU a copy is complete when the call returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class Staging:
    """Copies of tensors on a device, by name. Not collective."""

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
        """Launch the work of the block on the stream of the copies, after all work of the current stream so far."""
        if self._stream is None or not self.tensors:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield


def _line_on(device: torch.device) -> torch.Stream | None:
    """Return a new stream of the device; None on the CPU, which has no streams."""
    return None if device.type == "cpu" else torch.Stream(device)
