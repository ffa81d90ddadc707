"""The 8-bit Adam step is the fp32 step between dequantising and quantising, in every variant, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bmt_kernels import (
    _adam8bit_table,
    _native,
    adam8bit_step,
    adam_step,
    dequantize_blockwise,
    quantize_blockwise,
    reference,
)

HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALVES]
SETTINGS = {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
STATES = ("exp_avgs", "exp_avg_sqs", "absmax_avgs", "absmax_avg_sqs")
NAMES = ("params", "grads", *STATES, "masters")
SIZES = (1, 15, 16, 17, 255, 256, 257, 1000)


def same(left, right):
    """Equal bits, with all NaN alike."""
    left, right = left.cpu().float(), right.cpu().float()
    return bool(((left.isnan() & right.isnan()) | (left.view(torch.int32) == right.view(torch.int32))).all())


def lists(rows, device="cpu"):
    """Fresh copies of rows of tensors as the arguments of a step."""
    return {name: [None if row[name] is None else row[name].clone().to(device) for row in rows] for name in NAMES}


def new_state(numel, offset=0, device="cpu"):
    blocks = -(-(numel + offset) // 256) if numel else 0
    return {
        "exp_avgs": torch.full((numel,), 127, dtype=torch.uint8, device=device),
        "exp_avg_sqs": torch.zeros(numel, dtype=torch.uint8, device=device),
        "absmax_avgs": torch.zeros(blocks, device=device),
        "absmax_avg_sqs": torch.zeros(blocks, device=device),
    }


def row(numel, offset=0, dtype=torch.float32, grad_dtype=torch.float32, master=False, seed=0, device="cpu"):
    """A parameter with a state as after some steps."""
    generator = torch.Generator().manual_seed(seed)
    param = torch.randn(numel, generator=generator).to(dtype)
    exp_avg, absmax_avg = quantize_blockwise(torch.randn(numel, generator=generator) * 0.1, block_offset=offset)
    second = torch.rand(numel, generator=generator) * 0.01
    exp_avg_sq, absmax_avg_sq = quantize_blockwise(second, signed=False, block_offset=offset)
    result = {
        "params": param,
        "grads": torch.randn(numel, generator=generator).to(grad_dtype),
        "exp_avgs": exp_avg,
        "exp_avg_sqs": exp_avg_sq,
        "absmax_avgs": absmax_avg,
        "absmax_avg_sqs": absmax_avg_sq,
        "masters": param.float() if master else None,
    }
    return {name: None if tensor is None else tensor.to(device) for name, tensor in result.items()}


class TestOneStep:
    @pytest.mark.parametrize("decoupled", [True, False])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_is_the_fp32_step_on_dequantised_moments(self, device, dtype, decoupled):
        offsets = [0, 1, 200, 255, 0, 3, 0, 77]
        master = dtype is not torch.float32
        rows = [row(n, o, dtype, torch.bfloat16, master, seed=n) for n, o in zip(SIZES, offsets)]
        ours, theirs = lists(rows, device), lists(rows, device)
        options = {**SETTINGS, "step": 7, "grad_scale": 4.0, "decoupled": decoupled}
        moments, moments_sq = [], []
        for i, offset in enumerate(offsets):
            for into, codes, absmax, signed in (
                (moments, "exp_avgs", "absmax_avgs", True),
                (moments_sq, "exp_avg_sqs", "absmax_avg_sqs", False),
            ):
                into.append(
                    dequantize_blockwise(theirs[codes][i], theirs[absmax][i], signed=signed, block_offset=offset)
                )
        masters = theirs["masters"] if master else None
        adam_step(theirs["params"], theirs["grads"], moments, moments_sq, masters=masters, **options)
        adam8bit_step(**ours, **options, block_offsets=offsets)
        for i, offset in enumerate(offsets):
            assert same(ours["params"][i], theirs["params"][i])
            if master:
                assert same(ours["masters"][i], theirs["masters"][i])
            codes, absmax = quantize_blockwise(moments[i], block_offset=offset)
            assert torch.equal(ours["exp_avgs"][i], codes)
            assert torch.equal(ours["absmax_avgs"][i], absmax)
            codes, absmax = quantize_blockwise(moments_sq[i], signed=False, block_offset=offset)
            assert torch.equal(ours["exp_avg_sqs"][i], codes)
            assert torch.equal(ours["absmax_avg_sqs"][i], absmax)

    def test_the_first_is_that_of_torch(self, device):
        """From zero moments nothing is lost to quantisation yet: the update uses the exact new moments."""
        start, grad = torch.randn(1000), torch.randn(1000)
        theirs = start.double().requires_grad_()
        theirs.grad = grad.double()
        torch.optim.AdamW([theirs], **SETTINGS).step()
        ours = start.to(device)
        state = {name: [tensor] for name, tensor in new_state(1000, device=device).items()}
        adam8bit_step([ours], [grad.to(device)], **state, step=1, **SETTINGS)
        torch.testing.assert_close(ours.cpu().double(), theirs.detach(), rtol=1e-6, atol=1e-7)

    def test_minimises_nearly_as_fast_as_with_fp32_moments(self, device):
        generator = torch.Generator().manual_seed(0)
        target = torch.randn(2000, generator=generator).to(device)
        ends = []
        for eight_bits in (True, False):
            weight = torch.zeros_like(target)
            small = {name: [tensor] for name, tensor in new_state(2000, device=device).items()}
            large = [torch.zeros_like(target)], [torch.zeros_like(target)]
            for step in range(1, 61):
                grads = [weight - target]
                options = {"step": step, **SETTINGS, "weight_decay": 0.0}
                if eight_bits:
                    adam8bit_step([weight], grads, **small, **options)
                else:
                    adam_step([weight], grads, *large, **options)
            ends.append(float((weight - target).square().mean()))
        assert ends[0] <= 1.3 * ends[1]
        assert ends[1] < 0.1


@st.composite
def cases(draw):
    rows, offsets = [], []
    for i in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(DTYPES))
        master = dtype is not torch.float32 and draw(st.booleans())
        offsets.append(draw(st.sampled_from([0, 0, 1, 100, 255])))
        numel = draw(st.sampled_from([0, *SIZES]))
        rows.append(row(numel, offsets[-1], dtype, draw(st.sampled_from(DTYPES)), master, seed=i))
        if numel:
            special = draw(st.sampled_from([None, 0.0, math.inf, math.nan, 1e-40, 3e38]))
            if special is not None:
                rows[-1]["grads"][draw(st.integers(0, numel - 1))] = torch.tensor(special)
            rows[-1]["grads"] *= draw(st.sampled_from([1.0, 0.0, 1e-20, 1e4]))
    step = {
        "lr": draw(st.floats(0.0, 2.0)),
        "betas": (draw(st.floats(0.0, 0.9999)), draw(st.floats(0.0, 0.9999))),
        "eps": draw(st.sampled_from([0.0, 1e-8])),
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
        "step": draw(st.integers(1, 2000)),
        "grad_scale": draw(st.sampled_from([1.0, 3.0, 65536.0])),
        "decoupled": draw(st.booleans()),
        "maximize": draw(st.booleans()),
        "hold_steps": draw(st.sampled_from([0, 10**6])),
        "block_offsets": offsets,
    }
    return rows, step


class TestEveryVariant:
    @settings(max_examples=60, deadline=None)
    @given(case=cases())
    def test_has_the_bits_of_the_reference(self, case, places, use_variant):
        rows, step = case
        expected = lists(rows)
        reference.adam8bit_step(**expected, **step)
        for place in places:
            ours = lists(rows, place.device)
            with use_variant(place.variant):
                adam8bit_step(**ours, **step)
            for name in NAMES:
                for mine, wanted in zip(ours[name], expected[name]):
                    assert mine is None or same(mine, wanted), (place, name)

    @settings(max_examples=40, deadline=None)
    @given(case=cases())
    def test_is_handed_the_same_table_by_the_fast_and_the_complete_packing(self, case):
        rows, step = case
        arguments = {**lists(rows), "block_offsets": step["block_offsets"]}
        expected = _adam8bit_table._adam8bit_table_checked(**arguments).rows
        assert _adam8bit_table.adam8bit_table(**arguments).rows == expected
        try:
            assert _native.configure_reading(allow_exchange=False) != "dlpack"
            assert _adam8bit_table.adam8bit_table(**arguments).rows == expected
        finally:
            _native.configure_reading()

    def test_gives_the_same_bits_on_any_number_of_threads(self, device):
        offsets = [5, 0, 0, 255]
        rows = [row(n, o, seed=n) for n, o in zip((70_001, 3, 0, 99_999), offsets)]
        results = []
        before = torch.get_num_threads()
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(lists(rows, device))
                adam8bit_step(**results[-1], step=2, block_offsets=offsets, **SETTINGS)
        finally:
            torch.set_num_threads(before)
        for result in results[1:]:
            for name in ("params", *STATES):
                assert all(torch.equal(a, b) for a, b in zip(result[name], results[0][name]))

    def test_takes_more_tensors_than_one_launch_holds(self, device):
        rows = [row(i % 23 + 1, seed=i) for i in range(150)]
        ours, expected = lists(rows, device), lists(rows)
        adam8bit_step(**ours, step=3, **SETTINGS)
        reference.adam8bit_step(**expected, step=3, **SETTINGS)
        for name in ("params", *STATES):
            assert all(same(a, b) for a, b in zip(ours[name], expected[name]))

    def test_takes_tensors_that_are_dense_in_another_order(self, device):
        flat = row(35 * 20, seed=1, device=device)
        shaped = {
            name: tensor.clone() if name.startswith("absmax") else tensor.clone().view(20, 35).t()
            for name, tensor in flat.items()
            if tensor is not None
        }
        adam8bit_step(**{name: [tensor] for name, tensor in shaped.items()}, step=2, **SETTINGS)
        adam8bit_step(**{name: [flat[name]] for name in shaped}, step=2, **SETTINGS)
        for name, tensor in shaped.items():
            assert same(tensor if tensor.dim() == 1 else tensor.t().reshape(-1), flat[name])


class TestSwitches:
    def test_held_parameters_stay_while_moments_move(self, device):
        rows = [row(300, dtype=torch.bfloat16, master=True)]
        ours = lists(rows, device)
        adam8bit_step(**ours, step=1, hold_steps=1, **SETTINGS)
        assert same(ours["params"][0], rows[0]["params"])
        assert same(ours["masters"][0], rows[0]["masters"])
        assert all(not same(ours[name][0], rows[0][name]) for name in STATES)

    @pytest.mark.parametrize("flag", [0.0, 1.0, math.nan])
    def test_nothing_changes_where_an_overflow_was_found(self, device, flag):
        rows = [row(300, dtype=torch.bfloat16, master=True)]
        ours = lists(rows, device)
        adam8bit_step(**ours, step=1, found_inf=torch.tensor([flag], device=device), **SETTINGS)
        for name in (*STATES, "params", "masters"):
            assert same(ours[name][0], rows[0][name]) == (flag != 0.0)

    def test_a_nan_spreads_over_its_block_at_the_next_step_and_no_further(self, device):
        ours = lists([row(700)], device)
        ours["grads"][0][300] = math.nan
        adam8bit_step(**ours, step=1, **SETTINGS)
        assert ours["params"][0].isnan().nonzero().tolist() == [[300]]
        ours["grads"][0][300] = 0.0
        adam8bit_step(**ours, step=2, **SETTINGS)
        bad = ours["params"][0].isnan().cpu()
        assert bool(bad[256:512].all())
        assert int(bad.sum()) == 256

    def test_empty_lists_are_fine(self, device):
        adam8bit_step([], [], [], [], [], [], step=1, **SETTINGS)
        flag = torch.zeros(1, device=device)
        adam8bit_step([], [], [], [], [], [], masters=[], block_offsets=[], found_inf=flag, step=1, **SETTINGS)

    def test_weights_are_seen_to_be_updated(self, device):
        weight = torch.ones(5, device=device, requires_grad=True)
        loss = (weight * weight).sum()
        state = {name: [tensor] for name, tensor in new_state(5, device=device).items()}
        adam8bit_step([weight], [torch.ones(5, device=device)], **state, step=1, **SETTINGS)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_devices_without_kernels_are_served_by_the_reference(self):
        arguments = lists([row(300)], "meta")
        adam8bit_step(**arguments, step=1, **SETTINGS)


def put(name, value):
    def change(arguments):
        arguments[name][1] = value(arguments[name][1])

    return change


WRONG = {
    "fewer codes": (lambda a: a["exp_avgs"].pop(), ValueError, r"exp_avgs has 1 entries and params has 2"),
    "fewer offsets": (lambda a: a.update(block_offsets=[0]), ValueError, r"block_offsets has 1 entries and params has"),
    "fp32 moments": (put("exp_avgs", torch.Tensor.float), TypeError, r"exp_avgs\[1\] .* must be torch.uint8"),
    "signed codes": (put("exp_avg_sqs", torch.Tensor.char), TypeError, r"exp_avg_sqs\[1\] .* must be torch.uint8"),
    "uint8 gradients": (put("grads", torch.Tensor.byte), TypeError, r"grads\[1\] has dtype torch.uint8"),
    "half absmax": (put("absmax_avgs", torch.Tensor.half), TypeError, r"absmax_avgs\[1\] has dtype torch.float16"),
    "a missing block": (
        put("absmax_avg_sqs", lambda t: t[:1].clone()),
        ValueError,
        r"absmax_avg_sqs\[1\] has shape \(1,\); it must be \(2,\)",
    ),
    "strided absmax": (
        put("absmax_avgs", lambda t: torch.zeros(4, device=t.device)[::2]),
        ValueError,
        r"absmax_avgs\[1\] has strides \(2,\)",
    ),
    "no codes": (lambda a: a.update(exp_avg_sqs=None), TypeError, r"exp_avg_sqs is a NoneType"),
    "no absmax": (lambda a: a.update(absmax_avgs=None), TypeError, r"absmax_avgs is a NoneType"),
    "codes elsewhere": (put("exp_avgs", lambda t: t.to("meta")), ValueError, r"exp_avgs\[1\] is on meta"),
    "codes of another shape": (put("exp_avgs", lambda t: t[:-1]), ValueError, r"exp_avgs\[1\] has shape \(299,\)"),
    "an offset of a block": (lambda a: a.update(block_offsets=[0, 256]), ValueError, r"block_offsets\[1\] is 256"),
    "a huge offset": (lambda a: a.update(block_offsets=[0, 2**70]), ValueError, r"block_offsets\[1\] is 1180"),
    "a float offset": (lambda a: a.update(block_offsets=[0, 1.0]), TypeError, r"block_offsets\[1\] is a float"),
    "one absmax for both": (
        lambda a: a.update(absmax_avg_sqs=a["absmax_avgs"]),
        ValueError,
        r"absmax_avg.* overlaps absmax_avg",
    ),
    "a master of fp32": (put("params", torch.Tensor.float), TypeError, r"masters\[1\] belongs to a float32"),
    "step zero": (lambda a: a.update(step=0), ValueError, r"step is 0"),
    "an integer flag": (lambda a: a.update(found_inf=1), TypeError, r"found_inf is a int"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_call_is_named_and_changes_nothing(device, case):
    change, error, message = WRONG[case]
    rows = [row(300, dtype=torch.bfloat16, master=True, seed=seed) for seed in range(2)]
    arguments = {**lists(rows, device), "block_offsets": [0, 0], "step": 1}
    before = [(t, t.clone()) for name in NAMES for t in arguments[name]]
    change(arguments)
    with pytest.raises(error, match=message):
        adam8bit_step(**arguments, **SETTINGS)
    assert all(same(now, then) for now, then in before)


class TestCompiled:
    def test_a_graph_has_it_as_a_node(self, device):
        rows = [row(300, dtype=torch.bfloat16, master=True), row(20, 3)]

        def update(arguments, step):
            adam8bit_step(**arguments, block_offsets=[0, 3], step=step, **SETTINGS)
            return arguments["params"][0] * 2

        ours, expected = lists(rows, device), lists(rows, device)
        compiled = torch.compile(update, fullgraph=True, backend="aot_eager")
        for step in (1, 2, 3):
            assert same(compiled(ours, step), update(expected, step))
        for name in NAMES:
            for mine, wanted in zip(ours[name], expected[name]):
                assert mine is None or same(mine, wanted), name
