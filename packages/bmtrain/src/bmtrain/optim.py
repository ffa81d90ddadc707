"""Optimizers, and the manager that scales losses and steps them."""

from bmt_optim import AdamOptimizer, OptimManager

__all__ = ["AdamOptimizer", "OptimManager"]
