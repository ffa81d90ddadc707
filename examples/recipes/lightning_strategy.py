"""Lightning's Trainer over a module that bmtrain shards.

The Trainer keeps its loop, callbacks, logging and checkpoints. The strategy wraps the models in a LightningModule by
``BMTrainModelWrapper`` in the place of ``DistributedDataParallel``, and divides the loss by the number of replicas,
because bmtrain sums gradients over ranks.

Start it with ``torchrun --nproc-per-node 2 lightning_strategy.py``.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

import bmtrain as bmt


class ShardedStrategy(DDPStrategy):
    """Data parallelism by bmtrain's ZeRO.

    Args:
        zero_level: see ``bmtrain.BMTrainModelWrapper``.
        options: of ``DDPStrategy``.
    """

    def __init__(self, zero_level: int = 3, **options: Any) -> None:
        super().__init__(**options)
        self.zero_level = zero_level

    def setup_environment(self) -> None:
        super().setup_environment()
        bmt.init_distributed()  # adopts Lightning's process group

    def configure_ddp(self) -> None:
        """Shard the models, before the optimizers are made."""
        assert self.lightning_module is not None
        for name, model in list(self.lightning_module.named_children()):
            if any(True for _ in model.parameters()):
                setattr(self.lightning_module, name, bmt.BMTrainModelWrapper(model, zero_level=self.zero_level))

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        replicas = bmt.config["topology"].replicas
        return super().backward(closure_loss / replicas, *args, **kwargs)


class Autoencoder(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)])

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return (self.model(batch) - batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return bmt.optim.AdamOptimizer(self.parameters(), lr=1e-2)


def main() -> None:
    rows: Any = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))
    data = DataLoader(rows, batch_size=8)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = Trainer(devices=ranks, strategy=ShardedStrategy(), max_epochs=2, logger=False, enable_checkpointing=False)
    trainer.fit(Autoencoder(), data)


if __name__ == "__main__":
    main()
