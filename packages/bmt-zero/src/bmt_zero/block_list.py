"""A stack of Blocks that prefetch each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .block import Block
from .hooks import link
from .shard import group_of, sharding_of
from .state import load_state_dict


def link_blocks(blocks: Iterable[nn.Module]) -> None:
    """Let sharded modules prefetch each other, in this order in forward."""
    link([sharding.hooks for block in dict.fromkeys(blocks) if (sharding := sharding_of(block)) is not None])


def copy_containers(hidden: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same tensors in new containers, because a layer may write into its containers."""
    return tuple(x if isinstance(x, Tensor) else tree_map(lambda leaf: leaf, x) for x in hidden)


def stack_hidden_states(inputs: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The hidden states that layers have taken, stacked: tensors of shape (layers, *hidden).

    Args:
        inputs: of each layer. Hidden states may be containers of tensors; what is no tensor in them is the first
            layer's in the result.

    Raises:
        ValueError: the containers of two layers differ, or one has a tensor where another has none.
    """
    if not inputs:
        return ()
    flat = [tree_flatten(of_layer) for of_layer in inputs]
    structure = flat[0][1]
    for number, (_, other) in enumerate(flat):
        if other != structure:
            raise ValueError(
                f"return_hidden_states=True: layer {number} takes hidden states of the structure {other}, and layer 0 "
                f"of {structure}; let all layers take and return the same containers"
            )
    by_leaf = list(zip(*(leaves for leaves, _ in flat)))
    for leaves in by_leaf:
        are_tensors = [isinstance(leaf, Tensor) for leaf in leaves]
        if len(set(are_tensors)) > 1:
            number = are_tensors.index(not are_tensors[0])
            raise ValueError(
                f"return_hidden_states=True: layer {number} takes a {type(leaves[number]).__name__} where layer 0 "
                f"takes a {type(leaves[0]).__name__}; let all layers take and return tensors there"
            )
    stacked = [torch.stack(leaves) if isinstance(leaves[0], Tensor) else leaves[0] for leaves in by_leaf]
    result: tuple[Any, ...] = tree_unflatten(stacked, structure)
    return result


class TransformerBlockList(nn.Module):
    """Calls Blocks one after the other. While a Block computes, the next one is unsharded.

    The first ``num_hidden`` arguments are passed from Block to Block; each Block gets all others unchanged.

    Args:
        modules: Blocks, or modules, which become Blocks.
        num_hidden: the number of hidden states that the Blocks take and return.
    """

    handles_shards = True  # its saving and loading support sharded parameters

    def __init__(self, modules: Iterable[nn.Module], num_hidden: int = 1) -> None:
        super().__init__()
        if num_hidden < 1:
            raise ValueError(f"num_hidden={num_hidden} must be at least 1")
        self.num_hidden = num_hidden
        for index, module in enumerate(modules):
            block = module if isinstance(module, Block) else Block(module)
            group_of(block).name = f"layer {index} (a {type(module).__name__})"
            self.add_module(str(index), block)
        link_blocks(self)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    def __getitem__(self, index: int | str) -> nn.Module:
        return list(self)[int(index)]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a plain state dict; see :func:`bmt_zero.load_state_dict`."""
        return load_state_dict(self, state_dict, strict, assign)

    def forward(self, *args: Any, return_hidden_states: bool = False, **kwargs: Any) -> Any:
        """Run all Blocks.

        Returns the hidden states of the last Block's output. With ``return_hidden_states`` a tuple: these hidden
        states, and then for each of them the inputs of all layers: tensors of shape (layers, *hidden), in the
        containers of the hidden states.
        """
        hidden, others = args[: self.num_hidden], args[self.num_hidden :]
        inputs: list[tuple[Any, ...]] = []
        output: Any = hidden if self.num_hidden > 1 else (hidden[0] if hidden else None)
        for block in self:
            if return_hidden_states:
                inputs.append(copy_containers(hidden))
            output = block(*hidden, *others, **kwargs)
            hidden = tuple(output[: self.num_hidden]) if isinstance(output, (tuple, list)) else (output,)
            if len(hidden) < self.num_hidden:
                raise ValueError(f"a Block returned {len(hidden)} hidden states, and num_hidden={self.num_hidden}")
        if not return_hidden_states:
            return hidden[0] if self.num_hidden == 1 else hidden
        return (*hidden, *stack_hidden_states(inputs))
