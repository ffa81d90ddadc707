"""The exceptions and warnings of a source file, as they are written in it. Standard library only."""

from __future__ import annotations

import ast
from pathlib import Path


def messages(path: Path) -> list[tuple[str, str]]:
    """The class and the text of each exception and warning in a file; what is filled in is in braces."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call) or not call.args:
            continue
        name = ast.unparse(call.func).rpartition(".")[2] or ast.unparse(call.func)
        if isinstance(node, ast.Raise):
            wanted = name.endswith(("Error", "Exception")) and name != "KeyError"
        else:
            wanted = name == "warn"
        if wanted and (text := text_of(call.args[0])):
            found.append((call.lineno, "warning" if name == "warn" else name, text))
    return [(kind, text) for _, kind, text in sorted(set(found))]


def text_of(node: ast.expr) -> str:
    """A message as it is written in the source; empty if it is made elsewhere."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else placeholder(part) for part in node.values]
        text = "".join(str(part) for part in parts)
        return text if any(isinstance(part, ast.Constant) for part in node.values) else ""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return ""


def placeholder(part: ast.expr) -> str:
    assert isinstance(part, ast.FormattedValue)
    return "{" + ast.unparse(part.value) + "}"
