"""Models whose state_dict is on rank 0 only (as in ModelCenter) are saved and loaded like any other."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bmt_zero import Block, load, rank0_state_dict, save


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.head = nn.Linear(3, 2)
        self.register_buffer("count", torch.tensor(4))

    def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:  # type: ignore[override]
        return rank0_state_dict(self, destination, prefix)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("level", [0, 3])
def test_the_state_dict_is_on_rank_0_and_in_files(ctx: Any, level: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Model()
    wanted = {name: value.clone() for name, value in nn.Module.state_dict(model).items()}
    folder = Path(ctx.world.broadcast_object(str(tmp_path)))
    for layer in [*model.layers, model.head]:
        Block(layer, zero_level=level)
    state = model.state_dict()
    assert list(state) == (list(wanted) if ctx.rank == 0 else [])
    assert all(torch.equal(state[name], wanted[name]) for name in state)
    outer = nn.ModuleDict({"inner": model})
    assert list(outer.state_dict()) == ([f"inner.{name}" for name in wanted] if ctx.rank == 0 else [])
    save(model, folder / "model.pt")
    saved = torch.load(folder / "model.pt", weights_only=True)
    assert list(saved) == list(wanted)
    assert all(torch.equal(saved[name], wanted[name]) for name in wanted)
    torch.manual_seed(2)
    other = Model()
    plain = copy.deepcopy(other)
    for layer in [*other.layers, other.head]:
        Block(layer, zero_level=level)
    load(other, folder / "model.pt")
    state = other.state_dict()
    assert all(torch.equal(state[name], wanted[name]) for name in state)
    assert not torch.equal(plain.head.weight, wanted["head.weight"])
