"""A script's default device: what a package makes in host memory says so, or a device mode would move it.

The meta device stands for a GPU: a tensor that comes to lie there has no values.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bmtrain as bmt
from bmt_comm import ParallelContext
from bmt_optim import CAME, Lamb


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + torch.tanh(self.linear(x)))


class Model(nn.Module):
    def __init__(self, list_type: type) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.layers = list_type([bmt.Block(Layer()) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(x)))


def train(ctx: ParallelContext, optimizer_type: type, folder: Path) -> None:
    list_type = bmt.PipelineTransformerBlockList if ctx.pipe_size > 1 else bmt.TransformerBlockList
    model = bmt.BMTrainModelWrapper(Model(list_type))
    tokens = torch.randint(11, (4, 5))
    with torch.device("meta"):
        bmt.init_parameters(model)
        optimizer = optimizer_type(model.parameters(), lr=1e-3)
        manager = bmt.optim.OptimManager(loss_scale=1024)
        manager.add_optimizer(optimizer, bmt.lr_scheduler.Noam(optimizer, 1e-3, 2, 10))
        for _ in range(3):
            manager.zero_grad()
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            manager.backward(loss)
            manager.clip_grad_norm(optimizer.param_groups, 1.0)
            manager.step()
            assert bmt.sum_loss(loss) > 0
        checkpointer = bmt.Checkpointer(folder / "checkpoints")
        for step in (1, 2):
            checkpointer.save(step, model=model, manager=manager)
            checkpointer.wait()
        assert checkpointer.load_latest(model=model, manager=manager) == 2
        for name in ("model.pt", "model.safetensors"):
            bmt.save(model, folder / name)
            bmt.load(model, folder / name)
        manager.state_dict(gather_opt=True)
        manager.load_state_dict(manager.state_dict())
        model.load_state_dict(model.state_dict())
        bmt.inspect.inspect_model(model, "*")
        with bmt.inspect.inspect_tensor() as inspector:
            output = model(tokens)
            bmt.inspect.record_tensor(output, "output")
            manager.backward(output.sum())
        assert inspector.get_summary()[-1]["name"].endswith("output")
    assert all(param.isfinite().all() for param in model.parameters() if param.requires_grad)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    "optimizer_type", [bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer, CAME, Lamb], ids=lambda t: t.__name__
)
def test_zero(ctx: ParallelContext, optimizer_type: type, tmp_path: Path) -> None:
    train(ctx, optimizer_type, tmp_path)


@pytest.mark.ranks(2, tp_size=2)
def test_tensor_parallel(ctx: ParallelContext, tmp_path: Path) -> None:
    train(ctx, bmt.optim.AdamOptimizer, tmp_path)


@pytest.mark.ranks(2, pipe_size=2)
def test_pipeline(ctx: ParallelContext, tmp_path: Path) -> None:
    train(ctx, bmt.optim.AdamOptimizer, tmp_path)
