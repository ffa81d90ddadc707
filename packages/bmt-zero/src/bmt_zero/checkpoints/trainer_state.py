"""What a checkpoint holds beside tensors of the model and the optimizers: options, schedulers, random generators."""

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

from bmt_comm import current_context, is_initialized
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
    """Whether each rank had the part of the work that it has now, when ``trainer.json`` was written."""
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
        DamagedError: it is none.
        ValueError: it does not fit.
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
            _usable(lambda: manager.check_trainer_state(self._trainer), problem)

    def apply(self) -> None:
        """Set the options, the schedulers and the loss scale."""
        for optimizer, groups in zip(self._optimizers, self._groups):
            for mine, options in zip(optimizer.param_groups, groups):
                mine.update(options)
        if self._manager is not None:
            _usable(
                lambda: self._manager.load_trainer_state(self._trainer),
                f"{self._what} says nothing usable of the manager",
            )


def names_of_groups(optimizers: Sequence[Any], names: Mapping[Tensor, str]) -> list[list[str]]:
    """The names of the parameters of each group of all optimizers."""
    return [_names_of(group, names) for optimizer in optimizers for group in optimizer.param_groups]


def _names_of(group: Mapping[str, Any], names: Mapping[Tensor, str]) -> list[str]:
    return [names[param] for param in group["params"] if param in names]


def _check_kind(optimizer: Any, kind: str, what: str) -> None:
    """Raise unless an optimizer goes on from the state of one of a class named ``kind``, where that is known here."""
    here = _idea_of(type(optimizer).__name__)
    if _idea_of(kind) and here and here != _idea_of(kind):
        raise ValueError(f"{what} of class {kind}, and the one here is a {type(optimizer).__name__}")


# Optimizers of one idea may go on from each other's state, which is compared by names and shapes. Longer names first.
_IDEAS = (
    *("ademamix", "adammini", "adamax", "adadelta", "adagrad", "adafactor", "nadam", "radam", "sparseadam"),
    *("schedulefree", "galore", "apollo", "8bit", "adam", "lamb", "lars", "lion", "dion", "muon", "came", "soap"),
    *("shampoo", "rmsprop", "rprop", "lbfgs", "asgd", "sgd"),
)


def _idea_of(kind: str) -> str | None:
    return next((idea for idea in _IDEAS if idea in kind.lower().replace("_", "")), None)


def _check_order(saved: Any, mine: Sequence[Sequence[str]], what: str) -> None:
    """Raise where a parameter group has none of its parameters of then, and another group has them: options and
    schedulers go by place."""
    if not isinstance(saved, list) or len(saved) != len(mine):
        return  # a file without names, or another number of groups
    then = [{str(name) for name in group} if isinstance(group, list) else set() for group in saved]
    for place, now in enumerate(mine):
        elsewhere = [n for n, group in enumerate(then) if n != place and not group.isdisjoint(now)]
        if then[place].isdisjoint(now) and elsewhere:
            raise ValueError(
                f"{what} has the parameters of group {place} (of all optimizers' groups) in group {elsewhere[0]}: add "
                "optimizers and their groups in the order in which they were saved"
            )


def _check_options(optimizer: Any, mine: Mapping[str, Any], options: Any, problem: str) -> None:
    """Raise unless a parameter group can have the options, which come from a file."""
    if not isinstance(options, dict):
        raise DamagedError(problem)
    for key, value in options.items():
        if key in ("params", "param_names") or not isinstance(key, str):
            raise DamagedError(f"{problem}: {key!r} is no option")
        if key in mine and not _is_alike(mine[key], value):
            raise DamagedError(f"{problem}: its {key!r} is {str(value)[:100]}, and the one here is {mine[key]!r}")
    check = getattr(optimizer, "check_options", None)
    if check is not None:
        _usable(lambda: check({**mine, **options}), problem)
    elif type(optimizer).__module__.startswith("torch.optim."):
        _usable(lambda: _check_torch_options(type(optimizer), {**mine, **options}, problem), problem)


def _check_torch_options(kind: Any, options: Mapping[str, Any], problem: str) -> None:
    """torch's optimizers check the range of their options when they are made."""
    known = inspect.signature(kind).parameters.keys() - {"params", "foreach", "fused", "capturable", "differentiable"}
    try:
        kind([torch.zeros(1, 1, device="cpu")], **{key: value for key, value in options.items() if key in known})
    except ValueError as error:
        raise ValueError(f"{problem}: {error}") from None


def _usable(call: Callable[[], object], problem: str) -> None:
    """Call with what a file says; raise DamagedError if it is of other types than the call knows."""
    try:
        call()
    except (TypeError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        raise DamagedError(f"{problem}: {error}") from error


def _is_alike(mine: Any, theirs: Any) -> bool:
    """Whether an option may have the one value after the other."""
    if mine is None or theirs is None:
        return True
    if isinstance(mine, (list, tuple)):
        return isinstance(theirs, (list, tuple)) and len(mine) == len(theirs) and all(map(_is_alike, mine, theirs))
    numbers = (int, float, Tensor)
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        return mine.shape == theirs.shape
    return isinstance(theirs, numbers if isinstance(mine, numbers) else type(mine))


def random_state() -> dict[str, Tensor]:
    """The states of torch's, Python's and, where it is loaded, numpy's random generators."""
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
    """Raise DamagedError unless :func:`set_random_state` takes it."""
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
    """Go back to what :func:`random_state` returned, or begin with a seed."""
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
    if not 0 <= position <= len(keys):  # which numpy does not look at before it reads there
        raise ValueError(f"numpy's generator is at {position} of {len(keys)} words")
    cached = float(state["numpy_gauss"])
    return "MT19937", numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached


def small_safetensors(name: str, tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file of a few small tensors, as bytes."""
    on_host = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    layout = lay_out_file(name, [Entry(k, dtype_name(t.dtype, k), tuple(t.shape)) for k, t in on_host.items()])
    return layout.head + b"".join(bytes(view_of(flat_bytes(on_host[entry.name]))) for entry in layout.entries)


def parse_small_safetensors(path: object, content: bytes) -> dict[str, Tensor]:
    """The tensors of such a file.

    Raises:
        DamagedError: it is none.
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
    """The number of this rank's replica, how many there are, and whether this rank is the first of its own."""
    tp = current_context().tp_size if is_initialized() else 1
    return rank // tp, size // tp, rank % tp == 0


def replica_file(name: str, replica: int, replicas: int) -> str:
    return f"state-{name}-{replica:05}-of-{replicas:05}.json"


STAGE_FILES = "trainer-stage-"


def stage_file() -> tuple[str, bool] | None:
    """The file of what optimizers and schedulers of this rank's pipeline stage have, and whether this rank writes it.

    Stages may have parameter groups, and learning rates, of their own.
    """
    context = current_context() if is_initialized() else None
    if context is None or context.pipe_size == 1:
        return None
    leads = context.data_rank == 0 and context.tp_rank == 0
    return f"{STAGE_FILES}{context.pipe_rank:05}-of-{context.pipe_size:05}.json", leads


def rng_file(rank: int, size: int) -> str:
    return f"rng-{rank:05}-of-{size:05}.safetensors"


def to_json(value: Any) -> bytes:
    """The same bytes for equal values."""
    return json.dumps(value, sort_keys=True).encode()
