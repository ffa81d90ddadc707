"""Hugging Face models whose layers are a pipeline, with the forward that they have: what the plain model computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import bmt_pipe
import bmt_zero

VOCABULARY = 37
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6, "max_position_embeddings": 16,
    "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


def build(kind: str) -> PreTrainedModel:
    torch.manual_seed(3)
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=16, n_embd=12, n_layer=3, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, initializer_range=0.2, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        )  # fmt: skip
        return GPT2LMHeadModel(config)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES))
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4))
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SIZES))
    sliding = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1} if kind == "hybrid" else {}
    return Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}, **sliding))


def in_stages(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, of which this rank keeps the layers of its stage."""
    holder, name = (model.transformer, "h") if hasattr(model, "transformer") else (model.model, "layers")
    setattr(holder, name, bmt_pipe.PipelineTransformerBlockList(getattr(holder, name)))
    return bmt_zero.BMTrainModelWrapper(model)


def batch(step: int, padded: bool) -> dict[str, Tensor]:
    """4 samples; not as many tokens, so that no other tensor looks like one of samples."""
    ids = torch.randint(1, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(step))
    mask = torch.ones_like(ids)
    for row in range(4 if padded else 0):
        mask[row, :row] = 0
    return {"input_ids": ids, "attention_mask": mask, "targets": ids.masked_fill(mask == 0, -100)}


def train(model: nn.Module, rank: int, size: int, padded: bool) -> None:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10):
        whole = batch(step, padded)
        mine = {name: value.chunk(size)[rank] for name, value in whole.items()}
        logits = model(input_ids=mine["input_ids"], attention_mask=mine["attention_mask"]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), mine["targets"].flatten(), reduction="sum")
        (loss / int((whole["targets"] != -100).sum())).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=120)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_model_whose_layers_are_a_pipeline_trains_as_the_plain_one(ctx: Any, kind: str, padded: bool) -> None:
    plain, model = build(kind), in_stages(build(kind))
    start = copy.deepcopy(plain.state_dict())
    train(plain, 0, 1, padded)
    train(model, ctx.rank, 2, padded)
    found = model.state_dict()
    assert list(found) == list(plain.state_dict())
    for name, wanted in plain.state_dict().items():
        change = (wanted - start[name]).norm()
        assert (found[name] - wanted).norm() <= 1e-5 * change + 1e-6, name
    plain.eval(), model.eval()
    prompt = batch(0, padded)["input_ids"].chunk(2)[ctx.rank]
    with torch.no_grad():
        torch.testing.assert_close(model(prompt, use_cache=False).logits, plain(prompt).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4)
def test_iteration_outside_of_a_forward_gives_the_layers(ctx: Any) -> None:
    model = in_stages(build("llama"))
    layers = model.model.layers
    own = [[True, True, False], [False, False, True]][ctx.rank]
    names = ["LlamaDecoderLayer" if is_here else "AbsentLayer" for is_here in own]
    assert [type(layer).__name__ for layer in layers] == names
    assert [isinstance(layer, bmt_zero.Block) for layer in layers[:]] == own
    first = own.index(True)
    assert layers[first] is list(layers)[first]
    assert len(layers) == 3


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4)
def test_what_a_loop_over_a_pipeline_cannot_do_is_refused(ctx: Any) -> None:
    ids = batch(0, False)["input_ids"].chunk(2)[ctx.rank]
    with pytest.raises(RuntimeError, match="gives layer 1 other arguments than layer 0"):
        in_stages(build("hybrid"))(ids)  # layers from 1 on have another mask
    with pytest.raises(ValueError, match="call the model with use_cache=False"):
        in_stages(build("gpt2")).eval()(ids)

    class Wrong(nn.Module):
        def __init__(self, how: str) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.how = how
            self.layers = bmt_pipe.PipelineTransformerBlockList([nn.Linear(3, 3) for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            if self.how == "part":
                return [layer(x) for layer in self.layers[:2]][-1]
            if self.how == "index":
                return self.layers[0](x)
            for i, layer in enumerate(self.layers):
                if self.how == "attribute":
                    return layer.weight
                if self.how == "skip" and i == 2:
                    continue
                if self.how == "end" and i == 3:
                    continue
                x = layer(x)
                if self.how == "leave" and i == 1:
                    break
                if self.how == "read" and i == 1:
                    print(x.shape, x, float(x.sum()))
                if self.how == "between":
                    x = x + 1
            return x

    for how, error, match in (
        ("part", ValueError, "a pipeline runs all of them"),
        ("index", RuntimeError, "by its index"),
        ("attribute", AttributeError, "'weight' of layer 0"),
        ("skip", RuntimeError, "calls layer 3 after layer 1"),
        ("end", RuntimeError, "has called 3 of 4 layers"),
        ("between", RuntimeError, "between two layers"),
        ("read", RuntimeError, "of the hidden state between two layers"),
        ("leave", RuntimeError, "of the hidden state between two layers"),
    ):
        with pytest.raises(error, match=match):
            Wrong(how)(torch.ones(4, 3)).sum()
    assert Wrong("right")(torch.ones(4, 3)).shape == (4, 3)


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4)
def test_layers_that_return_further_tensors_are_refused(ctx: Any) -> None:
    """T5's layers hand the bias of positions on."""
    config = T5Config(vocab_size=VOCABULARY, d_model=12, d_kv=6, d_ff=20, num_layers=2, num_heads=2, dropout_rate=0.0)
    model = T5ForConditionalGeneration(config)
    model.encoder.block = bmt_pipe.PipelineTransformerBlockList(model.encoder.block)
    ids = batch(0, False)["input_ids"].chunk(2)[ctx.rank]
    with pytest.raises(RuntimeError, match="returns tensors beside its 1 hidden states"):
        bmt_zero.BMTrainModelWrapper(model)(input_ids=ids, decoder_input_ids=ids, use_cache=False)
