"""FusedCrossEntropy against torch.nn.CrossEntropyLoss, unsharded and sharded over the vocabulary."""

import itertools

import pytest
import torch
from torch import nn

from bmt_optim import FusedCrossEntropy

N, V = 9, 13
IGNORED = 4


def batch(dtype=torch.float32, n=N, v=V):
    generator = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn(n, v, generator=generator)).to(dtype)
    target = torch.randint(0, v, (n,), generator=generator)
    target[1] = IGNORED
    return logits, target


SETTINGS = [
    {"reduction": r, "label_smoothing": s, "ignore_index": i, "weighted": w}
    for r, s, i, w in itertools.product(["mean", "sum", "none"], [0.0, 0.2], [-100, IGNORED], [False, True])
]


def losses(settings, **more):
    settings = dict(settings)
    weight = torch.linspace(0.1, 2, V) if settings.pop("weighted") else None
    return FusedCrossEntropy(weight, **settings, **more), nn.CrossEntropyLoss(weight, **settings)


def value_and_gradient(loss_fn, logits, target):
    leaf = logits.clone().requires_grad_()
    loss = loss_fn(leaf, target)
    scale = torch.linspace(1, 2, loss.numel()).view(loss.shape)
    (gradient,) = torch.autograd.grad((loss.float() * scale).sum(), leaf)
    return loss.detach(), gradient


@pytest.mark.parametrize("settings", SETTINGS)
def test_value_and_gradient_are_those_of_torch(settings):
    ours, reference = losses(settings)
    for a, b in zip(value_and_gradient(ours, *batch()), value_and_gradient(reference, *batch())):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_half_precision_is_computed_in_fp32_with_label_smoothing(dtype, smoothing):
    logits, target = batch(dtype)
    loss, gradient = value_and_gradient(FusedCrossEntropy(label_smoothing=smoothing), logits, target)
    reference, expected = value_and_gradient(nn.CrossEntropyLoss(label_smoothing=smoothing), logits.float(), target)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, reference)
    assert gradient.dtype is dtype
    torch.testing.assert_close(gradient, expected.to(dtype))


def test_any_strides():
    logits, target = batch()
    wide = torch.zeros(N, 2 * V)
    wide[:, ::2] = logits
    for strided in (logits.t().contiguous().t(), wide[:, ::2], logits[:1].expand(N, V)):
        assert not strided.is_contiguous()
        loss, gradient = value_and_gradient(FusedCrossEntropy(), strided, target)
        expected, expected_gradient = value_and_gradient(nn.CrossEntropyLoss(), strided.contiguous(), target)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(gradient, expected_gradient)


def test_a_second_backward_gives_the_same_gradient():
    logits, target = batch()
    logits.requires_grad_()
    loss = FusedCrossEntropy(label_smoothing=0.1)(logits, target)
    first, second = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_the_mean_over_nothing_is_nan_as_in_torch():
    logits, target = batch()
    target.fill_(-100)
    assert FusedCrossEntropy()(logits, target).isnan()
    assert FusedCrossEntropy(reduction="sum")(logits, target) == 0


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="'average' is unknown"):
        FusedCrossEntropy(reduction="average")
    with pytest.raises(ValueError, match="label_smoothing"):
        FusedCrossEntropy(label_smoothing=1.5)


@pytest.mark.parametrize("wrong", [-1, V, 10**6])
def test_a_target_out_of_range_is_refused(wrong):
    logits, target = batch()
    target[3] = wrong
    with pytest.raises(IndexError, match=f"target {wrong} "):
        FusedCrossEntropy()(logits, target)


def test_wrong_shapes_and_dtypes_are_refused():
    logits, target = batch()
    with pytest.raises(ValueError, match=r"not \(N, V\) and \(N,\)"):
        FusedCrossEntropy()(logits, target[:-1])
    with pytest.raises(ValueError, match=r"not \(N, V\) and \(N,\)"):
        FusedCrossEntropy()(logits[None], target)
    with pytest.raises(TypeError, match="indices are integers"):
        FusedCrossEntropy()(logits, target.float())
    with pytest.raises(TypeError, match="logits are floating-point"):
        FusedCrossEntropy()(logits.long(), target)
    with pytest.raises(ValueError, match="weight has shape"):
        FusedCrossEntropy(torch.ones(V + 1))(logits, target)
    torch.testing.assert_close(FusedCrossEntropy()(logits, target.int()), nn.CrossEntropyLoss()(logits, target))


def test_parallel_needs_a_context():
    with pytest.raises(RuntimeError, match="init_distributed"):
        FusedCrossEntropy(parallel=True)(*batch())


@pytest.mark.ranks(1)
def test_parallel_over_one_rank_is_the_plain_loss(ctx):
    for settings in SETTINGS:
        ours, reference = losses(settings, parallel=True)
        for a, b in zip(value_and_gradient(ours, *batch()), value_and_gradient(reference, *batch())):
            torch.testing.assert_close(a, b)


def _check_columns(comm, start, stop):
    for settings in SETTINGS:
        logits, target = batch()
        ours, reference = losses(settings, parallel=True, comm=comm)
        expected, gradient = value_and_gradient(reference, logits, target)
        for _ in range(2):
            loss, mine = value_and_gradient(ours, logits[:, start:stop], target)
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(mine, gradient[:, start:stop])
    leaf = logits[:, start:stop].clone().requires_grad_()
    loss = FusedCrossEntropy(parallel=True, comm=comm)(leaf, target)
    first, second = (torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    target[0] = V
    with pytest.raises(IndexError, match=f"0 to {V - 1}"):
        FusedCrossEntropy(parallel=True, comm=comm)(leaf, target)


@pytest.mark.ranks(2, tp_size=2)
def test_split_over_the_vocabulary_it_is_the_loss_and_gradient_of_one_process(ctx):
    _check_columns(None, *((0, 7) if ctx.tp_rank == 0 else (7, V)))


@pytest.mark.ranks(3, tp_size=3)
def test_parts_of_the_vocabulary_may_differ_in_size_and_be_empty(ctx):
    _check_columns(ctx.tp, *[(0, 9), (9, 9), (9, V)][ctx.tp_rank])


@pytest.mark.ranks(2, tp_size=2)
def test_large_logits_do_not_overflow_when_split(ctx):
    logits, target = batch(torch.float16)
    logits = logits * 1000
    columns = slice(0, 7) if ctx.tp_rank == 0 else slice(7, V)
    loss, gradient = value_and_gradient(FusedCrossEntropy(parallel=True), logits[:, columns], target)
    expected, expected_gradient = value_and_gradient(nn.CrossEntropyLoss(), logits.float(), target)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient[:, columns].half())
