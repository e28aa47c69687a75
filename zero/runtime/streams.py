"""Orders an optimizer's work on a device across streams: a new current stream waits for the previous one.

Knows: streams, and whether CUDA is capturing them for a graph. Does not know: what the work is.

    backward on stream 1    wait_for_previous, enqueue ...
    step on stream 2        wait_for_previous: stream 2 waits for the work that stream 1 has so far; enqueue ...
                            keep_memory: memory of stream 1 that is freed now is in use until that work is done

The host never waits. The CPU has no streams, and there nothing is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from collectives.torch_internals import current_raw_stream


class Streams:
    """The streams on which one optimizer enqueues work."""

    def __init__(self) -> None:
        self.exist = False  # some device has streams
        self._last: dict[torch.device, torch.Stream | None] = {}  # of each device with streams
        self._numbers: dict[torch.device, int | None] = {}  # of these streams; None: not known
        self._refusal = ""  # why nothing may be enqueued now
        self._several = False  # work was enqueued on more than one stream of a device

    def use(self, devices: Iterable[torch.device]) -> None:
        """Set the devices on which work is enqueued."""
        self._last = {device: self._last.get(device) for device in devices if device.type != "cpu"}
        self.exist = bool(self._last)

    def wait_for_previous(self) -> None:
        """Let the current stream of each device wait for all work so far on the stream that this optimizer used before.

        Raises `RuntimeError` while a CUDA graph is being captured, and between `refuse` and `allow`.
        """
        self.check_allowed()
        if self._captures():
            raise RuntimeError(
                "a CUDA graph is being captured: its replay would not communicate with the other ranks. Run "
                "forwards, backwards and steps of this optimizer outside torch.cuda.graph()"
            )
        self._follow()

    def refuse(self, why: str) -> None:
        """Let `wait_for_previous`, with which all work begins, raise `RuntimeError` with this text until `allow`."""
        self._refusal = why

    def check_allowed(self) -> None:
        """Raise `RuntimeError` between `refuse` and `allow`."""
        if self._refusal:
            raise RuntimeError(self._refusal)

    def allow(self) -> None:
        """Undo `refuse`."""
        self._refusal = ""

    def changed(self) -> bool:
        """Return whether a current stream may be another one than after the last wait, without torch's objects."""
        return any(last is None or _number(device) != last for device, last in self._numbers.items())

    def end_on_current(self) -> None:
        """Let the current streams wait in the same way at the end of a forward or a block, which must be able to end.

        It may have used memory on the current stream after its last call of `wait_for_previous`. The next stream must
        wait for that before it uses the memory again. During a capture this does nothing: the forward was refused, and
        a wait for a stream outside the capture would invalidate the user's graph.
        """
        if not self._captures():
            self._follow()

    def _captures(self) -> bool:
        return any(map(_is_recorded, self._last))

    def _follow(self) -> None:
        for device, last in self._last.items():
            current = _current(device)
            if last is not None and last != current:
                current.wait_stream(last)
                self._several = True
            self._last[device], self._numbers[device] = current, _number(device)

    @contextmanager
    def block(self) -> Iterator[None]:
        """Return the context of a block that may end on another stream than it began."""
        try:
            yield
        finally:
            self.end_on_current()

    def keep_memory(self, tensors: Iterable[Tensor]) -> None:
        """Delay reuse of the memory of tensors until the work so far on the last-used stream is done (`record_stream`).

        Another stream may have allocated it, for example that of a part of a forward. The caching allocator gives freed
        memory to the next tensor of that stream, which would not wait.
        """
        for tensor in tensors if self._several else ():
            last = self._last.get(tensor.device)
            if last is not None:
                tensor.record_stream(last)


def _current(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def _number(device: torch.device) -> int | None:
    """Return the number of the current stream; None if torch has none for this kind of device."""
    return current_raw_stream(device.index) if device.type == "cuda" and current_raw_stream is not None else None


def _is_recorded(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
