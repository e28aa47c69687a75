"""On which stream torch's engine runs each node of a backward, and what that stream waits for before.

On a device the engine does this by itself (`torch/csrc/autograd/engine.cpp`). On the CPU it knows no streams:

    a node               runs on the stream of its forward; a leaf's, on that of the leaf's first use
    before it            that stream waits for the nodes that made its gradients, the first one for the caller's stream
    the end              the caller's stream waits for all leaves, and runs the callbacks of the end
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

LEAF = "AccumulateGrad"


class _Stream(Protocol):
    clock: Any

    def wait_clock(self, clock: Any) -> None: ...


S = TypeVar("S", bound=_Stream)


class Backward(Generic[S]):
    def __init__(self, loss: Tensor, caller: S, stream_of_forward: Callable[[int], S]) -> None:
        """``stream_of_forward``: returns the stream on which a forward made the node of a number."""
        self._root: Any = loss.grad_fn
        self._caller, self._stream_of_forward = caller, stream_of_forward
        self._begin: Any = None  # the caller's clock when the first node begins
        self._producers: dict[Any, list[Any]] = defaultdict(list)  # the nodes that make a node's gradients
        self._done: dict[Any, Any] = {}  # the clock at the end of each node that ran an operator
        self._node: Any = None  # that runs
        self._find_producers()

    def _find_producers(self) -> None:
        seen, left = {self._root}, [self._root]
        while left:
            node: Any = left.pop()
            for following, _ in node.next_functions:
                if following is not None:
                    self._producers[following].append(node)
                    if following not in seen:
                        seen.add(following)
                        left.append(following)
        self._leaves = [node for node in seen if not node.next_functions]

    def stream_at(self, node: Any) -> S | None:
        """Note which node runs now. Return its stream; None if none runs, or if it is of another graph."""
        if node is None:
            if self._node is not None:
                self.end()
            return None
        if node is not self._root and node not in self._producers:
            return None
        stream = self._stream_of(node)
        if node is not self._node:
            if self._begin is None:
                self._begin = dict(self._caller.clock)
            self._finish()
            self._node = node
            stream.wait_clock(self._ready(node))
        return stream

    def end(self) -> None:
        self._finish()
        self._node = None
        for leaf in self._leaves:
            self._caller.wait_clock(self._done[leaf] if leaf in self._done else self._ready(leaf))

    def _finish(self) -> None:
        if self._node is not None:
            self._done[self._node] = dict(self._stream_of(self._node).clock)

    def _ready(self, node: Any) -> Any:
        """Return the clock at which all gradients of a node are there."""
        ready = dict(self._begin) if node is self._root else {}
        for producer in self._producers[node]:
            clock = self._done[producer] if producer in self._done else self._ready(producer)
            for stream, time in clock.items():
                ready[stream] = max(time, ready.get(stream, 0))
        return ready

    def _stream_of(self, node: Any) -> S:
        if node.name().endswith(LEAF) and self._producers[node]:
            node = min(self._producers[node], key=lambda producer: producer._sequence_nr())
        return self._stream_of_forward(node._sequence_nr())
