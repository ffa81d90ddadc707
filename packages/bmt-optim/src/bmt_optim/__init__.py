"""Optimizer manager, Adam over shards, learning-rate schedules and cross entropy."""

from . import lr_scheduler
from ._version import __version__
from .adam import AdamOptimizer
from .adam_offload import AdamOffloadOptimizer
from .loss import FusedCrossEntropy
from .manager import OptimManager
from .saving import save_optimizer

__all__ = [
    "AdamOffloadOptimizer",
    "AdamOptimizer",
    "FusedCrossEntropy",
    "OptimManager",
    "__version__",
    "lr_scheduler",
    "save_optimizer",
]
