"""Prompts that recorded passes of few sizes have taken in leave the keys that a pass of their own length leaves."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from engine.device_engines import Rehearsing
from forerun.cache.base import CacheFull
from forerun.cache.paged import PagedCache
from forerun.engine.device import prompt_passes
from forerun.engine.device.capture import Work
from forerun.engine.device.prompt_passes import CHUNKS, PIECE, PIECES, WEIGHTS, PromptPasses, why_not
from forerun.errors import ForerunWarning
from forerun.models.scorer import Scorer
from forerun.models.static_pass import StaticRows
from support.recompute import check, recomputed
from support.tiny import tiny_model

CPU = torch.device("cpu")
LONGEST = 300


def scorer_with_passes(
    bound: int | None = 512, longest: int = LONGEST, with_head: bool = False
) -> tuple[Scorer, PromptPasses]:
    scorer = Scorer(tiny_model("llama"), cache=PagedCache(4096, CPU, longest=longest, block_size=16))
    passes = PromptPasses(scorer, Rehearsing(CPU), bound, with_head=with_head)
    scorer.admit(99)  # settles the size
    if bound is not None:
        passes.prepare()
    scorer.recorded_feed = passes.feed
    return scorer, passes


def text(seed: int, length: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(97) for _ in range(length)]


def check_rows(scorer: Scorer, texts: dict[int, list[int]]) -> None:
    for row, own in texts.items():
        assert scorer.length(row) == len(own)
        check(scorer.score([row], [[5, 6]]), recomputed(scorer.model, [*own, 5, 6])[-2:])
        scorer.rewind([row], [len(own)])


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("lengths", [(3,), (PIECE + 1, 2), (5, 9, 1, 2 * PIECE, 70), tuple(range(1, 20))])
def test_same_keys(lengths: tuple[int, ...]) -> None:
    """Twice, so that the second time there are keys before those that are taken in."""
    scorer, passes = scorer_with_passes()
    recorded = passes.recordings.recorder.num_recordings
    texts: dict[int, list[int]] = {row: [] for row in range(len(lengths))}
    for row in texts:
        scorer.admit(row)
    for turn in range(2):
        more = [text(100 * turn + row, length) for row, length in enumerate(lengths)]
        scorer.feed(list(texts), more)
        texts = {row: [*own, *new] for (row, own), new in zip(texts.items(), more, strict=True)}
        check_rows(scorer, texts)
    assert passes.recordings.recorder.num_recordings == recorded
    assert isinstance(scorer.cache, PagedCache)
    scorer.cache.check()


def fail_once(passes: PromptPasses, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Let the second of their passes not be recorded; the shapes that were asked for."""
    monkeypatch.setattr("forerun.engine.device.prompt_passes.CHUNKS", (32, 64))
    recorded, shapes = passes._recorded, list[tuple[int, ...]]()

    def failing(*shape: int) -> Work:
        shapes.append(shape)
        if len(shapes) == 2:
            raise RuntimeError("no such graph")
        return recorded(*shape)

    monkeypatch.setattr(passes, "_recorded", failing)
    return shapes


def check_ends(scorer: Scorer, texts: dict[int, list[int]], ending: list[int]) -> None:
    """Fed to their ends: logits there, of the rows that want them and of no others."""
    found = scorer.feed_to_end(list(texts), list(texts.values()), ending)
    assert sorted(found) == sorted(ending)
    for row in ending:
        check(found[row][None], recomputed(scorer.model, texts[row])[-1:])
    check_rows(scorer, texts)


@pytest.mark.parametrize("bound", [512, None])
@pytest.mark.parametrize("lengths", [(3,), (PIECE, 2 * PIECE, 70, 1), tuple(range(1, 20)), (LONGEST - 2, 40)])
@pytest.mark.quick(every=3)
def test_logits_after_last_tokens(lengths: tuple[int, ...], bound: int | None) -> None:
    """By chunks, by pieces together, and by a pass of its own where padding has no room."""
    scorer, passes = scorer_with_passes(bound, with_head=True)
    texts = {row: text(row, length) for row, length in enumerate(lengths)}
    for row in texts:
        scorer.admit(row)
    check_ends(scorer, texts, [row for row in texts if row % 3 != 1])
    assert passes.recordings.recorder.num_recordings


def test_logits_of_rows_that_begin_alike() -> None:
    """A text that is the beginning of another one is copied up to its last token, which is run."""
    scorer, _ = scorer_with_passes(None, with_head=True)
    long = text(1, 150)
    texts = {0: long, 1: long[:90], 2: [*long[:80], 3, 4], 3: list(long)}
    for row in texts:
        scorer.admit(row)
    check_ends(scorer, texts, [0, 1, 2, 3])


def test_logits_behind_a_pass_that_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, passes = scorer_with_passes(None, with_head=True)
    fail_once(passes, monkeypatch)
    monkeypatch.setattr(passes, "_are_faster_together", lambda _: False)
    texts = {0: text(0, 60), 1: text(1, 130), 2: text(2, 20)}  # the first is done by then
    for row in texts:
        scorer.admit(row)
    with pytest.warns(ForerunWarning, match="could not be recorded"):
        check_ends(scorer, texts, [0, 1, 2])


def test_control_logits_after_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, passes = scorer_with_passes(None, with_head=True)
    at = passes._pass.logits_at
    monkeypatch.setattr(passes._pass, "logits_at", lambda new, rows, last: at(new, rows, last - 1))
    scorer.admit(0)
    with pytest.raises(AssertionError):
        check_ends(scorer, {0: text(1, 20)}, [0])


def test_what_padding_has_no_room_for_is_left() -> None:
    scorer, passes = scorer_with_passes()
    room = scorer.cache.capacity
    scorer.admit(0)
    own = text(1, room - 10)
    scorer.feed([0], [own[:-PIECE]])
    assert passes.feed([(0, own[-PIECE:])]) == [(0, own[-PIECE:])], "a chunk would end past the last key"
    scorer.feed([0], [own[-PIECE:]])
    check_rows(scorer, {0: own})


def test_a_row_longer_than_attention_was_recorded_for_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel divides its work by the bound: keys past it would not be seen."""
    scorer, passes = scorer_with_passes(bound=128)
    rows, ends = passes._pass.rows, list[int]()

    def watched(slots: Tensor, past: Tensor, count: int, bound: int) -> StaticRows:
        ends.append(int(past.max()) + count)
        return rows(slots, past, count, bound)

    monkeypatch.setattr(passes._pass, "rows", watched)
    scorer.admit(0)
    own = text(1, 200)
    for start in (0, 40, 90):
        scorer.feed([0], [own[start : {0: 40, 40: 90}.get(start)]])
    assert ends and max(ends) <= 128
    check_rows(scorer, {0: own})


def test_what_passes_leave_of_a_long_prompt_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, passes = scorer_with_passes()
    shapes, recorded = list[tuple[int, ...]](), passes._recorded
    monkeypatch.setattr(passes, "_recorded", lambda *shape: (shapes.append(shape), recorded(*shape))[1])
    monkeypatch.setattr("forerun.engine.device.prompt_passes.LONG", 64)
    monkeypatch.setattr("forerun.models.scorer.PREFILL_TOKENS", 64)
    scorer.admit(0)
    scorer.feed([0], [text(1, 150)])
    assert shapes == [(1, 32, 512)]
    check_rows(scorer, {0: text(1, 150)})


def test_several_short_prompts_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of one row lie in one pass, and one pass does not hold all of them."""
    scorer, passes = scorer_with_passes()
    shapes, recorded = list[tuple[int, ...]](), passes._recorded
    monkeypatch.setattr(passes, "_recorded", lambda *shape: (shapes.append(shape), recorded(*shape))[1])
    texts = {row: text(row, 40 + row) for row in range(12)}
    for row in texts:
        scorer.admit(row)
    scorer.feed(list(texts), list(texts.values()))
    assert shapes == [(PIECES[1], PIECE, 512), (PIECES[0], PIECE, 512)], "36 to 41 pieces"
    check_rows(scorer, texts)


def test_without_a_warm_up_sizes_are_recorded_as_they_are_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time already, so that the same text is read by the same work the second time."""
    monkeypatch.setattr("forerun.engine.device.shapes.SMALLEST_KEY_BOUND", 64)
    scorer, passes = scorer_with_passes(bound=None, longest=600)
    recorder, rows, bounds = passes.recordings.recorder, passes._pass.rows, list[tuple[int, int]]()

    def watched(slots: Tensor, past: Tensor, count: int, bound: int) -> StaticRows:
        bounds.append((int(past.max()) + count, bound))
        return rows(slots, past, count, bound)

    monkeypatch.setattr(passes._pass, "rows", watched)
    own = text(1, 250)
    for row in range(2):
        scorer.admit(row)
        for start, end, known in ((0, 20, 1), (20, 50, 1), (50, 80, 2), (80, 250, 3)):
            scorer.feed([row], [own[start:end]])
            assert recorder.num_recordings == (3 if row else known), "chunks of 32 for 64 and 128 keys, of 256"
    assert all(keys <= bound for keys, bound in bounds) and {bound for _, bound in bounds} == {64, 128, 512}
    check_rows(scorer, {0: own, 1: own})


def test_without_a_warm_up_many_tokens_are_left_to_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.engine.device.prompt_passes.LONG", 60)
    scorer, passes = scorer_with_passes(bound=None)
    texts = {row: text(row, 30) for row in range(3)}
    for row in texts:
        scorer.admit(row)
    assert passes.feed(list(texts.items())) == list(texts.items())
    scorer.feed(list(texts), list(texts.values()))
    check_rows(scorer, texts)
    assert passes.recordings.recorder.num_recordings == 0
    assert passes.feed([(0, text(7, 30)), (1, text(8, 30))]) == [], "together these are few"


@pytest.mark.parametrize("lengths", [(150,), (40,) * 12])
def test_a_pass_that_cannot_be_recorded_costs_no_text(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the passes before it have read stays read, and the rest is read without them; said once."""
    scorer, passes = scorer_with_passes()
    shapes = fail_once(passes, monkeypatch)
    texts = {row: text(row, length) for row, length in enumerate(lengths)}
    for row in texts:
        scorer.admit(row)
    with pytest.warns(ForerunWarning, match=r"pass over prompts could not be recorded \(RuntimeError: no such graph"):
        scorer.feed(list(texts), list(texts.values()))
    check_rows(scorer, texts)
    assert scorer.recorded_feed is None and len(shapes) == 2
    scorer.feed([0], [text(5, 20)])  # without a warning
    check_rows(scorer, {0: [*texts[0], *text(5, 20)]})


def test_chunks_of_every_length_are_found_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold all tokens and cost no more than one padded chunk; a plan that tries every way never ends."""
    plan, steps = prompt_passes._chunks, 0

    def counted(tokens: int) -> list[int]:
        nonlocal steps
        steps += 1
        assert steps <= 2 * len(CHUNKS)
        return plan(tokens)

    monkeypatch.setattr(prompt_passes, "_chunks", counted)
    for tokens in range(1, 2 * CHUNKS[-1] + 2):
        steps = 0
        chunks = counted(tokens)
        assert set(chunks) <= set(CHUNKS)
        assert tokens <= sum(chunks)
        if tokens <= CHUNKS[-1]:
            one = next(chunk for chunk in CHUNKS if chunk >= tokens)
            assert prompt_passes._cost(chunks) <= WEIGHTS + one


def test_a_recorded_pass_without_room_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, passes = scorer_with_passes()
    scorer.admit(0)
    monkeypatch.setattr(scorer.cache, "reserve", lambda *_: (_ for _ in ()).throw(CacheFull("no room")))
    with pytest.raises(CacheFull):
        scorer.feed([0], [text(1, 20)])
    assert scorer.recorded_feed == passes.feed


def test_control_a_pass_that_forgets_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, passes = scorer_with_passes()
    rows = passes._pass.rows
    monkeypatch.setattr(passes._pass, "rows", lambda slots, past, *rest: rows(slots, past * 0, *rest))
    scorer.admit(0)
    scorer.feed([0], [text(1, 20)])
    scorer.feed([0], [text(2, 20)])
    with pytest.raises(AssertionError):
        check_rows(scorer, {0: [*text(1, 20), *text(2, 20)]})


def test_rows_in_one_piece_are_refused() -> None:
    assert "one piece" in (why_not(Scorer(tiny_model("llama"))) or "")
    assert CHUNKS[0] % PIECE == 0
