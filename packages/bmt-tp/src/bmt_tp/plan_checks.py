"""Checks of a plan as a whole: experts and the sums of their results, tied parameters, parts of the sequence."""

from __future__ import annotations

from torch import nn

from bmt_comm import Slice

from .matches import SHARDING_STYLES, owner_of
from .planned_shard import PlannedShard, is_vector


def check_experts(shards: list[PlannedShard]) -> None:
    """Check parameters that the plan names themselves.

    Raises:
        ValueError: those of packed experts have no ``experts`` module that sums the ranks' results, or an ``experts``
            module has none; a vector has no column-wise layer in its module; or a ``moe_identity_expert`` is in no
            ``experts`` module.
    """
    summed = {id(shard.module) for shard in shards if shard.kind == "experts"}
    with_parameters = {id(shard.module) for shard in shards if shard.parameter is not None}
    in_experts = tuple(shard.name + "." for shard in shards if shard.kind == "experts")
    for shard in shards:
        if shard.kind == "experts" and id(shard.module) not in with_parameters:
            raise ValueError(
                f"the plan has {shard.name!r} as 'experts', and shards no parameter of it; name these, too"
            )
        if shard.kind == "moe_identity_expert" and not shard.name.startswith(in_experts):
            raise ValueError(
                f"the plan has {shard.name!r} as 'moe_identity_expert', and no module around it as 'experts'"
            )
    with_columns = {owner_of(shard.name) for shard in shards if shard.is_column and shard.parameter is None}
    for shard in shards:
        if shard.parameter is None:
            continue
        if is_vector(shard.module._parameters[shard.parameter]):
            if shard.name not in with_columns:
                raise ValueError(
                    f"the plan shards the parameter {shard.parameter!r} of {shard.name!r}, and no layer of it "
                    "column-wise"
                )
        elif id(shard.module) not in summed:
            raise ValueError(
                f"the plan shards the parameter {shard.parameter!r} of {shard.name!r}; it must have {shard.name!r} "
                "itself as 'experts', so that what the ranks compute is summed"
            )


def planned_slices(model: nn.Module, shards: list[PlannedShard]) -> list[tuple[nn.Parameter, Slice]]:
    """This rank's slice of each parameter that the plan shards. Tied parameters appear once.

    Raises:
        ValueError: modules that share a parameter would shard it differently, or one of them not at all.
    """
    slices: dict[int, tuple[nn.Parameter, Slice]] = {}
    owners: dict[int, str] = {}
    for shard in shards:
        for param, where in shard.slices():
            other = slices.get(id(param))
            if other is not None and other[1] != where:
                raise ValueError(
                    f"{owners[id(param)]!r} and {shard.name!r} share a parameter and are sharded differently"
                )
            slices[id(param)] = (param, where)
            owners[id(param)] = shard.name
    sharded_modules = {id(shard.module) for shard in shards if shard.kind in SHARDING_STYLES}
    for name, module in model.named_modules():
        for param in module._parameters.values():
            # The head of BERT also has the bias of the layer in it. If it computed with that, shapes would not fit.
            is_held = id(param) in slices and param.dim() == 1 and owners[id(param)].rpartition(".")[0] == name
            if id(param) in slices and id(module) not in sharded_modules and not is_held:
                raise ValueError(
                    f"{name!r} shares a parameter with {owners[id(param)]!r}, which the plan shards; "
                    "put it into the plan, too"
                )
    return list(slices.values())


def check_sequence(shards: list[PlannedShard], slices: list[tuple[nn.Parameter, Slice]]) -> None:
    """Raise ValueError if the plan shards a parameter of a module that works on a part of the sequence."""
    sharded_params = {id(param) for param, _ in slices}
    for shard in shards:
        if shard.kind in ("sequence", "sequence_end", "ulysses"):
            for name, param in shard.module.named_parameters():
                if id(param) in sharded_params or getattr(param, "tp_mode", False):
                    raise ValueError(
                        f"the plan has {shard.name!r} as {shard.kind!r}, and shards its parameter {name!r}; "
                        f"{shard.kind!r} is for modules, such as norms, that ranks have in common"
                    )
