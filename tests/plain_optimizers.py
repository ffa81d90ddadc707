"""Optimizers on one device: a published formula, and an author's code."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class LambFormula:
    """Algorithm 2 of arXiv:1904.00962."""

    def __init__(self, params: list[Tensor], lr: float, betas: Any, eps: float, weight_decay: float) -> None:
        self.params, self.t = params, 0
        self.lr, self.betas, self.eps, self.decay = lr, betas, eps, weight_decay
        self.moments = [[torch.zeros_like(p), torch.zeros_like(p)] for p in params]

    @torch.no_grad()
    def step(self) -> None:
        self.t += 1
        one, two = (1 - beta**self.t for beta in self.betas)
        for p, (m, v) in zip(self.params, self.moments):
            assert p.grad is not None
            m.lerp_(p.grad, 1 - self.betas[0])
            v.lerp_(p.grad.square(), 1 - self.betas[1])
            r = (m / one) / ((v / two).sqrt() + self.eps) + self.decay * p
            p.sub_(self.lr * (p.norm() / r.norm() if p.norm() > 0 and r.norm() > 0 else 1) * r)


def galore_torch() -> Any:
    """Its AdamW, without its __init__, which imports bitsandbytes."""
    if "galore_torch" not in sys.modules:
        package = types.ModuleType("galore_torch")
        found = importlib.util.find_spec("galore_torch")
        assert found is not None
        assert found.origin is not None
        package.__path__ = [str(Path(found.origin).parent)]
        package.__spec__ = found  # others look for it, too
        sys.modules["galore_torch"] = package
    return importlib.import_module("galore_torch.adamw").AdamW
