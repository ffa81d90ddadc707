"""The parameters of a model by group name, and gradient accumulation without synchronisation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .gradient_reducer import GradientReducer
from .sharded_parameter import ShardedParameter


def grouped_parameters(model: nn.Module) -> Iterator[tuple[str | None, list[nn.Parameter]]]:
    """The model's parameters by their ``group`` name, as pairs (group, parameters); None for those without one."""
    groups: dict[str | None, list[nn.Parameter]] = {}
    for param in model.parameters():
        groups.setdefault(getattr(param, "group", None), []).append(param)
    return iter(groups.items())


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients of backward passes in this context without reducing them, at ZeRO levels 0 and 1.

    The first backward outside of the context reduces the sum; until then ``.grad`` does not include it. Levels 2 and 3
    never hold unsharded gradients, so each backward reduces as always. The accumulated gradient is the same.

    Setting ``.grad`` to None, replacing it, or overwriting it (``zero_``, ``fill_``, ``copy_``) drops the accumulated
    gradients of this parameter, as in plain PyTorch. ``add_`` and ``sub_`` also have their usual effect. After other
    writes (scaling, clipping) the next backward raises a RuntimeError.

    With ``init_distributed(deterministic=True)``, each backward reduces at all levels, and ``.grad`` includes the sum
    only after the first backward outside of the context. That backward must be the last one of the step.
    """
    handles: list[Any] = [param.handle for param in model.parameters() if isinstance(param, ShardedParameter)]
    before: dict[GradientReducer, bool] = {r: r.no_sync for handle in handles for r in handle.group.reducers}
    for reducer in before:
        reducer.no_sync = True
    try:
        yield
    finally:
        for reducer, value in before.items():
            reducer.no_sync = value
