"""The conformance kit passes what is right, over every framework, and says what is wrong with the rest."""

import platform

import pytest
import torch
import torch.distributed as dist

from bmt_optim import AdamOptimizer, AdamW, Muon
from bmt_optim.testing import CASES, FRAMEWORKS, Case, Framework, Subject, check, outcomes
from bmt_optim.testing.__main__ import main

ADAM = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
RIGHT = [Subject(made.__name__, made, torch.optim.AdamW, ADAM, tolerance=1e-6) for made in (AdamW, AdamOptimizer)]


class ByNorm(torch.optim.SGD):
    """Divides gradients by their norms, which are the full ones for DTensors, and not for other shards."""

    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                p.grad = p.grad / p.grad.norm()
        super().step()


class Talkative(torch.optim.SGD):
    def step(self, closure=None):
        if dist.get_rank() == 0:
            dist.barrier()
        super().step()


class Bare(torch.optim.SGD):
    def __init__(self, params, lr):
        raise NotImplementedError("no such thing")


@pytest.mark.parametrize(("subject", "framework"), [(RIGHT[0], "FSDP2"), (RIGHT[1], "rows x tp")])
def test_what_is_right_passes(subject, framework):  # over the others in the nox session "optimizers"
    results = outcomes(subject, framework, list(CASES))
    assert set(results) <= {"pass", "-"}
    assert results.count("pass") >= 10


def test_what_is_wrong_is_told():
    sgd = {"lr": 0.1}
    by_norm = Subject("by norm", ByNorm, ByNorm, sgd, least=1)
    assert outcomes(by_norm, "FSDP2", ["ragged shapes"]) == ["pass"]
    [outcome] = outcomes(by_norm, "rows x tp", ["ragged shapes"])
    assert outcome.startswith("wrong by")
    with pytest.raises(AssertionError, match="wrong by"):
        check(by_norm, "rows x tp", "ragged shapes")
    assert outcomes(Subject("talkative", Talkative, torch.optim.SGD, sgd), "DDP", ["ragged shapes"], 3) == ["hangs"]
    results = outcomes(Subject("bare", Bare, torch.optim.SGD, sgd), "DDP", ["ragged shapes"])
    assert results == ["raises NotImplementedError: no such thing"]
    assert outcomes(Subject("Muon", Muon, torch.optim.SGD, dims=(7,)), "DDP", ["ragged shapes"]) == ["-"]


def test_the_table(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("Text.\n<!-- table -->\nold\n")
    arguments = ["--only", "AdamW", "torch.optim.AdamW", "--cases", "clipping", "accumulation"]
    assert main([*arguments, "--frameworks", "one process", "--into", str(page)]) == 0
    made = f"Made with Python {platform.python_version()}, torch {torch.__version__}.\n\n"
    rows = "| | one process |\n|---|---|\n| AdamW | all 2 |\n| torch.optim.AdamW * | all 2 |\n"
    assert page.read_text() == f"Text.\n<!-- table -->\n\n{made}{rows}"
    assert rows in capsys.readouterr().out
    assert isinstance(CASES["clipping"], Case)
    assert isinstance(FRAMEWORKS["DDP"], Framework)
