"""The modules of BMTrain 1.0 that have another place here, importable under their old names.

A table has the public names of each module, and where they come from. Importing ``bmtrain`` puts the modules into
``sys.modules`` and, if the name is not taken, on their parent module.
"""

from __future__ import annotations

import importlib
import sys
from operator import attrgetter
from types import ModuleType

MODULES: dict[str, tuple[str, str]] = {
    # Module: the module that has its names, and the names.
    "global_var": ("bmtrain", "config rank world_size"),
    "parameter": ("bmtrain", "DistributedParameter ParameterInitializer"),
    "layer": ("bmtrain", "DistributedModule DistributedParameter"),
    "param_init": ("bmtrain", "grouped_parameters init_parameters"),
    "synchronize": ("bmtrain", "gather_result sum_loss synchronize wait_loader"),
    "block_layer": (
        "bmtrain",
        "Block DistributedParameter TransformerBlockList utils.round_up utils.storage_type_cuda utils.tp_split_tensor",
    ),
    "pipe_layer": ("bmtrain", "PipelineTransformerBlockList"),
    "wrapper": ("bmtrain", "BMTrainModelWrapper"),
    "inspect.format": ("bmtrain.inspect", "format_summary"),
    "inspect.model": ("bmtrain.inspect", "inspect_model"),
    "inspect.tensor": ("bmtrain.inspect", "InspectTensor InspectTensorManager inspect_tensor record_tensor"),
    "optim.adam": ("bmtrain.optim", "AdamOptimizer"),
    "optim.adam_offload": ("bmtrain.optim", "AdamOffloadOptimizer"),
    "optim.optim_manager": ("bmtrain.optim", "OptimManager"),
    "lr_scheduler.warmup": ("bmtrain.lr_scheduler", "WarmupLRScheduler"),
    "lr_scheduler.no_decay": ("bmtrain.lr_scheduler", "NoDecay"),
    "lr_scheduler.noam": ("bmtrain.lr_scheduler", "Noam"),
    "lr_scheduler.linear": ("bmtrain.lr_scheduler", "Linear"),
    "lr_scheduler.cosine": ("bmtrain.lr_scheduler", "Cosine"),
    "lr_scheduler.exponential": ("bmtrain.lr_scheduler", "Exponential"),
    "nn.linear": ("bmtrain.nn", "Linear OpLinear"),
    "nn.column_parallel_linear": ("bmtrain.nn", "ColumnParallelLinear"),
    "nn.row_parallel_linear": ("bmtrain.nn", "RowParallelLinear"),
    "nn.parallel_embedding": ("bmtrain.nn", "VPEmbedding"),
    "nn.parallel_linear_func": ("bmtrain.nn", "OpParallelLinear ReduceType"),
    "loss.cross_entropy": ("bmtrain.loss", "FusedCrossEntropy"),
    "distributed.ops": (
        "bmtrain.distributed",
        "all_gather all_reduce broadcast recv_activations reduce_scatter send_activations",
    ),
    "benchmark.all_gather": ("bmtrain.benchmark", "all_gather"),
    "benchmark.reduce_scatter": ("bmtrain.benchmark", "reduce_scatter"),
    "benchmark.send_recv": ("bmtrain.benchmark", "send_recv"),
}


def install() -> None:
    """Make the modules of the table importable."""
    for path, (source, names) in MODULES.items():
        origin = importlib.import_module(source)
        module = ModuleType(f"bmtrain.{path}", f"BMTrain's module of this name; see :mod:`{source}`.")
        members = {name.rpartition(".")[2]: attrgetter(name)(origin) for name in names.split()}
        module.__all__ = list(members)  # type: ignore[attr-defined]
        module.__dict__.update(members)
        parent, _, own = module.__name__.rpartition(".")
        sys.modules[module.__name__] = module
        if not hasattr(sys.modules[parent], own):  # bmtrain.synchronize and bmtrain.benchmark.all_gather are functions
            setattr(sys.modules[parent], own, module)
