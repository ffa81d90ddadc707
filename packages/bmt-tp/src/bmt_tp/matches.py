"""The modules and parameters of a model that a plan names, each with its style.

The styles are listed in [Note: plans] of ``parallelize.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

_ALIASES = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "embedding_rowwise": "vocab",
    "replicated_with_grad_allreduce": "sequence",  # the gradient is partial, as on a part of the sequence
    "moe_tp_experts": "experts",
    "all_reduce": "experts",  # shared experts
    "ep_dispatch_experts": "expert_parallel",
    "grouped_gemm": "expert_parallel",  # the experts' parameters
    "local_params": "replicate",  # the plan names sharded parameters themselves
}
_SEQUENCE_PART_STYLES = ("sequence", "sequence_start", "sequence_end", "sequence_gather", "ulysses")
_PLAIN_STYLES = (*_SEQUENCE_PART_STYLES, "experts", "moe_identity_expert", "mla_kv_a_proj", "replicate")
LINEAR_STYLES = ("colwise", "colwise_gather_output", "packed_colwise", "rowwise", "rowwise_split_input")
SHARDING_STYLES = (*LINEAR_STYLES, "packed_rowwise", "vocab", "embedding_colwise", "expert_parallel")
_NORMS_OF_HEADS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")
_SEQUENCE_STYLES = ("colwise", "packed_colwise", "rowwise", "vocab", "expert_parallel")


def with_expert_parallel(plan: Mapping[str, str]) -> dict[str, str]:
    """The plan, with ``expert_parallel`` in the place of ``experts``: each expert is on one rank."""
    routed = {name: _style(name, style) for name, style in plan.items() if style != "all_reduce"}
    experts = tuple(name for name, style in routed.items() if style in ("experts", "expert_parallel"))
    if not experts:
        raise ValueError("expert_parallel=True, and the plan has no 'experts'")
    inside = tuple(name + "." for name in experts)
    for name, style in plan.items():
        if style == "moe_identity_expert" and name.startswith(inside):
            raise ValueError(f"expert_parallel=True, and {name!r} is an expert without weights, which no rank can have")
    return {n: "expert_parallel" if n in experts else s for n, s in plan.items() if not n.startswith(inside)}


class Match(NamedTuple):
    """A module that the plan names, or a parameter of one."""

    name: str  # of the module
    module: nn.Module
    style: str
    parameter: str | None
    parent: nn.Module  # the module that calls it, an attention for example
    wrapper: nn.Module  # the module that it is in


def owner_of(name: str) -> str:
    """The name of the module that calls the module ``name``. Layers in a wrapper of peft count as the wrapper."""
    parts = name.split(".")[:-1]
    if name.endswith(".base_layer"):
        parts = parts[:-1]
    elif len(parts) > 1 and parts[-1] in ("lora_A", "lora_B"):
        parts = parts[:-2]
    return ".".join(parts)


def find_matches(model: nn.Module, plan: Mapping[str, str], must_match: bool) -> list[Match]:
    """What the plan names, in the model's order. If several entries match, the first counts.

    Raises:
        ValueError: a style is unknown, no name matches, or with ``must_match`` some name does not.
    """
    patterns = [(re.compile(re.escape(p).replace(r"\*", r"[^.]+")), p, _style(p, style)) for p, style in plan.items()]
    matches: list[Match] = []
    used = set()
    known: set[tuple[nn.Module, str | None]] = set()
    for name, module in model.named_modules(remove_duplicate=False):  # a shared module may be named by any of its names
        prefix = name + "." if name else ""
        names = [(name, None), *((prefix + n, n) for n, p in module._parameters.items() if p is not None)]
        for path, parameter in names:
            for pattern, source, style in patterns:
                if pattern.fullmatch(path):
                    used.add(source)
                    if parameter is not None and style == "expert_parallel":
                        break  # the module's entry shards it
                    if (module, parameter) in known:
                        break
                    known.add((module, parameter))
                    parent = model.get_submodule(owner_of(name))
                    wrapper = model.get_submodule(name.rpartition(".")[0])
                    matches.append(Match(name, module, style, parameter, parent, wrapper))
                    break
    missing = [source for _, source, _ in patterns if source not in used]
    if missing and must_match:
        raise ValueError(f"the plan names {missing[0]!r}, and {type(model).__name__} has no module of that name")
    if not matches:
        raise ValueError(f"no name in the plan is that of a module of {type(model).__name__}")
    return matches


def implied_matches(matches: list[Match]) -> list[Match]:
    """Modules that the plans of some models do not name, and that compute with this rank's heads or features only.

    These are norms over one head, and activations with parameters of one element. Their gradients are partial, so
    their style is ``sequence``.
    """
    implied: dict[str, Match] = {}
    known = {match.name for match in matches}
    for match in matches:
        kind = re.split("[:+]", match.style)[0]
        if kind not in ("colwise", "packed_colwise") or match.parameter is not None:
            continue
        size = getattr(match.parent, "head_dim", None)
        head = size if isinstance(size, int) else 0
        for name, most in (*((norm, head) for norm in _NORMS_OF_HEADS), ("act_fn", 1)):
            module = match.parent._modules.get(name)
            path = f"{owner_of(match.name)}.{name}".lstrip(".")
            sizes = [] if module is None else [param.numel() for param in module.parameters()]
            if module is not None and sizes and max(sizes) <= most and path not in known:
                implied[path] = Match(path, module, "sequence", None, match.parent, match.parent)
    return list(implied.values())


def _style(name: str, style: str) -> str:
    """The style, with aliases replaced. Raises ValueError if it is unknown."""
    base, plus, suffix = str(style).partition("+")
    kind, colon, count = base.partition(":")
    kind = _ALIASES.get(kind, kind)
    fits = kind in (*_PLAIN_STYLES, *SHARDING_STYLES)
    fits &= not plus or (suffix == "sequence" and kind in _SEQUENCE_STYLES)
    fits &= not colon or (kind == "packed_colwise" and count.isdigit() and int(count) > 0)
    if not fits:
        known = ", ".join((*_PLAIN_STYLES, *SHARDING_STYLES))
        raise ValueError(
            f"the plan shards {name!r} by {style!r}, which is no style; choose one of {known} (packed_colwise:n for n "
            "parts), or one of the sharding ones with '+sequence'"
        )
    return kind + colon + count + plus + suffix
