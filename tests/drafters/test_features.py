"""What a drafter has heard of its target, against lists that are written one vector at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.cache.base import CacheFull
from forerun.cache.ragged import RaggedCache
from forerun.drafters import features
from forerun.drafters.features import Features

SIZE = 3


class LastLayer:
    """Stands for the target: states before its last layer are below 0, those behind it above."""

    def finish(self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int], states: Tensor) -> Tensor:
        assert len(states) == sum(counts) and len(rows) == len(starts) == len(counts)
        assert (states < 0).all(), "a state went through the last layer twice"
        return -states


TARGET: Any = LastLayer()


class Kept:
    """The same as plain lists."""

    def __init__(self) -> None:
        self.rows: dict[int, list[Tensor]] = {}

    def hear(self, rows: list[int], past: list[int], counts: list[int], hidden: Tensor) -> None:
        for row, length, own in zip(rows, past, hidden.split(counts), strict=True):
            if row in self.rows and len(self.rows[row]) == length:
                self.rows[row] += own


def check(heard: Features, kept: Kept, every: bool = False) -> None:
    for row, vectors in kept.rows.items():
        assert heard.length(row) == len(vectors)
    full = [row for row, vectors in kept.rows.items() if vectors]
    if every and full:
        found = heard.take(full, [0] * len(full), [len(kept.rows[row]) for row in full], TARGET)
        assert torch.equal(found, torch.stack([vector for row in full for vector in kept.rows[row]]))


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("seed", range(20))
def test_random_lives_of_rows(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = random.Random(seed)
    monkeypatch.setattr(features, "MOST_WAITING", choose.choice([1, 3, 32]))
    heard, kept, number = Features(), Kept(), 0
    memory = torch.empty(64, SIZE)  # which a body writes its next hidden states into
    for _ in range(300):
        rows = sorted(kept.rows)
        act = choose.choice(["round"] * 8 + ["pass", "rewind", "keep", "copy", "admit", "release", "look", "read"])
        if act == "admit" or not rows:
            heard.admit(number)
            kept.rows[number] = []
            number += 1
        elif act in ("round", "pass"):
            asked = rows if choose.random() < 0.8 else choose.sample(rows, choose.randint(1, len(rows)))
            counts = [1 if act == "round" else choose.randint(1, 4) for _ in asked]
            past = [len(kept.rows[row]) + (choose.random() < 0.02) for row in asked]
            hidden = memory[: sum(counts)].copy_(1 + torch.rand(sum(counts), SIZE)) if sum(counts) <= 64 else None
            if hidden is not None:
                kept.hear(asked, past, counts, hidden.clone())
                finished = None if act == "round" else [choose.randint(0, count) for count in counts]
                for own, tail in zip(hidden.split(counts), finished or counts, strict=True):
                    own[: len(own) - tail].neg_()
                heard.on_hidden_states(asked, past, counts, hidden, finished)
        elif act == "rewind":
            row = choose.choice(rows)
            length = choose.randint(0, len(kept.rows[row]) + 1)
            heard.rewind(row, length)
            del kept.rows[row][length:]
        elif act == "keep":
            row = choose.choice(rows)
            start = choose.randint(0, len(kept.rows[row]))
            heard.finish([row], [range(start, len(kept.rows[row]))], TARGET)  # trees are run whole
            tail = kept.rows[row][start:]
            picks = sorted(choose.sample(range(len(tail)), choose.randint(0, len(tail))))
            with torch.inference_mode():  # as scorers keep paths
                heard.on_keep(row, start, picks)
            kept.rows[row][start:] = [tail[pick] for pick in picks]
        elif act == "copy":
            source, length = choose.choice(rows), choose.randint(0, len(kept.rows[choose.choice(rows)]))
            heard.admit(number)
            heard.on_copy(source, number, length)
            kept.rows[number] = kept.rows[source][:length] if len(kept.rows[source]) >= length else []
            number += 1
        elif act == "release":
            row = choose.choice(rows)
            heard.release(row)
            del kept.rows[row]
        elif act == "read":  # a part of a row
            row = choose.choice(rows)
            first, last = sorted(choose.choices(range(len(kept.rows[row]) + 1), k=2))
            if first < last:
                found = heard.take([row], [first], [last - first], TARGET)
                assert torch.equal(found, torch.stack(kept.rows[row][first:last]))
        check(heard, kept, act == "look")
    check(heard, kept, every=True)


def test_vectors_of_many_rounds_are_stored_together(monkeypatch: pytest.MonkeyPatch) -> None:
    heard, writes = Features(), []
    store = heard._write
    monkeypatch.setattr(heard, "_write", lambda *arguments: (writes.append(arguments[1]), store(*arguments)))
    for row in (0, 1):
        heard.admit(row)
    for past in range(features.MOST_WAITING + 2):
        heard.on_hidden_states([0, 1], [past, past], [1, 1], torch.full((2, SIZE), float(past)))
    assert writes == [[features.MOST_WAITING] * 2]
    assert heard.take([1], [features.MOST_WAITING], [2], TARGET)[:, 0].tolist() == [
        features.MOST_WAITING,
        features.MOST_WAITING + 1,
    ]


def test_a_row_can_be_released_whatever_came_while_its_vectors_waited() -> None:
    """Of a cache for 100 tokens a second row takes half."""
    heard = Features(RaggedCache(100))
    heard.admit(0)
    heard.on_hidden_states([0], [0], [60], torch.randn(60, SIZE))
    for past in range(60, 70):
        heard.on_hidden_states([0], [past], [1], torch.randn(1, SIZE))
    heard.admit(1)
    heard.release(0)
    assert not heard.knows(0)
    heard.on_hidden_states([1], [0], [95], torch.randn(95, SIZE))
    assert heard.length(1) == 95


def test_vectors_that_find_no_room_are_not_lost() -> None:
    heard, rows = Features(RaggedCache(128)), [0, 1]
    for row in rows:
        heard.admit(row)
    heard.on_hidden_states(rows, [0, 0], [63, 63], torch.randn(126, SIZE))
    for past in range(63, 66):
        heard.on_hidden_states(rows, [past, past], [1, 1], torch.randn(2, SIZE))
    for _ in range(2):
        with pytest.raises(CacheFull):
            heard.take([0], [0], [1], TARGET)
    assert heard.length(0) == 66
