import os

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bmt_comm import init_distributed
from bmt_tp import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy

VOCAB, HIDDEN = 60, 7
SETTINGS = [
    {},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "none", "ignore_index": 5},
    {"label_smoothing": 0.2, "ignore_index": 5, "weighted": True},
]


def start():
    return init_distributed(tp_size=int(os.environ["WORLD_SIZE"]))


def part(x, dim, ctx):
    return x.chunk(ctx.tp_size, dim)[ctx.tp_rank]


def leaf(x):
    return x.detach().clone().requires_grad_()


def tensors():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 12, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    bias = torch.randn(VOCAB, generator=generator, dtype=torch.float64)
    target = torch.randint(0, VOCAB, (3, 12), generator=generator)
    target[0, :2] = 5
    return hidden, weight, bias, target


def settings_of(given):
    given = dict(given)
    weighted = given.pop("weighted", False)
    return given, torch.linspace(0.5, 2, VOCAB, dtype=torch.float64) if weighted else None


def close(a, b):
    assert a.shape == b.shape
    assert (a.double() - b).abs().max() <= 1e-12 * b.abs().max() + 1e-15


@pytest.mark.ranks(1, 2, 3, 4, init=False)
@pytest.mark.parametrize("given", SETTINGS, ids=str)
def test_split_scores_have_the_loss_and_gradient_of_full_ones(given):
    ctx = start()
    hidden, weight, bias, target = tensors()
    options, class_weight = settings_of(given)
    scores = leaf(F.linear(hidden, weight, bias))
    expected = F.cross_entropy(scores.flatten(0, 1), target.flatten(), class_weight, **options)
    expected.square().sum().backward()
    mine = leaf(part(scores, -1, ctx))
    loss = vocab_parallel_cross_entropy(mine, target, weight=class_weight, **options)
    loss.square().sum().backward()
    close(loss.flatten(), expected.flatten())
    assert loss.shape == (target.shape if options.get("reduction") == "none" else ())
    close(mine.grad, part(scores.grad, -1, ctx))
    everyone = ctx.tp.all_gather_object(loss.detach())
    assert all(torch.equal(other, loss) for other in everyone)


@pytest.mark.ranks(1, 2, 3, init=False)
@pytest.mark.parametrize("gather_input", [True, False])
@pytest.mark.parametrize("given", SETTINGS, ids=str)
def test_head_and_loss_in_one(given, gather_input):
    ctx = start()
    hidden, weight, bias, target = tensors()
    options, class_weight = settings_of(given)
    full = [leaf(t) for t in (hidden, weight, bias)]
    scores = F.linear(*full)
    expected = F.cross_entropy(scores.flatten(0, 1), target.flatten(), class_weight, **options)
    expected.square().sum().backward()
    mine = leaf(part(hidden, 1, ctx) if gather_input else hidden)
    my_weight, my_bias = leaf(part(weight, 0, ctx)), leaf(part(bias, 0, ctx))
    loss = vocab_parallel_linear_cross_entropy(
        mine, my_weight, target, my_bias, gather_input=gather_input, class_weight=class_weight, chunk_size=5, **options
    )
    loss.square().sum().backward()
    close(loss.flatten(), expected.flatten())
    close(mine.grad, part(full[0].grad, 1, ctx) if gather_input else full[0].grad)
    close(my_weight.grad, part(full[1].grad, 0, ctx))
    close(my_bias.grad, part(full[2].grad, 0, ctx))


class Largest(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return out


@pytest.mark.ranks(2, tp_size=2)
def test_scores_are_never_gathered_and_those_of_a_fused_head_never_exist(ctx):
    rows, hidden = 4096, torch.randn(4096, HIDDEN)
    target = torch.arange(rows) % VOCAB
    scores = leaf(torch.randn(rows, VOCAB // 2))
    before = ctx.tp.traffic.copy()
    calls = {op: count.calls for op, count in before.items()}
    with Largest() as largest:
        vocab_parallel_cross_entropy(scores, target).backward()
    assert largest.numel <= scores.numel()
    sent = {op: count.calls - calls.get(op, 0) for op, count in ctx.tp.traffic.items()}
    assert {op: number for op, number in sent.items() if number} == {"all_gather": 1}
    with Largest() as largest:
        vocab_parallel_linear_cross_entropy(leaf(hidden), leaf(torch.randn(VOCAB // 2, HIDDEN)), target).backward()
    assert largest.numel < scores.numel() / 2


@pytest.mark.ranks(2, tp_size=2)
def test_a_target_outside_of_the_vocabulary_is_named(ctx):
    with pytest.raises(IndexError, match="60"):
        vocab_parallel_cross_entropy(torch.zeros(2, VOCAB // 2), torch.tensor([0, VOCAB]))


@pytest.mark.ranks(2, tp_size=2)
def test_ranks_with_different_numbers_of_classes_are_named(ctx):
    columns, target = 13 - ctx.tp_rank, torch.tensor([0, 1])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"same number of classes: .*13 on each rank.*12 on each rank.*pad the"):
            vocab_parallel_cross_entropy(torch.zeros(2, columns), target)
        with pytest.raises(ValueError, match="same number of classes"):
            vocab_parallel_linear_cross_entropy(torch.zeros(2, HIDDEN), torch.zeros(columns, HIDDEN), target)


@pytest.mark.ranks(2, tp_size=2)
def test_targets_in_another_order_of_dimensions_are_refused(ctx):
    with pytest.raises(ValueError, match=r"target has shape \(3, 2\); .* it must be \(2, 3\)"):
        vocab_parallel_cross_entropy(torch.zeros(2, 3, VOCAB // 2), torch.zeros(3, 2, dtype=torch.long))
