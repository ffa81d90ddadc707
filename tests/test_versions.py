"""The versions of the packages and the ranges that they ask of each other hold together."""

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))


def project(name):
    return tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]


def version(name):
    module = name.replace("-", "_")
    text = (ROOT / "packages" / name / "src" / module / "_version.py").read_text()
    return Version(re.search(r'__version__ = "(.+)"', text)[1])


def requirements(name):
    metadata = project(name)
    optional = metadata.get("optional-dependencies", {}).values()
    return [Requirement(entry) for entries in (metadata.get("dependencies", []), *optional) for entry in entries]


@pytest.mark.parametrize("name", PACKAGES)
def test_siblings_satisfy_what_is_required_of_them(name):
    for requirement in requirements(name):
        if requirement.name in PACKAGES:
            assert version(requirement.name) in requirement.specifier, requirement
            next_major = f"{version(requirement.name).major + 1}.0"
            assert next_major not in requirement.specifier, f"{requirement} allows an incompatible {next_major}"


@pytest.mark.parametrize("name", PACKAGES)
def test_versions_come_after_those_of_the_package_index(name):
    assert version(name) >= Version("2.0.0")
    assert "version" in project(name)["dynamic"]


@pytest.mark.parametrize("name", PACKAGES)
def test_the_changelog_tells_of_this_version_first(name):
    text = (ROOT / "packages" / name / "CHANGELOG.md").read_text()
    assert re.search(r"^## (.+)$", text, re.MULTILINE)[1] == str(version(name))


def test_the_whole_requires_every_part():
    assert {r.name for r in requirements("bmtrain")} >= set(PACKAGES) - {"bmtrain"}


def test_what_is_tested_is_what_is_promised():
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1].isalpha()]
    tested = {pin.name: next(iter(pin.specifier)).version for pin in pins}
    wanted = {r.name: r.specifier for name in PACKAGES for r in requirements(name) if r.name in tested}
    assert "torch" in wanted
    for name, specifier in wanted.items():
        assert tested[name] in specifier
    assert len({str(r.specifier) for name in PACKAGES for r in requirements(name) if r.name == "torch"}) == 1
    assert len({project(name)["requires-python"] for name in PACKAGES}) == 1
