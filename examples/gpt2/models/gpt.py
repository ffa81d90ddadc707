"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners")."""

from torch import Tensor

import bmtrain as bmt
from layers import Attention, FeedForward, LayerNorm, PositionEmbedding, TokenEmbedding, dropout

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

    Between the halves of the layers, each tensor-parallel rank has a part of the sequence, in them its part of the
    heads and of the feed-forward, and of the scores its range of the vocabulary.

    Args:
        config: its sizes.
        use_checkpoint: whether a layer keeps only its input for backward, and computes the rest again there.
    """

    def __init__(self, config: GPTConfig, use_checkpoint: bool = True):
        super().__init__()
        self.config = config
        hidden, dtype = config.hidden_size, DTYPES[config.dtype]
        self.token_embedding = TokenEmbedding(config.vocab_size, hidden, dtype)
        self.position_embedding = PositionEmbedding(config.seq_len, hidden, dtype)
        self.layers = bmt.TransformerBlockList(
            [bmt.Block(GPTLayer(config), use_checkpoint=use_checkpoint) for _ in range(config.num_layers)]
        )
        self.final_norm = LayerNorm(hidden, dtype=dtype)
        if not config.tied:
            self.head = TokenEmbedding(config.vocab_size, hidden, dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (B, S) to scores (B, S, V / tensor-parallel ranks)."""
        x = self.token_embedding(ids) + self.position_embedding(ids.shape[1])  # (B, S / ranks, H)
        x = dropout(x, self.config.dropout, self.training)
        x = self.final_norm(self.layers(x))
        return (self.token_embedding if self.config.tied else self.head)(x, projection=True)
