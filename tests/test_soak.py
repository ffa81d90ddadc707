"""Long runs leave nothing behind: memory, descriptors, threads, processes and shared memory stay as they are.

By default they are short; with BMT_SOAK=1 (the nox session ``soak``) they have 100,000 collectives and 2,000 steps.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import bmtrain as bmt
from bmt_comm import Communicator, ParallelContext
from bmt_comm.testing.memory import held

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(sys.platform != "linux", reason="what a process uses is read from /proc"),
]

LIBC = ctypes.CDLL(None)
LONG = bool(os.environ.get("BMT_SOAK"))
COLLECTIVES = 100_000 if LONG else 3000
STEPS = 2000 if LONG else 120
NUMBERS = 65536  # in the largest message


class Usage(NamedTuple):
    descriptors: int
    threads: int
    processes: int
    shared: int  # mappings of shared memory
    memory: int  # in kB, without mapped files

    @staticmethod
    def now() -> Usage:
        gc.collect()
        process = Path("/proc/self")
        children = [child for task in (process / "task").iterdir() for child in (task / "children").read_text().split()]
        if hasattr(LIBC, "malloc_trim"):
            LIBC.malloc_trim(0)  # what is free, and kept by the allocator for later, is no leak
        return Usage(
            len(os.listdir(process / "fd")),
            len(os.listdir(process / "task")),
            len(children),
            (process / "maps").read_text().count("memfd:"),
            held() // 1024,
        )

    def check(self, before: Usage) -> None:
        """Memory may vary by 2 %."""
        assert self[:4] <= before[:4], (before, self)
        assert self.memory <= 1.02 * before.memory, (before, self)


def call_one(comm: Communicator, draw: random.Random, pending: list[Any]) -> None:
    """A collective of random kind and size, the same on all ranks, with the result that it must have."""
    count, kind = draw.choice([1, 7, 1000, NUMBERS]), draw.randrange(7)
    own = torch.full((count,), float(comm.rank + 1))
    total = comm.size * (comm.size + 1) / 2
    if kind == 0:
        comm.all_reduce(own)
        assert float(own[-1]) == total
    elif kind == 1:
        everyone = torch.empty(comm.size * count)
        comm.all_gather(everyone, own)
        assert everyone[::count].tolist() == [float(rank + 1) for rank in range(comm.size)]
    elif kind == 2:
        comm.reduce_scatter(own, torch.full((comm.size * count,), float(comm.rank + 1)))
        assert float(own[0]) == total
    elif kind == 3:
        root = draw.randrange(comm.size)
        comm.broadcast(own, root)
        assert float(own[0]) == root + 1
    elif kind == 4:
        following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        received = torch.empty(count)
        comm.send_recv([(own, following)], [(received, previous)])
        assert float(received[-1]) == previous + 1
    elif kind == 5:
        assert comm.all_gather_object({"rank": comm.rank}) == [{"rank": rank} for rank in range(comm.size)]
    else:
        pending.append((own, comm.all_reduce(own, async_op=True), total))
    if len(pending) > 4 or kind == 5:
        for value, work, expected in pending:
            work.wait()
            assert float(value[0]) == expected
        pending.clear()


@pytest.mark.ranks(4, tp_size=2, timeout=7200 if LONG else 120)
def test_collectives_of_all_kinds_and_groups(ctx: ParallelContext) -> None:
    draw, pending = random.Random(0), []
    groups = [ctx.world, ctx.tp, ctx.tp_zero]
    before = None
    for number in range(COLLECTIVES):
        call_one(draw.choice(groups), draw, pending)
        if number == COLLECTIVES // 2:  # the records of the last operations are full by then
            before = Usage.now()
    for _, work, _ in pending:
        work.wait()
    assert before is not None
    Usage.now().check(before)


def build() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)]
    return bmt.BMTrainModelWrapper(nn.Sequential(nn.Embedding(50, 64), *map(bmt.Block, layers), nn.Linear(64, 50)))


def manage(model: nn.Module) -> bmt.optim.OptimManager:
    manager = bmt.optim.OptimManager(loss_scale=1024.0, loss_scale_steps=8)
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3))
    return manager


@pytest.mark.ranks(2, timeout=7200 if LONG else 240)
def test_training_with_overflow_evaluation_saving_and_new_models(ctx: ParallelContext, tmp_path: Path) -> None:
    draw = random.Random(0)
    model = build()
    manager = manage(model)
    checkpointer = bmt.Checkpointer(tmp_path / "checkpoints", keep=2)
    before, skipped = None, 0
    for step in range(STEPS):
        ids = torch.randint(50, (4, 8), generator=torch.Generator().manual_seed(2 * step + ctx.rank))
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())
        if draw.random() < 0.1 and ctx.rank == draw.randrange(2):  # an overflow on one rank
            loss = loss * float("inf")
        scale = manager.loss_scale
        manager.zero_grad()
        manager.backward(loss)
        manager.clip_grad_norm(model.parameters(), 1.0)
        manager.step()
        skipped += manager.loss_scale < scale
        if step % 10 == 0:
            with torch.no_grad():
                model.eval()(ids)
                model.train()
        if step % 20 == 0:
            checkpointer.save(step, model=model, manager=manager)
            bmt.save(model, tmp_path / "model.pt")
        if step % 40 == 20:  # another model goes on with the state of this one
            checkpointer.wait()
            model = build()
            manager = manage(model)
            assert checkpointer.load_latest(model=model, manager=manager) == step
            bmt.load(model, tmp_path / "model.pt")
        if step == STEPS // 2:
            checkpointer.wait()
            before = Usage.now()
    checkpointer.close()
    assert skipped > STEPS // 40
    assert before is not None
    Usage.now().check(before)
    assert all(param.isfinite().all() for param in model.parameters())
