"""Parameters, gradients, shards, and copies where there is no device to copy to."""

import contextlib
from typing import ClassVar

import pytest
import torch
from torch import nn

import bmt_optim.adam_offload
from bmt_comm import Slice, shard_of, slice_of
from bmt_kernels import OffloadPipeline, offload
from bmt_optim import AdamOffloadOptimizer

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

    def _is_remote(self, tensor):
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
            new_state = AdamOffloadOptimizer.new_state

            def host_state(self, *arguments):
                kept.append(new_state(self, *arguments))
                CopyingPipeline.host_storages.add(kept[-1].untyped_storage().data_ptr())
                return kept[-1]

            patch.setattr(AdamOffloadOptimizer, "new_state", host_state)
            patch.setattr(bmt_optim.adam_offload, "OffloadPipeline", CopyingPipeline)
            patch.setattr(AdamOffloadOptimizer, "_is_offloaded", lambda self, device: True)
        yield lambda params, **options: AdamOffloadOptimizer(params, compute=compute, **options)
        CopyingPipeline.host_storages.clear()
    assert (CopyingPipeline.copied > before) == bool(copying)


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
        mine = shard_of(g * scale, slice_of(p)).to(p.dtype)
        if p.grad is None:
            p.grad = mine.clone()
        else:
            p.grad.copy_(mine)


def train(optimizer, params, steps, scale=1.0, shapes=SHAPES):
    for step in steps:
        set_grads(params, values(step + 1, shapes), scale)
        optimizer.step(scale=scale)


def assert_same_state(actual, expected):
    assert actual["state"].keys() == expected["state"].keys()
    for index, entry in expected["state"].items():
        assert actual["state"][index].keys() == entry.keys()
        for key, value in entry.items():
            assert torch.equal(actual["state"][index][key], value), (index, key)


def assert_same(optimizer, params, reference, expected):
    for i, (p, q) in enumerate(zip(params, expected)):
        assert torch.equal(p, q), i
    assert_same_state(optimizer.state_dict(), reference.state_dict())


# --- shards ---------------------------------------------------------------------------------------------------


def row_slice(shape, comm, tp_dim=None, tp_comm=None):
    """The slice of the rank-th of ``comm.size`` ragged row ranges, with ``tp_dim`` sharded almost evenly."""
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
    """Shards of the tensors, those of one dtype end to end; where there is no slice, the full tensor."""
    params = end_to_end([t if where is None else shard_of(t, where) for t, where in zip(tensors, slices)])
    for p, where in zip(params, slices):
        if where is not None:
            p.bmt_slice = where
    return params


def mixed_slices(ctx):
    """Sharded over all ranks, but for the second and the last."""
    return [None if i in (1, len(SHAPES) - 1) else row_slice(s, ctx.world) for i, s in enumerate(SHAPES)]
