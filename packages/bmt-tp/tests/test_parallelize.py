"""Plain models that a plan shards."""

import copy
import math
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bmt_comm import init_distributed, slice_of, tp_shard_of, unshard_tp
from bmt_tp import DIVIDED_ATTRIBUTES, full_state_dict, load_full_state_dict, parallelize

VOCAB, HIDDEN, HEADS = 24, 24, 12


class Attention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.num_heads, self.head_dim, self.fused = HEADS, HIDDEN // HEADS, fused
        if fused:
            self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        else:
            self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN, bias=i == 0) for i in range(3))
        self.o = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        heads = [t.view(*t.shape[:2], self.num_heads, self.head_dim).transpose(1, 2) for t in (q, k, v)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = Attention(fused)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, fused=False, tied=True):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN, padding_idx=3)
        self.layers = nn.ModuleList(Layer(fused) for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def plan_of(fused, sequence):
    suffix = "+sequence" if sequence else ""
    plan = {
        "embed": "vocab",
        "layers.*.attention.o": "rowwise" + suffix,
        "layers.*.up": "colwise" + suffix,
        "layers.*.down": "rowwise" + suffix,
        "head": "colwise_gather_output",
    }
    if fused:
        plan["layers.*.attention.qkv"] = "packed_colwise:3" + suffix
    else:
        plan |= {f"layers.*.attention.{name}": "colwise" + suffix for name in "qkv"}
    if sequence:
        plan |= {"layers.0": "sequence_start", "layers.*.norm1": "sequence", "layers.*.norm2": "sequence"}
        plan |= {"norm": "sequence_end"}
    return plan


def batch(step):
    return torch.randint(0, VOCAB, (3, 13), generator=torch.Generator().manual_seed(step))


def train(model, steps=10):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        ids = batch(step)
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.ranks(1, 2, 3, 4, init=False)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_training_is_that_of_the_model_on_one_device(fused, sequence, tied):
    init_distributed(tp_size=int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(0)
    plain = Model(fused, tied).double()  # in fp32 rounding a weight takes 1e-5 of its update
    model = copy.deepcopy(plain)
    start = copy.deepcopy(plain.state_dict())
    assert parallelize(model, plan_of(fused, sequence)) is model
    assert (model.head.weight is model.embed.weight) == tied
    model = copy.deepcopy(model)
    train(plain)
    train(model)
    after = full_state_dict(model)
    assert list(after) == list(start)
    for name, value in plain.state_dict().items():
        update, expected = after[name] - start[name], value - start[name]
        assert (update - expected).norm() <= 1e-11 * expected.norm(), name
    other = parallelize(Model(fused, tied).double(), plan_of(fused, sequence))
    load_full_state_dict(other, plain.state_dict())
    torch.testing.assert_close(other(batch(0)[:, :-1]), plain(batch(0)[:, :-1]))


@pytest.mark.ranks(2, tp_size=2)
def test_a_rank_holds_its_shard_and_the_slice_of_it(ctx):
    model = parallelize(Model(fused=True), plan_of(True, False))
    weight = model.layers[0].attention.qkv.weight
    assert weight.shape == (3 * HIDDEN // 2, HIDDEN)
    assert slice_of(weight).shape == (3 * HIDDEN, HIDDEN)
    assert slice_of(weight).tp_blocks == (HIDDEN, HIDDEN, HIDDEN)
    assert model.layers[0].attention.num_heads == HEADS // 2
    assert isinstance(model.layers[0].attention.qkv, nn.Linear)


@pytest.mark.ranks(2, tp_size=2)
def test_query_key_and_value_reduce_the_gradient_of_their_input_together(ctx):
    model = parallelize(Model(), plan_of(False, False))
    x = torch.randn(2, 5, HIDDEN, requires_grad=True)
    before = {op: count.calls for op, count in ctx.tp.traffic.items()}
    model.layers[0](x).sum().backward()
    calls = {op: count.calls - before.get(op, 0) for op, count in ctx.tp.traffic.items()}
    # Forward: two reductions, in two chunks each; backward: the inputs of attention and of the feed-forward.
    assert calls["all_reduce"] == 4 + 2


@pytest.mark.ranks(2, tp_size=2)
def test_the_first_batch_is_compared(ctx):
    model = parallelize(Model(), plan_of(False, False))
    with pytest.raises(RuntimeError, match="must be given the same batch"):
        model(batch(ctx.tp_rank))


@pytest.mark.ranks(2, tp_size=2)
@pytest.mark.parametrize(
    ("plan", "error", "message"),
    [
        ({"layers.*.upp": "colwise"}, ValueError, r"names 'layers\.\*\.upp', and Model has no module"),
        ({"layers.*.up": "columnwise"}, ValueError, "by 'columnwise', which is no style; choose one of sequence"),
        ({"layers.*.up": "colwise:3"}, ValueError, "no style"),
        ({"layers.*.up": "sequence+sequence"}, ValueError, "no style"),
        ({"norm": "colwise"}, TypeError, "'norm' is a LayerNorm; 'colwise' shards a torch.nn.Linear"),
        ({"norm": "vocab"}, TypeError, "'norm' is a LayerNorm; 'vocab' shards a torch.nn.Embedding"),
        ({"embed": "vocab"}, ValueError, "'head' shares a parameter with 'embed', which the plan shards"),
        ({"embed": "vocab", "head": "rowwise"}, ValueError, "share a parameter and are sharded differently"),
        (
            {"layers.0": "sequence", "layers.0.up": "colwise"},
            ValueError,
            "'layers.0' as 'sequence', and shards its",
        ),
        (None, ValueError, "Model carries no tp_plan"),
    ],
)
def test_plans_that_cannot_be(ctx, plan, error, message):
    model = Model()
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        parallelize(model, plan)
    assert not model._forward_pre_hooks
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])


@pytest.mark.ranks(3, tp_size=3)
def test_sizes_that_do_not_divide_are_named(ctx):
    model = nn.ModuleDict({"a": nn.Linear(4, 6), "b": nn.Linear(6, 4)})
    with pytest.raises(ValueError, match=r"dimension 0 of 'b', of shape \(4, 6\), cannot be divided into 3"):
        parallelize(model, {"a": "colwise", "b": "colwise"})
    assert type(model["a"]) is nn.Linear
    parallelize(model, {"a": "colwise"})
    with pytest.raises(ValueError, match="parallelize has sharded a parameter of 'a' already"):
        parallelize(model, {"a": "colwise"})

    model = nn.ModuleDict({"table": nn.Embedding(6, 4)})
    model.weight = model["table"].weight  # its forward may look rows up in it
    with pytest.raises(ValueError, match="'' shares a parameter with 'table'"):
        parallelize(model, {"table": "vocab"})

    attention = Attention(fused=False)
    attention.num_heads, attention.head_dim = 8, 3
    with pytest.raises(ValueError, match=r"'q' has 8 heads of 3 features, which cannot be divided over 3"):
        parallelize(attention, {"q": "colwise"})
    attention.head_dim = None
    with pytest.raises(ValueError, match="num_heads=8 of '' cannot be divided over 3"):
        parallelize(attention, {"q": "colwise"})
    with pytest.raises(ValueError, match=r"dimension 0 of 'x', .* into 5 parts over 3"):
        parallelize(nn.ModuleDict({"x": nn.Linear(2, 6)}), {"x": "packed_colwise:5"})
    with pytest.raises(ValueError, match="'x' has max_norm=1"):
        parallelize(nn.ModuleDict({"x": nn.Embedding(6, 2, max_norm=1)}), {"x": "vocab"})


class Scaled(nn.Embedding):
    def forward(self, ids):
        return 3 * super().forward(ids)


class Doubled(nn.Embedding):
    def forward(self, ids):
        return 2 * F.embedding(ids, self.weight)


@pytest.mark.ranks(2, tp_size=2)
def test_a_forward_that_calls_that_of_torch_is_kept(ctx):
    torch.manual_seed(0)
    plain = nn.ModuleDict({"x": Scaled(6, 4)})
    model = parallelize(copy.deepcopy(plain), {"x": "vocab"})
    ids = torch.tensor([[0, 5, 3], [2, 2, 4]])
    for which in (plain, model):
        which["x"](ids).square().sum().backward()
    assert isinstance(model["x"], Scaled)
    torch.testing.assert_close(model["x"](ids), plain["x"](ids))
    torch.testing.assert_close(model["x"].weight.grad, plain["x"].weight.grad.chunk(2)[ctx.tp_rank])
    assert torch.equal(full_state_dict(copy.deepcopy(model))["x.weight"], plain["x"].weight)


class Experts(nn.Module):
    """Packed experts, as transformers has them."""

    def __init__(self, transposed=False):
        super().__init__()
        self.is_transposed = transposed
        shapes = ((3, 6, 8), (3, 4, 6)) if transposed else ((3, 8, 6), (3, 6, 4))
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.randn(shape)) for shape in shapes)
        self.gate_up_bias = nn.Parameter(torch.randn(3, 8))

    def forward(self, x, chosen, weights):
        up, down = self.gate_up_proj, self.down_proj
        if self.is_transposed:
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        gate, value = (torch.einsum("boi,bi->bo", up[chosen], x) + self.gate_up_bias[chosen]).chunk(2, -1)
        return torch.einsum("boi,bi->bo", down[chosen], F.silu(gate) * value) * weights


class Mixture(nn.Module):
    def __init__(self, transposed=False):
        super().__init__()
        self.router, self.experts = nn.Linear(6, 3), Experts(transposed)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).max(-1)
        return x + self.experts(x, chosen, weights[:, None])


EXPERTS = {
    "experts.gate_up_proj": "packed_colwise",
    "experts.gate_up_bias": "packed_colwise",
    "experts.down_proj": "rowwise",
    "experts": "moe_tp_experts",
}
TRANSPOSED = {**EXPERTS, "experts.gate_up_proj": "packed_rowwise", "experts.down_proj": "colwise"}


@pytest.mark.ranks(1, 2, init=False)
@pytest.mark.parametrize("transposed", [False, True])
def test_packed_experts_train_as_on_one_device(transposed):
    ctx = init_distributed(tp_size=int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(0)
    plain = Mixture(transposed)
    model = parallelize(copy.deepcopy(plain), TRANSPOSED if transposed else EXPERTS)
    assert model.experts.down_proj.numel() == plain.experts.down_proj.numel() // ctx.tp_size
    start = copy.deepcopy(plain.state_dict())
    x = torch.randn(20, 6)
    for which in (plain, model):
        optimizer = torch.optim.SGD(which.parameters(), lr=0.01)
        for _ in range(10):
            which(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    after = full_state_dict(model)
    for name, value in plain.state_dict().items():
        update, expected = after[name] - start[name], value - start[name]
        assert (update - expected).norm() <= 1e-5 * expected.norm(), name


@pytest.mark.ranks(2, tp_size=2)
def test_plans_of_experts_that_cannot_be(ctx):
    without = {name: style for name, style in EXPERTS.items() if name != "experts"}
    with pytest.raises(
        ValueError, match="shards the parameter 'gate_up_proj' of 'experts'; it must have 'experts' itself"
    ):
        parallelize(Mixture(), without)
    with pytest.raises(ValueError, match=r"'experts.gate_up_bias' has the shape \(3, 8\); 'rowwise' shards a weight"):
        parallelize(Mixture(), {**EXPERTS, "experts.gate_up_bias": "rowwise"})
    with pytest.raises(ValueError, match=r"'experts\.down_proj' is a parameter, and 'vocab' is for modules"):
        parallelize(Mixture(), {**EXPERTS, "experts.down_proj": "vocab"})
    with pytest.raises(ValueError, match="has 'experts' as 'experts', and shards no parameter of it"):
        parallelize(Mixture(), {"router": "replicate", "experts": "moe_tp_experts"})
    with pytest.raises(ValueError, match=r"'experts\.identity' is an expert without weights, which no rank can have"):
        parallelize(Mixture(), {**EXPERTS, "experts.identity": "moe_identity_expert"}, expert_parallel=True)
    with pytest.raises(ValueError, match="'router' as 'moe_identity_expert', and no module around it as 'experts'"):
        parallelize(Mixture(), {**EXPERTS, "router": "moe_identity_expert"})
    with pytest.raises(ValueError, match="shards the parameter 'scales' of '', and no layer of it column-wise"):
        parallelize(WithScales(), {"scales": "colwise", "o": "rowwise"})
    with pytest.raises(ValueError, match="'scales' has one dimension; 'colwise' can shard it, 'rowwise' cannot"):
        parallelize(WithScales(), {"scales": "rowwise", "q": "colwise"})


class WithScales(nn.Module):
    """An embedding, and a number per head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6, padding_idx=2)
        self.q, self.o, self.scales = nn.Linear(6, 12), nn.Linear(12, 6), nn.Parameter(torch.randn(4))

    def forward(self, ids):
        heads = self.q(self.embedding(ids)).unflatten(-1, (-1, 3))
        return self.o((heads * self.scales[:, None]).flatten(-2))


@pytest.mark.ranks(2, tp_size=2)
def test_parameters_of_heads_and_features_of_an_embedding(ctx):
    torch.manual_seed(0)
    plain = WithScales()
    plan = {"embedding": "embedding_colwise", "q": "colwise", "scales": "colwise", "o": "rowwise"}
    model = parallelize(copy.deepcopy(plain), plan)
    assert (model.scales.shape, model.embedding.weight.shape) == ((2,), (7, 3))
    ids = torch.randint(0, 7, (4, 5))
    for which in (plain, model):
        which(ids).square().mean().backward()
    torch.testing.assert_close(model(ids), plain(ids))
    for (name, param), shard in zip(plain.named_parameters(), model.parameters(), strict=True):
        expected = tp_shard_of(param.grad, slice_of(shard))
        torch.testing.assert_close(torch.as_tensor(shard.grad), expected, msg=name)
    assert torch.equal(full_state_dict(model)["embedding.weight"], plain.embedding.weight)


@pytest.mark.ranks(2, tp_size=2)
def test_modules_that_compute_something_else_are_refused(ctx):
    with pytest.raises(TypeError, match="'x', a Doubled, has a forward of its own"):
        parallelize(nn.ModuleDict({"x": Doubled(4, 4)}), {"x": "vocab"})
    replaced = nn.Linear(4, 4)
    replaced.forward = lambda x: x
    with pytest.raises(TypeError, match="'x', a Linear, has a forward of its own"):
        parallelize(nn.ModuleDict({"x": replaced}), {"x": "colwise"})
    normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    with pytest.raises(TypeError, match="the weight of 'x' is computed from something else"):
        parallelize(nn.ModuleDict({"x": normed}), {"x": "rowwise"})


class HeadNorm(nn.Module):
    """Normalises each head of a projection; all heads have one weight."""

    def __init__(self):
        super().__init__()
        self.q, self.norm, self.o = nn.Linear(6, 12), nn.LayerNorm(3), nn.Linear(12, 6)

    def forward(self, x):
        return self.o(self.norm(self.q(x).unflatten(-1, (-1, 3))).flatten(-2))


@pytest.mark.ranks(2, tp_size=2)
def test_a_norm_of_heads_gets_the_gradient_of_all_of_them(ctx):
    torch.manual_seed(0)
    plain, x = HeadNorm(), torch.randn(2, 5, 6)
    plan = {"q": "colwise", "norm": "replicated_with_grad_allreduce", "o": "rowwise"}
    model = parallelize(copy.deepcopy(plain), plan)
    for which in (plain, model):
        which(x).square().sum().backward()
    torch.testing.assert_close(model.norm.weight.grad, plain.norm.weight.grad)
    torch.testing.assert_close(model.norm.bias.grad, plain.norm.bias.grad)


class QueryNorm(nn.Module):
    """Normalises the queries of each head by a norm that plans of Hugging Face do not name."""

    def __init__(self):
        super().__init__()
        self.head_dim = 3
        self.qkv, self.q_norm, self.o = nn.Linear(6, 36), nn.LayerNorm(3), nn.Linear(12, 6)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        q = self.q_norm(q.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        return self.o(q * k + v)


@pytest.mark.ranks(2, tp_size=2)
@pytest.mark.parametrize("suffix", ["", "+sequence"])
def test_a_norm_of_queries_is_found_whatever_the_columns_beside_it_are(ctx, suffix):
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Identity(), QueryNorm(), nn.Identity()), torch.randn(2, 6, 6)
    plan = {"1.qkv": "packed_colwise:3" + suffix, "1.o": "rowwise" + suffix}
    model = parallelize(copy.deepcopy(plain), plan | ({"0": "sequence_start", "2": "sequence_end"} if suffix else {}))
    for which in (plain, model):
        which(x).square().sum().backward()
    torch.testing.assert_close(model[1].q_norm.weight.grad, plain[1].q_norm.weight.grad)
    torch.testing.assert_close(model[1].q_norm.bias.grad, plain[1].q_norm.bias.grad)


@pytest.mark.ranks(2, tp_size=2)
def test_shards_stay_marked_after_torch_has_replaced_them(ctx):
    torch.manual_seed(0)
    state = Model().state_dict()
    with torch.device("meta"):
        model = Model(tied=False)
    parallelize(model, plan_of(False, False)).to_empty(device="cpu")
    load_full_state_dict(model, state)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    after = full_state_dict(model)
    assert after._metadata == state._metadata
    for name, value in state.items():
        assert torch.equal(after[name], value), name


@pytest.mark.ranks(2, tp_size=2)
def test_a_state_dict_that_does_not_fit_changes_nothing(ctx):
    model = parallelize(Model(), plan_of(False, False))
    state = full_state_dict(model)
    before = model.layers[0].up.weight.clone()
    wrong = {**state, "layers.0.up.weight": state["layers.0.up.weight"] + 1, "embed.weight": torch.zeros(5, 5)}
    with pytest.raises(ValueError, match=r"'embed.weight' has shape \(5, 5\); the logical parameter has \(24, 24\)"):
        load_full_state_dict(model, wrong)
    assert torch.equal(model.layers[0].up.weight, before)


class Feedforward(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


FEEDFORWARD = {"up": "colwise", "down": "rowwise"}


def feedforwards():
    """A plain model, and a sharded copy of it."""
    torch.manual_seed(0)
    plain = Feedforward()
    return plain, parallelize(copy.deepcopy(plain), FEEDFORWARD)


def check_same(model, plain):
    for name, value in full_state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2, tp_size=2)
def test_torch_clips_and_scales_a_sharded_model_as_the_plain_one(ctx):
    plain, model = feedforwards()
    x = torch.randn(5, 6)
    for step in range(3):
        norms = []
        for each in (plain, model):
            each(x).square().sum().backward()
            norms.append(nn.utils.clip_grad_norm_(each.parameters(), 0.1))
            torch.optim.SGD(each.parameters(), lr=1.0).step()
            each.zero_grad(set_to_none=step == 0)
        torch.testing.assert_close(*norms)
    check_same(model, plain)
    for bad in (False, True):
        for each in (plain, model):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
            scaler.scale(each(x).square().sum()).backward()
            if bad and (each is plain or ctx.rank == 1):  # in the shard of one rank
                each.up.weight.grad[-1, 0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        check_same(model, plain)
    assert nn.Parameter(torch.ones(2)).grad is None
    for name in ("Adafactor", "LBFGS"):
        optimizer = getattr(torch.optim, name)(model.parameters())
        model(x).sum().backward()
        with pytest.raises(TypeError, match=f"{name} computes with logical parameters"):
            optimizer.step(lambda: model(x).sum())


@pytest.mark.ranks(2, tp_size=2)
def test_torch_reduces_the_norms_of_all_gradients_together(ctx):
    _, model = feedforwards()
    model(torch.randn(5, 6)).square().sum().backward()
    before = ctx.tp.traffic["all_reduce"].calls
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert ctx.tp.traffic["all_reduce"].calls == before + 1


@pytest.mark.ranks(2, tp_size=2)
def test_what_is_reset_after_it_was_sharded_is_that_of_the_plain_layer(ctx):
    for style in ("vocab", "colwise", "rowwise"):
        plain = nn.Sequential(nn.Embedding(8, 6, padding_idx=1) if style == "vocab" else nn.Linear(6, 8))
        model = parallelize(copy.deepcopy(plain), {"0": style})
        shards = list(model.parameters())
        for each in (plain, model):
            torch.manual_seed(3)
            each.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
        check_same(model, plain)
        assert all(a is b for a, b in zip(shards, model.parameters(), strict=True))


@pytest.mark.ranks(2, tp_size=2)
def test_an_encoder_layer_of_torch_is_right_in_evaluation(ctx):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)).eval()
    model = parallelize(copy.deepcopy(plain), {"0.linear1": "colwise", "0.linear2": "rowwise"})
    x = torch.randn(2, 5, 8)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), plain(x))


@pytest.mark.ranks(2, tp_size=2)
def test_a_plan_may_name_a_shared_module_twice(ctx):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = self.b = nn.Linear(4, 4)

        def forward(self, x):
            return self.b(self.a(x))

    plain = Twice()
    for names in ("a", "b", "ab"):
        model = parallelize(copy.deepcopy(plain), dict.fromkeys(names, "colwise_gather_output"))
        assert len(model.a.weight) == 2
        torch.testing.assert_close(model(torch.ones(2, 4)), plain(torch.ones(2, 4)))


@pytest.mark.ranks(2, tp_size=2)
def test_an_input_that_was_written_to_is_copied_again(ctx):
    plain = nn.Linear(4, 6).requires_grad_(False)  # or torch would keep the input
    model = parallelize(nn.Sequential(copy.deepcopy(plain)), {"0": "colwise_gather_output"})
    results = []
    for each in (plain, model):
        x = torch.ones(2, 4, requires_grad=True)
        first = each(x)
        with torch.no_grad():
            x.add_(0.5)
        (first + 2 * each(x)).sum().backward()
        results.append(x.grad)
    torch.testing.assert_close(*results)
    with torch.inference_mode():
        x = torch.ones(2, 4)
        torch.testing.assert_close(model(x), plain(x))


@pytest.mark.ranks(2, tp_size=2)
def test_a_sparse_mask_beside_the_batch(ctx):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, mask):
            return self.linear(x)

    model = parallelize(Masked(), {"linear": "colwise_gather_output"})
    assert model(torch.ones(2, 4), torch.eye(2).to_sparse()).shape == (2, 4)


@pytest.mark.ranks(2, tp_size=2)
def test_heads_by_the_names_of_many_repositories(ctx):
    class Vit(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = 4
            self.to_qkv, self.to_out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, -1))
            return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    plain = nn.Sequential(Vit())
    plan = {"0.to_qkv": "packed_colwise:3", "0.to_out": "rowwise"}
    with pytest.raises(ValueError, match=r"divided_attributes=\(\*DIVIDED_ATTRIBUTES, 'heads'\)"):
        parallelize(copy.deepcopy(plain), plan)
    model = parallelize(copy.deepcopy(plain), plan, divided_attributes=(*DIVIDED_ATTRIBUTES, "heads"))
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.ranks(2, tp_size=2)
@pytest.mark.parametrize("kind", ["Apertus", "Glm4Moe"])
def test_plans_of_models_are_completed(ctx, kind):
    transformers = pytest.importorskip("transformers")
    options = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    if kind == "Glm4Moe":
        options |= {"use_qk_norm": True, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        options |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    config = getattr(transformers, f"{kind}Config")(**options)
    torch.manual_seed(0)
    plain = getattr(transformers, f"{kind}ForCausalLM")(config)
    model = parallelize(copy.deepcopy(plain))
    ids = torch.randint(1, 32, (2, 6))
    for each in (plain, model):
        each(input_ids=ids, labels=ids).loss.backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        grad = p.grad if p.grad is None or not getattr(p, "tp_mode", False) else unshard_tp(p.grad, slice_of(p))
        torch.testing.assert_close(grad, q.grad, rtol=1e-3, atol=1e-5, msg=name)
