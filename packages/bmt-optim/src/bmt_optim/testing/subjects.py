"""Optimizers of this package and of others, each beside its author's code."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import bmt_optim as ours

from .kit import Subject


def _author(where: str) -> Any:
    """The class ``package.module:Class``.

    Raises:
        ImportError: it is not installed.
    """
    name, _, attribute = where.partition(":")
    package = name.partition(".")[0]
    try:
        importlib.import_module(package)
    except ImportError:
        spec = importlib.util.find_spec(package)
        if spec is None:
            raise
        sys.modules[package] = importlib.util.module_from_spec(spec)  # galore_torch's needs bitsandbytes
    try:
        return getattr(importlib.import_module(name), attribute)
    except AttributeError as error:
        raise ImportError(str(error)) from None


@dataclass(frozen=True)
class _Imported:
    """Makes an author's optimizer. Ranks import its class themselves, by :func:`_author`."""

    where: str

    def __call__(self, groups: Any, **options: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = _author(self.where)(groups, **options)
        if hasattr(optimizer, "train"):  # schedule-free ones
            optimizer.train()
        return optimizer


def versions(tested: Iterable[Subject]) -> str:
    """The versions of Python, torch and the packages with the authors' code."""
    packages = {s.author.where.partition(":")[0].partition(".")[0] for s in tested if isinstance(s.author, _Imported)}
    distributions = importlib.metadata.packages_distributions()
    names = {name for package in packages for name in distributions.get(package, [])}
    of_packages = [f"{name} {importlib.metadata.version(name)}" for name in sorted(names - {"torch"})]
    return ", ".join([f"Python {platform.python_version()}", f"torch {torch.__version__}", *of_packages])


def subjects() -> Iterator[Subject]:
    """Optimizers of this package and of others whose authors' code is installed; others' names end in ``*``."""
    adam = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    muon = {"lr": 0.02, "weight_decay": 0.1}
    adafactor = {"lr": 0.02, "weight_decay": 0.1}
    theirs = {**adafactor, "relative_step": False, "scale_parameter": False}
    came = {"lr": 0.02, "betas": (0.8, 0.95, 0.99), "weight_decay": 0.1}
    lion = {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1}
    eight = {**adam, "weight_decay": 0.0, "min_8bit_size": 1}  # bitsandbytes decays before or after the step, by device
    ao = {**adam, "block_size": 16}
    galore = {"rank": 2, "update_proj_gap": 3, "scale": 0.5, "proj_type": "std"}
    rows: list[tuple[str, Any, str, dict[str, Any], dict[str, Any]]] = [
        ("Adam", ours.Adam, "torch.optim:Adam", adam, {}),
        ("AdamW", ours.AdamW, "torch.optim:AdamW", adam, {}),
        ("AdamOptimizer", ours.AdamOptimizer, "torch.optim:AdamW", adam, {}),
        ("AdamOffloadOptimizer", ours.AdamOffloadOptimizer, "torch.optim:AdamW", adam, {}),
        ("Muon", ours.Muon, "torch.optim:Muon", muon, {"dims": (2,), "least": 1, "tolerance": 0.02}),
        ("", None, "deepspeed.runtime.zero.muon.original_muon:SingleDeviceMuon", muon,
         {"dims": (2,), "least": 1, "tolerance": 0.02}),
        ("TorchAdafactor", ours.TorchAdafactor, "torch.optim:Adafactor", adafactor, {"least": 1}),
        ("Adafactor", ours.Adafactor, "transformers.optimization:Adafactor", theirs, {"least": 1}),
        ("CAME", ours.CAME, "came_pytorch:CAME", came, {"least": 1, "dims": (1, 2, 3, 4), "tolerance": 5e-5}),
        ("Lion", ours.Lion, "lion_pytorch:Lion", lion, {}),
        ("ScheduleFreeAdamW", ours.ScheduleFreeAdamW, "schedulefree:AdamWScheduleFree", adam, {}),
        ("GaLoreAdamW", partial(ours.GaLoreAdamW, nbits=32), "galore_torch.adamw:AdamW", adam,
         {"dims": (2,), "least": 3, "tolerance": 2e-5, "group_options": galore,
          "author_options": {"no_deprecation_warning": True}}),
        ("AdamW8bit", ours.AdamW8bit, "bitsandbytes.optim:AdamW8bit", eight, {"tolerance": 0.05}),
        ("", None, "torchao.optim:AdamW8bit", ao, {}),
    ]  # fmt: skip
    for name, optimizer, where, options, rest in rows:
        try:
            _author(where)
        except ImportError as error:
            print(f"{name or where}: {error}", file=sys.stderr)
            continue
        author = _Imported(where)
        if optimizer is not None:
            yield Subject(name, optimizer, author, options, **rest)
        theirs_options = {**options, **rest.pop("author_options", {})}
        yield Subject(f"{where.replace(':', '.')} *", author, author, theirs_options, **rest)
