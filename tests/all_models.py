"""Put every model of ``model_zoo`` to every check of ``model_checks`` on 2 ranks, and write docs/models.md.

    python tests/all_models.py [words in the names of models] [--checks updates,meta] [--limit 60]
                               [--results FILE] [--seconds 300] [--no-write]

With ``--results`` a run takes up where another has stopped. Ends with status 1 if a result is wrong, and with status 3
if ``--seconds`` were not enough.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import importlib.util
import json
import sys
import time
import warnings
from pathlib import Path

import torch
from model_checks import CHECKS, run
from model_zoo import Model, loss_of, size_of, transformers_models, vision_models

from bmt_comm.testing import RankError, RankPool

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
LARGEST = 30_000_000  # parameters of a model that is tried

INTRODUCTION = """# Models of other people

Models with small random weights, each under `BMTrainModelWrapper` on 2 CPU ranks, with the defaults of the wrapper
(`use_checkpoint=True`, ZeRO 3) and of the model (`use_cache=True`). `nox -s models` writes this page with
`tests/all_models.py`; CI takes some ten of them.

| column | what is compared with plain PyTorch |
|---|---|
| updates | the change of every parameter in 3 steps of SGD; names, ties, buffers |
| padded | the same, for a batch of sequences with padding |
| meta | values after a start on the meta device, wrapping and `init_parameters`: std, constants, buffers |
| generate | the tokens of greedy `generate` |
| save_pretrained | what the plain class loads with `from_pretrained` |
| LoRA before | updates of a model with adapters (peft) on all linear layers |
| LoRA after | the same for adapters that are added to the wrapped model |
| compiled | updates where each Block is compiled by `layer.compile()`, with the backend "eager" |
| tensor parallel | updates of the model sharded by `bmt_tp.parallelize` over the 2 ranks, by its plan or bmt-tp's |

A cell has the error, or "right"; *refused* or **wrong**, with the number of a message below; "–" where the plain model
cannot do it; "not run" where a check was left out. Updates are right if their error is at most {tolerance:.0e} in fp32,
or else at most {exact:.0e} in fp64, where rounding explains nothing.

A start on the meta device is refused where no module fills a parameter: build such models on a device. Constructors of
many vision models write into parameters after `reset_parameters`, and XLNet's attention does not heed the meta device:
`init_parameters` warns of both by name ("refused").

FSMT computes something else with a cache than without, also in plain PyTorch (it leaves out the causal mask), so it is
tried with `use_cache=False`. Layers that are given a cache (learned prefixes; XLM and Flaubert, which always make one)
are recomputed with the cache as it was before their forward.
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only models with one of these in their names")
    parser.add_argument("--checks", default=",".join(CHECKS), help="only these checks, separated by commas")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one check of one model")
    parser.add_argument("--results", type=Path, help="a file of results: those in it are not found out again")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin with no model after this time")
    parser.add_argument("--no-write", action="store_true", help="print the results and write no page")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    checks = [name for name in CHECKS if name in options.checks.split(",")]
    models = [*transformers_models(), *vision_models()]
    if options.words:
        models = [m for m in models if any(word.lower() in m.name.lower() for word in options.words)]
    results = Results(options.results)
    begin = time.monotonic()
    complete = True
    with RankPool(2) as pool:
        for number, model in enumerate(models, 1):
            missing = results.missing(model, checks)
            if not missing:
                continue
            complete = time.monotonic() - begin < options.seconds
            if not complete:
                break
            start = time.monotonic()
            problem = problem_of(model) if not results.of(model) else ""
            if problem:
                results.add(model, "not tried", problem)
            for check in missing if not problem else ():
                results.add(model, check, result_of(pool, model, check, options.limit))
            text = "; ".join(f"{check} {result}" for check, result in results.of(model).items())
            print(f"[{number}/{len(models)}] {model.name} ({time.monotonic() - start:.0f} s): {text}", flush=True)
    rows = {model: results.of(model) for model in models if results.of(model)}
    tried = {model: row for model, row in rows.items() if "not tried" not in row}
    if not options.no_write:
        PAGE.write_text(page(tried, {m: row["not tried"] for m, row in rows.items() if m not in tried}, checks))
    counts = collections.Counter(r.partition(":")[0] for row in tried.values() for r in row.values())
    print(f"{len(tried)} models, {len(rows) - len(tried)} not tried; {dict(counts)}")
    return 3 if not complete else 1 if counts["wrong"] else 0


class Results:
    """What is known of each model, by check, or as "not tried". Each result is a line of JSON in a file."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("a") if path else None
        self._known: dict[str, dict[str, str]] = {}
        for line in path.read_text().splitlines() if path else ():
            name, check, result = json.loads(line)
            self._known.setdefault(name, {})[check] = result

    def add(self, model: Model, check: str, result: str) -> None:
        self.of(model)[check] = result
        if self._file:
            print(json.dumps([model.name, check, result]), file=self._file, flush=True)

    def of(self, model: Model) -> dict[str, str]:
        return self._known.setdefault(model.name, {})

    def missing(self, model: Model, checks: list[str]) -> list[str]:
        return [] if "not tried" in self.of(model) else [check for check in checks if check not in self.of(model)]


def problem_of(model: Model) -> str:
    """Why a model is not tried: it cannot be built small, or does not train by itself; nothing if it does."""
    if importlib.util.find_spec("transformers") is not None:
        import transformers

        transformers.logging.set_verbosity_error()
    try:
        count = size_of(model)
        plain = model.build() if count <= LARGEST else None
        if plain is None:
            return f"{count / 1e6:.0f} million parameters with the sizes that were asked for"
        loss = loss_of(plain, model.batch(0), 4)
        loss.backward()
        return "" if torch.isfinite(loss) else "the loss is not finite"
    except Exception as error:  # whatever another library says
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0][:100]}"


def result_of(pool: RankPool, model: Model, check: str, limit: float) -> str:
    """What a check comes to: the worst result of the ranks."""
    try:
        by_rank = pool.run(run, 2, model, check, timeout=limit)
    except RankError as error:
        outcomes = sorted({str(report.outcome) for report in error.reports})
        return f"wrong: {', '.join(outcomes)}"
    order = ["wrong", "refused", "none", "right"]
    worst = min(by_rank, key=lambda result: order.index(result.partition(":")[0]))
    kinds = {result.partition(":")[0] for result in by_rank}
    return worst if len(kinds) == 1 or worst.startswith("wrong") else f"wrong: ranks differ: {by_rank}"


def page(results: dict[Model, dict[str, str]], unusable: dict[Model, str], checks: list[str]) -> str:
    """The results as Markdown."""
    from model_checks import TOLERANCE, TOLERANCE_64

    versions = [
        f"{name} {importlib.metadata.version(name)}"
        for name in ("torch", "transformers", "peft", "torchvision", "timm")
        if importlib.util.find_spec(name) is not None
    ]
    lines = [INTRODUCTION.format(tolerance=TOLERANCE, exact=TOLERANCE_64), f"Versions: {', '.join(versions)}.", ""]
    messages: dict[str, int] = {}
    for library in dict.fromkeys(model.library for model in results):
        lines += [f"## {library}", "", f"| model | {' | '.join(checks)} |", "|---" * (len(checks) + 1) + "|"]
        for model, row in sorted(results.items(), key=lambda item: item[0].name.lower()):
            if model.library == library:
                cells = [cell(row[check], messages) if check in row else "not run" for check in checks]
                lines.append(f"| {model.name} | {' | '.join(cells)} |")
        lines.append("")
    if messages:
        lines += ["## Messages", ""]
        lines += [f"{number}. {escaped(text)}" for text, number in messages.items()]
        lines.append("")
    if unusable:
        lines += [
            "## Not tried",
            "",
            "Configurations that small sizes do not fit, or whose inputs are not made here.",
            "",
        ]
        lines += ["| model | why |", "|---|---|"]
        lines += [
            f"| {model.name} | {escaped(why)} |" for model, why in sorted(unusable.items(), key=lambda i: i[0].name)
        ]
        lines.append("")
    return "\n".join(lines)


def cell(result: str, messages: dict[str, int]) -> str:
    kind, _, text = result.partition(": ")
    if kind == "none":
        return "–"
    if kind == "right":
        return text.partition(",")[0] or "right"
    number = messages.setdefault(text, len(messages) + 1)
    return f"*refused* ({number})" if kind == "refused" else f"**wrong** ({number})"


def escaped(text: str) -> str:
    return f"`{text.replace('`', chr(39)).replace('|', '/')}`"


if __name__ == "__main__":
    sys.exit(main())
