"""Optimizers, and the manager that scales losses and steps them."""

from bmt_optim import (
    CAME,
    Adafactor,
    Adam,
    AdamOffloadOptimizer,
    AdamOptimizer,
    DistGaloreAdamW,
    DistributedAdafactor,
    DistributedCAME,
    DistributedLamb,
    GaLoreAdamW,
    Lamb,
    Muon,
    OptimManager,
    get_galore_param_groups,
    save_optimizer,
)

__all__ = [
    "CAME",
    "Adafactor",
    "Adam",
    "AdamOffloadOptimizer",
    "AdamOptimizer",
    "DistGaloreAdamW",
    "DistributedAdafactor",
    "DistributedCAME",
    "DistributedLamb",
    "GaLoreAdamW",
    "Lamb",
    "Muon",
    "OptimManager",
    "get_galore_param_groups",
    "save_optimizer",
]
