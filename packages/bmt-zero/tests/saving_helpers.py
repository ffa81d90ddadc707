"""A module with code of its own for saving and loading, and the memory that a process takes."""

from pathlib import Path

from torch import nn


class Doubling(nn.Linear):
    """Saves its parameters doubled."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):  # type: ignore[no-untyped-def]
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._parameters:
            destination[prefix + name] = destination[prefix + name].detach() * 2

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        for name in self._parameters:
            state_dict[prefix + name] = state_dict[prefix + name] / 2
        super()._load_from_state_dict(state_dict, prefix, *args)


def peak() -> int:
    """Bytes of host memory that this process has held at most since the last call."""
    status = Path("/proc/self/status").read_text()
    found = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return found
