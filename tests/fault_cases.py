"""Jobs in which rank 1 fails or does something else than rank 0; run by test_faults.py.

Each case is a job of two processes, forks of this one, which has imported torch for all of them. What they print goes
to files. A line of JSON for each case: how each rank has ended, and after how many seconds.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # now, and not in each case
from torch import nn

import bmt_comm
from bmt_optim import AdamOptimizer, OptimManager
from bmt_pipe import PipelineTransformerBlockList
from bmt_zero import Block, TransformerBlockList, save

TIMEOUT = 6.0
AT_MOST = 60.0  # seconds for a case, after which it is killed

ENDS: dict[str, Callable[[], None]] = {
    "raise": lambda: _raise(),
    "exit": lambda: sys.exit(0),
    "spin": lambda: _spin(),
    "sleep": lambda: time.sleep(1000),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}
CALLS = ("skip", "twice", "shape", "dtype", "order")
FAULTS = (*ENDS, *CALLS, "frozen")
POINTS = ("forward", "backward", "step", "save", "pipeline")


def _raise() -> None:
    raise ValueError("the culprit")


def _spin() -> None:
    while True:
        pass


class Job:
    """Training, with a fault at one point of the second step of rank 1."""

    def __init__(self, fault: str, point: str, began: Path) -> None:
        self.fault, self.point, self.began = fault, point, began
        self.armed = False

    def at(self, point: str) -> None:
        """Two collectives; rank 1 fails in their place, or calls others."""
        if point != self.point or not self.armed:
            return
        self.armed = False
        context = bmt_comm.current_context()
        self.began.touch()
        fault = self.fault if context.rank == 1 else ""
        if fault in ENDS:
            ENDS[fault]()
        if point == "pipeline" and self.fault in ENDS:
            return  # stages reach it one after the other
        first, second = torch.ones(3), torch.ones(2)
        if fault == "shape":
            first = torch.ones(4)
        if fault == "dtype":
            first = first.int()
        calls = [lambda: context.world.all_reduce(first), lambda: context.world.all_reduce(second, "max")]
        chosen = {"skip": calls[1:], "twice": [calls[0], *calls], "order": calls[::-1]}.get(fault, calls)
        for call in chosen:
            call()
        context.world.barrier()

    def run(self, url: str, folder: Path) -> None:
        pipe = self.point == "pipeline"
        context = bmt_comm.init_distributed(url, pipe_size=2 if pipe else 1, device="cpu", timeout=TIMEOUT)
        layers = [Layer(self) for _ in range(4)]
        model: Any = PipelineTransformerBlockList(layers) if pipe else TransformerBlockList(map(Block, layers))
        manager = OptimManager()
        manager.add_optimizer(AdamOptimizer(model.parameters(), lr=0.01))
        x = torch.ones(4, 8)
        for step in range(3):
            self.armed = step == 1
            if self.armed and self.fault == "frozen" and context.rank == 1:
                self.began.touch()
                next(model.parameters()).requires_grad_(False)
            if pipe and self.fault not in ENDS:
                self.at("pipeline")
            order = [0, 1, 2, 3]
            if self.armed and self.point == "forward" and context.rank == 1:
                order = {"skip": [0, 2, 3], "twice": [0, 1, 1, 2, 3], "order": [0, 2, 1, 3]}.get(self.fault, order)
                if order != [0, 1, 2, 3]:
                    self.began.touch()
                    self.armed = False
            y = x
            if pipe:
                y = model(x)
            else:
                for index in order:
                    y = model[index](y)
            manager.backward(y.square().sum())
            self.at("step")
            manager.clip_grad_norm(model.parameters(), 1.0)
            manager.step()
            manager.zero_grad()
            if not pipe:
                self.at("save")
                save(model, folder / "model.pt")


class Layer(nn.Linear):
    def __init__(self, job: Job) -> None:
        super().__init__(8, 8)
        self.job = job

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.job.fault in ENDS or self.job.point == "forward":
            self.job.at("pipeline")
            if self.job.fault not in ("skip", "twice", "order"):
                self.job.at("forward")
        return _Backward.apply(super().forward(x), self.job)

    def __deepcopy__(self, memo: dict[int, Any]) -> Layer:
        return self


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, job: Job) -> torch.Tensor:
        ctx.job = job
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.job.at("backward")
        return grad, None


def child(case: str, rank: int, folder: Path) -> None:
    """One rank of a case; does not return."""
    fault, point, backend = case.split("-")
    out = os.open(folder / f"rank{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    torch.set_num_threads(1)
    os.environ["BMT_FAULT_DIR"] = str(folder)
    if backend == "gloo":
        sys.modules["bmt_kernels"] = None  # type: ignore[assignment]
    code = 0
    try:
        job = Job(fault, point, folder / "began")
        job.run(f"tcp://127.0.0.1:{(folder / 'port').read_text()}?rank={rank}&world_size=2", folder)
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        code = 1
        kind, value, stack = sys.exc_info()
        assert kind is not None
        assert value is not None
        sys.last_type = kind
        sys.excepthook(kind, value, stack)
    finally:
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(code)


def run(case: str, folder: Path) -> dict[str, Any]:
    """Run a case and tell how it has ended."""
    folder.mkdir()
    with __import__("socket").socket() as probe:
        probe.bind(("127.0.0.1", 0))
        (folder / "port").write_text(str(probe.getsockname()[1]))
    ranks: dict[int, int] = {}
    for rank in range(2):
        process = os.fork()
        if process == 0:
            child(case, rank, folder)
        ranks[process] = rank
    codes: dict[int, Any] = {0: "hangs", 1: "hangs"}
    seconds: dict[int, float] = {}
    deadline = time.monotonic() + AT_MOST
    while ranks and time.monotonic() < deadline:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == 0:
            if list(ranks.values()) == [1] and case.startswith("stop"):
                break
            time.sleep(0.01)
            continue
        rank = ranks.pop(process)
        codes[rank] = os.waitstatus_to_exitcode(status)
        began = folder / "began"
        seconds[rank] = time.time() - began.stat().st_mtime if began.exists() else -1.0
    for process in ranks:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return {"case": case, "codes": [codes[0], codes[1]], "seconds": [seconds.get(0, AT_MOST), seconds.get(1, AT_MOST)]}


if __name__ == "__main__":
    for wanted in sys.argv[2:]:
        print(json.dumps(run(wanted, Path(sys.argv[1]) / wanted)), flush=True)
