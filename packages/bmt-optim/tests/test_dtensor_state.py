"""The state of optimizers over FSDP2's parameters, as torch's tools for checkpoints see it."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from bmt_optim import (
    CAME,
    Adafactor,
    AdamOptimizer,
    AdamW,
    GaLoreAdamW,
    Lamb,
    Muon,
    TorchAdafactor,
    get_galore_param_groups,
)


def galore(nbits):
    def make(model):
        groups = get_galore_param_groups(model, 0.01, rank=3, update_proj_gap=4)
        return GaLoreAdamW(groups, lr=0.01, nbits=nbits, min_8bit_size=16)

    return make


def muon(model):
    return Muon([p for p in model.parameters() if p.dim() == 2], lr=0.01)


OPTIMIZERS = {
    "AdamOptimizer": lambda model: AdamOptimizer(model.parameters(), lr=0.01),
    "AdamW": lambda model: AdamW(model.parameters(), lr=0.01),
    "Lamb": lambda model: Lamb(model.parameters(), lr=0.01),
    "Adafactor": lambda model: Adafactor(model.parameters(), lr=0.01, relative_step=False, beta1=0.9),
    "CAME": lambda model: CAME(model.parameters(), lr=0.01),
    "TorchAdafactor": lambda model: TorchAdafactor(model.parameters(), lr=0.01),
    "GaLore": galore(32),
    "8-bit GaLore": galore(8),
    "Muon": muon,
}


def sharded_model(mesh=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 1))
    kwargs = {} if mesh is None else {"mesh": mesh}
    for layer in (model[0], model[2], model):
        fully_shard(layer, **kwargs)
    return model


def train(model, optimizer, steps):
    for step in steps:
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(step * 10 + dist.get_rank()))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def values(model, optimizer):
    tensors = {f"param.{name}": p.full_tensor() for name, p in model.named_parameters()}
    for index, entry in optimizer.state_dict()["state"].items():
        for key, value in entry.items():
            tensors[f"{index}.{key}"] = value.full_tensor() if isinstance(value, DTensor) else value
    return tensors


def check_equal(actual, wanted):
    assert actual.keys() == wanted.keys()
    assert [key for key in wanted if not torch.equal(actual[key], wanted[key])] == []


@pytest.mark.ranks(2, 3, init=False)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_tensors_are_dtensors_of_the_logical_state(name):
    dist.init_process_group("gloo")
    model = sharded_model()
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, range(3))
    local, gathered = optimizer.state_dict()["state"], optimizer.state_dict(gather=True)["state"]
    unsharded = {i: {k: v.full_tensor() for k, v in entry.items() if k != "step"} for i, entry in local.items()}
    if dist.get_rank() == 0:
        for index, entry in gathered.items():
            projector = entry.pop("projector", None)
            if projector is not None:
                bases = projector.ortho_matrix if isinstance(projector.ortho_matrix, list) else [projector.ortho_matrix]
                keys = [key for key in ("ortho_left", "ortho_right") if key in unsharded[index]]
                entry.update(zip(keys, bases, strict=True))
            assert entry.pop("step") == local[index]["step"]
            check_equal(unsharded[index], entry)
    assert all(isinstance(value, DTensor) for entry in local.values() for k, value in entry.items() if k != "step")


@pytest.mark.ranks(2, 3, init=False)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_distributed_checkpoints_go_on_to_the_last_bit(name, tmp_path):
    dist.init_process_group("gloo")
    model = sharded_model()
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, range(3))
    saved = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=tmp_path)
    train(model, optimizer, range(3, 6))

    again = sharded_model()
    optimizer_again = OPTIMIZERS[name](again)
    train(again, optimizer_again, range(7, 8))
    loaded = {"model": again.state_dict(), "optimizer": get_optimizer_state_dict(again, optimizer_again)}
    dcp.load(loaded, checkpoint_id=tmp_path)
    again.load_state_dict(loaded["model"])
    set_optimizer_state_dict(again, optimizer_again, loaded["optimizer"])
    train(again, optimizer_again, range(3, 6))
    check_equal(values(again, optimizer_again), values(model, optimizer))


@pytest.mark.ranks(2, 3, init=False)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_full_state_dicts_are_loaded_by_a_fresh_optimizer(name):
    dist.init_process_group("gloo")
    options = StateDictOptions(full_state_dict=True)
    model = sharded_model()
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, range(3))
    again = sharded_model()
    optimizer_again = OPTIMIZERS[name](again)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    assert not any(isinstance(v, DTensor) for entry in state["state"].values() for v in entry.values())
    set_optimizer_state_dict(again, optimizer_again, state, options=options)
    again.load_state_dict(model.state_dict())
    check_equal(values(again, optimizer_again), values(model, optimizer))


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("name", ["AdamOptimizer", "CAME"])
def test_replicas_of_shards(name, tmp_path):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded_model(mesh)
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, range(3))
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path)
    again = sharded_model()  # over all four ranks
    optimizer_again = OPTIMIZERS[name](again)
    loaded = {"optimizer": get_optimizer_state_dict(again, optimizer_again)}
    dcp.load(loaded, checkpoint_id=tmp_path)
    set_optimizer_state_dict(again, optimizer_again, loaded["optimizer"])
    actual, wanted = values(again, optimizer_again), values(model, optimizer)
    check_equal(*({k: v for k, v in each.items() if not k.startswith("param.")} for each in (actual, wanted)))
