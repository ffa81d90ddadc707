"""Process start-up, the parallel layout, communicators and differentiable collectives."""

from importlib import import_module as _import_module
from types import ModuleType as _ModuleType

from . import nccl, packing, process_group, store
from ._compat import inside_checkpoint, not_compiled, runs_compiled_autograd, uses_compiler
from ._version import __version__
from .agreement import CallSequences, DisagreementError, agreement_time, check_agreement, note_step
from .autocast import without_autocast
from .callers import is_called_from
from .collectives import all_gather, all_reduce, broadcast, recv_activations, reduce_scatter, send_activations
from .combine import REDUCE_OPS
from .communicator import Communicator, Traffic
from .config import Config, config, rank, world_size
from .context import (
    ParallelContext,
    context_or_none,
    current_context,
    init_distributed,
    is_deterministic,
    is_initialized,
    shutdown,
)
from .errors_on_all import errors_on_all, raise_on_all
from .fixed_order import TREE_SUM, TreeSum, tree_sum
from .host_memory import page_locked
from .journal import note_place
from .leaving import before_shutdown
from .loss_scale import (
    LossScaler,
    begin_backward,
    expected_scale,
    forget_scale,
    mark_scaled,
    note_scale,
    scale_in_backward,
    scale_of,
    use_scaler,
)
from .planned import PlannedCommunicator, planned_context
from .printing import print_block, print_dict, print_rank, see_memory
from .ranges import named_range
from .reduce import gather_result, sum_loss, synchronize, wait_loader
from .row_reductions import reduce_over
from .second_derivatives import differentiable_once
from .sharded_gradient import (
    ShardedGradient,
    gradient_of,
    local_rows,
    noting_gradient,
    sharded_gradient,
    use_multi_tensor_functions,
)
from .sharded_rows import (
    ShardedRows,
    check_initializer,
    in_place,
    is_called_by_optimizer,
    logical_operands,
    sharded_rows,
)
from .slice import (
    LAYER_ATTRIBUTE,
    SLICE_ATTRIBUTE,
    STAGE_LOCAL_ATTRIBUTE,
    Slice,
    dtensor_like,
    is_dtensor,
    is_stage_local,
    is_tp_shard,
    local_tensor,
    select_rows,
    shard_of,
    slice_of,
    tp_shard_of,
    unshard_tp,
    unsharded_slice,
)
from .state_record import StateRecord
from .store import allgather_objects, broadcast_object
from .topology import TopologyNames
from .watch import RankFailureError
from .whole_layer_optimizers import refuse_whole_layer_optimizers
from .work import Work

__all__ = [
    "LAYER_ATTRIBUTE",
    "REDUCE_OPS",
    "SLICE_ATTRIBUTE",
    "STAGE_LOCAL_ATTRIBUTE",
    "TREE_SUM",
    "CallSequences",
    "Communicator",
    "Config",
    "DisagreementError",
    "LossScaler",
    "ParallelContext",
    "PlannedCommunicator",
    "RankFailureError",
    "ShardedGradient",
    "ShardedRows",
    "Slice",
    "StateRecord",
    "TopologyNames",
    "Traffic",
    "TreeSum",
    "Work",
    "__version__",
    "agreement_time",
    "all_gather",
    "all_reduce",
    "allgather_objects",
    "before_shutdown",
    "begin_backward",
    "benchmark",
    "broadcast",
    "broadcast_object",
    "check_agreement",
    "check_initializer",
    "config",
    "context_or_none",
    "current_context",
    "differentiable_once",
    "dtensor_like",
    "errors_on_all",
    "expected_scale",
    "forget_scale",
    "gather_result",
    "gradient_of",
    "in_place",
    "init_distributed",
    "inside_checkpoint",
    "is_called_by_optimizer",
    "is_called_from",
    "is_deterministic",
    "is_dtensor",
    "is_initialized",
    "is_stage_local",
    "is_tp_shard",
    "local_rows",
    "local_tensor",
    "logical_operands",
    "mark_scaled",
    "named_range",
    "nccl",
    "not_compiled",
    "note_place",
    "note_scale",
    "note_step",
    "noting_gradient",
    "packing",
    "page_locked",
    "planned_context",
    "print_block",
    "print_dict",
    "print_rank",
    "raise_on_all",
    "rank",
    "recv_activations",
    "reduce_over",
    "reduce_scatter",
    "refuse_whole_layer_optimizers",
    "runs_compiled_autograd",
    "scale_in_backward",
    "scale_of",
    "see_memory",
    "select_rows",
    "send_activations",
    "shard_of",
    "sharded_gradient",
    "sharded_rows",
    "shutdown",
    "slice_of",
    "store",
    "sum_loss",
    "synchronize",
    "tp_shard_of",
    "tree_sum",
    "unshard_tp",
    "unsharded_slice",
    "use_multi_tensor_functions",
    "use_scaler",
    "uses_compiler",
    "wait_loader",
    "without_autocast",
    "world_size",
]


process_group.register()


def __getattr__(name: str) -> _ModuleType:
    if name == "benchmark":  # imported when it is used: python -m bmt_comm.benchmark must find it new
        return _import_module(".benchmark", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
