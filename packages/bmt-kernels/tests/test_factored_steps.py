"""Adafactor and CAME, put together from their passes over matrices or parts of them, follow their definitions."""

from __future__ import annotations

import functools
import math

import pytest
import torch

import bmt_kernels as bk

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


# ---- the same from the operations, every matrix split in parts ---------------------------------


def split_in_two(tensors, dim):
    """Each tensor in two unequal parts along `dim` (one of which may be empty), or unsplit: (parts, where)."""
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
        self.params, self.where = split_in_two(start, dim)
        self.exp_avgs = zeros_like(self.params)
        wholes = zeros_like(start)
        self.row, self.col = [t.sum(-1) for t in wholes], [t.sum(-2) for t in wholes]
        self.residual_row, self.residual_col = clones(self.row), clones(self.col)

    def average(self, row_sums, col_sums, row, col, beta):
        """Add the parts' sums, divide them by the full size, average; returns each part's factors."""
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
        grads, _ = split_in_two(grads, self.dim)
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
