"""Modules and objects that tests save, and helpers for the saved files."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bmt_zero
from bmt_zero.checkpoints.manifest import NAME, parse_manifest, record_of


class Doubling(nn.Linear):
    """Saves its parameters doubled."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):  # type: ignore[no-untyped-def]
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._parameters:
            destination[prefix + name] = destination[prefix + name].detach() * 2

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        for name in self._parameters:
            state_dict[prefix + name] = state_dict[prefix + name] / 2
        super()._load_from_state_dict(state_dict, prefix, *args)


class Model(nn.Module):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.norm = nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.randn(()))
        self.low = nn.Parameter(torch.randn(5, 3).bfloat16())
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False]))


def plain(seed: int = 1, width: int = 7) -> Model:
    torch.manual_seed(seed)
    return Model(width)


def sharded(seed: int = 1, width: int = 7, level: int = 3) -> Model:
    return bmt_zero.BMTrainModelWrapper(plain(seed, width), zero_level=level)


def same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that two state dicts have equal tensors in the same order."""
    assert list(actual) == list(expected)
    for name in expected:
        assert actual[name].dtype == expected[name].dtype, name
        assert torch.equal(actual[name], expected[name]), name


def files_of_model(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name.startswith("model")}


def sign(folder: Path, name: str) -> None:
    """Replace the record of a file in the manifest of a checkpoint by that of its present content."""
    manifest = parse_manifest(folder / NAME, (folder / NAME).read_bytes())
    files = {**manifest.files, name: record_of((folder / name).read_bytes())}
    (folder / NAME).write_bytes(dataclasses.replace(manifest, files=files).to_json())


class Position:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
