"""State dicts: plain names, unsharded tensors, and all or nothing on loading."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bmt_zero


class Layer(nn.Module):
    """Ragged sizes, a scalar, an odd buffer of each kind, a tied weight, and a nested list."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.norm = nn.LayerNorm(7)
        self.parts = nn.ModuleList([nn.Linear(7, 5), nn.Linear(5, 7, bias=False)])
        self.tied = nn.Linear(7, 5)
        self.tied.weight = self.parts[0].weight
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("cache", torch.randn(2, 3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.parts[0](self.norm(x)) + self.tied(x)
        return x + self.scale * self.parts[1](torch.relu(h))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.BatchNorm1d(7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


class Own(bmt_zero.DistributedModule):
    """A module that was written with sharded parameters, and a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt_zero.DistributedParameter(torch.randn(5, 3))
        self.scalar = bmt_zero.DistributedParameter(torch.randn(()))
        self.plain = nn.Linear(3, 2)
        self.inner = bmt_zero.Block(nn.Linear(3, 5))


def made(kind: str) -> nn.Module:
    torch.manual_seed(5)
    if kind == "block":
        return Layer()
    if kind == "list":
        return nn.ModuleList([Layer(), Layer()])
    return Model()


def sharded(kind: str) -> nn.Module:
    plain = made(kind)
    if kind == "block":
        return bmt_zero.Block(plain)
    if kind == "list":
        assert isinstance(plain, nn.ModuleList)
        return bmt_zero.TransformerBlockList(plain)
    if kind == "mixed":
        assert isinstance(plain, Model)
        plain.layers = bmt_zero.TransformerBlockList(plain.layers)  # type: ignore[assignment]
        return plain
    return bmt_zero.BMTrainModelWrapper(plain)


KINDS = pytest.mark.parametrize("kind", ["block", "list", "mixed", "wrapped"])


def same(result: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(result) == list(wanted)
    for name in wanted:
        assert result[name].dtype == wanted[name].dtype, name
        assert torch.equal(result[name], wanted[name]), name


@pytest.mark.ranks(1, 2, 3)
@KINDS
def test_state_dict_is_that_of_the_plain_model(kind: str) -> None:
    wanted = made(kind).state_dict()
    model = sharded(kind)
    state = model.state_dict()
    same(state, wanted)
    assert state._metadata.keys() == wanted._metadata.keys()
    assert all(v.is_contiguous() and v.untyped_storage().nbytes() == v.nbytes for v in state.values())
    made(kind).load_state_dict(state, strict=True)
    sharded_names = {n for n, p in model.named_parameters() if isinstance(p, bmt_zero.DistributedParameter)}
    for name in sharded_names:  # the entries are copies
        state[name].zero_()
    same(model.state_dict(), wanted)


@pytest.mark.ranks(1, 3)
@KINDS
@pytest.mark.parametrize("through", ["method", "function"])
def test_a_plain_state_dict_loads(kind: str, through: str) -> None:
    model = sharded(kind)
    before = [(id(p), p.requires_grad) for p in model.parameters()]
    wanted = OrderedDict((k, torch.randn(v.shape).to(v.dtype) * 3) for k, v in made(kind).state_dict().items())
    for a, b in (("embed", "head"), ("parts.0", "tied")):
        for name in wanted:
            if name.endswith(f"{a}.weight"):
                wanted[name.replace(a, b)] = wanted[name]
    given = OrderedDict((k, nn.Parameter(v) if v.is_floating_point() else v) for k, v in wanted.items())
    if through == "method":
        result = model.load_state_dict(given)
    else:
        result = bmt_zero.load_state_dict(model, given)
    assert result.missing_keys == result.unexpected_keys == []
    same(model.state_dict(), wanted)
    assert [(id(p), p.requires_grad) for p in model.parameters()] == before
    assert all(isinstance(v, Tensor) and (not isinstance(v, nn.Parameter) or v.requires_grad) for v in given.values())


@pytest.mark.ranks(2)
def test_values_loaded_are_the_values_computed_with() -> None:
    plain, model = made("wrapped"), sharded("wrapped")
    state = {k: v + 0.5 if v.is_floating_point() else v for k, v in plain.state_dict().items()}
    x = torch.arange(8) % 11
    model.eval(), plain.eval()
    with torch.no_grad():
        model(x)  # gathers the values before
    plain.load_state_dict(state)
    model.load_state_dict(state)
    torch.testing.assert_close(model(x), plain(x))


def remove(state: dict[str, Tensor], name: str) -> str:
    del state[name]
    return name


def add(state: dict[str, Tensor], name: str) -> str:
    state["surplus." + name] = state[name]
    return "surplus." + name


def misshape(state: dict[str, Tensor], name: str) -> str:
    state[name] = torch.zeros(2, 2, 2)
    return name


def transpose(state: dict[str, Tensor], name: str) -> str:
    state[name] = state[name].reshape(1, -1)
    return name


def spoil(state: dict[str, object], name: str) -> str:
    state[name] = "a string"
    return name


@pytest.mark.ranks(1, 2)
@KINDS
@pytest.mark.parametrize("damage", [remove, add, misshape, transpose, spoil])
def test_what_does_not_fit_changes_nothing(kind: str, damage: Callable[..., str]) -> None:
    model = sharded(kind)
    before = model.state_dict()
    loaders = [lambda s: bmt_zero.load_state_dict(model, s)]
    if kind == "list":
        loaders.append(model.load_state_dict)
    for load in loaders:
        for which in (0, -1):
            names = [n for n in before if before[n].dim() > 0]
            state = OrderedDict((k, v + 1) for k, v in before.items())
            name = damage(state, names[which])
            with pytest.raises(ValueError, match=name.replace(".", r"\.")):
                load(state)
            same(model.state_dict(), before)
    if kind == "block":  # torch's own method
        state = OrderedDict((k, v.clone()) for k, v in before.items())
        name = damage(state, next(n for n in before if before[n].dim() > 0))
        with pytest.raises(RuntimeError, match=name.replace(".", r"\.")):
            model.load_state_dict(state)
    x = torch.randn(4, 7) if kind in ("block", "list") else torch.arange(4)
    model(x).sum().backward()  # still works


@pytest.mark.ranks(2)
def test_lenient_loading_takes_what_is_there() -> None:
    model = sharded("wrapped")
    before = model.state_dict()
    name = "layers.1.norm.weight"
    result = bmt_zero.load_state_dict(model, {name: torch.full((7,), 9.0), "x": torch.zeros(1)}, strict=False)
    assert result.unexpected_keys == ["x"]
    missing = set(before) - {name, "norm.num_batches_tracked"}  # torch forgives the latter
    assert set(result.missing_keys) == missing
    same(model.state_dict(), {**before, name: torch.full((7,), 9.0)})


@pytest.mark.ranks(2)
def test_wrong_calls() -> None:
    model = sharded("block")
    with pytest.raises(ValueError, match="assign"):
        bmt_zero.load_state_dict(model, model.state_dict(), assign=True)
    with pytest.raises(TypeError, match="list"):
        bmt_zero.load_state_dict(model, [1, 2])  # type: ignore[arg-type]


@pytest.mark.ranks(1, 2)
def test_distributed_module_with_plain_parts() -> None:
    model = Own()
    state = model.state_dict()
    assert {k: tuple(v.shape) for k, v in state.items()} == {
        "weight": (5, 3), "scalar": (), "plain.weight": (2, 3), "plain.bias": (2,),
        "inner.weight": (5, 3), "inner.bias": (5,),
    }  # fmt: skip
    wanted = OrderedDict((k, v * 2 + 1) for k, v in state.items())
    model.load_state_dict(wanted)
    same(model.state_dict(), wanted)
    nn.Sequential(model).load_state_dict({f"0.{k}": v for k, v in state.items()})  # a plain parent
    same(model.state_dict(), state)
    with pytest.raises(ValueError, match="scalar"):
        model.load_state_dict({**wanted, "scalar": torch.zeros(2, 2)})  # older versions of torch take a vector's first
    same(model.state_dict(), state)


@pytest.mark.ranks(3)
def test_half_precision() -> None:
    model = sharded("wrapped").half()
    same(model.state_dict(), made("wrapped").half().state_dict())
    single = made("wrapped").state_dict()
    model.load_state_dict(single)
    assert model.layers[0].norm.weight.dtype == torch.half
    same(model.state_dict(), made("wrapped").half().state_dict())


@pytest.mark.ranks(2)
def test_a_copied_model_has_a_state_of_its_own() -> None:
    model = sharded("wrapped")
    before = model.state_dict()
    twin = copy.deepcopy(model)
    wanted = OrderedDict((k, v + 1) for k, v in before.items())
    bmt_zero.load_state_dict(twin, wanted)
    same(twin.state_dict(), wanted)
    same(model.state_dict(), before)


@pytest.mark.ranks(2)
def test_a_plain_parent_reports_shapes_by_name() -> None:
    model = nn.Sequential(bmt_zero.Block(nn.Linear(3, 5)))
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        model.load_state_dict({"0.weight": torch.zeros(3, 5), "0.bias": torch.zeros(5)})


class Custom(nn.Module):
    """Saves its weight doubled and transposed, loads it from an old name too, and counts."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))
        self.inner = nn.Linear(3, 4)
        self.in_place = in_place
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def _save_to_state_dict(self, destination, prefix, keep_vars):  # type: ignore[no-untyped-def]
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = 2 * self.weight.t().detach()

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        for name in (prefix + "weight", prefix + "old"):
            if name in state_dict:
                value = state_dict.pop(name).t() / 2
                state_dict[prefix + "weight"] = value
                if self.in_place and value.shape == self.weight.shape:
                    del state_dict[prefix + "weight"]
                    self.weight.data.copy_(value)
        super()._load_from_state_dict(state_dict, prefix, *args)
        missing = args[2]
        if self.in_place and prefix + "weight" in missing:
            missing.remove(prefix + "weight")

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + (x @ self.weight.t()).sum()


def in_place() -> nn.Module:
    return Custom(in_place=True)


def with_hooks() -> nn.Module:
    """Its child is saved as ``renamed.*`` and found again."""
    model = nn.Sequential(OrderedDict(child=nn.Linear(3, 5), last=nn.Linear(5, 2)))

    def rename(module, state, prefix, _metadata):  # type: ignore[no-untyped-def]
        for name in list(state):
            if name.startswith(prefix + "child."):
                state[name.replace("child", "renamed")] = state.pop(name) * 2

    def restore(state, prefix, *_):  # type: ignore[no-untyped-def]
        for name in list(state):
            if name.startswith(prefix + "renamed."):
                state[name.replace("renamed", "child")] = state.pop(name) / 2

    model._register_state_dict_hook(rename)
    model._register_load_state_dict_pre_hook(restore)
    return model


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("make", [Custom, in_place, with_hooks])
@pytest.mark.parametrize("how", ["block", "wrapped", "in a list"])
def test_the_code_of_modules_sees_unsharded_parameters(make: Callable[[], nn.Module], how: str) -> None:
    torch.manual_seed(3)
    plain, other = make(), make()
    torch.manual_seed(3)
    inner = make()
    if how == "block":
        model: nn.Module = bmt_zero.Block(inner)
    elif how == "wrapped":
        model = bmt_zero.BMTrainModelWrapper(inner)
    else:
        model = bmt_zero.TransformerBlockList([inner])
        plain, other = nn.ModuleList([plain]), nn.ModuleList([other])
    for module in other.modules():
        if isinstance(module, Custom):
            module.calls = 8
    same_entries(model.state_dict(), plain.state_dict())
    wanted = other.state_dict()
    with pytest.raises(ValueError, match="surplus"):
        bmt_zero.load_state_dict(model, {**wanted, "surplus": torch.zeros(1)})
    same_entries(model.state_dict(), plain.state_dict())
    bmt_zero.load_state_dict(model, wanted)
    same_entries(model.state_dict(), wanted)


def same_entries(entries: dict[str, object], wanted: dict[str, object]) -> None:
    assert list(entries) == list(wanted)
    for name, value in wanted.items():
        if isinstance(value, Tensor):
            assert torch.equal(entries[name], value), name  # type: ignore[arg-type]
        else:
            assert entries[name] == value


@pytest.mark.ranks(2)
def test_recurrent_weights_stay_their_own() -> None:
    torch.manual_seed(0)
    plain = nn.LSTM(3, 4)
    model = bmt_zero.Block(copy.deepcopy(plain))
    state = {k: v + 0.1 for k, v in plain.state_dict().items()}
    model.load_state_dict(state)
    plain.load_state_dict(state)
    x = torch.randn(5, 2, 3)
    torch.testing.assert_close(model(x)[0], plain(x)[0])
    same(model.state_dict(), plain.state_dict())
