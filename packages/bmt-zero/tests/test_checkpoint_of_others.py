"""Checkpoints of models that other libraries have sharded, and loads of checkpoints that do not fit."""

from __future__ import annotations

import copy
import logging
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel

import bmt_zero
from bmt_comm import ParallelContext
from bmt_zero import BMTrainModelWrapper, Checkpointer, DistributedParameter, MemorySnapshots, SaveError

fsdp2 = pytest.importorskip("torch.distributed.fsdp")


def plain(norm: bool = False, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5) if norm else nn.Tanh(), nn.Linear(5, 7))


def unsharded(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    actual = unsharded(model)
    for name, value in expected.named_parameters():
        assert actual[name].equal(value), name


@pytest.mark.ranks(2)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", ["m.pt", "m.safetensors"])
def test_a_model_of_fsdp2(ctx: ParallelContext, tmp_path: Path, name: str, norm: bool) -> None:
    """One of the models has a module (a batch norm) whose own code loads it."""
    model, other = (fsdp2.fully_shard(plain(norm, seed), mesh=init_device_mesh("cpu", (2,))) for seed in (0, 1))
    bmt_zero.save(model, tmp_path / name)
    with closing(Checkpointer(tmp_path / "steps")) as checkpointer:
        checkpointer.save(1, model=model)
        checkpointer.wait()
        assert checkpointer.load_latest(model=other) == 1
        assert_equal(other, plain(norm))
        other = fsdp2.fully_shard(plain(norm, 1), mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(TypeError, match="DTensor, of which this rank has a part"):
            checkpointer.save(2, model=model, ema=other)
        with pytest.raises(SaveError):
            checkpointer.wait()
    bmt_zero.load(other, tmp_path / name)
    assert_equal(other, plain(norm))
    if ctx.rank == 0 and name.endswith("pt"):
        assert torch.load(tmp_path / name)["0.weight"].equal(plain(norm)[0].weight)


@pytest.mark.ranks(2)
def test_a_model_of_fsdp1_is_refused(ctx: ParallelContext, tmp_path: Path) -> None:
    bmt_zero.save(plain(), tmp_path / "m.pt")
    model = FullyShardedDataParallel(plain(seed=1), device_id=torch.device("cpu"))
    with pytest.raises(TypeError, match="FullyShardedDataParallel cannot be loaded"):
        bmt_zero.load(model, tmp_path / "m.pt")
    with closing(Checkpointer(tmp_path / "steps")) as checkpointer:
        checkpointer.save(1, model=plain())
        with pytest.raises(TypeError, match="FullyShardedDataParallel cannot be loaded"):
            checkpointer.load_latest(model=model)


class Pair(Tensor):
    """A tensor made of two others, as torchao's."""

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor) -> Pair:
        pair: Pair = Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)
        pair.parts = a, b
        return pair

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Pair(*args[0].parts)
        args = [sum(x.parts) if isinstance(x, Pair) else x for x in args]
        return func(*args, **(kwargs or {}))


@pytest.mark.ranks(1)
def test_tensors_made_of_others(ctx: ParallelContext, tmp_path: Path) -> None:
    """Each has its own values in the checkpoint. Loading into them raises."""
    model = nn.ParameterList([nn.Parameter(Pair(torch.full((4,), float(n)), torch.ones(4))) for n in range(2)])
    with closing(Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save(1, model=model)
        checkpointer.wait()
        other = nn.ParameterList([nn.Parameter(torch.zeros(4)) for _ in range(2)])
        checkpointer.load_latest(model=other)
        assert [float(each.detach()[0]) for each in other] == [1.0, 2.0]
        with pytest.raises(ValueError, match="made of other tensors"):
            checkpointer.load_latest(model=model)


def every_second(values: Tensor) -> nn.Module:
    """A module with the first of every second value: one element, whose stride is 2."""
    module = nn.Module()
    module.weight = nn.Parameter(values[::2][:1])
    module.register_buffer("first", values[::2][:1])
    return module


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["m.pt", "m.safetensors", "steps"])
def test_one_element_of_any_stride(ctx: ParallelContext, tmp_path: Path, name: str) -> None:
    model, other = every_second(torch.ones(4)), every_second(torch.zeros(4))
    state = {"first": model.first}
    if name == "steps":
        with closing(Checkpointer(tmp_path)) as checkpointer:
            checkpointer.save(1, model=model, others=nn.ParameterDict(state))
            checkpointer.load(1, model=other)
    else:
        bmt_zero.save(model, tmp_path / name)
        bmt_zero.load(other, tmp_path / name)
    assert float(other.weight.detach()) == float(other.first) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["m.pt", "m.safetensors", "steps", "mapped"])
def test_elements_that_share_memory_are_refused(ctx: ParallelContext, tmp_path: Path, name: str) -> None:
    """Before anything is loaded. With ``m.pt``, only one rank has such a tensor."""
    model, other = (bmt_zero.shard(nn.Linear(3, 3)) for _ in range(2))
    model.register_buffer("rows", torch.ones(1, 3).expand(2, 3))
    other.register_buffer("rows", model.rows if name != "m.pt" or ctx.rank == 1 else torch.ones(2, 3))
    before = {key: value.clone() for key, value in other.state_dict().items()}
    with closing(Checkpointer(tmp_path)) as checkpointer:
        if name == "steps":
            checkpointer.save(1, model=model)
            load = partial(checkpointer.load, 1, model=other)
        else:
            bmt_zero.save(model, tmp_path / name)
            load = partial(
                bmt_zero.load, other, tmp_path / name, key_map=(lambda key: key) if name == "mapped" else None
            )
        with pytest.raises(ValueError, match="elements of 'rows' share memory"):
            load()
    assert all(value.equal(before[key]) for key, value in other.state_dict().items())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["m.pt", "m.safetensors"])
def test_what_load_replaces_may_share_elements(ctx: ParallelContext, tmp_path: Path, name: str) -> None:
    def made(device: str) -> nn.Module:
        model = nn.Linear(3, 3, device=device)
        model.register_buffer("rows", torch.ones(1, 3, device=device).expand(2, 3))
        return model

    model, other = made("cpu"), made("meta")
    bmt_zero.save(model, tmp_path / name)
    with torch.inference_mode():
        bmt_zero.load(other, tmp_path / name)
    assert all(value.equal(model.state_dict()[key]) for key, value in other.state_dict().items())
    other(torch.ones(2, 3)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()


@pytest.mark.ranks(2)
def test_a_reserved_name_is_told_and_the_checkpointer_goes_on(ctx: ParallelContext, tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("__metadata__", torch.ones(1))
    with closing(Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save(1, model=model)
        with pytest.raises(SaveError, match="no tensors of the name '__metadata__'"):
            checkpointer.wait()
        checkpointer.save(2, model=nn.Linear(3, 3))
        checkpointer.wait()
        assert checkpointer.steps() == [2]


@pytest.mark.ranks(2)
def test_gradients_stay_off_while_objects_are_loaded(ctx: ParallelContext, tmp_path: Path) -> None:
    class Average:
        def __init__(self) -> None:
            self.value = nn.Parameter(torch.ones(2))

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value.detach()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value.copy_(state["value"])

    with closing(Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save(1, average=Average())
        for mode in (torch.no_grad, torch.inference_mode):
            average = Average()
            with mode():
                average.value.zero_()
                checkpointer.load(1, average=average)
            assert average.value.tolist() == [1, 1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_states_that_are_made_in_inference_mode_can_be_stepped(ctx: ParallelContext, tmp_path: Path, kind: Any) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = bmt_zero.shard(nn.Linear(3, 3))
        return model, kind(model.parameters(), lr=0.1)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made()
    train(model, optimizer)
    with closing(Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save(1, model=model, optimizer=optimizer)
        other, of_other = made()
        with torch.inference_mode():
            checkpointer.load(1, model=other, optimizer=of_other)
    for each in (model, optimizer), (other, of_other):
        train(*each)
    assert all(value.equal(model.state_dict()[key]) for key, value in other.state_dict().items())


class Conjugates(nn.Module):
    """Its buffers are tensors that torch conjugates and negates when they are read."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        values = torch.randn(3, 2, dtype=torch.complex64, generator=torch.Generator().manual_seed(seed))
        self.register_buffer("values", values)
        self.register_buffer("conjugate", values.conj())  # in the same memory
        self.register_buffer("other", values.clone().conj())
        self.register_buffer("negative", values[:1, :1].clone().conj().imag)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["m.pt", "m.safetensors", "steps", "memory"])
def test_conjugated_and_negated_tensors(ctx: ParallelContext, tmp_path: Path, name: str) -> None:
    expected = {key: value.clone() for key, value in Conjugates(0).state_dict().items()}
    model = Conjugates(0)
    if name == "memory":
        with closing(MemorySnapshots()) as snapshots:
            snapshots.take(1, model=model)
            for buffer in model.buffers():
                buffer.zero_()
            snapshots.restore(model=model)
    elif name == "steps":
        with closing(Checkpointer(tmp_path)) as checkpointer:
            checkpointer.save(1, model=model)
            model = Conjugates(1)
            checkpointer.load_latest(model=model)
    else:
        bmt_zero.save(model, tmp_path / name)
        model = Conjugates(1)
        bmt_zero.load(model, tmp_path / name)
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


@pytest.mark.ranks(2)
def test_zeros_for_a_module_with_code_of_its_own(ctx: ParallelContext, tmp_path: Path) -> None:
    source = plain(norm=True)
    bmt_zero.save(source, tmp_path / "m.pt")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 7))
    model = BMTrainModelWrapper(model)
    bmt_zero.load(model, tmp_path / "m.pt")
    assert not any(p.awaits_values for p in model.parameters())
    assert_equal(model, source)


@pytest.mark.ranks(2)
def test_assignment_into_a_layer_alone(ctx: ParallelContext) -> None:
    class Layer(bmt_zero.DistributedModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = DistributedParameter(torch.ones(4, 3))

    model = nn.Sequential(Layer())
    param = model[0].weight
    model.load_state_dict({"0.weight": torch.full((4, 3), 2.0)}, assign=True)
    assert model[0].weight is param
    assert param.full_tensor().equal(torch.full((4, 3), 2.0))


@pytest.mark.ranks(1)
def test_an_optimizer_of_another_class_or_in_another_order(ctx: ParallelContext, tmp_path: Path) -> None:
    model = plain()
    first, last = list(model[0].parameters()), list(model[2].parameters())
    groups = [{"params": first, "lr": 0.1}, {"params": last, "lr": 0.2}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.ones(3, 6)).sum().backward()
    optimizer.step()
    with closing(Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save(1, model=model, optimizer=optimizer)
        checkpointer.wait()
        for other in (torch.optim.SGD, torch.optim.RMSprop, torch.optim.NAdam):
            with pytest.raises(ValueError, match=f"of class AdamW, and the one here is a {other.__name__}"):
                checkpointer.load_latest(model=model, optimizer=other(groups, lr=0.5))
        with pytest.raises(ValueError, match=r"parameters of group 0 .* in group 1"):
            checkpointer.load_latest(model=model, optimizer=torch.optim.AdamW(groups[::-1]))

        class Own(torch.optim.AdamW):
            pass

        for kind in (torch.optim.Adam, Own):
            fresh = kind(copy.copy(groups), lr=0.5)
            assert checkpointer.load_latest(model=model, optimizer=fresh) == 1
            assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.2]


class Holder:
    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


@pytest.mark.ranks(2, tp_size=2)
def test_replicas_have_one_state(ctx: ParallelContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of the first rank of each replica is saved. If another rank has a different one, it is logged."""
    said: list[str] = []
    monkeypatch.setattr(bmt_zero.checkpoints.job._log, "warning", lambda text, *_: said.append(text))
    with closing(Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save(np.int64(1), model=plain(), data=Holder(7), per_replica=["data"])
        checkpointer.wait()
        holder = Holder(0)
        assert checkpointer.load_latest(data=holder) == 1
        assert holder.value == 7
        assert not said
        checkpointer.save(2, model=plain(), data=Holder(ctx.rank), per_replica=["data"])
        checkpointer.wait()
        assert len(said) == (ctx.rank == 0)
        assert all("tensor-parallel ranks of one replica" in each for each in said)


class Files:
    """As a tokenizer."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def save_pretrained(self, folder: str) -> None:
        for name in self.names:
            (Path(folder) / name).write_text("{}")


@pytest.mark.ranks(1)
def test_files_of_other_objects(ctx: ParallelContext, tmp_path: Path) -> None:
    """They may be passed to a load, and must not have names that a checkpoint needs."""
    model = plain()
    with closing(Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save(1, model=model, tokenizer=Files("vocab.json"))
        assert checkpointer.load_latest(model=model, tokenizer=Files("vocab.json")) == 1
        for name in ("manifest.json", "trainer.json", "rng-00000-of-00001.safetensors", "model.safetensors"):
            with pytest.raises(ValueError, match="a name that a checkpoint has itself"):
                checkpointer.save(2, model=model, tokenizer=Files(name))
            with pytest.raises(SaveError):
                checkpointer.wait()
        checkpointer.save(3, model=model, tokenizer=Files("model.json", ".hidden"))
        checkpointer.wait()
        assert (tmp_path / "step-00000003" / "model.json").exists()
        assert not (tmp_path / "step-00000003" / ".hidden").exists()


@pytest.mark.ranks(1)
def test_a_part_of_a_snapshot(ctx: ParallelContext) -> None:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with closing(MemorySnapshots()) as snapshots:
        snapshots.take(1, model=model, optimizer=optimizer, tokenizer=Files("vocab.json"))
        expected = copy.deepcopy(model)
        optimizer.param_groups[0]["lr"] = 0.25
        with torch.no_grad():
            model[0].weight.zero_()
        assert snapshots.restore(model=model, tokenizer=Files("vocab.json")) == 1
        assert_equal(model, expected)
        assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.ranks(2)
def test_a_file_with_no_entry_of_the_model(
    ctx: ParallelContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    for name in ("state", "checkpoints"):
        logger = logging.getLogger(f"bmt_zero.{name}")
        monkeypatch.setattr(logger, "warning", lambda text, *_: said.append(text))
    model = BMTrainModelWrapper(plain())
    prefixed = {f"module.{name}": value for name, value in plain(seed=1).state_dict().items()}
    if ctx.rank == 0:
        torch.save(prefixed, tmp_path / "m.pt")
    dist.barrier()
    for options in ({}, {"key_map": lambda name: name}):
        bmt_zero.load(model, tmp_path / "m.pt", strict=False, **options)
        assert said.pop().startswith("nothing is loaded")
    assert_equal(model, plain())


@pytest.mark.ranks(2)
def test_a_file_that_does_not_fit_a_model_of_fsdp2(ctx: ParallelContext, tmp_path: Path) -> None:
    """The model is then unchanged, also if a module's own code loads it."""
    entries = plain(norm=True, seed=1).state_dict()
    del entries["2.bias"]
    if ctx.rank == 0:
        torch.save(entries, tmp_path / "m.pt")
    dist.barrier()
    model = fsdp2.fully_shard(plain(norm=True), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match=r"missing entries: '2\.bias'"):
        bmt_zero.load(model, tmp_path / "m.pt")
    assert_equal(model, plain(norm=True))
