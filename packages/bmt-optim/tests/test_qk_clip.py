"""QK clipping over shards is that of plain weights on one device."""

import pytest
import torch
from layouts import layout, shards, tensors, train
from torch import nn
from torch.nn import functional

from bmt_comm import slice_of
from bmt_optim import Muon, QKClip, ScheduleFreeAdamW, largest_logits
from bmt_optim.slices import unshard

HEADS, GROUPS, WIDTH, TAU = 6, 3, 4, 3.0
SHAPES = [(HEADS * WIDTH, 10), (GROUPS * WIDTH, 10), (HEADS * WIDTH,), (GROUPS * WIDTH,), (3 * 2 * WIDTH, 10)]


def logits_of(weights, x):
    """Of every head, the largest over the batch."""
    q, k = (functional.linear(x, weights[n], weights[n + 2]).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for n in (0, 1))
    return q, k, largest_logits(q, k)


def fused(weights, x):
    q, k, _ = functional.linear(x, weights[4]).unflatten(-1, (3, 2, WIDTH)).movedim(2, 0)
    return largest_logits(q.transpose(1, 2), k.transpose(1, 2))


def check(ctx, dtype):
    start = [t.to(dtype).float() for t in tensors(SHAPES)]
    params = shards(start, layout(ctx, SHAPES), dtype)
    optimizer = Muon([{"params": [params[n]], "use_muon": n in (0, 1, 4), "lr": 0.0} for n in range(5)])
    clip = QKClip(optimizer, tau=TAU)
    first = clip.add([params[0], params[2]], [params[1], params[3]], HEADS, WIDTH, GROUPS)
    second = clip.add([params[4]], [params[4]], 2, WIDTH, key_row=2 * WIDTH)
    inputs = [torch.randn(2, 5, 10, generator=torch.Generator().manual_seed(n)) / 3 for n in range(4)]
    seen = [[logits_of(start, x)[2] for x in inputs], [fused(start, x) for x in inputs]]
    for n in range(len(inputs)):
        if n % ctx.world_size == ctx.rank:  # every rank has seen other data, and one of them nothing
            half = HEADS // 2
            clip.record(first, seen[0][n][:half])
            clip.record(first, seen[0][n][half:], first_head=half)
            clip.record(second, seen[1][n])
    train(optimizer, params, range(1), lambda step: [torch.zeros(s) for s in SHAPES])
    clip.step()
    weights = []
    for p in params:
        weight = optimizer.state[p].get("master", p.detach())
        weights.append(unshard(weight, slice_of(p)))
        assert torch.equal(weight.to(dtype), p)
    factors = [TAU / torch.stack(each).amax(dim=0).clamp(min=TAU) for each in seen]
    keys = factors[0].view(GROUPS, -1).amin(dim=1).sqrt()
    queries = factors[0] / keys.repeat_interleave(HEADS // GROUPS)
    both = torch.cat([factors[1].sqrt(), factors[1].sqrt(), torch.ones(2)])
    scales = [queries, keys, queries, keys, both]
    assert (factors[0] < 1).any()
    assert (factors[0] == 1).any()
    for p, old, scale in zip(weights, start, scales):
        expected = old * scale.repeat_interleave(WIDTH).view(-1, *[1] * (old.dim() - 1))
        torch.testing.assert_close(p, expected, rtol=1e-6, atol=1e-7)
    largest = torch.stack([logits_of(weights, x)[2] for x in inputs]).amax(dim=0)
    torch.testing.assert_close(largest, torch.stack(seen[0]).amax(dim=0).clamp(max=TAU), rtol=1e-5, atol=1e-5)
    before = [p.clone() for p in params]
    clip.record(first, torch.full((HEADS,), torch.inf))  # of a step that overflows
    clip.record(first, torch.full((HEADS,), torch.nan))
    clip.step()
    clip.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before))


@pytest.mark.ranks(1, 3)
def test_over_row_shards_it_is_that_of_one_device(ctx):
    check(ctx, torch.float32)
    check(ctx, torch.bfloat16)


@pytest.mark.ranks(4, tp_size=2)
def test_over_tensor_parallel_shards_it_is_that_of_one_device(ctx):
    check(ctx, torch.float32)


def test_largest_logits_are_those_of_attention_and_wrong_arguments_are_refused():
    q, k = tensors([(2, 4, 3, 8), (2, 2, 5, 8)])
    logits = q @ k.repeat_interleave(2, dim=1).mT / 8**0.5
    mask = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)
    torch.testing.assert_close(largest_logits(q, k, causal=False), logits.amax(dim=(0, 2, 3)))
    expected = logits.masked_fill(mask, -torch.inf).amax(dim=(0, 2, 3))
    torch.testing.assert_close(largest_logits(q, k), expected)
    weight = nn.Parameter(torch.ones(8, 4))
    clip = QKClip(torch.optim.SGD([weight]))
    for options in ({"heads": 3, "head_dim": 4}, {"heads": 2, "head_dim": 4, "key_row": 1}):
        with pytest.raises(ValueError, match="are not in a parameter"):
            clip.add([weight], [weight], **options)
    with pytest.raises(ValueError, match="kv_heads=3 must divide heads=4"):
        clip.add([weight], [weight], 4, 2, 3)
    with pytest.raises(ValueError, match="tau=0"):
        QKClip(torch.optim.SGD([weight]), tau=0)


def test_queries_and_keys_may_have_different_dtypes():
    query, key = torch.full((1, 1, 2, 4), 2.0), torch.full((1, 1, 2, 4), 3.0, dtype=torch.bfloat16)
    assert largest_logits(query, key).tolist() == largest_logits(key, query).tolist() == [12.0]


def test_half_precision_products_that_are_too_large_are_found():
    query, key = (torch.full((1, 1, 2, 64), 40.0, dtype=torch.float16) for _ in range(2))
    assert largest_logits(query, key) == 40 * 40 * 8
    assert largest_logits(2 * query, key) == 80 * 40 * 8
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        q, k = (torch.full((1, 1, 2, 64), 512.0, dtype=dtype) for _ in range(2))
        with torch.autocast("cpu", torch.float16):
            assert largest_logits(q, k) == 512 * 512 * 8


def test_schedule_free_steps_do_not_undo_the_scaling():
    param = torch.nn.Parameter(torch.full((4, 4), 2.0))
    optimizer = ScheduleFreeAdamW([param], lr=0.1)
    clip = QKClip(optimizer, tau=1.0)
    layer = clip.add([param], [param], heads=1, head_dim=2, query_row=0, key_row=2)
    for step in range(20):
        param.grad = torch.zeros_like(param)
        optimizer.step()
        if step == 0:
            clip.record(layer, torch.tensor([4.0]))
            clip.step()
    torch.testing.assert_close(param.detach(), torch.ones(4, 4))
