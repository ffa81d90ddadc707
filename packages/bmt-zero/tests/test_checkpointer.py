"""Checkpoints of models: written in place by all ranks, read by anybody, complete or not there."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from saving_helpers import peak
from torch import nn

import bmt_zero
from bmt_zero import Checkpointer, DamagedError, SaveError
from bmt_zero.checkpoints import job as job_module
from bmt_zero.checkpoints import trainer_state
from bmt_zero.checkpoints import writer as writer_module
from bmt_zero.checkpoints.manifest import Manifest


class Model(nn.Module):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.norm = nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.randn(()))
        self.low = nn.Parameter(torch.randn(5, 3).bfloat16())
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False]))


def plain(seed: int = 1, width: int = 7) -> Model:
    torch.manual_seed(seed)
    return Model(width)


def sharded(seed: int = 1, width: int = 7, level: int = 3) -> Model:
    return bmt_zero.BMTrainModelWrapper(plain(seed, width), zero_level=level)


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert list(found) == list(wanted)
    for name in wanted:
        assert found[name].dtype == wanted[name].dtype, name
        assert torch.equal(found[name], wanted[name]), name


def files_of_model(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name.startswith("model")}


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_any_layout_writes_the_bytes_of_the_plain_model(ctx: Any, tmp_path: Path, level: int) -> None:
    """Of several pieces, so that ranks have pieces of their own and pieces in common."""
    load = pytest.importorskip("safetensors.torch").load_file
    width = 700
    model = sharded(width=width, level=level)
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(5, model=model)
    checkpointer.wait()
    folder = tmp_path / "c" / "step-00000005"
    wanted = plain(width=width).state_dict()
    found = load(folder / "model-00001-of-00001.safetensors")
    same({name: found[name] for name in wanted}, wanted)
    assert found.keys() == wanted.keys()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == dict.fromkeys(index["weight_map"], "model-00001-of-00001.safetensors")
    assert index["weight_map"].keys() == wanted.keys()
    # The same bytes as from plain modules, whose ranks are replicas.
    other = Checkpointer(tmp_path / "plain")
    other.save(5, model=plain(width=width))
    other.wait()
    assert files_of_model(folder) == files_of_model(tmp_path / "plain" / "step-00000005")


@pytest.mark.ranks(3)
@pytest.mark.parametrize("level", [0, 3])
def test_loading_puts_everything_back_in_place(ctx: Any, tmp_path: Path, level: int) -> None:
    saved = sharded(1, level=level)
    saved.steps.fill_(9)
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(5, model=saved)
    model = sharded(2, level=3 - level)
    identities = [id(p) for p in model.parameters()]
    assert checkpointer.load_latest(model=model) == 5
    same(model.state_dict(), saved.state_dict())
    assert [id(p) for p in model.parameters()] == identities
    assert int(model.steps) == 9
    ids = torch.arange(5)
    assert torch.equal(model.embed(ids), saved.embed(ids))  # unsharded copies are not those from before


@pytest.mark.ranks(2)
def test_no_checkpoint_is_step_zero(ctx: Any, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "a" / "b")
    assert checkpointer.load_latest(model=sharded()) == 0
    assert checkpointer.steps() == []
    with pytest.raises(FileNotFoundError, match="has no checkpoint of step 3"):
        checkpointer.load(3, model=sharded())


@pytest.mark.ranks(2)
def test_what_is_written_is_what_the_call_saw(ctx: Any, tmp_path: Path) -> None:
    model = sharded()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    checkpointer = Checkpointer(tmp_path / "c")
    hold = threading.Event()
    run = job_module.PieceWriter.run
    job_module.PieceWriter.run = lambda self: (hold.wait(), run(self))[1]  # type: ignore[method-assign]
    try:
        checkpointer.save(1, model=model)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
        assert checkpointer.steps() == []
        hold.set()
        checkpointer.wait()
    finally:
        job_module.PieceWriter.run = run  # type: ignore[method-assign]
    assert checkpointer.steps() == [1]
    checkpointer.load(1, model=model)
    same(model.state_dict(), wanted)


@pytest.mark.ranks(2)
def test_a_second_save_waits_and_says_so(ctx: Any, tmp_path: Path) -> None:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bmt_zero.checkpoints").addHandler(handler)
    model = sharded()
    checkpointer = Checkpointer(tmp_path / "c")
    hold = threading.Event()
    run = job_module.PieceWriter.run
    job_module.PieceWriter.run = lambda self: (hold.wait(), run(self))[1]  # type: ignore[method-assign]
    try:
        checkpointer.save(1, model=model)
        threading.Timer(0.2, hold.set).start()
        checkpointer.save(2, model=model)
    finally:
        hold.set()
        job_module.PieceWriter.run = run  # type: ignore[method-assign]
        logging.getLogger("bmt_zero.checkpoints").removeHandler(handler)
    checkpointer.wait()
    assert checkpointer.steps() == [1, 2]
    assert records[0] == "save(2) waits for the checkpoint of step 1, which is still being written"
    assert records[1].startswith("save(2) has waited for ")


@pytest.mark.ranks(2)
def test_older_checkpoints_go_and_the_newest_finite_one_stays(ctx: Any, tmp_path: Path) -> None:
    model = sharded()
    checkpointer = Checkpointer(tmp_path / "c", keep=2)
    for step in range(1, 5):
        checkpointer.save(step, model=model)
    checkpointer.wait()
    assert checkpointer.steps() == [3, 4]
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.scale.fill_(float("nan"))
    for step in range(5, 9):
        checkpointer.save(step, model=model)
    checkpointer.wait()
    assert checkpointer.steps() == [4, 7, 8]
    assert checkpointer.load_latest(model=model) == 4  # the weights of the others are not finite
    same(model.state_dict(), wanted)


@pytest.mark.ranks(2)
def test_a_step_may_be_saved_again(ctx: Any, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c")
    for seed in (1, 2):
        checkpointer.save(7, model=sharded(seed))
    model = sharded(3)
    assert checkpointer.load_latest(model=model) == 7
    same(model.state_dict(), sharded(2).state_dict())
    assert sorted(os.listdir(tmp_path / "c")) == [".lock", "step-00000007"]


def test_everything_is_on_the_disk_before_the_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power failure at any instant depends on."""
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(handle: int) -> None:
        events.append(("fsync", os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), tmp_path)))
        fsync(handle)

    def noted_rename(source: Any, target: Any) -> None:
        events.append(("rename", os.path.relpath(source, tmp_path)))
        rename(source, target)

    checkpointer = Checkpointer(tmp_path / "c")
    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    checkpointer.save(1, model=plain(width=700))
    checkpointer.close()
    monkeypatch.undo()
    part = "c/.step-00000001.part"
    files = {f"{part}/{name}" for name in os.listdir(tmp_path / "c" / "step-00000001")}
    assert len(files) > 4
    at = events.index(("rename", part))
    assert {name for kind, name in events[:at] if kind == "fsync"} == {*files, part}
    assert events.index(("fsync", f"{part}/manifest.json")) > max(
        events.index(("fsync", name)) for name in files if not name.endswith("manifest.json")
    )
    assert events[at - 1] == ("fsync", part)
    assert events[at + 1] == ("fsync", "c")


LIMITED = """
import os, resource, sys
from pathlib import Path
import torch
from torch import nn
from bmt_zero import Checkpointer, SaveError
model = nn.Linear(300, 300)
checkpointer = Checkpointer(sys.argv[1])
checkpointer.save(1, model=model)
checkpointer.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
checkpointer.save(2, model=model)
try:
    checkpointer.wait()
except SaveError as error:
    print(error)
print(sorted(os.listdir(sys.argv[1])))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
checkpointer.save(3, model=model)
checkpointer.wait()
print(checkpointer.steps())
"""


def test_a_limit_of_the_file_size_is_named_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "c")], capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    message, listing, steps = result.stdout.splitlines()
    assert message == (
        "the checkpoint of step 2 was not written: rank 0: File too large. Earlier checkpoints are as they were"
    )
    assert listing == "['.lock', 'step-00000001']"
    assert steps == "[1, 3]"


FULL_DISK = """
import os, sys
from pathlib import Path
from torch import nn
from bmt_zero import Checkpointer, SaveError
checkpointer = Checkpointer(sys.argv[1])
checkpointer.save(1, model=nn.Linear(300, 300))
checkpointer.wait()
filler = Path(sys.argv[2])
filler.write_bytes(b"x" * 1_200_000)
checkpointer.save(2, model=nn.Linear(700, 700))
try:
    checkpointer.wait()
except SaveError as error:
    print(error)
print(sorted(os.listdir(sys.argv[1])))
filler.unlink()
checkpointer.save(3, model=nn.Linear(300, 300))
checkpointer.wait()
print(checkpointer.steps())
"""


UNSHARED = ["unshare", "--map-root-user", "--mount"]
MOUNTS = pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run([*UNSHARED, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode != 0,
    reason="this process may not mount file systems; limits of the file size are tested everywhere",
)


@MOUNTS
def test_a_full_disk_is_named_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """A file system of 3 MiB."""
    mount = [*UNSHARED, "sh", "-c", 'mount -t tmpfs -o size=3m none "$0" && exec "$@"']
    result = subprocess.run(
        [*mount, str(tmp_path), sys.executable, "-c", FULL_DISK, str(tmp_path / "c"), str(tmp_path / "filler")],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    message, listing, steps = result.stdout.splitlines()
    assert message == (
        "the checkpoint of step 2 was not written: rank 0: No space left on device. Earlier checkpoints are as they "
        "were"
    )
    assert listing == "['.lock', 'step-00000001']"
    assert steps == "[1, 3]"


READ_ONLY = """
import subprocess, sys
from torch import nn
from bmt_zero import Checkpointer, SaveError
model, path = nn.Linear(30, 30), sys.argv[1]
running = Checkpointer(path)
running.save(1, model=model)
running.wait()
subprocess.run(["mount", "--bind", path, path], check=True)
subprocess.run(["mount", "-o", "remount,ro,bind", path], check=True)
try:
    running.save(2, model=model)
    running.wait()
except SaveError as error:
    print(error)
running.close()
try:
    Checkpointer(path)
except RuntimeError as error:
    print(error)
print(Checkpointer(path, readonly=True).load_latest(model=model))
"""


@MOUNTS
def test_a_read_only_directory_is_named_and_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "c"
    result = subprocess.run(
        [*UNSHARED, sys.executable, "-c", READ_ONLY, str(path)], capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    failed, refused, step = result.stdout.splitlines()
    assert failed == (
        f"the checkpoint of step 2 was not written: {path}/.step-00000002.part: Read-only file system. Earlier "
        "checkpoints are as they were"
    )
    assert refused.startswith(f"{path} cannot be used for checkpoints: ")
    assert "Read-only file system" in refused
    assert step == "1"


@pytest.mark.ranks(2)
def test_a_directory_that_is_removed_meanwhile_is_named(ctx: Any, tmp_path: Path) -> None:
    model = sharded(width=300)
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=model)
    checkpointer.wait()
    ctx.world.barrier()
    if ctx.rank == 0:
        shutil.rmtree(tmp_path / "c")
    ctx.world.barrier()
    checkpointer.save(2, model=model)
    with pytest.raises(SaveError, match=r"not written: .*/c/.step-00000002.part: No such file or directory"):
        checkpointer.wait()


@pytest.mark.ranks(2, timeout=300)
def test_many_saves_leave_nothing_behind(ctx: Any, tmp_path: Path) -> None:
    """The session ``checkpoint_faults`` of nox saves more often."""
    saves = int(os.environ.get("BMT_SAVES", "24"))
    model, checkpointer = sharded(width=300), Checkpointer(tmp_path / "c", keep=2)

    def usage() -> tuple[int, int, int]:
        gc.collect()
        status = Path("/proc/self/status").read_text()
        memory = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), memory

    for step in range(saves):
        checkpointer.save(step, model=model, data=Position(step))
        if step == saves // 3:
            checkpointer.wait()
            before = usage()
    checkpointer.wait()
    after = usage()
    assert after[0] <= before[0]
    assert after[1] <= before[1]
    assert after[2] <= before[2] * 1.01


@pytest.mark.ranks(2, timeout=120)
def test_little_memory_is_needed_beside_the_copy_and_the_shard(ctx: Any, tmp_path: Path) -> None:
    def make(device: str) -> nn.Module:
        with torch.device(device):
            layers = [nn.Linear(2048, 2048, bias=False) for _ in range(24)]
        return bmt_zero.BMTrainModelWrapper(nn.Sequential(*layers))

    extra, shard = 64 << 20, 24 * 2048 * 2048 * 4 // 2
    model, checkpointer = make("cpu"), Checkpointer(tmp_path / "c")
    gc.collect()
    peak()
    before = peak()
    checkpointer.save(1, model=model)
    checkpointer.wait()
    assert shard < peak() - before < shard + extra
    before = peak()
    checkpointer.save(2, model=model)  # into the same memory
    checkpointer.wait()
    assert peak() - before < extra
    checkpointer.close()
    ctx.world.barrier()
    peak()
    before = peak()
    bmt_zero.load(make("meta"), tmp_path / "c" / "step-00000002")
    assert shard * 0.9 < peak() - before < shard + extra


# --- objects --------------------------------------------------------------------------------------


class Position:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.ranks(2)
def test_objects_with_a_state_are_saved(ctx: Any, tmp_path: Path) -> None:
    value = {"a": (1, 2.5, None, True), 3: [b"x", "é"], "t": torch.arange(3, dtype=torch.int16), "nan": float("inf")}
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(
        1, model=sharded(), common=Position(value), own=Position(ctx.rank), per_replica=["own"], empty=Position([])
    )
    common, own = Position(None), Position(None)
    assert checkpointer.load_latest(model=sharded(), common=common, own=own) == 1
    assert own.value == ctx.rank
    assert torch.equal(common.value.pop("t"), value.pop("t"))
    assert common.value == value
    with pytest.raises(ValueError, match="has no state of 'other'"):
        checkpointer.load(1, other=common)
    checkpointer.save(2, model=sharded(), own=Position(ctx.rank))
    with pytest.raises(SaveError, match=r"state of 'own' is not the same on ranks 0 and 1; .* per_replica=\['own'\]"):
        checkpointer.wait()
    assert checkpointer.steps() == [1]


@pytest.mark.ranks(2)
def test_random_generators_go_back(ctx: Any, tmp_path: Path) -> None:
    import random

    torch.manual_seed(ctx.rank)
    random.seed(ctx.rank)
    torch.randn(3)
    random.gauss(0, 1)
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=sharded_without_randomness())
    wanted = (torch.randn(4).tolist(), random.random(), random.gauss(0, 1))
    torch.manual_seed(77)
    random.seed(77)
    checkpointer.load_latest(model=sharded_without_randomness())
    assert (torch.randn(4).tolist(), random.random(), random.gauss(0, 1)) == wanted


def numbers() -> tuple[list[float], float]:
    import random

    return torch.rand(4).tolist(), random.random()


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("alike", [True, False])
def test_random_generators_at_another_number_of_ranks(tmp_path: Path, alike: bool) -> None:
    """The states that all ranks had, or new ones: another for each replica, the same whenever it is loaded."""
    import random

    import bmt_comm

    ctx = bmt_comm.init_distributed(tp_size=2, seed=0)
    # As if by three ranks: files of states are all that says so.
    if ctx.rank == 0:
        writer = Alone(tmp_path / "c", 3)
        for rank in range(3):
            torch.manual_seed(5 if alike else rank)
            random.seed(5 if alike else rank)
            torch.rand(3)
            writer.write(rank)
        wanted = numbers()
        writer.publish()
    ctx.world.barrier()
    checkpointer = Checkpointer(tmp_path / "c", readonly=True)
    drawn = []
    for _ in range(2):
        torch.manual_seed(ctx.rank)
        random.seed(ctx.rank)
        assert checkpointer.load_latest() == 1
        drawn.append(numbers())
    assert drawn[0] == drawn[1]
    everyone = ctx.world.all_gather_object(drawn[0])
    if alike:
        assert everyone == [ctx.world.broadcast_object(wanted if ctx.rank == 0 else None)] * 4
    else:
        assert everyone[0] == everyone[1] != everyone[2] == everyone[3]  # tensor-parallel ranks are one replica
        torch.manual_seed(0)
        random.seed(0)
        assert numbers() not in everyone
    bmt_comm.shutdown()


class Alone:
    """Writes a checkpoint of nothing but the states of random generators, as several ranks would."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self.part, self.directory, self.ranks = directory / ".part", directory, ranks
        self.part.mkdir(parents=True)
        self.records: dict[str, Any] = {}

    def add(self, name: str, content: bytes) -> None:
        self.records[name] = writer_module.write_small_file(self.part / name, content)

    def write(self, rank: int) -> None:
        name = trainer_state.rng_file(rank, self.ranks)
        self.add(name, trainer_state.small_safetensors(name, trainer_state.random_state()))

    def publish(self) -> None:
        self.add("trainer.json", json.dumps(trainer_state.describe_run(1, self.ranks)).encode())
        (self.part / "manifest.json").write_bytes(Manifest(1, True, self.records).to_json())
        self.part.rename(self.directory / "step-00000001")


@pytest.mark.ranks(4, init=False)
def test_states_of_replicas_need_as_many_replicas(tmp_path: Path) -> None:
    import bmt_comm

    ctx = bmt_comm.init_distributed(tp_size=2)
    replica = ctx.rank // 2
    checkpointer = Checkpointer(tmp_path / "c")
    model, data = sharded(), Position(replica)
    checkpointer.save(1, model=model, data=data, per_replica=["data"])
    checkpointer.close()
    states = [name for name in os.listdir(tmp_path / "c" / "step-00000001") if name.startswith("state-data")]
    assert sorted(states) == ["state-data-00000-of-00002.json", "state-data-00001-of-00002.json"]
    bmt_comm.shutdown()
    ctx = bmt_comm.init_distributed()
    checkpointer = Checkpointer(tmp_path / "c")
    other, mine = sharded(2), Position(7)
    before = other.state_dict()
    with pytest.raises(ValueError, match="has the states of 'data' of 2 replicas, and there are 4 now; leave data out"):
        checkpointer.load_latest(model=other, data=mine)
    same(other.state_dict(), before)
    assert mine.value == 7
    assert checkpointer.load_latest(model=other) == 1
    same(other.state_dict(), plain().state_dict())
    checkpointer.close()
    bmt_comm.shutdown()


def sharded_without_randomness() -> nn.Module:
    model = nn.Linear(3, 3)
    state = torch.get_rng_state()
    model = bmt_zero.BMTrainModelWrapper(model)
    torch.set_rng_state(state)
    return model


@pytest.mark.ranks(2)
def test_wrong_calls_are_named_on_every_rank(ctx: Any, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c")
    model = sharded()
    for error, message, call in [
        (TypeError, "model must be a torch.nn.Module, not int", lambda: checkpointer.save(1, model=3)),
        (ValueError, "step=-1 must be a whole number", lambda: checkpointer.save(-1, model=model)),
        (TypeError, "data is a int; a checkpoint takes objects", lambda: checkpointer.save(1, model=model, data=3)),
        (ValueError, "'rng' cannot be the name", lambda: checkpointer.save(1, model=model, rng=Position(1))),
        (ValueError, "per_replica names", lambda: checkpointer.save(1, model=model, per_replica=["x"])),
        (
            TypeError,
            r"state of 'x'\['value'\] is a builtins.object",
            lambda: checkpointer.save(1, x=Position(object())),
        ),
        (ValueError, "pass model=, too", lambda: checkpointer.save(1, optimizer=torch.optim.SGD(model.parameters()))),
    ]:
        with pytest.raises(error, match=message):
            call()
        with pytest.raises(SaveError, match=f"rank 0: {error.__name__}"):
            checkpointer.wait()
    with pytest.raises(ValueError, match="keep=0 must be at least 1"):
        Checkpointer(tmp_path, keep=0)
    assert checkpointer.steps() == []


@pytest.mark.ranks(2)
def test_an_error_on_one_rank_is_raised_on_all_and_nobody_waits(ctx: Any, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c")
    model = sharded()
    checkpointer.save(1, model=model)
    bad = Position(object() if ctx.rank == 1 else 1)
    if ctx.rank == 1:
        with pytest.raises(TypeError, match="object"):
            checkpointer.save(2, model=model, bad=bad)
    else:
        checkpointer.save(2, model=model, bad=bad)
    with pytest.raises(SaveError, match="rank 1: TypeError"):
        checkpointer.save(3, model=model)
    checkpointer.save(4, model=plain(width=7 + ctx.rank))
    with pytest.raises(SaveError, match="ranks disagree"):
        checkpointer.wait()
    checkpointer.save(5, model=model)
    checkpointer.wait()
    assert checkpointer.steps() == [1, 5]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_the_disk_on_one_rank_is_raised_on_all(ctx: Any, tmp_path: Path, rank: int) -> None:
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=sharded())
    checkpointer.wait()
    original = writer_module.write_all

    def full(handle: int, content: memoryview, offset: int) -> None:
        raise OSError(28, "No space left on device")

    if ctx.rank == rank:
        writer_module.write_all = full
    try:
        checkpointer.save(2, model=sharded(width=700))
        with pytest.raises(SaveError, match=f"rank {rank}: No space left on device. Earlier checkpoints are"):
            checkpointer.wait()
    finally:
        writer_module.write_all = original
    assert sorted(os.listdir(tmp_path / "c")) == [".lock", "step-00000001"]
    checkpointer.save(3, model=sharded())
    checkpointer.wait()
    assert checkpointer.steps() == [1, 3]


# --- damage ---------------------------------------------------------------------------------------


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(content[: len(content) * 2 // 3])
    elif how == "longer":
        path.write_bytes(content + b"\0")
    else:
        content[len(content) * 3 // 4] ^= 1
        path.write_bytes(content)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["missing", "empty", "cut", "longer", "flipped"])
def test_a_damaged_checkpoint_is_passed_over(ctx: Any, tmp_path: Path, how: str) -> None:
    checkpointer = Checkpointer(tmp_path / "c")
    older = sharded(1, width=300)
    checkpointer.save(1, model=older, data=Position(1))
    checkpointer.save(2, model=sharded(2, width=300), data=Position(2))
    checkpointer.wait()
    folder = tmp_path / "c" / "step-00000002"
    for name in sorted(os.listdir(folder)):
        if how == "flipped" and (name.startswith("rng-00001") or name.endswith("index.json")):
            continue  # of the other rank; and what is not read
        backup = tmp_path / "backup"
        ctx.world.barrier()
        if ctx.rank == 0:
            shutil.copy(folder / name, backup)
            damage(folder / name, how)
        ctx.world.barrier()
        model, data = sharded(3, width=300), Position(0)
        assert checkpointer.load_latest(model=model, data=data) == 1, name
        assert data.value == 1
        same(model.state_dict(), older.state_dict())
        ctx.world.barrier()
        if ctx.rank == 0:
            shutil.copy(backup, folder / name)
    ctx.world.barrier()
    assert checkpointer.load_latest(model=sharded(3, width=300)) == 2


@pytest.mark.ranks(1, 2)
def test_a_flipped_byte_in_any_piece_is_noticed(ctx: Any, tmp_path: Path) -> None:
    """Of tensors of several pieces, which are compared while more is read."""
    checkpointer = Checkpointer(tmp_path / "c")
    model = bmt_zero.BMTrainModelWrapper(nn.Sequential(*[nn.Linear(1100, 1100) for _ in range(2)]))
    checkpointer.save(1, model=model)
    checkpointer.wait()
    path = tmp_path / "c" / "step-00000001" / "model-00001-of-00001.safetensors"
    for at in [*range(1 << 19, path.stat().st_size, 1 << 20), path.stat().st_size - 1]:
        for flipped in (True, False):
            ctx.world.barrier()
            if ctx.rank == 0:
                with open(path, "rb+") as file:
                    file.seek(at)
                    (byte,) = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte ^ 4]))
            ctx.world.barrier()
            if flipped:
                with pytest.raises(DamagedError, match=f"checksum of bytes {at >> 20 << 20} to"):
                    checkpointer.load(1, model=model)
    checkpointer.load(1, model=model)


@pytest.mark.ranks(2)
def test_if_all_are_damaged_that_is_an_error(ctx: Any, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=sharded())
    checkpointer.wait()
    if ctx.rank == 0:
        damage(tmp_path / "c" / "step-00000001" / "model-00001-of-00001.safetensors", "flipped")
    ctx.world.barrier()
    with pytest.raises(RuntimeError, match=r"all checkpoints in .* are damaged"):
        checkpointer.load_latest(model=sharded())
    with pytest.raises(DamagedError, match=r"model-00001-of-00001.safetensors has changed .* bytes 0 to"):
        checkpointer.load(1, model=sharded())
    ctx.world.barrier()
    if ctx.rank == 0:
        (tmp_path / "c" / "step-00000001" / "manifest.json").unlink()
    ctx.world.barrier()
    with pytest.raises(RuntimeError, match=r"none of the checkpoints \[1\] is complete"):
        checkpointer.load_latest(model=sharded())


@pytest.mark.ranks(2)
def test_a_checkpoint_of_another_model_is_refused_and_nothing_changes(ctx: Any, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=sharded())
    other = sharded(2, width=8)
    before = other.state_dict()
    with pytest.raises(
        ValueError, match=r"'embed.weight' has shape \(11, 7\) in the checkpoint's model, and \(11, 8\)"
    ):
        checkpointer.load_latest(model=other)
    same(other.state_dict(), before)
    less = bmt_zero.BMTrainModelWrapper(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"lacks '0.weight', '0.bias'; the checkpoint's model has"):
        checkpointer.load_latest(model=less)


@pytest.mark.ranks(1)
def test_other_names_in_the_directory_are_left_alone(ctx: Any, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=sharded())
    checkpointer.wait()
    for name in ("step-00000004.bak", "step-4", "notes", "step-00000009"):
        (tmp_path / "c" / name).mkdir()
    assert checkpointer.steps() == [1]
    assert checkpointer.load_latest(model=sharded()) == 1
    for step in (10, 11, 12):
        checkpointer.save(step, model=sharded())
    checkpointer.wait()
    assert {"step-00000004.bak", "step-4", "notes"} <= set(os.listdir(tmp_path / "c"))


# --- one run at a time ----------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_a_second_run_in_the_directory_is_refused(ctx: Any, tmp_path: Path) -> None:
    first = Checkpointer(tmp_path / "c")
    with pytest.raises(RuntimeError, match=r"another run writes checkpoints to .*/c"):
        Checkpointer(tmp_path / "c")
    first.save(1, model=sharded())
    first.wait()
    reader = Checkpointer(tmp_path / "c", readonly=True)
    assert reader.load_latest(model=sharded()) == 1
    with pytest.raises(RuntimeError, match="readonly"):
        reader.save(2, model=sharded())
    first.close()
    second = Checkpointer(tmp_path / "c")
    assert second.steps() == [1]


@pytest.mark.ranks(1)
def test_leftovers_of_dead_runs_are_removed(ctx: Any, tmp_path: Path) -> None:
    first = Checkpointer(tmp_path / "c")
    for step in (1, 2):
        first.save(step, model=sharded())
    first.close()
    (tmp_path / "c" / ".step-00000003.part").mkdir()
    (tmp_path / "c" / ".step-00000003.part" / "model-00001-of-00001.safetensors").write_bytes(b"x")
    os.rename(tmp_path / "c" / "step-00000002", tmp_path / "c" / ".step-00000002.old")  # died between two renames
    second = Checkpointer(tmp_path / "c")
    assert sorted(os.listdir(tmp_path / "c")) == [".lock", "step-00000001", "step-00000002"]
    assert second.steps() == [1, 2]


def test_a_checkpointer_needs_no_process_group(tmp_path: Path) -> None:
    """Plain modules, in a plain process."""
    model, other = plain(1), plain(2)
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(3, model=model)
    assert checkpointer.load_latest(model=other) == 3
    same(other.state_dict(), model.state_dict())
    checkpointer.close()
