"""Adafactor and CAME follow their definitions: put together from passes, over parts of matrices, and as whole steps."""

from __future__ import annotations

import functools
import math

import pytest
import torch

import bmt_kernels as bk
from bmt_kernels import _native

# Ragged against vector widths and tiles (64 or 128 rows, 4096 or 128 columns); a batch of small matrices; bands.
SHAPES = [(33, 70), (1, 5), (200, 17), (2, 3, 5, 7), (70, 2100), (9, 4200)]
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


def relative_error(start, ours, theirs):
    """Of the update, the largest over the tensors; NaN if one of them is."""
    errors = []
    for s, a, b in zip(start, ours, theirs, strict=True):
        update = b.cpu().double() - s.cpu().double()
        errors.append(float((a.cpu().double() - b.cpu().double()).norm() / update.norm()))
    return torch.tensor(errors, dtype=torch.float64).max().item()


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


# ---- the steps that make the passes by themselves ----------------------------------------------

SINGLE = [(1, 9), (1, 0), (0, 4), (3, 0), (1, 1), (17, 33), (2, 1, 6), (300, 517)]


def state_of(params):
    """Averages and moments as they might be in the middle of a training."""
    generator = torch.Generator().manual_seed(7)

    def averages(dim):
        shapes = [[n for d, n in enumerate(p.shape) if d != p.dim() + dim] for p in params]
        return [(torch.rand(shape, generator=generator) + 0.1).to(params[0].device) for shape in shapes]

    exp_avgs = [torch.randn(p.shape, generator=generator).to(p.device) for p in params]
    return averages(-1), averages(-2), averages(-1), averages(-2), exp_avgs


def adafactor_arguments(params, state, momentum, sized):
    rows, cols, _, _, exp_avgs = state
    return {
        "params": params,
        "row_averages": rows,
        "col_averages": cols,
        "lr": LR,
        "beta2": BETA2,
        "eps": (EPS, 0.3),
        "clip_threshold": THRESHOLD,
        "weight_decay": DECAY,
        "exp_avgs": exp_avgs if momentum else None,
        "beta1": BETA1 if momentum else 0.0,
        "sizes": torch.full((len(params),), math.nan, device=params[0].device) if sized else None,
    }


def came_arguments(params, state, residuals=True):
    rows, cols, res_rows, res_cols, exp_avgs = state
    return {
        "params": params,
        "exp_avgs": exp_avgs,
        "row_averages": rows,
        "col_averages": cols,
        "residual_row_averages": res_rows if residuals else None,
        "residual_col_averages": res_cols if residuals else None,
        "lr": LR,
        "betas": (BETA1, BETA2, BETA3),
        "eps": (EPS, EPS2),
        "clip_threshold": THRESHOLD,
        "weight_decay": DECAY,
    }


def without_kernels(monkeypatch):
    """The steps then are their passes, put together in PyTorch."""
    monkeypatch.setattr(_native, "cpu_kernels", lambda: None)


def tensors_in(arguments):
    found = []
    for value in arguments.values():
        found += value if isinstance(value, list) else [value] if isinstance(value, torch.Tensor) else []
    return [t for t in found if t is not None]


class TestOneCall:
    @pytest.mark.parametrize("threads", [1, 3])
    @pytest.mark.parametrize("name", ["adafactor", "adafactor with momentum", "came"])
    def test_update_equals_the_definition_in_fp64(self, device, name, threads):
        start, grads_of_step = training()
        params = [p.to(device, copy=True) for p in start]
        zeros = zeros_like(params)
        state = [t.sum(-1) for t in zeros], [t.sum(-2) for t in zeros]
        state = *state, *(clones(averages) for averages in state), zeros
        name, _, momentum = name.partition(" ")
        scaling = {"grad_scale": 3.0, "grad_factor": torch.tensor([0.5], device=device)}
        torch.set_num_threads(threads)
        for grads in grads_of_step:
            grads = [g.to(device) * 6.0 for g in grads]
            if name == "came":
                bk.came_step(grads=grads, **came_arguments(params, state), **scaling)
            else:
                bk.adafactor_step(
                    grads=grads, **adafactor_arguments(params, state, bool(momentum), sized=False), **scaling
                )
        assert relative_error(start, params, plain_trajectory(name, bool(momentum))) <= 2e-6

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("kind", ["adafactor", "adafactor sized", "adafactor with momentum", "came", "came bare"])
    def test_it_is_the_passes(self, device, kind, dtype, monkeypatch):
        """Also of matrices without elements, of single rows, of half-precision gradients, and with masters."""
        results = []
        for compiled in (True, False):
            if not compiled:
                without_kernels(monkeypatch)
            masters = random_list(0, device=device, shapes=SINGLE)
            params = masters if dtype is torch.float32 else [m.to(dtype) for m in masters]
            grads = random_list(1, dtype, device, SINGLE)
            state = state_of(masters)
            if kind.startswith("came"):
                arguments = came_arguments(params, state, kind == "came")
            else:
                arguments = adafactor_arguments(params, state, "momentum" in kind, "sized" in kind)
            arguments["masters"] = None if dtype is torch.float32 else masters
            versions = [t._version for t in params]
            step = bk.came_step if kind.startswith("came") else bk.adafactor_step
            step(grads=grads, grad_scale=2.0, **arguments)
            assert all(p._version > version for p, version in zip(params, versions) if p.numel())
            results.append(arguments)
        for ours, theirs in zip(*(tensors_in(arguments) for arguments in results), strict=True):
            single = ours.dtype is torch.float32
            torch.testing.assert_close(ours, theirs, rtol=2e-5 if single else 1e-2, atol=1e-6, equal_nan=True)

    def test_a_compiled_graph_takes_it(self):
        def step(params, state, grads):
            bk.adafactor_step(grads=grads, **adafactor_arguments(params, state, True, True))
            bk.came_step(grads=grads, **came_arguments(params, state))

        results = []
        for function in (torch.compile(step, fullgraph=True, backend="aot_eager"), step):
            params = random_list(0, shapes=[(5, 7), (1, 3)])
            state = state_of(params)
            function(params, state, random_list(1, shapes=[(5, 7), (1, 3)]))
            results.append([*params, *(t for tensors in state for t in tensors)])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)

    def test_nothing_is_fine(self):
        bk.adafactor_step([], [], [], [], lr=LR, beta2=BETA2, eps=(EPS, 0.0), clip_threshold=1.0)
        bk.came_step([], [], [], [], [], None, None, lr=LR, betas=(0.9, 0.9, 0.9), eps=(EPS, EPS2), clip_threshold=1.0)
