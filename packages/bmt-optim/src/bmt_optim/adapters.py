"""Which distributed optimizer is the counterpart of an optimizer class, and how options and state are converted.

[Note: kinds of optimizers]
    Whether an optimizer may step shards depends on its update of an element:

    - If the update depends on nothing but that element's gradient, weight and state, the optimizer is *element-wise*,
      and is right over shards as it is.
    - If it depends on other elements of the layer, too (norms, row sums, matrix products), the optimizer is
      *layer-wise*, and would be wrong over shards without an error. An :class:`Adapter` names our optimizer that
      computes the same over shards.
    - An optimizer that is not known to be one or the other is refused over shards.

    Classes are known by their qualified names, so that nothing has to be imported. A class derived from a known one is
    treated as that one if it overrides none of its methods.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .adafactor import DistributedAdafactor
from .adam import Adam, AdamW
from .came import DistributedCAME
from .distributed import DistributedOptimizer
from .galore import DistGaloreAdamW
from .muon import Muon
from .torch_adafactor import TorchAdafactor

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Adapter:
    """Converts an optimizer of another class to a distributed one.

    Attributes:
        target: the distributed class.
        options: converts the options of a group, or the defaults, to the target's. It raises ValueError for options
            that the target does not have.
        state: converts one parameter's state to the target's names; by default it does not change.
    """

    target: type[DistributedOptimizer]
    options: Callable[[Options], dict[str, Any]]
    state: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict


def adamw(options: Options) -> dict[str, Any]:
    """The options of AdamW, by torch or by us."""
    refuse(options, amsgrad=False, differentiable=False, hold_steps=0)
    if options.get("capturable"):
        raise ValueError("capturable=True has no counterpart: steps communicate, and are not captured in CUDA graphs")
    converted = {**pick(options, "lr", "eps", "weight_decay"), "maximize": bool(options.get("maximize"))}
    return {**converted, "betas": tuple(number(beta) for beta in options["betas"])}


def adam(options: Options) -> dict[str, Any]:
    """The options of torch's Adam, which are ours."""
    return {**adamw(options), "decoupled_weight_decay": bool(options.get("decoupled_weight_decay"))}


def muon(options: Options) -> dict[str, Any]:
    """The options of torch's Muon, which are ours."""
    refuse(options, maximize=False)
    converted = pick(options, "lr", "weight_decay", "momentum", "eps")
    return {
        **converted,
        **{name: options[name] for name in ("nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")},
    }


def torch_adafactor(options: Options) -> dict[str, Any]:
    """The options of torch's Adafactor."""
    refuse(options, maximize=False)
    return {**pick(options, "lr", "beta2_decay", "d", "weight_decay"), "eps": tuple(options["eps"])}


def adafactor(options: Options) -> dict[str, Any]:
    """The options of Hugging Face's Adafactor, which are ours."""
    converted = pick(options, "lr", "clip_threshold", "decay_rate", "beta1", "weight_decay")
    flags = {name: options[name] for name in ("scale_parameter", "relative_step", "warmup_init")}
    return {**converted, **flags, "eps": tuple(options["eps"])}


def adafactor_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Hugging Face's state; ``RMS`` is a tensor."""
    return {**state, "RMS": torch.as_tensor(state["RMS"], dtype=torch.float32)}


def came(options: Options) -> dict[str, Any]:
    """The options of CAME, which are ours."""
    converted = pick(options, "lr", "clip_threshold", "weight_decay")
    return {**converted, "eps": tuple(options["eps"]), "betas": tuple(options["betas"])}


def galore(options: Options) -> dict[str, Any]:
    """The options of galore-torch's AdamW, whose moments are not quantised; those of a projection are in groups."""
    converted = {**pick(options, "lr", "eps", "weight_decay"), "correct_bias": options["correct_bias"]}
    return {**converted, "betas": tuple(options["betas"]), "nbits": 32}


ADAPTERS = {
    "torch.optim.Adam": Adapter(Adam, adam),
    "torch.optim.AdamW": Adapter(AdamW, adamw),
    "torch.optim.Adafactor": Adapter(TorchAdafactor, torch_adafactor),
    "torch.optim.Muon": Adapter(Muon, muon),
    "transformers.optimization.Adafactor": Adapter(DistributedAdafactor, adafactor, adafactor_state),
    "came_pytorch.CAME.CAME": Adapter(DistributedCAME, came),
    "galore_torch.adamw.AdamW": Adapter(DistGaloreAdamW, galore),
    "bmt_optim.adam.AdamOptimizer": Adapter(AdamW, adamw),
}

ELEMENTWISE = frozenset(
    {
        *(f"torch.optim.{name}" for name in ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam")),
        *(f"torch.optim.{name}" for name in ("RAdam", "RMSprop", "Rprop", "SGD")),
        "bmt_optim.adam.AdamOptimizer",
        "bmt_optim.adam_offload.AdamOffloadOptimizer",
    }
)

REFUSED = {
    "torch.optim.LBFGS": "it searches along a line with inner products over all parameters; nothing replaces it",
    "galore_torch.adafactor.Adafactor": "there is no GaLore with Adafactor; use bmt_optim.GaLoreAdamW",
    "galore_torch.adamw8bit.AdamW8bit": "use bmt_optim.GaLoreAdamW, whose moments have 8 bits by default",
    "bmt_optim.adam_offload.AdamOffloadOptimizer": "its state is in host memory; it is right over shards as it is",
}

# Our optimizer of the same kind, by a part of a class's name in lower case.
_LIKE_OURS = {
    "adafactor": "bmt_optim.Adafactor",
    "came": "bmt_optim.CAME",
    "galore": "bmt_optim.GaLoreAdamW",
    "lamb": "bmt_optim.Lamb",
    "muon": "bmt_optim.Muon",
    "lars": None,
    "dion": "bmt_optim.Dion",
    "shampoo": "bmt_optim.DistributedShampoo",
    "soap": "bmt_optim.SOAP",
}


def known_name(cls: type) -> str | None:
    """The name under which a class is known: its own, or that of a base if it overrides none of its methods."""
    for number, base in enumerate(cls.__mro__):
        name = _qualified_name(base)
        if name in ADAPTERS or name in ELEMENTWISE or name in REFUSED:
            return None if any(_overrides(derived, base) for derived in cls.__mro__[:number]) else name
    return None


def explanation(cls: type) -> str:
    """Why an optimizer of this class, without an adapter, is refused over shards, and what to do."""
    known = known_name(cls)
    if known in REFUSED:
        return f"{cls.__qualname__} cannot be made a distributed optimizer: {REFUSED[known]}"
    name = _qualified_name(cls)
    for part, ours in _LIKE_OURS.items():
        if part in cls.__qualname__.lower():
            instead = f"use {ours}" if ours else "there is no distributed optimizer like it yet"
            return (
                f"{name} needs statistics of whole layers, of which this rank has parts, and there is no conversion "
                f"of this class; {instead}"
            )
    return (
        f"{name} is not known, and may need statistics of whole layers, of which this rank has parts; its steps would "
        "then be wrong. If its update of an element depends on nothing but that element's gradient, weight and state, "
        "say so by add_optimizer(..., elementwise=True), or by an attribute `elementwise = True` of the optimizer; if "
        "not, derive it from bmt_optim.DistributedOptimizer"
    )


def refuse(options: Options, **wanted: Any) -> None:
    """Raise ValueError if one of these options has another value."""
    for name, value in wanted.items():
        if options.get(name, value) != value:
            raise ValueError(f"{name}={options[name]!r} has no counterpart; only {name}={value!r} can be converted")


def pick(options: Options, *names: str) -> dict[str, Any]:
    """Some of the options, as numbers. They may be tensors of one element."""
    return {name: number(options[name]) for name in names}


def number(value: Any) -> Any:
    """A number, which may be given as a tensor."""
    return value.item() if isinstance(value, Tensor) else value


def _qualified_name(cls: type) -> str:
    # Versions of torch differ in the modules within torch.optim.
    module = "torch.optim" if cls.__module__.startswith("torch.optim.") else cls.__module__
    return f"{module}.{cls.__qualname__}"


def _overrides(derived: type, base: type) -> bool:
    for name, value in vars(derived).items():
        known = getattr(base, name, None)
        # torch wraps the method `step` of a class when an optimizer of it is made.
        if callable(known) and not name.startswith("__") and inspect.unwrap(value) is not inspect.unwrap(known):
            return True
    return False
