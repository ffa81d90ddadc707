"""What a rule may ask for: sums, maxima and transfers over the ranks that share a logical parameter.

[Note: rules]
    A *rule* is the mathematics of one optimizer step. It is a generator over a :class:`~bmt_optim.batch.Batch`: the
    logical parameters of one parameter group that are at the same step. This rank holds a :class:`~bmt_comm.Slice` of
    each. The rule computes with what this rank has, yields a list of requests, and receives the list of their results::

        def rule(self, batch):
            squares = [g.float().pow(2).sum() for g in batch.grads]
            (squares,) = yield [Sum(squares, batch.logical_params)]
            ...

    The engine (:mod:`bmt_optim.engine`) advances the rules of all groups and optimizers together. It answers all
    requests of a round with one collective per communicator and operation, and without any on one rank. So a rule
    never sees a communicator, and computes the single-device step up to the order of summation.

    What a rule must keep to:

    - **No state and no weight changes before the first yield.** The step may be abandoned there, when another rank
      reports an overflow. A rule without a request yields ``[]``, which costs nothing. Every rule yields at least once.
    - **The sequence of rounds depends on the options and ``batch.step`` alone.** It depends neither on values nor on
      which parameters the batch has: the ranks that share a parameter may have batches that differ in others (other
      pipeline stages). For a kind of parameter that a batch lacks, the rule yields a request with empty lists.
    - It asks for the same parameters on all ranks that share them, also where this rank's shard is empty: zeros for a
      sum. (A parameter that one rank holds unsharded is stepped on that rank only, in a batch of its own. State that
      all ranks have a copy of, such as column statistics, is then up to date on that rank only.)
    - What it computes for a parameter does not depend on which others are in the batch.
    - The host waits for nothing: no ``item()``, no ``bool(tensor)``.
    - Results may share memory with the values of the request, or with each other.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .logical_params import LogicalParam


@dataclass
class Sum:
    """Add ``values[i]`` up over the ranks that shard ``logical_params[i]`` along ``over``.

    ``over`` names the dimensions that the statistic has been reduced over, counted from the end: ``None`` (all) for a
    statistic of the logical parameter, ``(-1,)`` for one per row (shape ``(*, R)``), ``(-2,)`` for one per column
    (shape ``(*, C)``). Ranks that shard another dimension hold other rows, or columns, and take no part: the result is
    that of this rank's rows, or columns. A dimension that is not sharded costs nothing. Where ranks shard the rows of
    packed experts (:mod:`bmt_optim.experts`), statistics per column and per expert are of all experts.

    Many statistics are handled as fast as one where ``values`` is one tensor: with one entry per parameter along
    dimension 0, or, with ``sizes``, a vector in which they lie end to end.

    Attributes:
        values: fp32; of the same shape on all ranks that take part.
        logical_params: to which they belong, in the order of the batch.
        sizes: how many elements of the vector belong to each parameter.

    Result: a list of fp32 tensors of the same shapes, or one tensor if ``values`` is one.
    """

    values: Sequence[Tensor] | Tensor
    logical_params: Sequence[LogicalParam]
    over: tuple[int, ...] | None = None
    sizes: Sequence[int] | None = None


@dataclass
class Max(Sum):
    """As :class:`Sum`, the largest value. A NaN is kept."""


@dataclass
class GatherToOwner:
    """Unshard ``logical_params[i]`` on its owner (``logical.owned``).

    Owners are fixed for each parameter when the optimizer starts, balanced by ``DistributedOptimizer.cost``.

    Attributes:
        values: this rank's shards, of the local shapes; of one dtype on all ranks.
        logical_params: to which they belong.

    Result: a list: the unsharded tensor (``logical.where.shape``) on its owner, ``None`` on the others.
    """

    values: Sequence[Tensor]
    logical_params: Sequence[LogicalParam]


@dataclass
class Scatter:
    """Shard the owners' tensors, and send each rank its shards.

    Attributes:
        values: on the owner of ``logical_params[i]`` a tensor of ``logical.where.shape``, ``None`` elsewhere.
        logical_params: to which they belong.
        dtype: of the values.

    Result: a list of tensors of the local shapes.
    """

    values: Sequence[Tensor | None]
    logical_params: Sequence[LogicalParam]
    dtype: torch.dtype = torch.float32


@dataclass
class Broadcast:
    """Send the owners' tensors, unsharded, to all ranks that share their parameters.

    Attributes:
        values: on the owner of ``logical_params[i]`` a tensor of ``shapes[i]``, ``None`` elsewhere.
        logical_params: to which they belong.
        shapes: of the values, known to all.
        dtype: of the values.

    Result: a list of tensors of ``shapes``.
    """

    values: Sequence[Tensor | None]
    logical_params: Sequence[LogicalParam]
    shapes: Sequence[tuple[int, ...]]
    dtype: torch.dtype = torch.float32


Request = Sum | GatherToOwner | Scatter | Broadcast
Rule = Generator[Sequence[Request], list[Any], None]
"""Yields lists of requests, receives lists of their results (lists of tensors)."""


def reduced(
    kind: type[Sum],
    values: Mapping[int, Tensor],
    logical_params: Sequence[LogicalParam],
    over: Sequence[tuple[int, ...]],
) -> Generator[Sequence[Sum], list[Any], dict[int, Tensor]]:
    """``values`` by parameter, each reduced over the ranks that shard the dimensions ``over[i]``. One round."""
    kinds = [k for k in ([i for i in values if over[i] == dims] for dims in sorted(set(over))) if k]
    results = yield [kind([values[i] for i in k], [logical_params[i] for i in k], over[k[0]]) for k in kinds]
    by_index = {i: value for k, tensors in zip(kinds, results) for i, value in zip(k, tensors)}
    return {i: by_index[i] for i in values}
