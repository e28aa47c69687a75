"""A sentinel may ask for an event while the rank's own thread captures a CUDA graph."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from collectives.backends import gloo


def test_a_thread_asks_for_an_event_in_a_mode_of_its_own_and_has_its_old_mode_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes = [0]

    class Driver:
        def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> None:  # noqa: N802
            before = modes[-1]
            modes.append(mode._obj.value)
            mode._obj.value = before

    event = mock.Mock(device=torch.device("cuda", 0), query=lambda: modes[-1] == 1)
    monkeypatch.setattr(gloo, "_DRIVER", Driver())
    assert gloo.has_ended(event)
    assert modes == [0, 1, 0]
