"""`forerun check`: it passes what is exact, fails what is not, and its statistics are what they claim to be."""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

import forerun
from cli.command import Command
from forerun.checks import chi_square
from forerun.checks.base import CheckedPair, Outcome
from forerun.checks.chi_square import detectable, fit, survival
from forerun.checks.settings import CheckSettings
from forerun.checks.suite import CheckReport, check_pair
from forerun.drafters import DraftModel, PromptLookup
from forerun.errors import ForerunWarning, InvalidArgument
from forerun.measure import reference
from forerun.measure.reference import deviation, difference, greedy, logits_after
from forerun.types import Draft, DraftContext
from support.tiny import draft_of, ragged_prompts, tiny_model

QUICK = CheckSettings(samples=300, max_new_tokens=8)
FEW = CheckSettings(samples=100, max_new_tokens=8)  # where the sampled law is not what is looked at
PROMPTS = [prompt + prompt[:4] for prompt in ragged_prompts(3, 97, seed=5, longest=12)]
OPEN = PROMPTS[1:]


def outcomes(report: CheckReport) -> dict[str, Outcome]:
    return {finding.name: finding.outcome for finding in report.findings}


def run(drafter: Any, plan: CheckSettings = QUICK, **settings: Any) -> CheckReport:
    return check_pair(CheckedPair(tiny_model("llama"), drafter, **settings), PROMPTS, OPEN, plan)


def drafter() -> DraftModel:
    return DraftModel(draft_of(tiny_model("llama"), noise=0.05))


def test_an_honest_pair_passes_and_the_control_is_caught() -> None:
    report = run(drafter())
    assert report.passed, report
    assert outcomes(report) == dict.fromkeys(("greedy text", "sampled law", "control", "rows apart"), Outcome.PASSED)
    numbers = {finding.name: finding.numbers for finding in report.findings}
    assert numbers["sampled law"]["accepted"] > 50
    assert numbers["sampled law"]["drafted"] > numbers["sampled law"]["accepted"] + 50
    assert 0.05 < numbers["sampled law"]["detectable_distance"] < 0.3
    assert numbers["control"]["caught"]


class Forged:
    """A law that claims `claim` for every drafted token and shares out the rest evenly: it could be true."""

    def __init__(self, claim: float, tokens: Tensor, vocab_size: int) -> None:
        self.claim, self.tokens, self.vocab_size = claim, tokens, vocab_size

    def of(self, tokens: Tensor) -> Tensor:
        return torch.full_like(tokens, self.claim, dtype=torch.float64)

    def at(self, position: Tensor) -> Tensor:
        drafted = self.tokens.gather(1, position.unsqueeze(-1))
        others = (1 - self.claim) / (self.vocab_size - 1)
        law = torch.full((len(position), self.vocab_size), others, dtype=torch.float64)
        return law.scatter(1, drafted, self.claim)


class Contradicting(Forged):
    """Says nothing of the tokens when asked for the whole law."""

    def at(self, position: Tensor) -> Tensor:
        return torch.zeros(len(position), self.vocab_size, dtype=torch.float64)


class Liar:
    """Drafts as another drafter does and lies about how."""

    def __init__(self, honest: Any, claim: float, law: type[Forged] = Forged) -> None:
        self.honest, self.claim, self.law = honest, claim, law

    def __getattr__(self, name: str) -> Any:
        return getattr(self.honest, name)

    def propose(self, context: DraftContext) -> Draft:
        draft: Draft = self.honest.propose(context)
        law = self.law(self.claim, draft.tokens, context.vocab_size)
        return replace(draft, law=law, deterministic=False)

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.honest.rewind(rows, lengths)


def test_a_drafter_that_lies_about_its_law_fails() -> None:
    report = run(Liar(drafter(), 1e-9))
    assert outcomes(report)["sampled law"] is Outcome.FAILED
    assert not report.passed


@pytest.mark.slow
def test_a_drafter_whose_law_contradicts_itself_fails() -> None:
    """The whole law is what counts, and this one would have every draft rejected: exact text, nothing tested."""
    report = run(Liar(drafter(), 1e-9, Contradicting))
    assert outcomes(report)["sampled law"] is Outcome.UNTESTED
    (failure,) = (finding for finding in report.findings if finding.name == "drafter")
    assert "draft.law.of says 1e-09 of a drafted token, draft.law.at 0" in failure.summary


@pytest.mark.slow
def test_the_coupled_rule_does_not_mind_a_liar() -> None:
    from forerun.types import Rule

    assert run(Liar(drafter(), 1e-9), rule=Rule.COUPLED).passed


class Silent:
    def propose(self, context: DraftContext) -> Draft:
        raise RuntimeError("out of ideas")

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Nothing to forget."""


def test_a_drafter_that_fails_is_a_finding() -> None:
    found = outcomes(run(Silent()))
    assert found["drafter"] is Outcome.FAILED
    assert found["sampled law"] is Outcome.UNTESTED


class Slow(PromptLookup):
    def propose(self, context: DraftContext) -> Draft:
        warnings.warn("it goes on without CUDA graphs, slower", ForerunWarning, stacklevel=2)
        return super().propose(context)


def test_a_warning_about_speed_is_passed_on_and_no_finding() -> None:
    with pytest.warns(ForerunWarning, match="slower"):
        report = run(Slow(), FEW)
    assert "drafter" not in outcomes(report) and report.passed


@pytest.mark.slow
def test_without_a_drafter_there_is_nothing_to_draft() -> None:
    assert run(None).passed


def test_nothing_drafted_is_not_a_pass() -> None:
    report = run(PromptLookup(), FEW, policy=0)
    assert outcomes(report)["sampled law"] is Outcome.UNTESTED
    assert not report.passed


def test_a_wrong_greedy_text_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = reference.greedy
    monkeypatch.setattr(reference, "greedy", lambda *arguments: [*real(*arguments)[:-1], 11])
    assert outcomes(run(drafter(), FEW))["greedy text"] is Outcome.FAILED


@pytest.mark.slow
def test_rows_that_lean_on_their_neighbours_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose random numbers are counted by row number, not by request."""
    from forerun.engine import host_round

    real = host_round.keys_of
    monkeypatch.setattr(
        host_round,
        "keys_of",
        lambda batch, device: replace(real(batch, device), request_id=torch.full((len(batch),), len(batch))),
    )
    assert outcomes(run(drafter(), FEW))["rows apart"] is Outcome.FAILED


def test_too_few_samples_for_the_control_is_said() -> None:
    report = run(None, CheckSettings(samples=100, alpha=1e-12, max_new_tokens=4, temperature=0.2))
    control = next(finding for finding in report.findings if finding.name == "control")
    assert control.outcome is Outcome.UNTESTED
    assert "--samples" in control.summary


class TestDifference:
    def judge(self, ours: list[int], theirs: list[int], rounding: float) -> Any:
        return difference(tiny_model("llama"), [3, 4], ours, theirs, rounding)

    def test_none(self) -> None:
        assert self.judge([1, 2], [1, 2], 0.0) is None

    def test_a_tie_is_within_twice_the_rounding(self) -> None:
        (first, second), (best, other) = (x.tolist() for x in logits_after(tiny_model("llama"), [3, 4, 1]).topk(2))
        gap = first - second
        assert self.judge([1, other], [1, best], gap / 1.9).is_tie
        found = self.judge([1, other], [1, best], gap / 2.1)
        assert (found.position, found.ours, found.theirs, found.is_tie) == (1, other, best, False)

    def test_two_unlikely_tokens_are_no_tie(self) -> None:
        """Equal logits excuse nothing where a third token is likelier than both."""
        logits = logits_after(tiny_model("llama"), [3, 4, 1])
        worst, next_to_it = (-logits).topk(2).indices.tolist()
        found = self.judge([1, worst], [1, next_to_it], 0.6 * float(logits[next_to_it] - logits[worst]))
        assert found.gap > 1 and not found.is_tie

    def test_rounding_is_measured_where_nobody_gives_it(self) -> None:
        best, other = logits_after(tiny_model("llama"), [3, 4, 1]).topk(2).indices.tolist()
        assert not difference(tiny_model("llama"), [3, 4], [1, other], [1, best]).is_tie  # type: ignore[union-attr]

    def test_an_early_end(self) -> None:
        found = self.judge([1], [1, 5], 1e9)
        assert (found.gap, found.is_tie) == (None, False)


def test_rounding_is_measured() -> None:
    model = tiny_model("llama")
    assert 0 < deviation(model, list(range(1, 20))) < 1e-3
    assert deviation(model, [5]) == 0


def test_the_judge_is_plain_decoding() -> None:
    model = tiny_model("llama")
    first = int(logits_after(model, [3, 4]).argmax())
    assert greedy(model, [3, 4], 1) == [first]


class TestChiSquare:
    @pytest.mark.parametrize("shift", [0.0, 0.3, 40.0])
    def test_survival(self, shift: float) -> None:
        for x in (0.5, 8.0, 60.0):
            law = stats.ncx2(7, shift) if shift else stats.chi2(7)
            assert math.isclose(survival(x, 7, shift), float(law.sf(x)), rel_tol=1e-6)

    def test_a_large_shift_takes_the_terms_around_its_mean_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """All of them are millions with a rounding that is large beside the temperature."""
        central, counted = chi_square._central, list[int]()
        monkeypatch.setattr(chi_square, "_central", lambda x, half: (counted.append(half.numel()), central(x, half))[1])
        assert math.isclose(survival(1.005e6, 7, 1e6), float(stats.ncx2(7, 1e6).sf(1.005e6)), rel_tol=1e-6)
        assert counted[0] < 2 * (12 * math.sqrt(1e6 / 2) + 31)

    def test_p_values_are_uniform_for_the_right_law_and_not_for_another(self) -> None:
        generator = torch.Generator().manual_seed(0)
        law = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.03, 0.02, 0.0], dtype=torch.float64)
        wrong = torch.tensor([0.3, 0.4, 0.15, 0.1, 0.03, 0.02, 0.0], dtype=torch.float64)

        def p_values(source: Tensor) -> list[float]:
            draws = torch.multinomial(source, 400 * 300, replacement=True, generator=generator).reshape(300, 400)
            return [fit(Counter(row), law).p_value for row in draws.tolist()]

        assert stats.kstest(p_values(law), "uniform").pvalue > 0.01
        assert stats.kstest(p_values(wrong), "uniform").pvalue < 1e-9

    def test_a_forbidden_token_fails_at_once_unless_in_doubt(self) -> None:
        law = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
        counts = {0: 50, 1: 49, 2: 1}
        assert fit(counts, law).p_value == 0
        assert fit(counts, law, doubtful=frozenset({1, 2})).p_value > 0.5

    def test_slack_forgives_rounding_and_no_more(self) -> None:
        law = torch.tensor([0.5, 0.5], dtype=torch.float64)
        counts = {0: 5200, 1: 4800}
        assert fit(counts, law).p_value < 1e-3
        assert fit(counts, law, slack=0.05).p_value > 0.05

    def test_the_stated_distance_is_found_as_often_as_stated(self) -> None:
        law = torch.full((8,), 1 / 8, dtype=torch.float64)
        samples, level = 500, 1e-3
        distance = detectable(samples, 7, level)
        hard = law + distance / 4 * torch.tensor([1.0] * 4 + [-1.0] * 4)  # the form that is hardest to see
        generator = torch.Generator().manual_seed(1)
        draws = torch.multinomial(hard, samples * 400, replacement=True, generator=generator).reshape(400, samples)
        caught = sum(fit(Counter(row), law).p_value < level for row in draws.tolist())
        assert 340 <= caught <= 385  # 360 expected, 6 the standard deviation


@pytest.mark.parametrize("bad", [{"samples": 5}, {"alpha": 0.0}, {"max_new_tokens": 1}, {"temperature": 0.0}])
def test_a_plan_that_shows_nothing_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(bad))):
        CheckSettings(**bad)


QUICKLY = ("--samples", "200", "--max-new-tokens", "6")


def test_the_command_passes_with_a_table(check: Command, target: str, draft: str) -> None:
    result = check("-m", target, "-d", draft, *QUICKLY, COLUMNS="200")
    assert result.exit_code == 0, result.output
    for words in ("control caught: yes", "identical to model.generate", "would fail", "0.001 of the time", "Passed"):
        assert words in " ".join(result.stdout.split())


@pytest.mark.slow
def test_the_command_fails_with_exit_code_1(
    check: Command, target: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forerun import drafters

    honest = drafters.named_drafter
    monkeypatch.setattr(drafters, "named_drafter", lambda *a, **k: Liar(honest(*a, **k), 1e-9))
    result = check("-m", target, "-d", draft, *QUICKLY, "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert found["passed"] is False
    assert {f["name"]: f["outcome"] for f in found["findings"]}["sampled law"] == "FAILED"


MINE = """
import torch
from forerun.drafters import EarlyExit


class Honest(EarlyExit):
    def __init__(self):
        super().__init__(1)


class Law:
    def __init__(self, tokens, vocab_size):
        self.tokens, self.vocab_size = tokens, vocab_size

    def of(self, tokens):
        return torch.full_like(tokens, 1e-9, dtype=torch.float64)

    def at(self, position):
        drafted = self.tokens.gather(1, position.unsqueeze(-1))
        others = torch.full((len(position), self.vocab_size), 1 / (self.vocab_size - 1), dtype=torch.float64)
        return others.scatter(1, drafted, 1e-9)


class Liar(Honest):
    def propose(self, context):
        from dataclasses import replace

        draft = super().propose(context)
        return replace(draft, law=Law(draft.tokens, context.vocab_size), deterministic=False)


class NoDrafter:
    pass
"""


def test_a_class_of_your_own_is_checked(
    check: Command, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_drafter.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    honest = check("-m", target, "-d", "my_drafter:Honest", *QUICKLY, "--json")
    assert honest.exit_code == 0, honest.output
    liar = check("-m", target, "-d", "my_drafter:Liar", *QUICKLY, "--json")
    assert liar.exit_code == 1
    assert {f["name"]: f["outcome"] for f in json.loads(liar.stdout)["findings"]}["sampled law"] == "FAILED"
    for name, words in (("NoDrafter", "no method propose"), ("Missing", "module:Class")):
        refused = check("-m", target, "-d", f"my_drafter:{name}", *QUICKLY)
        assert refused.exit_code == 2
        assert words in " ".join(refused.output.split())


class TestFunction:
    """`forerun.check`."""

    @pytest.mark.slow
    def test_token_ids_need_no_tokenizer(self) -> None:
        report = forerun.check(tiny_model("llama"), drafter(), prompts=PROMPTS, open_prompts=OPEN, settings=QUICK)
        assert report.passed
        assert str(report).endswith(report.verdict) and "control caught: yes" in str(report)

    def test_texts_need_one(self) -> None:
        with pytest.raises(InvalidArgument, match="tokenizer"):
            forerun.check(tiny_model("llama"), drafter(), settings=QUICK)

    @pytest.mark.slow
    def test_a_lossy_rule_fails(self) -> None:
        found = forerun.check(
            tiny_model("llama"), drafter(), prompts=PROMPTS, open_prompts=OPEN, settings=QUICK, rule="lenient:0.5"
        )
        assert not found.passed and "FAILED" in found.verdict


@pytest.mark.slow
def test_quiet_is_an_exit_code(check: Command, target: str) -> None:
    result = check("-m", target, "-d", "early:1", "-q", *QUICKLY)
    assert (result.exit_code, result.output) == (0, "")


def test_help_lists_defaults(check: Command) -> None:
    output = " ".join(check("--help").output.split())
    for words in ("[default: 512]", "[default: 0.001]", "[default: 4]", "[default: auto]"):
        assert words in output
