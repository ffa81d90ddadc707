"""Loss functions."""

from bmt_optim import FusedCrossEntropy

__all__ = ["FusedCrossEntropy"]
