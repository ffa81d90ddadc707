"""A train script in torchtitan's style: its model and its ranks, sharded by bmtrain.

``parallelize`` has the place of the ``parallelize_fn`` of torchtitan's ``ModelSpec``, which calls ``fully_shard``. The
loop is torchtitan's, shortened. bmtrain sums gradients over ranks, and ``OptimManager`` divides the loss.

Start it with ``torchrun --nproc-per-node 2 torchtitan_script.py``.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3 import llama3_configs

import bmtrain as bmt
from bmt_zero import shard


def parallelize(model: nn.Module, *, parallel_dims: ParallelDims, zero_level: int = 3, **_: Any) -> nn.Module:
    """Shard a torchtitan model in place: each of its layers, and the rest.

    Args:
        model: its ``layers`` are a ``ModuleDict``.
        parallel_dims: only data parallelism is asked for.
        zero_level: see ``bmt_zero.shard``.

    Raises:
        ValueError: another kind of parallelism is asked for.
    """
    if parallel_dims.world_size != parallel_dims.dp_shard:
        raise ValueError(f"{parallel_dims} must have dp_shard={parallel_dims.world_size} and nothing else")
    layers: Any = model.layers
    for layer in layers.values():
        shard(layer, zero_level=zero_level)
    return shard(model, zero_level=zero_level)


class CausalAttention(nn.Module):
    """In the place of torchtitan's flex attention, which has no backward on CPU. Tensors are (B, S, heads, size)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, **options: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        gqa = options.get("enable_gqa", False)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa).transpose(1, 2)


def build(layers: int = 2) -> nn.Module:
    """torchtitan's debug model with so many layers, the same values on every rank."""
    config: Any = llama3_configs["debugmodel"]("flex")
    config.layers = config.layers[:layers]
    torch.manual_seed(0)
    model: nn.Module = config.build()
    model.init_states(buffer_device=torch.device("cpu"))  # type: ignore[operator]
    if not torch.cuda.is_available():
        for layer in model.layers.values():  # type: ignore[operator]
            layer.attention.inner_attention = CausalAttention()
    return model


def batch(step: int, rank: int, rows: int = 2, length: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randint(2048, (rows, length + 1), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    positions = torch.arange(inputs.shape[1], device=tokens.device).expand_as(inputs)
    return F.cross_entropy(model(inputs, positions=positions).flatten(0, 1).float(), targets.flatten())


def train(steps: int = 20, lr: float = 1e-3) -> list[float]:
    """The losses, as means over ranks."""
    context = bmt.init_distributed()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    dims = ParallelDims(dp_replicate=1, dp_shard=world, cp=1, tp=1, pp=1, ep=1, world_size=world)
    model = parallelize(build().to(context.device), parallel_dims=dims)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters(), lr=lr))
    losses = []
    for step in range(steps):
        loss = loss_of(model, batch(step, bmt.rank()).to(context.device))
        manager.zero_grad()
        manager.backward(loss)
        manager.step()
        losses.append(bmt.sum_loss(loss.detach()).item())
    return losses


if __name__ == "__main__":
    for number, value in enumerate(train()):
        bmt.print_rank(f"step {number}: loss {value:.4f}")
