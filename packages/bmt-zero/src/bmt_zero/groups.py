"""Walking over the sharded parameters of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .gradient_reducer import GradientReducer
from .sharded_parameter import ShardedParameter


def grouped_parameters(model: nn.Module) -> Iterator[tuple[str | None, list[nn.Parameter]]]:
    """The model's parameters by their ``group`` name, as pairs (group, parameters); None for those without."""
    groups: dict[str | None, list[nn.Parameter]] = {}
    for param in model.parameters():
        groups.setdefault(getattr(param, "group", None), []).append(param)
    return iter(groups.items())


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients of backward passes in this context without reducing them, where that saves something.

    At ZeRO levels 0 and 1, gradients stay on their rank, and the first backward outside of the context reduces
    the sum once; until then ``.grad`` does not include them. At levels 2 and 3, which never hold unsharded
    gradients, each backward reduces as always. The accumulated gradient is the same.
    """
    reducers: dict[GradientReducer, None] = {}
    for param in model.parameters():
        if isinstance(param, ShardedParameter):
            reducers.update(dict.fromkeys(param.handle.group.reducers))  # type: ignore[attr-defined]
    before = {reducer: reducer.no_sync for reducer in reducers}
    for reducer in reducers:
        reducer.no_sync = True
    try:
        yield
    finally:
        for reducer, value in before.items():
            reducer.no_sync = value
