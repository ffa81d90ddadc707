"""Learning-rate schedules with a warm-up."""

from bmt_optim.lr_scheduler import Cosine, Exponential, Linear, Noam, NoDecay, WarmupLRScheduler

__all__ = ["Cosine", "Exponential", "Linear", "NoDecay", "Noam", "WarmupLRScheduler"]
