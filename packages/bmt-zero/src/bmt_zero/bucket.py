"""Where the bytes of sharded parameters are: one flat buffer per dtype, gathered and reduced as a whole.

[Note: storage]
    ``shard``  this rank's part of the flat buffer, in the dtype the parameters are stored in. The parameters
               that ``model.parameters()`` yields are views of it, and stay the same objects for ever.
    ``full``   the whole flat buffer, in the dtype that is computed in. While it is gathered, modules compute
               with views of it. Freeing and gathering it resizes one and the same storage object, so what
               autograd saved stays valid. Where one rank holds everything, ``full`` is ``shard``; at level 1
               ``shard`` is a part of ``full``, which is never freed.
    ``grads``  this rank's part of the reduced gradient; the parameters' ``.grad`` are views of it.

    A gradient is reduced from a flat buffer, too. At levels 2 and 3 the space of ``full`` serves for it: at
    that point of backward the parameters have done their duty.

[Note: streams]
    On CUDA, the collectives of a bucket, what follows them, and the storage of ``full`` belong to one side
    stream. Before anything is written there, that stream waits for all that the compute stream has been given
    so far: the optimizer's writes, and the readers of whatever memory is used again. So no buffer is refilled
    before its readers are done. (A prefetch loses nothing by it: it could not start before the buffer of the
    unit before was freed.) The compute stream waits for the event behind the one collective it needs, not for
    the whole side stream, where the next gather may be queued already. The host waits for nothing.

[Note: frozen parameters]
    Parameters are sorted into buckets by ``requires_grad`` once, when they are sharded; their layout never
    changes after that, because optimizers keep their shapes. In a bucket of which some parameters were frozen
    since, these count as zeros in the reduction and get no gradient.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bmt_comm import Communicator, Work

from .layout import FlatLayout, Placement
from .parameter import DistributedParameter
from .precision import MixedPrecision


def on_stream(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """Issue work to ``stream``; on CPU (None) just run it."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.insert(0, step)
        step *= max(length, 1)
    return tuple(strides)


_Geometry = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides, offset in a flat buffer


def _strided_views(flat: Tensor, geometry: Sequence[_Geometry]) -> list[Tensor]:
    start = flat.storage_offset()
    return [flat.as_strided(shape, strides, start + offset) for shape, strides, offset in geometry]


class State(enum.Enum):
    SHARDED = "only the shard is held"
    GATHERING = "the gather has been started"
    GATHERED = "the full parameters can be used"


class Bucket:
    """Parameters of one dtype that are sharded together.

    Args:
        layout: where they lie, over ``shard_comm.size`` ranks.
        params: in the order of ``layout``'s indices; this call moves them into the bucket's shard.
        shard: the flat storage of this rank, filled already: ``layout.shard_numel`` elements.
        shard_comm: the ranks that hold a part each.
        replicate_comm: the ranks that hold the same part; gradients are summed over them, too.
        level: ZeRO level (see DESIGN).
        precision: dtypes.
        grad_scale: what summed gradients are multiplied by.
        standalone: the parameters are gathered into storage of their own (:meth:`gather_fresh`) and ``full``
            stays empty.
    """

    def __init__(
        self,
        layout: FlatLayout,
        params: Sequence[DistributedParameter],
        shard: Tensor,
        shard_comm: Communicator,
        replicate_comm: Communicator,
        level: int,
        precision: MixedPrecision,
        grad_scale: float,
        standalone: bool = False,
    ) -> None:
        self.layout = layout
        self.shard_comm = shard_comm
        self.replicate_comm = replicate_comm
        self.level = level
        self.precision = precision
        self.grad_scale = grad_scale
        self.standalone = standalone
        self.params = list(params)
        for index, param in enumerate(self.params):
            param.bucket, param.bucket_index = self, index
        self.stream = (shard_comm if shard_comm.size > 1 else replicate_comm).stream
        self.state = State.SHARDED
        self.no_sync = False
        self._gather_work: Work | None = None
        self._gathered: torch.cuda.Event | None = None  # behind the gather in the side stream
        self._reduce_work: _Reduction | None = None
        self._local_grad: Tensor | None = None  # unreduced gradients of levels 0 and 1 under no_sync
        self._reached = [False] * len(self.params)  # by a gradient, on this rank, since the last reduction
        self._used: list[bool] | None = None  # by any rank; None: not known yet
        self._grads_then: list[tuple[Tensor, int]] = []  # .grad and its version when _local_grad began
        self._gathered_version = -1
        self._stale = True
        self.placements: list[Placement] = sorted(layout.placements, key=lambda p: p.index)
        self._full_geometry = [(p.shape, _strides(p.shape), p.offset) for p in self.placements]
        self._local_geometry = [self._local(p) for p in self.placements]
        self._gaps = _gaps(layout)
        self.use_storage(shard)

    # --- storage ----------------------------------------------------------------------------------

    def use_storage(self, shard: Tensor) -> None:
        """Make ``shard`` (filled) the storage of the parameters, on its device and in its dtype."""
        assert shard.numel() == self.layout.shard_numel
        self.state = State.SHARDED
        self._stale = True
        comm, layout = self.shard_comm, self.layout
        compute = self.precision.param_dtype if shard.is_floating_point() else None
        compute_dtype = compute or shard.dtype
        self.casts = compute_dtype != shard.dtype
        self.frees = False
        if not self.casts and comm.size == 1:
            self.full = shard
        elif not self.casts and self.level <= 1 and not self.standalone:
            self.full = torch.empty(layout.numel, dtype=shard.dtype, device=shard.device)
            part = self.full[comm.rank * layout.shard_numel : (comm.rank + 1) * layout.shard_numel]
            part.copy_(shard)
            shard = part
        else:
            self.frees = self.level >= 2 or self.standalone
            with on_stream(self.stream):
                self.full = torch.empty(layout.numel, dtype=compute_dtype, device=shard.device)
        self.shard = shard
        self.aliased = self.full.data_ptr() == shard.data_ptr() and comm.size == 1
        self._bytes = self.full.untyped_storage().nbytes()
        self._templates = self._make_templates()  # while the storage is there: set_ would grow it otherwise
        if self.frees:
            self.full.untyped_storage().resize_(0)
        self.grads: Tensor | None = None
        self._grad_views: list[Tensor] = []
        self._pointers = []
        for param, view in zip(self.params, self.local_views(self.shard), strict=True):
            grad, param.grad = param.grad, None
            param.data = view
            self._pointers.append(view.data_ptr())
            if grad is not None:  # moved to another device or dtype
                param.grad = grad.to(self.shard.device, self.shard.dtype)

    def give_up(self) -> None:
        """Give the memory back: the parameters have moved elsewhere, or are not used on this rank any more.

        What refers to itself in circles, as Blocks do, would keep it until Python looks for such things.
        """
        self.finish_reduce()
        self.finish_gather()
        nothing = self.shard.new_empty(0)
        for param in self.params:
            if param.bucket is self:
                param.grad = None
                param.data = nothing
        self.shard = self.full = nothing
        self._templates, self.grads, self._grad_views, self._local_grad = [], None, [], None

    def follow_params(self) -> None:
        """Move where the parameters have been moved to: ``model.to(...)`` and the like give each a new tensor."""
        for param, pointer in zip(self.params, self._pointers, strict=True):
            if param.data_ptr() != pointer or param.dtype != self.shard.dtype:
                break
        else:
            return
        self.finish_reduce()
        self.finish_gather()
        first = self.params[0]
        if any(p.dtype != first.dtype for p in self.params):
            found = sorted({str(p.dtype) for p in self.params})
            raise RuntimeError(
                f"parameters that are sharded together were given different dtypes ({', '.join(found)}); convert "
                f"all parameters of a Block, or some of them before the Block is made"
            )
        shard = torch.zeros(self.layout.shard_numel, dtype=first.dtype, device=first.device)
        for param, view in zip(self.params, self.local_views(shard), strict=True):
            if param.shape != view.shape:
                raise RuntimeError(
                    f"a sharded parameter holds {tuple(view.shape)} of {param.bmt_slice.shape} on this rank, and "
                    f"was given a tensor of shape {tuple(param.shape)}; copy into it instead"
                )
            view.copy_(param.data)
        self.use_storage(shard)

    def _local(self, placement: Placement) -> _Geometry:
        """Shape, strides and offset of this rank's rows of a parameter in a flat shard."""
        rank = self.shard_comm.rank
        start, stop = self.layout.rows_of(placement, rank)
        shape: tuple[int, ...] = (stop - start, *placement.shape[1:])
        if not placement.shape and stop > start:
            shape = ()
        return shape, _strides(shape), self.layout.offset_in_shard(placement, rank)

    def local_views(self, flat: Tensor) -> list[Tensor]:
        """This rank's rows of every parameter, as views of a flat shard."""
        return _strided_views(flat, self._local_geometry)

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Every parameter, whole, as views of a flat buffer of the size of ``full``."""
        return _strided_views(flat, self._full_geometry)

    def _make_templates(self) -> list[Tensor]:
        # Not autograd views: tensors of their own on the same storage, each with its own version counter, so
        # that refilling the storage does not look like a modification of what autograd saved.
        templates = []
        with torch.no_grad():
            for shape, strides, offset in self._full_geometry:
                view = torch.empty(0, dtype=self.full.dtype, device=self.full.device)
                start = int(self.full.storage_offset()) + offset
                templates.append(view.set_(self.full.untyped_storage(), start, shape, strides))
        return templates

    def full_views(self) -> list[Tensor]:
        """The parameters, whole, as new tensors on the storage of ``full``."""
        return [template.data for template in self._templates]

    # --- gathering --------------------------------------------------------------------------------

    @property
    def requires_grad(self) -> bool:
        """Whether any parameter does."""
        return any(p.requires_grad for p in self.params)

    @property
    def version(self) -> int:
        """Changes whenever a parameter is written in place."""
        return sum(p._version for p in self.params)

    @property
    def fresh(self) -> bool:
        """Whether ``full`` holds, or is about to hold, the present parameters."""
        if self.aliased:
            return True
        return self.state is not State.SHARDED and not self._stale and self._gathered_version == self.version

    def outdate(self) -> None:
        """Do not trust what an earlier computation has gathered: not every write to a parameter can be seen.

        While gradients are accumulated at level 1, parameters stay gathered from one micro-step to the next.
        """
        accumulating = self.level <= 1 and (self.no_sync or self._local_grad is not None)
        if self.state is State.GATHERED and not accumulating:
            self._stale = True

    def start_gather(self) -> None:
        """Start to gather, unless ``full`` is fresh already."""
        if self.fresh:
            return
        self.finish_reduce()  # it may still read from the space of full
        self.finish_gather()
        # Another alias of the storage: to autograd, nothing it knows is written.
        full = self.full.data
        self._let_side_stream_wait()
        with on_stream(self.stream):
            if self.frees:
                storage = full.untyped_storage()
                if storage.nbytes() != self._bytes:
                    storage.resize_(self._bytes)
            size = self.layout.shard_numel
            mine = full[self.shard_comm.rank * size : (self.shard_comm.rank + 1) * size]
            if mine.data_ptr() != self.shard.data_ptr():
                mine.copy_(self.shard.data)
            self._gather_work = self.shard_comm.all_gather(full, mine, async_op=self.stream is None)
            self._gathered = _record(self.stream)
        self.state = State.GATHERING
        self._gathered_version = self.version
        self._stale = False

    def finish_gather(self) -> None:
        """Make a started gather's result usable by the compute stream."""
        if self.state is not State.GATHERING:
            return
        assert self._gather_work is not None
        self._gather_work.wait()
        _wait(self.stream, self._gathered)
        self._gather_work = self._gathered = None
        self.state = State.GATHERED

    def free(self) -> None:
        """Give back the space of the full parameters, or mark them outdated where they are kept (level 1)."""
        self.finish_gather()
        self._stale = True
        if self.frees and self.state is State.GATHERED:
            self._let_side_stream_wait()
            self.full.untyped_storage().resize_(0)
            self.state = State.SHARDED

    def gather_fresh(self, index: int) -> Tensor:
        """Parameter ``index``, whole, in storage of its own, in the dtype that is computed in."""
        self.follow_params()
        if self.aliased:
            return self._templates[index].data
        if len(self.params) > 1:
            return self.gather_stored(index).to(self.full.dtype)
        full = torch.empty(self.layout.numel, dtype=self.full.dtype, device=self.full.device)
        size = self.layout.shard_numel
        mine = full[self.shard_comm.rank * size : (self.shard_comm.rank + 1) * size]
        mine.copy_(self.shard.data)
        self.shard_comm.all_gather(full, mine)
        # Not a view: what is computed with it would keep ``full`` in its place, and it could not be found again.
        return _strided_views(full, self._full_geometry[index : index + 1])[0].data

    def gather_stored(self, index: int) -> Tensor:
        """Parameter ``index`` alone, whole, in the dtype that it is stored in; not differentiable."""
        self.follow_params()
        comm, placement = self.shard_comm, self.placements[index]
        whole = torch.empty(placement.shape, dtype=self.shard.dtype, device=self.shard.device)
        rows = whole.view(placement.rows, *placement.shape[1:])
        parts = [rows[slice(*self.layout.rows_of(placement, rank))] for rank in range(comm.size)]
        mine = parts[comm.rank]
        mine.copy_(self.params[index].detach().view_as(mine))
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        comm.send_recv(
            [(mine, rank) for rank in others if mine.numel()],
            [(parts[rank], rank) for rank in others if parts[rank].numel()],
        )
        return whole

    @property
    def reducing_in_full(self) -> bool:
        """Whether a reduction in flight uses the space of ``full``."""
        return self._reduce_work is not None and self._reduce_work.in_full

    def _let_side_stream_wait(self) -> None:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    # --- gradients --------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce(self, grads: Sequence[Tensor | None], done: bool = True) -> None:
        """Start to sum gradients of the full parameters over the ranks.

        Every rank must come here, also one whose gradients are all None (they count as zeros). ``done``: the
        full parameters are not needed any more in this backward.
        """
        self.finish_reduce()
        self._forget_zeroed()
        self._reached = [r or g is not None for r, g in zip(self._reached, grads, strict=True)]
        local = self.no_sync and self.level <= 1
        if self._local_grad is None and not local and self._reduces_nothing:
            self._accumulate_whole(grads)
            return
        flat = self._local_grad
        if flat is None and not local and self.shard_comm.size > 1 and self._is_flat(grads[0]):
            assert grads[0] is not None
            flat = grads[0].reshape(-1)
        elif flat is None:
            flat = self._space_for_gradients(done and not local)
            self._copy_into(flat, grads)
        else:
            present = [(v, g) for v, g in zip(self._views(flat), grads, strict=True) if g is not None]
            if present:
                torch._foreach_add_([v for v, _ in present], [g for _, g in present])
        if local:
            if self._local_grad is None:
                self._local_grad = flat
                self._watch_gradients()
            return
        self._local_grad = None
        self._agree_on_use()
        self._reduce_work = _Reduction(self, flat)

    def reduce_waiting(self) -> None:
        """Reduce what has waited under ``no_sync`` where no backward comes that would; all ranks, or none."""
        if self._local_grad is not None and not self.no_sync:
            self.reduce([None] * len(self.params))
            self.finish_reduce()

    def _agree_on_use(self) -> None:
        """Parameters that no rank has used yet get no gradient, as in plain PyTorch: optimizers leave them alone.

        The ranks tell each other at the first reduction, and then only while there are such parameters: in a
        model that uses all it has, nothing is exchanged and the host does not wait.
        """
        if self._used is None or not all(self._used):
            before = self._used or self._reached
            flags = [u or r for u, r in zip(before, self._reached, strict=True)]
            used = torch.tensor(flags, dtype=torch.uint8, device=self.shard.device)
            for comm in (self.shard_comm, self.replicate_comm):
                comm.all_reduce(used, "max")
            self._used = [bool(flag) for flag in used.tolist()]
        self._reached = [False] * len(self.params)

    def _watch_gradients(self) -> None:
        """See to it that zeroing gradients can be noticed while some wait to be reduced."""
        if all(p.grad is None for p in self.params):
            self.add_gradient(torch.zeros_like(self.shard))
        self._grads_then = [(p.grad, p.grad._version) for p in self.params if p.grad is not None]

    def _forget_zeroed(self) -> None:
        """Where gradients were zeroed since, those that wait to be reduced are meant, too."""
        if self._local_grad is None:
            return
        present = {id(p.grad) for p in self.params if p.grad is not None}
        gone = not any(id(grad) in present for grad, _ in self._grads_then)
        written = any(grad._version != version for grad, version in self._grads_then)
        if gone or (written and not any(bool(grad.any()) for grad, _ in self._grads_then)):
            self._local_grad = None

    def _is_flat(self, grad: Tensor | None) -> bool:
        """Whether a gradient is, as it stands, the flat gradient of the bucket: that of its only parameter."""
        return (
            len(self.params) == 1
            and grad is not None
            and grad.is_contiguous()
            and grad.numel() == self.layout.numel
            and grad.dtype == (self.precision.reduce_dtype or self.full.dtype)
        )

    @property
    def _reduces_nothing(self) -> bool:
        return self.shard_comm.size == 1 and self.replicate_comm.size == 1 and not self._changes_dtype

    @property
    def _changes_dtype(self) -> bool:
        return self.casts or self.precision.reduce_dtype not in (None, self.shard.dtype)

    def _space_for_gradients(self, may_overwrite: bool) -> Tensor:
        dtype = self.precision.reduce_dtype if self.full.is_floating_point() else None
        dtype = dtype or self.full.dtype
        if self.frees and dtype == self.full.dtype and may_overwrite and self.state is State.GATHERED:
            self._stale = True
            return self.full.data
        return torch.empty(self.layout.numel, dtype=dtype, device=self.full.device)

    def _copy_into(self, flat: Tensor, grads: Sequence[Tensor | None]) -> None:
        for start, stop in self._gaps:  # what is reduced may be used as a whole
            flat[start:stop].zero_()
        views = self._views(flat)
        if all(g is not None for g in grads):
            torch._foreach_copy_(views, list(grads))  # type: ignore[arg-type]
            return
        for view, grad in zip(views, grads, strict=True):
            view.zero_() if grad is None else view.copy_(grad)

    def _accumulate_whole(self, grads: Sequence[Tensor | None]) -> None:
        """One rank, one dtype: what backward computed is the gradient."""
        self._used, self._reached = self._reached, [False] * len(self.params)
        if all(p.grad is None for p in self.params):
            flat = torch.empty_like(self.shard)
            self._copy_into(flat, grads)
            self.add_gradient(flat)
            return
        for param, grad in zip(self.params, grads, strict=True):
            if grad is None or not param.requires_grad:
                continue
            if param.grad is None:
                param.grad = grad.clone()
            else:
                param.grad.add_(grad)

    def add_gradient(self, reduced: Tensor) -> None:
        """Add a flat, reduced gradient of this rank's shard to the parameters' ``.grad``."""
        views = self.local_views(reduced)
        pairs = [(p, view) for p, view in zip(self.params, views, strict=True) if self._gets_gradient(p)]
        if all(p.grad is None for p, _ in pairs):
            self.grads, self._grad_views = reduced, views
            for param, view in pairs:
                param.grad = view
        elif self.grads is not None and self._has_own_gradients():
            self.grads.add_(reduced)
        else:  # somebody has set or removed single gradients, or frozen parameters
            for param, view in pairs:
                if param.grad is None:
                    param.grad = view.clone()
                else:
                    param.grad.add_(view)

    def set_gradients_aside(self) -> tuple[Any, ...]:
        """Begin with none; :meth:`restore_gradients` takes what this returns."""
        self.finish_reduce()
        aside = ([p.grad for p in self.params], self.grads, self._grad_views, self._local_grad, self._grads_then)
        for param in self.params:
            param.grad = None
        self.grads, self._grad_views, self._local_grad, self._grads_then = None, [], None, []
        return aside

    def restore_gradients(self, aside: tuple[Any, ...]) -> Tensor | None:
        """Have the gradients again that were set aside; returns the flat one of what has come since."""
        self.finish_reduce()
        flat = self.grads
        if all(p.grad is None for p in self.params):
            flat = None
        elif flat is None or not self._has_own_gradients():
            flat = torch.zeros_like(self.shard)
            for view, param in zip(self.local_views(flat), self.params, strict=True):
                if param.grad is not None:
                    view.copy_(param.grad)
        grads, self.grads, self._grad_views, self._local_grad, self._grads_then = aside
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad
        return flat

    def _has_own_gradients(self) -> bool:
        pairs = zip(self.params, self._grad_views, strict=True)
        return all(p.grad is view for p, view in pairs if self._gets_gradient(p))

    def _gets_gradient(self, param: DistributedParameter) -> bool:
        used = self._reached if self._used is None else self._used
        return param.requires_grad and used[param.bucket_index]

    def finish_reduce(self) -> None:
        """Complete a started reduction: after this the parameters' ``.grad`` include it."""
        work, self._reduce_work = self._reduce_work, None
        if work is not None:
            work.finish()

    def __deepcopy__(self, memo: dict[int, Any]) -> Bucket:
        """A copy; without gradients, as copies of parameters are."""
        self.finish_reduce()
        twins = []
        for param in self.params:
            data = param.data.clone()  # replaced by a view of the twin's storage below
            twin = torch.Tensor._make_subclass(type(param), data, param.requires_grad)
            twin.__dict__.update({k: v for k, v in param.__dict__.items() if k not in ("unit", "bucket")})
            memo[id(param)] = twin
            twins.append(twin)
        return Bucket(
            self.layout,
            twins,
            self.shard.detach().clone(),
            self.shard_comm,
            self.replicate_comm,
            self.level,
            self.precision,
            self.grad_scale,
            self.standalone,
        )

    def forget_backward(self) -> None:
        """Drop what an interrupted backward has left."""
        work, self._reduce_work = self._reduce_work, None
        if work is not None:
            work.drop()
        self._local_grad = None
        self._reached = [False] * len(self.params)
        self.free()


class _Reduction:
    """The sum of a bucket's gradients over the ranks, in flight.

    ``flat`` is held until the collective has read it; where it lies in the space of the full parameters,
    that space is given back then. On CUDA everything is queued at once in the bucket's side stream.
    """

    def __init__(self, bucket: Bucket, flat: Tensor) -> None:
        self.bucket = bucket
        self.flat: Tensor | None = flat  # read by the side stream until ``done``
        self.in_full = flat.data_ptr() == bucket.full.data_ptr() and bucket.frees
        self.done: torch.cuda.Event | None = None
        comm, wait_later = bucket.shard_comm, bucket.stream is None
        bucket._let_side_stream_wait()
        with on_stream(bucket.stream):
            if comm.size == 1:
                self.reduced = flat
                self.work = bucket.replicate_comm.all_reduce(flat, async_op=wait_later)
            else:
                self.reduced = torch.empty(bucket.layout.shard_numel, dtype=flat.dtype, device=flat.device)
                self.work = comm.reduce_scatter(self.reduced, flat, async_op=wait_later)
            if not wait_later:
                self._complete()
                self.done = _record(bucket.stream)
        if not wait_later:
            self._give_back()  # the space belongs to the side stream, in whose queue its last reader is

    def finish(self) -> None:
        bucket = self.bucket
        self.work.wait()
        if bucket.stream is None:
            self._complete()
            self._give_back()
        _wait(bucket.stream, self.done)
        self.flat = None
        bucket.add_gradient(self.reduced)

    def drop(self) -> None:
        self.work.wait()
        _wait(self.bucket.stream, self.done)
        self.flat = None
        if self.bucket.stream is None:
            self._give_back()

    def _complete(self) -> None:
        bucket = self.bucket
        if bucket.shard_comm.size > 1:
            bucket.replicate_comm.all_reduce(self.reduced)
        if bucket.grad_scale != 1.0:
            self.reduced.mul_(bucket.grad_scale)
        self.reduced = self.reduced.to(bucket.shard.dtype)

    def _give_back(self) -> None:
        bucket = self.bucket
        if self.in_full and bucket.state is State.GATHERED:
            bucket.full.untyped_storage().resize_(0)
            bucket.state = State.SHARDED


def _record(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """An event behind what ``stream`` has been given."""
    return None if stream is None else stream.record_event()


def _wait(stream: torch.cuda.Stream | None, event: torch.cuda.Event | None) -> None:
    """Let the compute stream wait for an event of the side stream ``stream``."""
    if stream is not None and event is not None:
        torch.cuda.current_stream(stream.device).wait_event(event)


def _gaps(layout: FlatLayout) -> list[tuple[int, int]]:
    """The ranges of a flat buffer that belong to no parameter."""
    gaps, cursor = [], 0
    for placement in sorted(layout.placements, key=lambda p: (p.offset, p.numel)):
        if placement.offset > cursor:
            gaps.append((cursor, placement.offset))
        cursor = max(cursor, placement.offset + placement.numel)
    if cursor < layout.numel:
        gaps.append((cursor, layout.numel))
    return gaps
