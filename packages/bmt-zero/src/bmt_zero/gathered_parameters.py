"""Whole parameters for a while: to merge adapters, change weights as those of a plain module, generate, or export."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bmt_comm import select_rows

from .parameter_group import replaced_parameters
from .sharded_parameter import ShardedParameter


@contextmanager
def gathered_parameters(module: nn.Module, write_back: bool = True) -> Iterator[None]:
    """Within, ``module`` and the modules in it have unsharded parameters (``nn.Parameter``) in place of sharded ones.

    They are copies, which every rank has, so the module must fit into the memory of one. Modules compute with them
    without communication. They have no gradients. Every rank must enter and leave, and change its copies alike, for it
    keeps the rows that it holds.

    Args:
        module: sharded by this package. Parameters of a Block that is partly in it are gathered together. A layer that
            is cut over tensor-parallel ranks has this rank's shard.
        write_back: whether what was changed is kept, in the dtype that parameters are stored in, unless an exception
            leaves (which should leave on all ranks). Otherwise the copies have the dtype of computation, and are
            dropped. An optimizer with float32 copies of half-precision parameters takes changes over by
            ``sync_masters()``.

    Raises:
        TypeError: parameters are FSDP2's.
        RuntimeError: a forward is running.
        ValueError: at the end, a copy has another shape or dtype than before; nothing is written then.
    """
    if any(hasattr(param, "placements") for param in module.parameters()):
        raise TypeError("gathered_parameters is for modules that bmt_zero has sharded, and parameters are DTensors")
    found = dict.fromkeys(p.handle.group for p in module.parameters() if isinstance(p, ShardedParameter))
    for group in found:
        if group.step.calls:
            raise RuntimeError(f"the parameters of {group.name} are gathered in a forward: gather them outside of it")
    copies: dict[ShardedParameter, nn.Parameter] = {}
    with torch.no_grad():
        for param in [param for group in found for param in group.params]:
            whole: Tensor = param.handle.gather(stored=True)
            dtype = param.dtype if write_back else param.handle.flat.dtype
            copies[param] = nn.Parameter(whole.to(dtype, copy=True), requires_grad=False)
    originals = copies.copy()
    shapes = {param: (copy.shape, copy.dtype) for param, copy in copies.items()}
    places = [(slot.module, slot.name, group.params[slot.index]) for group in found for slot in group.slots]
    with replaced_parameters(copies):
        alone = [  # those outside of Blocks
            (part, name, param)
            for part in module.modules()
            for name, param in part._parameters.items()
            if isinstance(param, ShardedParameter)
        ]
        for part, name, param in alone:
            part._parameters[name] = copies[param]
        try:
            yield
            for part, name, param in (*places, *alone):
                now = part._parameters.get(name)
                if isinstance(now, nn.Parameter) and now is not originals[param]:  # a script has set another one
                    copies[param] = now
        finally:
            for part, name, param in alone:
                part._parameters[name] = param
    if not write_back:
        return
    for param, copy in copies.items():
        if (copy.shape, copy.dtype) != shapes[param]:
            raise ValueError(
                f"a parameter of {param.handle.group.name} had shape and dtype {shapes[param]} and has "
                f"{(copy.shape, copy.dtype)}: gathered_parameters keeps values, and no other shape or dtype"
            )
    with torch.no_grad():
        for param, copy in copies.items():
            param.to_local().copy_(select_rows(copy, param.bmt_slice))
