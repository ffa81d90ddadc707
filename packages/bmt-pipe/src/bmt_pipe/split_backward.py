"""Backward of any computation in two passes: the input-gradient pass, and later the weight-gradient pass.

[Note: the two passes]
    Zero-bubble schedules send the gradient of a chunk's input as soon as possible and fill idle time with the gradients
    of its parameters (Qi et al., arXiv:2401.10241). Autograd can compute the two separately, for any module::

        output ── Addmm ── Gelu ── Addmm ── input         the path to the inputs
                    │                │
                    T                T                    the boundary
                    │                │
                  weight           weight                 what parameters enter through

    The input-gradient pass is ``autograd.grad`` with respect to the inputs: nodes compute only the gradients on the
    path. A hook keeps the gradient that arrives at each node with an edge across the boundary. The weight-gradient pass
    runs each of these nodes alone, for its edges across the boundary, and starts an ordinary backward pass behind the
    boundary with the resulting gradients. That pass accumulates gradients, calls hooks and lets bmt_zero reduce.
    Parameters that enter through the same node, such as those of a Block, are processed together, the last ones first.

    torch.distributed.pipelining splits in the same way. But it takes leaves for parameters, does not call hooks of
    parameters' tensors, and computes a function twice if it returns all gradients at once.

[Note: what the input-gradient pass computes]
    Only products (linear layers, embeddings) are worth a weight-gradient pass. Other gradients that cross the boundary,
    such as those of norms' gains and elementwise factors, are computed together with the inputs' gradients: it takes
    one kernel instead of two, and the weight-gradient pass then reads no values of parameters. The same holds for the
    gradients of a ``torch.autograd.Function``, which may compute all of them in any case (unless it has
    ``splits_backward = True``; see ``bmt_tp.ops``), and for those of a tensor that crosses the boundary at several
    nodes, because one of these may be on the path of another.

    The input-gradient pass computes all gradients if the computation contains a node that runs once (``_RUN_ONCE``), if
    a tensor that crosses the boundary is computed from another one that crosses it, or if a tensor just behind the
    boundary has hooks and is a parameter or known to bmt_zero.

    Hooks on a product, and on other tensors just behind the boundary, are called in both passes, because a node does
    not show its hooks. What they return in the second pass is ignored. So ``retain_grad`` there retains twice the
    gradient.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from bmt_zero.backward_context import BackwardPart, StepContext
from bmt_zero.hooks import Call

_PRODUCTS = {
    "AddmmBackward0": ("mat1", "mat2"),
    "MmBackward0": ("self", "mat2"),
    "BmmBackward0": ("self", "mat2"),
    "BaddbmmBackward0": ("batch1", "batch2"),
    "EmbeddingBackward0": ("indices",),
}
"""Nodes that can compute the gradient of a weight alone, without its value, at a cost that is worth a pass; and the
names of the tensors that they save."""

_RUN_ONCE = frozenset({"CheckpointFunctionBackward", "CompiledFunctionBackward"})
"""Nodes of reentrant checkpoints, which support only complete backward passes, and of compiled backwards, which may
overwrite their saved tensors."""

_SHAPES = "Alias Expand Permute ReshapeAlias Select Slice Split Squeeze T Transpose Unbind UnsafeView Unsqueeze View"
_COPIES = "Add Cat Clone Stack Sub ToCopy Embedding"
_READ_NO_PARAMETERS = frozenset(f"{name}Backward0" for name in f"{_SHAPES} {_COPIES}".split())
_READ_NO_PARAMETERS |= {"EnterBackward", "torch::autograd::AccumulateGrad"}
"""Nodes behind the boundary that do not read values of parameters."""

Graph = Mapping[Node, Sequence[tuple["Node | None", int]]]
"""The edges of each node."""


class _Group:
    """Parameters that enter a computation through the same nodes.

    Attributes:
        nodes: the nodes behind the boundary.
        crossing: nodes on the path to the inputs, with their edges that end at ``nodes``.
        grads: the gradients at such edges.
        called: the edges whose tensors' hooks have been called.
    """

    def __init__(self, nodes: set[Node]) -> None:
        self.nodes = nodes
        self.crossing: dict[Node, list[GradientEdge]] = {}
        self.grads: dict[GradientEdge, Tensor] = {}
        self.called: set[GradientEdge] = set()

    @property
    def order(self) -> int:
        """Larger for groups that enter the computation later."""
        return min(node._sequence_nr() for node in self.nodes)

    @property
    def reads_parameters(self) -> bool:
        """Whether the weight-gradient pass may read values of parameters."""
        return any(node.name() not in _READ_NO_PARAMETERS for node in self.nodes)

    @contextlib.contextmanager
    def unsharded(self) -> Iterator[None]:
        """Within, the Blocks of the parameters are unsharded if the parameters' values may be read."""
        entries: list[Any] = [node for node in self.nodes if node.name() == "EnterBackward" and self.reads_parameters]
        calls = [
            node.receiver for node in sorted(entries, key=lambda node: node._sequence_nr())
        ]  # the same order on all ranks
        owners = list(dict.fromkeys(call.group for call in calls if isinstance(call, Call)))
        for owner in owners:
            owner.unshard()
        for owner in owners:
            owner.wait()
        yield
        for owner in owners:
            owner.reshard_in_backward()

    def add(self, edge: GradientEdge, grad: Tensor | None, called: bool = True) -> None:
        if grad is not None:
            before = self.grads.get(edge)
            self.grads[edge] = grad if before is None else before + grad
            if called:
                self.called.add(edge)


class SplitBackward:
    """A backward in two passes; see [Note: the two passes].

    Args:
        roots: the edges at which backward starts.
        grads: the gradients at ``roots``.
        leaves: the inputs. The input-gradient pass accumulates their gradients.
        step: it is told which pass is running.
        hooked: nodes of tensors whose hooks must be called once.
        calls: the calls of Blocks. Those that have used no parameter take part where other ranks reduce.
    """

    def __init__(
        self,
        roots: Sequence[GradientEdge],
        grads: Sequence[Tensor],
        leaves: Sequence[Tensor],
        step: StepContext,
        hooked: Collection[Node] = (),
        calls: Sequence[Call] = (),
    ) -> None:
        self._step = step
        self._leaves = [leaf for leaf in leaves if leaf.requires_grad]
        self._roots = list(zip(roots, grads, strict=True))
        self._arrived: dict[Node, Sequence[Tensor | None]] = {}
        self._together: list[tuple[_Group, GradientEdge]] = []  # of the input-gradient pass
        self._groups: list[_Group | Call] = []
        graph = graph_of(root.node for root in roots)
        path = _leading_to([get_gradient_edge(leaf).node for leaf in self._leaves], graph)
        users: dict[Node, set[Node]] = defaultdict(set)  # of each node just behind the boundary
        for node in path:
            for entry, _ in graph[node]:
                if entry is not None and entry not in path:
                    users[entry].add(node)
        behind = {entry: set(graph_of([entry])) for entry in users}
        at_once = {
            entry
            for entry, nodes in users.items()
            if len(nodes) > 1 or any(node in hooked or not _has_weight_pass(node) for node in nodes)
        }
        edges = {edge for node in path for edge in graph[node] if edge[0] in behind}
        others = {edge for nodes in behind.values() for node in nodes for edge in graph[node]}
        others.update((root.node, root.output_nr) for root, _ in self._roots)
        self._recomputed = _Recomputed()
        self._all_at_once = (
            any(node.name() in _RUN_ONCE for node in graph)
            or any(not at_once.isdisjoint(nodes - {entry}) for entry, nodes in behind.items())
            or not edges.isdisjoint(others)
            or any(entry in hooked or _has_hooks(entry) for entry in behind)
        )
        if self._all_at_once:
            return
        late_roots = [(root, grad) for root, grad in self._roots if root.node not in path]
        self._roots = [(root, grad) for root, grad in self._roots if root.node in path]
        behind.update((root.node, set(graph_of([root.node]))) for root, _ in late_roots)
        late = [[entry for entry, _ in graph[node] if entry in behind and entry not in at_once] for node in path]
        unions = (set[Node]().union(*(behind[entry] for entry in entries)) for entries in late)
        group_of = _grouped((*behind.values(), *unions))  # so that a node runs once for all its parameters
        for root, grad in late_roots:
            group_of[root.node].add(root, grad, called=False)
        for node in path:
            for entry, index in graph[node]:
                if entry is None or entry in path:
                    continue
                group, edge = group_of[entry], GradientEdge(entry, index)
                if entry in at_once:
                    self._together.append((group, edge))
                else:
                    group.crossing.setdefault(node, []).append(edge)
        unused = [call for call in calls if not call.is_in(graph)]
        self._groups = sorted([*dict.fromkeys(group_of.values()), *unused], key=lambda group: group.order)

    def run_input_pass(self) -> None:
        """The input-gradient pass: accumulate the gradients of the inputs."""
        roots, self._roots = self._roots, []
        leaves, self._leaves = self._leaves, []
        if not roots:
            return
        edges, grads = [root for root, _ in roots], [grad for _, grad in roots]
        if self._all_at_once:
            torch.autograd.backward(edges, grads)
            return
        nodes = {node for group in self._groups if isinstance(group, _Group) for node in group.crossing}
        handles = [node.register_prehook(partial(self._arrived.__setitem__, node)) for node in nodes]
        together = list(dict.fromkeys(edge for _, edge in self._together))
        wanted = [*map(get_gradient_edge, leaves), *together]
        try:
            with self._step.computing(BackwardPart.INPUTS), self._recomputed.within(nodes):
                results = torch.autograd.grad(edges, wanted, grads, retain_graph=bool(nodes), allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        for leaf, grad in zip(leaves, results):
            if grad is not None:
                leaf.grad = grad if leaf.grad is None else leaf.grad + grad
        groups = {edge: group for group, edge in self._together}
        for edge, grad in zip(together, results[len(leaves) :], strict=True):
            groups[edge].add(edge, grad)
        self._together = []

    def run_weight_pass(self) -> None:
        """The weight-gradient pass: accumulate the gradients of the parameters."""
        with self._recomputed.within():
            while self._groups:
                group = self._groups.pop()
                if isinstance(group, Call):
                    _reduce_nothing(group)
                    continue
                with group.unsharded():
                    self._weights_of(group)

    def _weights_of(self, group: _Group) -> None:
        with self._step.computing(BackwardPart.WEIGHTS):
            while group.crossing:
                node, edges = group.crossing.popitem()
                self._run_alone(node, list(dict.fromkeys(edges)), group)
        if group.grads:
            nodes = {edge.node for edge in group.called}
            handles = [node.register_prehook(partial(_after_hooks, node, group)) for node in nodes]
            try:
                torch.autograd.backward(list(group.grads), list(group.grads.values()))
            finally:
                for handle in handles:
                    handle.remove()

    def _run_alone(self, node: Node, edges: Sequence[GradientEdge], group: _Group) -> None:
        arrived = self._arrived.get(node, ())
        grads = {GradientEdge(node, n): grad for n, grad in enumerate(arrived) if grad is not None}
        if not grads:
            return
        handle = node.register_prehook(lambda _: tuple(arrived))  # its hooks have been called already
        try:
            results = torch.autograd.grad(list(grads), edges, [*grads.values()], retain_graph=True, allow_unused=True)
        finally:
            handle.remove()
        for edge, grad in zip(edges, results, strict=True):
            group.add(edge, grad)


class _Recomputed:
    """Makes non-reentrant checkpoints in the computation recompute once for both passes.

    Versions of torch without ``GraphExecGroup``, or that hide saved tensors, recompute in each backward pass.
    """

    def __init__(self) -> None:
        group = getattr(torch.utils.checkpoint, "GraphExecGroup", None)
        serves = group is not None and hasattr(torch._C._autograd.SavedTensor, "data")
        self._group = group() if serves and group is not None and group._get_current_group() is None else None

    @contextlib.contextmanager
    def within(self, nodes: Iterable[Node] = ()) -> Iterator[None]:
        """Around one of the passes. ``nodes`` run again in the other one."""
        if self._group is None:
            yield
            return
        for node in nodes:
            names = [f"_raw_saved_{name}" for name in _PRODUCTS.get(node.name(), ())] or ["_raw_saved_tensors"]
            for saved in (getattr(node, name, ()) for name in names):
                for each in saved if isinstance(saved, tuple) else (saved,):
                    if isinstance(each.data, torch.utils.checkpoint._Holder):
                        each.data.handles = _KeptHandles(each.data.handles)
        with self._group:
            yield


class _KeptHandles(dict[Any, Any]):
    """The handles of what torch's checkpoint recomputed. torch sets each to None after its first use; this does not."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if value is not None:
            super().__setitem__(key, value)


def graph_of(roots: Iterable[Node]) -> Graph:
    """The nodes that ``roots`` lead to, including the roots."""
    graph: dict[Node, Sequence[tuple[Node | None, int]]] = {}
    left = list(roots)
    while left:
        node = left.pop()
        if node not in graph:
            graph[node] = node.next_functions
            left += [following for following, _ in graph[node] if following is not None]
    return graph


def _leading_to(targets: Iterable[Node], graph: Graph) -> dict[Node, None]:
    """The nodes of a graph that lead to one of ``targets``, including the targets."""
    before: dict[Node, list[Node]] = defaultdict(list)
    for node, edges in graph.items():
        for following, _ in edges:
            if following is not None:
                before[following].append(node)
    path: dict[Node, None] = {}
    left = [node for node in targets if node in graph]
    while left:
        node = left.pop()
        if node not in path:
            path[node] = None
            left += before[node]
    return path


def _grouped(sets: Iterable[set[Node]]) -> dict[Node, _Group]:
    """The group of each node. Sets with a common node are merged into one group."""
    group_of: dict[Node, _Group] = {}
    for nodes in sets:
        groups = {group_of[node] for node in nodes if node in group_of}
        group = _Group(nodes.union(*(group.nodes for group in groups)))
        group_of.update(dict.fromkeys(group.nodes, group))
    return group_of


def _has_hooks(node: Any) -> bool:
    """Whether a node belongs to a parameter with hooks."""
    return node.name() == "torch::autograd::AccumulateGrad" and bool(node.variable._backward_hooks)


def _after_hooks(node: Node, group: _Group, arrived: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients for a node behind the boundary, without the effect of hooks that were called already."""
    edges = [GradientEdge(node, index) for index in range(len(arrived))]
    return tuple(group.grads[e] if e in group.called else grad for e, grad in zip(edges, arrived, strict=True))


def _has_weight_pass(node: Any) -> bool:
    """Whether a node computes gradients of parameters in the weight-gradient pass."""
    if node.name() in _PRODUCTS:
        return True
    function = getattr(node, "_forward_cls", None)  # of a torch.autograd.Function
    return bool(getattr(function, "splits_backward", False))


class _Unused:
    """Receives, in place of a call's gradients, the message that there are none."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def params_arrived(self, _grads: Any) -> None:
        self.call.reduce_nothing()


def _reduce_nothing(call: Call) -> None:
    """Take part, in a backward pass, when other ranks reduce their gradients of a call that has used no parameter."""
    with torch.enable_grad():
        [root] = call.group.enter(_Unused(call), [torch.zeros((), device=call.group.context.device)])
    root.backward()
