"""Alpha along a text: against overlaps computed token by token, without any of the shortcuts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from benchmarks.papers.alpha import Alpha, Text, alpha, overlap, score
from benchmarks.papers.pairs import Pair
from forerun.drafters import DraftModel, EarlyExit, FeatureHead, NgramTable, PromptLookup
from forerun.drafters.early_exit import shallow
from support.heads import head_logits, head_of
from support.tiny import draft_of, tiny_model

VOCAB = 97
TOKENS = (5, 17, 3, 40, 5, 17, 8, 61, 5, 17, 3, 22)
TEXT = Text(TOKENS, prompt_length=5)


@pytest.fixture(scope="module")
def pair() -> Pair:
    target = copy.deepcopy(tiny_model("llama", layers=4))
    draft = draft_of(target, 0.05)
    return Pair("test", "test", target, None, {"draft model": lambda: DraftModel(draft)}, draft)


def law(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).float()
    return (logits / temperature).softmax(-1)


@torch.no_grad()
def by_hand(target: Any, q_of: Any, temperature: float) -> list[float]:
    """One forward a place, over exactly the tokens before it."""
    found = []
    for place in TEXT.places:
        history = torch.tensor([TOKENS[:place]])
        p, q = law(target(history).logits[0, -1], temperature), q_of(TOKENS[:place])
        found.append(float(torch.minimum(p, q).sum()))
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
class TestOverlap:
    def test_draft_model(self, pair: Pair, temperature: float) -> None:
        found = overlap(pair, DraftModel(pair.draft_model), score(pair, TEXT), temperature)
        logits = lambda history: pair.draft_model(torch.tensor([history])).logits[0, -1]  # noqa: E731
        expected = by_hand(pair.target, lambda history: law(logits(history), temperature), temperature)
        assert found.tolist() == pytest.approx(expected, abs=1e-5)
        assert 0.05 < sum(expected) / len(expected) < 0.999  # neither strangers nor twins

    def test_early_exit(self, pair: Pair, temperature: float) -> None:
        first = shallow(pair.target, 2)
        found = overlap(pair, EarlyExit(2), score(pair, TEXT), temperature)
        q_of = lambda history: law(first(torch.tensor([history])).logits[0, -1], temperature)  # noqa: E731
        assert found.tolist() == pytest.approx(by_hand(pair.target, q_of, temperature), abs=1e-5)

    @pytest.mark.quick(every=2)
    @pytest.mark.parametrize("ids", [None, tuple(range(0, VOCAB, 2))])
    def test_feature_head(self, pair: Pair, temperature: float, ids: tuple[int, ...] | None) -> None:
        head = head_of(pair.target, noise=0.02)
        chosen = None if ids is None else torch.tensor(ids)

        def q_of(history: tuple[int, ...]) -> torch.Tensor:
            q = law(head_logits(pair.target, head, history, (), chosen), temperature)
            return q if chosen is None else torch.zeros(VOCAB).index_copy(0, chosen, q)

        found = overlap(pair, FeatureHead(head, draft_vocabulary=chosen), score(pair, TEXT), temperature)
        assert found.tolist() == pytest.approx(by_hand(pair.target, q_of, temperature), abs=1e-5)


def test_bigrams_are_asked_with_the_right_history(pair: Pair) -> None:
    table = NgramTable.count([[5, 17, 3, 5, 17, 8, 5, 17, 3]], 2, vocab_size=VOCAB)
    found = overlap(pair, table, score(pair, TEXT), 1.0)
    p = pair.target(torch.tensor([TOKENS[:6]])).logits[0, -1].softmax(-1)  # after 5, 17 came 3 twice and 8 once
    expected = min(float(p[3]), 2 / 3) + min(float(p[8]), 1 / 3)
    assert float(found[TEXT.places.index(6)]) == pytest.approx(expected, abs=1e-6)


def test_where_nothing_is_drafted_there_is_no_alpha(pair: Pair) -> None:
    found = alpha(pair, PromptLookup(min_ngram=2), [score(pair, TEXT)], 1.0)
    heard = [place for place in TEXT.places if TOKENS[place - 2 : place] in pairs_before(place)]
    assert 0 < len(heard) < len(TEXT.places)
    assert (found.positions, found.spoke) == (len(TEXT.places), len(heard) / len(TEXT.places))
    silent = NgramTable.count([[1]], 1, vocab_size=VOCAB)
    assert alpha(pair, silent, [score(pair, TEXT)], 1.0).spoke == 1


def pairs_before(place: int) -> set[tuple[int, ...]]:
    return {TOKENS[end - 2 : end] for end in range(2, place)}


def test_a_twin_is_always_kept(pair: Pair) -> None:
    twin = Pair("twin", "twin", pair.target, None, pair.drafters, pair.target)
    found = alpha(twin, DraftModel(pair.target), [score(twin, TEXT)], 1.0)
    assert found == Alpha(pytest.approx(1.0, abs=1e-6), pytest.approx(0.0, abs=1e-6), len(TEXT.places), 1.0)
