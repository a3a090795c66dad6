"""What a call of `generate` may say to an encoder-decoder model, and what it means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, MinPLogitsWarper

import forerun
from forerun.engine import Engine, Request
from forerun.errors import ForerunWarning, InvalidArgument
from forerun.models.seq2seq import Seq2SeqScorer
from forerun.policy import Constant
from forerun.types import Source
from support.finish import finished
from support.seq2seq import batch_of, generated, recomputed, rows_of, source_of
from support.tiny import draft_of, tiny_model

NEW = 12


def decoder(family: str, drafter: Any = None, **settings: Any) -> forerun.SpeculativeDecoder:
    model = tiny_model(family)
    return forerun.SpeculativeDecoder(model, drafter or forerun.DraftModel(draft_of(model)), policy=3, **settings)


def inputs(family: str, count: int = 4) -> dict[str, Tensor]:
    return batch_of(family, rows_of(family)[:count])


class Louder:
    """A processor without state: even tokens are made a little likelier the longer the text."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        louder = scores.clone()
        louder[:, ::2] += 0.05 * ids.shape[1]
        return louder


BEGINNING = torch.tensor([[2, 9, 30]] * 4)
SAME: list[dict[str, Any]] = [
    {},
    {"decoder_input_ids": BEGINNING},
    {"decoder_input_ids": BEGINNING[:, 1:]},  # without the start token, which is put in front (not for Whisper)
    {"decoder_start_token_id": 5},
    {"forced_bos_token_id": 11},
    {"forced_eos_token_id": 13},
    {"forced_bos_token_id": 11, "begin_suppress_tokens": [20, 21, 22, 23, 24, 25]},
    {"no_repeat_ngram_size": 2, "eos_token_id": 40, "pad_token_id": 0},
    {"suppress_tokens": list(range(30, 60)), "repetition_penalty": 1.3},
    {"logits_processor": LogitsProcessorList([Louder()])},
    {"generation_config": GenerationConfig(forced_bos_token_id=11, decoder_start_token_id=5, pad_token_id=0)},
    {"min_new_tokens": 6, "eos_token_id": list(range(1, 60)), "pad_token_id": 0},
]


@pytest.mark.parametrize("family", ("t5_gated", "bart", "whisper"))
@pytest.mark.parametrize("keywords", SAME, ids=lambda k: "+".join(k) or "plain")
@pytest.mark.quick(every=14)
def test_keywords_mean_what_they_mean_to_generate(family: str, keywords: dict[str, Any]) -> None:
    model = tiny_model(family)
    wanted = generated(model, inputs(family), max_new_tokens=NEW, **keywords)
    ours = decoder(family, forerun.DraftModel(draft_of(model), shares_encoder=True))
    assert ours.generate(**inputs(family), max_new_tokens=NEW, **keywords).sequences.tolist() == wanted.tolist()
    inside = generated(model, inputs(family), max_new_tokens=NEW, custom_generate=ours.as_custom_generate(), **keywords)
    assert inside.tolist() == wanted.tolist()


def test_ids_of_the_models_own_configuration_count() -> None:
    """BART forces its end, Marian forbids its pad: the text is not the model's without it. None switches one off."""
    model = tiny_model("bart", seed=1)
    kept = model.generation_config
    try:
        model.generation_config = GenerationConfig.from_dict(
            {**kept.to_dict(), "forced_eos_token_id": 13, "forced_bos_token_id": 4, "bad_words_ids": [[50], [51]]}
        )
        wanted = generated(model, inputs("bart"), max_new_tokens=NEW)
        ours = forerun.SpeculativeDecoder(model, None)
        assert ours.generate(**inputs("bart"), max_new_tokens=NEW).sequences.tolist() == wanted.tolist()
        assert wanted[:, 1].tolist() == [4] * 4 and wanted[:, -1].tolist() == [13] * 4
        free = ours.generate(**inputs("bart"), max_new_tokens=NEW, forced_bos_token_id=None)
        assert free.sequences[:, 1].tolist() != [4] * 4
    finally:
        model.generation_config = kept


@pytest.mark.quick("t5")
@pytest.mark.parametrize("family", ("t5", "bart", "whisper", "moonshine"))
def test_encoder_outputs_stand_in_for_inputs(family: str) -> None:
    model, ours = tiny_model(family), decoder(family, forerun.PromptLookup())
    wanted = ours.generate(**inputs(family), max_new_tokens=NEW).sequences.tolist()
    calls = ours.engine.target.encoder.calls
    mask = inputs(family).get("attention_mask")
    with torch.no_grad():
        states = model.get_encoder()(**inputs(family))
    for given in (states, (states.last_hidden_state,), states.last_hidden_state):
        out = ours.generate(encoder_outputs=given, attention_mask=mask, max_new_tokens=NEW)
        assert out.sequences.tolist() == wanted
    assert ours.engine.target.encoder.calls == calls


def test_features_may_come_without_a_name() -> None:
    ours, features = decoder("whisper"), inputs("whisper")["input_features"]
    named = ours.generate(input_features=features, decoder_input_ids=BEGINNING, max_new_tokens=NEW)
    assert ours.generate(features, decoder_input_ids=BEGINNING, max_new_tokens=NEW).new_tokens == named.new_tokens
    ids = ours.generate(BEGINNING, input_features=features, max_new_tokens=NEW)
    assert ids.sequences.tolist() == named.sequences.tolist(), "transformers takes input_ids for the decoder's there"


def test_ragged_beginnings_are_rows_of_their_own() -> None:
    """Whisper's previous text: padded on the left, masked, and not there as far as the row is concerned."""
    ours = decoder("whisper")
    ids = torch.tensor([[7, 7, 2, 9], [2, 30, 31, 9], [7, 7, 7, 2], [7, 2, 50, 9]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1], [0, 1, 1, 1]])
    out = ours.generate(
        **inputs("whisper"), decoder_input_ids=ids, decoder_attention_mask=mask, max_new_tokens=NEW, pad_token_id=0
    )
    for row, features in enumerate(rows_of("whisper")[:4]):
        alone = generated(
            tiny_model("whisper"),
            {"input_features": features[None], "decoder_input_ids": ids[row : row + 1, mask[row].bool()]},
            max_new_tokens=NEW,
        )
        assert out.new_tokens[row] == alone[0, int(mask[row].sum()) :].tolist()
    assert out.sequences[:, :4].tolist() == (ids * mask).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("side", ("left", "right"))
@pytest.mark.parametrize("pad", (2, 7), ids=("padded with the start token", "padded with another"))
def test_ragged_beginnings_get_the_start_token_as_they_would_alone(pad: int, side: str) -> None:
    """Before each row's own first token, not before its padding; the last row has it already."""
    ours, rows = decoder("bart"), [[30], [31, 32, 33], [9, 11], [2, 9]]
    places = [slice(3 - len(row), 3) if side == "left" else slice(len(row)) for row in rows]
    ids, mask = torch.full((4, 3), pad), torch.zeros(4, 3, dtype=torch.int64)
    for i, (row, place) in enumerate(zip(rows, places, strict=True)):
        ids[i, place], mask[i, place] = torch.tensor(row), 1
    settings = {"max_new_tokens": NEW, "pad_token_id": 0, "decoder_start_token_id": 2}
    out = ours.generate(**inputs("bart"), decoder_input_ids=ids, decoder_attention_mask=mask, **settings)
    assert [list(row.request.prompt) for row in out.rows] == [[2, 30], [2, 31, 32, 33], [2, 9, 11], [2, 9]]
    for row, source in enumerate(rows_of("bart")[:4]):
        alone = ours.generate(source[None], decoder_input_ids=torch.tensor([rows[row]]), **settings)
        assert out.new_tokens[row] == alone.new_tokens[0]


def test_several_sequences_encode_their_source_once() -> None:
    ours = decoder("bart")
    out = ours.generate(**inputs("bart"), max_new_tokens=NEW, temperature=0.8, num_return_sequences=5, seed=1)
    assert ours.engine.target.encoder.calls == 1
    assert out.sequences.shape[0] == 20
    assert len({tuple(tokens) for tokens in out.new_tokens}) > 12


def test_what_was_read_is_forgotten_with_its_row() -> None:
    ours = decoder("t5")
    for _ in range(2):
        ours.generate(**inputs("t5"), max_new_tokens=3)
    target = ours.engine.target
    assert isinstance(target, Seq2SeqScorer) and isinstance(ours.drafter, forerun.DraftModel)
    for scorer in (target, ours.drafter.scorer):
        assert isinstance(scorer, Seq2SeqScorer)
        assert not scorer.sources.cache.rows and not scorer.sources.waiting and not scorer._states


@pytest.mark.quick("bart")
@pytest.mark.parametrize("family", ("t5_gated", "bart", "whisper"))
def test_a_late_arrival_reads_its_own_source(family: str) -> None:
    """Rows come and go, slots move; sources move on their own."""
    model, rows = tiny_model(family), rows_of(family)
    drafter = forerun.DraftModel(draft_of(model), shares_encoder=True)
    engine = Engine(Seq2SeqScorer(model), drafter, Constant(2))
    lengths = [3, 12, 7, 9, 14, 5, 8, 6]
    results = {}
    for step in range(60):
        if step < 8:
            prompt = (2,) if step % 2 else (2, 9)
            asked = Request(prompt=prompt, source=source_of(rows[step]), max_new_tokens=lengths[step], request_id=step)
            engine.add(asked)
        engine.step()
        results |= {result.request.request_id: result for result in engine.take_results()}
    assert len(results) == 8
    for row, result in results.items():
        begins = torch.tensor([list(result.request.prompt)])
        alone = generated(
            model, {**batch_of(family, [rows[row]]), "decoder_input_ids": begins, "decoder_start_token_id": 2},
            max_new_tokens=lengths[row],
        )  # fmt: skip
        assert list(result.tokens) == alone[0, begins.shape[1] :].tolist()
    assert not engine.target.cache.rows and not engine.target.sources.cache.rows  # type: ignore[attr-defined]


def test_a_kept_row_serves_only_its_own_source() -> None:
    """The shelf holds keys that depend on the source: the same beginning of another one must not find them."""
    model, rows = tiny_model("bart"), rows_of("bart")
    engine = Engine(Seq2SeqScorer(model), None, Constant(0), keep_rows=2)
    prompt = (2, 9, 30, 31)
    said = []
    for row in (0, 1, 0):
        engine.add(Request(prompt=prompt, source=source_of(rows[row]), max_new_tokens=5))
        said += [result.tokens for result in finished(engine)]
    wanted = [generated(model, {**batch_of("bart", [rows[row]]), "decoder_input_ids": torch.tensor([prompt])},
                        max_new_tokens=5)[0, 4:].tolist() for row in (0, 1)]  # fmt: skip
    assert [list(tokens) for tokens in said] == [wanted[0], wanted[1], wanted[0]]
    assert wanted[0] != wanted[1]
    assert engine.target.encoder.calls == 2, "the third finds the first one's keys"  # type: ignore[attr-defined]


def test_lookup_copies_from_the_source() -> None:
    """A text that says what its source says is drafted from it, unless told not to."""
    context: Any = type("Context", (), {})()
    context.rows, context.histories, context.vocab_size = (0,), ([2, 31, 32],), 97
    context.max_lengths, context.copy_lengths, context.device = (4,), None, torch.device("cpu")
    source = Source(ids=(30, 31, 32, 33, 34, 120, 35))
    for asked, wanted in ((True, [33, 34]), (False, [])):
        lookup = forerun.PromptLookup(source=asked)
        lookup.admit(0, (2,))
        lookup.read(0, source)
        draft = lookup.propose(context)
        assert draft.tokens[0, : int(draft.lengths[0])].tolist() == wanted, "120 is a word of the encoder's alone"
        lookup.release(0)
        assert lookup.propose(context).lengths.tolist() == [0]


def test_streams_and_stops() -> None:
    ours = decoder("bart")
    whole = ours.generate(**inputs("bart"), max_new_tokens=NEW)
    stream = ours.stream(**inputs("bart"), max_new_tokens=NEW)
    gained: dict[int, list[int]] = {}
    for progress in stream:
        for entry in progress:
            gained.setdefault(entry.row, []).extend(entry.tokens)
    assert [gained[row] for row in range(4)] == whole.new_tokens
    stop = whole.new_tokens[1][4]
    ended = ours.generate(**inputs("bart"), max_new_tokens=NEW, eos_token_id=stop)
    assert ended.new_tokens[1] == whole.new_tokens[1][: whole.new_tokens[1].index(stop) + 1]
    assert ended.finish_reasons[1] == "stop"


@pytest.mark.slow
def test_the_decoders_context_is_the_limit() -> None:
    out = decoder("whisper").generate(**inputs("whisper"), decoder_input_ids=BEGINNING, max_new_tokens=500)
    assert {len(tokens) for tokens in out.new_tokens} == {96 - 3}
    last = out.new_tokens[0][-1]
    logits = recomputed(tiny_model("whisper"), "whisper", rows_of("whisper")[0], out.sequences[0, :-1].tolist())
    assert logits[-1].max() - logits[-1][last] < 1e-3


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("t5", {}, "give input_ids"),
    ("whisper", {}, "give input_features"),
    ("t5", {"input_features": torch.zeros(1, 8, 48)}, "input_ids"),
    ("whisper", {"input_features": torch.zeros(1, 8, 48, dtype=torch.long)}, "numbers"),
    ("t5", {"input_ids": torch.tensor([[3, 4]]), "decoder_input_ids": torch.tensor([[0], [0]])}, "a row a source"),
    ("t5", {"encoder_outputs": torch.zeros(1, 3, 31)}, r"\[batch, length, 32\]"),
    ("t5", {"input_ids": torch.tensor([[3, 4]]), "num_beams": 4}, "beam search"),
    ("t5", {"input_ids": torch.tensor([[3, 4]]), "attention_mask": torch.tensor([[0, 0]])}, "empty"),
    ("llama", {"input_ids": torch.tensor([[3, 4]]), "decoder_input_ids": torch.tensor([[0]])}, "no encoder"),
    ("llama", {}, "input_ids is missing"),
]


@pytest.mark.parametrize(("family", "keywords", "message"), REFUSED)
def test_what_cannot_be_meant_is_refused(family: str, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        forerun.SpeculativeDecoder(tiny_model(family), None).generate(**keywords, max_new_tokens=2)


def test_a_model_that_does_not_say_how_it_begins() -> None:
    model = tiny_model("t5", decoder_start_token_id=None)
    with pytest.raises(InvalidArgument, match="how does the decoder begin"):
        forerun.SpeculativeDecoder(model, None).generate(torch.tensor([[3, 4]]), max_new_tokens=2)


def test_drafters_that_do_not_fit_are_refused() -> None:
    narrow = tiny_model("t5", d_model=16)
    whisper, t5 = tiny_model("whisper"), tiny_model("t5")
    cases: list[tuple[Any, Any, str]] = [
        (t5, forerun.DraftModel(narrow, shares_encoder=True), "32 wide"),
        (t5, forerun.DraftModel(whisper), "input_features"),
        (t5, forerun.DraftModel(tiny_model("llama"), shares_encoder=True), "no cross-attention"),
        (tiny_model("llama"), forerun.DraftModel(t5), "decoder-only draft"),
        (t5, forerun.EarlyExit(2), "leave some out"),
    ]
    for target, drafter, message in cases:
        with pytest.raises(InvalidArgument, match=message):
            forerun.SpeculativeDecoder(target, drafter)


def test_heads_on_features_are_refused() -> None:
    from support.heads import head_of

    with pytest.raises(InvalidArgument, match="decoder-only"):
        forerun.SpeculativeDecoder(tiny_model("t5"), forerun.FeatureHead(head_of(tiny_model("llama"))))


def test_a_draft_that_cannot_read_says_so_and_the_text_is_right() -> None:
    """Encoder outputs of another width mean nothing to a draft's own encoder: it stays silent, and warns."""
    model = tiny_model("t5")
    ours = forerun.SpeculativeDecoder(model, forerun.DraftModel(tiny_model("t5", d_model=16)), policy=3)
    wanted = generated(model, inputs("t5"), max_new_tokens=NEW)
    with pytest.warns(ForerunWarning, match="16"):
        got = generated(model, inputs("t5"), max_new_tokens=NEW, custom_generate=ours.as_custom_generate())
    assert got.tolist() == wanted.tolist()


def test_warpers_of_the_callers_own_are_honoured() -> None:
    """`logits_processor` reaches every position of a draft: with only the likeliest token left, sampling is greedy."""
    greedy = decoder("bart").generate(**inputs("bart"), max_new_tokens=NEW)
    only = LogitsProcessorList([MinPLogitsWarper(1.0)])
    sampled = decoder("bart").generate(**inputs("bart"), max_new_tokens=NEW, temperature=1.0, logits_processor=only)
    assert sampled.new_tokens == greedy.new_tokens


def test_a_draft_reads_the_source_itself_though_the_targets_states_are_given() -> None:
    """Both of one width, so that only the text tells whose states they are."""
    model, draft = tiny_model("t5"), tiny_model("t5", seed=1)
    with torch.no_grad():
        states = model.get_encoder()(**inputs("t5")).last_hidden_state
    runs = []
    for given in ({}, {"encoder_outputs": states}):
        ours = forerun.SpeculativeDecoder(model, forerun.DraftModel(draft), policy=3)
        out = ours.generate(**inputs("t5"), **given, max_new_tokens=NEW, temperature=1.0, seed=2)
        assert ours.drafter.scorer.encoder.calls == 1
        runs.append(out.new_tokens)
    assert runs[0] == runs[1]


def test_inside_generate_only_what_the_call_asks_for_counts() -> None:
    """Whisper clears fields that it has made processors of: the model's own configuration must not bring them back."""
    model = tiny_model("bart", seed=1)
    ours, kept = forerun.SpeculativeDecoder(model, None), model.generation_config
    with torch.no_grad():
        states = model.get_encoder()(**inputs("bart"))
    ids = torch.full((4, 1), 2)
    given = {"encoder_outputs": states, "attention_mask": inputs("bart")["attention_mask"]}
    asked = GenerationConfig(max_length=9, eos_token_id=None, pad_token_id=0)
    free = ours.as_custom_generate()(model, ids, generation_config=asked, **given)
    try:
        model.generation_config = GenerationConfig.from_dict({**kept.to_dict(), "forced_bos_token_id": 4})
        assert ours.as_custom_generate()(model, ids, generation_config=asked, **given).tolist() == free.tolist()
        assert ours.generate(**inputs("bart"), max_new_tokens=8).sequences.tolist() != free.tolist()
    finally:
        model.generation_config = kept
