"""Functions that the compiler leaves out of its graphs cost nothing where it is not in use."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch
from torch import Tensor

from bmt_comm import not_compiled


@not_compiled
def doubled(x: Tensor) -> Tensor:
    assert not torch.compiler.is_compiling()
    return twice(x)


def twice(x: Tensor) -> Tensor:
    assert not torch.compiler.is_compiling()
    return 2 * x


def test_it_is_between_two_graphs() -> None:
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    compiled = torch.compile(lambda x: doubled(x + 1) - 3, backend=backend)
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(3)), torch.ones(3))
    assert [len(names) for names in graphs] == [1, 1]
    assert "add" in graphs[0][0]
    assert "sub" in graphs[1][0]
    assert torch.equal(doubled(torch.ones(3)), torch.full((3,), 2.0))


def test_the_compiler_is_not_imported() -> None:
    script = (
        "import sys; from bmt_comm import not_compiled; assert not_compiled(max)(3, 5) == 5; "
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
