"""Tensor and sequence parallelism: layers, operations, and sharding models that were written for one device."""

from ._version import __version__
from .batch import check_same_batch
from .embedding import VPEmbedding
from .experts import expert_parallel
from .head_counts import DIVIDED_ATTRIBUTES
from .linear import Linear
from .loss import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from .ops import OpLinear
from .parallel_linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from .parallel_ops import OpParallelLinear, ReduceType, column_linear, row_linear
from .parallelize import parallelize
from .random import per_rank_random
from .regions import copy_to_ranks, gather_along, reduce_from_ranks, reduce_scatter_along, split_along
from .sequence import sequence_parallel
from .state_dict import full_state_dict, load_full_state_dict
from .symmetric import enable_symmetric_memory
from .ulysses import ulysses_attention

__all__ = [
    "DIVIDED_ATTRIBUTES",
    "ColumnParallelLinear",
    "Linear",
    "OpLinear",
    "OpParallelLinear",
    "ReduceType",
    "RowParallelLinear",
    "VPEmbedding",
    "__version__",
    "check_same_batch",
    "column_linear",
    "column_parallel",
    "copy_to_ranks",
    "enable_symmetric_memory",
    "expert_parallel",
    "full_state_dict",
    "gather_along",
    "load_full_state_dict",
    "parallelize",
    "per_rank_random",
    "reduce_from_ranks",
    "reduce_scatter_along",
    "row_linear",
    "sequence_parallel",
    "split_along",
    "ulysses_attention",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]
