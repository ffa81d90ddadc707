"""Cutting a model that was written for one device over the tensor-parallel ranks.

[Note: plans]
    A plan maps names of modules to how they are cut. ``*`` in a name stands for one part of it, such as a layer's
    number. The names are those that Hugging Face models carry (``model.tp_plan``), and a few more:

    =========================  =============================================================================
    colwise                    a linear layer: a rank computes its part of the output features
    colwise_gather_output      the same, and every rank gets all of them (also: ``colwise_rep``)
    packed_colwise:n           a fused linear layer: n outputs of equal length in one, each cut by itself
    packed_colwise             n = 2 (gate and up)
    rowwise                    a linear layer: a rank takes its part of the input features; the ranks' results
                               are summed
    rowwise_split_input        the same for an input that is whole (also: ``rowwise_rep``)
    vocab                      an embedding: a rank has a range of the ids (also: ``embedding_rowwise``)
    embedding_colwise          an embedding: a rank has a range of the features, and every rank gets all of them
    sequence                   any module that works on a part of the sequence, such as a norm, or of the heads,
                               such as a norm of queries (also: ``replicated_with_grad_allreduce``)
    sequence_start             the input of this module is split along the sequence
    sequence_end               as ``sequence``, and the output of this module is joined again
    sequence_gather            the input of this module, which is split, is joined for the ``colwise`` layers in it
                               (an attention that takes the sequence's length from its input needs this)
    ulysses                    an attention module on a part of the sequence: each rank computes some of the heads for
                               the whole sequence (:mod:`bmt_tp.ulysses`). The attention must be
                               ``F.scaled_dot_product_attention``
    experts                    a module that computes with packed experts: a rank computes with its part of each
                               expert, and the ranks' results are summed (also: ``moe_tp_experts``, and
                               ``all_reduce`` of experts that every token has)
    expert_parallel            a module of packed experts: a rank has some of the experts, whole
                               (:mod:`bmt_tp.experts`; also: ``ep_dispatch_experts``). Its forward takes tokens,
                               (T, H), their experts, (T, k), and the weights of these, (T, k)
    moe_identity_expert        a module in ``experts`` that returns its input: each rank returns its share of the sum
    mla_kv_a_proj              a linear layer that every rank has, of multi-head latent attention: its last
                               ``qk_rope_head_dim`` outputs go to the heads of every rank
    replicate                  nothing: every rank has the module as it is (also: ``local_params``)
    =========================  =============================================================================

    Where an attention has fewer key/value heads than there are ranks (grouped queries), ``colwise`` leaves their
    projections whole: each rank computes the head that its queries need, and the gradients are summed.

    The parameters of packed experts, (experts, outputs, inputs), are named themselves, as ``colwise``,
    ``packed_colwise`` or ``rowwise``, beside their module, which is ``experts``. Where an expert multiplies from the
    left, (experts, inputs, outputs), they are named the other way round: ``packed_rowwise`` (gate and up), ``colwise``.
    A parameter with one number per head, such as an attention's sinks, is ``colwise`` beside layers that are.

    ``colwise+sequence``, ``packed_colwise:n+sequence``, ``rowwise+sequence``, ``vocab+sequence`` and
    ``expert_parallel+sequence`` stand where activations outside of the layer are split along the sequence.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bmt_comm import Communicator, Slice, tp_shard_of

from .batch import check_same_batch, check_same_values, have_equal_values
from .cut_modules import (
    ChangeInput,
    CopyInputs,
    CopyLastOutputs,
    CutColumnLinear,
    CutEmbedding,
    CutEmbeddingColumns,
    CutRowLinear,
    DivideInput,
    GatherOutput,
    ReduceOutput,
    Settings,
    SharedHeadLinear,
    SharedInput,
    class_with_forward_of,
)
from .experts import ExpertParallel
from .matches import (
    CUTTING_STYLES,
    LINEAR_STYLES,
    PLAIN_STYLES,
    Match,
    find_matches,
    left_out,
    owner_of,
    with_whole_experts,
)
from .parameters import PieceModule, TensorParallelParameter, mark_piece, piece_of
from .plans import plan_of
from .regions import tensor_comm
from .sequence import sequence_parallel
from .ulysses import UlyssesModule

M = TypeVar("M", bound=nn.Module)

DIVIDED_ATTRIBUTES = (
    "num_heads",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "n_head",
    "n_heads",
    "n_kv_heads",
    "num_kv_head",
    "split_size",
    "all_head_size",
)
"""What an attention module counts its heads by: divided where its projections are cut."""


_HEADS = tuple(name for name in DIVIDED_ATTRIBUTES if name not in ("split_size", "all_head_size"))

_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_kv_head")

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERT_STYLES = ("colwise", "packed_colwise", "rowwise", "packed_rowwise")


def parallelize(
    model: M,
    plan: Mapping[str, str] | None = None,
    comm: Communicator | None = None,
    *,
    sequence_dim: int = 1,
    divided_attributes: tuple[str, ...] | None = None,
    expert_parallel: bool = False,
) -> M:
    """Cut the modules that ``plan`` names over the tensor-parallel ranks, in place.

    Parameters stay the same objects under the same names, and hold this rank's piece of the values that they have
    now, the same on every rank (a sample is compared). Tied parameters stay tied. ``bmt_zero`` may wrap the result, or
    ``DistributedDataParallel`` over the data-parallel ranks.

    Args:
        model: any module: its ``torch.nn.Linear`` and ``Embedding``, and Hugging Face's ``Conv1D``, can be cut.
        plan: see [Note: plans]; by default ``model.tp_plan``, or that of :mod:`bmt_tp.plans` if it names more.
        comm: the tensor-parallel ranks; by default the context's.
        sequence_dim: the dimension of activations along which the sequence is split.
        divided_attributes: integers of a module that are divided by the number of ranks if one of its linear
            layers is cut by columns: numbers of heads. By default ``DIVIDED_ATTRIBUTES``.
        expert_parallel: what the plan has as ``experts`` becomes ``expert_parallel``, and its parameters, too.

    Returns:
        ``model``.

    Raises:
        TypeError: a name in the plan belongs to a module that cannot be cut so.
        ValueError: an unknown style, a name that no module has, sizes that the ranks do not divide, parameters
            tied between modules that are cut differently, or that are cut or sharded already; without
            ``divided_attributes``, a module with an integer (``heads``, ``nhead``) that may count heads that are cut or
            not. The model is as it was then.
        RuntimeError: the ranks have different parameters. Forward: they have different batches, or their pieces were
            overwritten.
    """
    comm = tensor_comm(comm)
    given = plan is not None
    if plan is None:
        plan = plan_of(model)
        if not plan:
            raise ValueError(f"{type(model).__name__} carries no tp_plan; give a plan of module names")
    if expert_parallel:
        plan = with_whole_experts(plan)
    cuts = find_matches(model, plan, given)
    cuts += left_out(cuts)
    gathered = tuple(match.name + "." for match in cuts if match.style == "sequence_gather")
    whole = [_Cut.of(match, comm, sequence_dim, match.name.startswith(gathered)) for match in cuts]
    _check_experts(whole)
    heads = _heads(model, whole, comm, divided_attributes)
    pieces = _pieces(model, whole)
    check_same_values(((name, p) for name, p in model.named_parameters() if _is_plain(p)), comm)
    _check_sequence(whole, pieces)
    for param, found in pieces:
        with torch.no_grad():
            piece = tp_shard_of(param.detach(), found).clone(memory_format=torch.contiguous_format)
        param.data = piece
        param.grad = None
        mark_piece(param, found)
    shared: dict[str, SharedInput] = {}
    for cut in whole:
        cut.apply(shared.setdefault(cut.name.rpartition(".")[0], SharedInput()))
    for module, attribute, value in heads:
        setattr(module, attribute, value)
    layers = {match.parent for match in cuts if isinstance(match.parent, nn.TransformerEncoderLayer)}
    for layer in layers:
        layer.activation_relu_or_gelu = 0  # else torch computes with the weights of its layers, in evaluation
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and not layers.isdisjoint(encoder.layers):
            encoder.use_nested_tensor = False  # which only those computations take
    model.register_forward_pre_hook(_FirstBatchCheck(model, comm), with_kwargs=True)
    if comm.size > 1 and any(cut.kind == "expert_parallel" and cut.in_sequence for cut in whole):
        model.register_forward_pre_hook(_check_router_logits, with_kwargs=True)
    return model


@dataclass(frozen=True)
class _Cut:
    """What becomes of one module."""

    name: str
    module: nn.Module
    kind: str
    in_sequence: bool  # activations outside are split along the sequence
    comm: Communicator
    sequence_dim: int
    is_gathered: bool  # its input was gathered, and the gradient of that is reduced there
    transposed: bool = False  # the weight is (in, out)
    parts: int = 1
    parameter: str | None = None  # of packed experts: which of the module's is cut
    last: int = 0  # of mla_kv_a_proj: how many outputs go to the heads
    shared_heads: int = 0  # of shared_heads: how many heads there are, each for several ranks

    @staticmethod
    def of(match: Match, comm: Communicator, sequence_dim: int, is_gathered: bool) -> _Cut:
        name, module, style, parameter, parent, wrapper = match
        base, plus, _ = style.partition("+")
        kind, _, count = base.partition(":")
        if style == "colwise" and parameter is not None and _has_gate_and_up(module, parameter):
            kind = "packed_colwise"  # plans of some models (Inkling) forget it
        parts = int(count or 2) if kind in ("packed_colwise", "packed_rowwise") else 1
        transposed = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
        if parameter is not None:
            _check_expert_parameter(f"{name}.{parameter}".lstrip("."), module._parameters[parameter], style)
        elif kind in ("vocab", "embedding_colwise"):
            if not isinstance(module, nn.Embedding):
                raise TypeError(f"{name!r} is a {type(module).__name__}; {style!r} cuts a torch.nn.Embedding")
            for option, harmless in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
                if getattr(module, option) != harmless:
                    raise ValueError(f"{name!r} has {option}={getattr(module, option)}, which needs the whole table")
        elif kind == "expert_parallel":
            _check_expert_module(name, module)
        elif kind == "packed_rowwise":
            raise TypeError(f"{name!r} is a {type(module).__name__}; {style!r} cuts a parameter of packed experts")
        elif kind in LINEAR_STYLES and not (isinstance(module, nn.Linear) or transposed):
            cure = f"; name {name}.base_layer, and the layers beside it" if hasattr(module, "base_layer") else ""
            raise TypeError(
                f"{name!r} is a {type(module).__name__}; {style!r} cuts a torch.nn.Linear or a Conv1D of "
                f"transformers{cure}"
            )
        if kind in CUTTING_STYLES and kind != "expert_parallel" and parameter is None:
            _check_uncut(name, module)
        if kind in CUTTING_STYLES and getattr(type(parent), "forward", None) is nn.MultiheadAttention.forward:
            raise TypeError(
                f"{name!r} is in a torch.nn.MultiheadAttention, which reads its weight and does not call it"
            )
        if kind.startswith("rowwise") and len(getattr(wrapper, "lora_magnitude_vector", ())):
            raise TypeError(f"{name!r} has adapters with use_dora=True, whose norms of columns are of the whole weight")
        shared_heads = _shared_heads(module, parent, comm) if kind == "colwise" and not transposed else 0
        if shared_heads:
            kind = "shared_heads"
        last = 0
        if kind == "mla_kv_a_proj":
            last = getattr(parent, "qk_rope_head_dim", 0)
            if not isinstance(module, nn.Linear) or not 0 < last <= module.out_features:
                raise TypeError(
                    f"{name!r} is a {type(module).__name__} of a {type(parent).__name__}; {style!r} is for a "
                    f"torch.nn.Linear in an attention that has qk_rope_head_dim"
                )
        cut = _Cut(
            name,
            module,
            kind,
            bool(plus),
            comm,
            sequence_dim,
            is_gathered,
            transposed,
            parts,
            parameter,
            last,
            shared_heads,
        )
        for param, dim in cut.dims():
            if param.shape[dim] % (comm.size * parts):
                what = f"{parts} parts over " if parts > 1 else ""
                cure = (
                    f"; model.resize_token_embeddings(pad_to_multiple_of={comm.size}) first" if kind == "vocab" else ""
                )
                raise ValueError(
                    f"dimension {dim} of {name!r}, of shape {tuple(param.shape)}, cannot be divided into "
                    f"{what}{comm.size} tensor-parallel ranks{cure}"
                )
        return cut

    @property
    def is_column(self) -> bool:
        return self.kind in ("colwise", "colwise_gather_output", "packed_colwise")

    def dims(self) -> Iterator[tuple[nn.Parameter, int]]:
        """The parameters that are cut, and along which dimension."""
        if self.kind not in CUTTING_STYLES:
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

    def pieces(self) -> Iterator[tuple[nn.Parameter, Slice]]:
        for param, dim in self.dims():
            shape = tuple(param.shape)
            blocks = () if self.parts == 1 else (shape[dim] // self.parts,) * self.parts
            yield param, piece_of(shape, dim, self.comm, blocks)

    def apply(self, shared: SharedInput) -> None:
        """Let the module compute with its piece; ``shared`` is for the modules beside it."""
        module = self.module
        if self.parameter is not None and not isinstance(module, PieceModule):
            module.__class__ = class_with_forward_of(PieceModule, type(module))
        if self.parameter is not None or self.kind == "replicate":
            return
        if self.kind == "mla_kv_a_proj":
            module.register_forward_hook(CopyLastOutputs(self.comm, self.last))
            return
        if self.kind == "experts":
            module.register_forward_pre_hook(CopyInputs(self.comm), with_kwargs=True)
            module.register_forward_hook(ReduceOutput(self.comm))
            return
        if self.kind == "moe_identity_expert":
            module.register_forward_pre_hook(DivideInput(self.comm.size))
            return
        if self.kind in PLAIN_STYLES:
            if self.kind in ("sequence_start", "sequence_gather"):
                change = ChangeInput(self.comm, self.sequence_dim, self.kind == "sequence_gather")
                module.register_forward_pre_hook(change, with_kwargs=True)
                return
            sequence_parallel(module, self.comm)
            if self.kind == "sequence_end":
                module.register_forward_hook(GatherOutput(self.comm, self.sequence_dim))
            if self.kind == "ulysses" and self.comm.size > 1:
                UlyssesModule(self.comm, self.sequence_dim, self.name).register(module)
            return
        if self.kind == "expert_parallel":
            experts = len(next(module.parameters())) * self.comm.size  # which are cut by now
            for name in _EXPERT_COUNTS:
                if getattr(module, name, None) == experts:
                    setattr(module, name, experts // self.comm.size)
            vars(module).update(all_experts=experts, split_tokens=self.in_sequence, comm=self.comm)
            module.__class__ = class_with_forward_of(ExpertParallel, type(module))
            return
        if self.kind == "shared_heads":
            sequence_parallel(module, self.comm)  # each rank finds a part of the gradient
            module.tensor_parallel = self._settings(shared)  # type: ignore[assignment]
            module.__class__ = class_with_forward_of(SharedHeadLinear, type(module))
            return
        embeddings: dict[str, type[PieceModule]] = {"vocab": CutEmbedding, "embedding_colwise": CutEmbeddingColumns}
        form = embeddings.get(self.kind) or (CutColumnLinear if self.is_column else CutRowLinear)
        module.tensor_parallel = self._settings(shared)  # type: ignore[assignment]
        module.__class__ = class_with_forward_of(form, type(module))

    def _settings(self, shared: SharedInput) -> Settings:
        return Settings(
            self.comm,
            self.in_sequence,
            self.sequence_dim,
            self.transposed,
            None if self.is_gathered else shared,
            gather_output=self.kind == "colwise_gather_output",
            split_input=self.kind == "rowwise_split_input",
            vocab_size=getattr(self.module, "num_embeddings", 0),
            shared_heads=self.shared_heads,
        )


def _shared_heads(module: nn.Module, attention: nn.Module, comm: Communicator) -> int:
    """How many heads of keys or values a projection computes, where ranks are more, so that several share each; or 0.

    Such an attention says how many queries share one (``num_key_value_groups``).
    """
    head, groups = getattr(attention, "head_dim", None), getattr(attention, "num_key_value_groups", None)
    if not isinstance(head, int) or not isinstance(groups, int) or groups < 2 or not isinstance(module, nn.Linear):
        return 0
    heads, rest = divmod(module.out_features, head)
    return heads if not rest and heads < comm.size and comm.size % heads == 0 else 0


def _check_experts(cuts: list[_Cut]) -> None:
    """Raise where parameters are cut that no layers of this rank go with: of packed experts whose results nothing
    sums, or of a module without layers that are cut by columns."""
    summed = {id(cut.module) for cut in cuts if cut.kind == "experts"}
    cut_inside = {id(cut.module) for cut in cuts if cut.parameter is not None}
    of_experts = tuple(cut.name + "." for cut in cuts if cut.kind == "experts")
    for cut in cuts:
        if cut.kind == "experts" and id(cut.module) not in cut_inside:
            raise ValueError(f"the plan has {cut.name!r} as 'experts', and cuts no parameter of it; name these, too")
        if cut.kind == "moe_identity_expert" and not cut.name.startswith(of_experts):
            raise ValueError(
                f"the plan has {cut.name!r} as 'moe_identity_expert', and no module around it as 'experts'"
            )
    beside = {owner_of(cut.name) for cut in cuts if cut.is_column and cut.parameter is None}
    for cut in cuts:
        if cut.parameter is None:
            continue
        if _is_vector(cut.module._parameters[cut.parameter]):
            if cut.name not in beside:
                raise ValueError(
                    f"the plan cuts the parameter {cut.parameter!r} of {cut.name!r}, and no layer of it by columns"
                )
        elif id(cut.module) not in summed:
            raise ValueError(
                f"the plan cuts the parameter {cut.parameter!r} of {cut.name!r}; it must have {cut.name!r} itself as "
                "'experts', so that what the ranks compute is summed"
            )


def _check_expert_parameter(path: str, param: nn.Parameter | None, style: str) -> None:
    """Raise unless a parameter of packed experts can be cut by ``style``."""
    if style.partition(":")[0] not in _EXPERT_STYLES:
        raise ValueError(f"{path!r} is a parameter, and {style!r} is for modules; choose one of {_EXPERT_STYLES}")
    if _is_vector(param) and style != "colwise":
        raise ValueError(f"{path!r} has one dimension; it can be cut by 'colwise' only, not by {style!r}")
    if param is None or param.dim() not in (1, 2, 3) or (param.dim() == 2 and style == "rowwise"):
        shape = None if param is None else tuple(param.shape)
        raise ValueError(
            f"{path!r} has the shape {shape}; {style!r} cuts a weight of packed experts, (experts, outputs, inputs), "
            "or, by columns, their biases, (experts, outputs)"
        )
    _check_whole(path, param)


def _has_gate_and_up(module: nn.Module, parameter: str) -> bool:
    """Whether a parameter of transformers' packed experts is [gate; up], by outputs."""
    concatenated, transposed = (getattr(module, name, False) for name in ("is_concatenated", "is_transposed"))
    return parameter == "gate_up_proj" and bool(concatenated) and not transposed


def _is_vector(param: nn.Parameter | None) -> bool:
    return param is not None and param.dim() == 1


def _check_expert_module(name: str, module: nn.Module) -> None:
    """Raise unless a module computes with packed experts, of which each rank can have some."""
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
        _check_whole(name, param)


def _check_whole(name: str, param: nn.Parameter | None) -> None:
    if getattr(param, "tp_mode", False):
        raise ValueError(f"a parameter of {name!r} has been cut already; parallelize a model once")
    if hasattr(param, "handle") or hasattr(param, "placements"):
        raise ValueError(f"a parameter of {name!r} is sharded already; parallelize a model first, and then shard it")


def _check_uncut(name: str, module: nn.Module) -> None:
    """Raise unless a module is its class's, with its parameters in their places and whole."""
    for key in ("weight", "bias"):
        _check_whole(name, module._parameters.get(key))
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


def _check_sequence(cuts: list[_Cut], pieces: list[tuple[nn.Parameter, Slice]]) -> None:
    """Raise where parameters that are cut are to be used on parts of the sequence."""
    cut_params = {id(param) for param, _ in pieces}
    for cut in cuts:
        if cut.kind in ("sequence", "sequence_end", "ulysses"):
            for name, param in cut.module.named_parameters():
                if id(param) in cut_params or getattr(param, "tp_mode", False):
                    raise ValueError(
                        f"the plan has {cut.name!r} as {cut.kind!r}, and cuts its parameter {name!r}; "
                        f"{cut.kind!r} is for modules, such as norms, that ranks have in common"
                    )


def _pieces(model: nn.Module, cuts: list[_Cut]) -> list[tuple[nn.Parameter, Slice]]:
    """What is kept of each parameter, once for tied ones; raises ValueError where they would be cut differently."""
    found: dict[int, tuple[nn.Parameter, Slice]] = {}
    owners: dict[int, str] = {}
    for cut in cuts:
        for param, piece in cut.pieces():
            other = found.get(id(param))
            if other is not None and other[1] != piece:
                raise ValueError(f"{owners[id(param)]!r} and {cut.name!r} share a parameter and are cut differently")
            found[id(param)] = (param, piece)
            owners[id(param)] = cut.name
    cut_modules = {id(cut.module) for cut in cuts if cut.kind in CUTTING_STYLES}
    for name, module in model.named_modules():
        for param in module._parameters.values():
            # BERT's head has the bias of the layer in it, too. Where it computes with that, shapes do not fit.
            is_held = id(param) in found and param.dim() == 1 and owners[id(param)].rpartition(".")[0] == name
            if id(param) in found and id(module) not in cut_modules and not is_held:
                raise ValueError(
                    f"{name!r} shares a parameter with {owners[id(param)]!r}, which the plan cuts; "
                    "put it into the plan, too"
                )
    return list(found.values())


def _heads(
    model: nn.Module, cuts: list[_Cut], comm: Communicator, attributes: tuple[str, ...] | None
) -> list[tuple[nn.Module, str, int]]:
    """The attributes that are to be set, with their values."""
    parents: dict[str, nn.Module] = {}
    features: dict[str, list[int]] = {}  # of the layers that are cut by columns in each of them
    for cut in cuts:
        if cut.kind not in ("colwise", "packed_colwise") or cut.parameter is not None:
            continue
        parent_name = owner_of(cut.name)
        parent = parents[parent_name] = model.get_submodule(parent_name)
        counts = {v for name in _HEADS if isinstance(v := getattr(parent, name, None), int) and cut.parts == 3}
        if len(counts) > 1:
            raise ValueError(
                f"{cut.name!r} holds queries, keys and values of different numbers of heads {sorted(counts)}, which "
                f"'packed_colwise:3' would cut as equal parts; split it into layers of their own"
            )
        head = getattr(parent, "head_dim", None)
        size = next(param.shape[dim] for param, dim in cut.dims())
        features.setdefault(parent_name, []).append(size // cut.parts)
        heads, rest = divmod(size, head * cut.parts) if isinstance(head, int) and head > 0 else (0, 0)
        if rest == 0 and heads % comm.size:
            raise ValueError(
                f"{cut.name!r} has {heads} heads of {head} features, which cannot be divided over {comm.size} "
                "tensor-parallel ranks"
            )
    found = []
    shared: dict[nn.Module, int] = {}
    for cut in cuts:
        if cut.kind == "shared_heads":
            shared[model.get_submodule(owner_of(cut.name))] = cut.shared_heads
    for parent_name, parent in parents.items():
        values = {**{name: getattr(parent, name, None) for name in ("heads", "nhead")}, **vars(parent)}
        sizes = features[parent_name]
        unclear = [name for name, value in values.items() if _may_count_heads(name, value, sizes)]
        if unclear and attributes is None:
            raise ValueError(
                f"{parent_name!r} has the attribute {unclear[0]!r}: if it counts heads that the plan divides, pass "
                f"divided_attributes=(*DIVIDED_ATTRIBUTES, {unclear[0]!r}), else divided_attributes=DIVIDED_ATTRIBUTES"
            )
        if parent in shared:  # one for each rank
            groups: Any = parent.num_key_value_groups
            found.append((parent, "num_key_value_groups", groups * shared[parent] // comm.size))
            found += [(parent, name, 1) for name in _KEY_VALUE_HEADS if hasattr(parent, name)]
        for attribute in DIVIDED_ATTRIBUTES if attributes is None else attributes:
            if parent in shared and attribute in _KEY_VALUE_HEADS:
                continue
            value = getattr(parent, attribute, None)
            if not isinstance(value, int) or isinstance(value, bool):
                continue
            if value % comm.size:
                raise ValueError(
                    f"{attribute}={value} of {parent_name!r} cannot be divided over {comm.size} tensor-parallel ranks"
                )
            found.append((parent, attribute, value // comm.size))
    return found


def _may_count_heads(name: str, value: Any, features: list[int]) -> bool:
    """Whether an attribute of a module may count heads into which it divides some of ``features``."""
    if name in DIVIDED_ATTRIBUTES or not isinstance(value, int) or isinstance(value, bool):
        return False
    if name in ("heads", "nhead"):
        return True
    if value < 2 or name.startswith("d_"):
        return False
    lengths = ("dim", "size", "index", "idx", "group", "per_head")
    counts = name == "h" or ("head" in name and not any(each in name for each in lengths))
    return counts and any(size % value == 0 for size in features)


def _check_router_logits(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if a Hugging Face model would compute a loss of its routers from this rank's part of the tokens."""
    config = getattr(module, "config", None)
    parts = [config, getattr(config, "text_config", None)]
    asked = kwargs.get("output_router_logits")
    if asked or (asked is None and any(getattr(part, "output_router_logits", False) for part in parts)):
        raise ValueError(
            "output_router_logits=True: routers see this rank's part of the sequence, and the auxiliary loss is of all "
            "tokens; use a plan without 'expert_parallel+sequence', or output_router_logits=False"
        )


def _is_plain(param: nn.Parameter) -> bool:
    """Whether a parameter is whole and has its values in memory of its own."""
    if getattr(param, "tp_mode", False) or hasattr(param, "handle") or hasattr(param, "placements"):
        return False
    return param.layout is torch.strided and not param.is_quantized and (param.is_meta or param.data_ptr() != 0)


def _check_not_fully_sharded(model: nn.Module) -> None:
    """Raise if torch's ``fully_shard`` has replaced pieces by DTensors, which do not say what they are pieces of."""
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for name, module in model.named_modules():
        if isinstance(module, sharded) and any(isinstance(part, PieceModule) for part in module.modules()):
            raise RuntimeError(
                f"torch's fully_shard has sharded {name or type(module).__name__!r}, which parallelize has cut: "
                f"clipping and state dicts would take pieces for whole parameters; use bmt_zero (fully_shard, "
                f"BMTrainModelWrapper) or DistributedDataParallel over the data-parallel ranks"
            )


class _FirstBatchCheck:
    """Compares the first batch over the tensor-parallel ranks, and the pieces that they have."""

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self.comm = comm
        self.done = False
        self.were_equal = have_equal_values(self._pieces(model), comm)  # experts that begin as copies of one, say

    @staticmethod
    def _pieces(model: nn.Module) -> list[nn.Parameter]:
        return [p for p in model.parameters() if isinstance(p, TensorParallelParameter) and p.tp_mode]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.done and not torch.compiler.is_compiling():
            # Caches, which lie deeper, have the heads of this rank.
            given = [*args, *kwargs.values()]
            given += [x for value in given if type(value) is dict for x in value.values()]
            check_same_batch(*(x for x in given if isinstance(x, Tensor)), comm=self.comm)
            _check_not_fully_sharded(module)
            if not self.were_equal and have_equal_values(self._pieces(module), self.comm):
                raise RuntimeError(
                    "the tensor-parallel ranks have the same values in different pieces, which were overwritten: give "
                    "DistributedDataParallel the data-parallel ranks (process_group=), and initialise a model before "
                    "it is cut"
                )
            self.done = True
