"""Greedy decoding must give the very tokens of `model.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from transformers import PreTrainedModel

from forerun.check import plain
from forerun.check.base import CheckResult, CheckSettings, Outcome, Pair, Tell
from forerun.config import SamplingParams
from forerun.math.penalties import adjust

NAME = "greedy text"
GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two greedy continuations of one prompt part."""

    row: int
    position: int  # index among the new tokens
    ours: int | None  # None where the text has ended
    theirs: int | None
    gap: float | None  # between the logits of the two tokens, where there are two
    is_tie: bool  # the gap is within twice the model's own rounding


def difference(
    model: PreTrainedModel | plain.Reading,
    prompt: Sequence[int],
    ours: Sequence[int],
    theirs: Sequence[int],
    rounding: float,
    row: int = 0,
    params: SamplingParams = GREEDY,
) -> Difference | None:
    """The first difference of two greedy continuations, judged by plain logits; None where there is none.

    `params` may hold penalties and a bias, which move the logits that are compared.
    """
    if list(ours) == list(theirs):
        return None
    pairs = enumerate(zip(ours, theirs, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    a, b = (tokens[position] if position < len(tokens) else None for tokens in (ours, theirs))
    if a is None or b is None:
        return Difference(row, position, a, b, None, False)
    logits = plain.logits_after(model, [*prompt, *theirs[:position]])
    logits = adjust(logits[None], prompt, theirs[:position], [], params)[0]
    gap = abs(float(logits[a] - logits[b]))
    return Difference(row, position, a, b, gap, gap <= 2 * rounding)


def gap_in_words(found: Difference) -> str:
    return "where one has ended" if found.gap is None else f"where the logits lie {found.gap:.2g} apart"


def check_greedy(
    pair: Pair, prompts: Sequence[Sequence[int]], settings: CheckSettings, rounding: float, tell: Tell
) -> CheckResult:
    """All prompts in one batch against `model.generate` one by one; ties of the best logits are told, not failed."""
    tell("greedy text, with drafts", 0, len(prompts) + 1)
    result = pair.decoder().generate(*padded(prompts, pair), max_new_tokens=settings.max_new_tokens)
    differences = []
    for row, (prompt, ours) in enumerate(zip(prompts, result.new_tokens, strict=True)):
        tell("greedy text, model.generate", row + 1, len(prompts) + 1)
        theirs = plain.greedy(pair.model, prompt, settings.max_new_tokens)
        if (found := difference(pair.model, prompt, ours, theirs, rounding, row)) is not None:
            differences.append(found)
    tell("greedy text", len(prompts) + 1, len(prompts) + 1)
    drafted = result.stats.num_draft_tokens
    numbers = {
        "prompts": len(prompts), "tokens": result.stats.num_emitted_tokens, "drafted": drafted,
        "accepted": result.stats.num_accepted_tokens, "logit_deviation": rounding,
        "differences": [asdict(d) for d in differences],
    }  # fmt: skip
    return CheckResult(NAME, _outcome(differences, drafted, pair), _summary(numbers, differences), numbers)


def padded(prompts: Sequence[Sequence[int]], pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, padded on the left."""
    width = max(map(len, prompts))
    ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=pair.model.device), torch.tensor(mask, device=pair.model.device)


def _outcome(differences: list[Difference], drafted: int, pair: Pair) -> Outcome:
    if any(not d.is_tie for d in differences):
        return Outcome.FAILED
    return Outcome.PASSED if drafted or pair.drafter is None else Outcome.UNTESTED


def _summary(numbers: dict[str, object], differences: list[Difference]) -> str:
    accepted = f"{numbers['accepted']} of {numbers['drafted']} drafted accepted"
    seen = f"{numbers['prompts']} prompts, {numbers['tokens']} tokens, {accepted}"
    rounding = f"{numbers['logit_deviation']:.1g}"
    faults = [d for d in differences if not d.is_tie]
    ties = len(differences) - len(faults)
    if faults:
        first = faults[0]
        return (
            f"{seen}; {len(faults)} differ from model.generate, the first in prompt {first.row + 1} at token "
            f"{first.position + 1}, {gap_in_words(first)} (rounding: {rounding})"
        )
    told = f", apart from {ties} numerical ties (logits closer than twice the rounding, {rounding})"
    return f"{seen}; identical to model.generate{told if ties else ''}"
