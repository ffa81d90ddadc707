"""A training run that saves every second step, and whose ranks are killed at random instants.

``torchrun --max-restarts N checkpoint_worker.py FOLDER STEPS KILLS``
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

import bmtrain as bmt
from bmt_zero.checkpoints.directory import complete_checkpoints


class Data:
    """Batches by number; every replica has its own."""

    def __init__(self, replica: int) -> None:
        self.replica, self.number = replica, 0

    def next(self) -> torch.Tensor:
        self.number += 1
        generator = torch.Generator().manual_seed(1000 * self.number + self.replica)
        return torch.randn(4, 65, generator=generator)

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def newest(folder: Path) -> int:
    """The step of the newest complete checkpoint on the disk; 0 if there is none."""
    return max((step for step, _ in complete_checkpoints(folder / "checkpoints", log=False).checkpoints), default=0)


def kill_some(folder: Path, count: int, ranks: int) -> None:
    """Kill one rank, or all, at a random instant of a second; of two times once after a save of this run."""
    generator = random.Random(count)
    before = newest(folder)
    while count % 2 == 0 and newest(folder) == before:
        time.sleep(0.01)
    time.sleep(generator.random() * generator.choice([0.1, 1.0]))
    (folder / f"seen-{count}").write_text(str(newest(folder)))
    chosen = [generator.randrange(ranks)] if generator.random() < 0.6 else list(range(ranks))
    for rank in sorted(chosen, reverse=True):  # rank 0 runs this
        os.kill(int((folder / f"pid-{rank}").read_text()), signal.SIGKILL)


def main() -> None:
    folder, steps, kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    ctx = bmt.init_distributed(seed=1, device="cpu")
    (folder / f"pid-{ctx.rank}").write_text(str(os.getpid()))
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(65, 130), nn.Dropout(0.2), nn.Tanh(), nn.Linear(130, 65)) for _ in range(3)]
    model = bmt.BMTrainModelWrapper(nn.Sequential(*layers))
    torch.manual_seed(ctx.rank)
    manager = bmt.optim.OptimManager(loss_scale=64.0, loss_scale_steps=5)
    optimizer = bmt.optim.AdamOptimizer(model.parameters())
    manager.add_optimizer(optimizer, bmt.lr_scheduler.Cosine(optimizer, 1e-2, 5, steps))
    data = Data(ctx.rank)
    checkpointer = bmt.Checkpointer(folder / "checkpoints", keep=2)
    step = checkpointer.load_latest(model=model, manager=manager, data=data)
    ctx.world.barrier()
    done = len(list(folder.glob("kill-*")))
    if ctx.rank == 0:
        with open(folder / "starts.jsonl", "a") as file:
            file.write(json.dumps(step) + "\n")
        if done < kills:
            (folder / f"kill-{done}").touch()
            threading.Thread(target=kill_some, args=(folder, done, ctx.world_size), daemon=True).start()
    record = open(folder / "losses.jsonl", "a")  # noqa: SIM115
    while step < steps:
        manager.zero_grad()
        loss = model(data.next()).square().mean()
        manager.backward(loss)
        manager.clip_grad_norm(optimizer.param_groups, 1.0)
        manager.step()
        step += 1
        mean = bmt.sum_loss(loss).item()
        if ctx.rank == 0:
            record.write(json.dumps([step, mean]) + "\n")
            record.flush()
        if step % 2 == 0:
            checkpointer.save(step, model=model, manager=manager, data=data)
        if done < kills:
            time.sleep(0.02)  # so that the run lasts long enough to be killed
    checkpointer.wait()
    record.close()
    if ctx.rank == 0:
        (folder / "finished").touch()


if __name__ == "__main__":
    main()
