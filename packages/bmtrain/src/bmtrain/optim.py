"""Optimizers, and the manager that scales losses and steps them."""

from bmt_optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager, save_optimizer

__all__ = ["AdamOffloadOptimizer", "AdamOptimizer", "OptimManager", "save_optimizer"]
