"""Check the Markdown files: relative links lead somewhere, and Python examples run.

Every block fenced as ``python`` is run as a script of its own, in an empty folder, as a single process; one that
defines ``test_…`` functions is run by pytest. ``<!-- no-run -->`` on the line before a block exempts it; so does any
other language, such as ``console`` or ``text``.

Arguments: the files to check; by default all of them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(
    r"^(?P<indent> *)(?P<marks>`{3,})(?P<language>\w*)[^\n]*\n(?P<body>.*?)^ *(?P=marks)`* *$", re.M | re.S
)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)[^)]*\)")
NO_RUN = re.compile(r"<!-- no-run -->\s*\Z")


def anchors(path: Path) -> set[str]:
    """The fragments by which a Markdown file's headings are linked to."""
    titles = re.findall(r"^#+ +(.+?) *$", FENCE.sub("", path.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(path: Path) -> Iterator[str]:
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", path.read_text()))
    for match in LINK.finditer(text):
        target, _, fragment = match["target"].partition("#")
        if re.match(r"[a-z]+:", target):
            continue  # another site: not ours to check
        place = (path.parent / target).resolve() if target else path
        if not place.exists():
            yield f"the link to {match['target']} leads nowhere"
        elif fragment and place.suffix == ".md" and fragment not in anchors(place):
            yield f"the link to {match['target']} names no heading there"


def examples(path: Path) -> Iterator[tuple[Path, int, str]]:
    """The Python examples of a file that are to be run, each with the line where it begins."""
    text = path.read_text()
    for match in FENCE.finditer(text):
        if match["language"] == "python" and not NO_RUN.search(text[: match.start()]):
            body = re.sub(rf"^{match['indent']}", "", match["body"], flags=re.M)
            yield path, text[: match.start()].count("\n") + 1, body


def failure(path: Path, line: int, body: str) -> str | None:
    """What an example prints if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "test_example.py"
        script.write_text(body)
        command = [sys.executable, str(script)]
        if re.search(r"^(async )?def test_", body, re.M):
            command[1:1] = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
            command += ["--rootdir", folder]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    print(f"{path.relative_to(ROOT)}:{line}: {'ran' if result.returncode == 0 else 'FAILED'}", flush=True)
    if result.returncode == 0:
        return None
    return f"{path.relative_to(ROOT)}: the example in line {line} fails:\n{result.stdout}{result.stderr}"


def every_file() -> list[Path]:
    """The Markdown files outside of hidden folders and of what builds leave behind."""
    found = []
    for path in sorted(ROOT.rglob("*.md")):
        parts = path.relative_to(ROOT).parts
        if not any(part.startswith(".") or part in ("build", "dist") for part in parts):
            found.append(path)
    return found


def main(arguments: list[str]) -> int:
    paths = [ROOT / name for name in arguments] or every_file()
    problems = [f"{path.relative_to(ROOT)}: {problem}" for path in paths for problem in broken_links(path)]
    with ThreadPoolExecutor(2) as pool:  # most of an example's time is imports
        failures = pool.map(lambda example: failure(*example), [e for path in paths for e in examples(path)])
        problems += [problem for problem in failures if problem is not None]
    print("\n".join(problems) or f"{len(paths)} files are fine")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
