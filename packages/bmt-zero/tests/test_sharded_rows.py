"""Operations on ``p.grad`` and ``p.detach()`` of sharded parameters: as on the plain model, or an error."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from block_helpers import pair, rows_of
from torch import Tensor, nn

from bmt_comm import ShardedRows, local_rows

SHAPES = {"matrix": (7, 5), "vector": (9,), "row": (1, 6), "experts": (3, 4, 5), "scalar": (), "tall": (11, 1)}


class Weights(nn.Module):
    """Parameters of many shapes, each with another gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.weights = nn.ParameterDict(
            {name: torch.randn(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        )

    def forward(self, scale: Tensor) -> Tensor:
        return scale * sum(w.square().sum() * (i + 1) / 7 + w.sin().sum() for i, w in enumerate(self.weights.values()))


def gradients(ctx) -> list[tuple[str, Tensor, Tensor, nn.Parameter, nn.Parameter]]:
    """Name, gradient of the plain model, gradient of the sharded one, and the parameters."""
    plain, block = pair(Weights, zero_level=3)
    plain(torch.ones((), dtype=torch.float64)).backward()
    block(torch.ones((), dtype=torch.float64) / ctx.world_size).backward()
    named = dict(plain.named_parameters())
    return [(name, named[name].grad, p.grad, named[name], p) for name, p in block.named_parameters()]


def same(got, expected, name: str) -> None:
    """``got`` may be rows of the logical result."""
    assert type(got) in (type(expected), ShardedRows), (name, type(got))
    if not isinstance(expected, Tensor):
        assert got == pytest.approx(expected) if isinstance(got, float) else got == expected, name
        return
    if isinstance(got, ShardedRows):
        where = got.bmt_slice
        assert where.shape == tuple(expected.shape), (name, where, expected.shape)
        torch.testing.assert_close(got.to_local(), rows_of(expected, got), msg=lambda text: f"{name}: {text}")
    torch.testing.assert_close(got.full_tensor() if isinstance(got, ShardedRows) else got, expected, msg=name)


OPERATIONS = {
    "arithmetic": lambda g: (2 * g - g / 3 + g**2 + (-g).abs() + abs(g) - 1 / (1 + g * g)) % 3 // 0.1,
    "comparison": lambda g: (g > 0.1) & ~(g == 1) | g.isnan(),
    "where": lambda g: torch.where(g > 0, g, torch.zeros_like(g)),
    "clamp": lambda g: g.clamp(-0.1, 0.1).sign(),
    "addcmul": lambda g: torch.addcmul(g, g, g, value=0.5).lerp(g, 0.3),
    "copies": lambda g: g.detach().clone().float().double().contiguous().to(torch.float32),
    "max of two": lambda g: torch.max(g, -g),
    "foreach": lambda g: torch._foreach_mul([g, g], 2.0)[1],
    "flatten": lambda g: g.flatten().view(-1) * 2,
    "norm": lambda g: g.norm(),
    "norm of a multiple": lambda g: (1.0 * g).norm(p=2),
    "norm of a detached": lambda g: g.detach().norm(2),
    "norm of a copy": lambda g: g.detach().clone().norm(1),
    "norm of flat": lambda g: g.view(-1).norm(math.inf),
    "linalg norm": lambda g: torch.linalg.vector_norm(g, 3),
    "spectral norm": lambda g: torch.linalg.matrix_norm(g, 2) if len(g_shape(g)) == 2 else None,
    "linalg norm of a matrix": lambda g: torch.linalg.norm(g, 2) if len(g_shape(g)) == 2 else None,
    "nuclear norm": lambda g: g.norm("nuc") if len(g_shape(g)) == 2 else None,
    "sum": lambda g: g.sum(),
    "sum in fp64": lambda g: g.sum(dtype=torch.float64),
    "sum of a comparison": lambda g: (g > 0).sum(),
    "mean": lambda g: g.mean(),
    "mean of absolutes": lambda g: g.abs().mean().item(),
    "root mean square": lambda g: g.pow(2).mean().sqrt(),
    "max": lambda g: g.abs().max(),
    "min": lambda g: torch.min(g),
    "amax": lambda g: g.amax(),
    "any": lambda g: torch.isnan(g).any(),
    "all": lambda g: torch.isfinite(g).all().item(),
    "count": lambda g: torch.count_nonzero(g.relu()),
    "std": lambda g: g.std() if math.prod(g_shape(g)) > 1 else None,
    "median": lambda g: g.median(),
    "argmax": lambda g: g.argmax(),
    "quantile": lambda g: g.quantile(0.3),
    "histogram": lambda g: torch.histc(g, 5, -1, 1),
    "sum of products": lambda g: (g * g.exp()).sum(),
    "dot": lambda g: torch.dot(g.flatten(), (2 * g).flatten()),
    "cat": lambda g: torch.cat([g.view(-1), g.flatten()]),
    "stack": lambda g: torch.stack([g, 2 * g]).sum(),
    "cosine": lambda g: nn.functional.cosine_similarity(g.flatten(), g.exp().flatten(), dim=0),
    "item": lambda g: g.item() if math.prod(g_shape(g)) == 1 else None,
    "list": lambda g: torch.tensor(g.tolist()),
    "numpy": lambda g: torch.from_numpy(g.cpu().numpy().copy()) if len(g_shape(g)) else None,
    "equal": lambda g: torch.equal(g, g.clone()),
    "not equal": lambda g: torch.allclose(g, g + 1e-3),
    "mask": lambda g: g[g > 0].sum(),
}
WITH_DIMENSIONS = {
    "mean of rows": lambda g: g.mean(dim=-1),
    "centralised": lambda g: g - g.mean(dim=tuple(range(1 - len(g_shape(g)), 0)), keepdim=True),
    "mean of columns": lambda g: g.mean(dim=-len(g_shape(g)), keepdim=True),
    "without the mean of columns": lambda g: g - g.mean(dim=-len(g_shape(g)), keepdim=True),
    "norm of rows": lambda g: g.norm(2, dim=-1, keepdim=True),
    "normalised rows": lambda g: g / g.norm(dim=-1, keepdim=True).clamp(min=1e-6),
    "largest norm of a row": lambda g: g.norm(dim=-1).max(),
    "largest entries": lambda g: g.max(dim=-1).values,
    "sum over two": lambda g: g.sum((-2, -1)),
    "std of rows": lambda g: g.std(-1, unbiased=False),
    "softmax": lambda g: g.softmax(-1),
    "sorted": lambda g: g.sort(dim=0).values,
    "product": lambda g: g @ torch.arange(g_shape(g)[-1], dtype=g.dtype),
    "einsum": lambda g: torch.einsum("...ij,...ik->...jk", g, g),
    "selected": lambda g: g[torch.tensor([0, -1])],
    "normalize": lambda g: nn.functional.normalize(g, dim=-1),
    "along rows": lambda g: g * torch.arange(g_shape(g)[-1], dtype=g.dtype),
}


def g_shape(g: Tensor) -> tuple[int, ...]:
    return getattr(g, "logical_shape", tuple(g.shape))


@pytest.mark.ranks(1, 2, 3, 4)
def test_operations(ctx):
    for name, expected, grad, _, _ in gradients(ctx):
        for title, operation in OPERATIONS.items():
            same(operation(grad), operation(expected), f"{title} of {name}")


@pytest.mark.ranks(1, 2, 3, 4)
def test_operations_along_dimensions(ctx):
    for name, expected, grad, _, _ in gradients(ctx):
        for title, operation in WITH_DIMENSIONS.items():
            if expected.dim() > 1:
                same(operation(grad), operation(expected), f"{title} of {name}")


@pytest.mark.ranks(1, 2, 3)
def test_a_nan_of_one_rank(ctx):
    for name, expected, grad, _, param in gradients(ctx):
        expected.view(-1)[-1] = math.nan
        if param.bmt_slice.row_stop == param.bmt_slice.tp_shard_rows and param.to_local().numel():
            local_rows(grad).view(-1)[-1] = math.nan
        for operation in (torch.max, torch.amin, torch.sum, torch.norm, lambda g: g.isnan().sum(), lambda g: g.norm(8)):
            torch.testing.assert_close(operation(grad), operation(expected), equal_nan=True, msg=name)


@pytest.mark.ranks(1, 2, 3)
def test_operands_that_are_logical(ctx):
    every = gradients(ctx)
    with torch.no_grad():
        for name, expected, grad, wanted, param in every:
            logical = wanted.abs()
            same(grad * logical, expected * logical, name)
            same(logical - grad, logical - expected, name)
            same(torch.where(logical > 0.5, grad, logical), torch.where(logical > 0.5, expected, logical), name)
            same(abs(param) * grad, expected * logical, name)
            same((param * grad).sum(), (wanted * expected).sum(), name)
            same((grad + 0.1 * param).norm(), (expected + 0.1 * wanted).norm(), name)
            grad.mul_(logical > 0.5)
            same(grad.clone(), expected.mul_(logical > 0.5), name)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("adaptive", [False, True])
def test_sharpness_aware_minimisation(ctx, adaptive):
    """The two steps of SAM and ASAM (Foret et al. 2021; Kwon et al. 2021), written for plain parameters."""
    plain, block = pair(Weights, zero_level=3)
    share = torch.ones((), dtype=torch.float64) / ctx.world_size

    def train(model: nn.Module, scale: Tensor) -> None:
        params = list(model.parameters())
        for _ in range(3):
            model(scale).backward()
            with torch.no_grad():
                norms = [((p.abs() if adaptive else 1.0) * p.grad).norm(p=2) for p in params]
                rate = 0.05 / (torch.stack(norms).norm(p=2) + 1e-12)
                before = [p.data.clone() for p in params]
                for p in params:
                    p.add_((p.pow(2) if adaptive else 1.0) * p.grad * rate)
            model.zero_grad()
            model(scale).backward()
            with torch.no_grad():
                for p, kept in zip(params, before, strict=True):
                    p.data = kept
                    p.sub_(p.grad, alpha=0.1)
            model.zero_grad()

    train(plain, torch.ones((), dtype=torch.float64))
    train(block, share)
    for (name, wanted), got in zip(plain.named_parameters(), block.parameters(), strict=True):
        torch.testing.assert_close(got.full_tensor(), wanted, msg=name)


class LayerWise(torch.optim.Optimizer):
    """LAMB (You et al. 2020) with centralised gradients, written for plain parameters."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["average"], state["square"] = torch.zeros_like(p), torch.zeros_like(p.detach())
                grad = p.grad
                if p.dim() > 1:
                    grad = grad - grad.mean(dim=-1, keepdim=True)
                state["average"].mul_(0.9).add_(grad, alpha=0.1)
                state["square"].mul_(0.99).addcmul_(grad, grad, value=0.01)
                update = state["average"] / state["square"].sqrt().add_(1e-4) + 0.01 * p
                rate = p.detach().norm() / update.pow(2).sum().sqrt()
                p.add_(update * rate.clamp(0.1, 10.0), alpha=-group["lr"])


@pytest.mark.ranks(1, 2, 3)
def test_an_optimizer_of_layers_that_knows_nothing_of_sharding(ctx):
    plain, block = pair(Weights, zero_level=3)
    optimizers = [LayerWise(plain.parameters()), LayerWise(block.parameters())]
    before = [p.detach().clone() for p in plain.parameters()]
    for _ in range(10):
        plain(torch.ones((), dtype=torch.float64)).backward()
        block(torch.ones((), dtype=torch.float64) / ctx.world_size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, wanted), got, start in zip(plain.named_parameters(), block.parameters(), before, strict=True):
        update, expected = got.full_tensor() - start, wanted - start
        assert (update - expected).norm() <= 1e-9 * expected.norm(), name
    states = optimizers[1].state_dict()["state"]
    for index, state in optimizers[0].state_dict()["state"].items():
        torch.testing.assert_close(states[index], state)


@pytest.mark.ranks(1, 2, 3)
def test_random_numbers_are_those_of_the_logical_tensor(ctx):
    for name, expected, grad, wanted, param in gradients(ctx):
        for fill in (
            torch.randn_like,
            torch.rand_like,
            lambda x: x.clone().normal_(),
            lambda x: nn.init.uniform_(x.clone()),
        ):
            torch.manual_seed(9)
            made = [fill(x) for x in (expected, wanted.detach())]
            torch.manual_seed(9)
            for ours, theirs in zip([fill(x) for x in (grad, param.detach())], made, strict=True):
                same(ours, theirs, name)
        if expected.dim() > 1 and param.bmt_slice.communicators:
            with pytest.raises(RuntimeError, match="init_parameters"):
                nn.init.xavier_normal_(param.detach())


@pytest.mark.ranks(1, 2, 3)
def test_clipping_by_norms_of_units(ctx):
    """Adaptive gradient clipping (Brock et al. 2021)."""
    for name, expected, grad, wanted, param in gradients(ctx):
        if expected.dim() < 2:
            continue

        def clipped(g: Tensor, weight: Tensor) -> Tensor:
            dims = tuple(range(1 - weight.dim(), 0))
            limit = weight.norm(2, dim=dims, keepdim=True).clamp(min=1e-3) * 0.01
            norm = g.norm(2, dim=dims, keepdim=True)
            return torch.where(norm < limit, g, g * (limit / norm.clamp(min=1e-6)))

        same(clipped(grad, param.full_tensor().detach()), clipped(expected, wanted.detach()), name)


@pytest.mark.ranks(2, 3)
def test_views_and_writes_that_others_would_have_to_see(ctx):
    for _, expected, grad, wanted, param in gradients(ctx):
        if expected.dim() < 2 or not grad.bmt_slice.communicators:
            continue
        for refused in (
            lambda g: g[0],
            lambda g: g.t(),
            lambda g: g.permute(*reversed(range(len(g_shape(g))))),
            lambda g: g.unbind(),
            lambda g: list(g),
            lambda g: g.split(1),
            lambda g: torch.zeros(13, *g.shape[1:]).add_(g),
            lambda g: torch.zeros(26, *g.shape[1:]).__setitem__(slice(0, 13), g),
        ):
            with pytest.raises(RuntimeError, match="full_tensor"):
                refused(grad)
        assert not hasattr(grad, "T")
        if grad.dim() != expected.dim():  # packed experts
            with pytest.raises(ValueError, match="from the end"):
                grad.mean(dim=tuple(range(1, grad.dim())))
        grad[:] = expected  # of all rows
        same(grad.clone(), expected, "all rows")
        grad[grad > 0] = 0.0
        expected.clamp_(max=0)
        same(grad.clone(), expected, "masked")
        some = torch.tensor([2, 0])
        for index in (0, -1, (slice(None), 0), some, (0, 0), slice(1, None, 2), (..., 0), (0, ..., 0), expected < -1):
            if index is some and len(expected) < 3:
                continue
            values = torch.randn(expected[index].shape, dtype=torch.float64)
            for value in (values, 3.0):
                grad[index], expected[index] = value, value
                same(grad.clone(), expected, f"index {index}")
                with torch.no_grad():
                    param[index], wanted[index] = value, value
                same(param.detach(), wanted.detach(), f"index {index}")


@pytest.mark.ranks(2)
def test_what_does_not_communicate(ctx):
    for name, _, grad, _, param in gradients(ctx):
        if ctx.rank == 0:  # alone
            assert f"rows=[{grad.bmt_slice.row_start}" in repr(grad), name
            str(grad), grad.shape, grad.dtype, grad.numel(), grad.is_sparse, len(grad) if grad.dim() else None
            assert hasattr(grad, "norm")
            assert not torch.zeros_like(grad).to_local().any()
            with pytest.raises(TypeError, match="full_tensor"):
                torch.save({"grad": grad * 2}, io.BytesIO())
            assert torch.equal(copy.copy(grad).to_local(), grad.to_local())
            copy.deepcopy(grad).to_local().zero_()
            assert grad.to_local().abs().sum() > 0 or not param.to_local().numel()


@pytest.mark.ranks(2, 3)
def test_operations_in_place_that_are_not_elementwise_are_refused(ctx):
    for _, expected, grad, _, param in gradients(ctx):
        if expected.dim() < 2 or not grad.bmt_slice.communicators:
            continue
        for refused in (
            lambda x: x.index_fill_(0, torch.tensor([0]), 0.0),
            lambda x: x.cumsum_(0),
            lambda x: x.tril_(),
            lambda x: x.fill_diagonal_(0.0),
            lambda x: x.t_(),
            lambda x: x.unsqueeze_(0),
            lambda x: nn.init.orthogonal_(x) if len(x) else x.t_(),  # which does nothing without elements
        ):
            for tensor in (grad, param.detach(), param):
                with torch.no_grad(), pytest.raises(RuntimeError):
                    refused(tensor)


class Cuts(nn.Module):
    """Equal shapes. Each rank has other rows of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.arange(8.0).view(2, 4) + i for i in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return x * sum((w * w).sum() for w in self.weights)


@pytest.mark.ranks(2)
def test_parameters_of_one_shape_and_other_rows_are_not_combined(ctx):
    _, block = pair(Cuts, zero_level=3)
    block(torch.ones(())).backward()
    a, b, _ = block.parameters()
    assert a.bmt_slice != b.bmt_slice
    for combine in (
        lambda: a.grad.add_(b.grad),
        lambda: a.detach().copy_(b.detach()),
        lambda: a.copy_(b),
        lambda: a.grad * b.grad,
        lambda: a * b.grad,
        lambda: torch._foreach_add_([b, a], [b.grad, b.grad]),
    ):
        with torch.no_grad(), pytest.raises(ValueError, match="full_tensor"):
            combine()


@pytest.mark.ranks(1, 2, 3)
def test_the_meaning_of_shapes_does_not_depend_on_rows(ctx):
    plain, block = pair(lambda: nn.ParameterDict({"a": torch.randn(8, 6), "b": torch.randn(1, 6), "c": torch.randn(3)}))
    results = []
    for model in (plain, block.inner if hasattr(block, "inner") else block):
        a, b, c = (param.detach() for param in dict(model.named_parameters()).values())
        x = torch.arange(15.0).view(5, 3)
        results.append(
            [
                a * b,
                b * a,
                x * c,
                a.mean(-1, keepdim=True) * a.mean(0, keepdim=True),
                b.flatten(),
                b.flatten(1),
                c.unsqueeze(-1),
                a.unsqueeze(1).squeeze(1),
                a.norm(8),
                (a * 1e-6).norm(8),
            ]
        )
    for ours, theirs in zip(*results[::-1], strict=True):
        torch.testing.assert_close(ours.full_tensor() if isinstance(ours, ShardedRows) else ours, theirs)
    if a.shape != (8, 6):
        for refused in (lambda: a.reshape(4, -1), lambda: a.unsqueeze(0), lambda: b.squeeze(), lambda: a.view(2, 24)):
            with pytest.raises(RuntimeError, match="full_tensor"):
                refused()


@pytest.mark.ranks(2, 3)
def test_rows_that_become_gradients(ctx):
    """Clipping and the search for infinities see all ranks' rows, whoever made the gradient."""
    for make in (
        lambda p: p.grad.clone(),
        lambda p: p.grad * 1.0,
        lambda p: p.grad.to_local().clone(),
        lambda p: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad,
    ):
        for _, expected, _, _, param in gradients(ctx):
            param.grad = make(param)
            torch.testing.assert_close(param.grad.norm(), expected.norm())
            with pytest.raises((ValueError, RuntimeError), match="gradient"):
                param.grad = torch.ones(17)


@pytest.mark.ranks(2)
def test_a_hook_may_return_the_logical_gradient(ctx):
    plain, block = pair(lambda: nn.Linear(5, 7))
    for model, share in ((plain, 1), (block, ctx.world_size)):
        for param in model.parameters():
            param.register_hook(lambda grad: grad.cumsum(0))
        (model(torch.ones(2, 5)).sum() / share).backward()
    for wanted, param in zip(plain.parameters(), block.parameters(), strict=True):
        torch.testing.assert_close(
            param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad, wanted.grad
        )


@pytest.mark.ranks(2, 3)
def test_autograd_is_not_lost(ctx):
    plain, block = pair(lambda: nn.Linear(5, 7))
    goal = [p.detach().clone() * 0.5 for p in block.parameters()]
    for model, aims in ((plain, [p.detach() * 0.5 for p in plain.parameters()]), (block, goal)):
        distance = sum(((p - aim) ** 2).sum() for p, aim in zip(model.parameters(), aims, strict=True))
        (distance / (1 if model is plain else ctx.world_size)).backward()
    for wanted, param in zip(plain.parameters(), block.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), wanted.grad)
    weight = block.weight.detach().clone().requires_grad_()
    for compute in (lambda: weight.sum(), lambda: nn.functional.linear(torch.ones(5), weight), lambda: weight.norm()):
        with pytest.raises(RuntimeError, match="have no gradients"):
            compute()
    x = torch.ones(5, requires_grad=True)
    nn.functional.linear(x, block.weight.detach()).sum().backward()
    torch.testing.assert_close(x.grad, plain.weight.detach().sum(0))


@pytest.mark.ranks(1, 2, 3)
def test_layer_wise_states_go_on_after_loading(ctx):
    plain, block = pair(Weights, zero_level=3)
    params = [list(model.parameters()) for model in (plain, block)]
    optimizers = [LayerWise(each) for each in params]
    for step in range(6):
        if step == 3:
            states = [optimizer.state_dict() for optimizer in optimizers]
            optimizers = [LayerWise(each) for each in params]
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.load_state_dict(state)
        plain(torch.ones((), dtype=torch.float64)).backward()
        block(torch.ones((), dtype=torch.float64) / ctx.world_size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for wanted, got in zip(*params, strict=True):
        torch.testing.assert_close(got.full_tensor(), wanted)


@pytest.mark.ranks(1, 2)
def test_values_that_are_loaded_may_be_rows(ctx):
    plain, block = pair(lambda: nn.Linear(5, 7))
    average = {name: param.detach().clone().mul_(0.5) for name, param in block.named_parameters()}
    block.load_state_dict(average)
    for wanted, param in zip(plain.parameters(), block.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), wanted * 0.5)
    with torch.no_grad():
        for wanted, param in zip(plain.parameters(), block.parameters(), strict=True):
            param.copy_(wanted)  # logical
            param.mul_(wanted > 0)
            torch.testing.assert_close(param.full_tensor(), wanted * (wanted > 0))


@pytest.mark.ranks(2)
def test_the_search_for_infinities_in_copies_of_gradients(ctx):
    """Master weights of another dtype, whose gradients are copies."""
    _, block = pair(lambda: nn.Linear(5, 8, bias=False))
    masters = [nn.Parameter(p.detach().clone().double()) for p in block.parameters()]
    optimizer, scaler = torch.optim.SGD(masters, lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(block(torch.ones(2, 5)).sum()).backward()
    if ctx.rank == 1:
        block.weight.grad.to_local().fill_(math.inf)
    for master, param in zip(masters, block.parameters(), strict=True):
        master.grad = param.grad.double()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    twin = copy.deepcopy(masters[0])
    assert twin.requires_grad
    assert isinstance(twin, nn.Parameter)


@pytest.mark.ranks(2, 3)
def test_scalars_and_packed_experts_as_operands(ctx):
    shapes = {"scalar": (), "experts": (2, 3, 4)}
    _, block = pair(lambda: nn.ParameterDict({name: torch.ones(shape) * 3 for name, shape in shapes.items()}))
    scalar, experts = block.scalar, block.experts
    with torch.no_grad():
        experts.add_(torch.ones_like(experts.to_local()))  # this rank's rows, however many
        torch.testing.assert_close(experts.full_tensor(), torch.full((2, 3, 4), 4.0))
        torch.testing.assert_close((experts.detach() * scalar.detach()), torch.full((2, 3, 4), 12.0))
        with pytest.raises(ValueError, match="full_tensor"):
            experts.mul_(scalar)
        torch.testing.assert_close(scalar.detach().sum(), torch.tensor(3.0))
        kept = torch.linalg.vector_norm(experts.detach(), 2, None, True)
        assert kept.shape == (1, 1, 1)
        for write in (lambda: nn.functional.relu(experts, inplace=True), lambda: torch.mul(scalar, 2.0, out=experts)):
            with pytest.raises(RuntimeError, match="to_local"):
                write()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("of", ["parameters", "detached", "gradients"])
def test_lists_of_tensors(ctx, of):
    """An average of weights with ``torch._foreach``, and values that are logical."""
    plain, block = pair(Weights, zero_level=3)
    for model, divisor in ((plain, 1), (block, ctx.world_size)):
        model(torch.ones((), dtype=torch.float64) / divisor).backward()
    choose = {"parameters": lambda p: p, "detached": lambda p: p.detach(), "gradients": lambda p: p.grad}[of]
    theirs, ours = ([choose(p) for p in model.parameters()] for model in (plain, block))
    logical = [torch.randn_like(each, dtype=torch.float64) for each in theirs]
    with torch.no_grad():
        results = []
        for tensors in (theirs, ours):
            averages = torch._foreach_mul(tensors, 0.9)
            torch._foreach_add_(averages, tensors, alpha=0.1)
            torch._foreach_lerp_(averages, logical, 0.3)
            torch._foreach_mul_(tensors, [0.5 + i for i in range(len(tensors))])
            torch._foreach_add_(tensors, averages)
            torch._foreach_addcmul_(tensors, averages, logical, 0.1)
            results.append((averages, torch._foreach_norm(tensors)))
        for name, theirs_, ours_ in zip(SHAPES, results[0][0], results[1][0], strict=True):
            same(ours_, theirs_, name)
        torch.testing.assert_close(results[1][1], results[0][1])
        torch._foreach_copy_(ours, logical)
        for name, tensor, values in zip(SHAPES, ours, logical, strict=True):
            same(tensor.clone(), values, name)


@pytest.mark.ranks(1, 2)
def test_lists_of_parameters_with_gradients(ctx):
    plain, block = pair(Weights, zero_level=3)
    for model, divisor in ((plain, 1), (block, ctx.world_size)):
        sum(each.sum() for each in torch._foreach_mul(list(model.parameters()), 3.0)).div(divisor).backward()
    for name, theirs, ours in zip(SHAPES, plain.parameters(), block.parameters(), strict=True):
        same(ours.grad.clone(), theirs.grad, name)


@pytest.mark.ranks(1, 2, 3)
def test_norms_of_updates(ctx):
    plain, block = pair(Weights, zero_level=3)
    results = []
    for model, share in ((plain, 1), (block, ctx.world_size)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with torch.no_grad():
            before = [(p.clone(), p.detach().clone(), p.double()) for p in model.parameters()]
        model(torch.ones((), dtype=torch.float64) / share).backward()
        optimizer.step()
        with torch.no_grad():
            for p, olds in zip(model.parameters(), before, strict=True):
                results.append(
                    torch.stack([(p - old).norm() for old in olds] + [(old - p).abs().max() for old in olds])
                )
    half = len(results) // 2
    for ours, theirs in zip(results[half:], results[:half], strict=True):
        torch.testing.assert_close(ours, theirs)
