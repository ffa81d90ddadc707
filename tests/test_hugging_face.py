"""Hugging Face models, with random weights, under BMTrainModelWrapper: nothing but speed and memory changes."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5Model,
    ViTConfig,
    ViTModel,
)

import bmt_zero
from bmt_pipe import PipelineTransformerBlockList
from bmtrain.planning import DEVICES, Job, Settings, estimate, load_model

VOCABULARY = 37


def build(kind: str) -> PreTrainedModel:
    torch.manual_seed(3)
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=16, n_embd=12, n_layer=3, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.2,
            bos_token_id=0, eos_token_id=0, pad_token_id=0,
        )  # fmt: skip
        return GPT2LMHeadModel(config)
    if kind == "llama":
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=12, intermediate_size=20, num_hidden_layers=3,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16, initializer_range=0.2,
            bos_token_id=0, eos_token_id=0, pad_token_id=0,
        )  # fmt: skip
        return LlamaForCausalLM(config)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=12, intermediate_size=20, num_hidden_layers=3, num_attention_heads=2,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
    )  # fmt: skip
    return BertForMaskedLM(config)


def train(model: nn.Module, batches: list[Tensor], replicas: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        (loss / replicas).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("use_checkpoint", [True, False])
def test_trains_as_the_plain_model_does(ctx: Any, kind: str, use_checkpoint: bool) -> None:
    plain = build(kind)
    start = copy.deepcopy(plain.state_dict())
    inner = build(kind)
    model = bmt_zero.BMTrainModelWrapper(inner, use_checkpoint=use_checkpoint)
    blocks = [m for m in model.modules() if isinstance(m, bmt_zero.Block)]
    assert len(blocks) == 3
    assert isinstance(model, type(plain))
    plain.train(), model.train()
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(1, VOCABULARY, (2 * ctx.world_size, 9), generator=generator) for _ in range(10)]
    wanted = train(plain, batches, 1)
    losses = torch.tensor(train(model, [b.chunk(ctx.world_size)[ctx.rank] for b in batches], ctx.world_size))
    ctx.world.all_reduce(losses)
    torch.testing.assert_close(losses / ctx.world_size, torch.tensor(wanted), rtol=1e-5, atol=1e-5)
    found = model.state_dict()
    assert list(found) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        change = (value - start[name]).norm()
        # The bias of attention keys has no effect, and a gradient of rounding errors.
        assert (found[name] - value).norm() <= 1e-5 * change + 1e-6, name
        assert change > 1e-4 or "key" in name or "pooler" in name, name
    plain.load_state_dict(found, strict=True)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("cache", [True, False])
def test_generates_what_the_plain_model_does(kind: str, cache: bool) -> None:
    plain = build(kind).eval()
    model = bmt_zero.BMTrainModelWrapper(build(kind)).eval()
    prompt = torch.tensor([[5, 9, 2], [7, 1, 3]])
    arguments = {"max_new_tokens": 6, "do_sample": False, "use_cache": cache, "attention_mask": torch.ones_like(prompt)}
    assert torch.equal(model.generate(prompt, **arguments), plain.generate(prompt, **arguments))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_everything_a_model_returns(kind: str) -> None:
    """Hidden states and attentions, as attributes and as a tuple."""
    models = [build(kind), bmt_zero.BMTrainModelWrapper(build(kind))]
    prompt = torch.tensor([[5, 9, 2], [7, 1, 3]])
    results = []
    for model in models:
        model.set_attn_implementation("eager")
        model.eval()
        results.append(model(prompt, output_hidden_states=True, output_attentions=True))
    plain, found = results
    assert list(found) == list(plain)
    torch.testing.assert_close(found.logits, plain.logits)
    torch.testing.assert_close(found.hidden_states, plain.hidden_states)
    torch.testing.assert_close(found.attentions, plain.attentions)
    assert len(found.hidden_states) == 4
    assert len(found.attentions) == 3


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_checkpoint_is_read_by_the_plain_model(kind: str, tmp_path: Any) -> None:
    model = bmt_zero.BMTrainModelWrapper(build(kind))
    bmt_zero.save(model, tmp_path / "model.pt")
    other = build(kind)
    with torch.no_grad():
        for param in other.parameters():
            param.add_(1)
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True), strict=True)
    for name, value in build(kind).state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_layers_built_on_meta_are_initialised_as_the_family_does(ctx: Any, kind: str) -> None:
    model = build(kind)
    stack = model.transformer.h if kind == "gpt2" else model.model.layers
    for index in range(len(stack)):
        stack[index].to("meta")
    bmt_zero.BMTrainModelWrapper(model)
    bmt_zero.init_parameters(model)
    state = model.state_dict()
    gathered = ctx.world.all_gather_object({k: v.tolist() for k, v in state.items()})
    assert gathered[0] == gathered[-1]
    plain = build(kind).state_dict()
    for name, value in state.items():
        if plain[name].unique().numel() == 1:
            assert torch.equal(value, plain[name]), name
        elif "c_proj" not in name:  # those GPT-2 scales down as a whole model, not as a module
            assert 0.5 < value.std() / plain[name].std() < 2.5, name
    assert not torch.equal(*(state[n] for n in list(state) if n.endswith(("0.mlp.c_fc.weight", "1.mlp.c_fc.weight",
        "0.mlp.up_proj.weight", "1.mlp.up_proj.weight"))))  # fmt: skip


def padded_batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(1, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(step))
    mask = torch.ones_like(ids)
    for row in range(4):  # on the left, as decoders have it
        mask[row, :row] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_decoders_train_on_padded_batches_with_the_defaults_of_both(ctx: Any, kind: str) -> None:
    """Layers are checkpointed, and the model's configuration asks for a cache."""
    plain, model = build(kind), bmt_zero.BMTrainModelWrapper(build(kind))
    assert model.config.use_cache
    start = copy.deepcopy(plain.state_dict())
    for which, rank, size in ((plain, 0, 1), (model, ctx.rank, 2)):
        which.train()
        optimizer = torch.optim.SGD(which.parameters(), lr=0.1)
        for step in range(5):
            batch = {name: value.chunk(size)[rank] for name, value in padded_batch(step).items()}
            logits = which(**{k: v for k, v in batch.items() if k != "labels"}).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
            (loss / 20).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.state_dict().items():
        wanted = plain.state_dict()[name]
        assert (value - wanted).norm() <= 1e-5 * (wanted - start[name]).norm() + 1e-6, name
    batch = padded_batch(0)
    with pytest.warns(UserWarning, match="use_cache=True is ignored"):
        assert model(**batch, use_cache=True).past_key_values is None
    assert model.eval()(**batch).past_key_values is not None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_checkpointed_layers_train_with_a_given_cache(ctx: Any, kind: str) -> None:
    """As learned prefixes have it. Each layer puts its own keys into the cache, in forward and in recomputation."""
    updates = []
    plain = build(kind)
    # transformers calls the argument "cache" since 5.24, and past_key_values before.
    name = "cache" if "cache" in inspect.signature(plain.forward).parameters else "past_key_values"
    for model in (plain, bmt_zero.BMTrainModelWrapper(build(kind))):
        start = copy.deepcopy(model.state_dict())
        ids = padded_batch(0)["input_ids"]
        with torch.no_grad():
            cache = model.eval()(ids[:, :3]).past_key_values
        assert cache.get_seq_length() == 3
        output = model.train()(ids[:, 3:], **{name: cache})
        assert cache.get_seq_length() == 9
        (output.logits.square().mean() / (1 if model is plain else 2)).backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        updates.append({name: value - start[name] for name, value in model.state_dict().items()})
    for name, wanted in updates[0].items():
        assert (updates[1][name] - wanted).norm() <= 1e-5 * wanted.norm() + 1e-6, name


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["t5", "vit", "llama", "bert"])
def test_models_built_on_meta_are_initialised_as_their_family_does(ctx: Any, kind: str) -> None:
    """Parents fill their children (T5), embeddings (ViT) and buffers that no state dict has (Llama)."""
    if kind == "t5":
        config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
        plain, make = T5Model(config), lambda: T5Model(config)
    elif kind == "vit":
        vit = ViTConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=32)
        plain, make = ViTModel(vit), lambda: ViTModel(vit)
    else:
        plain, make = build(kind), lambda: build(kind)
    with torch.device("meta"):
        model = bmt_zero.BMTrainModelWrapper(make())
    bmt_zero.init_parameters(model)
    for name, value in model.state_dict().items():
        wanted = plain.state_dict()[name]
        if wanted.unique().numel() == 1:
            assert torch.equal(value, wanted), name
        elif wanted.numel() > 100:
            assert 0.7 < value.std() / wanted.std() < 1.4, name
    for (name, buffer), (_, wanted) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(buffer, wanted), name


@pytest.mark.ranks(1)
def test_what_nothing_fills_is_named() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(3, 3), nn.Parameter(torch.ones(3))
            self.register_buffer("table", torch.ones(3))

    with torch.device("meta"):
        model = bmt_zero.BMTrainModelWrapper(Scaled())
    with pytest.raises(ValueError, match=r"2 tensors .* fills them: 'scale' of a Scaled, 'table' of a Scaled; give"):
        bmt_zero.init_parameters(model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_parameters_are_counted_as_in_the_plain_model(kind: str) -> None:
    plain = build(kind)
    wrapped = bmt_zero.BMTrainModelWrapper(build(kind))
    for arguments in ({}, {"only_trainable": True}, {"exclude_embeddings": True}):
        assert wrapped.num_parameters(**arguments) == plain.num_parameters(**arguments)


RESIZED = {
    "gpt2": r"transformer.wte.weight of .*resize_token_embeddings\) before",
    "llama": r"'lm_head.weight', of a Linear, came into the model .* Change heads and embeddings first",
    "bert": r"cls.predictions.(decoder.)?bias of .*resize_token_embeddings\) before",
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_a_vocabulary_that_is_resized_after_wrapping_is_refused_by_name(kind: str) -> None:
    model = bmt_zero.BMTrainModelWrapper(build(kind))
    model.resize_token_embeddings(VOCABULARY + 4, mean_resizing=False)
    with pytest.raises(RuntimeError, match=RESIZED[kind]):
        model(input_ids=torch.tensor([[1, 2, 3]]))


@pytest.mark.ranks(2, pipe_size=2)
@pytest.mark.parametrize("what", ["hidden_states", "attentions"])
def test_what_a_pipeline_cannot_record_of_its_layers_is_refused(what: str) -> None:
    model = build("llama")
    model.model.layers = PipelineTransformerBlockList(model.model.layers)
    model = bmt_zero.BMTrainModelWrapper(model)
    batch = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]]), "use_cache": False}
    assert model(**batch).logits.shape == (2, 3, VOCABULARY)
    with pytest.raises(ValueError, match=f"records {what} of its layers"):
        model(**batch, **{f"output_{what}": True})


def test_a_configuration_is_planned(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4}
    LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=64).save_pretrained(tmp_path)
    llama = load_model(str(tmp_path))
    assert llama.depth == 5
    job = Job(4, 1e9, 2, 16, torch.float32, DEVICES["cpu"])
    for settings in (Settings(), Settings(zero=2, tp=2, checkpoint=False)):
        assert estimate(llama, job, settings).peak.total > 0
