"""Conversion of optimizer states that BMTrain 1.0 saved into files that optimizers of this project load.

Checkpoints of models need no such conversion: they are state dicts in files of ``torch.save``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bmt_comm.durable import complete_file
from bmt_optim.upstream_state import merge_ranks, to_own_form
from bmt_zero.checkpoints.pt_files import PtSource, read_shapes, read_state_dict
from bmt_zero.checkpoints.reader import read_tensor


def is_optimizer_file(path: Path) -> bool:
    """Whether a file holds the state of an optimizer or of an ``OptimManager``.

    Raises:
        ValueError: the file is damaged.
    """
    if not path.is_file() or path.suffix == ".safetensors":
        return False
    return not read_shapes(path).keys().isdisjoint(("param_groups", "optimizers"))


def convert_upstream(sources: Sequence[Path], target: Path, *, model: Path | None) -> None:
    """Convert the state of an optimizer, or of an ``OptimManager``, of BMTrain 1.0.

    Args:
        sources: one file with the gathered state, or the files of all ranks, in the order of the ranks.
        target: the file to write, for ``torch.load``; it must not exist.
        model: the checkpoint of the model, as BMTrain saved it, with tensors in the order of the parameters. It gives
            the shapes, because BMTrain saves flat optimizer states.

    Raises:
        FileExistsError: ``target`` exists.
        FileNotFoundError: a file, or the folder of ``target``, is missing.
        ValueError: a file is damaged or is something else; or the state does not fit the model, or was saved with
            tensor parallelism: load that in a job with the same layout, which takes it as it is.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists already; choose another target, or remove it")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {target.parent}")
    for path in (*sources, *([] if model is None else [model])):
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
    contents = [read_state_dict(path) for path in sources]
    if model is None:
        raise ValueError(
            "the state of an optimizer of BMTrain has flat tensors: give the checkpoint of the model, whose shapes "
            "they get, as --model"
        )
    is_manager = any("optimizers" in content for content in contents)
    kind = "a manager" if is_manager else "an optimizer"
    for path, content in zip(sources, contents):
        if ("optimizers" if is_manager else "param_groups") not in content:
            raise ValueError(f"{path} is not the state of {kind}, as others are")
        _check(path, content)
    weights = PtSource(model)
    try:
        converted = _manager(contents, weights) if is_manager else _optimizer(contents, weights, None)
    finally:
        weights.close()
    with complete_file(target) as part:
        torch.save(converted, part)


def _check(path: Path, content: Mapping[str, Any]) -> None:
    """Raise ValueError if a file does not have the form of a state."""
    optimizers = content.get("optimizers", [content])
    if not _are_mappings(optimizers) or not all(_are_mappings(each.get("param_groups")) for each in optimizers):
        raise ValueError(f"{path} is not the state of an optimizer: it has no list of param_groups")


def _are_mappings(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(each, Mapping) for each in values)


def _manager(contents: Sequence[Mapping[str, Any]], weights: PtSource) -> dict[str, Any]:
    first = contents[0]
    optimizers = [
        _optimizer([each["optimizers"][i] for each in contents], weights, first.get("loss_scale"))
        for i in range(len(first["optimizers"]))
    ]
    return {**first, "optimizers": optimizers}


def _optimizer(contents: Sequence[Mapping[str, Any]], weights: PtSource, loss_scale: float | None) -> dict[str, Any]:
    merged = contents[0] if contents[0].get("is_whole") or len(contents) == 1 else merge_ranks(contents)
    shapes = [torch.Size(entry.shape) for entry in weights.entries.values()]
    names = list(weights.entries)
    return to_own_form(merged, shapes, loss_scale, lambda place: read_tensor(weights, names[place]))
