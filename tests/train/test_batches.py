"""The order of the data is a function of the seed; every loss position is where it should be."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from forerun.errors import InvalidArgument
from forerun.train.batches import Batch, BatchOrder, Rollouts, collate, prefetched, split
from forerun.train.shards import TrainingText

LENGTHS = [5 + 7 * (i % 11) for i in range(60)]


def order(seed: int = 0) -> BatchOrder:
    return BatchOrder(LENGTHS, range(60), batch_tokens=256, max_length=64, seed=seed)


def text(length: int, prompt: int) -> TrainingText:
    return TrainingText(torch.arange(1, length + 1), prompt)


def test_an_epoch_has_every_sequence_once_within_the_budget() -> None:
    batches = order().epoch(3)
    assert sorted(i for batch in batches for i in batch) == list(range(60))
    for batch in batches:
        widest = max(min(LENGTHS[i], 64) for i in batch)
        assert -(-widest // 32) * 32 * len(batch) <= 256
    assert order().epoch(0) != order().epoch(1)
    assert order(0).epoch(0) != order(1).epoch(0)


def test_any_step_can_be_reached_directly() -> None:
    steps = list(islice(order().from_step(0), 3 * len(order().epoch(0))))
    for start in (0, 1, len(order().epoch(0)), len(steps) - 2):
        assert list(islice(order().from_step(start), 2)) == steps[start : start + 2]


def test_steps_of_epochs_are_counted_as_far_as_need_be() -> None:
    counts = [len(order().epoch(number)) for number in range(3)]
    assert order().num_steps(2) == sum(counts[:2]) and order().num_steps(0.001) == 1
    assert order().num_steps(2.5) == sum(counts[:2]) + round(counts[2] / 2)
    assert order().num_steps(2, enough=sum(counts)) == sum(counts[:2])
    assert order().num_steps(1e12, enough=counts[0] + 1) == sum(counts[:2]), "nor are a million million epochs made"


def test_held_out_sequences_are_not_trained_on() -> None:
    train, held = split(range(60), 9, seed=4)
    assert len(held) == 9 and sorted(train + held) == list(range(60))
    assert split(range(60), 9, seed=5)[1] != held
    with pytest.raises(InvalidArgument, match="held out"):
        split(range(9), 9, seed=0)
    assert split(range(9), 0, seed=0) == (list(range(9)), [])


def test_no_prompt_is_trained_on_and_held_out() -> None:
    prompts = [i // 4 for i in range(60)]
    train, held = split(prompts, 9, seed=4)
    assert len(held) == 9 and not {prompts[i] for i in held} & {prompts[i] for i in train}
    assert len(train) == 60 - 12, "three prompts are enough for nine texts"
    with pytest.raises(InvalidArgument, match="60 sequences for 1 prompts"):
        split([7] * 60, 9, seed=0)


def test_loss_lies_on_what_the_target_wrote() -> None:
    batch = collate([text(10, 4), text(6, 6), text(7, 1)], 64, Rollouts(), 0, with_tops=False)
    rows, times = batch.keep // batch.tokens.shape[1], batch.keep % batch.tokens.shape[1]
    assert torch.equal(times, batch.times)
    assert times[rows == 0].tolist() == [3, 4, 5, 6, 7, 8]  # the token after position 3 is the first written one
    assert times[rows == 1].tolist() == []
    assert times[rows == 2].tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.num_tokens == 23


def test_what_is_too_long_loses_its_beginning() -> None:
    batch = collate([text(100, 50)], 64, Rollouts(), 0, with_tops=False)
    assert batch.tokens[0].tolist() == list(range(37, 101))
    assert batch.times.tolist() == list(range(13, 63))


def test_stored_laws_stay_with_their_positions() -> None:
    tops = torch.arange(100)[:, None].expand(100, 2)
    stored = TrainingText(torch.arange(1, 101), 50, tops, -tops.float())
    batch = collate([stored], 64, Rollouts(), 0, with_tops=True)
    assert batch.top_ids is not None and batch.top_logprobs is not None
    assert batch.top_ids[:, 0].tolist() == list(range(49, 99))
    assert batch.top_logprobs[0].tolist() == [-49.0, -49.0]


def test_rollouts_begin_in_the_written_part_and_end_their_row() -> None:
    texts = [text(40, 10) for _ in range(200)]
    batch = collate(texts, 64, Rollouts(0.5, 8), seed=1, with_tops=False)
    assert 60 < len(batch.rolled) < 140
    assert int(batch.cuts.min()) >= 9 and int(batch.cuts.max()) <= 38
    rows = batch.keep // batch.tokens.shape[1]
    for row, cut in zip(batch.rolled.tolist(), batch.cuts.tolist(), strict=True):
        # the last law is the one that the last drafted token meets
        assert int(batch.times[rows == row].max()) == min(cut + 8, 39) - 1
    again = collate(texts, 64, Rollouts(0.5, 8), seed=1, with_tops=False)
    assert torch.equal(again.cuts, batch.cuts)


def test_errors_while_reading_ahead_are_raised() -> None:
    def broken() -> Iterator[Batch]:
        yield collate([text(10, 4)], 64, Rollouts(), 0, with_tops=False)
        raise InvalidArgument("shard-00001 is damaged")

    found = []
    with pytest.raises(InvalidArgument, match="shard-00001"):
        found.extend(prefetched(broken()))
    assert len(found) == 1
