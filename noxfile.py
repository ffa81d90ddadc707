"""What is checked, and how: ``nox -l`` lists the sessions, a bare ``nox`` runs what CI runs.

Environment:
    BMT_TORCH       the torch version of the test environments (2.8.0, say) instead of the pin in constraints.txt
    PIP_FIND_LINKS  folders or pages with further wheels, such as another build of torch; uv gets them, too

``nox --no-venv -s tests`` (lint, docs, train, bench) uses what is installed and installs nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2025.10.14"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "build", "tests_alone", "tests_across"]

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
# In an order in which each needs only those before it.
PACKAGES = ["bmt-kernels", "bmt-comm", "bmt-zero", "bmt-tp", "bmt-pipe", "bmt-optim", "bmtrain"]

BUILD_NEEDS = ["build", "hatchling>=1.26", "scikit-build-core>=1.0", "pybind11>=3.0", "editables", "packaging"]
TOOL_NEEDS = ["pytest>=8", "packaging", "tomli; python_version < '3.11'"]
TEST_NEEDS = ["pytest>=8", "hypothesis", "numpy", "safetensors", "transformers", "came-pytorch", "matplotlib"]
EXAMPLE_NEEDS = ["tokenizers", "matplotlib", "tqdm", "safetensors", "numpy"]


@nox.session
def lint(session: nox.Session) -> None:
    """Style, types, and that the packages' versions and imports fit together."""
    install(session, "torch", "numpy", "safetensors", "ruff", "mypy", *TOOL_NEEDS)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", *[str(path) for path in sorted(ROOT.glob("packages/*/src/*"))])
    session.run(
        "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_versions.py", "tests/test_layering.py"
    )


@nox.session(default=False)
def tests(session: nox.Session) -> None:
    """All tests, in one environment with all packages in place; arguments go to pytest."""
    install(session, "torch", *TOOL_NEEDS, *TEST_NEEDS, *EXAMPLE_NEEDS)
    install(session, "--no-deps", "galore-torch")  # of which tests use what does not need bitsandbytes
    install_ours(session)
    arguments = session.posargs or ["tests", *[f"packages/{name}/tests" for name in PACKAGES]]
    session.run("python", "-m", "pytest", *arguments)


@nox.session(reuse_venv=False)
def build(session: nox.Session) -> None:
    """Build wheels and sdists into dist/, check their metadata, install the wheels and import them."""
    needs_environment(session)
    shutil.rmtree(DIST, ignore_errors=True)
    install(session, "torch", "numpy", *BUILD_NEEDS)
    install_build_tools(session)
    for name in PACKAGES:
        # The wheel is made from the sdist, so an sdist that lacks a file fails here.
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(DIST), f"packages/{name}")
    session.run("python", ".ci/check_dist.py", str(DIST))
    install_wheels(session, *PACKAGES)
    session.chdir(temporary_folder(session))  # away from the sources
    session.run("python", "-W", "error", "-c", f"import {', '.join(import_name(name) for name in PACKAGES)}")
    session.run("bmtrain", "info")


@nox.session(requires=["build"])
def tests_alone(session: nox.Session) -> None:
    """Each package's tests with nothing of ours but what it requires; arguments are package names.

    Packages come from the wheels in dist/ and tests run in a temporary folder, so a requirement that is not
    declared, a file that is not packaged and a module that a folder shadows are noticed.
    """
    needs_environment(session)
    install(session, "torch", *TEST_NEEDS)
    install(session, "--no-deps", "galore-torch")  # of which tests use what does not need bitsandbytes
    failed = []
    for name in session.posargs or PACKAGES:
        uninstall_ours(session)
        install_wheels(session, name)
        folder = temporary_folder(session) / name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(ROOT / "packages" / name / "tests", folder / "tests")
        shutil.copy(ROOT / "packages" / name / "README.md", folder)
        with session.chdir(folder):
            settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), "-p", "no:cacheprovider"]
            try:
                session.run("python", "-m", "pytest", *settings, "tests")
            except CommandFailed:
                failed.append(name)
    if failed:
        session.error(f"tests fail in {', '.join(failed)}")


@nox.session(requires=["build"])
def tests_across(session: nox.Session) -> None:
    """The tests of packages together, of the example and of the documentation, with all wheels installed."""
    needs_environment(session)
    install(session, "torch", *TOOL_NEEDS, *TEST_NEEDS, *EXAMPLE_NEEDS)
    install(session, "--no-deps", "galore-torch")  # of which tests use what does not need bitsandbytes
    uninstall_ours(session)
    install_wheels(session, *PACKAGES)
    session.run("python", "-m", "pytest", *(session.posargs or ["tests"]))
    session.run("python", ".ci/check_docs.py")


@nox.session(default=False)
def sanitize(session: nox.Session) -> None:
    """The tests of bmt-kernels with its CPU module under AddressSanitizer and UndefinedBehaviorSanitizer (GCC)."""
    needs_environment(session)
    install(session, "torch", *TEST_NEEDS, *BUILD_NEEDS)
    install_build_tools(session)
    build = {"BMT_SANITIZE": "ON", "BMT_CUDA": "OFF", "SKBUILD_BUILD_DIR": str(session.env_dir / "build-sanitized")}
    session.install("--no-build-isolation", "--no-deps", "--force-reinstall", "packages/bmt-kernels", env=build)
    libraries = [
        (session.run("g++", f"-print-file-name=lib{name}.so", silent=True, external=True) or "").strip()
        for name in ("asan", "ubsan")
    ]
    # Python and torch do not free all they have at their end, and torch's exceptions cross the sanitizer's stacks.
    environment = {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"}
    arguments = session.posargs or ["packages/bmt-kernels/tests"]
    session.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, env=environment)


@nox.session(requires=["build"], default=False)
def docs(session: nox.Session) -> None:
    """Links of the Markdown files resolve, and their Python examples run."""
    install(session, "torch", *TEST_NEEDS)
    if has_own_environment(session):
        uninstall_ours(session)
        install_wheels(session, *PACKAGES)
    session.run("python", ".ci/check_docs.py", *session.posargs)


@nox.session(default=False)
def train(session: nox.Session) -> None:
    """Train the GPT-2 example, on every GPU or on two CPU ranks; arguments go to the script."""
    install(session, "torch", *EXAMPLE_NEEDS)
    install_ours(session)
    count = session.run("python", "-c", "import torch; print(torch.cuda.device_count() or 2)", silent=True)
    processes = (count or "2").split()[-1]
    session.run("torchrun", "--standalone", "--nproc-per-node", processes, "examples/gpt2/train.py", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Run the scripts of benchmarks/, or the one that is named, with its arguments."""
    scripts = {path.stem: path for path in sorted((ROOT / "benchmarks").glob("*.py")) if is_script(path)}
    name, *arguments = session.posargs or [""]
    if name and name not in scripts:
        session.error(f"there is no benchmark {name!r}; choose one of {', '.join(scripts)}")
    install(session, "torch", *EXAMPLE_NEEDS)
    install_ours(session)
    for script in [scripts[name]] if name else scripts.values():
        session.run("python", "-W", "ignore", str(script), *arguments)


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
        session.install("-c", str(constraints(session)), *dict.fromkeys(requirements), env=uv_settings())


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
    install(session, *BUILD_NEEDS)
    install_build_tools(session)
    paths = [argument for name in PACKAGES for argument in ("-e", f"packages/{name}")]
    # A build folder of this environment's own: CMake keeps paths of the environment that it first saw.
    build_folder = str(session.env_dir / "build-kernels")
    session.install(
        "--no-build-isolation", "--no-deps", "--force-reinstall", *paths, env={"SKBUILD_BUILD_DIR": build_folder}
    )


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
    session.install("--no-index", "--find-links", str(DIST), *packages)


if __name__ == "__main__":
    sys.exit("run this file by nox: python3 -m pip install nox && python3 -m nox")
