"""Runs that are killed go on from a complete checkpoint, as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_worker import newest

WORKER = Path(__file__).parent / "checkpoint_worker.py"


def run(folder: Path, steps: int, kills: int, restarts: int) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(restarts), "--monitor-interval", "0.1"]
    command += [str(WORKER), str(folder), str(steps), str(kills)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, timeout=60 + 60 * (restarts + 1), capture_output=True).returncode


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = (folder / "losses.jsonl").read_text().splitlines()
    return [tuple(json.loads(line)) for line in lines if line.endswith("]")]


def starts_of(folder: Path) -> list[int]:
    """The step from which each start went on."""
    return [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]


@pytest.mark.thorough
def test_killed_runs_go_on_from_a_complete_checkpoint(tmp_path: Path) -> None:
    """torchrun restarts one run, and the other one is started again by hand. The session ``checkpoint_faults`` of nox
    kills more often."""
    kills = int(os.environ.get("BMT_KILLS", "1"))
    steps = 60 + 12 * kills  # a run that is killed takes 3 to 8 steps before
    plain, restarted, by_hand = tmp_path / "plain", tmp_path / "restarted", tmp_path / "by_hand"
    for folder in (plain, restarted, by_hand):
        folder.mkdir()
    assert run(plain, steps, 0, 0) == 0
    wanted = dict(losses(plain))
    assert sorted(wanted) == list(range(1, steps + 1))
    assert run(restarted, steps, kills, kills + 1) == 0
    times, on_disk = 0, []
    while not (by_hand / "finished").exists():
        run(by_hand, steps, kills, 0)
        on_disk.append(newest(by_hand))
        times += 1
        assert times <= kills + 1
    assert starts_of(by_hand)[1:] == on_disk[:-1]
    for folder in (restarted, by_hand):
        assert (folder / "finished").exists()
        starts = starts_of(folder)
        assert len(starts) == 1 + len(list(folder.glob("kill-*"))) == 1 + kills
        assert all(start % 2 == 0 for start in starts)
        # What was complete at the instant of a kill is not lost.
        seen = [int((folder / f"seen-{number}").read_text()) for number in range(kills)]
        assert all(start >= at_least for start, at_least in zip(starts[1:], seen)), (starts, seen)
        assert starts == sorted(starts)
        assert starts[1] > 0
        # What a killed run has written to its record after its last save is taken again, with the same result.
        for step, loss in losses(folder):
            assert loss == wanted[step], step
        assert {step for step, _ in losses(folder)} == set(wanted)
