"""Optimizer manager, Adam over shards, learning-rate schedules and cross entropy."""

from . import lr_scheduler
from ._version import __version__
from .adam import AdamOptimizer
from .loss import FusedCrossEntropy
from .manager import OptimManager

__all__ = ["AdamOptimizer", "FusedCrossEntropy", "OptimManager", "__version__", "lr_scheduler"]
