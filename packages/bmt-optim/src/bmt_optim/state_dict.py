"""Optimizer state dicts over sharded parameters: unsharding tensors, and sharding loaded ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import bmt_comm
from bmt_comm import Slice, StateRecord, local_tensor, reduce_over, shard_of, slice_of

from .logical_params import layers_of
from .slices import by_mesh, unshard


def gather_state(
    state: Mapping[int, Mapping[str, Any]],
    params: Sequence[Tensor],
    tensors: Sequence[Mapping[str, tuple[Slice, torch.dtype]]],
) -> dict[int, dict[str, Any]]:
    """The unsharded state, on the CPU of the rank that keeps it; an empty dict on the others.

    Args:
        state: by parameter index, ``step`` and the tensors that ``tensors[index]`` names, of the local shape.
        params: the parameters, the same ones in the same order on every rank that shares them.
        tensors: the tensors that each parameter's state consists of: which part of each this rank holds, and its
            dtype.
    """
    slices = [slice_of(p) for p in params]
    keep = keeps_gathered_state()
    steps = _agreed_steps([int(state[i]["step"]) if i in state else -1 for i in range(len(params))], slices)
    gathered: dict[int, dict[str, Any]] = {}
    for index, (param, step) in enumerate(zip(params, steps)):
        if step < 0:  # no rank has a state for it
            continue
        entry: dict[str, Any] = {"step": torch.tensor(float(step), dtype=torch.float32, device="cpu")}
        for key, (where, dtype) in tensors[index].items():
            if index in state:
                local = state[index][key]
            else:
                local = torch.zeros(where.local_shape, dtype=dtype, device=param.device)
            full = unshard(local, where)
            if keep:
                # Without shards there was no copy, and the result must not be the memory of the state.
                entry[key] = full.cpu().clone() if full.data_ptr() == local.data_ptr() else full.cpu()
        if keep:
            gathered[index] = entry
    return gathered


LAYERS = "pipeline_layers"
"""The key of :func:`saved_layers` in gathered groups, in a pipeline."""


def saved_layers(params: Sequence[Tensor]) -> list[list[int]]:
    """For each parameter its pipeline and layer, or an empty list, in the form of the file."""
    return [list(layer or ()) for layer in layers_of(params)]


def before_loading(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """What the hooks before ``load_state_dict`` make of ``state_dict``, which they do not change."""
    given: dict[str, Any] = _with_own_containers(state_dict)
    hooks = getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", {})  # wrappers of optimizers may have none
    for hook in hooks.values():
        changed = hook(optimizer, given)
        given = given if changed is None else changed
    return given


def check_before_loading(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], check: Callable[[Mapping[str, Any]], object]
) -> None:
    """Call ``check`` with ``state_dict``, or, if that raises, with what the hooks before loading make of it.

    Hooks are called only where they are needed: a hook may be for one load.
    """
    try:
        check(state_dict)
    except ValueError:
        if not getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", {}):
            raise
        check(before_loading(optimizer, state_dict))


def _with_own_containers(value: Any) -> Any:
    """Other dicts and lists of the same tensors, numbers and strings."""
    if isinstance(value, Mapping):
        return {key: _with_own_containers(entry) for key, entry in value.items()}
    return [_with_own_containers(entry) for entry in value] if isinstance(value, list) else value


def match_groups(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], allow_empty: bool = False
) -> list[tuple[Tensor, Mapping[str, Any] | None]]:
    """Each parameter with its state in ``state_dict``, or ``None`` where that has none.

    Raises:
        ValueError: the numbers of groups or of parameters differ, the state is of another pipeline stage, or, without
            ``allow_empty``, there is no state at all, though a parameter requires a gradient.
    """
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"the state dict has no {key!r}; its keys are {sorted(map(str, state_dict))}")
    mine, saved = optimizer.param_groups, state_dict["param_groups"]
    if len(mine) != len(saved):
        raise ValueError(f"the state dict has {len(saved)} parameter groups and the optimizer has {len(mine)}")
    state = state_dict["state"]
    matched: list[tuple[Tensor, Mapping[str, Any] | None]] = []
    for number, (group, theirs) in enumerate(zip(mine, saved)):
        if len(group["params"]) != len(theirs["params"]):
            raise ValueError(
                f"parameter group {number} has {len(theirs['params'])} parameters in the state dict and "
                f"{len(group['params'])} in the optimizer"
            )
        if LAYERS in theirs and theirs[LAYERS] != saved_layers(group["params"]):
            raise ValueError(
                f"parameter group {number} of the state dict is of other layers of a pipeline than this rank has; give "
                "each stage the state of its own"
            )
        matched += [(param, state.get(key)) for param, key in zip(group["params"], theirs["params"])]
    unknown = set(state) - {key for theirs in saved for key in theirs["params"]}
    if unknown:
        raise ValueError(f"the state dict has state for parameters {sorted(unknown)}, which are in none of its groups")
    if any(param.requires_grad for param, _ in matched) and not state and not allow_empty:
        raise ValueError(
            "the state dict holds no state: it was saved before the first step, or it is what a rank other than "
            "0 gets of a gathered one; load the one of rank 0 on every rank"
        )
    return matched


def state_value(values: Mapping[str, Any], key: str, index: int, where: Slice) -> Tensor:
    """This rank's shard, at ``where``, of the tensor ``values[key]``, which has the local or the full shape.

    Raises:
        ValueError: it is missing, or of another shape.
    """
    value = values.get(key)
    if not isinstance(value, Tensor):
        raise ValueError(
            f"the state of parameter {index} has no tensor {key!r} in the state dict; it has {sorted(map(str, values))}"
        )
    with torch.no_grad():
        local = local_tensor(value)
        if tuple(local.shape) == where.local_shape:
            return local
        if tuple(local.shape) == where.shape:
            return shard_of(local, where)
    raise ValueError(
        f"{key} of parameter {index} has shape {tuple(value.shape)} in the state dict; this rank needs the full "
        f"shape {where.shape} or its part of it, {where.local_shape}"
    )


def whole_number(values: Mapping[str, Any], key: str, index: int) -> int:
    """``values[key]``, a number or a tensor of one element, as an int.

    Raises:
        ValueError: it is neither, or negative, or not whole.
    """
    value = values.get(key)
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0 or value != int(value):
        raise ValueError(f"{key} of parameter {index} is {value!r} in the state dict, not a whole number")
    return int(value)


def step_record(param: Tensor, step: int) -> StateRecord:
    """The number of steps that a parameter has taken. Ranks with an empty shard may lag, and do not count."""
    where = slice_of(param)
    counts = bool(where.numel or not math.prod(where.shape))
    return StateRecord(param, "step", Slice((), 0, 1), torch.tensor(int(step), dtype=torch.int64, device="cpu"), counts)


def _agreed_steps(steps: list[int], slices: Sequence[Slice]) -> list[int]:
    """The largest step of each parameter over the ranks that share it. A rank with an empty shard may lag."""
    agreed = list(steps)
    for mesh, indices in by_mesh(slices):
        if mesh:
            vector = torch.tensor([steps[i] for i in indices], device=mesh[0].device)
            reduce_over(vector, mesh, "max")
            for i, step in zip(indices, vector.tolist()):
                agreed[i] = step
    return agreed


def keeps_gathered_state() -> bool:
    """Whether this is the rank that gets the tensors: rank 0, or the first rank of its pipeline stage."""
    if bmt_comm.is_initialized():
        context = bmt_comm.current_context()
        return context.data_rank == 0 and context.tp_rank == 0
    return not dist.is_initialized() or dist.get_rank() == 0
