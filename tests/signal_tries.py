"""Runs of the example of which one rank gets a signal at some moment; run by test_signals.py.

Each try is a job of two processes, forks of this one, which has imported torch for all of them. It goes on from the
checkpoint that the try before has left. A line of JSON for each try: how the ranks have ended, after how many seconds,
and what was said and saved.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt2"
sys.path.insert(0, str(EXAMPLE))

import torch  # noqa: E402
import torch._dynamo  # noqa: E402 - now, and not in each try
import train  # noqa: E402

AT_MOST = 120.0  # seconds for a try, after which it is killed
FLAGS = [
    *("--data", "text", "--vocab-size", "300", "--layers", "2", "--hidden", "32", "--heads", "2", "--seq-len", "32"),
    *("--optimizer", "adam", "--lr", "1e-3", "--schedule", "constant", "--batch-size", "4", "--device", "cpu"),
    *("--steps", "1000000", "--save-interval", "7", "--keep", "3", "--log-interval", "1", "--eval-interval", "3"),
    *("--accumulation", "2", "--resume"),
]


def child(rank: int, port: int, folder: Path) -> None:
    """One rank of a try; does not return."""
    out = os.open(folder / f"rank{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(folder)
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    sys.argv = ["train.py", *FLAGS]
    code = 0
    try:
        train.main()
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(number: signal.Signals, times: int, rank: int, moment: float, folder: Path) -> dict[str, Any]:
    """Start a job, send a rank signals ``moment`` seconds after it has begun, and tell how the job has ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    said = folder / "rank0"
    said.unlink(missing_ok=True)
    processes = []
    for each in range(2):
        process = os.fork()
        if process == 0:
            child(each, port, folder)
        processes.append(process)
    deadline = time.monotonic() + AT_MOST
    while time.monotonic() < deadline and not (said.exists() and "Building the model" in said.read_text()):
        time.sleep(0.01)
    time.sleep(moment)
    sent = time.monotonic()
    for _ in range(times):
        os.kill(processes[rank], number)
        time.sleep(0.05)
    codes: dict[int, Any] = dict.fromkeys(processes, "hangs")
    running = list(processes)
    while running and time.monotonic() < deadline:
        for process in list(running):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[process] = os.waitstatus_to_exitcode(status)
                running.remove(process)
        time.sleep(0.01)
    for process in running:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    text = said.read_text(errors="replace")
    step = re.search(r"Interrupted and saved after step (\d+);", text)
    checkpoints = sorted((folder / "runs" / "gpt2" / "checkpoints").glob("step-*"))
    return {
        "try": f"{number.name}, {times} times, to rank {rank} after {moment:.2f} s",
        "codes": [codes[process] for process in processes],
        "seconds": time.monotonic() - sent,
        "step": int(step[1]) if step else None,
        "saved": int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else None,
        "said": text[-2000:] + (folder / "rank1").read_text(errors="replace")[-2000:],
    }


if __name__ == "__main__":
    draw = random.Random(0)
    for _ in range(int(sys.argv[2])):
        number = draw.choice([signal.SIGTERM, signal.SIGUSR1])
        times, rank, moment = draw.choice([1, 2]), draw.randrange(2), draw.uniform(0.0, 4.0)
        print(json.dumps(run(number, times, rank, moment, Path(sys.argv[1]))), flush=True)
