"""Linear maps compute only the gradients that the running backward pass needs."""

import inspect
import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bmt_comm import init_distributed
from bmt_tp import OpLinear, OpParallelLinear, ReduceType, column_linear

IN, OUT, LENGTH = 8, 12, 6


def start(tp_size=None):
    """By default all ranks are tensor-parallel."""
    return init_distributed(tp_size=tp_size or int(os.environ["WORLD_SIZE"]))


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def leaf(*shape, seed, dtype=torch.float64):
    return random(*shape, seed=seed, dtype=dtype).requires_grad_()


def in_two_passes(y, factor, x, weights):
    """An input-gradient pass, and a weight-gradient pass after it, as in zero-bubble pipelines."""
    [grad] = torch.autograd.grad(y, [x], factor, retain_graph=True)
    return [grad, *torch.autograd.grad(y, weights, factor)]


class Products(TorchDispatchMode):
    """Counts matrix products."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
        return func(*args, **(kwargs or {}))


def gathers_of(comm):
    return comm.traffic["all_gather"].calls if "all_gather" in comm.traffic else 0


def column(gather, chunks):
    return lambda x, w, b: OpParallelLinear.apply(x, w, b, gather, async_gather_chunks=chunks)


def row(kind, chunks):
    return lambda x, w, b: OpParallelLinear.apply(x, w, b, reduce_output_type=kind, async_gather_chunks=chunks)


def linear_maps(n):
    """By name: the shapes of this rank's x and weight, and the map."""
    yield "unsharded", (2, LENGTH, IN), (OUT, IN), OpLinear.apply
    for chunks in (1, 2):
        yield f"column {chunks}", (2, LENGTH, IN), (OUT // n, IN), column(False, chunks)
        yield f"column, gathered {chunks}", (2, LENGTH // n, IN), (OUT // n, IN), column(True, chunks)
        yield f"row {chunks}", (2, LENGTH, IN // n), (OUT, IN // n), row(ReduceType.ALL_REDUCE, chunks)
        yield f"row, scattered {chunks}", (2, LENGTH, IN // n), (OUT, IN // n), row(ReduceType.REDUCE_SCATTER, chunks)


@pytest.mark.ranks(1, 2, init=False)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_every_linear_map(dtype, bias):
    """Two passes compute the same as one, and no product twice. Weights are leaves or not."""
    for name, x_shape, shape, apply in linear_maps(start().tp_size):
        for leaves in (True, False):
            grads, counts = [], []
            for passes in (1, 2):
                x, weight = leaf(*x_shape, seed=1, dtype=dtype), leaf(*shape, seed=2, dtype=dtype)
                b = leaf(shape[0], seed=3, dtype=dtype) if bias else None
                params = [weight] if b is None else [weight, b]
                y = apply(x, *(params if leaves else [w * 1 for w in params]), *([] if bias else [None]))
                factor = random(*y.shape, seed=4, dtype=dtype)
                with Products() as products:
                    if passes == 1:
                        grads.append(torch.autograd.grad(y, [x, *params], factor))
                    else:
                        grads.append(in_two_passes(y, factor, x, params))
                counts.append(products.calls)
            assert counts[0] == counts[1], name
            for one, two in zip(*grads, strict=True):
                assert torch.equal(one, two), name


@pytest.mark.ranks(2, init=False)
def test_a_pass_communicates_only_for_what_it_computes():
    ctx = start()
    for apply, x_shape, shape, gathers in [
        (column(True, 1), (2, LENGTH // 2, IN), (OUT // 2, IN), [0, 1]),
        (row(ReduceType.REDUCE_SCATTER, 1), (2, LENGTH, IN // 2), (OUT, IN // 2), [1, 1]),
    ]:
        x, weight, b = leaf(*x_shape, seed=1), leaf(*shape, seed=2), leaf(shape[0], seed=3)
        y = apply(x, weight, b)
        factor = random(*y.shape, seed=4, dtype=torch.float64)
        for inputs, count in zip(([x], [weight, b]), gathers, strict=True):
            before = gathers_of(ctx.tp)
            torch.autograd.grad(y, inputs, factor, retain_graph=True)
            assert gathers_of(ctx.tp) == before + count


@pytest.mark.ranks(1, 2, init=False)
@pytest.mark.parametrize("gather", [True, False])
def test_maps_of_one_input_gather_it_once(gather):
    ctx = start()
    n, comm = ctx.tp_size, ctx.tp
    grads = []
    for passes in (1, 2):
        x = leaf(2, LENGTH // n if gather else LENGTH, IN, seed=1)
        twice, once, frozen = (leaf(OUT // n, IN, seed=2 + i) for i in range(3))
        biases = [leaf(OUT // n, seed=8 + i) for i in range(2)]
        frozen.requires_grad_(False)
        layers = [(twice, biases[0]), (twice, None), (once, None), (frozen, biases[1])]
        y = torch.cat(column_linear(x, layers, gather_input=gather), -1)
        factor = random(*y.shape, seed=4, dtype=torch.float64)
        before, params = gathers_of(comm), [twice, once, *biases]
        if passes == 1:
            grads.append(torch.autograd.grad(y, [x, *params], factor))
        else:
            grads.append(in_two_passes(y, factor, x, params))
        assert gathers_of(comm) == before + (gather and n > 1)
    for one, two in zip(*grads, strict=True):
        assert torch.equal(one, two)


@pytest.mark.ranks(2, init=False)
def test_under_autocast():
    start()
    for name, x_shape, shape, apply in linear_maps(2):
        x, weight = leaf(*x_shape, seed=1, dtype=torch.float32), leaf(*shape, seed=2, dtype=torch.float32)
        b = leaf(shape[0], seed=3, dtype=torch.float32)
        with torch.autocast("cpu"):
            y = apply(x, weight, b)
        expected = torch.autograd.grad(y, [x, weight, b], torch.ones_like(y), retain_graph=True)
        for one, two in zip(expected, in_two_passes(y, torch.ones_like(y), x, [weight, b]), strict=True):
            assert one.dtype == torch.float32
            assert torch.equal(one, two), name


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, as it traces
def test_a_compiled_layer_computes_all_gradients():
    x, weight = leaf(3, IN, seed=1), leaf(OUT, IN, seed=2)
    compiled = torch.compile(lambda x, w: OpLinear.apply(x, w).sum(), backend="aot_eager", fullgraph=True)
    compiled(x, weight).backward()
    torch.testing.assert_close(weight.grad, x.detach().sum(0).expand(OUT, IN))


@pytest.mark.ranks(2, init=False)
def test_with_symmetric_memory(monkeypatch):
    """PyTorch's own fallbacks replace CUDA's operations."""
    symmetric_memory = pytest.importorskip("torch.distributed._symmetric_memory")
    from bmt_tp import _compat

    if "return_A" not in inspect.signature(symmetric_memory._fused_all_gather_matmul_fallback).parameters:
        pytest.skip("an old fallback")
    ctx = start()
    monkeypatch.setattr(_compat, "fused_all_gather_matmul", symmetric_memory._fused_all_gather_matmul_fallback)
    monkeypatch.setattr(_compat, "fused_matmul_reduce_scatter", symmetric_memory._fused_matmul_reduce_scatter_fallback)
    monkeypatch.setattr(ctx.tp, "symmetric_memory", True)
    x, up = leaf(2, LENGTH // 2, IN, seed=1), leaf(OUT // 2, IN, seed=2)
    down, b = leaf(IN, OUT // 2, seed=3), leaf(IN, seed=4)
    hidden = column(True, 1)(x, up, None)
    y = row(ReduceType.REDUCE_SCATTER, 1)(torch.sin(hidden), down, b)
    expected = torch.autograd.grad(y, [hidden, down, b], torch.ones_like(y), retain_graph=True)
    for one, two in zip(expected, in_two_passes(y, torch.ones_like(y), hidden, [down, b]), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
    expected = torch.autograd.grad(hidden, [x, up], torch.ones_like(hidden), retain_graph=True)
    for one, two in zip(expected, in_two_passes(hidden, torch.ones_like(hidden), x, [up]), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
