"""Random models that tensor-parallel ranks share, for ``test_random_tensor_parallel.py``.

The models are plain PyTorch. ``plan_of`` draws a plan for one, and ``with_parallel_layers`` replaces the layers that
the plan names by those of bmt_tp.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from random_programs import freeze_some
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bmt_tp import (
    ColumnParallelLinear,
    RowParallelLinear,
    VPEmbedding,
    column_parallel,
    gather_along,
    sequence_parallel,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)

WIDTH, HEADS, FEATURES, EXPERTS, VOCAB = 12, 6, 18, 6, 18  # 2 and 3 tensor-parallel ranks divide them


@dataclass
class Kind:
    """What a model is drawn for.

    Attributes:
        planned: a plan shards it; otherwise bmt_tp's layers replace its own.
        sequence: activations are split along the sequence.
        ranks: the number of tensor-parallel ranks.
        shares: two layers have one norm.
        single: single precision.
    """

    planned: bool
    sequence: bool
    ranks: int
    shares: bool = False
    single: bool = False


class LoRA(nn.Module):
    """A frozen layer with an adapter, with the names of peft."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class MLP(nn.Module):
    """``styles`` are those of its modules in a plan, with a ``+`` where the input may be a part of the sequence."""

    def __init__(self, draw: random.Random, d: Kind) -> None:
        super().__init__()
        self.gated, bias = draw.random() < 0.3, draw.random() < 0.7
        self.up: nn.Module = nn.Linear(WIDTH, FEATURES * (1 + self.gated), bias=bias)
        self.down: nn.Module = nn.Linear(FEATURES, WIDTH, bias=draw.random() < 0.7)
        self.writes, self.scale = draw.random() < 0.3, Scale() if draw.random() < 0.3 else None
        if draw.random() < 0.3:
            self.unused = nn.Linear(3, 2)
        self.styles = {"up": "packed_colwise:2+" if self.gated else "colwise+", "down": "rowwise+", "scale": "sequence"}
        if not d.sequence and not self.gated and draw.random() < 0.3:
            self.styles |= {"up": "colwise_gather_output", "down": "rowwise_split_input"}
        for name in ("up", "down"):
            if d.planned and not self.gated and draw.random() < 0.25:
                setattr(self, name, LoRA(getattr(self, name)))
                base, first = self.styles.pop(name), f"{name}.lora_A.default"
                own, other = (first, f"{name}.lora_B.default")[:: -1 if "col" in base else 1]
                self.styles |= {f"{name}.base_layer": base, own: base, other: "sequence"}

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.gated:
            gate, y = y.chunk(2, -1)
            y = y * torch.sigmoid(gate)
        y = self.down(torch.tanh(y))
        y = y.mul_(0.9) if self.writes else y
        return y if self.scale is None else self.scale(y)


class Attention(nn.Module):
    def __init__(self, draw: random.Random, d: Kind) -> None:
        super().__init__()
        kinds = ["ulysses", "gathered"] if d.sequence and d.planned else []
        self.kind = draw.choice(["fused", "apart", "apart", *kinds])
        counts = [HEADS, d.ranks, 1] if d.planned else [HEADS, d.ranks]
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.num_key_value_heads = draw.choice(counts) if self.kind != "fused" else HEADS
        self.num_key_value_groups = HEADS // self.num_key_value_heads
        self.styles = {"o": "rowwise+"}
        bias, size = draw.random() < 0.5, self.num_key_value_heads * self.head_dim
        # The softmax ignores a bias of the keys, whose gradient is what rounding leaves.
        if self.kind == "fused":
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=bias and not d.single)
            self.styles["qkv"] = "packed_colwise:3+"
        else:
            self.q, self.k = nn.Linear(WIDTH, WIDTH, bias=bias), nn.Linear(WIDTH, size, bias=False)
            self.v = nn.Linear(WIDTH, size, bias=bias)
            self.styles |= dict.fromkeys("qkv", "colwise+")
        self.o = nn.Linear(WIDTH, WIDTH)
        self.q_norm = nn.RMSNorm(self.head_dim) if draw.random() < 0.3 and self.kind != "ulysses" else nn.Identity()
        self.sinks = None
        if d.planned and self.kind != "ulysses" and draw.random() < 0.3:
            self.sinks = nn.Parameter(torch.rand(HEADS))
            self.styles["sinks"] = "colwise"
        self.per_head = not isinstance(self.q_norm, nn.Identity)
        if self.kind == "ulysses":
            self.styles = {"": "ulysses"}
        elif self.kind == "gathered":
            self.styles |= {"": "sequence_gather", **dict.fromkeys("qkv", "colwise")}

    def projections(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).chunk(3, -1) if self.kind == "fused" else (self.q(x), self.k(x), self.v(x))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projections(x)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        q = self.q_norm(q)
        k, v = (t.repeat_interleave(self.num_key_value_groups, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y if self.sinks is None else y * self.sinks[:, None, None]
        return self.o(y.transpose(1, 2).flatten(2))


class ParallelAttention(Attention):
    def projections(self, x: Tensor) -> tuple[Tensor, ...]:
        return super().projections(x) if self.kind == "fused" else column_parallel(x, [self.q, self.k, self.v])


class Experts(nn.Module):
    def __init__(self, biased: bool) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, FEATURES, WIDTH) * 0.3)
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, FEATURES) * 0.1) if biased else None
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, FEATURES) * 0.3)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden)
        for expert in index.unique().tolist():
            tokens, place = (index == expert).nonzero(as_tuple=True)
            y = hidden[tokens] @ self.up[expert].t()
            y = torch.tanh(y if self.up_bias is None else y + self.up_bias[expert]) @ self.down[expert].t()
            result = result.index_add(0, tokens, y * weights[tokens, place, None])
        return result


class Mixture(nn.Module):
    def __init__(self, draw: random.Random, d: Kind) -> None:
        super().__init__()
        biased = draw.random() < 0.5
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts(biased)
        self.count = draw.choice([1, 2])
        if d.sequence or draw.random() < 0.5:
            self.styles = {"experts": "expert_parallel+", "router": "sequence"}
        else:
            self.styles = {"experts": "experts", "experts.up": "colwise", "experts.down": "rowwise"}
            self.styles |= {"experts.up_bias": "colwise"} if biased else {}

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x.flatten(0, 1)).softmax(-1).topk(self.count)
        return self.experts(x.flatten(0, 1), index, weights).view_as(x)


class Layer(nn.Module):
    """``x + inner(norm(x))``."""

    def __init__(self, draw: random.Random, d: Kind) -> None:
        super().__init__()
        kinds = [MLP, MLP, Attention, *([Mixture] if d.planned else [])]
        self.norm, self.inner, self.end = nn.LayerNorm(WIDTH), draw.choice(kinds)(draw, d), nn.Identity()
        self.recomputes = draw.random() < 0.2

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone() if not self.recomputes else x
        y = self.norm(x)
        return self.end(x + (checkpoint(self.inner, y, use_reentrant=False) if self.recomputes else self.inner(y)))


class Head(nn.Module):
    """The loss; without a projection of its own the scores are those of the embedding."""

    def __init__(self, draw: random.Random, d: Kind) -> None:
        super().__init__()
        self.kind = draw.choice(["scores", "split scores", "fused"])
        self.smoothing = draw.choice([0.0, 0.1])
        self.out = nn.Linear(WIDTH, VOCAB, bias=draw.random() < 0.3)
        self.sequence = False

    def forward(self, x: Tensor, targets: Tensor, embedding: nn.Module) -> Tensor:
        return F.cross_entropy(self.out(x).flatten(0, 1), targets.flatten(), label_smoothing=self.smoothing)


class ParallelHead(Head):
    def forward(self, x: Tensor, targets: Tensor, embedding: nn.Module) -> Tensor:
        smoothing: Any = {"label_smoothing": self.smoothing}
        if self.kind == "fused":
            own = self.out or embedding
            bias = getattr(own, "bias", None)
            options = {"gather_input": self.sequence, **smoothing}
            return vocab_parallel_linear_cross_entropy(x, own.weight, targets, bias, **options)
        scores = embedding(x, projection=True) if self.out is None else self.out(x)
        if self.kind == "split scores":
            return vocab_parallel_cross_entropy(scores, targets, **smoothing)
        return F.cross_entropy(gather_along(scores, -1).flatten(0, 1), targets.flatten(), **smoothing)


class Model(nn.Module):
    def __init__(self, draw: random.Random, d: Kind) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH, padding_idx=3 if d.planned and draw.random() < 0.3 else None)
        count = draw.randint(1, 3)
        self.layers = nn.ModuleList(Layer(draw, d) for _ in range(count))
        self.order = [*range(count), *([count - 1] if not d.sequence and draw.random() < 0.25 else [])]
        if d.shares and count > 1:
            self.layers[1].norm = self.layers[0].norm
        self.norm, self.head = nn.LayerNorm(WIDTH), Head(draw, d)
        self.tied = draw.random() < 0.4
        if self.tied:
            self.head.out = nn.Linear(WIDTH, VOCAB, bias=False)
            self.head.out.weight = self.embedding.weight
        freeze_some(self.layers, draw)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids)
        for index in self.order:
            x = self.layers[index](x)
        return self.head(self.norm(x), targets, self.embedding)


def plan_of(model: Model, draw: random.Random, d: Kind) -> dict[str, str]:
    """A plan for a drawn model. With ``d.sequence``, activations are split in all layers, or from the second on."""
    plan: dict[str, str] = {}
    first = 0 if d.shares or not d.planned else draw.randrange(len(model.layers))
    for number, layer in enumerate(model.layers):
        within = d.sequence and number >= first
        styles = {"norm": "sequence", **{f"inner.{n}".rstrip("."): s for n, s in layer.inner.styles.items()}}
        names = {name for name, _ in layer.named_modules()} | {name for name, _ in layer.named_parameters()}
        for name, style in styles.items():
            of_part = style in ("sequence", "ulysses", "sequence_gather")
            if name in names and (within or not of_part):
                plan[f"layers.{number}.{name}"] = style.replace("+", "+sequence" if within else "")
        if getattr(layer.inner, "per_head", False) and not (
            d.planned and draw.random() < 0.5
        ):  # or parallelize adds it
            plan[f"layers.{number}.inner.q_norm"] = "sequence"  # its gradient is that of this rank's heads
    if d.planned:
        plan["embedding"] = "vocab" if model.tied else draw.choice(["vocab", "embedding_colwise", "replicate"])
        if d.sequence and first == 0 and plan["embedding"] == "vocab" and draw.random() < 0.5:
            plan["embedding"] = "vocab+sequence"
        elif d.sequence:
            plan[f"layers.{first}"] = "sequence_start"
        if d.sequence:
            plan |= {draw.choice(["norm", f"layers.{len(model.layers) - 1}.end"]): "sequence_end"}
        plan["head.out"] = "colwise_gather_output" if model.tied or draw.random() < 0.7 else "replicate"
    elif d.sequence:
        plan["norm"] = "sequence"
    return plan


def with_parallel_layers(model: Model, plan: dict[str, str], sequence: bool) -> Model:
    """The model with bmt_tp's layers in place of those that the plan names."""
    for name, style in plan.items():
        kind, module = style.partition("+")[0], model.get_submodule(name)
        if kind == "sequence":
            sequence_parallel(module)
            continue
        assert isinstance(module, nn.Linear)
        sizes: Any = module.in_features, module.out_features, module.bias is not None, module.weight.dtype
        if "colwise" in kind:
            gathers, parts = kind == "colwise_gather_output", int(kind.partition(":")[2] or 1)
            new: nn.Module = ColumnParallelLinear(*sizes, gathers, sequence, parts=parts)
        else:
            new = RowParallelLinear(*sizes, split_input=kind == "rowwise_split_input", all_reduce_output=not sequence)
        model.set_submodule(name, new)
    for layer in model.layers:
        if isinstance(layer.inner, Attention):
            layer.inner.__class__ = ParallelAttention
    head, dtype = model.head, model.embedding.weight.dtype
    bias = head.out.bias is not None
    model.embedding = VPEmbedding(VOCAB, WIDTH, dtype, sequence_parallel=sequence)
    head.__class__, head.sequence = ParallelHead, sequence
    head.out = None if model.tied else ColumnParallelLinear(WIDTH, VOCAB, bias, dtype, gather_input=sequence)
    return model
