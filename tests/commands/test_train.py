"""`zero train` from the outside: the parameters of a plain loop, one-line errors, files."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from collectives import Transport, on_threads
from zero import MixedPrecision, Offload, ZeroOptimizer
from zero.commands import cli, runner
from zero.commands.console import Console
from zero.commands.flags import from_flags, to_flags
from zero.commands.train import command as train
from zero.commands.train.data import load_corpus
from zero.commands.train.model import build_model, parameters_sha256
from zero.commands.train.rank import RankTraining, check_same_text
from zero.commands.train.settings import TrainConfig

from ..matrix import Variant, trained_sha256
from .conftest import LIMIT, RunOutput, command, flags, run_json

ROOT = Path(__file__).parents[2]
STEPS, MICRO_BATCHES, BATCH, SEQUENCE = 3, 4, 2, 24


pytestmark = pytest.mark.usefixtures("no_launcher")


def plain_sha256(
    text: Path, clip: float | None = None, precision: str = "", muon: bool = False, **arguments: Any
) -> str:
    """Train with a loop without this library: model and data of `zero train`, torch's optimizer."""
    torch.set_num_threads(1)
    corpus, model = load_corpus(text, SEQUENCE), build_model("tiny", SEQUENCE, seed=0)
    mixed = MixedPrecision({"bf16": torch.bfloat16, "fp16": torch.float16}[precision]) if precision else None
    variant = Variant("", clip=clip, precision=mixed, scaled=precision == "fp16", muon=muon)
    return trained_sha256(corpus, model, STEPS, MICRO_BATCHES, (BATCH, SEQUENCE), variant, **arguments)


# ---------------------------------------------------------------------------------------------------- the same bits


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("more", "plain"),
    [
        (("--stage=0", "--bucket-cap-mb=0.01"), {}),
        (("--stage=1", "--fused"), {"fused": True}),
        (("--clip=0.5", "--weight-decay=0.3", "--lr=0.003"), {"clip": 0.5, "weight_decay": 0.3, "lr": 0.003}),
        (("--optimizer=muon", "--weight-decay=0.3"), {"muon": True, "weight_decay": 0.3}),
        (("--precision=bf16", "--stage=3"), {"precision": "bf16"}),
        (("--precision=fp16", "--stage=0", "--clip=0.5"), {"precision": "fp16", "clip": 0.5}),
    ],
)
@pytest.mark.by_default("more3-plain3")
def test_one_rank_gives_the_parameters_of_the_plain_loop(
    text: Path, tmp_path: Path, more: tuple[str, ...], plain: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    assert cli.main(flags(text, out, "--ranks=1", *more), "train") == 0
    assert run_json(out)["params_sha256"] == plain_sha256(text, **plain)


def test_ranks_that_read_other_text_are_an_error_on_each() -> None:
    def program(transport: Transport) -> str:
        optimizer = ZeroOptimizer(torch.nn.Linear(1, 1), torch.optim.SGD, lr=0.1, process_group=transport)
        check_same_text(optimizer, "0a" * 32)
        with pytest.raises(ValueError, match="--data") as caught:
            check_same_text(optimizer, f"{transport.rank // 2}a" * 32)
        return str(caught.value)

    words = (
        "rank 2 reads other text than rank 0 (SHA-256 1a1a1a1a1a1a and 0a0a0a0a0a0a): give every host the same files"
    )
    assert on_threads(3, program) == [f"{words} with --data"] * 3


@pytest.fixture(scope="module")
def two_ranks(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Return the record of a run on two ranks at each stage.

    The runs are started by `zero train`, by torchrun, and by the function that `python -m zero.train` calls.
    """
    outs = [tmp_path_factory.mktemp(f"stage{stage}") for stage in range(3)]
    ended = command("-m", "zero.commands.cli", "train", "--ranks=2", *flags(text, outs[0], "--stage=0"))
    assert (ended.returncode, ended.stderr) == (0, "")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")  # prints a line on OMP_NUM_THREADS
    ended = command(*torchrun, "-m", "zero.train", *flags(text, outs[1], "--stage=1"))
    assert ended.returncode == 0, ended.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        assert cli.main(flags(text, outs[2], "--stage=2", "--bucket-cap-mb=0.05"), "train") == 0
    return {stage: run_json(out) for stage, out in enumerate(outs)}


@pytest.mark.timeout(3 * LIMIT)
@pytest.mark.full
def test_every_way_to_start_two_ranks_gives_the_parameters_and_losses_of_one(
    one_rank: RunOutput, two_ranks: dict[int, dict[str, Any]]
) -> None:
    one = one_rank.record
    for stage, record in two_ranks.items():
        assert (record["world_size"], record["stage"]) == (2, stage)
        for key in ("params_sha256", "losses", "validation_bits_per_byte"):
            assert record[key] == one[key]


@pytest.mark.slow
@pytest.mark.usefixtures("bare")
@pytest.mark.timeout(3 * LIMIT)
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.long)])
def test_two_ranks_have_the_hash_of_the_plain_loop_in_sixteen_bits_too(
    text: Path, tmp_path: Path, precision: str
) -> None:
    for stage in (1, 3):
        ended = command(
            *("-m", "zero.commands.cli", "train", "--ranks=2", f"--precision={precision}"),
            *flags(text, tmp_path, f"--stage={stage}", "--bucket-cap-mb=0.05"),
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        record = run_json(tmp_path)
        assert record["params_sha256"] == plain_sha256(text, precision=precision)
        assert record["traffic_bytes_per_step"] == record["formula_traffic_bytes_per_step"]
        held, formula = record["bytes_per_rank"], record["formula_bytes_per_rank"]
        for kind in ("parameters", "gradients", "optimizer"):
            assert formula[kind] == held[kind], kind


@pytest.mark.full
@pytest.mark.usefixtures("bare")
@pytest.mark.timeout(5 * LIMIT)
@pytest.mark.parametrize(
    ("precision", "runs"),
    [
        ("fp32", [(3, 2, True), (2, 4, True)]),
        pytest.param("fp32", [(0, 2, False), (1, 4, False), (3, 4, False)], marks=pytest.mark.long),
        pytest.param(
            "bf16", [(0, 2, False), (1, 4, False), (3, 4, False), (3, 2, True), (2, 4, True)], marks=pytest.mark.long
        ),
    ],
)
def test_muon_and_adamw_have_the_hash_of_the_plain_loop_at_every_stage_and_number_of_ranks(
    text: Path, tmp_path: Path, precision: str, runs: list[tuple[int, int, bool]]
) -> None:
    """Also where they go on from a checkpoint of another number of ranks."""
    expected = plain_sha256(text, muon=True, precision="" if precision == "fp32" else precision)
    saved = (f"--checkpoint={tmp_path / 'saved'}", "--resume=auto")
    begun = False
    for stage, ranks, saves in runs:
        more = (*(() if begun else ("--steps=2",)), *saved) if saves else ()
        begun = begun or saves
        ended = command(
            *("-m", "zero.commands.cli", "train", f"--ranks={ranks}", "--optimizer=muon", f"--precision={precision}"),
            *flags(text, tmp_path, f"--stage={stage}", "--bucket-cap-mb=0.05", *more),
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        record = run_json(tmp_path)
        assert (record["params_sha256"] == expected) is ("--steps=2" not in more)
        assert record["traffic_bytes_per_step"] == record["formula_traffic_bytes_per_step"]


@pytest.mark.full
@pytest.mark.usefixtures("bare")
@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize(
    ("ranks", "more", "plain"),
    [
        (5, ("--stage=2", "--precision=fp16", "--clip=0.5"), {"precision": "fp16", "clip": 0.5}),
        pytest.param(3, ("--stage=0",), {}, marks=pytest.mark.long),
        pytest.param(
            3, ("--stage=3", "--collective=pairwise", "--reshard-after-forward=false"), {}, marks=pytest.mark.long
        ),
        pytest.param(3, ("--stage=3", "--precision=bf16"), {"precision": "bf16"}, marks=pytest.mark.long),
        pytest.param(5, ("--stage=0", "--precision=fp16"), {"precision": "fp16"}, marks=pytest.mark.long),
        pytest.param(
            5,
            ("--stage=3", "--collective=pairwise", "--precision=fp16"),
            {"precision": "fp16"},
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda value: "".join(value) if isinstance(value, tuple) else str(value),
)
def test_ranks_that_cannot_share_the_micro_batches_evenly_have_the_hash_of_the_plain_loop(
    text: Path, tmp_path: Path, ranks: int, more: tuple[str, ...], plain: dict[str, Any]
) -> None:
    """Four micro-batches on three ranks, and on five, where one has none at all; at stage 3 also where units travel."""
    ended = command(
        *("-m", "zero.commands.cli", "train", f"--ranks={ranks}"),
        *flags(text, tmp_path / "uneven", "--bucket-cap-mb=0.05", *more),
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    record = run_json(tmp_path / "uneven")
    assert record["params_sha256"] == plain_sha256(text, **plain)
    assert record["traffic_bytes_per_step"] == record["formula_traffic_bytes_per_step"] > 0
    alone = [flag for flag in more if flag.startswith(("--precision", "--clip"))]
    assert cli.main(flags(text, tmp_path / "one", "--ranks=1", *alone), "train") == 0
    assert record["losses"] == run_json(tmp_path / "one")["losses"]


# ------------------------------------------------------------------------------------------------ output of a run


def test_a_run_leaves_the_hash_of_the_plain_loop_its_record_and_its_pictures(text: Path, one_rank: RunOutput) -> None:
    record, shown = one_rank.record, one_rank.shown
    assert record["params_sha256"] == plain_sha256(text)
    model = build_model("tiny", SEQUENCE, 0)
    whole = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert record["parameters"] * 4 == whole
    assert (record["world_size"], record["stage"], record["steps"], record["micro_batches"]) == (1, 2, STEPS, 4)
    assert len(record["losses"]) == STEPS
    assert record["losses"][0] == pytest.approx(math.log(256), abs=0.2)
    assert record["losses"][-1] < record["losses"][0]
    assert 0 < record["validation_bits_per_byte"] < 8.5
    assert record["step_ms_median"] > 0
    assert set(record["bytes_per_rank"]) == {"parameters", "gradients", "optimizer", "gathered_peak", "scratch_peak"}
    assert set(record["formula_bytes_per_rank"]) == set(record["bytes_per_rank"])
    slack = 64 * len(list(model.parameters()))
    for kind, size in (("parameters", whole), ("gradients", whole), ("optimizer", 2 * whole)):
        assert size <= record["bytes_per_rank"][kind] <= size + slack
    assert record["traffic_bytes_per_step"] == record["formula_traffic_bytes_per_step"] == 0
    assert record["config"]["out"] == str(one_rank.out)
    assert record["versions"]["torch"] == torch.__version__
    for name in ("loss.png", "memory.png"):
        assert (one_rank.out / name).read_bytes().startswith(b"\x89PNG")
    assert f"step {STEPS}/{STEPS}  loss {record['losses'][-1]:.3f}" in shown
    table = [line.split() for line in shown.splitlines() if line.startswith(("parameters  ", "gradients", "optimizer"))]
    sizes = {row[0]: row[-2:] for row in table}
    for kind in ("parameters", "gradients", "optimizer"):
        assert sizes[kind] == [f"{record[key][kind]:,}" for key in ("bytes_per_rank", "formula_bytes_per_rank")]
    assert f"SHA-256 {record['params_sha256']}\n" in shown


@pytest.mark.timeout(3 * LIMIT)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.full
def test_two_ranks_hold_and_send_what_the_formulas_say(two_ranks: dict[int, dict[str, Any]], stage: int) -> None:
    record = two_ranks[stage]
    assert record["traffic_bytes_per_step"] == record["formula_traffic_bytes_per_step"] > 0
    assert 0 < record["control_bytes_per_step"] < record["traffic_bytes_per_step"]
    for facts in record["ranks"]:
        for kind in ("parameters", "gradients", "optimizer"):
            assert facts["measured"][kind] == facts["formula"][kind]
        assert facts["measured"]["scratch_peak"] <= facts["formula"]["scratch_peak"]
    assert [facts["rank"] for facts in record["ranks"]] == [0, 1]


@pytest.mark.full
def test_without_matplotlib_it_trains_and_says_what_to_install(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "out"
    assert cli.main(flags(text, out, "--ranks=1"), "train") == 0
    shown = capsys.readouterr().out
    assert shown.count("pip install 'zero-optimizer[cli]'") == 1
    assert f"step {STEPS}/{STEPS}" in shown
    assert sorted(path.name for path in out.iterdir()) == ["run.json"]


@pytest.mark.parametrize(
    ("command", "program"),
    [(None, "zero"), ("train", "python -m zero.train"), ("verify", "python -m zero.verify")],
)
def test_a_command_without_the_extra_says_what_to_install(
    command: str | None, program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    assert cli.main(["--help"], command) == 1
    assert capsys.readouterr().err == f"error: {program} needs typer: pip install 'zero-optimizer[cli]'\n"
    monkeypatch.setitem(sys.modules, "rich", None)
    assert cli.main(["--help"], command) == 1
    assert f"{program} needs typer and rich: " in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--stage=9"], "9"),
        (["--optimizer=adamu"], "--optimizer adamu: torch.optim has no such class. It has adadelta"),
        (["--optimizer=lbfgs"], "LBFGS"),
        (["--optimizer=rprop", "--fused"], "Rprop.__init__() got an unexpected keyword argument 'fused'"),
        (["--collective=telepathy"], "telepathy"),
        (["--data=/no/such/text"], "--data /no/such/text: there is no such file or folder"),
        (["--sharding-factor=3"], "sharding_factor must divide the number of ranks, 2, so be one of [1, 2], not 3"),
        (["--sharding-factor=1", "--stage=0"], "stage 0 shards nothing: leave sharding_factor=1 out"),
        (["--reshard-after-forward=false"], "reshard_after_forward=False with stage 2, where every rank holds whole"),
        (["--reshard-after-forward=3", "--stage=3"], "so one of [1, 2], not 3"),
        (["--reshard-after-forward=some"], "--reshard-after-forward is some: it must be true, false or a number"),
        (["--sequence=100000"], "less than one sequence of 100000 bytes"),
        (["--steps=0"], "--steps is 0: it must be at least 1"),
        (["--lr=nan"], "--lr is nan: it must be finite"),
        (["--seed=-1"], "--seed is -1"),
        (["--clip=0"], "--clip is 0.0: it must be above 0"),
        (["--checkpoint=c", "--checkpoint-every=0"], "--checkpoint-every is 0: it must be at least 1"),
        (["--checkpoint-every=5"], "error: --checkpoint-every needs --checkpoint DIR\n"),
        (["--resume=auto"], "error: --resume auto needs --checkpoint DIR\n"),
        (["--checkpoint=/proc/folder"], "error: --checkpoint /proc/folder: cannot write there ("),
    ],
)
def test_bad_input_is_one_line_before_anything_is_started(
    text: Path,
    tmp_path: Path,
    more: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(train, "launch_ranks", lambda *_: pytest.fail("ranks were started"))
    assert cli.main(flags(text, tmp_path / "out", *more), "train") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "--stepz=5"], r"No such option: --stepz .*--steps.*\. See `zero train --help`"),
        (["train", "--steps=many"], r"Invalid value for '--steps': .* integer.*\. See `zero train --help`"),
        (["train", "--steps"], r"Option '--steps' requires an argument\. See `zero.* --help`"),
        (["train", "--resume=saved"], r"Invalid value for '--resume': .*'none', 'auto'\. .*"),
        (["train", "--elastic=2:4"], r"No such option: --elastic.*"),
        (["train", "--preset=huge"], r"Invalid value for '--preset': .*'tiny', 'small', 'medium'\. .*"),
        (["train", "5"], r"Got unexpected extra argument.*5.*\. See `zero train --help`"),
        (["verify"], r"Missing argument 'MODULE:FUNCTION'\. See `zero verify --help`"),
        (["trian"], r"No such command 'trian'\. Did you mean 'train'\? See `zero --help`"),
        (["export", "saved"], r"No such command 'export'\. It is `zero checkpoint export`"),
    ],
)
def test_arguments_that_cannot_be_read_are_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert re.fullmatch(f"error: {said}\n", capsys.readouterr().err)


def test_an_output_folder_that_cannot_be_written_is_an_error(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert cli.main(flags(text, out), "train") == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: --out {out}: cannot write there (")
        assert error.endswith("Name a folder that can be written\n")


def test_ranks_that_contradict_the_launcher_are_an_error(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert cli.main(flags(text, tmp_path / "out", "--ranks=2"), "train") == 2
    assert "--ranks 2, but the launcher started 4 (WORLD_SIZE)" in capsys.readouterr().err


@pytest.mark.usefixtures("bare")
@pytest.mark.full
def test_an_error_in_the_middle_is_one_line_and_its_traceback_a_file(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: RankTraining, step: int) -> None:
        raise RuntimeError("the loss is\nnot what it was")

    monkeypatch.setattr(RankTraining, "_backwards", fail)
    assert cli.main(flags(text, tmp_path, "--ranks=1"), "train") == 1
    assert capsys.readouterr().err == f"error: the loss is not what it was (traceback in {tmp_path}/error.txt)\n"
    assert "in _take_steps" in (tmp_path / "error.txt").read_text()
    monkeypatch.undo()
    assert cli.main(flags(text, tmp_path, "--ranks=1"), "train") == 0
    assert not (tmp_path / "error.txt").exists()


FAILING_RANKS = {
    "an error in its work": (
        "def work(settings):\n"
        "    if rank == settings['fails']:\n"
        "        raise ValueError('the first\\nerror')\n"
        "    time.sleep(600)\n"
        "raise SystemExit(run_rank(work))\n",
        "rank 1: the first error",
    ),
    "an error": (
        "if rank == '1':\n"
        "    record_error(ValueError('the first\\nerror'))\n"
        "    record_error(ValueError('what came of it'))\n"
        "    raise SystemExit(1)\n"
        "time.sleep(600)\n",
        "rank 1: the first error",
    ),
    "a crash, and what came of it": (
        "if rank == '1':\n    os.kill(os.getpid(), 9)\nrecord_error(ValueError('connection lost'))\ntime.sleep(600)\n",
        "rank 1: the process was ended by SIGKILL and left no message: often a lack of memory",
    ),
}


@pytest.mark.parametrize("what", FAILING_RANKS)
@pytest.mark.full
def test_the_failure_of_a_rank_that_was_launched_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], what: str
) -> None:
    program, told = FAILING_RANKS[what]
    (tmp_path / "a_rank_fails.py").write_text(
        "import os, time\n"
        "from zero.commands.runner import record_error, run_rank, started_by_us\n"
        "assert started_by_us()\n"
        "rank = os.environ['RANK']\n" + program
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    with pytest.raises(runner.RankError) as raised:
        runner.launch_ranks("a_rank_fails", {"fails": "1"}, 2)
    assert (str(raised.value), *capfd.readouterr()) == (told, "", "")
    assert not raised.value.trace or "ValueError" in raised.value.trace
    assert not list(temporary.iterdir()), "left behind"


# ------------------------------------------------------------------------------------------------------ the parts


def test_both_command_lines_have_the_flags_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[TrainConfig] = []
    monkeypatch.setattr(train, "run", lambda config: given.append(config) or 0)
    assert cli.main(["--ranks=3", "--fused", "--clip", "0.5", "--data=-x", "--preset=tiny", "--lr=1e-7"], "train") == 0
    assert given.pop() == TrainConfig(ranks=3, fused=True, clip=0.5, data=Path("-x"), preset="tiny", lr=1e-7)
    default = TrainConfig()
    for arguments, name in ((["train"], None), ([], "train")):
        assert cli.main(arguments, name) == 0
        assert given.pop() == default
        assert cli.main([*arguments, "-h"], name) == 0
        shown = capsys.readouterr().out
        assert all(f"--{field.replace('_', '-')}" in shown for field in to_flags(default))


def test_a_rank_gets_the_configuration_as_json() -> None:
    config = TrainConfig(
        ranks=3, fused=True, clip=0.5, data=Path("-x"), offload=Offload(Path("disk")), checkpoint=Path("c")
    )
    for sent in (config, TrainConfig()):
        assert from_flags(TrainConfig, json.loads(json.dumps(to_flags(sent)))) == sent


def test_the_hash_is_of_whole_float32_parameters_in_order_with_ties_once() -> None:
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, -0.0]]).T)
    model.b = torch.nn.Parameter(torch.tensor([0.5], dtype=torch.bfloat16))
    model.c = model.a
    expected = hashlib.sha256(torch.tensor([1.0, 3.0, 2.0, -0.0, 0.5]).numpy().astype("<f4").tobytes())
    assert parameters_sha256(model) == expected.hexdigest()


def test_in_a_file_progress_is_about_ten_lines(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(steps=250)
    for step in range(1, 251):
        console.advance(step, "loss 1.000")
    console.finish()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[-1] == "step 250/250  loss 1.000"


@pytest.mark.parametrize("width", ["40", "200"])
def test_in_a_file_tables_and_lines_are_plain_and_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: str
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    console = Console()
    console.table("title", ["bytes", "measured"], [["sent by all ranks", "1,234"], ["none", "0"]])
    console.line("[bold] :snake: {'a': 1} " + 100 * "-")
    assert capsys.readouterr().out == (
        "title\n"
        "bytes              measured\n"
        "-----------------  --------\n"
        "sent by all ranks     1,234\n"
        "none                      0\n"
        "[bold] :snake: {'a': 1} " + 100 * "-" + "\n"
    )


def test_a_terminal_shows_a_bar_and_the_same_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = SimpleNamespace(isatty=lambda: True, write=sys.stdout.write, flush=sys.stdout.flush)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    console = Console(steps=2)
    console.advance(2, "loss 1.000")
    console.finish()
    output = capsys.readouterr().out
    assert all(part in output for part in ("2/2", "loss 1.000", "\x1b["))
    console.table("title", ["bytes", "measured"], [["parameters", "1,234"]])
    console.line("[not markup]")
    assert capsys.readouterr().out.splitlines() == [
        "title",
        "bytes       measured",
        "----------  --------",
        "parameters     1,234",
        "[not markup]",
    ]
