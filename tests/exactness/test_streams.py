"""Numbers for drafting, acceptance and the final draw must not know of each other, and rounds must not share any."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor

from exactness import controls
from exactness.recall import ScriptedScorer
from exactness.sampling import Loop, draft_model, verdict
from forerun.drafters import DraftModel
from forerun.engine import drafting
from forerun.math import verify
from forerun.math.random import RandomStream
from forerun.types import Keys, Rule
from support.markov import toy_pair

NUMBER = 5_000
FEWER = 1_200  # where the quick part looks
TARGET = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
DRAFT = torch.tensor([0.6, 0.4, 0.0], dtype=torch.float64)


def scripted(rule: Rule, policy: str = "3") -> Loop:
    """Target and draft whose laws are known and never change; the draft cannot say 2."""
    target, draft = toy_pair(3)
    drafter: DraftModel = draft_model(draft)
    drafter.scorer = ScriptedScorer(draft, DRAFT.expand(3, 3))
    return Loop(drafter, policy, rule, target=ScriptedScorer(target, TARGET.expand(3, 3)))


def joint(steps: int) -> Tensor:
    law = TARGET
    for _ in range(steps - 1):
        law = law[..., None] * TARGET
    return law


def test_a_known_law_briefly() -> None:
    assert not verdict(scripted(Rule.BLOCK).sample(FEWER, max_new_tokens=5), joint(4))


def test_control_rounds_that_share_numbers_are_noticed_briefly(monkeypatch: MonkeyPatch) -> None:
    controls.one_round(monkeypatch)
    assert verdict(scripted(Rule.BLOCK).sample(FEWER, max_new_tokens=5), joint(4))


@pytest.mark.slow
@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("policy", ["1", "3"])
def test_known_laws(rule: Rule, policy: str) -> None:
    assert not verdict(scripted(rule, policy).sample(NUMBER, max_new_tokens=5), joint(4))


@pytest.mark.slow
@pytest.mark.parametrize("stream", [RandomStream.ACCEPT, RandomStream.FINAL])
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_control_shared_noise_is_noticed(rule: Rule, stream: RandomStream, monkeypatch: MonkeyPatch) -> None:
    controls.shared_noise(monkeypatch, stream)
    assert verdict(scripted(rule).sample(NUMBER, max_new_tokens=5), joint(4))


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_control_rounds_that_share_numbers_are_noticed(rule: Rule, monkeypatch: MonkeyPatch) -> None:
    controls.one_round(monkeypatch)
    assert verdict(scripted(rule).sample(NUMBER, max_new_tokens=5), joint(4))


@pytest.mark.slow
def test_control_block_rule_keyed_by_position_is_noticed(monkeypatch: MonkeyPatch) -> None:
    """Block verification looks at later tokens before it decides: numbers met again in the next round bend the law."""
    controls.keyed_by_position(monkeypatch)
    assert verdict(scripted(Rule.BLOCK).sample(NUMBER, max_new_tokens=5), joint(4))


@pytest.mark.slow
def test_token_rule_keyed_by_position_would_do(monkeypatch: MonkeyPatch) -> None:
    """The token rule never looks ahead, so the control above is about block verification and nothing else."""
    controls.keyed_by_position(monkeypatch)
    assert not verdict(scripted(Rule.TOKEN).sample(NUMBER, max_new_tokens=5), joint(4))


def recorded(patch: MonkeyPatch, rounds: int) -> dict[str, Tensor]:
    """First and second number of each stream in every round of long rows, one row behind the other."""
    found: dict[str, dict[int, list[Tensor]]] = {name: defaultdict(list) for name in ("draft", "accept", "final")}
    noise_of, draft_uniforms = verify.noise_of, drafting.draft_uniforms

    def keep(stream: str, keys: Keys, made: Tensor) -> None:
        if made.shape[1] >= 2 + (stream == "final"):  # the same rounds for all three: their numbers stand side by side
            for row, pair in zip(keys.request_id.tolist(), made[:, :2], strict=True):
                found[stream][row].append(pair)

    def noise(keys: Keys, width: int, rule: Rule) -> verify.Noise:
        made = noise_of(keys, width, rule)
        keep("accept", keys, made.accept)
        keep("final", keys, made.final)
        return made

    def draft(keys: Keys, width: int, rule: Rule) -> Tensor:
        made = draft_uniforms(keys, width, rule)
        keep("draft", keys, made)
        return made

    patch.setattr(verify, "noise_of", noise)
    patch.setattr(drafting, "draft_uniforms", draft)
    loop = scripted(Rule.TOKEN)
    loop.run(loop.requests(rounds // 20, max_new_tokens=90))  # of 20 rounds and more each: four tokens a round at most
    return {name: torch.cat([torch.stack(row[:20]) for row in rows.values()]) for name, rows in found.items()}


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


@pytest.mark.slow
def test_uniforms_are_uncorrelated(monkeypatch: MonkeyPatch) -> None:
    """Along rounds, along positions and between streams; a thousand rounds."""
    rounds = 1_000
    streams = recorded(monkeypatch, rounds)
    least = 4 / rounds**0.5
    for name, pairs in streams.items():
        assert len(pairs) == rounds
        assert abs(correlation(pairs[1:, 0], pairs[:-1, 0])) < least, f"{name}: from round to round"
        assert abs(correlation(pairs[:, 0], pairs[:, 1])) < least, f"{name}: from position to position"
        assert abs(float(pairs[:, 0].mean()) - 0.5) < least * 12**-0.5
    for one, other in (("draft", "accept"), ("draft", "final"), ("accept", "final")):
        assert abs(correlation(streams[one][:, 0], streams[other][:, 0])) < least, f"{one} and {other}"


@pytest.mark.slow
def test_control_correlated_uniforms_are_noticed(monkeypatch: MonkeyPatch) -> None:
    controls.shared_noise(monkeypatch, RandomStream.FINAL)
    streams = recorded(monkeypatch, 300)
    assert abs(correlation(streams["draft"][:, 0], streams["final"][:, 0])) > 4 / 300**0.5
