import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

from bmt_tp import OpLinear

LEADING = [(), (5,), (2, 3), (2, 1, 3), (0,), (2, 0)]
# Relative to the largest gradient: a few roundings of the dtype.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def tensors(leading, dtype, with_bias=True):
    torch.manual_seed(0)
    x = torch.randn(*leading, 7, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, 7, dtype=dtype, requires_grad=True)
    bias = torch.randn(4, dtype=dtype, requires_grad=True) if with_bias else None
    return x, weight, bias


def gradients(function, inputs):
    inputs = [None if t is None else t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    y = function(*inputs)
    (y * torch.arange(1, 5, dtype=y.dtype)).sum().backward()
    return y, [None if t is None else t.grad for t in inputs]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("leading", LEADING, ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_output_and_gradients_are_those_of_linear_in_double_precision(leading, dtype, with_bias):
    inputs = tensors(leading, dtype, with_bias)
    y, grads = gradients(OpLinear.apply, inputs)
    reference = [None if t is None else t.detach().double().requires_grad_() for t in inputs]
    expected_y, expected = gradients(F.linear, reference)
    assert y.dtype == dtype
    assert y.shape == expected_y.shape
    for got, want in [(y, expected_y), *zip(grads, expected, strict=True)]:
        if want is None:
            assert got is None
            continue
        assert got.dtype == dtype
        assert got.shape == want.shape
        scale = want.abs().max() if want.numel() else torch.tensor(1.0)
        assert not want.numel() or (got.double() - want).abs().max() <= TOLERANCE[dtype] * scale


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_first_and_second_gradients_agree_with_differences(leading, with_bias):
    inputs = tensors(leading, torch.float64, with_bias)
    assert gradcheck(OpLinear.apply, inputs)
    assert gradgradcheck(OpLinear.apply, inputs)


def test_the_bias_may_be_left_out():
    x, weight, _ = tensors((3,), torch.float32)
    y = OpLinear.apply(x, weight)
    y.sum().backward()
    torch.testing.assert_close(y, F.linear(x, weight))
    torch.testing.assert_close(weight.grad, x.detach().sum(0).expand(4, 7))


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_frozen_input_gets_no_gradient_and_changes_no_other(frozen):
    inputs = tensors((5,), torch.float32)
    _, expected = gradients(F.linear, inputs)
    inputs[frozen].requires_grad_(False)
    _, grads = gradients(OpLinear.apply, inputs)
    assert grads[frozen] is None
    for i in {0, 1, 2} - {frozen}:
        torch.testing.assert_close(grads[i], expected[i])


@pytest.mark.parametrize(("frozen", "needed"), [(0, 0), (1, 1)], ids=["input", "weight"])
def test_only_what_backward_needs_is_kept_and_nothing_is_copied(frozen, needed):
    inputs = tensors((5,), torch.float32)
    inputs[frozen].requires_grad_(False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        OpLinear.apply(*inputs)
    assert kept == [inputs[needed].data_ptr()]  # the weight's gradient needs x, and that of x the weight


def test_strided_inputs_give_the_same_gradients():
    torch.manual_seed(0)
    x = torch.randn(7, 3, 2).permute(2, 1, 0).requires_grad_()
    weight = torch.randn(7, 4).t().requires_grad_()
    _, expected = gradients(F.linear, (x, weight, None))
    _, grads = gradients(OpLinear.apply, (x, weight, None))
    torch.testing.assert_close(grads[0], expected[0])
    torch.testing.assert_close(grads[1], expected[1])


def test_under_autocast_it_computes_what_linear_computes():
    inputs = tensors((5,), torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, grads = gradients(OpLinear.apply, inputs)
        expected_y, expected = gradients(F.linear, inputs)
    assert y.dtype == expected_y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected_y)
    for got, want in zip(grads, expected, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((3, 7), (7,), None), r"weight has shape \(7,\); a matrix"),
        (((3, 6), (4, 7), None), r"x has shape \(3, 6\); a weight of shape \(4, 7\) takes \(\*, 7\)"),
        (((), (4, 7), None), r"x has shape \(\)"),
        (((3, 7), (4, 7), (1,)), r"bias has shape \(1,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes, message):
    with pytest.raises(ValueError, match=message):
        OpLinear.apply(*[None if shape is None else torch.zeros(shape) for shape in shapes])
