"""Copies between the host and a device, beside the device's current stream.

Knows: streams. Does not know: buckets, the use of a copy, when it is needed.

`Staging` copies states that are offloaded for the step, and back:

    fetch     launch the copies to the device, on a stream of their own
    wait      make the device's current stream wait for these copies
    put_back  launch the copies back to the host, after all work that the current stream has so far
    let_go    make the current stream wait for those, and release the memory on the device

If the host's memory is pinned, the host waits for none of these. On the CPU a copy is complete when the call returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor


class CopyStream:
    """A stream of a device for copies, which is made when it is first used. The CPU has none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.Stream | None = None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Launch the work of the block on this stream, after all work of the current stream so far."""
        if self._stream is None:
            self._stream = _line_on(self._device)
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield

    def wait(self) -> None:
        """Make the current stream wait for all copies so far."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def event(self) -> torch.Event | None:
        """Return an event of all copies so far, for which `torch.Stream.wait_event` waits; None on the CPU."""
        return None if self._stream is None else self._stream.record_event()


class Staging:
    """Copies of tensors on a device, by name. Not collective."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._copies = device, CopyStream(device)
        self.tensors: dict[str, Tensor] = {}

    def fetch(self, kept: Mapping[str, Tensor]) -> None:
        self.tensors = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device) for name, tensor in kept.items()
        }
        with self._beside():
            for name, tensor in kept.items():
                self.tensors[name].copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        if self.tensors:
            self._copies.wait()

    def put_back(self, kept: Mapping[str, Tensor]) -> None:
        with self._beside():
            for name, tensor in self.tensors.items():
                kept[name].copy_(tensor, non_blocking=True)

    def let_go(self) -> None:
        self.wait()
        self.tensors = {}

    def _beside(self) -> AbstractContextManager[None]:
        return self._copies.beside() if self.tensors else nullcontext()


def _line_on(device: torch.device) -> torch.Stream | None:
    """Return a new stream of the device; None on the CPU, which has no streams."""
    return None if device.type == "cpu" else torch.Stream(device)
