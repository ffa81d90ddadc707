"""State dicts of the Adam optimizers of BMTrain 1.0.

[Note: their form]
    ``state[i]`` has ``step``, ``exp_avg``, ``exp_avg_sq`` and usually ``_param_fp32`` (the master weight), all flat.
    Gathered ones (``is_whole``) have all elements of a parameter. Others have those of one rank. The ranks' elements
    follow one another, and a parameter of which a rank has no elements may be missing there. The layout of upstream
    decides what is sharded over which ranks, and where the shards end. The number of elements is enough to tell.

    The gathered state of a tensor-parallel parameter has the elements of all ranks in the order of the ranks: for each
    part of the shards, that part of every tensor-parallel rank's shard. (A bias of ``RowParallelLinear``, which these
    ranks replicate, is there once per rank.) The boundaries of the parts are not in the file. They follow from the
    number of ranks, and in a Block from its parameters, whose flat buffer is sharded evenly. With the right boundaries,
    the master weights are the parameters.

    The moments of fp16 parameters in upstream's ``AdamOptimizer`` are multiplied by the loss scale. The first moment is
    then in fp16.

    In a pipeline, every rank's optimizer has the parameters of all stages, and the state of its own stage's. Here a
    rank has only its own stage's parameters, and finds their places among all by the layers that they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import bmt_comm
from bmt_comm import LAYER_ATTRIBUTE, Communicator, Slice, local_tensor, select_rows, slice_of

from .batch import HALF

_KEYS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "_param_fp32": "master"}


def is_upstream(state_dict: Mapping[str, Any]) -> bool:
    """Whether an optimizer's state dict was saved by BMTrain 1.0. The same on all ranks of a job."""
    groups = state_dict.get("param_groups") or ()
    has_form = any(set(group) >= _OPTIONS and not _OTHERS & set(group) for group in groups)
    states = list((state_dict.get("state") or {}).values())
    return "is_whole" in state_dict or (has_form and all("step" in entry for entry in states if entry))


_OPTIONS = {"params", "lr", "betas", "eps", "weight_decay"}
_OTHERS = {"hold_steps", "amsgrad", "maximize", "foreach", "bias_correction"}  # of this package's Adam, torch's, apex's


def from_upstream(
    state_dict: Mapping[str, Any], groups: Sequence[Sequence[Tensor]], loss_scale: float | None = None
) -> dict[str, Any]:
    """This rank's part of a state dict of BMTrain 1.0, in the form of this package's Adam.

    Args:
        state_dict: gathered, the same on every rank; or what this rank has saved, in a job of as many ranks with the
            same tensor-parallel size and stages. Every rank must call this for the latter, with tensor parallelism, and
            in a pipeline. With tensor parallelism, gathered states need a job of as many ranks, too, and the parameters
            must have the values that the model had when its state was saved.
        groups: the optimizer's parameters, in groups.
        loss_scale: the factor of moments in fp16.

    Raises:
        ValueError: tensors do not have as many elements as the parameters; moments are multiplied by a loss scale that
            is not given; or the gathered state of tensor-parallel parameters does not fit them.
    """
    return _converted(state_dict, [param for group in _of_all_stages(groups) for param in group], loss_scale)


def _converted(
    state_dict: Mapping[str, Any], params: Sequence[Tensor | None], loss_scale: float | None
) -> dict[str, Any]:
    """:func:`from_upstream`, with the parameters of all stages in order, None for those of other ones."""
    saved = [list(group["params"]) for group in state_dict["param_groups"]]
    order = [key for keys in saved for key in keys]
    if len(order) != len(params):
        raise ValueError(f"the state dict has {len(order)} parameters and the optimizer has {len(params)}")
    state = state_dict["state"]
    slices = [None if param is None else slice_of(param) for param in params]
    flats = _Gathered(state, order, params, slices) if state_dict.get("is_whole") else _OfRanks(state, order, slices)
    converted: dict[Any, dict[str, Any]] = {}
    for index, (key, param, where) in enumerate(zip(order, params, slices, strict=True)):
        step = flats.step(index)
        if step is None:
            continue
        if flats.is_scaled(index) and loss_scale is None:
            raise ValueError(
                f"the moments of parameter {index} are multiplied by the loss scale, which the state dict of "
                f"BMTrain's AdamOptimizer does not tell: load the state dict of its OptimManager instead"
            )
        entry: dict[str, Any] = {"step": torch.tensor(float(step), dtype=torch.float32, device="cpu")}
        for name, own in _KEYS.items():
            flat = flats.tensor(index, name, where)
            if flat is None or where is None or param is None or (own == "master" and param.dtype not in HALF):
                continue
            if flats.is_scaled(index) and own != "master":
                assert loss_scale is not None
                flat = flat.float() / loss_scale
            entry[own] = select_rows(flat.view(where.tp_shard_shape), where).contiguous()
        if param is not None:
            converted[key] = entry
    mine = {key for key, param in zip(order, params, strict=True) if param is not None}
    return {
        "state": converted,
        "param_groups": [
            {**group, "params": [key for key in keys if key in mine]}
            for group, keys in zip(state_dict["param_groups"], saved, strict=True)
        ],
    }


def _of_all_stages(groups: Sequence[Sequence[Tensor]]) -> list[list[Tensor | None]]:
    """The parameters of all pipeline stages in the order of the model; ``None`` for those of other stages."""
    if not bmt_comm.is_initialized() or bmt_comm.current_context().pipe_size == 1:
        return [list(params) for params in groups]
    places: list[list[tuple[int, tuple[int, ...], int]]] = []
    for params in groups:
        outside = 0  # parameters outside of the pipelines, which every stage has
        own = []
        for index, param in enumerate(params):
            layer = getattr(param, LAYER_ATTRIBUTE, ())
            outside += not layer
            own.append((outside, layer, index if layer else 0))
        places.append(own)
    stages = bmt_comm.current_context().pipe_host.all_gather_object(places)
    if any(len(theirs) != len(groups) for theirs in stages):
        raise ValueError(f"pipeline stages have optimizers of {[len(theirs) for theirs in stages]} groups")
    merged: list[list[Tensor | None]] = []
    for number, (params, own) in enumerate(zip(groups, places, strict=True)):
        mine = dict(zip(own, params, strict=True))
        everyone = sorted({place for theirs in stages for place in theirs[number]})
        merged.append([mine.get(place) for place in everyone])
    return merged


class _Gathered:
    """All elements of each parameter; see [Note: their form]."""

    def __init__(
        self,
        state: Mapping[Any, Any],
        order: Sequence[Any],
        params: Sequence[Tensor | None],
        slices: Sequence[Slice | None],
    ) -> None:
        self._entries = [state.get(key) for key in order]
        self._params = params
        self._slices = slices
        self._tp_size = bmt_comm.current_context().tp_size if bmt_comm.is_initialized() else 1
        self._boundaries: dict[int, list[int]] = {}
        if self._tp_size > 1:
            self._find_boundaries()

    def step(self, index: int) -> int | None:
        entry = self._entries[index]
        return None if entry is None or "step" not in entry else int(entry["step"])

    def is_scaled(self, index: int) -> bool:
        return _is_half(self._entries[index])

    def tensor(self, index: int, name: str, where: Slice | None) -> Tensor | None:
        """The elements of this tensor-parallel rank's shard of a tensor of the state, flat."""
        flat = (self._entries[index] or {}).get(name)
        if flat is None or where is None:
            return None
        if index in self._boundaries:
            return self._own_shard(flat.reshape(-1), self._boundaries[index])
        if flat.numel() != _numel(where):
            raise ValueError(
                f"{name} of parameter {index} has {flat.numel()} elements in the state dict, and the parameter, of "
                f"shape {where.shape}, has {_numel(where)}"
            )
        return flat.reshape(-1)

    def _own_shard(self, flat: Tensor, boundaries: Sequence[int]) -> Tensor:
        """This tensor-parallel rank's shard, from the elements of all. The parts of a shard end at ``boundaries``."""
        size, rank = self._tp_size, bmt_comm.current_context().tp_rank
        starts = [(size * start + rank * (stop - start), stop - start) for start, stop in pairwise(boundaries)]
        return torch.cat([flat[start : start + count] for start, count in starts])

    def _is_of_tp_ranks(self, index: int) -> bool:
        """Whether the state has a shard, or a copy, of each tensor-parallel rank."""
        where, entry = self._slices[index], self._entries[index]
        return (
            where is not None and bool(entry) and (entry or {})["exp_avg"].numel() == self._tp_size * _numel(where) > 0
        )

    def _find_boundaries(self) -> None:
        """Find boundaries per parameter with which the master weights of its Block are the parameters, on all ranks."""
        context = bmt_comm.current_context()
        everyone = context.world_size // self._tp_size
        ways = [(True, everyone // context.pipe_size), (True, everyone), (False, everyone)]
        fits = torch.ones(len(self._params), len(ways), dtype=torch.float32, device="cpu")
        for index in filter(self._is_of_tp_ranks, range(len(self._params))):
            for number, way in enumerate(ways):
                fits[index, number] = self._fits(index, self._boundaries_of(index, *way))
        for members in self._blocks():
            fits[members] = fits[members].amin(0)
        fits = fits.to(context.device)
        context.world.all_reduce(fits, "min")
        for index, row in enumerate(fits.tolist()):
            if not any(row):
                raise ValueError(
                    f"parameter {index} is split over tensor-parallel ranks, and for no layout of this job's ranks "
                    f"are the master weights in the gathered state of BMTrain its values: load the model's checkpoint "
                    f"of the same step first, in a job of as many ranks and stages and with the same tensor-parallel "
                    f"size; or load what each rank has saved, with gather=False"
                )
            if self._is_of_tp_ranks(index):
                self._boundaries[index] = self._boundaries_of(index, *ways[row.index(1.0)])

    def _blocks(self) -> list[list[int]]:
        """Which parameters are in the same Block."""
        numbers = {id(param): index for index, param in enumerate(self._params) if self._is_of_tp_ranks(index)}
        blocks = {tuple(id(p) for p in _block_of(self._params[index])) for index in numbers.values()}
        return [[numbers[each] for each in block if each in numbers] for block in blocks if block]

    def _fits(self, index: int, boundaries: Sequence[int]) -> bool:
        param, where = self._params[index], self._slices[index]
        master = (self._entries[index] or {}).get("_param_fp32")
        assert param is not None
        assert where is not None
        if master is None or not boundaries:
            return False
        own = select_rows(self._own_shard(master.reshape(-1), boundaries).view(where.tp_shard_shape), where)
        values = local_tensor(param).detach().cpu().float()
        precision = torch.finfo(param.dtype)
        return torch.allclose(own.cpu().float(), values.view_as(own), rtol=2 * precision.eps, atol=precision.tiny)

    def _boundaries_of(self, index: int, in_block: bool, parts: int) -> list[int]:
        """The boundaries of the parts of a shard, in a Block or by itself; none if it is in no Block."""
        param, where = self._params[index], self._slices[index]
        assert param is not None
        assert where is not None
        numel, offset, total = _numel(where), 0, _numel(where)
        if in_block:
            total = 0
            numbers = {id(each): number for number, each in enumerate(self._params)}
            for member in _block_of(param):
                alike = (member.dtype, member.requires_grad) == (param.dtype, param.requires_grad)
                if not alike or id(member) not in numbers or not self._is_of_tp_ranks(numbers[id(member)]):
                    continue
                offset = total if member is param else offset
                aligned = 512 // param.element_size()
                total = -(-(total + _numel(slice_of(member))) // aligned) * aligned
            if not total:
                return []
        each = -(-total // parts)
        return [min(max(each * part - offset, 0), numel) for part in range(parts + 1)]


def _block_of(param: Tensor | None) -> list[Tensor]:
    """The parameters of the same Block, in their order; none outside of Blocks."""
    return getattr(param, "block_parameters", [])


class _OfRanks:
    """The elements that each rank has saved. Every rank must ask for the same tensors in the same order."""

    def __init__(self, state: Mapping[Any, Any], order: Sequence[Any], slices: Sequence[Slice | None]) -> None:
        self._entries = [state.get(key) or {} for key in order]
        mine = [
            (
                None if "step" not in entry else int(entry["step"]),
                {name: (entry[name].numel(), entry[name].dtype) for name in _KEYS if name in entry},
                _is_half(entry),
            )
            for entry in self._entries
        ]
        self._comm = bmt_comm.current_context().world if bmt_comm.is_initialized() else Communicator()
        self._facts = self._comm.all_gather_object(mine)
        with bmt_comm.errors_on_all(self._comm):
            if any(len(facts) != len(mine) for facts in self._facts):
                raise ValueError(f"ranks have states of {[len(facts) for facts in self._facts]} parameters")
            for index, where in enumerate(slices):
                for name in _KEYS:
                    if where is not None:
                        self._shard_group(self._sizes(index, name), where, index, name)

    def step(self, index: int) -> int | None:
        steps = [facts[index][0] for facts in self._facts if facts[index][0] is not None]
        return max(steps, default=None)

    def is_scaled(self, index: int) -> bool:
        return any(facts[index][2] for facts in self._facts)

    def tensor(self, index: int, name: str, where: Slice | None) -> Tensor | None:
        sizes = self._sizes(index, name)
        dtypes = [facts[index][1][name][1] for facts in self._facts if name in facts[index][1]]
        if not any(sizes):
            return None
        comm, device = self._comm, self._comm.device
        mine = torch.zeros(max(sizes), dtype=dtypes[0], device=device)
        mine[: sizes[comm.rank]] = self._entries[index].get(name, mine[:0]).reshape(-1).to(device)
        everyone = comm.stacked(mine)
        if where is None:
            return None
        return torch.cat([everyone[rank, : sizes[rank]] for rank in self._shard_group(sizes, where, index, name)])

    def _sizes(self, index: int, name: str) -> list[int]:
        """How many elements each rank has."""
        return [facts[index][1].get(name, (0, None))[0] for facts in self._facts]

    def _shard_group(self, sizes: Sequence[int], where: Slice, index: int, name: str) -> Sequence[int]:
        """The ranks whose elements, one after the other, are this rank's tensor-parallel shard."""
        if not any(sizes):
            return ()
        candidates = [tuple(range(len(sizes)))]
        if bmt_comm.is_initialized():
            context = bmt_comm.current_context()
            candidates += [context.outer_tp_zero.ranks, context.zero.ranks, context.tp_zero.ranks, (context.rank,)]
        for ranks in candidates:
            if sum(sizes[rank] for rank in ranks) == _numel(where):
                return ranks
        raise ValueError(
            f"{name} of parameter {index} has {list(sizes)} elements on the ranks, and this rank's part of it, of "
            f"shape {where.tp_shard_shape}, has {_numel(where)}; load it in a job of as many ranks, and with "
            f"the same tensor-parallel size, as it was saved in"
        )


def _numel(where: Slice) -> int:
    return torch.Size(where.tp_shard_shape).numel()


def _is_half(entry: Mapping[str, Any] | None) -> bool:
    return bool(entry) and getattr((entry or {}).get("exp_avg"), "dtype", None) == torch.float16


# --- files ----------------------------------------------------------------------------------------


def merge_ranks(state_dicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The gathered state dict, from those that the ranks of a job without tensor parallelism have saved, in order."""
    first = state_dicts[0]
    order = [key for group in first["param_groups"] for key in group["params"]]
    state: dict[Any, dict[str, Any]] = {}
    for key in order:
        entries = [each["state"][key] for each in state_dicts if key in each["state"]]
        if entries:
            state[key] = {"step": max(int(entry["step"]) for entry in entries)}
            for name in _KEYS:
                parts = [entry[name].reshape(-1).cpu() for entry in entries if name in entry]
                if parts:
                    state[key][name] = torch.cat(parts)
    return {"state": state, "param_groups": first["param_groups"], "is_whole": True}


def to_own_form(
    state_dict: Mapping[str, Any],
    shapes: Sequence[torch.Size],
    loss_scale: float | None = None,
    values: Callable[[int], Tensor] | None = None,
) -> dict[str, Any]:
    """A gathered state dict in the form of this package's, with unsharded tensors.

    Args:
        state_dict: gathered.
        shapes: of the model's parameters and buffers, in order. The optimizer's parameters are some of them, in the
            same order.
        loss_scale: the factor of moments in fp16.
        values: gives the tensor whose shape is number i of ``shapes``. Master weights with its elements in another
            order are those of tensor-parallel ranks.

    Raises:
        ValueError: the shapes do not fit, or several do, or the state is of tensor-parallel ranks; see also
            :func:`from_upstream`.
    """
    order = [key for group in state_dict["param_groups"] for key in group["params"]]
    entries = [state_dict["state"].get(key) for key in order]
    fitting = iter(_fitting([None if entry is None else entry["exp_avg"].numel() for entry in entries], shapes))
    chosen: list[Tensor] = []
    for index, entry in enumerate(entries):
        if entry is None:
            chosen.append(torch.empty(0, device="cpu"))
            continue
        place, is_certain = next(fitting)
        if is_certain and values is not None and "_param_fp32" in entry:
            _check_order(index, entry["_param_fp32"], values(place))
        dtype = torch.float16 if "_param_fp32" in entry else torch.float32  # whether there is a master weight
        chosen.append(torch.empty(shapes[place], dtype=dtype, device="meta"))
    converted = _converted({**state_dict, "is_whole": True}, chosen, loss_scale)
    groups = [{**group, "hold_steps": 0} for group in converted["param_groups"]]  # which they do not save
    return {**converted, "param_groups": groups}


def _check_order(index: int, master: Tensor, value: Tensor) -> None:
    """Raise if master weights are the elements of a parameter in another order."""
    master, value = master.reshape(-1).cpu().to(value.dtype).float(), value.reshape(-1).float()
    if not torch.equal(master, value) and torch.equal(master.sort().values, value.sort().values):
        raise ValueError(
            f"the master weights of parameter {index} of the optimizer are those of the model in another order, as "
            f"tensor-parallel ranks have them: load its state in a job with as many of these, which takes it as it is"
        )


def _fitting(counts: Sequence[int | None], shapes: Sequence[torch.Size]) -> list[tuple[int, bool]]:
    """For each count of elements (``None``: no state): the index of the parameter's shape in ``shapes``, in order.

    Each index comes with whether no other one is possible.

    Raises:
        ValueError: there is none, or shapes that differ.
    """
    wanted = [(index, count) for index, count in enumerate(counts) if count is not None]
    first = _places(wanted, shapes)
    last = [len(shapes) - 1 - place for place in reversed(_places(wanted[::-1], shapes[::-1]))]
    for (index, count), low, high in zip(wanted, first, last, strict=True):
        alike = {tuple(shape) for shape in shapes[low : high + 1] if shape.numel() == count}
        if len(alike) > 1:
            raise ValueError(
                f"parameter {index} of the optimizer has {count} elements, and so have tensors of the model of the "
                f"shapes {sorted(alike)}, of which it does not train all: leave those that it does not train out of "
                f"the model's checkpoint, or load its state in a job, which takes it as it is"
            )
    return [(low, low == high) for low, high in zip(first, last, strict=True)]


def _places(wanted: Sequence[tuple[int, int]], shapes: Sequence[torch.Size]) -> list[int]:
    """The first indices of shapes with these numbers of elements, in ascending order."""
    places: list[int] = []
    candidates = iter(enumerate(shapes))
    for index, count in wanted:
        place = next((place for place, shape in candidates if shape.numel() == count), None)
        if place is None:
            raise ValueError(
                f"parameter {index} of the optimizer has {count} elements, and no tensor of the model after those of "
                f"the parameters before it has as many: the optimizer has them in another order than the model, or "
                f"was saved with tensor parallelism; load its state in a job, which takes it as it is"
            )
        places.append(place)
    return places
