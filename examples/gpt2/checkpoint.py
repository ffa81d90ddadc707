"""Training checkpoints: a folder each, which appears complete or not at all.

``step-000100/``
    ``model.pt``       the ordinary, unsharded state dict of the model
    ``model.json``     its sizes
    ``tokenizer.json`` what turned text into ids
    ``rank-0.pt`` …    each rank's optimizer state, position in the data and random generators
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import torch

import bmtrain as bmt
from data import Batches, Corpus
from errors import UsageError
from models import GPT, GPTConfig


def save_checkpoint(
    root: Path, step: int, model: GPT, manager: bmt.optim.OptimManager, batches: Batches, corpus: Corpus, keep: int
) -> None:
    """Write ``root/step-…``, and delete all but the newest ``keep`` checkpoints. All ranks must call this."""
    folder = root / f"step-{step:06d}"
    unfinished = root / f".unfinished-{folder.name}"
    if bmt.rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        (unfinished / "model.json").write_text(json.dumps(dataclasses.asdict(model.config), indent=2))
        corpus.tokenizer.save(str(unfinished / "tokenizer.json"))
    bmt.synchronize()
    bmt.save(model, str(unfinished / "model.pt"))
    state = {
        "step": step,
        "manager": manager.state_dict(),
        "position": batches.position,
        "data": corpus.key,
        "seed": batches.seed,
        "layout": layout(model),
        "optimizers": optimizer_kinds(manager),
        "random": random_state(),
    }
    torch.save(state, unfinished / f"rank-{bmt.rank()}.pt")
    bmt.synchronize()
    if bmt.rank() == 0:
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.rename(folder)
        for old in list_checkpoints(root)[:-keep]:
            shutil.rmtree(old)


def load_checkpoint(folder: Path, model: GPT, manager: bmt.optim.OptimManager, batches: Batches, corpus: Corpus) -> int:
    """Go back to where a checkpoint was saved, and return its step. All ranks must call this.

    Raises:
        UsageError: the checkpoint is of another model, another optimizer, other data or another layout of ranks.
    """
    saved_config, config = read_config(folder), model.config
    if saved_config != config:
        other = [
            f"{field.name} {getattr(saved_config, field.name)} there and {getattr(config, field.name)} here"
            for field in dataclasses.fields(config)
            if getattr(saved_config, field.name) != getattr(config, field.name)
        ]
        raise UsageError(f"{folder} holds a different model: {', '.join(other)}")
    ranks = len(list(folder.glob("rank-*.pt")))
    if ranks != bmt.world_size():
        raise UsageError(f"{folder} was saved by {ranks} ranks, and there are {bmt.world_size()}; use as many")
    state: dict[str, Any] = torch.load(folder / f"rank-{bmt.rank()}.pt", map_location="cpu", weights_only=True)
    if state["layout"] != layout(model):
        raise UsageError(f"{folder} was saved with {state['layout']}, and this run has {layout(model)}; use the same")
    saved, mine = state["optimizers"], optimizer_kinds(manager)
    if saved != mine:
        raise UsageError(f"{folder} was saved with {saved}, and this run has {mine}; pass the same --optimizer")
    if state["data"] != corpus.key:
        raise UsageError(f"{folder} was trained on other data; pass the same --data, --max-bytes and --vocab-size")
    if state["seed"] != batches.seed:
        raise UsageError(f"{folder} was trained with --seed {state['seed']}; pass the same")
    bmt.load(model, str(folder / "model.pt"))
    manager.load_state_dict(state["manager"])
    batches.position = state["position"]
    set_random_state(state["random"])
    return state["step"]


def layout(model: GPT) -> str:
    """The flags that decide, beside the number of ranks, of what a rank has the optimizer's state."""
    return f"--pipe {bmt.config['pipe_size']} --interleave {model.interleave} --tp {bmt.config['tp_size']}"


def optimizer_kinds(manager: bmt.optim.OptimManager) -> str:
    """The optimizers, by what state they have: that of Adam is the same on the host."""
    return " and ".join(type(optimizer).__name__.replace("Offload", "") for optimizer in manager.optimizers)


def list_checkpoints(root: Path) -> list[Path]:
    """The checkpoints in ``root``, oldest first."""
    return sorted(root.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))


def find_checkpoint(path: Path) -> Path:
    """The checkpoint ``path``, or the newest one of the run whose output folder it is.

    Raises:
        UsageError: there is none.
    """
    if (path / "model.json").exists():
        return path
    found = list_checkpoints(path / "checkpoints")
    if not found:
        raise UsageError(f"{path} holds no checkpoint, and is none")
    return found[-1]


def read_config(folder: Path) -> GPTConfig:
    """The sizes of a checkpoint's model."""
    return GPTConfig(**json.loads((folder / "model.json").read_text()))


def random_state() -> dict[str, torch.Tensor]:
    """The state of torch's random generators, which dropout draws from."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
