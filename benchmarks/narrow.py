"""`python -m benchmarks.narrow TEXT`: what quantising a model's weights or its keys and values does to it, on a text.

For each form, beside float32: perplexity, how often the likeliest next token is still the same one, and
alpha = E[sum min(p, q)], the chance that a token drafted by the quantised copy is kept by the float32 target
(`SelfDraft`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.command import add_outputs, make_parser, run_command
from forerun.cache.paged import PagedCache
from forerun.config import Kernels
from forerun.errors import InvalidArgument
from forerun.eval.estimate import Estimate, compare, mean
from forerun.eval.windows import Window, windows
from forerun.files import read_text
from forerun.kernels.cpu.narrow import held
from forerun.loading import load_model
from forerun.loading.quantise import SCHEMES, matrices
from forerun.measure.plot import Figure, Panel, Series
from forerun.measure.progress import Reporter
from forerun.measure.provenance import provenance, without_folders
from forerun.measure.record import Record
from forerun.measure.show import main
from forerun.measure.table import Table
from forerun.measure.turns import Turn, TurnsOutcome, take_turns
from forerun.models.cache_size import CACHE_SCHEMES, cache_scheme
from forerun.models.scorer import Scorer

KIND = "narrow weights"
FLOAT32 = "float32"
KEYS = " keys"  # ends the name of a form whose keys and values are rounded
PAPERS = "w8a8"  # weights and activations as BASS rounds them; its keys and values are rounded, too
AT_ONCE = 64  # positions whose logits are held at a time
KEYS_AT_ONCE = 8192  # of a window, and blocks to spare


@dataclass(slots=True)
class Reading:
    """One model on one window: sums over its scored positions."""

    window: int
    form: str
    positions: int = 0
    minus_log_probability: float = 0.0
    agreements: int = 0  # positions at which the likeliest token is float32's
    overlap: float = 0.0  # sum of min(p, q)


class Forms:
    """The same model in float32 and rounded, each with a scorer of its own."""

    def __init__(self, model: str, schemes: Sequence[str], keys: Sequence[str], use: Kernels) -> None:
        self.scorers: dict[str, Scorer] = {}
        self.sizes: dict[str, int] = {}
        for form in (FLOAT32, *schemes):
            asked: dict[str, Any] = {} if form == FLOAT32 else {"quantize": form}
            loaded, self.tokenizer = load_model(model, device="cpu", dtype="float32", **asked)
            size = sum(held(weight)[1] for weight in matrices(loaded))
            self._add(form, Scorer(loaded, use=use), size)
            for rounded in keys if form in (FLOAT32, PAPERS) else ():
                name = (rounded if form == FLOAT32 else f"{form}, {rounded}") + KEYS
                self._add(name, with_rounded_keys(loaded, rounded), size)

    def _add(self, form: str, scorer: Scorer, size: int) -> None:
        self.scorers[form], self.sizes[form] = scorer, size

    @torch.inference_mode()
    def read(self, index: int, window: Window) -> list[Reading]:
        totals = {form: Reading(index, form) for form in self.scorers}
        for scorer in self.scorers.values():
            scorer.admit(0)
            scorer.feed([0], [window.tokens[: window.first - 1]])
        for start in range(window.first - 1, len(window.tokens) - 1, AT_ONCE):
            stop = min(start + AT_ONCE, len(window.tokens) - 1)
            right = torch.tensor(window.tokens[start + 1 : stop + 1])
            wide: Tensor | None = None
            for form, scorer in self.scorers.items():
                logs = scorer.score([0], [window.tokens[start:stop]]).double().log_softmax(-1)
                wide = logs if wide is None else wide
                sums = totals[form]
                sums.positions += len(right)
                sums.minus_log_probability -= float(logs.gather(1, right[:, None]).sum())
                sums.agreements += int((logs.argmax(-1) == wide.argmax(-1)).sum())
                sums.overlap += float(torch.minimum(logs, wide).exp().sum())
        for scorer in self.scorers.values():
            scorer.release(0)
        return list(totals.values())


def with_rounded_keys(model: PreTrainedModel, scheme: str) -> Scorer:
    """On a GPU kernels read such keys. Here torch does, from the same blocks: slower, and the same numbers."""
    cache = PagedCache(KEYS_AT_ONCE, torch.device("cpu"), scheme=cache_scheme(scheme))
    return Scorer(model, cache=cache, use=Kernels.OFF)


@dataclass(frozen=True, slots=True)
class Compared:
    """One form beside float32."""

    perplexity: Estimate
    difference: Estimate  # of perplexities
    change: Estimate  # the same in percent of float32's
    agreement: Estimate
    alpha: Estimate


def compared(readings: Sequence[Reading], forms: Iterable[str]) -> dict[str, Compared]:
    """Intervals of 95 %, by a bootstrap over windows; the change of perplexity is paired, window by window."""
    by_form = {}
    wide = [reading for reading in readings if reading.form == FLOAT32]
    for form in forms:
        narrow = [reading for reading in readings if reading.form == form]
        if not narrow or len(narrow) != len(wide):
            continue
        losses = [[r.minus_log_probability / r.positions for r in side] for side in (wide, narrow)]
        both = compare(*losses, weights=[r.positions for r in narrow], exponential=True)
        percent = 100 / both.plain.value
        ends = (None if end is None else percent * end for end in (both.difference.low, both.difference.high))
        by_form[form] = Compared(
            both.speculative,
            both.difference,
            Estimate(percent * both.difference.value, *ends),
            mean([r.agreements / r.positions for r in narrow]),
            mean([r.overlap / r.positions for r in narrow]),
        )
    return by_form


def summary(readings: Sequence[Reading], sizes: dict[str, int]) -> Table:
    rows = []
    for form, change in compared(readings, sizes).items():
        cells = (
            _shown(change.perplexity, 2),
            f"{change.change.value:+.2f} %",
            _shown(change.difference, 3),
        )
        shares = (_shown(change.agreement, 3), _shown(change.alpha, 3))
        rows.append((form, f"{sizes[form] / 2**20:.0f}", *cells, *shares))
    headings = ("", "MiB", "perplexity", "change", "difference", "same likeliest token", "alpha")
    return Table("Rounded weights, or keys and values, beside float32", headings, tuple(rows))


def figure(readings: Sequence[Reading], sizes: dict[str, int], machine: str) -> Figure | None:
    """Bars a scheme: perplexity beside float32's, with intervals of 95 %, and how like float32's its laws are."""
    by_form = compared(readings, sizes)
    schemes = tuple(form for form in by_form if form != FLOAT32)
    if not schemes:
        return None
    ticks = tuple(map(float, range(len(schemes))))
    changes = [by_form[form].change for form in schemes]
    error = tuple(0.0 if e.low is None or e.high is None else (e.high - e.low) / 2 for e in changes)
    change = Series("", ticks, tuple(e.value for e in changes), kind="bars", error=error)
    shares = {  # their intervals are lopsided, the more the nearer to 1: the table has them
        "likeliest token unchanged": [by_form[form].agreement.value for form in schemes],
        "alpha as a draft": [by_form[form].alpha.value for form in schemes],
    }
    panels = (
        Panel("", "", "perplexity beside float32's, %", (change,), ticks, schemes, y_from=None),
        *(
            Panel("", "", what, (Series("", ticks, tuple(values), kind="bars", values="%.3f"),), ticks, schemes)
            for what, values in shares.items()
        ),
    )
    return Figure(f"Rounded, {machine}", panels, columns=3, panel_size=(3.8, 3.4))


def _shown(estimate: Estimate, digits: int) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.{digits}f}"
    return f"{estimate.value:.{digits}f} ({estimate.low:.{digits}f} to {estimate.high:.{digits}f})"


def chosen_windows(tokens: Sequence[int], size: int, count: int) -> list[Window]:
    """`count` windows spread evenly over a text."""
    every = windows(tokens, size)[1:]
    if not 1 <= count <= len(every):
        raise InvalidArgument(f"--windows {count}: the text has {len(every)} of {size} tokens")
    return [every[i * len(every) // count] for i in range(count)]


def run(
    model: str, text: Path, schemes: Sequence[str], keys: Sequence[str], size: int, count: int, use: Kernels,
    output: Path, reporter: Reporter, command: Sequence[str],
) -> Record:  # fmt: skip
    content = read_text(text)
    reporter.start(f"loading {without_folders(model)}")
    forms = Forms(model, schemes, keys, use)
    windows = chosen_windows(forms.tokenizer(content)["input_ids"], size, count)
    origin, readings = provenance("cpu", command), list[Reading]()

    def save(outcome: TurnsOutcome) -> Record:
        return Record(
            KIND,
            origin,
            settings={"model": without_folders(model), "text": text.name, "window": size, "windows": count},
            rows=[asdict(reading) for reading in readings],
            details={"bytes": forms.sizes},
            tables=(summary(readings, forms.sizes),) if readings else (),
            figure=figure(readings, forms.sizes, origin.machine.name),
            remarks=(f"{count} windows of {size} tokens, of which the second half is scored; intervals of 95 %",),
            complete=outcome.complete,
        ).kept(output)

    def one(index: int, window: Window) -> None:
        readings.extend(forms.read(index, window))

    return take_turns([Turn(f"window {i + 1}", partial(one, i, w)) for i, w in enumerate(windows)], reporter, save)


def command(arguments: list[str]) -> int:
    parser = make_parser("narrow", __doc__)
    parser.add_argument("text", type=Path, help="a text file, such as test.txt of WikiText-2")
    parser.add_argument("--model", default="embedded", help="Hub name, folder, GGUF file or 'embedded'")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--keys", nargs="*", choices=list(CACHE_SCHEMES), default=list(CACHE_SCHEMES),
                        help=f"round keys and values, of float32 and of {PAPERS} weights")  # fmt: skip
    parser.add_argument("--window", type=int, default=256, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--kernels", choices=[each.value for each in Kernels], default=Kernels.ON.value)
    add_outputs(parser, plot="perplexity and likeness of each scheme")
    chosen = parser.parse_args(arguments)
    use = Kernels(chosen.kernels)
    parts = (chosen.model, chosen.text, chosen.schemes, chosen.keys, chosen.window, chosen.windows, use)
    return run_command("narrow", arguments, chosen, partial(run, *parts))


if __name__ == "__main__":
    sys.exit(main(lambda: command(sys.argv[1:])))
