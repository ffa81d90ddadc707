"""Sphinx's configuration: ``nox -s site`` builds the site from the Markdown files and docstrings, without network.

The source folder is the repository's root, so links between Markdown files are the same on GitHub and on the site.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).resolve().parent))

from messages import messages

project = "bmtrain"
author = "the authors of bmtrain"
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "docs/api/*.md",
    "docs/concepts/*.md",
    "packages/*/README.md",
    "packages/*/CHANGELOG.md",
    "examples/gpt2/README.md",
]
exclude_patterns = [".*", "build", "dist"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

myst_heading_anchors = 4
default_role = "code"  # names in single backticks
autodoc_inherit_docstrings = False  # torch's docstrings refer to pages that are not here
autodoc_member_order = "groupwise"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_use_rtype = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = "bmtrain"
html_copy_source = False
html_show_sphinx = False
html_extra_path = ["extra"]  # the site's first page leads to docs/index.html

LINK = re.compile(r"(?<=\]\()(?P<target>[^)\s#:]+)(?=[)#])")
TABLE_EDGE = re.compile(r"^ *=+(?: +=+)+$", re.MULTILINE)
CODE = re.compile(r"``.*?``|`.*?`_{0,2}", re.DOTALL)
EMPHASIS = re.compile(r"((?<![\w*])(?:\*\*|\*)(?=[\w\0])[^*]*[\w\0.,:;!?](?:\*\*|\*)(?![\w*]))")


def link_to_readmes(app: Sphinx, name: str, source: list[str]) -> None:
    """A link to a folder leads to its README, as on GitHub."""
    place = Path(app.env.doc2path(name)).parent

    def target(match: re.Match[str]) -> str:
        readme = place / match["target"] / "README.md"
        return os.path.relpath(readme, place) if readme.exists() else match["target"]

    source[0] = LINK.sub(target, source[0])


def clean_docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Stars and bars of formulas are no markup. A table that reStructuredText does not accept is shown as it is."""
    fix_tables(lines)
    paragraphs = re.split(r"(\n\s*\n)", "\n".join(lines))
    literal = False
    for number in range(0, len(paragraphs), 2):
        text = paragraphs[number]
        literal = literal and text.startswith(" ")
        if not literal and not TABLE_EDGE.search(text):
            paragraphs[number] = escape_formulas(text)
        literal = literal or text.rstrip().endswith("::")
    lines[:] = "".join(paragraphs).split("\n")


def escape_formulas(text: str) -> str:
    """Put a backslash before each star that begins or ends no emphasis, and before each bar; code stays as it is."""
    code = CODE.findall(text)
    text = CODE.sub("\0", text.replace("\\*", "*")).replace("|", "\\|")
    parts = EMPHASIS.split(text)
    parts[::2] = [part.replace("*", "\\*") for part in parts[::2]]
    pieces = "".join(parts).split("\0")
    return "".join(piece + literal for piece, literal in zip(pieces, [*code, ""], strict=True))


def fix_tables(lines: list[str]) -> None:
    """Make a literal block of each table with text between two columns."""
    edges = [number for number, line in enumerate(lines) if TABLE_EDGE.fullmatch(line)]
    for first, last in reversed(list(zip(edges[::3], edges[2::3], strict=False))):
        gaps = [match.start() for match in re.finditer(" (?==)", lines[first].lstrip())]
        indent = len(lines[first]) - len(lines[first].lstrip())
        rows = [line[indent:] for line in lines[first : last + 1]]
        if any(len(row) > gap and row[gap] != " " for row in rows for gap in gaps):
            lines[first : last + 1] = [" " * indent + "::", "", *(" " * (indent + 4) + row for row in rows), ""]


class Messages(SphinxDirective):
    """``{messages} package``: every exception and warning that the package's sources raise, by file."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        [package] = self.arguments
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations
        folder = Path(spec.submodule_search_locations[0])
        made: list[nodes.Node] = []
        for path in sorted(folder.rglob("*.py")):
            self.env.note_dependency(str(path))
            items = nodes.bullet_list()
            for kind, text in messages(path):
                paragraph = nodes.paragraph("", "", nodes.literal("", kind), nodes.Text(": "), nodes.Text(text))
                items += nodes.list_item("", paragraph)
            if items.children:
                made += [nodes.rubric("", path.relative_to(folder).as_posix()), items]
        return made


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", link_to_readmes)
    app.connect("autodoc-process-docstring", clean_docstring)
    app.add_directive("messages", Messages)
    return {"parallel_read_safe": True}
