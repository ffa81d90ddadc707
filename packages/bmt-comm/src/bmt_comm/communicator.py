"""A communicator: the ranks that talk to each other, and raw (non-differentiable) collectives between them.

[Note: direct exchange]
    On CPU the ranks share one machine, so what a large collective costs is the bytes that are copied, not
    the number of messages; a short one costs the trips that follow each other.  Gloo's ring all-gather copies
    its result twice and its reduce-scatter is a whole all-reduce.  Here every rank sends each peer just what
    that peer needs, straight between the callers' buffers: an all-gather moves (n-1)/n of the result per rank
    with no extra copy, a reduce-scatter moves (n-1)/n of the input with one receive buffer.  CUDA tensors go
    through the process group's own collectives (NCCL).

Every rank of a communicator must call the same collectives on it in the same order.
"""

from __future__ import annotations

import datetime
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from . import _compat
from .shared_memory import SharedMemory, connect_shared_memory

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # divided afterwards: gloo has no average
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}
REDUCE_OPS = tuple(_REDUCE_OPS)

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": Tensor.add_,
    "avg": Tensor.add_,
    "max": lambda a, b: torch.maximum(a, b, out=a),
    "min": lambda a, b: torch.minimum(a, b, out=a),
    "prod": Tensor.mul_,
}

# On CPU, an all-reduce of up to this many bytes (of fewer on more ranks, in proportion) takes one trip: everyone sends
# all it has to everyone. On 2 to 8 ranks that takes a half to a third of the time of gloo's all-reduce, and less than a
# reduce-scatter and an all-gather.
_ONE_TRIP_BYTES = 1 << 18
_ONE_TRIP_RANKS = 8

# What every backend can carry. Other dtypes travel as bytes.
_BACKEND_DTYPES = frozenset(
    (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    )
)

# Gloo's tags are 31-bit. The upper half is for direct exchange, whose tags only have to differ from those
# still in flight; the lower half is for the caller's sends and receives.
_TAG_RANGE = 1 << 30


@dataclass
class Traffic:
    """What a rank has sent by one kind of collective.

    ``bytes`` are those of an algorithm that sends no more than it must: with n ranks, an all-gather of what this
    rank has sends it to the n - 1 others; a reduce-scatter sends (n - 1) / n of its input; an all-reduce is both.
    """

    calls: int = 0
    bytes: int = 0


@dataclass
class _GroupState:
    """What the communicators that stand on one process group have in common."""

    tags: itertools.count[int] = field(default_factory=itertools.count)
    all_reduces: deque[Callable[[], None]] = field(default_factory=deque)
    """What is left to do of all-reduces in flight, in the order in which they began."""
    shared_memory: SharedMemory | None = None


_states: WeakKeyDictionary[dist.ProcessGroup, _GroupState] = WeakKeyDictionary()


class Work(Protocol):
    """A collective in flight. ``wait`` makes its result usable: on CUDA by the current stream, on CPU by
    the host."""

    def wait(self) -> Any: ...

    def is_completed(self) -> bool:
        """Whether it has been done, without waiting. On CPU it is known only to those that have waited."""
        ...


class _Done:
    """A collective that needed no communication."""

    def wait(self) -> None:
        return None

    def is_completed(self) -> bool:
        return True


DONE: Work = _Done()


class _Pending:
    """Point-to-point works of one collective, and what is to be done once they have all arrived."""

    def __init__(self, works: list[Any], finish: Callable[[], None] | None, keep: object) -> None:
        self._works = works
        self._finish = finish
        self._keep = keep  # buffers that the transport reads or writes until wait()

    def wait(self) -> None:
        # What has failed stays, so that waiting again does not pass for success.
        while self._works:
            self._works[-1].wait()
            self._works.pop()
        if self._finish is not None:
            self._finish()
        self._finish = self._keep = None

    def is_completed(self) -> bool:
        return self._finish is None and all(work.is_completed() for work in self._works)


class Communicator:
    """The ranks of one process group, and collectives between them.

    Args:
        group: a ``torch.distributed`` process group this process belongs to; ``None`` for this rank alone.
        device: the device of the tensors that are communicated; by default CUDA for an NCCL group, else CPU.

    Attributes:
        rank: this process's rank within the communicator.
        size: the number of ranks.
        ranks: the global ranks, in order.
        traffic: what this rank has sent through this object, by the collective's name.
        symmetric_memory: whether operations that fuse products with communication may read the other ranks'
            memory; see ``bmt_tp.enable_symmetric_memory``.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | str | None = None) -> None:
        self.group = group
        if group is None:
            self.rank, self.size = 0, 1
            self.ranks: tuple[int, ...] = (dist.get_rank() if dist.is_initialized() else 0,)
        else:
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            self.ranks = tuple(dist.get_process_group_ranks(group))
        if device is None:
            nccl = group is not None and "nccl" in dist.get_backend(group)
            device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        self.device = torch.device(device)
        self.traffic: dict[str, Traffic] = {}
        self.symmetric_memory = False
        self._stream: torch.cuda.Stream | None = None
        if group is not None and group not in _states:
            _states[group] = _GroupState()

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size}, ranks={self.ranks}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        return self  # a process group is a connection, not a value

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The side stream for collectives that overlap with computation; ``None`` on CPU."""
        if self._stream is None and self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device, priority=-1)
        return self._stream

    def share_memory(self, timeout: datetime.timedelta = datetime.timedelta(minutes=30)) -> bool:
        """Let short all-reduces go through memory that the ranks share; every rank must call this.

        It needs ``bmt_kernels``, and ranks on one Linux host. ``init_distributed`` calls this for its communicators.

        Args:
            timeout: after which such an all-reduce fails if a rank has not joined it.

        Returns:
            Whether they do, from now on: the same on every rank. Otherwise all goes on as before.
        """
        if self.size == 1 or self.device.type != "cpu":
            return False
        if self._state.shared_memory is None:
            self._state.shared_memory = connect_shared_memory(self, timeout)
        return self._state.shared_memory is not None

    def _count(self, op: str, sent: int) -> None:
        if self.size > 1:
            traffic = self.traffic.setdefault(op, Traffic())
            traffic.calls += 1
            traffic.bytes += sent

    # --- collectives ------------------------------------------------------------------------------

    def all_gather(self, out: Tensor, src: Tensor, async_op: bool = False) -> Work:
        """Concatenate every rank's ``src`` into ``out``, in rank order.

        ``out`` (size × numel) and ``src`` (numel) are contiguous; ``src`` may be this rank's part of ``out``.
        """
        self._check_contiguous(out=out, src=src)
        _check_same_dtype("all_gather", out, src)
        if out.numel() != self.size * src.numel():
            raise ValueError(
                f"all_gather: out has {out.numel()} elements; {self.size} ranks × {src.numel()} are needed"
            )
        flat, mine = _flat(out), _flat(src)
        numel = mine.numel()
        self._count("all_gather", (self.size - 1) * _bytes(mine))
        if self.size == 1:
            _copy_unless_same(flat, mine)
            return DONE
        if out.is_cuda:
            work = _compat.all_gather_single(_wire(flat), _wire(mine), group=self.group, async_op=async_op)
            return self._finish_now(work, async_op)
        chunks = [flat[r * numel : (r + 1) * numel] for r in range(self.size)]
        works = self._exchange([mine] * self.size, chunks, self._next_tag())
        _copy_unless_same(chunks[self.rank], mine)
        return self._finish_now(_Pending(works, None, (flat, mine)), async_op)

    def reduce_scatter(self, out: Tensor, src: Tensor, op: str = "sum", async_op: bool = False) -> Work:
        """Reduce ``src`` over the ranks and keep this rank's part of the result in ``out``.

        ``src`` (size × numel) and ``out`` (numel) are contiguous and do not overlap. On CPU ``src`` must
        stay unchanged until ``wait``.
        """
        _check_op(op, src)
        self._check_contiguous(out=out, src=src)
        _check_same_dtype("reduce_scatter", out, src)
        if src.numel() != self.size * out.numel():
            raise ValueError(
                f"reduce_scatter: src has {src.numel()} elements; {self.size} ranks × {out.numel()} are needed"
            )
        flat, mine = _flat(src), _flat(out)
        numel = mine.numel()
        self._count("reduce_scatter", (self.size - 1) * _bytes(mine))
        if self.size == 1:
            _copy_unless_same(mine, flat)
            return DONE
        if src.is_cuda:
            reduce_op = dist.ReduceOp.AVG if op == "avg" else _REDUCE_OPS[op]
            work = _compat.reduce_scatter_single(mine, flat, reduce_op, group=self.group, async_op=async_op)
            return self._finish_now(work, async_op)
        chunks = [flat[r * numel : (r + 1) * numel] for r in range(self.size)]
        return self._finish_now(self._direct_reduce_scatter(mine, chunks, op), async_op)

    def all_reduce(self, tensor: Tensor, op: str = "sum", async_op: bool = False) -> Work:
        """Reduce ``tensor`` (contiguous) over the ranks, in place on every rank.

        The result is the same, bit for bit, on every rank.  On CPU a large all-reduce does its second half
        in ``wait``, after those that began earlier on the same process group.  So ranks may wait for several
        in different orders, but a rank that waits needs the others to come to a wait, too.
        """
        _check_op(op, tensor)
        self._check_contiguous(tensor=tensor)
        self._count("all_reduce", 2 * (self.size - 1) * _bytes(tensor) // self.size)
        if self.size == 1 or tensor.numel() == 0:
            return DONE
        if tensor.is_cuda:
            reduce_op = dist.ReduceOp.AVG if op == "avg" else _REDUCE_OPS[op]
            return self._finish_now(dist.all_reduce(tensor, reduce_op, group=self.group, async_op=async_op), async_op)
        flat = _flat(tensor)
        # Not gloo's: its max and min lose a NaN, or keep it, depending on who holds it.
        short = _bytes(flat) * max(self.size, _ONE_TRIP_RANKS) <= _ONE_TRIP_BYTES * _ONE_TRIP_RANKS
        memory = self._state.shared_memory
        if not short:
            work = self._direct_all_reduce(flat, op)
        elif memory is None:
            work = self._one_trip_all_reduce(flat, op)
        else:
            work = self._shared_memory_all_reduce(memory, flat, op)
        return self._finish_now(work, async_op)

    def broadcast(self, tensor: Tensor, root: int, async_op: bool = False) -> Work:
        """Copy rank ``root``'s ``tensor`` (contiguous) to every rank's, in place."""
        self._check_rank("root", root)
        self._check_contiguous(tensor=tensor)
        self._count("broadcast", (self.size - 1) * _bytes(tensor) if self.rank == root else 0)
        if self.size == 1 or tensor.numel() == 0:
            return DONE
        flat = _flat(tensor)
        if not tensor.is_cuda:
            nothing = flat[:0]
            sends = [flat if self.rank == root else nothing] * self.size
            recvs = [flat if r == root else nothing for r in range(self.size)]
            works = self._exchange(sends, recvs, self._next_tag())
            return self._finish_now(_Pending(works, None, flat), async_op)
        work = dist.broadcast(_wire(flat), self.ranks[root], group=self.group, async_op=async_op)
        return self._finish_now(work, async_op)

    def send(self, tensor: Tensor, peer: int, tag: int = 0, async_op: bool = False) -> Work:
        """Send ``tensor`` (contiguous) to rank ``peer``, which must call :meth:`recv` with the same tag."""
        data = self._message(tensor, peer, tag)
        self._count("send", _bytes(tensor))
        work = dist.isend(data, self.ranks[peer], group=self.group, tag=tag)
        return self._finish_now(_Pending([work], None, tensor), async_op)

    def recv(self, tensor: Tensor, peer: int, tag: int = 0, async_op: bool = False) -> Work:
        """Receive into ``tensor`` (contiguous) what rank ``peer`` sends."""
        data = self._message(tensor, peer, tag)
        work = dist.irecv(data, self.ranks[peer], group=self.group, tag=tag)
        return self._finish_now(_Pending([work], None, tensor), async_op)

    def send_recv(
        self, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]], async_op: bool = False
    ) -> Work:
        """Several :meth:`send` and :meth:`recv` (pairs of tensor and peer) at once.

        Ranks that send to each other must use this: NCCL runs what goes between two ranks in order, so two
        sends that face each other would wait forever.
        """

        def op(call: Any, tensor: Tensor, peer: int) -> dist.P2POp:
            return dist.P2POp(call, self._message(tensor, peer, 0), self.ranks[peer], self.group)

        ops = [op(dist.irecv, *message) for message in recvs] + [op(dist.isend, *message) for message in sends]
        if not ops:
            return DONE
        for tensor, _ in sends:
            self._count("send", _bytes(tensor))
        return self._finish_now(_Pending(dist.batch_isend_irecv(ops), None, (sends, recvs)), async_op)

    def barrier(self) -> None:
        """Return once every rank has called this."""
        if self.size > 1:
            token = torch.zeros(1, device=self.device)
            self.all_reduce(token)
            token.item()  # on CUDA: until the device has done it

    # --- objects ----------------------------------------------------------------------------------

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's ``obj`` (picklable), in rank order. For the ranks of one job, which trust each other."""
        if self.size == 1:
            return [obj]
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, obj, group=self.group)
        return out

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Rank ``root``'s ``obj`` (picklable) on every rank."""
        self._check_rank("root", root)
        if self.size == 1:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, self.ranks[root], group=self.group, device=self.device)
        return box[0]

    # --- direct exchange (CPU) --------------------------------------------------------------------

    @property
    def _state(self) -> _GroupState:
        assert self.group is not None
        return _states[self.group]

    def _next_tag(self) -> int:
        return _TAG_RANGE + next(self._state.tags) % _TAG_RANGE

    def _exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor], tag: int) -> list[Any]:
        """Send ``sends[r]`` to, and receive ``recvs[r]`` from, every other rank r at once.

        Ranks agree on what is empty (the sizes are the same function of the ranks on both sides), so
        neither side waits for an empty message.
        """
        assert self.group is not None
        # The process group's own methods: those of torch.distributed cost several times as much.
        send, recv = self.group.send, self.group.recv
        works = []
        for k in range(1, self.size):
            source = (self.rank - k) % self.size
            if recvs[source].numel():
                works.append(recv([recvs[source]], source, tag))
        for k in range(1, self.size):
            target = (self.rank + k) % self.size
            if sends[target].numel():
                works.append(send([sends[target]], target, tag))
        return works

    def _direct_reduce_scatter(self, out: Tensor, chunks: Sequence[Tensor], op: str) -> _Pending:
        """Reduce ``chunks[rank]`` over the ranks into ``out``; chunk sizes may differ between ranks."""
        received = out.new_empty(self.size - 1, out.numel())
        parts = [received[r if r < self.rank else r - 1] for r in range(self.size) if r != self.rank]
        parts.insert(self.rank, chunks[self.rank])
        works = self._exchange(chunks, parts, self._next_tag())

        return _Pending(works, lambda: _reduce(out, parts, op), (received, chunks))

    def _one_trip_all_reduce(self, flat: Tensor, op: str) -> _Pending:
        reduced = torch.empty_like(flat)
        reduce = self._direct_reduce_scatter(reduced, [flat] * self.size, op)

        def finish() -> None:
            reduce.wait()
            flat.copy_(reduced)

        return _Pending([], finish, flat)

    def _direct_all_reduce(self, flat: Tensor, op: str) -> _Pending:
        bounds = [flat.numel() * r // self.size for r in range(self.size + 1)]
        chunks = [flat[a:b] for a, b in itertools.pairwise(bounds)]
        mine = chunks[self.rank]
        reduced = torch.empty_like(mine)
        reduce = self._direct_reduce_scatter(reduced, chunks, op)
        # Taken now, so that ranks which wait for their collectives in different orders still agree.
        tag = self._next_tag()

        def complete() -> None:
            reduce.wait()
            mine.copy_(reduced)
            for work in self._exchange([mine] * self.size, chunks, tag):
                work.wait()

        return self._complete_in_order(complete, flat)

    def _shared_memory_all_reduce(self, memory: SharedMemory, flat: Tensor, op: str) -> _Pending:
        memory.send(flat)

        def complete() -> None:
            _reduce(flat, memory.receive(flat), op)
            memory.release()

        return self._complete_in_order(complete, flat)

    def _complete_in_order(self, complete: Callable[[], None], keep: object) -> _Pending:
        """Leave ``complete`` for ``wait``: every rank completes all-reduces in one order, whichever it waits for."""
        unfinished = self._state.all_reduces
        done = False

        def last_step() -> None:
            nonlocal done
            complete()
            done = True

        def finish() -> None:
            while not done:
                unfinished[0]()
                unfinished.popleft()

        unfinished.append(last_step)
        return _Pending([], finish, keep)

    # --- checks -----------------------------------------------------------------------------------

    @staticmethod
    def _finish_now(work: Work, async_op: bool) -> Work:
        if async_op:
            return work
        if work is not None:  # torch returns None for a collective it has already enqueued
            work.wait()
        return DONE

    @staticmethod
    def _check_contiguous(**tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            if not tensor.is_contiguous():
                raise ValueError(
                    f"{name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous; "
                    f"pass {name}.contiguous()"
                )

    def _check_rank(self, name: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"{name}={rank} is not a rank of this communicator (0 to {self.size - 1})")

    def _message(self, tensor: Tensor, peer: int, tag: int) -> Tensor:
        """``tensor`` as it travels to or from ``peer``."""
        self._check_rank("peer", peer)
        if peer == self.rank:
            raise ValueError(f"peer={peer} is this rank itself; a rank cannot send to or receive from itself")
        if not 0 <= tag < _TAG_RANGE:
            raise ValueError(f"tag={tag} is out of range; choose one from 0 to {_TAG_RANGE - 1}")
        self._check_contiguous(tensor=tensor)
        return _wire(_flat(tensor))


def _check_op(op: str, tensor: Tensor) -> None:
    if op not in _REDUCE_OPS:
        raise ValueError(f"op={op!r} is not a reduction; choose one of {', '.join(REDUCE_OPS)}")
    if (op in ("max", "min") and tensor.is_complex()) or (op == "avg" and tensor.dtype == torch.bool):
        raise TypeError(f"op={op!r} is not defined for {tensor.dtype}")


def _check_same_dtype(name: str, out: Tensor, src: Tensor) -> None:
    if out.dtype != src.dtype:
        raise ValueError(f"{name}: out is {out.dtype} and src is {src.dtype}; they must have the same dtype")


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _flat(tensor: Tensor) -> Tensor:
    """A contiguous tensor in one dimension, without its history: what is received may go into a parameter."""
    return tensor.detach().view(-1)


def _wire(flat: Tensor) -> Tensor:
    """``flat`` as a dtype that every backend carries."""
    return flat if flat.dtype in _BACKEND_DTYPES else flat.view(torch.uint8)


def _copy_unless_same(dst: Tensor, src: Tensor) -> None:
    if dst.data_ptr() != src.data_ptr() or dst.numel() != src.numel():
        dst.copy_(src)


def _reduce(out: Tensor, parts: Sequence[Tensor], op: str) -> None:
    """Reduce the ranks' ``parts`` into ``out``, in rank order, so that a sum does not depend on who computes it."""
    out.copy_(parts[0])
    for part in parts[1:]:
        _COMBINE[op](out, part)
    if op == "avg":
        _divide(out, len(parts))


def _divide(tensor: Tensor, size: int) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.div_(size)
    else:
        tensor.floor_divide_(size)
