"""Whether a model fits a number of devices, with which settings, and how fast it trains."""

from .devices import DEVICES, Device, measured
from .estimate import Estimate, estimate
from .gpt import PRESETS
from .live_memory import Memory
from .models import PlannedModel, load_model
from .search import Choices, search
from .settings import DTYPES, OPTIMIZERS, Job, Settings

__all__ = [
    "DEVICES",
    "DTYPES",
    "OPTIMIZERS",
    "PRESETS",
    "Choices",
    "Device",
    "Estimate",
    "Job",
    "Memory",
    "PlannedModel",
    "Settings",
    "estimate",
    "load_model",
    "measured",
    "search",
]
