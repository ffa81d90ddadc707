"""Conversion of optimizers that were written for one device to distributed ones, which take their places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bmt_comm import is_deterministic, slice_of

from .adapters import ADAPTERS, ELEMENTWISE, REFUSED, explanation, known_name
from .distributed import DistributedOptimizer

_FORWARDED = (
    *("step", "add_param_group"),  # torch's own zero_grad stays
    *("state_dict", "load_state_dict", "state_records", "adopt_state_records"),
)
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


@torch.no_grad()
def to_distributed(optimizer: torch.optim.Optimizer, params: Iterable[Tensor] | None = None) -> DistributedOptimizer:
    """Our optimizer that computes over shards what ``optimizer`` computes on one device.

    ======================================== ==========================================
    class                                    becomes
    ======================================== ==========================================
    torch.optim.Adam                         Adam
    torch.optim.AdamW, AdamOptimizer         AdamW
    torch.optim.Adafactor                    TorchAdafactor
    torch.optim.Muon                         Muon
    transformers.Adafactor                   Adafactor
    came_pytorch.CAME                        CAME
    galore_torch.GaLoreAdamW                 GaLoreAdamW, with ``nbits=32``
    any DistributedOptimizer                 itself, with its state sharded as needed
    ======================================== ==========================================

    Groups, options and state are taken over, also after training. The parameters may have been sharded since they were
    given to ``optimizer``: state tensors of the full shape are then sharded as the parameters are. State becomes fp32,
    and half-precision parameters get fp32 masters.

    ``optimizer`` then forwards to the result: it has the same groups (the same dicts) and state, and stepping it steps
    the result. So a scheduler, say, can go on referring to it.

    Args:
        optimizer: as in the table, or of a class derived from one of these that overrides no method.
        params: the parameters that take the places of the optimizer's, in the same order; by default its own.

    Raises:
        TypeError: there is no such optimizer, or it does not take the parameters.
        ValueError: an option has no counterpart; the state does not fit; ``params`` are too few or too many.

        Nothing has been changed then.
    """
    groups = _with_params(optimizer, params)
    name = known_name(type(optimizer))
    if isinstance(optimizer, DistributedOptimizer) and name is None:
        return _reshard(optimizer, groups)
    if name not in ADAPTERS:
        raise TypeError(explanation(type(optimizer)))
    adapter = ADAPTERS[name]
    for number, group in enumerate(groups):
        try:
            group.update(adapter.options(group))
        except ValueError as error:
            raise ValueError(f"param_groups[{number}] of {type(optimizer).__name__}: {error}") from None
    made = adapter.target(groups, **adapter.options(optimizer.defaults))
    old = [p for group in optimizer.param_groups for p in group["params"]]
    state = {index: adapter.state(optimizer.state[p]) for index, p in enumerate(old) if optimizer.state.get(p)}
    _load(made, state)
    _take_place(made, optimizer)
    return made


def distributed_where_needed(optimizer: Any, elementwise: bool = False) -> Any:
    """``optimizer`` if it is right over its parameters as they are sharded, otherwise the optimizer it is converted to.

    Args:
        elementwise: treat an optimizer of an unknown class as element-wise. Its attribute of this name does the same.

    Raises:
        TypeError: it would be wrong, or is not known to be right, and there is no conversion.
        ValueError: it cannot be converted as it is.
    """
    optimizer = vars(optimizer).get("_stands_for", optimizer)
    if isinstance(optimizer, DistributedOptimizer):
        return optimizer
    same_bits = is_deterministic()  # one rank must use the optimizer of several
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if same_bits and fused and any(p.device.type == "cpu" for g in optimizer.param_groups for p in g["params"]):
        raise ValueError(
            f"fused=True: on the CPU, {type(optimizer).__name__} then rounds an element by its place in memory, which "
            "depends on the number of ranks; with deterministic=True, leave fused out"
        )
    if not same_bits and not any(slice_of(p).communicators for g in optimizer.param_groups for p in g["params"]):
        return optimizer
    name = known_name(type(optimizer))
    if name in ELEMENTWISE:
        return optimizer
    if name not in ADAPTERS and name not in REFUSED and (elementwise or getattr(optimizer, "elementwise", False)):
        return optimizer
    return to_distributed(optimizer)


def _with_params(optimizer: torch.optim.Optimizer, params: Iterable[Tensor] | None) -> list[dict[str, Any]]:
    """Copies of the parameter groups, with other parameters."""
    groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    if params is None:
        return groups
    given = list(params)
    count = sum(len(group["params"]) for group in groups)
    if len(given) != count or not all(isinstance(p, Tensor) for p in given):
        raise ValueError(f"params are {len(given)} and must be {count} tensors: one for each that the optimizer has")
    old = [p for group in groups for p in group["params"]]
    for index, (a, b) in enumerate(zip(old, given)):
        if slice_of(a).shape != slice_of(b).shape:
            raise ValueError(
                f"params[{index}] has shape {slice_of(b).shape}, and the optimizer's parameter {slice_of(a).shape}"
            )
    rest = iter(given)
    for group in groups:
        group["params"] = [next(rest) for _ in group["params"]]
    return groups


def _load(optimizer: DistributedOptimizer, state: Mapping[int, Mapping[str, Any]]) -> None:
    if not state:  # before the first step
        return
    groups, count = [], 0
    for group in optimizer.param_groups:
        groups.append({**group, "params": list(range(count, count + len(group["params"])))})
        count += len(group["params"])
    full = {index: {key: _without_copies(value) for key, value in entry.items()} for index, entry in state.items()}
    optimizer.load_state_dict({"state": full, "param_groups": groups})


def _without_copies(value: Any) -> Any:
    """The full tensor of a DTensor that is not sharded; anything else as it is."""
    placements = getattr(value, "placements", None)
    return value.full_tensor() if placements and not any(p.is_shard() for p in placements) else value


def _take_place(new: DistributedOptimizer, old: torch.optim.Optimizer) -> None:
    """Let ``old`` forward to ``new``: with its groups, state and hooks, and its methods."""
    for theirs, group in zip(old.param_groups, new.param_groups):
        theirs.update(group)
    new.param_groups, old.state, old.defaults = old.param_groups, new.state, new.defaults
    for name in _HOOKS:
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))
    for name in _FORWARDED:
        setattr(old, name, getattr(new, name))
    old._stands_for = new  # type: ignore[attr-defined]
    old._opt_called = True  # type: ignore[attr-defined]  # for torch's schedulers; see DistributedOptimizer.step


def _reshard(optimizer: DistributedOptimizer, groups: Sequence[dict[str, Any]]) -> DistributedOptimizer:
    before = [group["params"] for group in optimizer.param_groups]
    held = dict(optimizer.state)
    state = {i: held[p] for i, p in enumerate(p for params in before for p in params) if p in held}
    try:
        for group, changed in zip(optimizer.param_groups, groups):
            group["params"] = changed["params"]
            optimizer._check_group(group)
        _load(optimizer, state)
    except BaseException:
        for group, params in zip(optimizer.param_groups, before):
            group["params"] = params
        optimizer.state.clear()
        optimizer.state.update(held)
        raise
    finally:
        optimizer._plan = None
        optimizer._layouts = optimizer._current_layouts()
    return optimizer
