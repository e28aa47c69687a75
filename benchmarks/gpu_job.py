"""The job of a training on a device, the model sizes, and the results, as plain values for JSON.

Knows: fields, shapes, bytes. Does not know: systems, processes, tables, devices.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch

from zero.commands.train.model import GPT, Shape

VOCABULARY = 50304
SHAPES = (Shape(24, 14, 1792, VOCABULARY), Shape(36, 20, 1280, VOCABULARY), Shape(24, 16, 1024, VOCABULARY))
TINY = Shape(2, 2, 32, 64)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PASSES = 7  # of a fused AdamW over memory: it reads parameter, gradient and two states, and writes all but the gradient
STATE = 6 * 4  # bytes of an fp32 element: parameter, gradient, two states, and a buffer or a sum beside the gradient
ACTIVATIONS = 40  # the most tensors of (tokens, width) that a block keeps for its backward and works with


def numel(shape: Shape) -> int:
    """Return the number of elements of a model's parameters."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(shape, 1).parameters())


def needed_bytes(shape: Shape, tokens: int) -> int:
    """Estimate the bytes of training in fp32: parameters and states, activations, and logits with their gradients."""
    activations = tokens * shape.layers * shape.width * ACTIVATIONS * 4
    return numel(shape) * STATE + activations + tokens * shape.vocabulary * 4 * 4


def largest(free: int, tokens: int) -> Shape | None:
    """Return the largest model that fits into ``free`` bytes with a margin, or None."""
    return next((shape for shape in SHAPES if needed_bytes(shape, tokens) <= 0.9 * free), None)


@dataclass(frozen=True)
class GpuJob:
    """A training of a model on ``device`` under ``system``.

    It runs ``warm`` steps, ``steps`` steps with a wait for the device after each, and as many in a row. ``dtype``: of
    parameters, gradients, states and activations. ``copied``: bytes of the copy that is timed.
    """

    system: str
    dtype: str
    device: str
    shape: Shape
    batch: int
    sequence: int
    warm: int
    steps: int
    copied: int
    timeout: float = 300.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> GpuJob:
        record = json.loads(text)
        return cls(**record | {"shape": Shape(**record["shape"])})


@dataclass(frozen=True)
class OnDevice:
    """The results of one run. Times are in seconds.

    ``in_a_row``: of a step, if only the last of several is waited for. The next three are medians over steps that are
    each waited for. ``waited``: until the device is done; ``host``: until the calls have returned; ``update``: device
    time of `step()` alone. ``copy``: bytes a second that the device reads and writes in a copy. ``peak``: the most
    bytes above the start; ``kept``: bytes between steps. ``loss``: of the last step.
    """

    job: GpuJob
    numel: int
    in_a_row: float
    waited: float
    host: float
    update: float
    copy: float
    peak: int
    kept: int
    loss: float

    @property
    def update_bandwidth(self) -> float:
        """Bytes a second of the optimizer's step, if it makes the fewest passes over memory."""
        return PASSES * DTYPES[self.job.dtype].itemsize * self.numel / self.update


def read_on_device(record: dict[str, Any]) -> OnDevice:
    return OnDevice(**record | {"job": GpuJob.from_json(json.dumps(record["job"]))})
