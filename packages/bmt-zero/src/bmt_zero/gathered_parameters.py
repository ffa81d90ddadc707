"""A context with unsharded parameters: to merge adapters, change weights as in a plain module, generate, or export."""

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
    """Within, ``module`` and its submodules have unsharded parameters (``nn.Parameter``) in place of sharded ones.

    They are copies without gradients, on every rank, so the module must fit into the memory of one rank. Modules
    compute with them without communication. Every rank must enter and leave the context, and make the same changes:
    each keeps the rows that it holds.

    Args:
        module: a module that this package has sharded. If it contains a part of a Block, all parameters of that Block
            are unsharded. A tensor-parallel layer has this rank's shard.
        write_back: whether to keep changes, in the dtype that parameters are stored in, unless an exception leaves the
            context (it should leave it on all ranks). Otherwise the copies have the dtype of computation, and changes
            are dropped. An optimizer with float32 copies of half-precision parameters reads the changes in
            ``sync_masters()``.

    Raises:
        TypeError: the module has parameters of FSDP2.
        RuntimeError: a forward is running.
        ValueError: at the end, a copy has another shape or dtype than before; no changes are kept then.
    """
    if any(hasattr(param, "placements") for param in module.parameters()):
        raise TypeError("gathered_parameters is for modules that bmt_zero has sharded, and parameters are DTensors")
    groups = dict.fromkeys(p.handle.group for p in module.parameters() if isinstance(p, ShardedParameter))
    for group in groups:
        if group.step.calls:
            raise RuntimeError(f"the parameters of {group.name} are gathered in a forward: gather them outside of it")
    copies: dict[ShardedParameter, nn.Parameter] = {}
    with torch.no_grad():
        for param in [param for group in groups for param in group.params]:
            unsharded: Tensor = param.handle.unshard(stored=True)
            dtype = param.dtype if write_back else param.handle.flat.dtype
            copies[param] = nn.Parameter(unsharded.to(dtype, copy=True), requires_grad=False)
    originals = copies.copy()
    shapes = {param: (copy.shape, copy.dtype) for param, copy in copies.items()}
    places = [(slot.module, slot.name, group.params[slot.index]) for group in groups for slot in group.slots]
    with replaced_parameters(copies):
        alone = [  # the parameters outside of Blocks
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
