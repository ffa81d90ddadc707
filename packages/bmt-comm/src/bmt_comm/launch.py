"""How this process was launched: the size of its job, its device, and the store where the processes meet."""

from __future__ import annotations

import datetime
import os
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch
import torch.distributed as dist

from . import _compat
from .startup import Start, connect

LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
"""Where torchrun, srun, Open MPI and other launchers of MPI programs set the local rank."""


class Launch:
    """How this process was launched, read from the environment.

    Args:
        init_method: of ``init_distributed``.

    Attributes:
        adopts: whether there is a default process group already.
        world_size: the number of processes.
        local_rank: of this process, on its host.
        local_size: the number of processes on this host.

    Raises:
        ValueError: the environment does not tell the number of processes, or contradicts itself.
    """

    def __init__(self, init_method: str) -> None:
        self.adopts = dist.is_initialized()
        self._init_method = init_method
        given = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
        if len(given) == 1 and init_method == "env://" and not self.adopts:
            missing = "WORLD_SIZE" if given == ["RANK"] else "RANK"
            raise ValueError(
                f"the environment variable {given[0]} is set and {missing} is not; launchers such as torchrun set "
                "both, and a job of one process needs neither"
            )
        is_launched = len(given) == 2
        self._has_others = is_launched or init_method != "env://"
        if self.adopts:
            self.world_size = dist.get_world_size()
        else:
            self.world_size = _world_size(init_method) if self._has_others else 1
            if is_launched and not 0 <= int(os.environ["RANK"]) < self.world_size:
                raise ValueError(
                    f"the environment variables RANK={os.environ['RANK']} and WORLD_SIZE={os.environ['WORLD_SIZE']} do "
                    f"not fit: ranks are 0 to {self.world_size - 1}; launchers such as torchrun set both"
                )
        self.local_rank = local_rank()
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(self.world_size if is_launched else 1)))

    def join(self, timeout: datetime.timedelta) -> Meeting:
        """Reach the store where the processes of the job meet."""
        seconds = timeout.total_seconds()
        if self.adopts:
            store = dist.distributed_c10d._get_default_store()
            return Meeting(store, dist.get_rank(), self.world_size, Start(store, dist.get_rank(), seconds))
        if not self._has_others:
            return Meeting(dist.HashStore(), 0, 1, None)
        rank, size = (int(os.environ.get(name, -1)) for name in ("RANK", "WORLD_SIZE"))  # -1: init_method contains it
        store, rank, size = connect(self._init_method, rank, size, timeout)
        store.set_timeout(timeout)
        return Meeting(store, rank, size, Start(store, rank, seconds))


class Meeting:
    """Where the processes of a job meet.

    Attributes:
        store: for this start of the job only. torchrun's store outlives a process group, and still has the addresses of
            the previous one.
        rank, size: of this process, and of the job.
        start: what has named ``store``; ``None`` without a launcher and an ``init_method``.
    """

    def __init__(self, store: Any, rank: int, size: int, start: Start | None) -> None:
        self.store = store if start is None else dist.PrefixStore(f"bmt_comm/{start.name}", store)
        self.rank, self.size, self.start = rank, size, start


def local_rank() -> int:
    """This process's number on its host, as its launcher has set it; 0 without a launcher."""
    return int(next((os.environ[name] for name in LOCAL_RANKS if name in os.environ), "0"))


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


def choose_device(device: str | torch.device | None, local_rank: int, backend: str | None, adopt: bool) -> torch.device:
    """The device of this process.

    Args:
        device, backend: as for ``init_distributed``.
        local_rank: as of :class:`Launch`.
        adopt: whether there is a default process group already.

    Raises:
        ValueError: the device does not exist, or ``backend`` does not fit it.
    """
    if device is None:
        nccl = "nccl" in _compat.backends().values() if adopt else backend != "gloo"
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
    index = chosen.index
    if index is None and adopt:  # the device that the process group is bound to, or that the process has chosen
        assert dist.group.WORLD is not None
        bound = dist.group.WORLD.bound_device_id
        index = (torch.cuda.current_device() or None) if bound is None else bound.index
    if index is None:
        has_own = torch.cuda.device_count() == 1 and "," not in os.environ.get("CUDA_VISIBLE_DEVICES", ",")
        index = 0 if has_own else local_rank  # a launcher may let each process see its own GPU only
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} needs CUDA device {index}, and there are {torch.cuda.device_count()}; "
            f"start at most one process per GPU, or pass device='cpu'"
        )
    return torch.device("cuda", index)
