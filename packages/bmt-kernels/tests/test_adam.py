"""The Adam step follows torch.optim, and every variant gives the same bits as the reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bmt_kernels
from bmt_kernels import _native, _tables, reference

# Around the vector widths (8 and 16 lanes) and their multiples, and shapes that nothing divides.
SHAPES = [(1,), (7,), (8,), (9,), (15,), (16,), (17,), (31,), (33,), (3, 5, 7), (129, 3), ()]
HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALVES]
SETTINGS = {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
STEPS = 12


def random_list(seed, scale=1.0, dtype=torch.float32, device="cpu", shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) * scale).to(dtype).to(device) for shape in shapes]


def zeros_like(tensors):
    return [torch.zeros_like(t, dtype=torch.float32) for t in tensors]


def clones(tensors):
    return [t.clone() for t in tensors]


def bits(tensor):
    """The bits, with all NaN alike: their payloads are unspecified."""
    tensor = torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor)
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def same_bits(left, right):
    return all(torch.equal(bits(a.cpu()), bits(b.cpu())) for a, b in zip(left, right, strict=True))


def relative_error(start, ours, theirs):
    """Of the update, over all tensors together."""
    error = sum((a.cpu().double() - b.cpu().double()).square().sum() for a, b in zip(ours, theirs))
    size = sum((b.cpu().double() - s.cpu().double()).square().sum() for b, s in zip(theirs, start))
    return float((error / size).sqrt())


def torch_trajectory(start, grads_of_step, dtype, decoupled, maximize=False, settings=SETTINGS):
    """Parameters after steps of torch.optim, without this package's code."""
    params = [p.detach().cpu().to(dtype, copy=True).requires_grad_() for p in start]
    optimizer_class = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = optimizer_class(params, maximize=maximize, foreach=False, **settings)
    for grads in grads_of_step:
        for param, grad in zip(params, grads):
            param.grad = grad.cpu().to(dtype)
        optimizer.step()
    return [p.detach() for p in params]


class TestAgainstTorch:
    @pytest.mark.parametrize("maximize", [False, True])
    @pytest.mark.parametrize("decoupled", [True, False])
    def test_fp32_update_equals_that_of_torch_optim(self, device, decoupled, maximize):
        start = random_list(0, 0.1, device=device)
        grads_of_step = [random_list(10 + step, device=device) for step in range(STEPS)]
        params, exp_avgs, exp_avg_sqs = clones(start), zeros_like(start), zeros_like(start)
        for step, grads in enumerate(grads_of_step, 1):
            scaled = [g * 3.0 for g in grads]
            bmt_kernels.adam_step(
                params,
                scaled,
                exp_avgs,
                exp_avg_sqs,
                step=step,
                grad_scale=3.0,
                decoupled=decoupled,
                maximize=maximize,
                **SETTINGS,
            )
        for dtype in (torch.float64, torch.float32):
            expected = torch_trajectory(start, grads_of_step, dtype, decoupled, maximize)
            assert relative_error(start, params, expected) <= 1e-6

    @pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("dtype", HALVES, ids=str)
    def test_masters_follow_fp64_and_params_are_their_rounded_copies(self, device, dtype, grad_dtype):
        start = random_list(1, 0.1, device=device)
        masters, params = clones(start), [p.to(dtype) for p in start]
        exp_avgs, exp_avg_sqs = zeros_like(start), zeros_like(start)
        grads_of_step = [random_list(20 + step, dtype=grad_dtype, device=device) for step in range(STEPS)]
        for step, grads in enumerate(grads_of_step, 1):
            bmt_kernels.adam_step(params, grads, exp_avgs, exp_avg_sqs, masters=masters, step=step, **SETTINGS)
            assert same_bits(params, [m.to(dtype) for m in masters])
        expected = torch_trajectory(start, grads_of_step, torch.float64, decoupled=True)
        assert relative_error(start, masters, expected) <= 1e-6

    @pytest.mark.parametrize("dtype", HALVES, ids=str)
    def test_half_parameter_without_master_is_computed_in_fp32_and_rounded(self, device, dtype):
        start = random_list(2, dtype=dtype, device=device)
        grads = random_list(3, dtype=dtype, device=device)
        params = clones(start)
        bmt_kernels.adam_step(params, grads, zeros_like(start), zeros_like(start), step=1, **SETTINGS)
        expected = torch_trajectory(start, [grads], torch.float32, decoupled=True)
        # The fp32 results may differ in the last bit, hence the rounded ones rarely by one of theirs.
        for ours, theirs in zip(params, expected):
            torch.testing.assert_close(
                ours.cpu().float(), theirs, rtol=2 ** (-8 if dtype is HALVES[0] else -11), atol=1e-7
            )
        equal = sum(int((a.cpu() == b.to(dtype)).sum()) for a, b in zip(params, expected))
        assert equal >= 0.99 * sum(p.numel() for p in params)

    def test_infinite_and_nan_gradients_do_what_they_do_in_torch(self, device):
        start = [torch.linspace(-1, 1, 40, device=device)]
        grads = [torch.ones(40, device=device)]
        for i, value in enumerate((math.inf, -math.inf, math.nan, 3e38, 0.0, 1e-45)):
            grads[0][7 * i] = value
        params, exp_avgs, exp_avg_sqs = clones(start), zeros_like(start), zeros_like(start)
        bmt_kernels.adam_step(params, grads, exp_avgs, exp_avg_sqs, step=1, **SETTINGS)
        expected = torch_trajectory(start, [grads], torch.float32, decoupled=True)
        torch.testing.assert_close(params[0].cpu(), expected[0], rtol=1e-6, atol=0, equal_nan=True)
        assert params[0][[0, 7, 14]].isnan().all()
        assert exp_avgs[0][0] == math.inf
        assert exp_avgs[0][7] == -math.inf

    def test_subnormal_numbers_are_kept(self, device):
        tiny = torch.full((37,), 1e-39, device=device)
        params, exp_avgs, exp_avg_sqs = [tiny.clone()], [tiny.clone()], [tiny.clone()]
        bmt_kernels.adam_step(
            params,
            [tiny.clone()],
            exp_avgs,
            exp_avg_sqs,
            lr=0.0,
            betas=(0.5, 0.5),
            eps=1.0,
            weight_decay=0.0,
            step=1,
        )
        assert torch.equal(params[0], tiny)
        assert torch.equal(exp_avgs[0], tiny)
        torch.testing.assert_close(exp_avg_sqs[0], tiny / 2, rtol=1e-5, atol=0)


numbers = st.one_of(
    st.floats(-4.0, 4.0, width=32),
    st.sampled_from(
        [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-45, 1e-38, 3e38, 65519.0, 65520.0, 6e-8, 1e-20]
    ),
)


@st.composite
def buffers(draw, count, dtype, positive=False):
    """A buffer of `count` elements somewhere inside a larger one: (whole, offset)."""
    offset = draw(st.integers(0, 9))
    margin = draw(st.integers(0, 9))
    pattern = draw(st.lists(numbers, min_size=1, max_size=12))
    values = (pattern * (offset + count + margin))[: offset + count + margin]
    whole = torch.tensor(values, dtype=torch.float32)
    return (whole.abs() if positive else whole).to(dtype), offset


@st.composite
def cases(draw):
    """A list of tensors of all kinds and the numbers of a step."""
    rows = []
    for _ in range(draw(st.integers(0, 4))):
        count = draw(st.one_of(st.integers(0, 70), st.sampled_from([127, 128, 129, 255, 257])))
        dtype, grad_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
        with_master = dtype is not torch.float32 and draw(st.booleans())
        rows.append(
            {
                "count": count,
                "params": draw(buffers(count, dtype)),
                "grads": draw(buffers(count, grad_dtype)),
                "exp_avgs": draw(buffers(count, torch.float32)),
                "exp_avg_sqs": draw(buffers(count, torch.float32, positive=True)),
                "masters": draw(buffers(count, torch.float32)) if with_master else None,
            }
        )
    step = {
        "lr": draw(st.floats(0.0, 2.0)),
        "betas": (draw(st.floats(0.0, 0.9999)), draw(st.floats(0.0, 0.9999))),
        "eps": draw(st.sampled_from([0.0, 1e-8, 1e-3])),
        "weight_decay": draw(st.sampled_from([0.0, 0.1, 2.0])),
        "step": draw(st.integers(1, 2000)),
        "grad_scale": draw(st.sampled_from([1.0, 3.0, 65536.0, 1e-3])),
        "decoupled": draw(st.booleans()),
        "maximize": draw(st.booleans()),
        "hold_steps": draw(st.sampled_from([0, 5000])),
    }
    return rows, step


def views_of(rows, device):
    """Fresh copies of a case's buffers on `device`: (all whole buffers, the arguments that view them)."""
    wholes, arguments = [], {name: [] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "masters")}
    for row in rows:
        for name, views in arguments.items():
            if row[name] is None:
                views.append(None)
                continue
            whole, offset = row[name]
            whole = whole.clone().to(device)
            wholes.append(whole)
            views.append(whole[offset : offset + row["count"]])
    return wholes, arguments


class TestEveryVariant:
    @settings(max_examples=80, deadline=None)
    @given(case=cases())
    def test_has_the_bits_of_the_reference_and_touches_nothing_else(self, case, places, use_variant):
        rows, step = case
        expected, arguments = views_of(rows, "cpu")
        reference.adam_step(**arguments, **step)
        for place in places:
            wholes, arguments = views_of(rows, place.device)
            with use_variant(place.variant):
                bmt_kernels.adam_step(**arguments, **step)
            assert same_bits(wholes, expected), place

    @pytest.mark.parametrize("eps", [0.0, 1e-8])
    @pytest.mark.parametrize("exponents", [(0, 256), (70, 185)], ids=["all", "usual"])
    def test_quotients_of_all_magnitudes_have_the_bits_of_the_reference(self, device, exponents, eps):
        """On CUDA a thread computes its quotients by other instructions where all magnitudes are usual."""
        count = 1 << (24 if device.type == "cuda" else 16)
        moments = []
        for sign in (2, 1):
            places = torch.randint(*exponents, (count,), dtype=torch.int32) * 2**23
            patterns = places + torch.randint(2**23, (count,), dtype=torch.int32)
            moments.append((patterns - torch.randint(sign, (count,)) * 2**31).to(torch.int32).view(torch.float32))
        results = []
        for module, where in ((reference, "cpu"), (bmt_kernels, device)):
            param = torch.zeros(count, device=where)
            exp_avg, exp_avg_sq = (moment.to(where, copy=True) for moment in moments)
            zeros = torch.zeros(count, device=where)
            module.adam_step(
                [param], [zeros], [exp_avg], [exp_avg_sq], lr=1.0, betas=(0.5, 0.5), eps=eps, weight_decay=0.0, step=1
            )
            results.append([param, exp_avg, exp_avg_sq])
        assert same_bits(*results)

    @settings(max_examples=50, deadline=None)
    @given(case=cases())
    def test_is_handed_the_same_table_by_the_fast_and_the_complete_packing(self, case):
        rows, _ = case
        _, arguments = views_of(rows, "cpu")
        expected = _tables._adam_table_checked(**arguments).rows
        assert _tables.adam_table(**arguments).rows == expected
        try:
            assert _native.configure_reading(allow_exchange=False) != "dlpack"
            assert _tables.adam_table(**arguments).rows == expected
        finally:
            _native.configure_reading()

    def test_gives_the_same_bits_on_any_number_of_threads(self, device):
        shapes = [(70001,), (3,), (64, 1001), (0,), (1,), (99999,)]
        start = random_list(4, shapes=shapes, device=device)
        grads = random_list(5, shapes=shapes, device=device)
        results = []
        before = torch.get_num_threads()
        try:
            for threads in (1, 2, 3, 5):
                torch.set_num_threads(threads)
                params, exp_avgs, exp_avg_sqs = clones(start), zeros_like(start), zeros_like(start)
                bmt_kernels.adam_step(params, grads, exp_avgs, exp_avg_sqs, step=1, **SETTINGS)
                results.append([*params, *exp_avgs, *exp_avg_sqs])
        finally:
            torch.set_num_threads(before)
        wanted = [clones(start), grads, zeros_like(start), zeros_like(start)]
        reference.adam_step(*wanted, step=1, **SETTINGS)
        assert all(same_bits(result, results[0]) for result in results[1:])
        if device.type == "cpu":
            assert same_bits(results[0], [*wanted[0], *wanted[2], *wanted[3]])

    def test_takes_more_tensors_than_one_launch_holds(self, device):
        shapes = [(i % 23 + 1,) for i in range(333)]
        start = random_list(6, shapes=shapes, device=device)
        grads = random_list(7, shapes=shapes, device=device)
        ours = [clones(start), grads, zeros_like(start), zeros_like(start)]
        theirs = [[t.cpu() for t in tensors] for tensors in ours]
        theirs = [clones(theirs[0]), theirs[1], clones(theirs[2]), clones(theirs[3])]
        bmt_kernels.adam_step(*ours, step=3, **SETTINGS)
        reference.adam_step(*theirs, step=3, **SETTINGS)
        for mine, wanted in zip(ours, theirs):
            assert same_bits(mine, wanted)

    def test_takes_tensors_that_are_dense_in_another_order(self, device):
        wide = [torch.randn(5, 7, device=device).t(), torch.randn(2, 3, 4, 5, device=device).permute(0, 2, 3, 1)]
        arguments = [[torch.empty_like(t).normal_() for t in wide] for _ in range(4)]
        assert not arguments[0][0].is_contiguous()
        for exp_avg_sq in arguments[3]:
            exp_avg_sq.abs_()
        expected = [clones(tensors) for tensors in arguments]
        bmt_kernels.adam_step(*arguments, step=2, **SETTINGS)
        reference.adam_step(*expected, step=2, **SETTINGS)
        for mine, wanted in zip(arguments, expected):
            for a, b in zip(mine, wanted):
                torch.testing.assert_close(a, b)


class TestRounding:
    """With a zero gradient and lr = 0 a step does nothing but round the master into the parameter."""

    @staticmethod
    def round_through_step(values, dtype):
        params = [torch.zeros_like(values, dtype=dtype)]
        masters = [values.clone()]
        bmt_kernels.adam_step(
            params,
            zeros_like(params),
            zeros_like(params),
            zeros_like(params),
            masters=masters,
            lr=0.0,
            betas=(0.9, 0.99),
            eps=1.0,
            weight_decay=0.0,
            step=1,
        )
        assert same_bits(masters, [values])
        return params

    @pytest.mark.parametrize(("dtype", "dropped"), [(torch.bfloat16, 16), (torch.float16, 13)], ids=str)
    def test_every_pattern_rounds_to_nearest_even_as_in_torch(self, device, dtype, dropped):
        """All kept bits, with the dropped bits around zero, around the tie and at the top."""
        kept = torch.arange(2 ** (32 - dropped), dtype=torch.int64) << dropped
        tie = 1 << (dropped - 1)
        low = torch.tensor([0, 1, tie - 1, tie, tie + 1, 2 * tie - 1])
        patterns = (kept[:, None] + low).flatten()
        values = torch.where(patterns >= 2**31, patterns - 2**32, patterns).to(torch.int32).view(torch.float32)
        values = values.to(device)
        assert same_bits(self.round_through_step(values, dtype), [values.to(dtype)])

    @pytest.mark.parametrize("dtype", HALVES, ids=str)
    def test_fp16_subnormals_and_limits_round_as_in_torch(self, device, dtype):
        generator = torch.Generator().manual_seed(0)
        exponents = torch.randint(-30, 18, (200_003,), generator=generator).float()
        values = (torch.randn(200_003, generator=generator) * torch.exp2(exponents)).to(device)
        assert same_bits(self.round_through_step(values, dtype), [values.to(dtype)])

    @pytest.mark.parametrize("dtype", HALVES, ids=str)
    def test_every_half_gradient_and_parameter_is_read_as_in_torch(self, device, dtype):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
        params, exp_avgs = [every.clone()], [torch.zeros(every.numel(), device=device)]
        bmt_kernels.adam_step(
            params,
            [every],
            exp_avgs,
            zeros_like(exp_avgs),
            lr=0.0,
            betas=(0.0, 0.99),
            eps=1.0,
            weight_decay=0.0,
            step=1,
        )
        # exp_avg is 0 * 0 + 1 * grad, which loses the sign of zero only.
        assert same_bits(exp_avgs, [every.float() + 0.0])
        finite = every.isfinite()
        # An overflowing v is infinite and the update 0 * (m / inf) = 0; infinite gradients make NaN.
        assert same_bits([params[0][finite]], [every[finite]])


class TestSwitches:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_held_parameters_stay_while_moments_move(self, device, dtype):
        params = random_list(30, dtype=dtype, device=device)
        masters = None if dtype is torch.float32 else [p.float() for p in params]
        grads = random_list(31, device=device)
        held = [clones(params), grads, zeros_like(params), zeros_like(params)]
        moved = [clones(params), grads, zeros_like(params), zeros_like(params)]
        held_masters = None if masters is None else clones(masters)
        versions = [p._version for p in held[0]]
        bmt_kernels.adam_step(*held, masters=held_masters, step=1, hold_steps=1, **SETTINGS)
        bmt_kernels.adam_step(*moved, masters=masters, step=1, **SETTINGS)
        assert same_bits(held[0], params)
        assert [p._version for p in held[0]] == versions
        assert not same_bits(held[0], moved[0])
        assert same_bits(held[2], moved[2])
        assert same_bits(held[3], moved[3])
        if masters is not None:
            assert not same_bits(held_masters, masters)

    @pytest.mark.parametrize("flag", [1.0, -1.0, math.inf, math.nan])
    def test_nothing_changes_where_an_overflow_was_found(self, device, flag):
        params = random_list(32, dtype=torch.bfloat16, device=device)
        arguments = [params, random_list(33, device=device), zeros_like(params), zeros_like(params)]
        masters = [p.float() for p in params]
        before = [clones(tensors) for tensors in (*arguments, masters)]
        found_inf = torch.tensor([flag], device=device)
        bmt_kernels.adam_step(*arguments, masters=masters, step=1, found_inf=found_inf, **SETTINGS)
        for now, then in zip((*arguments, masters), before):
            assert same_bits(now, then)

    def test_a_zero_flag_changes_nothing_about_the_step(self, device):
        start, grads = random_list(34, device=device), random_list(35, device=device)
        plain = [clones(start), grads, zeros_like(start), zeros_like(start)]
        flagged = [clones(start), grads, zeros_like(start), zeros_like(start)]
        bmt_kernels.adam_step(*plain, step=1, **SETTINGS)
        bmt_kernels.adam_step(*flagged, step=1, found_inf=torch.zeros((), device=device), **SETTINGS)
        assert same_bits(plain[0], flagged[0])

    def test_a_power_of_two_gradient_scale_leaves_no_trace(self, device):
        start, grads = random_list(36, device=device), random_list(37, device=device)
        plain = [clones(start), grads, zeros_like(start), zeros_like(start)]
        scaled = [clones(start), [g * 1024 for g in grads], zeros_like(start), zeros_like(start)]
        bmt_kernels.adam_step(*plain, step=1, **SETTINGS)
        bmt_kernels.adam_step(*scaled, step=1, grad_scale=1024.0, **SETTINGS)
        assert same_bits(plain[0], scaled[0])

    def test_masters_may_be_missing_for_some(self, device):
        params = [torch.ones(9, device=device), torch.ones(9, device=device, dtype=torch.bfloat16)]
        grads = [torch.ones(9, device=device), torch.ones(9, device=device)]
        masters = [None, torch.ones(9, device=device)]
        bmt_kernels.adam_step(
            params, grads, zeros_like(params), zeros_like(params), masters=masters, step=1, **SETTINGS
        )
        assert same_bits([params[0]], [masters[1]])
        assert same_bits([params[1]], [masters[1].bfloat16()])

    def test_empty_lists_and_empty_tensors_are_fine(self, device):
        bmt_kernels.adam_step([], [], [], [], step=1, **SETTINGS)
        bmt_kernels.adam_step([], [], [], [], masters=[], step=1, found_inf=torch.zeros(1, device=device), **SETTINGS)
        empty = [[torch.empty(0, 3, device=device)] for _ in range(4)]
        bmt_kernels.adam_step(*empty, step=1, **SETTINGS)


class TestAutograd:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_leaves_that_require_grad_are_updated_and_seen_to_be(self, device, dtype):
        weight = torch.ones(5, device=device, dtype=dtype, requires_grad=True)
        loss = (weight * weight).sum()  # saves weight
        before = weight._version
        masters = None if dtype is torch.float32 else [weight.detach().float()]
        bmt_kernels.adam_step(
            [weight],
            [torch.ones_like(weight)],
            zeros_like([weight]),
            zeros_like([weight]),
            masters=masters,
            step=1,
            **SETTINGS,
        )
        assert weight._version > before
        assert weight.requires_grad
        assert weight.is_leaf
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_subclasses_of_parameter_are_tensors(self, device):
        class Special(torch.nn.Parameter):
            pass

        weight = Special(torch.ones(5, device=device))
        bmt_kernels.adam_step(
            [weight],
            [torch.ones(5, device=device)],
            [torch.zeros(5, device=device)],
            [torch.zeros(5, device=device)],
            step=1,
            **SETTINGS,
        )
        assert (weight < 1).all()


def test_devices_without_kernels_are_served_by_the_reference():
    arguments = [[torch.empty(3, device="meta")] for _ in range(4)]
    bmt_kernels.adam_step(*arguments, step=1, **SETTINGS)
    assert _native.runnable_variants()[0] == "reference"
