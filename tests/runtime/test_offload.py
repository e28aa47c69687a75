"""Offload to disk: the same bits, states that are read before their step, and an error if the disk is full."""

from __future__ import annotations

import errno
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads, solo
from zero import Offload, ZeroOptimizer
from zero.runtime.offload import OffloadedStates

from ..contract.space import HABITS
from ..support.errors import error_of
from ..support.models import odd_batches, odd_loss
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_model, assert_same_states
from ..support.programs import Program, check, locked_build
from ..support.rows import rows

STEPS = (*HABITS["no sync"], *HABITS["norms"])
ROWS: list[tuple[int, int, str, str | None, bool]] = rows(  # ranks, stage, class, precision; copied to another device
    [
        (2, 1, "adamw", None, True),
    ],
    [
        (2, 2, "adagrad", "bf16", False),
        (1, 3, "adagrad", None, True),
    ],
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[1]}-{row[2]}{'-copied' * row[4]}")
def test_states_on_disk_change_no_bit(row: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as if parameters were on a GPU: states are copied there for a step, and back."""
    world_size, stage, optimizer, precision, copied = row
    if copied:
        monkeypatch.setattr(OffloadedStates, "_is_elsewhere", lambda self, flat: True)
    mixed = PRECISIONS[precision] if precision else None
    check(Program(world_size, stage, optimizer, steps=STEPS, precision=mixed, offload=Offload(tmp_path)))
    assert list(tmp_path.iterdir()) == []


class Replacing(torch.optim.SGD):
    """A class that creates new state tensors in each step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    kept = self.state[p]
                    kept["m"] = 0.5 * kept["m"] + p.grad if "m" in kept else p.grad.clone()
                    p.sub_(kept["m"], alpha=group["lr"])


@pytest.mark.parametrize("staged", [False, True])
def test_states_that_a_class_makes_anew_are_those_that_are_kept(
    tmp_path: Path, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dict does not know where they were kept, and one of live states may be loaded."""
    monkeypatch.setattr(OffloadedStates, "_is_elsewhere", lambda self, flat: staged)
    ours, plain = locked_build(0), locked_build(0)
    zero = ZeroOptimizer(ours, Replacing, stage=1, process_group=solo(), lr=0.1, offload=Offload(tmp_path))
    sgd = Replacing(plain.named_parameters(), lr=0.1)
    for step in range(4):
        for model, optimizer in ((ours, zero), (plain, sgd)):
            optimizer.zero_grad()
            odd_loss(model, odd_batches(1, step)[0]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        before, parameters = zero.state_dict(), zero.param_groups[0]["params"]
        assert_same_states(before, sgd.state_dict())
        live = {index: dict(zero.state[parameters[index]]) for index in before["state"]}
        zero.load_state_dict({**before, "state": live})
        assert_same_states(zero.state_dict(), before)
    zero.close()
    assert_same_model(ours, plain)


def test_what_is_written_for_one_bucket_leaves_memory_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When master weights are made, in a step, and when a dict is loaded."""
    here: set[OffloadedStates] = set()
    tensor, evict = OffloadedStates.tensor, OffloadedStates.evict

    def made(this: OffloadedStates, *given: Any) -> Tensor:
        assert here <= {this}
        here.add(this)
        return tensor(this, *given)

    def evicted(this: OffloadedStates, flats: Any) -> None:
        here.discard(this)
        evict(this, flats)

    monkeypatch.setattr(OffloadedStates, "tensor", made)
    monkeypatch.setattr(OffloadedStates, "evict", evicted)
    model, settings = locked_build(0), {"bucket_cap_mb": 0.0005, "offload": Offload(tmp_path)}
    optimizer = ZeroOptimizer(model, mixed_precision=PRECISIONS["bf16"], process_group=solo(), **settings)  # type: ignore[arg-type]
    odd_loss(model, odd_batches(1)[0]).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert not here


def test_states_of_an_option_from_a_dict_are_on_disk_too(tmp_path: Path) -> None:
    model, arguments = nn.Linear(8, 8), {"partition": "parameter", "offload": Offload(tmp_path)}
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, process_group=solo(), **arguments)  # type: ignore[arg-type]
    saved = optimizer.state_dict()
    saved["param_groups"][0]["momentum"] = 0.9
    optimizer.load_state_dict(saved)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert optimizer.describe().offloaded_bytes >= 4 * 72


def test_describe_says_what_is_elsewhere_and_the_hosts_memory_is_there_already(tmp_path: Path) -> None:
    optimizer = ZeroOptimizer(nn.Linear(64, 64), offload=Offload(tmp_path))
    found = optimizer.describe()
    assert found.offloaded_bytes >= 8 * (64 * 64 + 64)
    assert f"elsewhere      {found.offloaded_bytes:>14,}" in str(found)
    with pytest.warns(UserWarning, match="the parameters are on the CPU: nothing to do"):
        optimizer = ZeroOptimizer(nn.Linear(2, 2), offload=Offload("cpu"))
    assert optimizer.describe().offloaded_bytes == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_between_steps_no_page_of_the_file_is_mapped(tmp_path: Path) -> None:
    """`ci/runtime/test_offload_memory` looks at every moment of a step."""
    optimizer = ZeroOptimizer(model := nn.Linear(64, 64), process_group=solo(), offload=Offload(tmp_path))
    model(torch.ones(64)).sum().backward()
    optimizer.step()
    mapped = rf"{re.escape(str(tmp_path))}.* \(deleted\)\n(?:.*\n)*?Rss: +(\d+) kB"
    assert set(re.findall(mapped, Path("/proc/self/smaps").read_text())) == {"0"}


# -- errors ------------------------------------------------------------------------------------------------------------


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_an_error_before_anything_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of only one rank is full."""
    reserve = os.posix_fallocate
    monkeypatch.setattr(
        os, "posix_fallocate", lambda *given: (full if threading.current_thread().name == "full" else reserve)(*given)
    )

    def program(transport: Transport) -> str:
        threading.current_thread().name = "full" if transport.rank == 1 else "empty"
        model = locked_build(0)
        memory = [parameter.data_ptr() for parameter in model.parameters()]
        said = error_of(ZeroOptimizer, model, process_group=transport, offload=Offload(tmp_path))
        assert [parameter.data_ptr() for parameter in model.parameters()] == memory
        return said

    told = on_threads(2, program)
    assert told[0].startswith("ValueError: rank 1: offload: ")
    assert all("do not fit into" in text and "No space left on device" in text for text in told)


def test_what_cannot_be_asked_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(ValueError, match=f"offload: no file can be made in {folder}"):
            ZeroOptimizer(nn.Linear(2, 2), offload=Offload(folder))
    wrong: Any
    for wrong in ("", 3):
        with pytest.raises(TypeError, match="offload"):
            Offload(wrong)
    with pytest.raises(TypeError, match="offload"):
        ZeroOptimizer(nn.Linear(2, 2), offload="/tmp")  # type: ignore[arg-type]


def test_a_further_group_has_room_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the folder is gone is no matter until there is no room."""
    (folder := tmp_path / "folder").mkdir()
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    optimizer = ZeroOptimizer(model[0].parameters(), module=model, stage=3, offload=Offload(folder))
    folder.rmdir()
    before, further = optimizer.describe().offloaded_bytes, list(model[1].parameters())
    with pytest.raises(ValueError, match="is not a parameter of the module"):
        optimizer.add_param_group({"params": [*further, nn.Parameter(torch.ones(2))]})
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(ValueError, match=r"do not fit into .* free .No space left"):
            optimizer.add_param_group({"params": further})
    assert optimizer.describe().offloaded_bytes == before
    optimizer.add_param_group({"params": further})
    assert optimizer.describe().offloaded_bytes == 2 * before
