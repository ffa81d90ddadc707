"""What code bases on BMTrain do (CPM-Bee, ModelCenter, OpenDelta, BMCook) trains as in plain PyTorch.

The models are written once, for a :class:`Library`: BMTrain's names, or those of plain PyTorch.
"""

from __future__ import annotations

import copy
import math
import types
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bmtrain as bmt

VOCABULARY, WIDTH, HEADS, INNER, LAYERS, LENGTH, BUCKETS = 23, 12, 3, 20, 3, 7, 9
STEPS, TOLERANCE, EPS = 8, 1e-5, 1e-4


@dataclass
class Library:
    """What a model is made of."""

    module: type[nn.Module]
    parameter: Callable[..., nn.Parameter]
    block: Callable[[nn.Module], nn.Module]
    block_list: Callable[[list[nn.Module]], nn.Module]


class PlainList(nn.ModuleList):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        for layer in self:
            x = layer(x, *args)
        return x


BMT = Library(bmt.DistributedModule, bmt.DistributedParameter, bmt.CheckpointBlock, bmt.TransformerBlockList)
PLAIN = Library(nn.Module, lambda data, init_method=None: nn.Parameter(data), lambda module: module, PlainList)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    dtype = hidden.dtype
    variance = hidden.to(torch.float32).pow(2).mean(dim=-1, keepdim=True)
    hidden = (hidden * torch.rsqrt(variance + eps)).to(dtype)
    return hidden * weight


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    rms_norm = torch.jit.script(rms_norm)


def model_of(library: Library) -> nn.Module:
    normal = bmt.ParameterInitializer(nn.init.normal_, mean=0.0, std=0.3)

    class Linear(library.module):  # type: ignore[name-defined,misc]
        def __init__(self, dim_in: int, dim_out: int) -> None:
            super().__init__()
            self.in_features, self.out_features = dim_in, dim_out
            self.weight = library.parameter(torch.empty(dim_out, dim_in), init_method=normal)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight) / math.sqrt(self.in_features) * 3

    class Norm(library.module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = library.parameter(torch.full((WIDTH,), 1.0))

        def forward(self, x: Tensor) -> Tensor:
            assert x.size(-1) == WIDTH
            return rms_norm(x, self.weight, 1e-6)

    class Attention(library.module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.project_q, self.project_k, self.project_v = (Linear(WIDTH, WIDTH) for _ in range(3))
            self.attention_out = Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, mask: Tensor, bias: Tensor, past: Any, use_cache: bool) -> Any:
            q, k, v = (
                each(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
                for each in (self.project_q, self.project_k, self.project_v)
            )
            if past is not None:
                k, v = torch.cat([past[0], k], dim=-2), torch.cat([past[1], v], dim=-2)
            scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS) + bias
            scores = scores.masked_fill(~mask[:, None], -math.inf).softmax(-1).masked_fill(~mask[:, None], 0)
            out = self.attention_out((scores @ v).transpose(1, 2).flatten(2))
            return (out, (k, v)) if use_cache else out

    class Layer(library.module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm_attention, self.attention = Norm(), Attention()
            self.norm_ffn, self.w_in, self.w_out = Norm(), Linear(WIDTH, INNER), Linear(INNER, WIDTH)

        def forward(
            self, hidden: Tensor, mask: Tensor, bias: Tensor, past_key_value: Any = None, use_cache: bool = False
        ) -> Any:
            x = self.attention(self.norm_attention(hidden), mask, bias, past_key_value, use_cache)
            x, present = x if use_cache else (x, None)
            hidden = (hidden + x) / 1.05
            hidden = (hidden + self.w_out(F.gelu(self.w_in(self.norm_ffn(hidden))))) / 1.05
            return (hidden, present) if use_cache else hidden

    class Encoder(library.module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = library.block_list([library.block(Layer()) for _ in range(LAYERS)])
            self.output_norm = Norm()

        def forward(self, hidden: Tensor, mask: Tensor, bias: Tensor, use_cache: bool = False, past: Any = None) -> Any:
            if not use_cache:
                return self.output_norm(self.layers(hidden, mask, bias))
            with torch.no_grad():
                present = []
                for i, module in enumerate(self.layers):
                    hidden = module(hidden, mask, bias, past_key_value=past[i] if past else None, use_cache=use_cache)
                    present.append(hidden[1])
                    hidden = hidden[0]
                return self.output_norm(hidden), present

    class Embedding(library.module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = library.parameter(torch.empty(VOCABULARY, WIDTH), init_method=nn.init.normal_)

        def forward(self, ids: Tensor, subscript: Tensor) -> Tensor:
            return F.embedding(ids, self.weight) * torch.cos(subscript[..., None] / 10)

        def projection(self, x: Tensor, table: Tensor) -> Tensor:
            scores = F.linear(x / math.sqrt(WIDTH), self.weight)
            return torch.cat([scores, F.linear(x / math.sqrt(WIDTH), table)], dim=-1)

    class PositionBias(library.module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.relative_attention_bias = library.parameter(torch.empty(BUCKETS, HEADS), init_method=normal)

        def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
            buckets = (queries[:, None] - keys[None]).clamp(-(BUCKETS // 2), BUCKETS // 2) + BUCKETS // 2
            return F.embedding(buckets, self.relative_attention_bias).permute(2, 0, 1).contiguous()

    class Model(library.module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.input_embedding, self.position_bias = Encoder(), Embedding(), PositionBias()

        def forward(self, ids: Tensor, length: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                positions = torch.arange(ids.shape[1], device=ids.device)
                mask = (positions < length[:, None])[:, None] & (positions[:, None] >= positions)
            hidden = self.input_embedding(ids, positions)
            hidden = self.encoder(hidden, mask, self.position_bias(positions, positions))
            extra = self.input_embedding(table, torch.arange(len(table), device=ids.device))
            return self.input_embedding.projection(hidden, extra), hidden

        def generate(self, ids: Tensor, table: Tensor, count: int) -> Tensor:
            """Ids of the most likely tokens, with a cache of keys and values."""
            past, given, chosen = None, ids, []
            with torch.inference_mode():
                extra = self.input_embedding(table, torch.arange(len(table), device=ids.device))
            for _ in range(count):
                total = (0 if past is None else past[0][0].shape[-2]) + given.shape[1]
                keys = torch.arange(total, device=ids.device)
                queries = keys[total - given.shape[1] :]
                with torch.inference_mode():
                    mask = (queries[:, None] >= keys).expand(len(ids), -1, -1)
                    hidden = self.input_embedding(given, queries)
                    bias = self.position_bias(queries, keys)
                    hidden, past = self.encoder(hidden, mask, bias, True, past)
                    scores = self.input_embedding.projection(hidden[:, -1:], extra)
                chosen.append(scores)
                given = scores[..., :VOCABULARY].argmax(-1)
            return torch.cat(chosen, dim=1)

    return Model()


def pair() -> tuple[nn.Module, nn.Module]:
    """The same model on the ranks and in plain PyTorch."""
    bmt.init_distributed(seed=0)
    model = model_of(BMT)
    bmt.init_parameters(model)
    plain = model_of(PLAIN)
    plain.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    return model, plain


def batch(step: int, rank: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    text = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator)
    length = torch.randint(2, LENGTH + 1, (2,), generator=generator)
    targets = text[:, 1:].masked_fill(torch.arange(LENGTH) >= length[:, None], -100)
    return (text[:, :-1], length, torch.randint(0, VOCABULARY, (3,), generator=generator)), targets


Loss = Callable[[nn.Module, tuple[Tensor, Tensor, Tensor], Tensor], Tensor]


def cross_entropy(model: nn.Module, inputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    logits, _ = model(*inputs)
    loss_func = bmt.loss.FusedCrossEntropy(ignore_index=-100)
    return loss_func(logits.view(-1, logits.size(-1)), targets.reshape(-1))


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def managed(model: nn.Module) -> bmt.optim.OptimManager:
    optimizer = bmt.optim.AdamOffloadOptimizer(trainable(model), weight_decay=0.01, eps=EPS)
    scheduler = bmt.lr_scheduler.Noam(optimizer, start_lr=2e-2, warmup_iter=2, end_iter=None, num_iter=0)
    manager = bmt.optim.OptimManager(
        loss_scale=2.0**20, loss_scale_steps=3, loss_scale_factor=2, max_loss_scale=2.0**21, min_loss_scale=1
    )
    manager.add_optimizer(optimizer, scheduler)
    return manager


def train(model: nn.Module, manager: bmt.optim.OptimManager, steps: Iterable[int], loss_of: Loss) -> None:
    device = bmt.config["device"]
    for step in steps:
        inputs, targets = batch(step, bmt.rank())
        loss = loss_of(model, tuple(x.to(device) for x in inputs), targets.to(device))
        manager.zero_grad()
        manager.backward(loss if step != 3 else loss * float("inf"))
        manager.clip_grad_norm(manager.optimizers[0].param_groups, max_norm=1.0)
        manager.step()


def train_plain(plain: nn.Module, loss_of: Loss) -> None:
    optimizer = torch.optim.AdamW(trainable(plain), lr=0.0, weight_decay=0.01, eps=EPS)
    taken = 0
    for step in range(STEPS):
        if step == 3:  # overflows
            continue
        optimizer.zero_grad()
        size = bmt.world_size()
        sum(loss_of(plain, *batch(step, rank)) for rank in range(size)).div(size).backward()
        torch.nn.utils.clip_grad_norm_(trainable(plain), 1.0)
        optimizer.param_groups[0]["lr"] = 2e-2 * (taken / 2**1.5 if taken < 2 else 1 / math.sqrt(taken))
        optimizer.step()
        taken += 1


def check_updates(model: nn.Module, plain: nn.Module, before: dict[str, Tensor]) -> None:
    after, wanted = model.state_dict(), plain.state_dict()
    assert list(after) == list(wanted)
    error = torch.cat([(after[name].cpu() - wanted[name]).flatten() for name in wanted]).norm()
    update = torch.cat([(wanted[name] - before[name]).flatten() for name in wanted]).norm()
    assert error <= TOLERANCE * update


@pytest.mark.ranks(1, 2, 4, init=False)
def test_cpm_bee() -> None:
    """An embedding that is used twice and projects, scripted norms, a bias for all layers, a loss scale; a cache."""
    model, plain = pair()
    before = copy.deepcopy(plain.state_dict())
    train(model, managed(model), range(STEPS), cross_entropy)
    train_plain(plain, cross_entropy)
    check_updates(model, plain, before)
    (ids, _, table), _ = batch(0, 0)
    found = model.generate(ids.to(bmt.config["device"]), table.to(bmt.config["device"]), 4).cpu()
    assert torch.allclose(found, plain.generate(ids, table, 4), rtol=1e-4, atol=1e-4)


@pytest.mark.ranks(1, 2, 4, init=False)
def test_files_of_each_rank(tmp_path: Path) -> None:
    """The optimizer's state of each rank in a file of its own."""
    model, plain = pair()
    before = copy.deepcopy(plain.state_dict())
    manager = managed(model)
    train(model, manager, range(STEPS // 2), cross_entropy)
    folder = Path(bmt.store.broadcast_object(str(tmp_path), bmt.config["comm"]))
    bmt.save(model, str(folder / "model.pt"))
    own = folder / f"optimizer.rank-{bmt.rank()}.opt"
    torch.save(manager.optimizers[0].state_dict(), own)
    torch.save(manager.lr_schedulers[0].state_dict(), folder / f"scheduler-{bmt.rank()}.pt")
    bmt.synchronize()

    again = model_of(BMT)
    bmt.load(again, str(folder / "model.pt"))
    later = managed(again)
    later.optimizers[0].load_state_dict(torch.load(own, weights_only=True))
    later.lr_schedulers[0].load_state_dict(torch.load(folder / f"scheduler-{bmt.rank()}.pt", weights_only=True))
    train(again, later, range(STEPS // 2, STEPS), cross_entropy)
    train_plain(plain, cross_entropy)
    check_updates(again, plain, before)


class LowRank(nn.Module):
    def __init__(self, weight_shape: tuple[int, int]) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.randn(2, weight_shape[1]))
        self.lora_B = nn.Parameter(torch.randn(weight_shape[0], 2) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.lora_A.t() @ self.lora_B.t() / 2


def insert_lora(model: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Beside the queries and values of each layer; everything else is frozen."""
    torch.manual_seed(7)
    for layer in model.encoder.layers:
        for name in ("project_q", "project_v"):
            module = getattr(layer.attention, name)
            module.lora = wrap(LowRank((module.out_features, module.in_features)))

            def forward(module: nn.Module, x: Tensor, before: Callable[[Tensor], Tensor]) -> Tensor:
                return before(x) + module.lora(x)

            before = module.forward
            module.forward = types.MethodType(lambda self, x, before=before: forward(self, x, before), module)
    for name, param in model.named_parameters():
        param.requires_grad_("lora" in name)


@pytest.mark.ranks(1, 2, 4, init=False)
def test_lora_in_finished_blocks() -> None:
    """Layers are inserted into checkpointed Blocks, each in a wrapper of its own."""
    model, plain = pair()
    insert_lora(model, bmt.BMTrainModelWrapper)
    insert_lora(plain, lambda module: module)
    plain.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    before = copy.deepcopy(plain.state_dict())
    assert len(trainable(model)) == 4 * LAYERS
    train(model, managed(model), range(STEPS), cross_entropy)
    train_plain(plain, cross_entropy)
    check_updates(model, plain, before)
    frozen = model.state_dict()
    assert all(torch.equal(frozen[name].cpu(), value) for name, value in before.items() if "lora" not in name)


def patch(model: nn.Module, names: Iterable[str], suffix: str, record: Callable[..., None]) -> None:
    """The forwards of these modules record what they return."""
    for name, module in model.named_modules():
        if name in names:
            module.forward_old = module._module.forward if isinstance(module, bmt.CheckpointBlock) else module.forward
            module.inspect_name = name + suffix

            def forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                x = self.forward_old(x, *args, **kwargs)
                record(x, self.inspect_name)
                return x

            module.forward = types.MethodType(forward, module)


@pytest.mark.ranks(1, 2, 4, init=False)
def test_distillation() -> None:
    """A teacher and a student record hidden states, which the loss compares."""
    student, plain_student = pair()
    teacher = model_of(BMT)
    bmt.init_parameters(teacher)
    plain_teacher = model_of(PLAIN)
    plain_teacher.load_state_dict({name: value.cpu() for name, value in teacher.state_dict().items()})
    names = ["encoder.layers.0", "encoder.layers.2", "encoder.output_norm", "encoder.layers.1.attention.attention_out"]
    kept: dict[str, Tensor] = {}
    for model, suffix in ((student, "_student"), (teacher, "_teacher")):
        patch(model, names, suffix, bmt.inspect.record_tensor)
    for model, suffix in ((plain_student, "_student"), (plain_teacher, "_teacher")):
        patch(model, names, suffix, lambda x, name: kept.update({name: x}))

    def distance(records: dict[str, Tensor]) -> Tensor:
        total = 0
        for name in names:
            mine, theirs = records[name + "_student"], records[name + "_teacher"].detach()
            mine, theirs = (x / x.norm(dim=-1).mean() for x in (mine, theirs))
            total = total + (mine - theirs).square().mean()
        return total * 10

    def loss(model: nn.Module, inputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
        if model is plain_student:
            value = cross_entropy(model, inputs, targets)
            with torch.no_grad():
                logits, _ = plain_teacher(*inputs)
            records = dict(kept)
        else:
            with bmt.inspect.inspect_tensor() as inspector:
                value = cross_entropy(model, inputs, targets)
                with torch.no_grad():
                    logits, _ = teacher(*inputs)
            records = {record["name"]: record["tensor"] for record in inspector._summary}
        return value + distance(records) + logits.mean() * 0

    before = copy.deepcopy(plain_student.state_dict())
    train(student, managed(student), range(STEPS), loss)
    train_plain(plain_student, loss)
    check_updates(student, plain_student, before)
