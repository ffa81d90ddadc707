"""What is the same in every call of a pipeline with arguments of the same kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .messages import Form, Forms, Message, TensorForm, structure_of
from .schedule import Schedule
from .signature import Signature


@dataclass
class Plan:
    """What is the same in every call with arguments of the same kind.

    Attributes:
        signatures: of each stage's arguments.
        schedule: the actions of all stages.
        differentiable: whether anything will be differentiated.
        taps: whether the layers' inputs are wanted.
        layers: which layers of the list are at each place.
        forms: what each message consists of, as far as it is known.
        learned: whether a call has been through, and all is known.
    """

    signatures: list[Signature]
    schedule: Schedule
    differentiable: bool
    taps: bool
    layers: Sequence[range]
    forms: Forms = field(default_factory=Forms)
    learned: bool = False

    def __post_init__(self) -> None:
        for i in range(self.schedule.micro_batches):
            self._note_inputs(i)

    @property
    def stages(self) -> int:
        return len(self.signatures)

    def origin(self, micro_batch: int) -> int:
        """The stage that a micro-batch comes from."""
        return micro_batch % self.stages

    def rows(self, micro_batch: int) -> slice:
        """The rows of its origin's batch that a micro-batch consists of."""
        origin, piece = self.origin(micro_batch), micro_batch // self.stages
        pieces = self.schedule.micro_batches // self.stages
        size, longer = divmod(self.signatures[origin].batch, pieces)
        start = piece * size + min(piece, longer)
        return slice(start, start + size + (piece < longer))

    def weight(self, micro_batch: int) -> float:
        """A micro-batch's share of its origin's batch."""
        rows = self.rows(micro_batch)
        return (rows.stop - rows.start) / max(self.signatures[self.origin(micro_batch)].batch, 1)

    def _note_inputs(self, micro_batch: int) -> None:
        """The forms of the hidden states that come in, and of the gradients that are wanted of them."""
        signature, rows = self.signatures[self.origin(micro_batch)], self.rows(micro_batch)
        count = rows.stop - rows.start
        hidden, *_ = signature.structure.fill([None] * len(signature.leaves))
        forms = [
            TensorForm((count, *leaf.value.shape[1:]), leaf.value.dtype) if leaf.is_tensor else leaf.value
            for leaf in signature.leaves[: signature.num_hidden]
        ]
        wanted = [form for form, leaf in zip(forms, signature.leaves) if leaf.requires_grad]
        self.forms[Message("input", micro_batch, 0)] = Form(structure_of(hidden), tuple(forms))
        self.forms[Message("input_grad", micro_batch, 0)] = Form(structure_of([None] * len(wanted)), tuple(wanted))
