"""Find the repeated layers of a model."""

from __future__ import annotations

from collections import Counter

from torch import nn

from .shard import sharding_of

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_layers(model: nn.Module) -> dict[nn.Module, None]:
    """The outermost repeated layers with parameters, in the order of the model.

    Layers are the elements of a ``ModuleList``, and elements of a ``Sequential`` or ``ModuleDict`` that have submodules
    and whose class occurs several times in such containers. Containers without their own forward are searched
    instead. Recurrent modules, which keep lists of their weights, are layers, too.
    """
    classes = Counter(
        type(child) for module in model.modules() if isinstance(module, _CONTAINERS) for child in module.children()
    )
    layers: dict[nn.Module, None] = {}

    def is_layer(child: nn.Module, parent: nn.Module) -> bool:
        if isinstance(child, nn.RNNBase):
            return True
        if type(child).forward in (nn.Module.forward, nn.Sequential.forward) and isinstance(child, _CONTAINERS):
            # A Sequential in a ModuleList is a layer: it is called as one.
            return isinstance(parent, nn.ModuleList) and isinstance(child, nn.Sequential)
        if isinstance(parent, nn.ModuleList):
            return type(child).forward is not nn.Module.forward
        return isinstance(parent, _CONTAINERS) and classes[type(child)] > 1 and any(True for _ in child.children())

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if sharding_of(child) is not None:
                continue
            if not is_layer(child, module):
                visit(child)
            elif any(True for _ in child.parameters()):
                layers[child] = None

    visit(model)
    return layers
