"""Answers to requests: what each needs to be reduced or moved in the phases of a round (see the engine's note).

A matrix's ranks form a grid. What its owner assembles goes over the rows of the owner's tensor-parallel column and
all others at once (phase 0: each column's piece, to the owner's row), and then over the tensor-parallel ranks of
that row (phase 1: the pieces, to the owner). The way back is the reverse. At its end what a rank has got goes to the
ranks that replicate it (phase 2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .exchange import Reduction, Transfer
from .matrix import Matrix
from .requests import Max, Own, Request, Return, Share, Sum


class Answer:
    """To one request. The engine calls ``begin``, communicates, and calls ``end``, for one phase after the other."""

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
    return {Own: _Own, Return: _Return, Share: _Share}[type(request)](request)


def _check(request: Request) -> None:
    sizes = request.sizes if isinstance(request, Sum) else None
    values = request.values
    if sizes is None:
        count = len(values)
    elif isinstance(values, Tensor) and values.shape == (sum(sizes),) and min(sizes, default=0) >= 0:
        count = len(sizes)
    else:
        raise ValueError(f"{type(request).__name__} has sizes for {sum(sizes)} elements, and values are no such vector")
    lengths = [count, len(request.matrices)]
    if isinstance(request, Share):
        lengths.append(len(request.shapes))
    if len(set(lengths)) > 1:
        raise ValueError(f"{type(request).__name__} has lists of {lengths} entries")


def answer_alone(request: Request) -> Any:
    """The result of a request for matrices that this rank shares with nobody. Raises what :func:`answer_to` raises."""
    _check(request)
    values = request.values
    if isinstance(request, (Own, Return)):
        whole = isinstance(request, Own)
        shapes = [m.where.shape if whole else m.where.local_shape for m in request.matrices]
        return [None if v is None else v.reshape(shape) for v, shape in zip(values, shapes)]
    return values if isinstance(values, Tensor) else list(values)


class _Reduce(Answer):
    def __init__(self, request: Sum) -> None:
        self.asks = len(request.matrices) > 0
        self.op = "max" if isinstance(request, Max) else "sum"
        self.comms = [matrix.cut_along(request.over) for matrix in request.matrices]
        values, self.sizes = request.values, request.sizes
        self.stacked = isinstance(values, Tensor)
        self.whole = False  # whether all statistics are one value
        if not isinstance(values, Tensor):
            self.values = list(values)
        elif len(set(self.comms)) <= 1:
            self.whole = True
            self.values, self.comms = [values], self.comms[:1] or [(None, None)]
        else:
            self.values = list(values if self.sizes is None else values.split(list(self.sizes)))
        for value in self.values:
            if value.dtype is not torch.float32:
                raise TypeError(f"a statistic of dtype {value.dtype} is to be reduced; statistics are float32")
        self.pending: list[tuple[int, Reduction]] = []

    def begin(self, phase: int) -> tuple[list[Reduction], list[Transfer]]:
        self.pending = [
            (i, Reduction(comm, self.op, self.values[i]))
            for i, comms in enumerate(self.comms)
            if phase < 2 and (comm := comms[phase]) is not None
        ]
        return [reduction for _, reduction in self.pending], []

    def end(self, phase: int) -> None:
        for i, reduction in self.pending:
            self.values[i] = reduction.value

    def result(self) -> Sequence[Tensor | None] | Tensor:
        if self.whole:
            return self.values[0]
        if not self.stacked:
            return self.values
        return torch.stack(self.values) if self.sizes is None else torch.cat(self.values)


class _Own(Answer):
    def __init__(self, request: Own) -> None:
        self.asks = len(request.values) > 0
        self.matrices = request.matrices
        self.values: list[Tensor | None] = [
            v.reshape(m.where.row_stop - m.where.row_start, *m.where.row_shape)
            for v, m in zip(request.values, request.matrices)
        ]
        for value, matrix in zip(request.values, request.matrices):
            if value.shape != matrix.where.local_shape:
                raise ValueError(
                    f"a value of shape {tuple(value.shape)} stands for a part of shape {matrix.where.local_shape}"
                )

    def begin(self, phase: int) -> tuple[list[Reduction], list[Transfer]]:
        transfers: list[Transfer] = []
        for i, matrix in enumerate(self.matrices):
            if not matrix.with_owner:
                self.values[i] = None
            elif phase == 0 and matrix.row_comm is not None:
                self.values[i] = self._piece(matrix, self.values[i], transfers)
            elif phase == 1 and matrix.tp_comm is not None:
                self.values[i] = self._whole(matrix, self.values[i], transfers)
        return [], transfers

    @staticmethod
    def _piece(matrix: Matrix, local: Tensor | None, transfers: list[Transfer]) -> Tensor | None:
        """This rank's piece where it is in the owner's row."""
        comm, target = matrix.row_comm, matrix.owner[0]
        assert comm is not None
        assert local is not None
        if comm.rank != target:
            transfers.append(Transfer(comm, "own", comm.rank, target, local, None))
            return None
        piece = local.new_empty(matrix.where.tp_shard_rows, *matrix.where.row_shape)
        for source, (start, stop) in enumerate(matrix.rows):
            mine = local if source == target else None
            transfers.append(Transfer(comm, "own", source, target, mine, piece[start:stop]))
        return piece

    @staticmethod
    def _whole(matrix: Matrix, piece: Tensor | None, transfers: list[Transfer]) -> Tensor | None:
        """The matrix where this rank is the owner."""
        comm, target = matrix.tp_comm, matrix.owner[1]
        assert comm is not None
        if piece is None:
            return None
        if comm.rank != target:
            for part, _ in regions(matrix, comm.rank, piece, None):
                transfers.append(Transfer(comm, "own", comm.rank, target, part, None))
            return None
        whole = piece.new_empty(matrix.where.shape)
        for source in range(comm.size):
            for part, into in regions(matrix, source, piece if source == target else None, whole):
                transfers.append(Transfer(comm, "own", source, target, part, into))
        return whole

    def result(self) -> list[Tensor | None]:
        return [
            value.reshape(matrix.where.shape) if value is not None and matrix.owned else None
            for value, matrix in zip(self.values, self.matrices)
        ]


class _Return(Answer):
    def __init__(self, request: Return) -> None:
        self.asks = len(request.values) > 0
        self.matrices = request.matrices
        self.dtype = request.dtype
        self.values = list(request.values)
        for value, matrix in zip(self.values, self.matrices):
            _check_owned(value, matrix, matrix.where.shape, request.dtype)

    def begin(self, phase: int) -> tuple[list[Reduction], list[Transfer]]:
        transfers: list[Transfer] = []
        for i, matrix in enumerate(self.matrices):
            if phase == 2:
                shape = matrix.where.local_shape
                self.values[i] = _broadcast(matrix, 2, "return", self.values[i], shape, self.dtype, transfers)
            elif not matrix.with_owner:
                continue
            elif phase == 0 and matrix.tp_comm is not None and matrix.place[0] == matrix.owner[0]:
                self.values[i] = self._piece(matrix, self.values[i], transfers)
            elif phase == 1 and matrix.row_comm is not None:
                self.values[i] = self._local(matrix, self.values[i], transfers)
        return [], transfers

    def _piece(self, matrix: Matrix, whole: Tensor | None, transfers: list[Transfer]) -> Tensor:
        """This rank's piece, in the owner's row."""
        comm, source = matrix.tp_comm, matrix.owner[1]
        assert comm is not None
        piece = torch.empty(matrix.where.tp_shard_shape, dtype=self.dtype, device=_device(matrix))
        for into, part in regions(matrix, comm.rank, piece, whole):
            transfers.append(Transfer(comm, "return", source, comm.rank, part, into))
        if whole is not None:
            for target in range(comm.size):
                if target != source:
                    for _, part in regions(matrix, target, None, whole):
                        transfers.append(Transfer(comm, "return", source, target, part, None))
        return piece

    def _local(self, matrix: Matrix, piece: Tensor | None, transfers: list[Transfer]) -> Tensor:
        """This rank's slice."""
        comm, source = matrix.row_comm, matrix.owner[0]
        assert comm is not None
        where = matrix.where
        local = torch.empty(
            where.row_stop - where.row_start, *where.row_shape, dtype=self.dtype, device=_device(matrix)
        )
        if comm.rank == source:
            assert piece is not None
            piece = piece.reshape(where.tp_shard_rows, *where.row_shape)
            for target, (start, stop) in enumerate(matrix.rows):
                into = local if target == source else None
                transfers.append(Transfer(comm, "return", source, target, piece[start:stop], into))
        else:
            transfers.append(Transfer(comm, "return", source, comm.rank, None, local))
        return local

    def result(self) -> list[Tensor | None]:
        return [
            value.reshape(matrix.where.local_shape) if value is not None else None
            for value, matrix in zip(self.values, self.matrices)
        ]


class _Share(Answer):
    def __init__(self, request: Share) -> None:
        self.asks = len(request.values) > 0
        self.matrices = request.matrices
        self.dtype = request.dtype
        self.shapes = request.shapes
        self.values = list(request.values)
        for value, matrix, shape in zip(self.values, self.matrices, self.shapes):
            _check_owned(value, matrix, shape, request.dtype)

    def begin(self, phase: int) -> tuple[list[Reduction], list[Transfer]]:
        transfers: list[Transfer] = []
        for i, matrix in enumerate(self.matrices):
            along = (1, 0, 2)[phase]
            if (phase < 2 and not matrix.with_owner) or (phase == 0 and matrix.place[0] != matrix.owner[0]):
                continue
            self.values[i] = _broadcast(matrix, along, "share", self.values[i], self.shapes[i], self.dtype, transfers)
        return [], transfers

    def result(self) -> list[Tensor | None]:
        return self.values


def _broadcast(
    matrix: Matrix,
    along: int,
    op: str,
    value: Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    transfers: list[Transfer],
) -> Tensor | None:
    """What the owner's place along a dimension of the grid has: ``value`` there, and on the others what comes."""
    comm, source = matrix.comms[along], matrix.owner[along]
    if comm is None:
        return value
    if comm.rank != source:
        value = torch.empty(shape, dtype=dtype, device=_device(matrix))
        transfers.append(Transfer(comm, op, source, comm.rank, None, value))
    else:
        transfers += [Transfer(comm, op, source, t, value, None) for t in range(comm.size) if t != source]
    return value


def regions(
    matrix: Matrix, tp_rank: int, piece: Tensor | None, whole: Tensor | None
) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Views of a tensor-parallel rank's piece and of the matrix that are the same elements: one pair per block."""
    where, dim = matrix.where, matrix.where.tp_dim
    assert dim is not None
    offset, extent = matrix.pieces[tp_rank]
    cuts = [(0, offset, extent)]
    if where.tp_blocks:
        ranks = len(matrix.pieces)
        cuts, at, start = [], 0, 0
        for block in where.tp_blocks:
            part = block // ranks
            cuts.append((at, start + part * tp_rank, part))
            at, start = at + part, start + block
    for in_piece, in_whole, length in cuts:
        yield (
            None
            if piece is None
            else piece.reshape(_piece_shape(where.shape, dim, extent)).narrow(dim, in_piece, length),
            None if whole is None else whole.narrow(dim, in_whole, length),
        )


def _piece_shape(shape: Sequence[int], dim: int, extent: int) -> tuple[int, ...]:
    return (*shape[:dim], extent, *shape[dim + 1 :])


def _device(matrix: Matrix) -> torch.device:
    return matrix.param.device


def _check_owned(value: Tensor | None, matrix: Matrix, shape: Sequence[int], dtype: torch.dtype) -> None:
    if (value is not None) != matrix.owned:
        raise ValueError(
            f"parameter {matrix.index} has {'no value' if value is None else 'a value'} on a rank that is "
            f"{'' if matrix.owned else 'not '}its owner"
        )
    if value is not None and (tuple(value.shape) != tuple(shape) or value.dtype is not dtype):
        raise ValueError(
            f"what the owner of parameter {matrix.index} has is {value.dtype} of shape {tuple(value.shape)}; "
            f"{dtype} of shape {tuple(shape)} was announced"
        )
