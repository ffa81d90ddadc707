"""Check the Markdown files: relative links lead somewhere, and Python examples run.

Every block fenced as ``python`` is run as a script of its own, in an empty folder, as a single process; one that
defines ``test_…`` functions is run by pytest. ``<!-- no-run -->`` on the line before a block exempts it; so does any
other language, such as ``console`` or ``text``. Shell scripts are parsed, not run, with the options that they give to
Slurm. The messages that ``docs/troubleshooting.md`` explains must be in the sources, the README's figures of what
training costs in the tables of ``docs/benchmarks.md``, and pictures are those that ``docs/pictures.py`` draws.

Arguments: the files to check; by default all of them.
"""

from __future__ import annotations

import importlib
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "site"))

from messages import messages  # noqa: E402

FENCE = re.compile(
    r"^(?P<indent> *)(?P<marks>`{3,})(?P<language>\w*)[^\n]*\n(?P<body>.*?)^ *(?P=marks)`* *$", re.M | re.S
)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)[^)]*\)")
# Options of sbatch that scripts here use, and the form of their values; None: they take none.
SBATCH = {
    "job-name": r"[\w.-]+",
    "nodes": r"\d+(-\d+)?",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"([\w.-]+:)?\d+",
    "cpus-per-task": r"\d+",
    "time": r"(\d+-)?\d+(:\d\d){0,2}",
    "output": r"\S+",
    "open-mode": r"append|truncate",
    "requeue": None,
    "signal": r"([RB]+:)?(\d+|[A-Z]+\d?)(@\d+)?",
}
SECONDS = 300  # that an example may take
PRELOADED = ["torch", "torch.distributed.tensor", "transformers", "bmtrain"]
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


def broken_scripts(path: Path) -> Iterator[str]:
    """What is wrong with a file's shell scripts: those that bash cannot parse, and options that sbatch would refuse."""
    text = path.read_text()
    for match in FENCE.finditer(text):
        if match["language"] not in ("sh", "bash"):
            continue
        line = text[: match.start()].count("\n") + 1
        result = subprocess.run(["bash", "-n"], input=match["body"], capture_output=True, text=True, timeout=60)
        if result.returncode:
            yield f"the script in line {line} is not one: {result.stderr.strip()}"
        options = re.findall(r"^#SBATCH +(.*)$", match["body"], re.M)
        head = match["body"].split("\n\n")[0]
        if options and not head.startswith("#!"):
            yield f"the script in line {line} begins with no #!, so sbatch refuses it"
        if len(options) != len(re.findall(r"^#SBATCH ", head, re.M)):
            yield f"the script in line {line} has options that sbatch ignores: they follow its head"
        for option in options:
            name, equals, value = option.removeprefix("--").partition("=")
            form = SBATCH.get(name, "")
            fits = form is None and not equals if form is None else bool(form) and re.fullmatch(form, value)
            if not option.startswith("--") or not fits:
                yield f"the script in line {line} has {option!r}, which is no option of sbatch that is known here"


def missing_messages() -> Iterator[str]:
    """Messages that docs/troubleshooting.md explains and no source has."""
    texts = [text for file in ROOT.glob("packages/*/src/**/*.py") for _, text in messages(file)]
    sources = "\n".join(re.sub(r"\{[^{}]*\}", "\0", text) for text in texts)
    page = (ROOT / "docs" / "troubleshooting.md").read_text().partition("\n## All messages")[0]
    for table in re.findall(r"^\| message .*?(?:\n\n|\Z)", page, re.M | re.S):
        for message in re.findall(r"^\| `(.+?)` \|", table, re.M):
            pattern = r"[^\n]*?".join(re.escape(part.strip()) for part in message.split("…") if part.strip())
            if not re.search(pattern, sources):
                yield f"docs/troubleshooting.md: no source has the message {message!r}"


def unmeasured_figures() -> Iterator[str]:
    """Figures of the README's section "What it costs" that the tables of training steps do not have."""
    readme = (ROOT / "README.md").read_text()
    section = readme.partition("\n## What it costs\n")[2].partition("\n## ")[0]
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    tables = page.partition("<!-- train-step: begin -->")[2].partition("<!-- train-step: end -->")[0]
    measured = set(re.findall(r"\d+\.\d+", "\n".join(re.findall(r"^\|.*$", tables, re.M))))
    quoted = re.findall(r"\d+\.\d+", section)
    if not quoted:
        yield "README.md: the section 'What it costs' quotes no figure"
    for figure in quoted:
        if figure not in measured:
            yield f"README.md: docs/benchmarks.md has no {figure} in its tables of training steps"


def old_pictures() -> Iterator[str]:
    """Pictures that are not what the code draws; that of memory depends on PyTorch's version."""
    names = ["flat-buffer", "pipeline-timelines", "optimizer-rounds", "checkpoint-files"]
    command = [sys.executable, str(ROOT / "docs" / "pictures.py"), "--check", *names]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if result.returncode:
        yield result.stdout + result.stderr


def run_example(body: str, folder: Path) -> NoReturn:
    """Run an example in this process, which is a fork for it alone, and end with a script's exit status."""
    script = folder / "test_example.py"
    script.write_text(body)
    output = os.open(folder.parent / f"{folder.name}.output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    signal.alarm(SECONDS)  # ends it
    sys.argv, sys.path[0] = [str(script)], str(folder)
    if re.search(r"^(async )?def test_", body, re.M):
        options = ["-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder)]
        # pytest wants to see its plugins imported.
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *options, str(script)])
    runpy.run_path(str(script), run_name="__main__")
    sys.exit(0)


def failures(found: list[tuple[Path, int, str]], folder: Path) -> Iterator[str]:
    """What examples print that fail.

    Each runs in a fork of this process, two at a time, because most of an example's time would be the import of torch.
    """
    for name in PRELOADED:
        importlib.import_module(name)
    running: dict[int, int] = {}
    for number in range(len(found) + 1):
        while running and (len(running) == 2 or number == len(found)):
            pid, status = os.wait()
            path, line, _ = found[at := running.pop(pid)]
            print(f"{path.relative_to(ROOT)}:{line}: {'FAILED' if status else 'ran'}", flush=True)
            if status:
                said = (folder / f"{at}.output").read_text()
                how = f"signal {os.WTERMSIG(status)}\n" if os.WIFSIGNALED(status) else ""
                yield f"{path.relative_to(ROOT)}: the example in line {line} fails:\n{said}{how}"
        if number < len(found):
            own = folder / str(number)
            own.mkdir()
            sys.stdout.flush()
            pid = os.fork()
            if not pid:
                run_example(found[number][2], own)
            running[pid] = number


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
    problems += [f"{path.relative_to(ROOT)}: {problem}" for path in paths for problem in broken_scripts(path)]
    problems += missing_messages()
    problems += unmeasured_figures()
    problems += [] if arguments else old_pictures()
    folder = Path(tempfile.mkdtemp())
    problems += failures([example for path in paths for example in examples(path)], folder)
    shutil.rmtree(folder)  # not by a context, which forks would leave, too
    print("\n".join(problems) or f"{len(paths)} files are fine")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
