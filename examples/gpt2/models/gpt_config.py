"""The sizes of a GPT."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class GPTConfig:
    """What a GPT is built from.

    Attributes:
        vocab_size: V, how many different tokens there are.
        seq_len: S, how many tokens the model sees at most.
        num_layers: L, transformer layers.
        num_heads: attention heads of each layer.
        hidden_size: H, the length of a position's vector.
        dropout: the probability with which activations are dropped in training.
        tied: whether the head has the token embedding's weight, instead of one of its own.
        dtype: of the parameters: fp32, bf16 or fp16.
        num_experts: how many feed-forwards a layer has, of which each position takes two; 0: one, without a router.
    """

    vocab_size: int = 4096
    seq_len: int = 128
    num_layers: int = 2
    num_heads: int = 4
    hidden_size: int = 128
    dropout: float = 0.0
    tied: bool = True
    dtype: str = "fp32"
    num_experts: int = 0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "seq_len", "num_layers", "num_heads", "hidden_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.hidden_size % self.num_heads != 0:
            raise ValueError(f"hidden_size={self.hidden_size} is no multiple of num_heads={self.num_heads}")
        if self.num_experts < 0 or self.num_experts == 1:
            raise ValueError(f"num_experts={self.num_experts} must be at least 2, or 0 for none")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is unknown; choose one of {', '.join(DTYPES)}")

    @property
    def num_parameters(self) -> int:
        """How many numbers are trained."""
        hidden = self.hidden_size
        layer = 12 * hidden**2 + 13 * hidden
        if self.num_experts:
            layer += self.num_experts * (8 * hidden**2 + hidden + 1) - (8 * hidden**2 + 5 * hidden)
        tables = (self.vocab_size * (1 if self.tied else 2) + self.seq_len) * hidden
        return self.num_layers * layer + tables + 2 * hidden


PRESETS = {
    "small-cpu": GPTConfig(),
    "gpt2": GPTConfig(50257, 1024, num_layers=12, num_heads=12, hidden_size=768, dropout=0.1),
    "gpt2-medium": GPTConfig(50257, 1024, num_layers=24, num_heads=16, hidden_size=1024, dropout=0.1),
    "gpt2-large": GPTConfig(50257, 1024, num_layers=36, num_heads=20, hidden_size=1280, dropout=0.1),
    "gpt2-xl": GPTConfig(50257, 1024, num_layers=48, num_heads=25, hidden_size=1600, dropout=0.1),
    "13b": GPTConfig(50257, 1024, num_layers=40, num_heads=128, hidden_size=5120),
}
