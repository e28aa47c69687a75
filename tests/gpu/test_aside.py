"""On one GPU, sums are formed on a stream aside, behind what they read and before what follows their wait.

Where there is no GPU the test runs on the CPU, which only shows that its code works.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from collectives import Chain, Work, solo
from collectives.algorithms.base import Launched
from collectives.algorithms.ordered_sum import AddedAside, Aside, ordered_sum

from ..support.devices import DEVICE, HAS_GPU
from .streams import CYCLES


class Adds:
    """A work that adds three times the source, late, on the current stream."""

    def __init__(self, source: Tensor, out: Tensor) -> None:
        self._source, self._out = source, out

    def wait(self) -> None:
        if self._out.is_cuda:
            torch.cuda._sleep(CYCLES)
        ordered_sum([self._source] * 3, self._out)


@pytest.mark.parametrize("is_awaited", [False, True] if HAS_GPU else [True])
def test_a_sum_aside_lies_between_its_launch_and_its_wait_or_end(is_awaited: bool) -> None:
    """The kernel that adds runs on the stream aside, too."""
    source, out = torch.zeros(1 << 16, device=DEVICE), torch.zeros(1 << 16, device=DEVICE)
    aside, found = Aside().of(source.device), list[Tensor]()
    for number in range(8):
        if source.is_cuda:
            torch.cuda._sleep(CYCLES)
        source.fill_(number)
        adds: Any = Adds(source, out)
        work: Work = adds
        if aside is None:
            work.wait()
        else:
            work = AddedAside(solo(), Launched(Chain(()), adds), aside, source.device, (source, out))
            if is_awaited:
                work.wait()
            del work
        found.append(out.clone())
        source.zero_()
        out.zero_()
    assert torch.stack(found).unique(dim=1).flatten().tolist() == [3.0 * number for number in range(8)]
