"""Count registrations of parameters and modules in this process. Without a new one, no model has new parameters."""

from __future__ import annotations

from typing import Any

from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class _Registrations:
    """Counts the parameters and modules that were registered with any module."""

    count = 0

    def __call__(self, *_args: Any) -> None:
        self.count += 1


registrations = _Registrations()
register_module_parameter_registration_hook(registrations)
register_module_module_registration_hook(registrations)
