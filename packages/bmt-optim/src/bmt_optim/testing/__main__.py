"""The table of what conforms: ``python -m bmt_optim.testing``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .cases import CASES
from .frameworks import FRAMEWORKS, Slices, Zero
from .kit import close, outcomes
from .subjects import subjects, versions


def _told(failures: Sequence[tuple[str, str, str, str]]) -> list[str]:
    """The (subject, framework, case, outcome) of cases that did not pass, grouped by subject and outcome."""
    alike: dict[tuple[str, str], dict[str, list[str]]] = {}
    for subject, framework, case, what in failures:
        alike.setdefault((subject, what.partition("(")[0].rstrip()), {}).setdefault(framework, []).append(case)
    lines = []
    for (subject, what), by_framework in alike.items():
        where = [
            f"{framework}, {' and '.join(cases) if len(cases) < 3 else f'{len(cases)} cases'}"
            for framework, cases in by_framework.items()
        ]
        lines.append(f"- {subject}: {what} ({'; '.join(where)})")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bmt_optim.testing", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="optimizers whose names begin so")
    parser.add_argument("--frameworks", nargs="+", choices=list(FRAMEWORKS), default=list(FRAMEWORKS), metavar="NAME")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME")
    parser.add_argument("--into", type=Path, help="a file whose lines after <!-- table --> the table replaces")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds after which a case hangs")
    chosen = parser.parse_args(arguments)
    passed, seen, failures = True, {}, []
    lines = ["| | " + " | ".join(chosen.frameworks) + " |", "|---" * (len(chosen.frameworks) + 1) + "|"]
    for subject in subjects():
        if subject.name in seen or (chosen.only and not subject.name.startswith(tuple(chosen.only))):
            continue
        seen[subject.name] = subject
        cells = []
        for name in chosen.frameworks:
            if subject.name.endswith("*") and isinstance(FRAMEWORKS[name], (Zero, Slices)):
                cells.append("")  # not its own framework
                continue
            results = outcomes(subject, name, chosen.cases, chosen.timeout)
            good, run = results.count("pass"), len(results) - results.count("-")
            cells.append(f"{good} of {run}" if good < run else f"all {run}")
            for case, what in zip(chosen.cases, results):
                if what not in ("pass", "-"):
                    failures.append((subject.name, name, case, what))
                    print(*failures[-1], sep=", ", file=sys.stderr, flush=True)
                    passed &= subject.name.endswith("*")
        lines.append(f"| {subject.name} | " + " | ".join(cells) + " |")
        print(lines[-1], file=sys.stderr, flush=True)
    text = "\n".join([f"Made with {versions(seen.values())}.", "", *lines, "", *_told(failures)]).rstrip() + "\n"
    print(text)
    if chosen.into is not None:
        before, mark, _ = chosen.into.read_text().partition("<!-- table -->\n")
        chosen.into.write_text(f"{before}{mark}\n{text}")
    return 0 if passed else 1


if __name__ == "__main__":
    try:
        code = main()
    finally:
        close()
    sys.exit(code)
