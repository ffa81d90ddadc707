"""What a rule may ask for: the few words in which an optimizer says what it needs from the ranks that share a matrix.

[Note: rules]
    A *rule* is the mathematics of one optimizer step, written as a generator over a :class:`~bmt_optim.batch.Batch`:
    the logical tensors ("matrices", though a vector is one, too) of one parameter group that are at the same step,
    of each of which this rank holds a :class:`~bmt_comm.Slice`. It computes on what this rank has, yields a list of
    requests, and receives the list of their results::

        def rule(self, batch):
            squares = [g.float().pow(2).sum() for g in batch.grads]
            (squares,) = yield [Sum(squares, batch.matrices)]
            ...

    The engine (:mod:`bmt_optim.engine`) advances the rules of all groups and optimizers together, and answers all
    requests of a round with one collective per communicator and operation. On one rank it answers without any. So
    a rule never sees a communicator, and what it computes is the single-device step up to the order of summation.

    What a rule must keep to:

    - **Nothing that lasts (state, weights) changes before the first yield**, for the step may be abandoned there
      when another rank reports an overflow. A rule that has nothing to ask then yields ``[]``, which costs nothing.
      Every rule yields at least once.
    - **The sequence of rounds depends on the options and ``batch.step`` alone**, never on values, nor on which
      matrices the batch has: the ranks that share a matrix may have different batches besides it (other pipeline
      stages). A kind of matrix that a batch lacks is asked for with empty lists.
    - It asks for the same matrices on all ranks that share them, also where this rank's part is empty: zeros for a
      sum. (What one rank holds as a whole is stepped on that rank only, in batches of its own. What all ranks have a
      copy of, such as column statistics, is then up to date there only.)
    - What it computes of a matrix does not depend on which others are in the batch.
    - The host waits for nothing: no ``item()``, no ``bool(tensor)``.
    - Results may share memory with what was asked, or with each other.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .matrix import Matrix


@dataclass
class Sum:
    """Add ``values[i]`` up over the ranks that cut ``matrices[i]`` along ``over``.

    ``over`` names the dimensions that the statistic has been reduced over, counted from the end: a statistic of
    the whole matrix has ``None`` (all), one per row (shape ``(*, R)``) has ``(-1,)``, one per column (shape
    ``(*, C)``) has ``(-2,)``. Ranks that cut another dimension hold other rows, or columns, and take no part: the
    result is that of this rank's rows, or columns. A dimension that nothing cuts costs nothing. Of packed experts whose
    rows are spread over ranks (:mod:`bmt_optim.experts`), statistics per column and per expert are of all experts.

    Many statistics are handled as fast as one where ``values`` is one tensor: with one entry per matrix along
    dimension 0, or, with ``sizes``, a vector in which they lie end to end.

    Attributes:
        values: fp32; those of a matrix of the same shape on all ranks that take part.
        matrices: to which they belong, in the order of the batch.
        sizes: how many elements of the vector belong to each matrix.

    Result: a list of fp32 tensors of the same shapes, or one tensor if ``values`` is one.
    """

    values: Sequence[Tensor] | Tensor
    matrices: Sequence[Matrix]
    over: tuple[int, ...] | None = None
    sizes: Sequence[int] | None = None


@dataclass
class Max(Sum):
    """As :class:`Sum`, the largest value. A NaN is kept."""


@dataclass
class Own:
    """Assemble ``matrices[i]`` on its owner (``matrix.owned``).

    Owners are fixed for each matrix when the optimizer starts, balanced by ``DistributedOptimizer.cost``.

    Attributes:
        values: this rank's parts, of the local shapes; of one dtype on all ranks.
        matrices: to which they belong.

    Result: a list: the whole tensor (``matrix.where.shape``) on its owner, ``None`` on the others.
    """

    values: Sequence[Tensor]
    matrices: Sequence[Matrix]


@dataclass
class Return:
    """Send what the owners have, of the shapes of their matrices, back as slices.

    Attributes:
        values: on the owner of ``matrices[i]`` a tensor of ``matrix.where.shape``, ``None`` elsewhere.
        matrices: to which they belong.
        dtype: of the values.

    Result: a list of tensors of the local shapes.
    """

    values: Sequence[Tensor | None]
    matrices: Sequence[Matrix]
    dtype: torch.dtype = torch.float32


@dataclass
class Share:
    """Give what the owners have to all ranks that share their matrices, whole.

    Attributes:
        values: on the owner of ``matrices[i]`` a tensor of ``shapes[i]``, ``None`` elsewhere.
        matrices: to which they belong.
        shapes: of the values, known to all.
        dtype: of the values.

    Result: a list of tensors of ``shapes``.
    """

    values: Sequence[Tensor | None]
    matrices: Sequence[Matrix]
    shapes: Sequence[tuple[int, ...]]
    dtype: torch.dtype = torch.float32


Request = Sum | Own | Return | Share
Rule = Generator[Sequence[Request], list[Any], None]
"""Yields lists of requests, receives lists of their results (lists of tensors)."""


def reduced(
    kind: type[Sum], values: Mapping[int, Tensor], matrices: Sequence[Matrix], over: Sequence[tuple[int, ...]]
) -> Generator[Sequence[Sum], list[Any], dict[int, Tensor]]:
    """``values`` by matrix, each reduced over the ranks that cut the dimensions ``over[i]``. One round."""
    kinds = [[i for i in values if over[i] == dims] for dims in sorted(set(over))]
    results = yield [kind([values[i] for i in k], [matrices[i] for i in k], over[k[0]]) for k in kinds if k]
    found = {i: value for k, reduced in zip([k for k in kinds if k], results) for i, value in zip(k, reduced)}
    return {i: found[i] for i in values}
