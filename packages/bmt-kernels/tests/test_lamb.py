"""LAMB steps, in two passes, follow the formula in fp64, and every variant gives the reference's bits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bmt_kernels as bk
from bmt_kernels import _lamb_table, _native, reference

# Around the vector widths (8 and 16 lanes) and their multiples, and shapes that nothing divides.
SHAPES = [(1,), (7,), (8,), (9,), (15,), (16,), (17,), (31,), (33,), (3, 5, 7), (129, 3), (), (0, 4)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUMBERS = {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
LR = 0.02


def random_list(seed, dtype=torch.float32, device="cpu", shapes=SHAPES, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) * scale).to(dtype).to(device) for shape in shapes]


def zeros_like(tensors):
    return [torch.zeros_like(t, dtype=torch.float32) for t in tensors]


def clones(tensors):
    return [None if t is None else t.clone() for t in tensors]


def bits(tensor):
    """The bits, with all NaN alike: their payloads are unspecified."""
    tensor = torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor)
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def same_bits(left, right):
    return all(torch.equal(bits(a.cpu()), bits(b.cpu())) for a, b in zip(left, right, strict=True))


def rates_of(sums, lr=LR):
    norms = sums.sqrt()
    return (lr * torch.where((norms > 0).all(dim=1), norms[:, 0] / norms[:, 1], 1)).float()


def formula(params, grads_of_step, bias_correction=True, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1):
    """Parameters after steps by algorithm 2 of arXiv:1904.00962, in fp64."""
    params = [p.cpu().double() for p in params]
    ms, vs = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    for step, grads in enumerate(grads_of_step, 1):
        one, two = ((1 - beta**step) if bias_correction else 1 for beta in betas)
        for p, g, m, v in zip(params, grads, ms, vs):
            g = g.cpu().double()
            m.mul_(betas[0]).add_(g, alpha=1 - betas[0])
            v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
            r = (m / one) / ((v / two).sqrt() + eps) + weight_decay * p
            p.sub_(LR * (p.norm() / r.norm() if p.norm() > 0 and r.norm() > 0 else 1) * r)
    return params


def relative_error(start, ours, theirs):
    """Of the update, over all tensors together."""
    error = sum((a.cpu().double() - b).square().sum() for a, b in zip(ours, theirs))
    size = sum((b - s.cpu().double()).square().sum() for b, s in zip(theirs, start))
    return float((error / size).sqrt())


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
def test_steps_in_fp32_are_the_formula(device, grad_dtype, bias_correction):
    start = random_list(0, device=device)
    params, exp_avgs, exp_avg_sqs = clones(start), zeros_like(start), zeros_like(start)
    grads_of_step = [random_list(10 + i, grad_dtype, device) for i in range(8)]
    for step, grads in enumerate(grads_of_step, 1):
        numbers = {**NUMBERS, "step": step, "bias_correction": bias_correction}
        scaled = [g * 4 for g in grads]
        factor = torch.full((1,), 0.5, device=device)
        sums = bk.lamb_moments(params, scaled, exp_avgs, exp_avg_sqs, grad_scale=2.0, grad_factor=factor, **numbers)
        bk.lamb_update(params, exp_avgs, exp_avg_sqs, rates_of(sums), **numbers)
    expected = {c: formula(start, grads_of_step, c) for c in (True, False)}
    assert relative_error(start, params, expected[bias_correction]) < 2e-6
    assert relative_error(start, params, expected[not bias_correction]) > 1e-2


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_masters_follow_the_formula_and_parameters_are_their_rounded_copies(device, dtype):
    params, grads = random_list(0, dtype, device), random_list(1, dtype, device)
    masters = [p.float() for p in params]
    start = clones(masters)
    exp_avgs, exp_avg_sqs = zeros_like(params), zeros_like(params)
    versions = [t._version for t in (*params, *masters)]
    for step in (1, 2, 3):
        sums = bk.lamb_moments(masters, grads, exp_avgs, exp_avg_sqs, step=step, **NUMBERS)
        bk.lamb_update(params, exp_avgs, exp_avg_sqs, rates_of(sums), step=step, masters=masters, **NUMBERS)
    assert relative_error(start, masters, formula(start, [grads] * 3)) < 2e-6
    assert same_bits(params, [m.to(dtype) for m in masters])
    assert all(t._version > version for t, version in zip((*params, *masters), versions))


def test_the_sums_are_those_of_every_tensor_at_any_size(device):
    # Around one and two blocks of partial sums: of 16384 elements, 8192 on a GPU; and more than one launch holds.
    sizes = [0, 1, 8191, 8193, 16383, 16384, 16385, 33001, *(i % 7 for i in range(70))]
    dtypes = [DTYPES[i % 3] for i in range(len(sizes))]
    shapes = [(n,) for n in sizes]
    params = [p.to(d) for p, d in zip(random_list(0, shapes=shapes, device=device), dtypes)]
    grads = [g.to(d) for g, d in zip(random_list(1, shapes=shapes, device=device), dtypes[1:] + dtypes[:1])]
    exp_avgs, exp_avg_sqs = random_list(2, shapes=shapes, device=device), random_list(3, shapes=shapes, device=device)
    torch._foreach_abs_(exp_avg_sqs)
    before = [clones(tensors) for tensors in (params, grads)]
    sums = bk.lamb_moments(params, grads, exp_avgs, exp_avg_sqs, step=5, **NUMBERS)
    assert same_bits((*params, *grads), (*before[0], *before[1]))
    assert (sums.dtype, sums.shape, sums.device.type) == (torch.float64, (len(sizes), 2), device.type)
    rs = []
    for p, m, v in zip(params, exp_avgs, exp_avg_sqs):
        m, v = m.double() / (1 - 0.9**5), v.double() / (1 - 0.99**5)
        rs.append(m / (v.sqrt() + 1e-6) + 0.1 * p.double())
    expected = torch.stack([torch.stack([p.double().square().sum(), r.square().sum()]) for p, r in zip(params, rs)])
    torch.testing.assert_close(sums[:, 0], expected[:, 0], rtol=2e-7, atol=0)
    torch.testing.assert_close(sums[:, 1], expected[:, 1], rtol=1e-6, atol=0)
    # The r of the update is the one that was summed.
    rates = torch.arange(1.0, len(sizes) + 1, device=device)
    moved = [p.to(torch.float32, copy=True) for p in params]
    bk.lamb_update(moved, exp_avgs, exp_avg_sqs, rates, step=5, **NUMBERS)
    for p, q, r, rate in zip(params, moved, rs, rates):
        torch.testing.assert_close(q.double(), p.double() - rate * r, rtol=1e-5, atol=1e-5)


def test_results_do_not_depend_on_threads_or_variants(use_variant):
    shapes = [(70_001,), (5,), (16_384,), (0,), (99_999,)]
    grads = random_list(1, torch.bfloat16, shapes=shapes)
    before = torch.get_num_threads()
    results = []
    try:
        for variant in _native.runnable_variants()[1:]:
            for threads in (1, 2, 3, 5):
                torch.set_num_threads(threads)
                params, m, v = random_list(0, shapes=shapes), zeros_like(grads), zeros_like(grads)
                with use_variant(variant):
                    sums = bk.lamb_moments(params, grads, m, v, step=1, **NUMBERS)
                    bk.lamb_update(params, m, v, rates_of(sums), step=1, **NUMBERS)
                results.append([sums, *params, *m, *v])
    finally:
        torch.set_num_threads(before)
    assert all(same_bits(result, results[0]) for result in results[1:])


def test_results_repeat_exactly(device):
    shapes = [(70_001,), (5,), (99_999,)]
    params, grads = random_list(0, shapes=shapes, device=device), random_list(1, shapes=shapes, device=device)
    sums = [bk.lamb_moments(params, grads, zeros_like(grads), zeros_like(grads), step=1, **NUMBERS) for _ in range(4)]
    assert all(torch.equal(each, sums[0]) for each in sums[1:])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_copies_of_many_masters_are_right_at_any_alignment(device, dtype):
    """Copies of that many elements are stored past the caches."""
    n = 2_100_003
    whole, master = torch.zeros(n + 9, dtype=dtype, device=device), torch.linspace(-2, 2, n, device=device)
    for offset in (0, 3):
        params, masters = [whole[offset : offset + n]], [master.clone()]
        m, v = torch.full_like(master, 0.5), torch.full_like(master, 0.25)
        rates = torch.full((1,), 1e-3, device=device)
        bk.lamb_update(params, [m], [v], rates, step=1, masters=masters, **NUMBERS)
        assert same_bits(params, [masters[0].to(dtype)])
        assert not torch.equal(masters[0], master)
        assert float(whole[offset + n :].abs().max()) == 0


numbers = st.one_of(
    st.floats(-4.0, 4.0, width=32),
    st.sampled_from(
        [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-45, 1e-38, 3e38, 65519.0, 65520.0, 6e-8, 1e-20]
    ),
)


@st.composite
def buffers(draw, count, dtype, positive=False):
    """A buffer of `count` elements somewhere inside a larger one: (whole, offset)."""
    offset, margin = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    pattern = draw(st.lists(numbers, min_size=1, max_size=12))
    values = (pattern * (offset + count + margin))[: offset + count + margin]
    whole = torch.tensor(values, dtype=torch.float32)
    return (whole.abs() if positive else whole).to(dtype), offset


@st.composite
def cases(draw):
    """A list of tensors of all kinds and the numbers of a step."""
    rows = []
    for _ in range(draw(st.integers(0, 4))):
        count = draw(st.one_of(st.integers(0, 70), st.sampled_from([127, 128, 129, 257])))
        dtype = draw(st.sampled_from(DTYPES))
        with_master = dtype is not torch.float32 and draw(st.booleans())
        rows.append(
            {
                "count": count,
                "params": draw(buffers(count, dtype)),
                "grads": draw(buffers(count, draw(st.sampled_from(DTYPES)))),
                "exp_avgs": draw(buffers(count, torch.float32)),
                "exp_avg_sqs": draw(buffers(count, torch.float32, positive=True)),
                "masters": draw(buffers(count, torch.float32)) if with_master else None,
            }
        )
    step = {
        "betas": (draw(st.floats(0.0, 0.9999)), draw(st.floats(0.0, 0.9999))),
        "eps": draw(st.sampled_from([0.0, 1e-8, 1e-3])),
        "weight_decay": draw(st.sampled_from([0.0, 0.1, 2.0])),
        "step": draw(st.integers(1, 2000)),
        "bias_correction": draw(st.booleans()),
    }
    return rows, step, draw(st.sampled_from([1.0, 3.0, 65536.0, 1e-3])), draw(st.sampled_from([0.0, 0.01, math.inf]))


def views_of(rows, device):
    """Fresh copies of a case's buffers on `device`: (all whole buffers, the lists of tensors that view them)."""
    wholes, lists = [], {name: [] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "masters")}
    for row in rows:
        for name, views in lists.items():
            if row[name] is None:
                views.append(None)
                continue
            whole, offset = row[name]
            whole = whole.clone().to(device)
            wholes.append(whole)
            views.append(whole[offset : offset + row["count"]])
    return wholes, lists


def weights_of(lists):
    return [p if w is None else w for p, w in zip(lists["params"], lists["masters"])]


@settings(max_examples=80, deadline=None)
@given(case=cases())
def test_every_variant_has_the_bits_of_the_reference_and_touches_nothing_else(case, places, use_variant):
    rows, step, scale, rate = case

    def run(module, device):
        wholes, lists = views_of(rows, device)
        moments = lists["exp_avgs"], lists["exp_avg_sqs"]
        arguments = (weights_of(lists), lists["grads"], *moments)
        if module is reference:
            sums = torch.zeros(len(rows), 2, dtype=torch.float64)
            module.lamb_moments(*arguments, sums, grad_scale=scale, **step)
        else:
            sums = module.lamb_moments(*arguments, grad_scale=scale, **step)
        middle = clones(wholes)
        rates = torch.full((len(rows),), rate, device=device)
        module.lamb_update(lists["params"], *moments, rates, masters=lists["masters"], **step)
        return sums, [*middle, *wholes]

    sums, expected = run(reference, "cpu")
    for place in places:
        with use_variant(place.variant):
            result, tensors = run(bk, place.device)
        assert same_bits(tensors, expected), place
        # Squares are added in fp32 at first, which has an end.
        torch.testing.assert_close(result.cpu().float(), sums.float(), rtol=2e-6, atol=1e-37, equal_nan=True)


@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_the_fast_and_the_complete_packing_hand_over_the_same_table(case):
    _, lists = views_of(case[0], "cpu")
    moments = lists["exp_avgs"], lists["exp_avg_sqs"]
    for arguments in (
        (weights_of(lists), lists["grads"], *moments, None),
        (lists["params"], None, *moments, lists["masters"]),
    ):
        expected = _lamb_table._lamb_table_checked(*arguments).rows
        assert _lamb_table.lamb_table(*arguments).rows == expected
        try:
            assert _native.configure_reading(allow_exchange=False) != "dlpack"
            assert _lamb_table.lamb_table(*arguments).rows == expected
        finally:
            _native.configure_reading()


def test_tensors_that_are_dense_in_another_order(device):
    params, grads, m, v = (
        [torch.randn(5, 7, device=device).t(), torch.randn(2, 3, 4, 5, device=device).permute(0, 2, 3, 1)]
        for _ in range(4)
    )
    torch._foreach_abs_(v)
    plain = [[t.contiguous() for t in tensors] for tensors in (params, grads, m, v)]
    for p, g, one, two in ((params, grads, m, v), plain):
        sums = bk.lamb_moments(p, g, one, two, step=2, **NUMBERS)
        bk.lamb_update(p, one, two, rates_of(sums), step=2, **NUMBERS)
    for ours, theirs in zip((params, m, v), (plain[0], plain[2], plain[3])):
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b)


def test_nothing_is_fine(device):
    assert bk.lamb_moments([], [], [], [], step=1, **NUMBERS).shape == (0, 2)
    bk.lamb_update([], [], [], torch.zeros(0), step=1, **NUMBERS)
    empty = [torch.empty(0, 3, device=device)]
    sums = bk.lamb_moments(empty, empty, clones(empty), clones(empty), step=1, **NUMBERS)
    assert sums.tolist() == [[0.0, 0.0]]
    bk.lamb_update(empty, clones(empty), clones(empty), torch.ones(1, device=device), step=1, **NUMBERS)


def test_leaves_that_require_grad_are_seen_to_be_updated(device):
    weight = torch.ones(5, device=device, requires_grad=True)
    loss = (weight * weight).sum()  # saves weight
    moments = [torch.ones(5, device=device)], [torch.ones(5, device=device)]
    before = weight._version
    bk.lamb_moments([weight], [torch.ones(5, device=device)], *moments, step=1, **NUMBERS)
    assert weight._version == before
    bk.lamb_update([weight], *moments, torch.ones(1, device=device), step=1, **NUMBERS)
    assert weight.is_leaf
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_compiled_graph_takes_each_pass_as_one_node(device):
    def step(params, grads, m, v, masters, factor):
        weights = [p if w is None else w for p, w in zip(params, masters)]
        sums = bk.lamb_moments(weights, grads, m, v, step=3, grad_factor=factor, **NUMBERS)
        rates = 0.1 * (sums[:, 0] / sums[:, 1]).sqrt().float()
        bk.lamb_update(params, m, v, rates, step=3, masters=masters, **NUMBERS)
        return sums

    def arguments():
        params = [torch.ones(9, device=device), torch.ones(7, device=device, dtype=torch.bfloat16)]
        grads, m, v = ([torch.full_like(p, x, dtype=torch.float32) for p in params] for x in (0.5, 0.25, 1.0))
        return params, grads, m, v, [None, torch.ones(7, device=device)], torch.full((), 0.5, device=device)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    ours, theirs = arguments(), arguments()
    assert torch.equal(compiled(*ours), step(*theirs))
    for a, b in zip(ours[:4], theirs[:4]):
        assert same_bits(a, b)
    assert not torch.equal(ours[0][0], torch.ones(9, device=device))
    params, grads, m, v, masters, factor = arguments()
    numbers = {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, "step": 3, "bias_correction": True}
    scale = {"grad_scale": 1.0, "grad_factor": factor}
    torch.library.opcheck(torch.ops.bmt_kernels.lamb_moments.default, (params, grads, m, v), {**numbers, **scale})
    lists, present = (params, m, v, torch.ones(2, device=device)), {"masters": masters[1:], "mastered": [1]}
    torch.library.opcheck(torch.ops.bmt_kernels.lamb_update.default, lists, {**numbers, **present})


def test_devices_without_kernels_are_served_by_the_reference():
    lists = [[torch.empty(3, device="meta")] for _ in range(4)]
    assert bk.lamb_moments(*lists, step=1, **NUMBERS).shape == (1, 2)
    bk.lamb_update(lists[0], *lists[2:], torch.empty(1, device="meta"), step=1, **NUMBERS)


def good_call():
    params = [torch.ones(3, 4), torch.ones(5).bfloat16()]
    lists = {name: [torch.ones(3, 4), torch.ones(5)] for name in ("grads", "exp_avgs", "exp_avg_sqs")}
    return {"params": params, **lists, "step": 1, **NUMBERS}


BOTH = {
    "tensor for a list": ({"params": torch.ones(3)}, TypeError, r"params is a Tensor; pass a list"),
    "none": ({"params": [None, None]}, TypeError, r"params\[0\] is a NoneType"),
    "no moments": ({"exp_avgs": None}, TypeError, r"exp_avgs is a NoneType; pass a list"),
    "length": ({"exp_avgs": [torch.ones(3, 4)]}, ValueError, r"exp_avgs has 1 entries and params has 2"),
    "shape": ({"exp_avg_sqs": [torch.ones(3, 4)] * 2}, ValueError, r"exp_avg_sqs\[1\] has shape \(3, 4\)"),
    "fp64 params": ({"params": [torch.ones(3, 4).double()] * 2}, TypeError, r"params\[0\] has dtype torch.float64"),
    "half moments": ({"exp_avgs": [torch.ones(3, 4).half()] * 2}, TypeError, r"exp_avgs\[0\] has dtype torch.float16"),
    "device": ({"exp_avgs": [torch.ones(3, 4, device="meta")] * 2}, ValueError, r"exp_avgs\[0\] is on meta"),
    "strides": ({"exp_avgs": [torch.ones(4, 3).t(), torch.ones(5)]}, ValueError, r"exp_avgs\[0\] has strides"),
    "betas": ({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\] is 1.0"),
    "eps": ({"eps": -1.0}, ValueError, r"eps is -1.0"),
    "decay": ({"weight_decay": math.nan}, ValueError, r"weight_decay is nan"),
    "step": ({"step": 0}, ValueError, r"step is 0; steps count from 1"),
    "step type": ({"step": 1.0}, TypeError, r"step is a float"),
    "correction": ({"bias_correction": "moments"}, TypeError, r"bias_correction is a str"),
}
MOMENTS = {
    "no grads": ({"grads": None}, TypeError, r"grads is a NoneType; pass a list"),
    "grads": ({"grads": [torch.ones(3, 4).int()] * 2}, TypeError, r"grads\[0\] has dtype torch.int32"),
    "scale": ({"grad_scale": 0.0}, ValueError, r"grad_scale is 0.0; it must be finite and positive"),
    "factor": ({"grad_factor": torch.ones(2)}, ValueError, r"grad_factor has shape \(2,\)"),
}
UPDATE = {
    "number for rates": ({"rates": 0.1}, TypeError, r"rates is a float"),
    "rates": ({"rates": torch.ones(3)}, ValueError, r"rates has shape \(3,\); it must be \(2,\)"),
    "fp64 rates": ({"rates": torch.ones(2).double()}, TypeError, r"rates has dtype torch.float64"),
    "rates elsewhere": (
        {"rates": torch.ones(2, device="meta")},
        ValueError,
        r"rates is on meta; it must be on cpu like the parameters",
    ),
    "needless master": ({"masters": [torch.ones(3, 4), None]}, TypeError, r"masters\[0\] belongs to a float32"),
    "half master": ({"masters": [None, torch.ones(5).half()]}, TypeError, r"masters\[1\] has dtype torch.float16"),
}


@pytest.mark.parametrize(("change", "error", "message"), [*BOTH.values(), *MOMENTS.values()], ids=[*BOTH, *MOMENTS])
def test_wrong_first_passes_are_named_and_change_nothing(change, error, message):
    arguments, before = {**good_call(), **change}, good_call()
    with pytest.raises(error, match=message):
        bk.lamb_moments(**arguments)
    for name in {"exp_avgs", "exp_avg_sqs"} - set(change):
        assert same_bits(arguments[name], before[name])


@pytest.mark.parametrize(("change", "error", "message"), [*BOTH.values(), *UPDATE.values()], ids=[*BOTH, *UPDATE])
def test_wrong_second_passes_are_named_and_change_nothing(change, error, message):
    arguments, before = {"rates": torch.ones(2), **good_call(), **change}, good_call()
    del arguments["grads"]
    with pytest.raises(error, match=message):
        bk.lamb_update(**arguments)
    if "params" not in change:
        assert same_bits(arguments["params"], before["params"])


def test_overlaps_with_what_is_written_are_found():
    whole = torch.ones(20)
    one, two = whole[:12].view(3, 4), whole[8:].view(3, 4)
    for name, other in (("exp_avgs", "params"), ("exp_avgs", "grads"), ("exp_avg_sqs", "exp_avgs")):
        arguments = good_call()
        arguments[name][0], arguments[other][0] = one, two
        with pytest.raises(ValueError, match="overlaps"):
            bk.lamb_moments(**arguments)
    arguments = good_call()
    arguments["params"][0], arguments["exp_avgs"][0] = one, two
    del arguments["grads"]
    with pytest.raises(ValueError, match="overlaps"):
        bk.lamb_update(**arguments, rates=torch.ones(2))
    # What is only read may be anything.
    arguments = good_call()
    arguments["params"][0], arguments["grads"][0] = one, two
    bk.lamb_moments(**arguments)
