"""Inputs, outputs and gradients of Blocks, compared with those of the plain module."""

from __future__ import annotations

import copy
import threading
import types
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from block_helpers import (
    assert_same_gradients,
    assert_same_parameters,
    own_memory,
    pair,
    seeded,
    space,
    total,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bmt_comm import local_rows
from bmt_zero import Block, MixedPrecision, TransformerBlockList, shard
from bmt_zero.shard import forget_sharding, group_of

OPTIONS = [
    pytest.param({"use_checkpoint": checkpointing, "zero_level": level}, id=f"{level}{'c' * checkpointing}")
    for checkpointing in (False, True)
    for level in (1, 2, 3)
]
every_option = pytest.mark.parametrize("options", OPTIONS)


def compare(ctx, plain, block, call, inputs=1):
    """Back-propagate ``call(module, x)`` (a loss) of this rank's x in the Block, of all ranks' in the plain module."""
    expected = 0.0
    for rank in range(ctx.world_size):
        x = seeded(10 + rank, 3, 5).requires_grad_()
        loss = call(plain, x)
        loss.backward()
        expected += loss.item()
        if rank == ctx.rank:
            input_grad = x.grad
    mine = seeded(10 + ctx.rank, 3, 5).requires_grad_()
    loss = call(block, mine)
    loss.backward()
    assert total(loss) == pytest.approx(expected, rel=1e-5)
    if input_grad is None:
        assert mine.grad is None
    else:
        torch.testing.assert_close(mine.grad, input_grad, rtol=1e-5, atol=1e-6)
    assert_same_gradients(block, plain)


class Combined(nn.Module):
    """Two parameters in one expression: their gradients are views of one tensor, at an offset."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(2, 5))
        self.b = nn.Parameter(torch.randn(3, 5))

    def forward(self, x):
        return x @ torch.cat([self.a, self.b]).t()


@pytest.mark.ranks(1, 2, 3)
@every_option
def test_two_parameters_in_one_expression_get_their_own_gradients(ctx, options):
    compare(ctx, *pair(Combined, **options), lambda module, x: module(x).tanh().square().sum())


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 3))
        self.v = nn.Parameter(torch.randn(4, 5))
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x):
        # Gradients that are transposed, expanded and at an offset.
        return x @ self.w.t().contiguous().t() + x @ self.v[1:].t() + self.scale * self.w.sum(0) + self.v.sum()


@pytest.mark.ranks(1, 2)
@every_option
def test_gradients_of_any_strides_and_offset_are_read_right(ctx, options):
    compare(ctx, *pair(Transposed, **options), lambda module, x: module(x).square().sum())


class Signature(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x, skipped=None, bias=None, *, views=None, shift, flag=False):
        y = self.linear(x)
        if bias is not None:
            y = y + bias
        if flag:
            y = y * shift + views
        assert skipped is None
        return y


@pytest.mark.ranks(2)
@every_option
def test_keyword_only_arguments_and_those_after_a_skipped_one_arrive(ctx, options):
    def call(module, x):
        return module(x, None, x * 2, shift=x + 1, flag=True, views=x).square().sum()

    compare(ctx, *pair(Signature, **options), call)
    plain, block = pair(Signature, **options)
    compare(ctx, plain, block, lambda module, x: module(x, shift=None, bias=x).square().sum())
    with pytest.raises(TypeError, match="shift"):
        block(seeded(0, 3, 5))


@dataclass
class Output:
    hidden: Tensor
    extra: dict


class Nested(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.kind = kind

    def forward(self, x):
        y = self.linear(x)
        if self.kind == "dict":
            return {"y": y, "note": "text", "inner": [y * 2, None, (y + 1, 3)]}
        if self.kind == "dataclass":
            return Output(y, {"more": [y * 2]})
        return y, (y * 2, [y.detach()])


@pytest.mark.ranks(2)
@every_option
@pytest.mark.parametrize("kind", ["dict", "dataclass", "tuple"])
def test_outputs_keep_their_structure_and_gradients(ctx, options, kind):
    def call(module, x):
        out = module(x)
        if kind == "dict":
            assert list(out) == ["y", "note", "inner"]
            return out["y"].sum() + out["inner"][0].square().sum() + out["inner"][2][0].prod()
        if kind == "dataclass":
            assert isinstance(out, Output)
            return out.hidden.sum() + out.extra["more"][0].square().sum()
        return out[0].sum() + out[1][0].square().sum()

    compare(ctx, *pair(lambda: Nested(kind), **options), call)


@pytest.mark.ranks(2)
@every_option
def test_inputs_that_need_no_gradient_serve_several_outputs(ctx, options):
    def call(module, x):
        first, (second, _) = module(x.detach())
        return first.square().sum() + second.sum()

    compare(ctx, *pair(lambda: Nested("tuple"), **options), call)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x).tanh()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_forward_runs_again_in_backward_only_under_checkpointing(ctx, level):
    for checkpointing, calls in [(False, 1), (True, 2)]:
        block = Block(Counting(), checkpointing, level)
        block(seeded(0, 3, 5)).sum().backward()
        assert block.calls == calls
        with torch.no_grad():
            block(seeded(0, 3, 5))
        assert block.calls == calls + 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("level", [2, 3])
@own_memory()
def test_full_parameters_are_freed_when_they_should_be(ctx, level, checkpointing):
    blocks = TransformerBlockList([Block(nn.Linear(5, 5), checkpointing, level) for _ in range(3)])
    unsharded = 4 * group_of(blocks[0]).flats[0].layout.numel
    assert [space(b) for b in blocks] == [0, 0, 0]
    for _ in range(2):
        y = blocks(seeded(ctx.rank, 3, 5))
        # Level 3 frees after forward, but for the last, with which backward begins.
        assert [space(b) for b in blocks] == ([unsharded] * 3 if level == 2 else [0, 0, unsharded])
        y.sum().backward()
        assert [space(b) for b in blocks] == [0, 0, 0]
    with torch.no_grad():
        blocks(seeded(ctx.rank, 3, 5))
    assert [space(b) for b in blocks] == [0, 0, 0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("checkpointing", [False, True])
@own_memory()
def test_level_3_never_holds_more_than_two_blocks_in_backward(ctx, checkpointing):
    blocks = TransformerBlockList([Block(nn.Linear(5, 5), checkpointing, 3) for _ in range(5)])
    held = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            held.append(sum(space(b) > 0 for b in blocks))
            return grad

    for block in blocks:
        block.register_forward_hook(lambda module, inputs, output: Probe.apply(output))
    blocks(seeded(ctx.rank, 3, 5)).sum().backward()
    assert len(held) == 5
    assert max(held) <= 3  # the current one, the next one, and the one after that
    assert [space(b) for b in blocks] == [0] * 5


@pytest.mark.ranks(1, 2)
@every_option
@pytest.mark.parametrize("frozen", [["0.weight"], ["0.weight", "0.bias", "2.weight", "2.bias"]], ids=["part", "all"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_frozen_parameters_pass_gradients_on_to_inputs(ctx, options, frozen, when):
    def make():
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 5))
        if when == "before":
            for name in frozen:
                model.get_parameter(name).requires_grad_(False)
        return model

    plain, block = pair(make, **options)
    for name, param in [*plain.named_parameters(), *block.named_parameters()]:
        param.requires_grad_(name not in frozen)
    compare(ctx, plain, block, lambda module, x: module(x).square().sum())
    for name in frozen:
        assert dict(block.named_parameters())[name].grad is None


@pytest.mark.ranks(2)
@every_option
def test_freezing_and_unfreezing_between_steps_keeps_optimizer_state(ctx, options):
    plain, block = pair(lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)), **options)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1, eps=1e-3) for m in (plain, block)]
    shapes = [p.shape for p in block.parameters()]
    for step in range(6):
        for module in (plain, block):
            for name, param in module.named_parameters():
                param.requires_grad_(not (step in (2, 3) and name.startswith("0.")))
        for optimizer in optimizers:
            optimizer.zero_grad()
        compare(ctx, plain, block, lambda module, x: module(x).square().mean())
        for optimizer in optimizers:
            optimizer.step()
        assert [p.shape for p in block.parameters()] == shapes
    assert_same_parameters(block, plain)


class PassesThrough(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x, bias):
        return self.linear(x) + bias, bias


@pytest.mark.ranks(2)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("freeze", [False, True])
def test_an_input_that_is_passed_through_unchanged(ctx, checkpointing, freeze):
    def make():
        module = PassesThrough()
        module.linear.bias.requires_grad_(not freeze)
        return module

    torch.manual_seed(0)
    plain = nn.ModuleList([make() for _ in range(3)])
    blocks = copy.deepcopy(plain)
    blocks = TransformerBlockList([Block(m, checkpointing, 3) for m in blocks], num_hidden=2)
    bias = seeded(5, 3, 5).requires_grad_()
    counts = []
    for _ in range(2):
        x = seeded(1, 3, 5)
        y, passed = x, bias
        for layer in plain:
            y, passed = layer(y, passed)
        (y.square().sum() * 2 + passed.sum()).backward()
        before, bias.grad = bias.grad, None
        y, passed = blocks(x, bias)
        (y.square().sum() * (2 if ctx.world_size == 1 else 1) + passed.sum() / 2).backward()
        torch.testing.assert_close(2 * bias.grad, before)
        bias.grad = None
        counts.append(len(bias._backward_hooks or ()))
        assert [space(b) for b in blocks] == [0, 0, 0]
    assert counts == [0, 0]  # hooks on a leaf would stay for ever
    assert_same_gradients(blocks, plain)


@pytest.mark.ranks(2)
@every_option
def test_the_first_operation_may_write_to_the_input(ctx, options):
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x):
            return self.linear(x.mul_(2).tanh_())

    compare(ctx, *pair(InPlace, **{**options, "use_checkpoint": False}), lambda m, x: m(x * 1).square().sum())


@pytest.mark.ranks(2)
@every_option
@pytest.mark.parametrize("kind", ["tuple", "dataclass"])
def test_a_parameter_in_the_output_stays_readable(ctx, options, kind):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 5))

        def forward(self, x):
            output = x @ self.weight, {"weight": self.weight.t()}
            return Output(*output) if kind == "dataclass" else output

    def call(module, x):
        output = module(x)
        y, out = (output.hidden, output.extra) if kind == "dataclass" else output
        return (y.tanh() @ out["weight"]).square().sum()

    compare(ctx, *pair(Tied, **options), call)


@pytest.mark.ranks(2)
def test_a_parameter_hidden_in_an_output_object_is_refused(ctx):
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 5))

        def forward(self, x):
            return types.SimpleNamespace(hidden=x @ self.weight, extra={"w": self.weight})

    with pytest.raises(ValueError, match="contains a parameter"):
        Block(Hidden(), False, 3)(seeded(0, 3, 5))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.third = self.first

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


@pytest.mark.ranks(1, 2)
@every_option
def test_parameters_and_modules_shared_within_a_block(ctx, options):
    plain, block = pair(Shared, **options)
    assert len(list(block.parameters())) == len(list(plain.parameters()))
    compare(ctx, plain, block, lambda module, x: module(x).square().sum())
    state = block.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name


@pytest.mark.ranks(1, 2)
@every_option
def test_a_block_used_twice_in_one_forward(ctx, options):
    plain, block = pair(lambda: nn.Linear(5, 5), **options)
    compare(ctx, plain, block, lambda module, x: module(torch.tanh(module(x))).square().sum() + module(x).sum())


@pytest.mark.ranks(2)
@every_option
def test_several_forwards_before_one_backward(ctx, options):
    def call(module, x):
        return sum((module(x + i).square().sum() for i in range(3)), torch.zeros(()))

    compare(ctx, *pair(lambda: nn.Sequential(nn.Linear(5, 5), nn.Tanh()), **options), call)


@pytest.mark.ranks(2)
@every_option
def test_a_module_that_runs_in_another_thread_within_a_forward(ctx, options):
    """As autograd's thread does on CUDA, where a module's forward calls backward."""

    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.weight = inner, nn.Parameter(seeded(3, 5, 5))

        def forward(self, x):
            results = []
            thread = threading.Thread(target=lambda: results.append(self.inner(x)))
            thread.start()
            thread.join()
            assert self.weight.shape == (5, 5)  # it is unsharded still
            return results[0] @ self.weight

    plain = Outer(nn.Linear(5, 5))
    block = copy.deepcopy(plain)
    shard(block.inner, **options)
    shard(block, **options)
    compare(ctx, plain, block, lambda module, x: module(x).sum())


@pytest.mark.ranks(2)
@every_option
def test_two_losses_and_retain_graph(ctx, options):
    plain, block = pair(lambda: nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 4)), **options)
    for module, ranks in [(plain, range(2)), (block, [ctx.rank])]:
        for rank in ranks:
            y = module(seeded(rank, 3, 5))
            (y.square().sum()).backward(retain_graph=True)
            with torch.no_grad():
                module(seeded(7, 3, 5))  # in between
            y[0].sum().backward(retain_graph=True)
            y.prod(-1).sum().backward()
    assert_same_gradients(block, plain)


@pytest.mark.ranks(2)
@every_option
def test_no_grad_and_eval_between_forward_and_backward(ctx, options):
    plain, block = pair(lambda: nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.Linear(5, 4)), **options)
    plain.eval()

    def call(module, x):
        module.eval()
        y = module(x)
        module.train()
        with torch.no_grad():
            module(x)
        module.eval()
        with torch.inference_mode():
            module(x.detach())
        return y.square().sum()

    compare(ctx, plain, block, call)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 6)
        self.b = nn.Linear(6, 5)

    def part(self, x):
        return torch.tanh(self.b(torch.tanh(self.a(x))))

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=False) + self.a(x).sum()


@pytest.mark.ranks(2)
@every_option
def test_the_users_checkpoint_inside_a_block(ctx, options):
    def call(module, x):
        return (module(module(x)) + module(x + 1)).square().sum()

    compare(ctx, *pair(Inner, **options), call)


class ReadsInPart(nn.Module):
    """Computes with shapes and copies of its parameters, and with as many of them as its input says."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 5, 5))
        self.bias = nn.Parameter(torch.randn(5))

    def part(self, x):
        x = x * self.weights.shape[0] / self.bias.size(0) + self.weights.detach().mean() * len(self.bias)
        for i in range(1 if x.detach().sum() > 0 else 3):
            x = torch.tanh(x @ self.weights[i] + self.bias.data + self.bias)
        return torch.tanh(x * self.weights.dim() / self.weights.numel() + torch.ones_like(self.bias))

    def forward(self, x):
        return x + checkpoint(self.part, x, use_reentrant=False)


@pytest.mark.ranks(1, 2, 3)
@every_option
def test_the_users_checkpoint_recomputes_with_unsharded_parameters(ctx, options):
    """Modules have sharded parameters then. Which of them a rank reads may depend on its input."""
    compare(ctx, *pair(ReadsInPart, **options), lambda module, x: module(x).square().sum())


@pytest.mark.ranks(1, 2)
@every_option
def test_frozen_parameters_in_the_users_checkpoint_have_the_dtype_of_computation(ctx, options):
    torch.manual_seed(0)
    plain = Inner()
    plain.a.requires_grad_(False)
    plain.b.bias.requires_grad_(False)
    block = Block(copy.deepcopy(plain).double(), precision=MixedPrecision(param_dtype=torch.float32), **options)
    compare(ctx, plain, block, lambda module, x: module(x).square().sum())
    assert block.a.weight.sum().dtype == torch.float64
    if ctx.world_size == 1:
        block.a.weight[0].zero_()
        assert block.a.weight.to_local()[0].abs().sum() == 0


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("level", [0, 3])
def test_weights_of_another_block_have_the_dtype_of_computation_in_evaluation(ctx, level):
    options = {"zero_level": level, "precision": MixedPrecision(param_dtype=torch.float32)}
    first = Block(nn.Linear(5, 5, dtype=torch.float64), **options)

    class Tied(nn.Module):
        def forward(self, x):
            return x @ first.weight

    with torch.no_grad():
        assert Block(Tied(), **options)(first(torch.ones(2, 5))).dtype == torch.float32


@pytest.mark.ranks(2)
@every_option
def test_the_users_checkpoint_around_blocks(ctx, options):
    torch.manual_seed(0)
    plain = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)])
    blocks = TransformerBlockList([Block(copy.deepcopy(m), **options) for m in plain])

    def run(layers, x):
        for layer in layers:
            x = layer(x)
        return x

    def call(layers, x):
        return checkpoint(run, list(layers), x, use_reentrant=False).square().sum()

    compare(ctx, plain, blocks, call)
    if options["zero_level"] > 1:
        assert [space(b) for b in blocks] == [0, 0, 0]


@pytest.mark.ranks(1, 2)
@every_option
def test_recurrent_modules(ctx, options):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(5, 7, num_layers=2, batch_first=True)

        def forward(self, x):
            y, (h, c) = self.lstm(x[None])
            return y, h, c

    def call(module, x):
        y, h, c = module(x)
        return y.square().sum() + h.sum() + c.prod()

    compare(ctx, *pair(Recurrent, **options), call)


@pytest.mark.ranks(2)
@every_option
def test_a_block_whose_output_is_not_in_the_loss(ctx, options):
    plain, block = pair(lambda: nn.Linear(5, 5), **options)

    def call(module, x):
        module(x)
        return (x * 2).sum()

    compare(ctx, plain, block, call)
    compare(ctx, plain, block, lambda module, x: module(x).square().sum())


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("level", [1, 2, 3])
def test_checkpointing_changes_batch_norm_buffers_once(ctx, level):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh())
    blocks = [Block(copy.deepcopy(plain), checkpointing, level) for checkpointing in (False, True)]
    for step in range(3):
        x = seeded(step, 6, 5)
        plain(x).square().sum().backward()
        for block in blocks:
            block(x).square().sum().backward()
    for block in blocks:
        for name, buffer in plain.named_buffers():
            torch.testing.assert_close(dict(block.named_buffers())[name], buffer, msg=name)


@pytest.mark.ranks(2)
@every_option
def test_buffers_that_are_replaced_and_written_in_forward(ctx, options):
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 5)
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("last", torch.zeros(5), persistent=False)

        def forward(self, x):
            self.count += 1
            self.last = x.detach()[0] + self.last
            return self.linear(x)

    plain, block = pair(Steps, **options)
    for _ in range(2):
        for module in (plain, block):
            module(seeded(1, 3, 5)).sum().backward()
        assert block.count == plain.count
        assert torch.equal(block.last, plain.last)
    assert list(block.state_dict()) == list(plain.state_dict())


@pytest.mark.ranks(2)
@every_option
def test_dropout_is_the_same_when_it_is_computed_again(ctx, options):
    plain, block = pair(lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 5)), **options)

    def call(module, x):
        torch.manual_seed(int(x.abs().sum() * 1000))
        return module(x).square().sum()

    compare(ctx, plain, block, call)


@pytest.mark.ranks(2)
@every_option
def test_hooks_on_the_block_and_on_its_parts(ctx, options):
    def make():
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        model[0].register_forward_hook(lambda m, inputs, out: out * 2)
        model.register_forward_pre_hook(lambda m, inputs: (inputs[0] + 1,))
        return model

    plain, block = pair(make, **options)
    seen = []
    for module in (plain, block):
        module.register_forward_hook(lambda m, inputs, out: out * 3)
        module.register_full_backward_hook(lambda m, grad_in, grad_out: seen.append(grad_in[0].shape))
    compare(ctx, plain, block, lambda module, x: module(x).square().sum())
    assert seen == [(3, 5)] * 3


@pytest.mark.ranks(2)
@every_option
def test_autocast(ctx, options):
    plain, block = pair(lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5)), **options)

    def call(module, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
        assert y.dtype == torch.bfloat16
        return y.float().square().sum()

    compare(ctx, plain, block, call)


@pytest.mark.ranks(2)
def test_attributes_and_methods_are_those_of_the_module(ctx):
    plain, block = pair(Counting)
    assert isinstance(block.linear, nn.Linear)
    assert block.calls == 0
    block.calls = 5
    assert block.calls == 5
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = block.nothing_of_that_name
    assert [n for n, _ in block.named_modules()] == [n for n, _ in plain.named_modules()]
    assert "Counting" in repr(block)


@pytest.mark.ranks(1)
def test_train_and_eval_reach_the_module_by_its_own_method(ctx):
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(5)
            self.drop = nn.Dropout()

        def train(self, mode=True):
            super().train(mode)
            self.norm.eval()
            return self

    block = Block(Frozen())
    model = nn.Sequential(block)
    model.train()
    assert (block.training, block.norm.training) == (True, False)
    model.eval()
    assert (block.training, block.drop.training) == (False, False)


@pytest.mark.ranks(2)
def test_parameters_keep_identity_names_and_order(ctx):
    plain = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    before = dict(plain.named_parameters())
    block = Block(plain)
    after = dict(block.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    shapes = [p.shape for p in after.values()]
    block(seeded(0, 4, 5)).sum().backward()
    assert [p.shape for p in after.values()] == shapes
    assert all(a is b for a, b in zip(block.parameters(), before.values(), strict=True))


@pytest.mark.ranks(2)
@every_option
def test_gradients_of_inputs_alone_leave_parameters_without(ctx, options):
    def make():
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        model[0].bias.requires_grad_(False)
        return model

    plain, block = pair(make, **options)
    grads = []
    for module in (plain, block):
        x = seeded(ctx.rank, 3, 5).requires_grad_()
        grads.append(torch.autograd.grad(module(x).square().sum(), x)[0])
        assert all(p.grad is None for p in module.parameters())
    with pytest.raises(RuntimeError, match=r"call backward\(\)"):
        torch.autograd.grad(block(x).sum(), [x, *block.parameters()], allow_unused=True)
    torch.testing.assert_close(grads[1], grads[0])
    compare(ctx, plain, block, lambda module, x: module(x).square().sum())


@pytest.mark.ranks(2)
def test_a_backward_to_be_differentiated_is_refused_where_parameters_are_freed(ctx):
    x = seeded(ctx.rank, 3, 5).requires_grad_()
    block = Block(nn.Sequential(nn.Linear(5, 5), nn.Tanh()), False, 3)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(block(x).sum(), x, create_graph=True)
    plain, block = pair(lambda: nn.Sequential(nn.Linear(5, 5), nn.Tanh()), use_checkpoint=False, zero_level=1)

    def penalty(module, x):
        [grad] = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        return grad.square().sum()

    compare(ctx, plain, block, penalty)


@pytest.mark.ranks(2)
@every_option
def test_sparse_gradients(ctx, options):
    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(9, 5, sparse=True)
            self.linear = nn.Linear(5, 5)

        def forward(self, x):
            return self.linear(self.table(x.abs().argmax(-1))) * x

    plain, block = pair(Lookup, **options)
    for rank in range(2):
        plain(seeded(10 + rank, 3, 5)).square().sum().backward()
    plain.table.weight.grad = plain.table.weight.grad.to_dense()
    block(seeded(10 + ctx.rank, 3, 5)).square().sum().backward()
    assert_same_gradients(block, plain)


@pytest.mark.ranks(1, 2)
def test_a_module_without_parameters(ctx):
    block = Block(nn.Tanh())
    x = seeded(0, 3, 5).requires_grad_()
    block(x).sum().backward()
    torch.testing.assert_close(x.grad, 1 - torch.tanh(x.detach()) ** 2)


@pytest.mark.ranks(2)
@every_option
def test_functional_use_of_weights(ctx, options):
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.ParameterList([nn.Parameter(torch.randn(5, 5)) for _ in range(2)])

        def forward(self, x):
            return F.linear(torch.tanh(F.linear(x, self.w[0])), self.w[1].detach()) * self.w[1].sum()

    compare(ctx, *pair(Functional, **options), lambda module, x: module(x).square().sum())


class Doubling(nn.Module):
    """Its forward is replaced on the instance, as libraries that patch models do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

        def patched(module, x):
            module.calls += 1
            return 2 * type(module).forward(module, x)

        self.forward = types.MethodType(patched, self)

    def forward(self, x):
        return torch.tanh(self.linear(x))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("copied", [False, True])
def test_a_forward_that_was_set_on_the_instance_is_checkpointed(ctx, copied):
    torch.manual_seed(1)
    layer = Doubling()
    weight = layer.linear.weight.detach().clone().requires_grad_()
    bias = layer.linear.bias.detach().clone()
    x = seeded(2, 3, 4)
    block = Block(layer)
    if copied:
        block = copy.deepcopy(block)
        assert block.forward.replaced.__self__ is block
    y = block(x)
    assert block.calls == 1
    y.square().sum().backward()
    assert block.calls == 2  # computed again
    wanted = 2 * torch.tanh(F.linear(x, weight, bias))
    wanted.square().sum().backward()
    assert torch.allclose(y, wanted)
    own = block.linear.weight.bmt_slice
    grad = local_rows(block.linear.weight.grad)
    assert torch.allclose(grad, ctx.world_size * weight.grad[own.row_start : own.row_stop], rtol=1e-5)
    forget_sharding(block)
    assert block.forward.__func__.__name__ == "patched"
