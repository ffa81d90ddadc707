"""The pool of rank processes, without the plugin."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bmt_comm.testing import Outcome, RankError, RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def gone(pid: int) -> bool:
    """Whether the process has ended, even if its parent has not waited for it yet (Linux can tell)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state == "Z"


def wait_until_gone(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not all(gone(pid) for pid in pids):
        time.sleep(0.05)
    return all(gone(pid) for pid in pids)


def sum_over_ranks(tensor: torch.Tensor, factor: int) -> tuple[int, torch.Tensor]:
    dist.init_process_group("gloo")
    tensor = tensor * factor
    dist.all_reduce(tensor)
    return dist.get_rank(), tensor


def fail_on(rank: int) -> str:
    if int(os.environ["RANK"]) == rank:
        raise KeyError("lost")
    return "fine"


def return_a_lambda() -> object:
    return lambda: None


def start_a_child() -> tuple[int, int]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    return os.getpid(), child.pid


def test_results_come_back_by_rank(pool: RankPool) -> None:
    results = pool.run(sum_over_ranks, 2, torch.tensor([1.0, 2.0]), 3)
    assert [rank for rank, _ in results] == [0, 1]
    for _, tensor in results:
        assert tensor.tolist() == [6.0, 12.0]


def test_processes_are_kept_from_call_to_call(pool: RankPool) -> None:
    assert pool.run(os.getpid, 2) == pool.run(os.getpid, 2) == pool.pids
    assert pool.run(os.getpid, 1) == pool.pids[:1]


def test_errors_carry_a_report_of_every_rank(pool: RankPool) -> None:
    with pytest.raises(RankError, match="KeyError: 'lost'") as caught:
        pool.run(fail_on, 2, 1)
    failed, fine = caught.value.reports[1], caught.value.reports[0]
    assert (failed.outcome, failed.error_type) == (Outcome.RAISED, "builtins.KeyError")
    assert (fine.outcome, fine.value) == (Outcome.RETURNED, "fine")
    assert pool.run(fail_on, 2, 5) == ["fine", "fine"], "the next call gets new processes"


def test_a_result_that_cannot_be_pickled_is_an_error(pool: RankPool) -> None:
    with pytest.raises(RankError, match="the result, a function, cannot be pickled"):
        pool.run(return_a_lambda, 1)


def hash_and_modules() -> tuple[int, bool]:
    return hash("text"), "wave" in sys.modules


def test_ranks_have_imported_what_is_asked_for_and_not_all_the_same_order_of_sets() -> None:
    with RankPool(2, preload=["wave", "no_such_module.part"]) as pool:
        (first, imported), (second, imported_too) = pool.run(hash_and_modules, 2)
    assert first != second
    assert imported
    assert imported_too


def test_an_answer_that_an_interrupt_has_left_is_not_taken_for_another() -> None:
    with RankPool(1) as pool:
        (pid,) = pool.run(os.getpid, 1)
        unread = b'{"status": %d, "number": 0}' % pid
        pool._servers[0]._control.send(unread)
        os.kill(pid, signal.SIGKILL)
        assert wait_until_gone([pid], seconds=3)
        pool._servers[0]._control.send(unread)
        deadline = time.monotonic() + 3
        while pool.pids and time.monotonic() < deadline:  # its other threads end a little later
            time.sleep(0.01)
        assert pool.pids == []
        assert pool.run(os.getpid, 1) != [pid]


@pytest.mark.parametrize("n", [0, 3])
def test_a_wrong_number_of_ranks_is_refused(pool: RankPool, n: int) -> None:
    with pytest.raises(ValueError, match=f"n={n}"):
        pool.run(os.getpid, n)


def test_close_leaves_no_process_behind() -> None:
    with RankPool(1) as pool:
        ((pid, child),) = pool.run(start_a_child, 1)
        assert not gone(pid)
        assert not gone(child)
    assert wait_until_gone([pid, child], seconds=3)


def test_ranks_busy_or_idle_end_when_the_process_of_the_pool_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys, time
            from bmt_comm.testing import RankPool

            def write_pid_and_hang(path):
                with open(os.path.join(path, "part"), "w") as file:
                    file.write(str(os.getpid()))
                os.rename(os.path.join(path, "part"), os.path.join(path, "pid"))
                time.sleep(1000)

            if __name__ == "__main__":
                with RankPool(1) as idle, RankPool(1) as busy:
                    idle.run(os.getpid, 1)
                    with open(os.path.join(sys.argv[1], "idle"), "w") as file:
                        file.write(str(idle.pids[0]))
                    busy.run(write_pid_and_hang, 1, sys.argv[1])
            """
        )
    )
    owner = subprocess.Popen([sys.executable, str(script), str(tmp_path)])
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "pid").exists():
            assert time.monotonic() < deadline
            assert owner.poll() is None
            time.sleep(0.05)
        pids = [int((tmp_path / name).read_text()) for name in ("idle", "pid")]
        assert not any(gone(pid) for pid in pids)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert wait_until_gone(pids, seconds=5)


def test_the_traceback_of_a_preload_that_fails_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_no_use.py").write_text("raise LookupError('nothing to be found here')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with RankPool(preload=["of_no_use"]) as pool, pytest.raises(RuntimeError) as raised:
        pool.run(fail_on, 1, 5)
    assert "the process that forks ranks has ended with exit code 1" in str(raised.value)
    assert 'of_no_use.py", line 1' in str(raised.value)
    assert "LookupError: nothing to be found here" in str(raised.value)
