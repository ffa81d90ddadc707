"""The storage of parameters of one dtype: this rank's shard of one flat buffer, and the unsharded buffer.

[Note: storage]
    ``shard``      this rank's shard of the flat buffer, in the dtype the parameters are stored in. The parameters
                   that ``model.parameters()`` yields are views of it and always stay the same objects.
    ``unsharded``  the full flat buffer, in the dtype of computation. While it is unsharded, modules compute with views
                   of it. Releasing and refilling resizes the same storage object, so tensors that autograd saved stay
                   valid. If the shard group has one rank, ``unsharded`` is ``shard``. At levels 0 and 1 its storage is
                   never released, and ``shard`` is a view of it. Parameters that are cast, compressed or offloaded
                   always have separate storage for both.

    Gradients are also reduced from a flat buffer. At levels 2 and 3 it may borrow the storage of ``unsharded``, which
    backward does not need any more at that point.

[Note: memory that ranks share]
    If the ranks of the shard group share memory (CPU ranks of one host), ``unsharded`` is one buffer for all of them,
    and ``shard`` is this rank's part of it. Nothing is gathered, released or stored twice. Unsharding is a barrier:
    when all ranks have begun it, all have written their shards. A rank must not write again before the other ranks
    have computed. So ranks meet when a forward or a backward pass ends (``StepContext.end_use``). If an exception ends
    the forward of a rank after as many modules have begun as in its last forward, the other ranks do not wait for this
    rank. It waits for them when its next forward begins, and must not write before that.

    If parameters are cast for computation, ``unsharded`` is shared at levels 1 and 2, and ``shard`` is separate. At
    level 3 it is not shared: the cast parameters of the full model would take the memory that level 3 saves.

[Note: streams]
    On CUDA, the collectives of a flat parameter and the storage of ``unsharded`` belong to one side stream. Before that
    stream writes, it waits for all work in the compute stream so far: the optimizer's writes, and reads of memory that
    is reused. (This does not delay a prefetch, which cannot start before the buffer of the previous group is released.)
    The compute stream waits for the event after the one collective it needs, not for the side stream, where the next
    all-gather may be queued already. The host never waits, unless parameters are offloaded.

[Note: offloaded parameters]
    With ``offload=True`` a flat parameter has two devices. ``shard``, and so ``.grad`` and the optimizer's state, is in
    host memory (pinned, so that copies are asynchronous). ``unsharded`` and the flat gradient are on the device of
    computation. The side stream copies the shard into this rank's part of ``unsharded`` before it gathers the others,
    and the reduced gradient to the host after it has reduced it. The host waits

    - before a module computes, for the copy of its shard, which may have been prefetched. So later writes to the shard
      come after it was read;
    - before it reads a gradient: once, at the end of a backward pass (``StepContext``), or immediately if gradients are
      added to others or have hooks.

    On a context of the CPU both devices are the host, and the copies are the same.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bmt_comm import Communicator, Work, local_rows, named_range, sharded_gradient

from .float8 import Float8Weights, float8_dtype
from .layout import FlatLayout, Placement
from .options import Options
from .sharded_parameter import ShardedParameter
from .side_stream import SideStream, follow_compute, on_stream, record_event

_Geometry = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides, offset in a flat buffer


class State(enum.Enum):
    SHARDED = "the unsharded parameters are not valid; their storage may be kept, released or lent"
    UNSHARDING = "the all-gather has been started"
    UNSHARDED = "the unsharded parameters can be used"


class FlatParameter:
    """Parameters of one dtype that are unsharded by one collective.

    Args:
        layout: of the parameters, over ``shard_comm.size`` ranks.
        params: in the order of ``layout``'s indices; they become views of ``shard``.
        shard: this rank's flat storage with its values, ``layout.shard_numel`` elements.
        communicators: the shard group and the replicate group.
        options: how the parameters are sharded. At levels 0 and 1 the storage of ``unsharded`` is never released.
        allocate: whether ``unsharded`` is ever filled; otherwise parameters are only gathered one by one.

    Attributes:
        communicators: the groups of several ranks among the two.
        stream: for collectives that overlap with computation; None on CPU.
        offloads: whether ``shard`` is in host memory; see [Note: offloaded parameters].
        device: of computation.
        dtype: of computation, and so of gradients; ``unsharded`` has it, too, unless the weights are in float8.
    """

    def __init__(
        self,
        layout: FlatLayout,
        params: Sequence[ShardedParameter],
        shard: Tensor,
        communicators: tuple[Communicator, Communicator],
        options: Options,
        allocate: bool = True,
    ) -> None:
        self.layout = layout
        self.params = list(params)
        self.shard_comm, self.replicate_comm = communicators
        self.communicators = tuple(comm for comm in communicators if comm.size > 1)
        stream = (self.communicators or communicators)[0].stream
        self.stream = None if stream is None else SideStream(stream)
        self.options = options
        self.offloads = options.offload
        self.allocate = allocate
        self.placements: list[Placement] = sorted(layout.placements, key=lambda p: p.index)
        self._unsharded_geometry = [_geometry(p.shape, p.offset) for p in self.placements]
        self._local_geometry: list[_Geometry] = []
        rank, row_comm, replicate_comm = self.shard_comm.rank, *(c if c.size > 1 else None for c in communicators)
        for param, placement in zip(self.params, self.placements, strict=True):
            start, stop = layout.rows_of(placement, rank)
            shape, offset = placement.local_shape(stop - start), layout.offset_in_shard(placement, rank)
            self._local_geometry.append(_geometry(shape, offset))
            param.bmt_slice = replace(
                param.bmt_slice,
                row_start=start,
                row_stop=stop,
                row_comm=row_comm,
                row_dims=placement.row_dims,
                replicate_comm=replicate_comm,
            )
        self.state = State.SHARDED
        self._work: Work | None = None
        self._read: torch.cuda.Event | None = None  # recorded after the copy of an offloaded shard in the side stream
        self._versions_of_views: list[int] = []  # those of the parameters at the last call of note_writes
        self._version = -1  # sum of the parameters' versions when they were unsharded
        self._borrower: Callable[[], object] | None = None  # returns the storage of ``unsharded``
        self.label = ""  # names the collectives
        self.names: list[str] = []  # of the parameters
        self.is_shared = False  # whether ``unsharded`` is one buffer for all ranks
        self._may_share = False  # whether sharing memory is possible and was not tried yet
        self.use_storage(shard)

    # --- storage ----------------------------------------------------------------------------------

    def use_storage(self, shard: Tensor) -> None:
        """Make ``shard`` (filled) the storage of the parameters, on its device and in its dtype."""
        assert shard.numel() == self.layout.shard_numel
        self.state = State.SHARDED
        self.device = self.shard_comm.device if self.offloads else shard.device
        self.dtype = (self.options.precision.param_dtype if shard.is_floating_point() else None) or shard.dtype
        in_float8 = self.allocate and float8_dtype(self.params[0]) is not None
        self.float8 = Float8Weights(self.params, self.device) if in_float8 else None
        dtype = self.dtype if self.float8 is None else self.float8.dtype
        is_kept = self.options.level <= 1 and self.allocate
        self.casts = dtype != shard.dtype
        self.is_shard = not self.casts and not self.offloads and self.shard_comm.size == 1
        self.releases = not self.is_shard and not is_kept
        packs = self.allocate and not self.is_shard and shard.is_floating_point() and self.float8 is None
        self.compression = self.options.precision.packs_parameters if packs else None
        self.is_shared = False
        self._may_share = (
            self.allocate
            and not self.is_shard
            and not self.offloads
            and self.float8 is None
            and self.compression is None
            and not (self.casts and self.options.level == 3)
        )
        self.shard = self.unsharded = shard
        if not self.is_shard:
            with on_stream(self.stream if self.releases else None):
                self.unsharded = torch.empty(self.layout.numel, dtype=dtype, device=self.device)
            if is_kept and not self.casts and not self.offloads and self.compression is None:
                self.shard = self._shard_of(self.unsharded)
                self.shard.copy_(shard)
        self._rebind_unsharded()
        if self.releases:
            self._storage.resize_(0)
        self._bind_parameters()

    def _rebind_unsharded(self) -> None:
        """Make the templates of :meth:`views` for new storage of ``unsharded``, which must not be released."""
        self._storage = self.unsharded.untyped_storage()
        self._bytes = self._storage.nbytes()
        # Not autograd views but separate tensors on the same storage, each with its own version counter: to autograd,
        # refilling the storage does not modify the tensors that it saved.
        self._templates = []
        with torch.no_grad():
            for shape, strides, offset in self._unsharded_geometry:
                view = torch.empty(0, dtype=self.unsharded.dtype, device=self.unsharded.device)
                start = int(self.unsharded.storage_offset()) + offset
                self._templates.append(view.set_(self._storage, start, shape, strides))

    def _bind_parameters(self) -> None:
        """Make the parameters views of ``shard``."""
        for param, view in zip(self.params, self.local_views(self.shard), strict=True):
            grad, param.grad = param.grad, None
            with torch._C.DisableTorchFunctionSubclass():
                param.data = view
            if grad is not None:  # moved to another device or dtype
                param.grad = sharded_gradient(local_rows(grad).to(view.device, view.dtype), param)
        self._places = self._places_now()

    def _share_memory(self) -> None:
        """Move ``unsharded`` to memory that the ranks share, if they share memory; a collective.

        See [Note: memory that ranks share].
        """
        self._may_share = False
        with torch.inference_mode(False), torch.no_grad():  # the tensors may be used in training later
            shared = self.shard_comm.shared_vector(self.layout.numel, self.unsharded.dtype)
            if shared is None:
                return
            self.is_shared, self.releases = True, False
            self.unsharded = shared
            self._rebind_unsharded()
            if not self.casts:
                shard = self._shard_of(shared)
                shard.copy_(self.shard.data)
                self.shard = shard
                self._bind_parameters()

    def drop_storage(self) -> None:
        """Release all memory of parameters that have moved elsewhere, or are not used on this rank any more.

        Reference cycles would keep it until Python's garbage collector runs.
        """
        self.wait()
        nothing = self.shard.new_empty(0)
        for param in self.params:
            if getattr(param.handle, "flat", self) is self:
                param.grad = None
                with torch._C.DisableTorchFunctionSubclass():
                    param.data = nothing
        self.shard = self.unsharded = nothing
        self._storage = nothing.untyped_storage()
        self._templates = []

    def was_moved(self) -> bool:
        """Whether the parameters were given new tensors, by ``model.to(...)`` for example."""
        return self._places_now() != self._places

    def _places_now(self) -> list[tuple[int, torch.dtype]]:
        return [(param.data_ptr(), param.dtype) for param in self.params]

    def rebind_storage(self) -> None:
        """Move the shard to the device and dtype that the parameters were moved to.

        Raises:
            RuntimeError: the parameters were given different dtypes, or tensors of other shapes, or were swapped.
        """
        self.wait()
        if not all(isinstance(p, ShardedParameter) for p in self.params):
            raise RuntimeError(
                "sharded parameters were swapped with other tensors (torch.utils.swap_tensors, or "
                "torch.__future__.set_swap_module_params_on_conversion): copy values into them instead"
            )
        first = self.params[0]
        if any(p.dtype != first.dtype for p in self.params):
            dtypes = sorted({str(p.dtype) for p in self.params})
            raise RuntimeError(
                f"parameters that are sharded together were given different dtypes ({', '.join(dtypes)}); convert "
                f"all parameters of a Block, or convert them before the Block is built"
            )
        if self.offloads and first.device != self.shard.device:
            raise RuntimeError(
                f"parameters of {self.label or 'a module'} were sharded with offload=True, which keeps them on "
                f"{self.shard.device}, and were moved to {first.device}; move them back with "
                f"model.to({str(self.shard.device)!r}), or shard the model without offload=True"
            )
        for index, (param, view) in enumerate(zip(self.params, self.local_views(self.shard), strict=True)):
            if param.shape != view.shape:
                raise RuntimeError(
                    f"{self.names[index] if self.names else 'a parameter'} was given a tensor of shape "
                    f"{tuple(param.shape)}; this rank holds {tuple(view.shape)} of {param.bmt_slice.shape}: write into "
                    f"to_local(), and change shapes (resize_token_embeddings) before the model is sharded"
                )
        with torch.inference_mode(False), torch.no_grad():  # the tensors may be used in training later
            shard = self.options.new_storage(self.layout.shard_numel, first.dtype, first.device).zero_()
            for param, view in zip(self.params, self.local_views(shard), strict=True):
                view.copy_(param.to_local())
            if shard.dtype == self.shard.dtype and shard.device == self.shard.device:
                # Keep the storage, which other ranks may share: a rank without rows does not notice the move.
                self.state = State.SHARDED
                self.shard.copy_(shard)
                self._bind_parameters()
            else:
                self.use_storage(shard)

    def _shard_of(self, flat: Tensor) -> Tensor:
        """This rank's shard of a flat buffer, as a view."""
        size, rank = self.layout.shard_numel, self.shard_comm.rank
        return flat[rank * size : (rank + 1) * size]

    def local_views(self, flat: Tensor) -> list[Tensor]:
        """This rank's rows of every parameter, as views of a flat shard."""
        return _strided_views(flat, self._local_geometry)

    def unsharded_views(self, flat: Tensor) -> list[Tensor]:
        """Every parameter as a view of a flat buffer of the size of ``unsharded``."""
        return _strided_views(flat, self._unsharded_geometry)

    def views(self) -> list[Tensor]:
        """The unsharded parameters as new tensors on the storage of ``unsharded``.

        All views of a parameter have one version for autograd, that of its template; see :meth:`note_writes`.
        """
        views = [template.detach() for template in self._templates]
        return views if self.float8 is None else self.float8.tensors(views, self.dtype)

    def note_writes(self) -> None:
        """Increment the versions of the views of parameters that were written since the last call.

        Autograd raises a RuntimeError where it has saved such a view, as it does for plain parameters.
        """
        versions = [param._version for param in self.params]
        if versions != self._versions_of_views:
            both = zip(self._templates, versions, self._versions_of_views)
            torch.autograd.graph.increment_version([template for template, now, then in both if now != then])
            self._versions_of_views = versions

    @property
    def is_temporary(self) -> bool:
        """Whether ``unsharded`` has values only while parameters are unsharded."""
        return self.releases or (self.is_shared and self.options.level > 1)

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor may lose its values when the parameters are resharded."""
        return self.is_temporary and tensor.untyped_storage()._cdata == self._storage._cdata

    # --- transitions ------------------------------------------------------------------------------

    def _values(self) -> Tensor:
        """The shard's values, on the device of computation; the side stream copies them there."""
        shard = self.shard.data
        if self.offloads:
            shard = shard.to(self.device, non_blocking=True)
            self._read = record_event(self.stream)
        return shard

    def unshard(self) -> None:
        """Start the all-gather, unless the current values are unsharded or their all-gather has started."""
        if self.is_shard:
            self.state = State.UNSHARDED
            return
        version = sum([param._version for param in self.params])
        if self.state is not State.SHARDED and self._version == version:
            return
        if self._may_share:
            if self.was_moved():  # since the last forward: a prefetch does not check that
                self.rebind_storage()
            if self._may_share:
                self._share_memory()
            version = sum([param._version for param in self.params])
        if self._borrower is not None:
            self._borrower()
        self.wait()
        unsharded = self.unsharded.data  # another alias of the storage: its writes do not count for autograd
        follow_compute(self.stream)
        with named_range("unshard", self.label), on_stream(self.stream):
            if self.releases and self._storage.nbytes() != self._bytes:
                self._storage.resize_(self._bytes)
            comm, on_cpu = self.shard_comm, self.stream is None
            if self.compression is not None:
                self._work = self.compression.all_gather(comm, unsharded, self._values(), on_cpu, self.label)
            else:
                shard = self._shard_of(unsharded)
                if self.float8 is not None:
                    rows, values = self.local_views(shard), self.local_views(self._values())
                    self.float8.write(rows, values, comm, self.label)
                    unsharded, shard = unsharded.view(torch.uint8), shard.view(torch.uint8)
                elif self.casts or self.offloads:
                    shard.copy_(self._values())
                else:
                    shard = self.shard.data
                if self.is_shared:
                    self._work = comm.barrier(async_op=True, label=self.label)
                else:
                    self._work = comm.all_gather(unsharded, shard, async_op=on_cpu, label=self.label)
        if self.stream is not None:
            self.stream.record(self.stream.arrived)
        self.state = State.UNSHARDING
        self._version = version

    def wait(self) -> None:
        """Make the result of a started all-gather usable by the compute stream."""
        if self.state is not State.UNSHARDING:
            return
        assert self._work is not None
        with named_range("wait for unshard", self.label):
            self._work.wait()
        if self.stream is not None:
            self.stream.let_compute_wait(self.stream.arrived)
        if self._read is not None:
            self._read.synchronize()
        self._work = self._read = None
        self.state = State.UNSHARDED

    def reshard(self) -> None:
        """Release the storage of the unsharded parameters. If it is kept, invalidate them."""
        self.wait()
        if self.releases and self._borrower is None and self._storage.nbytes():
            with named_range("reshard", self.label):
                follow_compute(self.stream)  # what it has yet to read
                self._storage.resize_(0)
        if self.state is State.UNSHARDED and not self.is_shared:  # shared values stay valid until the next computation
            self.state = State.SHARDED

    def lend_storage(self, give_back: Callable[[], object]) -> Tensor | None:
        """The storage of the unsharded parameters, which are not needed any more; None if it cannot be lent.

        ``give_back`` is called if the storage is needed again before :meth:`storage_returned`.
        """
        if not self.releases or self.state is not State.UNSHARDED:
            return None
        self.state = State.SHARDED
        self._borrower = give_back
        return self.unsharded.data

    def storage_returned(self) -> None:
        """The borrower does not use the storage any more."""
        if self._borrower is not None:
            self._borrower = None
            if self.state is State.SHARDED:
                self._storage.resize_(0)

    # --- single parameters ------------------------------------------------------------------------

    def is_on_one_rank(self, index: int) -> bool:
        """Whether one rank of the shard group holds all rows of parameter ``index``."""
        placement, size = self.placements[index], self.layout.shard_numel
        return placement.offset // size == (placement.offset + max(1, placement.rows * placement.row_numel) - 1) // size

    def unshard_one(self, index: int) -> Tensor:
        """Parameter ``index``, unsharded, in the dtype of computation and in storage of its own."""
        if self.is_shard:
            return self._templates[index].data
        if len(self.params) > 1 or self.float8 is not None:
            return self.unshard_stored(index).to(self.dtype)
        flat = torch.empty(self.layout.numel, dtype=self.unsharded.dtype, device=self.unsharded.device)
        shard = self._shard_of(flat)
        shard.copy_(self.shard.data)
        self.shard_comm.all_gather(flat, shard, label=self.label)
        # ``data``, because graphs keep a view alive only through its base: weak references to a view would not last.
        return _strided_views(flat, self._unsharded_geometry[index : index + 1])[0].data

    def unshard_stored(self, index: int, like: Tensor | None = None) -> Tensor:
        """Parameter ``index`` alone, unsharded, in the dtype that it is stored in; not differentiable.

        Ranks send each other only its rows. An all-gather would move the full flat buffer.

        Args:
            like: a tensor of the shape of this rank's rows (an optimizer's state), to unshard instead.
        """
        comm, placement = self.shard_comm, self.placements[index]
        source = self.params[index].to_local() if like is None else local_rows(like).detach()
        result = torch.empty(placement.shape, dtype=source.dtype, device=self.device)
        rows = result.view(placement.rows, placement.row_numel)
        parts = [rows[slice(*self.layout.rows_of(placement, rank))] for rank in range(comm.size)]
        mine = parts[comm.rank]
        mine.copy_(source.reshape(mine.shape))
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        comm.send_recv(
            [(mine, rank) for rank in others if mine.numel()],
            [(parts[rank], rank) for rank in others if parts[rank].numel()],
            label=self.names[index] if self.names else self.label,
        )
        return result


def write_rows(shard: Tensor, layout: FlatLayout, placement: Placement, rank: int, values: Tensor) -> None:
    """Write the rows of an unsharded parameter that belong to ``rank`` into its flat shard."""
    start, stop = layout.rows_of(placement, rank)
    offset = layout.offset_in_shard(placement, rank)
    rows = values.reshape(placement.rows, placement.row_numel)[start:stop]
    shard[offset : offset + rows.numel()].view_as(rows).copy_(rows)


def _geometry(shape: tuple[int, ...], offset: int) -> _Geometry:
    return shape, torch.empty(shape, device="meta").stride(), offset


def _strided_views(flat: Tensor, geometry: Sequence[_Geometry]) -> list[Tensor]:
    start = flat.storage_offset()
    return [flat.as_strided(shape, strides, start + offset) for shape, strides, offset in geometry]
