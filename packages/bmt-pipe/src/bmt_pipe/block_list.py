"""A list of Blocks that is split into pipeline stages."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from bmt_comm import LAYER_ATTRIBUTE, ParallelContext, check_agreement, current_context, not_compiled
from bmt_zero import grouped_parameters, init_parameters, link_blocks, stage_block

from .call import Pipeline
from .list_state import StagedState
from .loop import LayerLoop, LoopLayer, in_forward_around, running_modules, simple_attributes
from .partition import split_layers
from .recording import Recorder
from .schedule import Schedule, make_schedule
from .simulate import Timeline

# The number of the next list of each context. It is the same on all ranks of the context.
_numbers: weakref.WeakKeyDictionary[ParallelContext, Iterator[int]] = weakref.WeakKeyDictionary()


class PipelineTransformerBlockList(StagedState):
    """A chain of layers that is split into pipeline stages. A rank has only the layers of its own stage.

    Every rank passes all layers, in the same order. The chain is split into ``interleave`` chunks for each stage: chunk
    c of stage r is number c · stages + r of the chain (for "zero_bubble_v", the second chunks are assigned in reverse
    order). Layers keep their names in a list of all layers ("5" is the sixth), so parameters, state dicts and initial
    values are those of a ``TransformerBlockList``. ``len``, iteration and indices cover the layers of all stages, in
    the order of the chain. An :class:`AbsentLayer`, which has no parameters, takes the place of another stage's layer.

    A module that takes the place of a layer later (``setattr(layers, "5", wrapper)``) is called instead of it, on the
    stage that has the layer.

    In the forward of a model that contains the list, iteration covers all layers of all stages, and runs them: a model
    that loops over its layers needs no change (see :mod:`.loop`).

    Layers are taken from ``modules`` one by one, and those of other stages are dropped at once. So a rank that makes
    them in a generator holds only one of those at a time, if ``weights`` give the length of the generator. Otherwise it
    is made into a list first. (On the meta device, layers take no memory.)

    Args:
        modules: modules, which become Blocks, or Blocks. A module that comes twice, in the same stage, is shared.
        num_hidden: how many hidden states the layers take and return.
        interleave: chunks of each stage; by default two for "zero_bubble_v", and one otherwise.
        weights: the relative cost of each layer, by which stages are balanced; by default all cost the same.
        tail_schedule: the schedule of calls with a tail: "1f1b", "interleaved_1f1b" (the default; the same as "1f1b"
            if a stage has one chunk), "zero_bubble_h1" or "zero_bubble_v".

    Attributes:
        num_layers: the number of layers of all stages.
        all_chunks: the layers of every chunk, in the order of the chain.
        chunks: the layers of this stage's chunks.

    Raises:
        RuntimeError: before ``init_distributed``, or ranks pass different arguments.
        TypeError: a layer is not a module.
        ValueError: fewer layers than chunks, more or fewer than ``weights``, a number out of range, a layer or a
            parameter that different stages would share, or a layer that cannot become a Block of one stage.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        num_hidden: int = 1,
        *,
        interleave: int | None = None,
        weights: Sequence[float] | None = None,
        tail_schedule: str | None = None,
    ) -> None:
        super().__init__()
        context = current_context()
        for name, value in (("num_hidden", num_hidden), ("interleave", 1 if interleave is None else interleave)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a positive integer")
        if tail_schedule is None:
            tail_schedule = "interleaved_1f1b"
        schedule = make_schedule(tail_schedule, context.pipe_size, context.pipe_size, interleave)
        interleave = schedule.chunks
        if weights is None and not isinstance(modules, Sized):
            modules = list(modules)
        costs = None if weights is None else [float(weight) for weight in weights]
        count = len(modules) if isinstance(modules, Sized) else len(costs or ())
        costs = [1.0] * count if costs is None else costs
        if len(costs) != count:
            raise ValueError(f"weights has {len(costs)} elements and modules {count}; there must be one for each layer")
        for index, cost in enumerate(costs):
            if not 0 <= cost < math.inf:
                raise ValueError(f"weights[{index}]={cost!r} must be a finite number, 0 or more")
        num_chunks = context.pipe_size * interleave
        if count < num_chunks:
            raise ValueError(
                f"modules has {count} layers, and {context.pipe_size} stages of interleave={interleave} chunks need "
                f"{num_chunks} or more"
            )
        self.num_hidden = num_hidden
        self.num_layers = count
        self.interleave = interleave
        self.all_chunks = split_layers(costs, num_chunks)
        self.chunks = [self.all_chunks[schedule.place(context.pipe.rank, chunk)] for chunk in range(interleave)]
        self._stages = [schedule.stage(place) for place, chunk in enumerate(self.all_chunks) for _ in chunk]  # by layer
        self._pipe = context.pipe
        self._attributes: list[dict[str, Any]] = []  # of the layers of all stages
        # Before the collectives of the layers: those of ranks that split the chain differently would not match.
        facts = [f"num_hidden={num_hidden}", f"interleave={interleave}", f"layers are split into {self.all_chunks}"]
        check_agreement(context.world, "the layers of a PipelineTransformerBlockList", facts)
        self._take(iter(modules), context)
        linked: set[nn.Module] = set()
        for chunk in range(interleave):
            blocks = [block for block in dict.fromkeys(self.blocks_of(chunk)) if block not in linked]
            link_blocks(blocks)
            linked.update(blocks)
        self._pipeline = Pipeline(self.all_chunks, num_hidden, context, tail_schedule)

    def forward(
        self,
        *hidden_and_args: Any,
        batch_related: Sequence[int | str] | None = (),
        return_hidden_states: bool = False,
        tail: Callable[..., Tensor] | None = None,
        tail_args: tuple[Any, ...] = (),
        tail_modules: Sequence[nn.Module] = (),
        **kwargs: Any,
    ) -> Any:
        r"""Run all layers, of all stages, on the batches of this rank and of the other stages.

        Every rank of the pipeline must call it, and run its backward. The first ``num_hidden`` arguments are the hidden
        states, which pass from layer to layer; each of their tensors has the batch as its first dimension. Each layer
        gets all other arguments, those of the batch in micro-batches.

        Without a ``tail``, a stage keeps each micro-batch's input, and recomputes its layers in backward.

        Args:
            batch_related: the arguments whose tensors are divided with the samples of the batch: positions among those
                that follow the first hidden state, and keywords. By default, the tensors whose first dimension is as
                long as the batch; None: no argument.
            return_hidden_states: whether to return the intermediate hidden states, too.
            tail: computes the loss (0-dim) of a micro-batch from the last layer's hidden states and ``tail_args``:
                a module, a method of one, or a function. It runs on the last stage, and uses that stage's copy of
                everything else that it refers to.
            tail_args: its further arguments, of this rank's batch, those of the batch in micro-batches.
            tail_modules: further modules whose sharded parameters it uses. The module that it is, or is a method of,
                need not be named.

        Returns:
            The last layer's hidden states (a tuple if there are several). With ``return_hidden_states``, a tuple of
            them, followed by the input of every layer for each of them: shape (layers, \*hidden). With ``tail``, the
            mean of the losses over this rank's samples; backward from it must have the same gradient on all stages.

        Raises:
            TypeError, ValueError: an argument that is not supported, on the rank that passed it.
            StageFailedError: another stage has raised an exception.
            StageLostError: another stage cannot be reached any more.
        """
        hidden, args = hidden_and_args[: self.num_hidden], hidden_and_args[self.num_hidden :]
        options = batch_related, return_hidden_states, tail, tail_args, tail_modules, self.training
        chunks = [self.blocks_of(chunk) for chunk in range(self.interleave)]
        result = self._pipeline(chunks, hidden, args, kwargs, *options)
        if tail is not None or return_hidden_states or self.num_hidden > 1:
            return result
        return result[0]

    @contextmanager
    def record(self) -> Iterator[list[tuple[Schedule, Timeline]]]:
        """Measure when each rank runs its actions. All ranks of the pipeline must enter and leave it.

        Yields a list, which holds (schedule, timeline) afterwards: of the last call of this list within, and its
        backward. There must be no other call of this list. See :func:`plot_timeline`.
        """
        pipeline = self._pipeline
        results: list[tuple[Schedule, Timeline]] = []
        pipeline.recorder = Recorder(self._pipe)
        try:
            yield results
            if pipeline.last_schedule is not None:
                results.append((pipeline.last_schedule, pipeline.recorder.timeline(pipeline.last_schedule)))
        finally:
            pipeline.recorder = None

    def _take(self, layers: Iterator[nn.Module], context: ParallelContext) -> None:
        """Make Blocks of this stage's layers, and drop the other layers."""
        seen = _Seen()
        pipeline = next(_numbers.setdefault(context, itertools.count()))
        for index in range(self.num_layers):
            try:
                layer = next(layers)
            except StopIteration:
                raise ValueError(
                    f"modules has {index} layers and weights {self.num_layers} elements; there must be one for each"
                ) from None
            keep = self._stages[index] == context.pipe.rank
            first = self._check(layer, index, seen, keep)
            self._attributes.append(simple_attributes(layer))
            block = stage_block(layer, keep) if first == index else self._modules.get(str(first))
            if block is not None:
                self.add_module(str(index), block)
                if first == index and context.pipe.size > 1:
                    block.register_forward_pre_hook(_check_called_by_list, prepend=True)
                for param in block.parameters() if first == index else ():
                    setattr(param, LAYER_ATTRIBUTE, (pipeline, index))
            del layer, block  # before the next one is made
        if next(layers, None) is not None:
            raise ValueError(
                f"modules has more than {self.num_layers} layers, which is how many elements weights has; there must "
                f"be one for each"
            )

    def _check(self, layer: Any, index: int, seen: _Seen, keep: bool) -> int:
        """The index at which ``layer`` came first.

        Raises:
            TypeError: it is not a module.
            ValueError: it belongs to another stage, or shares a parameter with another layer.
        """
        if not isinstance(layer, nn.Module):
            raise TypeError(f"modules[{index}] is a {type(layer).__name__}; layers must be torch.nn.Modules")
        if (
            isinstance(layer, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer))
            and not layer.self_attn.batch_first
        ):
            raise ValueError(
                f"modules[{index}] takes sequences as its first dimension, and a pipeline cuts that into micro-batches:"
                f" make it with batch_first=True"
            )
        first = seen.first(layer, index, keep=False)
        if self._stages[first] != self._stages[index]:
            raise ValueError(
                f"modules[{first}] and modules[{index}] are the same module, and belong to stages "
                f"{self._stages[first]} and {self._stages[index]}; a layer belongs to one stage"
            )
        for name, param in layer.named_parameters() if first == index else ():
            other = seen.first(param, index, keep)
            if other != index:
                raise ValueError(
                    f"parameter {name!r} of modules[{index}] is also one of modules[{other}]; a layer must own its "
                    f"parameters"
                )
        return first

    def blocks_of(self, chunk: int) -> list[nn.Module]:
        """The layers of one of this stage's chunks, in order: Blocks, or modules that have taken their place."""
        return [self._modules[str(index)] for index in self.chunks[chunk]]  # type: ignore[misc]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. A module in place of another stage's layer is dropped, as in the constructor.

        Raises:
            ValueError: the module has parameters that the layer does not have, so other stages would not know of them.
        """
        index = self._layer_of(f"{name}.", "") if isinstance(value, nn.Module) else None
        if index is not None:
            own = {id(param) for param in self[index].parameters()}
            for param_name, param in value.named_parameters():
                if id(param) not in own:
                    raise ValueError(
                        f"parameter {param_name!r} of a {type(value).__name__} is not one of layer {index}, whose "
                        f"place it would take; add it to the layer before the list is made"
                    )
        if index is None or self._stages[index] == self._pipe.rank:
            super().__setattr__(name, value)

    def __len__(self) -> int:
        return self.num_layers

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loop()) if in_forward_around(self) else (self[index] for index in range(self.num_layers))

    def __getitem__(self, index: int | str | slice) -> Any:
        in_forward = in_forward_around(self)
        if isinstance(index, slice):
            if not in_forward:
                return [self[number] for number in range(self.num_layers)[index]]
            if len(range(self.num_layers)[index]) != self.num_layers or index.step not in (None, 1):
                raise ValueError(f"{index} of {self.num_layers} layers: a pipeline runs all of them")
            return self._loop()
        number = range(self.num_layers)[int(index)]
        if in_forward:
            return LoopLayer(None, number, self._attributes[number])
        own = self._modules.get(str(number))
        return AbsentLayer(number, self._stages[number]) if own is None else own

    def _loop(self) -> LayerLoop:
        """The object over which a model's forward iterates in place of the layers."""
        return LayerLoop(self, self.blocks_of(0)[0], self._attributes, self.num_hidden)

    def extra_repr(self) -> str:
        return f"layers {', '.join(f'{c.start}-{c.stop - 1}' for c in self.chunks)} of {self.num_layers}"


class AbsentLayer(nn.Module):
    """In place of a layer of another pipeline stage.

    Attributes:
        index: the layer's number in the chain.
        stage: the stage that has the layer.
    """

    def __init__(self, index: int, stage: int) -> None:
        super().__init__()
        self.index, self.stage = index, stage

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"layer {self.index} belongs to pipeline stage {self.stage}, and has no {name!r} on this rank"
            ) from None

    def grouped_parameters(self) -> Iterator[tuple[str | None, list[nn.Parameter]]]:
        """No parameters."""
        return grouped_parameters(self)

    def init_parameters(self) -> None:
        """Take part in the initialisation of the layer by the ranks that have it."""
        init_parameters(self)

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(
            f"layer {self.index} belongs to pipeline stage {self.stage}, and cannot compute on this rank: call the "
            f"list of layers, or loop over it in the forward of a module that contains it"
        )

    def extra_repr(self) -> str:
        return f"layer {self.index}, of stage {self.stage}"


@not_compiled
def _check_called_by_list(layer: nn.Module, _args: Any) -> None:
    """A hook before the forward of a layer.

    Raises:
        RuntimeError: a module that contains the list calls it, and so does not run the layers of other stages.
    """
    for module in running_modules():
        if isinstance(module, PipelineTransformerBlockList):
            return
        if module is layer:
            continue
        lists = (m for m in module.modules() if isinstance(m, PipelineTransformerBlockList))
        if any(layer is part for layers in lists for part in layers.modules()):
            raise RuntimeError(
                f"the forward of {type(module).__name__} calls a layer of its pipeline that it has from children(), "
                f"modules() or _modules, where this stage's layers are: loop over the list, or call the list"
            )


class _Seen:
    """The modules and parameters that came before, with their indices. Those of other stages are not kept alive."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, int]] = {}  # by identity

    def first(self, thing: Any, index: int, keep: bool) -> int:
        """The index at which ``thing``, which comes at ``index``, came first. ``keep``: keep it alive.

        What becomes a part of a Block gets no weak reference: torch cannot swap a tensor that has one.
        """
        before, first = self._seen.get(id(thing), (None, index))
        if (before() if isinstance(before, weakref.ref) else before) is thing:
            return first
        self._seen[id(thing)] = thing if keep else weakref.ref(thing), index
        return index
