"""The model that ``MODEL`` names, on the meta device, with its layers and a batch."""

from __future__ import annotations

import copy
import functools
import importlib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmt_zero.repeated_layers import find_layers

from .gpt import GPT, PRESETS
from .settings import Settings

Batch = Callable[[int, int], "tuple[tuple[Any, ...], dict[str, Any]]"]


@dataclass
class PlannedModel:
    """A model on the meta device.

    Attributes:
        name: the name of the model.
        module: the model.
        sequence: the default number of tokens of a sequence.
        batch: ``batch(sequences, tokens)`` makes the arguments of ``module``, on the meta device.
        depth: the number of its repeated layers.
        parameters: the number of elements of its parameters.
        trained: the number of those that are trained.
        layers: the containers of the layers, each with its number of layers.
        uniform: whether all layers are equal and in one container.
        layer_trained: the largest number of trained elements of a layer.
        tp_plan: how the model is sharded over tensor-parallel ranks.
        positions: the number of tokens of the longest sequence that the model takes, if it is known.
        idle: the number of elements of experts that a token does not meet, if it is known.
    """

    name: str
    module: nn.Module
    sequence: int
    batch: Batch
    depth: int = 0
    parameters: int = 0
    trained: int = 0
    layers: list[tuple[str, int]] = field(default_factory=list)
    uniform: bool = False
    layer_trained: int = 0
    tp_plan: dict[str, str] | None = None
    positions: int | None = None
    idle: float = 0

    def __post_init__(self) -> None:
        self.parameters = sum(p.numel() for p in self.module.parameters())
        self.trained = _trained(self.module)
        self.tp_plan = self.tp_plan or getattr(self.module, "tp_plan", None)
        layers = list(find_layers(self.module))
        names = {module: name for name, module in self.module.named_modules()}
        containers: dict[str, list[nn.Module]] = {}
        for layer in layers:
            containers.setdefault(names[layer].rpartition(".")[0], []).append(layer)
        self.depth = len(layers)
        self.layers = [(path, len(members)) for path, members in containers.items()]
        self.uniform = len(containers) == 1 and _are_alike(layers)
        self.layer_trained = max(map(_trained, layers), default=0)

    def lines(self, settings: Settings) -> list[str]:
        """The lines of a script that select ``settings``."""
        path = self.layers[0][0] if self.layers else ""
        return settings.lines(path or "layers")

    def at_depth(self, depth: int) -> nn.Module:
        """A copy of the model with its first ``depth`` layers."""
        if depth < self.depth:
            [(path, _)] = self.layers
            container: Any = self.module.get_submodule(path)
            kept = dict(container._modules)
            container._modules = dict(list(kept.items())[:depth])
            try:
                return copy.deepcopy(self.module)
            finally:
                container._modules = kept
        return copy.deepcopy(self.module)


def _trained(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def _are_alike(layers: list[nn.Module]) -> bool:
    facts = [[(name, p.shape, p.dtype) for name, p in layer.named_parameters()] for layer in layers]
    return all(each == facts[0] for each in facts) and len({type(layer) for layer in layers}) == 1


def loss_of(output: Any, *_: Any) -> Tensor:
    """The scalar to differentiate: the loss that a model returned, or the cross entropy of its logits."""
    named = output.get if isinstance(output, Mapping) else functools.partial(getattr, output)
    loss = named("loss", None)
    if loss is None:
        loss = output[0] if isinstance(output, (tuple, list)) else named("logits", output)
    if not isinstance(loss, Tensor):
        raise ValueError(f"the model returned a {type(output).__name__} without a loss or logits")
    if loss.dim() == 0:
        return loss
    scores = loss.flatten(0, -2)
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long, device=scores.device))


def load_model(name: str, materialize_scores: bool = False) -> PlannedModel:
    """The model that ``name`` stands for; see ``bmtrain plan --help``.

    Raises:
        ValueError: there is no such model, or making it fails or returns something else.
        ImportError: a Hugging Face configuration needs ``transformers``, or a module cannot be imported.
    """
    if name in PRESETS:
        sizes = PRESETS[name]
        with torch.device("meta"):
            module: nn.Module = GPT(sizes, materialize_scores=materialize_scores)
        return PlannedModel(name, module, sizes.sequence, ids_and_labels, positions=sizes.sequence)
    if Path(name).exists():
        return _hugging_face(name, materialize_scores)
    module_name, colon, function = name.partition(":")
    if not colon:
        raise ValueError(
            f"MODEL {name!r} is no preset ({', '.join(PRESETS)}), no file or folder with a Hugging Face configuration, "
            "and not module:function"
        )
    sys.path.insert(0, "")
    try:
        source: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(f"MODEL {name!r}: the import failed: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove("")
    build = getattr(source, function, None)
    if build is None:
        raise ValueError(f"MODEL {name!r}: the module has no {function!r}")
    with torch.device("meta"):
        try:
            made = build()
        except Exception as error:
            raise ValueError(f"MODEL {name!r}: the call failed: {type(error).__name__}: {error}") from error
    module, *others = made if isinstance(made, tuple) else (made, _ids)
    if not isinstance(module, nn.Module):
        raise ValueError(f"MODEL {name!r} returned a {type(module).__name__}, not a module")
    if len(others) != 1 or not callable(others[0]):
        raise ValueError(f"MODEL {name!r} must return a module, or a module and a function that makes a batch")
    [batch] = others
    return PlannedModel(name, module, 1024, batch)


def _hugging_face(path: str, materialize_scores: bool) -> PlannedModel:
    import transformers

    attention = "eager" if materialize_scores else None  # None: the fastest that the model supports
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        names = getattr(config, "architectures", None) or []
        cls = getattr(transformers, names[0], None) if names else None
        with torch.device("meta"):
            if cls is not None:
                module = cls._from_config(config, attn_implementation=attention)
            else:
                module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"MODEL {path!r}: transformers cannot make it: {reason}") from error
    if module.main_input_name != "input_ids":
        raise ValueError(
            f"MODEL {path!r}: {type(module).__name__} takes {module.main_input_name}, not input_ids and labels; give "
            "module:function, whose function returns the model and a function that makes a batch"
        )
    module.config.use_cache = False
    positions = getattr(config, "max_position_embeddings", None) or None
    chosen = getattr(config.get_text_config(), "num_experts_per_tok", None) or 0
    packed = re.compile(r"\.experts\.\D")  # the first dimension is that of the experts
    experts = [p for name, p in module.named_parameters() if chosen and packed.search(name)]
    idle = sum(p.numel() * (1 - chosen / len(p)) for p in experts)
    return PlannedModel(path, module, min(positions or 1024, 4096), ids_and_labels, positions=positions, idle=idle)


def _ids(batch: int, sequence: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.zeros(batch, sequence, dtype=torch.long, device="meta"),), {}


def ids_and_labels(batch: int, sequence: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of models that take ``input_ids`` and ``labels``, both (B, S)."""
    ids = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    return (), {"input_ids": ids, "labels": torch.zeros_like(ids)}
