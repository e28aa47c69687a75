"""Orders an optimizer's work on a device across streams: when the current stream changes, it waits for the one before.

Knows: streams, and that CUDA may be recording them for a graph. Does not know: what the work is.

    backward on stream 1    wait_for_previous, enqueue ...
    step on stream 2        wait_for_previous: stream 2 waits for what stream 1 has so far; enqueue ...

The host waits for nothing. On the CPU there are no streams, and nothing is done.
"""

from __future__ import annotations

import torch


class Streams:
    """The streams on which one optimizer enqueues work."""

    def __init__(self) -> None:
        self._device: torch.device | None = None  # None: there are no streams
        self._last: torch.Stream | None = None

    def use(self, device: torch.device) -> None:
        """Work goes to this device."""
        self._device = None if device.type == "cpu" else device

    def wait_for_previous(self) -> None:
        """Let the current stream wait for the one that this optimizer used before, and for all that it has by now."""
        if self._device is None:
            return
        if _is_recorded(self._device):
            raise RuntimeError(
                "a CUDA graph is being captured: a replay would communicate nothing and agree on nothing; run "
                "forwards, backwards and steps of this optimizer outside torch.cuda.graph()"
            )
        current = _current(self._device)
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current


def _current(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def _is_recorded(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
