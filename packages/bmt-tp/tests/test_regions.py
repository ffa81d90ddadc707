"""Layouts, the random numbers in them, and parameters that are used on parts of the sequence."""

import copy
import os

import pytest
import torch
from torch import nn

from bmt_comm import init_distributed
from bmt_tp import (
    check_same_batch,
    copy_to_ranks,
    gather_along,
    per_rank_random,
    reduce_from_ranks,
    reduce_scatter_along,
    sequence_parallel,
    split_along,
)


def start():
    return init_distributed(tp_size=int(os.environ["WORLD_SIZE"]))


def part(x, dim, ctx):
    return x.chunk(ctx.tp_size, dim)[ctx.tp_rank]


def leaf(x):
    return x.detach().clone().requires_grad_()


@pytest.mark.ranks(2, tp_size=2)
@pytest.mark.parametrize(
    ("shape", "dim"), [((3, 4), 0), ((1, 3, 4), 1), ((2, 3, 4), 1), ((2, 1, 4), 1), ((2, 3, 1), 2)]
)
def test_gathered_parts_may_be_modified_in_place(ctx, shape, dim):
    x = torch.ones(shape, requires_grad=True)
    gather_along(x, dim).mul_(3.0).sum().backward()
    assert torch.equal(x.grad, torch.full(shape, 3.0))


@pytest.mark.ranks(1, 2, 3, init=False)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_layouts_and_their_gradients(dim):
    ctx = start()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 12, 6, generator=generator, dtype=torch.float64)
    factors = torch.randn(ctx.tp_size, 6, 12, 6, generator=generator, dtype=torch.float64)
    mine, common = factors[ctx.tp_rank], factors[0]

    replicated = leaf(x)
    y = copy_to_ranks(replicated)
    assert torch.equal(y, x)
    (y * mine).sum().backward()
    torch.testing.assert_close(replicated.grad, factors.sum(0))

    partial = leaf(mine)
    y = reduce_from_ranks(partial)
    torch.testing.assert_close(y, factors.sum(0))
    (y * common).sum().backward()
    torch.testing.assert_close(partial.grad, common)

    replicated = leaf(x)
    y = split_along(replicated, dim)
    assert torch.equal(y, part(x, dim, ctx))
    (y * part(common, dim, ctx)).sum().backward()
    assert torch.equal(replicated.grad, common)

    split = leaf(part(x, dim, ctx))
    y = gather_along(split, dim)
    assert torch.equal(y, x)
    (y * common).sum().backward()
    assert torch.equal(split.grad, part(common, dim, ctx))
    assert split.grad.untyped_storage().nbytes() == split.numel() * split.itemsize  # the full gradient is freed

    split = leaf(part(x, dim, ctx))
    y = gather_along(split, dim, partial_grad=True)
    assert torch.equal(y, x)
    (y * mine).sum().backward()
    torch.testing.assert_close(split.grad, part(factors.sum(0), dim, ctx))

    partial = leaf(mine)
    y = reduce_scatter_along(partial, dim)
    torch.testing.assert_close(y, part(factors.sum(0), dim, ctx))
    (y * part(common, dim, ctx)).sum().backward()
    assert torch.equal(partial.grad, common)


@pytest.mark.ranks(2, tp_size=2)
def test_what_cannot_be_split_is_named(ctx):
    for function in (split_along, reduce_scatter_along):
        with pytest.raises(ValueError, match=r"dimension 1 of shape \(2, 3\) cannot be split evenly over 2 .*pad it"):
            function(torch.zeros(2, 3), 1)
        with pytest.raises(ValueError, match="2 is not a dimension"):
            function(torch.zeros(2, 3), 2)
    with pytest.raises(ValueError, match="gather_along: 2 is not a dimension"):
        gather_along(torch.zeros(2, 3), 2)


@pytest.mark.ranks(1, 2, 3, init=False)
def test_a_norm_on_parts_of_the_sequence_gets_the_gradient_of_the_whole_sequence():
    ctx = start()
    torch.manual_seed(0)
    plain, norm = nn.LayerNorm(5), sequence_parallel(nn.LayerNorm(5))
    x, factor = torch.randn(2, 6, 5), torch.randn(2, 6, 5)
    for _ in range(2):  # gradients accumulate
        (plain(x) * factor).sum().backward()
        (norm(part(x, 1, ctx)) * part(factor, 1, ctx)).sum().backward()
    for name, param in norm.named_parameters():
        torch.testing.assert_close(param.grad, plain.get_parameter(name).grad)
    assert sequence_parallel(norm) is norm  # once more changes nothing
    norm.zero_grad()
    (norm(part(x, 1, ctx)) * part(factor, 1, ctx)).sum().backward()
    torch.testing.assert_close(norm.weight.grad, plain.weight.grad / 2)
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, not Tensor"):
        sequence_parallel(torch.zeros(1))


def on_meta_and_emptied(norm):
    emptied = sequence_parallel(copy.deepcopy(norm).to("meta")).to_empty(device="cpu")
    emptied.load_state_dict(norm.state_dict())
    return emptied


def assigned(norm):
    other = sequence_parallel(nn.LayerNorm(5))
    other.load_state_dict(norm.state_dict(), assign=True)
    return other


def frozen_when_marked(norm):
    return sequence_parallel(norm.requires_grad_(False)).requires_grad_()


def frozen_when_copied(norm):
    return copy.deepcopy(sequence_parallel(norm).requires_grad_(False)).requires_grad_()


def converted(norm):
    return sequence_parallel(norm).double().float()


@pytest.mark.ranks(2, tp_size=2)
@pytest.mark.parametrize("treat", [on_meta_and_emptied, assigned, frozen_when_marked, frozen_when_copied, converted])
def test_a_norm_stays_marked(ctx, treat):
    torch.manual_seed(0)
    plain, x, factor = nn.LayerNorm(5), torch.randn(2, 6, 5), torch.randn(2, 6, 5)
    norm = treat(copy.deepcopy(plain))
    (plain(x) * factor).sum().backward()
    (norm(part(x, 1, ctx)) * part(factor, 1, ctx)).sum().backward()
    for name, param in norm.named_parameters():
        torch.testing.assert_close(param.grad, plain.get_parameter(name).grad)


@pytest.mark.ranks(3, tp_size=3)
def test_random_numbers_differ_inside_a_region_and_agree_outside(ctx):
    torch.manual_seed(5)
    outside = [torch.rand(4)]
    inside = []
    for _ in range(2):
        with per_rank_random():
            inside.append(torch.rand(4))
        outside.append(torch.rand(4))
    everyone = ctx.tp.all_gather_object((inside, outside))
    assert all(torch.equal(a, b) for _, theirs in everyone for a, b in zip(theirs, outside, strict=True))
    numbers = [tuple(x.tolist()) for theirs, _ in everyone for x in theirs] + [tuple(x.tolist()) for x in outside]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.ranks(2, tp_size=2)
def test_recomputation_drops_the_same_activations(ctx):
    x = torch.ones(64, requires_grad=True)
    masks = []

    def region(x):
        with per_rank_random():
            y = nn.functional.dropout(x, 0.5)
        masks.append(y.detach().clone())
        return y * y

    torch.utils.checkpoint.checkpoint(region, x, use_reentrant=False).sum().backward()
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(x.grad, 2 * masks[0] * masks[0])


@pytest.mark.ranks(2, tp_size=2)
def test_ranks_with_another_batch_are_told(ctx):
    same = torch.arange(6).view(2, 3)
    check_same_batch(same, same.t(), torch.tensor(1.5, dtype=torch.bfloat16), torch.zeros(0))
    with pytest.raises(RuntimeError, match=r"the same batch.*item 1 is .*int64 with the digest"):
        check_same_batch(same, same + ctx.tp_rank)
