"""The factored operations: bits of the reference in elements, accurate and repeatable sums, one node in a graph."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bmt_kernels as bk
from bmt_kernels import _native, reference
from bmt_kernels._factored_tables import FactoredTensors

HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALVES]
# Ragged against vector widths and tiles (64 or 128 rows, 4096 or 128 columns); a batch of small matrices; bands.
SHAPES = [(33, 70), (1, 5), (200, 17), (2, 3, 5, 7), (70, 2100)]
LR, BETA1, EPS = 0.02, 0.9, 1e-2


@pytest.fixture(autouse=True)
def _one_thread():
    """Small tensors gain nothing from more, and lose where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_list(seed, dtype=torch.float32, device="cpu", shapes=SHAPES):
    """Rows and columns differ in size, so that no factor is near 1."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for shape in shapes:
        spread = torch.randn(shape[:-1], generator=generator).unsqueeze(-1)
        spread = spread + torch.randn(shape[:-2] + shape[-1:], generator=generator).unsqueeze(-2)
        result.append((torch.randn(shape, generator=generator) * torch.exp(spread)).to(dtype).to(device))
    return result


def clones(tensors):
    return [t.clone() for t in tensors]


def sums_like(tensors, fill=math.nan):
    """Lists for row sums and column sums, full of what must be overwritten."""
    rows = [torch.full(t.shape[:-1], fill, device=t.device) for t in tensors]
    return rows, [torch.full(t.shape[:-2] + t.shape[-1:], fill, device=t.device) for t in tensors]


def bits(tensor):
    """The bits, with all NaN alike."""
    tensor = torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor).cpu().contiguous()
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def same_bits(left, right):
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(left, right, strict=True))


numbers = st.one_of(
    st.floats(-4.0, 4.0, width=32),
    st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-45, 1e-20, 3e19, 65519.0, 6e-8]),
)


@st.composite
def cases(draw):
    """A list of matrices of all kinds, as lists of numbers to be laid out somewhere in a larger buffer."""
    rows = []
    for _ in range(draw(st.integers(0, 3))):
        batch = draw(st.sampled_from([(), (1,), (2,), (0,), (2, 3)]))
        shape = (*batch, draw(st.integers(0, 9)), draw(st.one_of(st.integers(0, 70), st.sampled_from([129, 2049]))))
        dtype, grad_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
        with_master = dtype is not torch.float32 and draw(st.booleans())
        rows.append((shape, dtype, grad_dtype, with_master, draw(st.integers(0, 5)), draw(st.integers(0, 2**31))))
    pattern = draw(st.lists(numbers, min_size=1, max_size=5))
    return rows, pattern, draw(st.booleans()), draw(st.booleans())


def arguments_of(case, device):
    """Everything the operations take, at odd addresses, with the pattern's numbers strewn among random ones."""
    rows, pattern, *_ = case
    names = ("params", "grads", "row_factors", "col_factors", "exp_avgs", "masters")
    lists = {name: [] for name in names}
    for shape, dtype, grad_dtype, with_master, offset, seed in rows:
        generator = torch.Generator().manual_seed(seed)

        def make(size, kind, offset=offset, generator=generator):
            count = math.prod(size)
            values = torch.randn(count + offset, generator=generator)
            places = torch.randint(0, 40, values.shape, generator=generator)
            for i, number in enumerate(pattern):
                values[places == i] = number
            return values.to(kind).to(device)[offset:].view(size)

        lists["params"].append(make(shape, dtype))
        lists["grads"].append(make(shape, grad_dtype))
        lists["row_factors"].append(make(shape[:-1], torch.float32))
        lists["col_factors"].append(make(shape[:-2] + shape[-1:], torch.float32))
        lists["exp_avgs"].append(make(shape, torch.float32))
        lists["masters"].append(make(shape, torch.float32) if with_master else None)
    lists["step_sizes"] = torch.arange(1.0, len(rows) + 1.0, device=device) / 8
    lists["decay_factors"] = 1 - lists["step_sizes"] / 8
    return lists


def run_all(module, case, device):
    """What every operation of `module` writes for the case: elements, and sums."""
    _, _, momentum, with_factor = case
    lists = arguments_of(case, device)
    grads, factors = lists["grads"], (lists["row_factors"], lists["col_factors"])
    scale = {"grad_scale": 4.0, "grad_factor": torch.tensor(0.3, device=device) if with_factor else None}
    rows, cols = sums_like(grads)
    module.factored_square_sums(grads, rows, cols, eps=1e-3, **scale)
    out = torch.full((len(grads),), math.nan, device=device)
    module.factored_update_square_sum(grads, *factors, out, **scale)
    exp_avgs = clones(lists["exp_avgs"])
    residual_rows, residual_cols = sums_like(grads)
    module.factored_residual_square_sums(
        grads, *factors, lists["step_sizes"], exp_avgs, residual_rows, residual_cols, beta1=0.9, eps=1e-3, **scale
    )
    options = {"exp_avgs": lists["exp_avgs"], "beta1": 0.7} if momentum else {}
    module.factored_update(
        lists["params"],
        grads,
        *factors,
        lists["step_sizes"],
        decay_factors=lists["decay_factors"],
        masters=lists["masters"],
        **options,
        **scale,
    )
    masters = [m for m in lists["masters"] if m is not None]
    return [*lists["params"], *masters, *lists["exp_avgs"], *exp_avgs], [
        *rows, *cols, out, *residual_rows, *residual_cols
    ]  # fmt: skip


class TestEveryVariant:
    @settings(max_examples=60, deadline=None)
    @given(case=cases())
    def test_has_the_bits_of_the_reference_in_elements_and_its_values_in_sums(self, case, places, use_variant):
        expected_elements, expected_sums = run_all(reference, case, "cpu")
        cpu_sums = []
        for place in places:
            with use_variant(place.variant):
                elements, sums = run_all(bk, case, place.device)
            assert same_bits(elements, expected_elements), place
            for ours, wanted in zip(sums, expected_sums, strict=True):
                torch.testing.assert_close(ours.cpu(), wanted, rtol=3e-6, atol=1e-37, equal_nan=True)
            if place.device == "cpu" and place.variant != "reference":
                cpu_sums.append(sums)
        for sums in cpu_sums[1:]:
            assert same_bits(sums, cpu_sums[0])

    @settings(max_examples=50, deadline=None)
    @given(case=cases())
    def test_is_handed_the_same_table_by_the_fast_and_the_complete_packing(self, case):
        lists = arguments_of(case, "cpu")
        vector, rest = lists.pop("step_sizes"), {n: v for n, v in lists.items() if n != "decay_factors"}
        rest["row_sums"], rest["col_sums"] = sums_like(rest["grads"])
        tensors = FactoredTensors(**rest, vector=vector)
        expected = tensors._pack_checked(torch.device("cpu"))
        try:
            for allowed in (True, False):
                _native.configure_reading(allow_exchange=allowed)
                assert tensors.pack(torch.device("cpu")) == expected
        finally:
            _native.configure_reading()

    def test_gives_the_same_bits_on_any_number_of_threads(self, device):
        shapes = [(200, 700), (3, 4), (64, 5000), (0, 3), (300, 2, 2), (1000, 70)]
        start, grads = random_list(4, shapes=shapes, device=device), random_list(5, shapes=shapes, device=device)
        results = []
        before = torch.get_num_threads()
        try:
            for threads in (1, 2, 3, 5):
                torch.set_num_threads(threads)
                params, moments = clones(start), clones(start)
                rows, cols = sums_like(grads)
                bk.factored_square_sums(grads, rows, cols, eps=EPS)
                factors = [r.clone() for r in rows], [c.clone() for c in cols]
                out = torch.zeros(len(shapes), device=device)
                bk.factored_update_square_sum(grads, *factors, out)
                ones = torch.ones(len(shapes), device=device)
                sums = sums_like(grads)
                bk.factored_residual_square_sums(grads, *factors, ones, moments, *sums, beta1=BETA1, eps=EPS)
                bk.factored_update(params, grads, *factors, ones, exp_avgs=moments, beta1=BETA1)
                results.append([*rows, *cols, out, *sums[0], *sums[1], *moments, *params])
        finally:
            torch.set_num_threads(before)
        for result in results[1:]:
            assert same_bits(result, results[0])
        assert all(bool(t.isfinite().all()) for t in results[0])

    def test_takes_more_matrices_than_one_launch_holds(self, device):
        case = ([((i % 5 + 1, i % 7 + 1), torch.float32, torch.float32, False, 0, i) for i in range(100)], [0.5], 1, 0)
        elements, sums = run_all(bk, case, device)
        expected_elements, expected_sums = run_all(reference, case, "cpu")
        assert same_bits(elements, expected_elements)
        for ours, wanted in zip(sums, expected_sums):
            torch.testing.assert_close(ours.cpu(), wanted, rtol=3e-6, atol=1e-37)


class TestSums:
    @pytest.mark.parametrize("shape", [(3000, 5), (5, 9000), (700, 3000)], ids=str)
    def test_long_sums_of_like_terms_do_not_drift(self, device, shape):
        """Equal terms round in the same direction every time: the worst case of adding one by one."""
        grads = [torch.full(shape, 0.7, device=device)]
        rows, cols = sums_like(grads)
        bk.factored_square_sums(grads, rows, cols, eps=0.0)
        square = float(torch.tensor(0.7) ** 2)
        torch.testing.assert_close(rows[0].cpu(), torch.full(shape[:1], square * shape[1]), rtol=1e-5, atol=0)
        torch.testing.assert_close(cols[0].cpu(), torch.full(shape[1:], square * shape[0]), rtol=1e-5, atol=0)

    @pytest.mark.parametrize("place", [(0, 0), (64, 2048), (99, 2099), (63, 2047), (128, 130)])
    def test_an_infinity_and_a_nan_reach_their_row_and_column_only(self, device, place):
        for value in (math.inf, math.nan, 1e30):
            grads = [torch.ones(130, 2100, device=device)]
            grads[0][place] = value
            rows, cols = sums_like(grads)
            bk.factored_square_sums(grads, rows, cols, eps=0.0)
            for sums, at, wanted in ((rows[0], place[0], 2100), (cols[0], place[1], 130)):
                assert not sums[at].isfinite()
                sums[at] = wanted
                assert bool((sums == wanted).all())

    def test_empty_parts_sum_to_zero(self, device):
        grads = [
            torch.empty(0, 4, device=device),
            torch.empty(3, 0, device=device),
            torch.empty(0, 2, 2, device=device),
        ]
        factors = sums_like(grads, 1.0)
        for function in (
            lambda sums: bk.factored_square_sums(grads, *sums, eps=EPS),
            lambda sums: bk.factored_residual_square_sums(
                grads, *factors, torch.ones(3, device=device), clones(grads), *sums, beta1=BETA1, eps=EPS
            ),
        ):
            sums = sums_like(grads)
            function(sums)
            assert all(bool((s == 0).all()) for each in sums for s in each)
        out = torch.full((3,), math.nan, device=device)
        bk.factored_update_square_sum(grads, *factors, out)
        assert out.tolist() == [0.0, 0.0, 0.0]
        bk.factored_update(clones(grads), grads, *factors, out)

    def test_nothing_to_do_is_fine(self, device):
        none = torch.empty(0, device=device)
        bk.factored_square_sums([], [], [], eps=EPS)
        bk.factored_update_square_sum([], [], [], none)
        bk.factored_residual_square_sums([], [], [], none, [], [], [], beta1=BETA1, eps=EPS)
        bk.factored_update([], [], [], [], none, masters=[], found_inf=torch.zeros(1, device=device))

    def test_what_is_only_read_may_be_strided_and_stays(self, device):
        wide = random_list(7, shapes=[(80, 66)], device=device)[0]
        grads = [wide[::2, 1::2], wide.t()]
        plain = [g.contiguous() for g in grads]
        rows, cols = sums_like(plain, 1.0)
        row_factors = [r.expand(2, -1).t()[:, 0] for r in rows]
        before = wide.clone()
        results = []
        for g, row_factor in ((grads, row_factors), (plain, rows)):
            out, params = torch.zeros(2, device=device), clones(plain)
            sums = sums_like(plain)
            bk.factored_square_sums(g, *sums, eps=EPS)
            bk.factored_update_square_sum(g, row_factor, cols, out)
            bk.factored_update(params, g, row_factor, cols, torch.ones(1, device=device).expand(2))
            results.append([*sums[0], *sums[1], out, *params])
        assert same_bits(*results)
        assert same_bits([wide], [before])


class TestUpdate:
    @pytest.mark.parametrize("dtype", HALVES, ids=str)
    def test_params_are_rounded_copies_of_their_masters(self, device, dtype):
        masters = random_list(40, device=device)
        params, grads = [m.to(dtype) for m in masters], random_list(41, dtype=dtype, device=device)
        expected, wanted_masters = [m.clone() for m in masters], clones(masters)
        factors = sums_like(grads, 0.5)
        sizes = torch.full((len(grads),), LR, device=device)
        bk.factored_update(params, grads, *factors, sizes, masters=masters)
        assert same_bits(params, [m.to(dtype) for m in masters])
        for p, g, m in zip(expected, grads, masters):
            torch.testing.assert_close(m, p - LR * 0.25 * g.float(), rtol=1e-6, atol=1e-7)
        unmastered = [m.to(dtype) for m in wanted_masters]
        wanted = [u.float() - (g.float() * (0.5 * sizes[0])) * 0.5 for u, g in zip(unmastered, grads)]
        bk.factored_update(unmastered, grads, *factors, sizes)
        assert same_bits(unmastered, [w.to(dtype) for w in wanted])

    @pytest.mark.parametrize("flag", [1.0, -1.0, math.inf, math.nan])
    def test_nothing_changes_where_an_overflow_was_found(self, device, flag):
        masters, grads = random_list(50, device=device), random_list(51, device=device)
        params, exp_avgs = [m.bfloat16() for m in masters], random_list(52, device=device)
        factors, sums = sums_like(grads, 0.5), sums_like(grads, 3.0)
        written = [*masters, *params, *exp_avgs, *sums[0], *sums[1]]
        before = clones(written)
        sizes, found_inf = torch.ones(len(grads), device=device), torch.tensor([flag], device=device)
        options = {"beta1": BETA1, "found_inf": found_inf}
        bk.factored_residual_square_sums(grads, *factors, sizes, exp_avgs, *sums, eps=EPS, **options)
        bk.factored_update(params, grads, *factors, sizes, exp_avgs=exp_avgs, masters=masters, **options)
        assert same_bits(written, before)
        found_inf.zero_()
        bk.factored_residual_square_sums(grads, *factors, sizes, exp_avgs, *sums, eps=EPS, **options)
        bk.factored_update(params, grads, *factors, sizes, exp_avgs=exp_avgs, masters=masters, **options)
        assert not any(torch.equal(now, then) for now, then in zip(written, before))

    def test_raises_the_version_counters_of_what_it_writes(self, device):
        weight = torch.ones(5, 4, device=device, requires_grad=True)
        loss = (weight * weight).sum()  # saves weight
        grads = [torch.ones(5, 4, device=device)]
        bk.factored_update([weight], grads, *sums_like(grads, 1.0), torch.ones(1, device=device))
        assert weight.is_leaf
        assert bool((weight == 0).all())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class TestCompile:
    def step(self, grads, params, exp_avgs, masters):
        rows, cols = sums_like(grads)
        bk.factored_square_sums(grads, rows, cols, eps=EPS)
        factors = [r.rsqrt() for r in rows], [c.rsqrt() for c in cols]
        out = torch.empty(len(grads), device=grads[0].device)
        bk.factored_update_square_sum(grads, *factors, out)
        sizes = out.rsqrt()
        bk.factored_residual_square_sums(grads, *factors, sizes, exp_avgs, rows, cols, beta1=BETA1, eps=EPS)
        factors = [r.rsqrt() for r in rows], [c.rsqrt() for c in cols]
        options = {"exp_avgs": exp_avgs, "beta1": BETA1, "masters": masters}
        bk.factored_update(params, grads, *factors, sizes, decay_factors=1 - sizes, **options)
        return out

    def test_a_compiled_step_is_the_eager_step(self, device):
        shapes = [(33, 20), (2, 5, 6)]
        results = []
        for function in (self.step, torch.compile(self.step, fullgraph=True, backend="aot_eager")):
            grads, exp_avgs = (
                random_list(60, device=device, shapes=shapes),
                random_list(61, device=device, shapes=shapes),
            )
            masters = [None, random_list(62, device=device, shapes=shapes)[1]]
            params = [random_list(63, device=device, shapes=shapes)[0], masters[1].bfloat16()]
            out = function(grads, params, exp_avgs, masters)
            results.append([out, *params, *exp_avgs, masters[1]])
        torch._dynamo.reset()
        assert same_bits(*results)

    def test_the_registrations_hold_up(self, device):
        grads = random_list(64, device=device, shapes=[(9, 5)])
        factors, sums, sizes = sums_like(grads, 0.5), sums_like(grads, 0.0), torch.ones(1, device=device)
        scale = {"grad_scale": 2.0, "grad_factor": None}
        no_flag = {"found_inf": None}
        ops, check = torch.ops.bmt_kernels, torch.library.opcheck
        check(ops.factored_square_sums, (grads, *sums), {"eps": EPS, **scale})
        check(ops.factored_update_square_sum, (grads, *factors, sizes.clone()), scale)
        moments = {"beta1": BETA1, "eps": EPS, **scale, **no_flag}
        check(ops.factored_residual_square_sums, (grads, *factors, sizes, clones(grads), *sums), moments)
        options = {"decay_factors": None, "exp_avgs": clones(grads), "beta1": BETA1, "masters": [], "with_master": []}
        check(ops.factored_update, (clones(grads), grads, *factors, sizes), {**options, **scale, **no_flag})


def test_devices_without_kernels_are_served_by_the_reference():
    grads = [torch.empty(3, 4, device="meta")]
    sums, vector = sums_like(grads), torch.empty(1, device="meta")
    bk.factored_square_sums(grads, *sums, eps=EPS, grad_factor=vector)
    bk.factored_update_square_sum(grads, *sums, vector)
    bk.factored_update(clones(grads), grads, *sums, vector)
