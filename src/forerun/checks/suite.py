"""The whole suite on one pair."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from forerun.arguments import integer, list_of, methods, refuse
from forerun.checks.base import POLICY, CheckedPair, CheckResult, Outcome
from forerun.checks.distribution import check_distribution
from forerun.checks.divergence import check_lossy
from forerun.checks.greedy import check_greedy
from forerun.checks.rows import check_rows
from forerun.checks.settings import CheckSettings
from forerun.drafters.base import Drafter
from forerun.engine.request import check_fits
from forerun.errors import FaultWarning, ForerunWarning, InvalidArgument, UnsupportedModel
from forerun.inputs import text_ids, unpadded
from forerun.keywords import check_tokenizer
from forerun.measure import reference
from forerun.measure.progress import Reporter, Silent
from forerun.models.families import check_model, context_length, head_size
from forerun.policy import as_policy
from forerun.rules import parse
from forerun.types import Rule

# Ordinary text that repeats itself, so that every kind of drafter has something to propose.
PROMPTS = (
    "The three primary colours are red, yellow and blue. What are the three primary colours? The three primary",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,",
    "Once upon a time there was a fox who lived in a forest. One morning the fox",
)

OPEN_PROMPTS = (
    "My sister likes music and my brother likes music and my mother likes",
    "The cat sat on the mat. The dog sat on the",
    "Monday was cold. Tuesday was cold. Wednesday was",
    "I went to the market and bought some apples. Then I went to the market and bought some",
)
"""Each ends with words it has used before, so that look-up drafts, and goes on in more than one way."""

MEASURED = 2  # prompts the model's rounding is measured on


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All findings on one pair."""

    findings: tuple[CheckResult, ...]
    settings: CheckSettings

    @property
    def passed(self) -> bool:
        """Whether every test was made and passed."""
        return all(finding.outcome is Outcome.PASSED for finding in self.findings)

    @property
    def verdict(self) -> str:
        """The outcome in a sentence."""
        alpha = self.settings.alpha
        rate = f"A pair that is exact fails this command by chance {alpha:g} of the time, over all seeds."
        if self.passed:
            return f"Passed. {rate}"
        if any(finding.outcome is Outcome.FAILED for finding in self.findings):
            return f"FAILED: this pair does not give exactly the target's text. {rate}"
        return "Nothing failed, but a test marked 'untested' had nothing to test: no drafts, or too few samples."

    def __str__(self) -> str:
        lines = [f"{finding.name}: {finding.outcome}. {finding.summary}" for finding in self.findings]
        return "\n".join([*lines, self.verdict])

    def as_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, "plan": asdict(self.settings), "findings": [asdict(f) for f in self.findings]}


def check(
    target: PreTrainedModel,
    drafter: Drafter | str | None = "auto",
    *,
    tokenizer: Any = None,
    prompts: Sequence[str | Sequence[int]] | None = None,
    open_prompts: Sequence[str | Sequence[int]] | None = None,
    settings: CheckSettings | None = None,
    reporter: Reporter | None = None,
    **options: Any,
) -> CheckReport:
    """Test that decoding `target` with `drafter` gives exactly the target's text; `forerun check` in Python.

    Greedy text is compared with `model.generate`, sampled text with the target's law by chi-square tests, rows of a
    batch with the same rows alone. `report.passed` is the verdict and `print(report)` says why.

    Prompts are texts, which need a `tokenizer`, or token ids; `open_prompts`, for the sampled tests, should go on in
    more than one way. Built-in texts are used where none are given. `options` are those of `SpeculativeDecoder`:
    `policy` (4 by default: "auto" may find that nothing pays in runs this short), `rule`, `attention`, `kernels`,
    `compile`.
    """
    check_model("target", target)
    _refuse_encoder(target)
    rule, policy = parse(options.pop("rule", Rule.TOKEN)), options.pop("policy", POLICY)
    as_policy(policy)  # refused here; each decoder makes one of its own
    if tokenizer is not None:
        check_tokenizer("tokenizer", tokenizer)
    if settings is not None and not isinstance(settings, CheckSettings):
        refuse("settings", settings, "must be a CheckSettings of forerun.checks.settings, or None")
    if reporter is not None:
        methods("reporter", reporter, ("start", "advance", "say"), "must have the methods start, advance and say")
    vocab_size = head_size(target)
    asked = _rows("prompts", PROMPTS if prompts is None else prompts, tokenizer, vocab_size)
    opened = _rows("open_prompts", OPEN_PROMPTS if open_prompts is None else open_prompts, tokenizer, vocab_size)
    pair = CheckedPair(target, drafter, policy, rule, {"tokenizer": tokenizer, **options})
    return check_pair(pair, asked, opened, settings, reporter)


def _refuse_encoder(target: PreTrainedModel) -> None:
    if getattr(target.config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{type(target).__name__} is an encoder-decoder model, and these tests are of causal ones: "
            "`forerun generate --compare` decodes with model.generate beside it"
        )


def _rows(name: str, prompts: Any, tokenizer: Any, vocab_size: int) -> list[list[int]]:
    """Token ids of each prompt."""
    if isinstance(prompts, Tensor):
        return unpadded(prompts, None, name, vocab_size)
    rows = prompts.tolist() if getattr(prompts, "ndim", 1) == 2 else prompts
    remedy = "must be a list of texts, or of lists of token ids"
    return list_of(name, rows, partial(_row, tokenizer=tokenizer, vocab_size=vocab_size), remedy)


def _row(name: str, prompt: Any, tokenizer: Any, vocab_size: int) -> list[int]:
    if isinstance(prompt, str) and tokenizer is None:
        raise InvalidArgument(
            f"{name}: texts need a tokenizer: give tokenizer=, or prompts and open_prompts as token ids"
        )
    if isinstance(prompt, str) and not callable(tokenizer):
        refuse("tokenizer", tokenizer, "cannot encode the texts of prompts; use transformers.AutoTokenizer")
    ids = text_ids(tokenizer, prompt) if isinstance(prompt, str) else prompt
    token = partial(integer, low=0, high=vocab_size - 1, remedy=f"the target's token ids are 0 to {vocab_size - 1}")
    row = list_of(name, ids, token, "must be a text or a list of token ids")
    if not row:
        refuse(name, prompt, "is empty; give at least one token")
    return row


def check_pair(
    pair: CheckedPair,
    prompts: Sequence[Sequence[int]],
    open_prompts: Sequence[Sequence[int]],
    settings: CheckSettings | None = None,
    reporter: Reporter | None = None,
) -> CheckReport:
    """Test that `pair` gives exactly the target's text. Prompts are token ids; open ones may go on in several ways.

    A pair with a lossy rule never passes.
    """
    if not prompts or not open_prompts:
        raise InvalidArgument(f"{len(prompts)} prompts and {len(open_prompts)} open prompts: give at least one of each")
    settings = CheckSettings() if settings is None else settings
    _check_lengths(pair.model, [*prompts, *open_prompts], settings)
    reporter = Silent() if reporter is None else reporter
    reporter.start("the model's own rounding")
    rounding = max(reference.deviation(pair.model, prompt) for prompt in prompts[:MEASURED])
    with _drafter_failures() as failures:
        findings = [
            check_greedy(pair, prompts, settings, rounding, reporter),
            *check_distribution(pair, open_prompts, settings, rounding, reporter),
            check_rows(pair, prompts, settings, rounding, reporter),
            *check_lossy(pair, [*prompts, *open_prompts], settings, reporter),
        ]
    return CheckReport((*findings, *failures), settings)


def _check_lengths(model: PreTrainedModel, prompts: Sequence[Sequence[int]], settings: CheckSettings) -> None:
    """Before the model is run: where the context ends we stop, and model.generate goes on or fails."""
    config: Any = model.config.get_text_config(decoder=True)
    limit = context_length(config)
    longest = max(prompts, key=len)
    check_fits(longest, limit)
    if limit is not None and len(longest) + settings.max_new_tokens > limit:
        raise InvalidArgument(
            f"{settings.max_new_tokens} new tokens do not fit behind a prompt of {len(longest)}: the target's context "
            f"ends at {limit}; shorten the prompt, or test fewer tokens (max_new_tokens)"
        )


@contextmanager
def _drafter_failures() -> Iterator[list[CheckResult]]:
    """A drafter that fails costs the engine a draft and the user a warning; here it is a finding.

    Other warnings, such as one that decoding is slower, say nothing against the pair: they are passed on.
    """
    failures: list[CheckResult] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ForerunWarning)
        yield failures
    messages = {str(w.message): w for w in caught}
    for text, warning in messages.items():
        if issubclass(warning.category, FaultWarning):
            failures.append(CheckResult("drafter", Outcome.FAILED, text))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
