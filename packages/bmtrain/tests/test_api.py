"""The names that BMTrain scripts call, with their arguments in order and defaults."""

import importlib
import inspect
import math
import subprocess
import sys
from operator import attrgetter

import pytest
import torch

import bmtrain

REQUIRED = inspect.Parameter.empty

# Per callable, the arguments a script may pass by position, each with its default.
SIGNATURES = {
    "init_distributed": {
        "init_method": "env://",
        "seed": 0,
        "pipe_size": -1,
        "num_micro_batches": None,
        "tp_size": 1,
    },
    "init.is_initialized": {},
    "rank": {},
    "world_size": {},
    "DistributedParameter": {
        "data": REQUIRED,
        "requires_grad": True,
        "init_method": None,
        "group": None,
        "tp_mode": False,
        "tp_split_dim": -1,
    },
    "DistributedModule": {},
    "BMTrainModelWrapper": {"model": REQUIRED},
    "Block": {
        "inner_module": REQUIRED,
        "use_checkpoint": True,
        "zero_level": None,
        "initialized": False,
        "mode": "BLOCK",
    },
    "CheckpointBlock": {
        "inner_module": REQUIRED,
        "use_checkpoint": True,
        "zero_level": None,
        "initialized": False,
        "mode": "BLOCK",
    },
    "TransformerBlockList": {"modules": REQUIRED, "num_hidden": 1},
    "PipelineTransformerBlockList": {"modules": REQUIRED, "num_hidden": 1},
    "init_parameters": {"model": REQUIRED},
    "grouped_parameters": {"model": REQUIRED},
    "synchronize": {},
    "wait_loader": {},
    "sum_loss": {"loss": REQUIRED, "comm": None},
    "gather_result": {"result": REQUIRED},
    "save": {"model": REQUIRED, "file_name": REQUIRED, "non_blocking": False},
    "load": {"model": REQUIRED, "file_name": REQUIRED, "strict": True},
    "print_dict": {"title": REQUIRED, "content": REQUIRED, "file": None},
    "print_block": {"title": REQUIRED, "content": None, "file": None},
    "see_memory": {"message": REQUIRED, "detail": False},
    "nn.Linear": {"in_features": REQUIRED, "out_features": REQUIRED, "bias": True, "dtype": None},
    "optim.AdamOptimizer": {
        "params": REQUIRED,
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0,
        "hold_steps": 0,
    },
    "optim.AdamOptimizer.step": {"closure": None, "scale": 1},
    "optim.AdamOptimizer.zero_grad": {"set_to_none": False},
    "optim.AdamOffloadOptimizer": {
        "params": REQUIRED,
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0,
        "hold_steps": 0,
        "record_delta": False,
    },
    "optim.AdamOffloadOptimizer.step": {"closure": None, "scale": 1},
    "optim.AdamOffloadOptimizer.zero_grad": {"set_to_none": False},
    "optim.AdamOffloadOptimizer.state_dict": {"gather": False},
    "optim.AdamOffloadOptimizer.load_state_dict": {"state_dict": REQUIRED},
    "optim.AdamOffloadOptimizer.get_avg_delta": {},
    "optim.AdamOffloadOptimizer.get_var_delta": {},
    "optim.DistributedLamb": {"params": REQUIRED, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0},
    "optim.DistributedAdafactor": {
        "params": REQUIRED,
        "lr": None,
        "eps": (1e-30, 1e-3),
        "clip_threshold": 1.0,
        "decay_rate": -0.8,
        "beta1": None,
        "weight_decay": 0.0,
        "scale_parameter": True,
        "relative_step": True,
        "warmup_init": False,
    },
    "optim.DistributedCAME": {
        "params": REQUIRED,
        "lr": REQUIRED,
        "eps": (1e-30, 1e-16),
        "clip_threshold": 1.0,
        "betas": (0.9, 0.999, 0.9999),
        "weight_decay": 0.0,
    },
    "optim.DistGaloreAdamW": {"params": REQUIRED, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2},
    "optim.get_galore_param_groups": {"model": REQUIRED, "weight_decay": REQUIRED, "rank": 256},
    "optim.to_distributed": {"optimizer": REQUIRED, "params": None},
    "optim.OptimManager": {
        "loss_scale": None,
        "loss_scale_factor": 2,
        "loss_scale_steps": 1024,
        "min_loss_scale": 1,
        "max_loss_scale": math.inf,
        "grad_scale": None,
    },
    "optim.OptimManager.add_optimizer": {"optimizer": REQUIRED, "lr_scheduler": None},
    "optim.OptimManager.scale_loss": {"loss": REQUIRED},
    "optim.OptimManager.backward": {"loss": REQUIRED},
    "optim.OptimManager.zero_grad": {},
    "optim.OptimManager.step": {},
    "optim.OptimManager.clip_grad_norm": {
        "param_groups": REQUIRED,
        "max_norm": REQUIRED,
        "norm_type": 2,
        "eps": 1e-6,
    },
    "optim.OptimManager.state_dict": {"gather_opt": False},
    "optim.OptimManager.load_state_dict": {"state_dict": REQUIRED},
    **{
        f"lr_scheduler.{name}": {
            "optimizer": REQUIRED,
            "start_lr": REQUIRED,
            "warmup_iter": REQUIRED,
            "end_iter": REQUIRED,
            "num_iter": 0,
        }
        for name in ("WarmupLRScheduler", "NoDecay", "Noam", "Linear", "Cosine")
    },
    "lr_scheduler.Exponential": {
        "optimizer": REQUIRED,
        "start_lr": REQUIRED,
        "warmup_iter": REQUIRED,
        "end_iter": REQUIRED,
        "num_iter": 0,
        "gamma": 0.95,
    },
    "lr_scheduler.Cosine.step": {"num_iter": None},
    "lr_scheduler.Cosine.get_lr": {},
    "lr_scheduler.Cosine.get_lr_warmup": {"num_iter": REQUIRED},
    "lr_scheduler.Cosine.get_lr_decay": {"num_iter": REQUIRED},
    "loss.FusedCrossEntropy": {
        "weight": None,
        "ignore_index": -100,
        "reduction": "mean",
        "label_smoothing": 0.0,
        "parallel": False,
    },
    "distributed.all_gather": {"x": REQUIRED, "comm": None},
    "distributed.all_reduce": {"x": REQUIRED, "op": "sum", "comm": None},
    "distributed.reduce_scatter": {"x": REQUIRED, "op": "sum", "comm": None},
    "distributed.broadcast": {"src": REQUIRED, "root": REQUIRED, "comm": None},
    "distributed.send_activations": {"hidden_state": REQUIRED, "next_rank": REQUIRED, "comm": REQUIRED},
    "distributed.recv_activations": {"prev_rank": REQUIRED, "comm": REQUIRED},
    "nccl.commCount": {"comm": REQUIRED},
    "nccl.commRank": {"comm": REQUIRED},
    "nccl.commDestroy": {"comm": REQUIRED},
    "nccl.allReduce": {"src": REQUIRED, "dst": REQUIRED, "op": REQUIRED, "comm": REQUIRED},
    "nccl.reduce": {"src": REQUIRED, "dst": REQUIRED, "op": REQUIRED, "root": REQUIRED, "comm": REQUIRED},
    "nccl.broadcast": {"src": REQUIRED, "dst": REQUIRED, "root": REQUIRED, "comm": REQUIRED},
    "nccl.allGather": {"src": REQUIRED, "dst": REQUIRED, "comm": REQUIRED},
    "nccl.reduceScatter": {"src": REQUIRED, "dst": REQUIRED, "op": REQUIRED, "comm": REQUIRED},
    "nccl.send": {"src": REQUIRED, "peer": REQUIRED, "comm": REQUIRED},
    "nccl.recv": {"dst": REQUIRED, "peer": REQUIRED, "comm": REQUIRED},
    "nccl.groupStart": {},
    "nccl.groupEnd": {},
    "debug.clear": {"key": None},
    "debug.set": {"key": REQUIRED, "value": REQUIRED},
    "debug.get": {"key": REQUIRED, "default": None},
    "debug.append": {"key": REQUIRED, "value": REQUIRED},
    "debug.extend": {"key": REQUIRED, "value": REQUIRED},
    "utils.round_up": {"x": REQUIRED, "d": REQUIRED},
    "utils.tp_split_tensor": {"tensor": REQUIRED, "split_dim": REQUIRED},
    "utils.AverageRecorder": {"alpha": 0.9, "start_value": 0},
    "utils.AverageRecorder.record": {"v": REQUIRED},
    "benchmark.all_gather": {},
    "benchmark.reduce_scatter": {},
    "benchmark.send_recv": {},
    "store.broadcast_object": {"obj": REQUIRED, "comm": None, "src": 0},
    "store.allgather_objects": {"obj": REQUIRED},
}

CONFIG_KEYS = [
    *("rank", "local_rank", "world_size", "local_size", "pipe_size", "tp_size", "zero_size", "tp_zero_size", "tp_rank"),
    *("zero_rank", "tp_zero_rank", "micros", "topology", "initialized", "comm", "zero_comm", "tp_comm", "pipe_comm"),
    *("tp_zero_comm", "pp_zero_comm", "pp_tp_zero_comm", "load_stream", "calc_stream"),
]

MODULES = [
    "inspect",
    *(name for name in bmtrain.compat.MODULES if "." not in name and name != "synchronize"),
    *("benchmark", "debug", "distributed", "init", "loss", "lr_scheduler", "nccl", "nn", "optim", "pipeline", "store"),
    "utils",
]


def find(name):
    value = bmtrain
    for part in name.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_and_defaults_are_those_of_bmtrain(name):
    expected = SIGNATURES[name]
    parameters = [p for p in inspect.signature(find(name)).parameters.values() if p.name != "self"]
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    defaults = {p.name: p.default for p in positional}
    assert list(defaults)[: len(expected)] == list(expected)
    assert {key: defaults[key] for key in expected} == expected
    # Whatever more there is must not be needed.
    assert all(p.default is not REQUIRED for p in positional[len(expected) :])


def test_functions_that_take_anything_take_what_scripts_pass():
    inspect.signature(bmtrain.print_rank).bind("a", 1, rank=0, end="")
    inspect.signature(bmtrain.ParameterInitializer).bind(print, 1, mean=2)
    inspect.signature(bmtrain.DistributedModule).bind()
    assert bmtrain.CheckpointBlock is bmtrain.Block
    for cls in (bmtrain.TransformerBlockList, bmtrain.PipelineTransformerBlockList):
        call = inspect.signature(cls.forward)
        call.bind(None, "hidden", "mask", "bias", return_hidden_states=True)
        assert call.parameters["return_hidden_states"].default is False
        assert all(hasattr(cls, name) for name in ("__len__", "__iter__", "__getitem__"))
    call.bind(None, "hidden", "mask", "bias", batch_related=[0])
    assert not call.parameters["batch_related"].default


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_attributes_and_can_be_imported(name):
    module = importlib.import_module(f"bmtrain.{name}")
    assert getattr(bmtrain, name) is module


@pytest.mark.parametrize("name", bmtrain.compat.MODULES)
def test_modules_of_bmtrain_have_the_names_of_where_they_come_from(name):
    source, names = bmtrain.compat.MODULES[name]
    module, origin = importlib.import_module(f"bmtrain.{name}"), importlib.import_module(source)
    paths = names.split()
    assert module.__all__ == [path.rpartition(".")[2] for path in paths]
    assert all(getattr(module, name) is attrgetter(path)(origin) for name, path in zip(module.__all__, paths))


@pytest.mark.parametrize(("version", "order"), [("2.5.1", 1), ("1.12", 1), ("99.0.0", -1), (torch.__version__, 0)])
def test_versions_of_torch_are_compared(version, order):
    assert bmtrain.utils.check_torch_version(version) == order
    with pytest.raises(ValueError, match="version_str='new' is not a version"):
        bmtrain.utils.check_torch_version("new")


def test_a_module_can_be_imported_before_the_package():
    script = "import bmtrain.optim.adam as a, sys; a.AdamOptimizer; from bmtrain.global_var import config;"
    script += " assert sys.modules['bmtrain'].nn.Linear"
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


@pytest.mark.parametrize("name", ["", *MODULES])
def test_all_names_exist(name):
    module = importlib.import_module(f"bmtrain.{name}".rstrip("."))
    public = getattr(module, "__all__", [])
    assert len(set(public)) == len(public)
    assert all(hasattr(module, entry) for entry in public)


@pytest.mark.ranks(1, init=False)
def test_config_has_the_keys_that_scripts_read():
    assert not bmtrain.init.is_initialized()
    assert not bmtrain.config["initialized"]
    bmtrain.init_distributed(device="cpu")
    assert bmtrain.init.is_initialized()
    missing = [key for key in CONFIG_KEYS if key not in bmtrain.config]
    assert missing == []
    assert bmtrain.rank() == bmtrain.config["rank"] == 0
    assert bmtrain.world_size() == bmtrain.config["world_size"] == 1
