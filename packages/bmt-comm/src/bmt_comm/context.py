"""Process start-up and the parallel layout: which rank does what, and who talks to whom.

Ranks form a grid of (pipe, data, tensor), tensor fastest:
``rank = (pipe_rank · data_size + data_rank) · tp_size + tp_rank``.
"""

from __future__ import annotations

import atexit
import datetime
import os
import random
import sys
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .backend_threads import let_backend_threads_rest
from .communicator import Communicator, stop_sharing_memory
from .slice import forget_communicators
from .topology import TopologyNames

MESH_DIMS = ("pipe", "data", "tensor")


@dataclass(frozen=True, eq=False)
class ParallelContext(TopologyNames):
    """The layout of ranks, this rank's place in it, and its communicators.

    ================ ===================================== ==============================================
    communicator     ranks                                 used for
    ================ ===================================== ==============================================
    ``world``        all                                   global sums, barriers
    ``zero``         same stage                            sharding parameters that every tensor rank holds
    ``tp_zero``      same stage, same tensor index         sharding tensor-parallel parameters
    ``tp``           same stage, same data index           activations in tensor-parallel layers
    ``pipe``         same data and tensor index            activations between stages
    ``outer_zero``   all                                   like ``zero``, for parameters outside the pipeline
    ``outer_tp_zero``  same tensor index                   like ``tp_zero``, for parameters outside the pipeline
    ================ ===================================== ==============================================

    Between two ranks NCCL carries messages in the order in which they are posted, so those to later stages go over
    ``pipe`` and those to earlier ones over ``pipe_back``, of the same ranks. ``pipe_host`` and ``tp_zero_host`` have
    the ranks of ``pipe`` and ``tp_zero``, and carry host memory: what the host must know, without waiting for the
    device.
    """

    mesh: DeviceMesh
    device: torch.device
    rank: int
    local_rank: int
    world_size: int
    local_size: int
    pipe_size: int
    data_size: int
    tp_size: int
    num_micro_batches: int
    seed: int
    zero_level: int
    world: Communicator
    zero: Communicator
    tp_zero: Communicator
    tp: Communicator
    pipe: Communicator
    outer_zero: Communicator
    outer_tp_zero: Communicator
    pipe_back: Communicator
    pipe_host: Communicator
    tp_zero_host: Communicator
    owns_process_group: bool = field(repr=False, default=True)
    subgroups: tuple[dist.ProcessGroup, ...] = field(repr=False, default=())
    """The process groups that were made for this layout."""

    @property
    def pipe_rank(self) -> int:
        return self.rank // (self.data_size * self.tp_size)

    @property
    def data_rank(self) -> int:
        return self.rank // self.tp_size % self.data_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def replicas(self) -> int:
        """How many ranks, or groups of tensor-parallel ranks, see different data.

        Modules outside a pipeline run data-parallel on every stage, so stages count too.
        """
        return self.world_size // self.tp_size

    def synchronize(self) -> None:
        """Wait until every rank has come here and its device has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.world.barrier()


_current: ParallelContext | None = None


def is_initialized() -> bool:
    """Whether :func:`init_distributed` has run (and :func:`shutdown` has not)."""
    return _current is not None


def current_context() -> ParallelContext:
    """The process-wide :class:`ParallelContext`.

    Raises:
        RuntimeError: before :func:`init_distributed`.
    """
    if _current is None:
        raise RuntimeError("the parallel context does not exist yet: call init_distributed() first")
    return _current


def init_distributed(
    init_method: str = "env://",
    seed: int | None = 0,
    pipe_size: int = -1,
    num_micro_batches: int | None = None,
    tp_size: int = 1,
    *,
    zero_level: int = 3,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout: float | datetime.timedelta = 1800.0,
) -> ParallelContext:
    """Join the job's other processes and lay out the ranks.

    Under ``torchrun`` the world comes from the environment; without a launcher the world is this process.
    A default process group that exists already is adopted, and left standing by :func:`shutdown`.

    Args:
        init_method: how processes find each other (see ``torch.distributed.init_process_group``).
        seed: of parameter initialisation, and of the generators of ``random``, numpy (where it is loaded) and torch,
            alike on every rank. ``None`` leaves the generators alone, and initialises parameters as 0 does.
        pipe_size: pipeline stages; -1: one.
        num_micro_batches: micro-batches of a pipeline; by default as many as stages.
        tp_size: tensor-parallel ranks.
        zero_level: default ZeRO level of Blocks that do not say.
        device: "cuda", "cpu" or a device with an index; by default this process's GPU where there is one.
        backend: of ``torch.distributed``; by default nccl for CUDA and gloo for CPU.
        timeout: seconds, or a timedelta, after which a collective that a rank has not joined fails.

    Raises:
        RuntimeError: called twice without :func:`shutdown`.
        ValueError: sizes that do not divide the world, a device that does not exist, or an argument out of range.
    """
    global _current
    if _current is not None:
        raise RuntimeError("init_distributed() was called already; call shutdown() before calling it again")
    pipe_size = 1 if pipe_size == -1 else pipe_size
    for name, value in (("pipe_size", pipe_size), ("tp_size", tp_size)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be a positive integer")
    if num_micro_batches is not None and (not isinstance(num_micro_batches, int) or num_micro_batches < 1):
        raise ValueError(f"num_micro_batches={num_micro_batches!r} must be a positive integer")
    if zero_level not in (0, 1, 2, 3):
        raise ValueError(f"zero_level={zero_level!r} is not a ZeRO level; choose 0, 1, 2 or 3")
    if not isinstance(timeout, datetime.timedelta):
        timeout = datetime.timedelta(seconds=timeout)
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    adopt = dist.is_initialized()
    if adopt:
        world_size = dist.get_world_size()
    else:
        world_size = _world_size(init_method) if launched or init_method != "env://" else 1
    # Before any process group exists, so that every rank raises and none waits for another.
    if world_size % (pipe_size * tp_size) != 0:
        raise ValueError(
            f"pipe_size={pipe_size} × tp_size={tp_size} = {pipe_size * tp_size} does not divide the world size "
            f"{world_size}; choose sizes whose product does"
        )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = _choose_device(device, local_rank, backend, adopt)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if not adopt:
        backend = backend or ("nccl" if chosen.type == "cuda" else "gloo")
        if launched or init_method != "env://":
            # -1: init_method says so itself.
            rank, size = (int(os.environ.get(name, -1)) for name in ("RANK", "WORLD_SIZE"))
            store, rank, size = next(dist.rendezvous(init_method, rank, size, timeout=timeout))
            store.set_timeout(timeout)
            # torchrun's store outlives a process group, and still holds the addresses of the one before. Every
            # rank counts, in that store, how often it has come.
            times = store.add(f"bmt_comm/starts/{rank}", 1)
            store = dist.PrefixStore(f"bmt_comm/{times}", store)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    context = _lay_out(
        chosen,
        pipe_size,
        tp_size,
        local_rank=local_rank,
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size if launched else 1))),
        num_micro_batches=num_micro_batches or pipe_size,
        seed=0 if seed is None else seed,
        zero_level=zero_level,
        owns_process_group=not adopt,
        timeout=timeout,
    )
    if seed is not None:
        _seed_generators(seed)
    _current = context
    return context


def shutdown() -> None:
    """Leave the job: forget the context and destroy the process group, unless it was adopted.

    Runs by itself at exit. Calling it twice, or before :func:`init_distributed`, does nothing.
    """
    global _current
    context, _current = _current, None
    if context is None:
        return
    forget_communicators()
    if not dist.is_initialized() or context.world.group is not dist.group.WORLD:
        return  # somebody else has destroyed the process groups
    assert dist.group.WORLD is not None
    stop_sharing_memory([dist.group.WORLD, *context.subgroups])
    if context.owns_process_group:
        dist.destroy_process_group()
    else:
        for group in context.subgroups:
            dist.destroy_process_group(group)


def _shutdown_at_exit() -> None:
    # After an exception the other ranks may be stuck in a collective; waiting for them would hide it.
    if not hasattr(sys, "last_type"):
        shutdown()
    let_backend_threads_rest()


atexit.register(_shutdown_at_exit)


def _world_size(init_method: str) -> int:
    """The number of processes, from the environment or else from the query of ``init_method``."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    query = parse_qs(urlparse(init_method).query)
    if "world_size" not in query:
        raise ValueError(
            f"init_method={init_method!r} does not tell the number of processes: add ?rank=...&world_size=... to it, "
            "or set the environment variables RANK and WORLD_SIZE"
        )
    return int(query["world_size"][0])


def _choose_device(
    device: str | torch.device | None, local_rank: int, backend: str | None, adopt: bool
) -> torch.device:
    if device is None:
        nccl = "nccl" in str(dist.get_backend_config()) if adopt else backend != "gloo"
        device = "cuda" if nccl and torch.cuda.is_available() else "cpu"
    chosen = torch.device(device)
    if chosen.type == "cpu":
        if backend is not None and "nccl" in backend and "gloo" not in backend:
            raise ValueError(f"backend={backend!r} cannot communicate CPU tensors; use gloo, or device='cuda'")
        return chosen
    if chosen.type != "cuda":
        raise ValueError(f"device={device!r} is not supported; choose 'cuda' or 'cpu'")
    if not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: no CUDA device is available; use device='cpu'")
    index = local_rank if chosen.index is None else chosen.index
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} needs CUDA device {index}, and there are {torch.cuda.device_count()}; "
            f"start at most one process per GPU, or pass device='cpu'"
        )
    return torch.device("cuda", index)


def _lay_out(
    device: torch.device,
    pipe_size: int,
    tp_size: int,
    *,
    local_rank: int,
    local_size: int,
    num_micro_batches: int,
    seed: int,
    zero_level: int,
    owns_process_group: bool,
    timeout: datetime.timedelta,
) -> ParallelContext:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data_size = world_size // (pipe_size * tp_size)
    grid = torch.arange(world_size).view(pipe_size, data_size, tp_size)
    place = (grid == rank).nonzero()[0].tolist()
    everyone = dist.group.WORLD
    assert everyone is not None
    groups = {tuple(range(world_size)): everyone}

    def group_along(*dims: int) -> dist.ProcessGroup:
        """The ranks that differ from this one in ``dims`` of the grid only.

        All ranks ask for the same dims in the same order, and only those of one group wait for each other.
        """
        part = grid[tuple(slice(None) if d in dims else place[d] for d in range(3))]
        ranks = tuple(part.flatten().tolist())
        if ranks not in groups:
            groups[ranks] = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
        return groups[ranks]

    mesh_groups = [group_along(d) for d in range(3)]
    mesh = DeviceMesh.from_group(mesh_groups, device.type, grid, mesh_dim_names=MESH_DIMS)

    def communicator(group: dist.ProcessGroup | None, device: torch.device) -> Communicator:
        comm = Communicator(group, device)
        comm.share_memory(timeout)
        return comm

    communicators = {everyone: communicator(everyone, device)}

    def along(*dims: int) -> Communicator:
        group = group_along(*dims)
        if group not in communicators:
            alone = dist.get_world_size(group) == 1
            communicators[group] = communicator(None if alone else group, device)
        return communicators[group]

    twins: list[dist.ProcessGroup] = []

    def twin(comm: Communicator, backend: str | None, where: str) -> Communicator:
        """Another communicator of the same ranks; on CPU one serves for all."""
        if comm.size == 1 or device.type == "cpu":
            return comm
        twins.append(dist.new_group(list(comm.ranks), timeout, backend, use_local_synchronization=True))
        return communicator(twins[-1], device if where == "device" else torch.device(where))

    pipe, tp_zero = along(0), along(1)
    pipe_back, pipe_host = twin(pipe, None, "device"), twin(pipe, "gloo", "cpu")
    tp_zero_host = twin(tp_zero, "gloo", "cpu") if pipe_size > 1 else tp_zero
    return ParallelContext(
        mesh=mesh,
        device=device,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_size=local_size,
        pipe_size=pipe_size,
        data_size=data_size,
        tp_size=tp_size,
        num_micro_batches=num_micro_batches,
        seed=seed,
        zero_level=zero_level,
        world=communicators[everyone],
        zero=along(1, 2),
        tp_zero=tp_zero,
        tp=along(2),
        pipe=pipe,
        outer_zero=along(0, 1, 2),
        outer_tp_zero=along(0, 1),
        pipe_back=pipe_back,
        pipe_host=pipe_host,
        tp_zero_host=tp_zero_host,
        owns_process_group=owns_process_group,
        subgroups=(*(group for group in groups.values() if group is not everyone), *twins),
    )


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)
