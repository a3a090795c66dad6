"""A seed and a request id name a text, whatever is decoded beside it and in whatever order."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from exactness.sampling import DRAFTERS, RULES, Loop
from forerun.engine import Request
from forerun.types import Rule

Texts = dict[tuple[int, int], tuple[int, ...]]


def texts(requests: list[Request], rule: Rule, drafter: str = "model", policy: str = "3", rows: int = 64) -> Texts:
    results = Loop(drafter, policy, rule, vocab=5).run(requests, rows)
    return {(result.request.seed, result.request.request_id): result.tokens for result in results}


def some(number: int = 16, seed: int = 1) -> list[Request]:
    plain = Loop(vocab=5).requests(number, max_new_tokens=8, seed=seed)
    return [replace(request, prompt=(1 + i % 4, *range(i % 3))) for i, request in enumerate(plain)]


@pytest.mark.quick("model-token")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_order_and_neighbours_do_not_matter(rule: Rule, drafter: str) -> None:
    once = texts(some(), rule, drafter)
    assert texts(some(), rule, drafter) == once
    shuffled = random.Random(3).sample(some(), 16)
    assert texts(shuffled, rule, drafter, rows=7) == once
    among_others = [request for pair in zip(some(), some(seed=2), strict=True) for request in pair]
    mixed = texts(among_others, rule, drafter, rows=20)
    assert {key: text for key, text in mixed.items() if key[0] == 1} == once


@pytest.mark.quick("token")
@pytest.mark.parametrize("rule", RULES)
def test_seeds_and_ids_make_a_difference(rule: Rule) -> None:
    same_prompt = Loop(vocab=5).requests(40, max_new_tokens=12)
    first, second = texts(same_prompt, rule), texts([replace(r, seed=2) for r in same_prompt], rule)
    assert len(set(first.values())) > 30, "request ids give the same text"
    assert sum(first[1, i] != second[2, i] for i in range(40)) > 30, "seeds give the same text"


def test_coupled_texts_depend_on_nothing_but_the_key() -> None:
    """Any drafter, any policy: the same tokens."""
    plain = texts(some(), Rule.COUPLED, "random", "1")
    for drafter, policy in (("model", "5"), ("ngram", "auto"), ("chain", "bass"), ("exit", "hf"), ("lookup", "3")):
        assert texts(some(), Rule.COUPLED, drafter, policy) == plain


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_control_other_rules_do_depend_on_the_length(rule: Rule) -> None:
    assert texts(some(), rule, "model", "5") != texts(some(), rule, "model", "1")
