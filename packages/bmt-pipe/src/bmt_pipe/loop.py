"""A model's own loop over its layers, which runs the layers of all stages.

A model that was written for one device calls the layers of its list one after another. In such a loop, the first call
runs all layers of all stages, and the last call returns their result. The other calls return tensors without values,
because the values may be on another stage. Each call must get what the call before it returned, and the same further
arguments as the first call. Anything else in a loop raises an error.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from ._compat import recorded_outputs

_SIMPLE = (str, int, float, bool, type(None))


def simple_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes that a loop may read of a layer on another stage: numbers, strings, booleans and None.

    Those of the modules in it are dictionaries, under the modules' names.
    """
    own = {k: v for k, v in vars(module).items() if isinstance(v, _SIMPLE) and not k.startswith("_")}
    return own | {k: simple_attributes(child) for k, child in module._modules.items() if child is not None}


def running_modules() -> Iterator[nn.Module]:
    """The modules whose forwards are running in this thread, the innermost one first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == nn.Module.__module__ and frame.f_code.co_name == "_call_impl":
            yield frame.f_locals["self"]
        frame = frame.f_back


def in_forward_around(layers: nn.Module) -> bool:
    """Whether the innermost module whose forward is running contains ``layers``."""
    module = next(running_modules(), None)
    if module is None:
        return False
    children = module._modules.values()  # the list is often one of them, and has many modules in it
    return any(m is layers for m in children) or any(m is layers for m in module.modules() if m is not module)


class _BetweenLayers(Tensor):
    """The hidden state between two layers. Only the metadata that it shares with the result, ``like``, is known."""

    @staticmethod
    def __new__(cls, like: Tensor) -> _BetweenLayers:
        return Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad
        )

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<hidden state of shape {tuple(self.shape)} between layers of a pipeline>"

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"{func} of the hidden state between two layers of a pipeline, which may be on another stage: a loop over "
            f"the layers can do no more than hand it on to the next layer, through all layers; write a forward that "
            f"calls the list of layers itself, with return_hidden_states=True where hidden states are wanted"
        )


class LayerLoop:
    """The layers of all stages, for one loop. ``run`` calls the pipeline; ``own`` is this stage's first layer."""

    def __init__(
        self, run: Callable[..., Any], own: nn.Module, attributes: Sequence[dict[str, Any]], num_hidden: int
    ) -> None:
        self._run = run
        self._own = own
        self._attributes = attributes
        self._num_hidden = num_hidden
        self._called = 0
        self._given: tuple[Any, list[Any]] | None = None  # the first call's arguments without hidden states
        self._output: Any = None
        self._between: Any = None  # returned in place of it before the last layer

    def __len__(self) -> int:
        return len(self._attributes)

    def __iter__(self) -> Iterator[LoopLayer]:
        for index, attributes in enumerate(self._attributes):
            yield LoopLayer(self, index, attributes)
        if 0 < self._called < len(self):
            raise RuntimeError(
                f"the model's forward has called {self._called} of {len(self)} layers, and the pipeline has run all; "
                f"a model that skips layers needs a forward that calls the list of layers itself"
            )

    def call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What layer ``index`` returns. The last layer returns the result of all layers of all stages."""
        # Hidden states may be passed by keyword.
        names = list(inspect.signature(type(self._own).forward).parameters)[1 : 1 + self._num_hidden]
        missing = names[len(args) :]
        hidden = (*args[: self._num_hidden], *(kwargs[name] for name in missing if name in kwargs))
        args, kwargs = args[self._num_hidden :], {k: v for k, v in kwargs.items() if k not in missing}
        leaves, spec = tree_flatten((args, kwargs))
        if self._called == len(self):
            raise RuntimeError(
                f"the model's forward calls layer {index} after the last one, as checkpointing of layers does in "
                f"backward: turn that off; the pipeline computes layers again by itself"
            )
        if index != self._called:
            raise RuntimeError(
                f"the model's forward calls layer {index} after layer {self._called - 1}; a pipeline runs all layers "
                f"in order"
            )
        self._called += 1
        if self._given is None:
            if any(hasattr(leaf, "get_seq_length") for leaf in leaves):
                raise ValueError("a pipeline keeps no cache of keys and values; call the model with use_cache=False")
            self._given = spec, leaves
            self._output = self._first_call(hidden, args, kwargs)
            self._between = tree_map_only(Tensor, _BetweenLayers, self._output)
            return self._result()
        before = self._between if isinstance(self._between, tuple) else (self._between,)
        if any(a is not b for a, b in zip(hidden, before)):
            raise RuntimeError(
                f"the model's forward changes the hidden state between layers {index - 1} and {index}, which may be "
                f"on different stages; write a forward that calls the list of layers itself"
            )
        if spec != self._given[0] or not all(map(_same, leaves, self._given[1])):
            raise RuntimeError(
                f"the model's forward gives layer {index} other arguments than layer 0; a pipeline gives all layers "
                f"the same: write a forward that calls the list of layers itself"
            )
        return self._result()

    def _result(self) -> Any:
        return self._output if self._called == len(self) else self._between

    def _first_call(self, hidden: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run all layers. The result has the form of the result of one layer."""
        recorded = recorded_outputs()
        if recorded:
            raise ValueError(
                f"the model records {', '.join(recorded)} of its layers, and a stage has some layers only: call it "
                f"without output_{recorded[0]}"
            )
        length = 0  # of the tuple that a layer returns

        def note(_module: nn.Module, _args: Any, output: Any) -> None:
            nonlocal length
            length = len(output) if isinstance(output, tuple) else 0
            if length and any(isinstance(leaf, Tensor) for leaf in tree_leaves(output[self._num_hidden :])):
                raise RuntimeError(
                    f"a {type(self._own).__name__} returns tensors beside its {self._num_hidden} hidden states, which "
                    f"would not reach other stages; give the list num_hidden={length}, or write a forward that "
                    f"calls the list of layers itself"
                )

        handle = self._own.register_forward_hook(note)
        try:
            output = self._run(*hidden, *args, **kwargs)
        finally:
            handle.remove()
        states = output if isinstance(output, tuple) else (output,)
        return (*states, *[None] * (length - len(states))) if length else output


class LayerPart:
    """A layer, or a module in it, of any stage in a model's loop: with its :func:`simple_attributes` only.

    Args:
        place: what it is called in messages.
        attributes: the simple attributes.
    """

    def __init__(self, place: str, attributes: dict[str, Any]) -> None:
        self.__dict__.update({k: v for k, v in attributes.items() if not isinstance(v, dict)})
        self.__dict__["_place"], self.__dict__["_attributes"] = place, attributes

    def __getattr__(self, name: str) -> Any:
        place, attributes = self.__dict__["_place"], self.__dict__["_attributes"]
        if name in attributes:
            return LayerPart(f"{name!r} of {place}", attributes[name])
        raise AttributeError(
            f"attribute {name!r} of {place} of a pipeline cannot be read in a forward: the layer may be on another "
            f"stage"
        )


class LoopLayer(LayerPart):
    """A layer that can be called."""

    def __init__(self, loop: LayerLoop | None, index: int, attributes: dict[str, Any]) -> None:
        super().__init__(f"layer {index}", attributes)
        self.__dict__["_loop"], self.__dict__["_index"] = loop, index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._loop is None:
            raise RuntimeError(
                f"the model's forward calls layer {self._index} of a pipeline by its index; iterate over the layers, "
                f"or call the list"
            )
        return self._loop.call(self._index, args, kwargs)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    return a is b or bool(a == b)
