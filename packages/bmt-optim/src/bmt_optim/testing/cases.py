"""The training cases of the conformance kit, and the model that is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

RAGGED = ((7, 5), (5,), (3, 4), (11, 2), (6, 9), (1, 6), (2,), (13, 3))


@dataclass(frozen=True)
class Case:
    """The settings of a training.

    Attributes:
        shapes: of the parameters.
        frozen, unused, tied: indices of parameters that do not require a gradient, are not used, are used twice.
        missing: indices of parameters that the last rank does not use. It uses others of their layers, because a
            sharded layer that some ranks do not call is an error.
        micro: backward passes per step.
        overflow: steps in which the last rank has an infinite gradient; all ranks skip them.
        clip: the largest norm of all gradients; ``None``: any.
        groups: whether there are two parameter groups with other options.
        schedule: whether learning rate and momentum change during training.
        dtype: of the parameters. If there are master weights, they are compared in place of the parameters.
        resume: whether a new optimizer resumes half way, at another layout if the framework has one.
        meta: whether the model is sharded on the meta device.
    """

    shapes: tuple[tuple[int, ...], ...] = RAGGED
    frozen: tuple[int, ...] = ()
    unused: tuple[int, ...] = ()
    tied: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    micro: int = 1
    overflow: tuple[int, ...] = ()
    clip: float | None = None
    groups: bool = False
    schedule: bool = False
    dtype: torch.dtype = torch.float32
    resume: bool = False
    meta: bool = False


CASES = {
    "ragged shapes": Case(),
    "experts, convolutions": Case(shapes=((3, 6, 5), (4, 6, 3, 2), (2, 4, 6), (7, 5), (4, 3))),
    "0-dim, empty": Case(shapes=((), (0, 3), (1,), (1, 1), (5, 3))),
    "frozen, unused, tied": Case(frozen=(1, 4), unused=(2, 6), tied=(0, 3)),
    "missing on a rank": Case(missing=(0, 1)),
    "accumulation": Case(micro=2),
    "clipping": Case(clip=0.5),
    "overflow on a rank": Case(overflow=(3,)),
    "groups, schedule": Case(groups=True, schedule=True),
    "master weights": Case(dtype=torch.bfloat16),
    "resumed": Case(resume=True),
    "from meta": Case(meta=True),
}


class Bag(nn.Module):
    """Some parameters. Its output is the sum of their products with coefficients, which are their gradients."""

    def __init__(self, tensors: Mapping[int, Tensor], case: Case) -> None:
        super().__init__()
        for i, tensor in tensors.items():
            self.register_parameter(f"p{i}", nn.Parameter(tensor, requires_grad=i not in case.frozen))
            if i in case.tied:
                self.register_parameter(f"p{i}_again", self.get_parameter(f"p{i}"))

    def forward(self, coefficients: Mapping[str, Tensor]) -> Tensor:
        params = dict(self.named_parameters(remove_duplicate=False))
        return torch.stack([(params[name] * c).sum() for name, c in coefficients.items()]).float().sum()


class Bags(nn.Module):
    """A model of layers with three parameters each."""

    def __init__(self, tensors: Sequence[Tensor], case: Case) -> None:
        super().__init__()
        numbered = list(enumerate(tensors))
        self.layers = nn.ModuleList(Bag(dict(numbered[n : n + 3]), case) for n in range(0, len(numbered), 3))

    def forward(self, coefficients: Mapping[str, Tensor]) -> Tensor:
        outputs = []
        for layer in self.layers:
            mine = {name: c for name, c in coefficients.items() if name.split("_")[0] in layer._parameters}
            if mine:
                outputs.append(layer(mine))
        return torch.stack(outputs).sum()
