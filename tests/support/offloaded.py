"""The host's memory as that of another device: there is no device here, and the CPU takes its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from zero import Offload, setup
from zero.runtime.offload import HostOffload, OffloadBackend, OffloadedStates, backend_for


@contextmanager
def copied_from_the_host() -> Iterator[None]:
    """Let `Offload("cpu")` make each copy in the block, and wait for none."""

    def backend(offload: Offload, device: torch.device) -> OffloadBackend | None:
        return HostOffload(device) if offload.on_host else backend_for(offload, device)

    def is_elsewhere(self: Any, flat: torch.Tensor) -> bool:
        return isinstance(self._offload_backend, HostOffload)

    with (
        patch.object(OffloadedStates, "_is_elsewhere", is_elsewhere),
        patch.object(setup, "backend_for", backend),
        patch.object(torch.accelerator, "synchronize", lambda *_: None),
    ):
        yield
