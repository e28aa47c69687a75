"""How a planned setting is started: flags of `zero train`, or arguments of `zero.ZeroOptimizer`.

Knows: how both write a setting. Does not know: why it was chosen.
"""

from __future__ import annotations

from ...core.layout import MIB
from ...planning.hardware import Cluster
from ...planning.plan import Training
from ...planning.setting import PlanSetting
from .settings import PlanConfig

_CLASSES = {"adamw": "AdamW", "adam": "Adam", "momentum": "SGD", "sgd": "SGD", "adagrad": "Adagrad", "muon": "AdamW"}
_TRAINED = ("adamw", "adam", "sgd", "adagrad", "muon")  # by zero train
_FUSED = ("adamw", "adam", "momentum", "sgd")  # in torch; Adagrad is on CPUs alone


def cap_argument(setting: PlanSetting, training: Training) -> str:
    """Return ``bucket_cap_mb`` as text; empty if buckets have the default size."""
    if setting.bucket_sizes == training.bucket_sizes(setting, None):
        return ""
    return (
        "auto" if setting.bucket_sizes == training.bucket_sizes(setting, "auto") else str(setting.bucket_bytes // MIB)
    )


def start_of(config: PlanConfig, setting: PlanSetting, cluster: Cluster, micro_batches: int, training: Training) -> str:
    """Return the command of a preset, or the arguments. ``micro_batches``: of each rank in a step."""
    cap = cap_argument(setting, training)
    on_cpu = cluster.gpu.family == "cpu"  # as zero train is
    if config.preset is None or not on_cpu or config.optimizer not in _TRAINED:
        return _arguments(config, setting, cluster, f'"{cap}"' if cap == "auto" else cap)
    if cluster.hosts == 1:
        flags = [f"zero train --ranks {cluster.ranks}"]
    else:
        launcher = f"torchrun --nnodes {cluster.hosts} --nproc-per-node {cluster.per_host}"
        flags = [f"{launcher} --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m zero.train"]
    flags.append(f"--preset {config.preset}")
    flags += [f"--{name.replace('_', '-')} {str(value).lower()}" for name, value in _sharding(setting).items()]
    if cap:
        flags.append(f"--bucket-cap-mb {cap}")
    if setting.offload:
        flags.append(f"--offload {setting.offload.states}")
    flags.append(f"--batch {config.micro} --sequence {config.sequence}")
    flags.append(f"--micro-batches {micro_batches * cluster.ranks}")
    flags.append(f"--precision {config.precision} --optimizer {config.optimizer}")
    flags += ["--fused"] * (config.optimizer != "muon")
    return " ".join(flags)


def _sharding(setting: PlanSetting) -> dict[str, int]:
    """Return the arguments that say who owns what, without defaults."""
    found = {"stage": setting.stage}
    if setting.sharding_factor is not None:
        found["sharding_factor"] = setting.factor
    if setting.reshard_after_forward is not True:
        found["reshard_after_forward"] = setting.reshard_after_forward
    return found


def _arguments(config: PlanConfig, setting: PlanSetting, cluster: Cluster, cap: str) -> str:
    arguments = [f"torch.optim.{_CLASSES[config.optimizer]}"]
    params = "model"
    if config.optimizer == "muon":
        muon = '{"params": matrices, "optimizer_class": torch.optim.Muon, "partition": "parameter"}'
        params = f'[{muon}, {{"params": rest}}]'
        arguments.append("module=model")
    arguments += [f"{name}={value}" for name, value in _sharding(setting).items()]
    if setting.offload:
        arguments.append(f'offload=Offload("{setting.offload.states}")')
    if cap:
        arguments.append(f"bucket_cap_mb={cap}")
    if setting.mixed_precision is not None:
        arguments.append(f"mixed_precision=MixedPrecision({setting.mixed_precision.param_dtype})")
    if config.optimizer in _FUSED or (config.optimizer == "adagrad" and cluster.gpu.family == "cpu"):
        arguments.append("fused=True")
    if config.optimizer == "momentum":
        arguments.append("momentum=0.9")
    return f"ZeroOptimizer({params}, {', '.join(arguments)})"
