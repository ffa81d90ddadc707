"""Tensor parallelism and ZeRO together."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from bmt_comm import Communicator, shard_of, slice_of
from bmt_tp import (
    ColumnParallelLinear,
    RowParallelLinear,
    VPEmbedding,
    full_state_dict,
    parallelize,
    per_rank_random,
    sequence_parallel,
    vocab_parallel_linear_cross_entropy,
)
from bmt_zero import (
    Block,
    BMTrainModelWrapper,
    DistributedModule,
    MixedPrecision,
    TransformerBlockList,
    init_parameters,
    load,
    load_state_dict,
    no_sync,
    save,
)

VOCAB, HIDDEN, LENGTH = 24, 12, 12
LAYOUTS = [(1, 1), (2, 2), (4, 2), (3, 3), (4, 4)]  # ranks, tensor-parallel size


class PlainLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class PlainModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(PlainLayer() for _ in range(3))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.embed.weight.T


class Layer(DistributedModule):
    def __init__(self, sequence):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = ColumnParallelLinear(HIDDEN, 24, gather_input=sequence)
        self.down = RowParallelLinear(24, HIDDEN, all_reduce_output=not sequence)
        if sequence:
            sequence_parallel(self.norm)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(DistributedModule):
    """The same with parallel layers; the scores are this rank's part of the vocabulary."""

    def __init__(self, sequence, level=None, checkpoint=True):
        super().__init__()
        self.embed = VPEmbedding(VOCAB, HIDDEN, torch.float32, sequence_parallel=sequence)
        self.layers = TransformerBlockList([Block(Layer(sequence), checkpoint, level) for _ in range(3)])
        self.norm = BMTrainModelWrapper(nn.LayerNorm(HIDDEN))
        if sequence:
            sequence_parallel(self.norm)

    def forward(self, ids):
        return self.embed(self.norm(self.layers(self.embed(ids))), projection=True)


def batches(step, count=4):
    ids = torch.randint(0, VOCAB, (count, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


def whole_loss(scores, targets, ctx):
    """Cross entropy over scores that are split along the vocabulary, by way of the whole scores."""
    from bmt_tp import gather_along

    return F.cross_entropy(gather_along(scores, -1, ctx.tp).flatten(0, 1), targets.flatten())


def train_plain(model, steps=10):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        ids, targets = batches(step, 12)
        F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def train(model, ctx, parts=1, steps=10):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        ids, targets = (t.chunk(ctx.data_size)[ctx.data_rank] for t in batches(step, 12))
        for i in range(parts):
            mine = slice(i, None, parts)
            loss = whole_loss(model(ids[mine]), targets[mine], ctx) / (ctx.replicas * parts)
            if i < parts - 1:
                with no_sync(model):
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same_update(model, plain, start):
    after = model.state_dict()
    assert list(after) == list(start)
    for name, value in plain.state_dict().items():
        update, expected = after[name].cpu() - start[name], value - start[name]
        assert (update - expected).norm() <= 1e-5 * expected.norm(), name


def check_training(ctx, model, plain, parts=1):
    start = copy.deepcopy(plain.state_dict())
    load_state_dict(model, start)
    train_plain(plain)
    train(model, ctx, parts)
    assert_same_update(model, plain, start)


@pytest.mark.ranks(4, tp_size=2)
@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_two_by_two_ranks_train_as_one_device_at_every_level(ctx, level, sequence):
    torch.manual_seed(0)
    check_training(ctx, Model(sequence, level, checkpoint=level == 3), PlainModel(), parts=2)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("sequence", [True, False])
def test_one_rank_trains_as_one_device(ctx, sequence):
    torch.manual_seed(0)
    check_training(ctx, Model(sequence), PlainModel())


@pytest.mark.ranks(3, tp_size=3)
def test_three_tensor_parallel_ranks_train_as_one_device(ctx):
    torch.manual_seed(0)
    check_training(ctx, Model(True), PlainModel())


@pytest.mark.ranks(4, tp_size=2)
@pytest.mark.parametrize("sequence", [True, False])
def test_a_plain_model_is_cut_and_then_sharded(ctx, sequence):
    suffix = "+sequence" if sequence else ""
    plan = {"layers.*.up": "colwise" + suffix, "layers.*.down": "rowwise" + suffix}
    if sequence:
        plan |= {"layers.0": "sequence_start", "layers.*.norm": "sequence", "norm": "sequence_end"}
    torch.manual_seed(0)
    plain = PlainModel()
    model = BMTrainModelWrapper(parallelize(copy.deepcopy(plain), plan))
    start = copy.deepcopy(plain.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_plain(plain)
    for step in range(10):
        ids, targets = (t.chunk(ctx.data_size)[ctx.data_rank] for t in batches(step, 12))
        (F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()) / ctx.replicas).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_update(model, plain, start)


class WithHead(PlainModel):
    """The same with a head, tied to the table; some parameters are not trained."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        for name, param in self.named_parameters():
            param.requires_grad_("up" not in name and name != "layers.1.norm.weight")

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@pytest.mark.ranks(4, tp_size=2)
@pytest.mark.parametrize("level", [0, 2, 3])
def test_frozen_and_tied_parameters_of_a_plain_model(ctx, level):
    plan = {"embed": "vocab", "layers.0": "sequence_start", "norm": "sequence_end", "head": "colwise_gather_output"}
    plan |= {"layers.*.norm": "sequence", "layers.*.up": "colwise+sequence", "layers.*.down": "rowwise+sequence"}
    torch.manual_seed(0)
    plain = WithHead()
    model = BMTrainModelWrapper(parallelize(copy.deepcopy(plain), plan), zero_level=level)
    assert model.head._parameters["weight"] is model.embed._parameters["weight"]
    start = copy.deepcopy(plain.state_dict())
    train_plain(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(10):
        ids, targets = (t.chunk(ctx.data_size)[ctx.data_rank] for t in batches(step, 12))
        (F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()) / ctx.replicas).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_update(model, plain, start)


@pytest.mark.ranks(4, tp_size=2)
@pytest.mark.parametrize("level", [0, 1, 3])
def test_torch_clips_by_the_norm_over_all_ranks(ctx, level):
    torch.manual_seed(0)
    plain, plan = PlainModel(), {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    model = BMTrainModelWrapper(parallelize(copy.deepcopy(plain), plan), zero_level=level)
    ids, targets = batches(0, 12)
    F.cross_entropy(plain(ids).flatten(0, 1), targets.flatten()).backward()
    ids, targets = (t.chunk(ctx.data_size)[ctx.data_rank] for t in (ids, targets))
    (F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()) / ctx.replicas).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    torch.testing.assert_close(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01), expected)
    torch.testing.assert_close(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item(), 0.01)


@pytest.mark.ranks(4, tp_size=2)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_torch_s_tools(ctx, level):
    """Hooks, the gradient scaler, AdamW, averages and copies of a model."""
    torch.manual_seed(0)
    plain, plan = PlainModel(), {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    model = BMTrainModelWrapper(parallelize(copy.deepcopy(plain), plan), zero_level=level)
    models = (plain, model)
    for which in models:
        which.get_parameter("layers.0.up.weight").register_hook(lambda grad: grad * 2)
    optimizers = [torch.optim.AdamW(which.parameters(), lr=0.01) for which in models]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1) for _ in models]
    averages = [AveragedModel(which, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for which in models]
    for step in range(4):
        for which, scaler in zip(models, scalers, strict=True):
            ids, targets = batches(step, 12)
            if which is model:
                ids, targets = (t.chunk(ctx.data_size)[ctx.data_rank] for t in (ids, targets))
            loss = F.cross_entropy(which(ids).flatten(0, 1), targets.flatten())
            scaler.scale(loss / (ctx.replicas if which is model else 1)).backward()
        if step == 2:  # on one rank alone; at level 0 its replica has the same gradients
            plain.get_parameter("layers.0.up.weight").grad[0, 0] = float("inf")
            if ctx.rank == 3 or (ctx.rank == 1 and level == 0):
                next(p for p in model.parameters() if p.grad is not None and p.grad.numel()).grad.fill_(float("inf"))
        for which, optimizer, scaler, average in zip(models, optimizers, scalers, averages, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            average.update_parameters(which)
    assert scalers[0].get_scale() == scalers[1].get_scale()
    for found, wanted in ((model, plain), (copy.deepcopy(model), plain), (averages[1].module, averages[0].module)):
        for name, param in found.named_parameters():
            expected = wanted.get_parameter(name).detach()
            torch.testing.assert_close(param.full_tensor().detach(), expected, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.ranks(3, tp_size=3)
def test_gradients_in_half_precision_are_not_scaled(ctx):
    """Those of a norm on parts of the sequence are multiplied by the number of ranks on their way, and divided."""
    torch.manual_seed(0)
    plain, x, factor = nn.LayerNorm(5), torch.randn(2, 6, 5), torch.randn(2, 6, 5)
    block = Block(sequence_parallel(copy.deepcopy(plain)), precision=MixedPrecision(torch.bfloat16, torch.float32))
    (plain(x) * factor).sum().backward()
    (block(x.chunk(3, 1)[ctx.rank]) * factor.chunk(3, 1)[ctx.rank]).sum().backward()
    for name, param in block.named_parameters():
        found = param.bmt_slice
        expected = plain.get_parameter(name).grad[found.row_start : found.row_stop]
        torch.testing.assert_close(param.grad, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.ranks(2, tp_size=2)
def test_layers_for_other_ranks_than_the_contexts_are_refused(ctx):
    alone = Communicator(None)
    with pytest.raises(ValueError, match=r"comm has the ranks \(\d,\), and bmt_zero shards by .* \(0, 1\)"):
        ColumnParallelLinear(4, 4, comm=alone)
    for model in (
        parallelize(nn.Sequential(nn.Linear(4, 4)), {"0": "colwise"}, alone),
        sequence_parallel(nn.LayerNorm(4), alone),
    ):
        with pytest.raises(ValueError, match=r"prepared for the tensor-parallel ranks \(\d,\), and the context's are"):
            BMTrainModelWrapper(model)


@pytest.mark.ranks(2, tp_size=2)
def test_a_sharded_model_is_not_cut(ctx):
    inner = nn.Linear(4, 4)
    model = BMTrainModelWrapper(
        nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(inner)]), "head": nn.Linear(4, 4)})
    )
    for name in ("head", "layers.0.0"):
        with pytest.raises(ValueError, match="is sharded already; parallelize a model first"):
            parallelize(model, {name: "colwise"})


@pytest.mark.ranks(4, tp_size=2)
def test_hybrid_sharding_must_reach_the_ranks_that_hold_a_parameter(ctx):
    alone = Communicator(None)
    mixed = nn.ModuleDict({"cut": ColumnParallelLinear(4, 4), "norm": nn.LayerNorm(4)})
    with pytest.raises(
        ValueError, match=r"over 4 ranks; parameter 'cut\.weight', which .* hold different shards of, belongs to 2"
    ):
        Block(mixed, shard_comm=ctx.zero, replicate_comm=alone)
    with pytest.raises(ValueError, match=r"over 2 ranks; parameter 'norm\.weight', which .* in common, belongs to 4"):
        Block(mixed, shard_comm=ctx.tp_zero, replicate_comm=alone)
    Block(mixed["cut"], shard_comm=ctx.tp_zero, replicate_comm=alone)


@pytest.mark.ranks(4, tp_size=2)
def test_files_are_those_of_the_plain_model_at_any_size(ctx, tmp_path):
    torch.manual_seed(0)
    plain = PlainModel()
    model = Model(True)
    load_state_dict(model, plain.state_dict())
    save(model, str(tmp_path / "model.pt"))
    ctx.world.barrier()
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    for name, value in plain.state_dict().items():
        assert torch.equal(saved[name], value)
    other = Model(False)
    load(other, str(tmp_path / "model.pt"))
    for name, value in other.state_dict().items():
        assert torch.equal(value.cpu(), saved[name])


@pytest.mark.ranks(2, tp_size=2)
def test_initial_values_do_not_depend_on_the_tensor_parallel_size(ctx):
    with torch.device("meta"):
        column, row = ColumnParallelLinear(HIDDEN, 24), RowParallelLinear(24, HIDDEN)
    parallel = nn.ModuleDict({"column": column, "row": row})
    init_parameters(parallel, seed=0)
    from bmt_tp import Linear

    whole = nn.ModuleDict({"column": Linear(HIDDEN, 24), "row": Linear(24, HIDDEN)})
    init_parameters(whole, seed=0)
    expected = whole.state_dict()
    for name, value in parallel.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.ranks(2, tp_size=2)
def test_dropout_in_a_checkpointed_block_is_replayed_and_differs_between_ranks(ctx):
    masks = []

    class Drop(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x):
            with per_rank_random():
                y = F.dropout(x * self.weight, 0.5)
            masks.append(y.detach().clone())
            return y * y

    torch.manual_seed(0)
    drop = Drop()
    sequence_parallel(drop)  # ranks drop other elements: they find other gradients
    Block(drop)(torch.ones(64)).sum().backward()
    assert torch.equal(masks[0], masks[1])
    first, second = ctx.tp.all_gather_object(masks[0])
    assert not torch.equal(first, second)


@pytest.mark.ranks(4, tp_size=2)  # so that ZeRO's communicators are others
@pytest.mark.parametrize("sequence", [True, False])
def test_traffic_of_a_layer_is_that_of_the_formula(ctx, sequence):
    """Without sequence parallelism an all-reduce of the activations for each pair of layers, forward and backward.
    With it an all-gather and a reduce-scatter instead of each, which is as many bytes, and the gather of the first
    layer's input once more, for the gradient of its weight, since only this rank's part was kept."""
    model = Layer(sequence)
    x = torch.randn(4, LENGTH // 2 if sequence else LENGTH, HIDDEN, requires_grad=True)
    model(x).sum().backward()  # the first time, ranks also compare gradients
    before = {op: count.bytes for op, count in ctx.tp.traffic.items()}
    model(x).sum().backward()
    sent = {op: count.bytes - before.get(op, 0) for op, count in ctx.tp.traffic.items()}
    sent = {op: count for op, count in sent.items() if count}
    activation = 4 * LENGTH * HIDDEN * 4  # bytes of the whole
    all_reduce = 2 * activation // 2
    if sequence:
        norm = 2 * HIDDEN * 4  # bytes: its gradient is summed
        assert sent == {"all_gather": 3 * all_reduce // 2, "reduce_scatter": 2 * all_reduce // 2, "all_reduce": norm}
    else:
        assert sent == {"all_reduce": 2 * all_reduce}


@pytest.mark.ranks(3, tp_size=3)
def test_activations_outside_of_the_pairs_are_a_part_of_those_without_sequence_parallelism(ctx):
    kept = {}
    for sequence in (True, False):
        layer = Layer(sequence)
        x = torch.randn(4, LENGTH // (3 if sequence else 1), HIDDEN, requires_grad=True)
        sizes = {}

        def note(t, sizes=sizes):
            if t.dim() == 3 and t.shape[-1] == HIDDEN:
                sizes[t.data_ptr()] = t.numel()
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            layer(x)
        kept[sequence] = sum(sizes.values())
    assert kept[False] == 3 * kept[True] > 0


@pytest.mark.ranks(2, 4, tp_size=2)
@pytest.mark.parametrize("level", [0, 3])
def test_a_module_on_a_part_of_the_sequence_that_does_not_say_so_raises_on_every_rank(ctx, level):
    class Layers(nn.Module):
        def __init__(self, marked):
            super().__init__()
            self.norm = nn.LayerNorm(HIDDEN)
            self.up, self.down = ColumnParallelLinear(HIDDEN, 8), RowParallelLinear(8, HIDDEN)
            if marked:
                sequence_parallel(self.norm)

        def forward(self, x):
            return self.down(self.up(self.norm(x)))

    torch.manual_seed(ctx.data_rank)
    x = torch.randn(3, 6, HIDDEN).chunk(2, 1)[ctx.tp_rank]
    Block(Layers(True), zero_level=level)(x).square().sum().backward()
    with pytest.raises(RuntimeError, match=r"different gradients of .*sequence_parallel\(module\)"):
        Block(Layers(False), zero_level=level)(x).square().sum().backward()


@pytest.mark.ranks(2, 4, tp_size=2)
@pytest.mark.parametrize("level", [None, 0, 2, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_the_head_and_its_loss_take_the_weight_of_an_embedding(ctx, level, tied):
    class Model(nn.Module):
        def __init__(self, embedding, loss):
            super().__init__()
            self.embedding, self.loss = embedding, loss

        def forward(self, x, ids):
            hidden = torch.tanh(self.embedding(ids)) if tied else x
            return self.loss(hidden, self.embedding.weight, ids)

    def plain_loss(hidden, weight, ids):
        return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), ids.flatten())

    torch.manual_seed(0)
    plain = Model(nn.Embedding(VOCAB, HIDDEN), plain_loss)
    model = Model(VPEmbedding(VOCAB, HIDDEN, torch.float32), vocab_parallel_linear_cross_entropy)
    model.embedding.load_state_dict(plain.embedding.state_dict())
    if level is not None:
        model = Block(model, zero_level=level)
    for replica in range(ctx.replicas):
        generator = torch.Generator().manual_seed(replica)
        x = torch.randn(2, 4, HIDDEN, generator=generator)
        ids = torch.randint(VOCAB, (2, 4), generator=generator)
        expected = plain(x, ids)
        expected.backward()
        if replica == ctx.tp_zero.rank:
            loss = model(x, ids)
            torch.testing.assert_close(loss, expected)
            loss.backward()
    param = model.embedding.weight
    wanted = shard_of(plain.embedding.weight.grad, slice_of(param))
    assert (param.grad - wanted).norm() <= 1e-5 * plain.embedding.weight.grad.norm()


@pytest.mark.ranks(2, tp_size=2)
def test_a_plain_model_that_was_cut_is_saved_whole(ctx, tmp_path):
    plan = {"up": "colwise", "down": "rowwise", "embed": "vocab"}

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm = nn.Embedding(6, 4), nn.LayerNorm(4)
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
            self.again = self.down

        def state_dict(self):  # code of its own, which takes nothing
            return super().state_dict()

    torch.manual_seed(1)
    plain = Both()
    for suffix in (".pt", ".safetensors"):
        save(parallelize(copy.deepcopy(plain), plan), tmp_path / f"m{suffix}")
        if ctx.rank == 0:
            torch.save(plain.state_dict(), tmp_path / "plain.pt")
        ctx.world.barrier()
        for name in (f"m{suffix}", "plain.pt"):
            model = parallelize(Both(), plan)
            load(model, tmp_path / name)
            for key, value in full_state_dict(model).items():
                assert torch.equal(value, plain.state_dict()[key]), key
    load(loaded := Both(), tmp_path / "m.pt")
    model = parallelize(Both(), plan)
    load_state_dict(model, plain.state_dict())
    for found in (loaded.state_dict(), full_state_dict(model)):
        for key, value in found.items():
            assert torch.equal(value, plain.state_dict()[key]), key


@pytest.mark.ranks(4, tp_size=2)
@pytest.mark.parametrize("padding", [None, 0])
def test_layers_that_were_cut_are_called_outside_of_their_model(ctx, padding):
    """As ``get_input_embeddings()`` is for prompts; keys and values have fewer heads than there are ranks."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
        pad_token_id=padding,
    )
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config)
    model = BMTrainModelWrapper(parallelize(copy.deepcopy(plain)))
    ids = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(1))
    embedded = [each.get_input_embeddings()(ids) for each in (plain, model)]
    torch.testing.assert_close(*embedded)
    logits = [each(inputs_embeds=x).logits for each, x in zip((plain, model), embedded)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    keys = [each.model.layers[0].self_attn.k_proj(embedded[0].detach()) for each in (plain, model)]
    torch.testing.assert_close(*keys)
    for x in embedded:
        (x * (1 + ids[..., None])).sum().backward()
    wanted, weight = plain.get_input_embeddings().weight.grad, model.get_input_embeddings().weight
    rows = shard_of(wanted, weight.bmt_slice)
    torch.testing.assert_close(weight.grad.to_local(), 2 * rows)  # two replicas, the same batch


class BeginsAsNothing(nn.Module):
    """A norm before a layer of zeros, both on a part of the sequence; only the layer is said to be."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 8)
        nn.init.zeros_(self.out.weight)

    def forward(self, x):
        return x + self.out(self.norm(x).square())


@pytest.mark.ranks(2, tp_size=2)
def test_a_forgotten_module_whose_first_gradients_are_zeros_is_found(ctx):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), BeginsAsNothing(), nn.Identity(), nn.Linear(8, 4))
    parallelize(model, {"0": "sequence_start", "1.out": "sequence", "2": "sequence_end"})
    optimizer = torch.optim.SGD(BMTrainModelWrapper(model).parameters(), lr=0.1)
    x = torch.randn(2, 6, 8)
    model(x).square().mean().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"different gradients of parameters of shapes \[\(8,\), \(8,\)\]"):
        model(x).square().mean().backward()
