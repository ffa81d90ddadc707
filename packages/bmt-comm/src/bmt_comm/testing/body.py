"""The body of one test, as it runs on one rank."""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import io
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch

import bmt_comm
from bmt_comm.testing.in_order import nccl_rules
from bmt_comm.testing.modules import ModuleSource
from bmt_comm.testing.protocol import FormattedError

__tracebackhide__ = True


class Placeholder(enum.Enum):
    """A placeholder for a value that each rank makes itself."""

    CONTEXT = "the ParallelContext returned by init_distributed"


@dataclass
class TestBody:
    """Everything a rank needs to run a test function."""

    __test__ = False

    module: ModuleSource
    qualname: str
    """Path from the module to the function, through classes."""
    arguments: dict[str, bytes]
    """Each argument pickled by itself, so that one that fails can be named."""
    init: dict[str, Any] | None
    """Keyword arguments of init_distributed; None: do not call it."""
    filters: bytes
    """Pickled warning filters, from :func:`warning_filters`."""
    traceback_style: Any
    verbosity: int
    hides_gpus: bool
    """Whether a body that makes its context itself makes one on the CPU, if it does not name a device."""
    rules: tuple[str, bool] | None = None
    """The referee's address, and whether communicators are eager, where the test has NCCL's rules."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a body that did not fail."""

    kind: str  # "passed", "skipped" or "xfailed"
    reason: str = ""


def warning_filters() -> bytes:
    """The warning filters in force, in a form that can be pickled."""
    plain = []
    for action, message, category, module, line in warnings.filters:
        texts = [getattr(pattern, "pattern", pattern) or "" for pattern in (message, module)]
        plain.append((action, texts[0], category, texts[1], line))
    return pickle.dumps(plain)


def run_test(body: TestBody) -> Verdict:
    """Run the test function on this rank."""
    try:
        with warnings.catch_warnings():
            module = body.module.load(rewrite=True)
            _apply_filters(body.filters)
            arguments = {name: _unpickle(name, value) for name, value in body.arguments.items()}
            with _rules(body), _explained_comparisons(body.verbosity):
                context = None if body.init is None else bmt_comm.init_distributed(**body.init)
                for name, value in arguments.items():
                    if value is Placeholder.CONTEXT:
                        arguments[name] = context
                try:
                    with _default_device(body, context):
                        _find(module, body.qualname)(**arguments)
                finally:
                    for value in arguments.values():  # the process goes on to other tests
                        if isinstance(value, pytest.MonkeyPatch):
                            value.undo()
    except pytest.skip.Exception as skip:
        return Verdict("skipped", skip.msg or "")
    except pytest.xfail.Exception as xfail:
        return Verdict("xfailed", xfail.msg or "")
    except BaseException as error:
        text = _format(error, body.traceback_style)
        raise FormattedError(text, f"{type(error).__module__}.{type(error).__qualname__}") from None
    return Verdict("passed")


def _rules(body: TestBody) -> contextlib.AbstractContextManager[None]:
    if body.rules is None:
        return contextlib.nullcontext()
    address, eager = body.rules
    return nccl_rules(address, int(os.environ["RANK"]), eager)


@contextlib.contextmanager
def _default_device(body: TestBody, context: bmt_comm.ParallelContext | None) -> Iterator[None]:
    """Let a body make tensors and contexts on the device that it is to run on."""
    if context is not None and context.device.type == "cuda":
        with drawing_on(context.device):
            yield
    elif body.hides_gpus and torch.cuda.is_available():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: False)
            patch.setattr(torch.cuda, "is_initialized", lambda: False)  # an earlier test may have used the GPU
            patch.setattr(torch.cuda, "device_count", lambda: 0)
            yield
    else:
        yield


@contextlib.contextmanager
def drawing_on(device: torch.device) -> Iterator[None]:
    """Make tensors on ``device``, also those whose numbers come from a generator of the CPU."""
    with device, pytest.MonkeyPatch.context() as patch:
        torch.empty(0)  # torch keeps a list of functions that have a default device from the first call on
        for name in ("rand", "randn", "randint", "randperm"):
            patch.setattr(torch, name, _drawn_on_cpu(getattr(torch, name), device))
        yield


def _drawn_on_cpu(function: Callable[..., torch.Tensor], device: torch.device) -> Callable[..., torch.Tensor]:
    """``function`` (such as ``torch.randn``), which may be given a generator of the CPU: the numbers are the same."""

    @functools.wraps(function)
    def draw(*args: Any, **kwargs: Any) -> torch.Tensor:
        generator = kwargs.get("generator")
        if generator is None or generator.device.type != "cpu" or kwargs.get("device") is not None:
            return function(*args, **kwargs)
        requires_grad = kwargs.pop("requires_grad", False)
        return function(*args, **{**kwargs, "device": "cpu"}).to(device).requires_grad_(requires_grad)

    return draw


def _apply_filters(filters: bytes) -> None:
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(pickle.loads(filters)):
        warnings.filterwarnings(action, message, category, module, line)


def _unpickle(name: str, value: bytes) -> Any:
    try:
        return pickle.loads(value)
    except Exception as error:
        raise TypeError(f"argument {name!r} cannot be unpickled on a rank: {error!r}") from error


def _find(module: Any, qualname: str) -> Any:
    """The function; as a bound method of a fresh instance where it is in a class."""
    *classes, name = qualname.split(".")
    owner = functools.reduce(getattr, classes, module)
    return getattr(owner() if inspect.isclass(owner) else owner, name)


def _format(error: BaseException, style: Any) -> str:
    """The traceback as pytest shows it, without this package's frames."""
    from _pytest._io import TerminalWriter

    text = io.StringIO()
    shown = pytest.ExceptionInfo.from_exception(error).getrepr(style=style)
    shown.toterminal(TerminalWriter(text))
    return text.getvalue().strip("\n")


@contextlib.contextmanager
def _explained_comparisons(verbosity: int) -> Any:
    """Let a failing ``assert a == b`` show how a and b differ."""
    from _pytest.assertion import util

    def explain(operator: str, left: object, right: object) -> str | None:
        config = _config(verbosity)
        for lines in config.hook.pytest_assertrepr_compare(config=config, op=operator, left=left, right=right):
            shown = [line.replace("\n", "\\n") for line in islice(lines or (), 200)]
            if shown:
                return "\n~".join(shown).replace("%", "%%")
        return None

    previous = util._reprcompare
    util._reprcompare = explain
    try:
        yield
    finally:
        util._reprcompare = previous


@functools.cache
def _config(verbosity: int) -> pytest.Config:
    """A pytest configuration with no plugins but the built-in ones, for their comparison of values."""
    from _pytest.config import _prepareconfig

    arguments: Sequence[str] = [
        f"--verbosity={verbosity}",
        "--assert=plain",
        "--capture=no",
        "--noconftest",
        "--config-file",
        os.devnull,
        "--rootdir",
        os.getcwd(),
        "-p",
        "no:cacheprovider",
    ]
    environ = dict(os.environ)
    try:
        for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
            os.environ.pop(name, None)
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        return _prepareconfig(list(arguments))
    finally:
        os.environ.clear()
        os.environ.update(environ)
