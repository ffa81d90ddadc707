"""What a run saves besides the model and the optimizers, and where its checkpoints are.

``step-00000100/``
    ``model-*.safetensors``  the ordinary, unsharded state dict of the model, which plain PyTorch loads
    ``model.json``           its sizes
    ``tokenizer.json``       what turned text into ids
    ``optimizer-*.safetensors``, ``trainer.json``, ``rng-*``, ``state-*``   what the run needs to go on, at any layout
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

import bmtrain as bmt
from errors import UsageError
from models import GPTConfig


class ModelFiles:
    """The files by which ``generate.py`` knows a model: its sizes and the tokenizer."""

    def __init__(self, config: GPTConfig, tokenizer: Tokenizer):
        self.config, self.tokenizer = config, tokenizer

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "model.json").write_text(json.dumps(dataclasses.asdict(self.config), indent=2))
        self.tokenizer.save(str(Path(folder) / "tokenizer.json"))


class Conditions:
    """What must be the same when a run goes on: the model, the optimizers, the data and its order."""

    def __init__(self, config: GPTConfig, manager: bmt.optim.OptimManager, data: str, seed: int):
        self.model = dataclasses.asdict(config)
        # Of the optimizers what state they have: that of Adam is the same on the host.
        self.optimizers = [type(optimizer).__name__.replace("Offload", "") for optimizer in manager.optimizers]
        self.data, self.seed = data, seed

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model, "optimizers": self.optimizers, "data": self.data, "seed": self.seed}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Raise UsageError unless the conditions are these."""
        other = [
            f"{name} {saved['model'].get(name)} there and {value} here"
            for name, value in self.model.items()
            if saved["model"].get(name) != value
        ]
        if other:
            raise UsageError(f"the checkpoint holds a different model: {', '.join(other)}")
        if saved["optimizers"] != self.optimizers:
            there, here = " and ".join(saved["optimizers"]), " and ".join(self.optimizers)
            raise UsageError(
                f"the checkpoint was saved with {there}, and this run has {here}; pass the same --optimizer"
            )
        if saved["data"] != self.data:
            raise UsageError(
                "the checkpoint was trained on other data; pass the same --data, --max-bytes, --held-out, --vocab-size"
            )
        if saved["seed"] != self.seed:
            raise UsageError(f"the checkpoint was trained with --seed {saved['seed']}; pass the same")


def find_checkpoint(path: Path) -> Path:
    """The checkpoint ``path``, or the newest one of the run whose output folder it is.

    Raises:
        UsageError: there is none.
    """
    if (path / "model.json").exists():
        return path
    steps = bmt.Checkpointer(path / "checkpoints", readonly=True).steps()
    if not steps:
        raise UsageError(f"{path} holds no checkpoint, and is none")
    return path / "checkpoints" / f"step-{steps[-1]:08}"


def read_config(folder: Path) -> GPTConfig:
    """The sizes of a checkpoint's model."""
    return GPTConfig(**json.loads((folder / "model.json").read_text()))
