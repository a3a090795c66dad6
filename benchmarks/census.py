"""`python -m benchmarks.census`: what Forerun makes of every model type of transformers, on shrunk random models.

With names of types it prints what becomes of these. `--write` judges all of them and writes docs/models.md and the list
of proven classes, src/forerun/models/proven.py, whose models need no self-check.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the recipes are the tests'

from benchmarks.families.page import section  # noqa: E402
from support.census import NOT_BUILT, Recipe, causal_recipes, seq2seq_recipes  # noqa: E402
from support.census_judge import Finding, Outcome, judge, proven_classes  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
PROVEN = ROOT / "src" / "forerun" / "models" / "proven.py"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.census", description=__doc__)
    parser.add_argument("types", nargs="*", help="Judge these alone, causal and encoder-decoder.")
    parser.add_argument("--write", action="store_true", help="Judge all, and write both files.")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="Processes side by side.")
    asked = parser.parse_args()
    with ProcessPoolExecutor(asked.jobs, get_context("spawn"), _be_quiet) as pool:
        causal = list(judged(pool, causal_recipes(), asked.types))
        seq2seq = list(judged(pool, seq2seq_recipes(), asked.types))
    if asked.write:
        PAGE.write_text(page(causal, seq2seq))
        PROVEN.write_text(proven(sorted(proven_classes((*causal, *seq2seq)))))
    if any(finding.outcome not in (Outcome.EXACT, Outcome.REFUSED) for finding in (*causal, *seq2seq)):
        sys.exit(1)


def _be_quiet() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")


def judged(pool: Executor, recipes: Sequence[Recipe], types: Sequence[str]) -> Iterator[Finding]:
    """Say each finding as it comes."""
    for finding in pool.map(judge, [recipe for recipe in recipes if not types or recipe.model_type in types]):
        print(f"{finding.recipe.name:32} {finding.outcome:10} {finding.layout:7} {finding.reason}", flush=True)
        yield finding


def proven(classes: list[str]) -> str:
    """src/forerun/models/proven.py."""
    return "\n".join([
        '"""Model classes that the census found exact, and the transformers it did so with.',
        "",
        "Written by `python -m benchmarks.census --write`; `tests/models/test_census.py` holds it to the census.",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        f'TRANSFORMERS = "{transformers.__version__}"',
        "CLASSES = frozenset({",
        *(f'    "{name}",' for name in classes),
        "})  # fmt: skip",
        "",
    ])  # fmt: skip


def page(causal: list[Finding], seq2seq: list[Finding]) -> str:
    """docs/models.md."""
    return "\n".join([*_beginning(causal, seq2seq), *_kind("Causal models", causal),
                      *_kind("Encoder-decoder models", seq2seq), *_not_built(), "", *section()])  # fmt: skip


def _beginning(causal: list[Finding], seq2seq: list[Finding]) -> list[str]:
    types = len({finding.recipe.model_type for finding in (*causal, *seq2seq)})
    return [
        "# Which models work",
        "",
        f"Written by `python -m benchmarks.census --write` with transformers {transformers.__version__}; do not edit.",
        "",
        f"For each of {types} model types of transformers a shrunk random model (about a hundred tokens of vocabulary,",
        "two layers, grouped keys, windows shorter than the texts, few experts; float64 where its modules run in it)",
        "decoded a ragged batch of three greedily: plainly, with drafts of which every third token is wrong, and with",
        "trees. *Exact* means that every row was `model.generate`'s, token for token, where the best two logits stood",
        "far enough apart that rounding cannot decide. Everything else is refused when the decoder is made, with the",
        "reason given here. `tests/models/test_census.py` keeps it so. Other models, and all models with another",
        "version of transformers, are tried when their decoder is made: see [exactness.md](exactness.md).",
        "",
    ]


def _kind(title: str, findings: list[Finding]) -> list[str]:
    exact = [finding for finding in findings if finding.outcome is Outcome.EXACT]
    others = [finding for finding in findings if finding.outcome is Outcome.REFUSED]
    faults = [finding for finding in findings if finding.outcome in (Outcome.WRONG, Outcome.UNDECIDED)]
    lines = [f"## {title}", "", f"### Exact: {len(exact)}", "", "| type | layout | trees |", "|---|---|---|"]
    lines += [f"| {f.recipe.name} | {f.layout} | {'yes' if f.takes_trees else 'no'} |" for f in exact]
    lines += ["", f"### Refused: {len(others)}", "", "| type | reason |", "|---|---|"]
    lines += [f"| {f.recipe.name} | {_cell(f.reason)} |" for f in others]
    if faults:
        lines += ["", f"### Wrong, to be mended: {len(faults)}", "", "| type | what |", "|---|---|"]
        lines += [f"| {f.recipe.name} | {f.outcome}: {_cell(f.reason)} |" for f in faults]
    return [*lines, ""]


def _not_built() -> list[str]:
    lines = [f"## Not tried: {len(NOT_BUILT)}", "", "| type | why no shrunk model decodes text |", "|---|---|"]
    return [*lines, *(f"| {name} | {reason} |" for name, reason in sorted(NOT_BUILT.items()))]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
