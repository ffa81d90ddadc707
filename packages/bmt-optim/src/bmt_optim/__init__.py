"""Optimizer manager, Adam over shards, learning-rate schedules and cross entropy."""

from . import lr_scheduler
from ._version import __version__
from .adafactor import Adafactor, DistributedAdafactor
from .adam import Adam, AdamOptimizer, AdamW
from .adam_mini import AdamMini, get_adam_mini_param_groups
from .adam_offload import AdamOffloadOptimizer
from .adamw8bit import AdamW8bit
from .ademamix import AdEMAMix
from .apollo import APOLLO
from .came import CAME, DistributedCAME
from .convert import to_distributed
from .dion import Dion
from .distributed import DistributedOptimizer
from .exchange import Communication
from .galore import DistGaloreAdamW, GaLoreAdamW, get_galore_param_groups
from .lamb import DistributedLamb, Lamb
from .lion import Lion
from .loss import FusedCrossEntropy
from .loss_spikes import LossSpikes
from .manager import OptimManager
from .muon import POLAR_EXPRESS, Muon, get_muon_param_groups
from .qk_clip import QKClip, largest_logits
from .saving import save_optimizer
from .schedule_free import ScheduleFreeAdamW
from .shampoo import DistributedShampoo
from .soap import SOAP
from .torch_adafactor import TorchAdafactor

__all__ = [
    "APOLLO",
    "CAME",
    "POLAR_EXPRESS",
    "SOAP",
    "AdEMAMix",
    "Adafactor",
    "Adam",
    "AdamMini",
    "AdamOffloadOptimizer",
    "AdamOptimizer",
    "AdamW",
    "AdamW8bit",
    "Communication",
    "Dion",
    "DistGaloreAdamW",
    "DistributedAdafactor",
    "DistributedCAME",
    "DistributedLamb",
    "DistributedOptimizer",
    "DistributedShampoo",
    "FusedCrossEntropy",
    "GaLoreAdamW",
    "Lamb",
    "Lion",
    "LossSpikes",
    "Muon",
    "OptimManager",
    "QKClip",
    "ScheduleFreeAdamW",
    "TorchAdafactor",
    "__version__",
    "get_adam_mini_param_groups",
    "get_galore_param_groups",
    "get_muon_param_groups",
    "largest_logits",
    "lr_scheduler",
    "save_optimizer",
    "to_distributed",
]
