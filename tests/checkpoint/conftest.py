"""The file system of the tests of this folder, see `file_systems`, and an optimizer that many of them save."""

from __future__ import annotations

import os

import pytest

from zero import ZeroOptimizer

from .file_systems import FILE_SYSTEMS, VARIABLE
from .saved import Training


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    system = FILE_SYSTEMS.get(os.environ.get(VARIABLE, ""))
    if system is not None:
        lacks = {*system.lacks, *([] if system.warning is None else ["no warning"])}
        for item in items:
            marker = item.get_closest_marker("assumes")
            if marker is not None and lacks & {*marker.args}:
                item.add_marker(pytest.mark.skip(f"is about {', '.join(marker.args)}"))


@pytest.fixture(autouse=True, scope="session")
def file_system() -> None:
    name = os.environ.get(VARIABLE)
    if name is not None:
        FILE_SYSTEMS[name].use(pytest.MonkeyPatch())


@pytest.fixture(scope="module")
def optimizer() -> ZeroOptimizer:
    """Return an optimizer of one rank that has taken a step."""
    training = Training(None, 0)
    training.step(0)
    return training.optimizer
