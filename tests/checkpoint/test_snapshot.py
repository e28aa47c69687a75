"""What is committed is the state at the save, whatever was before and follows, at any speed of the disk.

Every checkpoint here is compared with one that `zero.save` has written before training went on, without the plan of an
earlier save: its content, which names every byte of every file, each rank's own file, and what its manifest says.
"""

from __future__ import annotations

import errno
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from benchmarks.rank import live_storages
from collectives import Transport, on_threads
from zero import CheckpointManager, MixedPrecision, Offload
from zero.checkpoint.format.extents import Chunk, Part
from zero.checkpoint.write.capture import Snapshot, WritePlan
from zero.checkpoint.write.save_thread import Saving

from ..support.limits import PATIENT
from ..support.plain import assert_same_model
from ..support.rows import only, rows
from .saves import Taker, Training, entries, small_blocks

ALL = 10**6


@pytest.fixture
def taker(monkeypatch: pytest.MonkeyPatch) -> Taker:
    small_blocks(monkeypatch, 1024)
    return Taker(monkeypatch)


def committed_is_saved(
    folder: Path,
    taker: Taker,
    training: Training,
    follows: Callable[[Training, int], None],
    counts: Sequence[int] = (),
) -> int:
    """Save again and again while the thread may take so many chunks, and let ``follows`` change everything.

    ``counts``: how many it may take; by default so many that of each bucket the disk has taken none, one, and all.
    Returns how many chunks a save of this rank has.
    """
    rank = training.rank
    mine_alone = f"ranks/rank-{rank:05d}.safetensors"
    training.step(0)
    with CheckpointManager(folder / "asynchronous", training.optimizer) as checkpoints:
        taker.begin(rank, ALL)
        saving = checkpoints.save(0, {"n": 0, "t": torch.arange(0)}, {"rank": rank})
        saving.result(PATIENT)
        total = taker.taken[rank]
        counts = counts or [0, 1, *taker.one_of_each_bucket(rank), ALL]
        most = max(int(data) for data in training.optimizer.exchange(str(len(counts)).encode()))
        counts = [*counts, *[ALL] * most][:most]
        for number, count in enumerate(counts, start=1):
            path = folder / f"blocking-{number}"
            state: dict[str, Any] = {"n": number, "t": torch.arange(number)}
            anew = zero.save(path, training.optimizer, state, {"rank": rank}, step=number)
            taker.begin(rank, count)
            saving = checkpoints.save(number, state, {"rank": rank})
            state["t"].fill_(-1)
            taker.wait_until(rank, min(count, total))
            follows(training, number)
            taker.release(rank)
            assert saving.result(PATIENT) == anew.result(), f"{count} of {total} chunks were taken before"
            mine, theirs = (zero.open_checkpoint(each).manifest for each in (saving.path, path))
            for name in ("parameters", "param_groups", "not_saved", "block_bytes"):
                assert getattr(mine, name) == getattr(theirs, name), name
            assert (saving.path / mine_alone).read_bytes() == (path / mine_alone).read_bytes()
    return total


@pytest.mark.parametrize("row", rows(["1-3"], ["0-2", "2-1", "3-2"]))
def test_a_step_changes_nothing_of_a_save_of_which_the_disk_has_taken_none_one_some_or_all(
    row: str, taker: Taker, tmp_path: Path
) -> None:
    stage, world_size = map(int, row.split("-"))

    def program(transport: Transport) -> int:
        return committed_is_saved(tmp_path, taker, Training(transport, stage), Training.step)

    assert min(on_threads(world_size, program)) > 8


def edits_in_place(training: Training, number: int) -> None:
    with training.optimizer.gathered(write=True), torch.no_grad():
        for parameter in training.model.parameters():
            parameter.add_(number)
        training.model.get_buffer("offset").mul_(2)
    training.step(number)


def edits_without_asking(training: Training, number: int) -> None:
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.data.add_(number)
    for group in training.optimizer.param_groups:
        group["lr"] *= 0.5


def loads_a_dict(training: Training, number: int) -> None:
    older = training.plain()
    for state in older["state"].values():
        state["exp_avg"] = state["exp_avg"] + number
        state["step"] = state["step"] + number
    training.optimizer.load_state_dict(older)
    training.step(number)


def edits_states(training: Training, number: int) -> None:
    for state in training.optimizer.state.values():
        state["exp_avg"].add_(number)
        state["step"].add_(number)
    training.step(number)


def resets_states(training: Training, number: int) -> None:
    training.optimizer.reset_states(list(training.model.parameters())[number % 2 :: 2])
    training.step(number)


def adds_a_group(training: Training, number: int) -> None:
    training.model.register_parameter(f"late_{number}", nn.Parameter(torch.full((7,), float(number))))
    training.optimizer.add_param_group({"params": [getattr(training.model, f"late_{number}")]})
    training.step(number)


def closes(training: Training, number: int) -> None:
    training.optimizer.close()
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.fill_(number)


def does_all_on_disk(training: Training, number: int) -> None:
    (Training.step, edits_in_place, loads_a_dict)[number % 3](training, number)


LAYOUTS: Sequence[Callable[[Any, dict[str, Any], int], object]] = (
    lambda model, group, number: group.update(lr=group["lr"] / 3),  # its text has another length
    lambda model, group, number: group.update(note="x" * 6_000 if "note" not in group else "x" * number),
    lambda model, group, number: group.update(note="x" * number),
    lambda model, group, number: model.first.bias.requires_grad_(requires_grad=False),
    lambda model, group, number: model.offset.add_(1),
    lambda model, group, number: setattr(model.offset, "data", torch.full_like(model.offset, number)),
    lambda model, group, number: model.register_buffer("offset", torch.full_like(model.offset, number)),
    lambda model, group, number: model.layers.register_buffer("extra", torch.arange(number)),
    lambda model, group, number: model.layers.register_buffer("extra", torch.ones(number % 3, 2, dtype=torch.int64)),
    lambda model, group, number: model._non_persistent_buffers_set.add("offset"),
    lambda model, group, number: model._non_persistent_buffers_set.remove("offset"),
    lambda model, group, number: model.register_buffer("phase", torch.full((3,), 1 - 2j).conj()),  # conjugated if read
)


def changes_layouts(training: Training, number: int) -> None:
    """Change what the plan of the save before does not fit any more."""
    if number < 3:
        training.backward(number)
        training.optimizer.step()
        training.model.zero_grad()
    else:
        LAYOUTS[(number - 3) % len(LAYOUTS)](training.model, training.optimizer.param_groups[0], number)


ON_DISK = {"offload": "states"}
IN_BF16 = {"mixed_precision": MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)}
ANEW = [0] * (len(LAYOUTS) + 3)
EVENTS: dict[str, tuple[Callable[[Training, int], None], int, Sequence[int], dict[str, Any]]] = {
    "edits in gathered": (edits_in_place, 3, [0, 6], {}),
    "edits without asking": (edits_without_asking, 0, [0, 6], {}),
    "load_state_dict": (loads_a_dict, 3, [0, 6], {}),
    "states edited": (edits_states, 2, [0, 6], {}),
    "states reset": (resets_states, 1, [0, 6], {"cls": torch.optim.Adagrad}),  # it makes new states at once
    "add_param_group": (adds_a_group, 2, [0, 6], {}),  # stage 3 takes no parameter that its module did not have
    "close": (closes, 3, [5], {}),
    "states on disk": (does_all_on_disk, 1, [0, 0, 0, 4], ON_DISK),
    "bf16 on disk": (does_all_on_disk, 3, [0, 0, 0, 4], {**ON_DISK, **IN_BF16}),
    "layouts": (changes_layouts, 2, ANEW, {}),
    "layouts in bf16": (changes_layouts, 3, ANEW, IN_BF16),
}


@pytest.mark.parametrize("event", only(EVENTS, "states edited", "states reset", "edits without asking"))
def test_whatever_follows_changes_nothing_of_a_save_and_the_next_one_has_it(
    event: str, taker: Taker, tmp_path: Path
) -> None:
    follows, stage, counts, arguments = EVENTS[event]
    if "offload" in arguments:
        (tmp_path / "states").mkdir()
        arguments = {**arguments, "offload": Offload(states=tmp_path / "states")}

    def program(transport: Transport) -> None:
        committed_is_saved(tmp_path, taker, Training(transport, stage, **arguments), follows, counts)

    on_threads(2, program)


def test_a_plan_serves_the_next_save_if_no_layout_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[WritePlan] = []
    init = WritePlan.__init__

    def counted(this: WritePlan, *arguments: Any) -> None:
        made.append(this)
        init(this, *arguments)

    monkeypatch.setattr(WritePlan, "__init__", counted)
    training = Training(None, 2)
    training.step(1)  # with all parameters, whose states are there from now on
    with CheckpointManager(tmp_path, training.optimizer, asynchronous=False) as checkpoints:
        for number in range(1, 4):
            checkpoints.save(number)
            edits_without_asking(training, number)
            training.model.get_buffer("offset").add_(1)
            training.step(number)
    assert len(made) == 1


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_save_that_is_over_holds_nothing_of_what_it_wrote(tmp_path: Path) -> None:
    training = Training(None, 1)
    training.step(0)
    found: list[Saving] = []
    sizes = []
    with CheckpointManager(tmp_path / "a", training.optimizer) as checkpoints:
        for number in range(1, 4):
            saving = checkpoints.save(number, {"t": torch.zeros(100_000)})
            found.append(saving)
            training.step(number)
            saving.result(PATIENT)
            for thread in threading.enumerate():
                if thread.name.startswith("zero-checkpoint"):
                    thread.join(PATIENT)
            sizes.append(sum(live_storages().values()))
    # the caller's tensor alone has 400,000 bytes; a step makes small states, and what ran before may still be freed
    assert max(sizes[1:]) - sizes[0] < 10_000


def test_a_snapshot_frees_a_source_with_its_last_byte() -> None:
    held: list[weakref.ref[Tensor]] = []

    def made() -> Tensor:
        found = torch.ones(4, dtype=torch.uint8)
        held.append(weakref.ref(found))
        return found

    sources = [("weights", 0), ("state", 0)]
    chunks = [Chunk("file", 0, tuple(Part(source, n, n, 2) for source in sources)) for n in (0, 2)]
    snapshot = Snapshot({sources[0]: made()}, {sources[1]: (0, made)}, chunks)
    for number, chunk in enumerate(chunks):
        snapshot.take(chunk, torch.empty(4, dtype=torch.uint8))
        assert [ref() is None for ref in held] == [number == 1] * 2


@pytest.mark.filterwarnings("ignore:the save of step 1 has failed:RuntimeWarning")
@pytest.mark.timeout(20)  # for which a step would wait
def test_an_error_of_the_thread_never_blocks_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread fails at its first chunk, when a step has asked for its first bucket."""
    asked, before_update = threading.Event(), Snapshot.before_update

    def asks(this: Snapshot, bucket: int) -> None:
        asked.set()
        before_update(this, bucket)

    def fails(*_: object) -> None:
        assert asked.wait(PATIENT), "no step came"
        raise OSError(errno.EIO, "of the test")

    plain, training = Training(None, 1), Training(None, 1)
    monkeypatch.setattr(Snapshot, "take", fails)
    checkpoints = CheckpointManager(tmp_path, training.optimizer)
    plain.step(0)
    training.step(0)
    monkeypatch.setattr(Snapshot, "before_update", asks)
    saving = checkpoints.save(1)
    for number in (1, 2):
        plain.step(number)
        training.step(number)
    with pytest.raises(RuntimeError, match=r"rank 0 could not save .*step-00000001: OSError: .*of the test"):
        saving.result(PATIENT)
    checkpoints.close()
    assert_same_model(training.model, plain.model)
    assert entries(tmp_path) == [".lock"]
