"""State dicts and files of a PipelineTransformerBlockList: complete, and those of the plain layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from list_helpers import Held, Layer, assert_own_values, assert_same_entries, plain_layers
from torch import Tensor, nn

import bmt_zero
from bmt_comm import Communicator
from bmt_pipe import PipelineTransformerBlockList
from bmt_zero import Block, BMTrainModelWrapper, DistributedModule, DistributedParameter

COUNT = 5


class Model(nn.Module):
    """A list of layers between other modules, with a tied head."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 5)
        self.layers = layers
        self.head = nn.Linear(5, 9, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tensor([True, False]))


class Special(Layer):
    """Has state that is no tensor, and its own code saves one of its entries under another name."""

    def get_extra_state(self) -> Any:
        return {"steps": int(self.steps)}

    def set_extra_state(self, state: Any) -> None:
        self.steps.fill_(state["steps"])

    def _save_to_state_dict(self, destination, prefix, keep_vars):  # type: ignore[no-untyped-def]
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "double"] = destination.pop(prefix + "low").detach() * 2

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        if prefix + "double" in state_dict:
            state_dict[prefix + "low"] = state_dict.pop(prefix + "double") / 2
        super()._load_from_state_dict(state_dict, prefix, *args)


def plain_model(seed: int = 1, special: int | None = None, count: int = COUNT) -> Model:
    torch.manual_seed(seed)
    return Model(nn.ModuleList(Special() if index == special else Layer() for index in range(count)))


def staged_model(seed: int = 1, special: int | None = None, level: int = 3, **options: Any) -> Model:
    """The same model and values, in stages."""
    torch.manual_seed(seed)
    layers = (Special() if index == special else Layer() for index in range(COUNT))
    staged = PipelineTransformerBlockList((Block(layer, zero_level=level) for layer in layers), **options)
    return BMTrainModelWrapper(Model(staged))


def check_state_dicts(**options: Any) -> None:
    model = staged_model(**options)
    wanted = plain_model().state_dict()
    entries = model.state_dict()
    assert_same_entries(entries, wanted)
    assert dict(entries._metadata) == dict(wanted._metadata)
    assert entries["layers.4.a.weight"].data_ptr() == entries["layers.4.b.weight"].data_ptr()
    assert_same_entries(model.layers.state_dict(), plain_model().layers.state_dict())
    assert_same_entries(model.state_dict(prefix="m."), {f"m.{name}": value for name, value in wanted.items()})
    other = plain_model(2)
    identities = [id(p) for p in model.parameters()]
    result = bmt_zero.load_state_dict(model, other.state_dict())
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert_own_values(model.layers, other.layers)
    assert_same_entries(model.state_dict(), other.state_dict())
    assert [id(p) for p in model.parameters()] == identities
    third = plain_model(3)
    model.layers.load_state_dict(third.layers.state_dict())
    assert_same_entries(model.layers.state_dict(), third.layers.state_dict())
    nn.Module.load_state_dict(model, plain_model(4).state_dict())  # torch's own
    assert_same_entries(model.state_dict(), plain_model(4).state_dict())


@pytest.mark.ranks(1)
def test_state_dicts_of_one_stage(ctx: Any) -> None:
    check_state_dicts(interleave=2)


@pytest.mark.ranks(2, pipe_size=2)
def test_state_dicts_of_two_stages(ctx: Any) -> None:
    check_state_dicts(interleave=2, weights=[1, 1, 2, 2, 1])


@pytest.mark.ranks(3, pipe_size=3)
def test_state_dicts_of_three_stages(ctx: Any) -> None:
    check_state_dicts()


@pytest.mark.ranks(4, pipe_size=2)
@pytest.mark.parametrize("level", [0, 3])
def test_state_dicts_of_stages_of_several_ranks(ctx: Any, level: int) -> None:
    check_state_dicts(level=level)


@pytest.mark.ranks(4, pipe_size=4)
def test_state_dicts_of_four_stages(ctx: Any) -> None:
    check_state_dicts()


@pytest.mark.ranks(4, pipe_size=2)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_files_are_those_of_the_plain_model(ctx: Any, tmp_path: Path, suffix: str) -> None:
    """A file is the same for every layout, so every layout can read it."""
    path, theirs = tmp_path / f"ours{suffix}", tmp_path / f"theirs{suffix}"
    bmt_zero.save(staged_model(interleave=2), path)
    wanted = plain_model().state_dict()
    if suffix == ".pt":
        saved = torch.load(path, weights_only=True)
        assert_same_entries(saved, wanted)
        assert saved["layers.4.a.weight"].data_ptr() == saved["layers.4.b.weight"].data_ptr()
    else:
        from safetensors.torch import load_file, save_file

        saved = load_file(path)
        assert_same_entries({name: saved[name] for name in wanted}, wanted)
    plain_model(2).load_state_dict(saved, strict=True)
    other = plain_model(3)
    if ctx.rank == 0:
        state = {name: value.clone() for name, value in other.state_dict().items()}
        torch.save(state, theirs) if suffix == ".pt" else save_file(state, theirs)
    ctx.world.barrier()
    model = staged_model()
    bmt_zero.load(model, theirs)
    assert_same_entries(model.state_dict(), other.state_dict())
    assert_own_values(model.layers, other.layers)
    bmt_zero.load(model.layers, _layers_file(ctx, tmp_path / f"layers{suffix}"))
    assert_own_values(model.layers, plain_model(5).layers)


def _layers_file(ctx: Any, path: Path) -> Path:
    """A file of a list without stages, written by another layout of the same ranks."""
    torch.manual_seed(5)
    nn.Embedding(9, 5), nn.Linear(5, 9, bias=False)
    source = plain_model(5).layers
    bmt_zero.save(bmt_zero.TransformerBlockList(source), path)
    return path


class TensorParallel(DistributedModule):
    def __init__(self, ctx: Any) -> None:
        super().__init__()
        logical = torch.randn(4, 6)
        for dim in (0, 1):
            shard = logical.chunk(ctx.tp_size, dim)[ctx.tp_rank]
            self.register_parameter(f"w{dim}", DistributedParameter(shard, tp_mode=True, tp_split_dim=dim))
        self.common = DistributedParameter(logical[0])


@pytest.mark.ranks(4, pipe_size=2, tp_size=2)
@pytest.mark.parametrize("level", [0, 3])
def test_tensor_parallel_parameters_are_saved_as_logical_tensors(ctx: Any, tmp_path: Path, level: int) -> None:
    def build(seed: int) -> PipelineTransformerBlockList:
        torch.manual_seed(seed)
        return PipelineTransformerBlockList([Block(TensorParallel(ctx), zero_level=level) for _ in range(3)])

    def plain(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        logical = [torch.randn(4, 6) for _ in range(3)]
        return {f"{i}.{n}": w[0] if n == "common" else w for i, w in enumerate(logical) for n in ("w0", "w1", "common")}

    layers = build(1)
    assert_same_entries(layers.state_dict(), plain(1))
    layers.load_state_dict(plain(2))
    assert_same_entries(layers.state_dict(), plain(2))
    bmt_zero.save(layers, tmp_path / "m.pt")
    assert_same_entries(torch.load(tmp_path / "m.pt", weights_only=True), plain(2))
    other = build(3)
    bmt_zero.load(other, tmp_path / "m.pt")
    assert_same_entries(other.state_dict(), plain(2))


@pytest.mark.ranks(2, pipe_size=2)
def test_what_does_not_fit_any_layer_raises_alike_everywhere_and_changes_nothing(ctx: Any, tmp_path: Path) -> None:
    model = staged_model()
    before = model.state_dict()
    good = plain_model(2).state_dict()

    def without(*names: str) -> dict[str, Any]:
        return {name: value for name, value in good.items() if name not in names}

    cases: list[tuple[dict[str, Any], str]] = [
        (without("layers.0.scale"), "layers.0.scale"),
        (without("layers.4.scale"), "layers.4.scale"),
        (without("layers.3.low", "layers.0.low"), 'layers.0.low", "layers.3.low'),
        ({**good, "layers.4.a.bias": torch.zeros(6)}, "layers.4.a.bias"),
        ({**good, "layers.0.a.bias": torch.zeros(6)}, "layers.0.a.bias"),
        ({**good, "layers.1.extra": torch.zeros(6)}, "layers.1.extra"),
        ({**good, "layers.4.a.extra": torch.zeros(6)}, "layers.4.a.extra"),
        ({**good, "layers.5.scale": torch.zeros(6)}, "layers.5.scale"),
        ({**good, "layers.04.scale": torch.zeros(6)}, "layers.04.scale"),
        ({**good, "layers.x": torch.zeros(6)}, "layers.x"),
        ({**good, "extra": torch.zeros(6)}, "extra"),
        (without("embed.weight"), "embed.weight"),
    ]
    for number, (state, message) in enumerate(cases):
        with pytest.raises(ValueError, match=message) as raised:
            bmt_zero.load_state_dict(model, state)
        assert len(set(ctx.world.all_gather_object(str(raised.value)))) == 1
        with pytest.raises(RuntimeError, match=message) as torchs:
            nn.Module.load_state_dict(staged_model(), state)
        assert len(set(ctx.world.all_gather_object(str(torchs.value)))) == 1
        path = tmp_path / f"{number}.pt"
        if ctx.rank == 0:
            torch.save(state, path)
        ctx.world.barrier()
        with pytest.raises(ValueError, match=message.partition('"')[0]) as loaded:
            bmt_zero.load(model, path)
        assert len(set(ctx.world.all_gather_object(str(loaded.value)))) == 1
    assert_same_entries(model.state_dict(), before)
    lenient = {"layers.4.scale": torch.tensor(3.0), "layers.0.low": good["layers.0.low"], "layers.2.more": good["mask"]}
    result = bmt_zero.load_state_dict(model, lenient, strict=False)
    assert set(result.missing_keys) == set(good) - set(lenient)
    assert result.unexpected_keys == ["layers.2.more"]
    del lenient["layers.2.more"]
    assert_same_entries(model.state_dict(), {**before, **lenient})


@pytest.mark.ranks(2, pipe_size=2)
@pytest.mark.parametrize("special", [1, 4])
def test_a_layers_own_code_takes_part(ctx: Any, tmp_path: Path, special: int) -> None:
    """On whichever stage it is."""
    path = tmp_path / "m.pt"
    model = staged_model(1, special)
    wanted = plain_model(1, special).state_dict()
    assert f"layers.{special}.double" in wanted
    assert_same_entries(model.state_dict(), wanted)
    bmt_zero.save(model, path)
    assert_same_entries(torch.load(path, weights_only=True), wanted)
    other = staged_model(2, special)
    bmt_zero.load(other, path)
    assert_same_entries(other.state_dict(), wanted)
    bmt_zero.load_state_dict(other, plain_model(3, special).state_dict())
    assert_same_entries(other.state_dict(), plain_model(3, special).state_dict())
    del wanted[f"layers.{special}.double"]
    with pytest.raises(ValueError, match=f"layers.{special}.low"):
        bmt_zero.load_state_dict(other, wanted)


class Counting(Layer):
    def get_extra_state(self) -> Any:
        return {"steps": int(self.steps)}

    def set_extra_state(self, state: Any) -> None:
        self.scratch.fill_(state["steps"])


@pytest.mark.ranks(2, pipe_size=2)
def test_extra_state_and_shared_layers(ctx: Any, tmp_path: Path) -> None:
    def build(seed: int, kind: Any) -> Any:
        torch.manual_seed(seed)
        first, second = Counting(), Counting()
        return kind([first, first, second, second])

    layers, plain = build(1, PipelineTransformerBlockList), build(1, nn.ModuleList)
    assert_same_entries(layers.state_dict(), plain.state_dict())
    bmt_zero.save(layers, tmp_path / "m.pt")
    saved = torch.load(tmp_path / "m.pt", weights_only=True)
    assert_same_entries(saved, plain.state_dict())
    assert saved["2.a.weight"].data_ptr() == saved["3.b.weight"].data_ptr()
    other = build(2, PipelineTransformerBlockList)
    bmt_zero.load(other, tmp_path / "m.pt")
    assert_same_entries(other.state_dict(), plain.state_dict())
    own = next(other.children())
    assert int(own.scratch[0]) == int(own.steps)
    with pytest.raises(ValueError, match="tensors only"):
        bmt_zero.save(layers, tmp_path / "m.safetensors")


@pytest.mark.ranks(4, pipe_size=2)
def test_a_rank_holds_one_whole_parameter(ctx: Any, tmp_path: Path) -> None:
    layers = PipelineTransformerBlockList(nn.Linear(64, 64, bias=False) for _ in range(6))
    one = 64 * 64 * 4
    with Held() as saving:
        bmt_zero.save(layers, tmp_path / "m.pt")
    with Held() as loading:
        bmt_zero.load(layers, tmp_path / "m.pt")
    if ctx.rank != 0:
        assert one <= saving.most < 2 * one
        assert one <= loading.most < 2 * one
    else:
        assert one <= saving.most < 3 * one


@pytest.mark.ranks(2, pipe_size=2)
def test_saving_after_construction_sees_what_has_changed(ctx: Any) -> None:
    model = staged_model()
    model.to(torch.float64)
    wanted = plain_model().to(torch.float64).state_dict()
    assert_same_entries(model.state_dict(), wanted)
    alone = Communicator(None, ctx.device)
    hybrid = PipelineTransformerBlockList([Block(Layer(), shard_comm=ctx.zero, replicate_comm=alone) for _ in range(2)])
    hybrid.load_state_dict(plain_layers(2).state_dict())
    assert_own_values(hybrid, plain_layers(2))
