"""Linear layers whose weight gradients are put off end up with the gradients of one backward."""

import copy
import importlib.util
import inspect
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from bmt_comm import deferred_weight_gradients, init_distributed
from bmt_tp import (
    ColumnParallelLinear,
    Linear,
    OpLinear,
    OpParallelLinear,
    ReduceType,
    RowParallelLinear,
    VPEmbedding,
    column_linear,
    column_parallel,
    parallelize,
    sequence_parallel,
    vocab_parallel_cross_entropy,
)

SHARDED = importlib.util.find_spec("bmt_zero") is not None
IN, OUT = 8, 12
VOCAB, HIDDEN, LENGTH = 12, 8, 6


def start(tp_size=None):
    """All ranks are tensor-parallel, if nothing else is said."""
    return init_distributed(tp_size=tp_size or int(os.environ["WORLD_SIZE"]))


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def leaf(*shape, seed, dtype=torch.float64):
    return random(*shape, seed=seed, dtype=dtype).requires_grad_()


def kept_elements(deferred):
    """How many elements are kept, each storage counted once."""
    tensors = [t for work in deferred._works for gradient in work.gradients for t in gradient._tensors]
    spaces = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() // t.element_size() for t in tensors}
    return sum(spaces.values())


def gathers_of(comm):
    return comm.traffic["all_gather"].calls if "all_gather" in comm.traffic else 0


def column(gather, chunks):
    return lambda x, w, b: OpParallelLinear.apply(x, w, b, gather, async_gather_chunks=chunks)


def row(kind, chunks):
    return lambda x, w, b: OpParallelLinear.apply(x, w, b, reduce_output_type=kind, async_gather_chunks=chunks)


def linear_maps(n):
    """By name: the shapes of this rank's x and weight, and the map."""
    yield "whole", (2, LENGTH, IN), (OUT, IN), OpLinear.apply
    for chunks in (1, 2):
        yield f"column {chunks}", (2, LENGTH, IN), (OUT // n, IN), column(False, chunks)
        yield f"column, gathered {chunks}", (2, LENGTH // n, IN), (OUT // n, IN), column(True, chunks)
        yield f"row {chunks}", (2, LENGTH, IN // n), (OUT, IN // n), row(ReduceType.ALL_REDUCE, chunks)
        yield f"row, scattered {chunks}", (2, LENGTH, IN // n), (OUT, IN // n), row(ReduceType.REDUCE_SCATTER, chunks)


@pytest.mark.ranks(1, 2, init=False)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_every_linear_map(dtype, bias):
    """The input's gradient comes first. Nothing is kept but the input and the output's gradient; where the sequence
    is split, this rank's part of them."""
    for name, x_shape, shape, apply in linear_maps(start().tp_size):
        grads = []
        for parts in (1, 2):
            x, weight = leaf(*x_shape, seed=1, dtype=dtype), leaf(*shape, seed=2, dtype=dtype)
            b = leaf(shape[0], seed=3, dtype=dtype) if bias else None
            for step in range(2):  # also on top of what is there
                y = apply(x, weight, b)
                factor = random(*y.shape, seed=4 + step, dtype=dtype)
                if parts == 1:
                    y.backward(factor)
                    continue
                before = None if weight.grad is None else weight.grad.clone()
                with deferred_weight_gradients() as deferred:
                    y.backward(factor)
                assert len(deferred) == 1 + bias, name
                assert (weight.grad is None) if before is None else torch.equal(weight.grad, before), name
                assert x.grad is not None, name
                assert kept_elements(deferred) == x.numel() + factor.numel(), name
                deferred.run()
            grads.append([x.grad, weight.grad, weight.grad if b is None else b.grad])
        for one, two in zip(*grads, strict=True):
            assert torch.equal(one, two), name


@pytest.mark.ranks(2, init=False)
def test_an_input_without_gradient_is_not_waited_for():
    """The first layer of a model: its backward communicates nothing until its gradients are run."""
    ctx = start()
    for apply, x_shape, shape in [
        (column(True, 1), (2, LENGTH // 2, IN), (OUT // 2, IN)),
        (row(ReduceType.REDUCE_SCATTER, 1), (2, LENGTH, IN // 2), (OUT, IN // 2)),
    ]:
        weight, b = leaf(*shape, seed=2), leaf(shape[0], seed=3)
        y = apply(random(*x_shape, dtype=torch.float64), weight, b)
        factor = random(*y.shape, seed=4, dtype=torch.float64)
        y.backward(factor, retain_graph=True)
        expected, weight.grad, b.grad = (weight.grad, b.grad), None, None
        before = gathers_of(ctx.tp)
        with deferred_weight_gradients() as deferred:
            y.backward(factor)
        assert gathers_of(ctx.tp) == before
        deferred.run()
        assert gathers_of(ctx.tp) == before + 1
        assert torch.equal(weight.grad, expected[0])
        assert torch.equal(b.grad, expected[1])


@pytest.mark.ranks(1, 2, init=False)
@pytest.mark.parametrize("gather", [True, False])
def test_maps_of_one_input_gather_it_once(gather):
    ctx = start()
    n, comm = ctx.tp_size, ctx.tp
    grads = []
    for parts in (1, 2):
        x = leaf(2, LENGTH // n if gather else LENGTH, IN, seed=1)
        twice, once, frozen = (leaf(OUT // n, IN, seed=2 + i) for i in range(3))
        biases = [leaf(OUT // n, seed=8 + i) for i in range(2)]
        frozen.requires_grad_(False)
        layers = [(twice, biases[0]), (twice, None), (once, None), (frozen, biases[1])]
        y = torch.cat(column_linear(x, layers, gather_input=gather), -1)
        factor = random(*y.shape, seed=4, dtype=torch.float64)
        before = gathers_of(comm)
        if parts == 1:
            y.backward(factor)
        else:
            with deferred_weight_gradients() as deferred:
                y.backward(factor)
            assert (twice.grad, once.grad, biases[0].grad) == (None, None, None)
            assert biases[1].grad is not None  # its weight is frozen
            assert len(deferred) == 4
            assert gathers_of(comm) == before
            deferred.run()
        assert gathers_of(comm) == before + (gather and n > 1)
        grads.append([x.grad, twice.grad, once.grad, biases[0].grad, biases[1].grad])
    for one, two in zip(*grads, strict=True):
        assert torch.equal(one, two)


@pytest.mark.ranks(2, init=False)
def test_a_weight_that_was_computed_gets_its_gradient_at_once():
    start()
    found = []
    for parts in (1, 2):
        x = leaf(2, LENGTH // 2, IN, seed=1)
        direct, scaled, hooked = (leaf(OUT // 2, IN, seed=2 + i) for i in range(3))
        turned = leaf(IN, OUT // 2, seed=7)
        hooked.register_hook(lambda grad: 3 * grad)
        layers = [(w, None) for w in (direct, 2 * scaled, turned.t(), hooked)]
        loss = torch.cat(column_linear(x, layers, gather_input=True), -1).square().sum()
        if parts == 1:
            loss.backward()
        else:
            with deferred_weight_gradients() as deferred:
                loss.backward()
            assert len(deferred) == 1
            assert direct.grad is None
            assert all(w.grad is not None for w in (scaled, turned, hooked))
            deferred.run()
        found.append([w.grad for w in (x, direct, scaled, turned, hooked)])
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


@pytest.mark.ranks(2, init=False)
def test_under_autocast():
    start()
    for name, x_shape, shape, apply in linear_maps(2):
        grads = []
        for parts in (1, 2):
            x, weight = leaf(*x_shape, seed=1, dtype=torch.float32), leaf(*shape, seed=2, dtype=torch.float32)
            b = leaf(shape[0], seed=3, dtype=torch.float32)
            with torch.autocast("cpu"):
                loss = apply(x, weight, b).square().sum()
            if parts == 1:
                loss.backward()
            else:
                with deferred_weight_gradients() as deferred:
                    loss.backward()
                deferred.run()
            assert weight.grad.dtype == torch.float32
            grads.append([x.grad, weight.grad, b.grad])
        for one, two in zip(*grads, strict=True):
            assert torch.equal(one, two), name


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, as it traces
def test_a_compiled_layer_computes_all_gradients_at_once():
    x, weight = leaf(3, IN, seed=1), leaf(OUT, IN, seed=2)
    compiled = torch.compile(lambda x, w: OpLinear.apply(x, w).sum(), backend="aot_eager", fullgraph=True)
    with deferred_weight_gradients() as deferred:
        compiled(x, weight).backward()
    assert len(deferred) == 0
    torch.testing.assert_close(weight.grad, x.detach().sum(0).expand(OUT, IN))


@pytest.mark.ranks(2, init=False)
def test_with_symmetric_memory(monkeypatch):
    """PyTorch's own fallbacks stand in for CUDA's operations."""
    symmetric_memory = pytest.importorskip("torch.distributed._symmetric_memory")
    from bmt_tp import _compat

    if "return_A" not in inspect.signature(symmetric_memory._fused_all_gather_matmul_fallback).parameters:
        pytest.skip("an old fallback")
    ctx = start()
    monkeypatch.setattr(_compat, "fused_all_gather_matmul", symmetric_memory._fused_all_gather_matmul_fallback)
    monkeypatch.setattr(_compat, "fused_matmul_reduce_scatter", symmetric_memory._fused_matmul_reduce_scatter_fallback)
    monkeypatch.setattr(ctx.tp, "symmetric_memory", True)
    grads = []
    for parts in (1, 2):
        x, up = leaf(2, LENGTH // 2, IN, seed=1), leaf(OUT // 2, IN, seed=2)
        down, b = leaf(IN, OUT // 2, seed=3), leaf(IN, seed=4)
        y = row(ReduceType.REDUCE_SCATTER, 1)(torch.sin(column(True, 1)(x, up, None)), down, b)
        if parts == 1:
            y.square().sum().backward()
        else:
            with deferred_weight_gradients() as deferred:
                y.square().sum().backward()
            assert (up.grad, down.grad, b.grad) == (None, None, None)
            deferred.run()
        grads.append([x.grad, up.grad, down.grad, b.grad])
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


class Layer(nn.Module):
    """All kinds of linear layers, a norm that sees a part of the sequence, and a layer that is plain."""

    def __init__(self, sequence, checkpointing=False):
        super().__init__()
        self.checkpointing = checkpointing
        self.norm = nn.LayerNorm(HIDDEN)
        self.mix = Linear(HIDDEN, HIDDEN)
        self.qkv = nn.ModuleList(
            ColumnParallelLinear(HIDDEN, HIDDEN, bias=i == 1, gather_input=sequence) for i in range(3)
        )
        self.o = RowParallelLinear(HIDDEN, HIDDEN, all_reduce_output=not sequence)
        self.plain = nn.Linear(HIDDEN, HIDDEN)
        if sequence:
            for module in (self.norm, self.mix, self.plain):
                sequence_parallel(module)

    def forward(self, x):
        if self.checkpointing:
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x):
        q, k, v = column_parallel(self.mix(self.norm(x)), list(self.qkv))
        return x + self.plain(self.o(torch.tanh(q) * k + v))


class Model(nn.Module):
    """``level``: of Blocks around the layers; None: there are none."""

    def __init__(self, sequence, level, checkpointing, **options):
        super().__init__()
        self.embed = VPEmbedding(VOCAB, HIDDEN, torch.float32, sequence_parallel=sequence)
        layers = [Layer(sequence, level is None and checkpointing) for _ in range(2)]
        if level is not None:
            from bmt_zero import Block, TransformerBlockList

            self.layers = TransformerBlockList([Block(layer, checkpointing, level, **options) for layer in layers])
        else:
            self.layers = nn.Sequential(*layers)

    def loss(self, ids):
        x = self.layers(self.embed(ids)).float()
        return vocab_parallel_cross_entropy(self.embed(x, projection=True), ids).mean()


@pytest.mark.ranks(1, 2, init=False)
@pytest.mark.parametrize("tp_size", [None, 1])
@pytest.mark.parametrize("level", [None, 0, 1, 2, 3] if SHARDED else [None])
def test_models_of_our_layers(tp_size, level):
    ctx = start(tp_size)
    for sequence, checkpointing in [(False, False), (False, True), (True, False), (True, True)]:
        torch.manual_seed(0)
        model = Model(sequence, level, checkpointing)
        check_model(ctx, model, level)


@pytest.mark.skipif(not SHARDED, reason="bmt_zero is not installed")
@pytest.mark.ranks(2, init=False)
@pytest.mark.parametrize("tp_size", [None, 1])
def test_blocks_that_compute_in_half_precision(tp_size):
    from bmt_zero import MixedPrecision

    ctx = start(tp_size)
    for level in (0, 3):
        torch.manual_seed(0)
        model = Model(True, level, True, precision=MixedPrecision(torch.bfloat16, torch.float32))
        check_model(ctx, model, level)


def check_model(ctx, model, level):
    """Two micro-batches, of which the second goes forward and backward before the first one's second part."""
    twin = copy.deepcopy(model)
    batches = [
        torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(10 * i + ctx.data_rank))
        for i in range(2)
    ]
    waiting = []
    for ids in batches:
        loss = model.loss(ids)
        with deferred_weight_gradients() as deferred:
            loss.backward()
        waiting.append(deferred)
        twin.loss(ids).backward()
        if level is not None:  # Blocks wait with everything
            assert all(p.grad is None for p in model.layers.parameters())
    expected = {name: p.grad for name, p in twin.named_parameters()}
    for name, param in model.named_parameters():
        if level is None and ("plain" in name or "norm" in name):
            assert torch.equal(param.grad, expected[name]), name
    for deferred in waiting:
        assert len(deferred)
        deferred.run()
    for name, param in model.named_parameters():
        error = (param.grad - expected[name]).norm()
        assert error <= 1e-6 * expected[name].norm(), f"{name}: {error} of {expected[name].norm()}"


class PlainLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, OUT), nn.Linear(OUT, HIDDEN)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.ranks(1, 2, init=False)
@pytest.mark.parametrize("sequence", [False, True])
def test_a_plain_model_that_was_cut(sequence):
    """Its parameters are plain leaves; the norms', which have hooks, are complete after the first part."""
    start()
    suffix = "+sequence" if sequence else ""
    plan = {"*.up": "colwise" + suffix, "*.down": "rowwise" + suffix}
    if sequence:
        plan |= {"0": "sequence_start", "*.norm": "sequence", "2": "sequence_end"}
    torch.manual_seed(0)
    plain = nn.Sequential(PlainLayer(), PlainLayer(), nn.LayerNorm(HIDDEN))
    model = parallelize(copy.deepcopy(plain), plan)
    twin = copy.deepcopy(model)
    for step in range(2):
        x, y = leaf(2, LENGTH, HIDDEN, seed=step, dtype=torch.float32), random(2, LENGTH, HIDDEN, seed=step)
        before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        with deferred_weight_gradients() as deferred:
            model(x).square().sum().backward()
        twin(y.requires_grad_()).square().sum().backward()
        assert torch.equal(x.grad, y.grad)
        for (name, param), other, old in zip(model.named_parameters(), twin.parameters(), before, strict=True):
            if "up" in name or "down" in name:
                assert (param.grad is None) if old is None else torch.equal(param.grad, old), name
            else:
                assert torch.equal(param.grad, other.grad), name
        assert len(deferred) == 8
        deferred.run()
        for (name, param), other in zip(model.named_parameters(), twin.named_parameters(), strict=True):
            assert torch.equal(param.grad, other[1].grad), name
