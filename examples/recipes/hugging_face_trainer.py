"""Hugging Face's Trainer over a model that bmtrain shards.

The Trainer keeps its loop, arguments, callbacks, logging and evaluation. Two things differ from the plain Trainer. The
model is wrapped by ``BMTrainModelWrapper`` instead of ``DistributedDataParallel``. The loss is divided by the number of
replicas, because bmtrain sums gradients over ranks.

Start it with ``torchrun --nproc-per-node 2 hugging_face_trainer.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import bmtrain as bmt


class ShardedTrainer(Trainer):
    """A Trainer whose model is sharded over the ranks.

    Args:
        model: a plain model; it is sharded in place. ``init_distributed`` must have run.
        arguments: of ``Trainer``.
    """

    def __init__(self, model: nn.Module, **arguments: Any) -> None:
        super().__init__(bmt.BMTrainModelWrapper(model), **arguments)
        # The loss is the model's own mean, over this rank's samples.
        self.model_accepts_loss_kwargs = False

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        accelerator: Any = self.accelerator
        accelerator.prepare_model = lambda model, **_: model
        accelerator.backward = self._backward

    def _backward(self, loss: Tensor, **_: Any) -> None:
        replicas = bmt.config["world_size"] // bmt.config["tp_size"]
        (loss / replicas).backward()  # the Trainer has divided by the number of accumulated batches

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the ordinary weights, which ``from_pretrained`` loads; all ranks must call this."""
        model: Any = self.model
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        bmt.save(model, folder / "model.safetensors")
        if bmt.rank() == 0:
            model.config.save_pretrained(folder)


def main() -> None:
    bmt.init_distributed(seed=0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=4, n_head=4))
    ids = torch.randint(0, 256, (64, 32), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(output_dir="runs/trainer", max_steps=20, logging_steps=5, report_to=[])
    ShardedTrainer(model, args=arguments, train_dataset=data).train()


if __name__ == "__main__":
    main()
