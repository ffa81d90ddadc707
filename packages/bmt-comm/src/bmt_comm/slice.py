"""The rectangle of a logical tensor that one rank holds.

ZeRO shards, ``DTensor`` ``Shard(0)``, replicas and tensor parallelism all give each rank a rectangle of a logical
tensor: a range of rows of the rank's tensor-parallel shard. Rows run along dim 0, or along dims 0 and 1 together
(packed experts). :class:`Slice` describes the rectangle and the communicators over which the rest of the tensor is
spread. :func:`slice_of` returns it for any tensor. Optimizers, norms, checkpoints and inspection use nothing else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .communicator import Communicator

SLICE_ATTRIBUTE = "bmt_slice"
"""The attribute of a tensor that holds its :class:`Slice`; :func:`slice_of` reads it."""

LAYER_ATTRIBUTE = "bmt_pipe_layer"
"""On a parameter that only one pipeline stage has: the number of its pipeline in the process, and of its layer."""

STAGE_LOCAL_ATTRIBUTE = "bmt_stage_local"
"""On a parameter: a bool, whether only the ranks of one pipeline stage have it.

A parameter without it belongs to one stage if its rows are spread over ranks of that stage (or over the single rank
that is a stage). Otherwise every stage has a copy.
"""


def is_stage_local(tensor: Tensor) -> bool:
    """Whether a parameter is marked as belonging to this pipeline stage only."""
    return bool(getattr(tensor, STAGE_LOCAL_ATTRIBUTE, False))


@dataclass(frozen=True)
class Slice:
    """Which part of a logical tensor this rank holds.

    The logical tensor of ``shape`` is first sharded along ``tp_dim`` over the tensor-parallel ranks; this rank's
    tensor-parallel shard spans ``[tp_offset, tp_offset + tp_extent)`` of that dimension. This rank holds rows
    ``[row_start, row_stop)`` of the shard, counted from the shard's first row. A 0-dim tensor is one row.

    A tensor-parallel shard has as many rows as the product of its first ``row_dims`` dimensions. With ``row_dims=2``
    a weight of packed experts, (experts, R, C), has experts × R rows of C elements, and this rank may hold a part of
    an expert. Its local tensor then has the shape (rows, C).

    A fused weight (query, key and value in one, say) has ``tp_blocks``: the lengths of its blocks along ``tp_dim``.
    Each block is sharded separately. A shard is the concatenation of the rank's parts of all blocks. The shards in rank
    order are then the logical tensor with its rows or columns in another order. Statistics do not depend on this order;
    :func:`tp_shard_of` and :func:`unshard_tp` take it into account.

    Attributes:
        shape: the global, unpadded shape.
        row_start, row_stop: the half-open range of rows of the tensor-parallel shard that this rank holds.
        row_comm: the communicator over which the rows are spread; ``None``: this rank holds all rows.
        tp_dim: the dimension that tensor-parallel ranks shard; ``None``: none.
        tp_offset, tp_extent: this rank's shard along ``tp_dim``.
        tp_comm: the communicator of the ranks that shard ``tp_dim``; ``None``: none.
        tp_blocks: the blocks of a fused weight; empty: one block.
        row_dims: the number of leading dimensions along which rows are counted.
        replicate_comm: the communicator of the replicate group, the ranks that hold the same part and have equal
            gradients; ``None``: none is known. An optimizer may divide its work among them.
    """

    shape: tuple[int, ...]
    row_start: int
    row_stop: int
    row_comm: Communicator | None = None
    tp_dim: int | None = None
    tp_offset: int = 0
    tp_extent: int = 0
    tp_comm: Communicator | None = None
    tp_blocks: tuple[int, ...] = ()
    row_dims: int = 1
    replicate_comm: Communicator | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.row_dims <= max(1, len(self.shape)):
            raise ValueError(f"row_dims={self.row_dims} is not a number of dimensions of shape {self.shape}")
        if self.tp_dim is not None:
            if not 0 <= self.tp_dim < len(self.shape):
                raise ValueError(f"tp_dim={self.tp_dim} is not a dimension of shape {self.shape}")
            if not 0 <= self.tp_offset <= self.tp_offset + self.tp_extent <= self.shape[self.tp_dim]:
                raise ValueError(
                    f"[{self.tp_offset}, {self.tp_offset + self.tp_extent}) is not a range of dimension "
                    f"{self.tp_dim} of shape {self.shape}"
                )
            if self.tp_blocks:
                ranks = 1 if self.tp_comm is None else self.tp_comm.size
                if sum(self.tp_blocks) != self.shape[self.tp_dim] or any(b % ranks for b in self.tp_blocks):
                    raise ValueError(
                        f"tp_blocks={self.tp_blocks} do not make up dimension {self.tp_dim} of shape {self.shape}, "
                        f"or cannot each be sharded over {ranks} ranks"
                    )
        rows = self.tp_shard_rows
        if not 0 <= self.row_start <= self.row_stop <= rows:
            raise ValueError(f"rows [{self.row_start}, {self.row_stop}) are not a range of {rows} rows")

    @property
    def tp_shard_shape(self) -> tuple[int, ...]:
        """The shape of this tensor-parallel rank's shard, all rows included."""
        if self.tp_dim is None:
            return self.shape
        return (*self.shape[: self.tp_dim], self.tp_extent, *self.shape[self.tp_dim + 1 :])

    @property
    def tp_shard_rows(self) -> int:
        return math.prod(self.tp_shard_shape[: self.row_dims])

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        return self.tp_shard_shape[self.row_dims :]

    @property
    def row_numel(self) -> int:
        """Elements of one row."""
        return math.prod(self.row_shape)

    @property
    def numel(self) -> int:
        """Elements that this rank holds."""
        return (self.row_stop - self.row_start) * self.row_numel

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the local tensor; of a 0-dim tensor ``()`` on the rank that holds it, and ``(0,)`` elsewhere."""
        rows = self.row_stop - self.row_start
        if not self.shape:
            return () if rows else (0,)
        return (rows, *self.row_shape)

    @property
    def offset(self) -> tuple[int, ...]:
        """The global index of the first element that this rank holds."""
        offset, row = [0] * len(self.shape), self.row_start
        for dim in reversed(range(min(self.row_dims, len(self.shape)))):
            row, offset[dim] = divmod(row, max(1, self.tp_shard_shape[dim])) if dim else (0, row)
        if self.tp_dim is not None:
            offset[self.tp_dim] += self.tp_offset
        return tuple(offset)

    @property
    def row_shard(self) -> tuple[int, int, Communicator | None]:
        """The rows that this rank holds, and the communicator over which the rows are spread."""
        return self.row_start, self.row_stop, self.row_comm

    @functools.cached_property
    def communicators(self) -> tuple[Communicator, ...]:
        """The communicators whose ranks hold different elements of this tensor, tensor-parallel ones last."""
        return tuple(c for c in (self.row_comm, self.tp_comm) if c is not None and c.size > 1)


def tp_shard_of(full: Tensor, where: Slice) -> Tensor:
    """This tensor-parallel rank's shard of a logical tensor: a view, unless ``where`` has blocks."""
    if where.tp_dim is None:
        return full
    if not where.tp_blocks or where.tp_comm is None:
        return full.narrow(where.tp_dim, where.tp_offset, where.tp_extent)
    parts = block_parts(where.tp_blocks, where.tp_comm.rank, where.tp_comm.size)
    return torch.cat([full.narrow(where.tp_dim, begin, length) for begin, _, length in parts], dim=where.tp_dim)


def block_parts(blocks: Sequence[int], rank: int, size: int) -> list[tuple[int, int, int]]:
    """The part that one of ``size`` ranks has of each block: (begin in the tensor, begin in the shard, length)."""
    lengths = [block // size for block in blocks]
    begins = zip(accumulate(blocks, initial=0), accumulate(lengths, initial=0), lengths)
    return [(block + rank * length, in_shard, length) for block, in_shard, length in begins]


def select_rows(shard: Tensor, where: Slice) -> Tensor:
    """The rows of its tensor-parallel shard that this rank holds: a view of shape ``where.local_shape``."""
    return shard.reshape(where.tp_shard_rows, *where.row_shape)[where.row_start : where.row_stop].view(
        where.local_shape
    )


def shard_of(full: Tensor, where: Slice) -> Tensor:
    """This rank's shard of a logical tensor ``full`` (shape ``where.shape``): shape ``where.local_shape``."""
    return select_rows(tp_shard_of(full, where), where)


def unshard_tp(shard: Tensor, where: Slice) -> Tensor:
    """Gather the shards along ``tp_dim``; every tensor-parallel rank gets the unsharded tensor.

    ``shard`` is this rank's shard, with all its rows or some. The range of the other dimensions must be the same on all
    tensor-parallel ranks.

    Raises:
        ValueError: a shard of several blocks is incomplete along ``tp_dim``, or ``shard`` has some of the rows along
            two dimensions, one of which is ``tp_dim``.
    """
    dim, comm = where.tp_dim, where.tp_comm
    if dim is None or comm is None or comm.size == 1:
        return shard
    if shard.dim() < len(where.shape):  # rows along two dimensions
        if dim < where.row_dims:
            raise ValueError(
                f"rows [{where.row_start}, {where.row_stop}) of a tensor of shape {where.shape}, counted along its "
                f"first {where.row_dims} dimensions, cannot be unsharded along dimension {dim}; gather the rows first"
            )
        dim -= where.row_dims - 1
    if where.tp_blocks and shard.shape[dim] != where.tp_extent:
        raise ValueError(
            f"shard has {shard.shape[dim]} of the {where.tp_extent} along dimension {dim}, which is sharded in the "
            f"blocks {where.tp_blocks}; gather its rows first"
        )
    stacked = comm.stacked(shard.detach().to(comm.device).contiguous())  # it may be in host memory
    shards = list(stacked.to(shard.device))
    if where.tp_blocks:
        parts = [p.split([n // comm.size for n in where.tp_blocks], dim=dim) for p in shards]
        shards = [part[block] for block in range(len(where.tp_blocks)) for part in parts]
    return torch.cat(shards, dim=dim)


def unsharded_slice(tensor: Tensor) -> Slice:
    """The slice of a tensor that is not sharded."""
    shape = tuple(tensor.shape)
    return Slice(shape, 0, shape[0] if shape else 1)


def is_tp_shard(value: Any) -> bool:
    """Whether it is a tensor-parallel shard of a logical tensor that bmt_zero has not sharded further."""
    where = getattr(value, SLICE_ATTRIBUTE, None) if isinstance(value, Tensor) else None
    return where is not None and where.tp_dim is not None and not hasattr(value, "handle")


def slice_of(tensor: Tensor) -> Slice:
    """The part of its logical tensor that ``tensor`` holds on this rank.

    It is the :data:`SLICE_ATTRIBUTE` of a tensor that has one. For a ``DTensor`` it follows from the placements:
    ``Replicate``, ``Shard(0)`` over one mesh dimension, and one more ``Shard`` for tensor parallelism; also those of
    FSDP2 on a tensor-parallel module. Any other tensor is not sharded.

    Raises:
        ValueError: a ``DTensor`` has other placements (``Partial``, say).
    """
    known = getattr(tensor, SLICE_ATTRIBUTE, None)
    if known is not None:
        return known
    if is_dtensor(tensor):
        dtensor: Any = tensor
        # An equal mesh has other process groups after destroy_process_group.
        key = (dist.group.WORLD, dtensor.device_mesh, dtensor.placements, tensor.shape)
        part = _slices.get(key)
        if part is None:
            part = _slices[key] = _slice_of_dtensor(tensor)
        return part
    return unsharded_slice(tensor)


def is_dtensor(tensor: Any) -> bool:
    """Whether it is a ``DTensor``. Does not import the module of ``DTensor``, which takes long."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def dtensor_like(local: Tensor, where: Slice, like: Any) -> Tensor:
    """``local``, of shape ``where.local_shape``, as a ``DTensor`` of shape ``where.shape`` on the same memory.

    Args:
        like: a ``DTensor`` whose mesh has the mesh dimensions that shard ``where``.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = like.device_mesh
    placements: list[Any] = []
    for mesh_dim, placement in enumerate(like.placements):
        is_sharded = not placement.is_replicate() and mesh.size(mesh_dim) > 1
        comm = _cached_communicator(mesh.get_group(mesh_dim), mesh.device_type) if is_sharded else None
        if comm is None:
            placements.append(Replicate())
        elif comm is where.row_comm:
            placements.append(placement)
        elif comm is where.tp_comm:
            assert where.tp_dim is not None
            placements.append(Shard(where.tp_dim))
        else:
            placements.append(Replicate())
    shape, stride = torch.Size(where.shape), torch.empty(where.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def local_tensor(tensor: Tensor) -> Tensor:
    """The plain tensor that holds this rank's part: ``to_local()`` of a ``DTensor``, else ``tensor``."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


def _slice_of_dtensor(tensor: Any) -> Slice:
    shape = tuple(tensor.shape)
    mesh = tensor.device_mesh
    sharded: list[tuple[int, Any]] = []  # (dimension, process group), in mesh order
    strided: list[tuple[int, Any, int]] = []  # (dimension, process group, split factor)
    replicated: list[Any] = []  # process groups
    for mesh_dim, placement in enumerate(tensor.placements):
        if mesh.size(mesh_dim) == 1:
            continue
        if placement.is_replicate():
            replicated.append(mesh.get_group(mesh_dim))
            continue
        dim = getattr(placement, "dim", None)
        if dim is None or placement.is_partial():
            raise ValueError(f"placement {placement} of a DTensor of shape {shape} is not a slice; redistribute it")
        # FSDP2 over tensor-parallel rows: the outer mesh dimension shards the shards of the inner one.
        if type(placement).__name__ == "_StridedShard":
            strided.append((dim, mesh.get_group(mesh_dim), placement.split_factor))
        else:
            sharded.append((dim, mesh.get_group(mesh_dim)))
    row_group, row_split_factor = None, None
    tp_group: Any = None
    tp_dim, tp_offset, tp_extent, tp_comm = None, 0, 0, None
    several = ValueError(f"placements {tensor.placements} of a DTensor of shape {shape} are not one slice")
    for dim, group, split_factor in strided:
        if dim != 0 or row_group is not None:
            raise several
        row_group, row_split_factor = group, split_factor
    # Of two placements Shard(0), the later mesh dimension shards the shards of the earlier one.
    for dim, group in reversed(sharded):
        if dim == 0 and row_group is None:
            row_group = group
        elif tp_group is None:
            tp_dim, tp_group = dim, group
        else:
            raise several
    split_before = dist.get_world_size(tp_group) if tp_dim == 0 else 1
    if row_split_factor is not None and row_split_factor != split_before:
        raise several
    device = mesh.device_type
    rows = shape[0] if shape else 1
    if tp_dim is not None:
        tp_comm = _cached_communicator(tp_group, device)
        tp_offset, stop = _chunk_range(shape[tp_dim], tp_comm.size, tp_comm.rank)
        tp_extent = stop - tp_offset
        if tp_dim == 0:
            rows = tp_extent
    start, stop, row_comm = 0, rows, None
    if row_group is not None:
        row_comm = _cached_communicator(row_group, device)
        start, stop = _chunk_range(rows, row_comm.size, row_comm.rank)
    replicate_comm = _cached_communicator(replicated[0], device) if replicated else None
    return Slice(shape, start, stop, row_comm, tp_dim, tp_offset, tp_extent, tp_comm, replicate_comm=replicate_comm)


_communicators: dict[Any, Communicator] = {}
_slices: dict[Any, Slice] = {}  # of DTensors, by world group, mesh, placements and shape


def _cached_communicator(group: Any, device_type: str) -> Communicator:
    """One communicator per process group, so that parameters which share a group compare equal."""
    communicator = _communicators.get(group)
    if communicator is None:
        device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else device_type
        communicator = _communicators[group] = Communicator(group, device)
    return communicator


def forget_communicators() -> None:
    """Drop the communicators of process groups that are about to be destroyed."""
    _communicators.clear()
    _slices.clear()


def _chunk_range(length: int, parts: int, index: int) -> tuple[int, int]:
    """The range that ``torch.chunk`` gives part ``index``; the last parts may be empty."""
    size = -(-length // parts)
    return min(index * size, length), min((index + 1) * size, length)
