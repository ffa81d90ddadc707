"""The logical parameters that an optimizer steps: where their shards are, who owns them, which have gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle
from typing import Any

import torch.distributed as dist
from torch import Tensor

from bmt_comm import LAYER_ATTRIBUTE, Communicator, Slice, check_agreement, is_dtensor, slice_of

_LAYER_STRIDE = 1_000_003
"""Between the numbers of two layers of a pipeline."""
_MAX_LAYERS = 4096
"""Layers of a pipeline, for the numbers of the layers of further pipelines."""


@dataclass(eq=False)
class LogicalParam:
    """A logical parameter of which this rank holds a shard. The ranks that share it form a mesh (row × tp × replica).

    Attributes:
        index: its position among the optimizer's parameters.
        number: seeds its random numbers and spreads its renewals of state. It depends on the layer and the position in
            the layer for a layer of a pipeline, and otherwise on the position among all other parameters. It is the
            same on all ranks that share the parameter, though stages have other parameters before it.
        param: the parameter.
        where: which shard of it this rank holds.
        rows: the row range, within this rank's tensor-parallel shard, of every rank of ``where.row_comm``.
        tp_ranges: offset and extent along ``where.tp_dim`` of every rank of ``where.tp_comm``.
        owner: the coordinate in the mesh, (row, tp, replica), of the rank that gathers it.
        parts: the matrices, some rows each, that it consists of for its optimizer. Empty: it is one matrix, or it is
            ``undivided``. Each part has an owner. The owner of a part that one rank holds is that rank.
    """

    index: int
    param: Tensor
    where: Slice
    rows: Sequence[tuple[int, int]]
    tp_ranges: Sequence[tuple[int, int]]
    owner: tuple[int, int, int] = (0, 0, 0)
    number: int = -1
    parts: Sequence[LogicalParam] = ()

    def __post_init__(self) -> None:
        if self.number < 0:
            self.number = self.index

    @cached_property
    def row_comm(self) -> Communicator | None:
        """The ranks that shard the rows of the tensor-parallel shard; ``None``: one rank has them all."""
        return _unless_single(self.where.row_comm)

    @cached_property
    def tp_comm(self) -> Communicator | None:
        """The ranks that shard ``where.tp_dim``; ``None``: it is not sharded."""
        return _unless_single(self.where.tp_comm)

    @cached_property
    def replicate_comm(self) -> Communicator | None:
        """The ranks that have the same shard and divide the work of owners; ``None``: there are none."""
        return _unless_single(self.where.replicate_comm)

    @property
    def mesh(self) -> tuple[Communicator | None, Communicator | None, Communicator | None]:
        """The communicators along the dimensions of the mesh."""
        return self.row_comm, self.tp_comm, self.replicate_comm

    @property
    def coordinate(self) -> tuple[int, int, int]:
        """This rank's coordinate in the mesh."""
        row, tp, replica = (0 if comm is None else comm.rank for comm in self.mesh)
        return row, tp, replica

    @property
    def owned(self) -> bool:
        """Whether this rank is the owner."""
        return self.coordinate == self.owner

    @property
    def with_owner(self) -> bool:
        """Whether this rank is in the owner's replica."""
        return self.coordinate[2] == self.owner[2]

    @cached_property
    def undivided(self) -> bool:
        """Whether one rank (of each replica) holds all of it, and the others nothing. The same on all ranks.

        False for a sharded DTensor. Its state consists of DTensors, which are equal on all ranks that replicate them.
        """
        return (
            self.tp_comm is None
            and sum(start < stop for start, stop in self.rows) <= 1
            and (self.row_comm is None or not is_dtensor(self.param))
        )

    @cached_property
    def alone(self) -> LogicalParam:
        """This parameter, which is ``undivided`` and on this rank, as one that only replicas share."""
        where = replace(self.where, row_comm=None)
        rows, owner = [(where.row_start, where.row_stop)], (0, 0, self.owner[2])
        parts = [part.alone for part in self.parts]
        return LogicalParam(self.index, self.param, where, rows, self.tp_ranges, owner, self.number, parts)

    def shard_groups(self, over: tuple[int, ...] | None) -> tuple[Communicator | None, Communicator | None]:
        """The row and tensor-parallel communicators that shard the dimensions ``over`` (``None``: any)."""
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


def _unless_single(comm: Communicator | None) -> Communicator | None:
    return comm if comm is not None and comm.size > 1 else None


def plan_logical_params(
    params: Sequence[Tensor],
    costs: Sequence[float],
    heights: Sequence[int] | None = None,
    replicas: Communicator | None = None,
) -> list[LogicalParam]:
    """A :class:`LogicalParam` per parameter, with its owner.

    A collective over the ranks that share parameters, if there are such ranks.

    Args:
        params: the same parameters in the same order on all ranks that share them.
        costs: what owning each of them costs, in any unit.
        heights: the rows (of the slice) of the parts of each; 0: it has no parts.
        replicas: the ranks that have copies of the unsharded parameters.

    Raises:
        RuntimeError: ranks that share parameters disagree on their number, shapes or costs (on all of them).
    """
    slices = [_with_replicas(slice_of(p), cost, replicas) for p, cost in zip(params, costs)]
    planned: list[LogicalParam] = [
        LogicalParam(
            i, p, where, [(where.row_start, where.row_stop)], [(where.tp_offset, where.tp_extent)], number=number
        )
        for i, (p, where, number) in enumerate(zip(params, slices, _numbers(params)))
    ]
    here = dist.get_rank() if dist.is_initialized() else 0
    groups = group_by_mesh(planned)
    facts = [
        [(slices[i].shape, costs[i], *planned[i].rows[0], *planned[i].tp_ranges[0], planned[i].number) for i in g]
        for g in groups
    ]
    for along in range(3):
        for n, comm in _in_order([planned[g[0]].mesh[along] for g in groups]):
            shapes = [f"one of shape {shape}, of cost {cost}" for shape, cost, *_ in facts[n]]
            check_agreement(comm, "the parameters of an optimizer", shapes)
    meshes = gather_over_meshes([(planned[g[0]], (here, mine)) for g, mine in zip(groups, facts)])
    for mesh in meshes:
        _check_same_rows(mesh)
    shared: dict[int, list[int]] = {}  # the global ranks of the mesh, in the order [replica][tp][row]
    sizes: dict[int, tuple[int, int]] = {}
    for indices, mesh in zip(groups, meshes):
        _, tp_rank, replica = planned[indices[0]].coordinate
        ranks = [rank for columns in mesh for column in columns for rank, _ in column]
        for n, i in enumerate(indices):
            planned[i].rows = [facts[n][2:4] for _, facts in mesh[replica][tp_rank]]
            planned[i].tp_ranges = [column[0][1][n][4:6] for column in mesh[replica]]
            planned[i].number = mesh[0][0][0][1][n][-1]
            shared[i], sizes[i] = ranks, (len(mesh[0]), len(mesh[0][0]))
    owned: list[tuple[LogicalParam, float, int]] = []  # and the index in ``shared``
    for i in shared:
        logical = planned[i]
        height = 0 if heights is None or logical.tp_comm is not None else heights[i]
        if height and (logical.replicate_comm is not None or not logical.undivided):
            logical.parts = _parts(logical, height)
        owned += [(part, costs[i] / len(logical.parts), i) for part in logical.parts] or [(logical, costs[i], i)]
    held = [_held(logical, shared[i]) for logical, _, i in owned]
    chosen = assign_owners([cost for _, cost, _ in owned], [shared[i] for *_, i in owned], held)
    for (logical, _, i), rank in zip(owned, chosen):
        tp_size, row_size = sizes[i]
        column, row = divmod(shared[i].index(rank), row_size)
        replica, tp = divmod(column, tp_size)
        logical.owner = (row, tp, replica)
    return planned


def layers_of(params: Sequence[Tensor]) -> list[tuple[int, int] | None]:
    """For each parameter in a layer of a pipeline: the number of the pipeline in ``params``, and of the layer.

    Pipelines of the process that are not in ``params`` do not count.
    """
    layers = [getattr(param, LAYER_ATTRIBUTE, None) for param in params]
    pipelines: dict[int, int] = {}
    for layer in layers:
        if layer is not None:
            pipelines.setdefault(layer[0], len(pipelines))
    return [None if layer is None else (pipelines[layer[0]], layer[1]) for layer in layers]


def _numbers(params: Sequence[Tensor]) -> list[int]:
    """The numbers of logical parameters, as far as this rank knows them."""
    counts: dict[tuple[int, int] | None, int] = {}
    numbers = []
    for layer in layers_of(params):
        counts[layer] = number = counts.get(layer, -1) + 1
        # The stride is a prime, so that renewals every n steps are spread for the same parameter of all layers, too.
        numbers.append(number if layer is None else number + _LAYER_STRIDE * (1 + layer[1] + _MAX_LAYERS * layer[0]))
    return numbers


def _with_replicas(where: Slice, cost: float, replicas: Communicator | None) -> Slice:
    """``where`` with the ranks that divide the work on it. None divide it if the cost is 0."""
    if not cost:
        return replace(where, replicate_comm=None) if where.replicate_comm is not None else where
    if where.replicate_comm is None and where.row_comm is None and where.tp_comm is None:
        return replace(where, replicate_comm=replicas)
    return where


def _parts(logical: LogicalParam, height: int) -> list[LogicalParam]:
    """Parts of ``height`` rows each, which share the communicators of rows and of replicas."""
    where, parts = logical.where, []
    shape = (height, *where.row_shape)
    for top in range(0, where.tp_shard_rows, height):
        rows = [(_clip(start - top, height), _clip(stop - top, height)) for start, stop in logical.rows]
        start, stop = rows[logical.coordinate[0]]
        part = Slice(shape, start, stop, where.row_comm, replicate_comm=where.replicate_comm)
        parts.append(LogicalParam(logical.index, logical.param, part, rows, logical.tp_ranges, number=logical.number))
    return parts


def _clip(row: int, height: int) -> int:
    return min(max(row, 0), height)


def _held(logical: LogicalParam, ranks: Sequence[int]) -> dict[int, float]:
    """The share of the rows that each rank has. Empty with tensor parallelism."""
    if logical.tp_comm is not None:
        return {}
    total = sum(stop - start for start, stop in logical.rows)
    if not total:
        return {ranks[0]: 1.0}
    return {rank: (stop - start) / total for rank, (start, stop) in zip(ranks, cycle(logical.rows)) if start < stop}


def group_by_mesh(logical_params: Sequence[LogicalParam]) -> list[list[int]]:
    """The indices of the parameters that several ranks share, grouped by mesh."""
    groups: dict[tuple[Communicator | None, ...], list[int]] = {}
    for n, logical in enumerate(logical_params):
        if any(logical.mesh):
            groups.setdefault(logical.mesh, []).append(n)
    return list(groups.values())


def gather_over_meshes(brought: Sequence[tuple[LogicalParam, Any]]) -> list[list[list[list[Any]]]]:
    """The (picklable) objects that the ranks of each parameter's mesh bring, as [replica][tp][row].

    Collectives run in an order that is the same wherever two communicators meet: over rows first, then over
    tensor-parallel ranks, then over replicas, and by rank numbers among those.
    """
    objects: list[Any] = [mine for _, mine in brought]
    for along in range(3):
        gathered = [[x] for x in objects]
        for n, comm in _in_order([logical.mesh[along] for logical, _ in brought]):
            gathered[n] = comm.all_gather_object(objects[n])
        objects = gathered
    return objects


def _in_order(comms: Sequence[Communicator | None]) -> list[tuple[int, Communicator]]:
    """The communicators that there are, with their indices, by rank numbers."""
    numbered = [(n, comm) for n, comm in enumerate(comms) if comm is not None]
    return sorted(numbered, key=lambda item: item[1].ranks)


def _check_same_rows(mesh: list[list[list[Any]]]) -> None:
    """Raise unless replicas, and tensor-parallel ranks whose shards have as many rows, shard their rows alike."""
    columns = [column for replica in mesh for column in replica]
    for row in range(len(columns[0])):
        for n, a in enumerate(columns[0][0][1]):
            held = {column[row][1][n][2:4] for column in columns if column[row][1][n][5] == a[5]}
            if len(held) > 1:
                raise RuntimeError(
                    f"a parameter of shape {a[0]} has its rows sharded differently on ranks that have all of them: "
                    f"{sorted(held)}"
                )


def assign_owners(
    costs: Sequence[float], candidates: Sequence[Sequence[int]], held: Sequence[Mapping[int, float]] | None = None
) -> list[int]:
    """For each item one of its candidate ranks, so that the ranks' sums of costs are about equal.

    An item that one rank holds completely, by ``held`` (shares by rank), goes to such a rank. These items come first,
    and the others follow by descending cost. Each goes to the rank that holds most of it while that rank has less than
    its share of all costs, and otherwise to the rank with the least load (Graham's LPT rule: the largest load is at
    most 4/3 of the best possible).

    A rank's load includes only items that all candidates of the current item know: those with the same candidates, or
    with more. So all candidates compute the same result.
    """
    chosen = [ranks[0] for ranks in candidates]
    shares: Sequence[Mapping[int, float]] = held if held is not None else [{}] * len(costs)
    by_ranks: dict[frozenset[int], list[int]] = {}
    for i, ranks in enumerate(candidates):
        by_ranks.setdefault(frozenset(ranks), []).append(i)
    loads: dict[frozenset[int], dict[int, float]] = {}
    for ranks_set, items in sorted(by_ranks.items(), key=lambda item: (-len(item[0]), sorted(item[0]))):
        load = {
            rank: sum(known[rank] for others, known in loads.items() if ranks_set < others)
            for rank in sorted(ranks_set)
        }
        even = (sum(load.values()) + sum(costs[i] for i in items)) / len(load)
        for i in sorted(items, key=lambda i: (1.0 not in shares[i].values(), -costs[i], i)):
            mine = shares[i]
            largest = max(mine.values(), default=0.0)
            with_most = [rank for rank in mine if mine[rank] == largest]
            most = min(with_most, key=lambda rank: (load[rank], rank), default=None)
            least = min(load, key=lambda rank: (load[rank], rank))
            if most is None or (largest < 1 and load[most] > max(load[least], even * _UNEVEN - costs[i])):
                most = least
            chosen[i] = most
            load[most] += costs[i]
        loads[ranks_set] = {
            rank: value - sum(known[rank] for others, known in loads.items() if ranks_set < others)
            for rank, value in load.items()
        }
    return chosen


_UNEVEN = 1.02
"""How much more than the mean a rank may have to compute, so that less is sent."""


class Presence:
    """Which logical parameters have a gradient, agreed between the ranks that share them.

    [Note: missing gradients]
        A parameter without a gradient is not stepped. All its ranks must agree on that, or their collectives would
        differ. bmt-zero and FSDP2 make gradients by a collective, so their ranks agree, with one exception: a rank
        whose shard is empty may have no gradient where the others have one. So a parameter is stepped if any rank has
        a gradient for it. It is an error if a rank that holds elements has none.

        Ranks exchange what they have at the first step, and then only when it changes on this rank. A change must
        therefore come on all ranks that share the parameters at once. If it comes on some of them only, these wait in
        a collective that the others do not call, as in backward.
    """

    _LACKS, _HAS = 2, 1

    def __init__(self, logical_params: Sequence[LogicalParam]) -> None:
        self._logical_params = logical_params
        shared = group_by_mesh(logical_params)
        alone = sorted(set(range(len(logical_params))) - {i for group in shared for i in group})
        self._groups = [*shared, alone]
        self._seen: list[list[tuple[int, bool]] | None] = [None] * len(self._groups)
        self._present = [False] * len(logical_params)

    def update(self) -> list[bool]:
        """Whether each parameter has a gradient. A collective where something has changed since the last call.

        Raises:
            RuntimeError: ranks that hold elements of a parameter disagree (on all that share it).
        """
        here = [[(self._say(p), p.param.requires_grad) for p in self._of(group)] for group in self._groups]
        changed = [n for n, said in enumerate(here) if said != self._seen[n]]
        for n in changed:
            self._seen[n] = None
        shared = [n for n in changed if n < len(self._groups) - 1]
        brought = [(self._of(self._groups[n])[0], [s for s, _ in here[n]]) for n in shared]
        meshes = dict(zip(shared, gather_over_meshes(brought)))
        for n in changed:
            said = [s for s, _ in here[n]]
            for theirs in (theirs for replica in meshes.get(n, []) for column in replica for theirs in column):
                said = [a | b for a, b in zip(said, theirs)]
            for logical, i, what in zip(self._of(self._groups[n]), self._groups[n], said):
                if what == self._HAS | self._LACKS:
                    raise RuntimeError(
                        f"the gradient of parameter {logical.index}, of shape {logical.where.shape}, is there on some "
                        "ranks that share it and missing on others; call zero_grad(set_to_none=False), or use the "
                        "parameter on all of them"
                    )
                self._present[i] = what == self._HAS
            self._seen[n] = here[n]
        return self._present

    def _of(self, group: Sequence[int]) -> list[LogicalParam]:
        return [self._logical_params[i] for i in group]

    def _say(self, logical: LogicalParam) -> int:
        if logical.param.grad is not None:
            return self._HAS
        return self._LACKS if logical.where.numel else 0
