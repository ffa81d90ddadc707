"""Parameters that are used on this rank's part of the sequence.

Between a row-parallel layer that scatters its output and a column-parallel one that gathers its input, layer norms
and dropout see a part of the sequence on each tensor-parallel rank. The weight of such a norm is replicated, and its
gradient is that of this part only, so it must be summed over the ranks. The attribute ``sequence_parallel = True`` of a
parameter asks for this:

- if bmt_zero shards the parameter, its reduction over data-parallel and tensor-parallel ranks includes the sum;
- if the parameter is plain, a hook sums each gradient over the tensor-parallel ranks as soon as it is computed.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from bmt_comm import Communicator

from .parameters import mark_sequence_parallel
from .regions import tensor_comm

M = TypeVar("M", bound=nn.Module)


def sequence_parallel(module: M, comm: Communicator | None = None) -> M:
    """Mark all parameters of ``module`` as used on parts of the sequence.

    It may be called before the module becomes a Block, or after.

    Args:
        module: a norm, say; changed in place and returned. Names in its state dict stay the same.
        comm: the tensor-parallel ranks; by default the context's.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: a parameter is sharded over the tensor-parallel ranks.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    comm = tensor_comm(comm)
    for name, param in module.named_parameters():
        if getattr(param, "tp_mode", False):
            raise ValueError(
                f"parameter {name!r} is sharded over the tensor-parallel ranks; sequence_parallel is for parameters "
                "that they have in common, such as a norm's"
            )
    for part in module.modules():
        if any(param is not None for param in part._parameters.values()):
            keep = _KeepMarked(comm)
            keep(part)
            if comm.size > 1 and not any(isinstance(h, _KeepMarked) for h in part._forward_pre_hooks.values()):
                part.register_forward_pre_hook(keep)
    return module


class _KeepMarked:
    """Marks a module's own parameters before each forward.

    ``to_empty`` and ``load_state_dict(assign=True)`` replace them, and a frozen one may be trained now.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def __call__(self, module: nn.Module, *_args: Any) -> None:
        for param in module._parameters.values():
            if isinstance(param, nn.Parameter):  # while a Block computes, it is an unsharded tensor
                mark_sequence_parallel(param, self.comm)
