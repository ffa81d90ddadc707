"""Saving other state than the model: objects with a state, random generators, states of replicas."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from saving_helpers import Position, plain, same, sharded
from torch import nn

import bmt_comm
import bmt_zero
from bmt_zero import Checkpointer, SaveError
from bmt_zero.checkpoints import checkpointer as checkpointer_module
from bmt_zero.checkpoints import trainer_state
from bmt_zero.checkpoints import writer as writer_module
from bmt_zero.checkpoints.contents import adopt_records, make_state
from bmt_zero.checkpoints.directory import complete_checkpoints
from bmt_zero.checkpoints.headers import Entry
from bmt_zero.checkpoints.manifest import Manifest


@pytest.mark.ranks(2)
def test_objects_with_a_state_are_saved(ctx: Any, tmp_path: Path) -> None:
    value = {"a": (1, 2.5, None, True), 3: [b"x", "é"], "t": torch.arange(3, dtype=torch.int16), "nan": float("inf")}
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(
        1, model=sharded(), common=Position(value), own=Position(ctx.rank), per_replica=["own"], empty=Position([])
    )
    common, own = Position(None), Position(None)
    assert checkpointer.load_latest(model=sharded(), common=common, own=own) == 1
    assert own.value == ctx.rank
    assert torch.equal(common.value.pop("t"), value.pop("t"))
    assert common.value == value
    with pytest.raises(ValueError, match="has no state of 'other'"):
        checkpointer.load(1, other=common)
    checkpointer.save(2, model=sharded(), own=Position(ctx.rank))
    with pytest.raises(SaveError, match=r"state of 'own' is not the same on ranks 0 and 1; .* per_replica=\['own'\]"):
        checkpointer.wait()
    assert checkpointer.steps() == [1]


@pytest.mark.ranks(2)
def test_random_generators_go_back(ctx: Any, tmp_path: Path) -> None:
    import random

    torch.manual_seed(ctx.rank)
    random.seed(ctx.rank)
    torch.randn(3)
    random.gauss(0, 1)
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=sharded_without_randomness())
    wanted = (torch.randn(4).tolist(), random.random(), random.gauss(0, 1))
    torch.manual_seed(77)
    random.seed(77)
    checkpointer.load_latest(model=sharded_without_randomness())
    assert (torch.randn(4).tolist(), random.random(), random.gauss(0, 1)) == wanted


def numbers() -> tuple[list[float], float]:
    import random

    return torch.rand(4).tolist(), random.random()


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("alike", [True, False])
def test_random_generators_at_another_number_of_ranks(tmp_path: Path, alike: bool) -> None:
    """Ranks get the state that all ranks had, or a new state for each replica, the same one in every load."""
    import random

    import bmt_comm

    ctx = bmt_comm.init_distributed(tp_size=2, seed=0)
    # As if saved by three ranks: only the files of states tell the number of ranks.
    if ctx.rank == 0:
        writer = Alone(tmp_path / "c", 3)
        for rank in range(3):
            torch.manual_seed(5 if alike else rank)
            random.seed(5 if alike else rank)
            torch.rand(3)
            writer.write(rank)
        wanted = numbers()
        writer.publish()
    ctx.world.barrier()
    checkpointer = Checkpointer(tmp_path / "c", readonly=True)
    drawn = []
    for _ in range(2):
        torch.manual_seed(ctx.rank)
        random.seed(ctx.rank)
        assert checkpointer.load_latest() == 1
        drawn.append(numbers())
    assert drawn[0] == drawn[1]
    everyone = ctx.world.all_gather_object(drawn[0])
    if alike:
        assert everyone == [ctx.world.broadcast_object(wanted if ctx.rank == 0 else None)] * 4
    else:
        assert everyone[0] == everyone[1] != everyone[2] == everyone[3]  # tensor-parallel ranks are one replica
        torch.manual_seed(0)
        random.seed(0)
        assert numbers() not in everyone
    bmt_comm.shutdown()


@pytest.mark.ranks(4, init=False)
def test_random_generators_at_another_layout_of_as_many_ranks(tmp_path: Path) -> None:
    """Tensor-parallel ranks, which were replicas, have one state; the same layout has its own states."""
    import bmt_comm

    drawn = {}
    for tp_size in (1, 2, 1):
        ctx = bmt_comm.init_distributed(tp_size=tp_size, seed=None)
        if not drawn:
            torch.manual_seed(ctx.rank)
            checkpointer = Checkpointer(tmp_path / "c")
            checkpointer.save(1, data=Position(0))
            checkpointer.close()
            drawn[0] = ctx.world.all_gather_object(torch.rand(3).tolist())
        torch.manual_seed(7)
        assert Checkpointer(tmp_path / "c", readonly=True).load_latest(data=Position(0)) == 1
        drawn[tp_size] = ctx.world.all_gather_object(torch.rand(3).tolist())
        bmt_comm.shutdown()
    assert drawn[1] == drawn[0]
    a, b, c, d = drawn[2]
    assert a == b != c == d
    assert not any(each in drawn[0] for each in drawn[2])


class Alone:
    """Writes a checkpoint that has only the states of random generators, as several ranks would."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self.part, self.directory, self.ranks = directory / ".part", directory, ranks
        self.part.mkdir(parents=True)
        self.records: dict[str, Any] = {}

    def add(self, name: str, content: bytes) -> None:
        self.records[name] = writer_module.write_small_file(self.part / name, content)

    def write(self, rank: int) -> None:
        name = trainer_state.rng_file(rank, self.ranks)
        self.add(name, trainer_state.small_safetensors(name, trainer_state.random_state()))

    def publish(self) -> None:
        self.add("trainer.json", json.dumps(trainer_state.describe_run(1, self.ranks)).encode())
        (self.part / "manifest.json").write_bytes(Manifest(1, True, self.records).to_json())
        self.part.rename(self.directory / "step-00000001")


@pytest.mark.ranks(4, init=False)
def test_states_of_replicas_need_as_many_replicas(tmp_path: Path) -> None:
    import bmt_comm

    ctx = bmt_comm.init_distributed(tp_size=2)
    replica = ctx.rank // 2
    checkpointer = Checkpointer(tmp_path / "c")
    model, data = sharded(), Position(replica)
    checkpointer.save(1, model=model, data=data, per_replica=["data"])
    checkpointer.close()
    states = [name for name in os.listdir(tmp_path / "c" / "step-00000001") if name.startswith("state-data")]
    assert sorted(states) == ["state-data-00000-of-00002.json", "state-data-00001-of-00002.json"]
    bmt_comm.shutdown()
    ctx = bmt_comm.init_distributed()
    checkpointer = Checkpointer(tmp_path / "c")
    other, mine = sharded(2), Position(7)
    before = other.state_dict()
    with pytest.raises(ValueError, match="has the states of 'data' of 2 replicas, and there are 4 now; leave data out"):
        checkpointer.load_latest(model=other, data=mine)
    same(other.state_dict(), before)
    assert mine.value == 7
    assert checkpointer.load_latest(model=other) == 1
    same(other.state_dict(), plain().state_dict())
    checkpointer.close()
    bmt_comm.shutdown()


def sharded_without_randomness() -> nn.Module:
    model = nn.Linear(3, 3)
    state = torch.get_rng_state()
    model = bmt_zero.BMTrainModelWrapper(model)
    torch.set_rng_state(state)
    return model


@pytest.mark.ranks(2)
def test_objects_come_back_as_they_were(ctx: Any, tmp_path: Path) -> None:
    value = {
        "later": 1,
        "earlier": {frozenset({1}): {frozenset({2}), frozenset({3, 4})}},
        "conjugated": torch.tensor([1 + 2j]).conj(),
    }
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=sharded(), position=Position(value))
    checkpointer.wait()
    position = Position(None)
    checkpointer.load(1, position=position)
    loaded = position.value
    assert list(loaded) == list(value)
    assert loaded["earlier"] == value["earlier"]
    assert loaded["conjugated"].tolist() == [1 - 2j]


@pytest.mark.ranks(2)
def test_messages_and_states_of_any_length(ctx: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are longer than one value of the store, and than the limit of a file without a record."""
    from bmt_zero.checkpoints import manifest, store_communicator

    monkeypatch.setattr(store_communicator, "_PART", 100)
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=sharded(), position=Position("x" * 100_000))
    checkpointer.wait()
    monkeypatch.setattr(manifest, "_LONGEST", 50_000)
    position = Position(None)
    checkpointer.load(1, model=sharded(), position=position)
    assert position.value == "x" * 100_000
    lengths = [0, 1, 99, 100, 101, 250]
    for length in lengths:
        messages = checkpointer._comm.all_gather(bytes([ctx.rank]) * length)
        assert messages == [bytes([rank]) * length for rank in range(2)]


class Scaled(nn.Module):
    """Has a parameter without dimensions, which one rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale.exp()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["Adam", "NAdam", "ASGD", "SGD"])
def test_states_of_optimizers_of_torch_for_a_number(ctx: Any, tmp_path: Path, kind: str) -> None:
    def made(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = bmt_zero.BMTrainModelWrapper(Scaled().to(dtype))
        options = {"momentum": 0.9} if kind == "SGD" else {}
        return model, getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made()
    checkpointer = Checkpointer(tmp_path / "c")
    for _ in range(2):
        step(model, optimizer)
    checkpointer.save(1, model=model, optimizer=optimizer)
    checkpointer.wait()
    again, its_optimizer = made()
    checkpointer.load(1, model=again, optimizer=its_optimizer)
    step(model, optimizer)
    step(again, its_optimizer)
    wanted, actual = model.state_dict(), again.state_dict()
    other, its_optimizer = made(torch.bfloat16)
    with pytest.raises(ValueError, match=r"float32|F32"):
        checkpointer.load(1, model=other, optimizer=its_optimizer)
    assert all(torch.equal(actual[name], value) for name, value in wanted.items())


@pytest.mark.parametrize(
    ("kind", "options", "devices"),
    [
        ("AdamW", {}, {"step": "cpu"}),
        ("AdamW", {"capturable": True}, {"step": "meta"}),
        ("NAdam", {"capturable": True}, {"step": "meta", "mu_product": "meta"}),
        ("ASGD", {}, {"step": "cpu", "eta": "meta", "mu": "meta"}),
    ],
)
def test_numbers_of_optimizers_of_torch_are_on_the_device_that_reads_them(
    kind: str, options: dict[str, Any], devices: dict[str, str]
) -> None:
    """As after torch's ``load_state_dict``. The meta device stands for one that is not the host."""
    param = nn.Parameter(torch.empty(3, device="meta"))
    optimizer = getattr(torch.optim, kind)([param], **options)
    saved = {f"weight.{key}": Entry(f"weight.{key}", "F32", ()) for key in devices}
    adopt_records(optimizer, [], make_state(optimizer, {param: "weight"}, saved))
    assert {key: value.device.type for key, value in optimizer.state[param].items()} == devices


@pytest.mark.ranks(2)
def test_back_to_before_the_first_step_of_an_optimizer_of_torch(ctx: Any, tmp_path: Path) -> None:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(0, model=model, optimizer=optimizer)
    updates = []
    for _ in range(2):
        for _ in range(2):
            model.embed(torch.arange(3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        updates.append(model.state_dict())
        with pytest.raises(ValueError, match="has no state of 'other'"):
            checkpointer.load(0, model=model, optimizer=optimizer, other=Position(None))
        assert optimizer.state  # nothing was changed
        checkpointer.load(0, model=model, optimizer=optimizer)
        assert not optimizer.state
    same(*updates)


class WithFolder:
    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "additional_chat_templates").mkdir()


@pytest.mark.ranks(2)
def test_a_folder_of_a_tokenizer_is_refused(ctx: Any, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c")
    match = "a folder 'additional_chat_templates'"
    with pytest.raises(ValueError, match=match) if ctx.rank == 0 else contextlib.nullcontext():
        checkpointer.save(1, model=sharded(), tokenizer=WithFolder())
    with pytest.raises(SaveError, match=match):
        checkpointer.wait()


@pytest.mark.ranks(2, init=False)
def test_the_end_of_the_job_waits_for_the_last_checkpoint(tmp_path: Path) -> None:
    bmt_comm.init_distributed()
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=sharded())
    bmt_comm.shutdown()
    assert [step for step, _ in complete_checkpoints(tmp_path / "c").checkpoints] == [1]


@pytest.mark.ranks(1)
def test_a_reader_beside_a_run_that_keeps_one(ctx: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listed checkpoints are removed before they are read."""
    writer = Checkpointer(tmp_path / "c", keep=1)
    writer.save(1, model=sharded())
    writer.wait()
    reader = Checkpointer(tmp_path / "c", readonly=True)
    load, listed = reader._load, checkpointer_module.listed_steps
    steps = iter([2, 3])

    def save_next() -> None:
        if (step := next(steps, None)) is not None:
            writer.save(step, model=sharded())
            writer.wait()

    def late_load(*args: Any) -> None:
        save_next()
        load(*args)

    def early_list(directory: Path) -> list[int]:
        steps_before = listed(directory)
        monkeypatch.setattr(checkpointer_module, "listed_steps", listed)
        save_next()
        return steps_before

    monkeypatch.setattr(reader, "_load", late_load)
    monkeypatch.setattr(checkpointer_module, "listed_steps", early_list)
    assert reader.load_latest(model=sharded()) == 3
