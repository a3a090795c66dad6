"""Counts are of what was emitted; rates follow from counts."""

from __future__ import annotations

from itertools import pairwise

import pytest

from engine.scripted import PROMPT, VOCAB, answer, engine_with, finish, prophet, run
from forerun.config import SamplingParams
from forerun.drafters import DraftModel
from forerun.engine import Request, Seconds, Stats
from forerun.types import Origin
from support.tiny import draft_of, ragged_prompts, tiny_model


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("temperature", (0.0, 0.9))
def test_identities(temperature: float) -> None:
    """Emitted = sum over rounds of accepted + 1, less what a stop or the budget cut off."""
    params = SamplingParams(temperature=temperature)
    requests = [
        Request(
            prompt=tuple(p), max_new_tokens=23, params=params, request_id=i, stop_ids=frozenset(range(0, VOCAB, 40))
        )
        for i, p in enumerate(ragged_prompts(12, VOCAB, seed=8))
    ]
    rows = finish(engine_with(DraftModel(draft_of(tiny_model("llama"), 0.05)), 5), *requests)
    for row in rows:
        stats, ends = row.stats, len(row.origins) - row.origins.count(Origin.ACCEPTED)
        assert stats.num_emitted_tokens == len(row.tokens) == stats.num_accepted_tokens + ends
        assert stats.rounds - ends in (0, 1)  # at most the last round was cut before its own token
        assert stats.num_accepted_tokens == row.origins.count(Origin.ACCEPTED)
        assert stats.rounds - stats.num_drafts == row.origins.count(Origin.PLAIN)
        after = [before for before, origin in pairwise((None, *row.origins)) if origin is Origin.BONUS]
        assert all(before is Origin.ACCEPTED for before in after)
    total = Stats.total([row.stats for row in rows])
    assert total.num_emitted_tokens == sum(len(row.tokens) for row in rows)
    assert total.rounds == sum(row.stats.rounds for row in rows)
    assert 0.05 < total.acceptance_rate < 0.99
    assert sum(total.num_accepted_tokens_per_pos) == total.num_accepted_tokens
    assert sum(total.num_draft_tokens_per_pos) == total.num_draft_tokens
    assert sum(total.acceptance_histogram) == total.num_drafts
    assert sum(n * count for n, count in enumerate(total.acceptance_histogram)) == total.num_accepted_tokens
    accepted, reached = total.num_accepted_tokens_per_pos, total.num_reached_tokens_per_pos
    assert accepted == sorted(accepted, reverse=True)
    assert all(a <= r <= d for a, r, d in zip(accepted, reached, total.num_draft_tokens_per_pos, strict=True))


def test_a_known_course() -> None:
    """Drafts of 4 for 12 tokens; the third guess is wrong, the eighth too: 2 + 1, 4 + 1, 0 + 1, 2 + 1 tokens."""
    unused = next(token for token in range(VOCAB) if token not in answer())
    row = run(prophet({2: unused, 8: unused}), max_new_tokens=12)
    stats = row.stats
    assert [o.value[0] for o in row.origins] == list("aacaaaabcaab")
    assert (stats.rounds, stats.num_drafts, stats.num_draft_tokens) == (4, 4, 4 + 4 + 3 + 2)
    assert stats.num_accepted_tokens_per_pos == [3, 3, 1, 1]
    assert stats.num_draft_tokens_per_pos == [4, 4, 3, 2]
    assert stats.num_reached_tokens_per_pos == [4, 3, 2, 1]
    assert stats.acceptance_histogram == [1, 0, 2, 0, 1]
    assert stats.acceptance_rate == 8 / 13
    assert stats.mean_acceptance_length == 1 + 8 / 4
    assert stats.tokens_per_round == 12 / 4
    assert stats.acceptance_rate_chen == 8 / 17
    assert stats.acceptance_by_position == [3 / 4, 1, 1 / 2, 1]


def test_a_short_draft_reaches_no_later_place() -> None:
    """Ten drafts of one token, all kept, say nothing of the second place."""
    stats = Stats()
    for _ in range(10):
        stats.count(1, 1, 2)
    for kept in (0, 1, 2, 1):
        stats.count(2, kept, kept + 1)
    assert stats.acceptance_by_position == [13 / 14, 1 / 3]


def test_a_stop_says_nothing_of_what_follows_it() -> None:
    stats = Stats()
    stats.count(4, 2, 2)  # the second accepted token ended the row
    assert stats.num_reached_tokens_per_pos == [1, 1, 0, 0]
    assert stats.acceptance_by_position == [1, 1, 0, 0]


def test_plain_rounds_count_as_rounds_only() -> None:
    row = run(None)
    assert (row.stats.rounds, row.stats.num_drafts, row.stats.tokens_per_round) == (20, 0, 1.0)
    assert row.stats.mean_acceptance_length == 1.0
    assert row.stats.acceptance_rate == 0.0
    assert "20 tokens in 20 rounds" in str(row.stats)


def test_json_carries_counts_and_rates() -> None:
    shown = run(prophet(), prompt=PROMPT).stats.as_dict()
    assert shown["num_accepted_tokens"] == 16
    assert shown["draft_acceptance_rate"] == 1.0
    assert shown["tokens_per_round"] == 5.0


def test_runs_one_after_the_other_add_counts_and_all_seconds() -> None:
    """The batch's seconds too, those of capturing included; a total of rows leaves them out, as rows share them."""
    first = Stats(rounds=2, seconds=Seconds(1, 2, 3, 4, 5))
    second = Stats(rounds=3, seconds=Seconds(10, 20, 30, 40, 50))
    both = first.plus(second)
    assert both.rounds == 5 and both.seconds == Seconds(11, 22, 33, 44, 55)
    assert both.as_dict()["capture_seconds"] == 55 and both.seconds - first.seconds == second.seconds
    assert Stats.total([first, second]).seconds == Seconds()


@pytest.mark.parametrize("is_kept", (False, True))
def test_keys_of_prompts_that_were_there(is_kept: bool) -> None:
    """Three of one text: one reads it, two are given its keys up to the last token. Later a kept row's are found."""
    engine = engine_with(None, 0, keep_rows=int(is_kept))
    prompt = tuple(PROMPT)
    finish(engine, *(Request(prompt=prompt, max_new_tokens=2, request_id=i) for i in range(3)))
    assert (engine.num_prefix_queries, engine.num_prefix_hits) == (3 * len(prompt), 2 * (len(prompt) - 1))
    finish(engine, Request(prompt=(*prompt, 1, 2), max_new_tokens=2))
    hits = 2 * (len(prompt) - 1) + (len(prompt) if is_kept else 0)
    assert (engine.num_prefix_queries, engine.num_prefix_hits) == (4 * len(prompt) + 2, hits)


def test_a_warm_up_counts_no_keys() -> None:
    engine = engine_with(None, 0)
    engine.warm_up(2)
    assert engine.num_prefix_queries == 0
