"""Cross entropy is that of torch in double precision, keeps nothing of the logits' size, and every variant agrees."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from bmt_kernels import _native, cross_entropy

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
IGNORED = 1
# Around the 16 lanes and the blocks of 2048 of the CPU kernels and the 128-bit accesses of CUDA's.
WIDTHS = [2, 3, 15, 16, 17, 31, 33, 64, 127, 1000, 2047, 2048, 2065, 6001]
SETTINGS = [
    {"reduction": r, "label_smoothing": s, "ignore_index": i, "weighted": w}
    for r, s, i, w in itertools.product(["mean", "sum", "none"], [0.0, 0.2], [-100, IGNORED], [False, True])
]
# Relative and absolute: one rounding to the dtype, and a little in fp32 before it.
TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-13},
    torch.float32: {"rtol": 3e-6, "atol": 3e-8},
    torch.bfloat16: {"rtol": 1.01 * 2**-8 + 3e-6, "atol": 3e-8},
    torch.float16: {"rtol": 1.01 * 2**-11 + 3e-6, "atol": 6.1e-8},
}


def batch(rows, width, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(rows, width, generator=generator)).to(dtype)
    target = torch.randint(0, width, (rows,), generator=generator)
    target[: min(rows, 3)] = torch.tensor([0, IGNORED, width - 1])[: min(rows, 3)]
    return logits.to(device), target.to(device)


def class_weights(width, device="cpu"):
    return torch.linspace(0.1, 2.0, width).to(device)


def with_gradient(function, logits, target, **options):
    """Loss and gradient, for a different derivative of each row's loss where there are many."""
    leaf = logits.detach().clone().requires_grad_()
    loss = function(leaf, target, **options)
    scale = torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype, device=loss.device).view(loss.shape)
    (gradient,) = torch.autograd.grad((loss * scale).sum(), leaf)
    return loss.detach(), gradient


def in_double(logits, target, weight=None, **options):
    """The same from torch in double precision; the loss and its gradient."""
    return with_gradient(
        F.cross_entropy, logits.double(), target, weight=None if weight is None else weight.double(), **options
    )


def check(logits, target, loss_tolerance=2e-6, **options):
    loss, gradient = with_gradient(cross_entropy, logits, target, **options)
    expected, expected_gradient = in_double(logits, target, **options)
    double = logits.dtype is torch.float64
    assert loss.dtype is (torch.float64 if double else torch.float32)
    assert gradient.dtype is logits.dtype
    loss_tolerance = 1e-12 if double else loss_tolerance
    torch.testing.assert_close(loss.double(), expected, rtol=loss_tolerance, atol=loss_tolerance, equal_nan=True)
    torch.testing.assert_close(gradient.double(), expected_gradient, **TOLERANCE[logits.dtype], equal_nan=True)


class NewStorage(TorchDispatchMode):
    """Lists the size in bytes of every new tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {
            a.untyped_storage()._cdata
            for a in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(a, torch.Tensor)
        }
        results = function(*args, **(kwargs or {}))
        for result in torch.utils._pytree.tree_leaves(results):
            if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata not in given:
                self.sizes.append(result.untyped_storage().nbytes())
        return results


class TestAgainstTorch:
    @pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
    def test_every_setting(self, device, dtype):
        logits, target = batch(7, 37, dtype, device)
        for options in SETTINGS:
            options = dict(options)
            weight = class_weights(37, device) if options.pop("weighted") else None
            check(logits, target, weight=weight, **options)

    def test_smoothing_may_spread_everything(self, device):
        check(*batch(7, 37, device=device), label_smoothing=1.0)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_width_and_alignment(self, device, dtype):
        for width in WIDTHS:
            wide, target = batch(4, width + 9, dtype, device)
            target = target.clamp(max=width - 1)
            check(wide[:, :width], target)
            check(wide[:, 1 : 1 + width], target, label_smoothing=0.1)
            check(wide[:, 3 : 3 + width], target, label_smoothing=0.1, weight=class_weights(width, device))

    def test_rows_of_one_class_and_no_rows_and_no_classes(self, device):
        check(torch.full((3, 1), 5.0, device=device), torch.zeros(3, dtype=torch.int64, device=device))
        for reduction in ("mean", "sum", "none"):
            check(
                torch.zeros(0, 5, device=device), torch.zeros(0, dtype=torch.int64, device=device), reduction=reduction
            )
        assert cross_entropy(torch.zeros(0, 0, device=device), torch.zeros(0, dtype=torch.int64, device=device)).isnan()

    def test_logits_far_from_zero_lose_no_accuracy(self, device):
        logits, target = batch(6, 300, device=device)
        for offset in (-1e4, 1e4, 3e7):
            check(logits + offset, target)
        check(logits * 1e30, target)

    def test_a_wide_spread_of_logits_meets_every_block_in_turn(self, device):
        """The largest logit grows, or falls, from block to block."""
        rising = torch.linspace(-300, 300, 10_000, device=device)
        target = torch.tensor([3, 9_990], device=device)
        check(torch.stack([rising, rising.flip(0)]), target)
        check(torch.stack([rising, rising.flip(0)]), target.flip(0), label_smoothing=0.1, reduction="sum")

    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    def test_infinities_and_nan_do_what_they_do_in_torch(self, device, smoothing):
        logits, target = batch(9, 40, device=device)
        logits[0, 5] = logits[1, 0] = logits[1, 20] = -math.inf  # masked classes
        logits[2, int(target[2])] = -math.inf  # the target among them
        logits[3] = -math.inf
        logits[4, 7] = math.inf
        logits[5, int(target[5])] = math.inf
        logits[6, 33] = math.nan
        logits[7, :39] = -math.inf
        target[7] = 39
        check(logits, target, reduction="none", label_smoothing=smoothing)

    def test_the_exponential_is_within_two_units_in_the_last_place(self, device):
        """With a 0 among logits of at most -35 the gradient is the exponential itself."""
        below = torch.linspace(-35, -110, 300_001)
        logits = torch.cat([torch.zeros(1), below, torch.tensor([-math.inf])])[None].to(device)
        target = torch.zeros(1, dtype=torch.int64, device=device)
        (gradient,) = torch.autograd.grad(cross_entropy(logits.requires_grad_(), target, reduction="sum"), logits)
        exact = logits.detach().double().softmax(dim=1)
        unit = 2.0 ** (exact.log2().floor() - 23).clamp(min=-149)
        assert ((gradient[:, 1:].double() - exact[:, 1:]) / unit[:, 1:]).abs().max() <= 2

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_rows_to_be_ignored_are_not_read(self, device, reduction):
        logits, target = batch(4, 50, device=device)
        target[2] = -100
        logits[2] = math.nan
        loss, gradient = with_gradient(cross_entropy, logits, target, reduction=reduction, label_smoothing=0.1)
        assert not loss.isnan().any()
        assert (gradient[2] == 0).all()
        assert (gradient[[0, 1, 3]] != 0).all()

    def test_the_mean_over_nothing_is_nan_and_its_gradient_zero(self, device):
        logits, target = batch(3, 10, device=device)
        loss, gradient = with_gradient(cross_entropy, logits, torch.full_like(target, -100))
        assert loss.isnan()
        assert (gradient == 0).all()

    def test_any_strides_and_integer_targets(self, device):
        logits, target = batch(5, 33, device=device)
        wide = torch.zeros(5, 66, device=device)
        wide[:, ::2] = logits
        spaced = torch.stack([target, target], dim=1)[:, 0]
        base = wide.clone().requires_grad_()
        ours = torch.autograd.grad(cross_entropy(base[:, ::2], spaced), base)[0]
        theirs = torch.autograd.grad(F.cross_entropy(base[:, ::2], target), base)[0]
        torch.testing.assert_close(ours, theirs, rtol=3e-6, atol=1e-8)
        for strided in (logits.t().contiguous().t(), logits[:1].expand(5, 33), wide[:, 3:36]):
            torch.testing.assert_close(cross_entropy(strided, target.int()), F.cross_entropy(strided, target))


numbers = st.one_of(
    st.floats(-30.0, 30.0, width=32),
    st.sampled_from([0.0, -0.0, -math.inf, 1e-40, -1e4, 1e4, 300.0, math.inf, math.nan]),
)


def bits(tensor):
    """The bits, with all NaN alike."""
    tensor = torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor)
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


class TestEveryVariant:
    @settings(max_examples=60, deadline=None)
    @given(
        pattern=st.lists(numbers, min_size=1, max_size=40),
        width=st.one_of(st.integers(1, 70), st.sampled_from([2047, 2049, 4200])),
        offset=st.integers(0, 5),
        dtype=st.sampled_from(DTYPES),
        smoothing=st.sampled_from([0.0, 0.1]),
        weighted=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def test_has_the_same_bits(self, pattern, width, offset, dtype, smoothing, weighted, seed, places, use_variant):
        noise, target = batch(3, width + offset, seed=seed)
        values = torch.tensor((pattern * (width + offset))[: width + offset])
        noise[0] = values
        noise[1] += values.nan_to_num(posinf=0.0, neginf=0.0)
        logits, target = noise.to(dtype)[:, offset:], target.clamp(max=width - 1)
        weight = class_weights(width) if weighted else None
        results = []
        for place in places:
            if place.device == "cpu" and place.variant != "reference":
                with use_variant(place.variant):
                    options = {"weight": weight, "label_smoothing": smoothing, "reduction": "none"}
                    results.append(with_gradient(cross_entropy, logits, target, **options))
        for loss, gradient in results[1:]:
            assert torch.equal(bits(loss), bits(results[0][0]))
            assert torch.equal(bits(gradient), bits(results[0][1]))

    def test_has_the_same_bits_on_any_number_of_threads(self, device):
        logits, target = batch(67, 4001, device=device)
        before = torch.get_num_threads()
        results = []
        try:
            for threads in (1, 2, 3, 5):
                torch.set_num_threads(threads)
                results.append(with_gradient(cross_entropy, logits, target, label_smoothing=0.1))
        finally:
            torch.set_num_threads(before)
        for loss, gradient in results[1:]:
            assert torch.equal(loss, results[0][0])
            assert torch.equal(gradient, results[0][1])


class TestMemoryAndAutograd:
    def test_forward_keeps_the_logits_themselves_and_little_else(self, device):
        logits, target = batch(16, 500, device=device)
        leaf = logits.clone().requires_grad_()
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            cross_entropy(leaf, target, label_smoothing=0.1)
        assert [t.data_ptr() for t in kept if t.numel() >= leaf.numel()] == [leaf.data_ptr()]
        assert sum(t.numel() for t in kept if t.data_ptr() != leaf.data_ptr()) <= 4 * 16

    def test_forward_makes_nothing_of_the_logits_size_and_backward_one_tensor(self, device):
        if _native.cpu_kernels() is None and _native.cuda_kernels(device) is None:
            pytest.skip("plain PyTorch makes what it needs")
        logits, target = batch(16, 500, torch.bfloat16, device=device)
        leaf = logits.clone().requires_grad_()
        with NewStorage() as forward:
            loss = cross_entropy(leaf, target)
        assert max(forward.sizes) <= 3 * 16 * 4
        with NewStorage() as backward:
            torch.autograd.grad(loss, leaf)
        assert [size for size in backward.sizes if size >= 1000] == [16 * 500 * 2]

    def test_inputs_are_left_alone_and_a_second_backward_is_right(self, device):
        logits, target = batch(6, 77, device=device)
        leaf = logits.clone().requires_grad_()
        loss = cross_entropy(leaf, target, label_smoothing=0.1)
        first, second = (torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, second)
        assert torch.equal(leaf, logits)
        first.zero_()
        assert torch.equal(torch.autograd.grad(loss, leaf)[0], second)

    def test_double_differentiation_is_refused(self, device):
        logits, target = batch(4, 10, device=device)
        leaf = logits.requires_grad_()
        (gradient,) = torch.autograd.grad(cross_entropy(leaf, target), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="cross_entropy can be differentiated only once"):
            gradient.sum().backward()

    def test_changing_what_was_kept_is_noticed(self, device):
        logits, target = batch(4, 10, device=device)
        for change in (lambda x: x.add_(1), lambda x: target.fill_(0)):
            leaf = logits.clone().requires_grad_()
            inner = leaf * 1
            loss = cross_entropy(inner, target)
            change(inner)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


class TestInplaceBackward:
    @pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
    def test_gradient_takes_the_place_of_the_logits(self, device, dtype):
        values, target = batch(6, 2070, dtype, device)
        for weight in (None, class_weights(2070, device)):
            leaf = values.clone().requires_grad_()
            logits = leaf * 1
            seen = []
            logits.register_hook(lambda gradient, seen=seen: seen.append(gradient.data_ptr()))
            loss = cross_entropy(logits, target, weight, label_smoothing=0.1, inplace_backward=True)
            loss.backward()
            plain = values.clone().requires_grad_()
            cross_entropy(plain, target, weight, label_smoothing=0.1).backward()
            assert seen == [logits.data_ptr()]
            assert torch.equal(leaf.grad, plain.grad)
            assert torch.equal(logits, leaf.grad)

    def test_a_second_backward_is_refused(self, device):
        values, target = batch(4, 20, device=device)
        loss = cross_entropy(values.requires_grad_() * 1, target, inplace_backward=True)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="second backward through cross_entropy with inplace_backward=True"):
            loss.backward()

    def test_others_that_need_the_logits_are_told(self, device):
        values, target = batch(4, 20, device=device)
        leaf = values.requires_grad_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            cross_entropy(leaf.tanh(), target, inplace_backward=True).backward()
        logits = leaf * 1
        total = cross_entropy(logits, target) + cross_entropy(logits, target, inplace_backward=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()

    def test_logits_that_cannot_be_overwritten_are_refused(self, device):
        values, target = batch(4, 20, device=device)
        leaf = values.requires_grad_()
        for logits in (leaf, leaf.view(4, 20), leaf[:, :10]):
            with pytest.raises(ValueError, match="logits is a leaf or a view of one"):
                cross_entropy(logits, target.clamp(max=9), inplace_backward=True)
        for logits in ((leaf * 1)[:, ::2], (leaf * 1)[:1].expand(4, 20)):
            with pytest.raises(ValueError, match=r"rows that are contiguous and apart"):
                cross_entropy(logits, target.clamp(max=9), inplace_backward=True)
        cross_entropy(values.detach(), target, inplace_backward=True)


WRONG = {
    "reduction": (lambda x, t: cross_entropy(x, t, reduction="average"), ValueError, "'average' is unknown; choose"),
    "smoothing": (lambda x, t: cross_entropy(x, t, label_smoothing=1.5), ValueError, "label_smoothing=1.5 is not"),
    "logits type": (lambda x, t: cross_entropy([1.0], t), TypeError, "logits is a list"),
    "logits dtype": (lambda x, t: cross_entropy(x.long(), t), TypeError, "logits has dtype torch.int64"),
    "logits shape": (
        lambda x, t: cross_entropy(x[None], t),
        ValueError,
        r"logits of shape \(1, 4, 10\) and .* are not \(N, V\)",
    ),
    "target type": (lambda x, t: cross_entropy(x, 3), TypeError, "target is a int"),
    "target dtype": (lambda x, t: cross_entropy(x, t.float()), TypeError, "class indices are integers"),
    "target shape": (
        lambda x, t: cross_entropy(x, t[:3]),
        ValueError,
        r"target of shape \(3,\) are not \(N, V\) and \(N,\)",
    ),
    "target device": (lambda x, t: cross_entropy(x, t.to("meta")), ValueError, "target is on meta"),
    "weight type": (lambda x, t: cross_entropy(x, t, torch.ones(10).long()), TypeError, "weight is tensor"),
    "weight shape": (lambda x, t: cross_entropy(x, t, torch.ones(11)), ValueError, r"weight has shape \(11,\); 10"),
    "weight device": (lambda x, t: cross_entropy(x, t, torch.ones(10, device="meta")), ValueError, "weight is on meta"),
    "weight gradient": (
        lambda x, t: cross_entropy(x, t, torch.ones(10, device=x.device, requires_grad=True)),
        ValueError,
        r"weight requires a gradient, which is not computed; pass weight.detach\(\)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_call_is_named(device, case):
    call, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        call(*batch(4, 10, device=device))


@pytest.mark.parametrize("wrong", [-1, 10, 10**6, -(2**63)])
def test_a_target_out_of_range_is_refused(device, wrong):
    if device.type == "cuda":
        pytest.skip("the device asserts, and is lost to this process")
    logits, target = batch(4, 10)
    target[3] = wrong
    with pytest.raises(IndexError, match=rf"target {wrong} is neither a class \(0 to 9\) nor ignore_index=-100"):
        cross_entropy(logits, target)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(device, default):
    logits, target = batch(1000, 33, torch.bfloat16, device)
    expected = with_gradient(cross_entropy, logits, target)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        result = with_gradient(cross_entropy, logits, target)
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(result, expected))


def test_meta_tensors_give_shapes():
    logits, target = torch.empty(4, 10, device="meta"), torch.empty(4, dtype=torch.int64, device="meta")
    assert cross_entropy(logits, target, reduction="none").shape == (4,)
