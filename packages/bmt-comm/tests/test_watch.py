"""The end of a job of many ranks: one report, complete, of which no rank but one reads much."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from bmt_comm import journal, watch
from bmt_comm.operation import Operation
from bmt_comm.report import Status
from bmt_comm.startup import Peer

SIZE = 256
CULPRIT = 77
CONNECTIONS = 8  # that the simulated ranks share


class Counting:
    """A store that counts requests."""

    def __init__(self, store: Any) -> None:
        self.store, self.requests = store, 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self.store, name)


class OneOfMany(watch.Watch):
    """The watch of a simulated rank, which waits for the culprit or is it."""

    def _status(self) -> Status:
        wait: Any = {"key": "world", "group": "world", "number": 5, "name": "all_reduce", "seconds": 9.0, "place": ""}
        wait["peers"] = list(range(SIZE))
        names = {str(number): "all_gather of float32 (1048576,) for the forward of layer 3" for number in range(64)}
        late = self.rank == CULPRIT
        return {
            "waiting": [] if late else [wait],
            "groups": {"world": (4 if late else 5, names if late else {**names, "5": "all_reduce"})},
            "last": "",
            "place": "",
            "line": f"train.py:{30 if late else 5} in {'load' if late else 'step'}",
            "stack": "a line of the stack\n" * 100,
            "raised": "",
            "error": "",
        }


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    """The watches of many ranks on as many hosts, by rank, which are made by a call with the ranks that answer."""
    monkeypatch.setenv("BMT_FAULT_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(watch, "_ANSWER", 4.0)  # threads of one process answer more slowly than processes
    monkeypatch.setattr(watch, "_MESSAGE", 2.0)
    made: dict[int, OneOfMany] = {}
    servers = []

    def make(some: Collection[int] = range(SIZE)) -> dict[int, OneOfMany]:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        clients: list[dist.TCPStore] = []
        for rank in some:
            if len(clients) < CONNECTIONS:
                clients.append(dist.TCPStore("127.0.0.1", server.port, is_master=False))
            client = clients[rank % len(clients)]
            peers = {rank: Peer.here()}
            made[rank] = OneOfMany(Counting(client), rank, SIZE, peers, 600.0, lambda message: None)
            made[rank]._delivered.set()
        servers.append(server)
        return made

    yield make
    for each in made.values():
        each.stop(leaves=False)


def messages(made: dict[int, OneOfMany]) -> Counter[str]:
    """What the ranks say in the end, without where each has written it."""
    for each in made.values():
        assert each._concluded.wait(30)
    return Counter(each._message.partition("\n(rank ")[0] for each in made.values())


def test_all_ranks_say_the_same_and_name_the_culprit_of_many(ranks):
    made = ranks()
    begun = time.monotonic()
    made[200]._alarm("rank 200 has waited for long")
    [(said, count)] = messages(made).items()
    seconds = time.monotonic() - begun
    assert count == SIZE
    assert said.splitlines()[:3] == [
        "rank 200 has waited for long",
        "  rank 77: is at train.py:30 in load, and waits for no operation",
        "  ranks 0, 1, 2, 3, 4, 5, 6, 7 and 247 more: waits in operation 5 of world, all_reduce, at train.py:5 in step",
    ]
    assert "Python stack of rank 77" in said
    requests = sorted(each._store.requests for each in made.values())
    print(f"{SIZE} ranks: {seconds:.2f} s, {requests[SIZE // 2]} requests of a rank, {requests[-1]} of the reporter")
    assert requests[-1] < 2 * SIZE  # it waits for the others


def test_ranks_that_do_not_answer_are_named(ranks):
    made = ranks(set(range(SIZE)) - {CULPRIT, 99})
    made[3]._alarm("an alarm")
    [(said, _)] = messages(made).items()
    assert said.splitlines()[1].startswith("  rank 77: does not answer")
    assert said.splitlines()[2].startswith("  rank 99: does not answer")
    assert "and 246 more: waits in operation 5" in said


def test_another_rank_reports_where_the_first_reporter_has_failed(ranks):
    made = ranks(set(range(SIZE)) - {99})
    made[3]._store.store.set("alarm", '[99, "rank 99 has failed"]')
    [(said, count)] = messages(made).items()
    assert count == SIZE - 1
    assert said.splitlines()[:2] == [
        "rank 99 has failed",
        "  rank 99: does not answer; it may be in native code that holds the interpreter's lock",
    ]


def test_ranks_that_wait_for_different_operations_are_found_by_one_request(ranks, monkeypatch):
    made = ranks((3, CULPRIT))
    for each in made.values():
        each.stop(leaves=False)
    group: Any = type("Group", (), {"key": "world", "name": "world"})()
    waits = {
        rank: journal.Wait(0.0, group, Operation(5, b"all_gather" if rank == CULPRIT else b"all_reduce", 0), (), "")
        for rank in (3, CULPRIT)
    }
    for rank, wait in waits.items():
        monkeypatch.setattr(watch, "waits", {threading.get_ident(): wait})
        made[rank]._compare(time.monotonic())
    assert not made[3]._reason
    assert made[CULPRIT]._reason == (
        "ranks call different operations: rank 77 is at operation 5 of world, all_gather, rank 3 at all_reduce"
    )


def run_script(folder: Path, text: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder, where it is called script.py, with more environment variables."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(text))
    env = {**os.environ, **variables}
    command = [sys.executable, script, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=100)


UNWRITTEN = """
    import time
    import torch.distributed as dist
    from bmt_comm import watch
    from bmt_comm.startup import Peer

    def fail(*args):
        raise ValueError("on purpose")

    watch.write_record = fail
    store = dist.HashStore()
    peers = {rank: Peer.here() for rank in range(2)}
    made = watch.Watch(store, 0, 2, peers, 600.0, fail)
    made._alarm("rank 0 waits")
    time.sleep(60)
"""


def test_a_rank_ends_though_its_report_and_its_waits_fail(tmp_path):
    done = run_script(tmp_path, UNWRITTEN, BMT_FAULT_DIR=str(tmp_path))
    assert done.returncode == 1
    assert "the report of rank 0 could not be written: on purpose" in done.stderr
    assert "rank 0 is ended" in done.stderr


def test_a_rank_ends_though_nobody_reads_its_stderr(tmp_path):
    broken = UNWRITTEN.replace("watch.write_record = fail", "import os; r, w = os.pipe(); os.close(r); os.dup2(w, 2)")
    assert run_script(tmp_path, broken, BMT_FAULT_DIR=str(tmp_path)).returncode == 1


RAISES = """
    import sys
    import torch.distributed as dist
    from bmt_comm import watch
    from bmt_comm.startup import Peer

    made = watch.Watch(dist.HashStore(), 0, 1, {0: Peer.here()}, 600.0, lambda message: None)
    error = eval(sys.argv[1])
    if hasattr(error, "add_note"):
        error.add_note("a note")
    raise error
"""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("ValueError('the cause:\\n  3 rows\\n\\nset DEBUG=1')", "ValueError: the cause:"),
        ("SyntaxError('the cause', ('a.py', 1, 1, 'x y'))", "SyntaxError: the cause"),
    ],
)
def test_an_exception_of_several_lines_or_with_notes_is_named_by_its_first_line(tmp_path, error, said):
    assert run_script(tmp_path, RAISES, error, BMT_FAULT_DIR=str(tmp_path)).returncode == 1
    lines = next(tmp_path.glob("bmt-fault-rank0-*.txt")).read_text().splitlines()
    assert lines[0] == f"rank 0 raised {said}"
    assert lines[1] == f"  rank 0: raised {said}"


PRINTING = """
    import io
    import sys
    import time
    import torch.distributed as dist
    from bmt_comm import watch
    from bmt_comm.startup import Peer

    def hook(*args):  # as torch's: what is printed meanwhile goes to a buffer
        before, sys.stderr = sys.stderr, io.StringIO()
        time.sleep(0.6)
        sys.stderr = before
        print("rank 0:", args[1], file=sys.stderr, flush=True)

    sys.excepthook = hook
    peers = {rank: Peer.here() for rank in range(2)}
    made = watch.Watch(dist.HashStore(), 0, 2, peers, 600.0, lambda message: None)
    made._alarm("rank 0 waits")
    made._concluded.wait(20)
    time.sleep(watch._WAKE - 0.3)
    raise watch.RankFailureError(made._message)
"""


def test_a_rank_is_not_ended_while_it_prints_why(tmp_path):
    done = run_script(tmp_path, PRINTING, BMT_FAULT_DIR=str(tmp_path))
    assert done.returncode == 1
    assert "rank 0: rank 0 waits" in done.stderr


def test_the_file_of_a_rank_tells_what_the_flight_recorder_knows(tmp_path):
    done = run_script(tmp_path, RECORDED, TORCH_FR_BUFFER_SIZE="100")
    assert done.returncode == 0, done.stderr
    if not hasattr(c10d, "_dump_fr_trace_json"):
        assert done.stdout == "\n"
        return
    assert done.stdout.splitlines() == [
        f"PyTorch's flight recorder ({tmp_path}/bmt-flight-rank-0), operations that have not ended:",
        "  gloo:all_reduce number 2 of process group ['0', 'default_pg'], ['Float'] [[5]]: scheduled",
    ]
    entries = pickle.loads((tmp_path / "bmt-flight-rank-0").read_bytes())["entries"]
    assert [entry["input_sizes"] for entry in entries] == [[[3]], [[5]]]
    assert any(frame["filename"] == str(tmp_path / "script.py") for frame in entries[1]["frames"])


RECORDED = """
    import os
    import time
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from bmt_comm.flight_recorder import write_record
    store = dist.FileStore("store", 2)
    rank = int(os.fork() == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.all_reduce(torch.ones(3))
    if rank == 0:
        dist.all_reduce(torch.ones(5), async_op=True)
        while "[[3]]" in (said := write_record(Path.cwd(), 0)):  # the recorder is told later that it has ended
            time.sleep(0.01)
        print(said, flush=True)
        Path("over").touch()
    while not Path("over").exists():
        time.sleep(0.01)
    os._exit(0)
"""
