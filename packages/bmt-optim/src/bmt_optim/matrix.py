"""The logical tensors that an optimizer steps: where their parts are, who owns them, which have gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle
from typing import Any

import torch.distributed as dist
from torch import Tensor

from bmt_comm import LAYER_ATTRIBUTE, Communicator, Slice, check_agreement, is_dtensor, slice_of

_APART, _LAYERS = 1_000_003, 4096  # of the numbers of layers, and of pipelines


@dataclass(eq=False)
class Matrix:
    """A logical tensor of which this rank holds a part. The ranks that share it form a grid (row × tp × replica).

    Attributes:
        index: its place among the optimizer's parameters.
        number: by which random numbers and renewals of state are told apart: of a layer of a pipeline, that of the
            layer and the place in it; otherwise the place among all other parameters. The same on all ranks that share
            the parameter, though stages have other parameters before it.
        param: the parameter.
        where: which part of it this rank holds.
        rows: the row range, within this rank's piece, of every rank of ``where.row_comm``.
        pieces: offset and extent along ``where.tp_dim`` of every rank of ``where.tp_comm``.
        owner: the place in the grid, (row, tp, replica), of the rank that assembles it.
        parts: the matrices, some rows each, that it consists of for its optimizer; empty: it is one, or it is
            ``undivided``. Each has an owner; that of a part which one rank holds is this rank.
    """

    index: int
    param: Tensor
    where: Slice
    rows: Sequence[tuple[int, int]]
    pieces: Sequence[tuple[int, int]]
    owner: tuple[int, int, int] = (0, 0, 0)
    number: int = -1
    parts: Sequence[Matrix] = ()

    def __post_init__(self) -> None:
        if self.number < 0:
            self.number = self.index

    @cached_property
    def row_comm(self) -> Communicator | None:
        """Over which the rows of the piece are spread; ``None``: they are not."""
        return _real(self.where.row_comm)

    @cached_property
    def tp_comm(self) -> Communicator | None:
        """Over which ``where.tp_dim`` is cut; ``None``: it is not."""
        return _real(self.where.tp_comm)

    @cached_property
    def replicate_comm(self) -> Communicator | None:
        """Of the ranks that have the same part and divide the work of owners; ``None``: there are none."""
        return _real(self.where.replicate_comm)

    @property
    def comms(self) -> tuple[Communicator | None, Communicator | None, Communicator | None]:
        """The communicators along the dimensions of the grid."""
        return self.row_comm, self.tp_comm, self.replicate_comm

    @property
    def place(self) -> tuple[int, int, int]:
        """This rank's place in the grid."""
        row, tp, replica = (0 if comm is None else comm.rank for comm in self.comms)
        return row, tp, replica

    @property
    def owned(self) -> bool:
        """Whether this rank is the owner."""
        return self.place == self.owner

    @property
    def with_owner(self) -> bool:
        """Whether this rank is in the owner's replica."""
        return self.place[2] == self.owner[2]

    @cached_property
    def undivided(self) -> bool:
        """Whether one rank (of each replica) holds all of it, and the others nothing. All of them know.

        Not so for a DTensor, whose state is made of DTensors, which are the same on all ranks that replicate them.
        """
        return (
            self.tp_comm is None
            and sum(start < stop for start, stop in self.rows) <= 1
            and (self.row_comm is None or not is_dtensor(self.param))
        )

    @cached_property
    def alone(self) -> Matrix:
        """This matrix, which is ``undivided`` and here, as one that only replicas share."""
        where = replace(self.where, row_comm=None)
        rows, owner = [(where.row_start, where.row_stop)], (0, 0, self.owner[2])
        parts = [part.alone for part in self.parts]
        return Matrix(self.index, self.param, where, rows, self.pieces, owner, self.number, parts)

    def cut_along(self, over: tuple[int, ...] | None) -> tuple[Communicator | None, Communicator | None]:
        """The communicators, of rows and of tensor parallelism, that cut the dimensions ``over`` (``None``: any)."""
        if over is None:
            return self.row_comm, self.tp_comm
        dims = len(self.where.shape)
        wanted = {d + dims if d < 0 else d for d in over}
        if not all(0 <= d < dims for d in wanted):
            raise ValueError(f"over={over} are not dimensions of a tensor of shape {self.where.shape}")
        return (
            self.row_comm if wanted & set(range(self.where.row_dims)) else None,
            self.tp_comm if self.where.tp_dim in wanted else None,
        )


def _real(comm: Communicator | None) -> Communicator | None:
    return comm if comm is not None and comm.size > 1 else None


def plan_matrices(
    params: Sequence[Tensor],
    costs: Sequence[float],
    heights: Sequence[int] | None = None,
    replicas: Communicator | None = None,
) -> list[Matrix]:
    """A :class:`Matrix` per parameter, with its owner.

    A collective over the ranks that share parameters, where there are such.

    Args:
        params: the same ones in the same order on all ranks that share them.
        costs: what owning each of them costs, in any unit.
        heights: the rows (of the slice) of the parts of each; 0: it has none.
        replicas: the ranks that have copies of the parameters which are whole.

    Raises:
        RuntimeError: ranks that share parameters disagree on their number, shapes or costs (on all of them).
    """
    slices = [_with_replicas(slice_of(p), cost, replicas) for p, cost in zip(params, costs)]
    found: list[Matrix] = [
        Matrix(i, p, where, [(where.row_start, where.row_stop)], [(where.tp_offset, where.tp_extent)], number=number)
        for i, (p, where, number) in enumerate(zip(params, slices, _numbers(params)))
    ]
    here = dist.get_rank() if dist.is_initialized() else 0
    groups = by_grid(found)
    facts = [
        [(slices[i].shape, costs[i], *found[i].rows[0], *found[i].pieces[0], found[i].number) for i in g]
        for g in groups
    ]
    for along in range(3):
        for n, comm in _in_order([found[g[0]].comms[along] for g in groups]):
            shapes = [f"one of shape {shape}, of cost {cost}" for shape, cost, *_ in facts[n]]
            check_agreement(comm, "the parameters of an optimizer", shapes)
    grids = gather_over_grids([(found[g[0]], (here, mine)) for g, mine in zip(groups, facts)])
    for grid in grids:
        _check_same_rows(grid)
    shared: dict[int, list[int]] = {}  # the global ranks of the grid, in the order [replica][tp][row]
    sizes: dict[int, tuple[int, int]] = {}
    for indices, grid in zip(groups, grids):
        _, tp_rank, replica = found[indices[0]].place
        ranks = [rank for columns in grid for column in columns for rank, _ in column]
        for n, i in enumerate(indices):
            found[i].rows = [facts[n][2:4] for _, facts in grid[replica][tp_rank]]
            found[i].pieces = [column[0][1][n][4:6] for column in grid[replica]]
            found[i].number = grid[0][0][0][1][n][-1]
            shared[i], sizes[i] = ranks, (len(grid[0]), len(grid[0][0]))
    owned: list[tuple[Matrix, float, int]] = []  # and where its ranks are
    for i in shared:
        matrix = found[i]
        height = 0 if heights is None or matrix.tp_comm is not None else heights[i]
        if height and (matrix.replicate_comm is not None or not matrix.undivided):
            matrix.parts = _parts(matrix, height)
        owned += [(part, costs[i] / len(matrix.parts), i) for part in matrix.parts] or [(matrix, costs[i], i)]
    held = [_held(matrix, shared[i]) for matrix, _, i in owned]
    chosen = assign_owners([cost for _, cost, _ in owned], [shared[i] for *_, i in owned], held)
    for (matrix, _, i), rank in zip(owned, chosen):
        tp_size, row_size = sizes[i]
        column, row = divmod(shared[i].index(rank), row_size)
        replica, tp = divmod(column, tp_size)
        matrix.owner = (row, tp, replica)
    return found


def layers_of(params: Sequence[Tensor]) -> list[tuple[int, int] | None]:
    """Of each parameter in a layer of a pipeline, which of the pipelines in ``params`` that is, and the layer's number.

    A process may have made others, which do not count.
    """
    found = [getattr(param, LAYER_ATTRIBUTE, None) for param in params]
    pipelines: dict[int, int] = {}
    for layer in found:
        if layer is not None:
            pipelines.setdefault(layer[0], len(pipelines))
    return [None if layer is None else (pipelines[layer[0]], layer[1]) for layer in found]


def _numbers(params: Sequence[Tensor]) -> list[int]:
    """The numbers of matrices, as far as this rank knows them."""
    counts: dict[tuple[int, int] | None, int] = {}
    numbers = []
    for layer in layers_of(params):
        counts[layer] = number = counts.get(layer, -1) + 1
        # A prime: what is renewed every n steps is to be spread over them for the same parameter of all layers, too.
        numbers.append(number if layer is None else number + _APART * (1 + layer[1] + _LAYERS * layer[0]))
    return numbers


def _with_replicas(where: Slice, cost: float, replicas: Communicator | None) -> Slice:
    """``where`` with the ranks that divide the work on it: none if there is no work."""
    if not cost:
        return replace(where, replicate_comm=None) if where.replicate_comm is not None else where
    if where.replicate_comm is None and where.row_comm is None and where.tp_comm is None:
        return replace(where, replicate_comm=replicas)
    return where


def _parts(matrix: Matrix, height: int) -> list[Matrix]:
    """Matrices of ``height`` rows each, which share the communicators of rows and of replicas."""
    where, parts = matrix.where, []
    shape = (height, *where.row_shape)
    for top in range(0, where.tp_shard_rows, height):
        rows = [(_clip(start - top, height), _clip(stop - top, height)) for start, stop in matrix.rows]
        start, stop = rows[matrix.place[0]]
        part = Slice(shape, start, stop, where.row_comm, replicate_comm=where.replicate_comm)
        parts.append(Matrix(matrix.index, matrix.param, part, rows, matrix.pieces, number=matrix.number))
    return parts


def _clip(row: int, height: int) -> int:
    return min(max(row, 0), height)


def _held(matrix: Matrix, ranks: Sequence[int]) -> dict[int, float]:
    """The share of a matrix's rows that each rank has, as far as rows are divided."""
    if matrix.tp_comm is not None:
        return {}
    total = sum(stop - start for start, stop in matrix.rows)
    if not total:
        return {ranks[0]: 1.0}
    return {rank: (stop - start) / total for rank, (start, stop) in zip(ranks, cycle(matrix.rows)) if start < stop}


def by_grid(matrices: Sequence[Matrix]) -> list[list[int]]:
    """The indices of the matrices that several ranks share, together where the same communicators cut them."""
    found: dict[tuple[Communicator | None, ...], list[int]] = {}
    for n, matrix in enumerate(matrices):
        if any(matrix.comms):
            found.setdefault(matrix.comms, []).append(n)
    return list(found.values())


def gather_over_grids(brought: Sequence[tuple[Matrix, Any]]) -> list[list[list[list[Any]]]]:
    """What every rank of each matrix's grid brings with it (picklable), as [replica][tp][row].

    Collectives come in an order that is the same wherever two communicators meet: over rows first, then over
    tensor-parallel ranks, then over replicas, and by rank numbers among those.
    """
    found: list[Any] = [mine for _, mine in brought]
    for along in range(3):
        gathered = [[x] for x in found]
        for n, comm in _in_order([matrix.comms[along] for matrix, _ in brought]):
            gathered[n] = comm.all_gather_object(found[n])
        found = gathered
    return found


def _in_order(comms: Sequence[Communicator | None]) -> list[tuple[int, Communicator]]:
    found = [(n, comm) for n, comm in enumerate(comms) if comm is not None]
    return sorted(found, key=lambda item: item[1].ranks)


def _check_same_rows(grid: list[list[list[Any]]]) -> None:
    """Raise unless tensor-parallel ranks whose shards have as many rows, and replicas, have them cut alike."""
    columns = [column for replica in grid for column in replica]
    for row in range(len(columns[0])):
        for n, a in enumerate(columns[0][0][1]):
            held = {column[row][1][n][2:4] for column in columns if column[row][1][n][5] == a[5]}
            if len(held) > 1:
                raise RuntimeError(
                    f"a parameter of shape {a[0]} has its rows cut differently on ranks that have all of them: "
                    f"{sorted(held)}"
                )


def assign_owners(
    costs: Sequence[float], candidates: Sequence[Sequence[int]], held: Sequence[Mapping[int, float]] | None = None
) -> list[int]:
    """For each item one of its candidate ranks, so that the ranks' sums of costs are about equal.

    The costliest first, each to the rank that holds most of it while that has less than its share of all costs, else to
    the rank with the least so far (Graham's LPT rule: the fullest rank has at most 4/3 of the best possible). A rank
    only counts what all the item's candidates know of, so that they all come to the same result: items whose
    candidates are the same, or more. An item that a rank holds as a whole, by ``held`` (shares by rank), gets such a
    one.
    """
    chosen = [ranks[0] for ranks in candidates]
    shares: Sequence[Mapping[int, float]] = held if held is not None else [{}] * len(costs)
    by_ranks: dict[frozenset[int], list[int]] = {}
    for i, ranks in enumerate(candidates):
        by_ranks.setdefault(frozenset(ranks), []).append(i)
    loads: dict[frozenset[int], dict[int, float]] = {}
    for ranks_set, items in sorted(by_ranks.items(), key=lambda item: (-len(item[0]), sorted(item[0]))):
        load = {
            rank: sum(found[rank] for others, found in loads.items() if ranks_set < others)
            for rank in sorted(ranks_set)
        }
        even = (sum(load.values()) + sum(costs[i] for i in items)) / len(load)
        for i in sorted(items, key=lambda i: (1.0 not in shares[i].values(), -costs[i], i)):
            mine = shares[i]
            largest = max(mine.values(), default=0.0)
            holders = [rank for rank in mine if mine[rank] == largest]
            most = min(holders, key=lambda rank: (load[rank], rank), default=None)
            least = min(load, key=lambda rank: (load[rank], rank))
            if most is None or (largest < 1 and load[most] > max(load[least], even * _UNEVEN - costs[i])):
                most = least
            chosen[i] = most
            load[most] += costs[i]
        loads[ranks_set] = {
            rank: value - sum(found[rank] for others, found in loads.items() if ranks_set < others)
            for rank, value in load.items()
        }
    return chosen


_UNEVEN = 1.02
"""How much more than the mean a rank may have to compute, so that less is sent."""


class Presence:
    """Which matrices have a gradient, agreed between the ranks that share them.

    [Note: missing gradients]
        A parameter without a gradient is not stepped, and all its ranks must think so, or their collectives would
        differ. Whatever shards parameters (bmt-zero, FSDP2) makes gradients by a collective, so its ranks agree,
        but for one thing: a rank whose part is empty may have no gradient where the others have one. So a matrix
        is stepped if any rank has a gradient for it, and it is an error if one that holds elements lacks it.

        Ranks exchange what they have at the first step, and then only when it changes here; for that, a change
        must come on all ranks that share the parameters at once. (One that comes on some of them only leaves these
        waiting in a collective that the others do not call, as in backward.)
    """

    _LACKS, _HAS = 2, 1

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self._matrices = matrices
        shared = by_grid(matrices)
        alone = sorted(set(range(len(matrices))) - {i for group in shared for i in group})
        self._groups = [*shared, alone]
        self._seen: list[list[tuple[int, bool]] | None] = [None] * len(self._groups)
        self._present = [False] * len(matrices)

    def update(self) -> list[bool]:
        """Whether each matrix has a gradient. A collective where something has changed since the last call.

        Raises:
            RuntimeError: ranks that hold elements of a matrix disagree (on all that share it).
        """
        here = [[(self._say(m), m.param.requires_grad) for m in self._of(group)] for group in self._groups]
        changed = [n for n, said in enumerate(here) if said != self._seen[n]]
        for n in changed:
            self._seen[n] = None
        shared = [n for n in changed if n < len(self._groups) - 1]
        grids = dict(
            zip(shared, gather_over_grids([(self._of(self._groups[n])[0], [s for s, _ in here[n]]) for n in shared]))
        )
        for n in changed:
            said = [s for s, _ in here[n]]
            for theirs in (theirs for replica in grids.get(n, []) for column in replica for theirs in column):
                said = [a | b for a, b in zip(said, theirs)]
            for matrix, i, what in zip(self._of(self._groups[n]), self._groups[n], said):
                if what == self._HAS | self._LACKS:
                    raise RuntimeError(
                        f"the gradient of parameter {matrix.index}, of shape {matrix.where.shape}, is there on some "
                        "ranks that share it and missing on others; call zero_grad(set_to_none=False), or use the "
                        "parameter on all of them"
                    )
                self._present[i] = what == self._HAS
            self._seen[n] = here[n]
        return self._present

    def _of(self, group: Sequence[int]) -> list[Matrix]:
        return [self._matrices[i] for i in group]

    def _say(self, matrix: Matrix) -> int:
        if matrix.param.grad is not None:
            return self._HAS
        return self._LACKS if matrix.where.numel else 0
