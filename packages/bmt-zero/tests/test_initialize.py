"""Initial values that do not depend on the layout."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bmt_zero
from bmt_zero import DistributedParameter, ParameterInitializer

NORMAL = ParameterInitializer(torch.nn.init.normal_, mean=0.5, std=2.0)


class Layer(bmt_zero.DistributedModule):
    """Ragged parameters; ``split_*`` are shards under tensor parallelism."""

    def __init__(self, tp_size: int = 1) -> None:
        super().__init__()
        self.weight = DistributedParameter(torch.zeros(5, 3), init_method=NORMAL)
        self.bias = DistributedParameter(torch.zeros(7), init_method=torch.nn.init.uniform_)
        self.scalar = DistributedParameter(torch.zeros(()), init_method=NORMAL)
        self.split_0 = DistributedParameter(
            torch.zeros(6 // tp_size, 5), init_method=NORMAL, tp_mode=True, tp_split_dim=0
        )
        self.split_1 = DistributedParameter(
            torch.zeros(3, 4 // tp_size), init_method=NORMAL, tp_mode=True, tp_split_dim=1
        )
        self.low = DistributedParameter(torch.zeros(3, 3, dtype=torch.bfloat16), init_method=NORMAL)
        self.kept = DistributedParameter(torch.full((3,), 4.0))


class Model(bmt_zero.DistributedModule):
    def __init__(self, tp_size: int, level: int) -> None:
        super().__init__()
        self.block = bmt_zero.Block(Layer(tp_size), zero_level=level)
        self.layers = bmt_zero.TransformerBlockList(
            [bmt_zero.Block(Layer(tp_size), zero_level=level) for _ in range(2)]
        )
        self.single = Layer(tp_size)


def expected(name: str) -> Tensor:
    """The next random numbers of torch's generator for a parameter."""
    shape = {"weight": (5, 3), "bias": (7,), "scalar": (), "split_0": (6, 5), "split_1": (3, 4), "low": (3, 3)}
    kind = name.rpartition(".")[2]
    if kind == "kept":
        return torch.full((3,), 4.0)
    if kind == "bias":
        return torch.empty(7).uniform_()
    dtype = torch.bfloat16 if kind == "low" else torch.float32
    return torch.empty(shape[kind], dtype=dtype).normal_(0.5, 2.0)


def check(model: nn.Module, seed: int) -> None:
    """Values, and the next random numbers, are those of one process that has filled the parameters."""
    drawn = torch.rand(3)
    state = model.state_dict()
    assert len(state) == 4 * 7
    torch.manual_seed(seed)
    for name, value in state.items():
        wanted = expected(name)
        assert value.dtype == wanted.dtype
        assert torch.equal(value.cpu(), wanted), name
    assert torch.equal(drawn, torch.rand(3))


@pytest.mark.ranks(1, 2, 3, 4, seed=3)
@pytest.mark.parametrize("level", [0, 1, 3])
def test_values_are_those_of_one_process(level: int) -> None:
    model = Model(1, level)
    bmt_zero.init_parameters(model)
    check(model, seed=3)


@pytest.mark.ranks(2, 4, tp_size=2, seed=3)
@pytest.mark.parametrize("level", [0, 2, 3])
def test_tensor_parallel_values_are_those_of_one_process(level: int) -> None:
    model = Model(2, level)
    bmt_zero.init_parameters(model)
    check(model, seed=3)


@pytest.mark.ranks(2)
def test_generators_go_on_where_they_were_those_of_rank_0(ctx: Any) -> None:
    for seeds in ((4, 4), (4, 9)):
        torch.manual_seed(seeds[ctx.rank])
        before = torch.get_rng_state()
        model = Model(1, 3)
        bmt_zero.init_parameters(model)
        if seeds[ctx.rank] == 4:
            check(model, seed=4)
        else:
            assert torch.equal(torch.get_rng_state(), before)
            model.state_dict()


@pytest.mark.ranks(2)
def test_a_seed_gives_equal_models_equal_values_and_changes_no_generator() -> None:
    before = torch.get_rng_state(), random.getstate()
    first, second, other = Model(1, 3), Model(1, 0), Model(1, 3)
    for model, seed in ((first, 8), (second, 8), (other, 9)):
        bmt_zero.init_parameters(model, seed=seed)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    states = [model.state_dict() for model in (first, second, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["single.weight"], states[2]["single.weight"])


@pytest.mark.ranks(2)
def test_initialized_blocks_are_left_alone() -> None:
    filled = bmt_zero.Block(Layer(), initialized=True)
    with torch.device("meta"):
        linear = nn.Linear(3, 5)
    empty = bmt_zero.Block(linear, initialized=True)
    bmt_zero.init_parameters(nn.ModuleList([filled, empty]))
    assert all(not v.any() for k, v in filled.state_dict().items() if k != "kept")
    assert all(not v.any() for v in empty.state_dict().values())


class Lists(nn.Module):
    """It has parameters and overwrites those of a submodule, as nn.MultiheadAttention does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 3))
        self.part = nn.Linear(3, 5)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        nn.init.constant_(self.part.bias, 7.0)


class Family(nn.Module):
    """Initialises as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        self.scale = nn.Parameter(torch.empty(5))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=100.0, std=0.1)
            module.bias.data.zero_()
        if module is self:
            module.scale.data.fill_(2.0)  # type: ignore[union-attr]


def linear() -> nn.Module:
    return nn.Linear(5, 7)


def norm() -> nn.Module:
    return nn.LayerNorm(7)


def embedding() -> nn.Module:
    return nn.Embedding(11, 3, padding_idx=2)


def attention() -> nn.Module:
    return nn.MultiheadAttention(6, 2)


def recurrent() -> nn.Module:
    return nn.GRU(3, 5)


def nested() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 2)))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("make", [linear, norm, embedding, attention, recurrent, nested, Lists, Family])
@pytest.mark.parametrize("block", [True, False])
def test_modules_built_on_meta_get_the_values_of_their_class(
    ctx: Any, make: Callable[[], nn.Module], block: bool
) -> None:
    with torch.device("meta"):
        module = make()
    if not block:
        module = nn.Sequential(module)
    model = bmt_zero.Block(module) if block else bmt_zero.BMTrainModelWrapper(module)
    torch.manual_seed(6)
    bmt_zero.init_parameters(model)
    state = {name if block else name[2:]: value for name, value in model.state_dict().items()}
    drawn = torch.rand(2)
    assert all(torch.equal(drawn, other) for other in ctx.world.all_gather_object(drawn))
    torch.manual_seed(6)
    wanted = make().state_dict()
    assert state.keys() == wanted.keys()
    for name, value in state.items():
        if make is Family:
            assert abs(value.mean() - {"weight": 100.0, "bias": 0.0, "scale": 2.0}[name.rpartition(".")[2]]) < 0.5
        else:  # with the same seed, the same values
            assert torch.equal(value.cpu(), wanted[name]), name
    if make is embedding:
        assert not state["weight"][2].any()


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.gamma = nn.Parameter(torch.empty(3))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("block", [True, False])
def test_nothing_to_fill_a_parameter_with(block: bool) -> None:
    with torch.device("meta"):
        inner = NoReset()
    model = bmt_zero.Block(inner) if block else bmt_zero.BMTrainModelWrapper(inner)
    with pytest.raises(ValueError, match=r"'gamma'.*NoReset"):
        bmt_zero.init_parameters(model)
    assert all(not v.any() for v in model.state_dict().values())
    state = {k: torch.ones(v.shape) for k, v in model.state_dict().items()}
    bmt_zero.load_state_dict(model, state)
    bmt_zero.init_parameters(model)  # all have values now
    assert all(v.all() for v in model.state_dict().values())


class FilledInPart(nn.Module):
    """Its ``reset_parameters`` leaves the last element of one tensor alone."""

    def __init__(self, left: str) -> None:
        super().__init__()
        self.left = left
        self.weight = nn.Parameter(torch.empty(4))
        self.register_buffer("table", torch.empty(4))
        self.register_buffer("phases", torch.empty(4, dtype=torch.complex64))
        self.register_buffer("positions", torch.empty(4, dtype=torch.long))

    def reset_parameters(self) -> None:
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            tensor[: 3 if name == self.left else 4] = 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("left", ["", "weight", "table", "phases", "positions"])
def test_what_is_filled_only_in_part_is_named(left: str) -> None:
    with torch.device("meta"):
        inner = FilledInPart(left)
    model = bmt_zero.BMTrainModelWrapper(nn.Sequential(inner, nn.Linear(3, 3)))
    if not left:
        bmt_zero.init_parameters(model)
        assert not any(tensor.any() for tensor in (model[0].weight, *model[0].buffers()))
        return
    with pytest.raises(ValueError, match=f"'{left}' .* is filled only in part"):
        bmt_zero.init_parameters(model)


class InitialisedByConstructor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        nn.init.zeros_(self.out.weight)


class LikeTimm(nn.Module):
    """Its constructor fills the same tensors as its ``_init_weights``, and then one of them differently."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        for module in self.modules():
            self._init_weights(module, needs_reset=False)
        nn.init.zeros_(self.norm.weight)

    def _init_weights(self, module: nn.Module, needs_reset: bool = True) -> None:
        if needs_reset and hasattr(module, "reset_parameters"):
            module.reset_parameters()
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)


@pytest.mark.ranks(2)
def test_what_a_constructor_writes_after_a_family_of_timm_is_named() -> None:
    with torch.device("meta"):
        inner = LikeTimm()
    model = bmt_zero.BMTrainModelWrapper(inner)
    with pytest.warns(UserWarning, match=r"gives 1 parameters the values .*: norm\.weight; write"):
        bmt_zero.init_parameters(model)
    assert bool((model.inner.weight == 1).all())


@pytest.mark.ranks(2)
def test_what_a_constructor_writes_after_reset_parameters_is_named() -> None:
    with torch.device("meta"):
        inner = nn.Sequential(InitialisedByConstructor(), nn.MultiheadAttention(4, 2), nn.LayerNorm(4))
    model = bmt_zero.BMTrainModelWrapper(inner)
    with pytest.warns(
        UserWarning, match="gives 1 parameters the values of reset_parameters, .*: 0.out.weight; write them"
    ):
        bmt_zero.init_parameters(model)


@pytest.mark.ranks(2)
def test_what_has_values_keeps_them() -> None:
    """A module with one parameter on meta: its reset_parameters writes both, and one is taken."""
    for tied in (False, True):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        weight = model[0].weight.detach().clone()
        model[0].bias = nn.Parameter(torch.empty(3, device="meta"))
        if tied:
            model[1].weight = model[0].weight
        bmt_zero.BMTrainModelWrapper(model)
        bmt_zero.init_parameters(model)
        assert torch.equal(model.state_dict()["0.weight"], weight)
        assert model.state_dict()["0.bias"].any()


@pytest.mark.ranks(1, 2)
def test_a_tied_parameter_is_that_of_the_first_module() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(5, 3, padding_idx=1), nn.Linear(3, 5))
        model[1].weight = model[0].weight
    bmt_zero.BMTrainModelWrapper(model)
    bmt_zero.init_parameters(model)
    weight = model.state_dict()["1.weight"]
    assert not weight[1].any()  # an Embedding's
    assert weight[0].all()
    assert model.state_dict()["1.bias"].all()


class HeadByTheModel(nn.Module):
    """The model fills its head, which is tied to the embedding, in a special way."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            module.weight.data.fill_(1.0)
        elif module is self:
            self.head.weight.data.fill_(2.0)
            self.head.bias.data.fill_(3.0)


@pytest.mark.ranks(1, 2)
def test_a_module_around_a_tied_head_does_not_fill_the_embedding() -> None:
    with torch.device("meta"):
        model = HeadByTheModel()
    bmt_zero.BMTrainModelWrapper(model)
    bmt_zero.init_parameters(model)
    state = model.state_dict()
    assert (state["embedding.weight"] == 1).all()
    assert (state["head.bias"] == 3).all()


class Heedless(Family):
    """A part of it is not built on the meta device, whatever the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].bias = nn.Parameter(torch.FloatTensor(3))


@pytest.mark.ranks(1, 2)
def test_parameters_that_do_not_heed_the_meta_device_are_named() -> None:
    with torch.device("meta"):
        model = Heedless()
    bmt_zero.BMTrainModelWrapper(model)
    with pytest.warns(UserWarning, match=r"leaves 1 parameters as they are, .*: layers\.1\.bias; if nothing"):
        bmt_zero.init_parameters(model)
    assert (model.state_dict()["layers.0.bias"] == 0).all()
    # Marked as transformers marks loaded parameters.
    with torch.device("meta"):
        model = Heedless()
    model.layers[1]._is_hf_initialized = True
    bmt_zero.init_parameters(bmt_zero.BMTrainModelWrapper(model))


@pytest.mark.ranks(2)
def test_one_parameter_at_a_time_is_unsharded() -> None:
    sizes: list[int] = []
    alive: list[Any] = []

    def fill(unsharded: Tensor) -> None:
        sizes.append(unsharded.numel())
        assert all(ref.expired() for ref in alive)
        alive.append(torch.multiprocessing.reductions.StorageWeakRef(unsharded.untyped_storage()))
        unsharded.fill_(1)

    parts = nn.ModuleList()
    for _ in range(4):
        part = bmt_zero.DistributedModule()
        part.weight = DistributedParameter(torch.empty(64, 64, device="meta"), init_method=fill)
        parts.append(part)
    model = bmt_zero.Block(parts)
    bmt_zero.init_parameters(model)
    assert sizes == [64 * 64] * 4
    assert all(v.all() for v in model.state_dict().values())


@pytest.mark.ranks(2)
def test_wrong_calls(ctx: Any) -> None:
    with pytest.raises(TypeError, match="list"):
        bmt_zero.init_parameters([])  # type: ignore[arg-type]
    model = bmt_zero.DistributedModule()
    model.register_parameter(f"weight{ctx.rank}", DistributedParameter(torch.zeros(3, 3), init_method=NORMAL))
    with pytest.raises(RuntimeError, match=r"weight0.*weight1"):
        bmt_zero.init_parameters(model)
