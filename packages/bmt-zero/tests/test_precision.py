"""MixedPrecision: dtypes of shards, computation and reduction."""

from __future__ import annotations

import copy

import pytest
import torch
from block_helpers import seeded
from torch import nn

from bmt_zero import Block, BMTrainModelWrapper, MixedPrecision


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype"])
@pytest.mark.parametrize("value", [torch.int8, "bf16", 16])
def test_what_is_no_floating_point_dtype_is_refused(name, value):
    with pytest.raises(ValueError, match=name):
        MixedPrecision(**{name: value})


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_shards_and_gradients_keep_their_dtype_and_computation_has_another(ctx, level):
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 5)
            self.steps = nn.Parameter(torch.tensor([3]), requires_grad=False)

        def forward(self, x, index, *, scale):
            seen.append((self.linear.weight.dtype, x.dtype, index.dtype, scale.dtype, self.steps.dtype))
            return self.linear(x) * scale

    seen: list = []
    block = Block(Module(), zero_level=level, precision=MixedPrecision(torch.bfloat16, torch.float32))
    y = block(seeded(0, 3, 5), torch.tensor([1]), scale=torch.ones(()))
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    half = torch.bfloat16
    assert set(seen) == {(half, half, torch.int64, half, torch.int64)}
    for name, param in block.named_parameters():
        if name != "steps":
            assert (param.dtype, param.grad.dtype) == (torch.float32, torch.float32)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [0, 3])
def test_reduction_in_fp32_keeps_what_half_precision_would_lose(ctx, level):
    for reduce_dtype, expected in [(torch.float32, 257.0), (None, 256.0)]:
        # 256 and 1 cannot be added in bf16; in fp32 they can, and stay in the fp32 gradient.
        block = Block(nn.Linear(1, 1, bias=False), False, level, precision=MixedPrecision(torch.bfloat16, reduce_dtype))
        block(torch.tensor([[256.0 if ctx.rank == 0 else 1.0]])).sum().backward()
        [param] = block.parameters()
        assert param.grad.sum().item() == expected


def vectors_as_stored(param):
    return param.dtype if param.dim() == 1 else None


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("whole", [False, True])
def test_some_parameters_are_computed_with_as_they_are_stored(ctx, level, whole):
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(6, 5), nn.LayerNorm(5)

        def forward(self, x):
            dtypes.append([p.dtype for p in (self.linear.weight, self.linear.bias, self.norm.weight, self.norm.bias)])
            y = x @ self.linear.weight.T + self.linear.bias
            return self.norm(y.to(self.norm.weight.dtype))

    half, single = torch.bfloat16, torch.float32
    dtypes: list = []
    torch.manual_seed(0)
    plain = Module()
    twin = copy.deepcopy(plain)
    twin.linear.weight.data = twin.linear.weight.data.to(half)
    policy = MixedPrecision(half, single, param_dtype_override_fn=vectors_as_stored)
    if whole:
        model = BMTrainModelWrapper(plain, zero_level=level, precision=policy)
    else:
        model = Block(plain, False, level, precision=policy)
    x = seeded(0, 4, 6)
    y = model(x)
    expected = twin(x.to(half))
    assert dtypes == [[half, single, single, single]] * 2
    assert torch.equal(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    for (name, mine), theirs in zip(plain.named_parameters(), twin.parameters()):
        assert mine.grad.dtype == single
        grad = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
        assert torch.equal(grad, ctx.world_size * theirs.grad.to(single)), name


@pytest.mark.ranks(2)
def test_ranks_that_override_other_dtypes_are_told(ctx):
    policy = MixedPrecision(torch.bfloat16, param_dtype_override_fn=[vectors_as_stored, lambda param: None][ctx.rank])
    for shard in (lambda module: Block(module, precision=policy), lambda m: BMTrainModelWrapper(m, precision=policy)):
        with pytest.raises(RuntimeError, match=r"bias: .* torch.float32 computed as stored requires_grad=True"):
            shard(nn.Linear(4, 3))


@pytest.mark.ranks(1)
def test_an_override_must_choose_one_of_two_dtypes(ctx):
    module = nn.Linear(4, 3)
    policy = MixedPrecision(torch.bfloat16, param_dtype_override_fn=lambda param: torch.float16)
    with pytest.raises(ValueError, match=r"has returned torch.float16 for a parameter of shape \(3, 4\); it may"):
        Block(module, precision=policy)
    assert type(module.weight) is nn.Parameter


@pytest.mark.ranks(1, 2)
def test_state_dicts_hold_what_is_stored_and_not_what_is_computed_in(ctx):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    model = BMTrainModelWrapper(plain, precision=MixedPrecision(param_dtype=torch.bfloat16))
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
