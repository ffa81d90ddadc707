"""Block-wise 8-bit numbers: the map, exactly the nearest of its entries, and blocks that begin anywhere."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bmt_kernels import _native, dequantize_blockwise, dynamic_map, quantize_blockwise, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIGNED = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


def same(left, right):
    """Equal bits, with all NaN alike."""
    left, right = left.cpu().float(), right.cpu().float()
    both_nan = left.isnan() & right.isnan()
    return left.shape == right.shape and bool((both_nan | (left.view(torch.int32) == right.view(torch.int32))).all())


def quotients(x, block_offset=0):
    """(float64 quotients of fp32 elements and their block's absmax as the kernels round them, absmax per element)."""
    flat = x.cpu().float().reshape(-1)
    result, absmax = torch.empty_like(flat), torch.empty_like(flat)
    begin = 0
    while begin < flat.numel():
        end = min(begin + 256 - (block_offset if begin == 0 else 0), flat.numel())
        block = flat[begin:end]
        largest = block.abs().max()
        power = 2.0**64 if largest < 2.0**-64 else 2.0**-64 if largest > 2.0**64 else 1.0
        result[begin:end] = (block * power) * (1.0 / (largest * power)) if largest > 0 else 0.0
        absmax[begin:end] = largest
        begin = end
    return result.double(), absmax


def nearest_by_search(y, signed):
    """The code of the entry nearest to each y, by comparing it with all 256 in fp64; ties towards zero."""
    entries = dynamic_map(signed).double()
    distance = (y[:, None] - entries).abs()
    # Where two are equally near, those further from zero are out.
    tied = distance == distance.amin(dim=1, keepdim=True)
    return torch.where(tied, entries.abs(), math.inf).argmin(dim=1).to(torch.uint8)


def neighbourhoods_of_boundaries(signed):
    """The fp32 numbers around every middle between two entries, and around the entries."""
    entries = dynamic_map(signed).double()
    centres = torch.cat([(entries[:-1] + entries[1:]) / 2, entries]).float()
    up, down = torch.tensor(2.0), torch.tensor(-2.0)
    numbers = [centres]
    for towards in (up, down):
        x = centres
        for _ in range(3):
            x = torch.nextafter(x, towards)
            numbers.append(x)
    numbers = torch.cat(numbers)
    return numbers[numbers.abs() <= 1]


class TestMap:
    @SIGNED
    def test_has_the_published_definition(self, signed):
        """Computed in fp32 as elsewhere, it differs by a unit or two in the last place at most."""
        values = [0.0, 1.0]
        for decade in range(7):
            edges = torch.linspace(0.1, 1.0, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
            middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)
            values += [*middles.tolist(), *((-middles).tolist() if signed else [])]
        expected = torch.tensor(sorted(values), dtype=torch.float64)
        ours = dynamic_map(signed)
        assert ours.dtype is torch.float32
        assert ours.shape == (256,)
        assert bool((ours.diff() > 0).all())
        torch.testing.assert_close(ours.double(), expected, rtol=2.0**-23, atol=0)

    def test_has_its_known_values(self):
        signed, unsigned = dynamic_map(), dynamic_map(signed=False)
        assert (signed[127], signed[255], unsigned[0], unsigned[255]) == (0.0, 1.0, 0.0, 1.0)
        known = torch.tensor([-0.99296875, 5.5e-7, 0.99296875, 3.25e-7, 7.75e-7, 0.996484375], dtype=torch.float64)
        assert torch.equal(torch.stack([*signed[[0, 128, 254]], *unsigned[[1, 2, 254]]]), known.float())

    @pytest.mark.skipif(_native.cpu_module is None, reason="nothing was compiled")
    @SIGNED
    def test_is_the_one_that_was_compiled(self, signed):
        assert torch.equal(torch.tensor(_native.cpu_module.dynamic_map(signed)), dynamic_map(signed))

    @SIGNED
    def test_every_code_stands_for_its_entry(self, device, signed):
        codes = torch.arange(256, device=device).to(torch.uint8)
        values = dequantize_blockwise(codes, torch.ones(1, device=device), signed=signed)
        assert same(values, dynamic_map(signed))

    def test_is_the_callers_own(self):
        dynamic_map().zero_()
        assert dynamic_map()[255] == 1.0


class TestNearest:
    @SIGNED
    def test_around_every_boundary_the_nearest_entry_is_found(self, device, signed):
        numbers = neighbourhoods_of_boundaries(signed)
        blocks = -(-numbers.numel() // 255)
        x = torch.ones(blocks, 256)  # absmax 1, so that the quotients are the numbers themselves
        x[:, 1:] = torch.nn.functional.pad(numbers, (0, blocks * 255 - numbers.numel())).view(blocks, 255)
        codes, absmax = quantize_blockwise(x.to(device), signed=signed)
        assert torch.equal(absmax.cpu(), torch.ones(blocks))
        assert torch.equal(codes.cpu().reshape(-1), nearest_by_search(x.reshape(-1).double(), signed))

    @SIGNED
    def test_ties_go_towards_zero(self, device, signed):
        entries = dynamic_map(signed).double()
        middles = (entries[:-1] + entries[1:]) / 2
        ties = middles[middles.float().double() == middles].float()  # the others are no fp32 numbers
        assert ties.numel() >= 20
        x = torch.cat([torch.ones(1), ties[:255]]).to(device)
        values = dequantize_blockwise(*quantize_blockwise(x, signed=signed), signed=signed).cpu()
        assert bool((values[1:].abs() < x.cpu()[1:].abs()).all())

    @SIGNED
    @pytest.mark.parametrize("scale", [1.0, 1e-3, 1e30, 3e38, 1e-30, 1e-40, 1.4e-45])
    def test_random_numbers_of_any_scale_get_the_nearest_entry(self, device, signed, scale):
        generator = torch.Generator().manual_seed(1)
        x = (torch.rand(2000, generator=generator) * 2 - 1) ** 5 * scale
        codes, absmax = quantize_blockwise(x.to(device), signed=signed, block_offset=100)
        y, largest = quotients(x, 100)
        assert bool((y.abs() <= 1 + 2.0**-22).all())
        assert torch.equal(codes.cpu(), nearest_by_search(y, signed))
        place = (torch.arange(2000) + 100) // 256
        assert torch.equal(absmax.cpu()[place], largest)
        values = dequantize_blockwise(codes, absmax, signed=signed, block_offset=100).cpu()
        assert torch.equal(values, dynamic_map(signed)[codes.cpu().int()] * largest)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_values_come_back_nearly(self, device, dtype):
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(10_000, generator=generator).to(dtype).to(device)
        codes, absmax = quantize_blockwise(x)
        values = dequantize_blockwise(codes, absmax, dtype=dtype)
        assert values.dtype is dtype
        scale = absmax.repeat_interleave(256)[:10_000].double()
        error = (values.double() - x.double()).abs() / scale
        # Half of the widest step, 0.9 / 64, and half a unit in the last place of the result.
        assert float(error.max()) <= 0.00704 + torch.finfo(dtype).eps / 2
        assert float(error.mean()) <= 0.0045


@st.composite
def cases(draw):
    numel = draw(st.one_of(st.integers(0, 70), st.sampled_from([255, 256, 257, 511, 513, 1000])))
    pattern = draw(st.lists(st.floats(width=32), min_size=1, max_size=10))
    values = (pattern * (numel + 10))[: numel + 10]
    if draw(st.booleans()):
        values = [value if math.isfinite(value) else 0.0 for value in values]
    start = draw(st.integers(0, 9))
    x = torch.tensor(values, dtype=torch.float32).to(draw(st.sampled_from(DTYPES)))[start : start + numel]
    offset = draw(st.one_of(st.just(0), st.integers(0, 255)))
    return x, draw(st.booleans()), offset, draw(st.sampled_from([*DTYPES, torch.float64]))


class TestEveryVariant:
    @settings(max_examples=80, deadline=None)
    @given(case=cases())
    def test_has_the_bits_of_the_reference(self, case, places, use_variant):
        x, signed, block_offset, dtype = case
        options = {"signed": signed, "block_offset": block_offset}
        codes, absmax = reference.quantize_blockwise(x, **options)
        values = reference.dequantize_blockwise(codes, absmax, dtype=dtype, **options)
        before = x.clone()
        for place in places:
            with use_variant(place.variant):
                ours = quantize_blockwise(x.to(place.device), **options)
                back = dequantize_blockwise(*ours, dtype=dtype, **options)
            assert torch.equal(ours[0].cpu(), codes), place
            assert same(ours[1], absmax), place
            assert same(back, values), place
            assert back.dtype is dtype
        assert same(x, before)

    @SIGNED
    def test_gives_the_same_on_any_number_of_threads(self, device, signed):
        x = torch.randn(200_003, device=device)
        results = []
        before = torch.get_num_threads()
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                codes, absmax = quantize_blockwise(x, signed=signed, block_offset=77)
                back = dequantize_blockwise(codes, absmax, signed=signed, block_offset=77)
                results.append((codes, absmax, back))
        finally:
            torch.set_num_threads(before)
        for result in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(result, results[0]))

    @pytest.mark.parametrize("split", [1, 100, 256, 300, 511, 700])
    def test_a_part_has_the_codes_of_the_whole_where_its_blocks_hold_the_largest(self, device, split):
        """What a shard relies on: blocks are counted from the beginning of the logical tensor."""
        full = torch.randn(800, device=device)
        full[::50] = 10.0  # every block, and every part of it that is long enough, has the same absmax
        codes, absmax = quantize_blockwise(full)
        part, part_absmax = quantize_blockwise(full[split:], block_offset=split % 256)
        same_absmax = (part_absmax == 10.0).repeat_interleave(256)[split % 256 :][: part.numel()]
        assert int(same_absmax.sum()) >= part.numel() - 100
        assert torch.equal(part[same_absmax], codes[split:][same_absmax])
        back = dequantize_blockwise(codes[split:], absmax[split // 256 :], block_offset=split % 256)
        assert torch.equal(back, dequantize_blockwise(codes, absmax)[split:])


class TestUnusualBlocks:
    @SIGNED
    def test_zeros_stay_zeros(self, device, signed):
        x = torch.zeros(600, device=device)
        x[300] = 2.0
        x[1] = -0.0
        codes, absmax = quantize_blockwise(x, signed=signed)
        assert absmax.tolist() == [0.0, 2.0, 0.0]
        assert torch.equal(dequantize_blockwise(codes, absmax, signed=signed), x.abs())

    @SIGNED
    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
    def test_a_block_with_a_number_that_is_not_finite_is_all_nan(self, device, signed, bad):
        x = torch.ones(700, device=device)
        x[513] = bad
        codes, absmax = quantize_blockwise(x, signed=signed)
        assert absmax[:2].tolist() == [1.0, 1.0]
        assert absmax[2].isnan()
        assert bool((codes[512:] == (127 if signed else 0)).all())
        back = dequantize_blockwise(codes, absmax, signed=signed)
        assert torch.equal(back[:512], x[:512])
        assert bool(back[512:].isnan().all())

    def test_negative_numbers_are_zero_without_a_sign(self, device):
        x = torch.tensor([-4.0, 1.0, 4.0, -1e-30], device=device)
        codes, absmax = quantize_blockwise(x, signed=False)
        assert absmax.tolist() == [4.0]
        values = dequantize_blockwise(codes, absmax, signed=False)
        torch.testing.assert_close(values.cpu(), torch.tensor([0.0, 1.0, 4.0, 0.0]), rtol=0.02, atol=0)

    def test_nothing_has_no_blocks(self, device):
        codes, absmax = quantize_blockwise(torch.empty(0, 3, device=device), block_offset=5)
        assert (codes.shape, absmax.shape) == ((0, 3), (0,))
        assert dequantize_blockwise(codes, absmax, block_offset=5).shape == (0, 3)


class TestLayouts:
    def test_strided_tensors_are_taken_in_row_major_order(self, device):
        x = torch.randn(40, 30, device=device).t()[:, ::2]
        codes, absmax = quantize_blockwise(x)
        expected = quantize_blockwise(x.contiguous())
        assert torch.equal(codes, expected[0])
        assert torch.equal(absmax, expected[1])
        strided = torch.zeros(20, 30, 2, device=device)[..., 0].t()
        wide = codes.new_zeros(30, 40)
        wide[:, ::2] = codes
        result = dequantize_blockwise(wide[:, ::2], absmax, out=strided)
        assert result is strided
        assert torch.equal(strided, dequantize_blockwise(codes, absmax))

    @pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
    def test_out_is_written_and_counted(self, device, dtype):
        codes, absmax = quantize_blockwise(torch.randn(300, device=device))
        out = torch.full((302,), 7.0, dtype=dtype, device=device)
        version = out._version
        dequantize_blockwise(codes, absmax, out=out[1:-1])
        assert out._version > version
        assert torch.equal(out[1:-1], dequantize_blockwise(codes, absmax).to(dtype))
        assert out[[0, -1]].tolist() == [7.0, 7.0]

    @SIGNED
    def test_a_default_device_changes_nothing(self, device, signed):
        reference.quantize._boundaries.cache_clear()
        x = torch.randn(300, device=device)
        with torch.device("meta"):
            codes, _ = reference.quantize_blockwise(x, signed=signed)
        assert torch.equal(codes, quantize_blockwise(x, signed=signed)[0])

    def test_fp64_is_rounded_to_fp32(self, device):
        x = torch.randn(300, dtype=torch.float64, device=device)
        for ours, expected in zip(quantize_blockwise(x), quantize_blockwise(x.float())):
            assert torch.equal(ours, expected)


CODES, ABSMAX = torch.zeros(300, dtype=torch.uint8), torch.zeros(2)
WRONG = {
    "a list": (lambda: quantize_blockwise([1.0]), TypeError, r"x is a list; it must be a torch.Tensor"),
    "integers": (lambda: quantize_blockwise(CODES), TypeError, r"x has dtype torch.uint8"),
    "sparse": (lambda: quantize_blockwise(torch.eye(3).to_sparse()), TypeError, r"x has layout torch.sparse_coo"),
    "a block's length": (lambda: quantize_blockwise(ABSMAX, block_offset=256), ValueError, r"block_offset is 256"),
    "before the block": (lambda: quantize_blockwise(ABSMAX, block_offset=-1), ValueError, r"block_offset is -1"),
    "half a place": (lambda: quantize_blockwise(ABSMAX, block_offset=0.5), TypeError, r"block_offset is a float"),
    "signed codes": (lambda: dequantize_blockwise(CODES.char(), ABSMAX), TypeError, r"codes has dtype torch.int8"),
    "one block too few": (
        lambda: dequantize_blockwise(CODES, ABSMAX[:1]),
        ValueError,
        r"absmax has shape \(1,\); it must be \(2,\)",
    ),
    "a block more by the offset": (
        lambda: dequantize_blockwise(CODES, ABSMAX, block_offset=220),
        ValueError,
        r"absmax has shape \(2,\); it must be \(3,\)",
    ),
    "fp64 absmax": (lambda: dequantize_blockwise(CODES, ABSMAX.double()), TypeError, r"absmax has dtype torch.float64"),
    "absmax elsewhere": (lambda: dequantize_blockwise(CODES, ABSMAX.to("meta")), ValueError, r"absmax is on meta"),
    "integers out": (lambda: dequantize_blockwise(CODES, ABSMAX, dtype=torch.int8), TypeError, r"dtype is torch.int8"),
    "two dtypes": (
        lambda: dequantize_blockwise(CODES, ABSMAX, dtype=torch.float16, out=torch.zeros(300)),
        TypeError,
        r"out has dtype torch.float32; with dtype=torch.float16",
    ),
    "out of another shape": (
        lambda: dequantize_blockwise(CODES, ABSMAX, out=torch.zeros(3, 100)),
        ValueError,
        r"out has shape \(3, 100\); it must be \(300,\)",
    ),
    "out elsewhere": (
        lambda: dequantize_blockwise(CODES, ABSMAX, out=torch.zeros(300, device="meta")),
        ValueError,
        r"out is on meta",
    ),
    "out expanded": (
        lambda: dequantize_blockwise(CODES, ABSMAX, out=torch.zeros(1).expand(300)),
        ValueError,
        r"out has strides \(0,\)",
    ),
    "out over the codes": (
        lambda: dequantize_blockwise((whole := torch.zeros(300)).view(torch.uint8)[:300], ABSMAX, out=whole),
        ValueError,
        r"out overlaps codes",
    ),
    "out with a gradient": (
        lambda: dequantize_blockwise(CODES, ABSMAX, out=torch.zeros(300, requires_grad=True)),
        ValueError,
        r"out requires grad",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_call_is_named(case):
    call, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        call()


class TestCompiled:
    def test_a_graph_has_them_as_nodes(self, device):
        def round_trip(x, out):
            codes, absmax = quantize_blockwise(x * 2, block_offset=3)
            dequantize_blockwise(codes, absmax, block_offset=3, out=out)
            return dequantize_blockwise(codes, absmax, block_offset=3, dtype=torch.bfloat16) + 1

        x, out, expected_out = torch.randn(500, device=device), *torch.zeros(2, 500, device=device)
        compiled = torch.compile(round_trip, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x, out), round_trip(x, expected_out))
        assert torch.equal(out, expected_out)

    def test_are_registered_well(self):
        codes, absmax = quantize_blockwise(torch.randn(300))
        operations = torch.ops.bmt_kernels
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(operations.quantize_blockwise.default, (torch.randn(300), True, 0), test_utils=checks)
        torch.library.opcheck(
            operations.dequantize_blockwise.default, (codes, absmax, True, 0, torch.float32), test_utils=checks
        )
        torch.library.opcheck(
            operations.dequantize_blockwise_out.default,
            (codes, absmax, True, 0, torch.float32, torch.zeros(300)),
            test_utils=checks,
        )
