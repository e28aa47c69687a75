"""`zero train` has the bits of the plain loop on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.commands.conftest import (
    LIMIT,
    ROOT,
    RunOutput,
    Train,
    command,
    equal_part,
    flags,
    plain_sha256,
    run_json,
    trained_by_command,
)
from zero.commands import cli

pytestmark = [pytest.mark.usefixtures("bare"), pytest.mark.timeout(3 * LIMIT)]


def check_bytes(record: dict[str, Any]) -> None:
    """Assert that ranks have held and sent what the formulas say."""
    assert record["traffic_bytes_per_step"] == record["formula_traffic_bytes_per_step"] > 0
    assert record["control_bytes_per_step"] > 0
    assert [facts["rank"] for facts in record["ranks"]] == list(range(record["world_size"]))
    for facts in record["ranks"]:
        for kind in ("parameters", "gradients", "optimizer"):
            assert facts["measured"][kind] == facts["formula"][kind]
        assert facts["measured"]["scratch_peak"] <= facts["formula"]["scratch_peak"]


def test_every_way_to_start_two_ranks_gives_the_parameters_and_losses_of_one(
    text: Path, tmp_path: Path, one_rank: RunOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`zero train`, torchrun, and the function that `python -m zero.train` calls."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    outs = [tmp_path / str(stage) for stage in range(3)]
    trained_by_command(text, outs[0], "--ranks=2", "--stage=0")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")  # prints a line on OMP_NUM_THREADS
    ended = command(*torchrun, "-m", "zero.train", *flags(text, outs[1], "--stage=1"))
    assert ended.returncode == 0, ended.stderr
    assert cli.main(flags(text, outs[2], "--stage=2", "--bucket-cap-mb=0.05"), "train") == 0
    for stage, record in enumerate(map(run_json, outs)):
        assert (record["world_size"], record["stage"]) == (2, stage)
        assert equal_part(record) == equal_part(one_rank.record)
        assert record["control_bytes_per_step"] < record["traffic_bytes_per_step"]
        check_bytes(record)


@pytest.mark.parametrize(
    ("ranks", "more", "plain"),
    [
        (2, ("--stage=1", "--precision=bf16"), {"precision": "bf16"}),
        (2, ("--stage=3", "--precision=fp16"), {"precision": "fp16"}),
        (5, ("--stage=2", "--precision=fp16", "--clip=0.5"), {"precision": "fp16", "clip": 0.5}),
        (3, ("--stage=0",), {}),
        (3, ("--stage=3", "--reshard-after-forward=false", "--precision=bf16"), {"precision": "bf16"}),
        (3, ("--stage=3", "--collective=pairwise", "--fused"), {"fused": True}),
        (2, ("--stage=1", "--optimizer=muon", "--precision=bf16"), {"precision": "bf16", "muon": True}),
    ],
    ids=lambda value: "".join(value) if isinstance(value, tuple) else str(value),
)
def test_ranks_have_the_hash_of_the_plain_loop_and_the_losses_of_one_rank(
    text: Path, tmp_path: Path, trained: Train, ranks: int, more: tuple[str, ...], plain: dict[str, Any]
) -> None:
    """Four micro-batches on two ranks, on three, and on five, where one has none at all."""
    record = trained_by_command(text, tmp_path / "ranks", f"--ranks={ranks}", "--bucket-cap-mb=0.05", *more)
    assert record["params_sha256"] == plain_sha256(text, **plain)
    check_bytes(record)
    alone = [flag for flag in more if flag.startswith(("--precision", "--clip", "--optimizer", "--fused"))]
    assert record["losses"] == trained(*alone)["losses"]


def test_muon_and_adamw_go_on_from_a_checkpoint_of_another_number_of_ranks(text: Path, tmp_path: Path) -> None:
    saves = ("--optimizer=muon", f"--checkpoint={tmp_path / 'saved'}")
    check_bytes(trained_by_command(text, tmp_path, "--ranks=2", "--stage=3", "--steps=2", *saves))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "zero.train")
    refused = command(*torchrun, *flags(text, tmp_path, *saves))
    assert refused.returncode != 0
    assert "go on from it with --resume auto" in refused.stderr
    record = trained_by_command(text, tmp_path, "--ranks=4", "--stage=2", "--resume=auto", *saves)
    assert record["params_sha256"] == plain_sha256(text, muon=True)
    check_bytes(record)
