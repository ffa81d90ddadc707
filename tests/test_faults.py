"""Whatever one rank does, all ranks end soon after the time-out at most, and say which rank it was and where it is.

By default a few cases run; with BMT_ALL_FAULTS=1 (the nox session ``faults``) all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import fault_cases
import pytest
import torch

import bmt_kernels

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux" or torch.cuda.is_available(), reason="ranks are on the CPU of Linux")
]

BACKENDS = [pytest.param("gloo", marks=pytest.mark.long)]
if bmt_kernels.SharedMemoryExchange.available():
    BACKENDS += ["shm"]
FEW = {
    "gloo": ["raise-forward", "spin-backward", "kill-step", "shape-save", "sleep-pipeline", "skip-forward"],
    "shm": ["exit-forward", "raise-forward", "stop-backward", "kill-pipeline", "frozen-step", "twice-forward"],
}
SLACK = 3.0  # seconds after the time-out, on a busy machine


def cases(backend: str) -> list[str]:
    if not os.environ.get("BMT_ALL_FAULTS"):
        return [f"{case}-{backend}" for case in FEW[backend]]
    every = [(fault, point) for point in fault_cases.POINTS for fault in fault_cases.FAULTS]
    every.remove(("frozen", "pipeline"))  # stages have no parameter in common
    return [f"{fault}-{point}-{backend}" for fault, point in every]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_fault_ends_the_job_and_names_the_rank(tmp_path: Path, backend: str) -> None:
    wanted = cases(backend)
    process = subprocess.Popen(
        [sys.executable, fault_cases.__file__, str(tmp_path), *wanted],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=60 + 20 * len(wanted))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    results = [json.loads(line) for line in printed.splitlines()]
    assert [result["case"] for result in results] == wanted
    for result in results:
        fault, point, _ = result["case"].split("-")
        said = (tmp_path / result["case"] / "rank0").read_text(errors="replace")
        text = f"{result}\n{said[-3000:]}"
        assert result["codes"][0] == 1, text
        assert result["codes"][1] == {"exit": 0, "kill": -signal.SIGKILL, "stop": "hangs"}.get(fault, 1), text
        assert max(result["seconds"][:1] if fault == "stop" else result["seconds"]) < fault_cases.TIMEOUT + SLACK, text
        assert "rank 1" in said, text
        told_by_stage = fault == "raise" and point == "pipeline"  # stages tell each other of exceptions
        for expected in ["stage 1", "(rank 1) failed: ValueError"] if told_by_stage else EXPECTED.get(fault, []):
            assert expected in said, text
    for point in fault_cases.POINTS:
        waits = [result["seconds"][0] for result in results if result["case"].split("-")[1] == point]
        if waits:
            print(f"{backend}, {point}: {len(waits)} ended and named rank 1, the longest wait {max(waits):.1f} s")


EXPECTED = {
    "raise": ["rank 1: raised ValueError: the culprit", "fault_cases.py", "Traceback of rank 1:"],
    "exit": ["rank 1: has ended"],
    "kill": ["rank 1: has ended"],
    "spin": ["rank 1: is at ", "in _spin, and waits for no operation", "Python stack of rank 1:", "while True:"],
    "sleep": ["rank 1: is at ", "fault_cases.py", "time.sleep(1000)"],
    "stop": ["rank 1: does not answer; it is stopped"],
    "shape": ["operation", "(4,)"],
    "dtype": ["operation", "int32"],
}
