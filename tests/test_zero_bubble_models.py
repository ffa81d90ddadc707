"""Zero-bubble schedules split the backward of any layer: plain ones, those of Hugging Face, and LoRA's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("peft")

from peft import LoraConfig, inject_adapter_in_model
from transformers import GPT2Config, LlamaConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import bmt_zero
import bmtrain as bmt

WIDTH, LENGTH, ROWS, LAYERS, STEPS = 12, 5, 3, 4, 10
LLAMA = LlamaConfig(
    hidden_size=WIDTH, intermediate_size=18, num_attention_heads=2, num_key_value_heads=1, attn_implementation="sdpa"
)
GPT2 = GPT2Config(n_embd=WIDTH, n_head=2, resid_pdrop=0.0, attn_pdrop=0.0, attn_implementation="sdpa")


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 18, dropout=0.0, batch_first=True)


def lora() -> nn.Module:
    config = LoraConfig(r=2, target_modules=["linear1", "linear2"], init_lora_weights=False)
    return inject_adapter_in_model(config, encoder())


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "encoder": encoder,
    "gpt2": lambda: GPT2Block(GPT2, layer_idx=0),
    "llama": lambda: LlamaDecoderLayer(LLAMA, layer_idx=0),
    "lora": lora,
}


def arguments(kind: str) -> dict[str, Any]:
    """What all layers get beside the hidden state."""
    if kind != "llama":
        return {}
    positions = torch.arange(LENGTH)[None]
    cos, sin = LlamaRotaryEmbedding(LLAMA)(torch.zeros(1, dtype=torch.float64), positions)
    return {"position_embeddings": (cos, sin)}


def loss_of(x: Tensor) -> Tensor:
    return (x - 1).square().mean()


@pytest.mark.ranks(4, init=False, timeout=120)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("level", "schedule"),
    [
        pytest.param(0, "zero_bubble_h1", marks=pytest.mark.long),
        pytest.param(2, "zero_bubble_h1", marks=pytest.mark.long),
        pytest.param(3, "zero_bubble_h1", marks=pytest.mark.long),
        (3, "zero_bubble_v"),
    ],
)
def test_layers_of_any_kind_train_as_in_plain_pytorch(kind: str, level: int, schedule: str) -> None:
    torch.set_default_dtype(torch.float64)
    ctx = bmt.init_distributed(pipe_size=2, num_micro_batches=4)
    torch.manual_seed(0)
    plain = nn.ModuleList(KINDS[kind]() for _ in range(LAYERS))
    before = copy.deepcopy(plain.state_dict())
    blocks = [bmt_zero.Block(layer, level == 0, level) for layer in copy.deepcopy(plain)]
    layers = bmt.PipelineTransformerBlockList(blocks, tail_schedule=schedule)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (plain, layers)]
    generator = torch.Generator().manual_seed(1)
    named = arguments(kind)
    for _ in range(STEPS):
        batches = torch.randn(ctx.replicas, ROWS, LENGTH, WIDTH, generator=generator)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (layers(batches[ctx.rank], **named, tail=loss_of) / ctx.replicas).backward()
        for x in batches:
            for layer in plain:
                x = layer(x, **named)
                x = x[0] if isinstance(x, tuple) else x
            (loss_of(x) / ctx.replicas).backward()
        for optimizer in optimizers:
            optimizer.step()
    found = layers.state_dict()
    assert list(found) == list(before)
    for name, value in plain.state_dict().items():
        change = (value - before[name]).norm()
        assert (found[name] - value).norm() <= 1e-5 * change, name
        assert change > 0 or not dict(plain.named_parameters())[name].requires_grad, name
