"""Sharded logits give the loss and the gradient of the logical ones, with the same bits on every rank."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from bmt_kernels import cross_entropy, parallel_cross_entropy

V = 37
SPLITS = [(0, V), (0, 20, V), (0, 9, 9, 31, V), (0, 0, V)]
SETTINGS = [
    {"reduction": r, "label_smoothing": s, "weighted": w}
    for r, s, w in itertools.product(["mean", "sum", "none"], [0.0, 0.2], [False, True])
]


def batch(dtype, device):
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(6, V, generator=generator)).to(dtype)
    target = torch.tensor([0, 8, 9, V - 1, -100, 25])
    return logits.to(device), target.to(device)


def on_every_rank(loss_of, split):
    """Results of ``loss_of(start, stop, gather)`` on each rank, all in this process.

    The first round only collects the statistics that the second one gathers.
    """
    statistics = []

    def collect(mine):
        assert mine.is_contiguous()
        statistics.append(mine.clone())
        return mine[None]

    ranges = list(itertools.pairwise(split))
    for start, stop in ranges:
        loss_of(start, stop, collect)
    return [loss_of(start, stop, lambda mine: torch.stack(statistics)) for start, stop in ranges]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_ranks_have_the_loss_and_their_columns_of_the_gradient(device, dtype, split):
    logits, target = batch(dtype, device)
    for settings in SETTINGS:
        options = dict(settings)
        weight = torch.linspace(0.1, 2, V, device=device) if options.pop("weighted") else None

        def loss_of(start, stop, gather, weight=weight, options=options):
            leaf = logits[:, start:stop].clone().requires_grad_()
            loss = parallel_cross_entropy(
                leaf, target, gather, vocab_start=start, vocab_size=V, weight=weight, **options
            )
            return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]

        full = logits.double().requires_grad_()
        expected = F.cross_entropy(full, target, None if weight is None else weight.double(), **options)
        (expected_gradient,) = torch.autograd.grad(expected.sum(), full)
        results = on_every_rank(loss_of, split)
        gradient = torch.cat([columns for _, columns in results], dim=1)
        assert gradient.dtype is dtype
        assert all(torch.equal(loss, results[0][0]) for loss, _ in results)
        torch.testing.assert_close(results[0][0].double(), expected.detach(), rtol=2e-6, atol=2e-6)
        tolerance = 1.01 * 2**-8 if dtype is torch.bfloat16 else 3e-6
        torch.testing.assert_close(gradient.double(), expected_gradient, rtol=tolerance, atol=3e-8)


def test_masked_classes_and_huge_logits(device):
    """A rank that only has masked classes contributes nothing; a rank far below the other neither."""
    logits, target = batch(torch.float32, device)
    logits[:, :20] = -math.inf
    logits[1] += 1e30
    logits[2, 30:] += 1e4
    target[:3] = 31

    def loss_of(start, stop, gather):
        leaf = logits[:, start:stop].clone().requires_grad_()
        loss = parallel_cross_entropy(leaf, target, gather, vocab_start=start, vocab_size=V, reduction="none")
        return loss.detach(), torch.autograd.grad(loss[[0, 1, 2, 3, 5]].sum(), leaf)[0]

    full = logits.double().requires_grad_()
    expected = F.cross_entropy(full, target, reduction="none")
    (gradient,) = torch.autograd.grad(expected[[0, 1, 2, 3, 5]].sum(), full)
    for split in SPLITS:
        results = on_every_rank(loss_of, split)
        torch.testing.assert_close(results[0][0].double(), expected.detach(), rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(torch.cat([g for _, g in results], 1).double(), gradient, rtol=3e-6, atol=3e-8)


def test_one_rank_has_the_bits_of_the_whole(device):
    logits, target = batch(torch.float32, device)
    (loss,) = on_every_rank(
        lambda start, stop, gather: parallel_cross_entropy(logits, target, gather, vocab_start=0, vocab_size=V), (0, V)
    )
    assert torch.equal(loss, cross_entropy(logits, target))


def test_the_collective_is_one_small_one_in_forward_and_none_in_backward(device):
    logits, target = batch(torch.bfloat16, device)
    calls = []

    def gather(mine):
        calls.append((mine.shape, mine.dtype))
        return mine[None]

    for smoothing, kinds in ((0.0, 3), (0.1, 4)):
        leaf = logits.clone().requires_grad_()
        loss = parallel_cross_entropy(
            leaf, target, gather, vocab_start=0, vocab_size=V, label_smoothing=smoothing, inplace_backward=False
        )
        loss.backward()
        assert calls == [((kinds, 6), torch.float32)]
        calls.clear()
    inner = leaf * 1
    parallel_cross_entropy(inner, target, gather, vocab_start=0, vocab_size=V, inplace_backward=True).backward()
    assert torch.equal(inner, torch.autograd.grad(cross_entropy(leaf, target), leaf)[0])


def test_wrong_calls_are_named(device):
    logits, target = batch(torch.float32, device)
    with pytest.raises(ValueError, match=r"logits has 37 classes from vocab_start=3 on, .* vocab_size=39"):
        parallel_cross_entropy(logits, target, lambda s: s[None], vocab_start=3, vocab_size=39)
    with pytest.raises(ValueError, match=r"gather returned \(3, 6\) of torch.float32; .* \(ranks, \*that\)"):
        parallel_cross_entropy(logits, target, lambda s: s, vocab_start=0, vocab_size=V)
    with pytest.raises(
        ValueError, match=r"gather returned a tensor on meta; it must be on (cpu|cuda:0) like the logits"
    ):
        parallel_cross_entropy(logits, target, lambda s: s[None].to("meta"), vocab_start=0, vocab_size=V)
    if device.type == "cpu":
        target[0] = V
        with pytest.raises(IndexError, match="0 to 36"):
            parallel_cross_entropy(logits, target, lambda s: s[None], vocab_start=0, vocab_size=V)


@pytest.mark.parametrize("settings", [SETTINGS[0], SETTINGS[-1]], ids=str)
def test_compiled_into_one_graph_it_is_the_same(settings):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logits, target = batch(torch.float32, device)
    options = dict(settings)
    weight = torch.linspace(0.1, 2, V, device=device) if options.pop("weighted") else None

    def full(x):
        return cross_entropy(x * 2, target, weight, inplace_backward=True, **options)

    def part(x):
        return parallel_cross_entropy(
            x * 2, target, lambda mine: mine[None], vocab_start=0, vocab_size=V, weight=weight, **options
        )

    for function in (full, part):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        results = []
        for run in (function, compiled):
            leaf = logits.clone().requires_grad_()
            loss = run(leaf)
            (gradient,) = torch.autograd.grad(loss.sum(), leaf)
            results.append((loss, gradient))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch 2.14 of its own read
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_registered_operations_hold_what_pytorch_asks_of_them(smoothing):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logits, target = batch(torch.float32, device)
    classes = (target, torch.ones(V, device=device), 0, V, -100, smoothing)
    operations = torch.ops.bmt_kernels
    statistics = operations.cross_entropy_statistics(logits, *classes)
    torch.library.opcheck(operations.cross_entropy_statistics.default, (logits, *classes))
    for reduction in ("mean", "none"):
        leaf = logits.clone().requires_grad_()
        torch.library.opcheck(operations.cross_entropy_loss.default, (leaf, statistics[None], *classes, reduction))
    loss, normalizers, denominator = operations.cross_entropy_loss(logits, statistics[None], *classes, "mean")
    scale = torch.ones_like(loss)
    torch.library.opcheck(
        operations.cross_entropy_gradient.default, (scale, denominator, logits, normalizers, *classes)
    )
