"""Packages import only what lies below them, and nothing that they do not declare."""

import ast
import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGES = Path(__file__).parents[1] / "packages"

# What each package may import of the others: anywhere, and in a function or under a condition only.
ALLOWED = {
    "bmt_kernels": (set(), set()),
    "bmt_comm": (set(), {"bmt_kernels"}),
    "bmt_zero": ({"bmt_comm"}, set()),
    "bmt_tp": ({"bmt_comm", "bmt_kernels"}, {"bmt_zero"}),
    "bmt_pipe": ({"bmt_comm", "bmt_zero"}, set()),
    "bmt_optim": ({"bmt_comm", "bmt_kernels"}, set()),
    "bmtrain": ({"bmt_comm", "bmt_kernels", "bmt_optim", "bmt_pipe", "bmt_tp", "bmt_zero"}, set()),
}

TOP_LEVEL = {"_pytest": "pytest"}  # modules that are not called like what must be declared


def folder(name):
    return PACKAGES / name.replace("_", "-")


def imports(name):
    """(module imported, whether unconditionally and on import, file:line) of every absolute import.

    A subpackage that is called like an extra (``bmt_comm.testing``) is for those who install that extra.
    """
    extras = project(name).get("optional-dependencies", {})
    for path in sorted((folder(name) / "src").rglob("*.py")):
        in_extra = path.parent.name in extras
        tree = ast.parse(path.read_text())
        firm = {id(node) for node in tree.body}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                modules = [node.module]
            else:
                continue
            for module in modules:
                place = f"{path.relative_to(PACKAGES)}:{node.lineno}"
                top = module.split(".")[0]
                yield TOP_LEVEL.get(top, top), id(node) in firm and not in_extra, place


def project(name):
    return tomllib.loads((folder(name) / "pyproject.toml").read_text())["project"]


def declared(name):
    """The names of the required and of the optional distributions, as modules are called."""
    required = project(name).get("dependencies", [])
    optional = [entry for entries in project(name).get("optional-dependencies", {}).values() for entry in entries]
    return tuple({re.split(r"[^\w-]", e)[0].replace("-", "_") for e in entries} for entries in (required, optional))


def test_every_package_is_listed():
    assert {path.name.replace("-", "_") for path in PACKAGES.iterdir() if path.is_dir()} == ALLOWED.keys()


@pytest.mark.parametrize("name", ALLOWED)
def test_siblings_are_imported_along_the_arrows_only(name):
    anywhere, optional = ALLOWED[name]
    wrong = []
    for module, firm, place in imports(name):
        if module in ALLOWED and module != name and module not in (anywhere if firm else anywhere | optional):
            wrong.append(f"{place} imports {module}")
    assert wrong == []


@pytest.mark.parametrize("name", ALLOWED)
def test_whatever_is_imported_is_declared(name):
    required, optional = declared(name)
    wrong = []
    for module, firm, place in imports(name):
        if module in sys.stdlib_module_names or module == name:
            continue
        if module not in (required if firm else required | optional):
            wrong.append(f"{place} imports {module}")
    assert wrong == []


@pytest.mark.parametrize("name", ALLOWED)
def test_siblings_are_required_along_the_arrows_only(name):
    anywhere, extras = ALLOWED[name]
    required, optional = declared(name)
    assert required & ALLOWED.keys() <= anywhere
    assert optional & ALLOWED.keys() <= anywhere | extras


def modules_imported(path, package):
    """The modules of its own package that a file imports, anywhere in it."""
    own = path.relative_to(package).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [package.name, *own][: len(own) + 2 - node.level] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{start}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] != package.name:
                continue
            for end in range(len(parts), 1, -1):  # the longest part of the name that is a module
                found = package.joinpath(*parts[1:end])
                if found.with_suffix(".py").is_file():
                    yield found.with_suffix(".py")
                    break


@pytest.mark.parametrize("name", ALLOWED)
def test_no_circles_inside_a_package(name):
    package = folder(name) / "src" / name
    arrows = {path: set(modules_imported(path, package)) - {path} for path in package.rglob("*.py")}
    assert any(arrows.values()) or len(arrows) < 3
    circles = []
    while arrows:
        free = [path for path, targets in arrows.items() if not targets & arrows.keys()]
        if not free:
            circles = sorted(str(path.relative_to(package)) for path in arrows)
            break
        for path in free:
            del arrows[path]
    assert circles == []


# From the bottom up: each may import those before it.
ROOMS_OF_ZERO = [
    "layout",
    "sharded_parameter",
    "flat_parameter",
    "flat_gradient",
    "gradient_target",
    "parameter_gradients",
    "reduction",
    "gradient_reducer",
    "parameter_group",
    "backward_context",
    "hooks",
    "shard",
]


def test_rooms_of_bmt_zero_import_in_one_direction():
    package = folder("bmt_zero") / "src" / "bmt_zero"
    for place, room in enumerate(ROOMS_OF_ZERO):
        above = set(ROOMS_OF_ZERO[place + 1 :])
        assert not {path.stem for path in modules_imported(package / f"{room}.py", package)} & above, room
