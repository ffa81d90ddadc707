"""pytest plugin: ``@pytest.mark.ranks(n)`` runs the body of a test on n processes at once.

.. code-block:: python

    @pytest.mark.ranks(2, 4, tp_size=2)
    def test_layout(ctx, tmp_path):
        assert ctx.tp_size == 2

The positional arguments of the mark are numbers of ranks (one test item each), ``timeout`` is in seconds,
``init=False`` leaves the initialisation to the body, ``nccl_rules="lazy"`` or ``"eager"`` lets CPU ranks communicate by
NCCL's rules (see :mod:`bmt_comm.testing.in_order`; ``--bmt-nccl-rules`` does so for all tests), and all other keyword
arguments go to :func:`bmt_comm.init_distributed`, whose result the body gets as ``ctx``. Fixtures run in the pytest
process, and their values travel to the ranks by pickle.
"""

from __future__ import annotations

import inspect
import pickle
import re
import zlib
from collections.abc import Sequence
from typing import cast

import pytest

from bmt_comm.testing.body import Placeholder, TestBody, Verdict, run_test, warning_filters
from bmt_comm.testing.in_order import BACKEND
from bmt_comm.testing.modules import ModuleSource
from bmt_comm.testing.pool import DEFAULT_TIMEOUT, RankPool
from bmt_comm.testing.referee import Referee
from bmt_comm.testing.report import RankReport, describe

_WORLD_SIZE = "_ranks_world_size"

# One pool for all pytest sessions of this process (they nest where pytest tests a plugin), so that the inner ones
# find the processes warm. The last session to end closes it.
_pool = RankPool()
_sessions = 0


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("bmt_comm", "tests on several ranks")
    group.addoption(
        "--bmt-device",
        choices=["auto", "cpu", "cuda"],
        default=None,
        help="device of tests marked ranks(n): auto takes cuda where there are n GPUs, else cpu",
    )
    group.addoption(
        "--bmt-ranks",
        type=int,
        action="append",
        metavar="N",
        help="of tests marked ranks, run those on this number of ranks alone (may be given several times)",
    )
    group.addoption(
        "--bmt-one-size",
        action="store_true",
        help="run each test marked ranks, with each set of its parameters, on one of its numbers of ranks, by turns",
    )
    group.addoption(
        "--bmt-each-size",
        action="store_true",
        help="run each test marked ranks with each set of its parameters and on each of its numbers of ranks at least "
        "once, by turns, but not with all pairs of them",
    )
    group.addoption(
        "--bmt-nccl-rules",
        choices=["off", "lazy", "eager"],
        default="off",
        help="run tests marked ranks on CPU by NCCL's rules: order, blocking and reuse of buffers that hang or race on "
        "GPUs fail; eager: as if init_process_group had been given a device_id",
    )
    group.addoption(
        "--bmt-share-gpu",
        action="store_true",
        help="run tests marked ranks with all their ranks on one GPU, where there is one: NCCL then sends through "
        "sockets, as between hosts",
    )
    parser.addini("bmt_device", "default of --bmt-device", default="auto")
    parser.addini(
        "bmt_preload",
        "modules that ranks have imported from the start, where they are installed; they must start no threads",
        type="args",
    )
    parser.addini("bmt_ranks_timeout", "seconds a test marked ranks may take", default=str(DEFAULT_TIMEOUT))


def pytest_configure(config: pytest.Config) -> None:
    global _sessions
    config.addinivalue_line(
        "markers",
        "ranks(*sizes, timeout=60, init=True, **kwargs): run the test body on that many processes (one test per "
        "size) and hand kwargs to bmt_comm.init_distributed",
    )
    _sessions += 1


def pytest_unconfigure() -> None:
    global _sessions
    _sessions -= 1
    if _sessions == 0:
        _pool.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is None:
        return
    sizes = mark.args
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: ranks{sizes!r}: the positional arguments of the mark are numbers of "
            "ranks, at least one, each an int above 0"
        )
    if _WORLD_SIZE not in metafunc.fixturenames:
        metafunc.fixturenames.append(_WORLD_SIZE)
    ids = [f"ranks={size}" for size in sizes]
    metafunc.parametrize(_WORLD_SIZE, sizes, ids=ids, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--bmt-ranks")
    keep = [item for item in items if not wanted or _ranks_of(item) in (None, *wanted)]
    if config.getoption("--bmt-one-size"):
        keep = _by_turns(keep, each_size=False)
    elif config.getoption("--bmt-each-size"):
        keep = _by_turns(keep, each_size=True)
    if len(keep) < len(items):
        kept = set(keep)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = keep


def _by_turns(items: list[pytest.Item], each_size: bool) -> list[pytest.Item]:
    """Of items that differ in their number of ranks alone, one; more where a test would miss one of its numbers.

    The choice depends on the names of the items only. Without ``each_size`` it is always one.
    """
    tests: dict[str, dict[str, list[pytest.Item]]] = {}  # test -> its parameters -> an item for each number of ranks
    for item in items:
        parameters = re.sub(rf"\branks={_ranks_of(item)}\b", "", item.nodeid)
        tests.setdefault(item.nodeid.partition("[")[0], {}).setdefault(parameters, []).append(item)
    chosen = set()
    for test, groups in tests.items():
        start, sets = zlib.crc32(test.encode()), list(groups.values())
        turns = max(len(sets), max(map(len, sets))) if each_size else len(sets)
        for turn in range(turns):
            group = sets[turn % len(sets)]
            chosen.add(group[(start + turn) % len(group)])
    return [item for item in items if item in chosen]


def pytest_collection_finish(session: pytest.Session) -> None:
    _pool.preload = session.config.getini("bmt_preload")


def _ranks_of(item: pytest.Item) -> int | None:
    """The number of ranks that a test runs on; None without the mark."""
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get(_WORLD_SIZE)


@pytest.fixture
def _ranks_world_size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def ctx(request: pytest.FixtureRequest) -> Placeholder:
    """The ``ParallelContext`` of the rank, in the body of a test marked ``ranks``."""
    mark = request.node.get_closest_marker("ranks")
    if mark is None or not mark.kwargs.get("init", True):
        raise pytest.UsageError("ctx exists only in tests marked ranks(...), without init=False")
    return Placeholder.CONTEXT


@pytest.fixture
def device_type(request: pytest.FixtureRequest) -> str:
    """``"cpu"`` or ``"cuda"``: where this test runs (see ``--bmt-device``)."""
    marked = request.node.get_closest_marker("ranks") is not None
    return _device_type(request.config, request.getfixturevalue(_WORLD_SIZE) if marked else 1)


def _wanted_device(config: pytest.Config) -> str:
    wanted: str = config.getoption("--bmt-device") or config.getini("bmt_device")
    if wanted not in ("auto", "cpu", "cuda"):
        raise pytest.UsageError(f"bmt_device={wanted!r}: auto, cpu or cuda is needed")
    return wanted


def _device_type(config: pytest.Config, world_size: int) -> str:
    import torch

    wanted = _wanted_device(config)
    if wanted == "cpu":
        return "cpu"
    gpus = torch.cuda.device_count()
    if gpus > 1 and config.getoption("--bmt-share-gpu"):
        raise pytest.UsageError(f"--bmt-share-gpu: {gpus} GPUs are visible; set CUDA_VISIBLE_DEVICES to one of them")
    if gpus >= world_size or (gpus and config.getoption("--bmt-share-gpu")):
        return "cuda"
    if wanted == "cuda":
        pytest.skip(f"needs {world_size} GPUs, found {gpus}")
    return "cpu"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    world_size = cast(int, pyfuncitem.callspec.params[_WORLD_SIZE])
    init = dict(mark.kwargs)
    timeout = init.pop("timeout", None) or float(pyfuncitem.config.getini("bmt_ranks_timeout"))
    initialise = init.pop("init", True)
    # Bodies that make process groups themselves have what they ask for.
    default = pyfuncitem.config.getoption("--bmt-nccl-rules") if initialise else "off"
    rules = init.pop("nccl_rules", default)
    if rules not in ("off", "lazy", "eager"):
        raise pytest.UsageError(f"{pyfuncitem.nodeid}: nccl_rules={rules!r}: off, lazy or eager is needed")
    if initialise:
        init.setdefault("device", _device_type(pyfuncitem.config, world_size))
        if init["device"] != "cpu" or "backend" in init:
            rules = "off"  # it has another backend's
        elif rules != "off":
            init["backend"] = BACKEND
    elif init:
        raise pytest.UsageError(f"ranks(init=False) takes no arguments of init_distributed, got {sorted(init)}")
    wants_gpus = "device_type" in pyfuncitem.funcargs or _wanted_device(pyfuncitem.config) == "cuda"
    style = pyfuncitem.config.getoption("tbstyle")
    body = TestBody(
        module=_source(pyfuncitem),
        qualname=_qualname(pyfuncitem),
        arguments={name: _pickled(name, pyfuncitem.funcargs[name]) for name in _argnames(pyfuncitem)},
        init=init if initialise else None,
        hides_gpus=not initialise and not wants_gpus,
        filters=warning_filters(),
        traceback_style={"auto": "long", "no": "line"}.get(style, style),
        verbosity=pyfuncitem.config.get_verbosity(pytest.Config.VERBOSITY_ASSERTIONS),
    )
    unended = []
    _pool.share_gpu = pyfuncitem.config.getoption("--bmt-share-gpu")
    if rules == "off":
        reports = _pool.execute(run_test, world_size, [body], timeout=timeout)
    else:
        with Referee(world_size) as referee:
            body.rules = (referee.address, rules == "eager")
            reports = _pool.execute(run_test, world_size, [body], timeout=timeout)
        unended = [] if referee.rules.failure else referee.rules.unended()
    _attach_output(pyfuncitem, reports)
    _conclude(reports)
    if unended:
        listing = "\n".join(f"rank {each.rank}: {each}" for each in unended)
        raise pytest.fail.Exception(f"operations have not ended\n{listing}", pytrace=False)
    return True


def _source(item: pytest.Function) -> ModuleSource:
    source = ModuleSource.of(item.module)
    if source is None:
        raise pytest.UsageError(f"{item.nodeid}: ranks(...) needs a test module that is a Python file")
    return source


def _qualname(item: pytest.Function) -> str:
    name = item.originalname
    return name if item.cls is None else f"{item.cls.__qualname__}.{name}"


def _argnames(item: pytest.Function) -> Sequence[str]:
    """Names of the fixtures and parameters that the function itself asks for."""
    wanted = inspect.signature(item.obj).parameters
    return [name for name in item.funcargs if name in wanted]


def _pickled(name: str, value: object) -> bytes:
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        message = (
            f"argument {name!r}, a {type(value).__name__}, cannot be pickled, so it cannot be handed to the ranks "
            f"({type(error).__name__}: {error}). Make it inside the test body."
        )
        raise pytest.fail.Exception(message, pytrace=False) from None


def _attach_output(item: pytest.Function, reports: Sequence[RankReport]) -> None:
    for report in reports:
        for name, text in (("stdout", report.stdout), ("stderr", report.stderr)):
            if not text:
                continue
            item.add_report_section("call", f"{name} of rank {report.rank}", text)
            if item.config.getoption("capture") == "no":
                print("".join(f"[rank {report.rank}] {line}\n" for line in text.splitlines()), end="")


def _conclude(reports: Sequence[RankReport]) -> None:
    """Turn the ends of all ranks into the outcome of the test."""
    __tracebackhide__ = True
    if any(report.failed for report in reports):
        raise pytest.fail.Exception(describe(reports), pytrace=False)
    verdicts: list[Verdict] = [report.value for report in reports]
    kinds = {verdict.kind for verdict in verdicts}
    if len(kinds) > 1:
        listing = "\n".join(f"rank {i}: {v.kind} {v.reason}".rstrip() for i, v in enumerate(verdicts))
        raise pytest.fail.Exception(f"the ranks disagree about the outcome\n{listing}", pytrace=False)
    if kinds == {"skipped"}:
        raise pytest.skip.Exception(verdicts[0].reason, _use_item_location=True)
    if kinds == {"xfailed"}:
        raise pytest.xfail.Exception(verdicts[0].reason)
