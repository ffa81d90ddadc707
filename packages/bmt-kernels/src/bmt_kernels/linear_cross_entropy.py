"""Cross entropy of a linear layer's output, without materializing that output.

Tokens are processed in chunks. The logits of a chunk are computed, overwritten with their gradient, and multiplied into
the gradients of the layer's input and weight. The next chunk reuses their memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function

from bmt_kernels import _library
from bmt_kernels._compat import adds_products_in_fp32, keeps_graph
from bmt_kernels._cross_entropy_parts import (
    Classes,
    checked_classes,
    gradient,
    mean_denominator,
    numbers_of,
    reduced,
    row_losses,
    statistics,
)
from bmt_kernels.cross_entropy import Gather, check_columns, gathered_statistics
from bmt_kernels.reference.cross_entropy import computing_dtype

_LEAST_CHUNK = 256
"""Fewer rows than this keep a matrix product from running at full speed."""
_LEAST_HALF_CHUNK_ON_CUDA = 2048
"""With fewer rows than this in half precision, a GPU waits for the host."""
_PRODUCT = 1 << 22
"""Elements of the products of half-precision matrices at most, so that they stay in a cache until they are added up."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    chunk_size: int | None = None,
) -> Tensor:
    """``cross_entropy(hidden @ weight.T + bias, target)``, never holding the (N, V) logits.

    For "mean" and "sum", forward also computes the gradients that will be asked for (none of them under
    ``torch.no_grad`` or for what is frozen), keeps them, and backward multiplies them by the upstream gradient. For
    "none", whose upstream gradients are not known yet, backward makes the logits of each chunk again. Logits have the
    dtype of `hidden`, as those of ``torch.nn.functional.linear`` have; what is computed from them is in fp32. Chunks'
    contributions to the gradients of weight and bias are added up in fp32.

    Under autocast, hidden, weight and bias are cast to its dtype first, as for ``torch.nn.functional.linear``. As for
    torch's own functions, classes of tensors may have their own implementation (``__torch_function__``): a parameter
    that bmt-zero has sharded is gathered.

    Args:
        hidden: (..., H); float32, bfloat16, float16 or float64. The leading dimensions are N tokens.
        weight: (V, H), in the dtype of `hidden`.
        target: (...), any integer dtype.
        bias: (V,), in the dtype of `hidden`.
        class_weight: the `weight` of `cross_entropy`, (V,).
        ignore_index, reduction, label_smoothing: as for `cross_entropy`.
        chunk_size: tokens at a time. Default: as many as make a chunk's logits the size of `hidden`, N H / V, so that
            they add no more to the peak than the gradient of `hidden` does; but at least 256. In half precision at
            least 2048 on CUDA, and 3 H / 4 where `weight` needs a gradient: each chunk reads and writes its sum in
            fp32, and the logits take the memory in which the sum is rounded in the end.

    Returns:
        The loss, () or (...) for reduction "none"; float32, or float64 for float64.

    Raises:
        TypeError, ValueError, IndexError: as `cross_entropy`; also for dtypes or shapes that do not match, and for a
            `chunk_size` that is not positive.
        RuntimeError: a backward under ``create_graph=True``.
    """
    tensors = (hidden, weight, target, bias, class_weight)
    if has_torch_function(tensors):
        loss: Tensor = handle_torch_function(
            linear_cross_entropy,
            tensors,
            hidden,
            weight,
            target,
            bias,
            class_weight=class_weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            chunk_size=chunk_size,
        )
        return loss
    columns = _checked_layer(hidden, weight, bias, target)
    return _loss(
        hidden,
        weight,
        target,
        bias,
        None,
        0,
        columns,
        class_weight,
        ignore_index,
        reduction,
        label_smoothing,
        chunk_size,
    )


def parallel_linear_cross_entropy(
    hidden: Tensor,
    local_weight: Tensor,
    target: Tensor,
    gather: Gather,
    local_bias: Tensor | None = None,
    *,
    vocab_start: int,
    vocab_size: int,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    chunk_size: int | None = None,
) -> Tensor:
    """`linear_cross_entropy` with the vocabulary sharded over ranks; every rank gets the same loss, to the bit.

    The statistics of all chunks are computed first and gathered at once. If gradients are needed, the logits of each
    chunk are then computed again. The ranks' losses are copies of one loss, and the gradients are those of the one
    loss. The gradient of `hidden` is this rank's part, from its columns: **the caller adds it up over the ranks**, as
    for the input of any column-parallel layer.

    Args:
        hidden: (..., H), the same on every rank.
        local_weight: (V_local, H), the rows of the logical weight for classes `vocab_start` to
            ``vocab_start + V_local``; V_local may be 0.
        target: (...), classes of the full vocabulary, the same on every rank.
        gather: the caller's all-gather, as for `parallel_cross_entropy`, called once.
        local_bias: (V_local,).
        vocab_start, vocab_size: as for `parallel_cross_entropy`.
        class_weight: (vocab_size,), not sharded.
        ignore_index, reduction, label_smoothing, chunk_size: as for `linear_cross_entropy`.

    Raises:
        As `linear_cross_entropy` and `parallel_cross_entropy` do.
    """
    columns = _checked_layer(hidden, local_weight, local_bias, target)
    check_columns("local_weight", columns, vocab_start, vocab_size)
    return _loss(
        hidden,
        local_weight,
        target,
        local_bias,
        gather,
        vocab_start,
        vocab_size,
        class_weight,
        ignore_index,
        reduction,
        label_smoothing,
        chunk_size,
    )


def _checked_layer(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> int:
    """Raise unless they fit together; returns the number of columns of the logits."""
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias), ("target", target)):
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
    if not hidden.is_floating_point():
        raise TypeError(f"hidden has dtype {hidden.dtype}; it must be floating-point")
    if hidden.dim() == 0 or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"hidden of shape {tuple(hidden.shape)} and weight of shape {tuple(weight.shape)} are not (..., H) and "
            "(V, H)"
        )
    if target.shape != hidden.shape[:-1]:
        raise ValueError(f"target has shape {tuple(target.shape)}; it must be {tuple(hidden.shape[:-1])} like hidden")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}; weight has {weight.shape[0]} rows")
    autocast = _autocasts(hidden)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device}; it must be on {hidden.device} like hidden")
        if tensor.dtype != hidden.dtype and not (autocast and tensor.is_floating_point()):
            raise TypeError(f"{name} has dtype {tensor.dtype}; it must be {hidden.dtype} like hidden")
    return weight.shape[0]


def _autocasts(hidden: Tensor) -> bool:
    """Whether autocast is on for the device of `hidden`; meta, which has none, may not be asked for."""
    return hidden.device.type != "meta" and torch.is_autocast_enabled(hidden.device.type)


def _loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    gather: Gather | None,
    first: int,
    size: int,
    class_weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    chunk_size: int | None,
) -> Tensor:
    if chunk_size is not None and (type(chunk_size) is not int or chunk_size < 1):
        raise ValueError(f"chunk_size is {chunk_size!r}; it must be a positive int, or None")
    shape = target.shape
    hidden, target = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    if _autocasts(hidden) and hidden.dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    rows = hidden.shape[0]
    classes = checked_classes(
        hidden, rows, target, class_weight, first, size, ignore_index, label_smoothing, reduction, "class_weight"
    )
    layer = (hidden, weight, bias)
    if not _library.tracing() and forward_ad._current_level >= 0 and any(_has_tangent(tensor) for tensor in layer):
        raise NotImplementedError("linear_cross_entropy has no forward-mode derivative; use plain PyTorch for it")
    needs = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in layer]
    sums = needs[1] and computing_dtype(weight.dtype) is not weight.dtype
    half_on_cuda = hidden.is_cuda and computing_dtype(hidden.dtype) is not hidden.dtype
    least = _LEAST_HALF_CHUNK_ON_CUDA if half_on_cuda else _LEAST_CHUNK
    if sums:
        least = max(least, 3 * hidden.shape[1] // 4)
    chunk = chunk_size or max(least, hidden.numel() // max(weight.shape[0], 1))
    arguments = (classes.target, classes.weight, *numbers_of(classes))
    gathered = None
    if gather is not None:
        constants = [None if tensor is None else tensor.detach() for tensor in layer]
        gathered = gathered_statistics(gather, _statistics_op(*constants, *arguments, chunk))
    loss: Tensor = _loss_op(*layer, gathered, *arguments, reduction, chunk, *needs)[0]
    return loss.view(shape) if reduction == "none" else loss


def _has_tangent(tensor: Tensor | None) -> bool:
    return tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None


def _chunks(hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int) -> Iterator[tuple[int, int, Tensor]]:
    """Ranges of rows and their logits, which the next ones overwrite."""
    rows = hidden.shape[0]
    buffer = hidden.new_empty(min(chunk, rows), weight.shape[0])
    for begin in range(0, rows, chunk):
        end = min(begin + chunk, rows)
        logits = buffer[: end - begin]
        if bias is None:
            torch.mm(hidden[begin:end], weight.t(), out=logits)
        else:
            torch.addmm(bias, hidden[begin:end], weight.t(), out=logits)
        yield begin, end, logits


class _Gradients:
    """The gradients of the layer's input, weight and bias, as far as needed, while chunks come in."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, ...]) -> None:
        self._layer = (hidden, weight)
        dtype = computing_dtype(weight.dtype)
        self.hidden = hidden.new_empty(hidden.shape if needs[0] else 0)
        self.weight = weight.new_zeros(weight.shape, dtype=dtype) if needs[1] else weight.new_empty(0)
        self.bias = weight.new_zeros(weight.shape[:1], dtype=dtype) if needs[2] else weight.new_empty(0)
        self._widens = weight.dtype != dtype and weight.is_cuda and adds_products_in_fp32(weight.dtype)
        # Elsewhere a product of half-precision matrices is rounded to half precision; it is added up in fp32, some
        # classes at a time.
        rounds = needs[1] and weight.dtype != dtype and not self._widens
        self._classes = max(1, min(-(-weight.shape[0] // 4), _PRODUCT // max(weight.shape[1], 1)))
        self._product = weight.new_empty(self._classes, weight.shape[1]) if rounds else None
        self._needs = needs

    def add(self, begin: int, end: int, logits_gradient: Tensor) -> None:
        hidden, weight = self._layer
        if self._needs[0]:
            torch.mm(logits_gradient, weight, out=self.hidden[begin:end])
        if self._product is not None:
            for sums, part in zip(self.weight.split(self._classes), logits_gradient.split(self._classes, dim=1)):
                sums.add_(torch.mm(part.t(), hidden[begin:end], out=self._product[: len(sums)]))
        elif self._needs[1] and self._widens:
            torch.addmm(
                self.weight, logits_gradient.t(), hidden[begin:end], out_dtype=self.weight.dtype, out=self.weight
            )
        elif self._needs[1]:
            self.weight.addmm_(logits_gradient.t(), hidden[begin:end])
        if self._needs[2]:
            self.bias.add_(logits_gradient.sum(dim=0, dtype=self.bias.dtype))

    def rounded(self) -> tuple[Tensor, Tensor, Tensor]:
        """In the dtype of the layer."""
        dtype = self.hidden.dtype
        self._product = None
        return self.hidden, self.weight.to(dtype), self.bias.to(dtype)


def _scaled_late(dtype: torch.dtype) -> bool:
    """Whether the mean's division and the rounding wait for the upstream gradient.

    The gradients of fp16 logits, divided by the number of tokens, would be too small for fp16; that is what the loss
    scale in the upstream gradient is for.
    """
    return dtype is torch.float16


_LAYER = "Tensor hidden, Tensor weight, Tensor? bias"
_CLASSES = "Tensor target, Tensor? class_weight, int first, int size, int ignore_index, float label_smoothing"
_NEEDS = "bool need_hidden, bool need_weight, bool need_bias"


def _op_statistics(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    *settings, chunk = rest
    classes = Classes(*settings)
    out = torch.empty(classes.kinds, hidden.shape[0], dtype=computing_dtype(hidden.dtype), device=hidden.device)
    for begin, end, logits in _chunks(hidden, weight, bias, chunk):
        out[:, begin:end] = statistics(logits, classes.rows(begin, end))
    return out


def _fake_statistics(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    return hidden.new_empty(Classes(*rest[:-1]).kinds, hidden.shape[0], dtype=computing_dtype(hidden.dtype))


def _op_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, gathered: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    """The loss; normalizers; what gradients are still to be divided by; gradients, empty unless made here."""
    *settings, reduction, chunk, need_hidden, need_weight, need_bias = rest
    classes = Classes(*settings)
    needs = (need_hidden, need_weight, need_bias) if reduction != "none" else (False, False, False)
    dtype = computing_dtype(hidden.dtype)
    one = torch.ones((), dtype=dtype, device=hidden.device)
    denominator = mean_denominator(classes).to(dtype) if reduction == "mean" else one
    now, later = (denominator, one)
    if _scaled_late(hidden.dtype):
        # Without a target that counts the gradients are zeros, and must stay so.
        counts = (classes.target != classes.ignore_index).any()
        now, later = one, torch.where(counts, denominator, one)
    gradients = _Gradients(hidden, weight, bias, needs)
    if gathered is not None:
        losses, normalizers = row_losses(gathered, classes)
    else:
        losses, normalizers = one.new_empty(hidden.shape[0]), one.new_empty(2, hidden.shape[0])
    if gathered is None or any(needs):
        for begin, end, logits in _chunks(hidden, weight, bias, chunk):
            part = classes.rows(begin, end)
            if gathered is None:
                losses[begin:end], normalizers[:, begin:end] = row_losses(statistics(logits, part)[None], part)
            if any(needs):
                gradients.add(begin, end, gradient(one, now, logits, normalizers[:, begin:end], part, logits))
            del logits  # rounding needs the memory
    loss, _ = reduced(losses, classes, reduction)
    if _scaled_late(hidden.dtype):
        return loss, normalizers, later, gradients.hidden, gradients.weight, gradients.bias
    return loss, normalizers, later, *gradients.rounded()


def _fake_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, gathered: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    reduction, needs = rest[-5], rest[-3:]
    rows, columns = hidden.shape[0], weight.shape[0]
    dtype = computing_dtype(hidden.dtype)
    kept = dtype if _scaled_late(hidden.dtype) else hidden.dtype

    def made(shape: tuple[int, ...], need: bool, dtype: torch.dtype) -> Tensor:
        made_here = need and reduction != "none"
        return torch.empty(shape if made_here else 0, dtype=dtype if made_here else hidden.dtype, device=hidden.device)

    return (
        hidden.new_empty((rows,) if reduction == "none" else (), dtype=dtype),
        hidden.new_empty(2, rows, dtype=dtype),
        hidden.new_empty((), dtype=dtype),
        made((rows, hidden.shape[1]), needs[0], hidden.dtype),
        made((columns, weight.shape[1]), needs[1], kept),
        made((columns,), needs[2], kept),
    )


def _op_gradient(
    scale: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, normalizers: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *settings, chunk, need_hidden, need_weight, need_bias = rest
    classes = Classes(*settings)
    gradients = _Gradients(hidden, weight, bias, (need_hidden, need_weight, need_bias))
    one = torch.ones((), dtype=scale.dtype, device=scale.device)
    for begin, end, logits in _chunks(hidden, weight, bias, chunk):
        part = classes.rows(begin, end)
        gradients.add(begin, end, gradient(scale[begin:end], one, logits, normalizers[:, begin:end], part, logits))
        del logits  # rounding needs the memory
    return gradients.rounded()


def _fake_gradient(
    scale: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, normalizers: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    needs = rest[-3:]
    return (
        hidden.new_empty(hidden.shape if needs[0] else (0,)),
        hidden.new_empty(weight.shape if needs[1] else (0,)),
        hidden.new_empty(weight.shape[:1] if needs[2] else (0,)),
    )


_statistics_op = _library.register(
    f"linear_cross_entropy_statistics({_LAYER}, {_CLASSES}, SymInt chunk) -> Tensor", _op_statistics, _fake_statistics
)
_loss_op = _library.register(
    f"linear_cross_entropy_loss({_LAYER}, Tensor? gathered, {_CLASSES}, str reduction, SymInt chunk, {_NEEDS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _op_loss,
    _fake_loss,
)
_gradient_op = _library.register(
    f"linear_cross_entropy_gradient(Tensor scale, {_LAYER}, Tensor normalizers, {_CLASSES}, SymInt chunk, {_NEEDS}) "
    "-> (Tensor, Tensor, Tensor)",
    _op_gradient,
    _fake_gradient,
)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, _, target, class_weight, *settings, reduction, chunk, _, _, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.dtype = hidden.dtype
    ctx.inputs = len(inputs)
    ctx.recompute = reduction == "none"
    ctx.needs = inputs[-3:]
    if ctx.recompute:
        ctx.settings = (*settings, chunk)
        ctx.save_for_backward(hidden, weight, bias, output[1], target, class_weight)
    else:
        ctx.save_for_backward(*output[2:])


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    scale = grads[0]
    if torch.is_grad_enabled() and not _library.tracing():
        raise RuntimeError("linear_cross_entropy can be differentiated only once; pass create_graph=False")
    if scale is None:
        return (None,) * ctx.inputs
    if ctx.recompute:
        hidden, weight, bias, normalizers, target, class_weight = ctx.saved_tensors
        made = _gradient_op(scale, hidden, weight, bias, normalizers, target, class_weight, *ctx.settings, *ctx.needs)
    else:
        denominator, *kept = ctx.saved_tensors
        factor = scale / denominator
        # Their receivers may write to them, so that a second backward needs them untouched. A GPU would have the host
        # wait for a look at the factor, and a tensor that stands for one in a graph has no value.
        unchanged = type(factor) is Tensor and factor.device.type == "cpu" and not keeps_graph() and bool(factor == 1)
        made = [g if unchanged and g.dtype is ctx.dtype else (g * factor).to(ctx.dtype) for g in kept]
    results = [g if need else None for g, need in zip(made, ctx.needs)]
    return *results, *(None,) * (ctx.inputs - 3)


_library.differentiate("linear_cross_entropy_loss", _backward, _keep_for_backward)
