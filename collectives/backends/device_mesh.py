"""The ranks of a torch `DeviceMesh` as a group.

Torch makes a process group for each dimension of a mesh. Two dimensions together have none, and a new one would need a
call of every process of the job, which may not all be in the mesh. So these ranks send their messages in the job's own
group. The number of a rank is its place in the mesh, row by row:

    mesh (replicate 2, shard 2)    [[1, 5],    rank 0 is process 1, rank 1 is process 5,
                                    [3, 7]]    rank 2 is process 3, rank 3 is process 7

Knows: meshes, which hold global ranks. Does not know: what is sharded, buckets, optimizers.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..messages import Kind, Tag
from ..transport import Transport
from .gloo import GlooBackend, GroupsOfMesh, connect, timeout_of
from .threads import solo

_DIMENSIONS = (
    'the dimension that shards, as in mesh["dp"], or those that replicate and shard, as in mesh["dp_replicate", '
    '"dp_shard"]'
)


@dataclass(frozen=True)
class MeshPlace:
    """The dimensions of a mesh, and the place of this rank in the larger mesh of which it is a part.

    Attributes:
        names: of the dimensions, one (shard) or two (replicate, shard); their positions if they have none.
        shape: the ranks of each.
        part: the name, this rank's coordinate and the size of each dimension of more than one rank that the mesh leaves
            out; those of model parallelism.
        groups: for each of these, the process group of this rank along it.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    part: tuple[tuple[str, int, int], ...]
    groups: tuple[dist.ProcessGroup, ...] = field(default=(), repr=False, compare=False)

    @property
    def shard_ranks(self) -> int:
        """The number of ranks that share one copy."""
        return self.shape[-1]

    def __str__(self) -> str:
        return "mesh (" + ", ".join(f"{name} {size}" for name, size in zip(self.names, self.shape, strict=True)) + ")"


def place_in(mesh: DeviceMesh) -> MeshPlace:
    """Check a mesh, and return this rank's place in it. Local.

    Raises:
        TypeError: it is no `DeviceMesh`.
        ValueError: it has more than two dimensions, this process is not one of its ranks, or ranks along a dimension
            descend.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch.distributed.device_mesh.DeviceMesh, not {mesh!r:.100}")
    named = _names(mesh)
    if mesh.ndim not in (1, 2):
        raise ValueError(f"mesh has {mesh.ndim} dimensions ({', '.join(named)}): pass {_DIMENSIONS}")
    if mesh.get_coordinate() is None:
        raise ValueError("this process is not a rank of the mesh: build the optimizer on the mesh's ranks alone")
    for dimension, name in enumerate(named):
        if mesh.mesh.shape[dimension] > 1 and bool((mesh.mesh.diff(dim=dimension) < 0).any()):
            raise ValueError(
                f"the ranks of the mesh descend along {name}, {mesh.mesh.tolist()}, but torch numbers a group's ranks "
                "in ascending order: make a mesh whose ranks ascend along each dimension"
            )
    return MeshPlace(named, tuple(mesh.mesh.shape), *_part(mesh))


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or tuple(f"dim{number}" for number in range(mesh.ndim))


def _part(mesh: DeviceMesh) -> tuple[tuple[tuple[str, int, int], ...], tuple[dist.ProcessGroup, ...]]:
    """See `MeshPlace.part` and `MeshPlace.groups`."""
    root: DeviceMesh = getattr(mesh, "_root_mesh", None) or mesh
    place = root.get_coordinate()
    if place is None:
        return (), ()
    among: Tensor = torch.isin(root.mesh, mesh.mesh).nonzero()  # coordinates in the root of each rank of the mesh
    sizes, names = root.mesh.shape, _names(root)
    left_out = [d for d, size in enumerate(sizes) if size > 1 and bool((among[:, d] == place[d]).all())]
    return tuple((names[d], place[d], sizes[d]) for d in left_out), tuple(root.get_group(d) for d in left_out)


def connect_mesh(mesh: DeviceMesh) -> Transport:
    """Return the transport of the ranks of a mesh, numbered row by row. Collective.

    Raises `ValueError` on every rank if the ranks were given different meshes.
    """
    ranks: list[int] = mesh.mesh.flatten().tolist()
    if len(ranks) == 1:
        return solo()
    if mesh.ndim == 1 or 1 in mesh.shape:
        return connect(mesh.get_group(0 if mesh.ndim == 1 else 1 - mesh.shape.index(1)))
    rows: list[list[int]] = mesh.mesh.tolist()
    columns = zip(*rows, strict=True)
    known = {_key(rows): mesh.get_group(1), _key(columns): mesh.get_group(0)}
    group = dist.group.WORLD
    assert group is not None, "there is a mesh"
    backend = GlooBackend(group, timeout_of(group), of_mesh=GroupsOfMesh(sorted(ranks), known))
    transport = Transport(backend, ranks, zlib.crc32(str(sorted(ranks)).encode()) & 0xFFFFFF)
    texts = transport.exchange(str(rows).encode(), Tag(Kind.EXCHANGE, "comparing meshes"))
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise ValueError(
                f"the ranks have different meshes: rank 0 {texts[0].decode()}, rank {rank} {text.decode()}"
            )
    return transport


def _key(parts: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, parts))
