"""Runs that are killed go on from a complete checkpoint, as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "checkpoint_worker.py"
STEPS = 60


def run(folder: Path, kills: int, restarts: int) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(restarts), "--monitor-interval", "0.1"]
    command += [str(WORKER), str(folder), str(STEPS), str(kills)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, timeout=60 + 60 * (restarts + 1), capture_output=True).returncode


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = (folder / "losses.jsonl").read_text().splitlines()
    return [tuple(json.loads(line)) for line in lines if line.endswith("]")]


@pytest.mark.parametrize("by_hand", [False, True])
def test_killed_runs_go_on_from_a_complete_checkpoint(tmp_path: Path, by_hand: bool) -> None:
    """The session ``checkpoint_faults`` of nox kills more often."""
    kills = int(os.environ.get("BMT_KILLS", "2"))
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    plain.mkdir()
    killed.mkdir()
    assert run(plain, 0, 0) == 0
    wanted = dict(losses(plain))
    assert sorted(wanted) == list(range(1, STEPS + 1))
    if by_hand:
        codes = []
        while not (killed / "finished").exists():
            codes.append(run(killed, kills, 0))
            assert len(codes) <= kills + 1
    else:
        assert run(killed, kills, kills + 1) == 0
    assert (killed / "finished").exists()
    starts = [json.loads(line) for line in (killed / "starts.jsonl").read_text().splitlines()]
    assert len(starts) > 1
    assert all(start % 2 == 0 for start in starts)
    # What a killed run has written to its record after its last save is taken again, with the same result.
    for step, loss in losses(killed):
        assert loss == wanted[step], step
    assert {step for step, _ in losses(killed)} == set(wanted)
