"""Which storages belong to parameters, to their gradients (also unreduced ones), and to what is unsharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from bmt_comm import local_tensor


def owned_storages(params: Iterable[Tensor]) -> Iterator[tuple[str, torch.UntypedStorage]]:
    """The storages of parameters, sharded or not, each with its owner; one may come several times.

    Owners are "parameters", "gradients" and "unsharded parameters". At ZeRO levels 0 to 2 parameters stay unsharded,
    and that storage is the parameters' own. Nothing is communicated.
    """
    params = list(params)
    for param in params:
        yield "parameters", local_tensor(param.detach()).untyped_storage()
        handle = getattr(param, "handle", None)
        if handle is not None:
            yield "parameters", handle.reducer.flat.shard.untyped_storage()
    for param in params:
        if param.grad is not None:
            yield "gradients", local_tensor(param.grad).untyped_storage()
        handle = getattr(param, "handle", None)
        for gradient in handle.reducer.waiting() if handle is not None else ():
            yield "gradients", gradient.untyped_storage()  # at levels 2 and 3 that of unsharded parameters, lent
    for param in params:
        handle = getattr(param, "handle", None)
        if handle is not None:
            yield "unsharded parameters", handle.reducer.flat.unsharded.untyped_storage()
