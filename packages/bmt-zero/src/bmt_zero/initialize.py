"""Fill parameters with initial values that do not depend on the layout."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from bmt_comm import ParallelContext, check_agreement, current_context, errors_on_all

from .fill_order import Fill, generators_of_rank_0, run_in_order, without_drawing
from .resets import Reset, find_resets, inner_first, like
from .shard import sharding_of
from .sharded_parameter import ShardedParameter
from .state import write_logical


def init_parameters(model: nn.Module, *, seed: int | None = None) -> None:
    """Run the initialiser of every sharded parameter of ``model``.

    Parameters with an ``init_method`` are filled by it. Parameters and buffers that were built on the meta device are
    filled by the ``reset_parameters`` (or ``_reset_parameters``; in a Hugging Face model by the model's
    ``_init_weights``) of their module or of an outer module. All others are not changed, nor are Blocks that were
    built with ``initialized=True``.

    Values are drawn from torch's generators: first parameter by parameter in the order of ``model.parameters()``, then
    module by module, inner modules first. So a model has the values that one process would draw for it from the same
    seed, for every number of ranks, ZeRO level, tensor-parallel size and pipeline. Modules that are initialised one by
    one have different values. The logical parameter is filled, and each rank keeps its rows. One parameter at a time is
    unsharded; for ``reset_parameters``, the parameters that one module fills. Pipeline stages fill their layers one
    after the other.

    The states of rank 0's generators are used. If the generators of a rank had the same states before, they continue
    after the drawn values, as in one process. Otherwise they keep their states.

    Args:
        model: the module.
        seed: seed the generators with it, and restore them afterwards.

    Raises:
        TypeError: ``model`` is not a module.
        RuntimeError: ranks have different models.
        ValueError: none of these fills a tensor that was built on the meta device (the model is not changed then), or
            one of them fills a tensor only in part.
    """
    context = current_context()
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    shardings = {path: sharding for path, m in model.named_modules() if (sharding := sharding_of(m)) is not None}
    for path, sharding in shardings.items():
        if path:
            sharding.group.name = f"{path} (a {type(sharding.hooks.module).__name__})"
    settled = {id(p) for sharding in shardings.values() if sharding.initialized for p in sharding.group.params}
    named = {
        name: param
        for name, param in model.named_parameters()
        if isinstance(param, ShardedParameter) and id(param) not in settled
    }
    check_agreement(context.zero, "init_parameters", [f"{n}: {p.bmt_slice.shape} {p.dtype}" for n, p in named.items()])
    waiting = {id(p): n for n, p in named.items() if p.awaits_values and p.init_method is None}
    local = {path for path, sharding in shardings.items() if sharding.group.options.stage_local}
    with generators_of_rank_0(context, seed):
        with errors_on_all(context.pipe), without_drawing(context):  # stages have different layers
            resets = find_resets(model, waiting)
        fills = [
            Fill(name.rpartition(".")[0], functools.partial(_fill, param, context))
            for name, param in named.items()
            if param.init_method is not None
        ]
        run_in_order(fills, list(model.named_modules()), local, context)
        fills = [Fill(reset.path, functools.partial(_run_reset, reset, context)) for reset in resets]
        run_in_order(fills, inner_first(model), local, context)


def _fill(param: ShardedParameter, context: ParallelContext) -> None:
    """Fill the logical parameter by its ``init_method``."""
    assert param.init_method is not None
    values = torch.empty(param.bmt_slice.shape, dtype=param.dtype, device=context.device)
    with torch.no_grad():
        param.init_method(values)
    write_logical(param, values)


def _marker_of(dtype: torch.dtype) -> float | None:
    """A value that no function fills a tensor with; None: there is none."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return torch.iinfo(dtype).min if dtype in (torch.int16, torch.int32, torch.int64) else None


def _run_reset(reset: Reset, context: ParallelContext) -> None:
    """Call it with unsharded tensors in place of the parameters and buffers, and keep this rank's rows.

    Raises:
        ValueError: it fills only a part of a tensor.
    """
    before = [(tensors, name, tensors[name]) for tensors, name in reset.places]
    unsharded: dict[int, Tensor] = {}
    for tensor in {id(t): t for _, _, t in before}.values():
        values = unsharded[id(tensor)] = like(tensor, context.device)
        if tensor.is_meta or (isinstance(tensor, ShardedParameter) and tensor.awaits_values):
            if (marker := _marker_of(values.dtype)) is not None:
                values.fill_(marker)
        else:
            values.copy_(tensor.gather_all() if isinstance(tensor, ShardedParameter) else tensor)
    results: list[Any] = []
    try:
        for tensors, name, tensor in before:
            tensors[name] = unsharded[id(tensor)]
        with torch.no_grad():
            reset.function()
        results = [tensors[name] for tensors, name, _ in before]  # it may replace tensors
    finally:
        for tensors, name, tensor in before:
            tensors[name] = tensor
    for (tensors, name, tensor), result in zip(before, results, strict=True):
        if id(tensor) not in reset.fills:
            continue
        marker = _marker_of(result.dtype)
        if marker is not None and bool((result.isnan() if math.isnan(marker) else result == marker).any()):
            raise ValueError(f"{name!r} (near {reset.name!r}) was built on the meta device and is filled only in part")
        if isinstance(tensor, ShardedParameter):
            write_logical(tensor, result.detach())
        elif tensor.is_meta:
            tensors[name] = result.detach().to(context.device)
