"""Hugging Face's Trainer over a model that bmtrain shards.

The Trainer keeps its loop, arguments, callbacks, logging, evaluation and checkpoints. Three things differ. The model is
wrapped by ``BMTrainModelWrapper`` instead of ``DistributedDataParallel``. The loss is divided by the number of
replicas, because bmtrain sums gradients over ranks. All ranks take part when the model and the optimizer are saved.

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

    Raises:
        ValueError: ``fp16`` or ``torch_compile``, or the Trainer does not use the ranks of bmtrain.
    """

    def __init__(self, model: nn.Module, **arguments: Any) -> None:
        super().__init__(bmt.BMTrainModelWrapper(model), **arguments)
        if self.args.fp16 or self.args.torch_compile:
            raise ValueError(
                "fp16 and torch_compile are not for sharded models here: use bf16=True, and layer.compile()"
            )
        if self.args.world_size != bmt.world_size():
            raise ValueError(
                f"the Trainer has {self.args.world_size} processes and bmtrain {bmt.world_size()}: start them by "
                "torchrun, and pass use_cpu=True where there is no GPU"
            )

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        accelerator: Any = self.accelerator
        accelerator.prepare_model = lambda model, **_: model
        accelerator.backward = self._backward

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        return self.accelerator.autocast()  # which a prepared model would do by itself

    def _backward(self, loss: Tensor, **_: Any) -> None:
        replicas = bmt.config["topology"].replicas
        (loss / replicas).backward()  # the Trainer has divided by the number of accumulated batches, or of tokens

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.optimizer is not None
        assert self.lr_scheduler is not None
        state = self.optimizer.state_dict()  # all ranks take part
        if self.args.should_save:
            torch.save(state, Path(output_dir) / "optimizer.pt")
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the ordinary weights, or adapters, which ``from_pretrained`` loads; all ranks must call this."""
        model: Any = self.model
        folder = Path(output_dir or str(self.args.output_dir))
        if hasattr(model, "peft_config"):
            model.save_pretrained(folder, is_main_process=bmt.rank() == 0)
            return
        folder.mkdir(parents=True, exist_ok=True)
        bmt.save(model, folder / "model.safetensors")
        if bmt.rank() == 0:
            model.config.save_pretrained(folder)
            if model.can_generate():
                model.generation_config.save_pretrained(folder)


def main() -> None:
    bmt.init_distributed(seed=0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=4, n_head=4))
    ids = torch.randint(0, 256, (64, 32), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(
        output_dir="runs/trainer", max_steps=20, logging_steps=5, report_to=[], use_cpu=not torch.cuda.is_available()
    )
    ShardedTrainer(model, args=arguments, train_dataset=data).train()


if __name__ == "__main__":
    main()
