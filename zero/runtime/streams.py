"""Orders an optimizer's work on a device across streams: a new current stream waits for the previous one.

Knows: streams, and whether CUDA is capturing them for a graph. Does not know: what the work is.

    backward on stream 1    wait_for_previous, enqueue ...
    step on stream 2        wait_for_previous: stream 2 waits for the work that stream 1 has so far; enqueue ...

The host never waits. The CPU has no streams, and there nothing is done.
"""

from __future__ import annotations

import torch


class Streams:
    """The streams on which one optimizer enqueues work."""

    def __init__(self) -> None:
        self.exist = False  # the device has streams
        self._device: torch.device | None = None  # None: a device without streams
        self._last: torch.Stream | None = None

    def use(self, device: torch.device) -> None:
        """Set the device on which work is enqueued."""
        self._device = None if device.type == "cpu" else device
        self.exist = self._device is not None

    def wait_for_previous(self) -> None:
        """Let the current stream wait for all work so far on the stream that this optimizer used before.

        Raises `RuntimeError` while a CUDA graph is being captured.
        """
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
