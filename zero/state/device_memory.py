"""The memory of one optimizer on its device, which moves to the host between two steps, and back.

    offload    copy every storage to the host, agree; then each tensor becomes a view of the copy, and memory is free
    reload     copy them to the device, agree; then the same

Nothing has changed before all ranks have agreed. Views of one storage stay views of one storage. While the memory is on
the host, parameters are released, so that no use of them can crash or return an old number.

Knows: which objects hold tensors of a device. Does not know: when ranks agree, steps.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from collectives import Kind, Tag, Transport

from ..core.layout import ParameterSpec
from ..core.parameter_specs import as_plain
from ..parameters.gathered.units import nan_like
from ..parameters.released import released_class, weakly
from ..parameters.resident_units import ResidentBuffer
from ..parameters.storage import ParameterStorage
from ..runtime.bucket import Bucket
from ..runtime.flat_buffer import Move, usable_later
from ..runtime.offload import HostOffload
from ..runtime.streams import Streams
from .average import Averages

OFFLOADED = (
    "optimizer.offload() has moved parameters and states to the host: all ranks call optimizer.reload() before the "
    "model or the optimizer is used"
)


def is_on_device(tensor: Tensor) -> bool:
    """Return whether a tensor has to be moved to be in the host's memory."""
    return tensor.device.type not in ("cpu", "meta")


class _Holder(Protocol):
    def apply(self, move: Move) -> None: ...


_Pair = tuple[Tensor, Tensor]  # a storage, as bytes, and its copy


def _address(pair: _Pair) -> int:
    return pair[0].data_ptr()


class DeviceMemory:
    """All that one optimizer holds on devices on this rank, but for gradients. Nothing here is collective."""

    def __init__(
        self,
        storage: ParameterStorage,
        averages: Averages,
        transport: Transport,
        shard_group: Transport,
        streams: Streams,
    ) -> None:
        self._storage, self._averages, self._transport, self._streams = storage, averages, transport, streams
        self._pools = transport.pool, shard_group.pool
        self._rooms: dict[torch.device, HostOffload] = {}  # kept for the next time
        self._pairs: Sequence[_Pair] = []  # of a move under way, by address
        self._kept: list[tuple[Tensor, torch.device]] = []  # the copies on the host, and whence they came
        self._bases: list[tuple[Tensor, type[Tensor]]] = []  # parameters of stages 0 to 2, and their own classes
        self._offloaded = False

    def copy_to_host(self) -> str | None:
        """Copy all memory to the host; nothing else changes. Return an error's text if there is no room. Local."""
        try:
            with usable_later(), torch.no_grad():
                self._pairs = [*self._to_host()]
        except (RuntimeError, ValueError) as error:
            return f"offload(): {error}"
        return None

    def offload(self) -> None:
        """Let each tensor be a view of its copy, and free the device's memory. Local, after `copy_to_host`."""
        with usable_later(), torch.no_grad():
            self._wait()
            self._swap()
            self._release()
        self._free_pools()
        self._pairs, self._offloaded = [], True
        self._streams.refuse(OFFLOADED)

    def reload(self) -> None:
        """Undo `offload`. Collective. Raises `RuntimeError` on every rank if there is no room on one."""
        if not self._offloaded:
            return
        problem, copies = "", list[_Pair]()
        try:
            copies = self._to_device()
        except RuntimeError as error:  # out of memory
            problem = str(error)
        for rank, text in enumerate(self._transport.exchange(problem.encode(), Tag(Kind.EXCHANGE, "reload()"))):
            if text:
                raise RuntimeError(
                    f"reload(): rank {rank}: {text.decode()}; all is on the host still: free memory of the device, and "
                    "call reload() again"
                )
        self._reload(copies)

    def reload_alone(self) -> None:
        """Undo `offload` on this rank, if need be. Local."""
        if self._offloaded:
            self._reload(self._to_device())

    def forget(self) -> None:
        """Let go of copies that are not used, and of the host's memory for them. Local."""
        self._pairs = []
        self._rooms.clear()

    def _reload(self, copies: Sequence[_Pair]) -> None:
        self._pairs = copies
        with usable_later(), torch.no_grad():
            self._swap()
            self._recall()
        self._pairs, self._kept, self._offloaded = [], [], False
        self._streams.allow()
        self._streams.wait_for_previous()  # work on other streams waits for the copies, which are on this one

    # -- copies -------------------------------------------------------------------------------------------------------

    def _to_host(self) -> Iterator[_Pair]:
        found: dict[torch.device, dict[int, Tensor]] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if is_on_device(tensor) and storage.nbytes():
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                found.setdefault(tensor.device, {})[storage.data_ptr()] = whole.set_(storage)
            return tensor

        for holder in self._holders():
            holder.apply(note)
        for device, storages in found.items():
            wanted = [(whole.numel(), torch.uint8) for whole in storages.values()]
            room = self._rooms.get(device)
            if room is None or not room.start_over(wanted):
                self._rooms.pop(device, None)
                self._rooms[device] = room = HostOffload(device)
                room.reserve(wanted)
            for whole in storages.values():
                yield whole, room.empty(whole.numel(), torch.uint8).copy_(whole, non_blocking=True)

    @torch.no_grad()
    def _to_device(self) -> list[_Pair]:
        with usable_later():
            return [(kept, torch.empty_like(kept, device=d).copy_(kept, non_blocking=True)) for kept, d in self._kept]

    def _wait(self) -> None:
        for device in {source.device for source, _ in self._pairs if source.device.type != "cpu"}:
            torch.accelerator.synchronize(device)  # host synchronisation: any stream may use what is freed now

    def _swap(self) -> None:
        """Let each tensor be a view of its copy."""
        self._pairs = sorted(self._pairs, key=_address)
        for holder in self._holders():
            holder.apply(self._moved)
        self._kept = [(copy, source.device) for source, copy in self._pairs]

    def _moved(self, tensor: Tensor) -> Tensor:
        """Return the same elements of the copy, with the same shape and strides; the tensor itself if it stays."""
        if not tensor.numel():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        at = bisect.bisect_right(self._pairs, tensor.data_ptr(), key=_address) - 1
        if at < 0:
            return tensor
        source, copy = self._pairs[at]
        offset = tensor.data_ptr() - source.data_ptr()
        if offset >= source.numel():
            return tensor
        begin = (copy.storage_offset() + offset) // tensor.itemsize
        made = torch.empty(0, dtype=tensor.dtype, device=copy.device)
        return made.set_(copy.untyped_storage(), begin, tensor.shape, tensor.stride())

    def _holders(self) -> Iterator[_Holder]:
        """Yield each object that holds tensors of the device."""
        yield from self._storage.buckets
        yield from self._storage.unlisted_buckets()
        yield from () if self._storage.manager is None else self._storage.manager.buffers()
        yield from self._averages.by_name.values()

    def _free_pools(self) -> None:
        manager = self._storage.manager
        for pool in (*self._pools, *(() if manager is None else (manager.gathered.pool,))):
            pool.trim()
        if manager is not None:
            manager.edits.forget_memory()

    # -- parameters ---------------------------------------------------------------------------------------------------

    def _release(self) -> None:
        """Release each parameter that is a view of memory that has moved."""
        manager = self._storage.manager
        if manager is None:
            for bucket in self._storage.buckets:
                self._release_whole(bucket)
            return
        with as_plain():
            for buffer in manager.buffers():
                if isinstance(buffer, ResidentBuffer) and buffer.common is None and self._pairs:
                    dtype = buffer.bucket.dtypes.param_dtype
                    buffer.set_data(nan_like(parameter, dtype) for parameter in buffer.parameters)

    def _release_whole(self, bucket: Bucket) -> None:
        for parameter in bucket.parameters:
            base = type(parameter)
            if self._pairs:
                parameter.data = nan_like(parameter, bucket.spec.dtypes.param_dtype)
            parameter.__class__ = released_class(base, weakly(self._spec_of), weakly(self._refuse))
            self._bases.append((parameter, base))

    def _recall(self) -> None:
        """Undo `_release`."""
        for parameter, base in self._bases:
            parameter.__class__ = base
        self._bases = []
        manager = self._storage.manager
        for bucket in self._storage.buckets if manager is None else ():
            for parameter, slot, spec in zip(bucket.parameters, bucket.spec.slots, bucket.specs, strict=True):
                parameter.data = bucket.weights.slot(slot, spec)
        if manager is None:
            return
        with as_plain():
            for buffer in manager.buffers():
                if isinstance(buffer, ResidentBuffer) and buffer.common is None and self._pairs:
                    buffer.put_unsharded()

    def _spec_of(self, parameter: Tensor) -> ParameterSpec | None:
        return self._storage.layout.parameters[self._storage.index(parameter)]

    def _refuse(self, parameter: Tensor) -> NoReturn:
        spec = self._spec_of(parameter)
        raise RuntimeError(f"{'a parameter' if spec is None else repr(spec.name)} is on the host: {OFFLOADED}")
