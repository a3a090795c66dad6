"""Drafts from what a request predicts: followed, left, met again; and the law of the text is the target's."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter

import pytest
import torch

from forerun import Chain, PredictedText, PromptLookup, SamplingParams, SpeculativeDecoder
from forerun.config import SamplingParams as Params
from forerun.drafters import DraftModel, Tree, with_predictions
from forerun.drafters.predicted_text import _Follower
from forerun.engine import Request
from forerun.errors import InvalidArgument
from forerun.types import DraftContext, LawParams
from support.finish import finished
from support.tiny import tiny_model

PROMPT = [1, 2, 3]
PREDICTION = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]


def guess(drafter: PredictedText, output: list[int], room: int = 4, row: int = 0) -> tuple[list[int], int]:
    context = DraftContext(
        rows=(row,),
        histories=([*PROMPT, *output],),
        max_lengths=(room,),
        params=LawParams.stack([Params()]),
        uniforms=torch.zeros(1, room, dtype=torch.float64),
        adjusters=(None,),
        vocab_size=50,
        device=torch.device("cpu"),
    )
    draft = drafter.propose(context)
    assert draft.evidence is not None and draft.deterministic
    return draft.tokens[0, : draft.lengths[0]].tolist(), draft.evidence[0]


def predicting(prediction: list[int] = PREDICTION) -> PredictedText:
    drafter = PredictedText()
    drafter.predict(0, prediction, len(PROMPT))
    return drafter


@pytest.mark.parametrize(
    ("output", "expected", "evidence"),
    (
        ([], [10, 11, 12, 13], 0),
        ([10, 11], [12, 13, 14, 15], 2),
        ([10, 11, 40], [], 0),  # it has left
        ([10, 11, 40, 12], [], 0),  # one token may be chance
        ([10, 11, 40, 12, 13], [14, 15, 16, 17], 2),  # an insertion
        ([10, 14, 15], [16, 17, 18, 19], 2),  # an omission
        ([30, 31, 18, 19], [], 0),  # met at its end: nothing follows
        ([30, 31, 17, 18], [19], 2),
    ),
)
def test_an_answer_is_followed_and_met_again(output: list[int], expected: list[int], evidence: int) -> None:
    assert guess(predicting(), output) == (expected, evidence)


def test_rounds_change_nothing() -> None:
    """Asked after every token or once, the guess is the same."""
    output = [10, 11, 40, 12, 13, 14, 41, 10, 11, 12]
    often = predicting()
    for end in range(len(output)):
        guess(often, output[:end])
    assert guess(often, output) == guess(predicting(), output)
    assert guess(often, output[:2]) == guess(predicting(), output[:2]), "a shorter text is read again"


def test_the_place_behind_where_it_was_left_is_taken_first() -> None:
    twice = [10, 11, 20, 10, 11, 21, 10, 11, 22]
    assert guess(predicting(twice), [10, 11, 20, 40, 10, 11])[0] == [21, 10, 11, 22]


def met(prediction: list[int], answer: list[int]) -> tuple[int | None, int]:
    """Where an answer is in its prediction, and for how long it has been there: looked for place by place."""
    place, agreed, left_at = 0, 0, 0
    for end, token in enumerate(answer, start=1):
        if place is not None and prediction[place : place + 1] == [token]:
            place, agreed = place + 1, agreed + 1
            continue
        left_at, place, agreed = left_at if place is None else place, None, 0
        for n in (4, 3, 2):
            last = answer[end - n : end] if n <= end else None
            found = [at for at in range(n, len(prediction)) if prediction[at - n : at] == last]
            if found:
                place, agreed = next((at for at in found if at > left_at), found[-1]), n
                break
    return place, agreed


@pytest.mark.parametrize("first", (0, 0xD7FE, 0x10FFFC))  # ids that are no letters of their own, and the last that are
def test_wherever_the_last_tokens_are_they_are_found(first: int) -> None:
    draw = random.Random(first)
    for _ in range(200):
        prediction, answer = ([first + draw.randrange(4) for _ in range(draw.randrange(1, 24))] for _ in range(2))
        follower = _Follower(tuple(prediction), 0)
        follower.follow(answer)
        assert (follower.place, follower.agreed) == met(prediction, answer), (prediction, answer)


@pytest.mark.parametrize("beyond", (0x110000, 2**40))
def test_ids_beyond_all_letters_are_no_hindrance(beyond: int) -> None:
    follower = _Follower((10, beyond, 11, 12, 13), 0)
    follower.follow([10, 40, 11, 12])
    assert follower.guess(4) == ([13], 2)


def test_leaving_a_long_prediction_takes_a_few_bytes_a_token() -> None:
    """Four for a letter, and as many twice on the way to it; a table of its n-grams took hundreds, and a second."""
    size = 20_000
    follower = _Follower(tuple(i * i % 7919 for i in range(size)), 0)
    tracemalloc.start()
    follower.follow([8000, 8001])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert follower.place is None and most < 16 * size


def test_rows_are_apart_and_vocabularies_end() -> None:
    drafter = predicting([10, 99])
    assert guess(drafter, [])[0] == [10], "the target has no token 99"
    assert guess(drafter, [], row=1) == ([], 0)
    drafter.predict(0, (), 0)
    assert guess(drafter, []) == ([], 0)


def test_a_prediction_is_token_ids() -> None:
    with pytest.raises(InvalidArgument, match=r"prediction\[1\]"):
        Request(prompt=(1,), max_new_tokens=2, prediction=(3, -1))


def test_who_drafts_behind_predictions() -> None:
    model = tiny_model("llama")
    assert with_predictions(PromptLookup(), on_gpu=True).takes_predictions
    assert with_predictions(DraftModel(model), on_gpu=False).takes_predictions
    assert not with_predictions(DraftModel(model), on_gpu=True).takes_predictions
    assert not with_predictions(Tree(DraftModel(model)), on_gpu=False).takes_predictions
    decoder = SpeculativeDecoder(model, PromptLookup())
    with pytest.raises(InvalidArgument, match="takes none"):
        decoder.engine.add(Request(prompt=(1,), max_new_tokens=2, prediction=(3,)))


def second_tokens(samples: int, temperature: float) -> Counter[int]:
    decoder = SpeculativeDecoder(MODEL, Chain(PredictedText(), PromptLookup()), policy=2, rule="token")
    params = SamplingParams(temperature=temperature, top_k=8)
    for number in range(samples):
        decoder.engine.add(
            Request(prompt=(5, 6, 7), max_new_tokens=2, params=params, seed=1, request_id=number, prediction=EXPECTED)
        )
    done = finished(decoder.engine)
    assert sum(row.stats.num_accepted_tokens for row in done) > samples / 20, "predictions are tried and come true"
    return Counter(row.tokens[1] for row in done)


MODEL = tiny_model("llama", vocab=32)


def law(ids: list[int], temperature: float) -> torch.Tensor:
    logits = MODEL(torch.tensor([ids])).logits[0, -1].double() / temperature
    cut = logits < logits.topk(8).values[-1]
    return torch.softmax(logits.masked_fill(cut, -torch.inf), dim=-1)


EXPECTED = tuple(law([5, 6, 7], 1.0).topk(2).indices.tolist())


def test_the_law_is_the_targets() -> None:
    """Second tokens, summed over the first; samples of another temperature fail the same test."""
    first = law([5, 6, 7], 2.0)
    expected = sum(chance * law([5, 6, 7, token], 2.0) for token, chance in enumerate(first.tolist()) if chance)
    assert isinstance(expected, torch.Tensor)
    samples, cells = 500, expected.topk(7).indices.tolist()

    def statistic(counts: Counter[int]) -> float:
        seen = [counts[cell] for cell in cells]
        mean = [samples * float(expected[cell]) for cell in cells]
        seen, mean = [*seen, samples - sum(seen)], [*mean, samples - sum(mean)]
        return sum((s - m) ** 2 / m for s, m in zip(seen, mean, strict=True))

    critical = 24.3  # chi-square with 7 degrees of freedom: 0.1 %
    assert statistic(second_tokens(samples, 2.0)) < critical
    assert statistic(second_tokens(samples, 0.7)) > critical
