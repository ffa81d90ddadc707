"""What must hold of a model of another library under ``BMTrainModelWrapper``; each check runs on every rank.

The reference is the plain model in one process. It computes the parts of the batch that ranks have one after the other,
because normalisation over the batch, and routing by experts with a capacity, depend on the part.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from model_zoo import SAMPLES, Model, loss_of
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import bmt_tp
import bmt_zero
from bmt_comm import ParallelContext, current_context, init_distributed
from bmt_tp.plans import plan_of

TOLERANCE = 1e-5  # in fp32; what is above it is computed again in fp64
TOLERANCE_64 = 1e-9
STEPS = 3
RATE = 0.02


class Unusable(Exception):
    """The plain model itself cannot do what the check needs."""


def run(model: Model, check: str) -> str:
    """The result of a check on this rank: "right" and what was measured, "refused: message", or "wrong: why"."""
    warnings.simplefilter("ignore")
    _quiet()
    torch.set_num_threads(1)
    init_distributed(tp_size=2 if check == "tensor parallel" else 1)
    try:
        return CHECKS[check](model)
    except Unusable as error:
        return f"none: {_short(error)}"
    except AssertionError as error:
        return f"wrong: {_short(error)}"
    except Exception as error:  # what the wrapper, or the model under it, says
        return f"refused: {type(error).__name__}: {_short(error)}"


def trains(model: Model) -> str:
    return _trains(model, lambda m: bmt_zero.BMTrainModelWrapper(m))


def trains_padded(model: Model) -> str:
    if not model.has_text:
        raise Unusable("no padding")
    return _trains(model, lambda m: bmt_zero.BMTrainModelWrapper(m), padded=True)


def trains_compiled(model: Model) -> str:
    """Each Block by itself, after sharding."""

    def wrap(inner: nn.Module) -> nn.Module:
        wrapped = bmt_zero.BMTrainModelWrapper(inner)
        for module in wrapped.modules():
            if isinstance(module, bmt_zero.Block):
                module.compile(backend="eager")
        return wrapped

    torch._dynamo.reset()
    try:
        return _trains(model, wrap)
    finally:
        torch._dynamo.reset()


def trains_lora_before(model: Model) -> str:
    """An adapter for every linear layer, and then the wrapper."""
    return _trains(model, lambda m: bmt_zero.BMTrainModelWrapper(m), prepare=_with_adapters)


def trains_lora_after(model: Model) -> str:
    """Adapters that come into a wrapped model."""
    return _trains(model, lambda m: _with_adapters(bmt_zero.BMTrainModelWrapper(m)), reference=_with_adapters)


def trains_cut(model: Model) -> str:
    """Cut over the ranks by the plan that the model carries, and then sharded."""
    model = dataclasses.replace(model, vocabulary=model.vocabulary // 2 * 2)
    plain = _plain(model)
    if not plan_of(plain):
        raise Unusable("no plan")
    return _trains(model, lambda m: bmt_zero.BMTrainModelWrapper(bmt_tp.parallelize(m), use_checkpoint=False))


def starts_on_meta(model: Model) -> str:
    """Built without memory, wrapped and filled: as the model fills itself, or a warning names what may not be."""
    plain = _plain(model)
    with torch.device("meta"):
        wrapped = model.build()
    wrapped = bmt_zero.BMTrainModelWrapper(wrapped)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bmt_zero.init_parameters(wrapped)
    try:
        return f"right: std within {_compare_initial_values(wrapped, plain):.2f}"
    except AssertionError as error:
        named = [w.message for w in caught if str(w.message).startswith("init_parameters ")]
        raise (named[0] if named else error) from None


def _compare_initial_values(wrapped: nn.Module, plain: nn.Module) -> float:
    """By what factor standard deviations differ at most."""
    values = wrapped.state_dict()
    assert list(values) == list(plain.state_dict()), "other names"
    worst = 1.0
    for name, wanted in plain.state_dict().items():
        value = values[name]
        if not wanted.is_floating_point() or wanted.unique().numel() == 1:
            assert torch.equal(value, wanted), f"{name} has other values"
        elif wanted.numel() > 500:
            ratio = float(value.float().std() / wanted.float().std())
            worst = max(worst, ratio, 1 / max(ratio, 1e-9))
            assert worst < 1.5, f"{name}: std is {ratio:.2g} of the plain model's"
    for (name, buffer), (_, wanted) in zip(wrapped.named_buffers(), plain.named_buffers(), strict=True):
        if name not in values:
            torch.testing.assert_close(buffer, wanted, msg=f"buffer {name} differs")
    return worst


def generates(model: Model) -> str:
    if model.kind not in ("causal", "seq2seq"):
        raise Unusable("no text is generated")
    plain = _plain(model).eval()
    batch = model.batch(0)
    arguments = {"input_ids": batch["input_ids"][:2], "attention_mask": batch["attention_mask"][:2]}
    arguments |= {"max_new_tokens": 5, "do_sample": False}
    arguments |= {"decoder_start_token_id": 1} if model.kind == "seq2seq" else {}
    try:
        wanted = plain.generate(**copy.deepcopy(arguments))
    except Exception as error:
        raise Unusable(f"{type(error).__name__}: {error}") from error
    wrapped = bmt_zero.BMTrainModelWrapper(model.build()).eval()
    assert torch.equal(wrapped.generate(**arguments), wanted), "other tokens"
    return "right"


def saves(model: Model) -> str:
    """``save_pretrained`` of the wrapped model, and ``from_pretrained`` of the plain class."""
    if model.library != "transformers":
        raise Unusable("no save_pretrained")
    context = current_context()
    plain = _plain(model)
    # transformers writes on rank 0 alone.
    folder = context.world.broadcast_object(tempfile.mkdtemp() if context.rank == 0 else None)
    try:
        problem = _saved_and_loaded(plain, f"{folder}/plain", plain)
        if problem:
            raise Unusable(problem)
        problem = _saved_and_loaded(bmt_zero.BMTrainModelWrapper(model.build()), f"{folder}/sharded", plain)
        assert not problem, problem
    finally:
        context.world.barrier()
        if context.rank == 0:
            shutil.rmtree(folder)
    return "right"


def _saved_and_loaded(which: Any, folder: str, plain: Any) -> str:
    """What is wrong, on any rank, with the values of ``plain`` once ``which`` was saved and loaded again."""
    problem = ""
    try:
        which.save_pretrained(folder)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    context = current_context()
    context.world.barrier()
    if not problem:
        try:
            loaded = type(plain).from_pretrained(folder).state_dict()
            wrong = [name for name, value in plain.state_dict().items() if not torch.equal(loaded[name], value)]
            problem = f"{wrong[0]} differs" if wrong else ""
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    return next(filter(None, context.world.all_gather_object(problem)), "")


CHECKS: dict[str, Callable[[Model], str]] = {
    "updates": trains,
    "padded": trains_padded,
    "meta": starts_on_meta,
    "generate": generates,
    "save_pretrained": saves,
    "LoRA before": trains_lora_before,
    "LoRA after": trains_lora_after,
    "compiled": trains_compiled,
    "tensor parallel": trains_cut,
}


def _trains(
    model: Model,
    wrap: Callable[[nn.Module], nn.Module],
    *,
    prepare: Callable[[nn.Module], nn.Module] = lambda m: m,
    reference: Callable[[nn.Module], nn.Module] | None = None,
    padded: bool = False,
) -> str:
    """Whether updates are the plain model's. In fp64 rounding cannot hide an error, or be taken for one."""

    def compare(dtype: torch.dtype) -> tuple[float, str, int]:
        plain = (reference or prepare)(_in_dtype(_plain(model), dtype))
        return _compare(plain, lambda: wrap(prepare(_in_dtype(model.build(), dtype))), model, padded)

    error, name, blocks = compare(torch.float32)
    if error <= TOLERANCE:
        return f"right: {error:.0e}, {blocks} Blocks"
    with _in_float64():
        exact, name, blocks = compare(torch.float64)
    assert exact <= TOLERANCE_64, f"error {error:.1g}, in fp64 {exact:.1g} of {name}"
    return f"right: {error:.0e} ({exact:.0e} in fp64), {blocks} Blocks"


def _in_dtype(model: Any, dtype: torch.dtype) -> Any:
    if dtype is torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products have no fp64
    return model.to(dtype)


@contextlib.contextmanager
def _in_float64() -> Iterator[None]:
    """Within, what modules cast to fp32, whatever their own dtype (attention, norms), stays in fp64.

    Hooks enter the mode at every call, because backward, which computes layers again, does not keep it.
    """
    mode = _Float64()
    handles = [
        register_module_forward_pre_hook(lambda *_: mode.__enter__() and None),
        register_module_forward_hook(lambda *_: mode.__exit__(None, None, None), always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Float64(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args, kwargs = tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {}))
        return func(*args, **kwargs)


def _compare(plain: nn.Module, wrapped: Callable[[], nn.Module], model: Model, padded: bool) -> tuple[float, str, int]:
    """The largest error of a parameter's update or of a loss, what it is of, and how many Blocks there are."""
    context = current_context()
    start = {name: p.detach().clone() for name, p in plain.named_parameters()}
    try:
        wanted = _losses(plain, model, padded, None)
        assert all(loss == loss for loss in wanted)
    except Exception as error:
        raise Unusable(f"{type(error).__name__}: {error}") from error
    sharded = wrapped()
    assert _ties(sharded) == _ties(plain), "other ties"
    losses = _losses(sharded, model, padded, context)
    state = sharded.state_dict()
    names = list(plain.state_dict())
    assert list(state) == names, f"other names: {sorted(set(state) ^ set(names))[:3]}"
    assert [n for n, _ in sharded.named_buffers()] == [n for n, _ in plain.named_buffers()], "other buffers"
    changes = {name: p.detach() - start[name] for name, p in plain.named_parameters()}
    total = float(torch.stack([change.float().norm() for change in changes.values()]).norm())
    if not total > 0:
        raise Unusable("nothing is trained")
    errors = {f"loss {i}": abs(a - b) / max(1.0, abs(b)) for i, (a, b) in enumerate(zip(losses, wanted, strict=True))}
    for name, change in changes.items():
        # Some parameters (the bias of keys) have no effect, and gradients of rounding errors.
        scale = max(float(change.norm()), 1e-2 * total)
        errors[name] = float((state[name].to(change.device) - start[name] - change).norm()) / scale
    where = max(errors, key=lambda name: float("inf") if math.isnan(errors[name]) else errors[name])
    return errors[where], where, sum(isinstance(m, bmt_zero.Block) for m in sharded.modules())


def _losses(which: nn.Module, model: Model, padded: bool, context: ParallelContext | None) -> list[float]:
    """The losses of some steps of SGD, on all parts of the batch, or on this rank's."""
    parts = 2 if context is None else context.world_size
    optimizer = torch.optim.SGD([p for p in which.parameters() if p.requires_grad], lr=RATE)
    dtype = next(p.dtype for p in which.parameters() if p.is_floating_point())
    which.train()
    losses = []
    for step in range(STEPS):
        batch = model.batch(step, padded)
        count = int((batch["targets"] != -100).sum())
        total = torch.zeros((), dtype=dtype)
        for part in range(parts) if context is None or context.tp_size == parts else (context.rank,):
            rows = slice(part * SAMPLES // parts, (part + 1) * SAMPLES // parts)
            torch.manual_seed(7 + step)
            samples = {name: value[rows] for name, value in batch.items()}
            loss = loss_of(which, {n: v.to(dtype) if v.is_floating_point() else v for n, v in samples.items()}, count)
            loss.backward()
            total += loss.detach().cpu()
        if context is not None and context.tp_size == 1:
            context.world.all_reduce(total)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return losses


def _plain(model: Model) -> Any:
    return model.build()


def _with_adapters(inner: nn.Module) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise Unusable("peft is not installed") from error
    names = {n.rpartition(".")[2] for n, m in inner.named_modules() if isinstance(m, nn.Linear) or is_conv1d(m)}
    head = {"lm_head", "classifier", "head", "fc"}
    if not names - head:
        raise Unusable("no linear layers")
    torch.manual_seed(5)
    try:
        adapted = get_peft_model(inner, LoraConfig(r=2, target_modules=sorted(names - head), init_lora_weights=False))
    except (ValueError, TypeError) as error:
        if any(isinstance(p, bmt_zero.ShardedParameter) for p in inner.parameters()):
            raise
        raise Unusable(f"{type(error).__name__}: {error}") from error
    return adapted.train()


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is GPT-2's linear layer."""
    return type(module).__name__ == "Conv1D"


def _ties(model: nn.Module) -> list[list[str]]:
    """The names of parameters that are the same."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _short(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else "")[:300]


def _quiet() -> None:
    try:
        import transformers
    except ImportError:
        return
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
