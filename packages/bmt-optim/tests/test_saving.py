"""save_optimizer: gathered, in the background, and refused on every rank or on none."""

import copy
import os
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bmt_comm import Slice, shard_of, slice_of
from bmt_optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager, save_optimizer, saving
from bmt_optim.lr_scheduler import Noam

OPTIONS = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
SHAPES = [(7, 5), (1, 3), (2,), (), (10, 1, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.float32, torch.float32, torch.float16]


def values(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def parameters(ctx):
    """Sharded by rows over all ranks, but for the third."""
    params = []
    for i, (t, dtype) in enumerate(zip(values(), DTYPES)):
        rows = t.shape[0] if t.dim() else 1
        start, stop = rows * ctx.rank // ctx.world_size, rows * (ctx.rank + 1) // ctx.world_size
        where = slice_of(t) if i == 2 else Slice(tuple(t.shape), start, stop, ctx.world)
        params.append(nn.Parameter(shard_of(t, where).to(dtype)))
        params[-1].bmt_slice = where
    return params


def set_grads(params, tensors, scale=1.0):
    for p, g in zip(params, tensors):
        p.grad = shard_of(g * scale, slice_of(p)).to(p.dtype)


def assert_same_state(actual, expected):
    torch.testing.assert_close(actual["state"], expected["state"], rtol=0, atol=0)


@pytest.mark.ranks(1, 2)
def test_a_state_is_written_in_the_background_while_training_goes_on(ctx, tmp_path):
    params = parameters(ctx)
    optimizer = AdamOffloadOptimizer(params, **OPTIONS)
    manager = OptimManager(loss_scale=16)
    plain = [nn.Parameter(torch.ones(3))]
    sgd = torch.optim.SGD(plain, lr=0.1, momentum=0.9)
    manager.add_optimizer(optimizer, Noam(optimizer, 0.1, 2, 20))
    manager.add_optimizer(sgd)

    def go_on(steps):
        for step in steps:
            set_grads([*params, *plain], [*values(step + 1), torch.full((3,), 1.0 + step)], manager.loss_scale)
            manager.step()

    go_on(range(4))
    expected = copy.deepcopy(manager.state_dict(gather_opt=True))
    may_write, write = threading.Event(), saving._write

    def late(state, path):
        assert may_write.wait(60)
        write(state, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "_write", late)
        done = save_optimizer(manager, tmp_path / "manager.pt", non_blocking=True)
        alone = save_optimizer(optimizer, tmp_path / "optimizer.pt", non_blocking=True)
    go_on(range(4, 7))
    assert done.done() == alone.done() == (ctx.rank != 0)
    assert list(tmp_path.iterdir()) == []
    dist.barrier()
    may_write.set()
    done.result(60)
    alone.result(60)
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manager.pt", "optimizer.pt"]
    box = [torch.load(tmp_path / name, weights_only=True) for name in ("manager.pt", "optimizer.pt")]
    if ctx.rank == 0:
        torch.testing.assert_close(box[0], expected, rtol=0, atol=0)
    others = parameters(ctx)
    resumed = AdamOptimizer(others)
    for saved in (box[0]["optimizers"][0], box[1]):
        resumed.load_state_dict(saved)
        assert_same_state(resumed.state_dict(gather=True), expected["optimizers"][0])
        assert resumed.state_dict()["state"][0]["step"] == 4


@pytest.mark.ranks(1, 2)
def test_what_cannot_be_saved_is_refused_on_every_rank(ctx, tmp_path):
    params = parameters(ctx)
    optimizer = AdamOffloadOptimizer(params, **OPTIONS)
    (tmp_path / "folder").mkdir(exist_ok=True)
    dist.barrier()
    for name, message in (("none/optimizer.pt", r"rank 0 cannot write .* no folder"), ("folder", "it is a folder")):
        with pytest.raises(RuntimeError, match=message):
            save_optimizer(optimizer, tmp_path / name if ctx.rank == 0 else tmp_path / "x")
    with pytest.raises(TypeError, match="SGD cannot gather"):
        save_optimizer(torch.optim.SGD(params, lr=0.1), tmp_path / "sgd.pt")

    def fail(state, path):
        raise OSError("the disk is full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", fail)
        with pytest.raises(RuntimeError, match=r"rank 0 cannot write .* OSError: the disk is full"):
            save_optimizer(optimizer, tmp_path / "optimizer.pt")
        done = save_optimizer(optimizer, tmp_path / "optimizer.pt", non_blocking=True)
        assert isinstance(done.exception(60), OSError if ctx.rank == 0 else type(None))
    optimizer.param_groups[0]["lock"] = threading.Lock()  # of which there is no copy
    with pytest.raises(RuntimeError, match=r"rank 0 cannot write .* TypeError: cannot pickle"):
        save_optimizer(optimizer, tmp_path / "optimizer.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.ranks(1, 2)
def test_a_folder_that_one_rank_may_not_look_into_is_named_on_every_rank(ctx, tmp_path):
    optimizer = AdamOptimizer(parameters(ctx), **OPTIONS)

    def denied(self):
        raise PermissionError("Permission denied")

    with pytest.MonkeyPatch.context() as patch:
        if ctx.rank == 0:
            patch.setattr(type(tmp_path), "is_dir", denied)
        with pytest.raises(RuntimeError, match=r"rank 0 cannot write .* Permission denied"):
            save_optimizer(optimizer, tmp_path / "optimizer.pt")


@pytest.mark.ranks(2, pipe_size=2)
def test_every_stage_writes_a_file_of_its_own(ctx, tmp_path):
    params = [nn.Parameter(torch.full((3,), 1.0 + ctx.pipe_rank))]
    optimizer = AdamOptimizer(params, **OPTIONS)
    params[0].grad = params[0].detach().clone()
    optimizer.step()
    with pytest.raises(ValueError, match="2 pipeline stages are to write"):
        save_optimizer(optimizer, tmp_path / "optimizer.pt")
    dist.barrier()
    assert list(tmp_path.iterdir()) == []
    dist.barrier()
    path = tmp_path / f"stage{ctx.pipe_rank}.pt"
    save_optimizer(optimizer, path)
    assert_same_state(torch.load(path, weights_only=True), optimizer.state_dict())


def test_one_process_needs_no_context(tmp_path):
    params = [nn.Parameter(torch.ones(3))]
    optimizer = AdamOptimizer(params, **OPTIONS)
    assert save_optimizer(optimizer, tmp_path / "optimizer.pt").done()
    assert_same_state(torch.load(tmp_path / "optimizer.pt", weights_only=True), optimizer.state_dict())


def test_a_form_that_a_hook_gives_is_written(tmp_path):
    optimizer, added = AdamOptimizer([nn.Parameter(torch.ones(3))], **OPTIONS), torch.ones(2)
    optimizer.register_state_dict_post_hook(lambda _, state: {"state": {"added": added}, "all": state})
    save_optimizer(optimizer, tmp_path / "optimizer.pt")
    added.zero_()
    saved = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert saved["state"]["added"].tolist() == [1.0, 1.0]
    assert saved["all"].keys() == {"state", "param_groups"}


@pytest.mark.ranks(2)
def test_symbolic_links_stay_and_devices_are_no_files(ctx, tmp_path):
    optimizer = AdamOptimizer([torch.nn.Parameter(torch.ones(3))])
    folder = tmp_path / str(ctx.rank)
    folder.mkdir()
    (folder / "link.pt").symlink_to("target.pt")
    os.mkfifo(folder / "pipe")
    save_optimizer(optimizer, folder / "link.pt")
    with pytest.raises(RuntimeError, match="it is no regular file"):
        save_optimizer(optimizer, folder / "pipe")
    assert (folder / "link.pt").is_symlink()
    assert (folder / "pipe").is_fifo()
    assert (folder / "target.pt").exists() == (ctx.rank == 0)
