"""More cases of FSDP2's tests than in test_fully_shard.py: models called in parts, unusual modules, casts."""

from __future__ import annotations

import copy
import gc
from collections import namedtuple

import pytest
import torch
from fsdp_helpers import assert_same_updates, full, make, shard_layers
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from bmt_zero import FSDPModule, MixedPrecisionPolicy, fully_shard


class Chunked(nn.Module):
    """Its head may be left out of forward, and called for parts of the output afterwards."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.body = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, skip_head: bool = False) -> Tensor:
        hidden = self.norm(torch.tanh(self.body(self.embed(ids))))
        return hidden if skip_head else self.head(hidden)


def chunked(tied: bool, resharded: bool | None) -> tuple[Chunked, Chunked]:
    torch.manual_seed(3)
    plain = Chunked(tied)
    model = copy.deepcopy(plain)
    fully_shard(model.body)
    if tied:
        fully_shard([model.embed, model.norm, model.head], reshard_after_forward=resharded)
    else:
        fully_shard(model.embed)
        fully_shard([model.norm, model.head], reshard_after_forward=resharded)
    return plain, fully_shard(model)


def ids_of(rank: int, step: int = 0) -> Tensor:
    return torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))


def backward_in_chunks(model: Chunked, ids: Tensor, scale: float = 1.0) -> None:
    """The backward of the head for each part, and then that of the rest."""
    hidden = model(ids, skip_head=True)
    gradients = []
    for part in hidden.detach().chunk(3, dim=1):
        part = part.contiguous().requires_grad_()
        (model.head(part).square().mean() * scale).backward()
        gradients.append(part.grad)
    hidden.backward(torch.cat(gradients, dim=1))


def train_both(ctx, plain: nn.Module, model: nn.Module, backward, steps: int = 5) -> None:
    """``backward(model, rank, step, scale)`` on all ranks' parts, and on this rank's."""
    start = {name: p.detach().clone() for name, p in plain.named_parameters()}
    optimizers = [torch.optim.SGD(which.parameters(), lr=0.02) for which in (plain, model)]
    for step in range(steps):
        for rank in range(ctx.world_size):
            backward(plain, rank, step, 1 / ctx.world_size)
        backward(model, ctx.rank, step, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    expected = {name: p.detach() - start[name] for name, p in plain.named_parameters()}
    assert_same_updates({name: full(p) - start[name] for name, p in model.named_parameters()}, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("resharded", [True, False])
def test_a_loss_in_chunks_calls_a_module_of_a_group_by_itself(ctx, tied, resharded):
    plain, model = chunked(tied, resharded)
    train_both(ctx, plain, model, lambda m, rank, step, scale: backward_in_chunks(m, ids_of(rank, step), scale))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tied", [False, True])
def test_a_loss_in_chunks_keeps_its_group_unsharded(ctx, tied):
    plain, model = chunked(tied, None)

    def backward(which: Chunked, rank: int, step: int, scale: float) -> None:
        if which is model:
            which.head.set_reshard_after_forward(False)
            which.head.set_reshard_after_backward(False)
        backward_in_chunks(which, ids_of(rank, step), scale)
        if which is model:
            which.head.set_reshard_after_forward(True)
            which.head.set_reshard_after_backward(True)
            which.head.reshard()

    train_both(ctx, plain, model, backward)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("resharded", [True, False])
def test_a_loss_in_chunks_with_gradient_accumulation(ctx, resharded):
    plain, model = chunked(False, resharded)

    def backward(which: Chunked, rank: int, step: int, scale: float) -> None:
        for micro in range(3):
            if which is model:
                which.set_requires_gradient_sync(micro == 2)
                which.set_is_last_backward(micro == 2)
            backward_in_chunks(which, ids_of(rank, 3 * step + micro), scale)

    train_both(ctx, plain, model, backward)


@pytest.mark.ranks(2)
def test_two_forwards_without_the_head_and_one_backward(ctx):
    plain, model = chunked(False, None)
    for rank in range(2):
        ((plain(ids_of(rank), True) + plain(ids_of(rank, 1), True)).square().sum() / 2).backward()
    (model(ids_of(ctx.rank), True) + model(ids_of(ctx.rank, 1), True)).square().sum().backward()
    assert model.head.weight.grad is None
    for optimizer in [torch.optim.SGD(which.parameters(), lr=0.1) for which in (plain, model)]:
        optimizer.step()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(full(model.get_parameter(name)), param.detach())


@pytest.mark.ranks(2)
def test_an_exception_before_a_module_of_a_group_was_called(ctx):
    plain, model = chunked(False, None)
    with pytest.raises(IndexError):
        model(torch.tensor([[11]]))
    model.reset_iter_state()
    train_both(ctx, plain, model, lambda m, rank, step, s: (m(ids_of(rank, step)).square().sum() * s).backward(), 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("resharded", [True, False])
def test_two_forwards_and_one_backward_of_checkpointed_nested_modules(ctx, resharded):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 5)

        def inner(self, x: Tensor) -> Tensor:
            return x + self.second(torch.tanh(self.first(x)))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(5, 5), Layer(), Layer())
    model = copy.deepcopy(plain)
    for layer in model[1:]:
        fully_shard(layer.first, reshard_after_forward=resharded)
        fully_shard(layer.second, reshard_after_forward=resharded)
        fully_shard(layer, reshard_after_forward=resharded)
    fully_shard(model, reshard_after_forward=resharded)

    def backward(which: nn.Module, rank: int, step: int, scale: float) -> None:
        generator = torch.Generator().manual_seed(10 * step + rank)
        one, two = torch.randn(2, 3, 5, generator=generator)
        ((which(one).sum() - which(two).sum()).square() * scale * 0.01).backward()

    train_both(ctx, plain, model, backward)


@pytest.mark.ranks(2)
def test_a_module_that_runs_several_times(ctx):
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.frozen, self.outer = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 5)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.frozen(torch.relu(self.inner(x)))
                with torch.no_grad():
                    x += torch.relu(self.inner(x))
            return self.outer(x + self.inner(x))

    torch.manual_seed(3)
    plain = Several()
    model = copy.deepcopy(plain)
    for part in (model.inner, model.frozen, model):
        fully_shard(part)

    def backward(which: nn.Module, rank: int, step: int, scale: float) -> None:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        (which(x).square().sum() * scale).backward()

    train_both(ctx, plain, model, backward)


@pytest.mark.ranks(2)
def test_a_root_without_inputs_and_modules_without_parameters(ctx):
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(15.0).reshape(3, 5))

        def forward(self) -> Tensor:
            return self.weight @ self.weight.t()

    plain, model = Own(), fully_shard(Own())
    plain().square().sum().backward()
    model().square().sum().backward()
    torch.optim.SGD(plain.parameters(), lr=1e-4).step()
    torch.optim.SGD(model.parameters(), lr=1e-4).step()
    torch.testing.assert_close(full(model.weight), plain.weight.detach())

    empty = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for part in empty:
        fully_shard(part)
    fully_shard(empty)  # it has no parameters itself
    empty.unshard(async_op=True).wait()
    empty.reshard()
    assert empty(torch.ones(1, 4)).shape == (1, 4)


@pytest.mark.ranks(2)
def test_groups_with_a_module_that_is_not_called(ctx):
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.used = nn.Linear(1, 1), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.used(x))

    torch.manual_seed(3)
    plain = nn.Sequential(Part(), Part(), nn.Linear(5, 5))
    model = copy.deepcopy(plain)
    for part in model[:2]:
        fully_shard([part.unused, part.used])
    fully_shard(model)

    def backward(which: nn.Module, rank: int, step: int, scale: float) -> None:
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        (which(x).square().sum() * scale).backward()

    train_both(ctx, plain, model, backward)
    assert model[0].unused.weight.grad is None


@pytest.mark.ranks(2)
def test_two_losses_with_a_backward_each(ctx):
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.stem(x)
            return self.one(x), self.two(x)

    torch.manual_seed(3)
    plain = Fork()
    model = copy.deepcopy(plain)
    for part in (model.stem, model.one, model.two, model):
        fully_shard(part)

    def backward(which: Fork, rank: int, step: int, scale: float) -> None:
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        one, two = which(x)
        if which is model:
            which.set_is_last_backward(False)
        (two.square().sum() * scale).backward(retain_graph=True)
        if which is model:
            which.set_is_last_backward(True)
        (one.square().sum() * scale).backward()

    train_both(ctx, plain, model, backward)


@pytest.mark.ranks(2)
def test_layers_that_are_made_and_sharded_one_by_one(ctx):
    model = nn.Sequential()
    for _ in range(6):
        model.append(fully_shard(nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 5, bias=False))))
        gc.collect()
    fully_shard(model)
    model(torch.ones(2, 5)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.ranks(2)
def test_a_parameter_of_two_groups_is_refused_at_once(ctx):
    model = Chunked(tied=True)
    fully_shard(model.embed)
    with pytest.raises(ValueError, match="weight"):
        fully_shard(model.head)


@pytest.mark.ranks(2)
def test_a_parameter_that_was_replaced_after_sharding_is_refused(ctx):
    model = shard_layers(make())
    model.layers[0].up.weight = nn.Parameter(torch.ones(13, 7))
    with pytest.raises(RuntimeError, match=r"parameter 'up.weight' .* was replaced"):
        model(torch.ones(1, 5))
    with torch.no_grad():  # the cure; and a model may be sharded where no gradients are recorded
        other = shard_layers(make())
        other.layers[0].up.weight.copy_(torch.ones_like(other.layers[0].up.weight))
        assert float(full(other.layers[0].up.weight).sum()) == 13 * 7
    other(torch.ones(1, 5)).sum().backward()


@pytest.mark.ranks(2)
def test_memory_formats_dtypes_and_scalars(ctx):
    """FSDP2 refuses parameters that are not contiguous, or 0-dim."""
    torch.manual_seed(3)
    plain = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    plain.scalar = nn.Parameter(torch.tensor(2.0))
    plain.integers = nn.Parameter(torch.arange(7), requires_grad=False)
    plain.bytes = nn.Parameter(torch.randn(6, 4).to(torch.float8_e4m3fn), requires_grad=False)
    model = fully_shard(copy.deepcopy(plain))
    x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(x), plain(x))
    torch.testing.assert_close(full(model.bytes).float(), plain.bytes.float())
    assert torch.equal(full(model.integers), plain.integers)
    model(x).sum().backward()


@pytest.mark.ranks(4)
def test_meshes_made_of_process_groups(ctx):
    import torch.distributed as dist

    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[ctx.rank // 2]
    mesh = DeviceMesh.from_group(mine, "cpu", mesh_dim_names=("shard",))
    plain, model = make(), shard_layers(make(), mesh=mesh)
    x = torch.ones(2, 5) * (ctx.rank % 2 + 1)
    torch.testing.assert_close(model(x), plain(x))
    model(x).sum().backward()
    assert [p.shape[0] < 13 for p in (model.layers[0].up.weight,)] == [True]


@pytest.mark.ranks(2)
def test_inputs_are_cast_for_every_module_of_a_group(ctx):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).float())

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = Two()
    fully_shard([model.a, model.b], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    output = model(torch.ones(2, 4))
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["inputs", "outputs"])
def test_casts_are_repeated_when_a_call_is_recomputed(ctx, what):
    dtypes: list[torch.dtype] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def part(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            dtypes.append(x.dtype)
            return x

        def forward(self, x: Tensor) -> Tensor:
            x = x.to(torch.float32 if what == "inputs" else torch.bfloat16)
            with set_checkpoint_early_stop(False):
                return checkpoint(self.part, x, use_reentrant=False).float().sum()

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    if what == "outputs":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.float32, cast_forward_inputs=False)
    model = Model()
    model.linear.register_forward_pre_hook(lambda _, args: dtypes.append(args[0].dtype))
    fully_shard(model.linear, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model(torch.ones(2, 3)).backward()
    assert dtypes[: len(dtypes) // 2] == dtypes[len(dtypes) // 2 :]
    assert dtypes[1] == (torch.bfloat16 if what == "inputs" else torch.float32)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_normalisation_in_half_precision(ctx, dtype):
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    own = MixedPrecisionPolicy(output_dtype=dtype)
    for make_norm, norm_policy, shape in (
        (lambda: nn.LayerNorm(8), policy, (4, 8)),
        (lambda: nn.BatchNorm1d(8), own, (4, 8)),
        (lambda: nn.BatchNorm2d(8), own, (3, 8, 4, 4)),
    ):
        first: nn.Module = nn.Linear(8, 8) if len(shape) == 2 else nn.Conv2d(8, 8, 1)
        model = nn.Sequential(first, make_norm(), copy.deepcopy(first))
        for part, chosen in ((model[0], policy), (model[1], norm_policy), (model[2], policy), (model, policy)):
            fully_shard(part, mp_policy=chosen)
        output = model(torch.ones(shape))
        assert output.dtype == dtype
        output.sum().backward()
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.ranks(2)
def test_parameters_that_are_frozen_in_the_first_forward_and_trained_later(ctx):
    model = fully_shard(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    )
    model.requires_grad_(False)
    with torch.no_grad():
        model(torch.ones(1, 4))
    model.requires_grad_(True)
    model(torch.ones(1, 4)).sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.ranks(2)
def test_containers_between_modules(ctx):
    pair = namedtuple("pair", "x y")

    class Into(nn.Module):
        def forward(self, x: Tensor):
            return pair(x, x.clone())

    class Each(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 5)

        def forward(self, value):
            return pair(self.layer(value.x), self.layer(value.y))

    class Out(nn.Module):
        def forward(self, value) -> Tensor:
            return value.x + value.y

    torch.manual_seed(3)
    plain = nn.Sequential(Into(), Each(), Each(), Out())
    model = copy.deepcopy(plain)
    for part in model:
        fully_shard(part)
    fully_shard(model)
    assert all(isinstance(part, FSDPModule) for part in model)

    def backward(which: nn.Module, rank: int, step: int, scale: float) -> None:
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        (which(x).square().sum() * scale).backward()

    train_both(ctx, plain, model, backward)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("resharded", [True, False])
def test_forward_mode_derivatives(ctx, resharded):
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model = fully_shard(copy.deepcopy(plain), reshard_after_forward=resharded)
    x, tangent = torch.randn(2, 2, 5, generator=torch.Generator().manual_seed(1))
    results = []
    for which in (plain, model):
        with forward_ad.dual_level():
            results.append(forward_ad.unpack_dual(which(forward_ad.make_dual(x, tangent))))
    torch.testing.assert_close(results[1].primal, results[0].primal)
    torch.testing.assert_close(results[1].tangent, results[0].tangent)
    with pytest.raises(RuntimeError, match=r"transforms of torch.func .* torch.autograd.forward_ad"):
        torch.func.jvp(model, (x,), (tangent,))
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.ranks(2)
def test_a_state_dict_in_pieces_fills_a_model_without_values(ctx):
    plain = make()
    with torch.device("meta"):
        model = make()
    shard_layers(model)
    for name, value in plain.state_dict().items():
        model.load_state_dict({name: value}, assign=True, strict=False)
    x = torch.ones(2, 5)
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("order", [1, 2, 3, float("inf")])
def test_gradient_norms_of_other_orders(ctx, order):
    plain, model = make(), shard_layers(make())
    for rank in range(2):
        (plain(torch.ones(2, 5) * (rank + 1)).square().sum() * 5).backward()
    (model(torch.ones(2, 5) * (ctx.rank + 1)).square().sum() * 10).backward()
    wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0, order)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, order, foreach=True)
    torch.testing.assert_close(norm.as_subclass(Tensor), wanted)
    for optimizer in [torch.optim.SGD(which.parameters(), lr=1.0) for which in (plain, model)]:
        optimizer.step()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(full(model.get_parameter(name)), param.detach())
