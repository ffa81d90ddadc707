"""Process start-up and the parallel layout: the place of each rank, and the communicators.

Ranks form a grid of (pipe, data, tensor), tensor fastest:
``rank = (pipe_rank · data_size + data_rank) · tp_size + tp_rank``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import math
import os
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import watch
from .agreement import TIMEOUT, begin_agreements, forget_steps, stop_agreements
from .backend_threads import let_backend_threads_rest
from .communicator import Communicator
from .fixed_order import use_deterministic_kernels
from .job_settings import JobSettings, check_settings
from .journal import journals, note_place
from .launch import Launch, Meeting, choose_device
from .layout_groups import LayoutGroups
from .leaving import end_with_an_error, log_failures, prepare_shutdown
from .report import ranks_in_words
from .slice import forget_communicators
from .startup import meet
from .topology import TopologyNames
from .transport import stop_sharing_memory, stop_waiting

MESH_DIMS = ("pipe", "data", "tensor")


@dataclass(frozen=True, eq=False)
class ParallelContext(TopologyNames):
    """The layout of ranks, this rank's place in it, and its communicators.

    ================ ===================================== ==============================================
    communicator     ranks                                 used for
    ================ ===================================== ==============================================
    ``world``        all                                   global sums, barriers
    ``zero``         same stage                            sharding parameters that all tensor ranks have
    ``tp_zero``      same stage, same tensor index         sharding tensor-parallel parameters
    ``tp``           same stage, same data index           activations in tensor-parallel layers
    ``pipe``         same data and tensor index            activations between stages
    ``outer_zero``   all                                   like ``zero``, for parameters outside the pipeline
    ``outer_tp_zero``  same tensor index                   like ``tp_zero``, for parameters outside the pipeline
    ``alone``        this one                              no communication; one object, as it has a CUDA stream
    ================ ===================================== ==============================================

    ``pipe_channels`` are the point-to-point channels between stages, by source and target. NCCL runs the operations of
    a communicator in order, one at a time. So every pair of stages has one communicator (of these two ranks) for each
    direction, and a message only waits for earlier messages of its channel. The channels are connected when the context
    is made, in the same order on all ranks, because NCCL's first exchange blocks until both ranks are there. Other
    backends distinguish messages by tags; there every channel is ``pipe``.

    ``pipe_host`` and ``zero_host`` have the ranks of ``pipe`` and ``zero``, and communicate host memory: values that
    the host needs without waiting for the device.

    ``deterministic``: whether sums have an order that does not depend on the number of replicas.
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
    zero_level: int
    world: Communicator
    zero: Communicator
    tp_zero: Communicator
    tp: Communicator
    pipe: Communicator
    outer_zero: Communicator
    outer_tp_zero: Communicator
    alone: Communicator
    pipe_channels: Mapping[tuple[int, int], Communicator]
    pipe_host: Communicator
    zero_host: Communicator
    deterministic: bool = False
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

    @property
    def replica_rank(self) -> int:
        """The index of this rank's part of the data: the same on tensor-parallel ranks, different on each stage."""
        return self.rank // self.tp_size

    def synchronize(self) -> None:
        """Wait until every rank has come here and its device has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.world.barrier()


_current: ParallelContext | None = None
_process = os.getpid()  # the process that has made the context
_settings = contextlib.ExitStack()  # of torch, restored after the job


def is_initialized() -> bool:
    """Whether :func:`init_distributed` has run (and :func:`shutdown` has not)."""
    return _current is not None


def context_or_none() -> ParallelContext | None:
    """The process-wide :class:`ParallelContext`; None before :func:`init_distributed`."""
    return _current


def is_deterministic() -> bool:
    """Whether results do not depend on the number of ranks: see ``init_distributed(deterministic=True)``."""
    return _current is not None and _current.deterministic


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
    agreement_timeout: float | datetime.timedelta | None = None,
    deterministic: bool = False,
) -> ParallelContext:
    """Join the job's other processes and lay out the ranks.

    Under ``torchrun`` the world comes from the environment; without a launcher the world is this process.
    A default process group that exists already is adopted, and not destroyed by :func:`shutdown`.

    On CUDA, backward passes of the calling thread run in that thread until it calls :func:`shutdown`
    (``torch.autograd.set_multithreading_enabled(False)``). By default torch runs them in a thread for each GPU. With
    one GPU nothing runs side by side then, and a step of 64 small layers took up to 1.4 times as long.

    Args:
        init_method: how processes find each other (see ``torch.distributed.init_process_group``).
        seed: of the generators of ``random``, numpy (if it is loaded; modulo 2³²) and torch, the same on every rank;
            initial values of parameters are drawn from torch's. ``None``: the generators are not seeded.
        pipe_size: pipeline stages; -1: one.
        num_micro_batches: micro-batches of a pipeline; by default as many as stages.
        tp_size: tensor-parallel ranks.
        zero_level: default ZeRO level of Blocks that do not say.
        device: "cuda", "cpu" or a device with an index; by default this process's GPU if there is one: that of a
            process group that exists, or else the GPU whose index is the local rank, which torchrun, srun, Open MPI
            and Intel MPI set.
        backend: of ``torch.distributed``; by default nccl for CUDA and gloo for CPU.
        timeout: seconds, or a timedelta, after which a collective that a rank has not joined fails.
        agreement_timeout: the same for the comparisons of models, options and pipeline calls between ranks; not more
            than ``timeout``; by default five minutes, or ``timeout`` where that is shorter.
        deterministic: whether the same seed, data and micro-batches give the same bits on 1, 2, 4, ... replicas: sums
            over micro-batches and ranks have a fixed order, and torch's deterministic algorithms are on until
            :func:`shutdown`. The README of bmt-zero says what the script must do. The number of replicas must be a
            power of two, and there can be no pipeline.

    Raises:
        RuntimeError: called twice without :func:`shutdown`; a rank has not come in time, or has ended.
        ValueError: sizes that do not divide the world, a device that does not exist, an argument out of range, or
            arguments that differ between ranks.
    """
    global _current, _process
    if _current is not None:
        raise RuntimeError("init_distributed() was called already; call shutdown() before calling it again")
    settings = check_settings(
        seed, pipe_size, num_micro_batches, tp_size, zero_level, timeout, agreement_timeout, deterministic
    )
    # Checked before any process group exists, so that every rank raises and none waits for another.
    launch = Launch(init_method)
    settings.check_world_size(launch.world_size)
    chosen = choose_device(device, launch.local_rank, backend, launch.adopts)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if not backend and not launch.adopts:
        backend = "nccl" if chosen.type == "cuda" else "gloo"
    meeting = launch.join(settings.timeout)
    begin_agreements(dist.PrefixStore("agree", meeting.store), settings.agreement_timeout)
    if meeting.size > 1:
        _meet(meeting, {**vars(settings), "device": chosen.type, "backend": backend}, settings.timeout.total_seconds())
    try:
        if not launch.adopts:
            assert backend is not None
            dist.init_process_group(
                backend,
                store=meeting.store,
                rank=meeting.rank,
                world_size=meeting.size,
                timeout=settings.timeout,
                device_id=chosen if "nccl" in backend else None,  # with a device, NCCL connects now
            )
        context = _lay_out(chosen, settings, launch)
    except BaseException:
        watch.stop(leaves=False)
        raise
    _name_journals(context)
    forget_steps()
    if seed is not None:
        _seed_generators(seed)
    if deterministic:
        _settings.callback(use_deterministic_kernels(chosen.type == "cuda"))
    if chosen.type == "cuda":
        _settings.enter_context(torch.autograd.set_multithreading_enabled(False))
    _current, _process = context, os.getpid()
    return context


def _meet(meeting: Meeting, facts: Mapping[str, object], seconds: float) -> None:
    """Wait for the other ranks, compare facts with theirs, and watch them from now on."""
    peers = meet(dist.PrefixStore("start", meeting.store), meeting.rank, meeting.size, facts, seconds, meeting.start)
    watch.start(dist.PrefixStore("watch", meeting.store), meeting.rank, meeting.size, peers, seconds, _wake)


def _wake(message: str) -> None:
    """End all waits of this process with an error."""
    stop_agreements(message)
    stop_waiting(message)


def shutdown() -> None:
    """Leave the job: forget the context and destroy the process group, unless it was adopted.

    Is called at exit. Calling it twice, or before :func:`init_distributed`, does nothing.

    Raises:
        Exception: the first one of functions that :func:`before_shutdown` has registered, after all else is done. So a
            script notices that its last checkpoint could not be written.
    """
    failures = prepare_shutdown() if _current is not None else []
    _leave()
    if failures:
        log_failures(failures[1:])
        raise failures[0]


def _leave() -> None:
    global _current
    context, _current = _current, None
    if context is None:
        return
    _settings.close()
    watch.stop(leaves=True)
    begin_agreements(None, TIMEOUT)
    note_place("")
    forget_communicators()
    if not dist.is_initialized() or context.world.group is not dist.group.WORLD:
        return  # the process groups were destroyed already
    assert dist.group.WORLD is not None
    stop_sharing_memory([dist.group.WORLD, *context.subgroups])
    if context.owns_process_group:
        dist.destroy_process_group()
    else:
        for group in context.subgroups:
            dist.destroy_process_group(group)


def _shutdown_at_exit() -> None:
    failures = prepare_shutdown()
    if failures:
        log_failures(failures)
        end_with_an_error()
    if os.getpid() != _process:
        # A fork. The process groups' threads do not run here, so their destructors would abort or wait for ever.
        if _current is not None and dist.is_initialized():
            for group in dist.distributed_c10d._world.pg_map:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        return
    # After an exception the other ranks may be stuck in a collective; waiting for them would hide it.
    if not hasattr(sys, "last_type"):
        _leave()
    watch.stop(leaves=False)  # its thread must not run while the interpreter ends
    let_backend_threads_rest()


atexit.register(_shutdown_at_exit)


def _lay_out(device: torch.device, settings: JobSettings, launch: Launch) -> ParallelContext:
    """The context, with its communicators."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pipe_size, tp_size = settings.pipe_size, settings.tp_size
    data_size = world_size // (pipe_size * tp_size)
    grid = torch.arange(world_size, device="cpu").view(pipe_size, data_size, tp_size)
    everyone = dist.group.WORLD
    assert everyone is not None
    groups = LayoutGroups(everyone, device, settings.timeout)
    mesh_groups = [groups.of(_parts(grid, d)) for d in range(3)]
    mesh = DeviceMesh.from_group(mesh_groups, device.type, grid, mesh_dim_names=MESH_DIMS)

    def along(*dims: int) -> Communicator:
        return groups.communicator(_parts(grid, *dims))

    world = groups.world
    pipe, tp_zero, tp, zero, outer_zero, outer_tp_zero = (
        along(*dims) for dims in ((0,), (1,), (2,), (1, 2), (0, 1, 2), (0, 1))
    )
    pipe_host = groups.on_host(pipe, _parts(grid, 0))
    zero_host = groups.on_host(zero, _parts(grid, 1, 2)) if pipe_size > 1 else zero
    pipe_channels = groups.channels(pipe, _parts(grid, 0))
    return ParallelContext(
        mesh=mesh,
        device=device,
        rank=rank,
        world_size=world_size,
        pipe_size=pipe_size,
        data_size=data_size,
        tp_size=tp_size,
        world=world,
        zero=zero,
        tp_zero=tp_zero,
        tp=tp,
        pipe=pipe,
        outer_zero=outer_zero,
        outer_tp_zero=outer_tp_zero,
        alone=groups.alone,
        pipe_channels=pipe_channels,
        pipe_host=pipe_host,
        zero_host=zero_host,
        subgroups=tuple(groups.made),
        local_rank=launch.local_rank,
        local_size=launch.local_size,
        num_micro_batches=settings.num_micro_batches,
        zero_level=settings.zero_level,
        deterministic=settings.deterministic,
        owns_process_group=not launch.adopts,
    )


def _name_journals(context: ParallelContext) -> None:
    """Name the process groups in messages as the context does; a group with several names has the first one."""
    names = ("world", "zero", "tp_zero", "tp", "pipe", "outer_zero", "outer_tp_zero", "pipe_host", "zero_host")
    for name in reversed(names):
        comm: Communicator = getattr(context, name)
        if comm.group is not None and comm.size > 1:
            journals[comm.group].name = f"{name} ({ranks_in_words(comm.ranks)})"


def _parts(grid: Tensor, *dims: int) -> list[list[int]]:
    """The ranks of ``grid`` in parts; the ranks of a part differ only in ``dims``."""
    others = [d for d in range(3) if d not in dims]
    length = math.prod(grid.shape[d] for d in dims)
    return grid.permute(*others, *dims).reshape(-1, length).tolist()


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    torch.manual_seed(seed)
