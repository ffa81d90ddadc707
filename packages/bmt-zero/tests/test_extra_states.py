"""What modules return from ``get_extra_state`` is loaded with the weights, from every file that has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from saving_helpers import Doubling
from torch import nn

import bmt_zero
from bmt_zero import Checkpointer, DamagedError


class Counting(nn.Linear):
    def __init__(self, calls: int) -> None:
        super().__init__(3, 2)
        self.calls = calls

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def counting(calls: int, own_code: bool = False) -> nn.Module:
    torch.manual_seed(calls)
    return nn.Sequential(Counting(calls), Doubling(2, 2) if own_code else nn.Linear(2, 2))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("own_code", [False, True])
def test_a_directory_has_them(ctx: Any, tmp_path: Path, own_code: bool) -> None:
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=counting(5, own_code))
    checkpointer.close()
    folder = tmp_path / "c" / "step-00000001"
    model = counting(2, own_code)
    bmt_zero.load(model, folder)
    assert model[0].calls == 5
    assert torch.equal(model[0].weight, counting(5)[0].weight)
    bmt_zero.save(counting(6, own_code), tmp_path / "m.pt")
    bmt_zero.load(model, tmp_path / "m.pt", key_map=str)
    assert model[0].calls == 6
    wrapped = nn.ModuleDict({"inner": counting(2, own_code)})
    bmt_zero.load(wrapped, folder, key_map=lambda name: f"inner.{name}")
    assert wrapped["inner"][0].calls == 5
    bmt_zero.load(model, folder, strict=False, key_map={n: n for n in model.state_dict() if "extra" not in n})
    assert model[0].calls == 6
    ctx.world.barrier()
    if ctx.rank == 0:
        (folder / "extra-state.json").write_text("[]")
    ctx.world.barrier()
    with pytest.raises((DamagedError, ValueError), match=r"extra-state.json"):
        bmt_zero.load(model, folder)


@pytest.mark.ranks(2)
def test_a_checkpoint_without_them_is_refused(ctx: Any, tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=plain)
    checkpointer.close()
    model = counting(2)
    with pytest.raises(ValueError, match=r"lacks \['0._extra_state'\]"):
        bmt_zero.load(model, tmp_path / "c" / "step-00000001")
    assert torch.equal(model[0].weight, counting(2)[0].weight)
    bmt_zero.load(model, tmp_path / "c" / "step-00000001", strict=False)
    assert torch.equal(model[0].weight, plain[0].weight)
