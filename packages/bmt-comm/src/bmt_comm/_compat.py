"""The one place that knows how torch versions differ in what this package calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 renamed the single-tensor collectives and deprecates the old names.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def stash_in_thread(key: str, value: Any) -> None:
    """Keep a value in this thread, and in those that autograd runs this thread's backward passes in; None: no value.

    A thread that ends with a value in it waits for the interpreter's lock, possibly for ever; torch 2.13 can remove
    the entry.
    """
    if value is None and hasattr(torch._C, "_remove_obj_from_tls"):
        if torch._C._is_key_in_tls(key):
            torch._C._remove_obj_from_tls(key)
    else:
        torch._C._stash_obj_in_tls(key, value)


def stashed_in_thread(key: str) -> Any:
    """What :func:`stash_in_thread` has kept, or None."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None
