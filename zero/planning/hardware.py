"""Hardware as data: GPUs, how a cluster joins them, and how well collectives use the links.

Presets lie in ``hardware.json``, each value with its unit and its source. A file with the same shape, its date and its
machine describes measured hardware.

    gpus        memory, its bandwidth, peaks by dtype, links inside a host, network of a host, GPUs a host
    fabrics     seconds for each rank of a ring that spans hosts: a property of the network, not of the GPU
    network     what collectives make of the links
    host        what the host's calls take

Knows: files of hardware, and the text that names a cluster. Does not know: models, schedules.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

PRESETS = Path(__file__).with_name("hardware.json")
FORMAT = 1

UNITS: Mapping[str, tuple[str, float]] = {
    "1": ("number", 1.0),
    "GPUs": ("number", 1.0),
    "GiB": ("bytes", float(1 << 30)),
    "GB": ("bytes", 1e9),
    "GB/s": ("bytes a second", 1e9),
    "TB/s": ("bytes a second", 1e12),
    "Gb/s": ("bytes a second", 1e9 / 8),
    "TFLOP/s": ("operations a second", 1e12),
    "us": ("seconds", 1e-6),
    "ms": ("seconds", 1e-3),
}
"""What a unit measures, and how much of the base unit it is."""

Seconds = Annotated[float, "seconds"]


@dataclass(frozen=True)
class Accelerator:
    """A GPU, or a rank of a CPU. The text in a type is what the unit of a file's value measures.

    Attributes:
        name: its name in the file.
        family: its architecture, by which constants of its efficiency are found.
        memory, memory_bandwidth: its own.
        flops: peak operations a second of dense products, by the name of the dtype.
        link: to others of its domain (NVLink; PCIe without it).
        host_link: to the host's memory.
        per_host: how many a host has, unless the cluster says otherwise.
        domain: how many are joined by links of this speed.
        efficiency: measured shares of the peaks, by "matmul", "attention" or "memory"; empty in the presets.
        nic: of a host into the network; None if there is no typical value.
        sustained: share of the peaks that it sustains.
        host_memory: in which the host reads and writes its memory for one of its GPUs; None: as ``host_link``.
    """

    name: str
    family: str
    memory: Annotated[float, "bytes"]
    memory_bandwidth: Annotated[float, "bytes a second"]
    flops: Mapping[str, float]
    link: Annotated[float, "bytes a second"]
    host_link: Annotated[float, "bytes a second"]
    per_host: Annotated[int, "number"]
    domain: Annotated[int, "number"]
    efficiency: Mapping[str, float]
    nic: Annotated[float | None, "bytes a second"] = None
    sustained: Annotated[float, "number"] = 1.0
    host_memory: Annotated[float | None, "bytes a second"] = None

    def peak(self, dtype: str) -> float:
        """Return the peak of products of this dtype. Raises `ValueError` if the GPU has none."""
        if dtype not in self.flops:
            known = ", ".join(sorted(self.flops))
            raise ValueError(f"GPU {self.name!r} has no products of {dtype}: choose one of {known}")
        return self.flops[dtype]


@dataclass(frozen=True)
class Network:
    """What collectives make of the links.

    Attributes:
        ring_step: seconds that a ring spends for each rank if it spans hosts (the fabric).
        link_efficiency: the share of `Accelerator.link` that a ring reaches inside a host.
        nic_efficiency: the share of `Accelerator.nic` that is reached.
        base: seconds of the smallest collective.
        hop_inside: seconds that a ring spends for each rank inside a host.
        doorbell: seconds for each rank of a host until all of them know that shared memory was written.
    """

    ring_step: float
    link_efficiency: Annotated[float, "number"]
    nic_efficiency: Annotated[float, "number"]
    base: Seconds
    hop_inside: Seconds
    doorbell: Seconds


@dataclass(frozen=True)
class HostCalls:
    """Seconds of the host in which it issues a step: Python, torch's operators and launches.

    Attributes:
        launch: of a kernel of the model's forward, the call of its module included.
        unit: of the hooks of a gathered unit in a forward or a backward.
        parameter: of a parameter's hook in a backward.
        bucket: of a bucket's gradients, which are taken and copied side by side.
        exchange: of a bucket's reduction among several ranks, with its sum.
        gather: of an all-gather of a bucket.
        release: of a bucket that was gathered for a unit.
        update: of a bucket in the clip and in the step.
        step: of a clip and a step, without what each bucket adds.
    """

    launch: Seconds
    unit: Seconds
    parameter: Seconds
    bucket: Seconds
    exchange: Seconds
    gather: Seconds
    release: Seconds
    update: Seconds
    step: Seconds


@dataclass(frozen=True)
class Cluster:
    """Hosts with equally many GPUs. Ranks are numbered host by host.

    ``nic``: bytes a second that a host sends into the network; 0 if there is one host without a network.
    """

    gpu: Accelerator
    per_host: int
    hosts: int
    nic: float
    network: Network
    calls: HostCalls

    @property
    def ranks(self) -> int:
        return self.per_host * self.hosts

    @property
    def per_domain(self) -> int:
        """The number of ranks that are joined by `Accelerator.link`. A domain of a rack has several hosts."""
        if self.gpu.domain <= self.gpu.per_host:
            return self.per_host
        return min(max(self.gpu.domain // self.per_host, 1), self.hosts) * self.per_host


@dataclass(frozen=True)
class Hardware:
    """All that a file of hardware describes.

    Attributes:
        gpus: by name.
        fabrics: seconds for each rank of a ring that spans hosts, by name.
        network: see `Network`; its ``ring_step`` is that of the fabric "typical".
        calls: see `HostCalls`.
        measured: date and machine; empty for presets.
    """

    gpus: Mapping[str, Accelerator]
    fabrics: Mapping[str, float]
    network: Network
    calls: HostCalls
    measured: str = ""

    def cluster(self, text: str, *, nic: float | None = None, fabric: str = "typical") -> Cluster:
        """Return the cluster that ``text`` names: GPU, GPUs a host and hosts, as in "h100:8x16".

        "h100:8" is one host of 8, "h100" one host as it is usual.

        Args:
            text: the name.
            nic: Gb/s that a host sends into the network; None means what is usual for so many GPUs.
            fabric: the name of a fabric.

        Raises:
            ValueError: an unknown name, a number below 1, or several hosts without a network.
        """
        name, _, shape = text.strip().lower().partition(":")
        if name not in self.gpus:
            raise ValueError(f"no GPU is called {name!r}{_nearest(name, self.gpus)}")
        gpu = self.gpus[name]
        match = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", shape)
        if shape and match is None:
            raise ValueError(f"cluster {text!r}: give GPU:GPUS_PER_HOST, or GPU:GPUS_PER_HOSTxHOSTS as in {name}:8x16")
        per_host, hosts = (int(match[1]), int(match[2] or 1)) if match else (gpu.per_host, 1)
        if fabric not in self.fabrics:
            raise ValueError(f"no fabric is called {fabric!r}{_nearest(fabric, self.fabrics)}")
        if nic is not None and not (math.isfinite(nic) and nic > 0):
            raise ValueError(f"nic={nic!r}: give the Gb/s that a host sends into the network, above 0")
        usual = (gpu.nic or 0.0) * per_host / gpu.per_host  # a larger host has as much for each GPU
        bandwidth = usual if nic is None else nic * UNITS["Gb/s"][1]
        if hosts > 1 and not bandwidth:
            raise ValueError(
                f"{hosts} hosts of {gpu.name!r}, and no network is usual for it: give the Gb/s of a host (--nic)"
            )
        network = replace(self.network, ring_step=self.fabrics[fabric])
        return Cluster(gpu, per_host, hosts, bandwidth, network, self.calls)


def presets() -> Hardware:
    """Return the hardware that the library knows."""
    return read_hardware(PRESETS)


def read_hardware(path: Path | str) -> Hardware:
    """Read a file of hardware. What a measured file leaves out comes from the presets.

    Raises `ValueError`, which names the file and the place, if something is missing, unknown or not a number.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"hardware file {path}: cannot be read as JSON: {error}") from error
    try:
        return hardware_of(data, None if path == PRESETS else presets())
    except ValueError as error:
        raise ValueError(f"hardware file {path}: {error}") from error


def hardware_of(data: Any, before: Hardware | None) -> Hardware:
    """Return the hardware that parsed JSON describes. ``before`` has what it leaves out; None: nothing is left out."""
    top = _mapping(data, "the file", {"format", "fabrics", "network", "host", "gpus", "date", "machine"})
    if top.get("format") != FORMAT:
        raise ValueError(f"format is {top.get('format')!r}, and this version reads {FORMAT}")
    measured = ""
    if before is not None:
        missing = [key for key in ("date", "machine") if not isinstance(top.get(key), str) or not top[key].strip()]
        if missing:
            raise ValueError(f"{' and '.join(missing)} of the measurement missing: write them as text")
        measured = f"{top['machine']}, {top['date']}"
    gpus = {name: _accelerator(name, each) for name, each in _mapping(top.get("gpus", {}), "gpus").items()}
    fabrics = _mapping(top.get("fabrics", {}), "fabrics")
    fabrics = _values(fabrics, "fabrics", dict.fromkeys(fabrics, "seconds"))
    network, calls = (
        _values(_mapping(top.get(name, {}), name, set(kinds)), name, kinds)
        for name, kinds in (("network", _kinds(Network)), ("host", _kinds(HostCalls)))
    )
    if before is not None:
        gpus, fabrics = {**before.gpus, **gpus}, {**before.fabrics, **fabrics}
        network, calls = asdict(before.network) | network, asdict(before.calls) | calls
    network["ring_step"] = fabrics["typical"]
    return Hardware(gpus, fabrics, Network(**network), HostCalls(**calls), measured)


def _kinds(record: type[Any]) -> dict[str, str]:
    """Return what the values of a record measure that a file gives."""
    hints = get_type_hints(record, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}


def _accelerator(name: str, data: Any) -> Accelerator:
    place, kinds = f"gpus.{name}", _kinds(Accelerator)
    given = _mapping(data, place, {"family", "flops", "efficiency", *kinds})
    needed = {each.name for each in fields(Accelerator) if each.default is MISSING}
    missing = [key for key in ("family", "flops", *(kind for kind in kinds if kind in needed)) if key not in given]
    if missing:
        raise ValueError(f"{place}: {', '.join(missing)} missing")
    if not isinstance(given["family"], str):
        raise ValueError(f"{place}.family must be text, not {given['family']!r}")
    known: dict[str, Any] = _values(given, place, kinds)
    flops, efficiency = given["flops"], given.get("efficiency", {})
    _mapping(efficiency, f"{place}.efficiency", {"matmul", "attention", "memory"})
    return Accelerator(
        name=name,
        family=given["family"],
        flops=_values(flops, f"{place}.flops", dict.fromkeys(flops, "operations a second")),
        efficiency=_values(efficiency, f"{place}.efficiency", dict.fromkeys(efficiency, "number")),
        **known | {key: round(known[key]) for key in ("per_host", "domain")},
    )


def _values(data: Any, place: str, kinds: Mapping[str, str]) -> dict[str, float]:
    """Return those of these values that ``data`` has."""
    return {key: _value(data[key], f"{place}.{key}", kind) for key, kind in kinds.items() if key in data}


def _mapping(data: Any, place: str, known: set[str] | None = None) -> Mapping[str, Any]:
    """Return ``data`` if it is an object whose keys are all ``known``."""
    if not isinstance(data, dict):
        raise ValueError(f"{place} must be an object, not {type(data).__name__}")
    for key in data:
        if known is not None and key not in known:
            raise ValueError(f"{place} has an unknown key {key!r}{_nearest(key, known)}")
    return data


def _value(data: Any, place: str, kind: str) -> float:
    """Return a value in base units. It must have a unit of this kind and a source."""
    if not isinstance(data, dict) or set(data) != {"value", "unit", "source"}:
        raise ValueError(f'{place} must be an object of "value", "unit" and "source"')
    value, unit, source = data["value"], data["unit"], data["source"]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{place}: the value must be a number above 0, not {value!r}")
    if not isinstance(unit, str) or UNITS.get(unit, ("", 0.0))[0] != kind:
        fitting = ", ".join(name for name, (measures, _) in UNITS.items() if measures == kind)
        raise ValueError(f"{place}: the unit must be one of {fitting}, not {unit!r}")
    if not isinstance(source, str) or not source.strip():
        raise ValueError(f"{place}: a value needs a source")
    return float(value) * UNITS[unit][1]


def _nearest(name: str, known: Mapping[str, Any] | set[str]) -> str:
    """Return the end of an error: the nearest known name, or all of them."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f": did you mean {close[0]!r}?" if close else f": choose one of {', '.join(sorted(known))}"
