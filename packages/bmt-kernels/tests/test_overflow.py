"""The overflow check sees every infinity and NaN, wherever it hides, and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bmt_kernels import has_inf_or_nan

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_half_pattern_and_its_neighbours_in_fp32(device, dtype):
    """One call per class of pattern: none of the finite ones counts, each of the others does."""
    if dtype is torch.float32:
        patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32) * 2**16
        values = torch.cat([patterns, patterns + 1, patterns - 1]).view(torch.float32)
    else:
        values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values.to(device)
    finite = values.isfinite()
    assert has_inf_or_nan([values[finite]]) == 0.0
    for bad in values[~finite][:: max(1, int((~finite).sum()) // 100)]:
        assert has_inf_or_nan([bad.reshape(1)]) == 1.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_one_bad_element_at_any_place_is_seen(device, dtype, bad):
    for count in (1, 7, 16, 33, 100):
        values = torch.zeros(count + 3, dtype=dtype, device=device)
        for offset in (0, 1, 3):
            for place in {0, count // 2, count - 1}:
                view = values[offset : offset + count]
                assert has_inf_or_nan([view]) == 0.0
                view[place] = bad
                assert has_inf_or_nan([view]) == 1.0
                assert has_inf_or_nan([torch.ones(5, device=device, dtype=dtype), view]) == 1.0
                view[place] = 0.0


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_large_lists_are_searched_to_both_ends(device, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tensors = [torch.zeros(n, dtype=d, device=device) for n in (70_001, 0, 5, 99_999) for d in DTYPES]
        assert has_inf_or_nan(tensors) == 0.0
        for tensor in tensors:
            for place in (0, -1) if tensor.numel() else ():
                tensor[place] = math.nan
                assert has_inf_or_nan(tensors) == 1.0
                tensor[place] = 1.0
    finally:
        torch.set_num_threads(before)


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.lists(st.floats(width=32), max_size=40), max_size=4),
    dtype=st.sampled_from(DTYPES),
    offset=st.integers(0, 5),
)
def test_agrees_with_isfinite(values, dtype, offset, places, use_variant):
    for place in places:
        tensors = [torch.tensor(v, dtype=torch.float32, device=place.device).to(dtype)[offset:] for v in values]
        expected = any(not bool(t.isfinite().all()) for t in tensors)
        with use_variant(place.variant):
            assert bool(has_inf_or_nan(tensors)) == expected


def test_result_is_a_float32_scalar_on_the_device(device):
    result = has_inf_or_nan([torch.zeros(3, device=device)])
    assert result.dtype is torch.float32
    assert result.shape == ()
    assert result.device.type == device.type


def test_out_accumulates_and_is_never_reset(device):
    out = torch.zeros(1, device=device)
    good, bad = torch.zeros(20, device=device), torch.full((20,), math.inf, device=device)
    assert has_inf_or_nan([good], out) is out
    assert out == 0.0
    version = out._version
    assert has_inf_or_nan([bad], out) == 1.0
    assert out._version > version
    assert has_inf_or_nan([good], out) == 1.0
    out.fill_(2.0)
    assert has_inf_or_nan([bad], out) == 2.0


def test_nothing_to_search_finds_nothing(device):
    assert has_inf_or_nan([]) == 0.0
    assert has_inf_or_nan([torch.empty(0, device=device)]) == 0.0
    assert has_inf_or_nan([], torch.ones((), device=device)) == 1.0


def test_strided_and_expanded_tensors_are_searched_too(device):
    values = torch.zeros(8, 8, device=device)
    values[3, 4] = math.inf
    assert has_inf_or_nan([values.t()]) == 1.0
    assert has_inf_or_nan([values[:, ::2]]) == 1.0
    assert has_inf_or_nan([values[:, 1::2]]) == 0.0
    assert has_inf_or_nan([values[3, 4].expand(5)]) == 1.0


def test_a_compiled_graph_takes_it_as_one_node(device):
    def search(tensors, out):
        return has_inf_or_nan(tensors) + has_inf_or_nan(tensors[1:], out)

    tensors = [torch.full((5,), math.inf, device=device), torch.zeros(7, device=device)]
    out = torch.zeros((), device=device)
    compiled = torch.compile(search, fullgraph=True, backend="aot_eager")
    assert compiled(tensors, out) == 1.0
    assert out == 0.0
    assert compiled(tensors[::-1], out) == 2.0
    assert out == 1.0
    torch.library.opcheck(torch.ops.bmt_kernels.has_inf_or_nan.default, (tensors, out))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda d: has_inf_or_nan(torch.zeros(3)), TypeError, r"tensors is a Tensor; pass a list"),
        (lambda d: has_inf_or_nan([None]), TypeError, r"tensors\[0\] is a NoneType"),
        (
            lambda d: has_inf_or_nan([torch.zeros(3, dtype=torch.int32)]),
            TypeError,
            r"tensors\[0\] has dtype torch.int32",
        ),
        (
            lambda d: has_inf_or_nan([torch.zeros(3, device=d), torch.zeros(3, device="meta")]),
            ValueError,
            r"tensors\[1\] is on meta",
        ),
        (
            lambda d: has_inf_or_nan([torch.zeros(3, device=d)], torch.zeros(2, device=d)),
            ValueError,
            r"out has shape \(2,\)",
        ),
        (
            lambda d: has_inf_or_nan([torch.zeros(3, device=d)], torch.zeros(1, device=d).double()),
            TypeError,
            r"out has dtype torch.float64",
        ),
        (
            lambda d: has_inf_or_nan([torch.zeros(3, device=d)], torch.zeros(1, device="meta")),
            ValueError,
            r"out is on meta",
        ),
        (lambda d: has_inf_or_nan([torch.zeros(3, device=d)], 0.0), TypeError, r"out is a float"),
    ],
    ids=["tensor", "none", "integers", "devices", "two flags", "fp64 flag", "flag elsewhere", "number flag"],
)
def test_wrong_call_is_named(device, call, error, message):
    with pytest.raises(error, match=message):
        call(device)
