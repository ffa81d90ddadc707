"""Every public name of BMTrain 1.0: whether it is here, with its signature, and with its meaning.

``bmtrain_names.txt`` lists them as BMTrain's code has them: ``-`` before those that are not here; after ``#`` what else
they mean, or what replaces them. ``bmtrain_tests.txt`` lists BMTrain's own tests: their ranks, what they do here, and
why. ``docs/names.md`` is made of both: ``python tests/test_bmtrain_names.py``.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import bmtrain

LIST = Path(__file__).with_name("bmtrain_names.txt")
TESTS = Path(__file__).with_name("bmtrain_tests.txt")
PAGE = Path(__file__).parents[1] / "docs" / "names.md"

# What inspect cannot tell, or what is different on purpose, as the page says.
OTHER_SIGNATURE = {
    "init.topology": "made by `init_distributed`",
    "inspect.tensor.InspectTensor": "made by `inspect_tensor`",
    "nccl.NCCLCommunicator": "`(group, device)`",
    "block_layer.Block": "`zero_level=None`",
    "block_layer.Block.forward": "that of the module",
    "pipe_layer.PipelineTransformerBlockList.forward": "any number of hidden states come first",
    "utils.print_dict": "`file=None`, which is `sys.stdout`",
    "utils.print_block": "`file=None`, which is `sys.stdout`",
}


class Name(NamedTuple):
    path: str
    signature: str | None
    is_here: bool
    note: str


def names() -> list[Name]:
    found = []
    for line in LIST.read_text().splitlines():
        parts = re.fullmatch(r"(- )?([\w.]+)(\(.*?\))?(?: # (.*))?", line)
        assert parts is not None, line
        found.append(Name(parts[2], parts[3], parts[1] is None, parts[4] or ""))
    return found


def look_up(path: str) -> Any:
    """The object of a path inside of bmtrain; raises AttributeError or ImportError."""
    pieces = path.split(".")
    for count in range(len(pieces) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(["bmtrain", *pieces[:count]]))
        except ImportError:
            continue
        for piece in pieces[count:]:
            if found is bmtrain.Block:
                found = bmtrain.Block(nn.Linear(2, 2))  # Block returns the module: its methods are the module's
            found = getattr(found, piece)
        return found
    raise ImportError(path)


def check_signature(found: Any, wanted: str) -> None:
    """Every call with the arguments of ``wanted`` means the same, as far as names, order and defaults go."""
    namespace: dict[str, Any] = {"torch": torch, "sys": sys}
    exec(f"def function{wanted}: ...", namespace)  # from our own list
    theirs = [*inspect.signature(namespace["function"]).parameters.values()]
    signature = inspect.signature(found)
    ours = [p for p in signature.parameters.values() if p.name != "self"]
    takes_any = {p.kind for p in ours if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    positional = [p for p in ours if p.kind == p.POSITIONAL_OR_KEYWORD]
    for index, param in enumerate(theirs):
        if param.kind in (param.VAR_POSITIONAL, param.VAR_KEYWORD):
            assert param.kind in takes_any, param
        elif param.kind == param.KEYWORD_ONLY:
            assert signature.parameters[param.name].default == param.default, param
        elif index < len(positional):
            mine = positional[index]
            assert mine.name == param.name
            assert mine.default == param.default or param.default is param.empty, param
        else:
            assert inspect.Parameter.VAR_POSITIONAL in takes_any, param
    assert all(p.default is not p.empty for p in positional[len(theirs) :])


@pytest.mark.ranks(1)
def test_names_and_signatures_are_as_listed(ctx: Any) -> None:
    for name in names():
        if not name.is_here:
            assert name.note, name
            with pytest.raises((AttributeError, ImportError)):
                look_up(name.path)
            continue
        found = look_up(name.path)
        if inspect.isclass(found) and (hasattr(found, "apply") or issubclass(found, enum.Enum)):
            continue  # called by apply, or not at all
        if name.signature is not None and name.path not in OTHER_SIGNATURE:
            try:
                check_signature(found, name.signature)
            except AssertionError as error:
                raise AssertionError(f"{name.path}{name.signature} is {inspect.signature(found)} here") from error


def page() -> str:
    listed = names()
    here = [name for name in listed if name.is_here]
    lines = [
        "# The public names of BMTrain 1.0",
        "",
        f"All {len(listed)} functions, classes and methods without a leading underscore in the modules of BMTrain "
        f"1.0.1: {len(here)} of them are here. This page is made by `tests/test_bmtrain_names.py`, which also compares "
        "names and signatures. What differs on purpose, and which line of a script to change, is in "
        "[migration.md](migration.md).",
        "",
        "A signature is the same if every argument has its name, place and default; there may be more behind them.",
        "",
        "| name in `bmtrain` | present | same signature | meaning |",
        "|---|---|---|---|",
    ]
    for name in listed:
        signature = "" if not name.is_here else OTHER_SIGNATURE.get(name.path, "yes")
        meaning = name.note or "same"
        lines.append(f"| `{name.path}` | {'yes' if name.is_here else 'no'} | {signature} | {meaning} |")
    return "\n".join([*lines, *section_of_tests()]) + "\n"


def section_of_tests() -> list[str]:
    """What BMTrain's own tests do here."""
    rows = [[cell.strip() for cell in line.split("|")] for line in TESTS.read_text().splitlines()]
    counts = Counter(outcome for _, _, outcome, _ in rows)
    return [
        "",
        "## Its own tests",
        "",
        f"BMTrain 1.0.1 has {len(rows)} tests, which are scripts. "
        + ", ".join(f"{count}: {outcome}" for outcome, count in counts.most_common())
        + ". They were run on the CPU, by that number of processes, with `.cuda()` doing nothing. Models that are too "
        'large for that were made smaller ("smaller"): their widths, lengths and batches. "With other lines": after a '
        "line was changed as [migration.md](migration.md) says, or as given here.",
        "",
        "| test | ranks | outcome | what differs |",
        "|---|---|---|---|",
        *(f"| `test_{name}.py` | {ranks} | {outcome} | {why} |" for name, ranks, outcome, why in rows),
    ]


def test_the_page_is_of_this_list() -> None:
    assert PAGE.read_text() == page(), "run: python tests/test_bmtrain_names.py"


if __name__ == "__main__":
    PAGE.write_text(page())
