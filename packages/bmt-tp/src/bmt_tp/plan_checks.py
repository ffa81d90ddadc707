"""Whether what a plan cuts fits together: experts and what sums them, tied parameters, parts of the sequence."""

from __future__ import annotations

from torch import nn

from bmt_comm import Slice

from .matches import CUTTING_STYLES, owner_of
from .planned_cut import PlannedCut, is_vector


def check_experts(cuts: list[PlannedCut]) -> None:
    """Raise where parameters are cut that no layers of this rank go with: of packed experts whose results nothing
    sums, or of a module without layers that are cut by columns."""
    summed = {id(cut.module) for cut in cuts if cut.kind == "experts"}
    cut_inside = {id(cut.module) for cut in cuts if cut.parameter is not None}
    of_experts = tuple(cut.name + "." for cut in cuts if cut.kind == "experts")
    for cut in cuts:
        if cut.kind == "experts" and id(cut.module) not in cut_inside:
            raise ValueError(f"the plan has {cut.name!r} as 'experts', and cuts no parameter of it; name these, too")
        if cut.kind == "moe_identity_expert" and not cut.name.startswith(of_experts):
            raise ValueError(
                f"the plan has {cut.name!r} as 'moe_identity_expert', and no module around it as 'experts'"
            )
    beside = {owner_of(cut.name) for cut in cuts if cut.is_column and cut.parameter is None}
    for cut in cuts:
        if cut.parameter is None:
            continue
        if is_vector(cut.module._parameters[cut.parameter]):
            if cut.name not in beside:
                raise ValueError(
                    f"the plan cuts the parameter {cut.parameter!r} of {cut.name!r}, and no layer of it by columns"
                )
        elif id(cut.module) not in summed:
            raise ValueError(
                f"the plan cuts the parameter {cut.parameter!r} of {cut.name!r}; it must have {cut.name!r} itself as "
                "'experts', so that what the ranks compute is summed"
            )


def pieces_of(model: nn.Module, cuts: list[PlannedCut]) -> list[tuple[nn.Parameter, Slice]]:
    """What is kept of each parameter, once for tied ones; raises ValueError where they would be cut differently."""
    found: dict[int, tuple[nn.Parameter, Slice]] = {}
    owners: dict[int, str] = {}
    for cut in cuts:
        for param, piece in cut.pieces():
            other = found.get(id(param))
            if other is not None and other[1] != piece:
                raise ValueError(f"{owners[id(param)]!r} and {cut.name!r} share a parameter and are cut differently")
            found[id(param)] = (param, piece)
            owners[id(param)] = cut.name
    cut_modules = {id(cut.module) for cut in cuts if cut.kind in CUTTING_STYLES}
    for name, module in model.named_modules():
        for param in module._parameters.values():
            # BERT's head has the bias of the layer in it, too. Where it computes with that, shapes do not fit.
            is_held = id(param) in found and param.dim() == 1 and owners[id(param)].rpartition(".")[0] == name
            if id(param) in found and id(module) not in cut_modules and not is_held:
                raise ValueError(
                    f"{name!r} shares a parameter with {owners[id(param)]!r}, which the plan cuts; "
                    "put it into the plan, too"
                )
    return list(found.values())


def check_sequence(cuts: list[PlannedCut], pieces: list[tuple[nn.Parameter, Slice]]) -> None:
    """Raise where parameters that are cut are to be used on parts of the sequence."""
    cut_params = {id(param) for param, _ in pieces}
    for cut in cuts:
        if cut.kind in ("sequence", "sequence_end", "ulysses"):
            for name, param in cut.module.named_parameters():
                if id(param) in cut_params or getattr(param, "tp_mode", False):
                    raise ValueError(
                        f"the plan has {cut.name!r} as {cut.kind!r}, and cuts its parameter {name!r}; "
                        f"{cut.kind!r} is for modules, such as norms, that ranks have in common"
                    )
