"""Expert parallelism against one process."""

import copy
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bmt_comm import init_distributed
from bmt_tp import expert_parallel, full_state_dict, parallelize

B, S, HIDDEN, INNER, EXPERTS, CHOSEN = 2, 6, 7, 5, 6, 2
REPLICATED = {"layers.*.experts": "expert_parallel"}
SPLIT = {
    "layers.0": "sequence_start",
    **{f"layers.*.{name}": "sequence" for name in ("norm", "router", "dense")},
    "layers.*.experts": "expert_parallel+sequence",
    "norm": "sequence_end",
}


def start():
    return init_distributed(tp_size=int(os.environ["WORLD_SIZE"]))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) / 3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def forward(self, tokens, experts, weights):
        assert len(self.up) == self.num_experts
        result = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            rows, places = torch.where(experts == expert)
            y = F.silu(tokens[rows] @ self.up[expert].T) @ self.down[expert].T + self.bias[expert]
            result = result.index_add(0, rows, y * weights[rows, places, None])
        return result


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.router, self.experts = nn.Linear(HIDDEN, EXPERTS), Experts()

    def forward(self, x):
        y = self.norm(x).flatten(0, 1)
        weights, experts = self.router(y).softmax(-1).topk(CHOSEN)
        return x + self.experts(y, experts, weights).view_as(x) + self.dense(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 11)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build(favourites=()):
    """``favourites``: experts that all tokens choose."""
    torch.manual_seed(0)
    model = Model().double()
    for layer in model.layers:
        for expert in favourites:
            layer.router.bias.data[expert] += 100.0
    return model


def train(model, steps=10):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(0, 11, (B, S), generator=generator)
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten().roll(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.ranks(1, 2, 3, init=False)
@pytest.mark.parametrize("plan", [REPLICATED, SPLIT], ids=["replicated", "split"])
@pytest.mark.parametrize("favourites", [(), (0, 1), (EXPERTS - 1,)], ids=["any", "first", "last"])
def test_training_equals_one_process(plan, favourites):
    ctx = start()
    plain, model = build(favourites), build(favourites)
    before = copy.deepcopy(plain.state_dict())
    parallelize(model, plan)
    assert len(model.layers[0].experts.up) == EXPERTS // ctx.world_size
    assert train(model) == pytest.approx(train(plain), rel=1e-8)
    after = full_state_dict(model)
    for name, expected in plain.state_dict().items():
        change = expected - before[name]
        # An expert that no token chooses stays as it is.
        assert (after[name] - expected).norm() <= 1e-8 * change.norm() + 1e-14, name


@pytest.mark.ranks(2, 3, init=False)
@pytest.mark.parametrize("tracked", [(True, True), (True, False), (False, True), (False, False)])
def test_ranks_have_any_number_of_tokens(tracked):
    """One rank has none; another expert has none. Gradients of tokens, weights and experts, where they are required."""
    ctx = start()
    torch.manual_seed(3)
    counts = [0, 5, 3][: ctx.world_size]
    tokens = torch.randn(sum(counts), HIDDEN, dtype=torch.double)
    experts = torch.rand(sum(counts), EXPERTS - 1).topk(CHOSEN).indices
    weights = torch.rand(sum(counts), CHOSEN, dtype=torch.double)
    plain = Experts().double()
    local = copy.deepcopy(plain)
    share = EXPERTS // ctx.world_size
    for param in local.parameters():
        param.data = param.data[ctx.rank * share : (ctx.rank + 1) * share].clone()
    local.num_experts = share

    inputs = [x.clone().requires_grad_(needs_grad) for x, needs_grad in zip((tokens, weights), tracked)]
    expected = plain(inputs[0], experts, inputs[1])
    expected.square().sum().backward()

    mine = slice(sum(counts[: ctx.rank]), sum(counts[: ctx.rank + 1]))
    parts = [x[mine].clone().requires_grad_(needs_grad) for x, needs_grad in zip((tokens, weights), tracked)]
    result = expert_parallel(local, parts[0], experts[mine], parts[1], EXPERTS, split_tokens=True)
    result.square().sum().backward()

    torch.testing.assert_close(result, expected[mine])
    for part, full in zip(parts, inputs):
        if full.grad is not None:
            torch.testing.assert_close(part.grad, full.grad[mine])
    own_experts = slice(ctx.rank * share, (ctx.rank + 1) * share)
    for param, of_all in zip(local.parameters(), plain.parameters()):
        torch.testing.assert_close(param.grad, of_all.grad[own_experts])


@pytest.mark.ranks(2, tp_size=2)
@pytest.mark.parametrize("plan", [REPLICATED, SPLIT], ids=["replicated", "split"])
def test_experts_without_tokens_are_stepped_as_on_one_device(ctx, plan):
    plain = build()
    model = parallelize(copy.deepcopy(plain), plan)
    start = copy.deepcopy(plain.state_dict())
    for each in (plain, model):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
        for step in range(3):
            if step:  # then only the first rank's experts have tokens
                for layer in each.layers:
                    layer.router.bias.data[:CHOSEN] += 100
            ids = torch.randint(0, 11, (B, S), generator=torch.Generator().manual_seed(step))
            each(ids).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    after = full_state_dict(model)
    for name, value in plain.state_dict().items():
        update, expected = after[name] - start[name], value - start[name]
        assert (update - expected).norm() <= 1e-4 * expected.norm(), name


@pytest.mark.ranks(2, tp_size=2)
def test_what_cannot_be_divided_is_named_and_nothing_changes(ctx):
    model = build()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TypeError, match=r"'layers.0.dense' is a Linear with parameters of the shapes .*packed experts"):
        parallelize(model, {"layers.*.dense": "expert_parallel"})
    with pytest.raises(ValueError, match="expert_parallel=True, and the plan has no 'experts'"):
        parallelize(model, {"layers.*.dense": "colwise_gather_output"}, expert_parallel=True)
    for layer in model.layers:
        layer.experts.up = nn.Parameter(torch.zeros(3, INNER, HIDDEN))
        layer.experts.down = nn.Parameter(torch.zeros(3, HIDDEN, INNER))
        layer.experts.bias = nn.Parameter(torch.zeros(3, HIDDEN))
    with pytest.raises(ValueError, match=r"dimension 0 of 'layers.0.experts', of shape \(3, 5, 7\), cannot be divided"):
        parallelize(model, REPLICATED)
    assert torch.equal(model.layers[0].dense.weight, before["layers.0.dense.weight"])
    assert not hasattr(model.layers[0].experts.up, "bmt_slice")
    with pytest.raises(ValueError, match=r"tokens \(3, 7\), experts \(2, 1\) and weights \(3, 1\) must have"):
        expert_parallel(None, torch.zeros(3, 7), torch.zeros(2, 1, dtype=torch.long), torch.zeros(3, 1), 4)
    with pytest.raises(TypeError, match=r"experts have dtype torch\.float32; give integers"):
        expert_parallel(None, torch.zeros(3, 7), torch.zeros(3, 1), torch.zeros(3, 1), 4)
    with pytest.raises(ValueError, match="num_experts=3 cannot be divided"):
        expert_parallel(None, torch.zeros(3, 7), torch.zeros(3, 1, dtype=torch.long), torch.zeros(3, 1), 3)


@pytest.mark.ranks(2, init=False)
@pytest.mark.parametrize("alone", [0, 1])
def test_half_precision_where_a_rank_has_nothing_to_compute(alone):
    """Weights of a router in fp32, and all tokens are for one rank's experts."""
    start()
    torch.manual_seed(3)
    tokens = torch.randn(5, HIDDEN, dtype=torch.bfloat16)
    experts = torch.tensor([[0, 1]]).repeat(5, 1) + alone * EXPERTS // 2
    weights = torch.rand(5, CHOSEN)

    def compute(rows, numbers, scales):
        return ((rows + numbers) * scales).to(rows.dtype)

    result = expert_parallel(compute, tokens, experts, weights, EXPERTS, split_tokens=True)
    local = experts - alone * EXPERTS // 2
    expected = sum(compute(tokens, local[:, n, None], weights[:, n, None]) for n in range(CHOSEN))
    assert result.dtype is tokens.dtype
    torch.testing.assert_close(result, expected)


@pytest.mark.ranks(2, init=False)
@pytest.mark.parametrize("split_tokens", [False, True])
@pytest.mark.parametrize("nobody", [-1, EXPERTS])
def test_numbers_that_no_expert_has(split_tokens, nobody):
    ctx = start()
    torch.manual_seed(ctx.rank if split_tokens else 0)
    tokens, weights = torch.randn(5, HIDDEN), torch.rand(5, CHOSEN)
    experts = torch.rand(5, EXPERTS).topk(CHOSEN).indices
    if not split_tokens or ctx.rank == 0:
        experts[1:3, 1] = nobody

    def compute(rows, numbers, scales):
        return rows * (numbers + 1 + ctx.rank * EXPERTS // 2) * scales

    result = expert_parallel(compute, tokens, experts, weights, EXPERTS, split_tokens=split_tokens)
    factor = torch.where((experts >= 0) & (experts < EXPERTS), (experts + 1) * weights, 0).sum(1, keepdim=True)
    torch.testing.assert_close(result, tokens * factor)


@pytest.mark.ranks(2, init=False)
@pytest.mark.parametrize("split_tokens", [False, True])
def test_experts_that_draw_random_numbers(split_tokens):
    """Ranks draw for different numbers of tokens, and others; after it, the same again."""
    ctx = start()
    tokens, weights = torch.ones(6, HIDDEN), torch.ones(6, 1)
    drawn = []

    def compute(rows, numbers, scales):
        drawn.append(torch.rand(3))
        return F.dropout(rows, 0.5) * scales

    for experts in (torch.tensor([[0, 0, 0, 0, 0, EXPERTS - 1]]).T, torch.zeros(6, 1, dtype=torch.long)):
        torch.manual_seed(5)
        expert_parallel(compute, tokens, experts, weights, EXPERTS, split_tokens=split_tokens)
        after = ctx.tp.all_gather_object(torch.rand(3).tolist())
        assert after[0] == after[1]
    first = ctx.tp.all_gather_object(drawn[0].tolist())
    assert first[0] != first[1]


@pytest.mark.ranks(2, tp_size=2)
def test_a_loss_of_routers_that_see_a_part_of_the_tokens(ctx):
    class Config:
        output_router_logits = False

    class Routed(Model):
        def forward(self, ids, output_router_logits=None):
            return super().forward(ids)

    model = Routed()
    model.config = Config()
    parallelize(model, SPLIT)
    ids = torch.arange(B * S).view(B, S) % 11
    model(ids)
    with pytest.raises(ValueError, match="routers see this rank's part of the sequence"):
        model(ids, output_router_logits=True)
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="routers see this rank's part of the sequence"):
        model(ids)
    model(ids, output_router_logits=False)
