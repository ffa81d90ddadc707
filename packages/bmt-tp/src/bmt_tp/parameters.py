"""Where the layers' parameters live: sharded where bmt_zero is installed, else in plain modules."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

_SHARDED = importlib.util.find_spec("bmt_zero") is not None

if TYPE_CHECKING or not _SHARDED:
    Module = nn.Module
else:
    from bmt_zero import DistributedModule

    Module = DistributedModule


def make_parameter(
    shape: tuple[int, ...], dtype: torch.dtype | None, init: Callable[..., Any], *args: Any, **kwargs: Any
) -> nn.Parameter:
    """A parameter filled by ``init(tensor, *args, **kwargs)``; ``init_parameters`` will fill it again.

    Under ``torch.device("meta")`` it holds no values until then.

    Raises:
        RuntimeError: bmt_zero is installed and ``init_distributed`` has not run.
        TypeError: ``dtype`` is not a floating-point one.
    """
    data: Tensor = torch.empty(shape, dtype=dtype)
    if not data.is_floating_point():
        raise TypeError(f"dtype={dtype} cannot be trained; choose a floating-point dtype")
    with torch.no_grad():
        init(data, *args, **kwargs)
    if not _SHARDED:
        return nn.Parameter(data)
    from bmt_zero import DistributedParameter, ParameterInitializer

    return DistributedParameter(data, init_method=ParameterInitializer(init, *args, **kwargs))
