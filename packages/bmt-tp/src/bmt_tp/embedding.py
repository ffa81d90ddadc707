"""The vocabulary-parallel embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmt_comm import Communicator

from .batch import check_same_batch
from .parallel_ops import OpParallelLinear
from .parameters import Module, check_integers, check_is_own, check_positive, divided, make_parameter
from .regions import gather_along, reduce_from_ranks, reduce_scatter_along, tensor_comm


class VPEmbedding(Module):
    """An embedding table that is sharded along the vocabulary: every tensor-parallel rank has a range of the ids.

    As the first layer it looks up the ids in its range and sums over the ranks. As the last (``projection``) it
    computes the scores of its range, for :func:`bmt_tp.vocab_parallel_cross_entropy`. One object in both places ties
    the two. The computation never gathers the table. Only its initialization has the logical table in memory for a
    moment (not on the meta device).

    Args:
        vocab_size: rows of the logical table. The number of ranks must divide it.
        embedding_size: columns.
        dtype: of the table.
        init_mean, init_std: of the normal distribution of the initial values.
        sequence_parallel: outside of this layer, activations are split along the sequence: the vectors are scattered,
            and the input of the projection is gathered.
        gather_input: each rank passes the ids of its part of the sequence, which are gathered. It implies
            ``sequence_parallel``.
        sequence_dim: the dimension of the ids that is split. A negative one counts from the last dimension of the
            vectors, as in the linear layers: -2 is the last of the ids.
        comm: the tensor-parallel ranks; by default the context's.

    Raises:
        TypeError: ``dtype`` is not a floating-point one.
        ValueError: a size is not a positive integer, or the ranks do not divide ``vocab_size`` (pad it).
        RuntimeError: ``init_distributed`` has not run.
    """

    weight: nn.Parameter

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        dtype: torch.dtype = torch.half,
        init_mean: float = 0.0,
        init_std: float = 1,
        *,
        sequence_parallel: bool = False,
        gather_input: bool = False,
        sequence_dim: int = 1,
        comm: Communicator | None = None,
    ) -> None:
        super().__init__()
        self.comm = tensor_comm(comm)
        self.vocab_size_per_rank = divided("vocab_size", vocab_size, self.comm)
        check_positive("embedding_size", embedding_size)
        self.vocab_size = vocab_size
        self.embedding_size = embedding_size
        self.sequence_parallel = sequence_parallel or gather_input
        self.gather_input = gather_input
        self.sequence_dim = sequence_dim
        self.weight = make_parameter(
            (vocab_size, embedding_size), dtype, nn.init.normal_, init_mean, init_std, comm=self.comm, tp_dim=0
        )
        self._has_checked = False

    @property
    def vocab_start(self) -> int:
        """The first row of this rank."""
        return self.comm.rank * self.vocab_size_per_rank

    def forward(self, x: Tensor, projection: bool = False) -> Tensor:
        """The vectors of ids, or with ``projection`` the scores of vectors.

        Args:
            x: ids (\\*) of any integer dtype, the same on every tensor-parallel rank (checked on the first call); with
                ``gather_input``, the ids of this rank's part of the sequence. For the projection, vectors (\\*, H);
                with ``sequence_parallel``, those of this rank's part of the sequence.
            projection: compute the scores of this rank's range of the vocabulary, for
                ``FusedCrossEntropy(parallel=True)``.

        Returns:
            (\\*, H); with ``sequence_parallel``, this rank's part of the sequence. With ``projection``
            (\\*, vocab_size / ranks): for every position of the whole sequence, the scores of the ids from
            ``vocab_start`` on.

        Raises:
            IndexError: an id is outside of the vocabulary. On CUDA an assertion of the device fails instead.
            ValueError: the ids do not have the dimension ``sequence_dim``, or the ranks do not divide it.
            TypeError: ids are not integers, or the table is computed from something else.
            RuntimeError: the ranks have different ids.
        """
        check_is_own(self, self.comm, "weight")
        if projection:
            return OpParallelLinear.apply(
                x, self.weight, None, self.sequence_parallel, sequence_dim=self.sequence_dim, comm=self.comm
            )
        dim = dim_of_ids(x, self.sequence_dim) if self.sequence_parallel else 0
        if self.gather_input:
            x = gather_along(x, dim, self.comm)
        elif not self._has_checked and not torch.compiler.is_compiling():
            try:
                check_same_batch(x, comm=self.comm)
            except RuntimeError as error:
                raise RuntimeError(
                    f"{error}. If ranks pass parts of the sequence: VPEmbedding(gather_input=True)"
                ) from error
            self._has_checked = True
        y = lookup(x, self.weight, self.vocab_start, self.vocab_size)
        if self.sequence_parallel:
            return reduce_scatter_along(y, dim, self.comm)
        return reduce_from_ranks(y, self.comm)

    def extra_repr(self) -> str:
        return f"{self.vocab_size}, {self.embedding_size}, ranks={self.comm.size}"


def dim_of_ids(ids: Tensor, dim: int) -> int:
    """The dimension of ``ids`` that is dimension ``dim`` of their vectors, counted from the front.

    Raises:
        ValueError: the ids do not have it.
    """
    front = dim if dim >= 0 else dim + ids.dim() + 1
    if not 0 <= front < ids.dim():
        raise ValueError(
            f"sequence_dim={dim} is no dimension of ids of shape {tuple(ids.shape)}; negative ones count from the last "
            f"dimension of the vectors, so -2 is the last of the ids"
        )
    return front


def lookup(ids: Tensor, rows: Tensor, start: int, vocab_size: int) -> Tensor:
    """The vectors of ``ids``: ``rows`` has those of the ids start, start + 1, ...; others get zeros."""
    check_integers("ids", ids)
    ids = ids.long()  # small integer types cannot represent the size of the vocabulary
    if len(rows) == vocab_size:
        return F.embedding(ids, rows)
    outside = (ids < 0) | (ids >= vocab_size)
    if ids.is_cuda:
        torch._assert_async(~outside.any(), f"an id is not in the vocabulary (0 to {vocab_size - 1})")
    elif not ids.is_meta and outside.any():
        raise IndexError(f"id {int(ids[outside][0])} is not in the vocabulary (0 to {vocab_size - 1})")
    local = ids - start
    elsewhere = (local < 0) | (local >= len(rows))
    y = F.embedding(local.masked_fill(elsewhere, 0), rows)
    return y.masked_fill(elsewhere[..., None], 0)
