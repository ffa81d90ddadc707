"""Linear layers of torchao.float8 whose weights travel in float8: sharding changes no number.

The nox session "frameworks" runs this test.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bmt_zero
from bmt_comm import ParallelContext

# torchao says this about itself when Python compiles it for the first time.
pytestmark = pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt2"
EXAMPLE_FLAGS = [
    *("--data", "text", "--vocab-size", "300", "--layers", "2", "--hidden", "32", "--heads", "2", "--seq-len", "32"),
    *("--optimizer", "adam", "--lr", "1e-2", "--warmup", "4", "--batch-size", "4", "--step-size", "8", "--steps", "24"),
    *("--save-interval", "0", "--eval-interval", "8", "--sample-tokens", "0", "--device", "cpu"),
]
STEPS, BATCH, LENGTH = 10, 2, 8


class Layer(nn.Module):
    def __init__(self, hidden: int = 32, inner: int = 80) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def in_float8(model: nn.Module, gathered: bool) -> nn.Module:
    """``gathered``: as for FSDP2's all-gather in float8."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=gathered))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 32), Layer(), Layer(), nn.Linear(32, 3))
    model[1].down.weight.data[5] *= 30.0  # the largest number is on one rank
    return model


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(BATCH, LENGTH, 7, generator=generator)
    return x, x[..., :3].sin()


def plain_updates(ranks: int) -> tuple[dict[str, Tensor], list[float]]:
    """One process that computes each rank's batch by itself: activations have a scale for each."""
    model = build()
    for layer in model[1:3]:
        in_float8(layer, gathered=False)
    start = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    losses = []
    for step in range(STEPS):
        loss = sum(F.mse_loss(model(x), y) for x, y in (batch(step, rank) for rank in range(ranks)))
        (loss / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() / ranks)
    return {name: value - start[name] for name, value in model.state_dict().items()}, losses


def sharded(level: int, use_checkpoint: bool) -> nn.Sequential:
    model = build()
    for layer in model[1:3]:
        bmt_zero.shard(in_float8(layer, gathered=True), level, use_checkpoint=use_checkpoint)
    return bmt_zero.shard(model, level)


@pytest.mark.ranks(1, 2, 3, timeout=120)
@pytest.mark.parametrize(("level", "use_checkpoint"), [(0, False), (1, False), (2, True), (3, False), (3, True)])
def test_training_equals_one_process(ctx: ParallelContext, level: int, use_checkpoint: bool) -> None:
    model = sharded(level, use_checkpoint)
    start = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    losses = []
    for step in range(STEPS):
        x, y = batch(step, ctx.rank)
        loss = F.mse_loss(model(x), y)
        (loss / ctx.world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    total = torch.stack(losses)
    ctx.world.all_reduce(total)
    wanted, wanted_losses = plain_updates(ctx.world_size)
    assert (total / ctx.world_size).tolist() == pytest.approx(wanted_losses, rel=1e-5)
    for name, value in model.state_dict().items():
        assert type(value) is Tensor
        error = (value - start[name] - wanted[name]).norm() / wanted[name].norm()
        assert error <= 1e-5, (name, error)


@pytest.mark.ranks(2)
def test_a_weight_travels_as_a_byte_for_each_number(ctx: ParallelContext) -> None:
    layer = Layer()
    bmt_zero.shard(in_float8(layer, gathered=True), 3)
    biases = sum(p.bmt_slice.shape[0] for p in layer.parameters() if len(p.bmt_slice.shape) == 1)
    weights = 2 * 32 * 80
    with torch.no_grad():
        layer(torch.ones(16, 32))
        before = ctx.zero.traffic["all_gather"].bytes
        layer(torch.ones(16, 32))
    sent = ctx.zero.traffic["all_gather"].bytes - before
    assert weights // 2 <= sent <= weights // 2 + 4 * (biases // 2 + 100)
    assert {param.dtype for param in layer.parameters()} == {torch.float32}


@pytest.mark.ranks(2)
def test_the_layer_gets_what_it_would_make_of_the_whole_weight(ctx: ParallelContext) -> None:
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 48, bias=False))
    model[0].weight.data[40] *= 1000.0  # on one rank
    weight = model[0].weight.detach().clone()
    in_float8(model, gathered=True)
    wanted = hp_tensor_to_float8_dynamic(weight, torch.float8_e4m3fn, model[0].linear_mm_config)
    bmt_zero.shard(model, 3)
    seen = []

    def look(module: nn.Module, args: object) -> None:
        found: Any = module.weight
        seen.extend([found.dtype, found._data.dtype, found._data.float(), found._scale.clone()])

    model[0].register_forward_pre_hook(look)
    model(torch.ones(16, 16))
    dtype, stored, numbers, scale = seen
    assert (dtype, stored) == (torch.float32, torch.float8_e4m3fn)
    assert torch.equal(scale, wanted._scale)
    assert torch.equal(numbers, wanted._data.float())
    assert torch.equal(model[0].weight.full_tensor(), weight)


@pytest.mark.ranks(2)
def test_mixed_precision_computes_in_its_dtype(ctx: ParallelContext) -> None:
    """Weights go from fp32 to float8 at once; all else is bf16. FSDP2 does the same."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    precision = bmt_zero.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results = []
    for ours in (True, False):
        torch.manual_seed(3)
        layer = in_float8(Layer(), gathered=True)
        if ours:
            bmt_zero.shard(layer, 3, precision=precision)
        else:
            fully_shard(layer, mp_policy=policy)
        start = {name: p.full_tensor().detach().clone() for name, p in layer.named_parameters()}
        output = layer(torch.ones(16, 32) * (1 + ctx.rank))
        loss = output.float().square().mean()
        (loss / ctx.world_size if ours else loss).backward()  # FSDP2 takes the mean over the ranks
        torch.optim.SGD(layer.parameters(), lr=1.0).step()
        updates = {name: p.full_tensor().detach() - start[name] for name, p in layer.named_parameters()}
        results.append((output.detach().float(), updates))
    (output, updates), (wanted, wanted_updates) = results
    assert torch.equal(output, wanted)
    for name, update in updates.items():
        assert (update - wanted_updates[name]).norm() <= 1e-5 * wanted_updates[name].norm(), name


@pytest.mark.ranks(2)
def test_layers_on_meta_copies_and_states(ctx: ParallelContext) -> None:
    with torch.device("meta"):
        made = in_float8(Layer(), gathered=True)
    bmt_zero.shard(made, 3)
    torch.manual_seed(5)
    values = Layer().state_dict()
    made.load_state_dict(values)
    twin = copy.deepcopy(made)
    plain = in_float8(Layer(), gathered=False)
    plain.load_state_dict(values)
    x = torch.randn(16, 32)
    for layer in (made, twin):
        assert torch.equal(layer(x), plain(x))
        assert all(torch.equal(value, values[name]) for name, value in layer.state_dict().items())
    with torch.no_grad():
        twin.up.weight.mul_(2.0)
    assert not torch.equal(twin(x), made(x))
    frozen = in_float8(Layer(), gathered=True)
    frozen.load_state_dict(values)
    frozen.up.weight.requires_grad_(False)
    bmt_zero.shard(frozen, 3)
    assert torch.equal(frozen(x), plain(x))
    frozen(x).sum().backward()
    assert frozen.up.weight.grad is None
    assert frozen.down.weight.grad is not None


@pytest.mark.ranks(2)
def test_a_model_of_hugging_face_under_the_wrapper(ctx: ParallelContext, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(gathered: bool) -> LlamaForCausalLM:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=16, **sizes))
        in_float8(model.model.layers, gathered)
        return model.train()

    plain, model = make(False), bmt_zero.BMTrainModelWrapper(make(True))
    start = copy.deepcopy(plain.state_dict())
    assert list(model.state_dict()) == list(start)
    for step in range(5):
        ids = [torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(2 * step + rank)) for rank in (0, 1)]
        for each, mine in ((plain, ids), (model, [ids[ctx.rank]])):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            sum(each(input_ids=batch, labels=batch).loss / 2 for batch in mine).backward()
            optimizer.step()
            optimizer.zero_grad()
    bmt_zero.save(model, tmp_path / "model.safetensors")
    ctx.world.barrier()
    loaded = make(False)
    bmt_zero.load(loaded, tmp_path / "model.safetensors")
    for name, wanted in plain.state_dict().items():
        assert (model.state_dict()[name] - wanted).norm() <= 1e-5 * (wanted - start[name]).norm(), name
        assert (loaded.state_dict()[name] - wanted).norm() <= 1e-5 * (wanted - start[name]).norm(), name


@pytest.mark.ranks(2)
def test_ranks_must_agree_on_float8(ctx: ParallelContext) -> None:
    layer = Layer()
    if ctx.rank == 0:
        in_float8(layer, gathered=True)
    with pytest.raises(RuntimeError, match="float8_e4m3fn"):
        bmt_zero.shard(layer, 3)


def test_the_example_trains_in_float8(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for i in range(10):
        (tmp_path / "text" / f"{i}.txt").write_text("".join(f"line {j} of file {i}\n" for j in range(200)))
    losses = []
    for flags in ([], ["--float8"], ["--float8", "--tp", "2", "--context-parallel"]):
        out = tmp_path / f"run{len(losses)}"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += [str(EXAMPLE / "train.py"), *EXAMPLE_FLAGS, "--out", str(out), *flags]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        result = subprocess.run(command, cwd=tmp_path, env=env, timeout=120, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses.append([record["eval_loss"] for record in records if "eval_loss" in record])
    plain, *others = losses
    assert plain[-1] < 0.7 * plain[0]
    for found in others:
        assert found != plain
        assert found == pytest.approx(plain, rel=0.03)
