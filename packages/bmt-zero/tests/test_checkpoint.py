"""One-file checkpoints: plain PyTorch reads them, and bad files raise errors."""

from __future__ import annotations

import json
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from saving_helpers import Doubling, same
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bmt_zero
from bmt_zero import checkpoint
from bmt_zero.checkpoints import rank0_source, weight_files
from bmt_zero.checkpoints.pt_files import PtSource
from bmt_zero.checkpoints.sources import SafetensorsSource
from bmt_zero.checkpoints.tools import convert

SUFFIX = pytest.mark.parametrize("suffix", [".pt", ".safetensors"])


class Model(nn.Module):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.randn(()))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = torch.relu(layer(h))
        return self.head(self.norm(h) * self.scale)


def plain(seed: int = 1) -> Model:
    torch.manual_seed(seed)
    return Model()


def sharded(seed: int = 1, dtype: torch.dtype = torch.float32) -> Model:
    return bmt_zero.BMTrainModelWrapper(plain(seed).to(dtype))


def read_plain(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        tensors = load_file(path)
        return {name: tensors[name] for name in plain().state_dict()}
    return torch.load(path, weights_only=True)


@pytest.mark.ranks(1, 2, 3)
@SUFFIX
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_pytorch_reads_what_is_saved(ctx: Any, tmp_path: Path, suffix: str, dtype: torch.dtype) -> None:
    path = tmp_path / f"model{suffix}"
    model = sharded(dtype=dtype)
    done = bmt_zero.save(model, str(path))
    assert done.done()
    assert done.result() is None
    wanted = plain().to(dtype)
    saved = read_plain(path)
    same(saved, wanted.state_dict())
    plain(2).to(dtype).load_state_dict(saved, strict=True)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    if suffix == ".pt":
        assert saved["head.weight"].data_ptr() == saved["embed.weight"].data_ptr()  # once in the file
    other = sharded(2, dtype)
    identities = [id(p) for p in other.parameters()]
    bmt_zero.load(other, str(path))
    same(other.state_dict(), wanted.state_dict())
    assert [id(p) for p in other.parameters()] == identities
    assert other._modules["head"]._parameters["weight"] is other._modules["embed"]._parameters["weight"]


@pytest.mark.ranks(3)
@SUFFIX
def test_any_number_of_ranks_reads_what_another_wrote(ctx: Any, tmp_path: Path, suffix: str) -> None:
    """The file is the plain one for every number of ranks, so any two jobs can exchange it."""
    path = tmp_path / f"plain{suffix}"
    if ctx.rank == 0:
        state = {k: v.clone() for k, v in plain(4).state_dict().items()}
        if suffix == ".pt":
            torch.save(state, path)
        else:
            from safetensors.torch import save_file

            save_file(state, path)
    ctx.world.barrier()
    model = sharded()
    bmt_zero.load(model, path)
    same(model.state_dict(), plain(4).state_dict())


@pytest.mark.ranks(4, tp_size=2)
def test_tensor_parallel_shards_are_unsharded(ctx: Any, tmp_path: Path) -> None:
    class Split(bmt_zero.DistributedModule):
        def __init__(self, seed: int) -> None:
            super().__init__()
            gen = torch.Generator().manual_seed(seed)
            for dim in (0, 1):
                logical = torch.randn(6, 10, generator=gen)
                shard = logical.chunk(2, dim)[ctx.tp_rank]
                self.register_parameter(f"w{dim}", bmt_zero.DistributedParameter(shard, tp_mode=True, tp_split_dim=dim))
                setattr(self, f"_logical{dim}", logical)

    path = tmp_path / "m.pt"
    for kind in (lambda seed: Split(seed), lambda seed: bmt_zero.Block(Split(seed))):
        model = kind(1)
        bmt_zero.save(model, path)
        saved = torch.load(path, weights_only=True)
        assert torch.equal(saved["w0"], model._logical0)
        assert torch.equal(saved["w1"], model._logical1)
        other = kind(2)
        bmt_zero.load(other, path)
        same(other.state_dict(), saved)
        ctx.world.barrier()


@pytest.mark.ranks(4, tp_size=2)
@SUFFIX
@pytest.mark.parametrize("chunk", [16, 48])
def test_a_file_is_broadcast_in_chunks(ctx: Any, tmp_path: Path, suffix: str, chunk: int) -> None:
    """Chunks end within rows and within shards, and numbers are converted."""

    class Mixed(bmt_zero.DistributedModule):
        def __init__(self) -> None:
            super().__init__()
            for dim in (0, 1):
                shard = torch.zeros(6, 10).chunk(2, dim)[ctx.tp_rank]
                param = bmt_zero.DistributedParameter(shard, tp_mode=True, tp_split_dim=dim)
                self.register_parameter(f"sharded{dim}", param)
            self.low = bmt_zero.DistributedParameter(torch.zeros(7, 5, dtype=torch.bfloat16))
            self.transposed = nn.Parameter(torch.zeros(5, 9).t())
            self.register_buffer("wide", torch.zeros(11, dtype=torch.float64))

    path, generator = tmp_path / f"m{suffix}", torch.Generator().manual_seed(0)
    shapes = {"sharded0": (6, 10), "sharded1": (6, 10), "low": (7, 5), "transposed": (9, 5), "wide": (11,)}
    state = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if ctx.rank == 0:
        from safetensors.torch import save_file

        (torch.save if suffix == ".pt" else save_file)(state, path)
    ctx.world.barrier()
    model = Mixed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank0_source, "CHUNK", chunk)
        bmt_zero.load(model, path)
    loaded = model.state_dict()
    same({name: loaded[name] for name in state}, {name: state[name].to(loaded[name].dtype) for name in state})


@pytest.mark.ranks(2)
@SUFFIX
def test_saving_in_the_background_keeps_the_values_of_the_call(ctx: Any, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    model = sharded()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    hold = threading.Event()
    checkpoint._writer.submit(hold.wait)  # the writer is busy
    done = bmt_zero.save(model, path, non_blocking=True)
    assert done.done() == (ctx.rank != 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    model.steps.add_(1)
    assert not path.exists()
    ctx.world.barrier()
    hold.set()
    done.result(timeout=30)
    ctx.world.barrier()
    same(read_plain(path), wanted)
    assert not torch.equal(model.state_dict()["norm.weight"], wanted["norm.weight"])
    # A save without non_blocking writes after the pending saves.
    hold.clear()
    checkpoint._writer.submit(hold.wait)
    first = bmt_zero.save(sharded(7), path, non_blocking=True)
    threading.Timer(0.2, hold.set).start()
    bmt_zero.save(model, path)
    assert first.done()
    same(read_plain(path), model.state_dict())


def no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.ranks(2)
@SUFFIX
def test_a_failure_in_the_background_is_the_futures(ctx: Any, tmp_path: Path, suffix: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_files.PtFile, "write", no_space)
        patch.setattr(weight_files.SafetensorsFile, "write", no_space)
        done = bmt_zero.save(sharded(), tmp_path / f"m{suffix}", non_blocking=True)
        if ctx.rank == 0:
            assert isinstance(done.exception(timeout=30), OSError)
            assert not list(tmp_path.iterdir())


@pytest.mark.ranks(2)
def test_too_little_memory_for_the_copy_is_told_to_every_rank(ctx: Any, tmp_path: Path) -> None:
    def fail(tensor: Tensor) -> Tensor:
        raise MemoryError("no memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_host_copy", fail)
        with pytest.raises(RuntimeError, match=r"rank 0 could not write .*: MemoryError: no memory"):
            bmt_zero.save(sharded(), tmp_path / "m.pt", non_blocking=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.ranks(1, 2)
@SUFFIX
@pytest.mark.parametrize("method", ["open", "write", "close"])
def test_a_failed_write_is_told_to_every_rank_and_leaves_the_old_file(
    ctx: Any, tmp_path: Path, suffix: str, method: str
) -> None:
    path = tmp_path / f"m{suffix}"
    bmt_zero.save(sharded(1), path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_files.PtFile, method, no_space)
        patch.setattr(weight_files.SafetensorsFile, method, no_space)
        with pytest.raises(RuntimeError, match=r"rank 0 could not write .*No space left on device"):
            bmt_zero.save(sharded(2), path)
    ctx.world.barrier()
    same(read_plain(path), plain(1).state_dict())
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    bmt_zero.save(sharded(2), path)
    same(read_plain(path), plain(2).state_dict())


@pytest.mark.ranks(2)
@SUFFIX
def test_an_error_of_the_disk_while_rank_0_reads_is_raised_on_all(ctx: Any, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"m{suffix}"
    bmt_zero.save(sharded(1), path)
    reads = 0

    def fail(*_: object) -> None:
        nonlocal reads
        reads += 1
        if reads == 3:
            raise OSError(5, "Input/output error")

    model = sharded(2)
    with pytest.MonkeyPatch.context() as patch:
        for kind in (PtSource, SafetensorsSource):
            read = kind.read
            patch.setattr(kind, "read", lambda *args, read=read: (fail(), read(*args))[1])
        with pytest.raises(OSError, match="Input/output error"):
            bmt_zero.load(model, path)


@pytest.mark.ranks(2, timeout=40)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_the_disk_on_one_rank_before_the_file_is_opened(
    ctx: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """It is raised on all ranks if rank 0 has it. Other ranks do not need to see a file that rank 0 reads."""
    path = tmp_path / "m.pt"
    bmt_zero.save(sharded(1), path)
    stat = os.stat

    def failing(each: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(each) == str(path):
            raise OSError(5, "Input/output error", str(path))
        return stat(each, *args, **options)

    if ctx.rank == rank:
        monkeypatch.setattr(os, "stat", failing)
        monkeypatch.setattr(Path, "stat", failing)  # in Python 3.10 it has a reference of its own to os.stat
    model = sharded(2)
    if rank == 0:
        with pytest.raises(OSError, match="Input/output error"):
            bmt_zero.load(model, path)
    else:
        bmt_zero.load(model, path)
        same(model.state_dict(), sharded(1).state_dict())


@pytest.mark.ranks(1, 2)
@SUFFIX
@pytest.mark.parametrize("non_blocking", [False, True])
def test_everything_is_on_the_disk_before_the_file_has_its_name(
    ctx: Any, tmp_path: Path, suffix: str, non_blocking: bool
) -> None:
    events: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(handle: int) -> None:
        events.append(("fsync", os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), tmp_path)))
        fsync(handle)

    def noted_replace(source: Any, target: Any) -> None:
        events.append(("replace", os.path.relpath(source, tmp_path)))
        replace(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", noted_fsync)
        patch.setattr(os, "replace", noted_replace)
        bmt_zero.save(sharded(), tmp_path / f"m{suffix}", non_blocking).result()
    part = events[0][1] if events else ""
    assert part.startswith(f".m{suffix}.{os.getpid()}-") == (ctx.rank == 0)
    assert events == ([("fsync", part), ("replace", part), ("fsync", ".")] if ctx.rank == 0 else [])


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("non_blocking", [False, True])
def test_where_nothing_can_be_written(tmp_path: Path, non_blocking: bool) -> None:
    model = sharded()
    with pytest.raises(RuntimeError, match="there is no folder"):
        bmt_zero.save(model, tmp_path / "missing" / "m.pt", non_blocking)
    with pytest.raises(RuntimeError, match="it is a folder"):
        bmt_zero.save(model, tmp_path, non_blocking)


@pytest.mark.ranks(2)
def test_ranks_with_different_models(ctx: Any, tmp_path: Path) -> None:
    model = nn.Linear(3, 3 + ctx.rank)
    with pytest.raises(RuntimeError, match="disagree"):
        bmt_zero.save(model, tmp_path / "m.pt")
    with pytest.raises(RuntimeError, match="disagree"):
        bmt_zero.load(model, tmp_path / "m.pt")
    assert not list(tmp_path.iterdir())


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def bad_files(tmp_path: Path) -> dict[str, str]:
    """Path of a bad file → text that the message must contain."""
    files: dict[str, str] = {}

    def add(name: str, data: bytes, message: str) -> None:
        (tmp_path / name).write_bytes(data)
        files[str(tmp_path / name)] = message

    def add_torch(name: str, value: Any, message: str) -> None:
        torch.save(value, tmp_path / name)
        files[str(tmp_path / name)] = message

    from safetensors.torch import save

    state = {k: v.clone() for k, v in plain(2).state_dict().items()}
    torch.save(state, tmp_path / "complete.pt")
    for suffix, data in ((".pt", (tmp_path / "complete.pt").read_bytes()), (".safetensors", save(state))):
        damaged = "damaged|cannot be read" if suffix == ".pt" else "truncated|does not fit"
        for length in (1, 9, 100, len(data) // 2, len(data) - 100, len(data) - 1):
            add(f"truncated{length}{suffix}", data[:length], damaged)
        add(f"empty{suffix}", b"", damaged)
        add(f"text{suffix}", b"these are no tensors" * 20, damaged)
        (tmp_path / f"folder{suffix}").mkdir()
        files[str(tmp_path / f"folder{suffix}")] = "it is a folder"
        files[str(tmp_path / f"missing{suffix}")] = "no checkpoint file"
    marker = tmp_path / "executed"
    add("bomb.pkl", pickle.dumps({"embed.weight": Bomb(marker)}, protocol=2), "run code")
    add_torch("bomb.pt", {"embed.weight": Bomb(marker)}, "run code")
    add_torch("model.pt", nn.Linear(2, 2), "run code")
    add_torch("list.pt", [1, 2], "not a state dict")
    add_torch("tensor.pt", torch.zeros(3), "not a state dict")
    add_torch("keys.pt", {**state, 1: torch.zeros(3)}, "1 is not a name")
    add_torch("nested.pt", {"state_dict": state}, "missing entries.*'embed.weight'.*does not have: 'state_dict'")
    add_torch("number.pt", {**state, "norm.bias": 3}, "'norm.bias' has no tensor")
    add_torch("shape.pt", {**state, "layers.1.bias": torch.zeros(8)}, "'layers.1.bias' has shape")
    add_torch("surplus.pt", {**state, "extra": torch.zeros(8)}, "does not have: 'extra'")
    add_torch("negated.pt", {**state, "norm.bias": torch.zeros(7)._neg_view()}, "conjugated or negated")
    add_torch("sparse.pt", {**state, "norm.bias": torch.zeros(7).to_sparse()}, "'norm.bias'")
    return files


@pytest.mark.ranks(1, 2)
def test_bad_files_raise_on_every_rank_and_change_nothing(ctx: Any, bad_files: dict[str, str], tmp_path: Path) -> None:
    model = sharded()
    before = model.state_dict()
    for path, message in bad_files.items():
        kind = FileNotFoundError if "folder" in message or "no checkpoint file" in message else ValueError
        with pytest.raises(kind, match=message):
            bmt_zero.load(model, path)
    same(model.state_dict(), before)
    assert not (tmp_path / "executed").exists()
    model(torch.arange(3)).sum().backward()


@pytest.mark.ranks(2)
def test_lenient_loading(ctx: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    if ctx.rank == 0:
        torch.save({"norm.bias": torch.arange(7.0), "other": torch.zeros(2)}, path)
    ctx.world.barrier()
    model = sharded()
    before = model.state_dict()
    bmt_zero.load(model, path, strict=False)
    same(model.state_dict(), {**before, "norm.bias": torch.arange(7.0)})


class WithState(nn.Linear):
    """Keeps a tensor, or something else, by get_extra_state."""

    def __init__(self, state: Any) -> None:
        super().__init__(3, 5)
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("block", [True, False])
def test_extra_state(tmp_path: Path, block: bool) -> None:
    wrap: Any = bmt_zero.Block if block else bmt_zero.BMTrainModelWrapper
    path = tmp_path / "m.pt"
    for state in ({"steps": 4}, torch.arange(3.0)):
        bmt_zero.save(wrap(WithState(state)), path)
        model = wrap(WithState(torch.zeros(2)))
        bmt_zero.load(model, path)
        if isinstance(state, Tensor):
            assert torch.equal(model.state, state)
        else:
            assert model.state == state
    with pytest.raises(ValueError, match="tensors only"):
        bmt_zero.save(wrap(WithState({"steps": 4})), tmp_path / "m.safetensors")


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("block", [True, False])
def test_the_modules_own_code_takes_part(tmp_path: Path, block: bool) -> None:
    wrap: Any = bmt_zero.Block if block else bmt_zero.BMTrainModelWrapper
    path = tmp_path / "m.pt"
    torch.manual_seed(0)
    reference = Doubling(3, 5)
    torch.manual_seed(0)
    bmt_zero.save(wrap(Doubling(3, 5)), path)
    same(torch.load(path, weights_only=True), reference.state_dict())
    model = wrap(Doubling(3, 5))
    bmt_zero.load(model, path)
    same(model.state_dict(), reference.state_dict())


@pytest.mark.ranks(2)
def test_names_are_those_of_the_module_that_is_compiled(ctx: Any, tmp_path: Path) -> None:
    compiled, uncompiled = torch.compile(sharded(0), backend="eager"), sharded(1)
    bmt_zero.save(compiled, tmp_path / "m.pt")
    bmt_zero.load(uncompiled, tmp_path / "m.pt")
    same(uncompiled.state_dict(), sharded(0).state_dict())
    checkpointer = bmt_zero.Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=sharded(2))
    checkpointer.load(1, model=compiled)
    same(sharded(2).state_dict(), compiled._orig_mod.state_dict())


def test_tensors_that_are_no_plain_memory_are_not_converted(tmp_path: Path) -> None:
    for name, tensor in {"sparse": torch.eye(3).to_sparse(), "negated": torch.ones(3)._neg_view()}.items():
        torch.save({"weight": torch.ones(2), "other": {"nested": tensor}}, tmp_path / f"{name}.pt")
        with pytest.raises(ValueError, match=r"not plain memory|conjugated or negated"):
            convert(tmp_path / f"{name}.pt", tmp_path / "out.pt")
        assert not (tmp_path / "out.pt").exists()


class Upgraded(nn.Module):
    """The second version of a module; the first one had the logarithm of ``scale``."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 5.0))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *others: Any) -> None:
        if metadata.get("version", 1) < 2:
            state_dict[prefix + "scale"] = state_dict[prefix + "scale"].exp()
        super()._load_from_state_dict(state_dict, prefix, metadata, *others)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("is_sharded", [True, False])
def test_modules_know_the_version_of_what_they_load(ctx: Any, tmp_path: Path, is_sharded: bool) -> None:
    def made(value: float = 5.0) -> nn.Module:
        model: nn.Module = nn.Sequential(nn.Linear(3, 3), Upgraded())
        nn.init.constant_(model[1].scale, value)
        return bmt_zero.BMTrainModelWrapper(model) if is_sharded else model

    def check(model: nn.Module) -> None:
        assert model.state_dict()["1.scale"].tolist() == [5.0] * 3

    bmt_zero.save(made(), tmp_path / "m.pt")
    read = torch.load(tmp_path / "m.pt", weights_only=True)
    assert read._metadata == nn.Sequential(nn.Linear(3, 3), Upgraded()).state_dict()._metadata
    model = made(0.0)
    bmt_zero.load(model, tmp_path / "m.pt")
    check(model)
    if ctx.rank == 0:
        torch.save(nn.Sequential(nn.Linear(3, 3), Upgraded()).state_dict(), tmp_path / "theirs.pt")
        old = {"0.weight": torch.ones(3, 3), "0.bias": torch.ones(3), "1.scale": torch.full((3,), 5.0).log()}
        torch.save(old, tmp_path / "old.pt")
    ctx.world.barrier()
    for name in ("theirs.pt", "old.pt"):
        model = made(0.0)
        bmt_zero.load(model, tmp_path / name)
        torch.testing.assert_close(model.state_dict()["1.scale"], torch.full((3,), 5.0))
    checkpointer = bmt_zero.Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=made())
    model = made(0.0)
    checkpointer.load(1, model=model)
    check(model)
    trainer = json.loads((tmp_path / "c" / "step-00000001" / "trainer.json").read_text())
    assert trainer["versions"]["torch"] == torch.__version__
    assert trainer["module_versions"]["1"] == {"version": 2}
    model = made(0.0)
    bmt_zero.load(model, tmp_path / "c" / "step-00000001")
    check(model)


class Held(TorchDispatchMode):
    """The most bytes that were in storages made within, at any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        mine = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in mine:
                self.storages[tensor.untyped_storage()._cdata] = (
                    torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage()),
                    tensor.untyped_storage().nbytes(),
                )
        self.storages = {k: v for k, v in self.storages.items() if not v[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.storages.values()))
        return out


@pytest.mark.ranks(2)
def test_a_rank_holds_one_unsharded_parameter(ctx: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = bmt_zero.TransformerBlockList([nn.Linear(64, 64, bias=False) for _ in range(6)])
    one = 64 * 64 * 4
    with Held() as saving:
        bmt_zero.save(model, tmp_path / "m.pt")
    with Held() as loading:
        bmt_zero.load(model, tmp_path / "m.pt")
    if ctx.rank != 0:
        assert one <= saving.most < 2 * one
        assert one <= loading.most < 2 * one
    else:
        assert one <= saving.most < 3 * one


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", ["m.pt", "m.safetensors"])
def test_tensors_without_values_or_memory_of_their_own_are_named(ctx: Any, tmp_path: Path, name: str) -> None:
    for table, message in [
        (torch.eye(3).to_sparse(), "'table' is no dense tensor, but a torch.sparse_coo one"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "'table' is no dense tensor, but a quantized"),
        (torch.empty(3, device="meta"), "'table' has no values yet"),
    ]:
        model = sharded()
        model.register_buffer("table", table)
        with pytest.raises(ValueError, match=message):
            bmt_zero.save(model, tmp_path / name)
    for kind in (nn.Linear, Doubling):
        with torch.device("meta"):
            layer = kind(3, 3)
        model = bmt_zero.Block(layer)
        with pytest.raises(RuntimeError, match=r"nothing has filled them: \['weight', 'bias'\]; call init_parameters"):
            bmt_zero.save(model, tmp_path / name)
    assert not (tmp_path / name).exists()
    with torch.device("meta"):
        model = bmt_zero.Block(nn.Linear(8, 1))  # one rank has the weight
    for param, value in zip(model.parameters(), (2, 0), strict=True):
        param.data.fill_(value)  # which autograd does not count as a write
    checkpointer = bmt_zero.Checkpointer(tmp_path / "run")
    checkpointer.save(1, model=model)
    checkpointer.wait()
    bmt_zero.save(model, tmp_path / name)


@pytest.mark.ranks(2)
def test_symbolic_links_stay_and_devices_are_no_files(ctx: Any, tmp_path: Path) -> None:
    if ctx.rank == 0:
        (tmp_path / "folder").mkdir()
        (tmp_path / "link.pt").symlink_to("folder/target.pt")
    ctx.world.barrier()
    bmt_zero.save(sharded(), tmp_path / "link.pt")
    assert (tmp_path / "link.pt").is_symlink()
    same(torch.load(tmp_path / "folder" / "target.pt", weights_only=True), plain().state_dict())
    if ctx.rank == 0:
        (tmp_path / "link.safetensors").symlink_to("folder/blob")  # as in the cache of Hugging Face's hub
    ctx.world.barrier()
    bmt_zero.save(sharded(), tmp_path / "link.safetensors")
    assert (tmp_path / "folder" / "blob").is_file()
    model = sharded(2)
    bmt_zero.load(model, tmp_path / "link.safetensors")
    same(model.state_dict(), plain().state_dict())
    with pytest.raises(RuntimeError, match="/dev/null: it is no regular file"):
        bmt_zero.save(sharded(), "/dev/null")
    assert not Path("/dev/null").is_file()


@pytest.mark.ranks(2)
def test_dtypes_are_not_changed_silently(ctx: Any, tmp_path: Path) -> None:
    model = sharded()
    before = model.state_dict()
    for name, value, message in [
        ("scale", torch.tensor(1 + 2j), "'scale' has dtype torch.complex64, the model's has torch.float32"),
        ("scale", torch.tensor(3), "'scale' has dtype torch.int64, the model's has torch.float32"),
        ("steps", torch.tensor(3.5), "'steps' has dtype torch.float32, the model's has torch.int64"),
    ]:
        if ctx.rank == 0:
            torch.save({**plain(2).state_dict(), name: value}, tmp_path / "m.pt")
        ctx.world.barrier()
        with pytest.raises(ValueError, match=message):
            bmt_zero.load(model, tmp_path / "m.pt")
        same(model.state_dict(), before)
        ctx.world.barrier()
    if ctx.rank == 0:
        torch.save({**plain(2).state_dict(), "scale": torch.tensor(1e300, dtype=torch.float64)}, tmp_path / "m.pt")
    ctx.world.barrier()
    with pytest.raises(ValueError, match=r"'scale' has numbers of torch.float64 that are infinite in torch.float32"):
        bmt_zero.load(model, tmp_path / "m.pt")
