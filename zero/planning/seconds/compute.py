"""Seconds of compute: of a unit's forward and backward, and of an update.

    forward     matmul/(peak e_mm h/(h+h0))  +  attention/(peak e_at)  +  moved bytes/(bandwidth e_m)
    backward    2 x products, 2.5 x attention, 2 x moved bytes; and what is recomputed of the forward
    update      bytes of gradient, weights and states/bandwidth, as a fused kernel moves them; of the device's memory,
                or of the host's

The host issues kernels meanwhile (`HostCalls.launch`). Its seconds are returned apart, since a schedule knows which of
the two waits. `CONSTANTS` has every constant with its unit, its range and its source; those whose source is "fit" are
fitted to published runs.

Knows: work in operations and bytes, peaks, constants. Does not know: ranks, links, order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...core.layout import Dtypes
from ..hardware import Accelerator, Cluster
from ..model import UnitWork


@dataclass(frozen=True)
class Constant:
    """A constant of the equations. ``low`` and ``high`` bound a fit. ``source``: "fit", or where the value is from."""

    value: float
    unit: str
    low: float
    high: float
    source: str


FIT = "fit"
_MAMF = "of the peak, stas00/ml-engineering, compute/accelerator/README.md, maximum achievable matmul FLOPS"
_AS_FITTED = "0.91, the mean of Ampere (0.847 of 0.869) and Hopper (0.672 of 0.803),"
_JITTER = "an assumption: runs on quiet clusters cannot tell it from the steps of a ring"
_BACKWARD = "benchmarks/results/gpu-short-c.json, the plain loop: backward 27.5 ms, forward 20.5"

CONSTANTS: Mapping[str, Constant] = {
    "matmul.ampere": Constant(0.847, "share of the peak", 0.4, 0.95, FIT),
    "matmul.hopper": Constant(0.672, "share of the peak", 0.4, 0.95, FIT),
    "matmul.volta": Constant(0.69, "share of the peak", 0.4, 0.95, f"{_AS_FITTED} of 0.76 {_MAMF} (95 of 125)"),
    "matmul.blackwell": Constant(0.7, "share of the peak", 0.4, 0.95, f"{_AS_FITTED} of 0.776 {_MAMF} (1745 of 2250)"),
    "matmul.ada": Constant(0.67, "share of the peak", 0.4, 0.95, "as Hopper: no measured maximum is known here"),
    "matmul.cpu": Constant(0.7, "share of the peak", 0.2, 1.0, "an assumption; measure your own machine"),
    "attention.ampere": Constant(0.313, "share of the peak", 0.1, 0.8, FIT),
    "attention.hopper": Constant(0.182, "share of the peak", 0.1, 0.8, FIT),
    "attention.volta": Constant(0.25, "share of the peak", 0.05, 0.8, "between Ampere and Hopper"),
    "attention.blackwell": Constant(0.182, "share of the peak", 0.05, 0.8, "as Hopper"),
    "attention.ada": Constant(0.25, "share of the peak", 0.05, 0.8, "between Ampere and Hopper"),
    "attention.cpu": Constant(0.3, "share of the peak", 0.05, 1.0, "an assumption; measure your own machine"),
    "hidden": Constant(486.0, "features at which products reach half of their share", 0.0, 2000.0, FIT),
    "elementwise": Constant(0.822, "share of the memory's bandwidth in element-wise operations", 0.2, 1.0, FIT),
    "compiled": Constant(0.237, "share of element-wise bytes that is left by a compiler", 0.1, 1.0, FIT),
    "overlap": Constant(0.6, "seconds of slowdown for each second beside a collective", 0.0, 0.6, FIT),
    "fixed": Constant(0.019, "seconds of a step that no unit explains", 0.0, 0.2, FIT),
    "jitter": Constant(0.005, "share of a step for each doubling of hosts", 0.0, 0.03, _JITTER),
    "host_backward": Constant(1.34, "seconds of the host in a backward for each of its forward", 0.1, 4.0, _BACKWARD),
}
"""Every constant of the equations, by name; "matmul.ampere" is that of a family."""

NEWTON_SCHULZ = 5  # iterations: the default of torch.optim.Muon
ATTENTION_BACKWARD = (
    2.5  # products of a flash attention's backward for each of its forward: Dao, FlashAttention-2 (2023), section 4.1
)


def values(**changes: float) -> dict[str, float]:
    """Return the constants by name, some of them changed: ``values(**{"matmul.hopper": 0.7})``."""
    return {name: constant.value for name, constant in CONSTANTS.items()} | changes


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one unit for one micro-batch.

    Attributes:
        forward: of compute.
        backward: of compute, without what is recomputed.
        recompute: of compute, in the backward.
        host: in which the host issues the forward.
        host_backward: in which it issues the backward and what is recomputed.
    """

    forward: float
    backward: float
    recompute: float = 0.0
    host: float = 0.0
    host_backward: float = 0.0

    def with_hooks(self, forward: float, backward: float) -> PassSeconds:
        """Return the same passes with more seconds of the host."""
        return replace(self, host=self.host + forward, host_backward=self.host_backward + backward)


class Compute:
    """The equations for the GPUs of a cluster, one dtype of products and one set of constants."""

    def __init__(self, cluster: Cluster, dtype: str, constants: Mapping[str, float] | None = None) -> None:
        """``dtype``: of the products, for instance "bfloat16"; ``constants``: of `values`."""
        self.constants = values() if constants is None else constants
        self._gpu = gpu = cluster.gpu
        self.calls = cluster.calls
        self._peak = gpu.peak(dtype) * gpu.sustained
        self._matmul, self._attention = self._share(gpu, "matmul"), self._share(gpu, "attention")
        self._memory = gpu.memory_bandwidth * gpu.efficiency.get("memory", 1.0)
        self._host_memory = gpu.host_link if gpu.host_memory is None else gpu.host_memory
        self._elementwise = gpu.memory_bandwidth * gpu.efficiency.get("memory", self.constants["elementwise"])

    def _share(self, gpu: Accelerator, which: str) -> float:
        name = f"{which}.{gpu.family}"
        if which in gpu.efficiency:
            return gpu.efficiency[which]
        if name not in self.constants:
            families = sorted(key.partition(".")[2] for key in self.constants if key.startswith(f"{which}."))
            raise ValueError(
                f"GPU {gpu.name!r} is of the unknown family {gpu.family!r}: use one of {', '.join(families)}, or "
                f'write "efficiency" into the file of hardware'
            )
        return self.constants[name]

    def forward(self, work: UnitWork, hidden: int = 0) -> float:
        """Return the seconds of a forward. ``hidden``: features of a token; 0: products are large."""
        return self._products(work, hidden) + self._attended(work) + self._moved(work)

    def backward(self, work: UnitWork, hidden: int = 0) -> float:
        """Return the seconds of a backward in which nothing is recomputed. Arguments: those of `forward`."""
        attended = ATTENTION_BACKWARD * self._attended(work)
        return 2 * self._products(work, hidden) + attended + 2 * self._moved(work)

    def passes(self, work: UnitWork, hidden: int = 0, repeated: UnitWork | None = None) -> PassSeconds:
        """Return the seconds of a unit. ``repeated``: what of its forward the backward does again; None: nothing."""
        recompute, again = 0.0, 0
        if repeated is not None:
            recompute, again = self.forward(repeated, hidden), repeated.kernels
        host = work.kernels * self.calls.launch
        host_backward = self.constants["host_backward"] * host + again * self.calls.launch
        return PassSeconds(self.forward(work, hidden), self.backward(work, hidden), recompute, host, host_backward)

    def update(self, elements: float, dtypes: Dtypes, state_tensors: float) -> float:
        """Return the seconds in which an owner updates ``elements``."""
        return elements * update_bytes(dtypes, state_tensors) / self._memory

    def update_on_host(self, elements: float, dtypes: Dtypes, state_tensors: float) -> float:
        """Return the seconds in which an owner's host updates ``elements`` in its memory. The parameter is not written
        there: it is rounded where it is gathered."""
        nbytes = update_bytes(dtypes, state_tensors) - dtypes.has_master * dtypes.itemsize("param_dtype")
        return elements * nbytes / self._host_memory

    def orthogonalization(self, multiplications: float) -> float:
        """Return the seconds of Muon's Newton-Schulz iterations, at the rate of the products of the training.

        ``multiplications``: `zero.core.owners.step_work`, m m n, of the matrices. An iteration of torch.optim.Muon
        takes two products of m m n and one of m m m, at most as many: 6 m m n operations.
        """
        return NEWTON_SCHULZ * 6 * multiplications / (self._peak * self._matmul)

    def _products(self, work: UnitWork, hidden: int) -> float:
        large = hidden / (hidden + self.constants["hidden"]) if hidden else 1.0
        narrow = (work.matmul_flops - work.fp32_flops) / (self._peak * self._matmul * large)
        if not work.fp32_flops:
            return narrow
        return narrow + work.fp32_flops / (self._gpu.peak("float32") * self._gpu.sustained * self._matmul * large)

    def _moved(self, work: UnitWork) -> float:
        return work.moved_bytes / self._elementwise

    def _attended(self, work: UnitWork) -> float:
        return work.attention_flops / (self._peak * self._attention)


def update_bytes(dtypes: Dtypes, state_tensors: float) -> float:
    """Return the bytes that a fused update reads and writes for each element.

    It reads the gradient, and reads and writes weights and states: 28 for Adam in fp32. Where there are masters, it
    also writes the parameter.
    """
    master = dtypes.itemsize("master_dtype")
    parameter = dtypes.itemsize("param_dtype") if dtypes.has_master else 0
    return dtypes.itemsize("accumulate_dtype") + 2 * master * (1 + state_tensors) + parameter
