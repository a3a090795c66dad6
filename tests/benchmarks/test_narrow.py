"""What quantising does to a model: sums over windows become a table and a picture."""

from __future__ import annotations

import copy
from math import exp

import pytest

from benchmarks.narrow import FLOAT32, Reading, figure, summary, with_rounded_keys
from forerun.config import Kernels
from forerun.models.scorer import Scorer
from support.tiny import tiny_model

SIZES = {FLOAT32: 4 << 20, "int8": 1 << 20, "int4": 1 << 19}


def readings() -> list[Reading]:
    """Two windows; int4 has been measured on the first alone."""
    found = []
    for window, loss in enumerate((20.0, 30.0)):
        found.append(Reading(window, FLOAT32, 10, loss, 10, 10.0))
        found.append(Reading(window, "int8", 10, loss + 1, 9, 8.0))
    return [*found, Reading(0, "int4", 10, 25.0, 5, 4.0)]


def test_each_scheme_beside_float32() -> None:
    table = summary(readings(), SIZES)
    assert [row[:2] for row in table.rows] == [(FLOAT32, "4"), ("int8", "1")]
    wide, eight = table.rows
    assert wide[2].startswith(f"{exp(2.5):.2f} (") and eight[2].startswith(f"{exp(2.6):.2f} (")
    assert (wide[3], eight[3]) == ("+0.00 %", f"{100 * (exp(0.1) - 1):+.2f} %")
    assert eight[5].startswith("0.900") and eight[6].startswith("0.800")


def test_the_picture_is_the_tables() -> None:
    drawn = figure(readings(), SIZES, "m")
    assert drawn is not None
    assert all(panel.x_names == ("int8",) for panel in drawn.panels)
    values = [panel.series[0].y[0] for panel in drawn.panels]
    assert values == pytest.approx([100 * (exp(0.1) - 1), 0.9, 0.8])
    assert drawn.panels[0].series[0].error[0] > 0
    assert figure([one for one in readings() if one.form == FLOAT32], SIZES, "m") is None


def test_rounded_keys_and_nothing_else() -> None:
    """Not the model's own logits, and the further from them the fewer bits of a number count."""
    model, tokens = tiny_model("llama"), list(range(1, 25))
    scorers = {"exact": Scorer(copy.deepcopy(model), use=Kernels.OFF)}
    scorers |= {scheme: with_rounded_keys(model, scheme) for scheme in ("int8", "fp8")}
    logits = {}
    for name, scorer in scorers.items():
        scorer.admit(0)
        logits[name] = scorer.score([0], [tokens])
    spread = logits["exact"].std()
    eight, floating = (float((logits[name] - logits["exact"]).abs().mean() / spread) for name in ("int8", "fp8"))
    assert 1e-3 < eight < floating / 2 < 0.2
