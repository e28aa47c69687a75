"""Fixtures of the tests of `zero train`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text("".join(f"{number} bottles of beer on the wall\n" for number in range(300)))
    return path


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the variables of a launcher, and restore the number of threads."""
    import torch

    for name in ("WORLD_SIZE", "RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no pictures and hardly a sample, which take longer than the training."""
    from zero.commands.train import plots, rank

    monkeypatch.setattr(plots, "can_draw", lambda: False)
    monkeypatch.setattr(rank, "SAMPLE_LENGTH", 8)
