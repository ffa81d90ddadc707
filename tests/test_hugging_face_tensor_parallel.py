"""Hugging Face models, with random weights, cut over tensor-parallel ranks and then sharded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers import (
    BertConfig,
    BertForMaskedLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
)

import bmt_tp
import bmt_zero

VOCABULARY = 38
KINDS = ["gpt2", "llama", "llama in sequence", "llama, one head", "llama in sequence, one head", "gemma", "mixtral"]
KINDS += ["llama4", "deepseek", "bert", "opt", "roberta"]


def build(kind: str) -> PreTrainedModel:
    torch.manual_seed(3)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=16, n_embd=12, n_layer=3, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.2, **ids,
        )  # fmt: skip
        return GPT2LMHeadModel(config).double()
    if kind in ("bert", "roberta"):  # their heads have the biases of their decoders twice
        config_of, model_of = (BertConfig, BertForMaskedLM) if kind == "bert" else (RobertaConfig, RobertaForMaskedLM)
        bert = config_of(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=20, num_hidden_layers=3, num_attention_heads=4,
            max_position_embeddings=18, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            initializer_range=0.2, **{**ids, "pad_token_id": 0},
        )  # fmt: skip
        return model_of(bert).double()
    if kind == "opt":
        opt = OPTConfig(
            vocab_size=VOCABULARY, hidden_size=16, ffn_dim=20, num_hidden_layers=3, num_attention_heads=4,
            max_position_embeddings=16, word_embed_proj_dim=16, dropout=0.0, attention_dropout=0.0, init_std=0.2,
            **{**ids, "pad_token_id": 0},
        )  # fmt: skip
        return OPTForCausalLM(opt).double()
    if kind == "gemma":  # its embedding is scaled in a forward of its own
        gemma = GemmaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=20, num_hidden_layers=3, head_dim=4,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16, initializer_range=0.2, **ids,
        )  # fmt: skip
        return GemmaForCausalLM(gemma).double()
    if kind == "mixtral":  # packed experts
        mixtral = MixtralConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_local_experts=3,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16, initializer_range=0.2, **ids,
        )  # fmt: skip
        return MixtralForCausalLM(mixtral)
    if kind == "llama4":  # experts that multiply from the left
        llama4 = Llama4TextConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, intermediate_size_mlp=24, head_dim=4,
            num_hidden_layers=3, num_local_experts=4, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=16, initializer_range=0.2, attention_chunk_size=8, **ids,
        )  # fmt: skip
        return Llama4ForCausalLM(llama4)
    if kind == "deepseek":  # latent attention
        deepseek = DeepseekV2Config(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, moe_intermediate_size=16, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=4, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
            qk_nope_head_dim=4, v_head_dim=4, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
            first_k_dense_replace=1, n_group=1, topk_group=1, max_position_embeddings=16, initializer_range=0.2, **ids,
        )  # fmt: skip
        return DeepseekV2ForCausalLM(deepseek)
    heads = 1 if "one head" in kind else 2
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=20, num_hidden_layers=3, attention_bias=True,
        num_attention_heads=4, num_key_value_heads=heads, max_position_embeddings=16, initializer_range=0.2, **ids,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def plan_of(kind: str, model: PreTrainedModel) -> dict[str, str] | None:
    if "in sequence" not in kind:
        return None  # the model's own, or ours
    plan: dict[str, str] = dict(model.tp_plan)
    # The attention takes the length of the sequence from its input, so this is where it is joined.
    plan |= {"model.layers.*.self_attn": "sequence_gather", "model.layers.*.mlp": "sequence_gather"}
    plan |= {f"model.layers.*.{name}": "rowwise+sequence" for name in ("self_attn.o_proj", "mlp.down_proj")}
    norms = ("input_layernorm", "post_attention_layernorm")
    plan |= {f"model.layers.*.{name}": "sequence" for name in norms}
    return {**plan, "model.layers.0": "sequence_start", "model.norm": "sequence_end"}


def train(model: nn.Module, batches: list[Tensor], replicas: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        (loss / replicas).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.ranks(4, tp_size=2)
@pytest.mark.parametrize(
    ("kind", "sharded"),
    [
        *((kind, True) for kind in KINDS[:-1]),
        *(("gpt2", False), ("mixtral", False)),
        *(pytest.param(kind, False, marks=pytest.mark.long) for kind in KINDS if kind not in ("gpt2", "mixtral")),
        pytest.param(KINDS[-1], True, marks=pytest.mark.long),
    ],
)
def test_trains_as_the_plain_model_does(ctx: Any, kind: str, sharded: bool) -> None:
    plain = build(kind)
    start = copy.deepcopy(plain.state_dict())
    model = build(kind)
    bmt_tp.parallelize(model, plan_of(kind, model))
    if sharded:
        bmt_zero.BMTrainModelWrapper(model)
        assert sum(isinstance(m, bmt_zero.Block) for m in model.modules()) == 3
    plain.train(), model.train()
    replicas = ctx.data_size if sharded else 1
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(1, VOCABULARY, (2 * replicas, 10), generator=generator) for _ in range(10)]
    wanted = train(plain, batches, 1)
    rank = ctx.data_rank if sharded else 0
    losses = torch.tensor(train(model, [b.chunk(replicas)[rank] for b in batches], replicas))
    ctx.world.all_reduce(losses, "avg")
    torch.testing.assert_close(losses, torch.tensor(wanted), rtol=1e-5, atol=1e-5)
    # Gemma's norms compute in fp32, and so does all of Mixtral: grouped products know no fp64.
    tolerance = {"gemma": 1e-6, "mixtral": 5e-5, "llama4": 2e-4, "deepseek": 2e-4}.get(kind, 1e-8)
    found = bmt_tp.full_state_dict(model)
    assert list(found) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        change = (value - start[name]).norm()
        if kind in ("bert", "roberta", "opt") and name.endswith(("key.bias", "k_proj.bias")):
            change = torch.ones(())  # the softmax takes away what all keys have in common
        assert change > 1e-4, name
        assert (found[name] - value).norm() <= tolerance * change, name
    plain.load_state_dict(found, strict=True)


@pytest.mark.ranks(2, tp_size=2)
def test_a_plain_checkpoint_is_loaded_into_a_model_that_was_cut(ctx: Any) -> None:
    plain = build("gpt2")
    model = bmt_tp.parallelize(build("gpt2"))
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(1.5)
    bmt_tp.load_full_state_dict(model, plain.state_dict())
    assert model.lm_head.weight is model.transformer.wte.weight
    ids = torch.arange(1, 11)[None]
    torch.testing.assert_close(model(ids).logits, plain(ids).logits)


@pytest.mark.ranks(3, tp_size=3)
def test_sizes_that_cannot_be_divided_are_named(ctx: Any) -> None:
    model = build("llama")
    with pytest.raises(ValueError, match=r"'model.embed_tokens', of shape \(38, 16\), cannot be divided into 3"):
        bmt_tp.parallelize(model)
