"""Adafactor and CAME put together from the factored operations follow their definitions, whole and in parts."""

from __future__ import annotations

import functools
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
# Ragged against vector widths and tiles (64 or 128 rows, 2048 or 128 columns); one batch of small matrices.
SHAPES = [(33, 70), (1, 5), (200, 17), (2, 3, 5, 7), (70, 2100)]
STEPS = 10
LR, DECAY, BETA1, BETA2, BETA3 = 0.02, 0.1, 0.9, 0.98, 0.97
# Large, so that leaving them out shows.
EPS, EPS2, THRESHOLD = 1e-2, 1e-2, 0.9


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


def zeros_like(tensors):
    return [torch.zeros_like(t, dtype=torch.float32) for t in tensors]


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


def relative_error(start, ours, theirs):
    """Of the update, the largest over the tensors."""
    errors = []
    for s, a, b in zip(start, ours, theirs, strict=True):
        update = b.cpu().double() - s.cpu().double()
        errors.append(float((a.cpu().double() - b.cpu().double()).norm() / update.norm()))
    return max(errors)


# ---- the optimizers' definitions, in fp64 and without this package -----------------------------


def factors_of(row, col):
    return (row / row.mean(-1, keepdim=True)).rsqrt(), col.rsqrt()


def plain_step(name, p, grad, state, momentum):
    """One step of Adafactor or CAME on one tensor; returns the new parameter."""
    square = grad**2 + EPS
    state["row"] = BETA2 * state["row"] + (1 - BETA2) * square.mean(-1)
    state["col"] = BETA2 * state["col"] + (1 - BETA2) * square.mean(-2)
    row, col = factors_of(state["row"], state["col"])
    u = grad * row.unsqueeze(-1) * col.unsqueeze(-2)
    u = u / max(1.0, float(u.square().mean().sqrt()) / THRESHOLD)
    if name == "adafactor":
        u = LR * u
        if momentum:
            u = state["m"] = BETA1 * state["m"] + (1 - BETA1) * u
        return p - LR * DECAY * p - u
    state["m"] = BETA1 * state["m"] + (1 - BETA1) * u
    residual = (u - state["m"]) ** 2 + EPS2
    state["residual_row"] = BETA3 * state["residual_row"] + (1 - BETA3) * residual.mean(-1)
    state["residual_col"] = BETA3 * state["residual_col"] + (1 - BETA3) * residual.mean(-2)
    row, col = factors_of(state["residual_row"], state["residual_col"])
    return p - LR * DECAY * p - LR * state["m"] * row.unsqueeze(-1) * col.unsqueeze(-2)


@functools.cache
def training():
    """Parameters to start from and the gradients of every step."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) * 0.1 for shape in SHAPES]
    return start, [random_list(10 + step) for step in range(STEPS)]


@functools.cache
def plain_trajectory(name, momentum):
    start, grads_of_step = training()
    result = []
    for i, p in enumerate(start):
        p = p.double()
        state = {"m": torch.zeros_like(p)}
        for prefix in ("", "residual_"):
            state[prefix + "row"], state[prefix + "col"] = torch.zeros_like(p.sum(-1)), torch.zeros_like(p.sum(-2))
        for grads in grads_of_step:
            p = plain_step(name, p, grads[i].double(), state, momentum)
        result.append(p)
    return result


# ---- the same from the operations, every matrix cut into parts ---------------------------------


def cut(tensors, dim):
    """Each tensor in two unequal parts along dimension `dim` (one of which may be empty), or whole: (parts, where)."""
    parts, where = [], []
    for i, tensor in enumerate(tensors):
        size = 0 if dim is None else tensor.shape[dim]
        for begin, end in [(0, size // 3), (size // 3, size)] if dim is not None else [(None, None)]:
            rows = slice(begin, end) if dim == -2 else slice(None)
            cols = slice(begin, end) if dim == -1 else slice(None)
            parts.append(tensor[..., rows, cols].clone(memory_format=torch.contiguous_format))
            where.append((i, rows, cols))
    return parts, where


class Composed:
    """Adafactor or CAME as ranks that hold the parts would compute it, with their sums added by hand."""

    def __init__(self, start, dim, **options):
        self.shapes, self.dim, self.options = [t.shape for t in start], dim, options
        self.params, self.where = cut(start, dim)
        self.exp_avgs = zeros_like(self.params)
        wholes = zeros_like(start)
        self.row, self.col = [t.sum(-1) for t in wholes], [t.sum(-2) for t in wholes]
        self.residual_row, self.residual_col = clones(self.row), clones(self.col)

    def average(self, row_sums, col_sums, row, col, beta):
        """Add the parts' sums, divide them by the whole size, average; returns each part's factors."""
        totals = [(torch.zeros_like(r), torch.zeros_like(c)) for r, c in zip(row, col)]
        for row_sum, col_sum, (i, rows, cols) in zip(row_sums, col_sums, self.where):
            totals[i][0][..., rows] += row_sum
            totals[i][1][..., cols] += col_sum
        for i, (row_total, col_total) in enumerate(totals):
            row[i].mul_(beta).add_(row_total / self.shapes[i][-1], alpha=1 - beta)
            col[i].mul_(beta).add_(col_total / self.shapes[i][-2], alpha=1 - beta)
        factors = [factors_of(r, c) for r, c in zip(row, col)]
        row_factors = [factors[i][0][..., rows].contiguous() for i, rows, _ in self.where]
        return row_factors, [factors[i][1][..., cols].contiguous() for i, _, cols in self.where]

    def clips(self, squares):
        totals = [0.0] * len(self.shapes)
        for square, (i, _, _) in zip(squares, self.where):
            totals[i] = totals[i] + square
        return torch.stack(
            [(totals[i] / self.shapes[i].numel()).sqrt().div(THRESHOLD).clamp(min=1.0) for i, _, _ in self.where]
        )

    def step(self, name, grads, momentum=True, beta2=BETA2, eps=EPS, decay=DECAY):
        grads, _ = cut(grads, self.dim)
        row_sums, col_sums = sums_like(grads)
        bk.factored_square_sums(grads, row_sums, col_sums, eps=eps, **self.options)
        factors = self.average(row_sums, col_sums, self.row, self.col, beta2)
        squares = torch.full((len(grads),), math.nan, device=grads[0].device)
        bk.factored_update_square_sum(grads, *factors, squares, **self.options)
        clips = self.clips(squares)
        decays = torch.full_like(clips, 1 - LR * decay)
        if name == "adafactor":
            options = {"exp_avgs": self.exp_avgs, "beta1": BETA1} if momentum else {}
            bk.factored_update(
                self.params, grads, *factors, LR / clips, decay_factors=decays, **options, **self.options
            )
            return
        bk.factored_residual_square_sums(
            grads, *factors, 1 / clips, self.exp_avgs, row_sums, col_sums, beta1=BETA1, eps=EPS2, **self.options
        )
        factors = self.average(row_sums, col_sums, self.residual_row, self.residual_col, BETA3)
        sizes = torch.full_like(clips, LR)
        bk.factored_update(self.params, self.exp_avgs, *factors, sizes, decay_factors=decays)

    def result(self):
        wholes = [torch.full(shape, math.nan) for shape in self.shapes]
        for param, (i, rows, cols) in zip(self.params, self.where):
            wholes[i][..., rows, cols] = param.cpu()
        return wholes


class TestWholeSteps:
    @pytest.mark.parametrize("dim", [None, -2, -1], ids=["whole", "row parts", "column parts"])
    @pytest.mark.parametrize("name", ["adafactor", "adafactor with momentum", "came"])
    def test_update_equals_the_definition_in_fp64(self, device, name, dim):
        start, grads_of_step = training()
        factor = torch.tensor([0.5], device=device)
        composed = Composed([p.to(device) for p in start], dim, grad_scale=3.0, grad_factor=factor)
        name, _, momentum = name.partition(" ")
        for grads in grads_of_step:
            composed.step(name, [g.to(device) * 6.0 for g in grads], momentum=bool(momentum))
        expected = plain_trajectory(name, bool(momentum))
        assert relative_error(start, composed.result(), expected) <= 2e-6

    @pytest.mark.parametrize("dim", [None, -2, -1], ids=["whole", "row parts", "column parts"])
    @pytest.mark.parametrize("beta1", [None, BETA1])
    def test_update_equals_that_of_transformers(self, device, beta1, dim):
        optimization = pytest.importorskip("transformers.optimization")
        start, grads_of_step = training()
        theirs = [p.clone().requires_grad_() for p in start]
        optimizer = optimization.Adafactor(
            theirs, lr=LR, clip_threshold=THRESHOLD, beta1=beta1, weight_decay=DECAY, relative_step=False,
            scale_parameter=False,
        )  # fmt: skip
        composed = Composed([p.to(device) for p in start], dim)
        for step, grads in enumerate(grads_of_step, 1):
            for p, grad in zip(theirs, grads):
                p.grad = grad
            optimizer.step()
            composed.step(
                "adafactor", [g.to(device) for g in grads], momentum=beta1 is not None, beta2=1 - step**-0.8, eps=1e-30
            )
        assert relative_error(start, composed.result(), [p.detach() for p in theirs]) <= 1e-5


# ---- single operations -------------------------------------------------------------------------

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
        sizes, found = torch.ones(len(grads), device=device), torch.tensor([flag], device=device)
        options = {"beta1": BETA1, "found_inf": found}
        bk.factored_residual_square_sums(grads, *factors, sizes, exp_avgs, *sums, eps=EPS, **options)
        bk.factored_update(params, grads, *factors, sizes, exp_avgs=exp_avgs, masters=masters, **options)
        assert same_bits(written, before)
        found.zero_()
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
        found = {"found_inf": None}
        ops, check = torch.ops.bmt_kernels, torch.library.opcheck
        check(ops.factored_square_sums, (grads, *sums), {"eps": EPS, **scale})
        check(ops.factored_update_square_sum, (grads, *factors, sizes.clone()), scale)
        moments = {"beta1": BETA1, "eps": EPS, **scale, **found}
        check(ops.factored_residual_square_sums, (grads, *factors, sizes, clones(grads), *sums), moments)
        options = {"decay_factors": None, "exp_avgs": clones(grads), "beta1": BETA1, "masters": [], "with_master": []}
        check(ops.factored_update, (clones(grads), grads, *factors, sizes), {**options, **scale, **found})


def test_devices_without_kernels_are_served_by_the_reference():
    grads = [torch.empty(3, 4, device="meta")]
    sums, vector = sums_like(grads), torch.empty(1, device="meta")
    bk.factored_square_sums(grads, *sums, eps=EPS, grad_factor=vector)
    bk.factored_update_square_sum(grads, *sums, vector)
    bk.factored_update(clones(grads), grads, *sums, vector)


def good_call():
    grads = [torch.ones(3, 4), torch.ones(2, 5)]
    row, col = sums_like(grads, 1.0)
    return {
        "params": clones(grads), "grads": grads, "row_factors": row, "col_factors": col, "step_sizes": torch.ones(2),
        "decay_factors": torch.ones(2), "exp_avgs": clones(grads), "beta1": 0.9, "masters": [None, None],
    }  # fmt: skip


WRONG = {
    "tensor for a list": ({"grads": torch.ones(3, 4)}, TypeError, r"grads is a Tensor; pass a list"),
    "none in a list": ({"grads": [None, None]}, TypeError, r"grads\[0\] is a NoneType"),
    "length": ({"row_factors": [torch.ones(3)]}, ValueError, r"row_factors has 1 entries and grads has 2"),
    "vector": (
        {"grads": [torch.ones(3), torch.ones(3)]},
        ValueError,
        r"grads\[0\] has shape \(3,\); it must have rows",
    ),
    "integers": ({"grads": [torch.ones(3, 4).int()] * 2}, TypeError, r"grads\[0\] has dtype torch.int32"),
    "fp64 params": ({"params": [torch.ones(3, 4).double()] * 2}, TypeError, r"params\[0\] has dtype torch.float64"),
    "half moments": ({"exp_avgs": [torch.ones(3, 4).half()] * 2}, TypeError, r"exp_avgs\[0\] has dtype torch.float16"),
    "shape of params": ({"params": [torch.ones(4, 3)] * 2}, ValueError, r"params\[0\] has shape \(4, 3\); .*\(3, 4\)"),
    "row factors": ({"row_factors": [torch.ones(4)] * 2}, ValueError, r"row_factors\[0\] has shape \(4,\); .*\(3,\)"),
    "column factors": ({"col_factors": [torch.ones(3)] * 2}, ValueError, r"col_factors\[0\] has shape .*\(4,\)"),
    "device": ({"exp_avgs": [torch.ones(3, 4, device="meta")] * 2}, ValueError, r"exp_avgs\[0\] is on meta"),
    "strides": ({"params": [torch.ones(4, 3).t()] * 2}, ValueError, r"params\[0\] has strides \(1, 3\)"),
    "sizes": ({"step_sizes": torch.ones(3)}, ValueError, r"step_sizes has shape \(3,\); it must be \(2,\)"),
    "number for sizes": ({"step_sizes": 0.1}, TypeError, r"step_sizes is a float"),
    "fp64 decay": ({"decay_factors": torch.ones(2).double()}, TypeError, r"decay_factors has dtype torch.float64"),
    "decay elsewhere": ({"decay_factors": torch.ones(2, device="meta")}, ValueError, r"decay_factors is on meta"),
    "beta1": ({"beta1": 1.0}, ValueError, r"beta1 is 1.0; it must be not negative and less than 1"),
    "beta1 alone": ({"exp_avgs": None}, ValueError, r"beta1 is 0.9 without exp_avgs"),
    "scale": ({"grad_scale": 0.0}, ValueError, r"grad_scale is 0.0; it must be positive"),
    "scale type": ({"grad_scale": "2"}, TypeError, r"grad_scale is a str"),
    "nan": ({"grad_scale": math.nan}, ValueError, r"grad_scale is nan"),
    "factor": ({"grad_factor": torch.ones(2)}, ValueError, r"grad_factor has shape \(2,\)"),
    "flag": ({"found_inf": 1.0}, TypeError, r"found_inf is a float"),
    "needless master": ({"masters": [torch.ones(3, 4), None]}, TypeError, r"masters\[0\] belongs to a float32"),
}


class TestWrongCalls:
    @pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG.keys())
    def test_are_named_and_change_nothing(self, device, change, error, message):
        if device.type != "cpu":
            pytest.skip("checks do not depend on the device")
        arguments = {**good_call(), **change}
        before = good_call()
        with pytest.raises(error, match=message):
            bk.factored_update(**arguments)
        for name in set(before) - set(change) - {"beta1", "masters", "step_sizes", "decay_factors"}:
            assert same_bits(arguments[name], before[name])

    @pytest.mark.parametrize(
        ("name", "other"), [("params", "grads"), ("exp_avgs", "params"), ("params", "row_factors")]
    )
    def test_overlaps_are_found(self, name, other):
        arguments = good_call()
        whole = torch.ones(20)
        arguments[name][0], arguments[other][0] = whole[:12].view(3, 4), whole[8:].view(3, 4)
        if other == "row_factors":
            arguments[other][0] = whole[8:11]
        with pytest.raises(ValueError, match="overlaps"):
            bk.factored_update(**arguments)

    def test_sums_may_not_overlap_nor_out_its_inputs(self):
        grads, both = [torch.ones(3, 3)], torch.ones(3)
        with pytest.raises(ValueError, match="overlaps"):
            bk.factored_square_sums(grads, [both], [both], eps=0.0)
        with pytest.raises(ValueError, match=r"out overlaps grads\[0\]|grads\[0\] overlaps out"):
            bk.factored_update_square_sum(grads, [both], [torch.ones(3)], grads[0][0, :1])
        with pytest.raises(ValueError, match="eps is -1.0"):
            bk.factored_square_sums(grads, [torch.ones(3)], [both], eps=-1.0)
