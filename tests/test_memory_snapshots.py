"""Snapshots in memory: back to them after a bad step, and on from them after a rank or a host was lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_worker import Data
from torch import nn

import bmtrain as bmt

WORKER = Path(__file__).parent / "snapshot_worker.py"
MEMORY = Path("/dev/shm")
STEPS = 9


@pytest.fixture
def memory() -> Iterator[Path]:
    if not MEMORY.is_dir():
        pytest.skip("there is no /dev/shm")
    folder = MEMORY / f"bmt-test-{uuid.uuid4().hex}"
    folder.mkdir()
    yield folder
    left = [path for path in folder.rglob("*") if path.is_file()]
    for path in left:
        path.unlink()
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir()
    folder.rmdir()
    assert not left


def run(folder: Path, memory: str, when: str, ranks: int = 2) -> tuple[dict[int, float], list[int]]:
    """The losses by step, and the steps from which the starts went on."""
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", "1", "--monitor-interval", "0.1"]
    command += [str(WORKER), str(folder), str(STEPS), memory, when]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, timeout=180, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    losses = dict(json.loads(line) for line in (folder / "losses").read_text().splitlines())
    return losses, [int(line) for line in (folder / "starts").read_text().splitlines()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[int, float]:
    losses, starts = run(tmp_path_factory.mktemp("runs") / "uninterrupted", str(MEMORY), "never")
    assert starts == [0]
    assert sorted(losses) == list(range(1, STEPS + 1))
    return losses


def long(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("when", "hosts"),
    [
        ("host", "{rank}"),
        long("take", "one"),
        long("step", "one"),
        long("take", "{rank}"),
    ],
)
def test_a_killed_rank_costs_one_step_at_most(tmp_path, memory, uninterrupted, when, hosts):
    losses, starts = run(tmp_path / "run", str(memory / hosts), when)
    assert starts == [0, 4]
    assert losses == uninterrupted


def test_memory_of_jobs_that_have_ended_is_given_back(tmp_path, memory):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(WORKER), str(tmp_path), str(STEPS), str(memory), "step"]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=180, capture_output=True)
    assert done.returncode != 0
    assert list(memory.glob("bmt-snapshots-*/*"))
    snapshots = bmt.MemorySnapshots(memory)
    assert len(list(memory.iterdir())) == 1  # its own
    snapshots.close()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = bmt.TransformerBlockList(
            [bmt.Block(nn.Sequential(nn.Linear(65, 33), nn.Dropout(0.2), nn.Linear(33, 65))) for _ in range(2)]
        )
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layers(x)


def train(rank: int, every: int, bad: int | None, left_out: tuple[int, ...] = ()) -> list[float]:
    """The losses of the batches that were used, but for those that a return to a snapshot has undone."""
    torch.manual_seed(5)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager = bmt.optim.OptimManager(skip_non_finite=True)
    manager.add_optimizer(optimizer, bmt.lr_scheduler.Cosine(optimizer, 0.01, 2, 20))
    torch.manual_seed(rank)
    data, snapshots, losses = Data(rank), bmt.MemorySnapshots(), []
    kept: list[float] = []
    for number in range(10):
        x = data.next()
        if number in left_out:
            continue
        if number == bad and rank == 1:
            x[0, 0] = float("nan")
        manager.zero_grad()
        loss = model(x).square().mean()
        manager.backward(loss)
        if manager.step():
            losses.append(bmt.sum_loss(loss.detach()).item())
        else:
            assert snapshots.restore(model=model, manager=manager) == len(kept)
            losses = list(kept)
        if len(losses) % every == 0:
            snapshots.take(len(losses), model=model, manager=manager, data=data)
            kept = list(losses)
    assert model.calls == len(losses)
    snapshots.close()
    return losses


@pytest.mark.ranks(2)
@pytest.mark.parametrize("every", [1, 3])
def test_all_ranks_go_back_to_the_last_snapshot(ctx, every):
    bad = 5
    undone = tuple(range(bad - bad % every, bad + 1))
    assert train(ctx.rank, every, bad) == train(ctx.rank, every, None, left_out=undone)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("every", [1, 3])
def test_a_loss_scale_that_was_too_large_comes_back_from_no_snapshot(ctx, tmp_path, every):
    model = nn.Linear(3, 3, bias=False).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    manager = bmt.optim.OptimManager(loss_scale=64, loss_scale_steps=2, grad_scale=1)
    manager.add_optimizer(optimizer)
    snapshots, steps, taken = bmt.MemorySnapshots(tmp_path), 0, []
    for _ in range(12):
        manager.zero_grad()
        manager.backward((model.weight.float() * 1000).sum())  # gradients of 128,000 are inf in fp16
        taken.append(manager.step())
        if not taken[-1]:
            steps = snapshots.restore(model=model, manager=manager) or steps
        else:
            steps += 1
            if steps % every == 0:
                snapshots.take(steps, model=model, manager=manager)
    assert taken == [True, True, False] * 4

    # A process that comes later knows nothing better.
    snapshots.take(steps + 1, model=model, manager=manager)
    expected, manager.loss_scale = manager.loss_scale, 1
    later = bmt.MemorySnapshots(tmp_path)
    assert later.restore(model=model, manager=manager) == steps + 1
    assert manager.loss_scale == expected
    later.close()
    snapshots.close()


@pytest.mark.ranks(1, 2)
def test_a_damaged_snapshot_is_not_used(ctx, tmp_path):
    model = nn.Linear(3, 3)
    snapshots = bmt.MemorySnapshots(tmp_path)
    assert snapshots.restore(model=model) is None
    expected = model.weight.detach().clone()
    snapshots.take(1, model=model)
    with torch.no_grad():
        model.weight.add_(1.0)
    snapshots.take(2, model=model)
    if ctx.rank == 0:  # of the last one of this rank, and of the copy that the other one has
        for copies in tmp_path.glob("*/*"):
            with copies.open("r+b") as file:
                step = torch.frombuffer(bytearray(file.read(16)), dtype=torch.int64)[1]
                if step == 2:
                    file.seek(-1, os.SEEK_END)
                    file.seek(4096)
                    file.write(b"damaged")
    ctx.world.barrier()
    with torch.no_grad():
        model.weight.zero_()
    assert snapshots.restore(model=model) == 1
    assert torch.equal(model.weight.detach(), expected)
    with pytest.raises(ValueError, match="of another model"):
        snapshots.restore(model=nn.Linear(3, 4))
    snapshots.close()


@pytest.mark.ranks(2)
def test_memory_that_is_too_small_is_an_error(ctx, tmp_path):
    snapshots = bmt.MemorySnapshots(tmp_path)

    def no_room(*_: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_room)
        with pytest.raises(RuntimeError, match="has no room for"):
            snapshots.take(1, model=nn.Linear(3, 3))
    snapshots.close()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("in_files", [False, True])
def test_the_newest_snapshot_is_the_last_that_was_taken(ctx, tmp_path, in_files):
    model, directory = nn.Linear(3, 3), tmp_path if in_files else None
    snapshots = bmt.MemorySnapshots(directory)
    for step, value in [(490, 1.0), (500, 2.0), (410, 3.0), (410, 4.0)]:
        nn.init.constant_(model.weight, value)
        snapshots.take(step, model=model)
        nn.init.zeros_(model.weight)
        after_restart = bmt.MemorySnapshots(directory) if in_files else snapshots
        assert after_restart.restore(model=model) == step
        assert torch.equal(model.weight, torch.full((3, 3), value))
        ctx.world.barrier()
    heads = [path.read_bytes()[:64] for path in tmp_path.glob("*/*")]
    assert len({tuple(torch.frombuffer(bytearray(head), dtype=torch.int64).tolist()) for head in heads}) == len(
        heads
    ) / (ctx.world.size)
    ctx.world.barrier()
    snapshots.close()


class Raises:
    def state_dict(self) -> dict[str, int]:
        raise KeyError("no state")

    def load_state_dict(self, state: dict[str, int]) -> None: ...


class Fine(Raises):
    def state_dict(self) -> dict[str, int]:
        return {}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("place", ["state", "own", "neighbour"])
def test_all_ranks_raise_what_one_rank_has_met_while_it_takes_a_snapshot(ctx, tmp_path, place):
    model, fails = nn.Linear(3, 3), ctx.rank == 1
    snapshots = bmt.MemorySnapshots(tmp_path, timeout=10.0)
    nn.init.ones_(model.weight)
    snapshots.take(1, model=model)
    nn.init.zeros_(model.weight)
    allocate, calls = os.posix_fallocate, []

    def no_room(*args: int) -> None:
        calls.append(args)
        if len(calls) == ("own", "neighbour").index(place) + 1:
            raise OSError(28, "No space left on device")
        allocate(*args)

    expected = "rank 1: KeyError" if place == "state" else "rank 1: RuntimeError: .* has no room for"
    with pytest.MonkeyPatch.context() as patch:
        if fails and place != "state":
            patch.setattr(os, "posix_fallocate", no_room)
        with pytest.raises(RuntimeError, match=expected):
            snapshots.take(2, model=model, data=Raises() if fails and place == "state" else Fine())
    assert snapshots.restore(model=model) == 1
    assert model.weight.sum() == 9
    snapshots.take(3, model=model)
    assert snapshots.restore(model=model) == 3
    snapshots.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("late", [False, True])
def test_all_ranks_raise_what_one_rank_has_met_while_it_goes_back(ctx, late):
    """Before anything is changed, unless it is the user's own code that raises."""

    class Keeps:
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            if late and ctx.rank == 1:
                raise KeyError("this rank's")

    model, snapshots = nn.Linear(3, 3), bmt.MemorySnapshots(timeout=10.0)
    nn.init.ones_(model.weight)
    snapshots.take(1, model=model, keeps=Keeps())
    nn.init.zeros_(model.weight)
    given = nn.Linear(3, 4 if ctx.rank == 1 and not late else 3)
    expected = (RuntimeError, "KeyError: .this rank's") if late else (ValueError, "of another model")
    with pytest.raises(expected[0], match=expected[1]):
        snapshots.restore(model=model if late else given, keeps=Keeps())
    assert late or model.weight.sum() == 0
    late = False
    assert snapshots.restore(model=model, keeps=Keeps()) == 1
    assert model.weight.sum() == 9
    snapshots.close()


@pytest.mark.ranks(2)
def test_files_of_ranks_that_have_moved_to_another_host_are_removed(ctx, tmp_path):
    memory = tmp_path / f"{ctx.rank}"  # as if each rank were on another host
    memory.mkdir()
    model, snapshots = nn.Linear(3, 3), bmt.MemorySnapshots(memory)
    folder = next(memory.iterdir())

    def leave_files() -> None:
        for rank in (1 - ctx.rank, 7):
            for kind in ("own", "other"):
                (folder / f"{rank}-{kind}-0").write_bytes(b"0" * 4096)

    leave_files()
    snapshots.take(1, model=model)
    assert {path.name.partition("-")[0] for path in folder.iterdir()} == {f"{ctx.rank}"}
    leave_files()
    snapshots.close()
    assert not list(memory.iterdir())


@pytest.mark.parametrize("at_first", [True, False])
def test_a_snapshot_that_does_not_fit_leaves_everything_as_it_is(at_first):
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    snapshots = bmt.MemorySnapshots()
    if not at_first:
        step()
    snapshots.take(1, model=model, optimizer=optimizer)
    step()
    before = {param: {**state} for param, state in optimizer.state.items()}
    assert len(before) == 2
    values = [value.clone() for state in before.values() for value in state.values()]
    other = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="has no state of"):
        snapshots.restore(model=model, optimizer=optimizer, other=other)
    with pytest.raises(ValueError, match="that the model has not"):
        snapshots.restore(model=other, optimizer=optimizer)
    assert {param: {**state} for param, state in optimizer.state.items()} == before
    assert all(map(torch.equal, values, [value for state in before.values() for value in state.values()]))
    assert snapshots.restore(model=model, optimizer=optimizer) == 1
    assert [float(state["step"]) for state in optimizer.state.values()] == ([] if at_first else [1.0, 1.0])
    snapshots.close()


def test_objects_that_only_have_files_of_a_model_are_left_out():
    class Tokenizer:
        def save_pretrained(self, folder: str) -> None:
            raise AssertionError("a snapshot has no files")

    model, snapshots = nn.Linear(3, 3), bmt.MemorySnapshots()
    snapshots.take(1, model=model, tokenizer=Tokenizer())
    assert snapshots.restore(model=model) == 1
    snapshots.close()
