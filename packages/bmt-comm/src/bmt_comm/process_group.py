"""Shared memory as a backend of ``torch.distributed``: ``dist.init_process_group("bmt")``.

[Note: the process group "bmt"]
    If all ranks are processes of one host that have bmt_kernels, collectives on CPU tensors and single messages go
    through shared memory. On several hosts with the same number of ranks, collectives go through shared memory within a
    host and by messages of gloo between hosts, and single messages go over gloo. CUDA tensors, sparse tensors, and all
    operations of a group whose ranks cannot share memory go to a process group of torch, with gloo for CPU tensors and,
    where there is NCCL, NCCL for CUDA tensors.

    The way that a collective takes depends on what all ranks know: the operation and the dtype. It does not depend on
    the memory layout of a tensor. A rank that takes another way, or raises, notifies the other ranks, so that they fail
    instead of waiting for it: through shared memory, or, over several hosts if it raises, by the store of the group.
    All single messages of CPU tensors in a group take the same way, so that each meets its receive.
"""

from __future__ import annotations

import atexit
import datetime
import logging
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from .combine import TORCH_OPS, combines, copies
from .direct_exchange import DirectExchange
from .group_calls import GroupCall, GroupMessageWork, call_with_contiguous
from .group_of_one import CollectivesOfOneRank
from .hosts import HostsCollectives, connect, ranks_on_this_host
from .memory_ranges import as_in_memory, received
from .operation import Operation, describe
from .plain import is_dense, plain_tensor
from .progress import CollectiveWork, Progress
from .shared_memory import Messages, MessageWork, SharedMemoryCollectives
from .work import DONE, Work

NAME = "bmt"

_log = logging.getLogger("bmt_comm")
_OPS = {op: name for name, op in TORCH_OPS.items()}
_groups: weakref.WeakSet[Any] = weakref.WeakSet()

# Without its annotations: they are overloads, with names of arguments that differ between versions of torch.
_ProcessGroup: Any = dist.ProcessGroup


class SharedMemoryProcessGroup(_ProcessGroup):
    """A process group of the backend ``"bmt"``; see [Note: the process group "bmt"].

    Args:
        store: a store that nothing else uses.
        rank: of this process in the group.
        size: the number of ranks.
        ranks: the global ranks.
        timeout: after which a collective fails if a rank has not joined it.
        make_cuda_backend: makes the backend for CUDA tensors from the one for CPU tensors; None: there is none.
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
        self.own_rank, self._size, self._store = rank, size, store
        self._ranks = tuple(ranks)
        self._splits: Counter[tuple[int, ...]] = Counter()  # groups that split_group has made, by ranks in this group
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, size, timeout)
        self._gloo._set_sequence_number_for_group()
        if hasattr(self._gloo.options, "global_ranks_in_group"):  # which newer versions of torch read in split_group
            self._gloo.options.global_ranks_in_group = list(ranks)
        self._backends = backends = {"cpu": self._gloo}
        if make_cuda_backend is not None:
            backends["cuda"] = make_cuda_backend(self._gloo)
        # The group for everything else. It is another object, because methods of torch's class call those of this one.
        self._rest: Any = dist.ProcessGroup(store, rank, size)
        for group in (self._rest, self):
            for device, backend in backends.items():
                kind = (
                    dist.ProcessGroup.BackendType.GLOO if backend is self._gloo else dist.ProcessGroup.BackendType.NCCL
                )
                group._set_default_backend(kind)
                group._register_backend(torch.device(device), kind, backend)
        self.progress = Progress(weakref.proxy(self))
        self.done = CollectiveWork(self.progress, lambda: DONE, [])  # returned by calls that have waited already
        self.done.run()
        self.done.conclude()
        _groups.add(self)
        self._begun = 0  # operations through shared memory
        self._shared: SharedMemoryCollectives | HostsCollectives | CollectivesOfOneRank | None = None
        if size == 1:
            self._shared = CollectivesOfOneRank()
        else:
            direct = DirectExchange(self._rest, seconds_left=self._seconds_left)
            connected = connect(direct, ranks, self._seconds_left, ranks_on_this_host())
            if isinstance(connected, HostsCollectives):
                connected.tell_refusals(dist.PrefixStore(f"{NAME}/", store))
            if not isinstance(connected, str):
                self._shared = connected
            elif rank == 0 and ranks[0] == 0:
                _log.warning("process groups of the backend %r do all over gloo: %s", NAME, connected)

    @property
    def shares_memory(self) -> bool:
        """Whether collectives on CPU tensors go through memory that the ranks share."""
        return isinstance(self._shared, SharedMemoryCollectives)

    def __repr__(self) -> str:
        return f"SharedMemoryProcessGroup(rank={self.own_rank}, size={self._size}, shares_memory={self.shares_memory})"

    # --- methods that torch calls on a group ------------------------------------------------------

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
        """Make a group of some of the ranks; None on other ranks. It is of this class if it serves CPU tensors.

        All ranks of this group call it. The method of torch's class would need a store in that class; see ``__init__``.
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
        if self.own_rank not in members:
            return None

        def make_cuda_backend(gloo: Any) -> Any:
            return gloo if part is None else part._get_backend(torch.device("cuda"))

        group = SharedMemoryProcessGroup(
            dist.PrefixStore(f"{NAME} {name}/{self._splits[members]}/", self._store),
            members.index(self.own_rank),
            len(members),
            [self._ranks[rank] for rank in members],
            limit,
            None if cuda is None else make_cuda_backend,
        )
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self.group_desc}:split:{self._splits[members]}")
        return group

    def merge_remote_group(self, *arguments: Any, **options: Any) -> Any:
        """Make a group with the ranks of another job. It has only torch's backends."""
        return self._rest.merge_remote_group(*arguments, **options)

    def shutdown(self) -> None:
        self._leave("the process group was destroyed")
        self._rest.shutdown()
        self.progress.settle_rest()

    def abort(self) -> None:
        self._leave("the process group was aborted")
        DirectExchange(self._rest).stop()  # messages over gloo, which gloo's own abort leaves waiting
        self._rest.abort()
        self.progress.settle_rest()

    def _leave(self, why: str) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.stop(why)
        self.progress.stop()

    # --- called by its Progress -------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """A collective has failed: all later ones through shared memory raise an error that names the first."""
        shared = self._shared
        if shared is not None:
            shared.fail(error)

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
        call = GroupCall(self, opts, tensors)
        for flat in call.in_and_out(tensors):
            call.add("all_reduce", op, flat, "all_reduce", flat, op)
        return call.post()

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, *, root: Any = None) -> Any:
        tensors = _listed(tensors)
        opts = _options(c10d.BroadcastOptions, timeout, rootRank=root if opts is None else opts)
        if len(tensors) > 1 or not 0 <= opts.rootRank < self._size or not self._takes(tensors):
            return self._otherwise("broadcast", tensors, self._rest.broadcast, tensors, opts)
        call, root = GroupCall(self, opts, tensors), opts.rootRank
        (flat,) = call.ins(tensors) if root == self.own_rank else call.outs(tensors)
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
        call, root = GroupCall(self, opts, tensors), opts.rootRank
        (flat,) = call.in_and_out(tensors) if root == self.own_rank else call.ins(tensors)
        call.add(f"reduce to {root}", op, flat, "reduce", flat, root, op)
        return call.post()

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _options(c10d.AllgatherOptions, timeout if opts is None else opts)
        outputs, inputs = [_listed(each) for each in outputs], _listed(inputs)
        fits = len(inputs) == len(outputs) == 1 and len(outputs[0]) == self._size and _alike(outputs[0], inputs[0])
        if not fits or not self._takes([*inputs, *outputs[0]]):  # torch's group raises what does not fit
            return self._otherwise("all_gather", inputs, self._rest.allgather, outputs, inputs, opts)
        call = GroupCall(self, opts, outputs[0])
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
        call = GroupCall(self, opts, outputs)
        for flat, mine in zip(call.outs(outputs), call.ins(inputs, outputs), strict=True):
            call.all_gather(flat.view(self._size, -1).unbind() if flat.numel() else [flat] * self._size, mine)
        return call.post()

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: Any = None) -> Any:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        opts = _options(c10d.GatherOptions, timeout, rootRank=root if opts is None else opts)
        outputs, inputs = [_listed(each) for each in outputs], _listed(inputs)
        root, chunks = opts.rootRank, outputs[0] if outputs else []
        fits = len(inputs) == 1 and self._has_root(root, chunks)
        if not self._takes([*inputs, *chunks]) or not fits or not _alike(chunks, inputs[0]):
            return self._otherwise("gather", inputs, self._rest.gather, outputs, inputs, opts)
        call = GroupCall(self, opts, chunks)
        (mine,) = call.ins(inputs)
        flats = call.outs(chunks)
        if root == self.own_rank:
            call.own_copies.append((flats[root], mine))
        call.add("gather to", root, mine, "gather", flats, mine, root)
        return call.post()

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: Any = None) -> Any:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        opts = _options(c10d.ScatterOptions, timeout, rootRank=root if opts is None else opts)
        outputs, inputs = _listed(outputs), [_listed(each) for each in inputs]
        root, chunks = opts.rootRank, inputs[0] if inputs else []
        fits = len(outputs) == 1 and self._has_root(root, chunks)
        if not self._takes([*outputs, *chunks]) or not fits or not _alike(chunks, outputs[0]):
            return self._otherwise("scatter", outputs, self._rest.scatter, outputs, inputs, opts)
        call = GroupCall(self, opts, outputs)
        (mine,) = call.outs(outputs)
        flats = call.ins(chunks)
        if root == self.own_rank:
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
        fits = fits and _alike([inputs[0][self.own_rank]], outputs[0])
        if not fits or not self._takes([*outputs, *inputs[0]], op):
            return self._otherwise("reduce_scatter", outputs, self._rest.reduce_scatter, outputs, inputs, opts)
        call = GroupCall(self, opts, outputs)
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
        call = GroupCall(self, opts, outputs)
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
        if any(each < 0 for sizes in splits for each in sizes):  # gloo would write outside of the tensor
            self.notify("an all_to_all with a negative size, which raises ValueError")
            raise ValueError(f"all_to_all: the split sizes {splits[0]} and {splits[1]} must not be negative")
        for name, sizes, tensor in (("output", splits[0], output), ("input", splits[1], input)):
            # gloo would raise in its thread, where other ranks are not told.
            if tensor.is_cpu and not self._can_split(sizes, tensor):
                self.notify("an all_to_all with sizes that do not fit, which raises ValueError")
                raise ValueError(
                    f"all_to_all: the {name}, of shape {tuple(tensor.shape)}, cannot be split into "
                    f"{sizes if sizes else 'equal parts'} for {self._size} ranks"
                )
        if not self._takes((output, input)):
            return self._otherwise("all_to_all", [input], _all_to_all_single, self._rest, output, input, *splits, opts)
        call = GroupCall(self, opts, [output])
        (out,), (mine,) = call.outs([output]), call.ins([input])
        call.all_to_all(self._split(out, splits[0], output), self._split(mine, splits[1], input), [out, mine])
        return call.post()

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        opts = _options(c10d.AllToAllOptions, opts)
        outputs, inputs = _listed(outputs), _listed(inputs)
        if not self._takes([*outputs, *inputs]) or not len(outputs) == len(inputs) == self._size:
            return self._otherwise("all_to_all", inputs, self._rest.alltoall, outputs, inputs, opts)
        call = GroupCall(self, opts, outputs)
        call.all_to_all(call.outs(outputs), call.ins(inputs))
        return call.post()

    # --- single messages --------------------------------------------------------------------------

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Any:
        tensors = _listed(tensors)
        messages = self._messages(tensors, tag, dstRank)
        if messages is None:
            return self._rest.send(tensors, dstRank, tag)
        sent = messages.send(as_in_memory(tensors[0].data), dstRank, tag)
        return self.done if sent is None else self._work_of(sent)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Any:
        tensors = _listed(tensors)
        messages = self._messages(tensors, tag, srcRank)
        if messages is None:
            return self._rest.recv(tensors, srcRank, tag)
        return self._work_of(messages.receive(received(tensors[0]), srcRank, tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        tensors = _listed(tensors)
        messages = self._messages(tensors, tag)
        if messages is None:
            return self._rest.recv_anysource(tensors, tag)
        return self._work_of(messages.receive(received(tensors[0]), None, tag))

    def _work_of(self, message: MessageWork) -> GroupMessageWork:
        return GroupMessageWork(message, self._gloo.options._timeout.total_seconds())

    def _messages(self, tensors: list[Tensor], tag: int, peer: int | None = None) -> Messages | None:
        """The shared-memory exchange for messages of these tensors; None: torch's group takes them, or raises."""
        if not isinstance(self._shared, SharedMemoryCollectives) or len(tensors) != 1 or not self._takes(tensors):
            return None
        if (
            not tensors[0].is_contiguous()
            or not 0 <= tag < 1 << 31
            or (peer is not None and not 0 <= peer < self._size)
        ):
            return None
        if peer == self.own_rank:
            raise ValueError(f"rank {peer} cannot send to or receive from itself")
        return self._shared.messages

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        opts = _options(c10d.BarrierOptions, timeout if opts is None else opts)
        device = getattr(opts, "device", None)
        if self._shared is None or opts.device_ids or (device is not None and device.type != "cpu"):
            return self._rest.barrier(opts)
        call, token = GroupCall(self, opts, []), torch.empty(1, dtype=torch.uint8, device="cpu")
        call.add("barrier", "", token, "all_gather", [token] * self._size, token)
        return call.post()

    # The names before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- helpers ----------------------------------------------------------------------------------

    def _takes(self, tensors: Iterable[Tensor], op: str | None = "") -> bool:
        """Whether a collective goes through shared memory. ``op``: the reduction; "": none; None: an unknown one."""
        if self._shared is None or op is None:
            return False
        for tensor in tensors:
            if not is_dense(tensor):
                return False
            if not (combines(op, tensor.dtype) if op else copies(tensor.dtype)):
                return False
        return True

    def _otherwise(self, kind: str, tensors: Iterable[Tensor], method: Callable[..., Any], *arguments: Any) -> Any:
        """Call torch's method for a collective that does not go through shared memory. It may raise.

        Ranks that expect the collective in shared memory would wait for this rank, so they are notified.
        """
        if any(tensor.is_cuda for tensor in tensors):
            return method(*arguments)
        if self._shared is None:
            return call_with_contiguous(method, arguments)
        try:
            work = call_with_contiguous(method, arguments)
        except BaseException as error:
            self.notify(f"{kind} which raises {type(error).__name__}")
            raise
        if self.shares_memory:  # over hosts, ranks that wait for this one end when its wait over gloo does
            self.notify(f"{kind} over gloo")
        return work

    def notify(self, name: str) -> None:
        """Count an operation that does not go through shared memory on this rank.

        Ranks on which it does go through shared memory fail, with an error that says ``name``. If all ranks call this
        with the same name, their later collectives work.
        """
        shared = self._shared
        if not isinstance(shared, SharedMemoryCollectives | HostsCollectives):
            return

        def begin() -> Work:
            self._begun += 1
            return shared.send_nothing(Operation(self._begun, name.encode(), 0))

        self.progress.leave(self.progress.post(CollectiveWork(self.progress, begin, [])))

    def _has_root(self, root: int, chunks: Sequence[Tensor]) -> bool:
        """Whether ``root`` is a rank, and only the root has chunks: one for each rank."""
        return 0 <= root < self._size and len(chunks) == (self._size if root == self.own_rank else 0)

    def _fits(self, full: Tensor, part: Tensor) -> bool:
        return full.dtype == part.dtype and full.numel() == self._size * part.numel()

    def _can_split(self, splits: list[int], tensor: Tensor) -> bool:
        """Whether dim 0 of a tensor can be split into these sizes; ``[]``: into equal ones."""
        if tensor.dim() == 0:
            return False
        rows = tensor.shape[0]
        return len(splits) == self._size and sum(splits) == rows if splits else rows % self._size == 0

    def _split(self, flat: Tensor, splits: list[int], tensor: Tensor) -> Sequence[Tensor]:
        rows = tensor.shape[0]
        width = tensor.numel() // rows if rows else 0
        return flat.split([each * width for each in splits or [rows // self._size] * self._size])

    def _seconds_left(self) -> float:
        """Seconds that the collective that is being run may still take."""
        deadline = self.progress.deadline
        if deadline is None:
            return float(self._gloo.options._timeout.total_seconds())
        return max(1e-3, deadline - time.monotonic())

    def begin(self, kind: str, detail: object, flat: Tensor, method: str, arguments: tuple[Any, ...]) -> Work:
        if self._shared is None:
            raise RuntimeError("the process group was destroyed")
        self._begun += 1
        operation = Operation(self._begun, *describe(kind, detail, flat.dtype, flat.shape, ""))
        return getattr(self._shared, method)(*arguments, operation)


def _alike(tensors: Iterable[Tensor], other: Tensor) -> bool:
    return all(tensor.dtype == other.dtype and tensor.numel() == other.numel() for tensor in tensors)


def _listed(tensors: Any) -> list[Tensor]:
    return [plain_tensor(tensors)] if isinstance(tensors, Tensor) else [plain_tensor(tensor) for tensor in tensors]


def _options(kind: type, given: Any = None, **field: Any) -> Any:
    """Options of a collective, from what the caller gives: the options themselves, one field, or a time-out."""
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
    """A method of torch's process group, given its names in different versions."""
    return next(getattr(dist.ProcessGroup, name) for name in names if hasattr(dist.ProcessGroup, name))


_all_gather_single = _native("all_gather_single", "_allgather_base")
_all_gather_coalesced = _native("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
_reduce_scatter_single = _native("reduce_scatter_single", "_reduce_scatter_base")
_reduce_scatter_coalesced = _native("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
_all_to_all_single = _native("all_to_all_single", "alltoall_base")


def _make(options: Any, nccl_options: Any) -> SharedMemoryProcessGroup:
    """Called by torch. It uses only the returned group and drops the other backends of ``backend_config``."""
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
    """Threads must not return from a wait while the interpreter ends."""
    for group in list(_groups):
        group._leave("this process ends")


# A forked child must not stop the groups when it ends: they are its parent's.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_groups.clear)


def register() -> None:
    """Let torch know the backend."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu", "cuda"])
