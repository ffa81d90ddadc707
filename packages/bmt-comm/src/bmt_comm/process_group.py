"""Shared memory as a backend of ``torch.distributed``: ``dist.init_process_group("bmt")``.

[Note: the process group "bmt"]
    Collectives on CPU tensors and single messages go through memory that the ranks share, where they are processes of
    one host that have bmt_kernels. On several hosts with as many ranks each, collectives go through memory within a
    host and by messages of gloo between hosts, and single messages over gloo. Everything else goes to a process group
    of torch with gloo for CPU tensors and, where there is NCCL, NCCL for CUDA tensors: CUDA tensors, sparse tensors,
    and all that a group does whose ranks cannot share memory.

    Which way a collective goes depends on what all ranks know: the operation and the dtype. It does not depend on how
    a tensor lies in memory. Where one rank goes another way, or raises, it tells the others of its host, which fail
    instead of waiting for it in shared memory. All single messages of CPU tensors in a group go one way, so that each
    finds its receive.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import itertools
import logging
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from .combine import TORCH_OPS, combines
from .direct_exchange import DirectExchange
from .hosts import HostsCollectives, connect, ranks_on_this_host
from .operation import Operation, describe
from .plain import PLAIN_TYPES, plain_tensor
from .progress import CollectiveWork, Progress
from .shared_memory import Messages, MessageWork, SharedMemoryCollectives
from .work import DONE, Pending, Work

NAME = "bmt"

_log = logging.getLogger("bmt_comm")
_OPS = {op: name for name, op in TORCH_OPS.items()}
_NO_LIMIT = datetime.timedelta(0)
_profiler_enabled = torch.autograd._profiler_enabled
_groups: weakref.WeakSet[Any] = weakref.WeakSet()

# Without its annotations: they are overloads, with names of arguments that differ between versions of torch.
_ProcessGroup: Any = dist.ProcessGroup


class SharedMemoryProcessGroup(_ProcessGroup):
    """A process group of the backend ``"bmt"``; see [Note: the process group "bmt"].

    Args:
        store: which nothing else uses.
        rank: of this process in the group.
        size: the number of ranks.
        ranks: the global ranks.
        timeout: after which a collective fails if a rank has not joined it.
        make_cuda_backend: makes the backend for CUDA tensors, given that for CPU tensors; None: there is none.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        ranks: Sequence[int],
        timeout: datetime.timedelta,
        make_cuda_backend: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(rank, size)  # with a store, torch does not let a subclass be made
        self._rank, self._size, self._store = rank, size, store
        self._ranks = tuple(ranks)
        self._splits: Counter[tuple[int, ...]] = Counter()  # that were made, by their ranks in this group
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, size, timeout)
        self._gloo._set_sequence_number_for_group()
        if hasattr(self._gloo.options, "global_ranks_in_group"):  # which newer versions of torch read in split_group
            self._gloo.options.global_ranks_in_group = list(ranks)
        self._backends = backends = {"cpu": self._gloo}
        if make_cuda_backend is not None:
            backends["cuda"] = make_cuda_backend(self._gloo)
        # The group that does the rest. It is another object, because a method of torch's class calls ours.
        self._rest: Any = dist.ProcessGroup(store, rank, size)
        for group in (self._rest, self):
            for device, backend in backends.items():
                kind = (
                    dist.ProcessGroup.BackendType.GLOO if backend is self._gloo else dist.ProcessGroup.BackendType.NCCL
                )
                group._set_default_backend(kind)
                group._register_backend(torch.device(device), kind, backend)
        self._progress = Progress(weakref.proxy(self))
        self._done = CollectiveWork(self._progress, lambda: DONE, [])  # stands for each that a call has waited for
        self._done.run()
        self._done.conclude()
        _groups.add(self)
        self._begun = 0  # operations through shared memory
        self._shared: SharedMemoryCollectives | HostsCollectives | _OfOneRank | None = None
        if size == 1:
            self._shared = _OfOneRank()
        else:
            direct = DirectExchange(self._rest, seconds_left=self._seconds_left)
            connected = connect(direct, ranks, self._seconds_left, ranks_on_this_host())
            if not isinstance(connected, str):
                self._shared = connected
            elif rank == 0 and ranks[0] == 0:
                _log.warning("process groups of the backend %r do all over gloo: %s", NAME, connected)

    @property
    def shares_memory(self) -> bool:
        """Whether collectives on CPU tensors go through memory that the ranks share."""
        return isinstance(self._shared, SharedMemoryCollectives)

    def __repr__(self) -> str:
        return f"SharedMemoryProcessGroup(rank={self._rank}, size={self._size}, shares_memory={self.shares_memory})"

    # --- what torch asks of a group ---------------------------------------------------------------

    def getBackendName(self) -> str:
        return NAME

    def get_group_store(self) -> dist.Store:
        return self._store

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: datetime.timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[Any] | None = None,
    ) -> Any:
        """A group of some of the ranks, of this kind if it serves CPU tensors; None on other ranks.

        All ranks of this group call it. The method of torch's class needs a store in that class; see ``__init__``.
        """
        kinds = {torch.device(device).type for device in device_types or self._backends}
        cuda = self._backends.get("cuda") if "cuda" in kinds else None
        members, limit = tuple(sorted(ranks)), timeout or self._gloo.options._timeout
        self._splits[members] += 1
        # With a number: a group of the same ranks must not find the keys of an earlier one in the store.
        name = group_name or f"{self.group_name}:split:{list(members)}:{self._splits[members]}"
        given: dict[str, Any] = {"opts": opts, "group_desc": group_desc, "device_types": device_types}
        given = {key: value for key, value in given.items() if value is not None}  # older versions lack some
        is_nccl = cuda is not None and cuda is not self._gloo
        part = self._rest.split_group(ranks, timeout=limit, group_name=name, **given) if is_nccl else None
        if "cpu" not in kinds:
            return part
        if self._rank not in members:
            return None

        def make_cuda_backend(gloo: Any) -> Any:
            return gloo if part is None else part._get_backend(torch.device("cuda"))

        group = SharedMemoryProcessGroup(
            dist.PrefixStore(f"{NAME} {name}/{self._splits[members]}/", self._store),
            members.index(self._rank),
            len(members),
            [self._ranks[rank] for rank in members],
            limit,
            None if cuda is None else make_cuda_backend,
        )
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self.group_desc}:split:{self._splits[members]}")
        return group

    def merge_remote_group(self, *arguments: Any, **options: Any) -> Any:
        """A group with the ranks of another job. It has torch's backends alone."""
        return self._rest.merge_remote_group(*arguments, **options)

    def shutdown(self) -> None:
        self._leave("the process group was destroyed")
        self._rest.shutdown()

    def abort(self) -> None:
        self._leave("the process group was aborted")
        self._rest.abort()

    def _leave(self, why: str) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.stop(why)
        self._progress.stop()

    # --- what its progress asks of it -------------------------------------------------------------

    def give_up(self, error: BaseException) -> None:
        """A collective has failed: all later ones through shared memory raise an error that tells of the first."""
        shared = self._shared
        if shared is not None:
            shared.give_up(error)

    def stop_waits(self, why: str) -> None:
        shared = self._shared
        if shared is not None:
            shared.stop(why)

    # --- collectives ------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None) -> Any:
        tensors = _listed(tensors)
        opts = _options(c10d.AllreduceOptions, timeout, reduceOp=op if opts is None else opts)
        op = _OPS.get(opts.reduceOp.op)
        if len(tensors) > 1 or not self._takes(tensors, op):
            return self._otherwise("all_reduce", tensors, self._rest.allreduce, tensors, opts)
        return self._all_reduce(tensors, op, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        tensors = _listed(tensors)
        opts = _options(c10d.AllreduceCoalescedOptions, reduceOp=opts)
        op = _OPS.get(opts.reduceOp.op)
        if not self._takes(tensors, op):
            return self._otherwise("all_reduce", tensors, self._rest.allreduce_coalesced, tensors, opts)
        return self._all_reduce(tensors, op, opts)

    def _all_reduce(self, tensors: list[Tensor], op: str | None, opts: Any) -> Any:
        call = _Call(self, opts, tensors)
        for flat in call.in_and_out(tensors):
            call.add("all_reduce", op, flat, "all_reduce", flat, op)
        return call.post()

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, *, root: Any = None) -> Any:
        tensors = _listed(tensors)
        opts = _options(c10d.BroadcastOptions, timeout, rootRank=root if opts is None else opts)
        if len(tensors) > 1 or not 0 <= opts.rootRank < self._size or not self._takes(tensors):
            return self._otherwise("broadcast", tensors, self._rest.broadcast, tensors, opts)
        call, root = _Call(self, opts, tensors), opts.rootRank
        (flat,) = call.ins(tensors) if root == self._rank else call.outs(tensors)
        call.add("broadcast from", root, flat, "broadcast", flat, root)
        return call.post()

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None, *, root: Any = None) -> Any:
        tensors = _listed(tensors)
        opts = _options(c10d.ReduceOptions, timeout, rootRank=root if opts is None else opts)
        if op is not None:
            opts.reduceOp = op
        op = _OPS.get(opts.reduceOp.op)
        if len(tensors) > 1 or not 0 <= opts.rootRank < self._size or not self._takes(tensors, op):
            return self._otherwise("reduce", tensors, self._rest.reduce, tensors, opts)
        call, root = _Call(self, opts, tensors), opts.rootRank
        (flat,) = call.in_and_out(tensors) if root == self._rank else call.ins(tensors)
        call.add(f"reduce to {root}", op, flat, "reduce", flat, root, op)
        return call.post()

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _options(c10d.AllgatherOptions, timeout if opts is None else opts)
        outputs, inputs = [_listed(each) for each in outputs], _listed(inputs)
        fits = len(inputs) == len(outputs) == 1 and len(outputs[0]) == self._size and _alike(outputs[0], inputs[0])
        if not fits or not self._takes([*inputs, *outputs[0]]):  # the rest says what does not fit
            return self._otherwise("all_gather", inputs, self._rest.allgather, outputs, inputs, opts)
        call = _Call(self, opts, outputs[0])
        (mine,) = call.ins(inputs)
        call.all_gather(call.outs(outputs[0]), mine)
        return call.post()

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        opts = _options(c10d.AllgatherOptions, opts)
        output, input = plain_tensor(output), plain_tensor(input)
        if not self._takes((output, input)) or not self._fits(output, input):
            return self._otherwise("all_gather", [input], _all_gather_single, self._rest, output, input, opts)
        return self._all_gather_single([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        opts = _options(c10d.AllgatherOptions, opts)
        outputs, inputs = _listed(outputs), _listed(inputs)
        fits = len(outputs) == len(inputs) and all(map(self._fits, outputs, inputs))
        if not fits or not self._takes([*outputs, *inputs]):
            return self._otherwise("all_gather", inputs, _all_gather_coalesced, self._rest, outputs, inputs, opts)
        return self._all_gather_single(outputs, inputs, opts)

    def _all_gather_single(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Any:
        call = _Call(self, opts, outputs)
        for flat, mine in zip(call.outs(outputs), call.ins(inputs, outputs), strict=True):
            call.all_gather(flat.view(self._size, -1).unbind() if flat.numel() else [flat] * self._size, mine)
        return call.post()

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: Any = None) -> Any:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        opts = _options(c10d.GatherOptions, timeout, rootRank=root if opts is None else opts)
        outputs, inputs = [_listed(each) for each in outputs], _listed(inputs)
        root, chunks = opts.rootRank, outputs[0] if outputs else []
        fits = len(inputs) == 1 and len(chunks) == (self._size if root == self._rank else 0) and 0 <= root < self._size
        if not self._takes([*inputs, *chunks]) or not fits or not _alike(chunks, inputs[0]):
            return self._otherwise("gather", inputs, self._rest.gather, outputs, inputs, opts)
        call = _Call(self, opts, chunks)
        (mine,) = call.ins(inputs)
        flats = call.outs(chunks)
        if root == self._rank:
            call.own_copies.append((flats[root], mine))
        call.add("gather to", root, mine, "gather", flats, mine, root)
        return call.post()

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: Any = None) -> Any:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        opts = _options(c10d.ScatterOptions, timeout, rootRank=root if opts is None else opts)
        outputs, inputs = _listed(outputs), [_listed(each) for each in inputs]
        root, chunks = opts.rootRank, inputs[0] if inputs else []
        fits = len(outputs) == 1 and len(chunks) == (self._size if root == self._rank else 0) and 0 <= root < self._size
        if not self._takes([*outputs, *chunks]) or not fits or not _alike(chunks, outputs[0]):
            return self._otherwise("scatter", outputs, self._rest.scatter, outputs, inputs, opts)
        call = _Call(self, opts, outputs)
        (mine,) = call.outs(outputs)
        flats = call.ins(chunks)
        if root == self._rank:
            call.copies.insert(0, (mine, flats[root]))
        call.add("scatter from", root, mine, "scatter", mine, flats, root)
        return call.post()

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> Any:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _options(c10d.ReduceScatterOptions, timeout, reduceOp=op if opts is None else opts)
        outputs, inputs = _listed(outputs), [_listed(each) for each in inputs]
        op = _OPS.get(opts.reduceOp.op)
        fits = len(inputs) == len(outputs) == 1 and len(inputs[0]) == self._size
        fits = fits and _alike([inputs[0][self._rank]], outputs[0])
        if not fits or not self._takes([*outputs, *inputs[0]], op):
            return self._otherwise("reduce_scatter", outputs, self._rest.reduce_scatter, outputs, inputs, opts)
        call = _Call(self, opts, outputs)
        (mine,) = call.outs(outputs)
        call.reduce_scatter(mine, call.ins(inputs[0]), op)
        return call.post()

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        opts = _options(c10d.ReduceScatterOptions, reduceOp=opts)
        output, input = plain_tensor(output), plain_tensor(input)
        op = _OPS.get(opts.reduceOp.op)
        if not self._takes((output, input), op) or not self._fits(input, output):
            return self._otherwise("reduce_scatter", [input], _reduce_scatter_single, self._rest, output, input, opts)
        return self._reduce_scatter_single([output], [input], op, opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        opts = _options(c10d.ReduceScatterOptions, reduceOp=opts)
        outputs, inputs = _listed(outputs), _listed(inputs)
        op = _OPS.get(opts.reduceOp.op)
        fits = len(outputs) == len(inputs) and all(map(self._fits, inputs, outputs))
        if not fits or not self._takes([*outputs, *inputs], op):
            method = _reduce_scatter_coalesced
            return self._otherwise("reduce_scatter", inputs, method, self._rest, outputs, inputs, opts)
        return self._reduce_scatter_single(outputs, inputs, op, opts)

    def _reduce_scatter_single(self, outputs: list[Tensor], inputs: list[Tensor], op: str | None, opts: Any) -> Any:
        call = _Call(self, opts, outputs)
        for mine, flat in zip(call.outs(outputs), call.ins(inputs, outputs), strict=True):
            parts = flat.view(self._size, -1).unbind() if flat.numel() else [flat] * self._size
            call.reduce_scatter(mine, parts, op, flat)
        return call.post()

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> Any:
        opts = _options(c10d.AllToAllOptions, opts)
        output, input = plain_tensor(output), plain_tensor(input)
        splits = list(output_split_sizes or ()), list(input_split_sizes or ())
        if not self._takes((output, input)) or not all(map(self._cuts, splits, (output, input))):
            return self._otherwise("all_to_all", [input], _all_to_all_single, self._rest, output, input, *splits, opts)
        call = _Call(self, opts, [output])
        (out,), (mine,) = call.outs([output]), call.ins([input])
        call.all_to_all(self._cut(out, splits[0], output), self._cut(mine, splits[1], input), [out, mine])
        return call.post()

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        opts = _options(c10d.AllToAllOptions, opts)
        outputs, inputs = _listed(outputs), _listed(inputs)
        if not self._takes([*outputs, *inputs]) or not len(outputs) == len(inputs) == self._size:
            return self._otherwise("all_to_all", inputs, self._rest.alltoall, outputs, inputs, opts)
        call = _Call(self, opts, outputs)
        call.all_to_all(call.outs(outputs), call.ins(inputs))
        return call.post()

    # --- single messages --------------------------------------------------------------------------

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Any:
        tensors = _listed(tensors)
        messages = self._messages(tensors, tag, dstRank)
        if messages is None:
            return self._rest.send(tensors, dstRank, tag)
        sent = messages.send(_as_in_memory(tensors[0].data), dstRank, tag)
        return self._done if sent is None else _MessageWork(self, sent)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Any:
        tensors = _listed(tensors)
        messages = self._messages(tensors, tag, srcRank)
        if messages is None:
            return self._rest.recv(tensors, srcRank, tag)
        return _MessageWork(self, messages.receive(_received(tensors[0]), srcRank, tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        tensors = _listed(tensors)
        messages = self._messages(tensors, tag)
        if messages is None:
            return self._rest.recv_anysource(tensors, tag)
        return _MessageWork(self, messages.receive(_received(tensors[0]), None, tag))

    def _messages(self, tensors: list[Tensor], tag: int, peer: int | None = None) -> Messages | None:
        """What carries single messages of these tensors; None: the rest does, which says what is wrong with them."""
        if not isinstance(self._shared, SharedMemoryCollectives) or len(tensors) != 1 or not self._takes(tensors):
            return None
        if not tensors[0].is_contiguous() or tag < 0 or (peer is not None and not 0 <= peer < self._size):
            return None
        if peer == self._rank:
            raise ValueError(f"rank {peer} cannot send to or receive from itself")
        return self._shared.messages

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        opts = _options(c10d.BarrierOptions, timeout if opts is None else opts)
        device = getattr(opts, "device", None)
        if self._shared is None or opts.device_ids or (device is not None and device.type != "cpu"):
            return self._rest.barrier(opts)
        call, token = _Call(self, opts, []), torch.empty(1, dtype=torch.uint8, device="cpu")
        call.add("barrier", "", token, "all_gather", [token] * self._size, token)
        return call.post()

    # The names before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- what they have in common -----------------------------------------------------------------

    def _takes(self, tensors: Iterable[Tensor], op: str | None = "") -> bool:
        """Whether a collective goes through shared memory. ``op``: a reduction, "" of none, None of one unknown."""
        if self._shared is None or op is None:
            return False
        for tensor in tensors:
            if type(tensor) not in PLAIN_TYPES or not tensor.is_cpu or tensor.layout is not torch.strided:
                return False
            if tensor.is_quantized:  # its bytes are not all that it is
                return False
            if op and not combines(op, tensor.dtype):
                return False
        return True

    def _otherwise(self, kind: str, tensors: Iterable[Tensor], method: Callable[..., Any], *arguments: Any) -> Any:
        """Call the method that does a collective if shared memory does not, or says what is wrong with it.

        Ranks that expect it in shared memory would wait for this one, so they are told.
        """
        if self._shared is None or any(tensor.is_cuda for tensor in tensors):
            return method(*arguments)
        how = "over gloo"
        try:
            return method(*arguments)
        except Exception as error:
            how = f"which raises {type(error).__name__}"
            raise
        finally:
            self._tell(f"{kind} {how}")

    def _tell(self, name: str) -> None:
        """Count an operation that this rank does not do through shared memory. Ranks that do fail, and tell its name.

        If all ranks call this, with one name, their later collectives go on.
        """
        shared = self._shared
        if not isinstance(shared, SharedMemoryCollectives):
            return

        def begin() -> Work:
            self._begun += 1
            return shared.send_nothing(Operation(self._begun, name.encode(), 0))

        self._progress.leave(self._progress.post(CollectiveWork(self._progress, begin, [])))

    def _fits(self, whole: Tensor, part: Tensor) -> bool:
        return whole.dtype == part.dtype and whole.numel() == self._size * part.numel()

    def _cuts(self, splits: list[int], tensor: Tensor) -> bool:
        """Whether dim 0 of a tensor can be cut up like this."""
        if tensor.dim() == 0:
            return False
        rows = tensor.shape[0]
        return len(splits) == self._size and sum(splits) == rows if splits else rows % self._size == 0

    def _cut(self, flat: Tensor, splits: list[int], tensor: Tensor) -> Sequence[Tensor]:
        rows = tensor.shape[0]
        width = tensor.numel() // rows if rows else 0
        return flat.split([each * width for each in splits or [rows // self._size] * self._size])

    def _seconds_left(self) -> float:
        """That the collective which is being run may take."""
        deadline = self._progress.deadline
        if deadline is None:
            return float(self._gloo.options._timeout.total_seconds())
        return max(1e-3, deadline - time.monotonic())

    def _begin(self, kind: str, detail: object, flat: Tensor, method: str, arguments: tuple[Any, ...]) -> Work:
        if self._shared is None:
            raise RuntimeError("the process group was destroyed")
        self._begun += 1
        operation = Operation(self._begun, *describe(kind, detail, flat.dtype, flat.shape, ""))
        return getattr(self._shared, method)(*arguments, operation)


class _OfOneRank:
    """The collectives of a group of one rank, which takes what groups of several do.

    What a rank copies to itself in a gather, a scatter and an all-gather is copied by :class:`_Call`.
    """

    def all_reduce(self, flat: Tensor, op: str, operation: Operation) -> Work:
        return DONE

    def reduce(self, flat: Tensor, root: int, op: str, operation: Operation) -> Work:
        return DONE

    def broadcast(self, flat: Tensor, root: int, operation: Operation) -> Work:
        return DONE

    def all_gather(self, chunks: Sequence[Tensor], mine: Tensor, operation: Operation) -> Work:
        return DONE

    def gather(self, chunks: Sequence[Tensor], mine: Tensor, root: int, operation: Operation) -> Work:
        return DONE

    def scatter(self, mine: Tensor, chunks: Sequence[Tensor], root: int, operation: Operation) -> Work:
        return DONE

    def reduce_scatter(self, out: Tensor, chunks: Sequence[Tensor], op: str, operation: Operation) -> Work:
        return Pending([], partial(_copy, out, chunks[0]), None)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], operation: Operation) -> Work:
        if outputs[0].nbytes != inputs[0].nbytes:
            raise ValueError(f"all_to_all: {inputs[0].nbytes} bytes are sent, and the output takes {outputs[0].nbytes}")
        return Pending([], partial(_copy, outputs[0].view(torch.uint8), inputs[0].view(torch.uint8)), None)

    def stop(self, why: str) -> None:
        """Nothing waits."""

    def give_up(self, error: BaseException) -> None:
        """No other rank waits for this one."""


class _MessageWork(dist.Work):
    """A single message in flight."""

    def __init__(self, group: SharedMemoryProcessGroup, message: MessageWork) -> None:
        super().__init__()
        self._message, self._seconds = message, group._gloo.options._timeout.total_seconds()

    def wait(self, timeout: datetime.timedelta = _NO_LIMIT) -> bool:
        self._message.wait(timeout.total_seconds() if timeout else self._seconds)
        return True

    def is_completed(self) -> bool:
        return self._message.is_completed()

    def is_success(self) -> bool:
        return self.exception() is None

    def exception(self) -> Exception | None:
        return self._message.error

    def _source_rank(self) -> int:
        return -1 if self._message.peer is None else self._message.peer

    source_rank = _source_rank

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize


class _Call:
    """What one call of torch.distributed does.

    Attributes:
        copies: targets and sources, of what is to be copied after that.
        own_copies: of what is to be copied before it: what it receives may be written where the sources lie.
    """

    __slots__ = ("_group", "_in_inference", "_opts", "_outputs", "_steps", "copies", "own_copies")

    def __init__(self, group: SharedMemoryProcessGroup, opts: Any, outputs: list[Tensor]) -> None:
        self._group, self._opts, self._outputs = group, opts, outputs
        self._steps: list[tuple[str, object, Tensor, str, tuple[Any, ...]]] = []
        self._in_inference = False
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.own_copies: list[tuple[Tensor, Tensor]] = []

    def ins(self, tensors: Sequence[Tensor], outputs: Sequence[Tensor] = ()) -> list[Tensor]:
        """Tensors that are read, as vectors.

        Of several collectives in one call, each with one of the ``outputs``: copies, if one of them would write what
        another one reads.
        """
        flats = [_vector(_as_in_memory(tensor.data)) for tensor in tensors]
        if len(outputs) > 1:
            pairs = zip(map(_addresses, tensors), map(_addresses, outputs), strict=True)
            if _overlap(each for pair in pairs for each in _without_the_inner(*pair)):
                return [flat.clone() for flat in flats]
        return flats

    def outs(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Tensors that are written, as vectors."""
        return [self._written(tensor) for tensor in tensors]

    def in_and_out(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors that are read and written. Those that share memory are copied, so that each is read as it is now."""
        alone = len(tensors) == 1 or not _overlap(map(_addresses, tensors))
        return [self._written(tensor, read=True, alone=alone) for tensor in tensors]

    def _written(self, tensor: Tensor, read: bool = False, alone: bool = True) -> Tensor:
        # An alias of its own: writing must not count as a change of what autograd has saved.
        data = tensor.data
        self._in_inference |= tensor.is_inference()
        if alone and _is_as_in_memory(data):
            return _vector(data)
        if any(stride == 0 and length > 1 for length, stride in zip(data.shape, data.stride(), strict=True)):
            self._group._tell("a collective that cannot write to its tensor, which raises ValueError")
            raise ValueError(
                f"a collective cannot write to a tensor of shape {tuple(data.shape)} and strides {data.stride()}, "
                "whose elements share memory; pass tensor.contiguous()"
            )
        if read:
            dense = _as_in_memory(data) if alone else _as_in_memory(data).clone()
        else:
            dense = torch.empty(data.shape, dtype=data.dtype, device="cpu")
        self.copies.append((data, dense))
        return _vector(dense)

    def add(self, kind: str, detail: object, flat: Tensor, method: str, *arguments: Any) -> None:
        """A collective, by what ranks compare, and the method of :class:`SharedMemoryCollectives` that does it."""
        self._steps.append((kind, detail, flat, method, arguments))

    def all_gather(self, chunks: Sequence[Tensor], mine: Tensor) -> None:
        own = chunks[self._group._rank]
        if own.data_ptr() != mine.data_ptr():
            self.own_copies.append((own, mine))
        self.add("all_gather", "", own, "all_gather", chunks, own)

    def reduce_scatter(
        self, out: Tensor, chunks: Sequence[Tensor], op: str | None, whole: Tensor | None = None
    ) -> None:
        """``whole``: the tensor that the chunks are equal parts of, if there is one."""
        detail: object = op
        named = out
        if whole is None and any(chunk.numel() != out.numel() for chunk in chunks):  # ``out`` differs between ranks
            detail, named = f"{op} in parts of {[chunk.numel() for chunk in chunks]}", out[:0]
        may_overlap = whole is None or _overlap_in_part(out, whole)
        if may_overlap and any(_overlap_in_part(out, chunk) for chunk in chunks):  # what is still read must not change
            chunks = [chunk.clone() for chunk in chunks]
        self.add("reduce_scatter", detail, named, "reduce_scatter", out, chunks, op)

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], wholes: Sequence[Tensor] | None = None
    ) -> None:
        """``wholes``: what the outputs and the inputs are parts of, if each are parts of one tensor."""
        if _overlap(map(_addresses, wholes or (*outputs, *inputs))):
            inputs = [chunk.clone() for chunk in inputs]
        nothing = inputs[0][:0]  # lengths differ between ranks
        self.add("all_to_all", "", nothing, "all_to_all", outputs, inputs)

    def post(self) -> CollectiveWork:
        if _profiler_enabled() and self._steps:
            kind = self._steps[0][0].partition(" ")[0]
            with torch.profiler.record_function(f"{NAME}:{kind}"):
                return self._post()
        return self._post()

    def _post(self) -> CollectiveWork:
        group, opts = self._group, self._opts
        progress, limit = group._progress, opts.timeout
        seconds = limit.total_seconds() if limit.days >= 0 else 0.0
        if not getattr(opts, "asyncOp", True) and not self._in_inference:
            progress.run(self._begin, self._finish, seconds)
            return group._done
        work = CollectiveWork(progress, self._begin, self._outputs, self._finish, self._in_inference)
        work.limit = seconds
        return progress.leave(progress.post(work))

    def _begin(self) -> Work:
        if self.own_copies:
            # What else begins has buffers that are kept, which must not be those of an inference.
            with torch.inference_mode() if self._in_inference else contextlib.nullcontext():
                for target, source in self.own_copies:
                    _copy(target, source)
        if len(self._steps) == 1:
            return self._group._begin(*self._steps[0])
        works = [self._group._begin(*step) for step in self._steps]
        return Pending(works[::-1], None, None)  # which waits for the last one first

    def _finish(self) -> None:
        for target, source in self.copies:
            _copy(target, source)


def _is_as_in_memory(tensor: Tensor) -> bool:
    """Whether its elements lie one after the other in memory, as they are: not to be conjugated or negated."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _as_in_memory(tensor: Tensor) -> Tensor:
    return tensor if _is_as_in_memory(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


def _addresses(tensor: Tensor) -> tuple[int, int]:
    """Of its first element, and of what follows its last."""
    begin, size = tensor.data_ptr(), tensor.element_size()
    if tensor.is_contiguous():
        return begin, begin + size * tensor.numel()
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + size * (last + 1)


def _overlap(ranges: Iterable[tuple[int, int]]) -> bool:
    """Whether any two ranges of addresses do."""
    in_order = sorted((begin, end) for begin, end in ranges if begin < end)
    return any(second[0] < first[1] for first, second in itertools.pairwise(in_order))


def _without_the_inner(a: tuple[int, int], b: tuple[int, int]) -> Sequence[tuple[int, int]]:
    """Two ranges of addresses, or the outer one if the other lies in it."""
    if a[0] <= b[0] and b[1] <= a[1]:
        return (a,)
    return (b,) if b[0] <= a[0] and a[1] <= b[1] else (a, b)


def _overlap_in_part(a: Tensor, b: Tensor) -> bool:
    """Whether two vectors share memory, but are not the same."""
    begin, other = a.data_ptr(), b.data_ptr()
    if begin == other and a.numel() == b.numel():
        return False
    return begin < other + b.nbytes and other < begin + a.nbytes


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy, also where they overlap, which torch refuses."""
    target.copy_(source.clone() if _overlap_in_part(target, source) else source)


def _received(tensor: Tensor) -> Tensor:
    """What a single message is received into, as it is sent."""
    data: Tensor = tensor.data
    if not _is_as_in_memory(data):
        raise ValueError("a message cannot be received into a tensor that is conjugated or negated lazily")
    return data


def _vector(tensor: Tensor) -> Tensor:
    """A contiguous tensor as a vector of stride 1. A view would keep another stride of a single element."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _alike(tensors: Iterable[Tensor], other: Tensor) -> bool:
    return all(tensor.dtype == other.dtype and tensor.numel() == other.numel() for tensor in tensors)


def _listed(tensors: Any) -> list[Tensor]:
    return [plain_tensor(tensors)] if isinstance(tensors, Tensor) else [plain_tensor(tensor) for tensor in tensors]


def _options(kind: type, given: Any = None, **field: Any) -> Any:
    """Options of a collective, from these or from what a caller gives in their place: a field, or a time-out."""
    for value in (given, *field.values()):
        if isinstance(value, kind):
            return value
    opts = kind()
    for name, value in field.items():
        if value is not None:
            setattr(opts, name, value)
    if given is not None:
        opts.timeout = given
    return opts


def _native(*names: str) -> Any:
    """A method of torch's process group, by its names in different versions."""
    return next(getattr(dist.ProcessGroup, name) for name in names if hasattr(dist.ProcessGroup, name))


_all_gather_single = _native("all_gather_single", "_allgather_base")
_all_gather_coalesced = _native("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
_reduce_scatter_single = _native("reduce_scatter_single", "_reduce_scatter_base")
_reduce_scatter_coalesced = _native("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
_all_to_all_single = _native("all_to_all_single", "alltoall_base")


def _make(options: Any, nccl_options: Any) -> SharedMemoryProcessGroup:
    """Called by torch, which looks at nothing but what this returns: it drops what else its caller has asked for."""
    asked = sys._getframe(1).f_locals.get("backend_config")
    others = {} if asked is None else dict(asked.get_device_backend_map())
    others.pop("cpu", None)
    name = others.pop("cuda", None)
    if others:
        raise ValueError(f"backend={asked}: {NAME!r} serves CPU tensors, beside NCCL or gloo for CUDA tensors only")

    def make_cuda_backend(gloo: Any) -> Any:
        return gloo if name == "gloo" else _make_nccl(options, nccl_options)

    has_cuda = name == "gloo" or (name is not None and dist.is_nccl_available() and torch.cuda.is_available())
    size = options.group_size
    return SharedMemoryProcessGroup(
        options.store,
        options.group_rank,
        size,
        options.global_ranks_in_group or range(size),
        options.timeout,
        make_cuda_backend if has_cuda else None,
    )


def _make_nccl(options: Any, nccl_options: Any) -> Any:
    """As torch makes it."""
    chosen = nccl_options or dist.ProcessGroupNCCL.Options()
    chosen._timeout = options.timeout
    default = c10d._world.default_pg
    if default is not None and default.bound_device_id and options.global_ranks_in_group:
        source = c10d._get_split_source(default)
        if source is not None:
            chosen.split_from = source
            chosen.split_color = c10d._process_group_color(options.global_ranks_in_group)
    chosen.global_ranks_in_group = options.global_ranks_in_group
    chosen.group_name = options.group_id
    store = dist.PrefixStore("nccl/", options.store)
    backend = dist.ProcessGroupNCCL(store, options.group_rank, options.group_size, chosen)
    backend._set_sequence_number_for_group()
    return backend


@atexit.register
def _leave_all() -> None:
    """Threads must not come back from a wait while the interpreter ends."""
    for group in list(_groups):
        group._leave("this process ends")


# A child that is forked and ends has nothing to do with the groups: what it stopped would be its parent's.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_groups.clear)


def register() -> None:
    """Let torch know the backend."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu", "cuda"])
