"""Reads a row of a table of published runs: its model, its batch, its cluster, and the system that it names.

What a framework, a precision or a way of sharding means is data here. A framework chooses a schedule and how its loss
keeps logits, never a constant of the equations.

Knows: the columns of the table. Does not know: seconds, bytes of a rank.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from zero.core.layout import Dtypes
from zero.planning.hardware import Cluster, Hardware
from zero.planning.model import Transformer

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

Columns = Mapping[str, str]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Precision:
    """What the name of a precision says.

    Attributes:
        dtypes: in which parameters are gathered, gradients reduced, and masters kept.
        products: the dtype of the products of blocks, by the name of a peak.
        activations: the dtype in which activations are kept.
        stops_early: a recompute stops at the last tensor that the backward needs, as torch's does from 2.1 on.
        states: bytes of a parameter that is not sharded: weights, gradient, masters and Adam's states.
        has_masters: a run on one GPU keeps master weights, too; so a sharded one always does.
    """

    dtypes: Dtypes
    products: str = "bfloat16"
    activations: torch.dtype = BF16
    stops_early: bool = True
    states: int = 16
    has_masters: bool = True


_MIXED = Dtypes(BF16, FP32, FP32, FP32)
_NARROW = Dtypes(BF16, BF16, BF16, FP32)
PRECISIONS: Mapping[str, Precision] = {
    "fp32": Precision(Dtypes.all(FP32), "float32", FP32),
    "tf32": Precision(Dtypes.all(FP32), "tfloat32", FP32),
    "fp16": Precision(Dtypes(FP16, FP16, FP16, FP32), "float16", FP16),
    "amp_fp16": Precision(Dtypes(FP16, FP32, FP32, FP32), "float16", FP16),
    "bf16": Precision(_NARROW, has_masters=False),
    "bf16/PURE": Precision(_NARROW, stops_early=False),
    "bf16, fp32 masters": Precision(_MIXED),
    "bf16, fp32 gradients": Precision(_MIXED, states=20),
    "bf16 autocast, fp32 parameters": Precision(_MIXED),
    "amp_bf16": Precision(_MIXED),
    "amp_fp8": Precision(_MIXED, "float8"),
    "fp8": Precision(_NARROW, "float8"),
    "fp8 (current scaling)": Precision(_NARROW, "float8"),
    "fp8 linear, fp32 masters": Precision(_MIXED, "float8"),
}
"""The precisions by name. "bf16/PURE" is Composer's of torch 1.13, whose recompute repeats a whole block."""

_BY_FRAMEWORK: Mapping[str, Mapping[str, str]] = {
    "single": {"": "fsdp2"},
    "ddp": {"": "ddp"},
    "zero1": {"": "zero1"},
    "zero2": {"": "zero2"},
    "zero3": {"": "fsdp1", "FSDP2": "fsdp2", "DeepSpeed": "zero3"},
    "hsdp": {"": "fsdp1", "FSDP2": "fsdp2"},
}
"""The name of a schedule by the sharding and a part of the framework; "" is that of any other framework."""

COUNTED_LOGITS = 14.0  # bytes of a token and class that the counted loss holds
LOGIT_BYTES: Mapping[str, float] = {"": COUNTED_LOGITS, "Composer": 8.0}
"""Bytes of a token and class at the loss by a part of the framework.

14: 16-bit logits, their copy in 32 bits, and the gradients of both. 8: the loss casts inside, and no logits are held
(Composer's models). Runs that are 16-bit throughout hold 6.
"""
_NARROW_LOGITS = 6.0
FUSED_LOSSES = ("Composer",)
"""Frameworks whose loss is one kernel: it reads 16-bit logits, and writes their gradient in their place (flash-attn,
`ops/triton/cross_entropy.py`, the "fused_crossent" of llm-foundry)."""

_GPUS: Mapping[str, str] = {
    "v100": "v100-32",
    "a800": "a100-80",
    "a100": "a100-80",
    "h800": "h100",
    "h100-80": "h100",
    "h100-96": "h100-hbm2e",
    "h200-141": "h200",
    "b200-180": "b200",
    "b200-192": "b200",
    "gb200-186": "gb200",
    "gb300": "gb200",
}
"""The preset that stands for a GPU of another name."""

_RECOMPUTED: Mapping[str, str] = {
    "": "none",
    "none": "none",
    "full": "full",
    "selective op": "op",
    "selective": "half",
    "selective 2": "half",
    "selective layer": "half",
}
"""What a backward repeats: nothing, the cheap operations of each block, all of every second block, or all."""

_TORCH_2_1 = 2310  # year and month
_MANY = 1 << 22  # no model or cluster of today has more of anything but what `_LARGEST` names
_LARGEST: Mapping[str, int] = {"layers": 10_000, "vocab": 1 << 24, "seq": 1 << 27}

_YES = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False, "": True}


@dataclass(frozen=True)
class RowSetting:
    """A row, read.

    Attributes:
        model: its numbers: of GPT-2's or Llama's blocks, or T5's encoder and decoder.
        sequence, micro, micro_batches: tokens of a sequence, sequences of a micro-batch, micro-batches of a step.
        ranks, per_host: the size of the cluster.
        gpu: the preset.
        capacity: bytes of a GPU.
        nic: Gb/s of a host; None: what is usual.
        precision: what its name says.
        schedule: the name of the system's schedule.
        sharding: as the row says.
        factor: ranks that share a copy of what is sharded.
        reshard: units are gathered again for the backward.
        recompute: "none", "op", "half" or "full".
        is_compiled: whether element-wise operations are fused by a compiler.
        logit_bytes: of a token and class at the loss.
        framework: as the row says.
    """

    model: Transformer
    sequence: int
    micro: int
    micro_batches: int
    ranks: int
    per_host: int
    gpu: str
    capacity: float
    nic: float | None
    precision: Precision
    schedule: str
    sharding: str
    factor: int
    reshard: bool
    recompute: str
    is_compiled: bool
    logit_bytes: float
    framework: str

    @property
    def has_fused_loss(self) -> bool:
        return any(name.lower() in self.framework.lower() for name in FUSED_LOSSES)

    @property
    def tokens(self) -> int:
        """Tokens of a rank in a step."""
        return self.sequence * self.micro * self.micro_batches

    def cluster(self, hardware: Hardware, fabric: str) -> Cluster:
        hosts = self.ranks // self.per_host
        return hardware.cluster(f"{self.gpu}:{self.per_host}x{hosts}", nic=self.nic, fabric=fabric)


def read_row(row: Columns, hardware: Hardware) -> RowSetting:
    """Return a row, read. Raises `ValueError`, which names the column and the remedy, if it cannot be planned."""
    row = {"id": "", "model": "", **{key: (value or "").strip() for key, value in row.items() if key is not None}}
    row, has_decoder = _with_assumptions(row)
    gpu, ranks = _gpu(row, hardware), _integer(row, "gpus")
    per_host = min(ranks, _integer(row, "per_host", hardware.gpus[gpu].per_host))
    if ranks % per_host:
        raise ValueError(f"gpus: {ranks} do not fill hosts of {per_host}: give a multiple, or another per_host")
    sharding, precision = _chosen(row, "sharding", _BY_FRAMEWORK), _chosen(row, "precision", PRECISIONS)
    if sharding == "single" and ranks > 1:
        raise ValueError(f"sharding: 'single' is one GPU, and the row has {ranks}: name how they share the work")
    factor = _integer(row, "shard_factor", ranks) if sharding not in ("ddp", "single") else 1
    if ranks % factor:
        raise ValueError(f"shard_factor: {factor} does not divide {ranks} GPUs: choose a divisor")
    narrow = PRECISIONS[precision] == PRECISIONS["bf16/PURE"]
    framework, known = row.get("framework", ""), PRECISIONS[precision]
    if _is_early(row.get("source", "")):
        known = replace(known, stops_early=False)
    return RowSetting(
        model=_model(row, has_decoder),
        sequence=_integer(row, "seq"),
        micro=_integer(row, "micro_batch"),
        micro_batches=_integer(row, "accum", 1),
        ranks=ranks,
        per_host=per_host,
        gpu=gpu,
        capacity=_number(row, "gpu_mem_gib", hardware.gpus[gpu].memory / 2**30) * 2**30,
        nic=_number(row, "nic_gbit_host") if row.get("nic_gbit_host") else None,
        precision=known,
        schedule=_matching(framework, _BY_FRAMEWORK[sharding]),
        sharding=sharding,
        factor=factor,
        reshard=_yes(row, "reshard"),
        recompute=_RECOMPUTED[_chosen(row, "ac", _RECOMPUTED)],
        is_compiled=bool(row.get("compile")) and _yes(row, "compile"),
        logit_bytes=_NARROW_LOGITS if narrow else _matching(framework, LOGIT_BYTES),
        framework=framework,
    )


def _model(row: Columns, has_decoder: bool) -> Transformer:
    """Return the numbers of the model. ``has_decoder``: it has an encoder and a decoder, with as many blocks each."""
    gated, layers, hidden = (
        bool(row.get("gated")) and _yes(row, "gated"),
        _integer(row, "layers"),
        _integer(row, "hidden"),
    )
    plain, heads = not gated and not has_decoder, _integer(row, "heads")
    return Transformer(
        layers,
        hidden,
        heads,
        _integer(row, "ffn", 4 * hidden),
        _integer(row, "vocab"),
        _integer(row, "kv_heads", heads),
        _integer(row, "head_dim") if row.get("head_dim") else 0,
        _integer(row, "seq") if plain else 0,
        layers if has_decoder else 0,
        gated=gated,
        activation="silu" if gated else "relu" if has_decoder else "gelu",
        norm="layer" if plain else "rms",
        norm_bias=plain,
        qkv_bias=plain,
        out_bias=plain,
        mlp_bias=plain,
        rotary=gated,
        tied=_yes(row, "tied") if row.get("tied") else not gated,
    )


_T5: Mapping[str, dict[str, str]] = {
    "611000000": {"layers": "20", "heads": "16", "ffn": "4096", "head_dim": "64"},
    "2280000000": {"layers": "19", "heads": "32", "ffn": "16384", "head_dim": "128"},
    "11300000000": {"layers": "24", "heads": "128", "ffn": "65536", "head_dim": "128"},
}
_OF_T5 = {"hidden": "1024", "vocab": "32128", "gated": "0", "tied": "1", "seq": "512", "micro_batch": "8", "gpus": "8"}
"""Assumptions for a T5 whose row has no shapes: blocks of T5-large, T5-3B and T5-11B (Raffel et al. 2020, section
3.7), as many as come nearest to its parameters, on 8 GPUs with 8 x 512 tokens each."""


def _with_assumptions(row: dict[str, str]) -> tuple[dict[str, str], bool]:
    """Return the row, with what is assumed for a T5 without shapes, and whether it is one."""
    shapes = _T5.get(row.get("params", ""))
    if row.get("layers") or row.get("hidden") or shapes is None or "t5" not in (row["id"] + row["model"]).lower():
        return row, False
    return row | {key: row.get(key) or value for key, value in {**_OF_T5, **shapes}.items()}, True


def _is_early(source: str) -> bool:
    """Return whether a source names a paper of arXiv from before torch 2.1, the first whose recompute stops early."""
    number = re.search(r"\b(\d{4})\.\d{5}\b", source)
    return number is not None and int(number[1]) < _TORCH_2_1


def _integer(row: Columns, column: str, default: int | None = None) -> int:
    value = _number(row, column, default)
    if value != int(value):
        raise ValueError(f"{column}: {row[column]!r} is no whole number: write one")
    if value > _LARGEST.get(column, _MANY):
        raise ValueError(f"{column}: {row[column]!r} is more than {_LARGEST.get(column, _MANY):,}: check the row")
    return int(value)


def _number(row: Columns, column: str, default: float | None = None) -> float:
    text = row.get(column, "")
    if not text:
        if default is None:
            raise ValueError(f"{column} is missing: the row cannot be planned without it")
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{column}: {text!r} must be a number above 0")
    if not 1e-3 <= value <= 1e9:
        raise ValueError(f"{column}: {text!r} is not between 0.001 and 10^9: check the row")
    return value


def _yes(row: Columns, column: str) -> bool:
    text = row.get(column, "").lower()
    if text not in _YES:
        raise ValueError(f"{column}: {row[column]!r} must be true or false")
    return _YES[text]


def _chosen(row: Columns, column: str, known: Mapping[str, object]) -> str:
    text = row.get(column, "")
    if text in known:
        return text
    if not text:
        raise ValueError(f"{column} is missing: choose one of {_listed(known)}")
    close = difflib.get_close_matches(text, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"choose one of {_listed(known)}"
    raise ValueError(f"{column}: {text!r} is unknown: {hint}")


def _listed(known: Mapping[str, object]) -> str:
    return ", ".join(repr(name) for name in known if name)


def _gpu(row: Columns, hardware: Hardware) -> str:
    name = _chosen(row, "gpu", {**hardware.gpus, **_GPUS})
    return name if name in hardware.gpus else _GPUS[name]


def _matching(framework: str, known: Mapping[str, Value]) -> Value:
    """Return the value whose key is a part of the framework's name, else that of ""."""
    lower = framework.lower()
    return next((value for part, value in known.items() if part and part.lower() in lower), known[""])
