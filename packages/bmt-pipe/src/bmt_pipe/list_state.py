"""State dicts of the layers of all stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from bmt_comm import Communicator
from bmt_zero import entries_of_stages, has_own_stage_only, load_state_dict, serves_shards


class StagedState(nn.Module):
    """Layers in a chain, named by their numbers. Every pipeline stage has some of them.

    Every rank must call ``state_dict`` and ``load_state_dict``, of this module or of one that contains it. The entries
    are those of all layers, in the order of the chain. Each stage checks and loads the entries of its own layers. Every
    stage gets the missing and unexpected names, and the errors, of all stages.
    """

    handles_shards = True  # its state_dict and load_state_dict support sharded parameters

    num_layers: int
    _pipe: Communicator  # over the stages

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_tell_other_stages)

    def _layer_of(self, name: str, prefix: str) -> int | None:
        """The number of the layer, of any stage, that an entry belongs to."""
        if not name.startswith(prefix):
            return None
        number, dot, _ = name[len(prefix) :].partition(".")
        if not dot or not number.isdecimal() or str(int(number)) != number or int(number) >= self.num_layers:
            return None
        return int(number)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The logical tensors of the layers of all stages. Every rank must call it."""
        destination = super().state_dict(*args, **kwargs)
        if self._pipe.size == 1 or has_own_stage_only():
            return destination
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        own = {name: value for name, value in destination.items() if self._layer_of(name, prefix) is not None}
        for name in own:
            del destination[name]
        entries = entries_of_stages(own, self._pipe)
        for name in sorted(entries, key=lambda name: self._layer_of(name, prefix) or 0):
            destination[name] = entries[name]
        versions = getattr(destination, "_metadata", None)
        if versions is not None:
            mine = {name: v for name, v in versions.items() if self._layer_of(f"{name}.", prefix) is not None}
            for theirs in self._pipe.all_gather_object(mine):
                versions.update(theirs)
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load logical tensors under plain names; see :func:`bmt_zero.load_state_dict`."""
        return load_state_dict(self, state_dict, strict, assign)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, *problems: list[str]
    ) -> None:
        unexpected = problems[1]
        known = len(unexpected)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *problems)
        unexpected[known:] = [name for name in unexpected[known:] if self._layer_of(name, prefix) is None]
        # From here to the hook, the layers add their problems.
        self.__dict__["_loading"] = (prefix, [(texts, len(texts)) for texts in problems])


@serves_shards
def _tell_other_stages(layers: StagedState, _incompatible: Any) -> None:
    """Give all stages the problems of all stages, in the order of the chain."""
    prefix, problems = layers.__dict__.pop("_loading")
    if layers._pipe.size == 1:
        return
    everyone = layers._pipe.all_gather_object([texts[known:] for texts, known in problems])
    for (texts, known), of_stages in zip(problems, zip(*everyone, strict=True), strict=True):
        merged = [text for of_stage in of_stages for text in of_stage]
        texts[known:] = sorted(merged, key=lambda text: layers._layer_of(text, prefix) or 0)
