"""`zero plan`: what it prints and writes, which flags it takes, and what it says of wrong input."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from zero.commands import cli
from zero.commands.plan.inputs import training_of
from zero.commands.plan.settings import PlanConfig
from zero.commands.plan.start import start_of
from zero.config import PRECISIONS
from zero.planning.hardware import presets
from zero.planning.model import Model, ParameterShape
from zero.planning.plan import Training
from zero.planning.setting import PlanSetting

from ..planning.configs import LLAMA_3_8B, llama

SMALL = llama("llama", 4, 256, 4, 2, 704, 1000)
pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return path


def plan(*flags: str) -> int:
    return cli.main(["plan", *flags])


def written(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "plan.json").read_text())
    assert isinstance(found, dict)
    return found


def test_it_prints_a_table_and_a_recommendation_and_writes_files(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flags = [f"--config={config}", "--cluster=h100:8x2", "--sequence=512", "--global-batch=64", f"--out={out}"]
    assert plan(*flags, "--tokens=1e9", "--price=2", "--trace") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{tmp_path.name}: 3.46 M parameters in 5 units, ")
    assert "16 h100 (2 hosts, 3,200 Gb/s a host)" in lines[0]
    for begin in ("recommended: zero ", "its seconds: ", "bucket_cap_mb: ", "start: ", "smallest cluster that fits"):
        assert any(line.startswith(begin) for line in lines), begin
    assert any("days" in line for line in lines)
    assert any(line.startswith("$") for line in lines)
    found = written(out)
    names = [choice["name"] for choice in found["choices"]]
    assert len(set(names)) == len(names)
    assert found["recommended"]["name"] in names
    for choice in found["choices"]:
        assert sum(choice["bytes"].values()) == choice["total_bytes"]
    trace = json.loads((out / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in trace} == {"X", "M"}


def test_it_draws_pictures_with_room_for_their_words(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    from ..support.pictures import misfits

    drawn = {}
    monkeypatch.setattr(figure.Figure, "savefig", lambda figure, path, **_: drawn.update({path.name: figure}))
    flags = [f"--config={config}", "--cluster=h100:8x2", "--sequence=512", f"--out={tmp_path}"]
    assert plan(*flags) == 0
    assert set(drawn) == {"plan.png", "plan-scale.png"}
    for name, picture in drawn.items():
        assert misfits(picture) == [], name


def test_one_host_without_a_network_has_no_curve(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert plan(f"--config={config}", "--cluster=rtx4090:2", f"--out={tmp_path}") == 0
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "plan.json", "plan.png"}


def test_the_same_plan_has_the_same_bytes(config: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert plan(f"--config={config}", f"--out={tmp_path / name}") == 0
    assert (tmp_path / "one" / "plan.json").read_bytes() == (tmp_path / "two" / "plan.json").read_bytes()


def test_where_nothing_fits_it_names_a_change_that_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_8B))
    flags = [f"--config={path}", "--cluster=h100:8", "--sequence=8192", f"--out={tmp_path}"]
    assert plan(*flags) == 1
    captured = capsys.readouterr()
    assert captured.err == "error: no setting fits into 77.7 GB of a rank: --checkpoint selective would fit\n"
    assert written(tmp_path)["recommended"] is None
    assert plan(*flags, "--checkpoint=selective") == 0


def test_where_no_recomputing_is_enough_it_names_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_8B))
    flags = [f"--config={path}", "--sequence=512", "--checkpoint=full", "--nic=100", f"--out={tmp_path}"]
    assert plan(*flags, "--cluster=rtx4090:2") == 1
    error = capsys.readouterr().err
    hosts = error.split("(")[1].split()[0]
    assert error.endswith(" would fit\n")
    assert plan(*flags, f"--cluster=rtx4090:2x{hosts}") == 0
    assert plan(*flags, f"--cluster=rtx4090:2x{int(hosts) - 1}") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "the model needs exactly one of --config, --parameters, --module, --preset, here none"),
        (["--preset=tiny", "--config=C"], "here --config and --preset"),
        (["--config=C", "--cluster=h10:8"], "no GPU is called 'h10': did you mean 'h100'?"),
        (["--config=C", "--cluster=rtx4090:8x2"], "no network is usual for it: give the Gb/s of a host (--nic)"),
        (["--config=C", "--global-batch=12"], "not divisible by 8 ranks with micro-batches of 1: use 8 or 16"),
        (["--config=nowhere.json"], "nowhere.json"),
        (["--config=C", "--micro=0"], "--micro 0 and --sequence 2048 must both be at least 1"),
        (["--config=C", "--price=-1"], "--price is -1.0: it must be a number above 0"),
        (["--config=C", "--optimizer=lion"], "--optimizer is 'lion': choose one of "),
        (["--config=C", "--fabric=fast"], "fast"),
        (["--config=UNKNOWN"], "model_type 'lama' is unknown (did you mean 'llama'?)"),
        (["--parameters=EMPTY"], "EMPTY"),
        (["--module=nowhere:model"], "--module nowhere:model: ModuleNotFoundError"),
        (["--preset=tiny", "--checkpoint=full"], "leave it out with --preset"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    flags: list[str], message: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown, empty = tmp_path / "UNKNOWN", tmp_path / "EMPTY"
    unknown.write_text(json.dumps({**SMALL, "model_type": "lama"}))
    empty.write_text("")
    places = {"=C": f"={config}", "=UNKNOWN": f"={unknown}", "=EMPTY": f"={empty}"}
    given = [flag.replace(key, value) for flag in flags for key, value in [_place(flag, places)]]
    assert plan(*given, f"--out={tmp_path / 'out'}") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "out" / "plan.json").exists()


def _place(flag: str, places: dict[str, str]) -> tuple[str, str]:
    return next(((key, value) for key, value in places.items() if flag.endswith(key)), ("", ""))


def test_a_list_of_parameters_has_no_activations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "shapes.txt"
    path.write_text("a.weight 1024x1024 float32\nb.weight 1024x1024 float32\n")
    assert plan(f"--parameters={path}", "--cluster=h100:8", f"--out={tmp_path}") == 0
    assert "activations are not counted" in capsys.readouterr().out
    found = written(tmp_path)
    assert found["model"]["activations"] == "not counted"
    assert {choice["bytes"]["activations"] for choice in found["choices"]} == {0}


def test_a_module_is_built_without_memory_and_counted_with_its_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made.py").write_text(
        "import torch\n"
        "def alone():\n    return torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(3)])\n"
        "def model():\n    return alone(), lambda made: made(torch.ones(8, 512, dtype=torch.bfloat16)).sum()\n"
    )
    monkeypatch.chdir(tmp_path)
    for name, counted in (("alone", "not counted"), ("model", "counted")):
        assert plan(f"--module=made:{name}", f"--out={tmp_path}") == 0
        assert written(tmp_path)["model"] == {
            "name": f"made:{name}",
            "parameters": 3 * 513 * 512,
            "units": 4,
            "activations": counted,
        }


def start(**changes: Any) -> str:
    config = PlanConfig(preset="tiny", sequence=32, precision="fp32", optimizer=changes.get("optimizer", "adamw"))
    setting = PlanSetting(**{"stage": 3, "world_size": 2, **changes})
    return start_of(config, setting, presets().cluster("cpu:2"), 1, training_of(config))


def test_the_start_has_the_flags_of_zero_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zero.commands.train import command as train

    given: list[Any] = []
    monkeypatch.setattr(train, "run", lambda config: given.append(config) or 0)
    for changes in (
        {},
        {"sharding_factor": 1},
        {"reshard_after_forward": False},
        {"bucket_cap_mb": 3},
        {"stage": 0},
        {"offload": zero.Offload(".")},
    ):
        flags = shlex.split(start(**changes))
        assert flags[:2] == ["zero", "train"]
        assert cli.main(flags[1:]) == 0
        found = given[-1]
        assert (found.ranks, found.preset, found.sequence, found.micro_batches) == (2, "tiny", 32, 2)
        assert found.stage == changes.get("stage", 3)
        assert found.bucket_cap_mb == changes.get("bucket_cap_mb", 25)
        assert found.sharding_factor == changes.get("sharding_factor")
        assert found.reshard_after_forward == changes.get("reshard_after_forward", True)
        assert (found.offload is not None) is ("offload" in changes)
        assert found.fused

    flags = shlex.split(start(optimizer="muon"))
    assert cli.main(flags[1:]) == 0
    assert (given[-1].optimizer, given[-1].fused) == ("muon", False)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw", "adam", "momentum", "sgd", "adagrad", "muon"])
@pytest.mark.parametrize(
    "changes", [{}, {"offload": zero.Offload("cpu")}, {"sharding_factor": 2, "reshard_after_forward": False}]
)
def test_the_start_on_gpus_has_the_arguments_of_the_optimizer(
    precision: Any, optimizer: str, changes: dict[str, Any]
) -> None:
    config = PlanConfig(preset="tiny", precision=precision, optimizer=optimizer)
    given = {
        "stage": 3,
        "world_size": 8,
        "bucket_cap_mb": 3,
        "mixed_precision": PRECISIONS[precision],
        "device": "cuda",
    }
    begun = start_of(config, PlanSetting(**{**given, **changes}), presets().cluster("h100:8"), 1, training_of(config))
    bound = inspect.signature(zero.ZeroOptimizer).bind

    def optimizer_of(*given: Any, **named: Any) -> dict[str, Any]:
        return bound(*given, **named).arguments

    names = {"torch": torch, "Offload": zero.Offload, "MixedPrecision": zero.MixedPrecision, "model": None}
    found = eval(begun, {**names, "ZeroOptimizer": optimizer_of, "matrices": [1], "rest": [2]})
    if optimizer == "muon":
        muon = {"params": [1], "optimizer_class": torch.optim.Muon, "partition": "parameter"}
        assert (found["params"], found["module"]) == ([muon, {"params": [2]}], None)
    assert (found["stage"], found["bucket_cap_mb"]) == (3, 3)
    assert ("mixed_precision" in found) is (precision != "fp32")
    assert ("offload" in found) is ("offload" in changes)
    assert found.get("defaults", {}).get("fused", False) is (optimizer not in ("adagrad", "muon"))
    assert found.get("sharding_factor") == changes.get("sharding_factor")
    assert found.get("reshard_after_forward", True) == changes.get("reshard_after_forward", True)


def test_the_start_says_auto_where_that_is_the_size_and_nothing_where_it_is_the_default() -> None:
    config = PlanConfig(preset="tiny", precision="fp32")
    block = ParameterShape(("block",), (2560, 4096), unit=1)  # 40 MiB
    training = Training(Model("one", (block,), ("", "blocks.0")), [], precision="fp32")
    for device, ranks, mib, flag in (
        ("cpu", 64, 40, "--bucket-cap-mb auto "),
        ("cpu", 2, 40, "--bucket-cap-mb 40 "),
        ("cpu", 64, 41, "--bucket-cap-mb 41 "),
        ("cpu", 64, 25, ""),
        ("cuda", 2, 40, ""),
        ("cuda", 64, 41, "bucket_cap_mb=41, "),
        ("cuda", 64, 25, "bucket_cap_mb=25, "),
    ):
        setting = PlanSetting(stage=3, world_size=ranks, bucket_cap_mb=mib, device=device, ranks_per_host=1)
        gpu = "cpu" if device == "cpu" else "h100"
        begun = start_of(config, setting, presets().cluster(f"{gpu}:{ranks}"), 1, training)
        assert flag in begun
        assert bool(flag) is bool(re.search("bucket.cap.mb", begun))


def test_several_hosts_meet_at_an_endpoint() -> None:
    config = PlanConfig(preset="tiny", precision="fp32")
    setting = PlanSetting(stage=3, world_size=4)
    begun = start_of(config, setting, presets().cluster("cpu:2x2", nic=10), 1, training_of(config))
    assert begun.startswith("torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m ")


def test_states_on_a_disk_are_among_the_choices_of_processors_alone(config: Path, tmp_path: Path) -> None:
    kinds = set()
    for cluster in ("cpu:2", "h100:2"):
        assert plan(f"--config={config}", f"--cluster={cluster}", "--precision=bf16", f"--out={tmp_path}") == 0
        settings = [choice["setting"] for choice in written(tmp_path)["choices"]]
        kinds |= {(cluster, each["offload"]) for each in settings}
    assert kinds == {("cpu:2", ""), ("cpu:2", "disk"), ("h100:2", ""), ("h100:2", "host")}


def test_states_on_the_host_are_counted_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Adam keeps 8 bytes of each element, and a rank its share of them; masters stay on the GPU."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_8B))
    assert plan(f"--config={path}", "--cluster=h100:2", "--checkpoint=full", f"--out={tmp_path}", "--all") == 0
    for choice in written(tmp_path)["choices"]:
        setting = choice["setting"]
        owners = (setting["sharding_factor"] or 2) if setting["offload"] else 0
        wanted = 8 * 8_030_261_248 / owners if owners else 0
        assert choice["offloaded_bytes"] == pytest.approx(wanted, rel=1e-3)
    assert re.search(r"states on host.* with 32.1 GB of the host's memory for each rank", capsys.readouterr().out)


@pytest.mark.full
def test_the_recommended_command_trains(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], bare: None
) -> None:
    flags = ["--preset=tiny", "--cluster=cpu:2", "--precision=fp32", "--sequence=32", f"--out={tmp_path / 'plan'}"]
    assert plan(*flags) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("start: "))
    begun = shlex.split(line.removeprefix("start: "))
    assert cli.main([*begun[1:], "--steps=2", f"--data={text}", f"--out={tmp_path / 'run'}"]) == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["params_sha256"]


def test_the_named_hosts_fit_with_the_named_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_8B))
    flags = [f"--config={path}", "--sequence=512", "--nic=100", f"--out={tmp_path}", "--micro=200", "--checkpoint=full"]
    assert plan(*flags, "--global-batch=400", "--cluster=rtx4090:2") == 1
    error = capsys.readouterr().err
    hosts, named = error.split("(")[1].split()[0], re.findall(r"--[a-z-]+ \w+", error)
    assert plan(*flags, "--global-batch=400", f"--cluster=rtx4090:2x{hosts}", *" ".join(named).split()) == 0
