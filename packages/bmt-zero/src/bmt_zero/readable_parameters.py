"""Parameters that other modules read in forward: a fused loss takes the weight of a head that it does not call.

In a wrapped model each large module outside of the layers is unsharded while it computes. To other code that runs in
the model's forward, ``head.weight`` is the gathered parameter, with its whole shape, and gradients flow through it. It
is gathered once in each forward of the model.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .sharded_parameter import ShardedParameter


class ReadableParameters(dict[str, Any]):
    """The ``_parameters`` of a module, where its attributes are looked up."""

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        if not isinstance(param, ShardedParameter) or param.bmt_slice.tp_comm is not None:
            return param  # a layer that is cut computes with its own shard
        step = param.handle.group.step
        step.forget_ended_calls()
        return step.calls[0].read(param) if step.calls else param


def let_others_read(module: nn.Module) -> None:
    """From now on code outside of the module that reads its parameters in a forward gets them gathered."""
    if not isinstance(module._parameters, ReadableParameters):
        module.__dict__["_parameters"] = ReadableParameters(module._parameters)
