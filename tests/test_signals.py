"""A signal to any rank at any moment lets all ranks of the example save the same step and leave with code 0.

By default a few tries; with BMT_SIGNALS=50 (the nox session ``signals``) as many as that.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import signal_tries
import torch

TRIES = int(os.environ.get("BMT_SIGNALS", "3"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are on the CPU")
def test_a_signal_to_any_rank_at_any_moment(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for i in range(10):
        (tmp_path / "text" / f"{i}.txt").write_text("".join(f"line {j} of file {i}\n" for j in range(200)))
    process = subprocess.Popen(
        [sys.executable, signal_tries.__file__, str(tmp_path), str(TRIES)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=60 + 40 * TRIES)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    results = [json.loads(line) for line in printed.splitlines()]
    assert len(results) == TRIES
    before = -1
    for result in results:
        assert result["codes"] == [0, 0], result
        assert result["step"] is not None, result
        assert result["saved"] == result["step"] >= before, result
        assert result["seconds"] < 30, result  # after which torchrun kills
        before = result["step"]
    print(f"{TRIES} of {TRIES}; longest wait: {max(result['seconds'] for result in results):.1f} s")
