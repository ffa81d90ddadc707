"""Differentiable collectives against the same functions of one stacked tensor in plain torch."""

import pytest
import torch

import bmt_comm
from bmt_comm import collectives

SHAPES = [(), (0,), (4,), (4, 3), (8, 0, 2), (4, 1, 5)]
OPS = ["sum", "avg", "max", "min", "prod"]


def stacked_input(size, shape, dtype=torch.float64, zeros=True):
    """Every rank's input, (size, *shape), the same on every rank: small integers, so with ties and zeros."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(-2 if zeros else 1, 3, (size, *shape), generator=generator).to(dtype).requires_grad_()


def weights(size, shape, dtype=torch.float64):
    """A weight for each element of each rank's output: each rank's loss is its own. Quarters: sums are exact."""
    generator = torch.Generator().manual_seed(11)
    return torch.randint(-8, 9, (size, *shape), generator=generator).to(dtype) / 4


def reduced(x, op):
    """The reduction over dim 0 in plain torch, with the gradient of a tie shared equally."""
    if op in ("max", "min"):
        return x.amax(0) if op == "max" else x.amin(0)
    if op == "prod":
        result = torch.ones_like(x[0])
        for part in x:
            result = result * part
        return result
    return x.sum(0) if op == "sum" else x.mean(0)


def check(function, reference, shape, ctx, device, dtype=torch.float64, tolerance=None):
    """``function(x)`` on every rank, and the gradient of the sum over ranks of ``(w[rank] * output).sum()``."""
    size, rank = ctx.world_size, ctx.rank
    x_all = stacked_input(size, shape, dtype)
    expected = reference(x_all)  # (size, *output shape)
    w = weights(size, expected.shape[1:], dtype)
    (expected_grad,) = torch.autograd.grad((w * expected).sum(), x_all)
    x = x_all[rank].detach().to(device).requires_grad_()
    out = function(x)
    (grad,) = torch.autograd.grad((w[rank].to(device) * out).sum(), x)
    rtol, atol = tolerance or (1e-12, 1e-12)
    torch.testing.assert_close(out.detach().cpu(), expected[rank].detach(), rtol=rtol, atol=atol)
    torch.testing.assert_close(grad.cpu(), expected_grad[rank], rtol=rtol, atol=atol)
    torch.testing.assert_close(x.detach().cpu(), x_all[rank].detach(), rtol=0, atol=0)  # the input is left as it is


def everywhere(result, size):
    return result.expand(size, *result.shape)


@pytest.mark.ranks(1, 2, 3, 4)
def test_all_gather_backward_sums_what_every_rank_did_with_my_part(ctx, device_type):
    for shape in SHAPES:
        check(bmt_comm.all_gather, lambda x: everywhere(x, len(x)), shape, ctx, device_type)


@pytest.mark.ranks(1, 2, 3, 4)
def test_all_reduce_backward_is_the_gradient_of_every_op(ctx, device_type):
    for op in OPS:
        for shape in SHAPES:
            check(
                lambda x: bmt_comm.all_reduce(x, op),  # noqa: B023
                lambda x: everywhere(reduced(x, op), len(x)),  # noqa: B023
                shape,
                ctx,
                device_type,
            )


@pytest.mark.ranks(1, 2, 3, 4)
def test_reduce_scatter_backward_is_the_gradient_of_every_op(ctx, device_type):
    for op in OPS:
        for shape in [(12,), (12, 3), (0, 2), (24, 0), (12, 1, 5)]:
            check(
                lambda x: bmt_comm.reduce_scatter(x, op),  # noqa: B023
                lambda x: reduced(x, op).unflatten(0, (len(x), x.shape[1] // len(x))),  # noqa: B023
                shape,
                ctx,
                device_type,
            )


@pytest.mark.ranks(1, 2, 3, 4)
def test_broadcast_backward_goes_to_the_root_alone(ctx, device_type):
    for root in range(ctx.world_size):
        for shape in SHAPES:
            check(
                lambda x: bmt_comm.broadcast(x, root),  # noqa: B023
                lambda x: everywhere(x[root], len(x)),  # noqa: B023
                shape,
                ctx,
                device_type,
            )


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_precisions_and_large_tensors(ctx, device_type, dtype):
    # 140 000 elements: in both dtypes too large for a one-shot all-reduce.
    tolerance = (1e-6, 1e-6) if dtype == torch.float32 else (1e-2, 1e-2)
    for shape in [(8, 3), (140_000,)]:
        for op in OPS:
            check(
                lambda x: bmt_comm.all_reduce(x, op),  # noqa: B023
                lambda x: everywhere(reduced(x, op), len(x)),  # noqa: B023
                shape,
                ctx,
                device_type,
                dtype,
                tolerance,
            )
        check(bmt_comm.all_gather, lambda x: everywhere(x, len(x)), shape, ctx, device_type, dtype, tolerance)


@pytest.mark.ranks(2, 3)
def test_the_gradient_of_a_complex_product(ctx, device_type):
    size = ctx.world_size
    generator = torch.Generator().manual_seed(5)
    everyone = torch.randn(size, 2 * size, dtype=torch.complex128, generator=generator).requires_grad_()
    w = torch.randn(size, 2 * size, dtype=torch.complex128, generator=generator)
    (wanted,) = torch.autograd.grad((w * reduced(everyone, "prod")).sum().real, everyone)
    x = everyone.detach()[ctx.rank].to(device_type).requires_grad_()
    (grad,) = torch.autograd.grad((w[ctx.rank].to(device_type) * bmt_comm.all_reduce(x, "prod")).sum().real, x)
    torch.testing.assert_close(grad.cpu(), wanted[ctx.rank])
    (wanted,) = torch.autograd.grad((w[:, :2] * reduced(everyone, "prod").view(size, 2)).sum().real, everyone)
    part = bmt_comm.reduce_scatter(x, "prod")
    (grad,) = torch.autograd.grad((w[ctx.rank, :2].to(device_type) * part).sum().real, x)
    torch.testing.assert_close(grad.cpu(), wanted[ctx.rank])


@pytest.mark.ranks(2, 3)
def test_any_strides_in_and_gradients_of_any_strides_back(ctx, device_type):
    size = ctx.world_size

    def strided(x):  # (B, S) as columns of something larger
        return x.t().contiguous().t()[::2]

    def both(function, reference):
        # .t() behind the collective: the gradient that arrives is not contiguous, either.
        check(lambda x: function(strided(x)).transpose(0, -1), reference, (12, 6), ctx, device_type)

    def ref(f):
        return lambda x: f(x[:, ::2]).transpose(1, -1)

    both(bmt_comm.all_gather, ref(lambda x: everywhere(x, size)))
    both(lambda x: bmt_comm.broadcast(x, 1), ref(lambda x: everywhere(x[1], size)))
    for op in OPS:
        both(lambda x: bmt_comm.all_reduce(x, op), ref(lambda x: everywhere(reduced(x, op), size)))  # noqa: B023
        both(
            lambda x: bmt_comm.reduce_scatter(x, op),  # noqa: B023
            ref(lambda x: reduced(x, op).unflatten(0, (size, 6 // size))),  # noqa: B023
        )
    # Lazily conjugated inputs and gradients.
    x = torch.tensor([[1 + 2j, 3j], [0.5, 1 - 1j]] * size, device=device_type, requires_grad=True)
    for function in (bmt_comm.all_gather, bmt_comm.all_reduce, bmt_comm.reduce_scatter):
        y = function(x.conj())
        (grad,) = torch.autograd.grad((y.conj() * 2j).sum().real, x)
        torch.testing.assert_close(y, function(x.conj().resolve_conj()))
        torch.testing.assert_close(grad, torch.full_like(x, -2j * (1 if function is bmt_comm.reduce_scatter else size)))
    # A gradient with stride 0, as sum() makes it.
    x = torch.ones(3, device=device_type, requires_grad=True)
    bmt_comm.all_gather(x).sum().backward()
    assert x.grad.tolist() == [float(size)] * 3


@pytest.mark.ranks(2, 4)
def test_ties_share_the_gradient_and_zeros_do_not_lose_it(ctx, device_type):
    n, rank = ctx.world_size, ctx.rank
    x = torch.tensor([1.0, float(rank)], device=device_type, requires_grad=True)
    bmt_comm.all_reduce(x, "max").sum().backward()
    assert x.grad.tolist() == [1.0, n * float(rank == n - 1)]
    x = torch.tensor([0.0 if rank == 0 else 3.0, 0.0 if rank < 2 else 5.0], device=device_type, requires_grad=True)
    bmt_comm.all_reduce(x, "prod").sum().backward()
    assert x.grad.tolist() == [n * 3.0 ** (n - 1) if rank == 0 else 0.0, 0.0]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8], ids=str)
def test_integers(ctx, device_type, dtype):
    n, rank = ctx.world_size, ctx.rank
    x = torch.arange(6, device=device_type, dtype=dtype) + rank
    stack = torch.stack([torch.arange(6) + r for r in range(n)])
    assert bmt_comm.all_gather(x).tolist() == stack.tolist()
    assert bmt_comm.broadcast(x, 1).tolist() == stack[1].tolist()
    for op in ("sum", "max", "min", "prod"):
        expected = reduced(stack, op)
        assert bmt_comm.all_reduce(x, op).tolist() == expected.tolist()
        assert bmt_comm.reduce_scatter(x, op).tolist() == expected.view(n, -1)[rank].tolist()


@pytest.mark.ranks(4, tp_size=2)
def test_a_communicator_that_is_not_the_world(ctx, device_type):
    x = torch.full((3,), float(ctx.rank), device=device_type, requires_grad=True)
    out = bmt_comm.all_gather(x, ctx.tp)
    assert out[:, 0].tolist() == [float(r) for r in ctx.tp.ranks]
    (out * (1 + ctx.rank)).sum().backward()
    assert x.grad.tolist() == [float(sum(1 + r for r in ctx.tp.ranks))] * 3
    root = bmt_comm.broadcast(torch.tensor(float(ctx.rank), device=device_type), 1, ctx.tp_zero)
    assert root.item() == ctx.tp_zero.ranks[1]


@pytest.mark.ranks(2, 3)
def test_send_and_recv_pass_values_on_and_gradients_back(ctx, device_type):
    n, rank = ctx.world_size, ctx.rank
    for shape in [(), (0,), (3,), (2, 0, 4), (2, 3, 4)]:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            x0 = stacked_input(1, shape, dtype, zeros=False)[0].detach().to(device_type)
            leaf = x0.clone().requires_grad_()
            # x → 2x on the next rank → … ; the last rank's loss is the sum of squares.
            h = leaf * 1 if rank == 0 else bmt_comm.recv_activations(rank - 1, ctx.world) * 2
            assert h.shape == shape
            assert h.dtype == dtype
            assert h.requires_grad
            if rank < n - 1:
                sent = bmt_comm.send_activations(h, rank + 1, ctx.world)
                assert (sent.shape, sent.item()) == ((), 0.0)
                sent.backward()
            else:
                (h**2).sum().backward()
            if rank == 0:
                torch.testing.assert_close(leaf.grad, 2 * 4 ** (n - 1) * x0)


@pytest.mark.ranks(2)
def test_send_and_recv_of_what_needs_no_gradient(ctx, device_type):
    made = [
        torch.arange(5),
        torch.tensor([True, False]),
        torch.arange(6.0).view(2, 3).t(),
        torch.ones(2, 2, dtype=torch.int16),
    ]
    for x in made:
        if ctx.rank == 0:
            assert not bmt_comm.send_activations(x.to(device_type), 1, ctx.world).requires_grad
        else:
            got = bmt_comm.recv_activations(0, ctx.world)
            assert not got.requires_grad
            torch.testing.assert_close(got.cpu(), x)
    # A sender under no_grad will run no backward: the receiver must not send it a gradient.
    if ctx.rank == 0:
        with torch.no_grad():
            bmt_comm.send_activations(torch.ones(2, device=device_type, requires_grad=True), 1, ctx.world)
    else:
        assert not bmt_comm.recv_activations(0, ctx.world).requires_grad


@pytest.mark.ranks(2)
def test_a_second_derivative_is_refused_and_not_wrong(ctx, device_type):
    x = torch.ones(2, device=device_type, requires_grad=True)
    y = bmt_comm.all_reduce(x**2)
    (grad,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.ranks(2)
def test_wrong_calls_are_refused_before_anything_is_sent(ctx, device_type):
    x = torch.ones(3, device=device_type)
    for call, message in [
        (lambda: bmt_comm.all_reduce(x, "mean"), r"op='mean' is not a reduction; choose one of sum, avg"),
        (lambda: bmt_comm.reduce_scatter(torch.ones(2), "mean"), "op='mean' is not a reduction"),
        (lambda: bmt_comm.reduce_scatter(x), r"dim 0 of x \(shape \(3,\)\) must be divisible by the 2 ranks"),
        (lambda: bmt_comm.reduce_scatter(x.sum()), r"dim 0 of x \(shape \(\)\)"),
        (lambda: bmt_comm.broadcast(x, 2), r"root=2 is not a rank of this communicator \(0 to 1\)"),
        (lambda: bmt_comm.send_activations(x, ctx.rank, ctx.world), "this rank itself"),
        (lambda: bmt_comm.recv_activations(-1, ctx.world), "peer=-1 is not a rank"),
        (lambda: bmt_comm.send_activations(x.view((1,) * 16 + (3,)), 1 - ctx.rank, ctx.world), "cannot send"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert bmt_comm.all_reduce(x).tolist() == [2.0] * 3


def test_before_init_the_default_communicator_is_an_error():
    with pytest.raises(RuntimeError, match="call init_distributed"):
        bmt_comm.all_reduce(torch.ones(1))


def test_share_of_a_product_has_no_division():
    everyone = torch.tensor([[2.0, 0.0, 0.0], [3.0, 5.0, 0.0], [4.0, 6.0, 7.0]])
    share = collectives._share(everyone, "prod", everyone.prod(0))
    assert share.tolist() == [[12.0, 30.0, 0.0], [8.0, 0.0, 0.0], [6.0, 0.0, 0.0]]
