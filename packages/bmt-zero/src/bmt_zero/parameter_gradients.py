"""The ``.grad`` of sharded parameters: what is added to it, and what a script does to it while gradients wait.

[Note: gradients that wait]
    Reduced gradients of a backward pass are added to ``.grad``, as in plain PyTorch. Some wait: under ``no_sync`` for
    the reduction (levels 0 and 1), for the sum over replicas, or for the end of a sum in a fixed order. In plain
    PyTorch they would be a part of ``.grad``. So what a script does to ``.grad`` in the meantime applies to them:

    - ``p.grad = None``, another tensor as ``p.grad``, ``zero_``, ``fill_`` and ``copy_`` drop what waits for this
      parameter. Later gradients are added to what ``.grad`` is then.
    - ``add_`` and ``sub_`` have the same effect before and after what waits is added.
    - Other writes would have to change what waits, too. The next backward raises. Writes through another tensor on the
      same memory, which a script had before, are not noticed.
    - Reading cannot communicate: it gives what was added before.

    Each parameter that gradients wait for has a ``.grad`` that notes writes: zeros, if it had none. That tensor remains
    the parameter's ``.grad`` when they arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bmt_comm import ShardedGradient, gradient_of, local_rows, noting_gradient, sharded_gradient

from .flat_parameter import FlatParameter


class ParameterGradients:
    """The gradients of a flat parameter's parameters; see [Note: gradients that wait].

    Args:
        flat: the flat parameter.
    """

    def __init__(self, flat: FlatParameter) -> None:
        self._flat = flat
        self._watched: dict[int, ShardedGradient] = {}  # those that others wait to be added to
        self._zeros: dict[int, tuple[Tensor, int]] = {}  # zeros that have stood for others, and their versions
        self._placeholders: dict[int, ShardedGradient] = {}  # zeros that stand for gradients of other ranks

    @property
    def are_read_at_once(self) -> bool:
        """Whether the host reads what arrives, to add it to others or for hooks."""
        return any(p.grad is not None or p._backward_hooks or p._post_accumulate_grad_hooks for p in self._flat.params)

    def add(self, rows: Sequence[Tensor | None]) -> None:
        """Add rows to the gradients of the parameters.

        The parameters' hooks run here: autograd does not reach the parameters.
        """
        grads, added, hooked = [], [], []
        for index, (param, new) in enumerate(zip(self._flat.params, rows, strict=True)):
            if new is None:
                continue
            if param._backward_hooks:
                new = sharded_gradient(new, param)
                with torch._C._EnableTorchFunction():
                    for hook in list(param._backward_hooks.values()):
                        result = hook(new)
                        new = new if result is None else gradient_of(result, param)
            if param._post_accumulate_grad_hooks:
                hooked.append(param)
            before = param.grad
            if before is None:
                param.grad = sharded_gradient(new, param)
            elif self._is_zero(index, before):
                before.data = local_rows(new)  # nothing is added up, and who has the tensor sees the values
            else:
                grads.append(before)
                added.append(new)
        self._zeros = {}
        if grads:
            torch._foreach_add_(grads, added)
        if hooked:
            with torch._C._EnableTorchFunction():
                for param in hooked:
                    for hook in list(param._post_accumulate_grad_hooks.values()):
                        hook(param)

    def _is_zero(self, index: int, grad: Tensor) -> bool:
        """Whether a gradient is zeros that have waited for this one, and that nothing was written to."""
        zeros, version = self._zeros.get(index, (None, 0)) if self._zeros else (None, 0)
        return grad is zeros and grad._version == version

    # --- while others wait ------------------------------------------------------------------------

    def watch(self, used: Sequence[bool], of_others: bool = False) -> None:
        """Gradients wait to be added from now on, until :meth:`end_watch`: notice what is done to those that are there.

        Args:
            used: which parameters this rank has used.
            of_others: whether what waits has gradients of other ranks in it. A rank that has used nothing must notice,
                too, so all parameters have gradients until the ranks agree on which were used.
        """
        params = self._flat.params
        if len(self._watched) == len(params):
            return
        new = [i for i, p in enumerate(params) if p.requires_grad and i not in self._watched]
        new = [i for i in new if used[i] or of_others or params[i].grad is not None]
        if any(params[i].grad is None for i in new):
            zeros = self._flat.local_views(torch.zeros_like(self._flat.shard))
        for index in new:
            param = params[index]
            grad = param.grad
            if grad is None:
                param.grad = grad = noting_gradient(zeros[index], param)
                self._zeros[index] = grad, grad._version
                if not used[index]:
                    self._placeholders[index] = grad
            elif not isinstance(grad, ShardedGradient):
                param.grad = grad = noting_gradient(grad, param)
            grad.watch()
            self._watched[index] = grad

    @property
    def are_watched(self) -> bool:
        """Whether there are any that others wait to be added to."""
        return bool(self._watched)

    def take_dropped(self) -> list[int]:
        """The parameters whose gradients were overwritten, removed or replaced since :meth:`watch`; it ends for them.

        Raises:
            RuntimeError: one was changed otherwise.
        """
        if not self._watched:
            return []
        params = self._flat.params
        dropped = [i for i, grad in self._watched.items() if params[i].grad is not grad or grad.was_overwritten]
        for index, grad in self._watched.items():
            if grad.was_changed and params[index].grad is grad:
                name = self._flat.names[index] if self._flat.names else "a parameter"
                raise RuntimeError(
                    f"the gradient of {name} was changed while gradients of earlier backward passes wait to be added "
                    f"to it (no_sync, or backward passes that do not reduce): scale or clip it after the backward that "
                    f"reduces them. To drop them, zero it or set it to None; add_ and sub_ are possible"
                )
        for index in dropped:
            del self._watched[index]
            self._zeros.pop(index, None)
        # What a script has written stays, on all ranks.
        placeholders = self._placeholders.items()
        self._placeholders = {i: g for i, g in placeholders if params[i].grad is g and not g.was_overwritten}
        return dropped

    def end_watch(self) -> None:
        """Nothing waits any more."""
        self._watched = {}

    def remove_placeholders(self, indices: Iterable[int]) -> None:
        """Those of parameters that no rank has used."""
        for index in indices:
            param = self._flat.params[index]
            if param.grad is not None and param.grad is self._placeholders.pop(index, None):
                param.grad = None

    def keep_placeholders(self) -> None:
        """Some rank has used the parameters of the others."""
        self._placeholders = {}
