"""Optimizer manager, Adam over shards, learning-rate schedules and cross entropy."""

from . import lr_scheduler
from ._version import __version__
from .adafactor import Adafactor, DistributedAdafactor
from .adam import AdamOptimizer
from .adam_offload import AdamOffloadOptimizer
from .adam_rule import Adam
from .came import CAME, DistributedCAME
from .distributed import DistributedOptimizer
from .exchange import Communication
from .lamb import DistributedLamb, Lamb
from .loss import FusedCrossEntropy
from .manager import OptimManager
from .muon import Muon
from .saving import save_optimizer

__all__ = [
    "CAME",
    "Adafactor",
    "Adam",
    "AdamOffloadOptimizer",
    "AdamOptimizer",
    "Communication",
    "DistributedAdafactor",
    "DistributedCAME",
    "DistributedLamb",
    "DistributedOptimizer",
    "FusedCrossEntropy",
    "Lamb",
    "Muon",
    "OptimManager",
    "__version__",
    "lr_scheduler",
    "save_optimizer",
]
