"""The published GaLore, from galore-torch as installed."""

import importlib
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn


def _folder():
    """Where galore-torch is installed, or ``None``."""
    if importlib.util.find_spec("transformers") is None:
        return None
    spec = importlib.util.find_spec("galore_torch")
    return None if spec is None else Path(spec.origin).parent


FOLDER = _folder()
needs_galore_torch = pytest.mark.skipif(FOLDER is None, reason="galore-torch and transformers are not installed")


def galore_torch(module):
    """A module of galore-torch. Its ``__init__`` would import bitsandbytes, which nothing here needs."""
    if "galore_torch" not in sys.modules:
        package = types.ModuleType("galore_torch")
        package.__path__ = [str(FOLDER)]
        package.__spec__ = importlib.util.find_spec("galore_torch")  # others look for it, too
        sys.modules["galore_torch"] = package
    return importlib.import_module(f"galore_torch.{module}")


def reference_optimizer(groups, **options):
    return galore_torch("adamw").AdamW(groups, no_deprecation_warning=True, **options)


def on_rank_0(compute):
    """What ``compute`` returns on rank 0, on all ranks: the import is slow."""
    shared = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    return shared[0]


def trained(start, groups_of, gradients, steps, **options):
    """The parameters after ``steps``, by the reference; ``groups_of`` makes groups of a list of parameters."""
    params = [nn.Parameter(t.clone()) for t in start]
    optimizer = reference_optimizer(groups_of(params), **options)
    step_reference(optimizer, params, gradients, steps)
    return params, optimizer


def step_reference(optimizer, params, gradients, steps):
    for step in steps:
        for p, g in zip(params, gradients(step)):
            p.grad = g.clone()
        with torch.no_grad():
            optimizer.step()
