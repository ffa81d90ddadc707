"""How one module that a plan names is sharded: checks, this rank's slices, and the forward or hooks that it gets."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from bmt_comm import Communicator, Slice

from .experts import ExpertParallel
from .matches import LINEAR_STYLES, SHARDING_STYLES, Match
from .parameters import ShardModule, rank_slice
from .regions import gather_along, split_along
from .sequence import sequence_parallel
from .sharded_modules import (
    Settings,
    ShardedColumnLinear,
    ShardedEmbedding,
    ShardedEmbeddingColumns,
    ShardedRowLinear,
    SharedHeadLinear,
    SharedInput,
    class_with_forward_of,
    copy_inputs,
    copy_last_outputs,
    divide_input,
    gather_output,
    reduce_output,
    reshard_input,
)
from .ulysses import UlyssesModule

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERT_STYLES = ("colwise", "packed_colwise", "rowwise", "packed_rowwise")


@dataclass(frozen=True)
class PlannedShard:
    """How one module is sharded, or what hooks it gets."""

    name: str
    module: nn.Module
    kind: str
    in_sequence: bool  # activations outside are split along the sequence
    comm: Communicator
    sequence_dim: int
    is_gathered: bool  # a module around it gathers its input, and reduces the gradient of that
    transposed: bool = False  # the weight is (in, out)
    parts: int = 1
    parameter: str | None = None  # if the plan names a parameter of the module, its name
    last: int = 0  # of mla_kv_a_proj: how many outputs go to the heads
    shared_heads: int = 0  # of shared_heads: the number of heads; several ranks compute the same one

    @staticmethod
    def of(match: Match, comm: Communicator, sequence_dim: int, is_gathered: bool) -> PlannedShard:
        """How the plan shards a module. Raises TypeError or ValueError if the module cannot be sharded that way."""
        base, plus, _ = match.style.partition("+")
        kind, _, count = base.partition(":")
        if kind == "colwise" and not plus and _is_gate_and_up(match):
            kind = "packed_colwise"  # plans of some models (Inkling) say "colwise"
        transposed = type(match.module).__name__ == "Conv1D" and hasattr(match.module, "nf")
        _check_fits(match, kind, transposed)
        shared_heads = _shared_heads(match, comm) if kind == "colwise" and not transposed else 0
        shard = PlannedShard(
            match.name,
            match.module,
            "shared_heads" if shared_heads else kind,
            bool(plus),
            comm,
            sequence_dim,
            is_gathered,
            transposed,
            parts=int(count or 2) if kind in ("packed_colwise", "packed_rowwise") else 1,
            parameter=match.parameter,
            last=_outputs_for_heads(match) if kind == "mla_kv_a_proj" else 0,
            shared_heads=shared_heads,
        )
        for param, dim in shard.sharded_dims():
            if param.shape[dim] % (comm.size * shard.parts):
                what = f"{shard.parts} parts over " if shard.parts > 1 else ""
                cure = (
                    f"; model.resize_token_embeddings(pad_to_multiple_of={comm.size}) first" if kind == "vocab" else ""
                )
                raise ValueError(
                    f"dimension {dim} of {match.name!r}, of shape {tuple(param.shape)}, cannot be divided into "
                    f"{what}{comm.size} tensor-parallel ranks{cure}"
                )
        return shard

    @property
    def is_column(self) -> bool:
        return self.kind in ("colwise", "colwise_gather_output", "packed_colwise")

    def sharded_dims(self) -> Iterator[tuple[nn.Parameter, int]]:
        """The parameters that are sharded, each with the dimension."""
        if self.kind not in SHARDING_STYLES:
            return
        if self.kind == "expert_parallel":
            yield from ((param, 0) for param in self.module.parameters())
            return
        if self.parameter is not None:
            packed = self.module._parameters[self.parameter]
            assert packed is not None
            yield packed, min(1, packed.dim() - 1) if self.is_column else packed.dim() - 1
            return
        weight, bias = self.module._parameters["weight"], self.module._parameters.get("bias")
        assert weight is not None
        if self.kind in ("vocab", "embedding_colwise"):
            yield weight, 0 if self.kind == "vocab" else 1
        else:
            yield weight, 0 if self.is_column != self.transposed else 1
            if self.is_column and bias is not None:
                yield bias, 0

    def slices(self) -> Iterator[tuple[nn.Parameter, Slice]]:
        """The parameters that are sharded, each with this rank's slice."""
        for param, dim in self.sharded_dims():
            shape = tuple(param.shape)
            blocks = () if self.parts == 1 else (shape[dim] // self.parts,) * self.parts
            yield param, rank_slice(shape, dim, self.comm, blocks)

    def apply(self, shared: SharedInput) -> None:
        """Give the module the forward or the hooks for its shard. Sibling modules get the same ``shared``."""
        module, kind = self.module, self.kind
        if self.parameter is not None:
            if not isinstance(module, ShardModule):
                module.__class__ = class_with_forward_of(ShardModule, type(module))
        elif kind == "mla_kv_a_proj":
            module.register_forward_hook(partial(copy_last_outputs, self.comm, self.last))
        elif kind == "experts":
            module.register_forward_pre_hook(partial(copy_inputs, self.comm), with_kwargs=True)
            module.register_forward_hook(partial(reduce_output, self.comm))
        elif kind == "moe_identity_expert":
            module.register_forward_pre_hook(partial(divide_input, self.comm.size))
        elif kind in ("sequence_start", "sequence_gather"):
            along: dict[str, Any] = {"dim": self.sequence_dim, "comm": self.comm}
            gathers = kind == "sequence_gather"
            reshard = partial(gather_along, **along, partial_grad=True) if gathers else partial(split_along, **along)
            module.register_forward_pre_hook(partial(reshard_input, reshard), with_kwargs=True)
        elif kind in ("sequence", "sequence_end", "ulysses"):
            sequence_parallel(module, self.comm)
            if kind == "sequence_end":
                module.register_forward_hook(partial(gather_output, self.comm, self.sequence_dim))
            if kind == "ulysses" and self.comm.size > 1:
                UlyssesModule(self.comm, self.sequence_dim, self.name).register(module)
        elif kind == "expert_parallel":
            experts = len(next(module.parameters())) * self.comm.size  # the parameters are shards already
            for name in _EXPERT_COUNTS:
                if getattr(module, name, None) == experts:
                    setattr(module, name, experts // self.comm.size)
            vars(module).update(all_experts=experts, split_tokens=self.in_sequence, comm=self.comm)
            module.__class__ = class_with_forward_of(ExpertParallel, type(module))
        elif kind != "replicate":
            self._replace_forward(shared)

    def _replace_forward(self, shared: SharedInput) -> None:
        module, kind = self.module, self.kind
        if kind == "shared_heads":
            sequence_parallel(module, self.comm)  # the gradient is partial on each rank
        classes: dict[str, type[ShardModule]] = {
            "shared_heads": SharedHeadLinear,
            "vocab": ShardedEmbedding,
            "embedding_colwise": ShardedEmbeddingColumns,
        }
        sharded = classes.get(kind) or (ShardedColumnLinear if self.is_column else ShardedRowLinear)
        module.tensor_parallel = Settings(  # type: ignore[assignment]
            self.comm,
            self.in_sequence,
            self.sequence_dim,
            self.transposed,
            None if self.is_gathered else shared,
            gather_output=kind == "colwise_gather_output",
            split_input=kind == "rowwise_split_input",
            vocab_size=getattr(module, "num_embeddings", 0),
            shared_heads=self.shared_heads,
        )
        module.__class__ = class_with_forward_of(sharded, type(module))


def _check_fits(match: Match, kind: str, transposed: bool) -> None:
    """Raise unless ``kind`` can shard the module, or its parameter."""
    name, module, style, parameter, parent, wrapper = match
    if parameter is not None:
        _check_expert_parameter(f"{name}.{parameter}".lstrip("."), module._parameters[parameter], style)
        return
    if kind == "expert_parallel":
        _check_expert_module(name, module)
        return
    if kind == "packed_rowwise":
        raise TypeError(f"{name!r} is a {type(module).__name__}; {style!r} shards a parameter of packed experts")
    if kind in ("vocab", "embedding_colwise"):
        if not isinstance(module, nn.Embedding):
            raise TypeError(f"{name!r} is a {type(module).__name__}; {style!r} shards a torch.nn.Embedding")
        for option, harmless in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
            if getattr(module, option) != harmless:
                raise ValueError(f"{name!r} has {option}={getattr(module, option)}, which needs the unsharded table")
    if kind in LINEAR_STYLES and not (isinstance(module, nn.Linear) or transposed):
        cure = f"; name {name}.base_layer, and the layers beside it" if hasattr(module, "base_layer") else ""
        raise TypeError(
            f"{name!r} is a {type(module).__name__}; {style!r} shards a torch.nn.Linear or a Conv1D of "
            f"transformers{cure}"
        )
    if kind in SHARDING_STYLES:
        _check_shardable(name, module)
        if getattr(type(parent), "forward", None) is nn.MultiheadAttention.forward:
            raise TypeError(
                f"{name!r} is in a torch.nn.MultiheadAttention, which reads its weight and does not call it"
            )
    if kind in SHARDING_STYLES and len(getattr(wrapper, "lora_magnitude_vector", ())):
        raise TypeError(
            f"{name!r} has adapters with use_dora=True, whose norms and magnitudes are of the unsharded weight"
        )


def _outputs_for_heads(match: Match) -> int:
    """How many last outputs of the projection of a latent attention go to the heads of every rank."""
    last = getattr(match.parent, "qk_rope_head_dim", 0)
    if not isinstance(match.module, nn.Linear) or not 0 < last <= match.module.out_features:
        raise TypeError(
            f"{match.name!r} is a {type(match.module).__name__} of a {type(match.parent).__name__}; {match.style!r} is "
            "for a torch.nn.Linear in an attention that has qk_rope_head_dim"
        )
    return last


def _shared_heads(match: Match, comm: Communicator) -> int:
    """The number of key or value heads that a projection computes, if several ranks share each of them; else 0.

    The attention of such a projection has ``num_key_value_groups``, the number of query heads for each of them.
    """
    module, attention = match.module, match.parent
    head, groups = getattr(attention, "head_dim", None), getattr(attention, "num_key_value_groups", None)
    if not isinstance(head, int) or not isinstance(groups, int) or groups < 2 or not isinstance(module, nn.Linear):
        return 0
    heads, rest = divmod(module.out_features, head)
    return heads if not rest and heads < comm.size and comm.size % heads == 0 else 0


def _check_expert_parameter(path: str, param: nn.Parameter | None, style: str) -> None:
    """Raise unless ``style`` can shard a parameter of packed experts."""
    if style.partition(":")[0] not in _EXPERT_STYLES:
        raise ValueError(f"{path!r} is a parameter, and {style!r} is for modules; choose one of {_EXPERT_STYLES}")
    if is_vector(param) and style != "colwise":
        raise ValueError(f"{path!r} has one dimension; 'colwise' can shard it, {style!r} cannot")
    if param is None or param.dim() not in (1, 2, 3) or (param.dim() == 2 and style == "rowwise"):
        shape = None if param is None else tuple(param.shape)
        raise ValueError(
            f"{path!r} has the shape {shape}; {style!r} shards a weight of packed experts, (experts, outputs, inputs), "
            "or, column-wise, their biases, (experts, outputs)"
        )
    _check_unsharded(path, param)


def _is_gate_and_up(match: Match) -> bool:
    """Whether this is the parameter of transformers' packed experts that concatenates gate and up along outputs."""
    concatenated, transposed = (getattr(match.module, name, False) for name in ("is_concatenated", "is_transposed"))
    return match.parameter == "gate_up_proj" and bool(concatenated) and not transposed


def is_vector(param: nn.Parameter | None) -> bool:
    return param is not None and param.dim() == 1


def _check_expert_module(name: str, module: nn.Module) -> None:
    """Raise unless a module computes with packed experts that can be distributed over ranks."""
    params = list(module.parameters())
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    counts = {len(param) if param.dim() > 1 else 0 for param in params}
    if len(names) != 3 or len(counts) != 1 or 0 in counts:
        shapes = [tuple(param.shape) for param in params]
        raise TypeError(
            f"{name!r} is a {type(module).__name__} with parameters of the shapes {shapes}, and its forward takes "
            f"{names}; 'expert_parallel' is for packed experts, (experts, ...), whose forward takes tokens, their "
            "experts and the weights of these"
        )
    for param in params:
        _check_unsharded(name, param)


def _check_unsharded(name: str, param: nn.Parameter | None) -> None:
    if getattr(param, "tp_mode", False):
        raise ValueError(f"parallelize has sharded a parameter of {name!r} already; call it once for a model")
    if hasattr(param, "handle") or hasattr(param, "placements"):
        raise ValueError(f"a parameter of {name!r} is sharded already; parallelize a model first, and then shard it")


def _check_shardable(name: str, module: nn.Module) -> None:
    """Raise unless a module has an unsharded weight of its own and a forward that sharding can replace."""
    for key in ("weight", "bias"):
        _check_unsharded(name, module._parameters.get(key))
    if module._parameters.get("weight") is None:
        raise TypeError(f"the weight of {name!r} is computed from something else; leave it out of the plan")
    own_forward = type(module).forward not in (nn.Linear.forward, nn.Embedding.forward)
    code = getattr(type(module).forward, "__code__", None)
    calls_super = code is not None and {"super", "forward"} <= set(code.co_names)
    if "forward" in vars(module) or (own_forward and not calls_super and type(module).__name__ != "Conv1D"):
        raise TypeError(
            f"{name!r}, a {type(module).__name__}, has a forward of its own, which would be lost; leave it out of the "
            "plan"
        )
