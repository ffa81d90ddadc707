"""Find a module in one process and load the same file under the same name in another.

Needed for modules that a plain ``import`` cannot find: test files under ``--import-mode=importlib``, and the
script that was started as ``__main__``.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType


@dataclass(frozen=True)
class ModuleSource:
    """Where a module came from: enough to load it in another process."""

    name: str
    file: str
    packages: tuple[tuple[str, str | None, tuple[str, ...]], ...]
    """Packages around the module, outermost first: name, file of ``__init__`` and search path."""

    @classmethod
    def of(cls, module: ModuleType) -> ModuleSource | None:
        """The source of ``module``; None where it has no Python file."""
        file = getattr(module, "__file__", None)
        if file is None or not file.endswith(".py"):
            return None
        packages = []
        parts = module.__name__.split(".")
        for depth in range(1, len(parts)):
            name = ".".join(parts[:depth])
            package = sys.modules.get(name)
            init = getattr(package, "__file__", None)
            packages.append((name, init, tuple(getattr(package, "__path__", ()))))
        return cls(module.__name__, os.path.abspath(file), tuple(packages))

    def import_or_load(self) -> ModuleType:
        """Import the module by name where that works, else load its file.

        A script (``__main__``) is loaded under another name, so that its ``if __name__ == "__main__"`` part
        does not run, and then stands in for ``__main__``, as ``multiprocessing`` does it.
        """
        if self.name == "__main__":
            module = ModuleSource("__mp_main__", self.file, ()).load(rewrite=False)
            sys.modules["__main__"] = module
            return module
        try:
            return importlib.import_module(self.name)
        except ModuleNotFoundError:
            return self.load(rewrite=False)

    def load(self, *, rewrite: bool) -> ModuleType:
        """Load the file under the module's name, once per version of the file.

        Args:
            rewrite: rewrite ``assert`` as pytest does, so that a failing one shows its values.
        """
        key = (self.name, self.file, os.stat(self.file).st_mtime_ns)
        if key not in _loaded:
            for package in self.packages:
                _load_package(*package)
            loader = _RewritingLoader if rewrite else SourceFileLoader
            _loaded[key] = _execute(self.name, loader(self.name, self.file))
        sys.modules[self.name] = _loaded[key]
        return _loaded[key]


_loaded: dict[tuple[str, str, int], ModuleType] = {}


class _RewritingLoader(SourceFileLoader):
    """Compiles with pytest's assertion rewriting, without touching its cache of compiled files."""

    def get_code(self, fullname: str) -> CodeType:
        from _pytest.assertion.rewrite import rewrite_asserts

        source = self.get_data(self.path)
        tree = ast.parse(source, filename=self.path)
        rewrite_asserts(tree, source, self.path, None)
        return compile(tree, self.path, "exec", dont_inherit=True)


def _load_package(name: str, init: str | None, path: tuple[str, ...]) -> None:
    """Make a package around a test module exist: imported, loaded from its file, or an empty one."""
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == init and tuple(_path(known)) == path:
        return
    if init is None:
        package = ModuleType(name)
        package.__path__ = list(path)
        package.__spec__ = ModuleSpec(name, None, is_package=True)
        sys.modules[name] = package
    else:
        _execute(name, SourceFileLoader(name, init), list(path))


def _path(package: ModuleType) -> list[str]:
    return list(getattr(package, "__path__", ()))


def _execute(name: str, loader: SourceFileLoader, path: list[str] | None = None) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, loader.path, loader=loader, submodule_search_locations=path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    previous = sys.modules.get(name)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        if previous is None:
            del sys.modules[name]
        else:
            sys.modules[name] = previous
        raise
    return module
