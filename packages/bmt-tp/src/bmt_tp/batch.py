"""Checks that the ranks of a tensor-parallel group have the same data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bmt_comm import Communicator, DisagreementError, check_agreement, not_compiled

from .regions import tensor_comm


@not_compiled
def check_same_batch(*tensors: Tensor, comm: Communicator | None = None) -> None:
    """Raise unless all tensor-parallel ranks have the same tensors. Together these ranks compute one replica.

    It costs one pass over the tensors and a few bytes of communication. On CUDA it waits for the device. Call it on
    the first batch only, as :class:`bmt_tp.VPEmbedding` and :func:`bmt_tp.parallelize` do.

    Args:
        tensors: of any shapes and dtypes.
        comm: the tensor-parallel ranks; by default the context's.

    Raises:
        RuntimeError: on every rank, if they differ.
    """
    comm = tensor_comm(comm)
    if comm.size == 1 or comm.is_planned:
        return
    facts = [f"{tuple(t.shape)} {t.dtype} with the digest {_digest(t)}" for t in tensors]
    try:
        check_agreement(comm, "the batch of a tensor-parallel group", facts)
    except DisagreementError as error:
        raise RuntimeError(
            f"the ranks of a tensor-parallel group must be given the same batch, of which each computes a part: "
            f"{error}; choose the data by the context's replica_rank, not by rank"
        ) from error


@not_compiled
def check_same_input(x: Tensor, comm: Communicator, cure: str) -> None:
    """Raise unless all tensor-parallel ranks have the same activations, up to rounding.

    Args:
        x: the activations.
        comm: the tensor-parallel ranks.
        cure: the end of the error message, which says what to pass instead.

    Raises:
        RuntimeError: on every rank, if they differ.
    """
    if comm.size == 1 or comm.is_planned:
        return
    try:
        check_agreement(comm, "the input of a tensor-parallel layer", [f"of shape {tuple(x.shape)}"])
    except DisagreementError as error:
        raise RuntimeError(f"the tensor-parallel ranks pass different inputs: {error}; {cure}") from error
    if not x.numel():
        return
    # Compare random projections: if activations differ by more than rounding, so do these.
    values = x.detach().reshape(-1).double()
    generator = torch.Generator().manual_seed(values.numel())
    signs = torch.randint(0, 2, (8, min(values.numel(), 1 << 16)), generator=generator, device="cpu").to(values) * 2 - 1
    folded = torch.nn.functional.pad(values, (0, -values.numel() % signs.shape[1])).view(-1, signs.shape[1])
    ramp = 1 + torch.arange(len(folded), dtype=torch.float64, device=values.device) / len(folded)
    mine = torch.cat([signs @ (ramp @ folded), values.norm()[None]])
    everyone = comm.stacked(mine)
    difference, size = (everyone[:, :-1] - everyone[0, :-1]).abs().max(), everyone[:, -1].max()
    if bool(difference > _TOLERANCE * size):
        raise RuntimeError(f"the tensor-parallel ranks pass different inputs of shape {tuple(x.shape)}; {cure}")


@not_compiled
def have_equal_values(tensors: Sequence[Tensor], comm: Communicator) -> bool:
    """Whether all ranks have the same values. A sample of each tensor is compared.

    False if each sample has only one value, repeated, such as zeros. Every rank of ``comm`` must call it.
    """
    if comm.size == 1 or comm.is_planned or any(tensor.is_meta for tensor in tensors):
        return False
    samples = [_sample(tensor).reshape(-1).float().cpu() for tensor in tensors if tensor.numel()]
    if any(bool((sample != sample[0]).any()) for sample in samples):
        code = int(_digest(torch.cat(samples)), 16) >> 1
    else:
        code = comm.rank  # differs between ranks
    everyone = comm.stacked(torch.tensor([code], dtype=torch.int64, device="cpu").to(comm.device))
    return bool((everyone == everyone[0]).all())


def check_same_values(named: Iterable[tuple[str, Tensor]], comm: Communicator) -> None:
    """Raise unless all ranks have the same parameters, before they are sharded. A sample of each is compared.

    Raises:
        RuntimeError: on every rank, naming the first that differs.
    """
    if comm.size == 1 or comm.is_planned:
        return
    facts = [f"{name} {tuple(t.shape)} {t.dtype} with the digest {_digest(_sample(t))}" for name, t in named]
    try:
        check_agreement(comm, "the parameters of a model", facts)
    except DisagreementError as error:
        raise RuntimeError(
            f"the tensor-parallel ranks must have the same model before it is sharded: {error}; build it with the "
            f"same seed, or load the same weights, on all of them"
        ) from error


def _sample(tensor: Tensor) -> Tensor:
    """About a thousand elements."""
    if tensor.is_meta or not tensor.numel():
        return tensor
    return tensor.detach().reshape(-1)[:: max(1, tensor.numel() // 1024)]


_TOLERANCE = 0.05
"""Relative to the norm. Activations in half precision that differ only by the order of sums differ by less."""


def _digest(tensor: Tensor) -> str:
    if tensor.is_meta:
        return "unknown"
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]
