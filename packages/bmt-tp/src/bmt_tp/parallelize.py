"""Sharding a model that was written for one device over the tensor-parallel ranks.

[Note: plans]
    A plan maps names of modules to styles, which say how the modules are sharded. ``*`` in a name stands for one part
    of it, such as a layer's number. The styles are those of Hugging Face models (``model.tp_plan``), and a few more:

    =========================  =============================================================================
    colwise                    a linear layer: a rank computes its part of the output features
    colwise_gather_output      the same, and every rank gets all of them (also: ``colwise_rep``)
    packed_colwise:n           a fused linear layer: n outputs of equal length in one, each sharded by itself
    packed_colwise             n = 2 (gate and up)
    rowwise                    a linear layer: a rank takes its part of the input features; the ranks' results
                               are summed
    rowwise_split_input        the same for a replicated input (also: ``rowwise_rep``)
    vocab                      an embedding: a rank has a range of the ids (also: ``embedding_rowwise``)
    embedding_colwise          an embedding: a rank has a range of the features, and every rank gets all of them
    sequence                   any module that works on a part of the sequence, such as a norm, or of the heads,
                               such as a norm of queries (also: ``replicated_with_grad_allreduce``)
    sequence_start             the input of this module is split along the sequence
    sequence_end               as ``sequence``, and the output of this module is gathered
    sequence_gather            the input of this module, which is split, is gathered for the ``colwise`` layers in it
                               (an attention that takes the sequence's length from its input needs this)
    ulysses                    an attention module on a part of the sequence: each rank computes some of the heads for
                               the whole sequence (:mod:`bmt_tp.ulysses`). The attention must be
                               ``F.scaled_dot_product_attention``
    experts                    a module that computes with packed experts: a rank computes with its part of each
                               expert, and the ranks' results are summed (also: ``moe_tp_experts``, and
                               ``all_reduce`` for experts that every token uses)
    expert_parallel            a module of packed experts: a rank has some complete experts
                               (:mod:`bmt_tp.experts`; also: ``ep_dispatch_experts``). Its forward takes tokens,
                               (T, H), their experts, (T, k), and the weights of these, (T, k)
    moe_identity_expert        a module in ``experts`` that returns its input: each rank returns its share of the sum
    mla_kv_a_proj              a replicated linear layer of multi-head latent attention: its last
                               ``qk_rope_head_dim`` outputs go to the heads of every rank
    replicate                  every rank has the module unchanged (also: ``local_params``)
    =========================  =============================================================================

    If an attention has fewer key/value heads than there are ranks (grouped queries), ``colwise`` replicates their
    projections: each rank computes the head that its queries need, and the gradients are summed.

    The plan names the parameters of packed experts, (experts, outputs, inputs), themselves, as ``colwise``,
    ``packed_colwise`` or ``rowwise``, and their module as ``experts``. If the parameters are transposed, (experts,
    inputs, outputs), these styles are exchanged: ``packed_rowwise`` (gate and up) and ``colwise``.
    A parameter with one number per head, such as an attention's sinks, is ``colwise`` if layers of its module are.

    ``colwise+sequence``, ``packed_colwise:n+sequence``, ``rowwise+sequence``, ``vocab+sequence`` and
    ``expert_parallel+sequence`` are for activations that are split along the sequence outside of the layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import nn

from bmt_comm import Communicator, tp_shard_of

from .batch import check_same_values
from .first_batch import FirstBatchCheck, check_router_logits
from .head_counts import divided_heads
from .matches import find_matches, implied_matches, with_expert_parallel
from .parameters import mark_shard
from .plan_checks import check_experts, check_sequence, planned_slices
from .planned_shard import PlannedShard
from .plans import plan_of
from .regions import tensor_comm
from .sharded_modules import SharedInput

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
    """Shard the modules that ``plan`` names over the tensor-parallel ranks, in place.

    Parameters stay the same objects under the same names, and then hold this rank's shard of their values. The values
    must be the same on every rank (a sample is compared). Tied parameters stay tied. ``bmt_zero`` may wrap the result,
    or ``DistributedDataParallel`` over the data-parallel ranks.

    Args:
        model: any module. Its ``torch.nn.Linear`` and ``Embedding``, and Hugging Face's ``Conv1D``, can be sharded.
        plan: see [Note: plans]; by default ``model.tp_plan``, or that of :mod:`bmt_tp.plans` if it names more.
        comm: the tensor-parallel ranks; by default the context's.
        sequence_dim: the dimension of activations along which the sequence is split.
        divided_attributes: names of integer attributes of modules, such as numbers of heads. They are divided by the
            number of ranks if a linear layer of the module is sharded column-wise. By default ``DIVIDED_ATTRIBUTES``.
        expert_parallel: modules that the plan has as ``experts`` become ``expert_parallel``, with their parameters.

    Returns:
        ``model``.

    Raises:
        TypeError: a module that the plan names cannot be sharded that way; ``divided_attributes`` is a string.
        ValueError: an unknown style, a name that no module has, sizes that the ranks do not divide, parameters
            tied between modules that are sharded differently, or parameters that are sharded already; without
            ``divided_attributes``, a module with an integer attribute (``heads``, ``nhead``) that may or may not count
            sharded heads. The model is unchanged then.
        RuntimeError: the ranks have different parameters. Forward: the ranks have different batches, or their shards
            were overwritten.
    """
    comm = tensor_comm(comm)
    must_match = plan is not None
    if plan is None:
        plan = plan_of(model)
        if not plan:
            raise ValueError(f"{type(model).__name__} carries no tp_plan; give a plan of module names")
    if expert_parallel:
        plan = with_expert_parallel(plan)
    matches = find_matches(model, plan, must_match)
    matches += implied_matches(matches)
    gathered = tuple(match.name + "." for match in matches if match.style == "sequence_gather")
    shards = [PlannedShard.of(match, comm, sequence_dim, match.name.startswith(gathered)) for match in matches]
    check_experts(shards)
    heads = divided_heads(model, shards, comm, divided_attributes)
    slices = planned_slices(model, shards)
    check_same_values(((name, p) for name, p in model.named_parameters() if _is_comparable(p)), comm)
    check_sequence(shards, slices)
    for param, where in slices:
        param.data = tp_shard_of(param.detach(), where).clone(memory_format=torch.contiguous_format)
        param.grad = None
        mark_shard(param, where)
    shared: dict[str, SharedInput] = {}
    for shard in shards:
        shard.apply(shared.setdefault(shard.name.rpartition(".")[0], SharedInput()))
    for module, attribute, value in heads:
        setattr(module, attribute, value)
    layers = {match.parent for match in matches if isinstance(match.parent, nn.TransformerEncoderLayer)}
    for layer in layers:
        layer.activation_relu_or_gelu = 0  # switches off torch's fast path, which reads weights of sublayers directly
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and not layers.isdisjoint(encoder.layers):
            encoder.use_nested_tensor = False  # only the fast path takes nested tensors
    model.register_forward_pre_hook(FirstBatchCheck(model, comm), with_kwargs=True)
    if comm.size > 1 and any(shard.kind == "expert_parallel" and shard.in_sequence for shard in shards):
        model.register_forward_pre_hook(check_router_logits, with_kwargs=True)
    return model


def _is_comparable(param: nn.Parameter) -> bool:
    """Whether a parameter is unsharded and has its values in memory of its own."""
    if getattr(param, "tp_mode", False) or hasattr(param, "handle") or hasattr(param, "placements"):
        return False
    return param.layout is torch.strided and not param.is_quantized and (param.is_meta or param.data_ptr() != 0)
