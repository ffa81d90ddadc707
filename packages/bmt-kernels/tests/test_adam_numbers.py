"""What an Adam step reads from the device, the statistics it leaves there, and its place in a compiled graph."""

from __future__ import annotations

import math

import pytest
import torch

import bmt_kernels
from bmt_kernels import _native, reference

SETTINGS = {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
# One element, vector widths and what is around them, and more than two blocks of partial sums (of 16384 elements).
SIZES = [1, 15, 16, 17, 100, 16383, 16384, 16385, 40001]


class Case:
    """Two parameters of each kind, with offsets that leave their arrays unaligned."""

    def __init__(self, device, sizes=(1000, 37), seed=0):
        generator = torch.Generator().manual_seed(seed)

        def draw(dtype=torch.float32, n=1):
            offset = int(torch.randint(0, 5, (), generator=generator))
            return torch.randn(n + offset, generator=generator).to(dtype).to(device)[offset:]

        kinds = [(torch.float32, torch.float32, False), (torch.bfloat16, torch.bfloat16, True)]
        kinds += [(torch.float16, torch.float32, True), (torch.bfloat16, torch.float16, False)]
        rows = [(kind, n) for n in sizes for kind in kinds]
        self.params = [draw(dtype, n) for (dtype, _, _), n in rows]
        self.grads = [draw(dtype, n) for (_, dtype, _), n in rows]
        self.exp_avgs = [draw(n=n) for _, n in rows]
        self.exp_avg_sqs = [draw(n=n).abs() for _, n in rows]
        self.masters = [p.float() if with_master else None for ((_, _, with_master), _), p in zip(rows, self.params)]

    def step(self, function=bmt_kernels.adam_step, **options):
        lists = (self.params, self.grads, self.exp_avgs, self.exp_avg_sqs)
        function(*lists, masters=self.masters, **{**SETTINGS, **options})

    def written(self):
        return [*self.params, *self.exp_avgs, *self.exp_avg_sqs, *(m for m in self.masters if m is not None)]


def assert_same(left, right):
    """The same bits; on a GPU, whose pow may round the scalars otherwise, up to that."""
    for a, b in zip(left.written(), right.written(), strict=True):
        if a.device.type == "cpu":
            assert torch.equal(a, b.cpu())
        else:
            torch.testing.assert_close(a, b.to(a.device), rtol=1e-6 if a.dtype is torch.float32 else 1e-2, atol=1e-7)


def assert_differ(left, right):
    assert not all(torch.equal(a, b) for a, b in zip(left.written(), right.written(), strict=True))


class TestGradFactor:
    def test_multiplies_the_gradients_besides_the_scale(self, device):
        factored, multiplied = Case(device), Case(device)
        multiplied.grads = [g.float() * 0.25 for g in multiplied.grads]
        factored.step(step=3, grad_scale=3.0, grad_factor=torch.tensor(0.25, device=device))
        multiplied.step(step=3, grad_scale=3.0)
        for ours, theirs in zip(factored.written(), multiplied.written()):
            assert torch.equal(ours, theirs)

    @pytest.mark.parametrize("factor", [1.0, 0.3, 0.0, math.inf, math.nan])
    def test_is_multiplied_with_the_scale_as_in_the_reference(self, device, factor):
        ours, theirs = Case(device), Case("cpu")
        options = {"step": 5, "grad_scale": 7.0, "maximize": True}
        ours.step(grad_factor=torch.tensor([factor], device=device), **options)
        theirs.step(reference.adam_step, grad_factor=torch.tensor([factor]), **options)
        for a, b in zip(ours.written(), theirs.written()):
            torch.testing.assert_close(a.cpu(), b, rtol=0, atol=0, equal_nan=True)


class TestNumbersOnTheDevice:
    @pytest.mark.parametrize("lr_dtype", [None, torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize("step_dtype", [None, torch.float32, torch.float64, torch.int64], ids=str)
    def test_step_and_lr_mean_what_they_mean_as_numbers(self, device, step_dtype, lr_dtype):
        as_tensors, as_numbers = Case(device), Case(device)
        lr = float(torch.tensor(0.03, dtype=lr_dtype or torch.float64))
        for step in (1, 2, 1000):
            as_tensors.step(
                lr=lr if lr_dtype is None else torch.tensor([lr], dtype=lr_dtype, device=device),
                step=step if step_dtype is None else torch.tensor(step, dtype=step_dtype, device=device),
                hold_steps=1,
            )
            as_numbers.step(lr=lr, step=step, hold_steps=1)
            assert_same(as_tensors, as_numbers)

    def test_the_reference_takes_them_as_tensors_too(self):
        as_tensors, as_numbers = Case("cpu"), Case("cpu")
        for step in (1, 2, 3):
            tensors = {"lr": torch.tensor(0.5), "step": torch.tensor(step)}
            as_tensors.step(reference.adam_step, hold_steps=2, found_inf=torch.zeros(()), **tensors)
            as_numbers.step(reference.adam_step, hold_steps=2, lr=0.5, step=step)
            for a, b in zip(as_tensors.written(), as_numbers.written()):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize("kind", [int, torch.tensor])
    def test_parameters_are_held_up_to_hold_steps_and_then_move(self, device, kind):
        case, before = Case(device), Case(device)

        def step(t):
            case.step(step=t if kind is int else torch.tensor(t, device=device), hold_steps=2)
            return [torch.equal(a, b) for a, b in zip(case.params, before.params)]

        assert all(step(1))
        assert all(step(2))
        assert not any(torch.equal(a, b) for a, b in zip(case.exp_avgs, before.exp_avgs))
        assert not any(step(3))

    def test_nothing_changes_where_an_overflow_was_found(self, device):
        case, before = Case(device), Case(device)
        stats = torch.tensor([3.0, 4.0], dtype=torch.float64, device=device)
        case.step(
            step=torch.tensor(3, device=device),
            lr=torch.tensor(0.1, device=device),
            found_inf=torch.ones(1, device=device),
            grad_factor=torch.tensor(0.5, device=device),
            delta_stats=stats,
        )
        assert_same(case, before)
        assert stats.tolist() == [3.0, 4.0]

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_a_step_in_a_cuda_graph_follows_them(self):
        device = torch.device("cuda")
        captured, eager = Case(device), Case(device)
        step, lr = torch.tensor(0.0, device=device), torch.tensor(0.1, device=device)
        stats = torch.zeros(2, dtype=torch.float64, device=device)
        # Code is loaded when it is first called for, and not while a graph is captured.
        Case(device).step(step=step + 1, lr=lr, delta_stats=torch.zeros_like(stats))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step += 1
            captured.step(step=step, lr=lr, delta_stats=stats)
        expected = torch.zeros_like(stats)
        for t in range(1, 4):
            lr.fill_(0.1 * t)
            graph.replay()
            eager.step(step=t, lr=float(lr), delta_stats=expected)
        assert_same(captured, eager)
        torch.testing.assert_close(stats, expected, rtol=1e-9, atol=0)


def directions(case, step):
    """The Adam directions in float64, from the moments after the step."""
    beta1, beta2 = SETTINGS["betas"]
    return [
        m.cpu().double() / (1 - beta1**step) / ((v.cpu().double() / (1 - beta2**step)).sqrt() + SETTINGS["eps"])
        for m, v in zip(case.exp_avgs, case.exp_avg_sqs)
    ]


class TestDeltaStats:
    @pytest.mark.parametrize("hold_steps", [0, 10])
    def test_are_the_sum_and_the_sum_of_squares_of_the_directions(self, device, hold_steps):
        for size in SIZES:
            case, plain = Case(device, [size]), Case(device, [size])
            stats = torch.tensor([3.0, -4.0], dtype=torch.float64, device=device)
            version = stats._version
            case.step(step=4, delta_stats=stats, hold_steps=hold_steps)
            plain.step(step=4, hold_steps=hold_steps)
            for ours, theirs in zip(case.written(), plain.written()):
                assert torch.equal(ours, theirs)
            assert stats._version > version
            d = torch.cat(directions(case, 4))
            error = (stats.cpu() - torch.stack([3.0 + d.sum(), -4.0 + d.square().sum()])).abs()
            assert error[0] <= 3e-7 * d.abs().sum()
            assert error[1] <= 6e-7 * d.square().sum()

    def test_do_not_depend_on_threads_or_variants(self, use_variant):
        results = set()
        before = torch.get_num_threads()
        try:
            for variant in _native.runnable_variants():
                for threads in (1, 2, 3):
                    torch.set_num_threads(threads)
                    stats = torch.zeros(2, dtype=torch.float64)
                    with use_variant(variant):
                        Case("cpu", SIZES).step(step=2, delta_stats=stats)
                    if variant == "reference":
                        expected = stats
                    else:
                        results.add(tuple(stats.tolist()))
        finally:
            torch.set_num_threads(before)
        assert len(results) <= 1
        for result in results:
            torch.testing.assert_close(torch.tensor(result, dtype=torch.float64), expected, rtol=1e-12, atol=1e-9)

    def test_repeat_exactly(self, device):
        results = []
        for _ in range(3):
            stats = torch.zeros(2, dtype=torch.float64, device=device)
            Case(device, SIZES).step(step=2, delta_stats=stats)
            results.append(stats.tolist())
        assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("offset", [0, 1, 16])
def test_copies_stored_past_the_caches_have_the_same_bits(device, dtype, offset):
    """A step over more than a last-level cache holds, and the same in parts that fit."""
    n = 1_500_000
    results = []
    for parts in (1, 5):
        generator = torch.Generator().manual_seed(0)
        grad, master = (torch.randn(n, generator=generator).to(device) for _ in range(2))
        param = torch.zeros(n + offset + 1, dtype=dtype, device=device)
        lists = [param[offset : n + offset], grad, torch.zeros_like(grad), torch.zeros_like(grad), master]
        for i in range(parts):
            *arguments, masters = [[t[n * i // parts : n * (i + 1) // parts]] for t in lists]
            bmt_kernels.adam_step(*arguments, masters=masters, step=1, **SETTINGS)
        assert torch.equal(lists[0], master.to(dtype))
        assert not param[:offset].any()
        assert not param[n + offset :].any()
        results.append(master)
    assert torch.equal(*results)


class TestCompiled:
    @pytest.mark.parametrize("on_device", [False, True])
    def test_a_step_is_one_node_of_the_graph_and_does_the_same(self, device, on_device):
        def step(case, stats, factor, number, rate):
            case.step(step=number, lr=rate, delta_stats=stats, grad_factor=factor, found_inf=torch.zeros_like(factor))
            return stats * 2

        number, rate = (torch.tensor(3, device=device), torch.tensor(0.1, device=device)) if on_device else (3, 0.1)
        results = []
        for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            case, stats = Case(device), torch.zeros(2, dtype=torch.float64, device=device)
            for param in case.params:
                param.requires_grad_()
            doubled = function(case, stats, torch.tensor(0.5, device=device), number, rate)
            assert torch.equal(doubled, stats * 2)
            assert stats[1] > 0
            results.append((case, stats))
        assert_same(results[0][0], results[1][0])
        torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-9, atol=0)

    def test_the_operation_says_what_it_writes_to(self):
        case = Case("cpu", [20])
        masters = [m for m in case.masters if m is not None]
        mastered = [i for i, m in enumerate(case.masters) if m is not None]
        stats = torch.zeros(2, dtype=torch.float64)
        lists = (case.params, case.grads, case.exp_avgs, case.exp_avg_sqs)
        options = {"masters": masters, "mastered": mastered, "lr": 0.1, "lr_tensor": None, "step": 1}
        options |= {"step_tensor": torch.tensor(2), "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
        options |= {"grad_scale": 1.0, "grad_factor": None, "decoupled": True, "maximize": False, "hold_steps": 0}
        options |= {"found_inf": torch.zeros(()), "delta_stats": stats}
        torch.library.opcheck(torch.ops.bmt_kernels.adam_step.default, lists, options)
