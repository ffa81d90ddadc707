"""``fully_shard`` trains the same as plain PyTorch and torch's ``fully_shard``, in scripts for the latter."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import threading
import time

import pytest
import torch
import torch.distributed as dist
from block_helpers import own_memory
from fsdp_helpers import (
    Layer,
    assert_same_updates,
    data,
    full,
    loss_of,
    make,
    shard_layers,
    train_plain,
    train_sharded,
    twins,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from bmt_comm import current_context, is_initialized
from bmt_zero import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedParameter,
    fully_shard,
    register_fsdp_forward_method,
)
from bmt_zero.shard import group_of

adamw = functools.partial(torch.optim.AdamW, lr=0.01)


def world_mesh(dims: tuple[int, ...] | None = None):
    dims = dims or (dist.get_world_size(),)
    return init_device_mesh("cpu", dims, mesh_dim_names=("replicate", "shard")[-len(dims) :])


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("resharded", [None, True, False])
def test_training(ctx, resharded):
    plain, model = twins()
    shard_layers(model, reshard_after_forward=resharded)
    assert all(isinstance(p, ShardedParameter) for p in model.parameters())
    assert_same_updates(train_sharded(model, ctx.rank), train_plain(plain, ctx.world_size))


@pytest.mark.ranks(2, 4, init=False)
@pytest.mark.parametrize("hybrid", [False, True])
def test_a_script_of_torch_changes_one_import(hybrid):
    """torch.distributed alone is initialised, and both implementations run in one process."""
    dist.init_process_group("gloo")
    dims = (dist.get_world_size() // 2, 2) if hybrid else (dist.get_world_size(),)
    mesh = world_mesh(dims)
    ours, theirs = twins()
    shard_layers(ours, mesh=mesh)
    shard_layers(theirs, torch_fully_shard, mesh=mesh)
    rank = dist.get_rank()
    updates = train_sharded(theirs, rank, adamw, micro_steps=2, sync_last_only=True)
    assert_same_updates(train_sharded(ours, rank, adamw, micro_steps=2, sync_last_only=True), updates, 2e-5)
    assert_same_updates(updates, train_plain(make(), dist.get_world_size(), adamw, micro_steps=2), 2e-5)


@pytest.mark.ranks(2, init=False)
def test_the_context_follows_torch_s_process_group():
    for _ in range(2):
        dist.init_process_group("gloo")
        plain, model = twins()
        shard_layers(model, mesh=world_mesh())
        assert is_initialized()
        assert not current_context().owns_process_group
        updates = train_sharded(model, dist.get_rank(), steps=2)
        assert_same_updates(updates, train_plain(plain, 2, steps=2))
        dist.destroy_process_group()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_a_mesh_of_two_dimensions_is_hybrid(ctx, micro_steps):
    plain, model = twins()
    mesh = world_mesh((2, 2))
    shard_layers(model, mesh=mesh)
    param = model.first.weight
    assert param.device_mesh is mesh
    assert param.bmt_slice.row_comm.ranks == ((0, 1) if ctx.rank < 2 else (2, 3))
    updates = train_sharded(model, ctx.rank, micro_steps=micro_steps, sync_last_only=micro_steps > 1)
    assert_same_updates(updates, train_plain(plain, 4, micro_steps=micro_steps))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("dims", [(1, -1), (-1, 1)])
def test_meshes_with_a_dimension_of_one(ctx, dims):
    plain, model = twins()
    shard_layers(model, mesh=world_mesh(tuple(ctx.world_size if d == -1 else d for d in dims)))
    updates = train_sharded(model, ctx.rank, micro_steps=2, sync_last_only=True)
    assert_same_updates(updates, train_plain(plain, ctx.world_size, micro_steps=2))


@pytest.mark.ranks(4)
def test_gradients_wait_for_the_all_reduce(ctx):
    """Reduce-scatter in each micro-step, all-reduce in the last one."""
    for dims in ((2, 2), (4, 1)):
        plain, model = twins()
        shard_layers(model, mesh=world_mesh(dims))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        start = {name: full(p) for name, p in model.named_parameters()}
        for step in range(10):
            for micro in range(3):
                model.set_requires_all_reduce(micro == 2)
                x, y = data(step, micro, ctx.rank)
                loss_of(model(x), y).backward()
                if micro < 2:
                    assert all(not p.grad.any() for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        updates = {name: full(p) - start[name] for name, p in model.named_parameters()}
        expected = train_plain(plain, 4, functools.partial(torch.optim.SGD, lr=0.1), micro_steps=3)
        assert_same_updates(updates, expected)


class TwoDtypes(nn.Module):
    """Parameters of two dtypes, which are reduced separately. Some calls use one of them only."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x, both):
        return self.always(x) + self.sometimes(x.double()).float() if both else self.always(x)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_rank_that_has_used_nothing_drops_what_is_zeroed_before_the_all_reduce(ctx, set_to_none):
    model, x = TwoDtypes(), torch.ones(2, 3)
    fully_shard(model, mesh=world_mesh((2, 2)))

    def backward(both, all_reduces):
        model.set_requires_all_reduce(all_reduces)
        model(x, both).sum().backward()

    backward(ctx.rank == 3, False)
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(set_to_none)
    backward(True, True)
    for grad in (param.grad.to_local() for param in model.sometimes.parameters()):
        assert torch.equal(grad, torch.full_like(grad, 2.0))
    model.zero_grad()
    backward(False, False)
    backward(False, True)
    assert all(param.grad is None for param in model.sometimes.parameters())


@pytest.mark.ranks(4)
def test_a_mesh_of_some_of_the_ranks(ctx):
    """Two pairs train two models."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "data"))
    pair = ctx.rank // 2
    torch.manual_seed(pair)
    plain = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7, track_running_stats=True), nn.Linear(7, 5)).eval()
    plain[1].running_mean.fill_(pair)
    model = fully_shard(copy.deepcopy(plain), mesh=mesh["data"])
    assert_same_updates(train_sharded(model, ctx.rank % 2), train_plain(plain, 2))
    assert float(model[1].running_mean[0]) == pair


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("sync_last_only", [True, False])
def test_gradient_accumulation(ctx, sync_last_only):
    plain, model = twins()
    shard_layers(model)
    updates = train_sharded(model, ctx.rank, micro_steps=3, sync_last_only=sync_last_only, clip=0.05)
    assert_same_updates(updates, train_plain(plain, ctx.world_size, micro_steps=3, clip=0.05))


@pytest.mark.ranks(2)
def test_no_communication_without_gradient_sync(ctx):
    model = shard_layers(make())
    comm = group_of(model).flats[0].shard_comm

    def sent(synchronise: bool) -> int:
        model.set_requires_gradient_sync(synchronise)
        before = comm.traffic["reduce_scatter"].calls if "reduce_scatter" in comm.traffic else 0
        x, y = data(0, 0, ctx.rank)
        loss_of(model(x), y).backward()
        return (comm.traffic["reduce_scatter"].calls if "reduce_scatter" in comm.traffic else 0) - before

    assert sent(False) == 0
    assert all(not p.grad.any() for p in model.parameters())
    assert sent(True) == len({id(group_of(m)) for m in model.modules() if isinstance(m, FSDPModule)})
    model.zero_grad()
    sent(False)
    model.zero_grad()  # drops waiting gradients
    sent(True)
    once = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    sent(True)
    for grad, param in zip(once, model.parameters(), strict=True):
        torch.testing.assert_close(grad, param.grad)


@pytest.mark.ranks(2)
def test_parts_of_a_model_without_gradient_sync(ctx):
    plain, model = twins()
    shard_layers(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    start = {name: full(p) for name, p in model.named_parameters()}
    for step in range(10):
        for micro in range(2):
            model.layers[0].set_requires_gradient_sync(micro == 1, recurse=False)
            model.layers[1].set_reshard_after_backward(micro == 1)
            x, y = data(step, micro, ctx.rank)
            loss_of(model(x), y).backward()
            for rank in range(2):
                x, y = data(step, micro, rank)
                (loss_of(plain(x), y) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    updates = {name: full(p) - start[name] for name, p in model.named_parameters()}
    assert_same_updates(updates, {name: p.detach() - start[name] for name, p in plain.named_parameters()})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("foreach", [False, True])
def test_adamw(ctx, fused, foreach):
    if fused and foreach:
        foreach = None
    make_optimizer = functools.partial(torch.optim.AdamW, lr=0.01, fused=fused, foreach=foreach, weight_decay=0.1)
    plain, model = twins()
    shard_layers(model)
    assert_same_updates(train_sharded(model, ctx.rank, make_optimizer), train_plain(plain, 2, make_optimizer), 3e-5)


@pytest.mark.ranks(2)
def test_only_the_root(ctx):
    plain, model = twins()
    fully_shard(model)
    assert_same_updates(train_sharded(model, ctx.rank, clip=0.1), train_plain(plain, 2, clip=0.1))


@pytest.mark.ranks(2)
def test_no_root(ctx):
    """Only the layers are sharded. The script reduces the gradients of the other parameters."""
    plain, model = twins()
    for layer in model.layers:
        fully_shard(layer)
    for p in model.parameters():
        if not isinstance(p, ShardedParameter):
            p.register_hook(lambda grad: (dist.all_reduce(grad), grad / 2)[1])
    assert_same_updates(train_sharded(model, ctx.rank), train_plain(plain, 2))


@pytest.mark.ranks(3)
def test_nested(ctx):
    plain, model = twins()
    for layer in model.layers:
        for part in (layer.up, layer.down):
            fully_shard(part)
        fully_shard(layer)
    fully_shard(model)
    assert isinstance(model.layers[0].up, FSDPModule)
    assert len({id(group_of(m)) for m in model.modules() if isinstance(m, FSDPModule)}) == 10
    assert_same_updates(train_sharded(model, ctx.rank), train_plain(plain, 3))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("resharded", [None, False])
def test_modules_that_are_one_group(ctx, resharded):
    plain, model = twins()
    for layer in model.layers:
        fully_shard(layer)
    assert fully_shard([model.last, model.head, model.norm], reshard_after_forward=resharded) is not None
    assert group_of(model.norm) is group_of(model.last) is group_of(model.head)
    fully_shard(model)
    assert_same_updates(train_sharded(model, ctx.rank), train_plain(plain, 2))


@pytest.mark.ranks(2)
def test_a_group_whose_modules_run_one_by_one(ctx):
    """The model's forward ends before the head, which is called for each chunk of the output."""

    def forward(model, x):
        x = model.first(model.embed(x))
        return torch.cat([model.head(model.last(chunk)) for chunk in model.norm(x).chunk(3)])

    plain, model = twins(layers=0)
    fully_shard([model.norm, model.last, model.head])
    fully_shard(model.first)
    fully_shard(model.embed)
    assert_same_updates(train_sharded(model, ctx.rank, forward=forward), train_plain(plain, 2, forward=forward))


@pytest.mark.ranks(2, 3)
def test_shared_parameters(ctx):
    plain, model = twins(tied=True)
    shard_layers(model)
    assert model.head.weight is model.embed.weight
    assert_same_updates(train_sharded(model, ctx.rank), train_plain(plain, ctx.world_size))


@pytest.mark.ranks(2)
def test_a_parameter_shared_by_a_sharded_module_and_its_root(ctx):
    plain, model = twins(tied=True)
    fully_shard(model.embed)
    shard_layers(model)
    assert model.head.weight is model.embed.weight
    assert_same_updates(train_sharded(model, ctx.rank), train_plain(plain, 2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("when", ["before", "after"])
def test_frozen_parameters(ctx, when):
    plain, model = twins()
    if when == "before":
        frozen = [model]
    else:
        frozen = []
        shard_layers(model)
    for each in (plain, *frozen, *([] if frozen else [model])):
        for layer in each.layers:
            layer.up.requires_grad_(False)
        each.embed.weight.requires_grad_(False)
    if frozen:
        shard_layers(model)
    assert_same_updates(train_sharded(model, ctx.rank), train_plain(plain, 2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapped_first", [True, False])
def test_activation_checkpointing_of_torch(ctx, wrapped_first):
    plain, model = twins()
    for index, layer in enumerate(model.layers):
        if wrapped_first:
            model.layers[index] = fully_shard(checkpoint_wrapper(layer))
        else:
            model.layers[index] = checkpoint_wrapper(fully_shard(layer))
    fully_shard(model)
    updates = train_sharded(model, ctx.rank)
    updates = {name.replace("_checkpoint_wrapped_module.", ""): update for name, update in updates.items()}
    assert_same_updates(updates, train_plain(plain, 2))


@pytest.mark.ranks(2)
def test_several_forwards_before_one_backward(ctx):
    def forward(model, x):
        return model(model(x))

    plain, model = twins()
    shard_layers(model, reshard_after_forward=True)
    assert_same_updates(train_sharded(model, ctx.rank, forward=forward), train_plain(plain, 2, forward=forward))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_prefetching_of_given_modules(ctx, ahead):
    plain, model = twins(layers=4)
    shard_layers(model)
    layers = list(model.layers)
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + ahead])
        layer.set_modules_to_backward_prefetch(layers[max(0, index - ahead) : index][::-1])
    unsharding = []
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(
            lambda *_, index=index: unsharding.append([group_of(m).flats[0].state.name for m in layers[index + 1 :]])
        )
    assert_same_updates(train_sharded(model, ctx.rank), train_plain(plain, 2))
    for index, states in enumerate(unsharding[:3]):
        expected = max(1, ahead)
        assert sum(state != "SHARDED" for state in states) == min(expected, 3 - index), (index, states)
    if ctx.rank == 0:
        with pytest.raises(ValueError, match="Linear"):
            model.set_modules_to_forward_prefetch([nn.Linear(2, 2)])


@pytest.mark.ranks(2)
def test_the_order_of_prefetching_is_that_of_the_model(ctx):
    model = shard_layers(make())
    model(data(0, 0, ctx.rank)[0])
    hooks = [m._hooks for m in (model, *model.layers)]
    assert [h.next for h in hooks] == [*hooks[1:], None]
    assert [h.previous for h in hooks] == [hooks[3], None, hooks[1], hooks[2]]
    names = [h.group.name for h in hooks]
    assert names[:2] == ["a FSDPModel", "layers.0 (a FSDPLayer)"]


@pytest.mark.ranks(2)
@own_memory()
def test_the_root_is_the_outermost_module_that_is_called(ctx):
    model = shard_layers(make())
    model(data(0, 0, ctx.rank)[0])
    assert not group_of(model).reshard_after_forward
    assert all(group_of(layer).reshard_after_forward for layer in model.layers)
    assert group_of(model).flats[0].state.name == "UNSHARDED"
    assert group_of(model.layers[0]).flats[0].state.name == "SHARDED"
    model.set_reshard_after_forward(True)
    model(data(0, 0, ctx.rank)[0])
    assert {group_of(m).flats[0].state.name for m in (model, *model.layers)} == {"SHARDED"}
    model.set_reshard_after_forward(False, recurse=True)
    model(data(0, 0, ctx.rank)[0])
    assert {group_of(m).flats[0].state.name for m in (model, *model.layers)} == {"UNSHARDED"}


@pytest.mark.ranks(2)
@own_memory()
def test_parameters_stay_unsharded_after_backward_until_they_are_written(ctx):
    plain, model = twins()
    shard_layers(model)
    model.set_reshard_after_backward(False)
    comm = group_of(model).flats[0].shard_comm
    x, y = data(0, 0, ctx.rank)
    loss_of(model(x), y).backward()
    gathers = comm.traffic["all_gather"].calls
    assert {group_of(m).flats[0].state.name for m in (model, *model.layers)} == {"UNSHARDED"}
    model(x)
    assert comm.traffic["all_gather"].calls == gathers
    model.zero_grad()
    assert_same_updates(train_sharded(model, ctx.rank), train_plain(plain, 2))


@pytest.mark.ranks(2)
def test_unshard_and_reshard(ctx):
    plain, model = twins()
    shard_layers(model)
    layer, weight = model.layers[0], model.layers[0].up.weight
    assert layer.unshard() is None
    assert type(layer.up.weight) is torch.Tensor
    torch.testing.assert_close(layer.up.weight.detach(), plain.layers[0].up.weight.detach())
    assert isinstance(model.first.weight, ShardedParameter)
    layer.reshard()
    assert layer.up.weight is weight
    handle = layer.unshard(async_op=True)
    handle.wait()
    handle.wait()
    state = model.state_dict()
    assert layer.up.weight is weight
    torch.testing.assert_close(state["layers.0.up.weight"], plain.layers[0].up.weight.detach())
    for each in model.layers:
        each.unshard(async_op=True)
    assert_same_updates(train_sharded(model, ctx.rank), train_plain(plain, 2))
    for each in (model, *model.layers):
        each.unshard()
    torch.testing.assert_close(model(data(0, 0, 0)[0]), plain(data(0, 0, 0)[0]), atol=1e-5, rtol=1e-4)


@pytest.mark.ranks(2)
def test_what_is_computed_with_an_unsharded_parameter_has_a_gradient(ctx):
    plain, model = twins()
    shard_layers(model)
    model.layers[1].unshard()
    penalty = model.layers[1].down.weight.square().sum()
    x, y = data(0, 0, ctx.rank)
    (loss_of(model(x), y) + penalty).backward()
    sum(
        (loss_of(plain(x), y) + plain.layers[1].down.weight.square().sum()) / 2
        for x, y in (data(0, 0, r) for r in (0, 1))
    ).backward()
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (plain, model)]
    for optimizer in optimizers:
        optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(full(p), plain.get_parameter(name).detach(), msg=name)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("resharded", [True, False])
def test_mixed_precision(ctx, reduce_dtype, resharded):
    """Gradients accumulate in the dtype of the reduction; torch's own fully_shard has the same."""
    plain, ours = twins()
    theirs = copy.deepcopy(plain)
    policy = {"param_dtype": torch.bfloat16, "reduce_dtype": reduce_dtype}
    shard_layers(ours, mp_policy=MixedPrecisionPolicy(**policy), reshard_after_forward=resharded)
    shard_layers(theirs, torch_fully_shard, mp_policy=TorchPolicy(**policy), mesh=world_mesh())
    for model in (ours, theirs):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            x, y = data(0, micro, ctx.rank)
            output = model(x)
            assert output.dtype == torch.bfloat16
            loss_of(output, y).backward()
    sums: dict[str, list[torch.Tensor]] = {name: [] for name, _ in plain.named_parameters()}
    half = plain.to(torch.bfloat16)
    for rank in range(ctx.world_size):
        for micro in range(2):
            half.zero_grad()
            x, y = data(0, micro, rank)
            loss_of(half(x.to(torch.bfloat16)), y).backward()
            for name, p in half.named_parameters():
                if micro:
                    sums[name][rank] += p.grad
                else:
                    sums[name].append(p.grad.to(reduce_dtype or p.grad.dtype))
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert p.grad.dtype == p.dtype == torch.float32
        expected = torch.stack([each.float() for each in sums[name]]).mean(0)
        grad = p.grad.add(0)
        with torch.no_grad():
            p.copy_(grad)
        for value in (full(p), q.grad.full_tensor()):
            error = (value - expected).norm() / expected.norm()
            assert error < (1e-6 if reduce_dtype == torch.float32 else 1e-2), f"{name}: {error}"


@pytest.mark.ranks(2)
def test_a_policy_of_torch_chooses_dtypes(ctx):
    class Layer(nn.Linear):
        def forward(self, x):
            dtypes.append((x.dtype, self.weight.dtype, self.bias.dtype))
            return x @ self.weight.T + self.bias

    dtypes: list = []
    is_in_torch = hasattr(TorchPolicy, "param_dtype_override_fn")  # from 2.15 on
    policy = (TorchPolicy if is_in_torch else MixedPrecisionPolicy)(
        torch.bfloat16, param_dtype_override_fn=lambda param: param.dtype if param.dim() == 1 else None
    )
    for shard in (fully_shard, torch_fully_shard if is_in_torch else fully_shard):
        shard(Layer(4, 3), mesh=world_mesh(), mp_policy=policy)(torch.ones(2, 4)).sum().backward()
    assert dtypes == [(torch.bfloat16, torch.bfloat16, torch.float32)] * 2


@pytest.mark.ranks(2)
def test_dtypes_of_inputs_and_outputs(ctx):
    seen = []

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x, *, scale, index):
            seen.append((x.dtype, scale.dtype, index.dtype, self.linear.weight.dtype))
            return {"out": self.linear(x.to(self.linear.weight.dtype)) * scale}

    args = (torch.randn(2, 5),)
    kwargs = {"scale": torch.ones(5), "index": torch.arange(3)}
    policy = TorchPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    assert fully_shard(Inner(), mp_policy=policy)(*args, **kwargs)["out"].dtype == torch.float64
    fully_shard(Inner(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False))(*args, **kwargs)
    assert seen == [
        (torch.bfloat16, torch.bfloat16, torch.int64, torch.bfloat16),
        (torch.float32, torch.float32, torch.int64, torch.bfloat16),
    ]
    outer = nn.Sequential(fully_shard(nn.Linear(5, 5)))
    fully_shard(outer, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float64))  # it has no parameters itself
    assert outer(args[0]).dtype == torch.float64


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    index: torch.Tensor


@pytest.mark.ranks(2)
def test_dataclasses_are_cast(ctx):
    class Inner(nn.Linear):
        def forward(self, batch):
            assert batch.index.dtype == torch.int64
            return Batch(super().forward(batch.x), batch.index)

    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
    output = fully_shard(Inner(5, 5), mp_policy=policy)(Batch(torch.randn(2, 5), torch.arange(2)))
    assert output.x.dtype == torch.float64
    output.x.sum().backward()


@pytest.mark.ranks(2)
def test_unused_outputs_and_modules(ctx):
    """A rank's loss leaves out an output, and one layer runs on rank 0 only in one step and nowhere in another."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.never = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x, both):
            return self.a(x), self.b(x) if both else None

    torch.manual_seed(1)
    plain = Two()
    model = fully_shard(copy.deepcopy(plain))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    start = {name: full(p) for name, p in model.named_parameters()}
    for step in range(6):
        x, _ = data(step, 0, ctx.rank)
        first, second = model(x, both=ctx.rank == 0 and step % 2 == 0)
        (first if second is None else first + second).square().mean().backward()
        for rank in range(2):
            x, _ = data(step, 0, rank)
            first, second = plain(x, both=rank == 0 and step % 2 == 0)
            ((first if second is None else first + second).square().mean() / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert all(p.grad is None for p in model.never.parameters())
    updates = {name: full(p) - start[name] for name, p in model.named_parameters()}
    assert_same_updates(updates, {name: p.detach() - start[name] for name, p in plain.named_parameters()})


@pytest.mark.ranks(2)
def test_micro_batches_as_in_a_pipeline(ctx):
    """Forwards and backwards alternate; only the last backward is marked as the last."""
    plain, model = twins()
    shard_layers(model)
    model.set_is_last_backward(False)
    model.set_requires_gradient_sync(False)
    waiting = [loss_of(model(x), y) for x, y in (data(0, micro, ctx.rank) for micro in range(2))]
    for micro in range(2, 5):
        waiting.pop(0).backward()
        x, y = data(0, micro, ctx.rank)
        waiting.append(loss_of(model(x), y))
    waiting.pop(0).backward()
    model.set_is_last_backward(True)
    model.set_requires_gradient_sync(True)
    waiting.pop(0).backward()
    for rank in range(2):
        for micro in range(5):
            x, y = data(0, micro, rank)
            (loss_of(plain(x), y) / 2).backward()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(p.grad)
            torch.testing.assert_close(full(p), plain.get_parameter(name).grad, msg=name)


@pytest.mark.ranks(2)
def test_optimizers_that_step_in_backward(ctx):
    plain, model = twins()
    shard_layers(model)
    calls = []
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(param):
        calls.append(param)
        optimizers[param].step()
        optimizers[param].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    start = {name: full(p) for name, p in model.named_parameters()}
    for number in range(10):
        x, y = data(number, 0, ctx.rank)
        loss_of(model(x), y).backward()
    assert len(calls) == 10 * len(optimizers)
    updates = {name: full(p) - start[name] for name, p in model.named_parameters()}
    assert_same_updates(updates, train_plain(plain, 2, functools.partial(torch.optim.SGD, lr=0.1)))


@pytest.mark.ranks(4)
def test_a_mean_in_half_precision_does_not_overflow(ctx):
    model = fully_shard(nn.Linear(3, 3, bias=False).half())
    (model(torch.full((1, 3), 2.0).half()).sum() * 15000).backward()
    assert model.weight.grad.add(0).tolist() == torch.full_like(model.weight.detach(), 30000.0).tolist()


@pytest.mark.ranks(2)
def test_divisors_and_hooks_of_the_reduction(ctx):
    plain, model = twins(layers=1)
    shard_layers(model)
    model.set_gradient_divide_factor(1.0)
    model.layers[0].set_reduce_scatter_divide_factor(4.0)
    model.layers[0].set_all_reduce_hook(lambda grads: grads.mul_(3))
    x, y = data(0, 0, ctx.rank)
    loss_of(model(x), y).backward()
    for rank in range(2):
        x, y = data(0, 0, rank)
        loss_of(plain(x), y).backward()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(p.grad)
            factor = 0.75 if name.startswith("layers") else 1.0
            torch.testing.assert_close(full(p), plain.get_parameter(name).grad * factor, msg=name)


@pytest.mark.ranks(2)
def test_ignored_parameters(ctx):
    plain, model = twins()
    ignored = {model.first.weight, model.layers[1].up.bias}
    for layer in model.layers:
        fully_shard(layer, ignored_params=ignored)
    fully_shard(model, ignored_params=ignored)
    for p in model.parameters():
        assert (p in ignored) == (type(p) is nn.Parameter)
    for p in ignored:
        p.register_hook(lambda grad: (dist.all_reduce(grad), grad / 2)[1])
    assert_same_updates(train_sharded(model, ctx.rank), train_plain(plain, 2))


@pytest.mark.ranks(2)
def test_from_the_meta_device(ctx):
    with torch.device("meta"):
        model = make()
    shard_layers(model)
    model.to_empty(device="cpu")
    torch.manual_seed(7 + ctx.rank)  # ranks need not agree
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
        if "scale" in module._buffers:
            module.scale.fill_(0.5)
    torch.manual_seed(7)
    plain = make()
    torch.manual_seed(7)
    for module in plain.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for name, p in model.named_parameters():
        torch.testing.assert_close(full(p), plain.get_parameter(name).detach(), msg=name)
    assert_same_updates(train_sharded(model, ctx.rank), train_plain(plain, 2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts(ctx, assign):
    plain, model = twins()
    shard_layers(model)
    train_plain(plain, 2)
    state = plain.state_dict()
    with torch.device("meta"):
        empty = make()
    for target in (model, shard_layers(empty)):
        if not assign:
            for layer in target.layers:
                layer.scale = torch.zeros(())
        target.load_state_dict(state, assign=assign)
        loaded = target.state_dict()
        assert list(loaded) == list(state)
        for name, value in loaded.items():
            torch.testing.assert_close(value, state[name])
        assert all(isinstance(p, ShardedParameter) for p in target.parameters())


@pytest.mark.ranks(2)
def test_the_class_of_a_module(ctx):
    model = shard_layers(make())
    assert isinstance(model, FSDPModule)
    assert type(model).__name__ == "FSDPModel"
    assert not isinstance(model, TorchFSDPModule)
    assert not isinstance(model.first, FSDPModule)
    sequence = fully_shard(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))
    assert type(sequence[:2]) is nn.Sequential
    assert type(fully_shard(Layer())) is type(model.layers[0])
    assert "FSDPLayer" in repr(model)
    assert "Linear(in_features=5" in repr(model)


@pytest.mark.ranks(2)
def test_a_copy_of_a_model_trains_by_itself(ctx):
    plain, model = twins()
    shard_layers(model)
    model(data(0, 0, ctx.rank)[0])
    twin = copy.deepcopy(model)
    assert isinstance(twin, FSDPModule)
    assert isinstance(twin.layers[0], FSDPModule)
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}
    expected = train_plain(plain, 2)
    assert_same_updates(train_sharded(twin, ctx.rank), expected)
    assert_same_updates(train_sharded(model, ctx.rank, micro_steps=1), expected)


class WithLock(nn.Linear):
    """With an attribute that cannot be copied, and a method besides forward."""

    def __init__(self) -> None:
        super().__init__(5, 5)
        self.lock = threading.Lock()

    def __getstate__(self):
        return {name: value for name, value in super().__getstate__().items() if name != "lock"}

    def encode(self, x):
        return 2 * self(x)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_copy_does_not_compute_with_the_original(ctx):
    torch._dynamo.reset()
    model = fully_shard(WithLock())
    register_fsdp_forward_method(model, "encode")
    model.compile(backend="eager")
    x = torch.ones(2, 5)
    before = model.encode(x).detach(), model(x).detach()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.weight.mul_(3.0)
    for name, expected in zip(("encode", "forward"), before, strict=True):
        y = twin.encode(x) if name == "encode" else twin(x)
        torch.testing.assert_close(y.detach(), expected, msg=name)
        y.sum().backward()
        assert model.weight.grad is None
        assert twin.weight.grad is not None


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_layer_is_one_graph(ctx):
    torch._dynamo.reset()
    plain = Layer()
    model = fully_shard(copy.deepcopy(plain))
    model.compile(fullgraph=True, backend="eager")
    x = torch.ones(2, plain.up.in_features)
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.ranks(2)
def test_another_method_as_forward(ctx):
    class Generator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x):
            raise AssertionError("not this one")

        def generate(self, x, *, sign=1.0):
            assert not isinstance(self.linear.weight, ShardedParameter)
            if sign == 0:
                raise KeyError("sign")
            return sign * self.linear(x)

    torch.manual_seed(1)
    plain = Generator()
    model = fully_shard(copy.deepcopy(plain))
    register_fsdp_forward_method(plain, "generate")
    register_fsdp_forward_method(model, "generate")
    with pytest.raises(ValueError, match="missing"):
        register_fsdp_forward_method(model, "missing")
    with pytest.raises(KeyError, match="sign"):
        model.generate(torch.ones(1, 5), sign=0)
    assert isinstance(model.linear.weight, ShardedParameter)

    def forward(model, x):
        return model.generate(x, sign=-1.0) if isinstance(model, FSDPModule) else -model.linear(x)

    assert_same_updates(train_sharded(model, ctx.rank, forward=forward), train_plain(plain, 2, forward=forward))


@pytest.mark.ranks(2)
def test_an_exception_in_forward_or_backward(ctx):
    plain, model = twins()
    shard_layers(model)
    model.set_requires_gradient_sync(False)
    loss_of(model(data(5, 0, ctx.rank)[0]), data(5, 0, ctx.rank)[1]).backward()
    model.set_requires_gradient_sync(True)
    for place in ("forward", "backward"):
        output = model.first(torch.ones(1, 5)).register_hook
        del output
        handle = model.layers[1].register_forward_hook(functools.partial(_fail, place))
        with pytest.raises(ArithmeticError, match=place):
            loss_of(model(data(0, 0, ctx.rank)[0]), data(0, 0, ctx.rank)[1]).backward()
        handle.remove()
        model.reset_iter_state()
    assert all(isinstance(p, ShardedParameter) for p in model.parameters())
    model.zero_grad()
    assert_same_updates(train_sharded(model, ctx.rank), train_plain(plain, 2))


def _fail(place, module, args, output):
    if place == "forward":
        raise ArithmeticError("in forward")

    def hook(grad):
        raise ArithmeticError("in backward")

    output.register_hook(hook)


@pytest.mark.ranks(2)
def test_grad_scaler(ctx):
    plain, model = twins()
    shard_layers(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    start = {name: full(p) for name, p in model.named_parameters()}
    for step in range(10):
        optimizer.zero_grad()
        x, y = data(step, 0, ctx.rank)
        scaler.scale(loss_of(model(x), y)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
    updates = {name: full(p) - start[name] for name, p in model.named_parameters()}
    assert_same_updates(updates, train_plain(plain, 2, clip=0.05))


@pytest.mark.ranks(2)
def test_settings_that_mean_nothing_here_say_so(ctx):
    model = shard_layers(make())
    model.set_is_last_backward(False)
    model.set_force_sum_reduction_for_comms(True)
    model.set_reduce_scatter_unused_params(True)
    model.set_reduce_scatter_max_input_buffers(1)
    model.set_allocate_memory_from_process_group_for_comm(False)
    model.set_separate_reduce_scatter_group(False)
    model.set_keep_unsharded_storage(False)
    model.set_manual_backward_finalization(False)
    model.set_post_optim_event(None)
    model.layers[0].set_unshard_in_backward(True)
    for method, argument in [
        ("set_allocate_memory_from_process_group_for_comm", True),
        ("set_symm_mem_for_comm", "NCCL"),
        ("set_custom_all_gather", None),
        ("set_custom_reduce_scatter", None),
        ("set_separate_reduce_scatter_group", True),
        ("set_keep_unsharded_storage", True),
        ("set_manual_backward_finalization", True),
    ]:
        with pytest.raises(RuntimeError, match=method):
            getattr(model, method)(argument)
    with pytest.raises(RuntimeError, match="finalize_backward: bmt_zero completes the reductions of each backward"):
        model.finalize_backward()
    with pytest.raises(ValueError, match="max_input_buffers=2"):
        model.set_reduce_scatter_max_input_buffers(2)
    with pytest.raises(TypeError, match="bool"):
        model.set_reduce_scatter_max_input_buffers(True)
    with pytest.raises(ValueError, match="reshard_after_forward=2"):
        model.set_reshard_after_forward(2)
    with pytest.raises(ValueError, match="factor=0"):
        model.set_gradient_divide_factor(0)
    with pytest.raises(ValueError, match="stream"):
        model.set_all_reduce_hook(print, stream=object())


@pytest.mark.ranks(2)
def test_wrong_arguments(ctx):
    for module, options, kind, word in [
        (nn.ModuleList([nn.Linear(2, 2)]), {}, ValueError, "ModuleList"),
        ([], {}, ValueError, "empty"),
        ("model", {}, TypeError, "str"),
        (nn.Linear(2, 2), {"reshard_after_forward": 3}, ValueError, "reshard_after_forward=3"),
        (nn.Linear(2, 2), {"reshard_after_forward": "yes"}, ValueError, "reshard_after_forward='yes'"),
        (nn.Linear(2, 2), {"mp_policy": None}, TypeError, "mp_policy"),
        (nn.Linear(2, 2), {"offload_policy": None}, TypeError, "offload_policy"),
        (nn.Linear(2, 2), {"shard_placement_fn": lambda p: _shard(1)}, ValueError, "Shard(dim=1)"),
        (fully_shard(nn.Linear(2, 2)), {}, ValueError, "sharded already"),
    ]:
        with pytest.raises(kind, match=re.escape(word)):
            fully_shard(module, **options)
    fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda p: _shard(0) if p.dim() > 1 else None)
    fully_shard(nn.Linear(2, 2), offload_policy=CPUOffloadPolicy(), reshard_after_forward=1)
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ValueError, match="3 dimensions"):
        fully_shard(nn.Linear(2, 2), mesh=mesh)


def _shard(dim):
    from torch.distributed.tensor import Shard

    return Shard(dim)


@pytest.mark.ranks(2)
def test_offload_to_the_host(ctx):
    """On a CPU context everything is in host memory."""
    plain, model = twins()
    shard_layers(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert_same_updates(train_sharded(model, ctx.rank), train_plain(plain, 2))
    assert all(p.device.type == "cpu" for p in model.parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_fused_optimizers_where_parameters_stay_unsharded(ctx, name, offload):
    """Their writes are not counted by autograd."""
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 7)).double()
    model = copy.deepcopy(plain)
    fully_shard(model, offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy())
    model.set_reshard_after_backward(False)
    start = [param.detach().clone() for param in plain.parameters()]
    ours = getattr(torch.optim, name)(model.parameters(), lr=0.05, fused=True)
    theirs = getattr(torch.optim, name)(plain.parameters(), lr=0.05)
    for _ in range(5):
        batches = torch.randn(ctx.world_size, 4, 7, dtype=torch.float64)
        plain(batches.flatten(0, 1)).square().mean().backward()
        model(batches[ctx.rank]).square().mean().backward()
        if ctx.rank == 1:
            time.sleep(0.05)  # the other rank must wait for these rows
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    model.reshard()
    for param, other, before in zip(model.parameters(), plain.parameters(), start, strict=True):
        assert (param.full_tensor() - other).norm() <= 1e-9 * (other - before).norm()
