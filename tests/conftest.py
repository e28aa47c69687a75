"""Hypothesis profiles and fixtures of the whole suite.

Modules that import torch are imported inside functions: the process that hands out files to the workers runs no test,
and needs no torch.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from .support.processor import spare_matrix_unit
from .support.rows import further_rows

if TYPE_CHECKING:
    from .support.pool import GlooPool

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
for _name, _examples in (("default", 10), ("full", 40), ("ci", 12), ("thorough", 400)):
    settings.register_profile(
        _name, deadline=None, max_examples=_examples, derandomize=True, suppress_health_check=_SLOW
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        spare_matrix_unit()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out rows behind the `first` ones."""
    left_out = further_rows(items)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def pytest_collection_finish() -> None:
    """Spare the garbage collector what stays for the session: many tests call it, and are a quarter faster so."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Use one intra-op thread in ranks and plain loops: the number of threads changes bits.

    The first step of each optimizer class also happens here, on one thread: torch and its math library choose kernels
    at their first use, and do not promise that several threads may do so at once.
    """
    import torch

    from .support.machine.classes import CLASSES

    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for cls, arguments in CLASSES.values():
            parameter = torch.ones(1 << 10, dtype=dtype, requires_grad=True)
            parameter.square().sum().backward()
            cls([parameter], **arguments).step()


@pytest.fixture(autouse=True)
def each_test_leaves_one_thread(one_thread: None) -> Iterator[None]:
    """Fail the test that leaves another number of threads, not a later one, whose bits it would change."""
    import torch

    yield
    left = torch.get_num_threads()
    torch.set_num_threads(1)
    assert left == 1, f"this test leaves {left} intra-op threads to those that run after it"


@pytest.fixture(autouse=True, scope="session")
def one_call_of_the_generator_at_a_time() -> Iterator[None]:
    """Prevent a deadlock in torch's generator between ranks that are threads."""
    from .support.generator import one_call_at_a_time

    with pytest.MonkeyPatch.context() as patch:
        one_call_at_a_time(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def the_sanitizer_overlooks_gradients_without_memory() -> Iterator[None]:
    """Torch's CUDA sanitizer asks every tensor on a GPU for its address, and a rank has none for others' gradients."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TORCH_CUDA_SANITIZER"):
            from zero.gradients.grad_publisher import ShardedGradient

            patch.setattr(ShardedGradient, "is_cuda", False)
        yield


@pytest.fixture(scope="session")
def gloo() -> Iterator[GlooPool]:
    """Return a pool of four gloo processes, shared by the session."""
    from .support.pool import GlooPool, stop_forkserver

    pool = GlooPool()
    yield pool
    pool.stop()
    stop_forkserver()


@pytest.fixture(autouse=True, scope="session")
def trials_are_remembered() -> Iterator[None]:
    """Try an optimizer class once in a session for equal options, dtypes and shapes; see `every_trial_runs`."""
    from .support.trials import remember

    with pytest.MonkeyPatch.context() as patch:
        remember(patch)
        yield


@pytest.fixture
def every_trial_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the trial itself: none of its results is remembered."""
    from .support.trials import forget

    forget(monkeypatch)


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the library believe that the host cannot read values at once, as on an accelerator."""
    monkeypatch.setattr("zero.core.bits.host_readable.__code__", (lambda device: False).__code__)  # for all importers


@pytest.fixture
def accelerated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the library lay out and gather parameters as on an accelerator."""
    monkeypatch.setattr("zero.core.layout.device_type", lambda device: "cuda")


@pytest.fixture
def copied_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `Offload("cpu")` make each copy in the block, as if parameters were on a device, and wait for none."""
    import torch

    from zero import setup
    from zero.runtime.offload import HostOffload, OffloadedStates, backend_for

    monkeypatch.setattr(setup, "backend_for", lambda of, at: HostOffload(at) if of.on_host else backend_for(of, at))
    monkeypatch.setattr(
        OffloadedStates, "_is_elsewhere", lambda self, _: isinstance(self._offload_backend, HostOffload)
    )
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the library believe that work is launched, as on an accelerator: it takes gradients by bucket, gathers means
    while a backward runs, and steps buckets in groups."""
    monkeypatch.setattr("zero.core.bits.is_launched.__code__", (lambda device: True).__code__)  # for all importers


@pytest.fixture(params=["seen at once", "seen later"])
def whenever_seen(request: pytest.FixtureRequest) -> None:
    """Run a test about edits twice: where the host can read values at once, and where it cannot (`unseen`)."""
    if request.param == "seen later":
        request.getfixturevalue("unseen")
