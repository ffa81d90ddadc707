"""Files of BMTrain 1.0 turned into files of this project: checkpoints of models, and states of optimizers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bmt_optim.upstream_state import merge_ranks, to_own_form

Source: TypeAlias = str | os.PathLike[str]


def convert_upstream(sources: Source | Sequence[Source], target: Source, *, model: Source | None = None) -> str:
    """Convert what BMTrain 1.0 has saved.

    Args:
        sources: a checkpoint of ``bmt.save``; or the state of an optimizer or of an ``OptimManager``: one file that was
            gathered, or the files of all ranks, in the order of the ranks.
        target: the file to write. A checkpoint is written as safetensors if the name ends in ``.safetensors``, else as
            by ``torch.save``.
        model: the checkpoint of the model, which the state of an optimizer needs: from it come the shapes of its
            tensors, since BMTrain saves them flat.

    Returns:
        What ``sources`` were: "checkpoint", "optimizer" or "manager".

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged or is something else; or the state of an optimizer does not fit the model, or was
            saved with tensor parallelism: load that in a job with the same layout, which takes it as it is.
        ImportError: the safetensors package is missing.
    """
    paths = [Path(each) for each in ([sources] if isinstance(sources, (str, os.PathLike)) else sources)]
    if not paths:
        raise ValueError("sources is empty; give a file, or one for each rank")
    contents = [_read(path) for path in paths]
    if "optimizers" in contents[0]:
        kind, result = "manager", _manager(contents, _shapes(model))
    elif "param_groups" in contents[0]:
        kind, result = "optimizer", _optimizer(contents, _shapes(model), None)
    elif len(contents) > 1:
        raise ValueError(f"{paths[0]} is a checkpoint, of which there is one file, and sources are {len(paths)}")
    else:
        kind, result = "checkpoint", _checkpoint(paths[0], contents[0])
    _write(result, Path(target))
    return kind


def _checkpoint(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ValueError(f"{path} is no state dict: under {name!r} it has a {type(value).__name__}, not a tensor")
    return {name: value.detach().cpu().contiguous() for name, value in state.items()}


def _manager(contents: Sequence[Mapping[str, Any]], shapes: Sequence[torch.Size]) -> dict[str, Any]:
    first = contents[0]
    optimizers = [
        _optimizer([each["optimizers"][i] for each in contents], shapes, first.get("loss_scale"))
        for i in range(len(first["optimizers"]))
    ]
    return {**first, "optimizers": optimizers}


def _optimizer(
    contents: Sequence[Mapping[str, Any]], shapes: Sequence[torch.Size], loss_scale: float | None
) -> dict[str, Any]:
    merged = contents[0] if contents[0].get("is_whole") or len(contents) == 1 else merge_ranks(contents)
    return to_own_form(merged, shapes, loss_scale)


def _shapes(model: Source | None) -> list[torch.Size]:
    if model is None:
        raise ValueError(
            "the state of an optimizer of BMTrain has flat tensors: give model=, the checkpoint of the model"
        )
    return [value.shape for value in _read(Path(model)).values() if isinstance(value, Tensor)]


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can fail anywhere in the reader
        raise ValueError(f"{path} cannot be read, or holds objects whose loading would run code: {error}") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}, not what BMTrain saves")
    return content


def _write(content: dict[str, Any], path: Path) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if path.suffix == ".safetensors":
            if any(not isinstance(value, Tensor) for value in content.values()):
                raise ValueError(f"{path}: the state of an optimizer is written by torch.save; choose another name")
            from safetensors.torch import save_file

            save_file({name: value.clone() for name, value in content.items()}, part, metadata={"format": "pt"})
        else:
            torch.save(content, part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
