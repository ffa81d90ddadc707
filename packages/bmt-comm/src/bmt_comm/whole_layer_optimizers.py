"""Refuse optimizers that compute with logical parameters on parameters that are sharded."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from .slice import SLICE_ATTRIBUTE

_REFUSED = {
    ("torch", "Adafactor"): "bmt_optim.TorchAdafactor",
    ("torch", "LBFGS"): "an element-wise optimizer",
    ("torch", "Muon"): "bmt_optim.Muon",
    ("transformers", "Adafactor"): "bmt_optim.DistributedAdafactor",
}
"""What to use instead, by the library and the name of the class."""
_SEEN = "_bmt_parameters_seen"

_watching = False


def refuse_whole_layer_optimizers() -> None:
    """From now on, steps of such optimizers raise TypeError if other ranks have other parts of a parameter."""
    global _watching
    if not _watching:
        _watching = True
        register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """A hook before each step of any optimizer."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if optimizer.__dict__.get(_SEEN) == count:
        return
    for cls in type(optimizer).__mro__:
        library = cls.__module__.partition(".")[0]
        if (library, cls.__name__) in _REFUSED:
            for param in (param for group in optimizer.param_groups for param in group["params"]):
                where = getattr(param, SLICE_ATTRIBUTE, None)
                if where is not None and any(comm.size > 1 for comm in where.communicators):
                    raise TypeError(
                        f"{'torch.optim' if library == 'torch' else library}.{cls.__name__} computes with logical "
                        f"parameters, and this rank holds a part of a parameter of shape {where.shape}; use "
                        f"{_REFUSED[library, cls.__name__]}"
                    )
    optimizer.__dict__[_SEEN] = count


_before_step.bmt_for_others = True  # type: ignore[attr-defined]  # bmt_optim's optimizers may step without it
