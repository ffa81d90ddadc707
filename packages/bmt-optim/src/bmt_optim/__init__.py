"""Optimizer manager, Adam over shards, learning-rate schedules and cross entropy."""

from . import lr_scheduler
from ._version import __version__
from .adafactor import Adafactor, DistributedAdafactor
from .adam import AdamOptimizer
from .adam_offload import AdamOffloadOptimizer
from .adam_rule import Adam
from .came import CAME, DistributedCAME
from .convert import to_distributed
from .distributed import DistributedOptimizer
from .exchange import Communication
from .galore import DistGaloreAdamW, GaLoreAdamW, get_galore_param_groups
from .lamb import DistributedLamb, Lamb
from .loss import FusedCrossEntropy
from .loss_spikes import LossSpikes
from .manager import OptimManager
from .muon import Muon
from .saving import save_optimizer
from .torch_adafactor import TorchAdafactor

__all__ = [
    "CAME",
    "Adafactor",
    "Adam",
    "AdamOffloadOptimizer",
    "AdamOptimizer",
    "Communication",
    "DistGaloreAdamW",
    "DistributedAdafactor",
    "DistributedCAME",
    "DistributedLamb",
    "DistributedOptimizer",
    "FusedCrossEntropy",
    "GaLoreAdamW",
    "Lamb",
    "LossSpikes",
    "Muon",
    "OptimManager",
    "TorchAdafactor",
    "__version__",
    "get_galore_param_groups",
    "lr_scheduler",
    "save_optimizer",
    "to_distributed",
]
