"""Check the metadata of the wheels and sdists in a folder, as a package index would."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

from packaging.metadata import Metadata
from packaging.utils import parse_sdist_filename, parse_wheel_filename


def read_metadata(path: Path) -> bytes:
    """The METADATA or PKG-INFO of a distribution."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return wheel.read(next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")))
    with tarfile.open(path) as sdist:
        file = sdist.extractfile(next(m for m in sdist if m.name.count("/") == 1 and m.name.endswith("/PKG-INFO")))
        assert file is not None
        return file.read()


def file_names(path: Path) -> list[str]:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return wheel.namelist()
    with tarfile.open(path) as sdist:
        return sdist.getnames()


def problems(path: Path) -> list[str]:
    """What is wrong with a distribution."""
    metadata = Metadata.from_email(read_metadata(path), validate=True)  # raises on what the standards forbid
    name, version = (parse_wheel_filename if path.suffix == ".whl" else parse_sdist_filename)(path.name)[:2]
    found = []
    if name != metadata.name.replace("_", "-").lower() or version != metadata.version:
        found.append(f"says it is {metadata.name} {metadata.version}")
    for field in ("summary", "description", "license_expression", "requires_python", "license_files"):
        if not getattr(metadata, field):
            found.append(f"has no {field}")
    if metadata.description_content_type != "text/markdown":
        found.append("has a description that is not marked as Markdown")
    names = file_names(path)
    found += [f"contains {n}" for n in names if "__pycache__" in n or n.endswith((".pyc", ".o"))]
    if not any(n.endswith("/py.typed") for n in names):
        found.append("contains no py.typed")
    return found


def main(folder: Path) -> int:
    files = sorted([*folder.glob("*.whl"), *folder.glob("*.tar.gz")])
    bad = [f"{path.name} {problem}" for path in files for problem in problems(path)]
    print("\n".join(bad) or f"{len(files)} distributions are fine")
    return 1 if bad or not files else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
