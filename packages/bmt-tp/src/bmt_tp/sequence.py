"""Parameters that are used on this rank's part of the sequence.

Between a row-parallel layer that scatters its output and a column-parallel one that gathers its input, layer norms
and dropout see a part of the sequence on each tensor-parallel rank. What such a norm's weight, which the ranks have
in common, gets as its gradient is then only this part's; the sum over the ranks is wanted. A parameter says so by its
attribute ``sequence_parallel = True``:

- where bmt_zero shards it, its reduction over data-parallel and tensor-parallel ranks takes the sum;
- where it is a plain parameter, a hook sums each gradient over the tensor-parallel ranks as soon as it is there.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from bmt_comm import Communicator

from .parameters import mark_sequence_parallel
from .regions import tensor_comm

M = TypeVar("M", bound=nn.Module)


def sequence_parallel(module: M, comm: Communicator | None = None) -> M:
    """Say that all parameters of ``module`` are used on parts of the sequence.

    To be called before the module becomes a Block, or after.

    Args:
        module: a norm, say; changed in place and returned. Names in its state dict stay as they are.
        comm: the tensor-parallel ranks; by default the context's.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: a parameter is cut over the tensor-parallel ranks itself.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    comm = tensor_comm(comm)
    for name, param in module.named_parameters():
        if getattr(param, "tp_mode", False):
            raise ValueError(
                f"parameter {name!r} is cut over the tensor-parallel ranks; sequence_parallel is for parameters that "
                "they have in common, such as a norm's"
            )
    for part in module.modules():
        if any(param is not None for param in part._parameters.values()):
            keep = _KeepMarked(comm)
            keep(part)
            if comm.size > 1 and not any(isinstance(h, _KeepMarked) for h in part._forward_pre_hooks.values()):
                part.register_forward_pre_hook(keep)
    return module


class _KeepMarked:
    """Marks a module's own parameters before each forward: after ``to_empty`` and ``load_state_dict(assign=True)``
    they are others, and one that was frozen may be trained by now."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def __call__(self, module: nn.Module, *_args: Any) -> None:
        for param in module._parameters.values():
            if isinstance(param, nn.Parameter):  # and not unsharded, as it is while a Block computes
                mark_sequence_parallel(param, self.comm)
