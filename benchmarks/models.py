"""A plain PyTorch GPT for the benchmarks: nothing in it knows that it will be sharded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmt_kernels import linear_cross_entropy


@dataclass(frozen=True)
class GPTShape:
    layers: int = 8
    hidden: int = 512
    heads: int = 8
    vocab: int = 8192
    positions: int = 1024

    def __str__(self) -> str:
        words = f"{self.layers} layers, hidden {self.hidden}, {self.heads} heads, vocabulary {self.vocab}"
        return f"{words}, {self.parameters / 1e6:.1f} M parameters"

    @property
    def parameters(self) -> int:
        layer = 12 * self.hidden**2 + 13 * self.hidden
        return self.layers * layer + (2 * self.vocab + self.positions + 2) * self.hidden

    def flops_per_token(self, length: int) -> float:
        """Of a training step on sequences of ``length`` tokens, without recomputation (PaLM, arXiv:2204.02311, app. B).

        Matrices of the layers and the head take 6 FLOPs per parameter, attention 12 per layer, channel and position.
        """
        matrices = 12 * self.layers * self.hidden**2 + self.vocab * self.hidden
        return 6.0 * matrices + 12.0 * self.layers * self.hidden * length


class Layer(nn.Module):
    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1 = nn.LayerNorm(shape.hidden)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.out = nn.Linear(shape.hidden, shape.hidden)
        self.norm_2 = nn.LayerNorm(shape.hidden)
        self.up = nn.Linear(shape.hidden, 4 * shape.hidden)
        self.down = nn.Linear(4 * shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A GPT; with ``fused_loss`` head and loss are one function that holds no logits."""

    def __init__(self, shape: GPTShape, fused_loss: bool = False) -> None:
        super().__init__()
        self.fused_loss = fused_loss
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Embedding(shape.positions, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Token numbers (B, S) and targets (B, S) → the mean loss, shape ()."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        if self.fused_loss:
            return linear_cross_entropy(x, self.head.weight, targets)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())
