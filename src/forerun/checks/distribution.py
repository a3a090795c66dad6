"""Sampling must follow the target's law: continuations drawn through the whole loop against laws computed plainly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from forerun.checks.base import CheckedPair, CheckResult, Outcome
from forerun.checks.chi_square import POWER, Fit, detectable, fit
from forerun.checks.control import WrongDrafter, most_telling
from forerun.checks.settings import CheckSettings
from forerun.engine import Stats
from forerun.measure import reference
from forerun.measure.progress import Reporter
from forerun.types import Rule

NAME, CONTROL = "sampled law", "control"
LENGTH = 3  # new tokens of a continuation: a draft of two and what follows
MOST_TESTS = 6  # the first token, and continuations of the most frequent prefixes
LEAST_SAMPLES = 60  # a prefix seen less often says too little about what follows


@dataclass(frozen=True, slots=True)
class Draws:
    """Sampled continuations of one prompt."""

    tokens: list[list[int]]
    stats: Stats


@dataclass(frozen=True, slots=True)
class LawTest:
    """Compares continuations of one prompt with the target's exact law after each prefix."""

    pair: CheckedPair
    prompt: Sequence[int]
    settings: CheckSettings
    rounding: float

    def fit(self, tokens: Sequence[Sequence[int]], prefix: tuple[int, ...]) -> Fit:
        """What follows `prefix`, where something follows."""
        n = len(prefix)
        counts = Counter(t[n] for t in tokens if len(t) > n and tuple(t[:n]) == prefix)
        logits = reference.logits_after(self.pair.model, [*self.prompt, *prefix])
        law = reference.law(logits, self.settings.params)
        doubtful = reference.edge(logits, self.settings.params, self.rounding)
        return fit(counts, law, reference.slack(self.rounding, self.settings.temperature), doubtful)


def check_distribution(
    pair: CheckedPair, prompts: Sequence[Sequence[int]], settings: CheckSettings, rounding: float, reporter: Reporter
) -> list[CheckResult]:
    """The test on the prompt whose continuation is most open, then the control on the same one."""
    laws = [reference.law(reference.logits_after(pair.model, prompt), settings.params) for prompt in prompts]
    best = max(range(len(laws)), key=lambda i: most_telling(laws[i])[1])
    test = LawTest(pair, prompts[best], settings, rounding)
    draws = _draw(pair, test.prompt, settings, reporter, "sampled law", max_new_tokens=LENGTH)
    prefixes = _prefixes(draws.tokens)
    level = settings.alpha / len(prefixes)
    fits = {prefix: test.fit(draws.tokens, prefix) for prefix in prefixes}
    return [_finding(pair, settings, draws, fits, level), _check_control(test, laws[best], level, reporter)]


def _draw(
    pair: CheckedPair, prompt: Sequence[int], settings: CheckSettings, reporter: Reporter, stage: str, **ends: Any
) -> Draws:
    """Independent continuations: one seed, request ids that count on from batch to batch. `ends`: where they end."""
    decoder = pair.decoder()
    ids = torch.tensor([list(prompt)], device=pair.model.device)
    tokens: list[list[int]] = []
    stats = []
    reporter.start(stage, total=settings.samples)
    while len(tokens) < settings.samples:
        count = min(settings.batch, settings.samples - len(tokens))
        result = decoder.generate(
            ids, temperature=settings.temperature, top_k=settings.top_k, seed=settings.seed, **ends,
            num_return_sequences=count, request_ids=range(len(tokens), len(tokens) + count),
        )  # fmt: skip
        tokens += result.new_tokens
        stats.append(result.stats)
        reporter.advance(count)
    return Draws(tokens, Stats.total(stats))


def _prefixes(tokens: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The empty one and the most frequent others. They are chosen by their own counts, never by what follows them."""
    counts = Counter(tuple(t[:n]) for t in tokens for n in range(1, LENGTH) if len(t) > n)
    frequent = [prefix for prefix, count in counts.most_common(MOST_TESTS - 1) if count >= LEAST_SAMPLES]
    return [(), *frequent]


def _finding(
    pair: CheckedPair, settings: CheckSettings, draws: Draws, fits: dict[tuple[int, ...], Fit], level: float
) -> CheckResult:
    worst = min(fits.values(), key=lambda f: f.p_value)
    adjusted = min(1.0, worst.p_value * len(fits))
    distance = _detectable(fits[()], level)
    stats = draws.stats
    numbers: dict[str, Any] = {
        "samples": settings.samples, "drafted": stats.num_draft_tokens, "accepted": stats.num_accepted_tokens,
        "tests": [{"beginning": list(b), **asdict(f)} for b, f in fits.items()], "level_each": level,
        "p_value": adjusted, "alpha": settings.alpha, "detectable_distance": distance, "power": POWER,
    }  # fmt: skip
    summary = (
        f"{settings.samples} continuations, {stats.num_accepted_tokens} of {stats.num_draft_tokens} drafted accepted; "
        f"p = {adjusted:.2g} over {len(fits)} chi-square tests; a first-token law off by {distance:.0%} or more would "
        f"fail with chance {POWER:.0%}"
    )
    if adjusted < settings.alpha:
        return CheckResult(NAME, Outcome.FAILED, f"{summary}; the text does not follow the target's law", numbers)
    drafted = stats.num_draft_tokens or pair.drafter is None
    return CheckResult(NAME, Outcome.PASSED if drafted else Outcome.UNTESTED, summary, numbers)


def _detectable(first: Fit, level: float) -> float:
    return detectable(first.samples, first.freedom, level, first.shift) if first.freedom else 1.0


def _check_control(test: LawTest, law: torch.Tensor, level: float, reporter: Reporter) -> CheckResult:
    """The same test on a sampler that is wrong by a known distance: it must be rejected."""
    token, distance = most_telling(law)
    liar = replace(test.pair, drafter=WrongDrafter(token, len(test.prompt)), policy=1, rule=Rule.TOKEN)
    # Room for a draft, yet any token ends the text: only the first is judged.
    ends = {"max_new_tokens": 2, "eos_token_id": range(len(law))}
    draws = _draw(liar, test.prompt, test.settings, reporter, "control", **ends)
    fit = test.fit(draws.tokens, ())
    caught = fit.p_value < level
    numbers = {"distance": distance, "p_value": fit.p_value, "level": level, "caught": caught}
    answer = "yes" if caught else "no"
    summary = (
        f"control caught: {answer}; a sampler that draws corrections from p instead of the rest of p, "
        f"its law off by {distance:.0%}: p = {fit.p_value:.1g}"
    )
    if not caught:
        summary += "; the distribution test proves nothing here: give more --samples or a higher --temperature"
    return CheckResult(CONTROL, Outcome.PASSED if caught else Outcome.UNTESTED, summary, numbers)
