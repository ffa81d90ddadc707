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

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import nn

from bmt_comm import Communicator, tp_shard_of

from .batch import check_same_values
from .cut_modules import SharedInput
from .first_batch import FirstBatchCheck, check_router_logits
from .head_counts import divided_heads
from .matches import find_matches, left_out, with_whole_experts
from .parameters import mark_piece
from .plan_checks import check_experts, check_sequence, pieces_of
from .planned_cut import PlannedCut
from .plans import plan_of
from .regions import tensor_comm

M = TypeVar("M", bound=nn.Module)


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
    whole = [PlannedCut.of(match, comm, sequence_dim, match.name.startswith(gathered)) for match in cuts]
    check_experts(whole)
    heads = divided_heads(model, whole, comm, divided_attributes)
    pieces = pieces_of(model, whole)
    check_same_values(((name, p) for name, p in model.named_parameters() if _is_whole_with_values(p)), comm)
    check_sequence(whole, pieces)
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
    model.register_forward_pre_hook(FirstBatchCheck(model, comm), with_kwargs=True)
    if comm.size > 1 and any(cut.kind == "expert_parallel" and cut.in_sequence for cut in whole):
        model.register_forward_pre_hook(check_router_logits, with_kwargs=True)
    return model


def _is_whole_with_values(param: nn.Parameter) -> bool:
    """Whether a parameter is whole and has its values in memory of its own."""
    if getattr(param, "tp_mode", False) or hasattr(param, "handle") or hasattr(param, "placements"):
        return False
    return param.layout is torch.strided and not param.is_quantized and (param.is_meta or param.data_ptr() != 0)
