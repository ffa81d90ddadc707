"""Plans by ``config.model_type``, for Hugging Face models that have none, or one for their embeddings only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BERT = {
    "*.embeddings.word_embeddings": "vocab",
    **{f"*.encoder.layer.*.attention.self.{name}": "colwise" for name in ("query", "key", "value")},
    "*.encoder.layer.*.attention.output.dense": "rowwise",
    "*.encoder.layer.*.intermediate.dense": "colwise",
    "*.encoder.layer.*.output.dense": "rowwise",
}

PLANS: Mapping[str, Mapping[str, str]] = {
    "bert": {**_BERT, "cls.predictions.decoder": "colwise_gather_output"},
    "roberta": {**_BERT, "lm_head.decoder": "colwise_gather_output"},
    "gpt2": {
        "transformer.wte": "vocab",
        "transformer.h.*.attn.c_attn": "packed_colwise:3",
        "transformer.h.*.attn.c_proj": "rowwise",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    },
    "gpt_oss": {
        "model.embed_tokens": "vocab",
        **{f"model.layers.*.self_attn.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj", "sinks")},
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.experts": "expert_parallel",  # the biases of what experts return are added once
        "lm_head": "colwise_gather_output",
    },
    "opt": {
        "model.decoder.embed_tokens": "vocab",
        **{f"model.decoder.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        "model.decoder.layers.*.self_attn.out_proj": "rowwise",
        "model.decoder.layers.*.fc1": "colwise",
        "model.decoder.layers.*.fc2": "rowwise",
        "lm_head": "colwise_gather_output",
    },
}
"""Entries without a module in the model are ignored: a model without a head uses the plan of the model with a head."""


def plan_of(model: Any) -> Mapping[str, str]:
    """The model's ``tp_plan``, or the plan here if the model's names nothing that the plan here does not."""
    own: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    ours = PLANS.get(getattr(getattr(model, "config", None), "model_type", ""), {})
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and not hasattr(model, prefix):  # the model without a head
        ours = {name.removeprefix(prefix + "."): style for name, style in ours.items()}
    return own if set(own) - set(ours) else ours
