"""A plain PyTorch GPT, and presets of its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTSizes:
    """V ``vocab``, L ``layers``, H ``hidden``; at most ``sequence`` tokens."""

    vocab: int
    sequence: int
    layers: int
    heads: int
    hidden: int


PRESETS = {
    "small-cpu": GPTSizes(4096, 128, 2, 4, 128),
    "gpt2": GPTSizes(50257, 1024, 12, 12, 768),
    "gpt2-medium": GPTSizes(50257, 1024, 24, 16, 1024),
    "gpt2-large": GPTSizes(50257, 1024, 36, 20, 1280),
    "gpt2-xl": GPTSizes(50257, 1024, 48, 25, 1600),
    "gpt-6.7b": GPTSizes(50257, 2048, 32, 32, 4096),
    "13b": GPTSizes(50257, 512, 40, 128, 5120),
    "gpt-175b": GPTSizes(50257, 2048, 96, 96, 12288),
}


class Attention(nn.Module):
    def __init__(self, sizes: GPTSizes, materialize_scores: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim = sizes.heads, sizes.hidden // sizes.heads
        self.materialize_scores = materialize_scores
        self.q, self.k, self.v, self.out = (nn.Linear(sizes.hidden, sizes.hidden) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        if self.materialize_scores:
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            scores = (q / self.head_dim**0.5) @ k.transpose(-1, -2)
            attended = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        else:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, sizes: GPTSizes, materialize_scores: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(sizes.hidden), nn.LayerNorm(sizes.hidden)
        self.attention = Attention(sizes, materialize_scores)
        self.up = nn.Linear(sizes.hidden, 4 * sizes.hidden)
        self.down = nn.Linear(4 * sizes.hidden, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """GPT-2. Its head may share the weight of the token embedding.

    Args:
        sizes: its sizes.
        tied: whether the head shares the token embedding's weight.
        materialize_scores: whether attention keeps the scores, (B, heads, S, S), for backward, as implementations
            without flash attention do.
    """

    tp_plan: ClassVar[dict[str, str]] = {
        "layers.*.attention.q": "colwise",
        "layers.*.attention.k": "colwise",
        "layers.*.attention.v": "colwise",
        "layers.*.attention.out": "rowwise",
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
    }

    def __init__(self, sizes: GPTSizes, tied: bool = True, materialize_scores: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocab, sizes.hidden)
        self.positions = nn.Embedding(sizes.sequence, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes, materialize_scores) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Token ids (B, S) and the ids that follow them (B, S) → the mean loss, shape ()."""
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
