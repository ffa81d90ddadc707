"""Mixtures of experts of Hugging Face, each expert on one tensor-parallel rank, and then sharded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import bmt_optim
import bmt_tp
import bmt_zero

VOCABULARY, LAYERS, EXPERTS = 38, 3, 6


def build(kind: str) -> PreTrainedModel:
    torch.manual_seed(3)
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16, "initializer_range": 0.2,
        "num_experts_per_tok": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
    }  # fmt: skip
    if kind.startswith("mixtral"):
        return MixtralForCausalLM(MixtralConfig(**common, head_dim=4, num_local_experts=EXPERTS))
    if kind.startswith("qwen3"):
        qwen3 = Qwen3MoeConfig(**common, head_dim=4, num_experts=EXPERTS, moe_intermediate_size=12)
        return Qwen3MoeForCausalLM(qwen3)
    if kind == "gpt_oss":  # experts that multiply from the left, with biases
        gpt_oss = GptOssConfig(**common, head_dim=4, num_local_experts=EXPERTS, sliding_window=8)
        return GptOssForCausalLM(gpt_oss)
    deepseek = DeepseekV2Config(
        **{**common, "num_key_value_heads": 4}, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
        qk_nope_head_dim=4, v_head_dim=4,
        n_routed_experts=EXPERTS, n_shared_experts=1, moe_intermediate_size=12, n_group=1, topk_group=1,
        first_k_dense_replace=1,
    )  # fmt: skip
    return DeepseekV2ForCausalLM(deepseek)


NORMS = ("input_layernorm", "post_attention_layernorm")
IN_SEQUENCE = {
    "model.layers.0": "sequence_start",
    "model.layers.*.self_attn": "ulysses",
    **{f"model.layers.*.{name}": "sequence" for name in (*NORMS, "mlp.gate")},
    "model.layers.*.mlp.experts": "expert_parallel+sequence",
    "model.norm": "sequence_end",
}


def cut(kind: str, model: PreTrainedModel) -> None:
    if "in sequence" in kind:
        bmt_tp.parallelize(model, IN_SEQUENCE)
    else:
        bmt_tp.parallelize(model, expert_parallel=kind != "gpt_oss")  # whose plan has each expert on one rank anyway


def train(model: Any, batches: list[Tensor], replicas: int, adam: bool) -> list[float]:
    kind = bmt_optim.AdamW if adam else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=3e-3 if adam else 0.1)
    losses: list[float] = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        (loss / replicas).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def batches_of(replicas: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCABULARY, (2 * replicas, 10), generator=generator) for _ in range(10)]


def check(model: Any, plain: PreTrainedModel, start: dict[str, Tensor], tolerance: float) -> None:
    found = bmt_tp.full_state_dict(model)
    assert list(found) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert (found[name] - value).norm() <= tolerance * (value - start[name]).norm(), name


@pytest.mark.ranks(4, tp_size=2, timeout=120)
@pytest.mark.parametrize(
    ("kind", "use_checkpoint"),
    [
        pytest.param(kind, use_checkpoint, marks=[pytest.mark.long] if use_checkpoint == number % 2 else [])
        for number, kind in enumerate(
            ["mixtral", "mixtral in sequence", "qwen3 in sequence", "qwen3", "gpt_oss", "deepseek"]
        )
        for use_checkpoint in (True, False)  # CI takes them by turns
    ],
)
def test_trains_as_the_plain_model_does(ctx: Any, kind: str, use_checkpoint: bool) -> None:
    plain, model = build(kind), build(kind)
    start = copy.deepcopy(plain.state_dict())
    cut(kind, model)
    experts = [module for name, module in model.named_modules() if name.endswith("mlp.experts")]
    assert {len(param) for module in experts for param in module.parameters()} == {EXPERTS // 2}
    bmt_zero.BMTrainModelWrapper(model, use_checkpoint=use_checkpoint)
    plain.train(), model.train()
    batches = batches_of(ctx.data_size)
    wanted = train(plain, batches, 1, adam=False)
    mine = [batch.chunk(ctx.data_size)[ctx.data_rank] for batch in batches]
    losses = torch.tensor(train(model, mine, ctx.data_size, adam=False))
    ctx.world.all_reduce(losses, "avg")
    torch.testing.assert_close(losses, torch.tensor(wanted), rtol=1e-5, atol=1e-5)
    check(model, plain, start, {"deepseek": 2e-4, "gpt_oss": 2e-4}.get(kind, 5e-5))


@pytest.mark.ranks(4, tp_size=2, timeout=120)
def test_a_checkpoint_goes_on_in_another_layout(ctx: Any, tmp_path: Path) -> None:
    """From experts on two ranks, sharded, to one model without tensor parallelism on each rank."""
    model = build("qwen3")
    cut("qwen3 in sequence", model)
    bmt_zero.BMTrainModelWrapper(model)
    optimizer = bmt_optim.AdamW(model.parameters(), lr=3e-3)
    batches = batches_of(ctx.data_size)
    for batch in batches[:3]:
        mine = batch.chunk(ctx.data_size)[ctx.data_rank]
        (model(input_ids=mine, labels=mine).loss / ctx.data_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    bmt_zero.save(model, tmp_path / "model.safetensors")
    ctx.world.barrier()
    plain = build("qwen3")
    state = bmt_tp.full_state_dict(model)
    plain.load_state_dict(state)
    other = build("qwen3")
    bmt_zero.load(other, tmp_path / "model.safetensors")
    for name, value in other.state_dict().items():
        assert torch.equal(value, state[name]), name
    model.eval(), plain.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(batches[4]).logits, plain(batches[4]).logits, rtol=1e-4, atol=1e-5)
