"""The values of ``use_checkpoint``: the results of operations that a checkpointed module keeps besides its inputs."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping

import torch
from torch._ops import OpOverload, OpOverloadPacket

UseCheckpoint = bool | float | str | Collection[OpOverload | OpOverloadPacket]
"""The values of ``use_checkpoint``; see :func:`bmt_zero.shard`."""

MATMULS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_mm",
    "_scaled_mm_v2",
    "_int_mm",
    "_grouped_mm",
    "_scaled_grouped_mm",
    "_scaled_grouped_mm_v2",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
)
"""The operators of ``use_checkpoint="matmuls"``. Some versions of torch do not have all of them."""


class KeptOperations:
    """Keeps the results of all calls of some operators."""

    def __init__(self, operators: Iterable[OpOverload]) -> None:
        self.wanted: Mapping[OpOverload, frozenset[int] | None] = dict.fromkeys(operators)  # None: all calls

    @property
    def use_checkpoint(self) -> UseCheckpoint:
        """A value of ``use_checkpoint`` that means this."""
        return set(self.wanted) or True

    def __str__(self) -> str:
        return "recomputed in backward" + (", but for some operators" if self.wanted else "")


class KeptShare:
    """Keeps a share of a module's activation memory.

    Attributes:
        share: between 0 and 1, both exclusive.
        wanted: the calls of operators whose results are kept; None: the first forward has not run yet.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.wanted: Mapping[OpOverload, frozenset[int]] | None = None

    @property
    def use_checkpoint(self) -> UseCheckpoint:
        """The value of ``use_checkpoint`` that means this."""
        return self.share

    def __str__(self) -> str:
        return f"{self.share:.0%} of their activation memory is kept, the rest is recomputed in backward"


def kept_results(use_checkpoint: UseCheckpoint) -> KeptOperations | KeptShare | None:
    """The results that a checkpointed module keeps; None: all activations, so it is not checkpointed.

    Raises:
        ValueError: ``use_checkpoint`` is none of the values that :func:`bmt_zero.shard` takes.
    """
    if isinstance(use_checkpoint, int):  # also bool
        return KeptOperations(()) if use_checkpoint else None
    if isinstance(use_checkpoint, float):
        if not 0 <= use_checkpoint <= 1:  # also NaN
            raise ValueError(
                f"use_checkpoint={use_checkpoint!r} is not a share of the activation memory; choose one from 0.0 (keep "
                f"inputs only) to 1.0 (keep everything)"
            )
        if use_checkpoint in (0, 1):
            return None if use_checkpoint else KeptOperations(())
        return KeptShare(use_checkpoint)
    if use_checkpoint == "matmuls":
        packets = [getattr(torch.ops.aten, name) for name in MATMULS if hasattr(torch.ops.aten, name)]
        return KeptOperations(op for packet in packets for op in _overloads(packet) if why_not_kept(op) is None)
    if isinstance(use_checkpoint, str) or not isinstance(use_checkpoint, Collection):
        raise ValueError(
            f"use_checkpoint={use_checkpoint!r} says not what is kept; use True, False, a share from 0.0 to 1.0, "
            f"'matmuls', or a set of operators such as {{torch.ops.aten.mm.default}}"
        )
    operators: list[OpOverload] = []
    for op in use_checkpoint:
        if not isinstance(op, (OpOverload, OpOverloadPacket)):
            raise ValueError(
                f"use_checkpoint has {op!r} in it, which is not an operator; use operators such as "
                f"torch.ops.aten.mm.default"
            )
        overloads = [op] if isinstance(op, OpOverload) else _overloads(op)
        able = [each for each in overloads if why_not_kept(each) is None]
        if not able:
            raise ValueError(f"use_checkpoint has {op} in it, {why_not_kept(overloads[0])}")
        operators += able
    return KeptOperations(operators)


def _overloads(packet: OpOverloadPacket) -> list[OpOverload]:
    """The overloads that the dispatcher has. Others are TorchScript's, for numbers and lists."""
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return [op for op in overloads if torch._C._dispatch_has_kernel(op.name())]


@functools.cache
def why_not_kept(op: OpOverload) -> str | None:
    """Why the results of an operator cannot be kept; None: they can."""
    if op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return (
            "which autograd sees as the operators that it is composed of; use those, for example "
            "torch.ops.aten.mm and addmm for linear and matmul"
        )
    if op._schema.is_mutable or any(returned.alias_info is not None for returned in op._schema.returns):
        return "whose result is not a new tensor; use operators that neither write in place nor return views"
    return None
