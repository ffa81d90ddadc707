"""Sums of powers follow float64 arithmetic over any mixture of tensors, and notice every infinity and NaN."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import bmt_kernels as bk
from bmt_kernels import PowerSum, _native, power_sum, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
POWERS = [1, 2, math.inf, 3, 0.5]
# Around the vector widths, and around one and two blocks of partial sums (of 16384 elements; 8192 on a GPU).
SIZES = [0, 1, 7, 15, 16, 17, 33, 8191, 8193, 16383, 16384, 16385, 33001]


def exact(tensors, p):
    """In float64, each tensor's elements added up by Python."""
    values = [abs(x) for t in tensors for x in t.cpu().double().flatten().tolist()]
    if any(math.isnan(x) for x in values):
        return math.nan
    if math.isinf(p):
        return max(values, default=0.0)
    return math.inf if math.inf in values else math.fsum(x**p for x in values)


def draw(n, dtype, device, seed=0, offset=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n + offset, generator=generator).to(dtype).to(device)[offset:]


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_counts_once_at_any_size_and_alignment(device, dtype, p):
    for n in SIZES:
        for offset in (0, 1):
            values = draw(n, dtype, device, seed=n, offset=offset)
            found_inf, total = power_sum([values], p)
            assert found_inf == 0.0
            assert float(total) == pytest.approx(exact([values], p), rel=1e-13)


@pytest.mark.parametrize("p", POWERS)
def test_lists_of_all_dtypes_and_more_tensors_than_one_launch_holds(device, p):
    tensors = [draw(i % 40, dtype, device, seed=i) for i, dtype in enumerate(DTYPES * 50)]
    tensors += [draw(20000, dtype, device) for dtype in DTYPES]
    assert float(power_sum(tensors, p).total) == pytest.approx(exact(tensors, p), rel=1e-13)


@settings(max_examples=80, deadline=None)
@given(
    values=st.lists(st.lists(st.floats(width=32), max_size=50), max_size=4),
    dtype=st.sampled_from(DTYPES),
    p=st.sampled_from([1, 2, math.inf, 1.5]),
)
def test_whatever_the_elements_are(values, dtype, p, places, use_variant):
    for place in places:
        tensors = [torch.tensor(v, dtype=torch.float32).to(dtype).to(place.device) for v in values]
        with use_variant(place.variant):
            found_inf, total = power_sum(tensors, p)
        assert float(total) == pytest.approx(exact(tensors, p), rel=1e-13, nan_ok=True)
        assert bool(found_inf) == any(not bool(t.isfinite().all()) for t in tensors)


def test_huge_and_tiny_numbers_neither_overflow_nor_vanish(device):
    huge, tiny = torch.full((40_000,), 1e30, device=device), torch.full((40_000,), 1e-40, device=device)
    for values in (huge, -huge, tiny):
        found_inf, total = power_sum([values])
        assert found_inf == 0.0
        assert float(total) == pytest.approx(40_000 * float(values[0]) ** 2, rel=1e-12)
    assert float(power_sum([tiny], math.inf).total) == float(tiny[0])
    assert float(power_sum([-huge], 1).total) == pytest.approx(40_000 * float(huge[0]), rel=1e-12)


def test_a_power_out_of_range_is_infinite_without_an_infinity_being_found(device):
    values = torch.ones(100, device=device)
    values[50] = 1e38
    found_inf, total = power_sum([values], 10)
    assert total == math.inf
    assert found_inf == 0.0
    values[51] = math.inf
    assert power_sum([values], 10) == (1.0, math.inf)


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_one_bad_element_at_any_place_is_found_and_shows_in_the_total(device, dtype, p):
    for n in (1, 17, 100, 20_000):
        for place in {0, n // 2, n - 1}:
            values = torch.ones(n, dtype=dtype, device=device)
            for bad in (math.inf, -math.inf):
                values[place] = bad
                assert power_sum([values], p) == (1.0, math.inf)
            values[place] = math.nan
            found_inf, total = power_sum([torch.ones(3, device=device), values, values.new_full((5,), math.inf)], p)
            assert found_inf == 1.0
            assert total.isnan()


def test_results_do_not_depend_on_threads_or_variants(use_variant):
    tensors = [draw(n, dtype, "cpu", seed=n) for n in (70_001, 5, 16_384, 99_999) for dtype in DTYPES]
    before = torch.get_num_threads()
    try:
        for p in POWERS:
            results = set()
            for variant in _native.runnable_variants()[1:]:
                for threads in (1, 2, 3, 5):
                    torch.set_num_threads(threads)
                    with use_variant(variant):
                        results.add(float(power_sum(tensors, p).total))
            assert len(results) <= 1
    finally:
        torch.set_num_threads(before)


def test_results_repeat_exactly(device):
    tensors = [draw(n, dtype, device, seed=n) for n in (70_001, 5, 99_999) for dtype in DTYPES]
    assert len({float(power_sum(tensors, 2).total) for _ in range(5)}) == 1


@pytest.mark.parametrize(("p", "expected"), [(2, 9.0 + 16.0), (1, 3.0 + 4.0), (math.inf, 4.0), (3, 27.0 + 64.0)])
def test_out_accumulates(device, p, expected):
    out = power_sum([torch.full((1,), -3.0, device=device)], p)
    assert isinstance(out, PowerSum)
    versions = [t._version for t in out]
    again = power_sum([torch.full((1,), 4.0, device=device)], p, out=out)
    assert again.found_inf is out.found_inf
    assert again.total is out.total
    assert all(t._version > version for t, version in zip(out, versions))
    assert again == (0.0, expected)
    power_sum([torch.full((1,), math.inf, device=device)], p, out=out)
    power_sum([torch.ones(1, device=device)], p, out=out)
    assert out == (1.0, math.inf)
    assert power_sum([torch.ones(3, device=device).fill_(math.nan)], p, out=out).total.isnan()
    assert power_sum([torch.ones(3, device=device)], p, out=out).total.isnan()


def test_results_are_scalars_on_the_device(device):
    found_inf, total = power_sum([torch.zeros(3, device=device)])
    assert (found_inf.dtype, found_inf.shape, found_inf.device.type) == (torch.float32, (), device.type)
    assert (total.dtype, total.shape, total.device.type) == (torch.float64, (), device.type)


def test_of_nothing_the_sum_is_zero(device):
    assert power_sum([]) == (0.0, 0.0)
    assert power_sum([torch.empty(0, 3, device=device)], math.inf) == (0.0, 0.0)
    out = (torch.ones(1, device=device), torch.full((1,), 5.0, dtype=torch.float64, device=device))
    assert power_sum([], out=out) == (1.0, 5.0)


def test_strided_expanded_and_fp64_tensors_count_too(device):
    values = torch.arange(12.0, device=device).view(3, 4)
    tensors = [values.t(), values[:, ::2], values[2, 3].expand(5), values.double() * 1e200]
    assert float(power_sum(tensors[:3]).total) == pytest.approx(exact(tensors[:3], 2), rel=1e-13)
    found_inf, total = power_sum(tensors)
    assert found_inf == 0.0
    assert total == math.inf


@pytest.mark.parametrize("p", [2, math.inf])
def test_agrees_with_the_reference(device, p):
    tensors = [draw(1000, dtype, device) for dtype in DTYPES]
    for ours, theirs in zip(power_sum(tensors, p), reference.power_sum(tensors, p)):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=0)


def test_a_compiled_graph_takes_it_as_one_node(device):
    def norm(tensors, out):
        found_inf, total = power_sum(tensors)
        power_sum(tensors, math.inf, out=out)
        return found_inf + 1.0, total.sqrt()

    tensors = [draw(100, dtype, device) for dtype in DTYPES]
    outs = [(torch.zeros((), device=device), torch.zeros((), dtype=torch.float64, device=device)) for _ in range(2)]
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    assert compiled(tensors, outs[0]) == norm(tensors, outs[1])
    assert outs[0] == outs[1]
    assert outs[0][1] > 0
    torch.library.opcheck(torch.ops.bmt_kernels.power_sum.default, (tensors, 2.0, *outs[0]))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda d: power_sum(torch.zeros(3)), TypeError, r"tensors is a Tensor; pass a list"),
        (lambda d: power_sum([None]), TypeError, r"tensors\[0\] is a NoneType"),
        (lambda d: power_sum([torch.zeros(3, dtype=torch.int32)]), TypeError, r"tensors\[0\] has dtype torch.int32"),
        (
            lambda d: power_sum([torch.zeros(3, device=d), torch.zeros(3, device="meta")]),
            ValueError,
            r"tensors\[1\] is on meta",
        ),
        (lambda d: power_sum([], 0), ValueError, r"norm_type is 0; it must be positive"),
        (lambda d: power_sum([], -math.inf), ValueError, r"norm_type is -inf"),
        (lambda d: power_sum([], math.nan), ValueError, r"norm_type is nan"),
        (lambda d: power_sum([], "2"), TypeError, r"norm_type is a str; it must be a float"),
        (lambda d: power_sum([], out=torch.zeros(2)), TypeError, r"out is a Tensor; it must be a pair"),
        (
            lambda d: power_sum([], out=(torch.zeros(1), torch.zeros(1))),
            TypeError,
            r"out\[1\] has dtype torch.float32; it must be torch.float64",
        ),
        (
            lambda d: power_sum([torch.zeros(1, device=d)], out=(torch.zeros(2, device=d), torch.zeros(1).double())),
            ValueError,
            r"out\[0\] has shape \(2,\)",
        ),
        (
            lambda d: power_sum([torch.zeros(1, device=d)], out=(torch.zeros(1, device="meta"), torch.zeros(1))),
            ValueError,
            r"out\[0\] is on meta",
        ),
    ],
    ids=["tensor", "none", "integers", "devices", "p of 0", "p of -inf", "p of nan", "p of text", "one out", "fp32 out",
         "two flags", "out elsewhere"],
)  # fmt: skip
def test_wrong_call_is_named(device, call, error, message):
    with pytest.raises(error, match=message):
        call(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_square_sums_are_those_of_each_tensor(device, dtype):
    for shapes in ([(3,), (70_001,), (40, 500)], [(), (0, 3), (5, 2)]):
        tensors = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
        tensors[1] = tensors[1].T if tensors[1].dim() == 2 else tensors[1]
        sums = bk.square_sums(tensors)
        expected = torch.stack([t.double().square().sum() for t in tensors]).float()
        torch.testing.assert_close(sums, expected, rtol=2e-7 if device.type == "cpu" else 1e-5, atol=0)
    with pytest.raises(TypeError, match="dtype"):
        bk.square_sums([torch.ones(3, dtype=torch.int32, device=device)])


def test_square_sums_copy_no_tensor_beside_an_empty_one(use_variant):
    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            sizes.append(made.numel() if isinstance(made, torch.Tensor) else 0)
            return made

    sizes: list[int] = []
    full = [draw(n, dtype, "cpu", seed=n) for n in (20_000, 17) for dtype in DTYPES]
    none = torch.empty(0, 3)
    for variant in _native.runnable_variants()[1:]:
        with use_variant(variant):
            expected = bk.square_sums(full)
            with Sizes():
                sums = bk.square_sums([none.T, *full[:2], none, *full[2:], none.half()])
                nothing = bk.square_sums([none, none])
            assert max(sizes) <= len(sums)
        assert torch.equal(sums[[1, 2, 4, 5, 6, 7]], expected)
        assert sums[[0, 3, 8]].tolist() == [0.0] * 3
        assert nothing.tolist() == [0.0, 0.0]
    with pytest.raises(TypeError, match=r"tensors\[1\] has dtype"):
        bk.square_sums([full[0], none.int()])
