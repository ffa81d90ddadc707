"""Checks against models that would be silently wrong after sharding, and layers in adapters."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from bmt_comm import slice_of, unshard_tp
from bmt_tp import (
    ColumnParallelLinear,
    RowParallelLinear,
    VPEmbedding,
    column_parallel,
    expert_parallel,
    full_state_dict,
    parallelize,
)

PLAN = {"0": "colwise", "2": "rowwise"}


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


class Adapted(nn.Module):
    """A linear layer as peft wraps it."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base_layer.out_features, bias=False)})
        self.lora_magnitude_vector = nn.ModuleDict()

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Attention(nn.Module):
    def __init__(self, name: str = "num_heads", key_heads: int = 4) -> None:
        super().__init__()
        setattr(self, name, 4)
        self.name, self.head_dim, self.num_key_value_groups = name, 4, 4 // key_heads
        width = 4 * key_heads
        self.q, self.k, self.v = Adapted(nn.Linear(16, 16)), Adapted(nn.Linear(16, width)), nn.Linear(16, width)
        self.o = Adapted(nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (getattr(self, self.name), 4))
        k, v = (
            y.unflatten(-1, (-1, 4)).repeat_interleave(self.num_key_value_groups, 2) for y in (self.k(x), self.v(x))
        )
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.o(y.transpose(1, 2).flatten(2))


ADAPTED = {
    **{f"0.{name}.base_layer": "colwise" for name in "qk"},
    **{f"0.{name}.lora_B.default": "colwise" for name in "qk"},
    "0.v": "colwise",
    "0.o.base_layer": "rowwise",
    "0.o.lora_A.default": "rowwise",
}


@pytest.mark.ranks(2, tp_size=2)
@pytest.mark.parametrize("key_heads", [1, 4])
def test_heads_of_layers_with_adapters(ctx, key_heads):
    torch.manual_seed(0)
    plain = nn.Sequential(Attention(key_heads=key_heads))
    model = parallelize(copy.deepcopy(plain), ADAPTED)
    x = torch.randn(2, 5, 16)
    for each in (plain, model):
        each(x).square().sum().backward()
    torch.testing.assert_close(model(x), plain(x))
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        grad = unshard_tp(ours.grad, slice_of(ours)) if getattr(ours, "tp_mode", False) else ours.grad
        assert (grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm() + 1e-6, name


@pytest.mark.ranks(2, tp_size=2)
@pytest.mark.parametrize("name", ["h", "nheads", "num_query_heads", "decoder_attention_heads"])
def test_unknown_names_of_heads_are_refused(ctx, name):
    with pytest.raises(ValueError, match=f"DIVIDED_ATTRIBUTES, '{name}'"):
        parallelize(nn.Sequential(Attention(name)), ADAPTED)
    one_head = nn.Sequential(Attention())
    one_head[0].heads = 1
    with pytest.raises(ValueError, match="DIVIDED_ATTRIBUTES, 'heads'"):
        parallelize(one_head, ADAPTED)
    fused = nn.Sequential(nn.Module())
    fused[0].num_attention_heads, fused[0].all_head_size, fused[0].d_head = 4, 16, 4
    fused[0].qkv = nn.Linear(16, 48)
    parallelize(fused, {"0.qkv": "packed_colwise:3"})


class WithProperty(Attention):
    @property
    def n_head(self) -> int:
        return self.num_heads


@pytest.mark.ranks(2, tp_size=2)
def test_numbers_of_heads_that_cannot_be_set(ctx):
    torch.manual_seed(0)
    model = nn.Sequential(WithProperty())
    plain, x = copy.deepcopy(model), torch.randn(2, 3, 16)
    with pytest.raises(ValueError, match="'n_head' of '0' is a property"):
        parallelize(model, ADAPTED)
    with pytest.raises(TypeError, match=r"give a tuple of names, \('num_heads',\)"):
        parallelize(model, ADAPTED, divided_attributes="num_heads")
    assert torch.equal(model(x), plain(x))
    parallelize(model, ADAPTED, divided_attributes=("num_heads",))
    assert torch.allclose(model(x), plain(x), atol=1e-6)
    assert model[0].n_head == 2


@pytest.mark.ranks(2, tp_size=2)
def test_layers_that_are_not_called_or_need_unsharded_parameters(ctx):
    layer = nn.Sequential(nn.MultiheadAttention(8, 2))
    with pytest.raises(TypeError, match=r"in a torch\.nn\.MultiheadAttention"):
        parallelize(layer, {"0.out_proj": "rowwise"})
    for name in "qo":  # column-wise and row-wise
        with_magnitudes = nn.Sequential(Attention())
        with_magnitudes[0].get_submodule(name).lora_magnitude_vector["default"] = nn.Identity()
        with pytest.raises(TypeError, match=rf"'0\.{name}\.base_layer' has adapters with use_dora=True"):
            parallelize(with_magnitudes, ADAPTED)
    fused = nn.Sequential(Attention())
    fused[0].qkv, fused[0].num_key_value_heads = nn.Linear(16, 24), 2
    with pytest.raises(ValueError, match="different numbers of heads"):
        parallelize(fused, {"0.qkv": "packed_colwise:3"})
    with pytest.raises(ValueError, match="pad_to_multiple_of=2"):
        parallelize(nn.Sequential(nn.Embedding(7, 4)), {"0": "vocab"})


@pytest.mark.ranks(2, tp_size=2)
def test_ranks_with_different_values(ctx):
    model = mlp(seed=ctx.rank)
    with pytest.raises(RuntimeError, match=r"same model before it is sharded.*0\.weight"):
        parallelize(model, PLAN)
    assert model[0].weight.shape == (8, 6)


@pytest.mark.ranks(2, tp_size=2)
def test_shards_that_were_overwritten(ctx):
    model = parallelize(mlp(), PLAN)
    with pytest.raises(RuntimeError, match="same values in different shards"):
        nn.parallel.DistributedDataParallel(model)(torch.ones(2, 6))
    copies = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh())
    with torch.no_grad():
        copies[0].weight[4:] = copies[0].weight[:4]
    parallelize(copies, {"0": "colwise"})(torch.ones(2, 6))  # they were equal from the beginning


@pytest.mark.ranks(2, tp_size=2)
def test_a_model_that_is_sharded_in_two_calls(ctx):
    model = nn.Sequential(mlp(), mlp())
    plain = copy.deepcopy(model)
    parallelize(model[0], PLAN)
    parallelize(model, {f"1.{name}": style for name, style in PLAN.items()})
    torch.testing.assert_close(model(torch.ones(2, 6)), plain(torch.ones(2, 6)))


@pytest.mark.ranks(2, tp_size=2)
def test_fsdp2_of_shards_is_refused(ctx):
    from torch.distributed.fsdp import fully_shard

    model = parallelize(mlp(), PLAN)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(RuntimeError, match="fully_shard has sharded"):
        model(torch.ones(2, 6))


@pytest.mark.ranks(2, tp_size=2)
def test_dropout_of_ranks_that_draw_different_numbers(ctx, monkeypatch):
    warnings: list[str] = []
    monkeypatch.setattr(logging.getLogger("bmt_tp.first_batch"), "warning", warnings.append)

    def run(seed: int, p: float) -> None:
        torch.manual_seed(0)
        model = parallelize(nn.Sequential(mlp(), nn.Dropout(p)), {f"0.{name}": style for name, style in PLAN.items()})
        torch.manual_seed(seed)
        model(torch.ones(2, 6))

    run(1, 0.5)
    run(ctx.rank, 0.0)
    assert not warnings
    run(ctx.rank, 0.5)
    assert ["seed the ranks of a tensor-parallel group alike" in each for each in warnings] == [True] * (ctx.rank == 0)


@pytest.mark.ranks(2, tp_size=2)
def test_an_input_that_may_be_replicated(ctx, monkeypatch):
    warnings: list[str] = []
    monkeypatch.setattr(logging.getLogger("bmt_tp.parallel_linear"), "warning", warnings.append)
    parts = torch.randn(2, 3, 6)
    ColumnParallelLinear(6, 8)(parts + ctx.rank)
    ColumnParallelLinear(6, 8, gather_input=False)(parts)
    ColumnParallelLinear(6, 8)(torch.ones(2, 3, 6))  # of a padded batch, say
    assert not warnings
    ColumnParallelLinear(6, 8)(parts)
    assert len(warnings) == 1
    assert "gather_input=False" in warnings[0]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 8, 6)), nn.Parameter(torch.randn(3, 6, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("eoi,ebi->bo", self.down, torch.einsum("eoi,bi->ebo", self.up, x).tanh())


EXPERTS = {"0": "experts", "0.up": "colwise", "0.down": "rowwise"}


@pytest.mark.ranks(2, tp_size=2)
def test_packed_experts_whose_parameters_torch_replaces(ctx):
    torch.manual_seed(0)
    plain = nn.Sequential(Experts())
    model = parallelize(copy.deepcopy(plain), EXPERTS)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    model.to_empty(device="cpu")
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert isinstance(model[0], Experts)
    assert {name: value.shape for name, value in full_state_dict(model).items()} == {
        name: value.shape for name, value in plain.state_dict().items()
    }


@pytest.mark.ranks(2, tp_size=2)
def test_what_experts_return_beside_their_sum(ctx):
    class WithScores(Experts):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x), self.scores(x)

    x = torch.randn(4, 6)
    plain, model = nn.Sequential(WithScores()), nn.Sequential(WithScores())
    model.load_state_dict(plain.state_dict())
    for each in (plain[0], model[0]):
        each.scores = lambda x: x.detach().mean(-1)
    parallelize(model, EXPERTS)
    for ours, theirs in zip(model(x), plain(x), strict=True):
        torch.testing.assert_close(ours, theirs)
    model[0].scores = lambda x: x.requires_grad_().mean(-1)
    with pytest.raises(TypeError, match="tensors are without gradients"):
        model(x)


@pytest.mark.ranks(1, 2, tp_size=1)
def test_experts_of_one_rank_get_pairs(ctx):
    weights = torch.randn(3, 4, 4)

    def compute(rows: Tensor, chosen: Tensor, scales: Tensor) -> Tensor:
        assert chosen.shape == scales.shape == (len(rows), 1)
        return torch.einsum("pi,pij->pj", rows, weights[chosen[:, 0]]) * scales

    tokens, chosen, scales = torch.randn(5, 4), torch.randint(3, (5, 2)), torch.rand(5, 2)
    expected = sum(torch.einsum("pi,pij->pj", tokens, weights[chosen[:, k]]) * scales[:, k : k + 1] for k in range(2))
    torch.testing.assert_close(expert_parallel(compute, tokens, chosen, scales, 3), expected)


@pytest.mark.ranks(2, tp_size=2)
def test_an_encoder_of_torch_with_padding(ctx):
    torch.manual_seed(0)
    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)
    model = parallelize(copy.deepcopy(plain).eval(), {"layers.*.linear1": "colwise", "layers.*.linear2": "rowwise"})
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        result, expected = (each(x, src_key_padding_mask=padding) for each in (model, plain))
    torch.testing.assert_close(result[~padding], expected[~padding])


@pytest.mark.ranks(2, tp_size=2)
def test_the_first_argument_is_the_input(ctx):
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 8)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.linear(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = Mixer()

        def forward(self, x: Tensor) -> Tensor:
            return self.mixer(mask=torch.zeros(3), x=x)

    model = parallelize(Model(), {"mixer": "sequence_gather", "mixer.linear": "colwise"})
    assert model(torch.randn(2, 3, 6)).shape == (2, 6, 4)


TOOLS = {
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "parametrization": parametrizations.spectral_norm,
}


def layer_and_input(style: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if style in ("vocab", "embedding_colwise"):
        return nn.Embedding(4, 6), torch.tensor([[0, 3, 1]])
    return nn.Linear(6, 4), torch.randn(2, 3, 6)


def computed_pair(style: str, tool: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """A layer whose weight torch computes, before and after it was sharded, and an input."""
    (plain, x), (layer, _) = layer_and_input(style), layer_and_input(style)
    parallelize(nn.ModuleDict({"x": layer}), {"x": style})
    for each in (plain, layer):
        torch.manual_seed(1)
        TOOLS[tool](each)
    return plain, layer, x


@pytest.mark.ranks(2, tp_size=2)
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("style", ["colwise", "rowwise", "vocab", "embedding_colwise"])
def test_weights_that_torch_computes_from_shards_are_refused(ctx, style, tool):
    _, layer, x = computed_pair(style, tool)
    with pytest.raises(TypeError, match=r"the weight of a tensor-parallel .* is computed from something else"):
        layer(x.chunk(2, -1)[ctx.tp_rank] if style == "rowwise" else x)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("style", ["colwise", "rowwise", "vocab", "embedding_colwise"])
def test_one_rank_computes_weights_from_others(ctx, style, tool):
    plain, layer, x = computed_pair(style, tool)
    torch.testing.assert_close(layer(x), plain(x))


@pytest.mark.ranks(2, tp_size=2)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("tool", TOOLS)
def test_tensor_parallel_layers_refuse_weights_that_torch_computes(ctx, tool):
    x, ids = torch.randn(2, 3, 6), torch.tensor([[0, 3, 1]])
    column, row = ColumnParallelLinear(6, 4, gather_input=False), RowParallelLinear(12, 6, all_reduce_output=True)
    for layer, argument in ((column, x), (row, x), (VPEmbedding(4, 6, torch.float), ids)):
        with pytest.raises((TypeError, RuntimeError, ValueError), match=r"something else|shard|rows|change the shape"):
            TOOLS[tool](layer)(argument)


@pytest.mark.ranks(2, tp_size=2)
def test_of_tensor_parallel_layers_only_a_replicated_bias_may_be_pruned(ctx):
    x, model = torch.randn(2, 3, 6), parallelize(mlp(), PLAN)
    expected = model(x)
    prune.identity(model[2], "bias")
    torch.testing.assert_close(model(x), expected)
    prune.identity(model[0], "bias")
    with pytest.raises(TypeError, match="the bias of a tensor-parallel Linear is computed from something else"):
        model(x)


@pytest.mark.ranks(2, tp_size=2)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_fused_columns_refuse_weights_that_torch_computes(ctx):
    layer = spectral_norm(ColumnParallelLinear(6, 4, gather_input=False))
    with pytest.raises(TypeError, match="the weight of a tensor-parallel ColumnParallelLinear is computed"):
        column_parallel(torch.randn(2, 3, 6), [layer])
