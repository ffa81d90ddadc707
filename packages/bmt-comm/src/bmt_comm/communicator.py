"""A communicator: a group of ranks, and raw (non-differentiable) collectives between them.

CUDA tensors go through the collectives of the process group (NCCL). Collectives on CPU tensors go through shared memory
(:mod:`bmt_comm.shared_memory`) if :meth:`Communicator.share_memory` was called and succeeded, and otherwise by messages
between all ranks (:mod:`bmt_comm.direct_exchange`).

Every rank of a communicator must call the same collectives on it in the same order.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import _compat
from .combine import TORCH_OPS, check_op, combine
from .direct_exchange import TAG_RANGE
from .fixed_order import TREE_SUM
from .hosts import HostsCollectives
from .journal import Journal, journals
from .operation import Operation, describe
from .packing import Packing
from .plain import check_in_memory, plain_tensor
from .shared_memory import Messages, MessageWork, SharedMemoryCollectives
from .shared_vector import make_shared_vector
from .transport import HostCollectives, Transport, host_collectives, share_memory, transports, use_messages
from .watched import Watched
from .work import DONE, Pending, Work

# The dtypes that every backend supports. Other dtypes are sent as bytes.
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


_STAGED_BYTES = 1 << 24  # a message up to this size is copied into shared memory at once even if its sender waits


@dataclass
class Traffic:
    """What a rank has sent by one kind of collective.

    ``bytes`` are those of an algorithm that sends no more than it must. With n ranks, an all-gather sends this rank's
    input to the n - 1 others, a reduce-scatter sends (n - 1) / n of its input, and an all-reduce sends both.
    """

    calls: int = 0
    bytes: int = 0


class Communicator:
    """The ranks of one process group, and collectives between them.

    With ``async_op`` a collective returns a :class:`Work` at once, and its result is there after ``wait``. Ranks may
    wait for several collectives in different orders. A rank that waits needs the others to have called the collective.
    For all-reduces of more than 256 KiB on the CPU, and for all collectives over several hosts that share memory within
    each, it also needs the others to wait. On the CPU, 4096 collectives that some rank has not waited for may be in
    flight, 256 if they are large.

    Ranks whose next collectives differ do not take each other's data. Through shared memory all of them raise a
    RuntimeError that names both, and with gloo they time out. Collectives are the same if they have the same reduction
    or root, dtype, shape (of ``src`` of an all-gather, ``out`` of a reduce-scatter), and ``label``, a short text that
    says what the collective is for.

    Args:
        group: a ``torch.distributed`` process group this process belongs to; ``None`` for this rank alone.
        device: the device of the tensors that are communicated; by default CUDA for an NCCL group, else CPU.

    Attributes:
        rank: this process's rank within the communicator.
        size: the number of ranks.
        ranks: the global ranks, in order.
        traffic: what this rank has sent through this object, by the collective's name.
        symmetric_memory: whether operations that fuse matrix products with communication may read the memory of other
            ranks; see ``bmt_tp.enable_symmetric_memory``.
    """

    is_planned = False
    """Whether the other ranks do not exist; see ``planned_context``."""

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | str | None = None) -> None:
        self.group = group
        if group is None:
            self.rank, self.size = 0, 1
            self.ranks: tuple[int, ...] = (dist.get_rank() if dist.is_initialized() else 0,)
        else:
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            self.ranks = tuple(dist.get_process_group_ranks(group))
        if device is None:
            nccl = group is not None and _compat.uses_nccl(group)
            device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        self.device = torch.device(device)
        self.traffic: dict[str, Traffic] = {}
        self.symmetric_memory = False
        self._stream: torch.cuda.Stream | None = None
        self._tokens: Tensor | None = None  # for barriers; their values are not used
        make_transport = None if group is None else transports.get(dist.get_backend(group))
        self._transport = None if make_transport is None or group is None else make_transport(group)
        if group is not None:
            use_messages(group)
        if group is not None and group not in journals:
            journals[group] = Journal(group.group_name, self.ranks)
        self._journal = Journal("", self.ranks) if group is None else journals[group]

    @property
    def waited(self) -> float:
        """Seconds that this rank has waited for operations of the process group. On CUDA the host seldom waits."""
        return self._journal.waited

    @property
    def in_order(self) -> bool:
        """Whether operations run one at a time in the order in which they were posted, and a send only when its receive
        has been posted, as with NCCL. Other backends distinguish messages by tags, and buffer sent messages."""
        return self.device.type == "cuda" if self._transport is None else self._transport.in_order

    @property
    def eager(self) -> bool:
        """Whether all ranks of the job must take part in making another process group like this one."""
        if self._transport is not None:
            return self._transport.eager
        return self.group is not None and self.group.bound_device_id is not None

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
        """Let collectives on the CPU go through shared memory; every rank must call this.

        It needs ``bmt_kernels``, and ranks on one Linux host. On several hosts with the same number of ranks, at least
        two, collectives go through shared memory within a host, and by messages between hosts. ``init_distributed``
        calls this for its communicators.

        Args:
            timeout: after which a collective fails if a rank has not joined it.

        Returns:
            Whether all ranks share memory from now on: the same on every rank.
        """
        if self.group is None or self.size == 1 or self.device.type != "cpu" or self._transport is not None:
            return False
        share_memory(self.group, self.ranks, timeout)
        return self.shares_memory

    @property
    def shares_memory(self) -> bool:
        """Whether there are several ranks, and all share memory."""
        return self._shared is not None

    @property
    def _shared(self) -> SharedMemoryCollectives | None:
        on_host = None if self.group is None else self._on_host
        return on_host if isinstance(on_host, SharedMemoryCollectives) else None

    @_compat.not_compiled
    def shared_vector(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A vector of zeros in shared memory: each rank sees what the others write. Every rank must call this.

        After :meth:`barrier` all ranks have written, or read. The memory is released when the tensors of all ranks are
        gone. Returns None on every rank if the ranks do not share memory.
        """
        return make_shared_vector(self, numel, dtype) if self.shares_memory else None

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised vector to be the ``src`` of one :meth:`reduce_scatter`; no view of it is valid afterwards.

        If ranks share memory, the vector lies in it, and the others read it without a copy.
        """
        shared = self._shared if self.shares_memory else None
        vector = None if shared is None else shared.empty(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=self.device) if vector is None else vector

    def discard(self, vector: Tensor) -> None:
        """A vector that :meth:`empty` has made will not be reduced."""
        if self._shared is not None:
            self._shared.discard(vector)

    @property
    def shares_within_hosts(self) -> bool:
        """Whether the ranks are on several hosts, and share memory within each (see :meth:`share_memory`)."""
        return self.group is not None and isinstance(self._on_host, HostsCollectives)

    def _count(self, op: str, sent: int) -> None:
        if self.size > 1:
            traffic = self.traffic.get(op)
            if traffic is None:
                traffic = self.traffic[op] = Traffic()
            traffic.calls += 1
            traffic.bytes += sent

    def _begin(self, kind: str, detail: object, tensor: Tensor, label: str) -> Operation:
        """Record an operation that all ranks of the process group begin."""
        return self._journal.begin(*describe(kind, detail, tensor.dtype, tensor.shape, label))

    def _note(self, kind: str, peers: object, tensor: Tensor, label: str = "") -> Operation:
        """Record an operation that some ranks of the process group begin."""
        return self._journal.note(describe(kind, peers, tensor.dtype, tensor.shape, label)[0])

    # --- collectives ------------------------------------------------------------------------------

    @_compat.not_compiled
    def all_gather(self, out: Tensor, src: Tensor, async_op: bool = False, label: str = "") -> Work:
        """Concatenate every rank's ``src`` into ``out``, in rank order.

        ``out`` (size × numel) and ``src`` (numel) are contiguous; ``src`` may be this rank's part of ``out``.
        """
        self._check_memory(out=out, src=src)
        _check_same_dtype("all_gather", out, src)
        if out.numel() != self.size * src.numel():
            raise ValueError(
                f"all_gather: out has {out.numel()} elements; {self.size} ranks × {src.numel()} are needed"
            )
        flat, mine = _flat(out), _flat(src)
        numel = mine.numel()
        self._count("all_gather", (self.size - 1) * mine.nbytes)
        if self.size == 1:
            _copy_unless_same(flat, mine)
            return DONE
        if numel == 0:
            return DONE
        operation = self._begin("all_gather", "", src, label)
        if out.is_cuda:
            work = _compat.all_gather_single(_wire(flat), _wire(mine), group=self.group, async_op=async_op)
            return self._finish_now(work, async_op, operation)
        chunks = [flat[r * numel : (r + 1) * numel] for r in range(self.size)]
        _copy_unless_same(chunks[self.rank], mine)
        work = self._on_host.all_gather(chunks, mine, operation, waits_at_once=not async_op)
        return self._finish_now(work, async_op, operation)

    @_compat.not_compiled
    def stacked(self, x: Tensor, label: str = "") -> Tensor:
        """Every rank's ``x`` (contiguous), in rank order: shape (size, *x.shape)."""
        out = x.new_empty((self.size, *x.shape))
        self.all_gather(out, x, label=label)
        return out

    @_compat.not_compiled
    def reduce_scatter(
        self, out: Tensor, src: Tensor, op: str = "sum", async_op: bool = False, label: str = ""
    ) -> Work:
        """Reduce ``src`` over the ranks and write this rank's part of the result to ``out``.

        ``src`` (size × numel) and ``out`` (numel) are contiguous and do not overlap. On CPU ``src`` must not change
        until ``wait``. A ``src`` that :meth:`empty` has made must not be used afterwards, either. Both have the same
        dtype; for ``TREE_SUM`` the dtype of ``out`` may differ.
        """
        check_op(op, src)
        self._check_memory(out=out, src=src)
        if op != TREE_SUM:
            _check_same_dtype("reduce_scatter", out, src)
        if src.numel() != self.size * out.numel():
            raise ValueError(
                f"reduce_scatter: src has {src.numel()} elements; {self.size} ranks × {out.numel()} are needed"
            )
        flat, mine = _flat(src), _flat(out)
        numel = mine.numel()
        self._count("reduce_scatter", (self.size - 1) * mine.nbytes)
        if self.size == 1:
            _copy_unless_same(mine, flat)
            return DONE
        if numel == 0:
            return DONE
        operation = self._begin("reduce_scatter", op, out, label)
        if src.is_cuda and op == TREE_SUM:
            return self._finish_now(self._tree_sum(mine, flat), async_op, operation)
        if src.is_cuda:
            work = _compat.reduce_scatter_single(mine, flat, TORCH_OPS[op], group=self.group, async_op=async_op)
            return self._finish_now(work, async_op, operation)
        chunks = [flat[r * numel : (r + 1) * numel] for r in range(self.size)]
        work = self._on_host.reduce_scatter(mine, chunks, op, operation, waits_at_once=not async_op)
        return self._finish_now(work, async_op, operation)

    @_compat.not_compiled
    def packed_reduce_scatter(
        self, out: Tensor, src: Tensor, packing: Packing, async_op: bool = False, label: str = ""
    ) -> Work:
        """Sum ``src`` over the ranks and write this rank's part to ``out``. Ranks send packed numbers.

        Each number is rounded at most once, and sums are in fp32. Every rank packs its chunks for the other ranks, and
        adds up chunks in the order of the ranks. The rank's chunk for itself is not rounded. If ranks share memory
        within each of several hosts, each host adds up first, and only its sums for other hosts are packed.

        ``src`` (size × numel; float32, bfloat16 or float16) and ``out`` (numel; float32) are contiguous and do not
        overlap. ``src`` must not change until ``wait``.
        """
        self._check_memory(out=out, src=src)
        if out.dtype != torch.float32:
            raise TypeError(f"packed_reduce_scatter: out is {out.dtype}; it must be float32")
        if src.numel() != self.size * out.numel():
            raise ValueError(
                f"packed_reduce_scatter: src has {src.numel()} elements; {self.size} ranks × {out.numel()} are needed"
            )
        mine, numel = _flat(out), out.numel()
        if self.size == 1:
            mine.copy_(_flat(src))
            return DONE
        if numel == 0:
            return DONE
        chunks = _flat(src).view(self.size, numel).unbind()
        on_host = self._on_host if self.group is not None and not src.is_cuda else None
        if isinstance(on_host, HostsCollectives):
            hosts = on_host.host_count
            self._count("reduce_scatter", (self.size - hosts) * chunks[0].nbytes)
            self._count("send", (hosts - 1) * packing.bytes(numel))
            operation = self._begin("packed_reduce_scatter", packing, src, label)
            work = on_host.packed_reduce_scatter(mine, chunks, packing, operation)
            return self._finish_now(work, async_op, operation)
        others = [rank for rank in range(self.size) if rank != self.rank]
        packed = out.new_empty((2, self.size, packing.bytes(numel)), dtype=torch.uint8)
        sent, received = packed[0].unbind(), packed[1].unbind()
        for rank in others:
            packing.pack(sent[rank], chunks[rank])
        work = self.send_recv([(sent[r], r) for r in others], [(received[r], r) for r in others], async_op, label)
        summing = Pending([work], lambda: packing.add_up(mine, received, self.rank, chunks[self.rank]), sent)
        if async_op:
            return summing
        summing.wait()
        return DONE

    @_compat.not_compiled
    def all_reduce(self, tensor: Tensor, op: str = "sum", async_op: bool = False, label: str = "") -> Work:
        """Reduce ``tensor`` (contiguous) over the ranks, in place on every rank.

        The result is the same, bit for bit, on every rank.
        """
        check_op(op, tensor)
        self._check_memory(tensor=tensor)
        self._count("all_reduce", 2 * (self.size - 1) * tensor.nbytes // self.size)
        if self.size == 1 or tensor.numel() == 0:
            return DONE
        operation = self._begin("all_reduce", op, tensor, label)
        if tensor.is_cuda and op == TREE_SUM:
            self._tree_sum_everywhere(_flat(tensor))
            return DONE
        if tensor.is_cuda:
            work = dist.all_reduce(tensor, TORCH_OPS[op], group=self.group, async_op=async_op)
            return self._finish_now(work, async_op, operation)
        return self._finish_now(self._on_host.all_reduce(_flat(tensor), op, operation), async_op, operation)

    def _tree_sum(self, mine: Tensor, flat: Tensor) -> Work:
        """Reduce-scatter in a fixed order, on CUDA. It sends as many bytes as NCCL's, whose order is not fixed."""
        received = torch.empty_like(flat)
        work = dist.all_to_all_single(received, flat, group=self.group, async_op=True)
        parts = received.view(self.size, -1).unbind()
        return Pending([work], lambda: combine(mine, parts, TREE_SUM), flat)

    def _tree_sum_everywhere(self, flat: Tensor) -> None:
        part = -(-flat.numel() // self.size)
        padded = flat.new_zeros(self.size * part)
        padded[: flat.numel()] = flat
        mine = flat.new_empty(part)
        self._tree_sum(mine, padded).wait()
        _compat.all_gather_single(padded, mine, group=self.group, async_op=False)
        flat.copy_(padded[: flat.numel()])

    @_compat.not_compiled
    def broadcast(self, tensor: Tensor, root: int, async_op: bool = False, label: str = "") -> Work:
        """Copy rank ``root``'s ``tensor`` (contiguous) to every rank's, in place.

        On the CPU the root does not wait for the others while they have at most 256 MiB to receive, over all
        communicators. Beyond that it waits until they have called this, too.
        """
        self._check_rank("root", root)
        self._check_memory(tensor=tensor)
        self._count("broadcast", (self.size - 1) * tensor.nbytes if self.rank == root else 0)
        if self.size == 1 or tensor.numel() == 0:
            return DONE
        flat = _flat(tensor)
        operation = self._begin("broadcast from", root, tensor, label)
        if not tensor.is_cuda:
            return self._finish_now(self._on_host.broadcast(flat, root, operation), async_op, operation)
        work = dist.broadcast(_wire(flat), self.ranks[root], group=self.group, async_op=async_op)
        return self._finish_now(work, async_op, operation)

    @_compat.not_compiled
    def send(self, tensor: Tensor, peer: int, tag: int = 0, async_op: bool = False) -> Work:
        """Send ``tensor`` (contiguous) to rank ``peer``, which must call :meth:`recv` with the same tag.

        Through shared memory it does not wait for the receive, unless 64 MiB of messages have not been received.
        """
        data = self._message(tensor, peer, tag)
        self._count("send", tensor.nbytes)
        operation = self._note("send to", peer, tensor)
        if self._transport is not None:
            return self._finish_now(self._transport.send(data, peer, tag), async_op, operation, (peer,))
        if (messages := self._messages(data)) is not None:
            sent = messages.send(data, peer, tag)
            return DONE if sent is None else self._finish_now(sent, async_op, operation, (peer,))
        work = dist.isend(data, self.ranks[peer], group=self.group, tag=tag)
        return self._finish_now(Pending([work], None, tensor), async_op, operation, (peer,))

    @_compat.not_compiled
    def recv(self, tensor: Tensor, peer: int, tag: int = 0, async_op: bool = False) -> Work:
        """Receive a message of rank ``peer`` into ``tensor`` (contiguous)."""
        data = self._message(tensor, peer, tag)
        operation = self._note("receive from", peer, tensor)
        if self._transport is not None:
            return self._finish_now(self._transport.recv(data, peer, tag), async_op, operation, (peer,))
        if (messages := self._messages(data)) is not None:
            receive = messages.receive(data, peer, tag)
            try:
                return self._finish_now(receive, async_op, operation, (peer,))
            except BaseException:
                _cancel_all([receive])
                raise
        work = dist.irecv(data, self.ranks[peer], group=self.group, tag=tag)
        return self._finish_now(Pending([work], None, tensor), async_op, operation, (peer,))

    @_compat.not_compiled
    def send_recv(
        self,
        sends: Sequence[tuple[Tensor, int]],
        recvs: Sequence[tuple[Tensor, int]],
        async_op: bool = False,
        label: str = "",
    ) -> Work:
        """Several :meth:`send` and :meth:`recv` (pairs of tensor and peer) at once.

        Ranks that send to each other must use this: NCCL runs the operations between two ranks in order, so both
        ranks would wait for ever in their sends.
        """
        incoming = [(self._message(tensor, peer, 0), peer) for tensor, peer in recvs]
        outgoing = [(self._message(tensor, peer, 0), peer) for tensor, peer in sends]
        if not incoming and not outgoing:
            return DONE
        for tensor, _ in sends:
            self._count("send", tensor.nbytes)
        receives: list[MessageWork] = []
        try:
            if self._transport is not None:
                works: list[Any] = self._transport.send_recv(outgoing, incoming)
            elif (messages := self._messages((incoming or outgoing)[0][0])) is not None:
                for data, peer in incoming:
                    receives.append(messages.receive(data, peer))  # in a loop, so that an interruption loses none
                # If the caller waits anyway, large messages are not staged, which takes less memory and time.
                sent = [messages.send(d, peer, stage=async_op or d.nbytes <= _STAGED_BYTES) for d, peer in outgoing]
                works = [*receives, *(work for work in sent if work is not None)]
            else:
                ops = [dist.P2POp(dist.irecv, data, self.ranks[peer], self.group) for data, peer in incoming]
                ops += [dist.P2POp(dist.isend, data, self.ranks[peer], self.group) for data, peer in outgoing]
                works = dist.batch_isend_irecv(ops)
            peers = tuple({peer for _, peer in (*incoming, *outgoing)})
            first = recvs[0] if recvs else sends[0]
            operation = self._note("send and receive with", peers, first[0], label)
            pending = Pending(works, None, (sends, recvs), partial(_cancel_all, receives) if receives else None)
            return self._finish_now(pending, async_op, operation, peers)
        except BaseException:
            _cancel_all(receives)
            raise

    @_compat.not_compiled
    def barrier(self, async_op: bool = False, label: str = "") -> Work:
        """Return (with ``async_op``: end ``wait``) once every rank has called this.

        On CUDA, ``wait`` after ``async_op`` makes the stream wait, not the host.
        """
        if self.size == 1:
            return DONE
        self._count("barrier", self.size - 1)
        if self._tokens is None:
            with torch.inference_mode(False):  # they may be written outside of inference mode later
                self._tokens = torch.zeros(self.size, dtype=torch.uint8, device=self.device)
        tokens = self._tokens
        operation = self._begin("barrier", "", tokens, label)
        if self.device.type == "cpu":
            chunks = list(tokens.split(1))
            return self._finish_now(self._on_host.all_gather(chunks, chunks[self.rank], operation), async_op, operation)
        work = dist.all_reduce(tokens, group=self.group, async_op=async_op)
        if not async_op:
            tokens[0].item()  # until the device has done it
        return self._finish_now(work, async_op, operation)

    def wait_for(self, work: Work, name: str) -> None:
        """Wait for ``work`` as for a collective with this name. It needs all ranks."""
        self._finish_now(work, False, self._journal.begin(name.encode(), 0))

    # --- objects ----------------------------------------------------------------------------------

    @_compat.not_compiled
    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's ``obj`` (picklable), in rank order. Unpickles data of the other ranks, which must be trusted."""
        if self.size == 1:
            return [obj]
        if self._transport is not None:
            return self._transport.all_gather_object(obj)
        out: list[Any] = [None] * self.size
        gather = _Call(lambda: dist.all_gather_object(out, obj, group=self.group))
        self._finish_now(gather, False, self._journal.begin(b"all_gather_object", 0))
        return out

    @_compat.not_compiled
    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Rank ``root``'s ``obj`` (picklable) on every rank."""
        self._check_rank("root", root)
        if self.size == 1:
            return obj
        if self._transport is not None:
            return self._transport.broadcast_object(obj, root)
        box = [obj]
        broadcast = _Call(
            lambda: dist.broadcast_object_list(box, self.ranks[root], group=self.group, device=self.device)
        )
        self._finish_now(broadcast, False, self._journal.begin(f"broadcast_object from {root}".encode(), 0))
        return box[0]

    @property
    def _on_host(self) -> HostCollectives | Transport:
        if self._transport is not None:
            return self._transport
        assert self.group is not None
        return host_collectives[self.group]

    def _messages(self, data: Tensor) -> Messages | None:
        """The shared-memory exchange for single messages; None: they go through the process group."""
        shared = None if data.is_cuda else self._shared
        return None if shared is None else shared.messages

    # --- checks -----------------------------------------------------------------------------------

    def _finish_now(
        self, work: Work, async_op: bool, operation: Operation, peers: tuple[int, ...] | None = None
    ) -> Work:
        """Wait unless ``async_op``. ``peers``: the ranks without which the operation does not end; None: all."""
        if work is None:  # torch returns None for a collective it has already enqueued
            return DONE
        ranks = self.ranks if peers is None else tuple(self.ranks[peer] for peer in peers)
        watched = Watched(work, self._journal, operation, ranks)
        if async_op:
            return watched
        watched.wait()
        return DONE

    def _check_memory(self, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            check_in_memory(name, tensor, may_be_meta=self.is_planned)

    def _check_rank(self, name: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"{name}={rank} is not a rank of this communicator (0 to {self.size - 1})")

    def _message(self, tensor: Tensor, peer: int, tag: int) -> Tensor:
        """``tensor`` in the form in which it is sent to or received from ``peer``."""
        self._check_rank("peer", peer)
        if peer == self.rank:
            raise ValueError(f"peer={peer} is this rank itself; a rank cannot send to or receive from itself")
        if not 0 <= tag < TAG_RANGE:
            raise ValueError(f"tag={tag} is out of range; choose one from 0 to {TAG_RANGE - 1}")
        self._check_memory(tensor=tensor)
        return _wire(_flat(tensor))


def _cancel_all(receives: Sequence[MessageWork]) -> None:
    """Cancel receives after an exception: the caller may use the tensors for something else."""
    for receive in receives:
        receive.cancel(RuntimeError("another message of the same call has failed, or its wait was interrupted"))


class _Call:
    """An operation that runs in ``wait``."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run

    def wait(self) -> None:
        self._run()

    def is_completed(self) -> bool:
        return False


def _check_same_dtype(name: str, out: Tensor, src: Tensor) -> None:
    if out.dtype != src.dtype:
        raise ValueError(f"{name}: out is {out.dtype} and src is {src.dtype}; they must have the same dtype")


def _flat(tensor: Tensor) -> Tensor:
    """A contiguous tensor as a vector, detached, because the caller may receive into a parameter."""
    if type(tensor) is Tensor and tensor.dim() == 1 and not tensor.requires_grad:
        return tensor
    return plain_tensor(tensor).detach().view(-1)


def _wire(flat: Tensor) -> Tensor:
    """``flat`` as a dtype that every backend supports."""
    return flat if flat.dtype in _BACKEND_DTYPES else flat.view(torch.uint8)


def _copy_unless_same(dst: Tensor, src: Tensor) -> None:
    if dst.data_ptr() != src.data_ptr() or dst.numel() != src.numel():
        dst.copy_(src)
