"""Where units are gathered on an accelerator, a rank of stage 3 keeps the master weights of its shards alone."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.gpu_short.peers import device_paths
from collectives import Transport, on_threads
from collectives.backends import gloo as gloo_backend
from zero import ZeroOptimizer

from ..dials import loops
from ..dials.loops import DIALS
from ..dials.record import config_with
from ..step.narrow import build, step, zero
from ..support.late import LateBackend, on_late_threads
from ..support.machine.program import Backward, Freeze, Scaled
from ..support.machine.run import Played, play, run
from ..support.narrowed import BF16, PRECISIONS
from ..support.parts import parts_of
from ..support.plain import assert_same_bits

LOOPS, LOOKS = (dial.values for dial in DIALS)
NARROW = PRECISIONS["bf16"]
LOOP = [
    *(*loops.step(1), Backward(2, sync=False), *loops.step(3)),
    *(Freeze((14,)), *loops.step(4), Scaled(5, overflow=1)),
]
PROGRAMS: dict[str, dict[str, Any]] = {
    "all_to_all": {"world_size": 3, "collective": "all_to_all"},
    "kept by few for the backward": {"world_size": 4, "reshard": 2},
    "replicas": {"world_size": 6, "sharding_factor": 3},
    "by parameter": {"world_size": 3, "optimizer": "shampoo", "collective": "all_to_all"},
    "fp16": {"world_size": 2, "collective": "all_to_all", "precision": "fp16"},
}


class NoEvents(gloo_backend._UnderWay):
    """Gloo's collectives on the CPU, taken for work on a stream, which has no event here."""

    def awaited(self, device: torch.device) -> None:
        self._not_awaited -= 1


@pytest.mark.first(0)
@pytest.mark.parametrize("name", PROGRAMS)
def test_training_has_the_plain_loops_bits(name: str) -> None:
    """On the paths of a device, with collectives of the backend that finish at their wait."""
    config = config_with({"stage": 3, "precision": "bf16", **PROGRAMS[name]})
    with (
        device_paths(),
        mock.patch.object(LateBackend, "stays_on", return_value=True),
        mock.patch("collectives.topology._all_have_nccl", return_value=True),
        mock.patch("collectives.topology.ThreadBackend", NoEvents),  # threads pass for processes
    ):
        results = on_late_threads(config.setting.world_size, lambda transport: play(config, LOOP, transport))
    run(config, *LOOP, backend=Played(results))


def weights_of(optimizer: ZeroOptimizer) -> int:
    """Return the bytes of the parameters that this rank keeps beside its master weights."""
    return optimizer.describe().bytes["parameters"]


@pytest.mark.first(1)
@pytest.mark.usefixtures("accelerated")
@pytest.mark.parametrize("commands", [LOOPS["edits"], LOOKS["average"]], ids=["edits", "average"])
def test_masters_that_are_kept_alone_follow_what_is_written_and_are_averaged(commands: Any) -> None:
    run(config_with({"stage": 3, "world_size": 2, "precision": "bf16"}), *commands)


@pytest.mark.usefixtures("accelerated")
def test_parameters_are_kept_from_a_write_until_the_masters_have_followed() -> None:
    def program(transport: Transport) -> list[bool]:
        model = build()
        optimizer = zero(model, transport, 3)
        kept = [weights_of(optimizer)]
        step(model, optimizer)
        kept.append(weights_of(optimizer))
        with torch.inference_mode(), optimizer.gathered(write=True):
            model[0].weight.mul_(3.0)
        with optimizer.gathered():
            written = model[0].weight.detach().clone()
        assert_same_bits(optimizer.full_master(model[0].weight), written.float(), "masters are read as they will be")
        kept.append(weights_of(optimizer))
        step(model, optimizer)
        kept.append(weights_of(optimizer))
        manager = parts_of(optimizer).storage.manager
        assert manager is not None
        assert all(not buffer.shard.numel() for buffer in manager.buffers())
        assert all(block.free for block in manager.gathered.pool._blocks)
        return [nbytes > 0 for nbytes in kept]

    assert on_threads(2, program) == [[False, False, True, False]] * 2


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.usefixtures("accelerated")
def test_a_model_and_its_masters_are_loaded_in_any_order(model_first: bool) -> None:
    """The masters keep the digits that the model does not have. What is equal to its masters is kept once."""

    def program(transport: Transport) -> None:
        trained, model = build(), build(1)
        before, optimizer = zero(trained, transport, 3), zero(model, transport, 3)
        step(trained, before, transport.rank)
        before.consolidate_state_dict(None)
        with before.gathered():
            weights = {name: value.clone() for name, value in trained.state_dict().items()}
        if not model_first:
            optimizer.load_state_dict(before.state_dict())
        with optimizer.gathered(write=True):
            model.load_state_dict(weights)
        if model_first:
            optimizer.load_state_dict(before.state_dict())
        assert (weights_of(optimizer) == 0) is model_first
        for ours, theirs in zip(model.parameters(), trained.parameters(), strict=True):
            master = before.full_master(theirs)
            assert not torch.equal(master, master.to(BF16).float())
            assert_same_bits(optimizer.full_master(ours), master)

    on_threads(2, program)
