"""DistributedModule: parameters outside Blocks, gathered when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .parameter import DistributedParameter
from .state import cut_entry, load_state_dict, whole_parameters


class DistributedModule(nn.Module):
    """A module that may own :class:`DistributedParameter`s.

    Outside a Block, reading such a parameter (``self.weight``) gathers it, differentiably: every rank that
    shares it must read it. The whole tensor lives until backward has used it; a parameter that is read twice
    in one computation is gathered once. Writing into what was read changes a copy. In a Block, the Block
    gathers, and reading outside of its forward gives this rank's rows.
    """

    handles_shards = True  # its saving and loading serve sharded parameters

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, DistributedParameter) and value.bucket.standalone:
            return value.gather()
        return value

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        with whole_parameters((self, name) for name, _ in self._standalone()):
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        for name, param in self._standalone():
            cut_entry(param, state_dict, prefix + name, lists[-1])
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *lists)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load whole tensors under plain names; see :func:`bmt_zero.load_state_dict`."""
        return load_state_dict(self, state_dict, strict, assign)

    def _standalone(self) -> list[tuple[str, DistributedParameter]]:
        found = [(n, p) for n, p in self._parameters.items() if isinstance(p, DistributedParameter)]
        return [(name, param) for name, param in found if param.bucket.standalone]
