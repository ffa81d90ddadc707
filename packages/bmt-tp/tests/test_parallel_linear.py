"""Column- and row-parallel maps against torch's linear layer on unsharded tensors."""

import itertools
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bmt_comm import init_distributed, local_tensor
from bmt_tp import (
    ColumnParallelLinear,
    Linear,
    OpParallelLinear,
    ReduceType,
    RowParallelLinear,
    column_parallel,
    full_state_dict,
    load_full_state_dict,
)

IN, OUT = 24, 36  # divisible by 1, 2, 3 and 4
SIZES = (1, 2, 3, 4)


def start():
    """All ranks are tensor-parallel."""
    return init_distributed(tp_size=int(os.environ["WORLD_SIZE"]))


def full_tensors(shape=(2, 12), dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def random(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    return random(*shape, IN), random(OUT, IN), random(OUT), random(*shape, OUT)


def part(x, dim, ctx):
    return x.chunk(ctx.tp_size, dim)[ctx.tp_rank]


def leaf(x):
    return x.detach().clone().requires_grad_()


def reference(x, weight, bias, factor):
    """The output and the gradients of Σ y · factor for plain tensors."""
    x, weight, bias = map(leaf, (x, weight, bias))
    y = F.linear(x, weight, bias)
    (y * factor).sum().backward()
    return y.detach(), x.grad, weight.grad, bias.grad


def close(a, b, tolerance=1e-12):
    assert a.shape == b.shape
    assert (a.double() - b.double()).abs().max() <= tolerance * b.double().abs().max()


LAYOUTS = list(itertools.product((-2, 0), (1, 2, 5)))  # dimension of the sequence, chunks


@pytest.mark.ranks(*SIZES, init=False)
@pytest.mark.parametrize("gather_input", [True, False])
@pytest.mark.parametrize("gather_output", [True, False])
def test_column_parallel(gather_input, gather_output):
    ctx = start()
    x, weight, bias, factor = full_tensors((12, 12))
    y, grad_x, grad_weight, grad_bias = reference(x, weight, bias, factor)
    for sequence_dim, chunks in LAYOUTS:
        mine = leaf(part(x, sequence_dim, ctx) if gather_input else x)
        my_weight, my_bias = leaf(part(weight, 0, ctx)), leaf(part(bias, 0, ctx))
        out = OpParallelLinear.apply(
            mine, my_weight, my_bias, gather_input, gather_output, False, None, chunks, sequence_dim=sequence_dim
        )
        (out * (factor if gather_output else part(factor, -1, ctx))).sum().backward()
        close(out, y if gather_output else part(y, -1, ctx))
        close(mine.grad, part(grad_x, sequence_dim, ctx) if gather_input else grad_x)
        close(my_weight.grad, part(grad_weight, 0, ctx))
        close(my_bias.grad, part(grad_bias, 0, ctx))


@pytest.mark.ranks(*SIZES, init=False)
@pytest.mark.parametrize(("split_input", "gather_input"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("reduce", list(ReduceType))
def test_row_parallel(reduce, split_input, gather_input):
    ctx = start()
    x, weight, bias, factor = full_tensors((12, 12))
    y, grad_x, grad_weight, grad_bias = reference(x, weight, bias, factor)
    for sequence_dim, chunks in LAYOUTS:
        mine = x if split_input else part(x, -1, ctx)
        mine = leaf(part(mine, sequence_dim, ctx) if gather_input else mine)
        my_weight, my_bias = leaf(part(weight, 1, ctx)), leaf(bias)
        out = OpParallelLinear.apply(
            mine, my_weight, my_bias, gather_input, False, split_input, reduce, chunks, sequence_dim=sequence_dim
        )
        scattered = reduce is ReduceType.REDUCE_SCATTER
        (out * (part(factor, sequence_dim, ctx) if scattered else factor)).sum().backward()
        close(out, part(y, sequence_dim, ctx) if scattered else y)
        expected = grad_x if split_input else part(grad_x, -1, ctx)
        close(mine.grad, part(expected, sequence_dim, ctx) if gather_input else expected)
        close(my_weight.grad, part(grad_weight, 1, ctx))
        close(my_bias.grad, grad_bias)  # complete, on every rank


@pytest.mark.ranks(2, init=False)
@pytest.mark.parametrize("shape", [(12,), (1, 12), (2, 3, 12), (12, 1)])
def test_any_leading_dimensions(shape):
    ctx = start()
    x, weight, bias, factor = full_tensors(shape)
    y, grad_x, *_ = reference(x, weight, bias, factor)
    mine = leaf(x)
    inner = OpParallelLinear.apply(mine, part(weight, 0, ctx), part(bias, 0, ctx))
    (inner * part(factor, -1, ctx)).sum().backward()
    close(inner, part(y, -1, ctx))
    close(mine.grad, grad_x)


@pytest.mark.ranks(2, tp_size=2)
def test_combinations_without_meaning(ctx):
    x, weight, bias, _ = full_tensors()
    apply = OpParallelLinear.apply
    with pytest.raises(ValueError, match="split_input=True without reduce_output_type"):
        apply(x, weight, bias, split_input=True)
    with pytest.raises(ValueError, match="gather_output=True is for column-parallel"):
        apply(x, weight, bias, gather_output=True, reduce_output_type=1)
    with pytest.raises(ValueError, match="gather_input=True with reduce_output_type needs split_input=True"):
        apply(x, weight, bias, gather_input=True, reduce_output_type=2)
    with pytest.raises(ValueError, match="3 is not a valid ReduceType"):
        apply(x, weight, bias, reduce_output_type=3)
    with pytest.raises(ValueError, match=r"dimension 1 of shape \(2, 3, 24\) cannot be split evenly over 2 tensor"):
        apply(x[:, :3], weight, bias, reduce_output_type=2)
    with pytest.raises(ValueError, match="sequence_dim=-1 of x"):
        apply(x, weight, bias, gather_input=True, sequence_dim=-1)
    with pytest.raises(ValueError, match="number of chunks is 0"):
        apply(x, weight, bias, async_gather_chunks=0)
    with pytest.raises(ValueError, match=r"a weight of shape \(36, 24\) takes \(\*, 24\)"):
        apply(x[..., :5], weight)


@pytest.mark.ranks(2, tp_size=2)
def test_frozen_tensors_get_no_gradient_and_the_others_do(ctx):
    x, weight, bias, factor = full_tensors()
    _, grad_x, grad_weight, grad_bias = reference(x, weight, bias, factor)
    for trained in range(3):
        tensors = [part(x, -2, ctx), part(weight, 0, ctx), part(bias, 0, ctx)]
        tensors[trained] = leaf(tensors[trained])
        out = OpParallelLinear.apply(*tensors, True)
        (out * part(factor, -1, ctx)).sum().backward()
        expected = [part(grad_x, -2, ctx), part(grad_weight, 0, ctx), part(grad_bias, 0, ctx)]
        close(tensors[trained].grad, expected[trained])


@pytest.mark.ranks(2, tp_size=2)
def test_only_this_ranks_part_of_the_sequence_is_kept_for_backward(ctx):
    x, weight, bias, _ = full_tensors()
    kept = []
    mine = leaf(part(x, 1, ctx))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        OpParallelLinear.apply(mine, leaf(part(weight, 0, ctx)), part(bias, 0, ctx), True)
    assert sum(kept) == mine.numel() + weight.numel() // 2


@pytest.mark.ranks(2, tp_size=2)
def test_autocast(ctx):
    x, weight, bias, factor = full_tensors(dtype=torch.float32)
    y, grad_x, grad_weight, _ = reference(x, weight, bias, factor)
    mine, my_weight, my_bias = leaf(part(x, 1, ctx)), leaf(part(weight, 0, ctx)), leaf(part(bias, 0, ctx))
    row_weight = leaf(torch.eye(OUT)[:, ctx.tp_rank * OUT // 2 :][:, : OUT // 2])
    with torch.autocast("cpu", torch.bfloat16):
        inner = OpParallelLinear.apply(mine, my_weight, my_bias, True)
        assert inner.dtype == torch.bfloat16
        out = OpParallelLinear.apply(inner, row_weight, None, reduce_output_type=2)
    (out * part(factor, 1, ctx)).sum().backward()
    close(out, part(y, 1, ctx), 2e-2)
    close(mine.grad, part(grad_x, 1, ctx), 2e-2)
    close(my_weight.grad, part(grad_weight, 0, ctx), 2e-2)


@pytest.mark.ranks(2, tp_size=2)
def test_autocast_leaves_double_precision_alone(ctx):
    x, weight, bias, _ = full_tensors()
    with torch.autocast("cpu", torch.bfloat16):
        out = OpParallelLinear.apply(part(x, 1, ctx), part(weight, 0, ctx), part(bias, 0, ctx), True)
    close(out, part(F.linear(x, weight, bias), -1, ctx))


@pytest.mark.ranks(2, tp_size=2)
@pytest.mark.parametrize("shape", [(0, 4), (2, 0)], ids=["no sequences", "empty sequences"])
def test_a_batch_without_tokens(ctx, shape):
    x, weight = torch.zeros(*shape, IN, requires_grad=True), torch.zeros(IN, IN, requires_grad=True)
    for options in ({"gather_input": True, "gather_output": True}, {}, {"reduce_output_type": 1}):
        OpParallelLinear.apply(x, weight, **options).sum().backward()
    OpParallelLinear.apply(x, weight, reduce_output_type=2).sum().backward()
    assert x.grad.shape == x.shape
    assert torch.equal(weight.grad, torch.zeros(IN, IN))


@pytest.mark.ranks(2, tp_size=2)
def test_one_layer_used_twice_and_a_second_backward(ctx):
    x, weight, bias, factor = full_tensors()
    tensors = [leaf(x), leaf(weight[:IN]), leaf(bias[:IN])]
    mine = [leaf(x), leaf(part(weight[:IN], 0, ctx)), leaf(part(bias[:IN], 0, ctx))]
    expected = torch.tanh(F.linear(torch.tanh(F.linear(*tensors)), *tensors[1:]))
    inner = torch.tanh(OpParallelLinear.apply(*mine, gather_output=True))
    out = torch.tanh(OpParallelLinear.apply(inner, *mine[1:], gather_output=True))
    for y in (expected, out):
        loss = (y * factor[..., :IN]).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    close(mine[0].grad, tensors[0].grad)
    for shard, logical in zip(mine[1:], tensors[1:], strict=True):
        close(shard.grad, part(logical.grad, 0, ctx))


# --- layers ---------------------------------------------------------------------------------------


class Pair(nn.Module):
    """Column parallel, then row parallel, as a transformer's feed-forward."""

    def __init__(self, sequence):
        super().__init__()
        self.up = ColumnParallelLinear(IN, OUT, gather_input=sequence)
        self.down = RowParallelLinear(OUT, IN, all_reduce_output=not sequence)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


@pytest.mark.ranks(*SIZES, init=False)
@pytest.mark.parametrize("sequence", [True, False])
def test_training_is_that_of_unsharded_linear_layers(sequence):
    ctx = start()
    torch.manual_seed(0)
    plain = nn.ModuleDict({"up": nn.Linear(IN, OUT), "down": nn.Linear(OUT, IN)})
    first = {name: value.clone() for name, value in plain.state_dict().items()}
    torch.manual_seed(0)
    model = Pair(sequence)
    load_full_state_dict(model, first)
    for which in (plain, model):
        optimizer = torch.optim.SGD(which.parameters(), lr=0.1, momentum=0.9)
        for step in range(10):
            x = torch.randn(2, 12, IN, generator=torch.Generator().manual_seed(step))
            if which is plain:
                loss = plain["down"](torch.tanh(plain["up"](x))).square().mean()
            else:
                y = model(part(x, 1, ctx) if sequence else x)
                # A part of the sequence is a part of the one loss.
                loss = y.square().mean() / (ctx.tp_size if sequence else 1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    after = full_state_dict(model)
    assert list(after) == list(first)
    for name, value in plain.state_dict().items():
        update, expected = after[name] - first[name], value - first[name]
        assert (update - expected).norm() <= 1e-5 * expected.norm(), name


@pytest.mark.ranks(1, 2, 3, init=False)
def test_initial_values_are_those_of_torch_linear():
    ctx = start()
    torch.manual_seed(3)
    plain = nn.Linear(IN, OUT)
    for layer in (ColumnParallelLinear, RowParallelLinear):
        torch.manual_seed(3)
        state = full_state_dict(layer(IN, OUT))
        for name, value in plain.state_dict().items():
            assert torch.equal(state[name], value), (layer, name, ctx)


@pytest.mark.ranks(2, tp_size=2)
def test_a_rank_stores_its_part(ctx):
    column = ColumnParallelLinear(IN, OUT)
    row = RowParallelLinear(IN, OUT)
    column_numel = sum(local_tensor(p).numel() for p in column.parameters())
    row_weight = row._parameters["weight"]
    assert column_numel == (IN * OUT + OUT) // 2
    assert local_tensor(row_weight).numel() == IN * OUT // 2
    assert column._parameters["weight"].bmt_slice.tp_offset == ctx.tp_rank * OUT // 2
    assert row_weight.bmt_slice.offset == (0, ctx.tp_rank * IN // 2)


@pytest.mark.ranks(2, tp_size=2)
def test_layers_on_one_input_share_its_gather_and_its_reduction(ctx):
    torch.manual_seed(0)
    layers = [ColumnParallelLinear(IN, OUT, bias=bias) for bias in (True, False, True)]
    x = torch.randn(2, 12, IN)
    alone, together = leaf(part(x, 1, ctx)), leaf(part(x, 1, ctx))
    expected = [layer(alone) for layer in layers]
    sum(y.square().sum() for y in expected).backward()
    before = {op: count.calls for op, count in ctx.tp.traffic.items()}
    outputs = column_parallel(together, layers)
    sum(y.square().sum() for y in outputs).backward()
    calls = {op: count.calls - before.get(op, 0) for op, count in ctx.tp.traffic.items()}
    for a, b in zip(outputs, expected, strict=True):
        assert torch.equal(a, b)
    close(together.grad, alone.grad, 1e-6)
    # Two chunks forward, the input once more in backward; its gradient once.
    assert calls["all_gather"] == 3
    assert calls["reduce_scatter"] == 1
    with pytest.raises(ValueError, match="layers is empty"):
        column_parallel(x, [])


@pytest.mark.ranks(2, tp_size=2)
def test_wrong_sizes_are_named(ctx):
    for arguments, message in [
        ((3, 5), "out_features=5 cannot be divided over 2"),
        ((3, -2), "out_features=-2 must be a positive"),
        ((0, 2), "in_features=0 must be a positive"),
    ]:
        with pytest.raises(ValueError, match=message):
            ColumnParallelLinear(*arguments)
    with pytest.raises(ValueError, match="in_features=5 cannot be divided over 2"):
        RowParallelLinear(5, 3)
    with pytest.raises(TypeError, match=r"torch\.int64 cannot be trained"):
        RowParallelLinear(4, 2, dtype=torch.int64)
    assert "out_features=4, bias=False" in repr(ColumnParallelLinear(3, 4, bias=False))
    assert "in_features=4, out_features=3, bias=True" in repr(RowParallelLinear(4, 3))


@pytest.mark.ranks(2, tp_size=2)
def test_split_input_refuses_other_rows_on_each_rank(ctx):
    layer = RowParallelLinear(IN, OUT, split_input=True, all_reduce_output=True)
    torch.manual_seed(0)
    x = torch.randn(2, 4, IN)
    layer(x * (1 + 1e-4 * ctx.rank))  # up to rounding
    for other in (torch.randn(2, 4, IN) + ctx.rank, x.flip(0) if ctx.rank else x, x[:, ctx.rank :]):
        layer = RowParallelLinear(IN, OUT, split_input=True, all_reduce_output=True)
        with pytest.raises(
            RuntimeError, match=r"split_input=True takes .* the same on every rank: gather .*gather_along"
        ):
            layer(other)


@pytest.mark.ranks(2, tp_size=2)
def test_parts_of_the_sequence_in_dimension_0_are_refused(ctx):
    up, down = ColumnParallelLinear(IN, OUT), RowParallelLinear(OUT, IN)
    h = up(torch.randn(3, 2, IN))
    assert h.shape == (3, 4, OUT // 2)
    assert down(h).shape == (3, 2, IN)
    with pytest.raises(
        ValueError, match=r"2 parts of the sequence one after the other .* in the shape \(3, 4, features\)"
    ):
        down(h.view(6, 2, OUT // 2))


LAYERS = {
    "linear": lambda: Linear(6, 8),
    "column": lambda: ColumnParallelLinear(6, 8, gather_input=False),
    "gathered at once": lambda: ColumnParallelLinear(6, 8, async_gather_chunks=1),
    "gathered in parts": lambda: ColumnParallelLinear(6, 8, async_gather_chunks=2),
    "row": lambda: RowParallelLinear(6, 8, all_reduce_output=True),
    "row, scattered": lambda: RowParallelLinear(6, 8),
}


@pytest.mark.ranks(1, 2, init=False)
@pytest.mark.parametrize("kind", LAYERS)
def test_models_write_to_the_output_in_place(kind):
    start()
    layer = LAYERS[kind]()
    size = layer.weight.shape[1] if isinstance(layer, RowParallelLinear) else 6
    x = torch.randn(3, 4, size).requires_grad_()
    grads = []
    for inplace in (False, True):
        F.relu(layer(x), inplace=inplace).square().sum().backward()
        grads.append([x.grad, *[param.grad for param in layer.parameters()]])
        x.grad = None
        for param in layer.parameters():
            param.grad = None
    for expected, grad in zip(*grads, strict=True):
        assert torch.equal(expected, grad)


@pytest.mark.ranks(2, tp_size=2)
def test_an_input_that_was_not_gathered_is_not_taken_for_parts_of_one_before(ctx):
    gathers, up = ColumnParallelLinear(6, 8), ColumnParallelLinear(6, 8, gather_input=False)
    gathers(torch.randn(2, 4, 6))
    assert RowParallelLinear(8, 6)(up(torch.randn(4, 4, 6))).shape == (4, 2, 6)


@pytest.mark.ranks(1, 2, init=False)
@pytest.mark.parametrize("frozen", [False, True])
def test_second_derivatives_raise_where_they_would_be_lost(frozen):
    """A constant gradient arrives, but the layers' own gradients depend on their weights."""
    start()
    model = nn.Sequential(ColumnParallelLinear(4, 8), RowParallelLinear(8, 4)).requires_grad_(not frozen)
    x = torch.ones(3, 4, requires_grad=True)
    [grad] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert grad.requires_grad is not frozen
    if not frozen:
        with pytest.raises(RuntimeError, match="a tensor-parallel linear layer can be differentiated only once"):
            grad.square().sum().backward()
    loss = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).square().sum()
    torch.autograd.grad(loss, x, create_graph=True)  # the first derivative is right under a checkpoint, too
