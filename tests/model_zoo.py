"""Small models of other people's libraries, with random weights and inputs for them; nothing of this project."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# torchvision's wheels are built for torch with CUDA. Beside another torch their operators (of detection: no model here
# uses them) do not load, and torchvision, which transformers imports, too, asks for their names.
_torchvision_operators = None
if importlib.util.find_spec("torchvision") is not None and not torch.backends.cuda.is_built():
    _torchvision_operators = torch.library.Library("torchvision", "DEF")
    for _operator in ("nms", "qnms"):
        _torchvision_operators.define(f"{_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

VOCABULARY = 67
CLASSES = 5
LENGTH = 10  # of a sequence
SAMPLES = 4

# transformers' lists of models by task, and the kind of their inputs. The first one that has an architecture counts.
TASKS = {
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "seq2seq",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "masked",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "causal",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": "image",
    "MODEL_FOR_CTC_MAPPING_NAMES": "audio",
}

# Small values for the fields that a configuration class has.
_VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input", "padded_vocab_size")
_SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "emb_dim", "model_dim", "d_embed",
         "lru_width", "decoder_hidden_size", "dim_model", "width", "attention_hidden_size"), 32
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim",
         "d_inner", "feed_forward_size", "dim_ff", "ffn_hidden_size", "shared_expert_intermediate_size",
         "moe_intermediate_size", "expert_ffn_hidden_size", "shared_intermediate_size", "expert_ffn_size"), 48
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers",
         "n_layers", "num_encoder_layers", "depth"), 2
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "n_kv_heads",
         "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "global_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions",
         "max_sequence_length", "seq_length", "max_seq_len", "n_ctx", "block_size"), 64
    ),
    **dict.fromkeys(
        ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts"), 4
    ),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size"), 8),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_expand_ratio"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    "image_size": 32, "patch_size": 8, "num_channels": 3, "num_labels": CLASSES,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 3,
    "relative_attention_num_buckets": 8, "num_buckets": 8, "conv_dim": [16, 16], "conv_kernel": [4, 4],
    "conv_stride": [4, 4], "feat_extract_norm": "layer", "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False, "mask_time_prob": 0.0,
}  # fmt: skip

# What some architectures need beside.
_SPECIAL: dict[str, dict[str, Any]] = {
    **{key: {"head_dim": 8} for key in ("ministral", "hunyuan_v1_dense", "hunyuan_v1_moe")},
    **{key: {"rotary_dim": 4} for key in ("gptj", "codegen")},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 4], "is_decoder": False},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "xlnet": {"d_inner": 48, "d_head": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1, "chunk_size": 8},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "attn_layer_indices": [1]},
    "jamba": {"mamba_dt_rank": 4, "attn_layer_offset": 1, "attn_layer_period": 2},
    "ctrl": {"dff": 48},
    # With a cache and without labels it leaves out the causal mask.
    "fsmt": {"use_cache": False},
    "longformer": {"attention_window": 4},
    "led": {"attention_window": 4},
    "swin": {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2, "patch_size": 4},
    "swinv2": {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2, "patch_size": 4},
    "donut-swin": {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2, "patch_size": 4},
    "convnext": {"hidden_sizes": [16, 24], "depths": [2, 2], "num_stages": 2, "patch_size": 4},
    "convnextv2": {"hidden_sizes": [16, 24], "depths": [2, 2], "num_stages": 2, "patch_size": 4},
    "resnet": {"embedding_size": 16, "hidden_sizes": [16, 24], "depths": [2, 2]},
    "regnet": {"embedding_size": 16, "hidden_sizes": [16, 24], "depths": [2, 2], "groups_width": 8},
    "bit": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2], "num_groups": 4},
    "poolformer": {"hidden_sizes": [16, 24, 32, 48], "depths": [2, 2, 2, 2]},
    "segformer": {"hidden_sizes": [16, 32, 32, 32], "depths": [2, 2, 2, 2], "decoder_hidden_size": 16},
    "focalnet": {"embed_dim": 16, "depths": [2, 2], "hidden_sizes": [16, 32], "patch_size": 4},
}


@dataclass(frozen=True)
class Model:
    """A model that can be built again and again with the same weights.

    Attributes:
        library: "transformers", "torchvision" or "timm".
        name: of its class, or as its library knows it.
        kind: of its inputs: "causal", "masked", "seq2seq", "image" or "audio".
        key: the ``model_type`` in transformers.
        vocabulary: how many tokens there are.
    """

    library: str
    name: str
    kind: str
    key: str = ""
    vocabulary: int = VOCABULARY

    def build(self) -> nn.Module:
        """The model with weights from a fixed seed, in training mode."""
        torch.manual_seed(3)
        if self.library == "torchvision":
            model = _torchvision(self.name)
        elif self.library == "timm":
            model = _timm(self.name)
        else:
            import transformers

            model = getattr(transformers, self.name)(small_config(self.key, self.vocabulary))
        return model.train()

    @property
    def has_text(self) -> bool:
        return self.kind in ("causal", "masked", "seq2seq")

    def batch(self, step: int, padded: bool = False) -> dict[str, Tensor]:
        """The arguments of forward, and "targets", of a step: ``SAMPLES`` samples."""
        generator = torch.Generator().manual_seed(100 + step)
        if self.kind == "image":
            size = 32 if self.library == "transformers" else 64
            key = "pixel_values" if self.library == "transformers" else "x"
            pixels = torch.randn(SAMPLES, 3, size, size, generator=generator)
            return {key: pixels, "targets": torch.randint(CLASSES, (SAMPLES,), generator=generator)}
        if self.kind == "audio":
            waves = torch.randn(SAMPLES, 400, generator=generator)
            return {
                "input_values": waves,
                "targets": torch.randint(3, self.vocabulary, (SAMPLES,), generator=generator),
            }
        ids = torch.randint(4, self.vocabulary, (SAMPLES, LENGTH), generator=generator)
        mask = torch.ones_like(ids)
        if padded:
            for row in range(SAMPLES):  # decoders have it on the left
                if self.kind == "causal":
                    mask[row, :row] = 0
                else:
                    mask[row, LENGTH - row :] = 0
        batch = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
        targets = torch.randint(4, self.vocabulary, (SAMPLES, LENGTH), generator=generator)
        if self.kind == "seq2seq":
            batch["decoder_input_ids"] = targets.roll(1, 1)
            return {**batch, "targets": targets}
        return {**batch, "targets": targets.masked_fill(mask == 0, -100)}


def loss_of(model: nn.Module, batch: dict[str, Tensor], count: int) -> Tensor:
    """The part of these samples in the mean over ``count`` targets."""
    inputs = {name: value for name, value in batch.items() if name != "targets"}
    output = model(inputs["x"]) if "x" in inputs else model(**inputs)
    logits = output if isinstance(output, Tensor) else output.logits
    targets = batch["targets"]
    if logits.dim() > 2 and targets.dim() == 1:  # one class for a sequence
        logits = logits.mean(1)
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum") / count


def size_of(model: Model) -> int:
    """How many parameters a model has, without building it; 0 where that cannot be told."""
    try:
        with torch.device("meta"):
            return sum(param.numel() for param in model.build().parameters())
    except Exception:  # its constructor computes with values
        return 0


def small_config(key: str, vocabulary: int = VOCABULARY) -> Any:
    """The configuration of a ``model_type``, with small sizes and without dropout."""
    from transformers import AutoConfig

    cls = type(AutoConfig.for_model(key))
    sizes = {**_SIZES, **dict.fromkeys(_VOCABULARIES, vocabulary)}
    return cls(**{"num_labels": CLASSES, **_small(cls, key, sizes)})


def _small(cls: Any, key: str, sizes: dict[str, Any]) -> dict[str, Any]:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    mapped = getattr(cls, "attribute_map", {})
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if "drop" in name and isinstance(field.default, float):
            values[name] = 0.0
        elif name in sizes and _fits(sizes[name], field):
            values[name] = sizes[name]
    for name, target in mapped.items():
        if name in sizes and target in fields and target not in values and isinstance(fields[target].default, int):
            values[target] = sizes[name]
    for name, sub in (getattr(cls, "sub_configs", None) or {}).items():
        if name in fields and dataclasses.is_dataclass(sub) and sub.__name__ != "AutoConfig":
            values[name] = _small(sub, getattr(sub, "model_type", ""), sizes)
    if "kv_lora_rank" in fields:  # keys and values of all heads come from one low-rank projection
        values |= {name: 4 for name in ("num_key_value_heads",) if name in fields}
    values |= {"use_cache": True} if "use_cache" in fields else {}
    return values | _SPECIAL.get(key, {})


def _fits(value: Any, field: Any) -> bool:
    """Whether a value has the type of a field's default: some architectures have lists of sizes, or None by choice."""
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if default is None:
        return field.name not in ("sliding_window", "head_dim", "q_lora_rank")
    return isinstance(default, (list, tuple)) == isinstance(value, list)


def transformers_models() -> Iterator[Model]:
    """One model of every architecture that transformers has a task of ``TASKS`` for."""
    from transformers.models.auto import modeling_auto

    seen: set[str] = set()
    for task, kind in TASKS.items():
        for key, name in getattr(modeling_auto, task).items():
            names = name if isinstance(name, tuple) else (name,)
            if key not in seen and names[0] not in seen:
                seen |= {key, names[0]}
                yield Model("transformers", names[0], kind, key)


TORCHVISION = [
    "resnet18", "resnext50_32x4d", "vgg11_bn", "mobilenet_v2", "mobilenet_v3_small", "densenet121", "efficientnet_b0",
    "squeezenet1_1", "shufflenet_v2_x0_5", "mnasnet0_5", "regnet_y_400mf", "convnext_tiny", "swin_t", "vit_b_16",
]  # fmt: skip

TIMM = [
    "vit_tiny_patch16_224", "deit_tiny_patch16_224", "mixer_s32_224", "resnet10t", "convnext_atto",
    "efficientnet_lite0", "mobilevit_xxs", "poolformer_s12", "xcit_nano_12_p16_224", "pvt_v2_b0",
    "mobilenetv3_small_050", "regnetx_002", "swin_tiny_patch4_window7_224", "cait_xxs24_224", "edgenext_xx_small",
    "levit_128s", "gmlp_ti16_224",
]  # fmt: skip


def vision_models() -> Iterator[Model]:
    """Models of torchvision and timm, where these are installed."""
    for library, names in (("torchvision", TORCHVISION), ("timm", TIMM)):
        try:
            importlib.import_module(library)
        except ImportError:
            continue
        for name in names:
            yield Model(library, name, "image")


def _torchvision(name: str) -> nn.Module:
    import torchvision

    small: dict[str, Any] = {}
    if name == "vit_b_16":
        sizes = {"num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 48}
        model: nn.Module = torchvision.models.VisionTransformer(
            image_size=64, patch_size=16, num_classes=CLASSES, **sizes
        )
    elif name == "swin_t":
        small = {"patch_size": [4, 4], "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
        model = torchvision.models.SwinTransformer(**small, stochastic_depth_prob=0.0, num_classes=CLASSES)
    elif name == "convnext_tiny":
        setting = torchvision.models.convnext.CNBlockConfig
        blocks = [setting(16, 32, 2), setting(32, None, 2)]
        model = torchvision.models.ConvNeXt(blocks, num_classes=CLASSES)
    else:
        model = torchvision.models.get_model(name, num_classes=CLASSES)
    return _without_dropout(model)


def _timm(name: str) -> nn.Module:
    import timm

    sized = any(word in name for word in ("vit_tiny", "deit", "mixer", "xcit", "swin", "cait", "levit", "gmlp"))
    model = timm.create_model(name, num_classes=CLASSES, **({"img_size": 64} if sized else {}))
    return _without_dropout(model)


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if type(module).__name__ in ("StochasticDepth", "DropPath"):
            module.__dict__.update({k: 0.0 for k in ("p", "drop_prob") if k in module.__dict__})
    return model
