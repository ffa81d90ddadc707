"""Linear layer and cross entropy in one: the numbers of the pair, and never its logits."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F

from bmt_kernels import linear_cross_entropy, parallel_linear_cross_entropy
from bmt_kernels._compat import adds_products_in_fp32

N, H, V = 33, 8, 37
SETTINGS = [
    {"reduction": r, "label_smoothing": s, "weighted": w, "biased": b}
    for r, s, (w, b) in itertools.product(["mean", "sum", "none"], [0.0, 0.2], [(False, True), (True, False)])
]
# Of the largest gradient. Half-precision logits, their gradients and the products are rounded, as the pair's are.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request):
    """Without the CPU variants one by one: they differ in the kernels that test_cross_entropy.py tries."""
    return torch.device(request.param)


def layer(dtype=torch.float32, device="cpu", rows=N, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(shape, generator=generator) for shape in ((rows, H), (V, H), (V,)))
    target = torch.randint(0, V, (rows,), generator=generator)
    target[2] = -100
    leaves = [t.to(dtype).to(device).requires_grad_() for t in (hidden, weight, bias)]
    return leaves, target.to(device)


def options_of(settings, device):
    options = dict(settings)
    weight = torch.linspace(0.1, 2, V, device=device) if options.pop("weighted") else None
    return options.pop("biased"), weight, options


def gradients(loss, leaves, **more):
    """For another upstream gradient than 1."""
    scale = torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype, device=loss.device).view(loss.shape)
    return torch.autograd.grad((loss * scale).sum(), leaves, **more)


def in_double(leaves, target, biased, class_weight, **options):
    """Loss and gradients of the pair in double precision."""
    hidden, weight, bias = doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    logits = F.linear(hidden, weight, bias if biased else None).reshape(-1, V)
    class_weight = None if class_weight is None else class_weight.double()
    loss = F.cross_entropy(logits, target.reshape(-1), class_weight, **options)
    return loss.detach(), gradients(loss, doubles if biased else doubles[:2])


def assert_near(ours, theirs, tolerance):
    assert (ours.double() - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_loss_and_gradients_are_those_of_the_pair_in_double_precision(device, dtype):
    leaves, target = layer(dtype, device)
    for settings, chunk in itertools.product(SETTINGS, (None, 5)):
        biased, class_weight, options = options_of(settings, device)
        expected, expected_gradients = in_double(leaves, target, biased, class_weight, **options)
        hidden, weight, bias = leaves
        loss = linear_cross_entropy(
            hidden, weight, target, bias if biased else None, class_weight=class_weight, chunk_size=chunk, **options
        )
        assert loss.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
        assert_near(loss, expected, min(10 * TOLERANCE[dtype], 1e-2))
        for ours, theirs in zip(gradients(loss, leaves if biased else leaves[:2]), expected_gradients):
            assert ours.dtype is dtype
            assert_near(ours, theirs, TOLERANCE[dtype])


def test_leading_dimensions_and_strides(device):
    (hidden, weight, bias), target = layer(device=device, rows=12)
    wide = torch.stack([weight, weight], dim=1).detach()[:, 0].requires_grad_()
    for reduction in ("mean", "none"):
        flat = linear_cross_entropy(hidden, weight, target, bias, reduction=reduction)
        folded = linear_cross_entropy(
            hidden.view(3, 4, H).transpose(0, 1), wide, target.view(3, 4).t(), bias, reduction=reduction
        )
        if reduction == "none":
            assert folded.shape == (4, 3)
            folded = folded.t().reshape(-1)
        torch.testing.assert_close(folded, flat)
        expected = gradients(flat, [hidden, weight])
        for ours, theirs in zip(gradients(folded, [hidden, wide]), expected):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(device, reduction):
    leaves, target = layer(device=device)
    full = gradients(linear_cross_entropy(*leaves[:2], target, leaves[2], reduction=reduction), leaves)
    for wanted in itertools.product([False, True], repeat=3):
        mixed = [leaf.detach().requires_grad_(want) for leaf, want in zip(leaves, wanted)]
        loss = linear_cross_entropy(*mixed[:2], target, mixed[2], reduction=reduction)
        assert loss.requires_grad == any(wanted)
        if any(wanted):
            result = gradients(loss, [leaf for leaf in mixed if leaf.requires_grad])
            expected = [gradient for gradient, want in zip(full, wanted) if want]
            assert all(torch.equal(a, b) for a, b in zip(result, expected))
    with torch.no_grad():
        assert not linear_cross_entropy(*leaves[:2], target).requires_grad


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_second_backward_is_right_whatever_the_upstream_gradients(device, reduction, dtype):
    leaves, target = layer(dtype, device)
    loss = linear_cross_entropy(*leaves[:2], target, leaves[2], reduction=reduction).sum()
    first, second, triple = (
        torch.autograd.grad(loss * factor, leaves, retain_graph=True) for factor in (1.0, 1.0, 3.0)
    )
    for a, b, c in zip(first, second, triple):
        assert torch.equal(a, b)
        assert_near(c, 3 * a.double(), 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_may_be_written_to_before_a_second_backward(device, reduction):
    leaves, target = layer(device=device)
    loss = linear_cross_entropy(*leaves[:2], target, leaves[2], reduction=reduction).sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    expected = [gradient.clone() for gradient in first]
    for gradient in first:
        gradient.zero_()
    for _ in range(2):
        loss.backward(retain_graph=True)
    for leaf, gradient in zip(leaves, expected):
        assert_near(leaf.grad, 2 * gradient.double(), 1e-6)


def test_a_loss_scale_saves_small_gradients_in_half_precision(device):
    """Each is a ten-millionth or so: next to nothing in fp16 unless it is scaled before it is rounded."""
    (hidden, weight, _), target = layer(torch.float16, device, rows=5000)
    scale = 2.0**16
    _, expected_gradients = in_double([hidden, weight, weight[:, 0]], target, False, None)
    loss = linear_cross_entropy(hidden, weight, target)
    result = torch.autograd.grad(loss * scale, [hidden, weight])
    for ours, theirs in zip(result, expected_gradients):
        assert_near(ours.double() / scale * 0.5, theirs, 2e-3)


def test_many_chunks_add_up_in_fp32(device):
    """Added up in bfloat16, 100 chunks would lose most of the sum."""
    (hidden, weight, bias), target = layer(torch.bfloat16, device, rows=800)
    _, expected_gradients = in_double([hidden, weight, bias], target, True, None, reduction="sum")
    loss = linear_cross_entropy(hidden, weight, target, bias, reduction="sum", chunk_size=8)
    for ours, theirs in zip(gradients(loss, [hidden, weight, bias]), expected_gradients):
        assert_near(ours, theirs, 2e-2)


def largest_allocation(function):
    """In bytes, by whatever code."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    return max(event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_logits_never_exist(device, reduction):
    rows, width, size = 2048, 16, 4096
    hidden = torch.randn(rows, width, device=device, requires_grad=True)
    weight = torch.randn(size, width, device=device, requires_grad=True)
    target = torch.randint(0, size, (rows,), device=device)

    def pair():
        F.cross_entropy(F.linear(hidden, weight), target, reduction=reduction).sum().backward()

    def fused():
        linear_cross_entropy(hidden, weight, target, reduction=reduction).sum().backward()

    def parallel():
        parallel_linear_cross_entropy(
            hidden, weight, target, lambda mine: mine[None], vocab_start=0, vocab_size=size, reduction=reduction
        ).sum().backward()

    logits = rows * size * 4
    assert largest_allocation(pair) >= logits
    # A chunk is at least 256 rows, an eighth of these. CUDA's caching allocator does not split off up to 1 MiB.
    largest = logits // 8 + (2**20 if device.type == "cuda" else 0)
    assert largest_allocation(fused) <= largest
    assert largest_allocation(parallel) <= largest


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_sums_in_fp32_take_few_passes_and_hardly_more_memory_than_their_rounding(device, reduction):
    rows, width, size = 768, 512, 2048
    hidden, weight = (torch.randn(n, width, device=device).bfloat16().requires_grad_() for n in (rows, size))
    target = torch.randint(0, size, (rows,), device=device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        chunk_size = 384 if device.type == "cuda" else None
        loss = linear_cross_entropy(hidden, weight, target, reduction=reduction, chunk_size=chunk_size)
        gradients(loss, [hidden, weight])
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    peak = max(itertools.accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    # The gradient of the input; that of the weight in fp32 and rounded, and a quarter of it to be added, in fp32.
    expected = hidden.nbytes + weight.numel() * (4 + 2 + 1) + 2**18
    if device.type == "cuda":
        expected += 2**21
    elif torch.cpu._is_amx_tile_supported():
        expected += hidden.nbytes + weight.nbytes  # for products in tiles, oneDNN copies operands into its own memory
    assert peak <= expected
    additions = 2 * 4  # of 384 rows, a quarter of the classes
    if device.type == "cuda" and adds_products_in_fp32(torch.bfloat16):
        additions = 0
    assert sum(event.name() == "aten::add_" for event in events) == additions


@pytest.mark.parametrize("split", [(0, 20, V), (0, 9, 9, V)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_ranks_have_the_loss_their_rows_and_their_part_of_the_input_gradient(device, dtype, split):
    leaves, target = layer(dtype, device)
    hidden, weight, bias = leaves
    ranges = list(itertools.pairwise(split))
    for settings in SETTINGS:
        biased, class_weight, options = options_of(settings, device)
        statistics, results = [], []

        def gather(mine, statistics=statistics):
            statistics.append(mine)
            return torch.stack(statistics[: len(ranges)]) if len(statistics) > len(ranges) else mine[None]

        for start, stop in ranges * 2:  # a round to collect the statistics, and one with all of them
            part = [hidden, weight[start:stop], bias[start:stop]]
            loss = parallel_linear_cross_entropy(
                *part[:2],
                target,
                gather,
                part[2] if biased else None,
                vocab_start=start,
                vocab_size=V,
                class_weight=class_weight,
                chunk_size=7,
                **options,
            )
            results.append((loss, gradients(loss, part if biased else part[:2], retain_graph=True)))
        results = results[len(ranges) :]
        expected, expected_gradients = in_double(leaves, target, biased, class_weight, **options)
        assert len(statistics) == 2 * len(ranges)
        assert all(torch.equal(loss, results[0][0]) for loss, _ in results)
        assert_near(results[0][0], expected, 10 * TOLERANCE[dtype])
        result = [sum(parts[0].double() for _, parts in results)]
        result += [torch.cat([parts[i] for _, parts in results]) for i in range(1, 3 if biased else 2)]
        for ours, theirs in zip(result, expected_gradients):
            assert_near(ours, theirs, TOLERANCE[dtype])


def test_autocast_does_what_it_does_to_the_pair():
    leaves, target = layer()
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(*leaves[:2], target, leaves[2])
        expected = F.cross_entropy(F.linear(*leaves), target)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(gradients(loss, leaves), gradients(expected, leaves)):
        assert ours.dtype is torch.float32
        assert_near(ours, theirs.double(), 2e-2)


WRONG = {
    "layer": (lambda h, w, t: linear_cross_entropy(h[:, :3], w, t), ValueError, r"not \(..., H\) and \(V, H\)"),
    "target": (lambda h, w, t: linear_cross_entropy(h, w, t[:3]), ValueError, r"target has shape \(3,\); .* \(33,\)"),
    "bias": (lambda h, w, t: linear_cross_entropy(h, w, t, h[0]), ValueError, r"bias has shape \(8,\); weight has 37"),
    "dtype": (lambda h, w, t: linear_cross_entropy(h, w.half(), t), TypeError, "weight has dtype torch.float16"),
    "device": (lambda h, w, t: linear_cross_entropy(h, w.to("meta"), t), ValueError, "weight is on meta"),
    "chunk": (lambda h, w, t: linear_cross_entropy(h, w, t, chunk_size=0), ValueError, "chunk_size is 0"),
    "reduction": (lambda h, w, t: linear_cross_entropy(h, w, t, reduction="avg"), ValueError, "'avg' is unknown"),
    "class weight": (
        lambda h, w, t: linear_cross_entropy(h, w, t, class_weight=h[0].detach()),
        ValueError,
        r"class_weight has shape \(8,\); 37 classes need \(37,\)",
    ),
    "range": (lambda h, w, t: linear_cross_entropy(h, w, t + 200), IndexError, "is neither a class"),
    "columns": (
        lambda h, w, t: parallel_linear_cross_entropy(h, w, t, None, vocab_start=4, vocab_size=40),
        ValueError,
        "local_weight has 37 classes from vocab_start=4 on",
    ),
    "twice": (
        lambda h, w, t: torch.autograd.grad(linear_cross_entropy(h, w, t), h, create_graph=True),
        RuntimeError,
        "linear_cross_entropy can be differentiated only once",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_call_is_named(case):
    (hidden, weight, _), target = layer()
    call, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        call(hidden, weight, target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, N])
def test_the_mean_over_nothing_is_nan_and_its_gradients_zero(device, dtype, rows):
    leaves, target = layer(dtype, device)
    hidden, weight, bias = leaves
    nothing = torch.full_like(target[:rows], -100)
    loss = linear_cross_entropy(hidden[:rows], weight, nothing, bias)
    assert loss.isnan()
    assert all((gradient == 0).all() for gradient in gradients(loss, leaves))


def test_no_tokens():
    (hidden, weight, bias), target = layer()
    for reduction in ("mean", "sum", "none"):
        loss = linear_cross_entropy(hidden[:0], weight, target[:0], bias, reduction=reduction)
        assert torch.equal(torch.autograd.grad(loss.sum(), weight)[0], torch.zeros_like(weight))
        assert loss.isnan().all() if reduction == "mean" else loss.sum() == 0


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_into_one_graph_it_is_the_same(reduction):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    leaves, target = layer(device=device)

    def full(hidden, weight, bias):
        return linear_cross_entropy(hidden * 2, weight, target, bias, reduction=reduction)

    def part(hidden, weight, bias):
        return parallel_linear_cross_entropy(
            hidden * 2, weight, target, lambda s: s[None], bias, vocab_start=0, vocab_size=V, reduction=reduction
        )

    for function in (full, part):
        torch._dynamo.reset()
        results = []
        for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            loss = run(*leaves)
            results.append((loss, *gradients(loss, leaves)))
        for ours, theirs in zip(*results):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_graph_serves_any_number_of_tokens(reduction):
    """A second one may serve those so few that a chunk has its least size."""
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend=graphs, dynamic=True)
    for rows in (500, 3000, 4001, 6000):
        leaves, target = layer(rows=rows)
        results = [function(*leaves[:2], target, reduction=reduction) for function in (linear_cross_entropy, compiled)]
        for ours, theirs in zip(*([loss, *gradients(loss, leaves[:2])] for loss in results)):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert graphs.frame_count <= 2


def test_meta_tensors_give_shapes():
    (hidden, weight, bias), target = (
        [leaf.detach().to("meta").requires_grad_() for leaf in leaves]
        if isinstance(leaves, list)
        else leaves.to("meta")
        for leaves in layer()
    )
    loss = linear_cross_entropy(hidden, weight, target, bias, reduction="none")
    assert loss.shape == (N,)
    assert gradients(loss, [weight])[0].shape == (V, H)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch 2.14 of its own read
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_registered_operations_hold_what_pytorch_asks_of_them(dtype):
    leaves, target = layer(dtype)
    classes = (target, None, 0, V, -100, 0.1)
    operations = torch.ops.bmt_kernels
    constants = [leaf.detach() for leaf in leaves]
    torch.library.opcheck(operations.linear_cross_entropy_statistics.default, (*constants, *classes, 7))
    for reduction in ("mean", "none"):
        arguments = (*leaves, None, *classes, reduction, 7, True, True, True)
        torch.library.opcheck(operations.linear_cross_entropy_loss.default, arguments)
    normalizers = operations.linear_cross_entropy_loss(*constants, None, *classes, "none", 7, True, True, True)[1]
    scale = torch.ones(N)
    torch.library.opcheck(
        operations.linear_cross_entropy_gradient.default,
        (scale, *constants, normalizers, *classes, 7, True, False, True),
    )


def test_forward_mode_is_refused():
    hidden, weight, target = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 4])
    with torch.autograd.forward_ad.dual_level():
        wanted = linear_cross_entropy(hidden, weight, target)  # without a tangent
        dual = torch.autograd.forward_ad.make_dual(hidden, torch.ones_like(hidden))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            linear_cross_entropy(dual, weight, target)
    assert torch.equal(linear_cross_entropy(hidden, weight, target), wanted)
