"""The storages of parameters, of their gradients (also unreduced ones), and of unsharded parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from bmt_comm import local_tensor


def owned_storages(params: Iterable[Tensor]) -> Iterator[tuple[str, torch.UntypedStorage]]:
    """The storages of parameters, sharded or not, each with its owner. A storage may come several times.

    Owners are "parameters", "gradients" and "unsharded parameters". At ZeRO levels 0 to 2 parameters stay unsharded,
    and the storage is that of the parameters. Nothing is communicated.
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
            yield "gradients", gradient.untyped_storage()  # at levels 2 and 3 perhaps that of unsharded parameters
    for param in params:
        handle = getattr(param, "handle", None)
        if handle is not None:
            yield "unsharded parameters", handle.reducer.flat.unsharded.untyped_storage()
