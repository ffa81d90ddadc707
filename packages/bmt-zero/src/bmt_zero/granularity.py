"""The granularity of sharding: rows of a parameter that stay on one rank together. Set before a module is sharded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from bmt_comm import slice_of

Granularity = int | Literal["whole"]
_ATTRIBUTE = "bmt_granularity"


def set_granularity(
    module: nn.Module, granularity: Granularity | Callable[[str, nn.Parameter], Granularity | None]
) -> None:
    """Let parameters be divided among ranks only at multiples of some rows.

    Call it directly before the module is sharded, with the same arguments on all ranks: copies of a parameter, and
    ``to_empty``, forget it. All ways of sharding use it: :func:`shard`, ``Block``, ``BMTrainModelWrapper``,
    ``fully_shard``. For example, each block of quantisation, each head or each matrix of a fused weight is then on one
    rank. Checkpoints do not depend on it.

    Shards have equal sizes, so granules need padding: much, if there are few of them per rank. Sharding warns if it is
    more than 1 %; ``plan_layouts(shapes, world_size, granularity)`` shows it beforehand.

    Args:
        module: not sharded yet.
        granularity: a number of rows, such as those of a head, for all parameters of two dimensions or more; "whole":
            each of these stays on one rank; or a function of name and parameter that returns one of these, or None
            (any row), for parameters of any dimensions. Rows are those of the tensor-parallel shard. Rows of packed
            experts are counted along the first two dimensions, and "whole" means one expert.

    Raises:
        ValueError: a granularity is not "whole" or a whole number above 0; a parameter is sharded already.
    """
    chosen = {}
    for name, param in module.named_parameters():
        if callable(granularity):
            rows = granularity(name, param)
        else:
            rows = granularity if param.dim() > 1 else None
        if rows is None:
            continue
        if rows != "whole" and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
            raise ValueError(f"granularity {rows!r} of parameter {name!r} is not 'whole' or a whole number above 0")
        if hasattr(param, "bmt_slice") and slice_of(param).communicators:
            raise ValueError(f"parameter {name!r} is sharded already; call set_granularity before that")
        chosen[param] = rows
    for param, rows in chosen.items():
        setattr(param, _ATTRIBUTE, rows)


def granularity_of(param: Tensor) -> int:
    """The rows that :func:`set_granularity` gave it, or 1."""
    rows = getattr(param, _ATTRIBUTE, 1)
    if rows != "whole":
        return rows
    shape = slice_of(param).tp_shard_shape
    return max(1, shape[1] if len(shape) == 3 else math.prod(shape[:1]))
