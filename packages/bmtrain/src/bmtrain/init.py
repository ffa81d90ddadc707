"""Whether the job has started."""

from bmt_comm import init_distributed, is_initialized, shutdown

__all__ = ["init_distributed", "is_initialized", "shutdown"]
