"""CUDA kernels for what torch has no single operator for: `kernels_of` returns those of a device, or None.

Knows: devices, and whether the kernels compile there and have the bits of torch's operators. Does not know: optimizers,
ranks.

Whoever has a use for a kernel has the operators, too, with the same bits: they are what runs on other accelerators, or
where the kernels do not compile. So ranks need not agree about which of them they use, except where they exchange what
only a kernel makes (`DeviceKernels.norm_limbs`).
"""

from __future__ import annotations

from .device_kernels import LIMBS, NORM_TYPES, DeviceKernels
from .found import FOUND, kernels_of

__all__ = ["FOUND", "LIMBS", "NORM_TYPES", "DeviceKernels", "kernels_of"]
