"""Answers to requests: the reductions and transfers of each, for the phases of a round (see the engine's note).

The ranks that share a logical parameter form a mesh. What its owner gathers goes over the row ranks of the owner's
tensor-parallel column, and of all other columns, at once (phase 0: each column's tensor-parallel shard, to the owner's
row), and then over the tensor-parallel ranks of that row (phase 1: these shards, to the owner). The way back is the
reverse. At its end, each rank's result goes to the ranks that replicate it (phase 2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bmt_comm.slice import block_parts

from .exchange import Reduction, Transfer
from .logical_params import LogicalParam
from .requests import Broadcast, GatherToOwner, Max, Request, Scatter, Sum


class Answer:
    """To one request. For each phase in turn, the engine calls ``begin``, communicates, and calls ``end``."""

    asks: bool
    """Whether there is anything in the request."""

    def begin(self, phase: int) -> tuple[list[Reduction], list[Transfer]]:
        raise NotImplementedError

    def end(self, phase: int) -> None:
        """Take over what has been communicated."""

    def result(self) -> Sequence[Tensor | None] | Tensor | None:
        raise NotImplementedError


def answer_to(request: Request) -> Answer:
    """A new answer.

    Raises:
        TypeError: it is no request, or its values are not what it takes.
        ValueError: its lists are not equally long, or sizes are not those of its vector.
    """
    _check(request)
    if isinstance(request, Sum):
        return _Reduce(request)
    return {GatherToOwner: _GatherToOwner, Scatter: _Scatter, Broadcast: _Broadcast}[type(request)](request)


def _check(request: Request) -> None:
    sizes = request.sizes if isinstance(request, Sum) else None
    values = request.values
    if sizes is None:
        count = len(values)
    elif isinstance(values, Tensor) and values.shape == (sum(sizes),) and min(sizes, default=0) >= 0:
        count = len(sizes)
    else:
        raise ValueError(f"{type(request).__name__} has sizes for {sum(sizes)} elements, and values are no such vector")
    lengths = [count, len(request.logical_params)]
    if isinstance(request, Broadcast):
        lengths.append(len(request.shapes))
    if len(set(lengths)) > 1:
        raise ValueError(f"{type(request).__name__} has lists of {lengths} entries")


def answer_alone(request: Request) -> Any:
    """The result of a request for parameters that only this rank has. Raises what :func:`answer_to` raises."""
    _check(request)
    values = request.values
    if isinstance(request, (GatherToOwner, Scatter)):
        unsharded = isinstance(request, GatherToOwner)
        shapes = [p.where.shape if unsharded else p.where.local_shape for p in request.logical_params]
        return [None if v is None else v.reshape(shape) for v, shape in zip(values, shapes)]
    return values if isinstance(values, Tensor) else list(values)


class _Reduce(Answer):
    def __init__(self, request: Sum) -> None:
        self.asks = len(request.logical_params) > 0
        self.op = "max" if isinstance(request, Max) else "sum"
        self.groups = [logical.shard_groups(request.over) for logical in request.logical_params]
        values, self.sizes = request.values, request.sizes
        self.stacked = isinstance(values, Tensor)
        self.is_one_value = False  # all statistics together
        if not isinstance(values, Tensor):
            self.values = list(values)
        elif len(set(self.groups)) <= 1:
            self.is_one_value = True
            self.values, self.groups = [values], self.groups[:1] or [(None, None)]
        else:
            self.values = list(values if self.sizes is None else values.split(list(self.sizes)))
        for value in self.values:
            if value.dtype is not torch.float32:
                raise TypeError(f"a statistic of dtype {value.dtype} is to be reduced; statistics are float32")
        self.pending: list[tuple[int, Reduction]] = []

    def begin(self, phase: int) -> tuple[list[Reduction], list[Transfer]]:
        self.pending = [
            (i, Reduction(comm, self.op, self.values[i]))
            for i, comms in enumerate(self.groups)
            if phase < 2 and (comm := comms[phase]) is not None
        ]
        return [reduction for _, reduction in self.pending], []

    def end(self, phase: int) -> None:
        for i, reduction in self.pending:
            self.values[i] = reduction.value

    def result(self) -> Sequence[Tensor | None] | Tensor:
        if self.is_one_value:
            return self.values[0]
        if not self.stacked:
            return self.values
        return torch.stack(self.values) if self.sizes is None else torch.cat(self.values)


class _GatherToOwner(Answer):
    def __init__(self, request: GatherToOwner) -> None:
        self.asks = len(request.values) > 0
        self.logical_params = request.logical_params
        self.values: list[Tensor | None] = [
            v.reshape(p.where.row_stop - p.where.row_start, *p.where.row_shape)
            for v, p in zip(request.values, request.logical_params)
        ]
        for value, logical in zip(request.values, request.logical_params):
            if value.shape != logical.where.local_shape:
                raise ValueError(
                    f"a value of shape {tuple(value.shape)} stands for a part of shape {logical.where.local_shape}"
                )

    def begin(self, phase: int) -> tuple[list[Reduction], list[Transfer]]:
        transfers: list[Transfer] = []
        for i, logical in enumerate(self.logical_params):
            if not logical.with_owner:
                self.values[i] = None
            elif phase == 0 and logical.row_comm is not None:
                self.values[i] = self._tp_shard(logical, self.values[i], transfers)
            elif phase == 1 and logical.tp_comm is not None:
                self.values[i] = self._unsharded(logical, self.values[i], transfers)
        return [], transfers

    @staticmethod
    def _tp_shard(logical: LogicalParam, local: Tensor | None, transfers: list[Transfer]) -> Tensor | None:
        """This rank's tensor-parallel shard if it is in the owner's row."""
        comm, target = logical.row_comm, logical.owner[0]
        assert comm is not None
        assert local is not None
        if comm.rank != target:
            transfers.append(Transfer(comm, "gather", comm.rank, target, local, None))
            return None
        tp_shard = local.new_empty(logical.where.tp_shard_rows, *logical.where.row_shape)
        for source, (start, stop) in enumerate(logical.rows):
            mine = local if source == target else None
            transfers.append(Transfer(comm, "gather", source, target, mine, tp_shard[start:stop]))
        return tp_shard

    @staticmethod
    def _unsharded(logical: LogicalParam, tp_shard: Tensor | None, transfers: list[Transfer]) -> Tensor | None:
        """The logical parameter if this rank is its owner."""
        comm, target = logical.tp_comm, logical.owner[1]
        assert comm is not None
        if tp_shard is None:
            return None
        if comm.rank != target:
            for part, _ in regions(logical, comm.rank, tp_shard, None):
                transfers.append(Transfer(comm, "gather", comm.rank, target, part, None))
            return None
        unsharded = tp_shard.new_empty(logical.where.shape)
        for source in range(comm.size):
            for part, into in regions(logical, source, tp_shard if source == target else None, unsharded):
                transfers.append(Transfer(comm, "gather", source, target, part, into))
        return unsharded

    def result(self) -> list[Tensor | None]:
        return [
            value.reshape(logical.where.shape) if value is not None and logical.owned else None
            for value, logical in zip(self.values, self.logical_params)
        ]


class _Scatter(Answer):
    def __init__(self, request: Scatter) -> None:
        self.asks = len(request.values) > 0
        self.logical_params = request.logical_params
        self.dtype = request.dtype
        self.values = list(request.values)
        for value, logical in zip(self.values, self.logical_params):
            _check_owned(value, logical, logical.where.shape, request.dtype)

    def begin(self, phase: int) -> tuple[list[Reduction], list[Transfer]]:
        transfers: list[Transfer] = []
        for i, logical in enumerate(self.logical_params):
            if phase == 2:
                shape = logical.where.local_shape
                self.values[i] = _broadcast(logical, 2, "scatter", self.values[i], shape, self.dtype, transfers)
            elif not logical.with_owner:
                continue
            elif phase == 0 and logical.tp_comm is not None and logical.coordinate[0] == logical.owner[0]:
                self.values[i] = self._tp_shard(logical, self.values[i], transfers)
            elif phase == 1 and logical.row_comm is not None:
                self.values[i] = self._local(logical, self.values[i], transfers)
        return [], transfers

    def _tp_shard(self, logical: LogicalParam, unsharded: Tensor | None, transfers: list[Transfer]) -> Tensor:
        """The tensor-parallel shard of this rank, which is in the owner's row."""
        comm, source = logical.tp_comm, logical.owner[1]
        assert comm is not None
        tp_shard = torch.empty(logical.where.tp_shard_shape, dtype=self.dtype, device=logical.param.device)
        for into, part in regions(logical, comm.rank, tp_shard, unsharded):
            transfers.append(Transfer(comm, "scatter", source, comm.rank, part, into))
        if unsharded is not None:
            for target in range(comm.size):
                if target != source:
                    for _, part in regions(logical, target, None, unsharded):
                        transfers.append(Transfer(comm, "scatter", source, target, part, None))
        return tp_shard

    def _local(self, logical: LogicalParam, tp_shard: Tensor | None, transfers: list[Transfer]) -> Tensor:
        """This rank's slice."""
        comm, source = logical.row_comm, logical.owner[0]
        assert comm is not None
        where = logical.where
        shape = (where.row_stop - where.row_start, *where.row_shape)
        local = torch.empty(shape, dtype=self.dtype, device=logical.param.device)
        if comm.rank == source:
            assert tp_shard is not None
            tp_shard = tp_shard.reshape(where.tp_shard_rows, *where.row_shape)
            for target, (start, stop) in enumerate(logical.rows):
                into = local if target == source else None
                transfers.append(Transfer(comm, "scatter", source, target, tp_shard[start:stop], into))
        else:
            transfers.append(Transfer(comm, "scatter", source, comm.rank, None, local))
        return local

    def result(self) -> list[Tensor | None]:
        return [
            value.reshape(logical.where.local_shape) if value is not None else None
            for value, logical in zip(self.values, self.logical_params)
        ]


class _Broadcast(Answer):
    def __init__(self, request: Broadcast) -> None:
        self.asks = len(request.values) > 0
        self.logical_params = request.logical_params
        self.dtype = request.dtype
        self.shapes = request.shapes
        self.values = list(request.values)
        for value, logical, shape in zip(self.values, self.logical_params, self.shapes):
            _check_owned(value, logical, shape, request.dtype)

    def begin(self, phase: int) -> tuple[list[Reduction], list[Transfer]]:
        transfers: list[Transfer] = []
        for i, logical in enumerate(self.logical_params):
            along = (1, 0, 2)[phase]
            if phase < 2 and not logical.with_owner:
                continue
            if phase == 0 and logical.coordinate[0] != logical.owner[0]:
                continue
            shape = self.shapes[i]
            self.values[i] = _broadcast(logical, along, "broadcast", self.values[i], shape, self.dtype, transfers)
        return [], transfers

    def result(self) -> list[Tensor | None]:
        return self.values


def _broadcast(
    logical: LogicalParam,
    along: int,
    op: str,
    value: Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    transfers: list[Transfer],
) -> Tensor | None:
    """``value`` on the ranks at the owner's place along a mesh dimension. On the others, memory that receives it."""
    comm, source = logical.mesh[along], logical.owner[along]
    if comm is None:
        return value
    if comm.rank != source:
        value = torch.empty(shape, dtype=dtype, device=logical.param.device)
        transfers.append(Transfer(comm, op, source, comm.rank, None, value))
    else:
        transfers += [Transfer(comm, op, source, t, value, None) for t in range(comm.size) if t != source]
    return value


def regions(
    logical: LogicalParam, tp_rank: int, tp_shard: Tensor | None, unsharded: Tensor | None
) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Views of a tensor-parallel rank's shard, and of the same elements of the unsharded tensor: a pair per block."""
    where, dim = logical.where, logical.where.tp_dim
    assert dim is not None
    offset, extent = logical.tp_ranges[tp_rank]
    blocks = [(offset, 0, extent)]
    if where.tp_blocks:
        blocks = block_parts(where.tp_blocks, tp_rank, len(logical.tp_ranges))
    shard_shape = (*where.shape[:dim], extent, *where.shape[dim + 1 :])
    for in_unsharded, in_shard, length in blocks:
        yield (
            None if tp_shard is None else tp_shard.reshape(shard_shape).narrow(dim, in_shard, length),
            None if unsharded is None else unsharded.narrow(dim, in_unsharded, length),
        )


def _check_owned(value: Tensor | None, logical: LogicalParam, shape: Sequence[int], dtype: torch.dtype) -> None:
    if (value is not None) != logical.owned:
        raise ValueError(
            f"parameter {logical.index} has {'no value' if value is None else 'a value'} on a rank that is "
            f"{'' if logical.owned else 'not '}its owner"
        )
    if value is not None and (tuple(value.shape) != tuple(shape) or value.dtype is not dtype):
        raise ValueError(
            f"what the owner of parameter {logical.index} has is {value.dtype} of shape {tuple(value.shape)}; "
            f"{dtype} of shape {tuple(shape)} was announced"
        )
