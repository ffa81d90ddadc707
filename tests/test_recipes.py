"""The recipes for other libraries' training loops give the losses of plain PyTorch."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

sys.path.append(str(Path(__file__).parents[1] / "examples" / "recipes"))

STEPS, ROWS = 20, 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_trainer_of_hugging_face_gives_the_losses_of_plain_pytorch(
    ctx: Any, tmp_path: Path, accumulation: int
) -> None:
    from hugging_face_trainer import ShardedTrainer
    from torch.utils.data import SequentialSampler
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=37, max_position_embeddings=16))
    plain = copy.deepcopy(model)
    ids = torch.randint(1, 37, (STEPS * ROWS * ctx.world_size, 10), generator=torch.Generator().manual_seed(1))

    class InOrder(ShardedTrainer):
        def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    arguments = TrainingArguments(
        str(tmp_path / "run"), max_steps=STEPS, per_device_train_batch_size=ROWS // accumulation, learning_rate=1e-2,
        gradient_accumulation_steps=accumulation, use_cpu=True, lr_scheduler_type="constant", logging_steps=1,
        max_grad_norm=0.0, report_to=[], save_strategy="no", disable_tqdm=True, optim="sgd",
    )  # fmt: skip
    trainer = InOrder(model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2)  # which a wrong factor of gradients changes
    wanted = []
    for batch in ids.split(ROWS * ctx.world_size):
        loss = plain(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    assert len(losses) == STEPS
    assert losses == pytest.approx(wanted, abs=2e-4)  # the Trainer rounds what it logs
    assert wanted[-1] < wanted[0]

    trainer.save_model(str(tmp_path / "saved"))
    ctx.world.barrier()
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    for name, param in plain.named_parameters():
        torch.testing.assert_close(saved.get_parameter(name), param, rtol=1e-3, atol=1e-4)


@pytest.mark.ranks(2, init=False)
def test_the_script_beside_accelerate_has_the_losses_of_plain_pytorch() -> None:
    from accelerate.state import AcceleratorState
    from accelerate_script import ROWS, STEPS, build, data, train

    AcceleratorState._reset_state(True)
    losses = train(cpu=True)
    plain = build()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    wanted = []
    for x, y in torch.utils.data.DataLoader(data(), batch_size=2 * ROWS):
        loss = (plain(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    assert len(losses) == STEPS
    assert losses == pytest.approx(wanted, rel=1e-4)
