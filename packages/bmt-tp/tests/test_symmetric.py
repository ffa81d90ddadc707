"""Products fused with the gather or the reduction. PyTorch's own fallbacks replace CUDA's operations."""

import os

import pytest
import torch
import torch.nn.functional as F

from bmt_comm import init_distributed
from bmt_tp import _compat, column_linear, enable_symmetric_memory, row_linear

symmetric_memory = pytest.importorskip("torch.distributed._symmetric_memory")


def part(x, dim, ctx):
    return x.chunk(ctx.tp_size, dim)[ctx.tp_rank]


def leaf(x):
    return x.detach().clone().requires_grad_()


def use_fallbacks(ctx):
    """Returns what was called, in order."""
    calls = []

    def gather(x, weights, dim, group, *, return_A):
        calls.append("gather")
        options = {"return_A": return_A} if _compat.TAKES_RETURN_A else {}
        return symmetric_memory._fused_all_gather_matmul_fallback(x, weights, dim, group, **options)

    def scatter(*arguments):
        calls.append("scatter")
        return symmetric_memory._fused_matmul_reduce_scatter_fallback(*arguments)

    _compat.fused_all_gather_matmul, _compat.fused_matmul_reduce_scatter = gather, scatter
    ctx.tp.symmetric_memory = True
    return calls


@pytest.mark.ranks(2, 3, init=False)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("count", [1, 2])
def test_results_and_gradients_are_the_same(dim, count):
    ctx = init_distributed(tp_size=int(os.environ["WORLD_SIZE"]))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 12, 5, generator=generator, dtype=torch.float64)
    weights = [torch.randn(18, 5, generator=generator, dtype=torch.float64) for _ in range(count)]
    bias = torch.randn(18, generator=generator, dtype=torch.float64)
    down = torch.randn(4, 18, generator=generator, dtype=torch.float64)
    factor = torch.randn(6, 12, 4, generator=generator, dtype=torch.float64)
    full = [leaf(t) for t in (x, *weights, bias, down)]
    inner = sum(torch.tanh(F.linear(full[0], w, full[-2])) for w in full[1:-2])
    y = F.linear(inner, full[-1], torch.ones(4, dtype=torch.float64))
    (y * factor).sum().backward()

    originals = _compat.fused_all_gather_matmul, _compat.fused_matmul_reduce_scatter
    calls = use_fallbacks(ctx)
    try:
        mine = [leaf(part(x, dim, ctx)), *(leaf(part(w, 0, ctx)) for w in weights), leaf(part(bias, 0, ctx))]
        my_down = leaf(part(down, 1, ctx))
        outputs = column_linear(mine[0], [(w, mine[-1]) for w in mine[1:-1]], gather_input=True, sequence_dim=dim)
        result = row_linear(
            sum(map(torch.tanh, outputs)), my_down, torch.ones(4, dtype=torch.float64), sequence_dim=dim
        )
        (result * part(factor, dim, ctx)).sum().backward()
    finally:
        _compat.fused_all_gather_matmul, _compat.fused_matmul_reduce_scatter = originals
    # Forward: up, down. Backward: down, up, the latter by itself where one input has several maps.
    assert calls == ["gather", "scatter", "gather", "scatter"][: 4 if count == 1 else 3]
    torch.testing.assert_close(result, part(y, dim, ctx))
    torch.testing.assert_close(mine[0].grad, part(full[0].grad, dim, ctx))
    for w, expected in zip(mine[1:-1], full[1:-2], strict=True):
        torch.testing.assert_close(w.grad, part(expected.grad, 0, ctx))
    torch.testing.assert_close(mine[-1].grad, part(full[-2].grad, 0, ctx))
    torch.testing.assert_close(my_down.grad, part(full[-1].grad, 1, ctx))


@pytest.mark.ranks(2, tp_size=2, device="cpu")
def test_ranks_without_gpus_are_told(ctx):
    with pytest.raises(RuntimeError, match="symmetric memory cannot be used: rank 0 is on cpu, and CUDA devices are"):
        enable_symmetric_memory()
    assert not ctx.tp.symmetric_memory


@pytest.mark.ranks(1)
def test_a_rank_by_itself_needs_none(ctx):
    enable_symmetric_memory()
    assert not ctx.tp.symmetric_memory
