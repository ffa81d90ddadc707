"""Files of BMTrain 1.0, written here by hand, become files that load here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bmtrain as bmt
from bmt_comm.testing import MemoryGrowth
from bmtrain.command import main

OPTIONS = {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2))


def moments(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "exp_avg": torch.randn(p.shape, generator=generator),
            "exp_avg_sq": torch.rand(p.shape, generator=generator),
            "_param_fp32": p.detach().clone(),
        }
        for p in model.parameters()
    ]


def optimizer_of_rank(model: nn.Module, rank: int, ranks: int) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    for i, entry in enumerate(moments(model)):
        state[i] = {"step": 4, **{k: v.flatten().tensor_split(ranks)[rank].clone() for k, v in entry.items()}}
    group = {**OPTIONS, "params": list(range(len(state)))}
    return {"state": state, "param_groups": [group], "is_whole": ranks == 1}


def convert(*arguments: Any) -> int:
    """The command."""
    return main(["convert", *map(str, arguments)])


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_checkpoint(tmp_path: Path, suffix: str) -> None:
    model = plain_model()
    torch.save(model.state_dict(), tmp_path / "theirs.pt")
    target = tmp_path / f"ours{suffix}"
    assert convert(tmp_path / "theirs.pt", target) == 0
    if suffix == ".pt":
        converted = torch.load(target, weights_only=True)
    else:
        converted = pytest.importorskip("safetensors.torch").load_file(target)
    assert {name: value.tolist() for name, value in converted.items()} == {
        name: value.tolist() for name, value in model.state_dict().items()
    }


def test_a_checkpoint_is_converted_in_little_memory(tmp_path: Path) -> None:
    state = {f"w{n}": torch.randn(4096, 4096) for n in range(3)}  # 192 MiB
    torch.save(state, tmp_path / "plain.pt")
    torch.save({**state, "more": {"steps": [torch.arange(3)]}}, tmp_path / "more.pt")
    for source, target in (("plain", "ours.safetensors"), ("plain", "ours.pt"), ("more", "ours2.pt")):
        with MemoryGrowth() as memory:
            assert convert(tmp_path / f"{source}.pt", tmp_path / target) == 0
        assert memory.peak < 64 << 20
    converted = torch.load(tmp_path / "ours2.pt", weights_only=True)
    assert converted["more"]["steps"][0].tolist() == [0, 1, 2]
    assert all(torch.equal(converted[name], value) for name, value in state.items())


def test_the_model_of_an_optimizer_is_not_read_for_its_shapes(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(6000, 4096)}, tmp_path / "model.pt")  # 94 MiB
    state = {0: {"step": 1, "exp_avg": torch.zeros(8), "exp_avg_sq": torch.zeros(8), "_param_fp32": torch.zeros(8)}}
    saved = {"state": state, "param_groups": [{**OPTIONS, "params": [0]}], "is_whole": True}
    torch.save(saved, tmp_path / "optimizer.pt")
    with MemoryGrowth() as memory:
        assert convert(tmp_path / "optimizer.pt", tmp_path / "ours.pt", "--model", tmp_path / "model.pt") == 1
    assert memory.peak < 48 << 20


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_state_of_an_optimizer(tmp_path: Path, ranks: int) -> None:
    model = plain_model()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    files = [tmp_path / f"optimizer-{rank}.pt" for rank in range(ranks)]
    for rank, file in enumerate(files):
        torch.save(optimizer_of_rank(model, rank, ranks), file)
    assert convert(*files, tmp_path / "ours.pt", "--model", tmp_path / "model.pt") == 0
    optimizer = bmt.optim.AdamOptimizer(model.bfloat16().parameters())
    optimizer.load_state_dict(torch.load(tmp_path / "ours.pt", weights_only=True))
    for param, entry in zip(model.parameters(), moments(plain_model())):
        state = optimizer.state[param]
        assert float(state["step"]) == 4
        for ours, theirs in (("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"), ("master", "_param_fp32")):
            assert torch.equal(state[ours], entry[theirs])
    assert optimizer.param_groups[0]["lr"] == 0.02


def test_the_state_of_a_manager_whose_moments_are_scaled(tmp_path: Path) -> None:
    model = plain_model()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    saved = optimizer_of_rank(model, 0, 1)
    for entry in saved["state"].values():
        entry["exp_avg"], entry["exp_avg_sq"] = (entry["exp_avg"] * 16).half(), entry["exp_avg_sq"] * 16
    rates = {"start_lr": 0.02, "warmup_iter": 2, "end_iter": 50, "num_iter": 9}
    manager = {"optimizers": [saved], "lr_schedulers": [rates], "loss_scale": 16, "loss_scale_enabled": True}
    torch.save(manager, tmp_path / "manager.pt")
    assert convert(tmp_path / "manager.pt", tmp_path / "ours.pt", "--model", tmp_path / "model.pt") == 0
    converted = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert (converted["loss_scale"], converted["lr_schedulers"]) == (16, [rates])
    for entry, wanted in zip(converted["optimizers"][0]["state"].values(), moments(model)):
        assert torch.allclose(entry["exp_avg"], wanted["exp_avg"], rtol=1e-3, atol=1e-4)
        assert torch.equal(entry["exp_avg_sq"], wanted["exp_avg_sq"])


def test_what_cannot_be_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = plain_model()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "other.pt")
    torch.save(optimizer_of_rank(model, 0, 1), tmp_path / "optimizer.pt")
    (tmp_path / "damaged.pt").write_bytes(b"nothing")
    torch.save({"optimizers": [1, 2]}, tmp_path / "numbers.pt")
    torch.save({"param_groups": torch.ones(3)}, tmp_path / "tensor.pt")
    target = tmp_path / "ours.pt"
    for message, *arguments in [
        ("there is no checkpoint file", "missing.pt"),
        ("there is no checkpoint file or directory", "missing.pt", "--model", "model.pt"),
        ("there is no checkpoint file or directory", "missing.pt", "gone.pt"),
        ("there is no file", "optimizer.pt", "missing.pt"),
        ("damaged.pt", "damaged.pt"),
        ("give the checkpoint of the model", "optimizer.pt"),
        ("model.pt is not the state of an optimizer, as", "optimizer.pt", "model.pt", "--model", "model.pt"),
        ("model.pt is not the state of an optimizer", "model.pt", "optimizer.pt", "--model", "model.pt"),
        ("parameter 0 of the optimizer has 15 elements", "optimizer.pt", "--model", "other.pt"),
        ("holds weights, of which there is one SOURCE", "model.pt", "model.pt"),
        ("--model is for the state of an optimizer", "model.pt", "--model", "missing.pt"),
        ("numbers.pt is not the state of an optimizer: it has no list", "numbers.pt", "--model", "model.pt"),
        ("tensor.pt is not the state of an optimizer: it has no list", "tensor.pt", "--model", "model.pt"),
    ]:
        paths = [each if each.startswith("--") else tmp_path / each for each in arguments]
        at = paths.index("--model") if "--model" in paths else len(paths)
        assert convert(*paths[:at], target, *paths[at:]) == 1
        assert message in capsys.readouterr().err
        assert not target.exists()
    nowhere = tmp_path / "no" / "ours.pt"
    assert convert(tmp_path / "optimizer.pt", nowhere, "--model", tmp_path / "model.pt") == 1
    assert "there is no directory" in capsys.readouterr().err
    target.write_bytes(b"kept")
    assert convert(tmp_path / "optimizer.pt", target, "--model", tmp_path / "model.pt") == 1
    assert "exists already" in capsys.readouterr().err
    assert target.read_bytes() == b"kept"


@pytest.mark.parametrize("frozen", ["0.weight", "1.weight", "2.bias", "0.bias", "0.weight 0.bias", "1.weight 0.bias"])
def test_the_state_of_an_optimizer_that_does_not_train_everything(
    tmp_path: Path, frozen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shapes come from the model, so they must surely be those of the trained parameters."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3, bias=False), nn.Linear(3, 2))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    trained = {name: p for name, p in model.named_parameters() if name not in frozen.split()}
    state = {
        i: {"step": 1, "exp_avg": torch.randn(p.numel()), "exp_avg_sq": torch.rand(p.numel())}
        for i, p in enumerate(trained.values())
    }
    saved = {"state": state, "param_groups": [{**OPTIONS, "params": list(state)}], "is_whole": True}
    torch.save(saved, tmp_path / "optimizer.pt")
    done = convert(tmp_path / "optimizer.pt", tmp_path / "ours.pt", "--model", tmp_path / "model.pt")
    assert bool(done) == (" " in frozen)
    if done:
        message = "parameter 0 of the optimizer has 15 elements, and so have tensors of the model of the shapes [(3,"
        assert message in capsys.readouterr().err
        torch.save({name: p.detach() for name, p in trained.items()}, tmp_path / "trained.pt")
        assert convert(tmp_path / "optimizer.pt", tmp_path / "ours.pt", "--model", tmp_path / "trained.pt") == 0
    converted = torch.load(tmp_path / "ours.pt", weights_only=True)["state"]
    assert [tuple(converted[i]["exp_avg"].shape) for i in converted] == [tuple(p.shape) for p in trained.values()]


def test_states_of_tensor_parallel_ranks_are_told_from_others(tmp_path: Path) -> None:
    """Two ranks have columns of a weight. Their flat tensors together have the right number of elements."""
    model = nn.Sequential(nn.Linear(4, 3, bias=False))
    torch.save({**model.state_dict(), "steps": torch.tensor(3.0)}, tmp_path / "model.pt")
    saved = optimizer_of_rank(model, 0, 1)
    assert convert_one(tmp_path, saved) == 0
    for key in KEYS:
        saved["state"][0][key] = torch.cat([x.flatten() for x in saved["state"][0][key].view(3, 4).chunk(2, 1)])
    assert convert_one(tmp_path, saved) == 1
    other = {key: value + 1 for key, value in saved["state"][0].items()}  # of another step: nobody can tell
    assert convert_one(tmp_path, {**saved, "state": {0: other}}) == 0


KEYS = ("exp_avg", "exp_avg_sq", "_param_fp32")


def convert_one(folder: Path, saved: dict[str, Any]) -> int:
    torch.save(saved, folder / "optimizer.pt")
    (folder / "ours.pt").unlink(missing_ok=True)
    return convert(folder / "optimizer.pt", folder / "ours.pt", "--model", folder / "model.pt")
