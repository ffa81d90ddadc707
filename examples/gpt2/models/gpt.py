"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners")."""

import torch
import torch.nn.functional as F
from torch import Tensor

import bmtrain as bmt
from layers import Attention, Embedding, FeedForward, LayerNorm

from .gpt_config import DTYPES, GPTConfig


class GPTLayer(bmt.DistributedModule):
    """Attention, then feed-forward, each normalised before and added to what came in."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        hidden, dtype = config.hidden_size, DTYPES[config.dtype]
        # Every layer adds to the same sum twice; scaled so, it does not grow with the number of layers.
        out_std = 0.02 / (2 * config.num_layers) ** 0.5
        self.attention_norm = LayerNorm(hidden, dtype=dtype)
        self.attention = Attention(hidden, config.num_heads, config.dropout, out_std, dtype)
        self.feedforward_norm = LayerNorm(hidden, dtype=dtype)
        self.feedforward = FeedForward(hidden, config.dropout, out_std, dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feedforward(self.feedforward_norm(x))


class GPT(bmt.DistributedModule):
    """Scores of the next token at every position.

    Args:
        config: its sizes.
        use_checkpoint: whether a layer keeps only its input for backward, and computes the rest again there.
    """

    def __init__(self, config: GPTConfig, use_checkpoint: bool = True):
        super().__init__()
        self.config = config
        hidden, dtype = config.hidden_size, DTYPES[config.dtype]
        self.token_embedding = Embedding(config.vocab_size, hidden, dtype=dtype)
        self.position_embedding = Embedding(config.seq_len, hidden, init_std=0.01, dtype=dtype)
        self.layers = bmt.TransformerBlockList(
            [bmt.Block(GPTLayer(config), use_checkpoint=use_checkpoint) for _ in range(config.num_layers)]
        )
        self.final_norm = LayerNorm(hidden, dtype=dtype)
        if not config.tied:
            self.head = Embedding(config.vocab_size, hidden, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (B, S) to scores (B, S, V)."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.token_embedding(ids) + self.position_embedding(positions)
        x = F.dropout(x, self.config.dropout, self.training)
        x = self.final_norm(self.layers(x))
        return (self.token_embedding if self.config.tied else self.head).scores(x)
