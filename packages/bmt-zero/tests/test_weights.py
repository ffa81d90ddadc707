"""Weights from files of other formats, the conversion between them, and what damaged files do."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from saving_helpers import Doubling, sign
from torch import Tensor, nn

import bmt_zero
from bmt_comm.testing import MemoryGrowth
from bmt_zero import Checkpointer, DamagedError
from bmt_zero.checkpoints.manifest import parse_manifest, read_manifest
from bmt_zero.checkpoints.pretrained import open_source
from bmt_zero.checkpoints.pt_files import read_state_dict
from bmt_zero.checkpoints.tools import convert, describe, find_checkpoints, verify
from bmt_zero.checkpoints.trainer_state import random_state, small_safetensors
from bmt_zero.checkpoints.trees import decode, encode


class Model(nn.Module):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.scale = nn.Parameter(torch.randn(()))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(3))


def plain(seed: int = 1, width: int = 7) -> Model:
    torch.manual_seed(seed)
    return Model(width)


def same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that two state dicts have equal tensors, in any order."""
    assert actual.keys() == expected.keys()
    for name in expected:
        assert actual[name].dtype == expected[name].dtype, name
        assert torch.equal(actual[name], expected[name]), name


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of ``plain(1)`` in every form."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    root = tmp_path_factory.mktemp("files")
    state = {name: value.clone() for name, value in plain().state_dict().items()}
    save_file(state, root / "one.safetensors")
    torch.save(plain().state_dict(), root / "one.pt")
    for name, number in (("single", 1), ("several", 3)):
        (root / name).mkdir()
        names = sorted(state)
        del names[names.index("head.weight")]  # as Hugging Face writes tied weights
        groups = [names[n::number] for n in range(number)]
        if number == 1:
            save_file({n: state[n] for n in names}, root / name / "model.safetensors")
            continue
        weight_map = {}
        for n, group in enumerate(groups, 1):
            file = f"model-{n:05}-of-{number:05}.safetensors"
            save_file({n: state[n] for n in group}, root / name / file)
            weight_map.update(dict.fromkeys(group, file))
        (root / name / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpointer = Checkpointer(root / "checkpoints")
    checkpointer.save(3, model=plain())
    checkpointer.close()
    return str(root)


FORMS = ["one.safetensors", "one.pt", "single", "several", "checkpoints/step-00000003"]


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_every_form_loads_into_shards(files: str, form: str, place: str) -> None:
    torch.manual_seed(2)
    with torch.device(place):
        inner = Model()
    model = bmt_zero.BMTrainModelWrapper(inner)
    bmt_zero.load(model, Path(files) / form, key_map=lambda name: name)
    same(model.state_dict(), plain().state_dict())
    assert model.head.weight is model.embed.weight


@pytest.mark.ranks(2)
def test_a_plain_model_on_the_meta_device_gets_memory(files: str) -> None:
    with torch.device("meta"):
        model = Model()
    bmt_zero.load(model, Path(files) / "several")
    same(model.state_dict(), plain().state_dict())
    assert model.head.weight is model.embed.weight
    assert isinstance(model.scale, nn.Parameter)


@pytest.mark.ranks(2)
def test_names_may_differ(files: str) -> None:
    wrapped = nn.ModuleDict({"model": bmt_zero.BMTrainModelWrapper(plain(2))})
    bmt_zero.load(wrapped, Path(files) / "one.safetensors", key_map=lambda name: f"model.{name}")
    same(wrapped["model"].state_dict(), plain().state_dict())
    model = bmt_zero.BMTrainModelWrapper(plain(2))
    with pytest.raises(ValueError, match=r"lacks .*'layers.0.weight', 'layers.0.bias'"):
        bmt_zero.load(model, Path(files) / "one.safetensors", key_map={"embed.weight": "embed.weight"})
    same(model.state_dict(), plain(2).state_dict())
    bmt_zero.load(model, Path(files) / "one.safetensors", strict=False, key_map={"embed.weight": "embed.weight"})
    same(
        model.state_dict(),
        {**plain(2).state_dict(), **{n: plain().embed.weight for n in ("embed.weight", "head.weight")}},
    )
    with pytest.raises(ValueError, match=r"key_map gives '.*' and '.*' the same name 'x'"):
        bmt_zero.load(model, Path(files) / "one.safetensors", key_map=lambda name: "x")


class Packed(nn.Module):
    """Five experts in two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(5, 2 * 3, 4))
        self.down_proj = nn.Parameter(torch.randn(5, 4, 3))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
@pytest.mark.parametrize("place", ["directory", "file"])
def test_experts_that_a_file_has_one_by_one(ctx: Any, tmp_path: Path, names: tuple[str, str, str], place: str) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(0)
    wanted, bias = Packed(), torch.randn(4)
    gate, up, down = names
    parts = {}
    for number in range(5):
        for name, rows in ((gate, slice(3)), (up, slice(3, 6))):
            parts[f"experts.{number}.{name}.weight"] = wanted.gate_up_proj.data[number, rows].clone()
        parts[f"experts.{number}.{down}.weight"] = wanted.down_proj.data[number].clone()
    path = tmp_path / "model" / "model.safetensors"
    if ctx.rank == 0:
        path.parent.mkdir()
        save_file({**parts, "norm.bias": bias}, path)
        save_file({**parts, "norm.bias": bias, "experts.7.w9.weight": bias + 1}, tmp_path / "more.safetensors")
        odd = {name: part[:-1].clone() if ".3." in name else part for name, part in parts.items()}
        save_file({**odd, "norm.bias": bias}, tmp_path / "odd.safetensors")
    ctx.world.barrier()

    def build() -> nn.Module:
        model = nn.ModuleDict({"experts": Packed(), "norm": nn.LayerNorm(4)})
        model["norm"].weight = None
        return bmt_zero.BMTrainModelWrapper(model)

    model = build()
    bmt_zero.load(model, path.parent) if place == "directory" else bmt_zero.load(model, path, key_map=lambda name: name)
    loaded = model.state_dict()
    for name, param in wanted.named_parameters():
        assert torch.equal(loaded[f"experts.{name}"], param.detach())
    assert torch.equal(loaded["norm.bias"], bias)
    with pytest.raises(ValueError, match=r"experts\.7\.w9\.weight"):
        bmt_zero.load(build(), tmp_path / "more.safetensors", key_map=lambda name: name)
    with pytest.raises(ValueError, match=r"does not fit the model.*experts\.(gate_up|down)_proj"):
        bmt_zero.load(build(), tmp_path / "odd.safetensors", key_map=lambda name: name)


@pytest.mark.ranks(2)
def test_wrong_shapes_and_dtypes_change_nothing(ctx: Any, tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    state = {name: value.clone() for name, value in plain().state_dict().items()}
    for name, value, message in [
        ("scale", torch.zeros(1), r"'scale' has shape \(1,\) in .*, and \(\) here"),
        ("scale", torch.zeros((), dtype=torch.complex64), "'scale' has dtype C64 in .*, and F32 here"),
        ("scale", torch.zeros((), dtype=torch.int64), "'scale' has dtype I64 in .*, and F32 here"),
        ("steps", torch.zeros(()), "'steps' has dtype F32 in .*, and I64 here"),
        ("extra", torch.zeros(3), "has 'extra', which is not wanted"),
    ]:
        folder = tmp_path / name
        if ctx.rank == 0:
            folder.mkdir(exist_ok=True)
            save_file({**state, name: value}, folder / "model.safetensors")
        ctx.world.barrier()
        model = bmt_zero.BMTrainModelWrapper(plain(2))
        with pytest.raises(ValueError, match=message):
            bmt_zero.load(model, folder)
        same(model.state_dict(), plain(2).state_dict())
        ctx.world.barrier()


@pytest.mark.ranks(2)
def test_floating_point_numbers_are_converted_but_never_to_infinity(ctx: Any, tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    weight = torch.randn(9, 5, dtype=torch.float64)
    for name, value in (("fine", weight), ("large", weight.clone().fill_(1e300))):
        if ctx.rank == 0:
            (tmp_path / name).mkdir()
            save_file({"weight": value}, tmp_path / name / "model.safetensors")
    weight = ctx.world.broadcast_object(weight)
    ctx.world.barrier()
    model = bmt_zero.BMTrainModelWrapper(nn.Linear(5, 9, bias=False).bfloat16())
    bmt_zero.load(model, tmp_path / "fine")
    assert torch.equal(model.state_dict()["weight"], weight.bfloat16())
    with pytest.raises(ValueError, match=r"'weight' has numbers of torch.float64 that are infinite in torch.bfloat16"):
        bmt_zero.load(model, tmp_path / "large")


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("own_code", [False, True])
def test_numbers_that_are_too_large_change_nothing(ctx: Any, tmp_path: Path, own_code: bool) -> None:
    """They are in the last tensor, in a row of the last rank."""
    save_file = pytest.importorskip("safetensors.torch").save_file

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        layers = [Doubling(3, 5)] if own_code else [nn.Linear(3, 5)]
        return nn.Sequential(*layers, nn.Linear(5, 7))

    large = make(1).double()
    large[1].weight.data[-1, -1] = 1e300
    if ctx.rank == 0:
        (tmp_path / "folder").mkdir()
        for name in ("m.safetensors", "folder/model.safetensors"):
            save_file(large.state_dict(), tmp_path / name)
        torch.save(large.state_dict(), tmp_path / "m.pt")
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=bmt_zero.BMTrainModelWrapper(large))
    checkpointer.wait()
    ctx.world.barrier()
    model = bmt_zero.BMTrainModelWrapper(make(2))
    calls = [lambda name=name: bmt_zero.load(model, tmp_path / name) for name in ("m.safetensors", "m.pt", "folder")]
    for call in (*calls, lambda: checkpointer.load(1, model=model), lambda: checkpointer.load_latest(model=model)):
        with pytest.raises(
            ValueError, match=r"'1.weight' has numbers of torch.float64 that are infinite in torch.float32"
        ):
            call()
        same(model.state_dict(), make(2).state_dict())


@pytest.mark.ranks(1, 2)
def test_the_modules_own_code_takes_part(ctx: Any, tmp_path: Path) -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(Doubling(3, 5), nn.Linear(5, 2))

    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=bmt_zero.BMTrainModelWrapper(make(0)))
    model = bmt_zero.BMTrainModelWrapper(make(1))
    checkpointer.load(1, model=model)
    same(model.state_dict(), make(0).state_dict())
    same(dict(open_tensors(tmp_path / "c" / "step-00000001")), make(0).state_dict())
    model = bmt_zero.BMTrainModelWrapper(make(1))
    bmt_zero.load(model, tmp_path / "c" / "step-00000001")
    same(model.state_dict(), make(0).state_dict())


class WeightNormed(nn.Module):
    """Torch's own code gives the entries of the older weight norm their new names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
        self.embed, self.head = nn.Embedding(5, 6), nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("form", ["one.safetensors", "safetensors", "bin", "several"])
def test_entries_that_the_modules_own_code_renames_are_loaded(ctx: Any, tmp_path: Path, form: str) -> None:
    torch.manual_seed(0)
    plain = WeightNormed()
    old = {"original0": "weight_g", "original1": "weight_v"}
    state = {
        name.replace(f"parametrizations.weight.{name[-9:]}", old.get(name[-9:], "")): value.clone()
        for name, value in plain.state_dict().items()
    }
    assert {"first.weight_g", "first.weight_v"} < state.keys()
    folder = tmp_path / "model"
    if ctx.rank == 0:
        save_file = pytest.importorskip("safetensors.torch").save_file
        save_file(state, tmp_path / "one.safetensors")
        folder.mkdir()
        del state["head.weight"]  # as Hugging Face writes tied weights
        if form == "safetensors":
            save_file(state, folder / "model.safetensors")
        elif form == "bin":
            torch.save(state, folder / "pytorch_model.bin")
        else:
            weight_map = {name: f"pytorch_model-{n % 2}.bin" for n, name in enumerate(state)}
            for file in sorted(set(weight_map.values())):
                torch.save({name: value for name, value in state.items() if weight_map[name] == file}, folder / file)
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    ctx.world.barrier()
    torch.manual_seed(1)
    model = bmt_zero.BMTrainModelWrapper(WeightNormed())
    bmt_zero.load(model, tmp_path / form if form == "one.safetensors" else folder)
    same(model.state_dict(), plain.state_dict())


def test_files_of_a_directory_that_have_the_same_name_in_them_are_refused(tmp_path: Path) -> None:
    for n in range(2):
        torch.save({"weight": torch.ones(2), f"b{n}": torch.ones(1)}, tmp_path / f"pytorch_model-{n}.bin")
    weight_map = {"b0": "pytorch_model-0.bin", "b1": "pytorch_model-1.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(DamagedError, match="has 'weight', and so has another file"):
        open_source(tmp_path)


class WithState(nn.Linear):
    """Keeps something by get_extra_state."""

    def __init__(self, state: Any) -> None:
        super().__init__(3, 5)
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.ranks(2)
@pytest.mark.parametrize("own_code", [False, True])
def test_extra_state_is_kept(ctx: Any, tmp_path: Path, own_code: bool) -> None:
    def make(first: Any, second: Any) -> nn.Module:
        torch.manual_seed(0)
        layers = [WithState(first), nn.Sequential(WithState(second))]
        return bmt_zero.BMTrainModelWrapper(nn.Sequential(*layers, *([Doubling(5, 2)] if own_code else [])))

    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=make({"steps": 4}, torch.arange(3.0)))
    model = make(None, torch.zeros(7))
    checkpointer.load(1, model=model)
    assert model[0].state == {"steps": 4}
    assert torch.equal(model[1][0].state, torch.arange(3.0))
    checkpointer.save(2, model=bmt_zero.BMTrainModelWrapper(nn.Sequential(nn.Linear(3, 5))))
    with pytest.raises(ValueError, match=r"lacks \['0._extra_state'\], which the model has"):
        checkpointer.load(2, model=bmt_zero.BMTrainModelWrapper(nn.Sequential(WithState(1))))


@pytest.mark.ranks(1)
def test_extra_state_is_converted(ctx: Any, tmp_path: Path) -> None:
    def make(*states: Any) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[WithState(state) for state in states])

    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=make({"steps": 4}, torch.arange(3.0)))
    checkpointer.close()
    source = tmp_path / "c" / "step-00000001"
    for target, origin in (("x.pt", source), ("x", source), ("y", tmp_path / "x.pt"), ("y.pt", tmp_path / "x")):
        convert(origin, tmp_path / target)
        model = make(None, None)
        bmt_zero.load(model, tmp_path / target)
        assert model[0].state == {"steps": 4}
        assert torch.equal(model[1].state, torch.arange(3.0))
    converted = torch.load(tmp_path / "y.pt", weights_only=True)
    model = make(None, None)
    model.load_state_dict(converted)
    assert model[0].state == {"steps": 4}
    with pytest.raises(ValueError, match=r"'0._extra_state' is no tensor, and safetensors holds tensors only; use .pt"):
        convert(source, tmp_path / "x.safetensors")


def open_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors at a path."""
    from bmt_zero.checkpoints.reader import read_unsharded

    source = open_source(path)
    try:
        return read_unsharded(source)
    finally:
        source.close()


# --- conversion -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_any_form_converts_into_any_other(files: str, form: str, tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    source = Path(files) / form
    wanted = open_tensors(source)
    convert(source, tmp_path / "x.safetensors")
    same(load_file(tmp_path / "x.safetensors"), wanted)
    convert(source, tmp_path / "x.pt")
    same(torch.load(tmp_path / "x.pt", weights_only=True), wanted)
    same(read_state_dict(tmp_path / "x.pt"), wanted)
    convert(source, tmp_path / "x", max_file_size=500)
    assert len(list((tmp_path / "x").glob("model-*.safetensors"))) > 2
    same(open_tensors(tmp_path / "x"), wanted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "x.pt", "x.safetensors"]
    with pytest.raises(FileExistsError, match=r"x.pt exists already"):
        convert(source, tmp_path / "x.pt")
    with pytest.raises(FileNotFoundError, match="there is no directory"):
        convert(source, tmp_path / "no" / "x.pt")
    with pytest.raises(FileNotFoundError):
        convert(tmp_path / "nothing", tmp_path / "y.pt")


@pytest.mark.ranks(2, pipe_size=2)
def test_a_converted_checkpoint_of_a_pipeline_has_nothing_of_its_optimizers(ctx: Any, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=plain())
    checkpointer.close()
    if ctx.rank == 0:
        assert list((tmp_path / "c" / "step-00000001").glob("trainer-stage-*.json"))
        convert(tmp_path / "c" / "step-00000001", tmp_path / "x")
        names = sorted(path.name for path in (tmp_path / "x").iterdir())
        assert names == ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]


def test_conversion_takes_little_memory_and_says_how_far_it_is(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, model=nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(3)]))
    checkpointer.close()
    del checkpointer
    size, source = 3 * 4096 * 4096 * 4, tmp_path / "c" / "step-00000001"
    for name in ("x.pt", "x.safetensors", "x", "y.pt"):
        seen: list[tuple[int, int]] = []
        with MemoryGrowth() as memory:
            convert(source, tmp_path / name, report=lambda done, total, seen=seen: seen.append((done, total)))
        assert memory.peak < 64 << 20 < size
        assert [done for done, _ in seen] == sorted({done for done, _ in seen})
        assert seen[-1] == (size, size)
        source = tmp_path / name  # the next one is made of this one
    same(open_tensors(tmp_path / "y.pt"), open_tensors(tmp_path / "x"))


def test_checkpoints_are_found_described_and_verified(files: str, tmp_path: Path) -> None:
    (path,) = find_checkpoints(Path(files) / "checkpoints")
    assert find_checkpoints(path) == [path]
    facts = describe(path)
    assert (facts["step"], facts["is_finite"], facts["problem"], facts["layout"]) == (3, True, None, {"ranks": 1})
    seen: list[tuple[int, int]] = []
    verify(path, lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == facts["bytes"]
    with pytest.raises(FileNotFoundError, match="is no checkpoint, and holds none"):
        find_checkpoints(tmp_path)


# --- damaged files --------------------------------------------------------------------------------


def test_a_file_that_was_written_without_checksums(tmp_path: Path) -> None:
    wanted = plain().state_dict()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(wanted, tmp_path / "m.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert {info.CRC for info in zipfile.ZipFile(tmp_path / "m.pt").infolist()} == {0}
    same(read_state_dict(tmp_path / "m.pt"), wanted)


def test_a_flipped_bit_in_a_torch_file_is_noticed(tmp_path: Path) -> None:
    """torch.load of a mapped file reads most of these without an error."""
    path = tmp_path / "m.pt"
    torch.save(plain(width=40).state_dict(), path)
    content = path.read_bytes()
    generator = random.Random(0)
    silent = unnoticed = 0
    wanted = torch.load(path, weights_only=True)
    for _ in range(200):
        bit = generator.randrange(len(content) * 8)
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            torch.load(path, weights_only=True, mmap=True)
            silent += 1
        except Exception:
            pass
        try:
            state = read_state_dict(path)
        except DamagedError:
            continue
        # Bytes that no checksum covers have no effect: padding, dates.
        unnoticed += any(not torch.equal(state[n], wanted[n]) for n in wanted) or state.keys() != wanted.keys()
    assert silent > 20
    assert unnoticed == 0


def test_a_torch_file_that_was_packed_anew_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(plain(width=40).state_dict(), buffer)
    for kind, message in (
        (zipfile.ZIP_DEFLATED, "is compressed, which torch.save never does"),
        (zipfile.ZIP_STORED, ""),
    ):
        with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(tmp_path / "m.pt", "w", kind) as target:
            for info in source.infolist():
                target.writestr(info.filename, source.read(info))
        if message:
            with pytest.raises(DamagedError, match=message):
                read_state_dict(tmp_path / "m.pt")


@pytest.mark.ranks(2)
def test_a_small_file_does_not_claim_memory(ctx: Any, tmp_path: Path) -> None:
    """A tensor that repeats one element: a few bytes in the file, gigabytes as a contiguous tensor."""
    path = tmp_path / "m.pt"
    if ctx.rank == 0:
        torch.save({"0.weight": torch.zeros(1).expand(1 << 33), "0.bias": torch.zeros(5)}, path)
        assert path.stat().st_size < 2000
    ctx.world.barrier()
    for model in (nn.Sequential(Doubling(3, 5)), nn.Sequential(nn.Linear(3, 5))):
        with pytest.raises(ValueError, match="it is a view that repeats its elements"):
            bmt_zero.load(bmt_zero.BMTrainModelWrapper(model), path)


def pack(path: Path, described: bytes) -> None:
    """A torch file with another pickle in it."""
    buffer = io.BytesIO()
    torch.save({"x": 1}, buffer)
    with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(path, "w") as target:
        for info in source.infolist():
            content = described if info.filename.endswith("data.pkl") else source.read(info)
            target.writestr(info.filename, content)


def many_times(value: bytes) -> bytes:
    """A tuple that holds a value 2^200 times: operations of a pickle, without its end."""
    content = value
    for n in range(200):
        content += b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86"
    return content


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (b"}" + many_times(b"K\1") + b"K\1s.", "a key that is no plain value"),
        (b"}(" + many_times(b"K\1") + b"K\1X\1\0\0\0aK\2u.", "a key that is no plain value"),
        (b"ccollections\nOrderedDict\n]" + many_times(b"K\1") + b"K\1\x86a\x85R.", "a key that is no plain value"),
        (b"c__builtin__\nset\n]" + many_times(b"K\1") + b"a\x85R.", "a key that is no plain value"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n(" + many_times(b"K\1") + b"K\0))\x89NtR.", "without a storage"),
        (b"c_codecs\nencode\nX\1\0\0\0a" + many_times(b"K\1") + b"\x86R.", "an unknown encoding"),
        (many_times(b"K\1") + b".", "holds a tuple, not a state dict"),
        (b"(" * 1_000_000 + b".", "is damaged"),
        (b"}X\1\0\0\0a]" + b"\x85" * 1_000_000 + b"s.", "recursion"),
        (b"X\xff\xff\xff\xffabc.", "it is truncated"),
        (b"r\xff\xff\xff\xff.", "is damaged"),
        (b"cos\nsystem\nX\4\0\0\0exit\x85R.", "its loading would run code: os.system"),
    ],
)
def test_a_pickle_that_would_take_for_ever_is_refused(tmp_path: Path, described: bytes, message: str) -> None:
    pack(tmp_path / "m.pt", b"\x80\2" + described)
    with pytest.raises(DamagedError, match=message):
        read_state_dict(tmp_path / "m.pt")


def test_a_value_that_holds_itself_many_times_is_one_object(tmp_path: Path) -> None:
    pack(tmp_path / "m.pt", b"\x80\2}X\1\0\0\0a" + many_times(b"K\1") + b"s.")
    value = read_state_dict(tmp_path / "m.pt")["a"]
    assert value[0] is value[1]


@pytest.mark.long
@pytest.mark.ranks(2)
def test_a_file_of_very_many_tensors_loads(ctx: Any, tmp_path: Path) -> None:
    """The time of torch.load grows with the square of their number."""
    count = 80_000
    if ctx.rank == 0:
        torch.save({f"layers.{n}.weight": torch.tensor([n]) for n in range(count)}, tmp_path / "m.pt")
    ctx.world.barrier()
    with pytest.raises(ValueError, match=r"entries the model does not have: .* and 79995 more"):
        bmt_zero.load(nn.Identity(), tmp_path / "m.pt")


def odd_state() -> dict[str, Any]:
    """Values that torch.save writes in other ways than an ordinary weight."""
    return {
        "transposed": torch.randn(6, 5).t()[1:],
        "parameter": nn.Parameter(torch.randn(2)),
        "scalar": torch.tensor(3, dtype=torch.int8),
        "empty": torch.empty(0, 3),
        "uint16": torch.arange(5).to(torch.uint16),
        "float8": torch.randn(4).to(torch.float8_e4m3fn),
        "complex": torch.randn(3, dtype=torch.complex128),
        "other": {"a": (1, 2.5, None, True, b"x\xff", {1, 2}), 3: [torch.arange(2)], "big": 1 << 70, **COLLECTIONS},
    }


COLLECTIONS: dict[str, Any] = {
    "OrderedDict": OrderedDict([(3, "b"), ("a", 1)]),
    "Counter": Counter("abracadabra"),
    "Size": torch.Size([3, 1]),
    "device": torch.device("cuda", 1),
    "bytearray": bytearray(b"\0x\xff"),
    "keys": {torch.Size([2]): 1, torch.device("cpu"): 2},
}


@pytest.mark.parametrize("legacy", [False, True])
def test_all_that_torch_writes_is_read(tmp_path: Path, legacy: bool) -> None:
    state = odd_state()
    state["tied"] = state["transposed"]
    torch.save(state, tmp_path / "m.pt", _use_new_zipfile_serialization=not legacy)
    check_odd(read_state_dict(tmp_path / "m.pt"), state)


def check_odd(actual: dict[str, Any], state: dict[str, Any]) -> None:
    assert list(actual) == list(state)
    for name, value in state.items():
        if isinstance(value, Tensor):
            assert (actual[name].dtype, actual[name].shape) == (value.dtype, value.shape), name
            assert actual[name].tolist() == value.tolist(), name
    assert actual["other"]["a"] == state["other"]["a"]
    assert actual["other"][3][0].tolist() == [0, 1]
    assert actual["other"]["big"] == 1 << 70
    for name, value in COLLECTIONS.items():
        assert (type(actual["other"][name]), actual["other"][name]) == (type(value), value)


class Odd(nn.Module):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + name: value for name, value in self.state.items()})


@pytest.mark.ranks(1, 2)
def test_all_that_a_state_dict_may_have_is_saved(ctx: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Odd()
    model.state = odd_state()
    bmt_zero.save(model, tmp_path / "m.pt")
    for state in (torch.load(tmp_path / "m.pt", weights_only=True, mmap=True), read_state_dict(tmp_path / "m.pt")):
        check_odd(state, model.state)
    with zipfile.ZipFile(tmp_path / "m.pt") as archive:
        assert archive.testzip() is None


BYTE_FLOATS = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("file", ["m.safetensors", "m.pt"])
def test_floats_of_a_byte(ctx: Any, tmp_path: Path, file: str) -> None:
    dtypes = [getattr(torch, name) for name in BYTE_FLOATS if hasattr(torch, name)]  # the last is of torch 2.7

    def made(first: int) -> nn.Module:
        model = nn.Linear(3, 2)
        for number, dtype in enumerate(dtypes):
            model.register_buffer(f"scale{number}", (torch.arange(7, dtype=torch.uint8) + first).view(dtype))
        return bmt_zero.BMTrainModelWrapper(model)

    model = made(1)
    bmt_zero.save(model, tmp_path / file)
    bmt_zero.load(other := made(20), tmp_path / file)
    for loaded, wanted in zip(other.buffers(), model.buffers(), strict=True):
        assert loaded.dtype == wanted.dtype
        assert torch.equal(loaded.view(torch.uint8), wanted.view(torch.uint8))


class Unknown:
    """An object that only unpickling can restore."""


@pytest.mark.ranks(2)
def test_what_only_unpickling_reads_again_is_saved_with_a_warning(ctx: Any, tmp_path: Path) -> None:
    model = nn.Sequential(WithState({"a": Unknown()}))
    with pytest.warns(UserWarning, match=r"only torch.load.*Unknown") if ctx.rank == 0 else contextlib.nullcontext():
        bmt_zero.save(model, tmp_path / "m.pt")
    assert "a" in torch.load(tmp_path / "m.pt", weights_only=False)["0._extra_state"]


@pytest.mark.ranks(1)
def test_files_of_many_gigabytes_have_the_long_form(ctx: Any, tmp_path: Path) -> None:
    """Records of more than 100 bytes are treated as too long for the short form of a zip archive."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zipfile, "ZIP64_LIMIT", 100)
        bmt_zero.save(plain(width=40), tmp_path / "m.pt")
    wanted = plain(width=40).state_dict()
    saved = torch.load(tmp_path / "m.pt", weights_only=True, mmap=True)
    same(saved, wanted)
    addresses = {value.data_ptr() % 64 for value in saved.values()}
    assert len(addresses) == 1  # aligned alike in the file
    same(read_state_dict(tmp_path / "m.pt"), wanted)
    with zipfile.ZipFile(tmp_path / "m.pt") as archive:
        assert max(info.header_offset for info in archive.infolist()) > 1000
        assert archive.testzip() is None


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.ranks(1, timeout=900)
def test_mutated_torch_files_are_refused_clearly(ctx: Any, tmp_path: Path, seed: int, legacy: bool) -> None:
    """The session ``checkpoint_faults`` of nox takes more rounds."""
    path, generator = tmp_path / "m.pt", random.Random(seed)
    wanted = plain().state_dict()
    torch.save(wanted, path, _use_new_zipfile_serialization=not legacy)
    content = path.read_bytes()
    rounds = int(os.environ.get("BMT_MUTATIONS", "300"))
    refused = 0
    for _ in range(rounds):
        path.write_bytes(mutated(content, generator))
        model = plain(2)
        try:
            bmt_zero.load(model, path)
        except (ValueError, FileNotFoundError):
            refused += 1
            continue
        if not legacy:  # which has no checksums
            same(model.state_dict(), wanted)
    assert refused > rounds * 0.4


@pytest.mark.parametrize("seed", [0, 1])
def test_mutated_pickles_are_refused_clearly(tmp_path: Path, seed: int) -> None:
    """The checksums are right, so that only the reader of pickles can reject them."""
    torch.save({**odd_state(), **plain().state_dict()}, tmp_path / "complete.pt")
    with zipfile.ZipFile(tmp_path / "complete.pt") as archive:
        described = archive.read("complete/data.pkl")
    generator = random.Random(seed)
    for _ in range(int(os.environ.get("BMT_MUTATIONS", "300"))):
        pack(tmp_path / "m.pt", mutated(described, generator))
        with contextlib.suppress(DamagedError):
            read_state_dict(tmp_path / "m.pt")


def mutated(content: bytes, generator: random.Random) -> bytes:
    """Content with a few changes, as by a faulty disk or by an attacker."""
    changed = bytearray(content)
    for _ in range(generator.choice([1, 1, 1, 3, 10])):
        kind, at = generator.randrange(7), generator.randrange(len(changed) + 1)
        if kind == 0 and changed:
            changed[at % len(changed)] ^= 1 << generator.randrange(8)
        elif kind == 1:
            del changed[at:]
        elif kind == 2:
            del changed[at : at + generator.randrange(1, 50)]
        elif kind == 3:
            changed[at:at] = generator.randbytes(generator.randrange(1, 9))
        elif kind == 4 and changed:
            changed[at % len(changed) : at % len(changed) + 8] = generator.choice(
                [b"\xff" * 8, b"\0" * 8, b"99999999", b"../../..", b"[[[[[[[[", b"1e999999", b'":null,"']
            )
        elif kind == 5:
            digits = [n for n, byte in enumerate(changed) if 48 <= byte <= 57]
            if digits:
                changed[generator.choice(digits)] = generator.randrange(48, 58)
        elif changed:
            begin = generator.randrange(len(changed))
            changed[at:at] = changed[begin : begin + generator.randrange(1, 200)]
    return bytes(changed)


@contextlib.contextmanager
def little_memory(more: int) -> Iterator[None]:
    """Allocations of more memory fail, as on a machine that has no more."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    status = Path("/proc/self/status").read_text()
    used = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (used + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def run_mutations(folder: Path, work: Path, rounds: int, seed: int) -> dict[str, int]:
    """Change a file, and read the checkpoint with every reader. Returns how often each outcome occurred.

    Every second time the manifest has the checksums of the changed file, as if somebody had made it on purpose.
    """
    generator = random.Random(seed)
    outcomes: dict[str, int] = {}
    names = ["model-00001-of-00001.safetensors", "model.safetensors.index.json", "manifest.json", "trainer.json"]
    names += ["state-data.json", "rng-00000-of-00001.safetensors", "optimizer-00001-of-00001.safetensors"]
    names += ["extra-state.json"]
    shutil.copytree(folder, work / "step-00000003")
    target = work / "step-00000003"
    wanted = adam_of(Extended(1))[0].model.state_dict()
    checkpointer = Checkpointer(work, readonly=True)
    originals = {path.name: path.read_bytes() for path in folder.iterdir()}
    for number in range(rounds):
        name = names[number % len(names)]
        content = mutated(originals[name], generator)
        (target / name).write_bytes(content)
        signed = number // len(names) % 2 == 1 and name != "manifest.json"
        if signed:
            sign(target, name)
        model, manager = adam_of(Extended(2))
        (optimizer,) = manager.optimizers
        data, parameters = Data(0), [list(group["params"]) for group in optimizer.param_groups]
        try:
            checkpointer.load(3, model=model, manager=manager, data=data)
            outcome = "loaded"
            if not signed:  # if a load succeeds, it loads what was saved
                same(model.model.state_dict(), wanted)
                assert (data.value, model.extra) == (3, {"seed": 1})
            if not signed or not name.startswith("optimizer"):
                sum(param.sum() for param in model.parameters()).backward()
                optimizer.step()
            torch.rand(2), random.random(), np.random.rand(3)
        except (DamagedError, FileNotFoundError):
            outcome = "refused"
        except ValueError:
            assert signed
            outcome = "refused"
        assert [group["params"] for group in optimizer.param_groups] == parameters
        # As Hugging Face's, without a manifest.
        if name.startswith("model"):
            (target / "manifest.json").rename(work / "away")
            try:
                source = open_source(target)
                total = sum(entry.nbytes for entry in source.entries.values())
                assert total <= sum(path.stat().st_size for path in target.iterdir())
                source.close()
            except (DamagedError, FileNotFoundError):
                outcome += ", refused without a manifest"
            (work / "away").rename(target / "manifest.json")
        with contextlib.suppress(DamagedError):
            parse_manifest(target / name, content)
        (target / name).write_bytes(originals[name])
        (target / "manifest.json").write_bytes(originals["manifest.json"])
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    read_manifest(target)
    return outcomes


class Extended(nn.Module):
    """A model with a state that is not a tensor."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.model = plain(seed)
        self.extra = {"seed": seed}

    def get_extra_state(self) -> dict[str, int]:
        return self.extra

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.extra = state


class Manager:
    """The attributes of an OptimManager that a checkpoint uses."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizers = [optimizer]
        self.state = {"loss_scale": 64.0, "lr_schedulers": [{"num_iter": 3}]}

    def trainer_state(self) -> dict[str, Any]:
        return self.state

    def check_trainer_state(self, state: dict[str, Any]) -> None:
        if not state.keys() >= self.state.keys() or len(state["lr_schedulers"]) != 1:
            raise ValueError("it has other schedulers")

    def load_trainer_state(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


def adam_of(model: nn.Module) -> tuple[nn.Module, Manager]:
    """A model after a step, and the manager of its optimizer."""
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    sum(param.square().sum() for param in model.parameters()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, Manager(optimizer)


class Data:
    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "more": [1.5, (2, b"x"), {3: torch.arange(4)}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict) or "value" not in state:
            raise ValueError("it has no value")
        self.value = state["value"]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_mutated_files_are_refused_clearly(tmp_path: Path, seed: int) -> None:
    """The session ``checkpoint_faults`` of nox takes more rounds."""
    checkpointer = Checkpointer(tmp_path / "c")
    model, manager = adam_of(Extended(1))
    checkpointer.save(3, model=model, manager=manager, data=Data(3))
    checkpointer.close()
    rounds = int(os.environ.get("BMT_MUTATIONS", "300"))
    with little_memory(1 << 30):
        outcomes = run_mutations(tmp_path / "c" / "step-00000003", tmp_path / "work", rounds, seed)
    assert sum(outcomes.values()) == rounds
    assert sum(count for outcome, count in outcomes.items() if "refused" in outcome) > rounds * 0.6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda saved: saved["optimizers"][0]["groups"][0]["dict"].update(params=[]),
            "says nothing usable of .*params",
        ),
        (lambda saved: saved["optimizers"][0]["groups"][0]["dict"].update(lr="x"), "says nothing usable of .*'lr'"),
        (lambda saved: saved["optimizers"][0]["groups"][0]["dict"].update(betas={"tuple": [1]}), "usable of .*'betas'"),
        (lambda saved: saved["optimizers"][0]["groups"][0]["dict"].update(betas={"tuple": [0.9, 1.5]}), "Invalid beta"),
        (lambda saved: saved.update(manager=[1]), "says nothing usable of the manager"),
        (lambda saved: saved.update(manager=3), "says nothing usable of the manager"),
        (lambda saved: saved.update(manager={"dict": {"loss_scale": 1, "lr_schedulers": 3}}), "usable of the manager"),
        (lambda saved: saved.update(objects=[]), "has no state of 'data'"),
    ],
)
def test_settings_that_do_not_belong_to_the_optimizer_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    """The checksums are right."""
    checkpointer = Checkpointer(tmp_path / "c")
    model, manager = adam_of(plain())
    checkpointer.save(3, model=model, manager=manager, data=Data(3))
    checkpointer.wait()
    folder = tmp_path / "c" / "step-00000003"
    saved = json.loads((folder / "trainer.json").read_text())
    change(saved)
    (folder / "trainer.json").write_text(json.dumps(saved))
    sign(folder, "trainer.json")
    groups = [dict(group) for group in manager.optimizers[0].param_groups]
    with pytest.raises(ValueError, match=message):
        checkpointer.load(3, model=model, manager=manager, data=Data(0))
    assert [dict(group) for group in manager.optimizers[0].param_groups] == groups


@pytest.mark.parametrize("place", [-1, 625, 1 << 40])
def test_states_of_random_generators_that_point_outside_of_them_are_refused(tmp_path: Path, place: int) -> None:
    np.random.seed(3)
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(3, model=plain())
    checkpointer.wait()
    folder, name = tmp_path / "c" / "step-00000003", "rng-00000-of-00001.safetensors"
    state = random_state()
    state["numpy"][-2] = place
    (folder / name).write_bytes(small_safetensors(name, state))
    sign(folder, name)
    with pytest.raises(DamagedError, match="holds no states of random generators"):
        checkpointer.load(3, model=plain())
    np.random.rand(3)


def test_states_survive_as_json() -> None:
    value = {
        "numbers": [1, -2.5, True, None, float("inf"), 1 << 80],
        "tuple": (1, ("a", b"\0\xff")),
        "set": {1, 2},
        5: {"float": 1, "tensor": "no tensor"},
        "tensor": torch.randn(3, 2).bfloat16(),
        "empty": torch.empty(0, 3),
    }
    value |= {name: each for name, each in COLLECTIONS.items() if name not in ("device", "bytearray", "keys")}
    decoded = decode(json.loads(json.dumps(encode(value, "x"))), "x")
    assert {name: type(each) for name, each in decoded.items()} == {name: type(each) for name, each in value.items()}
    for name in ("tensor", "empty"):
        a, b = decoded.pop(name), value.pop(name)
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
        assert a.shape == b.shape
    assert decoded == value
    with pytest.raises(TypeError, match=r"x\['a'\]\[1\] is a builtins.object"):
        encode({"a": [1, object()]}, "x")
    for bad in ({"tensor": {}}, {"what": 1}, {"a": 1, "b": 2}, {"bytes": "§"}, {"pairs": [[1]]}, {"float": "x"}):
        with pytest.raises(DamagedError):
            decode(bad, "x")
