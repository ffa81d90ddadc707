"""Start-up, layout, shutdown, and what they leave alone."""

import contextlib
import datetime
import itertools
import math
import os
import random
import socket
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
import torch.distributed as dist

import bmt_comm
from bmt_comm import init_distributed, shutdown
from bmt_comm.launch import LOCAL_RANKS, choose_device, local_rank
from bmt_comm.layout_groups import _pairs
from bmt_comm.startup import connect


def run_script(tmp_path, text, processes=0, timeout=90, options=()):
    """The script in fresh interpreters, warnings being errors; 0 processes: without a launcher.

    What it prints is without the note that ranks do not share memory, which comes at most once.
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    command = [sys.executable, "-W", "error"]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    env["CUDA_VISIBLE_DEVICES"] = ""
    if processes:
        # torch's launcher itself may warn; its workers must not.
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"]
        command += options
        env |= {"PYTHONWARNINGS": "error::UserWarning,error::FutureWarning,error::ResourceWarning"}
        env |= {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=timeout, env=env)
    lines = done.stderr.splitlines(keepends=True)
    notes = [line for line in lines if line.startswith("ranks send messages over gloo and do not share memory")]
    assert len(notes) <= 1
    done.stderr = "".join(line for line in lines if line not in notes)
    return done


def expected_members(world_size, pipe, tp, rank):
    """The members of each communicator, from the definition rank = (pipe · data_size + data) · tp_size + tp."""
    data = world_size // (pipe * tp)
    place = {(p * data + d) * tp + t: (p, d, t) for p in range(pipe) for d in range(data) for t in range(tp)}
    mine = place[rank]

    def same(*dims):
        return tuple(r for r in range(world_size) if all(place[r][d] == mine[d] for d in dims))

    return mine, {
        "world": same(),
        "zero": same(0),
        "zero_host": same(0),
        "tp_zero": same(0, 2),
        "tp": same(0, 1),
        "pipe": same(1, 2),
        "outer_zero": same(),
        "outer_tp_zero": same(2),
    }


@pytest.mark.ranks(1, 2, 3, 4, init=False)
def test_the_layout_of_every_size(device_type):
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    for pipe in (1, 2, 3, 4):
        for tp in (1, 2, 3, 4):
            if world_size % (pipe * tp):
                continue
            ctx = init_distributed(pipe_size=pipe, tp_size=tp, device=device_type)
            place, members = expected_members(world_size, pipe, tp, rank)
            assert (ctx.pipe_rank, ctx.data_rank, ctx.tp_rank) == place
            assert (ctx.pipe_size, ctx.data_size, ctx.tp_size) == (pipe, world_size // (pipe * tp), tp)
            assert (ctx.rank, ctx.world_size, ctx.replicas) == (rank, world_size, world_size // tp)
            assert ctx.replica_rank == rank // tp
            for name, ranks in members.items():
                comm = getattr(ctx, name)
                assert comm.ranks == ranks, name
                assert (comm.size, comm.rank) == (len(ranks), ranks.index(rank)), name
                total = torch.tensor(float(rank), device=ctx.device)
                comm.all_reduce(total)
                assert total.item() == sum(ranks), name
            assert ctx.mesh.mesh_dim_names == ("pipe", "data", "tensor")
            assert tuple(ctx.mesh.shape) == (pipe, ctx.data_size, tp)
            assert tuple(ctx.mesh.get_coordinate()) == place
            for dim, name in (("pipe", "pipe"), ("data", "tp_zero"), ("tensor", "tp")):
                assert tuple(dist.get_process_group_ranks(ctx.mesh.get_group(dim))) == members[name]
            shutdown()
            assert not dist.is_initialized()


def test_pairs_come_once_and_in_rounds():
    for size in range(1, 12):
        pairs = list(_pairs(size))
        assert sorted(pairs) == list(itertools.combinations(range(size), 2))
        for first in range(0, len(pairs), size // 2 or 1):
            together = [rank for pair in pairs[first : first + size // 2] for rank in pair]
            assert len(set(together)) == len(together)


@pytest.mark.ranks(4, tp_size=2)
def test_the_mesh_serves_dtensor(ctx):
    from torch.distributed.tensor import Shard, distribute_tensor

    full = torch.arange(12.0, device=ctx.device).view(6, 2)
    x = distribute_tensor(full, ctx.mesh["data", "tensor"], [Shard(0), Shard(1)])
    assert torch.equal(x.full_tensor(), full)
    assert (x @ x.T).full_tensor().tolist() == (full @ full.T).tolist()


@pytest.mark.ranks(1, 2, 3, init=False)
def test_sizes_that_do_not_divide_raise_the_same_error_on_every_rank(device_type):
    world_size = int(os.environ["WORLD_SIZE"])
    message = f"pipe_size=2 × tp_size=4 = 8 does not divide the world size {world_size}; choose"
    with pytest.raises(ValueError, match=message):
        init_distributed(pipe_size=2, tp_size=4, device=device_type)
    assert not dist.is_initialized()
    assert init_distributed(device=device_type).world_size == world_size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pipe_size": 0}, "pipe_size=0 must be a positive integer"),
        ({"tp_size": -1}, "tp_size=-1 must be"),
        ({"tp_size": 1.0}, "tp_size=1.0 must be"),
        ({"num_micro_batches": 0}, "num_micro_batches=0 must be"),
        ({"zero_level": 4}, "zero_level=4 is not a ZeRO level; choose 0, 1, 2 or 3"),
        ({"device": "meta"}, "device='meta' is not supported; choose 'cuda' or 'cpu'"),
        ({"device": "cpu", "backend": "nccl"}, "backend='nccl' cannot communicate CPU tensors"),
        ({"timeout": 10.0, "agreement_timeout": 20.0}, "agreement_timeout=20 must be more than 0 and .* timeout=10,"),
        ({"timeout": 0.0}, "timeout=0 must be at least 0.001 and at most 1e.09 seconds"),
        ({"timeout": datetime.timedelta(seconds=-1)}, "timeout=-1 must be"),
        ({"timeout": math.inf}, "timeout=inf must be"),
        ({"timeout": math.nan}, "timeout=nan must be"),
        ({"seed": 2**64}, f"seed={2**64} must be at least -2..63 and below 2..64"),
        ({"agreement_timeout": 0.0}, "agreement_timeout=0 must be more than 0"),
        ({"agreement_timeout": -1.0}, "agreement_timeout=-1 must be"),
        ({"init_method": "tcp://127.0.0.1:29999"}, "does not tell the number of processes: add "),
    ],
)
def test_wrong_arguments_are_named(arguments, message, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=message):
        init_distributed(**arguments)
    assert not bmt_comm.is_initialized()
    assert not dist.is_initialized()


@pytest.mark.ranks(2, init=False)
def test_twice_is_an_error_and_again_after_shutdown_works(device_type):
    shutdown()  # does nothing
    with pytest.raises(RuntimeError, match=r"call init_distributed\(\) first"):
        bmt_comm.current_context()
    first = init_distributed(device=device_type)
    with pytest.raises(RuntimeError, match="was called already; call shutdown"):
        init_distributed(device=device_type)
    assert bmt_comm.current_context() is first
    shutdown()
    shutdown()
    assert not bmt_comm.is_initialized()
    second = init_distributed(device=device_type, tp_size=2, num_micro_batches=3, zero_level=2)
    assert second is not first
    assert (second.tp.size, second.num_micro_batches, second.zero_level) == (2, 3, 2)
    second.synchronize()


@pytest.mark.ranks(2, init=False, timeout=30)
@pytest.mark.parametrize("adopt", [False, True])
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("seed", (10, 11)),
        ("seed", (0, None)),
        ("tp_size", (1, 2)),
        ("pipe_size", (2, 1)),
        ("num_micro_batches", (1, 3)),
        ("zero_level", (3, 2)),
        ("timeout", (20.0, 30.0)),
    ],
)
def test_arguments_that_differ_are_an_error_on_every_rank(adopt, name, values):
    rank = int(os.environ["RANK"])
    if adopt:
        dist.init_process_group("gloo")
    with pytest.raises(ValueError, match=rf"{name} is \S+ on rank 0, \S+ on rank 1"):
        init_distributed(device="cpu", **{name: values[rank]})
    assert dist.is_initialized() == adopt
    init_distributed(device="cpu")


LATE = """
    import os, sys, time
    import torch.distributed as dist
    from bmt_comm.startup import meet
    how, rank = sys.argv[1], int(sys.argv[2])
    store = dist.FileStore(sys.argv[3], 3)
    if how == "never" and rank == 2:
        sys.exit(0)
    if rank == 2:
        time.sleep(60)
    if how == "ends" and rank == 1:
        import threading
        threading.Timer(1.0, os._exit, [9]).start()
    start = time.monotonic()
    try:
        meet(store, rank, 3, {}, 3.0 if how == "never" else 50.0)
    except RuntimeError as error:
        print(f"{error}; {time.monotonic() - start < 10}", flush=True)
    if rank > 0:
        time.sleep(5)
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("ends", "rank 1 ended while rank 0 waited for rank 2 to start; True\n"),
        ("never", "rank 2 did not come to init_distributed() in 3 seconds; True\n"),
    ],
)
def test_a_rank_that_ends_or_does_not_come_at_the_start_is_named(tmp_path, how, said):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(LATE))
    ranks = []
    try:
        for rank in range(3):
            command = [sys.executable, str(script), how, str(rank), str(tmp_path / "store")]
            ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert ranks[0].communicate(timeout=60)[0] == said
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="names and states of processes are in /proc")
def test_a_process_may_have_a_name_that_is_cut_within_a_character():
    script = """
        import ctypes
        ctypes.CDLL(None).prctl(15, "训练模型的程序".encode()[:14])
        from bmt_comm.startup import Peer
        print(Peer.here().state())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "alive\n", done.stderr


@contextlib.contextmanager
def three_ranks(text, folder):
    """The processes of a script, started without a launcher with a rank and a free port as arguments."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(text))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = []
    try:
        for rank in range(3):
            command = [sys.executable, str(script), str(rank), port]
            ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            process.stdout.close()


EARLY = """
    import os, sys, threading, time
    from bmt_comm import init_distributed
    rank, port = int(sys.argv[1]), sys.argv[2]
    if rank == 2:
        time.sleep(60)
    if rank == 1:
        threading.Timer(2.0, os._exit, [9]).start()
    try:
        init_distributed(f"tcp://127.0.0.1:{port}?rank={rank}&world_size=3", device="cpu", timeout=50.0)
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
"""


def test_a_rank_that_ends_at_the_start_without_a_launcher_is_named(tmp_path):
    """The process that keeps the store must not wait, in torch, for all others to connect."""
    with three_ranks(EARLY, tmp_path) as ranks:
        assert ranks[0].communicate(timeout=45)[0] == "rank 1 ended while rank 0 waited for rank 2 to start\n"


LEAVES = """
    import os, sys, time
    from bmt_comm import RankFailureError, check_agreement, current_context, init_distributed
    rank, port = int(sys.argv[1]), sys.argv[2]
    init_distributed(f"tcp://127.0.0.1:{port}?rank={rank}&world_size=3", device="cpu", timeout=50.0)
    if rank == 2:
        sys.exit(0)
    begun = time.monotonic()
    try:
        check_agreement(current_context().world, "the weather", [])
    except RankFailureError as error:
        print(error.args[0].splitlines()[:2], time.monotonic() - begun < 20, flush=True)
    os._exit(0)
"""


def test_a_check_does_not_wait_for_a_rank_that_has_left(tmp_path):
    with three_ranks(LEAVES, tmp_path) as ranks:
        assert ranks[1].communicate(timeout=80)[0] == "['rank 2 has ended', '  rank 2: has ended'] True\n"


DIFFERS = """
    import os, sys, time
    from bmt_comm import init_distributed
    rank, port = int(sys.argv[1]), sys.argv[2]
    if rank == 2:  # is slow to read
        import bmt_comm.startup as startup
        read = startup.read_soon
        startup.read_soon = lambda *args: (time.sleep(0.7), read(*args))[1]
    try:
        init_distributed(f"tcp://127.0.0.1:{port}?rank={rank}&world_size=3", device="cpu", timeout=50.0, seed=rank)
    except ValueError as error:
        print(error, flush=True)
    os._exit(0)
"""


def test_all_ranks_read_what_differs_before_the_one_that_keeps_the_store_ends(tmp_path):
    with three_ranks(DIFFERS, tmp_path) as ranks:
        for process in ranks:
            said = process.communicate(timeout=60)[0]
            assert said.endswith("seed is 0 on rank 0, 1 on rank 1, 2 on rank 2\n")


def test_a_store_that_cannot_be_reached_is_named():
    with socket.socket() as probe:  # a port on which no process listens
        probe.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{probe.getsockname()[1]}?rank=1&world_size=2"
        with pytest.raises(RuntimeError, match=r"rank 1 could not reach rank 0 at 127\.0\.0\.1:\d+ in 1 seconds"):
            connect(url, -1, -1, datetime.timedelta(seconds=1))


@pytest.mark.ranks(4, init=False)
def test_an_existing_process_group_is_adopted_and_left_standing():
    dist.init_process_group("gloo")
    before = set(dist.distributed_c10d._world.pg_map)
    for tp_size in (2, 1):
        ctx = init_distributed(tp_size=tp_size)
        assert ctx.world.group is dist.group.WORLD
        assert ctx.device.type == "cpu"  # gloo: whatever GPUs there are
        x = torch.ones(2)
        ctx.tp_zero.all_reduce(x)
        assert x.tolist() == [4.0 / tp_size] * 2
        with pytest.raises(RuntimeError, match="already"):
            init_distributed()
        shutdown()
        assert set(dist.distributed_c10d._world.pg_map) == before  # its subgroups are gone
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [4.0, 4.0]
    with pytest.raises(ValueError, match="does not divide the world size 4"):
        init_distributed(tp_size=3)


@pytest.mark.ranks(4, init=False, timeout=30)
@pytest.mark.parametrize("sizes", [{"pipe_size": 2}, {"tp_size": 2}, {"pipe_size": 2, "tp_size": 2}])
def test_ranks_may_be_in_different_numbers_of_groups_before(sizes):
    dist.init_process_group("gloo")
    for ranks in ([0], [0, 1], [1, 3]):
        dist.new_group(ranks)
    ctx = init_distributed(device="cpu", **sizes)
    total = torch.ones(1)
    for comm in (ctx.zero, ctx.tp_zero, ctx.pipe, ctx.tp):
        comm.all_reduce(total)
    assert total.item() == ctx.zero.size * ctx.tp_zero.size * ctx.pipe.size * ctx.tp.size
    assert all(comm is ctx.alone for comm in (ctx.zero, ctx.tp_zero, ctx.pipe, ctx.tp) if comm.size == 1)


@pytest.mark.ranks(2, init=False)
def test_rank_and_world_size_may_come_from_init_method(tmp_path):
    rank = os.environ.pop("RANK")
    del os.environ["WORLD_SIZE"]
    ctx = init_distributed(f"file://{tmp_path}/rendezvous?rank={rank}&world_size=2", device="cpu", tp_size=2)
    assert (ctx.rank, ctx.world_size) == (int(rank), 2)
    ctx.synchronize()


@pytest.mark.ranks(2, init=False)
def test_the_seed_reaches_the_generators_unless_it_is_none_and_nothing_else_changes(device_type):
    numpy = pytest.importorskip("numpy")

    def state():
        flags = torch.backends.cudnn
        return (
            random.getstate(),
            torch.get_rng_state().tolist(),
            numpy.random.get_state()[1].tolist(),
            (flags.enabled, flags.benchmark, flags.deterministic, flags.allow_tf32),
            os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None,
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            dict(os.environ),
        )

    rank = int(os.environ["RANK"])
    random.seed(rank)
    torch.manual_seed(rank)
    numpy.random.seed(rank)
    before = state()
    init_distributed(device=device_type, seed=None)
    assert state() == before
    shutdown()
    for arguments in ({}, {"seed": 5}, {"seed": 2**32 + 1}, {"seed": -1}):
        init_distributed(device=device_type, **arguments)
        seed = arguments.get("seed", 0)
        drawn = (random.random(), torch.rand(1).item(), numpy.random.rand())
        random.seed(seed)
        torch.manual_seed(seed)
        numpy.random.seed(seed % 2**32)
        assert drawn == (random.random(), torch.rand(1).item(), numpy.random.rand())
        assert state()[3:] == before[3:]
        shutdown()


@pytest.mark.ranks(1, init=False)
def test_backward_runs_in_the_thread_that_calls_it(device_type):
    threads = set()
    ctx = init_distributed(device=device_type)
    x = torch.ones(3, device=ctx.device, requires_grad=True)
    y = (x * 2).sin()
    y.register_hook(lambda grad: threads.add(threading.get_ident()))
    y.sum().backward()
    assert threads == {threading.get_ident()}
    assert torch._C._is_multithreading_enabled() == (ctx.device.type == "cpu")
    shutdown()
    assert torch._C._is_multithreading_enabled()


def test_one_process_without_a_launcher_leaves_nothing_behind(tmp_path):
    done = run_script(
        tmp_path,
        """
        import torch
        import bmt_comm as bmt

        ctx = bmt.init_distributed()
        assert (ctx.rank, ctx.world_size, ctx.local_size) == (0, 1, 1)
        x = torch.ones(2, requires_grad=True)
        bmt.all_gather(bmt.all_reduce(x)).sum().backward()
        assert x.grad.tolist() == [1.0, 1.0]
        bmt.synchronize()
        bmt.shutdown()
        ctx = bmt.init_distributed(seed=3)
        bmt.print_rank(bmt.sum_loss(torch.tensor(2.0)).item())
        """,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "2.0\n", "")


def test_two_launched_processes_end_without_a_word(tmp_path):
    done = run_script(
        tmp_path,
        """
        import torch
        import bmt_comm as bmt

        ctx = bmt.init_distributed(tp_size=2)
        x = torch.ones(70_000)
        ctx.tp.all_reduce(x)
        bmt.shutdown()
        ctx = bmt.init_distributed()  # again, with the launcher's store
        ctx.world.all_reduce(x)
        bmt.print_rank(x[0].item(), rank=1)
        """,
        processes=2,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "4.0\n", "")


def test_a_process_may_end_right_after_a_collective(tmp_path):
    """Unless it waits for the backend's thread, that asks for the interpreter's lock too late and, often, aborts."""
    done = run_script(
        tmp_path,
        """
        import sys

        import torch
        import torch.distributed as dist
        import bmt_comm as bmt

        ctx = bmt.init_distributed()
        values = torch.ones(10)
        sys.setswitchinterval(0.05)  # the lock is not taken from the main thread before
        flat = values.detach().view(-1)
        work = dist.all_reduce(flat, group=ctx.world.group, async_op=True)
        work.wait()
        del work, flat
        """,
        processes=4,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_rank_that_raises_ends_the_job(tmp_path):
    done = run_script(
        tmp_path,
        """
        import torch
        import bmt_comm as bmt

        ctx = bmt.init_distributed()
        if ctx.rank == 1:
            raise ValueError("on purpose")
        ctx.world.all_reduce(torch.ones(70_000))
        """,
        processes=2,
    )
    assert done.returncode != 0
    assert "ValueError: on purpose" in done.stderr


@pytest.mark.parametrize("rank", ["-1", "2"])
def test_a_rank_that_is_not_below_the_number_of_ranks_is_refused(rank, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=f"RANK={rank} and WORLD_SIZE=2 do not fit: ranks are 0 to 1"):
        bmt_comm.init_distributed()


@pytest.mark.parametrize(("given", "missing"), [("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")])
def test_one_of_rank_and_world_size_alone_is_refused(given, missing, monkeypatch):
    monkeypatch.delenv(missing, raising=False)
    monkeypatch.setenv(given, "1")
    with pytest.raises(ValueError, match=f"variable {given} is set and {missing} is not"):
        bmt_comm.init_distributed()


@pytest.mark.parametrize("crashes", [0, 1])
def test_ranks_meet_after_a_restart_though_only_one_had_come_before(tmp_path, crashes):
    done = run_script(
        tmp_path,
        f"""
        import os, sys, time
        from pathlib import Path
        import torch
        import bmt_comm as bmt

        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            inside = Path({str(tmp_path / "inside")!r})
            if os.environ["RANK"] == "{crashes}":
                while not inside.exists():
                    time.sleep(0.02)
                time.sleep(1.0)
                os._exit(3)
            inside.touch()
        x = torch.ones(2)
        bmt.init_distributed(device="cpu", timeout=20.0).world.all_reduce(x)
        bmt.print_rank(x.tolist())
        """,
        processes=2,
        options=["--max-restarts", "1"],
    )
    assert (done.returncode, done.stdout) == (0, "[2.0, 2.0]\n"), done.stderr


@pytest.mark.parametrize(
    ("given", "gpus", "index"),
    [
        ({}, 8, 0),
        ({"LOCAL_RANK": "3"}, 8, 3),
        ({"SLURM_LOCALID": "3"}, 8, 3),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "3", "LOCAL_RANK": "2"}, 8, 2),
        ({"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "6"}, 1, 0),  # each process sees its own only
        ({"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "0,1"}, 2, None),
        ({"LOCAL_RANK": "3"}, 1, None),
    ],
)
def test_the_gpu_of_a_process(given, gpus, index, monkeypatch):
    for name in (*LOCAL_RANKS, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if index is None:
        with pytest.raises(ValueError, match=f"local rank 3 needs CUDA device 3, and there are {gpus}"):
            choose_device(None, local_rank(), None, adopt=False)
    else:
        assert choose_device(None, local_rank(), None, adopt=False) == torch.device("cuda", index)
    assert choose_device("cuda:0", local_rank(), None, adopt=False).index == 0


@pytest.mark.ranks(2, init=False)
def test_a_process_group_that_was_made_without_a_backend_is_adopted():
    dist.init_process_group()
    ctx = init_distributed(device="cpu")
    total = torch.ones(3)
    ctx.world.all_reduce(total)
    assert total.tolist() == [2.0] * 3
    shutdown()
    dist.destroy_process_group()
