"""bmtrain's ZeRO beside accelerate: accelerate starts the processes and divides the data, bmtrain shards the model.

No adapter is needed: what accelerate prepares is the loader alone.

Start it with ``accelerate launch`` or ``torchrun --nproc-per-node 2 accelerate_script.py``.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bmtrain as bmt

ROWS, STEPS = 4, 20


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(30, 30), nn.GELU(), nn.LayerNorm(30)) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(30, 1))


def data() -> TensorDataset:
    x = torch.randn(2 * ROWS * STEPS, 30, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def train(cpu: bool = False, lr: float = 1e-2) -> list[float]:
    """The losses, as means over ranks."""
    accelerator = Accelerator(cpu=cpu)
    bmt.init_distributed()  # adopts accelerate's process group
    loader = accelerator.prepare(DataLoader(data(), batch_size=ROWS))
    model = bmt.BMTrainModelWrapper(build().to(accelerator.device))
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters(), lr=lr))
    losses = []
    for x, y in loader:
        loss = (model(x) - y).square().mean()
        manager.zero_grad()
        manager.backward(loss)
        manager.step()
        losses.append(bmt.sum_loss(loss.detach()).item())
    return losses


if __name__ == "__main__":
    for number, value in enumerate(train(cpu=not torch.cuda.is_available())):
        bmt.print_rank(f"step {number}: loss {value:.4f}")
