"""torch's optimizers on sharded parameters.

Element-wise optimizers compute with this rank's rows. Optimizers that need logical parameters raise an error.

[Note: states of torch's optimizers]
    An optimizer's states have the shape of this rank's rows. ``state_dict()`` of an optimizer returns logical states on
    every rank, as that of the model returns logical parameters, and ``load_state_dict`` takes logical states. So both
    work for any number of ranks, and ``torch.distributed.checkpoint`` can save them. All ranks must call
    ``state_dict()``.

    The hooks for this are registered with an optimizer before its first step, or before a checkpoint reads or writes
    its states. States that were loaded earlier are replaced by their rows then. Optimizers with their own
    ``state_dict`` (bmt_optim's) get no hooks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from bmt_comm import (
    ShardedRows,
    Slice,
    refuse_whole_layer_optimizers,
    shard_of,
    sharded_rows,
    unshard_tp,
    use_multi_tensor_functions,
)

from .sharded_parameter import ShardedParameter

OF_A_PARAMETER = ("step", "mu_product", "eta", "mu")
"""States with one value for each parameter. If the parameter has no dimensions, only their names tell this."""

_SEEN = "_bmt_sharded_parameters"

_watching = False


def watch_optimizers() -> None:
    """Call :func:`_before_step` and :func:`_after_step` around each step of any optimizer."""
    global _watching
    if not _watching:
        _watching = True
        refuse_whole_layer_optimizers()
        use_multi_tensor_functions(ShardedParameter)
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """A hook before each step of any optimizer."""
    keep_rows(optimizer)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """A hook after each step of any optimizer.

    torch's fused steps do not count their writes in the versions of parameters. Without them, parameters that are
    unsharded already would not get the new values. Ranks without rows count, too: all meet for the values.
    """
    for group in optimizer.param_groups:
        if group.get("fused"):
            for param in group["params"]:
                if isinstance(param, ShardedParameter):
                    torch.autograd.graph.increment_version(param)


def keep_rows(optimizer: Optimizer) -> None:
    """Let the states of an optimizer be those of this rank's rows; see [Note: states of torch's optimizers]."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    seen = optimizer.__dict__.get(_SEEN)
    if seen == count:
        return
    optimizer.__dict__[_SEEN] = count
    params = [param for _, param in _sharded(optimizer)]
    if not params:
        return
    kind = type(optimizer)
    if kind.state_dict is not Optimizer.state_dict or kind.load_state_dict is not Optimizer.load_state_dict:
        return
    if seen is None:
        _add_hooks(optimizer)
        optimizer.__dict__["__deepcopy__"] = partial(_copied, ref(optimizer))
    for param in params:
        _shard_states(optimizer, param, optimizer.state.get(param, {}), were_loaded=seen is None)


def _add_hooks(optimizer: Optimizer) -> None:
    optimizer.register_state_dict_post_hook(_with_logical_states)
    optimizer.register_load_state_dict_pre_hook(_with_rows)


def _copied(original: ref[Optimizer], memo: dict[int, Any]) -> Optimizer:
    """A deep copy of an optimizer, with the hooks, which torch leaves out. Another ``__getstate__`` may keep them."""
    optimizer = original()
    assert optimizer is not None
    copier = optimizer.__dict__.pop("__deepcopy__")
    try:
        twin = copy.deepcopy(optimizer, memo)
    finally:
        optimizer.__dict__["__deepcopy__"] = copier
    twin.__dict__["__deepcopy__"] = partial(_copied, ref(twin))
    if _SEEN not in twin.__dict__:
        _add_hooks(twin)
        twin.__dict__[_SEEN] = optimizer.__dict__[_SEEN]
    return twin


for _hook in (_before_step, _after_step):
    _hook.bmt_for_others = True  # type: ignore[attr-defined]  # bmt_optim's optimizers may step without it


def _sharded(optimizer: Optimizer) -> Iterator[tuple[int, ShardedParameter]]:
    """The parameters whose elements are spread over several ranks, with their numbers in a state dict."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in enumerate(params):
        if isinstance(param, ShardedParameter) and any(comm.size > 1 for comm in param.bmt_slice.communicators):
            yield number, param


def _shard_states(optimizer: Optimizer, param: ShardedParameter, states: dict[str, Any], were_loaded: bool) -> None:
    """Replace logical states by this rank's rows: plain tensors in torch's own optimizers, which are faster.

    Args:
        were_loaded: whether all states of the logical shape are logical. On a rank with all rows, rows have it, too.
    """
    bases = [base for base in type(optimizer).__mro__ if base is not Optimizer]
    where, is_torch = param.bmt_slice, any(base.__module__.startswith("torch.optim") for base in bases)
    for name, value in states.items():
        if _is_per_element(name, value, where) and tuple(value.shape) == where.shape:
            rows = value if where.shape == where.local_shape else shard_of(value, where).clone()
            states[name] = sharded_rows(rows, param) if were_loaded and not is_torch else rows


def _is_per_element(name: str, value: Any, where: Slice) -> bool:
    """Whether a state has a value for each element of a parameter, and not one for the parameter."""
    if not isinstance(value, Tensor):
        return False
    if tuple(value.shape) == (1,) and len(where.shape) != 1:  # a number
        return False
    return bool(value.dim()) if where.shape else name not in OF_A_PARAMETER


def _with_rows(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A hook before ``load_state_dict``."""
    states = {key: dict(values) for key, values in state_dict["state"].items()}
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]  # numbers or names
    for number, param in _sharded(optimizer):
        if number < len(keys):  # otherwise torch raises
            _shard_states(optimizer, param, states.get(keys[number], {}), were_loaded=True)
    return {**state_dict, "state": states}


def _with_logical_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A hook after ``state_dict()``. Every rank must come here."""
    states = dict(state_dict["state"])
    with torch.no_grad():
        for number, param in _sharded(optimizer):
            if number in states:
                states[number] = _logical_states(param, states[number])
    return {**state_dict, "state": states}


def _logical_states(param: ShardedParameter, states: dict[str, Any]) -> dict[str, Any]:
    where, logical = param.bmt_slice, {}
    for name, value in states.items():
        if not _is_per_element(name, value, where):
            logical[name] = value
        elif isinstance(value, ShardedRows):
            logical[name] = value.full_tensor()
        elif tuple(value.shape) == where.local_shape:
            logical[name] = unshard_tp(param.handle.unshard_stored(value), where).to(value.device)
        else:
            raise TypeError(
                f"state {name!r} of a parameter of shape {where.shape} has shape {tuple(value.shape)}; it is neither a "
                f"number nor one for each of this rank's {math.prod(where.local_shape)} elements, and cannot be "
                f"saved for other layouts"
            )
    return logical
