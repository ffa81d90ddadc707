"""The state in a checkpoint that is not tensors of the model and the optimizers: options, schedulers, random
generators."""

from __future__ import annotations

import inspect
import json
import platform
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bmt_comm import context_or_none, current_context, is_initialized
from bmt_zero._version import __version__

from .headers import DTYPES, DamagedError, Entry, dtype_name, lay_out_file, parse_head
from .memory import view_of
from .regions import flat_bytes
from .trees import decode, encode

FILE = "trainer.json"
FORMAT = 1


def describe_run(step: int, ranks: int) -> dict[str, Any]:
    """Versions, and the layout of the ranks."""
    layout: dict[str, Any] = {"ranks": ranks}
    if is_initialized():
        context = current_context()
        layout.update(_sizes())
        layout.update(zero_level=context.zero_level, micro_batches=context.num_micro_batches)
    versions = {"bmt_zero": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {"format": FORMAT, "step": step, "versions": versions, "layout": layout}


def _sizes() -> dict[str, int]:
    context = current_context()
    return {"pipe": context.pipe_size, "data": context.data_size, "tensor": context.tp_size}


def has_this_layout(trainer: Mapping[str, Any]) -> bool:
    """Whether the parallel layout (pipe, data and tensor sizes) in ``trainer.json`` is the present one."""
    saved = trainer.get("layout")
    sizes = _sizes() if is_initialized() else {}
    return isinstance(saved, dict) and all(saved.get(name, size) == size for name, size in sizes.items())


def state_of_optimizers(optimizers: Sequence[Any], manager: Any) -> dict[str, Any]:
    """The options of parameter groups, the schedulers and the loss scale, as JSON."""
    settings: dict[str, Any] = {
        "optimizers": [
            {
                "kind": type(optimizer).__name__,
                "groups": [
                    encode({k: v for k, v in group.items() if k not in ("params", "param_names")}, f"param_groups[{n}]")
                    for n, group in enumerate(optimizer.param_groups)
                ],
            }
            for optimizer in optimizers
        ],
        "manager": None,
    }
    if manager is not None:
        settings["manager"] = encode(manager.trainer_state(), "the state of the manager")
    return settings


class OptimizerSettings:
    """The part of ``trainer.json`` that :func:`state_of_optimizers` made, checked against optimizers.

    Raises:
        DamagedError: it has another structure.
        ValueError: it does not fit the optimizers or the manager.
    """

    def __init__(
        self, saved: Any, optimizers: Sequence[Any], manager: Any, what: str, names: Mapping[Tensor, str]
    ) -> None:
        self._optimizers, self._manager, self._what = optimizers, manager, what
        theirs = saved.get("optimizers") if isinstance(saved, dict) else None
        if not isinstance(theirs, list):
            raise DamagedError(f"{what} says nothing usable of optimizers")
        if len(theirs) != len(optimizers):
            raise ValueError(f"{what} has {len(theirs)} optimizer(s), and there are {len(optimizers)} here")
        self._groups: list[list[dict[str, Any]]] = []
        for number, (optimizer, each) in enumerate(zip(optimizers, theirs)):
            groups = each.get("groups") if isinstance(each, dict) else None
            if not isinstance(groups, list):
                raise DamagedError(f"{what} says nothing usable of optimizer {number}")
            if len(groups) != len(optimizer.param_groups):
                raise ValueError(
                    f"{what} has {len(groups)} parameter groups of optimizer {number} ({each.get('kind')}), and the "
                    f"one here ({type(optimizer).__name__}) has {len(optimizer.param_groups)}"
                )
            _check_kind(optimizer, str(each.get("kind")), f"{what} has an optimizer {number}")
            decoded = [decode(group, f"{what}: a parameter group") for group in groups]
            for n, (mine, options) in enumerate(zip(optimizer.param_groups, decoded)):
                _check_options(
                    optimizer, mine, options, f"{what} says nothing usable of group {n} of optimizer {number}"
                )
            self._groups.append(decoded)
        _check_order(saved.get("parameters"), names_of_groups(optimizers, names), what)
        self._trainer: Any = None
        if manager is not None:
            if saved.get("manager") is None:
                raise ValueError(f"{what} was saved without a manager; load it with optimizer=")
            self._trainer = decode(saved["manager"], f"{what}: the state of the manager")
            problem = f"{what} says nothing usable of the manager"
            if not isinstance(self._trainer, dict):
                raise DamagedError(problem)
            _call_with_saved(lambda: manager.check_trainer_state(self._trainer), problem)

    def apply(self) -> None:
        """Set the options, the schedulers and the loss scale."""
        for optimizer, groups in zip(self._optimizers, self._groups):
            for mine, options in zip(optimizer.param_groups, groups):
                mine.update(options)
        if self._manager is not None:
            _call_with_saved(
                lambda: self._manager.load_trainer_state(self._trainer),
                f"{self._what} says nothing usable of the manager",
            )


def names_of_groups(optimizers: Sequence[Any], names: Mapping[Tensor, str]) -> list[list[str]]:
    """The names of the parameters of each parameter group of all optimizers."""
    return [
        [names[param] for param in group["params"] if param in names]
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def _check_kind(optimizer: Any, kind: str, what: str) -> None:
    """Raise ValueError if the class of an optimizer and the class named ``kind`` are of different known families."""
    here = _family_of(type(optimizer).__name__)
    if _family_of(kind) and here and here != _family_of(kind):
        raise ValueError(f"{what} of class {kind}, and the one here is a {type(optimizer).__name__}")


# Optimizers of one family can load each other's state, whose names and shapes are compared. Longer names first.
_FAMILIES = (
    *("ademamix", "adammini", "adamax", "adadelta", "adagrad", "adafactor", "nadam", "radam", "sparseadam"),
    *("schedulefree", "galore", "apollo", "8bit", "adam", "lamb", "lars", "lion", "dion", "muon", "came", "soap"),
    *("shampoo", "rmsprop", "rprop", "lbfgs", "asgd", "sgd"),
)


def _family_of(kind: str) -> str | None:
    return next((family for family in _FAMILIES if family in kind.lower().replace("_", "")), None)


def _check_order(saved: Any, mine: Sequence[Sequence[str]], what: str) -> None:
    """Raise ValueError if the parameters of a parameter group were all saved in other groups: options and schedulers
    are loaded by the index of the group."""
    if not isinstance(saved, list) or len(saved) != len(mine):
        return  # a file without names, or another number of groups
    saved_groups = [{str(name) for name in group} if isinstance(group, list) else set() for group in saved]
    for index, names in enumerate(mine):
        elsewhere = [n for n, group in enumerate(saved_groups) if n != index and not group.isdisjoint(names)]
        if saved_groups[index].isdisjoint(names) and elsewhere:
            raise ValueError(
                f"{what} has the parameters of group {index} (of all optimizers' groups) in group {elsewhere[0]}: add "
                "optimizers and their groups in the order in which they were saved"
            )


def _check_options(optimizer: Any, mine: Mapping[str, Any], options: Any, problem: str) -> None:
    """Raise DamagedError or ValueError unless a parameter group can have the options, which come from a file."""
    if not isinstance(options, dict):
        raise DamagedError(problem)
    for key, value in options.items():
        if key in ("params", "param_names") or not isinstance(key, str):
            raise DamagedError(f"{problem}: {key!r} is no option")
        if key in mine and not _is_alike(mine[key], value):
            raise DamagedError(f"{problem}: its {key!r} is {str(value)[:100]}, and the one here is {mine[key]!r}")
    check = getattr(optimizer, "check_options", None)
    if check is not None:
        _call_with_saved(lambda: check({**mine, **options}), problem)
    elif type(optimizer).__module__.startswith("torch.optim."):
        _call_with_saved(lambda: _check_torch_options(type(optimizer), {**mine, **options}, problem), problem)


def _check_torch_options(kind: Any, options: Mapping[str, Any], problem: str) -> None:
    """Raise ValueError if options are out of range. The constructors of torch's optimizers check this."""
    known = inspect.signature(kind).parameters.keys() - {"params", "foreach", "fused", "capturable", "differentiable"}
    try:
        kind([torch.zeros(1, 1, device="cpu")], **{key: value for key, value in options.items() if key in known})
    except ValueError as error:
        raise ValueError(f"{problem}: {error}") from None


def _call_with_saved(call: Callable[[], object], problem: str) -> None:
    """Call a function of values from a file. Raise DamagedError if they have types that it does not accept."""
    try:
        call()
    except (TypeError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        raise DamagedError(f"{problem}: {error}") from error


def _is_alike(mine: Any, theirs: Any) -> bool:
    """Whether an option with the value ``mine`` may be set to ``theirs``, by their types and shapes."""
    if mine is None or theirs is None:
        return True
    if isinstance(mine, (list, tuple)):
        return isinstance(theirs, (list, tuple)) and len(mine) == len(theirs) and all(map(_is_alike, mine, theirs))
    numbers = (int, float, Tensor)
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        return mine.shape == theirs.shape
    return isinstance(theirs, numbers if isinstance(mine, numbers) else type(mine))


def random_state() -> dict[str, Tensor]:
    """The states of the random generators of torch, of Python and, if it is imported, of numpy."""
    version, words, gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64, device="cpu"),
    }
    if gauss is not None:
        states["python_gauss"] = torch.tensor(gauss, dtype=torch.float64, device="cpu")
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        _, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        states["numpy"] = torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64, device="cpu")
        states["numpy_gauss"] = torch.tensor(cached, dtype=torch.float64, device="cpu")
    return states


def check_random_state(state: Mapping[str, Tensor], what: str) -> None:
    """Raise DamagedError unless :func:`set_random_state` accepts the state."""
    try:
        torch.Generator().set_state(state["torch"])
        random.Random().setstate(_python_state(state))
        if "cuda" in state and torch.cuda.is_available():
            torch.Generator("cuda").set_state(state["cuda"])
        if "numpy" in state and "numpy" in sys.modules:
            sys.modules["numpy"].random.RandomState().set_state(_numpy_state(state))
    except (KeyError, RuntimeError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise DamagedError(f"{what} holds no states of random generators: {error}") from None


def set_random_state(state: Mapping[str, Tensor] | int) -> None:
    """Restore what :func:`random_state` returned, or set a seed."""
    if isinstance(state, int):
        random.seed(state)
        torch.manual_seed(state)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(state)
        return
    torch.set_rng_state(state["torch"])
    random.setstate(_python_state(state))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(_numpy_state(state))


def _python_state(state: Mapping[str, Tensor]) -> Any:
    version, *words = state["python"].tolist()
    gauss = state.get("python_gauss")
    return version, tuple(words), None if gauss is None else float(gauss)


def _numpy_state(state: Mapping[str, Tensor]) -> Any:
    numpy = sys.modules["numpy"]
    *keys, position, has_gauss = state["numpy"].tolist()
    if not 0 <= position <= len(keys):  # numpy would read out of bounds
        raise ValueError(f"numpy's generator is at {position} of {len(keys)} words")
    cached = float(state["numpy_gauss"])
    return "MT19937", numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached


def small_safetensors(name: str, tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file of a few small tensors, as bytes."""
    on_host = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    layout = lay_out_file(name, [Entry(k, dtype_name(t.dtype, k), tuple(t.shape)) for k, t in on_host.items()])
    return layout.head + b"".join(bytes(view_of(flat_bytes(on_host[entry.name]))) for entry in layout.entries)


def parse_small_safetensors(path: object, content: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file, from its bytes.

    Raises:
        DamagedError: they are not a valid file.
    """
    layout = parse_head(path, content, len(content))
    tensors = {}
    for entry, offset in zip(layout.entries, layout.offsets):
        data = bytearray(content[offset : offset + entry.nbytes])
        dtype = DTYPES[entry.dtype]
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
        tensors[entry.name] = flat.reshape(entry.shape)
    return tensors


# --- files of ranks -------------------------------------------------------------------------------


def replica_of(rank: int, size: int) -> tuple[int, int, bool]:
    """The number of this rank's replica, the number of replicas, and whether this rank is the first of its replica."""
    tp = current_context().tp_size if is_initialized() else 1
    return rank // tp, size // tp, rank % tp == 0


def replica_file(name: str, replica: int, replicas: int) -> str:
    return f"state-{name}-{replica:05}-of-{replicas:05}.json"


STAGE_FILES = "trainer-stage-"


def stage_file() -> tuple[str, bool] | None:
    """The file of the settings of this rank's pipeline stage, and whether this rank writes it; ``None`` for one stage.

    Stages may have different parameter groups and learning rates.
    """
    context = context_or_none()
    if context is None or context.pipe_size == 1:
        return None
    leads = context.data_rank == 0 and context.tp_rank == 0
    return f"{STAGE_FILES}{context.pipe_rank:05}-of-{context.pipe_size:05}.json", leads


def rng_file(rank: int, size: int) -> str:
    return f"rng-{rank:05}-of-{size:05}.safetensors"


def to_json(value: Any) -> bytes:
    """The same bytes for equal values."""
    return json.dumps(value, sort_keys=True).encode()
