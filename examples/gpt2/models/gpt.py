"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners")."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

import bmtrain as bmt
from layers import Attention, ExpertFeedForward, FeedForward, LayerNorm, PositionEmbedding, TokenEmbedding, dropout

from .gpt_config import DTYPES, GPTConfig


class GPTLayer(bmt.DistributedModule):
    """Attention, then feed-forward, each normalised before and added to what came in."""

    def __init__(self, config: GPTConfig, context_parallel: bool = False, float8: bool = False):
        super().__init__()
        hidden, dtype = config.hidden_size, DTYPES[config.dtype]
        # Every layer adds to the same sum twice; scaled so, it does not grow with the number of layers.
        out_std = 0.02 / (2 * config.num_layers) ** 0.5
        self.attention_norm = LayerNorm(hidden, dtype=dtype)
        self.attention = Attention(hidden, config.num_heads, config.dropout, out_std, dtype, context_parallel, float8)
        self.feedforward_norm = LayerNorm(hidden, dtype=dtype)
        self.feedforward: nn.Module
        if config.num_experts:
            self.feedforward = ExpertFeedForward(hidden, config.num_experts, config.dropout, out_std, dtype)
        else:
            self.feedforward = FeedForward(hidden, config.dropout, out_std, dtype, context_parallel, float8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feedforward(self.feedforward_norm(x))


class GPT(bmt.DistributedModule):
    """Scores of the next token at every position, and their loss.

    In a pipeline, each stage has a part of the layers; embeddings, final norm and head are shared out over all ranks.
    Between the halves of the layers, each tensor-parallel rank has a part of the sequence, in them its part of the
    heads and of the feed-forward (or of the experts), and of the scores its range of the vocabulary.

    Args:
        config: its sizes.
        use_checkpoint: whether a layer keeps only its input for backward, and computes the rest again there.
        interleave: in a pipeline, parts of the layers that each stage has.
        tail_schedule: in a pipeline, compute the loss inside of it, by this schedule.
        context_parallel: whether tensor-parallel ranks share out the sequence in the layers, and not the weights.
        float8: whether the layers multiply in float8 (torchao). Tensor-parallel ranks then need ``context_parallel``.
        compression: "int8" or "float8": how the layers' weights and gradients travel between ranks; None: as they are.
    """

    def __init__(
        self,
        config: GPTConfig,
        use_checkpoint: bool = True,
        interleave: int = 1,
        tail_schedule: str | None = None,
        context_parallel: bool = False,
        float8: bool = False,
        compression: Literal["int8", "float8"] | None = None,
    ):
        super().__init__()
        self.config = config
        self.interleave = interleave
        self.has_tail = tail_schedule is not None
        hidden, dtype = config.hidden_size, DTYPES[config.dtype]
        self.token_embedding = TokenEmbedding(config.vocab_size, hidden, dtype)
        self.position_embedding = PositionEmbedding(config.seq_len, hidden, dtype)
        precision = bmt.MixedPrecision(compression=compression)
        layers = [
            bmt.Block(GPTLayer(config, context_parallel, float8), use_checkpoint=use_checkpoint, precision=precision)
            for _ in range(config.num_layers)
        ]
        self.layers: bmt.PipelineTransformerBlockList | bmt.TransformerBlockList
        if bmt.config["pipe_size"] > 1:
            self.layers = bmt.PipelineTransformerBlockList(layers, interleave=interleave, tail_schedule=tail_schedule)
        else:
            self.layers = bmt.TransformerBlockList(layers)
        self.final_norm = LayerNorm(hidden, dtype=dtype)
        if not config.tied:
            self.head = TokenEmbedding(config.vocab_size, hidden, dtype)
        self.cross_entropy = bmt.loss.FusedCrossEntropy(parallel=True)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (B, S) to scores (B, S, V / tensor-parallel ranks)."""
        return self.scores(self.layers(self.embed(ids)))

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The mean loss, a scalar, of predicting ``targets`` (B, S), the tokens that come after ``ids`` (B, S)."""
        if self.has_tail:
            return self.layers(self.embed(ids), tail=self.loss_of_hidden, tail_args=(targets,))
        return self.loss_of_hidden(self.layers(self.embed(ids)), targets)

    def embed(self, ids: Tensor) -> Tensor:
        """What comes before the layers: (B, S) to (B, S / tensor-parallel ranks, H)."""
        x = self.token_embedding(ids) + self.position_embedding(ids.shape[1])
        return dropout(x, self.config.dropout, self.training)

    def scores(self, x: Tensor) -> Tensor:
        """What comes after them: (B, S / tensor-parallel ranks, H) to (B, S, V / tensor-parallel ranks)."""
        return (self.token_embedding if self.config.tied else self.head)(self.final_norm(x), projection=True)

    def loss_of_hidden(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss of what comes out of the layers, of a whole batch or, as a pipeline's tail, a micro-batch of it."""
        return self.cross_entropy(self.scores(x).flatten(0, 1), targets.flatten())
