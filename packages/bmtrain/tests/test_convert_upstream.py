"""Files of BMTrain 1.0, written here by hand, become files that load here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bmtrain as bmt
from bmtrain.convert_upstream import convert_upstream

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


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_checkpoint(tmp_path: Path, suffix: str) -> None:
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    model = plain_model()
    torch.save(model.state_dict(), tmp_path / "theirs.pt")
    target = tmp_path / f"ours{suffix}"
    assert convert_upstream(tmp_path / "theirs.pt", target) == "checkpoint"
    if suffix == ".pt":
        found = torch.load(target, weights_only=True)
    else:
        from safetensors.torch import load_file

        found = load_file(target)
    assert {name: value.tolist() for name, value in found.items()} == {
        name: value.tolist() for name, value in model.state_dict().items()
    }


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_state_of_an_optimizer(tmp_path: Path, ranks: int) -> None:
    model = plain_model()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    files = [tmp_path / f"optimizer-{rank}.pt" for rank in range(ranks)]
    for rank, file in enumerate(files):
        torch.save(optimizer_of_rank(model, rank, ranks), file)
    assert convert_upstream(files, tmp_path / "ours.pt", model=tmp_path / "model.pt") == "optimizer"
    optimizer = bmt.optim.AdamOptimizer(model.bfloat16().parameters())
    optimizer.load_state_dict(torch.load(tmp_path / "ours.pt", weights_only=True))
    for param, entry in zip(model.parameters(), moments(plain_model())):
        found = optimizer.state[param]
        assert float(found["step"]) == 4
        for ours, theirs in (("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"), ("master", "_param_fp32")):
            assert torch.equal(found[ours], entry[theirs])
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
    assert convert_upstream(tmp_path / "manager.pt", tmp_path / "ours.pt", model=tmp_path / "model.pt") == "manager"
    found = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert (found["loss_scale"], found["lr_schedulers"]) == (16, [rates])
    for entry, wanted in zip(found["optimizers"][0]["state"].values(), moments(model)):
        assert torch.allclose(entry["exp_avg"], wanted["exp_avg"], rtol=1e-3, atol=1e-4)
        assert torch.equal(entry["exp_avg_sq"], wanted["exp_avg_sq"])


def test_what_cannot_be_converted(tmp_path: Path) -> None:
    model = plain_model()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "other.pt")
    torch.save(optimizer_of_rank(model, 0, 1), tmp_path / "optimizer.pt")
    torch.save({"weight": [1, 2]}, tmp_path / "list.pt")
    (tmp_path / "damaged.pt").write_bytes(b"nothing")
    target = tmp_path / "ours.pt"
    cases: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (FileNotFoundError, "there is no file", tmp_path / "missing.pt", {}),
        (ValueError, "sources is empty", [], {}),
        (ValueError, "damaged.pt cannot be read", tmp_path / "damaged.pt", {}),
        (ValueError, "is no state dict: under 'weight' it has a list", tmp_path / "list.pt", {}),
        (ValueError, "give model=, the checkpoint of the model", tmp_path / "optimizer.pt", {}),
        (
            ValueError,
            "parameter 0 of the optimizer has 15 elements",
            tmp_path / "optimizer.pt",
            {"model": tmp_path / "other.pt"},
        ),
        (ValueError, "of which there is one file, and sources are 2", [tmp_path / "model.pt"] * 2, {}),
    ]
    for kind, message, sources, options in cases:
        with pytest.raises(kind, match=message):
            convert_upstream(sources, target, **options)
        assert not target.exists()
