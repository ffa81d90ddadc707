"""Statistics of the parameters of a model and of their gradients."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bmt_comm import (
    Communicator,
    current_context,
    is_initialized,
    is_stage_local,
    local_rows,
    local_tensor,
    scale_of,
    slice_of,
)

from .shard import sharding_of
from .stage_entry import natural_key
from .statistics import Statistics, as_statistics, describe, over_ranks, summary_of


@torch.no_grad()
def inspect_model(model: nn.Module, param_name: str, prefix: str = "") -> list[dict[str, Any]]:
    """Statistics of the logical parameters of a model, and of their gradients. Every rank must call it.

    Args:
        model: any module, sharded or not, with layers of other pipeline stages or not.
        param_name: which parameters: a pattern for names, in which ``*`` is anything.
        prefix: of all names.

    Returns:
        The same on every rank: for each parameter a dictionary with ``name``, ``shape``, ``max``, ``min``, ``mean``,
        ``std``, ``grad_max``, ``grad_min``, ``grad_mean`` and ``grad_std``. Gradients are divided by their loss scale:
        that of the ``OptimManager`` that steps the parameter, or of the last backward. The statistics of a missing
        gradient are 0.
    """
    entries: list[tuple[str, nn.Parameter]] = []
    positions: list[tuple[int, tuple[Any, ...], int]] = []  # in the order of all stages
    blocks = _blocks(model)
    outside = 0
    for index, (name, param) in enumerate(model.named_parameters(remove_duplicate=False)):
        local = is_stage_local(param)
        outside += not local
        if fnmatch.fnmatchcase(prefix + name, param_name):
            entries.append((prefix + name, param))
            positions.append((outside, natural_key(blocks[name]) if local else (), index))
    params = [param for _, param in entries]
    summary = [
        {"name": name, "shape": slice_of(param).shape, **summary_of(values, grad and grad.divided_by(scale), 0.0)}
        for (name, param), (values, grad) in zip(entries, _statistics(params), strict=True)
        for scale in (1.0 if param.grad is None else scale_of(param.grad),)
    ]
    if not is_initialized() or current_context().pipe_size == 1:
        return summary
    pipe = current_context().pipe_host
    items = list(zip(positions, summary, strict=True))
    others = [theirs for stage, theirs in enumerate(pipe.all_gather_object(items)) if stage != pipe.rank]
    items += [each for theirs in others for each in theirs if each[0][1]]
    return [item for _, item in sorted(items, key=lambda each: each[0])]


def _blocks(model: nn.Module) -> dict[str, str]:
    """The names of parameters in sharded modules, each with the name of its module."""
    return {
        f"{path}.{name}" if path else name: path
        for path, module in model.named_modules(remove_duplicate=False)
        if sharding_of(module) is not None
        for name, _ in module.named_parameters(remove_duplicate=False)
    }


def _statistics(params: Sequence[nn.Parameter]) -> list[tuple[Statistics | None, Statistics | None]]:
    """The statistics of each parameter and its gradient. Does one all-gather for each communicator over rows."""
    numbers: dict[nn.Parameter, Tensor] = {}
    shared: dict[tuple[Communicator, ...], list[nn.Parameter]] = {}
    for param in dict.fromkeys(params):
        grad = None if param.grad is None else local_tensor(local_rows(param.grad))
        values = local_tensor(param).detach()
        numbers[param] = torch.stack([describe(values), describe(grad).to(values.device)])
        shared.setdefault(slice_of(param).communicators, []).append(param)
    for communicators in sorted(shared, key=lambda communicators: [comm.ranks for comm in communicators]):
        together = torch.cat([numbers[param] for param in shared[communicators]])
        for comm in communicators:
            together = over_ranks(together, comm)
        numbers.update(zip(shared[communicators], together.split(2), strict=True))
    results = {param: as_statistics(pair) for param, pair in numbers.items()}
    return [(results[param][0], results[param][1]) for param in params]
