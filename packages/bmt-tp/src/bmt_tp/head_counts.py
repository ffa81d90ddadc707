"""Attributes of attention modules that count heads. They are divided by the number of tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

from torch import nn

from bmt_comm import Communicator

from .matches import owner_of
from .planned_shard import PlannedShard

DIVIDED_ATTRIBUTES = (
    "num_heads",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "n_head",
    "n_heads",
    "n_kv_heads",
    "num_kv_head",
    "split_size",
    "all_head_size",
)
"""Attributes that are divided if the projections of the attention are sharded: numbers of heads, and sizes of all."""

_HEADS = tuple(name for name in DIVIDED_ATTRIBUTES if name not in ("split_size", "all_head_size"))

_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_kv_head")


def divided_heads(
    model: nn.Module, shards: list[PlannedShard], comm: Communicator, attributes: tuple[str, ...] | None
) -> list[tuple[nn.Module, str, int]]:
    """The attributes to set, each as its module, its name and its value."""
    if isinstance(attributes, str):
        raise TypeError(f"divided_attributes={attributes!r} is a string; give a tuple of names, ({attributes!r},)")
    parents: dict[str, nn.Module] = {}
    features: dict[str, list[int]] = {}  # for each of them, the sizes of its layers that are sharded column-wise
    for shard in shards:
        if shard.kind not in ("colwise", "packed_colwise") or shard.parameter is not None:
            continue
        parent_name = owner_of(shard.name)
        parent = parents[parent_name] = model.get_submodule(parent_name)
        size = next(param.shape[dim] for param, dim in shard.sharded_dims())
        _check_heads(shard, parent, size, comm)
        features.setdefault(parent_name, []).append(size // shard.parts)
    divided: list[tuple[nn.Module, str, int]] = []
    shared: dict[nn.Module, int] = {}
    for shard in shards:
        if shard.kind == "shared_heads":
            shared[model.get_submodule(owner_of(shard.name))] = shard.shared_heads
    for parent_name, parent in parents.items():
        if attributes is None:
            _check_clear(parent_name, parent, features[parent_name])
        if parent in shared:  # each rank computes one key and value head
            groups: Any = parent.num_key_value_groups
            divided.append((parent, "num_key_value_groups", groups * shared[parent] // comm.size))
            divided += [(parent, name, 1) for name in _KEY_VALUE_HEADS if hasattr(parent, name)]
        for attribute in DIVIDED_ATTRIBUTES if attributes is None else attributes:
            if parent in shared and attribute in _KEY_VALUE_HEADS:
                continue
            value = getattr(parent, attribute, None)
            if isinstance(value, int) and not isinstance(value, bool):
                _check_divisible(parent_name, parent, attribute, value, comm)
                divided.append((parent, attribute, value // comm.size))
    return divided


def _check_heads(shard: PlannedShard, parent: nn.Module, size: int, comm: Communicator) -> None:
    """Raise ValueError if the ``size`` features of a layer that is sharded column-wise are not equal parts of heads."""
    counts = {v for name in _HEADS if isinstance(v := getattr(parent, name, None), int) and shard.parts == 3}
    if len(counts) > 1:
        raise ValueError(
            f"{shard.name!r} holds queries, keys and values of different numbers of heads {sorted(counts)}, which "
            f"'packed_colwise:3' would shard as equal parts; split it into layers of their own"
        )
    head = getattr(parent, "head_dim", None)
    heads, rest = divmod(size, head * shard.parts) if isinstance(head, int) and head > 0 else (0, 0)
    if rest == 0 and heads % comm.size:
        raise ValueError(
            f"{shard.name!r} has {heads} heads of {head} features, which cannot be divided over {comm.size} "
            "tensor-parallel ranks"
        )


def _check_clear(parent_name: str, parent: nn.Module, sizes: list[int]) -> None:
    """Raise ValueError if a module has an attribute of an unknown name that may be a number of heads."""
    values = {**{name: getattr(parent, name, None) for name in ("heads", "nhead")}, **vars(parent)}
    unclear = next((name for name, value in values.items() if _may_count_heads(name, value, sizes)), None)
    if unclear is not None:
        raise ValueError(
            f"{parent_name!r} has the attribute {unclear!r}: if it counts heads that the plan divides, pass "
            f"divided_attributes=(*DIVIDED_ATTRIBUTES, {unclear!r}), else divided_attributes=DIVIDED_ATTRIBUTES"
        )


def _check_divisible(parent_name: str, parent: nn.Module, attribute: str, value: int, comm: Communicator) -> None:
    """Raise ValueError if an attribute cannot be divided."""
    computed = getattr(type(parent), attribute, None)
    if isinstance(computed, property) and computed.fset is None:
        raise ValueError(
            f"{attribute!r} of {parent_name!r} is a property, which cannot be divided; pass divided_attributes with "
            "the attributes that it is computed from"
        )
    if value % comm.size:
        raise ValueError(
            f"{attribute}={value} of {parent_name!r} cannot be divided over {comm.size} tensor-parallel ranks"
        )


def _may_count_heads(name: str, value: Any, features: list[int]) -> bool:
    """Whether an attribute may be a number of heads. Such a number divides one of ``features``."""
    if name in DIVIDED_ATTRIBUTES or not isinstance(value, int) or isinstance(value, bool):
        return False
    if name in ("heads", "nhead"):
        return True
    if value < 2 or name.startswith("d_"):
        return False
    lengths = ("dim", "size", "index", "idx", "group", "per_head")
    counts = name == "h" or ("head" in name and not any(each in name for each in lengths))
    return counts and any(size % value == 0 for size in features)
