"""Some models of transformers, with their defaults and the wrapper's; ``nox -s models`` takes all of them."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import torch
from model_checks import CHECKS, run
from model_zoo import Model

MODELS = [
    Model("transformers", "LlamaForCausalLM", "causal", "llama"),
    Model("transformers", "GPT2LMHeadModel", "causal", "gpt2"),
    Model("transformers", "Gemma2ForCausalLM", "causal", "gemma2"),
    Model("transformers", "Qwen3MoeForCausalLM", "causal", "qwen3_moe"),
    Model("transformers", "BloomForCausalLM", "causal", "bloom"),
    Model("transformers", "BertForMaskedLM", "masked", "bert"),
    Model("transformers", "AlbertForMaskedLM", "masked", "albert"),
    Model("transformers", "XLMWithLMHeadModel", "masked", "xlm"),
    Model("transformers", "T5ForConditionalGeneration", "seq2seq", "t5"),
    Model("transformers", "BartForConditionalGeneration", "seq2seq", "bart"),
    Model("transformers", "ViTForImageClassification", "image", "vit"),
    Model("transformers", "ResNetForImageClassification", "image", "resnet"),
]

QUICK = ("llama", "gpt2", "qwen3_moe", "bert", "t5", "vit")
PARAMETERS = [
    pytest.param(model, id=model.key, marks=() if model.key in QUICK else pytest.mark.thorough) for model in MODELS
]

# What the plain model cannot do by itself.
NONE = {"padded": ("image",), "generate": ("image", "masked")}


@pytest.mark.ranks(2, init=False, timeout=180)
@pytest.mark.parametrize("check", [check for check in CHECKS if check not in ("compiled", "tensor parallel")])
@pytest.mark.parametrize("model", PARAMETERS)
def test_is_as_the_plain_model(model: Model, check: str) -> None:
    result = run(model, check)
    if model.kind in NONE.get(check, ()) or (model.key == "resnet" and "LoRA" in check):
        assert result.startswith("none"), result
    else:
        assert result.startswith("right"), result


# Of every style that plans have; the others are in test_hugging_face_tensor_parallel and test_expert_parallel.
CUT = [
    Model("transformers", "GraniteSWAForCausalLM", "causal", "granite_swa"),  # a parameter per head
    Model("transformers", "BeamForCausalLM", "causal", "beam"),
    Model("transformers", "LongcatFlashForCausalLM", "causal", "longcat_flash"),  # experts that return their input
    Model("transformers", "GptOssForCausalLM", "causal", "gpt_oss"),
    Model("transformers", "Qwen3MoeForCausalLM", "causal", "qwen3_moe"),
]


@pytest.mark.ranks(2, init=False, timeout=180)
@pytest.mark.parametrize("model", CUT, ids=lambda model: model.key)
def test_cut_by_its_own_plan(model: Model) -> None:
    assert run(model, "tensor parallel").startswith("right")


@pytest.mark.ranks(2, init=False, timeout=180)
@pytest.mark.parametrize("model", MODELS[:2], ids=lambda model: model.key)
def test_compiled_layers(model: Model) -> None:
    assert run(model, "compiled").startswith("right")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
