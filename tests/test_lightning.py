"""Our optimizers in the loops of Lightning: its Trainer, and Fabric. The nox session "frameworks" runs these tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from framework_cases import STEPS, TOLERANCES, Net, batch, check_updates, make_optimizer
from torch import nn
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).parents[1] / "examples" / "recipes"))

pytestmark = pytest.mark.filterwarnings("ignore")


def fully_sharded(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for module in (*model.layers, model):  # type: ignore[union-attr]
        fully_shard(module, mesh=mesh["data_parallel"])
    return model


@pytest.mark.ranks(2, init=False, timeout=120)
@pytest.mark.parametrize("kind", TOLERANCES)
def test_fabric_saves_and_loads_sharded_models(kind: str, tmp_path: Path) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(fully_sharded, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[TorchElasticEnvironment()])
    fabric.launch()

    def setup() -> tuple[nn.Module, Any]:
        model = fabric.setup_module(Net())
        return model, fabric.setup_optimizers(make_optimizer(kind, model))

    def train(model: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            fabric.backward(model(*batch(step, fabric.global_rank)))
            optimizer.step()

    model, optimizer = setup()
    train(model, optimizer, range(STEPS // 2))
    fabric.save(tmp_path / "saved", {"model": model, "optimizer": optimizer})
    model, optimizer = setup()
    train(model, optimizer, range(90, 92))  # something else
    fabric.load(tmp_path / "saved", {"model": model, "optimizer": optimizer})
    train(model, optimizer, range(STEPS // 2, STEPS))
    check_updates(kind, model.module, 2)


@pytest.mark.ranks(2, init=False, timeout=120)
@pytest.mark.parametrize("kind", TOLERANCES)
@pytest.mark.parametrize("sharded", [False, True])
def test_the_trainer_goes_on_from_a_checkpoint(kind: str, sharded: bool, tmp_path: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def configure_model(self) -> None:
            if sharded:
                fully_sharded(self.net, self.device_mesh)

        def training_step(self, given: Any, index: int) -> Any:
            return self.net(*given)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(kind, self.net)

    def fitted(epochs: int, checkpoint: str | None) -> tuple[Any, nn.Module]:
        strategy = (
            ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
            if sharded
            else DDPStrategy(process_group_backend="gloo")
        )
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy=strategy, plugins=[TorchElasticEnvironment()], max_epochs=epochs,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False, default_root_dir=str(tmp_path),
        )  # fmt: skip
        module = Module()
        rank = int(os.environ["RANK"])
        steps = range((epochs - 1) * STEPS // 2, epochs * STEPS // 2)
        data = DataLoader([batch(step, rank) for step in steps], batch_size=None)  # type: ignore[var-annotated,arg-type]
        trainer.fit(module, data, ckpt_path=checkpoint, **({"weights_only": False} if checkpoint else {}))
        return trainer, module.net

    trainer, _ = fitted(1, None)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    dist.barrier()
    _, model = fitted(2, str(tmp_path / "saved.ckpt"))
    check_updates(kind, model, 2)


@pytest.mark.ranks(2, init=False, timeout=120)
def test_zero_as_a_strategy_has_the_losses_of_plain_pytorch(tmp_path: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning_strategy import ShardedStrategy

    import bmtrain as bmt

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.losses: list[float] = []

        def training_step(self, given: Any, index: int) -> Any:
            loss = self.net(*given)
            self.losses.append(bmt.sum_loss(loss.detach()).item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return bmt.optim.AdamOptimizer(self.parameters(), lr=0.01)

    steps, rank, module = 20, int(os.environ["RANK"]), Module()
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=ShardedStrategy(process_group_backend="gloo"), max_epochs=1,
        plugins=[TorchElasticEnvironment()], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, default_root_dir=str(tmp_path),
    )  # fmt: skip
    data: list[Any] = [batch(step, rank) for step in range(steps)]
    trainer.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    assert all(hasattr(p, "bmt_slice") for p in module.parameters())
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    dist.barrier()

    plain = Net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    wanted = []
    for step in range(steps):
        losses = [plain(*batch(step, other)) for other in range(2)]
        optimizer.zero_grad()
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
        wanted.append(sum(loss.item() for loss in losses) / 2)
    assert module.losses == pytest.approx(wanted, rel=1e-5)
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=False)["state_dict"]
    assert saved.keys() == {f"net.{name}" for name in plain.state_dict()}
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(saved[f"net.{name}"], value, rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(2, init=False, timeout=120)
def test_the_recipe_for_fabric_has_the_updates_of_plain_pytorch() -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    import bmtrain as bmt

    text = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text()
    code = text.partition("## Fabric")[2].partition("```python\n")[2].partition("```")[0]
    order = [(step, rank) for step in range(STEPS) for rank in range(2)]  # the sampler deals them out to the ranks
    loader = DataLoader([batch(*each) for each in order], batch_size=None)  # type: ignore[var-annotated,arg-type]
    given: dict[str, Any] = {
        "fabric": Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=[TorchElasticEnvironment()]),
        "bmt": bmt,
        "model": Net(),
        "loader": loader,
        "loss_of": lambda model, batch: model(*batch),
    }
    exec(code, given)
    plain = Net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            (plain(*batch(step, rank)) / 2).backward()
        optimizer.step()
    start = dict(Net().named_parameters())
    for param, (name, wanted) in zip(given["model"].parameters(), plain.named_parameters(), strict=True):
        update = wanted - start[name]
        assert (param.full_tensor() - start[name] - update).norm() <= 1e-5 * update.norm(), name
