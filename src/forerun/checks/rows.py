"""A row's tokens must not depend on its neighbours: the coupled rule, alone and in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from forerun.checks.base import CheckedPair, CheckResult, Outcome
from forerun.checks.settings import CheckSettings
from forerun.math.random import RandomStream, span, uniforms
from forerun.measure import reference
from forerun.measure.progress import Reporter
from forerun.types import Keys, Rule

NAME = "rows apart"


@dataclass(frozen=True, slots=True)
class RowDifference:
    """Where a row alone and the same row in a batch part."""

    row: int
    position: int
    distance: float  # how far the row's random number lies from both tokens' share of the law
    is_rounding: bool


def check_rows(
    pair: CheckedPair, prompts: Sequence[Sequence[int]], settings: CheckSettings, rounding: float, reporter: Reporter
) -> CheckResult:
    """Sample every prompt alone and all of them together, with the same request ids."""
    length = max(2, settings.max_new_tokens // 2)
    keywords: dict[str, Any] = {
        "max_new_tokens": length,
        "temperature": settings.temperature,
        "top_k": settings.top_k,
        "seed": settings.seed,
    }
    decoder = pair.decoder(Rule.COUPLED)
    reporter.start("rows together", total=len(prompts) + 1)
    together = decoder.generate(prompts, **keywords).new_tokens
    differences = []
    for row, prompt in enumerate(prompts):
        reporter.advance()
        reporter.start("rows alone")
        alone = decoder.generate([prompt], request_ids=[row], **keywords).new_tokens[0]
        if (parted := _row_difference(pair, prompt, alone, together[row], row, settings, rounding)) is not None:
            differences.append(parted)
    faults = [p for p in differences if not p.is_rounding]
    numbers = {
        "rows": len(prompts),
        "tokens_each": length,
        "logit_deviation": rounding,
        "partings": [asdict(p) for p in differences],
    }
    return CheckResult(
        NAME,
        Outcome.FAILED if faults else Outcome.PASSED,
        _summary(differences, faults, len(prompts), rounding),
        numbers,
    )


def _row_difference(
    pair: CheckedPair,
    prompt: Sequence[int],
    alone: list[int],
    together: list[int],
    row: int,
    settings: CheckSettings,
    rounding: float,
) -> RowDifference | None:
    if alone == together:
        return None
    pairs = enumerate(zip(alone, together, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), min(len(alone), len(together)))
    if position in (len(alone), len(together)):
        return RowDifference(row, position, 1.0, False)
    law = reference.law(reference.logits_after(pair.model, [*prompt, *alone[:position]]), settings.params)
    u = _uniform(settings.seed, row, position)
    distance = max(_outside(law, tokens[position], u) for tokens in (alone, together))
    return RowDifference(row, position, distance, distance <= 2 * reference.slack(rounding, settings.temperature))


def _uniform(seed: int, request_id: int, position: int) -> float:
    """The random number that the coupled rule uses at a position."""
    keys = Keys(*(torch.tensor([value]) for value in (seed, request_id, 0, position)))
    return float(uniforms(keys, span(RandomStream.TARGET, 1)))


def _outside(law: torch.Tensor, token: int, u: float) -> float:
    """How far u lies outside the token's interval of the cumulative law."""
    end = float(law[: token + 1].sum())
    return max(end - float(law[token]) - u, u - end, 0.0)


def _summary(differences: list[RowDifference], faults: list[RowDifference], rows: int, rounding: float) -> str:
    if faults:
        first = faults[0]
        where = f"the first (prompt {first.row + 1}) at token {first.position + 1}"
        return f"{len(faults)} of {rows} rows change with their neighbours, {where}"
    if differences:
        return (
            f"{len(differences)} of {rows} rows part where a random number falls between two tokens: this model's "
            f"logits depend on the batch's shape, by {rounding:.1g}; the laws agree"
        )
    return f"{rows} rows, rule coupled: the same tokens alone and in a batch"
