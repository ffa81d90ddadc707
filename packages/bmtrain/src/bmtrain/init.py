"""Starting and ending a job, under BMTrain's name of the module."""

from bmt_comm import TopologyNames as topology
from bmt_comm import init_distributed, is_initialized, shutdown

__all__ = ["init_distributed", "is_initialized", "shutdown", "topology"]
