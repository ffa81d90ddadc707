"""AdamOffloadOptimizer is AdamOptimizer to the last bit, wherever it computes and whatever it must copy."""

import contextlib
import copy
import io
import math
import threading
import weakref
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import bmt_optim.adam_offload
from bmt_comm import Slice, slice_of
from bmt_kernels import OffloadPipeline, offload
from bmt_optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager, save_optimizer, saving
from bmt_optim.adam_runs import Home
from bmt_optim.lr_scheduler import Noam
from bmt_optim.slices import cut

OPTIONS = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
SHAPES = [(37, 29), (5,), (), (3, 100, 2), (0, 4), (401,), (1, 3), (64, 11)]
DTYPES = [torch.float32, torch.bfloat16, torch.float32, torch.float16] * 2


# --- copies on a machine without a device -------------------------------------------------------------------------


class Late:
    """A queue that runs nothing before somebody waits for it. It is its own event."""

    def __init__(self):
        self.functions = []

    def run(self, function):
        self.functions.append(function)

    def record(self):
        return self

    def wait(self, event):
        if event is not None and event is not self:
            event.synchronize()

    def synchronize(self):
        while self.functions:
            self.functions.pop(0)()


class CopyingPipeline(OffloadPipeline):
    """Takes state for host memory and all else for device memory, and stores as late as it may."""

    host_storages: ClassVar[set] = set()
    copied: ClassVar[int] = 0

    def __init__(self, device, compute):
        super().__init__(device, compute=compute, chunk_bytes=4096)
        self.late = Late()

    def _is_far(self, tensor):
        return (tensor.untyped_storage().data_ptr() in self.host_storages) == (self.compute == "device")

    def _queues(self):
        host = offload._Host()
        return host, self.late, host, host

    @torch.no_grad()
    def _copy(self, target, source):
        CopyingPipeline.copied += 1
        super()._copy(target, source)


VARIANTS = ["host", "device", "host, copying", "device, copying"]


@contextlib.contextmanager
def making(variant):
    """What makes an AdamOffloadOptimizer that computes where ``variant`` says, with or without copies."""
    compute, _, copying = variant.partition(", ")
    before = CopyingPipeline.copied
    with pytest.MonkeyPatch.context() as patch:
        if copying:
            kept = []  # so that no address is used twice
            zeros = Home.zeros

            def host_zeros(self, numel, device):
                kept.append(zeros(self, numel, device))
                if self.on_host:
                    CopyingPipeline.host_storages.add(kept[-1].untyped_storage().data_ptr())
                return kept[-1]

            patch.setattr(Home, "zeros", host_zeros)
            patch.setattr(bmt_optim.adam_offload, "OffloadPipeline", CopyingPipeline)
        yield lambda params, **options: AdamOffloadOptimizer(params, compute=compute, **options)
        CopyingPipeline.host_storages.clear()
    assert (CopyingPipeline.copied > before) == bool(copying)


@pytest.fixture(params=VARIANTS)
def make(request):
    with making(request.param) as make:
        yield make


def values(seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def separate(tensors, dtypes=DTYPES):
    return [nn.Parameter(t.detach().to(dtype, copy=True)) for t, dtype in zip(tensors, dtypes)]


def end_to_end(tensors, dtypes=DTYPES):
    """Parameters, and gradients, of one dtype in one buffer each, as ZeRO makes them."""
    params = [None] * len(tensors)
    for dtype in set(dtypes[: len(tensors)]):
        mine = [i for i, d in enumerate(dtypes[: len(tensors)]) if d is dtype]
        data = torch.cat([tensors[i].detach().reshape(-1) for i in mine]).to(dtype)
        grads, at = torch.zeros_like(data), 0
        for i in mine:
            stop = at + tensors[i].numel()
            params[i] = nn.Parameter(data[at:stop].view(tensors[i].shape))
            params[i].grad = grads[at:stop].view(tensors[i].shape)
            at = stop
    return params


def set_grads(params, tensors, scale=1.0):
    for p, g in zip(params, tensors):
        mine = cut(g * scale, slice_of(p)).to(p.dtype)
        if p.grad is None:
            p.grad = mine.clone()
        else:
            p.grad.copy_(mine)


def train(optimizer, params, steps, scale=1.0, shapes=SHAPES):
    for step in steps:
        set_grads(params, values(step + 1, shapes), scale)
        optimizer.step(scale=scale)


def assert_same_state(found, expected):
    assert found["state"].keys() == expected["state"].keys()
    for index, entry in expected["state"].items():
        assert found["state"][index].keys() == entry.keys()
        for key, value in entry.items():
            assert torch.equal(found["state"][index][key], value), (index, key)


def assert_same(optimizer, params, reference, expected):
    for i, (p, q) in enumerate(zip(params, expected)):
        assert torch.equal(p, q), i
    assert_same_state(optimizer.state_dict(), reference.state_dict())


# --- one process --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [separate, end_to_end])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_every_update_is_that_of_adam_bit_for_bit(make, layout, scale):
    ours, expected = layout(values()), layout(values())
    optimizer, reference = make(ours, **OPTIONS), AdamOptimizer(expected, **OPTIONS)
    for step in range(12):
        for o, params in ((optimizer, ours), (reference, expected)):
            set_grads(params, values(step + 1), scale)
            params[3].grad = params[3].grad if step % 3 else None  # counts its own steps
            before = [None if p.grad is None else p.grad.clone() for p in params]
            o.step(scale=scale)
            assert all(b is None or torch.equal(p.grad, b) for p, b in zip(params, before)), "gradients stay"
        assert all(torch.equal(p, q) for p, q in zip(ours, expected))
    assert_same(optimizer, ours, reference, expected)


@pytest.mark.parametrize("hold", [1, 3])
def test_hold_steps_holds_the_parameters_and_moves_the_moments(make, hold):
    ours, expected = separate(values()), separate(values())
    optimizer, reference = make(ours, hold_steps=hold, **OPTIONS), AdamOptimizer(expected, hold_steps=hold, **OPTIONS)
    for step in range(hold + 3):
        train(optimizer, ours, [step])
        train(reference, expected, [step])
        moved = any(not torch.equal(p, s.to(p.dtype)) for p, s in zip(ours, values()))
        assert moved == (step >= hold)
    assert_same(optimizer, ours, reference, expected)


def test_groups_closures_strides_and_gradients_of_another_dtype(make):
    results = []
    for cls in (make, AdamOptimizer):
        params = separate(values())
        params[0].data = params[0].data.t().contiguous().t()
        groups = [{"params": params[:3]}, {"params": params[3:], "lr": 1e-3, "weight_decay": 0.5, "hold_steps": 2}]
        optimizer = cls(groups, **OPTIONS)

        def closure(params=params, optimizer=optimizer):
            optimizer.zero_grad()
            loss = sum((p.float() ** 2).sum() for p in params)
            loss.backward()
            params[3].grad = params[3].grad.t() if params[3].dim() == 2 else params[3].grad
            return loss

        losses = [optimizer.step(closure).item() for _ in range(10)]
        assert losses[-1] < losses[0]
        results.append((optimizer, params))
    assert_same(*results[0], *results[1])


def test_parameters_may_be_written_to_and_moved(make):
    results = []
    for cls in (make, AdamOptimizer):
        params = separate(values())
        optimizer = cls(params, **OPTIONS)
        saved = optimizer.state_dict()["state"]
        assert not any(t.requires_grad for entry in saved.values() for t in entry.values())
        with torch.no_grad():
            params[1].fill_(2.0)  # loaded before the first step
        train(optimizer, params, range(4))
        with torch.no_grad():
            for p in params:
                p.reshape(-1)[-1:].fill_(5.0)
        optimizer.sync_masters()
        train(optimizer, params, range(4, 7))
        for p, moved in zip(params, end_to_end(params)):
            p.data, p.grad = moved.data, None
        train(optimizer, params, range(7, 10))
        results.append((optimizer, params))
    assert_same(*results[0], *results[1])


def test_a_copy_of_an_optimizer_goes_on_by_itself(make):
    ours = separate(values())
    optimizer = make(ours, record_delta=True, **OPTIONS)
    train(optimizer, ours, range(3))
    twin = copy.deepcopy(optimizer)
    assert twin.get_avg_delta() == optimizer.get_avg_delta()
    others = twin.param_groups[0]["params"]
    train(optimizer, ours, range(3, 6))
    train(twin, others, range(3, 6))
    assert twin.compute == optimizer.compute
    assert_same(twin, others, optimizer, ours)


def test_autograd_notices_a_step_and_no_gradient_is_kept_alive(make):
    params = [*separate(values(shapes=[(2, 2)])), *end_to_end(values(shapes=[(2, 2), (2, 2)]), [torch.float32] * 2)]
    losses = [(torch.ones(1, 2).requires_grad_() @ p).sum() for p in params]
    params[0].grad = torch.ones(2, 2)
    grad = weakref.ref(params[0].grad)
    make(params).step()
    params[0].grad = None
    assert grad() is None
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_state_dicts_go_from_either_optimizer_to_the_other(make):
    straight = separate(values())
    reference = AdamOptimizer(straight, **OPTIONS)
    train(reference, straight, range(9))
    first = separate(values())
    start = make(first, **OPTIONS)
    train(start, first, range(3))
    second = [nn.Parameter(p.detach().clone()) for p in first]
    middle = AdamOptimizer(second)
    middle.load_state_dict(copy.deepcopy(start.state_dict()))
    train(middle, second, range(3, 6))
    third = [nn.Parameter(p.detach().clone()) for p in second]
    end = make(third)
    train(end, third, range(20, 22))  # a state that is to go
    for p, q in zip(third, second):
        p.data.copy_(q)
    end.load_state_dict(copy.deepcopy(middle.state_dict(gather=True)))
    train(end, third, range(6, 9))
    assert_same(end, third, reference, straight)


def test_a_state_that_does_not_fit_changes_nothing(make):
    params = separate(values())
    optimizer = make(params, **OPTIONS)
    train(optimizer, params, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    bad = copy.deepcopy(before)
    bad["state"][5]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match="exp_avg of parameter 5"):
        optimizer.load_state_dict(bad)
    assert_same_state(optimizer.state_dict(), before)


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="compute='gpu'"):
        AdamOffloadOptimizer(separate(values()), compute="gpu")
    with pytest.raises(ValueError, match="lr"):
        AdamOffloadOptimizer(separate(values()), lr=-1)
    with pytest.raises(TypeError, match="float64"):
        AdamOffloadOptimizer([nn.Parameter(torch.zeros(2, dtype=torch.float64))])


@pytest.mark.ranks(1)
def test_an_overflow_under_a_manager_changes_nothing(ctx):
    for compute in ("host", "device"):
        params = separate(values())
        optimizer = AdamOffloadOptimizer(params, compute=compute, record_delta=True, **OPTIONS)
        manager = OptimManager(loss_scale=64)
        manager.add_optimizer(optimizer, Noam(optimizer, 0.1, 2, 10))
        for step in range(3):
            set_grads(params, values(step + 1), 64.0)
            manager.clip_grad_norm(params, 1.0)
            manager.step()
        before, weights = copy.deepcopy(manager.state_dict()), [p.detach().clone() for p in params]
        deltas = optimizer.get_avg_delta(), optimizer.get_var_delta()
        params[0].grad[3, 4] = math.inf
        with contextlib.redirect_stdout(io.StringIO()):
            manager.step()
        after = manager.state_dict()
        assert manager.loss_scale == 32
        assert_same_state(after["optimizers"][0], before["optimizers"][0])
        assert after["lr_schedulers"] == before["lr_schedulers"]
        assert all(torch.equal(p, w) for p, w in zip(params, weights))
        assert (optimizer.get_avg_delta(), optimizer.get_var_delta()) == deltas


# --- mean and variance of the direction ---------------------------------------------------------------------------


def directions(grads_by_step):
    """In fp64, of every parameter, from its gradient (or None) at every step."""
    (beta1, beta2), eps = OPTIONS["betas"], OPTIONS["eps"]
    found = []
    for grads in zip(*grads_by_step):
        m = v = torch.zeros((), dtype=torch.float64)
        count = 0
        for g in grads:
            if g is not None:
                count += 1
                m = beta1 * m + (1 - beta1) * g.double()
                v = beta2 * v + (1 - beta2) * g.double() ** 2
        if grads[-1] is not None:
            found.append((m / (1 - beta1**count) / ((v / (1 - beta2**count)).sqrt() + eps)).reshape(-1))
    return torch.cat(found)


def assert_recorded(optimizer, expected):
    assert optimizer.get_avg_delta() == pytest.approx(expected.mean().item(), abs=1e-6)
    assert optimizer.get_var_delta() == pytest.approx(expected.var(correction=0).item(), rel=1e-5)


@pytest.mark.parametrize("hold", [0, 2])
def test_the_direction_of_the_last_step_is_recorded(make, hold):
    params = separate(values())
    optimizer = make(params, record_delta=True, hold_steps=hold, **OPTIONS)
    assert math.isnan(optimizer.get_avg_delta())
    assert math.isnan(optimizer.get_var_delta())
    history = []
    for step in range(4):
        grads = [g.to(d) * (1 + i) for i, (g, d) in enumerate(zip(values(step + 1), DTYPES))]
        grads[5] = None if step % 2 else grads[5]
        history.append(grads)
        for p, g in zip(params, grads):
            p.grad = g if g is None else g * 64
        optimizer.step(scale=64.0)
        assert_recorded(optimizer, directions(history))


def test_nothing_is_recorded_unasked():
    optimizer = AdamOffloadOptimizer(separate(values()))
    for statistic in (optimizer.get_avg_delta, optimizer.get_var_delta):
        with pytest.raises(RuntimeError, match="record_delta=True"):
            statistic()


# --- several ranks ------------------------------------------------------------------------------------------------


def row_slice(shape, comm, tp_dim=None, tp_comm=None):
    """The slice of the rank-th of ``comm.size`` ragged row ranges, of a piece cut evenly enough over ``tp_comm``."""
    tp_offset = tp_extent = 0
    rows = shape[0] if shape else 1
    if tp_dim is None:
        tp_comm = None
    else:
        tp_offset = shape[tp_dim] * tp_comm.rank // tp_comm.size
        tp_extent = shape[tp_dim] * (tp_comm.rank + 1) // tp_comm.size - tp_offset
        rows = tp_extent if tp_dim == 0 else rows
    start, stop = rows * comm.rank // comm.size, rows * (comm.rank + 1) // comm.size
    return Slice(tuple(shape), start, stop, comm, tp_dim, tp_offset, tp_extent, tp_comm)


def shards(tensors, slices):
    """Parts of the tensors, those of one dtype end to end; where there is no slice, the whole tensor."""
    params = end_to_end([t if where is None else cut(t, where) for t, where in zip(tensors, slices)])
    for p, where in zip(params, slices):
        if where is not None:
            p.bmt_slice = where
    return params


def mixed_slices(ctx):
    """Sharded over all ranks, but for the second and the last."""
    return [None if i in (1, len(SHAPES) - 1) else row_slice(s, ctx.world) for i, s in enumerate(SHAPES)]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("variant", VARIANTS)
def test_shards_are_trained_as_by_adam_and_gathered_as_on_one_process(ctx, variant):
    slices = mixed_slices(ctx)
    ours, expected, whole = shards(values(), slices), shards(values(), slices), separate(values())
    with making(variant) as make:
        optimizer = make(ours, record_delta=True, **OPTIONS)
        reference, alone = AdamOptimizer(expected, **OPTIONS), AdamOptimizer(whole, **OPTIONS)
        for o, params in ((optimizer, ours), (reference, expected), (alone, whole)):
            train(o, params, range(10))
        assert_same(optimizer, ours, reference, expected)
        found = optimizer.state_dict(gather=True)
        if ctx.rank:
            assert found["state"] == {}
        else:
            assert_same_state(found, alone.state_dict())
        kept = copy.deepcopy(found)
        train(optimizer, ours, [10])
        optimizer.synchronize()
        assert_same_state(found, kept)  # it is a copy


@pytest.mark.ranks(2, 3)
def test_each_logical_element_is_recorded_once(ctx):
    for compute in ("host", "device"):
        params = shards(values(), mixed_slices(ctx))
        optimizer = AdamOffloadOptimizer(params, record_delta=True, compute=compute, **OPTIONS)
        for p in params:
            if p.numel() == 0:
                p.grad = None
        history = []
        for step in range(3):
            history.append([(g * (1 + i)).to(d) for i, (g, d) in enumerate(zip(values(step + 1), DTYPES))])
            for p, g in zip(params, history[-1]):
                if p.numel():
                    p.grad.copy_(cut(g, slice_of(p)))
            optimizer.step()
        assert_recorded(optimizer, directions(history))
        everyone = [None] * ctx.world_size
        dist.all_gather_object(everyone, (optimizer.get_avg_delta(), optimizer.get_var_delta()))
        assert len(set(everyone)) == 1


@pytest.mark.ranks(2, tp_size=2)
def test_the_direction_under_tensor_parallelism(ctx):
    dims = (0, None, None, 1, None, 0, 1, None)
    params = shards(values(), [row_slice(s, ctx.tp_zero, dim, ctx.tp) for s, dim in zip(SHAPES, dims)])
    optimizer = AdamOffloadOptimizer(params, record_delta=True, **OPTIONS)
    train(optimizer, params, range(2))
    history = [[g.to(d) for g, d in zip(values(step + 1), DTYPES)] for step in range(2)]
    assert_recorded(optimizer, directions(history))


@pytest.mark.ranks(2, pipe_size=2)
def test_the_direction_over_stages_counts_what_all_have_once(ctx, tmp_path):
    own = [0, 3] if ctx.pipe_rank == 0 else [5, 7]
    slices = [row_slice(s, ctx.zero) if i in own else None for i, s in enumerate(SHAPES)]
    params = shards(values(), slices)
    common = [1, 2, 6]
    optimizer = AdamOffloadOptimizer([params[i] for i in common + own], record_delta=True, **OPTIONS)
    train(optimizer, params, [0])
    history = [[g.to(d) for g, d in zip(values(1), DTYPES)]]
    history[0][4] = None  # has no elements anyway
    assert_recorded(optimizer, directions(history))
    with pytest.raises(ValueError, match="2 pipeline stages are to write"):
        save_optimizer(optimizer, tmp_path / "optimizer.pt")
    path = tmp_path / f"stage{ctx.pipe_rank}.pt"
    save_optimizer(optimizer, path)
    assert_same_state(torch.load(path, weights_only=True), optimizer.state_dict())


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.ranks(2, init=False)
def test_dtensors_of_fsdp2_are_trained_as_by_adam():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    results = []
    for cls in (lambda params, **o: AdamOffloadOptimizer(params, record_delta=True, **o), AdamOptimizer):
        model = Mlp()
        fully_shard(model.layers[0])
        fully_shard(model)
        optimizer = cls(model.parameters(), **OPTIONS)
        for step in range(10):
            x = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x[rank * 6 // size : (rank + 1) * 6 // size]).pow(2).sum().backward()
            optimizer.step()
        results.append((optimizer, [p.to_local() for p in model.parameters()]))
    assert_same(*results[0], *results[1])
    assert results[0][0].get_var_delta() > 0
    assert_same_state(results[0][0].state_dict(gather=True), results[1][0].state_dict(gather=True))


# --- saving -------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2)
def test_a_state_is_written_in_the_background_while_training_goes_on(ctx, tmp_path):
    params = shards(values(), mixed_slices(ctx))
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
    others = shards(values(), mixed_slices(ctx))
    resumed = AdamOptimizer(others)
    for saved in (box[0]["optimizers"][0], box[1]):
        resumed.load_state_dict(saved)
        assert_same_state(resumed.state_dict(gather=True), expected["optimizers"][0])
        assert resumed.state_dict()["state"][0]["step"] == 4


@pytest.mark.ranks(1, 2)
def test_what_cannot_be_saved_is_refused_on_every_rank(ctx, tmp_path):
    params = shards(values(), mixed_slices(ctx))
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
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


# --- a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compute", ["host", "device"])
def test_on_a_gpu_the_state_is_in_host_memory_and_the_update_that_of_adam(compute):
    shapes = [(1000, 333), (5,), (7, 11), (70_001,)]
    results = []
    for cls in (AdamOptimizer, lambda ps, **o: AdamOffloadOptimizer(ps, compute=compute, record_delta=True, **o)):
        params = [nn.Parameter(p.detach().cuda()) for p in separate(values(shapes=shapes))]
        optimizer = cls(params, **OPTIONS)
        before = torch.cuda.memory_allocated()
        optimizer.state_dict()
        grown = torch.cuda.memory_allocated() - before
        for step in range(10):
            for p, g in zip(params, values(step + 1, shapes)):
                p.grad = g.to(p)
            optimizer.step()
        results.append((optimizer, params))
    assert grown == 0
    (reference, expected), (optimizer, ours) = results
    assert all(torch.equal(p, q) for p, q in zip(ours, expected))
    found = optimizer.state_dict()["state"]
    for index, entry in reference.state_dict()["state"].items():
        for key, value in entry.items():
            assert found[index][key].device.type == "cpu"
            assert torch.equal(found[index][key], value.cpu())
            assert key == "step" or found[index][key].is_pinned() == (compute == "device")
    assert optimizer.get_var_delta() > 0
    moved = [p.detach().cpu() for p in ours]
    for p, data in zip(ours, moved):  # the state stays where it is
        p.data, p.grad = data, torch.ones_like(data)
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 11
