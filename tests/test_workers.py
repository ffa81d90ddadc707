"""Processes that a script starts beside collectives: workers of data loaders, forks; and cells that run twice."""

from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import bmtrain as bmt
from bmt_comm import ParallelContext

METHODS = [
    "fork",
    pytest.param("spawn", marks=pytest.mark.thorough),
    pytest.param("forkserver", marks=pytest.mark.long),
]


class Numbers(Dataset):
    """Samples that say in which process they were made."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((6,), float(index)), os.getpid()


def children() -> list[str]:
    tasks = Path("/proc/self/task").iterdir()
    return [child for task in tasks for child in (task / "children").read_text().split()]


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("persistent", [False, True])
def test_data_loaders_beside_training(ctx: ParallelContext, method: str, persistent: bool) -> None:
    model = bmt.BMTrainModelWrapper(nn.Sequential(bmt.Block(nn.Linear(6, 6)), nn.Linear(6, 1)))
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3))
    loader = DataLoader(
        Numbers(), 2, num_workers=2, multiprocessing_context=method, persistent_workers=persistent, timeout=60
    )
    makers: set[int] = set()
    for _ in range(2):
        seen = []
        for samples, processes in loader:  # workers prepare batches during collectives
            manager.zero_grad()
            manager.backward(model(samples).square().mean())
            manager.step()
            seen += samples[:, 0].tolist()
            makers |= set(processes.tolist())
        assert seen == [float(index) for index in range(12)]
    assert os.getpid() not in makers
    assert len(makers) == (2 if persistent else 4)
    del loader
    ctx.world.barrier()


def _double(value: int) -> int:
    return 2 * value


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("method", METHODS[:2])
def test_pools_of_processes(ctx: ParallelContext, method: str) -> None:
    with multiprocessing.get_context(method).Pool(2) as pool:
        answer = pool.map_async(_double, range(20))
        total = torch.ones(1000)
        for _ in range(50):
            ctx.world.all_reduce(total)
        assert answer.get(timeout=60) == [2 * value for value in range(20)]
    ctx.world.barrier()


@pytest.mark.ranks(2, timeout=120)
def test_a_fork_that_ends_by_itself_and_one_that_is_killed(ctx: ParallelContext) -> None:
    for end in (lambda: os._exit(0), lambda: os.kill(os.getpid(), 9)):
        child = os.fork()
        if child == 0:
            end()
        total = torch.ones(1000)
        ctx.world.all_reduce(total)
        os.waitpid(child, 0)
        assert float(total[0]) == 2.0


@pytest.mark.ranks(2, init=False, timeout=120)
def test_a_cell_that_runs_twice() -> None:
    counts = []
    for number in range(6):
        if number == 0:
            bmt.init_distributed(device="cpu")
        else:
            with pytest.raises(RuntimeError, match="shutdown"):  # says how to go on; the context stays
                bmt.init_distributed(device="cpu")
        model = bmt.BMTrainModelWrapper(nn.Sequential(bmt.Block(nn.Linear(6, 6)), nn.Linear(6, 1)))
        manager = bmt.optim.OptimManager()
        manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3))
        for _ in range(2):
            manager.zero_grad()
            manager.backward(model(torch.ones(2, 6)).sum())
            manager.step()
        counts.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    assert counts[-1] <= counts[1]
