"""Mixed precision by module, for the models of tests. The plain loop of `narrowed` reads it, too."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from zero import MixedPrecision

from .narrowed import BF16, FP16, FP32, PRECISIONS

KEEP = MixedPrecision(FP32, output_dtype=BF16)  # in a model in bf16


def by_kind(name: str, module: nn.Module) -> MixedPrecision:
    """Return the precision of a module of a random model, or of `Odd`. What may be tied has that of the rest."""
    kind = getattr(module, "kind", "")
    if kind in ("norm", "scalar") or isinstance(module, nn.Conv2d):
        return KEEP
    if kind == "linear" or name.startswith("layers.1"):
        return MixedPrecision(FP32, reduce_dtype=BF16, output_dtype=BF16)
    return PRECISIONS["bf16, sent in fp32"]


BY_MODULE: dict[str, Any] = {
    "ends in fp32": {"*": PRECISIONS["bf16"], "first": KEEP, "last": KEEP},
    "ends in fp16": {"": PRECISIONS["bf16, added up in bf16"], "first": MixedPrecision(FP16, output_dtype=BF16)},
    "by kind": by_kind,
    "outputs alone": MixedPrecision(None, output_dtype=BF16),
}
"""What `mixed_precision` may be beside the dtypes of a whole model."""
POLICIES = {"policy": MixedPrecisionPolicy(BF16, reduce_dtype=FP32, output_dtype=FP32)}
"""Those of FSDP2, for models without buffers, which it does not cast."""
