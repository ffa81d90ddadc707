"""Models on the meta device get memory and values from a file, or an error that names tensors without memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from saving_helpers import Doubling
from torch import nn

import bmt_zero
from bmt_zero import Checkpointer, MemorySnapshots, SaveError


class Net(nn.Module):
    def __init__(self, kind: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.first = kind(5, 4)
        self.second = nn.Linear(4, 5)
        self.tied = self.second
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("table", torch.arange(3.0), persistent=False)


def net(place: str = "cpu", kind: type[nn.Linear] = nn.Linear) -> Net:
    torch.manual_seed(1)
    with torch.device(place):
        return Net(kind)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", [nn.Linear, Doubling])
@pytest.mark.parametrize("name", ["m.safetensors", "m.pt"])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_plain_model_gets_memory_and_values(
    ctx: Any, tmp_path: Path, name: str, kind: type[nn.Linear], mapped: bool
) -> None:
    bmt_zero.save(net(kind=kind), tmp_path / name)
    model = net("meta", kind)
    bmt_zero.load(model, tmp_path / name, key_map=str if mapped else None)
    wanted = net(kind=kind).state_dict()
    state = model.state_dict()
    assert state.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(state[key], value), key
    assert model.second.weight is model.tied.weight
    assert isinstance(model.first.weight, nn.Parameter)
    assert model.table.is_meta  # no file has it: whoever uses it hears of it


@pytest.mark.ranks(2)
def test_what_a_file_lacks_stays_on_the_meta_device(ctx: Any, tmp_path: Path) -> None:
    bmt_zero.save(nn.ModuleDict({"first": net().first}), tmp_path / "m.safetensors")
    for key_map in (None, str):
        model = net("meta")
        bmt_zero.load(model, tmp_path / "m.safetensors", strict=False, key_map=key_map)
        assert torch.equal(model.first.weight, net().first.weight)
        assert model.second.weight.is_meta


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["m.safetensors", "m.pt"])
def test_a_refused_file_gives_no_memory(ctx: Any, tmp_path: Path, name: str) -> None:
    bmt_zero.save(net().first, tmp_path / name)
    model = net("meta")
    with pytest.raises(ValueError, match="does not have"):
        bmt_zero.load(model, tmp_path / name)
    assert model.first.weight.is_meta


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", [nn.Linear, Doubling])
def test_a_checkpointer_names_what_has_no_memory(ctx: Any, tmp_path: Path, kind: type[nn.Linear]) -> None:
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=net(kind=kind))
    model = net("meta", kind)
    for load in (lambda: checkpointer.load(1, model=model), lambda: checkpointer.load_latest(model=model)):
        with pytest.raises(ValueError, match=r"'(first.weight|steps)' is on the meta device .* model.to_empty"):
            load()
    model.to_empty(device="cpu")
    checkpointer.load(1, model=model)
    assert torch.equal(model.first.weight, net(kind=kind).first.weight)


@pytest.mark.ranks(1, 2)
def test_a_sharded_model_of_fsdp2_without_memory_is_named(ctx: Any, tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=net())
    checkpointer.wait()
    bmt_zero.save(net(), tmp_path / "m.safetensors")
    model = fully_shard(net("meta"))
    for load in (
        lambda: checkpointer.load(1, model=model),
        lambda: bmt_zero.load(model, tmp_path / "c" / "step-00000001"),
        lambda: bmt_zero.load(model, tmp_path / "m.safetensors", key_map=str),
        lambda: bmt_zero.load(model, tmp_path / "m.safetensors"),
    ):
        with pytest.raises(ValueError, match=r"'(first.weight|steps)' is on the meta device .* model.to_empty"):
            load()
    model.to_empty(device="cpu")
    checkpointer.load(1, model=model)
    assert torch.equal(model.first.weight.full_tensor(), net().first.weight)


@pytest.mark.ranks(2)
def test_a_sharded_model_gets_values_from_a_checkpointer(ctx: Any, tmp_path: Path) -> None:
    def layers(place: str) -> nn.Module:
        torch.manual_seed(1)
        with torch.device(place):
            return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 5))

    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=layers("cpu"))
    model = bmt_zero.BMTrainModelWrapper(layers("meta"))
    assert checkpointer.load_latest(model=model) == 1
    for name, value in layers("cpu").state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


@pytest.mark.ranks(2)
def test_values_that_a_script_has_written_are_saved(ctx: Any, tmp_path: Path) -> None:
    with torch.device("meta"):
        layer = nn.Linear(5, 4)
    model = bmt_zero.Block(layer)
    checkpointer, snapshots = Checkpointer(tmp_path / "c"), MemorySnapshots()
    with pytest.raises(RuntimeError, match=r"nothing has filled them: \['weight', 'bias'\]"):
        checkpointer.save(1, model=model)
    with pytest.raises(SaveError, match=r"nothing has filled them: \['weight', 'bias'\]"):
        checkpointer.wait()
    with torch.no_grad():
        if ctx.rank == 0:
            model.weight.fill_(2)
        with pytest.raises(RuntimeError, match=r"nothing has filled them: \['weight', 'bias'\]"):
            model(torch.ones(1, 5))  # on both ranks, though one has written its rows
        model.weight.fill_(2)
        with pytest.raises(RuntimeError, match=r"nothing has filled them: \['bias'\]"):
            model(torch.ones(1, 5))
        for param in model.parameters():
            param.fill_(2)
    checkpointer.save(1, model=model)
    snapshots.take(1, model=model)
    restored = bmt_zero.Block(nn.Linear(5, 4))
    checkpointer.load(1, model=restored)
    assert restored.weight.full_tensor().equal(torch.full((4, 5), 2.0))
