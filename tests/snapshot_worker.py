"""A training run that takes a snapshot of every step in memory, and of which rank 1 is killed once.

``torchrun --max-restarts 1 snapshot_worker.py FOLDER STEPS MEMORY WHEN``

MEMORY is a folder of a file system in memory; ``{rank}`` in it stands for the rank, as if each were on another host.
WHEN is one of: never; step (killed between the snapshots of steps 4 and 5); take (while it writes that of step 5); host
(as step, and its memory is lost, too).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch
from checkpoint_worker import Data
from torch import nn

import bmtrain as bmt
from bmt_zero.checkpoints import memory_snapshots


def main() -> None:
    folder, steps, memory, when = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    bmt.init_distributed(seed=3)
    rank = bmt.rank()
    memory = memory.format(rank=rank)
    killed = folder / "killed"
    if when == "host" and rank == 1 and killed.exists():
        shutil.rmtree(memory)
    Path(memory).mkdir(exist_ok=True, parents=True)
    layers = [nn.Sequential(nn.Linear(65, 33), nn.Dropout(0.2), nn.Linear(33, 65)) for _ in range(2)]
    model = bmt.TransformerBlockList([bmt.Block(layer) for layer in layers])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager = bmt.optim.OptimManager(loss_scale=8.0, loss_scale_steps=4)
    manager.add_optimizer(optimizer, bmt.lr_scheduler.Cosine(optimizer, 0.01, 2, steps))
    data = Data(rank)
    snapshots = bmt.MemorySnapshots(memory)
    step = snapshots.restore(model=model, manager=manager, data=data) or 0
    if rank == 0:
        with (folder / "starts").open("a") as file:
            print(step, file=file)
    while step < steps:
        manager.zero_grad()
        loss = model(data.next()).square().mean()
        manager.backward(loss)
        dies = step == 4 and rank == 1 and when != "never" and not killed.exists()
        if dies and when != "take":
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        manager.step()
        step += 1
        if dies:
            killed.touch()
            memory_snapshots.copy_into = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        mean = bmt.sum_loss(loss).item()
        if rank == 0:
            with (folder / "losses").open("a") as file:
                print(json.dumps([step, mean]), file=file)
        snapshots.take(step, model=model, manager=manager, data=data)
    snapshots.close()


if __name__ == "__main__":
    main()
