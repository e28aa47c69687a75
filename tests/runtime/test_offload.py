"""Offload to disk: the same bits, as little memory as promised, and an error if the disk is full."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import Transport, on_threads, solo
from zero import Offload, ZeroOptimizer
from zero.runtime.flat_states import BucketStates
from zero.runtime.offload import DiskOffload, OffloadedStates

from ..contract.test_sharding_factor import STEPS, check
from ..support.models import odd_batches, odd_loss
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_model, assert_same_states
from ..support.programs import CLASSES, Program, locked_build

ALL = pytest.mark.parametrize("stage", [0, 1, 2, 3])
MIB = 1 << 20


# -- the bits ----------------------------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("precision", ["", "bf16"])
@pytest.mark.by_default("-1", "bf16-3")
def test_states_on_disk_change_no_bit(tmp_path: Path, stage: int, precision: str) -> None:
    mixed = PRECISIONS[precision] if precision else None
    for world_size in (1, 2):
        check(Program(world_size, stage, "adamw fused", steps=STEPS, precision=mixed, offload=Offload(tmp_path)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", CLASSES)
def test_whatever_a_class_keeps(tmp_path: Path, optimizer: str) -> None:
    for stage in (1, 3):
        check(Program(2, stage, optimizer, steps=STEPS, offload=Offload(tmp_path)))


@pytest.mark.parametrize("optimizer", ["adagrad", "nadam", "sgd"])
@pytest.mark.by_default("adagrad")
def test_states_that_are_made_at_construction_counted_or_not_there(tmp_path: Path, optimizer: str) -> None:
    for mixed in (None, PRECISIONS["bf16"]):
        check(Program(2, 2, optimizer, steps=STEPS, precision=mixed, offload=Offload(tmp_path)))


@ALL
@pytest.mark.full
def test_states_that_are_copied_to_another_device_for_a_step_and_back(
    tmp_path: Path, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if parameters were on a GPU."""
    monkeypatch.setattr(OffloadedStates, "_is_elsewhere", lambda self, flat: True)
    for optimizer in ("adamw", "adamw fused", "adagrad"):
        check(Program(2, stage, optimizer, steps=STEPS, offload=Offload(tmp_path)))


class Replacing(torch.optim.SGD):
    """A class that creates new state tensors in each step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
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
    monkeypatch.setattr(OffloadedStates, "_is_elsewhere", lambda self, flat: staged)
    ours, plain = locked_build(0), locked_build(0)
    zero = ZeroOptimizer(ours, Replacing, stage=1, process_group=solo(), lr=0.1, offload=Offload(tmp_path))
    sgd = Replacing(plain.parameters(), lr=0.1)
    for step in range(4):
        for model, optimizer in ((ours, zero), (plain, sgd)):
            optimizer.zero_grad()
            odd_loss(model, odd_batches(1, step)[0]).backward()
            optimizer.step()
    zero.close()
    assert_same_model(ours, plain)


def test_its_own_live_states_may_be_loaded(tmp_path: Path) -> None:
    model = locked_build(0)
    optimizer = ZeroOptimizer(model, process_group=solo(), lr=1e-2, offload=Offload(tmp_path))
    odd_loss(model, odd_batches(1, 0)[0]).backward()
    optimizer.step()
    before = optimizer.state_dict()
    parameters = optimizer.param_groups[0]["params"]
    live = {index: dict(optimizer.state[parameters[index]]) for index in before["state"]}
    optimizer.load_state_dict({**before, "state": live})
    assert_same_states(optimizer.state_dict(), before)


@ALL
@pytest.mark.by_default("2")
def test_a_checkpoint_does_not_know_where_states_were_kept(tmp_path: Path, stage: int) -> None:
    def run(transport: Transport, offload: Offload | None, states: Any = None) -> Any:
        model = locked_build(0)
        optimizer = ZeroOptimizer(
            model, stage=stage, process_group=transport, bucket_cap_mb=0.0005, lr=1e-2, offload=offload
        )
        if states is None:
            odd_loss(model, odd_batches(2, 0, stage < 3)[transport.rank]).backward()
            optimizer.step()
        else:
            optimizer.load_state_dict(states)
            optimizer.load_state_dict(states)
        optimizer.consolidate_state_dict(1)
        return optimizer.state_dict() if transport.rank == 1 else None

    plain = on_threads(2, lambda transport: run(transport, None))[1]
    kept = Offload(tmp_path)
    assert_same_states(on_threads(2, lambda transport: run(transport, kept))[1], plain)
    assert_same_states(on_threads(2, lambda transport: run(transport, kept, plain))[1], plain)
    assert_same_states(on_threads(2, lambda transport: run(transport, None, plain))[1], plain)


# -- memory ------------------------------------------------------------------------------------------------------------


BUCKETS, WIDTH = 8, 512  # buckets of 1 MiB: a matrix of WIDTH x WIDTH in fp32


def mapped() -> int:
    """Return the resident bytes of this process's mapped files without a name."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            counts = line.endswith("(deleted)") and "memfd" not in line
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def private() -> int:
    """Return the bytes of this process alone, without memory that its allocator keeps."""
    ctypes.CDLL(None).malloc_trim(0)
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Anonymous:"))


def held(folder: str, stage: int, precision: str, meeting: str = "", rank: int = 0, factor: int = 1) -> dict[str, int]:
    """Train in this process. Return the most that was mapped at any time, and the private bytes after.

    ``meeting``: the file of the rendezvous of two ranks.
    """
    torch.set_num_threads(1)
    if meeting:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BUCKETS)))
    optimizer = ZeroOptimizer(
        model,
        torch.optim.AdamW,
        stage=stage,
        fused=True,
        bucket_cap_mb=1.0,
        mixed_precision=PRECISIONS[precision] if precision else None,
        offload=Offload(folder) if folder else None,
        sharding_factor=factor if stage else None,
    )
    most, evict = 0, DiskOffload.evict

    def look_and_leave(spool: DiskOffload, tensors: Iterable[Tensor]) -> None:
        """Measure when a bucket is evicted, after the prefetch of the next one: this is when most is mapped.

        (A measurement during the reads of the other thread may count the first and the third bucket.)
        """
        nonlocal most
        for coming in spool._coming.values():
            coming.result()
        most = max(most, mapped())
        evict(spool, tensors)

    DiskOffload.evict = look_and_leave  # type: ignore[method-assign]
    for _ in range(4):
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.consolidate_state_dict()
    description = optimizer.describe()
    found = {"most": most, "private": private(), "offloaded": description.offloaded_bytes, "left": mapped()}
    return {**found, "buckets": len(optimizer._storage.layout.buckets)}


def in_a_process(*arguments: Any) -> dict[str, int]:
    (found,) = in_processes([arguments])
    return found


def in_processes(each: Sequence[tuple[Any, ...]]) -> list[dict[str, int]]:
    """Call `held` in one process for each of ``each``; return the results."""
    codes = [f"from tests.runtime.test_offload import held; print(held(*{arguments!r}))" for arguments in each]
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for code in codes
    ]
    try:
        said = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, error) in zip(started, said, strict=True):
        assert process.returncode == 0, error
    return [eval(output.splitlines()[-1]) for output, _ in said]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("stage", "precision"), [(1, ""), pytest.param(1, "bf16", marks=pytest.mark.slow), (3, "")])
@pytest.mark.full
def test_two_buckets_at_most_are_resident_and_private_memory_falls_by_the_states(
    tmp_path: Path, stage: int, precision: str
) -> None:
    """One rank, which owns everything of Psi elements."""
    psi = BUCKETS * WIDTH * WIDTH
    kept = in_a_process(str(tmp_path), stage, precision)
    beside = in_a_process("", stage, precision)
    an_element = 12 if precision else 8
    assert kept["offloaded"] == an_element * psi
    assert kept["buckets"] >= 4
    assert 0 < kept["most"] <= 2 * an_element * psi // kept["buckets"]
    assert kept["left"] == 0
    assert beside["offloaded"] == 0
    fallen = beside["private"] - kept["private"]
    assert abs(fallen - an_element * psi) <= 0.05 * an_element * psi + 2 * MIB, (fallen, an_element * psi)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("stage", "precision", "factor"),
    [pytest.param(1, "", 1, marks=pytest.mark.long), (1, "", 2), (2, "bf16", 2), (3, "", 2)],
)
def test_of_two_ranks_each_holds_less_by_the_states_of_its_share(
    tmp_path: Path, stage: int, precision: str, factor: int
) -> None:
    psi = BUCKETS * WIDTH * WIDTH

    def found(folder: str) -> list[dict[str, int]]:
        meeting = str(tmp_path / f"meeting{bool(folder)}")
        return in_processes([(folder, stage, precision, meeting, rank, factor) for rank in range(2)])

    share = (12 if precision else 8) * psi // factor
    for kept, beside in zip(found(str(tmp_path)), found(""), strict=True):
        assert kept["offloaded"] == share
        assert 0 < kept["most"] <= 2 * share // kept["buckets"]
        fallen = beside["private"] - kept["private"]
        assert abs(fallen - share) <= 0.05 * share + 2 * MIB, (fallen, share)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_to_arrive_is_read_before_it_is_touched_and_leaves_as_a_whole(tmp_path: Path) -> None:
    spool = DiskOffload(tmp_path)
    spool.reserve([(4 * MIB, torch.float32)] * 2)
    first, second = (spool.empty(4 * MIB, torch.float32).fill_(number) for number in (1.0, 2.0))
    spool.evict([first, second])
    gc.collect()  # files of earlier tests
    before = mapped()
    spool.prefetch([first])
    deadline = time.monotonic() + 10
    while mapped() - before < 16 * MIB and time.monotonic() < deadline:
        time.sleep(0.01)
    assert mapped() - before == 16 * MIB
    spool.prefetch([second])
    spool.evict([second, first])
    assert mapped() == before
    assert (first.eq(1).all(), second.eq(2).all()) == (True, True)
    spool.prefetch([first])
    spool.close()


def test_states_of_what_is_not_updated_stay_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(BucketStates, "prefetch", lambda self: read.append(self.bucket.index))
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    optimizer = ZeroOptimizer(model, lr=0.1, bucket_cap_mb=0.0001, offload=Offload(tmp_path))
    assert len(optimizer._storage.layout.buckets) == 4
    for used in ((0, 1, 2, 3), (1,), (3, 0), ()):
        read.clear()
        sum((model[number].weight.sum() for number in used), torch.zeros(()).requires_grad_()).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert len(read) == len(used)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_an_error_before_anything_has_changed_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of only one rank is full."""
    reserve = os.posix_fallocate

    def full(*arguments: int) -> None:
        if threading.current_thread().name == "full":
            raise OSError(28, "No space left on device")
        reserve(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", full)

    def program(transport: Transport) -> str:
        threading.current_thread().name = "full" if transport.rank == 1 else "empty"
        model = locked_build(0)
        memory = [parameter.data_ptr() for parameter in model.parameters()]
        with pytest.raises(ValueError, match="offload") as caught:
            ZeroOptimizer(model, process_group=transport, offload=Offload(tmp_path))
        assert [parameter.data_ptr() for parameter in model.parameters()] == memory
        return str(caught.value)

    told = on_threads(2, program)
    assert "rank 1: offload: " in told[0]
    for text in told:
        assert "do not fit into" in text
        assert "No space left on device" in text


def too_small(folder: str) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
    try:
        ZeroOptimizer(nn.Linear(WIDTH, WIDTH), offload=Offload(folder))
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.full
def test_space_is_reserved_at_construction(tmp_path: Path) -> None:
    code = f"from tests.runtime.test_offload import too_small; print(too_small({str(tmp_path)!r}))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "do not fit into" in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_which_no_file_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(ValueError, match=f"offload: no file can be made in {folder}"):
            ZeroOptimizer(nn.Linear(2, 2), offload=Offload(folder))


def test_ranks_ask_for_the_same_and_may_have_folders_of_their_own(tmp_path: Path) -> None:
    def program(transport: Transport, offload: Offload | None) -> int:
        return ZeroOptimizer(locked_build(0), process_group=transport, offload=offload).describe().offloaded_bytes

    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    assert all(on_threads(2, lambda transport: program(transport, Offload(folders[transport.rank]))))
    with pytest.raises(ValueError, match=r"offload=states on disk, but rank 1 for .*offload=None"):
        on_threads(2, lambda transport: program(transport, None if transport.rank else Offload(tmp_path)))


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Offload(""), TypeError),
        (lambda: Offload(3), TypeError),  # type: ignore[arg-type]
        (lambda: ZeroOptimizer(nn.Linear(2, 2), offload="/tmp"), TypeError),  # type: ignore[arg-type]
    ],
)
def test_what_can_be_asked_for(make: Callable[[], Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="offload"):
        make()


def test_states_in_the_host_s_memory_are_there_already() -> None:
    with pytest.warns(UserWarning, match="the parameters are on the CPU: nothing to do"):
        optimizer = ZeroOptimizer(nn.Linear(2, 2), offload=Offload("cpu"))
    assert optimizer.describe().offloaded_bytes == 0


def test_describe_says_what_is_elsewhere(tmp_path: Path) -> None:
    optimizer = ZeroOptimizer(nn.Linear(64, 64), offload=Offload(tmp_path))
    found = optimizer.describe()
    assert found.offloaded_bytes >= 8 * (64 * 64 + 64)
    assert f"elsewhere      {found.offloaded_bytes:>14,}" in str(found)


def test_a_further_group_has_room_of_its_own_and_one_that_is_refused_has_none(tmp_path: Path) -> None:
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    optimizer = ZeroOptimizer(model[0].parameters(), module=model, stage=3, offload=Offload(tmp_path))
    before = optimizer.describe().offloaded_bytes
    with pytest.raises(ValueError, match="is not a parameter of the module"):
        optimizer.add_param_group({"params": [*model[1].parameters(), nn.Parameter(torch.ones(2))]})
    assert optimizer.describe().offloaded_bytes == before
    optimizer.add_param_group({"params": list(model[1].parameters())})
    assert optimizer.describe().offloaded_bytes == 2 * before


def test_a_folder_that_is_gone_is_no_matter_until_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    model = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    optimizer = ZeroOptimizer(model[0].parameters(), module=model, lr=0.1, offload=Offload(folder))
    folder.rmdir()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(ValueError, match=r"do not fit into .* free .No space left"):
            optimizer.add_param_group({"params": list(model[1].parameters())})
    optimizer.add_param_group({"params": list(model[1].parameters())})
