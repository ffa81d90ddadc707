"""``torch.compile`` of sharded models and layers: what the plain model computes, on every rank."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import bmt_tp
import bmt_zero
import bmt_zero.parameter_group
from bmt_comm import Communicator

# Dynamo looks for gradients of the unsharded parameters, which are no leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

WIDTH = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(19, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 19)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.head(x)


PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "embed": "vocab", "head": "colwise_gather_output"}


def loss_of(model: Callable[..., Tensor], ids: Tensor, count: int) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="sum") / count


def train(model: Any, run: Callable[..., Tensor], rank: int, size: int) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bmt_zero.parameter_group, "LEAST_BYTES", 0)  # weights here are small
        return train_with_weights_of_any_size(model, run, rank, size)


def train_with_weights_of_any_size(model: Any, run: Callable[..., Tensor], rank: int, size: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(5):
        ids = torch.randint(19, (4, 6), generator=torch.Generator().manual_seed(step))
        loss = loss_of(run, ids.chunk(size)[rank], ids.numel())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def check(model: nn.Module, run: Callable[..., Tensor], ctx: Any, state: Callable[..., Any] | None = None) -> None:
    plain = Model()
    start = copy.deepcopy(plain.state_dict())
    train(plain, plain, 0, 1)
    train(model, run, ctx.data_rank, ctx.data_size)
    found = model.state_dict() if state is None else state(model)
    for name, wanted in plain.state_dict().items():
        assert (found[name] - wanted).norm() <= 1e-5 * (wanted - start[name]).norm(), name


def compiled_graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


@pytest.fixture
def backend() -> str:
    """Without Inductor, which would compile C++ code for minutes: the graphs are the same."""
    return "aot_eager"


@pytest.mark.ranks(2, timeout=180)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("how", ["layers before", "layers after", "whole"])
def test_compiled_models_train_as_plain_ones_do(ctx: Any, level: int, checkpoint: bool, how: str, backend: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model: nn.Module = Model()
    if how == "layers before":
        for layer in model.layers:
            layer.compile(backend=backend)
    is_late = pytest.warns(UserWarning, match="compile") if checkpoint and how == "layers before" else nullcontext()
    with is_late:
        model = bmt_zero.BMTrainModelWrapper(model, zero_level=level, use_checkpoint=checkpoint)
    if how == "layers after":
        for layer in model.layers:
            layer.compile(backend=backend)
    run = torch.compile(model, backend=backend) if how == "whole" else model
    check(model, run, ctx)
    # A checkpointed layer computes as it is, unless it is compiled after it was sharded.
    assert compiled_graphs() > 0 or (checkpoint and how != "layers after")


@pytest.mark.ranks(2, timeout=180)
@pytest.mark.parametrize(
    ("kind", "level", "checkpoint"),
    [
        ("llama", 3, True),
        pytest.param("gpt2", 2, False, marks=pytest.mark.long),
        pytest.param("gpt2", 3, True, marks=pytest.mark.thorough),
    ],
)
def test_layers_of_transformers_are_one_graph_each(
    ctx: Any, kind: str, level: int, checkpoint: bool, backend: str
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "llama":
        sizes = {"vocab_size": 19, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
        config = transformers.LlamaConfig(**sizes, **heads, use_cache=False)
    else:
        sizes = {"vocab_size": 19, "n_embd": 16, "n_layer": 3, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
        config = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    plain = transformers.AutoModelForCausalLM.from_config(config).double()
    model, start = copy.deepcopy(plain), copy.deepcopy(plain.state_dict())
    layers = model.model.layers if kind == "llama" else model.transformer.h
    model = bmt_zero.BMTrainModelWrapper(model, zero_level=level, use_checkpoint=checkpoint)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in layers:
        layer.compile(backend=backend, fullgraph=True)
    train(plain, lambda ids: plain(input_ids=ids).logits, 0, 1)
    train(model, lambda ids: model(input_ids=ids).logits, ctx.rank, 2)
    assert compiled_graphs() == 1  # all layers have the same, and no step needs another
    found = model.state_dict()
    for name, wanted in plain.state_dict().items():
        assert (found[name] - wanted).norm() <= 1e-7 * (wanted - start[name]).norm(), name


@pytest.mark.ranks(2, timeout=180)
def test_a_model_that_is_compiled_again(ctx: Any, backend: str) -> None:
    torch._dynamo.reset()
    model = bmt_zero.BMTrainModelWrapper(Model(), use_checkpoint=False)
    for layer in model.layers:
        layer.compile(backend=backend)
    state = copy.deepcopy(model.state_dict())
    check(model, model, ctx)
    model.load_state_dict(state)
    torch._dynamo.reset()
    check(model, model, ctx)


@pytest.mark.ranks(2, timeout=180)
def test_a_compiled_function_of_a_weight(ctx: Any, backend: str) -> None:
    torch._dynamo.reset()

    @torch.compile(backend=backend)
    def product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return nn.functional.linear(x, weight, bias)

    class Head(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return product(x, self.weight, self.bias)

    model = Model()
    model.head.__class__ = Head
    model = bmt_zero.BMTrainModelWrapper(model, use_checkpoint=False)
    check(model, model, ctx)


@pytest.mark.ranks(2, timeout=180)
@pytest.mark.parametrize("how", ["before", "after"])
def test_a_single_block(ctx: Any, how: str, backend: str) -> None:
    torch._dynamo.reset()
    plain, inner = Model(), Model()
    if how == "before":
        inner = torch.compile(inner, backend=backend)
    block = bmt_zero.Block(inner, use_checkpoint=False)
    run = torch.compile(block, backend=backend) if how == "after" else block
    start = copy.deepcopy(plain.state_dict())
    train(plain, plain, 0, 1)
    train(block, run, ctx.rank, 2)
    for name, value in block.state_dict().items():
        wanted = plain.state_dict()[name.removeprefix("_orig_mod.")]
        change = (wanted - start[name.removeprefix("_orig_mod.")]).norm()
        assert (value - wanted).norm() <= 1e-5 * change, name


class Convolution(nn.Module):
    """Calls its layer without hooks, as SqueezeBert does, and as torch does, which does not run what is compiled then.

    Ranks hold rows of dims 0 and 1 of the weight together, so their part has another number of dims.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(nn.Conv1d(3, 5, 1), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer.forward(x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_call_of_forward_is_not_compiled(ctx: Any, checkpoint: bool, backend: str) -> None:
    torch._dynamo.reset()
    plain, model = Convolution(), Convolution()
    model.layer = bmt_zero.Block(model.layer, use_checkpoint=checkpoint)
    model.layer.compile(backend=backend)
    before, x = compiled_graphs(), torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(ctx.rank))
    model(x).sum().backward()
    assert compiled_graphs() == before
    for rank in range(ctx.world_size):
        plain(torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(rank))).sum().backward()
    for (name, param), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), wanted.grad, msg=name)
    model.layer(x)
    assert compiled_graphs() > before


@pytest.mark.ranks(4, timeout=180)
@pytest.mark.parametrize("how", ["layers", pytest.param("whole", marks=pytest.mark.long)])
def test_replicas_of_a_sharded_model(ctx: Any, how: str, backend: str) -> None:
    torch._dynamo.reset()
    groups = {ranks: dist.new_group(list(ranks)) for ranks in [(0, 1), (2, 3), (0, 2), (1, 3)]}
    shard, replicate = (
        Communicator(next(groups[ranks] for ranks in kinds if ctx.rank in ranks))
        for kinds in ([(0, 1), (2, 3)], [(0, 2), (1, 3)])
    )
    plain, model = Model(), bmt_zero.Block(Model(), False, shard_comm=shard, replicate_comm=replicate)
    run = torch.compile(model, backend=backend) if how == "whole" else model
    for layer in model.layers if how == "layers" else ():
        layer.compile(backend=backend)
    start = copy.deepcopy(plain.state_dict())
    train(plain, plain, 0, 1)
    train(model, run, ctx.rank, 4)
    for name, wanted in plain.state_dict().items():
        assert (model.state_dict()[name] - wanted).norm() <= 1e-5 * (wanted - start[name]).norm(), name


@pytest.mark.ranks(2, tp_size=2, timeout=180)
@pytest.mark.parametrize("level", [*(pytest.param(level, marks=pytest.mark.long) for level in (0, 2)), 1, 3])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_layers_that_tensor_parallel_ranks_compute(ctx: Any, checkpoint: bool, level: int, backend: str) -> None:
    torch._dynamo.reset()
    model = Model()
    plan = {**PLAN}
    del plan["embed"], plan["head"]  # 19 ids: no two ranks divide them
    bmt_tp.parallelize(model, plan)
    bmt_zero.BMTrainModelWrapper(model, zero_level=level, use_checkpoint=checkpoint)
    for layer in model.layers:
        layer.compile(backend=backend)
    check(model, model, ctx, bmt_tp.full_state_dict)


@pytest.mark.ranks(2, timeout=180)
def test_a_compiled_step_with_its_backward(ctx: Any, backend: str) -> None:
    """Autograd calls the hooks of backward within the compiled function."""
    torch._dynamo.reset()
    plain, model = Model(), bmt_zero.BMTrainModelWrapper(Model(), use_checkpoint=False)
    ids = torch.randint(19, (4, 6), generator=torch.Generator().manual_seed(0))

    def step(ids: Tensor) -> Tensor:
        loss = loss_of(model, ids, 24)
        loss.backward()
        return loss

    torch.compile(step, backend=backend)(ids.chunk(2)[ctx.rank])
    loss_of(plain, ids, 24).backward()
    for name, param in model.named_parameters():
        where, wanted = param.bmt_slice, plain.get_parameter(name).grad
        torch.testing.assert_close(param.grad.add(0), wanted[where.row_start : where.row_stop], msg=name)


@pytest.mark.ranks(2, timeout=180)
def test_a_penalty_in_a_compiled_function(ctx: Any, backend: str) -> None:
    torch._dynamo.reset()
    plain, model = Model(), bmt_zero.BMTrainModelWrapper(Model())

    def penalty(params: list[nn.Parameter]) -> Tensor:
        return sum(p.square().sum() for p in params)

    found = torch.compile(penalty, backend=backend)(list(model.parameters()))
    torch.testing.assert_close(found, penalty(list(plain.parameters())))


@pytest.mark.ranks(2, timeout=180)
def test_compiled_layers_keep_a_share_of_their_activations(ctx: Any, backend: str) -> None:
    saved = []
    for share in (0.1, 0.8, 1.0):
        torch._dynamo.reset()
        model = bmt_zero.BMTrainModelWrapper(Model(), use_checkpoint=share)
        for layer in model.layers:
            layer.compile(backend=backend)
        check(model, model, ctx)
        nbytes: dict[int, int] = {}

        def note(tensor: Tensor, nbytes: dict[int, int] = nbytes) -> Tensor:
            nbytes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            y = model.layers[0](torch.ones(4, 60, WIDTH))
        saved.append(sum(nbytes.values()))
        y.sum().backward()
    assert saved[0] < saved[1] < saved[2]
    assert compiled_graphs() > 0
    layer = bmt_zero.Block(Layer(), use_checkpoint="matmuls")
    with pytest.raises(ValueError, match="use_checkpoint names operators"):
        layer.compile()


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.relu(self.inner(x)), 0.5, self.training)


@pytest.mark.ranks(1)
def test_a_share_of_compiled_layers_that_drop_at_random_is_refused(ctx: Any, backend: str) -> None:
    torch._dynamo.reset()
    layer = bmt_zero.Block(Dropping(), use_checkpoint=0.3)
    layer.compile(backend=backend)
    with pytest.raises(RuntimeError, match=r"use_checkpoint=0\.3 draws random numbers"):
        layer(torch.ones(3, WIDTH))
    layer.eval()(torch.ones(3, WIDTH)).sum().backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.long), 3])
def test_compiled_autograd_is_refused(ctx: Any, level: int, backend: str) -> None:
    from torch._dynamo import compiled_autograd

    model = bmt_zero.BMTrainModelWrapper(Model(), zero_level=level)
    ids = torch.arange(12).view(2, 6)
    loss = loss_of(model, ids, 12)
    refused = pytest.raises(RuntimeError, match="backward runs with compiled autograd")
    with refused, compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    loss_of(model, ids, 12).backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.ranks(1)
@pytest.mark.parametrize("use_checkpoint", ["matmuls", 0.5])
def test_what_is_compiled_in_a_checkpointed_layer(ctx: Any, use_checkpoint: Any, backend: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain = Model()
    model = copy.deepcopy(plain)
    model.layers[1].compile(backend=backend)
    bmt_zero.shard(model, use_checkpoint=use_checkpoint)
    for _ in range(3):
        for each in (plain, model):
            each.zero_grad()
            each(torch.arange(12).view(2, 6)).square().sum().backward()
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert (param.grad - expected.grad).norm() <= 1e-6 * expected.grad.norm()
    if hasattr(torch.utils._python_dispatch.TorchDispatchMode, "ignore_compile_internals"):  # not in old torch
        assert compiled_graphs() == 1


TRAINS = """
import sys
import torch
from torch import nn
import bmtrain as bmt

bmt.init_distributed()
layers = bmt.TransformerBlockList([bmt.Block(nn.Linear(4, 4), use_checkpoint=False) for _ in range(3)])
with torch.device("meta"):
    embedding = bmt.nn.VPEmbedding(9, 4, dtype=torch.float32)
bmt.init_parameters(embedding)
model = bmt.BMTrainModelWrapper(nn.Sequential(embedding, layers))
weights, biases = ([p for p in model.parameters() if len(p.bmt_slice.shape) == dims] for dims in (2, 1))
groups = [{"params": weights}, {"params": biases, "use_muon": False}]
checkpointer = bmt.Checkpointer(sys.argv[1])
for step, optimizer in enumerate((bmt.optim.AdamOptimizer(model.parameters()), bmt.optim.Muon(groups))):
    manager = bmt.optim.OptimManager(loss_scale=1024.0)
    manager.add_optimizer(optimizer, bmt.lr_scheduler.Cosine(optimizer, 1e-3, 1, 10, 0))
    for _ in range(2):
        loss = model(torch.arange(3)).sum()
        manager.zero_grad()
        optimizer.zero_grad(set_to_none=True)
        manager.backward(loss)
        manager.clip_grad_norm(model.parameters(), 1.0)
        manager.step()
    optimizer.load_state_dict(optimizer.state_dict())
    checkpointer.save(step, model=model, manager=manager)
    checkpointer.wait()
    checkpointer.load_latest(model=model, manager=manager)
bmt.save(model, sys.argv[1] + "/model.pt")
imported = {"torch._dynamo", "sympy"} & set(sys.modules)
assert not imported, imported
"""


def test_a_script_that_does_not_compile_does_not_import_the_compiler(tmp_path: Path) -> None:
    """Activation checkpoints excepted: torch's own do."""
    subprocess.run([sys.executable, "-c", TRAINS, str(tmp_path)], check=True, timeout=120)
