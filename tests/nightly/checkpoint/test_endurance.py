"""Many saves leave nothing."""

from __future__ import annotations

import gc
import resource
import sys
import threading
from pathlib import Path

import torch

from collectives import Transport, on_threads
from zero import CheckpointManager

from ...checkpoint.saved import Training, entries
from ...support.descriptors import opened
from ...support.limits import PATIENT


def test_200_saves_leave_memory_descriptors_threads_and_the_folder_flat(tmp_path: Path) -> None:
    def program(transport: Transport) -> None:
        training = Training(transport, 1)
        training.step(0)
        before: tuple[int, int, int] | None = None
        descriptors: set[tuple[int, int, int]] = set()
        with CheckpointManager(tmp_path, training.optimizer, max_to_keep=2) as checkpoints:
            for step in range(200):
                saving = checkpoints.save(step, {"step": step, "t": torch.zeros(100)})
                training.step(step)
                if step in (49, 199):
                    saving.result(PATIENT)
                    for thread in threading.enumerate():
                        if thread.name.startswith("zero-checkpoint"):
                            thread.join(PATIENT)  # it ends after its result is there
                    training.optimizer.exchange(b"")
                    if transport.rank == 0:
                        gc.collect()
                        objects, threads = len(gc.get_objects()), threading.active_count()
                        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                        if before is None:
                            before, descriptors = (objects, threads, peak), opened()
                        else:
                            traced = sys.gettrace() is not None  # coverage keeps objects for each thread that it saw
                            assert traced or objects - before[0] < 150, "not one object a save"
                            assert threads <= before[1]
                            assert peak - before[2] < 2 * 4096, "two buffers of a block, in KiB"
                            assert not opened() - descriptors
                        assert len([name for name in entries(tmp_path) if not name.startswith(".saved-")]) == 3
                    training.optimizer.exchange(b"")

    on_threads(2, program)
    assert entries(tmp_path) == [".lock", "step-00000198", "step-00000199"]
