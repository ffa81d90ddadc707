"""The ``.grad`` of sharded parameters: adding to it, and noticing what a script does to it while gradients wait.

[Note: gradients that wait]
    Reduced gradients of a backward pass are added to ``.grad``, as in plain PyTorch. Some gradients wait: under
    ``no_sync`` for the reduction (levels 0 and 1), for the sum over replicas, or for the end of a sum in a fixed order.
    In plain PyTorch they would be in ``.grad`` already. So what a script does to ``.grad`` meanwhile applies to them:

    - ``p.grad = None``, another tensor as ``p.grad``, ``zero_``, ``fill_`` and ``copy_`` drop the gradients that wait
      for this parameter. Later gradients are added to the new ``.grad``.
    - ``add_`` and ``sub_`` have the same effect before and after the waiting gradients are added.
    - Other writes would have to change the waiting gradients, too: the next backward raises. Writes through another
      tensor on the same memory, which a script had before, are not noticed.
    - Reading does not communicate: it gives what was added before.

    While gradients wait for a parameter, its ``.grad`` is a tensor that notes writes; it is zeros if the parameter had
    no gradient. The same tensor stays the parameter's ``.grad`` when the gradients arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bmt_comm import ShardedGradient, gradient_of, is_stage_local, local_rows, noting_gradient, sharded_gradient

from .flat_parameter import FlatParameter


class ParameterGradients:
    """The gradients of a flat parameter's parameters; see [Note: gradients that wait].

    Args:
        flat: the flat parameter.
    """

    def __init__(self, flat: FlatParameter) -> None:
        self._flat = flat
        self._has_others = any(param.bmt_slice.communicators for param in flat.params)
        self._watched: dict[int, ShardedGradient] = {}  # ``.grad`` of parameters that gradients wait for
        self._zeros: dict[int, tuple[Tensor, int]] = {}  # zeros that :meth:`watch` has set, and their versions
        self._placeholders: dict[int, ShardedGradient] = {}  # zeros of parameters that only other ranks may have used

    @property
    def are_read_at_once(self) -> bool:
        """Whether the host reads a gradient when it arrives, to add it to ``.grad`` or to call hooks."""
        return any(p.grad is not None or p._backward_hooks or p._post_accumulate_grad_hooks for p in self._flat.params)

    def add(self, rows: Sequence[Tensor | None]) -> None:
        """Add rows to the gradients of the parameters.

        The parameters' hooks run here, because autograd does not reach the parameters.
        """
        grads, added, hooked = [], [], []
        are_parts = self._has_others or is_stage_local(self._flat.params[0])  # at least some
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
                param.grad = sharded_gradient(new, param) if are_parts else new
            elif self._is_zero(index, before):
                before.data = local_rows(new)  # no addition, and references to the tensor see the values
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
        """Whether ``grad`` is the zeros that :meth:`watch` has set, unwritten since."""
        zeros, version = self._zeros.get(index, (None, 0)) if self._zeros else (None, 0)
        return grad is zeros and grad._version == version

    # --- while gradients wait ---------------------------------------------------------------------

    def watch(self, used: Sequence[bool], of_others: bool = False) -> None:
        """Notice what is done to ``.grad`` from now on, until :meth:`end_watch`: gradients wait to be added.

        Args:
            used: which parameters this rank has used.
            of_others: whether the waiting gradients include those of other ranks. Then a rank that has used nothing
                must notice, too: all parameters get a ``.grad`` until the ranks agree on which were used.
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
        """Whether gradients wait for some parameter."""
        return bool(self._watched)

    def take_dropped(self) -> list[int]:
        """The parameters whose ``.grad`` was overwritten, removed or replaced since :meth:`watch`, which ends for them.

        Raises:
            RuntimeError: a ``.grad`` was changed in another way.
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
        # A ``.grad`` that a script has written to stays, on all ranks.
        placeholders = self._placeholders.items()
        self._placeholders = {i: g for i, g in placeholders if params[i].grad is g and not g.was_overwritten}
        return dropped

    def end_watch(self) -> None:
        """No gradients wait any more."""
        self._watched = {}

    def remove_placeholders(self, indices: Iterable[int]) -> None:
        """Remove the placeholders of parameters that no rank has used."""
        for index in indices:
            param = self._flat.params[index]
            if param.grad is not None and param.grad is self._placeholders.pop(index, None):
                param.grad = None

    def keep_placeholders(self) -> None:
        """Keep the remaining placeholders as gradients: some rank has used their parameters."""
        self._placeholders = {}
