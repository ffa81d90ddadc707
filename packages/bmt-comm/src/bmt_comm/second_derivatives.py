"""Functions of autograd whose gradients must not be differentiated again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def differentiable_once(
    what: str, depends: Callable[[Any], bool]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a second derivative through the ``backward`` of a ``torch.autograd.Function`` raise a RuntimeError.

    ``torch.autograd.function.once_differentiable`` does so only if an incoming gradient requires a gradient. That is
    enough for linear functions of one tensor. The gradients of other functions depend on saved tensors, too. Their
    second derivatives would be taken for zero, for example in a gradient penalty.

    Args:
        what: what is differentiated, for the message.
        depends: of the ``ctx``: whether the gradients depend on other tensors that require gradients than the incoming
            ones. It must not read ``ctx.saved_tensors``, which checkpoints give once.
    """

    def decorated(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def once(ctx: Any, *grads: Tensor | None) -> Any:
            with torch.no_grad():
                results = backward(ctx, *grads)
            if not torch.is_grad_enabled():  # no create_graph=True
                return results
            results = results if isinstance(results, tuple) else (results,)
            if not depends(ctx) and not any(grad is not None and grad.requires_grad for grad in grads):
                return results
            message = f"{what} can be differentiated only once; pass create_graph=False"
            error = torch._C._functions.DelayedError(message.encode(), len(results))
            return error(*(x.detach().requires_grad_() if isinstance(x, Tensor) else x for x in results))

        return once

    return decorated
