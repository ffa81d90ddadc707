"""The optimizers that ``--optimizer`` names."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

import torch

import bmtrain as bmt
from bmt_comm import slice_of
from models import GPT

LEARNING_RATES = {
    "adam": 1e-3,
    "adam_offload": 1e-3,
    "adafactor": 1e-3,
    "came": 1e-4,
    "lamb": 1e-2,
    "galore": 1e-2,
    "muon": 1e-2,
}
"""The optimizers, and the highest learning rate of each unless --lr is given."""

BETAS = (0.9, 0.95)


def make_optimizers(model: GPT, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """The optimizers that together step all parameters of the model, each parameter by one of them."""
    name, decay = args.optimizer, args.weight_decay
    if name == "galore":
        projected = bmt.optim.get_galore_param_groups(
            model, decay, rank=args.galore_rank, update_proj_gap=args.galore_gap
        )
        return [bmt.optim.GaLoreAdamW(projected, betas=BETAS)]
    if name == "muon":
        # Of embeddings and of the head, a row belongs to a token: they are lists of vectors more than they are maps.
        matrices = [p for p in model.layers.parameters() if len(slice_of(p).shape) >= 2]
        others = set(model.parameters()) - set(matrices)
        rest = parameter_groups((p for p in model.parameters() if p in others), decay)
        return [
            # "match_rms_adamw" makes steps as large as Adam's, so that one learning rate does for both.
            bmt.optim.Muon(matrices, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
            bmt.optim.AdamOptimizer(rest, betas=BETAS),
        ]
    groups = parameter_groups(model.parameters(), decay)
    if name == "adam_offload":
        return [bmt.optim.AdamOffloadOptimizer(groups, betas=BETAS)]
    if name == "adafactor":
        return [bmt.optim.Adafactor(groups, args.lr, scale_parameter=False, relative_step=False)]
    if name == "came":
        return [bmt.optim.CAME(groups, args.lr)]
    if name == "lamb":
        return [bmt.optim.Lamb(groups, betas=BETAS)]
    return [bmt.optim.AdamOptimizer(groups, betas=BETAS)]


def parameter_groups(params: Iterable[torch.Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices with weight decay, and biases and norms without."""
    params = list(params)
    matrices = [p for p in params if p.dim() >= 2]
    vectors = [p for p in params if p.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
