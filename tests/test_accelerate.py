"""Our optimizers over models that accelerate shards by FSDP2, and its saved states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from framework_cases import STEPS, TOLERANCES, Net, batch, check_updates, make_optimizer

pytest.importorskip("accelerate")


def prepared(kind: str) -> tuple[Any, torch.nn.Module, torch.optim.Optimizer]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Layer"]
    )
    # accelerate itself chooses FSDP on GPUs only.
    PartialState(cpu=True).distributed_type = DistributedType.FSDP
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.fsdp_plugin = plugin
    model = Net()
    return accelerator, *accelerator.prepare(model, make_optimizer(kind, model))


@pytest.mark.ranks(2, init=False)
@pytest.mark.parametrize("kind", TOLERANCES)
def test_training_that_goes_on_from_a_saved_state_has_the_plain_updates(kind: str, tmp_path: Path) -> None:
    def train(accelerator: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            accelerator.backward(model(*batch(step, accelerator.process_index)))
            optimizer.step()

    accelerator, model, optimizer = prepared(kind)
    train(accelerator, model, optimizer, range(STEPS // 2))
    accelerator.save_state(str(tmp_path / "state"))

    accelerator, model, optimizer = prepared(kind)
    train(accelerator, model, optimizer, range(90, 92))  # something else
    accelerator.load_state(str(tmp_path / "state"))
    train(accelerator, model, optimizer, range(STEPS // 2, STEPS))
    assert any(type(p).__name__ == "DTensor" for p in model.parameters())
    check_updates(kind, model, 2)
