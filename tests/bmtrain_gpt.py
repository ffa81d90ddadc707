"""A GPT as scripts for BMTrain 1.0 write it, its layers made of DistributedParameters; and one in plain PyTorch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bmtrain as bmt
from bmtrain import inspect
from bmtrain.block_layer import Block, TransformerBlockList
from bmtrain.global_var import config
from bmtrain.layer import DistributedModule
from bmtrain.nn.column_parallel_linear import ColumnParallelLinear
from bmtrain.nn.parallel_embedding import VPEmbedding
from bmtrain.nn.row_parallel_linear import RowParallelLinear
from bmtrain.parameter import DistributedParameter, ParameterInitializer
from bmtrain.pipe_layer import PipelineTransformerBlockList

VOCABULARY, WIDTH, HEADS, INNER, LAYERS, LENGTH = 26, 12, 4, 20, 3, 8


class Linear(DistributedModule):
    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__()
        self.weight = DistributedParameter(
            torch.empty(dim_out, dim_in), init_method=ParameterInitializer(nn.init.normal_, mean=0.0, std=0.2)
        )
        self.bias = DistributedParameter(torch.empty(dim_out), init_method=nn.init.zeros_)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Layernorm(DistributedModule):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = DistributedParameter(torch.empty(dim), init_method=nn.init.ones_)
        self.bias = DistributedParameter(torch.empty(dim), init_method=nn.init.zeros_)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias)


class Embedding(DistributedModule):
    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.weight = DistributedParameter(torch.empty(count, dim), init_method=nn.init.normal_)

    def forward(self, x: Tensor, projection: bool = False) -> Tensor:
        return F.linear(x, self.weight) if projection else F.embedding(x, self.weight)


class Attention(DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        if config["tp_size"] > 1:
            self.q, self.k, self.v = (ColumnParallelLinear(WIDTH, WIDTH, gather_input=False) for _ in range(3))
            self.out = RowParallelLinear(WIDTH, WIDTH)
        else:
            self.q, self.k, self.v, self.out = (Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if config["tp_size"] > 1:
            weight = torch.cat([self.q.weight, self.k.weight, self.v.weight])
            bias = torch.cat([self.q.bias, self.k.bias, self.v.bias])
            q, k, v = bmt.nn.OpParallelLinear.apply(x, weight, bias, True, False, False, None).chunk(3, dim=-1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        return self.out(attend(q, k, v, mask))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (y.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for y in (q, k, v))
    scores = (q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)).masked_fill(~mask[:, None], -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Feedforward(DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        if config["tp_size"] > 1:
            self.w_in, self.w_out = ColumnParallelLinear(WIDTH, INNER), RowParallelLinear(INNER, WIDTH)
        else:
            self.w_in, self.w_out = Linear(WIDTH, INNER), Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_out(F.gelu(self.w_in(x)))


class Encoder(DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.ln_attn, self.attn = Layernorm(WIDTH), Attention()
        self.ln_ff, self.ff = Layernorm(WIDTH), Feedforward()

    def forward(self, hidden: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
        inspect.record_tensor(hidden, "hidden")
        hidden = hidden + self.attn(self.ln_attn(hidden), mask)
        return hidden + self.ff(self.ln_ff(hidden))


class GPT(DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        if config["tp_size"] > 1:
            self.word_emb = VPEmbedding(VOCABULARY, WIDTH, dtype=torch.float, gather_input=True)
        else:
            self.word_emb = Embedding(VOCABULARY, WIDTH)
        self.pos_emb = Embedding(LENGTH, WIDTH)
        if config["pipe_size"] > 1:
            self.transformers = PipelineTransformerBlockList([Block(Encoder(), mode="PIPE") for _ in range(LAYERS)])
        else:
            self.transformers = TransformerBlockList([Block(Encoder()) for _ in range(LAYERS)])
        self.layernorm = Layernorm(WIDTH)
        if config["tp_size"] > 1:
            # What differs: modules that compute on a part of the sequence say so.
            for module in [*self.modules()]:
                if isinstance(module, Layernorm) or module is self.pos_emb:
                    bmt.nn.sequence_parallel(module)

    def forward(self, ids: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
        mask_2d = mask[:, None, :] & mask[:, :, None] & (pos[:, None, :] <= pos[:, :, None])
        mask_2d = mask_2d | torch.eye(LENGTH, dtype=torch.bool, device=mask.device)  # no row without any
        if config["tp_size"] > 1:
            ids = ids.chunk(config["tp_size"], dim=1)[config["tp_rank"]]
            pos = pos.chunk(config["tp_size"], dim=1)[config["tp_rank"]]
        out = self.pos_emb(pos) + self.word_emb(ids)
        out = self.transformers(out, mask_2d, None)
        out = self.layernorm(out)
        logits = self.word_emb(out, projection=True)
        inspect.record_tensor(logits, "logits")
        return logits


# --- the reference --------------------------------------------------------------------------------


class PlainLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_attn = nn.LayerNorm(WIDTH)
        self.attn = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("q", "k", "v", "out")})
        self.ln_ff = nn.LayerNorm(WIDTH)
        self.ff = nn.ModuleDict({"w_in": nn.Linear(WIDTH, INNER), "w_out": nn.Linear(INNER, WIDTH)})

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.ln_attn(x)
        x = x + self.attn["out"](attend(self.attn["q"](y), self.attn["k"](y), self.attn["v"](y), mask))
        return x + self.ff["w_out"](F.gelu(self.ff["w_in"](self.ln_ff(x))))


class PlainGPT(nn.Module):
    """Keeps what it has recorded in ``recorded``."""

    def __init__(self) -> None:
        super().__init__()
        self.word_emb, self.pos_emb = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.transformers = nn.ModuleList(PlainLayer() for _ in range(LAYERS))
        self.layernorm = nn.LayerNorm(WIDTH)
        self.recorded: list[tuple[str, Tensor]] = []

    def forward(self, ids: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
        mask_2d = mask[:, None, :] & mask[:, :, None] & (pos[:, None, :] <= pos[:, :, None])
        mask_2d = mask_2d | torch.eye(LENGTH, dtype=torch.bool)
        x = self.pos_emb(pos) + self.word_emb(ids)
        self.recorded = []
        for index, layer in enumerate(self.transformers):
            self.recorded.append((f"{index}.hidden", x))
            x = layer(x, mask_2d)
        x = F.linear(self.layernorm(x), self.word_emb.weight)
        self.recorded.append(("0.logits", x))
        for _, tensor in self.recorded:
            tensor.retain_grad()
        return x
