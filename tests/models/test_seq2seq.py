"""Encoder-decoder models as scorers: ragged rows, each with its own source and its own positions."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor
from transformers import UMT5Config, UMT5ForConditionalGeneration

from forerun import DraftModel, EarlyExit, SpeculativeDecoder, Tree
from forerun.cache.paged import PagedCache
from forerun.cache.ragged import RaggedCache
from forerun.errors import ForerunWarning, InvalidArgument, UnsupportedModel
from forerun.math.attention import Form
from forerun.models import cross_attention
from forerun.models.bodies.base import ForwardPass, PassOutput
from forerun.models.patches import positions
from forerun.models.scorer import Scorer
from forerun.models.seq2seq import Seq2SeqScorer, scorer_of
from forerun.types import Source
from support.recompute import check
from support.seq2seq import batch_of, generated, recomputed, rows_of, source_of
from support.tiny import EXTRA_SEQ2SEQ, SEQ2SEQ_FAMILIES, draft_of, tiny_model

ALL = (*SEQ2SEQ_FAMILIES, *EXTRA_SEQ2SEQ)
TOO_LONG = Source(ids=(5,) * 2000)
TEXTS = ((2, 5, 9, 20, 33, 7, 41, 6, 50, 81, 12, 3, 3, 64, 17), (2, 11), (2, 50, 60, 70, 9))
CUTS = (4, 1, 2)  # how much of each text is there before the rest is scored


def scorer(family: str, form: Form = Form.AUTO, rows: Any = (0, 1, 2), cache: Any = None) -> Seq2SeqScorer:
    made = Seq2SeqScorer(tiny_model(family), form, cache)
    for row in rows:
        made.admit(row)
        made.read(row, source_of(rows_of(family)[row]))
    return made


def scored(family: str, form: Form, cache: Any = None) -> tuple[Tensor, Tensor]:
    """Ours in two passes of ragged blocks, and plain forwards."""
    made = scorer(family, form, cache=cache)
    first = made.score(range(3), [text[:cut] for text, cut in zip(TEXTS, CUTS, strict=True)]).split(list(CUTS))
    rest = [text[cut:] for text, cut in zip(TEXTS, CUTS, strict=True)]
    second = made.score(range(3), rest).split([len(block) for block in rest])
    ours = torch.cat([part for pair in zip(first, second, strict=True) for part in pair])
    model, sources = tiny_model(family), rows_of(family)
    return ours, torch.cat([recomputed(model, family, sources[i], text) for i, text in enumerate(TEXTS)])


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("form", (Form.PAD, Form.SPLIT))
@pytest.mark.parametrize("family", ALL)
def test_ragged_rows_score_as_plain_forwards(family: str, form: Form) -> None:
    check(*scored(family, form))


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("family", ALL)
def test_rows_and_sources_in_blocks_score_as_plain_forwards(family: str) -> None:
    """Both in blocks of one pool, which neither fills."""
    check(*scored(family, Form.AUTO, in_blocks()))


def in_blocks() -> PagedCache:
    return PagedCache(256, torch.device("cpu"), block_size=8)


@pytest.mark.parametrize("family", SEQ2SEQ_FAMILIES)
@pytest.mark.parametrize("is_paged", (False, True))
def test_trees_are_scored_as_their_paths(family: str, is_paged: bool) -> None:
    """Two rows end in trees of different shapes: every node sees its own path, its source and its own position."""
    made, model = scorer(family, rows=(0, 1), cache=in_blocks() if is_paged else None), tiny_model(family)
    made.feed([0, 1], [TEXTS[0][:6], TEXTS[1][:1]])
    logits = made.score([0, 1], [[7, 8, 9, 30, 31], [5, 40, 41]], trees=[[-1, 0, 0, 1, 2], [-1, 0, 0]])
    paths = [(7,), (7, 8), (7, 9), (7, 8, 30), (7, 9, 31)], [(5,), (5, 40), (5, 41)]
    starts = TEXTS[0][:6], TEXTS[1][:1]
    wanted = [
        recomputed(model, family, rows_of(family)[row], [*starts[row], *path])[-1]
        for row in (0, 1)
        for path in paths[row]
    ]
    check(logits, torch.stack(wanted))


def test_control_positions_of_the_longest_row(monkeypatch: MonkeyPatch) -> None:
    """What transformers would do of itself: all rows count from the longest one's past."""
    monkeypatch.setattr(positions.PositionPatches, "__init__", _knows_nothing)
    monkeypatch.setattr(positions.PositionPatches, "is_told", True)  # without which such models are refused
    for family in ("t5_gated", "bart", "marian"):
        with pytest.raises((AssertionError, RuntimeError)):
            check(*scored(family, Form.PAD))


def _knows_nothing(self: Any, decoder: Any, takes_positions: bool) -> None:
    self._table, self._biases = None, []


def test_control_bias_of_the_longest_row(monkeypatch: MonkeyPatch) -> None:
    """A bias of the right shape whose distances are those of the batch's longest row."""

    def shifted(module: Any, states: Any) -> Any:
        late = copy.copy(states)
        late.positions = states.positions + (states.longest_past - states.positions.min())
        return right(module, late)

    right = positions._bias
    monkeypatch.setattr(positions, "_bias", shifted)
    with pytest.raises(AssertionError):
        check(*scored("t5_gated", Form.PAD))


@pytest.mark.parametrize("family", SEQ2SEQ_FAMILIES)
def test_control_the_source_of_another_row(family: str, monkeypatch: MonkeyPatch) -> None:
    right = cross_attention.Sources.of
    monkeypatch.setattr(cross_attention.Sources, "of", lambda self, row: right(self, (row + 1) % 3))
    with pytest.raises(AssertionError):
        check(*scored(family, Form.SPLIT))


@pytest.mark.parametrize("family", SEQ2SEQ_FAMILIES)
def test_the_encoder_runs_once_and_shared_sources_are_one(family: str) -> None:
    made, sources = Seq2SeqScorer(tiny_model(family)), rows_of(family)
    shared = source_of(sources[1])
    for row in range(6):
        made.admit(row)
        made.read(row, shared if row in (1, 2, 5) else source_of(sources[row]))
    for _ in range(3):
        made.score(range(6), [[2 + row] for row in range(6)])
    assert made.encoder.calls == 1
    assert len(made.sources.cache.rows) == 4, "rows that read the same share its keys"
    last = made.score(range(6), [[9]] * 6)
    for row in (0, 2, 5):
        source = sources[1] if row in (1, 2, 5) else sources[row]
        check(last[row : row + 1], recomputed(tiny_model(family), family, source, [2 + row] * 3 + [9])[-1:])
    for row in (1, 2):
        made.release(row)
    assert len(made.sources.cache.rows) == 4
    made.release(5)
    assert len(made.sources.cache.rows) == 3, "the last reader takes the source along"


def test_equal_texts_are_one_source_and_features_are_not() -> None:
    assert Source(ids=(1, 2)) == Source(ids=(1, 2)) != Source(ids=(2, 1))
    assert len({Source(ids=(1, 2)), Source(ids=(1, 2))}) == 1
    states = torch.zeros(2, 4)
    assert Source(states=states) != Source(states=states)
    assert Source(ids=(1, 2)) != Source(ids=(1, 2), states=states)


@pytest.mark.parametrize("family", ("t5", "bart", "whisper"))
def test_equal_beginnings_of_different_sources_are_no_twins(family: str) -> None:
    made, sources, model = scorer(family, rows=(0, 1)), rows_of(family), tiny_model(family)
    made.feed([0, 1], [[2, 30, 31]] * 2)
    logits = made.score([0, 1], [[32]] * 2)
    for row in (0, 1):
        check(logits[row : row + 1], recomputed(model, family, sources[row], [2, 30, 31, 32])[-1:])


def test_equal_beginnings_of_one_source_are_twins(monkeypatch: MonkeyPatch) -> None:
    made = Seq2SeqScorer(tiny_model("t5"))
    for row in (0, 1):
        made.admit(row)
        made.read(row, Source(ids=(5, 6, 7)))
    passed: list[int] = []
    right = made.body.run

    def noted(call: ForwardPass) -> PassOutput:
        passed.append(call.rows.num_tokens)
        return right(call)

    monkeypatch.setattr(made.body, "run", noted)
    made.feed([0, 1], [[2, 30, 31]] * 2)
    assert passed == [3]
    logits = made.score([0, 1], [[32]] * 2)
    check(logits[1:], logits[:1])


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("family", ALL)
def test_the_model_is_left_as_it_was(family: str) -> None:
    model = tiny_model(family)
    inputs = {**batch_of(family, rows_of(family)[1:2]), "decoder_input_ids": torch.tensor([TEXTS[0][:3]])}
    before = generated(model, inputs, max_new_tokens=8).tolist()
    scorer(family).score(range(3), [text[:3] for text in TEXTS])
    assert generated(model, inputs, max_new_tokens=8).tolist() == before


def test_a_long_beginning_goes_ahead_without_the_head(monkeypatch: MonkeyPatch) -> None:
    made, model = scorer("bart"), tiny_model("bart")
    sizes: list[int] = []
    hook = model.lm_head.register_forward_hook(lambda module, given, out: sizes.append(out.shape[1]))
    try:
        logits = made.score(range(3), TEXTS, tails=[2, 1, 1])
    finally:
        hook.remove()
    assert sizes == [4]
    wanted = [recomputed(model, "bart", rows_of("bart")[i], TEXTS[i])[-tail:] for i, tail in enumerate((2, 1, 1))]
    check(logits, torch.cat(wanted))


def test_a_failed_encoder_leaves_its_rows_releasable(monkeypatch: MonkeyPatch) -> None:
    made = scorer("t5")
    monkeypatch.setattr(made.encoder, "_run", lambda sources: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.score(range(3), [[2]] * 3)
    assert [made.length(row) for row in range(3)] == [0, 0, 0]
    for row in range(3):
        made.release(row)
    assert not made.sources.waiting and not made.cache.rows


def test_sources_whose_keys_find_no_memory_wait_on(monkeypatch: MonkeyPatch) -> None:
    made, write, calls = scorer("t5"), RaggedCache.write, list[RaggedCache]()

    def failing(self: RaggedCache, *arguments: Any) -> Any:
        calls.append(self)
        if len(calls) == 2:  # the second layer of the sources
            raise torch.OutOfMemoryError
        return write(self, *arguments)

    monkeypatch.setattr(RaggedCache, "write", failing)
    with pytest.raises(torch.OutOfMemoryError):
        made.score(range(3), [[2]] * 3)
    assert calls[1] is made.sources.cache and len(made.sources.waiting) == 3
    made.release(0)
    check(
        made.score([1, 2], [[2]] * 2),
        torch.cat([recomputed(tiny_model("t5"), "t5", rows_of("t5")[i], [2]) for i in (1, 2)]),
    )
    for row in (1, 2):
        made.release(row)
    assert not made.sources.cache.rows


def test_a_source_that_fails_takes_no_other_along() -> None:
    """Longer than the encoder's table of positions, as if that were known only when it is tried."""
    made, sources = Seq2SeqScorer(tiny_model("bart")), rows_of("bart")
    made.encoder.most_tokens = None
    for row in range(3):
        made.admit(row)
        made.read(row, TOO_LONG if row == 1 else source_of(sources[row]))
    check(
        made.score([0, 2], [[2]] * 2),
        torch.cat([recomputed(tiny_model("bart"), "bart", sources[i], [2]) for i in (0, 2)]),
    )
    assert made.why_unread(0) is None and "cannot read" in (made.why_unread(1) or "")
    with pytest.raises(InvalidArgument, match="cannot read"):
        made.score([0, 1], [[3]] * 2)
    assert [made.length(row) for row in range(3)] == [1, 0, 1]
    made.release(1)
    made.admit(1)
    made.read(1, source_of(sources[1]))
    check(made.score([1], [[2]]), recomputed(tiny_model("bart"), "bart", sources[1], [2]))


@pytest.mark.parametrize("family", ("bart", "marian", "pegasus", "blenderbot", "mbart"))
def test_no_source_is_longer_than_the_table_of_positions(family: str) -> None:
    """On a GPU an index past its end is no error that anybody could catch."""
    made = Seq2SeqScorer(tiny_model(family))
    most = made.encoder.most_tokens
    assert most == made.model.config.max_position_embeddings
    made.encoder.run([Source(ids=(5,) * most)])
    with pytest.raises(
        InvalidArgument, match=f"the source has {most + 1} tokens, this model's encoder {most} positions"
    ):
        made.encoder.check(Source(ids=(5,) * (most + 1)))
    assert Seq2SeqScorer(tiny_model("t5")).encoder.most_tokens is None


UNREAD_BY_DRAFT = {  # a draft's own encoder has fewer positions, or fewer ids
    "positions": ("bart", {"max_position_embeddings": 256}, {"max_position_embeddings": 64}, (5,) * 100),
    "ids": ("t5", {}, {"vocab_size": 60}, (80,) * 10),
}


@pytest.mark.slow
@pytest.mark.parametrize("lacks", UNREAD_BY_DRAFT)
def test_a_source_that_only_the_draft_cannot_read_changes_no_other_row(lacks: str) -> None:
    family, options, fewer, unread = UNREAD_BY_DRAFT[lacks]
    target, draft = tiny_model(family, 0, **options), tiny_model(family, 1, **fewer)
    text = tuple(range(10, 20))

    def decoded(*sources: tuple[int, ...]) -> list[list[int]]:
        width = max(map(len, sources))
        ids = torch.tensor([[*ids, *[1] * (width - len(ids))] for ids in sources])
        mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in sources])
        decoder = SpeculativeDecoder(target, DraftModel(draft), policy=3, kernels="off")
        out = decoder.generate(ids, attention_mask=mask, max_new_tokens=16, temperature=1.0, seed=1)
        assert decoder.engine.first_fault is None
        return [list(row) for row in out.new_tokens]

    alone = decoded(text)
    with pytest.warns(ForerunWarning, match="guesses without it"):
        beside = decoded(text, unread)
    assert beside[0] == alone[0] == decoded(text, text[::-1])[0]
    assert len(beside[1]) == 16


def test_a_draft_guesses_from_nothing_where_its_encoder_cannot_read() -> None:
    """Also encoder states of another width than its own, which come from the target; ids out of range are never run."""
    draft, sources = Seq2SeqScorer(tiny_model("t5"), is_draft=True), rows_of("t5")
    ran: list[Source] = []
    run = draft.encoder._run
    draft.encoder._run = lambda some: ran.extend(some) or run(some)  # type: ignore[method-assign, func-returns-value]
    for row, source in enumerate((Source(ids=(1, 97)), source_of(sources[0]), Source(states=torch.zeros(3, 31)))):
        draft.admit(row)
        draft.read(row, source)
    with pytest.warns(ForerunWarning, match="vocabulary of 97; it guesses without it"):
        logits = draft.score(range(3), [[2]] * 3)
    assert ran == [source_of(sources[0])]
    assert "vocabulary of 97" in (draft.why_unread(0) or "") and "[length, 32]" in (draft.why_unread(2) or "")
    assert torch.isfinite(logits).all() and draft.why_unread(1) is None
    check(logits[1:2], recomputed(tiny_model("t5"), "t5", sources[0], [2]))


def test_sources_are_encoded_in_batches_of_bounded_size(monkeypatch: MonkeyPatch) -> None:
    from forerun.models import encoder

    monkeypatch.setattr(encoder, "ENCODER_TOKENS", 20)
    made = scorer("t5", rows=range(8))
    logits = made.score(range(8), [[2]] * 8)
    assert 3 < made.encoder.calls <= 8
    for row in range(8):
        check(logits[row : row + 1], recomputed(tiny_model("t5"), "t5", rows_of("t5")[row], [2]))


def test_what_cannot_be_read_is_refused() -> None:
    t5, whisper = Seq2SeqScorer(tiny_model("t5")), Seq2SeqScorer(tiny_model("whisper"))
    t5.admit(0)
    for source, message in (
        (Source(), "at least one token"),
        (Source(states=torch.zeros(3, 31)), r"\[length, 32\]"),
        (Source(states=torch.zeros(0, 32)), "at least one"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            t5.read(0, source)
    with pytest.raises(InvalidArgument, match=r"token 97 .* vocabulary of 97"):
        t5.check_source(Source(ids=(1, 97)))
    with pytest.raises(InvalidArgument, match="input_features"):
        whisper.check_source(Source(ids=(1, 2)))
    for shape in ((8, 47), (7, 48), (48, 8), (48,)):
        with pytest.raises(InvalidArgument, match=r"reads \(8, 48\)"):
            whisper.check_source(Source(features=torch.zeros(shape)))
    with pytest.raises(InvalidArgument, match="no source"):
        t5.score([0], [[2]])
    with pytest.raises(InvalidArgument, match="no encoder"):
        Scorer(tiny_model("llama")).check_source(Source(ids=(1,)))


def test_features_of_which_a_mask_leaves_nothing_take_no_other_along() -> None:
    model, features = tiny_model("moonshine"), rows_of("moonshine")[0]
    made, mask = Seq2SeqScorer(model), torch.ones(len(features), dtype=torch.long)
    for row, own in enumerate((mask, 0 * mask)):
        made.admit(row)
        made.read(row, Source(features=features, mask=own))
    check(made.score([0], [[2]]), recomputed(model, "moonshine", features, [2]))
    assert made.why_unread(0) is None and "mask" in (made.why_unread(1) or "")


def test_other_models_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="Seq2SeqScorer"):
        Scorer(tiny_model("t5"))
    assert isinstance(scorer_of(tiny_model("t5")), Seq2SeqScorer)
    config = UMT5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=20)
    with pytest.raises(UnsupportedModel, match="position biases in every layer"):
        scorer_of(UMT5ForConditionalGeneration(config))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("family", ALL)
def test_on_a_gpu_greedy_text_is_generates(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_KERNELS", "auto")
    model = copy.deepcopy(tiny_model(family)).cuda()
    draft = draft_of(tiny_model(family)).cuda()
    inputs = {name: given.cuda() for name, given in batch_of(family, rows_of(family)).items()}
    wanted = generated(model, inputs, max_new_tokens=16).tolist()
    for drafter in (None, DraftModel(draft, shares_encoder=True), Tree(DraftModel(draft)), EarlyExit(1)):
        decoder = SpeculativeDecoder(model, drafter, policy=3)
        with warnings.catch_warnings():
            warnings.simplefilter("error", ForerunWarning)
            assert decoder.generate(**inputs, max_new_tokens=16).sequences.tolist() == wanted
        if drafter is None or isinstance(drafter, DraftModel):
            assert decoder.recorded == "whole rounds"
