"""Orders an optimizer's work on a device across streams: a new current stream waits for the previous one.

Knows: streams, and whether CUDA is capturing them for a graph. Does not know: what the work is.

    backward on stream 1    wait_for_previous, enqueue ...
    step on stream 2        wait_for_previous: stream 2 waits for the work that stream 1 has so far; enqueue ...

The host never waits. The CPU has no streams, and there nothing is done.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Streams:
    """The streams on which one optimizer enqueues work."""

    def __init__(self) -> None:
        self.exist = False  # some device has streams
        self._last: dict[torch.device, torch.Stream | None] = {}  # of each device with streams

    def use(self, devices: Iterable[torch.device]) -> None:
        """Set the devices on which work is enqueued."""
        self._last = {device: self._last.get(device) for device in devices if device.type != "cpu"}
        self.exist = bool(self._last)

    def wait_for_previous(self) -> None:
        """Let the current stream of each device wait for all work so far on the stream that this optimizer used before.

        Raises `RuntimeError` while a CUDA graph is being captured.
        """
        for device, last in self._last.items():
            self._last[device] = _behind(device, last)


def _behind(device: torch.device, last: torch.Stream | None) -> torch.Stream:
    """Return the current stream of a device, which waits for ``last``."""
    if _is_recorded(device):
        raise RuntimeError(
            "a CUDA graph is being captured: a replay would communicate nothing and agree on nothing; run "
            "forwards, backwards and steps of this optimizer outside torch.cuda.graph()"
        )
    current = _current(device)
    if last is not None and last != current:
        current.wait_stream(last)
    return current


def _current(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def _is_recorded(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
