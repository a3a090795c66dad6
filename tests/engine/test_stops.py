"""Several tokens arrive at once: a row ends at the first that ends it, wherever in the run that is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from engine.scripted import PROMPT, VOCAB, Scripted, Spell, answer, engine_with, finish, fresh_places, prophet, run
from forerun.engine import Engine, FinishReason, Request
from forerun.engine.stops import StopRule
from forerun.models.scorer import Scorer
from forerun.policy import Constant
from forerun.result import decode_text
from forerun.types import Origin
from support.tiny import plain_greedy, tiny_model

PLACES = [place for place in fresh_places() if place < 20]
UNUSED = next(token for token in range(VOCAB) if token not in answer())


def test_the_answer_has_stops_at_every_place_of_a_round() -> None:
    assert {place % 5 for place in PLACES} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("place", PLACES)
def test_an_accepted_or_bonus_stop_ends_the_row_there(place: int) -> None:
    """Perfect drafts of 4: places 0 to 3 of each round are accepted, place 4 is the bonus."""
    engine = engine_with(prophet(), keep_rows=1)
    stop = frozenset({answer()[place]})
    row = finish(engine, Request(prompt=PROMPT, max_new_tokens=40, stop_ids=stop))[0]
    assert row.tokens == answer()[: place + 1]
    assert row.finish_reason is FinishReason.STOP
    assert row.origins[-1] is (Origin.BONUS if place % 5 == 4 else Origin.ACCEPTED)
    assert engine.target.length(0) == len(PROMPT) + place  # all but the stop itself has been seen
    assert row.stats.num_emitted_tokens == place + 1
    assert row.stats.rounds == place // 5 + 1
    assert row.stats.num_accepted_tokens == row.origins.count(Origin.ACCEPTED)


@pytest.mark.parametrize("place", (0, 1, 2, 3, 5, 8))  # 4 is the bonus of the first round
def test_a_rejected_stop_stops_nothing(place: int) -> None:
    row = run(prophet({place: UNUSED}), stop_ids=frozenset({UNUSED}))
    assert row.tokens == answer()[:20]
    assert row.origins[place] is Origin.CORRECTION
    assert row.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("place", [place for place in PLACES if place % 5 < 4])
def test_a_stop_that_corrects_a_draft(place: int) -> None:
    row = run(prophet({place: UNUSED}), stop_ids=frozenset({answer()[place]}))
    assert row.tokens == answer()[: place + 1]
    assert row.origins[-1] is Origin.CORRECTION
    assert row.finish_reason is FinishReason.STOP


def test_the_earliest_of_several_stops_wins() -> None:
    first, *later = [place for place in PLACES if place // 5 == 1]
    assert len(later) >= 2
    for stops in (later[::-1], later):
        row = run(prophet(), stop_ids=frozenset(answer()[place] for place in (*stops, first)))
        assert row.tokens == answer()[: first + 1]


@pytest.mark.parametrize(("begin", "end"), [(0, 2), (2, 4), (3, 5), (3, 6), (4, 5), (1, 12)])
@pytest.mark.parametrize("length", (0, 4))
def test_a_stop_string_across_rounds(begin: int, end: int, length: int) -> None:
    """Drafts of 4 end their rounds after places 4 and 9."""
    text = "><".join(str(token) for token in answer()[begin : end + 1])
    row = run(prophet(), length, Spell(), stop_strings=("never", text))
    assert row.tokens == answer()[: end + 1]
    assert row.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("length", (0, 4))
@pytest.mark.parametrize("end", (0, 1, 6))
def test_a_stop_string_may_begin_in_the_prompt(end: int, length: int) -> None:
    """As in transformers: what counts is the token that completes it."""
    text = "".join(f"<{token}>" for token in (*PROMPT[-2:], *answer()[: end + 1]))
    for stop in (text, text[2:-1]):
        row = run(prophet(), length, Spell(), stop_strings=(stop,))
        assert row.tokens == answer()[: end + 1]
        assert row.finish_reason is FinishReason.STOP


def test_a_stop_string_that_is_whole_in_the_prompt_stops_nothing() -> None:
    row = run(prophet(), tokenizer=Spell(), stop_strings=(f"<{PROMPT[-2]}><{PROMPT[-1]}>", f"<{PROMPT[-1]}>"))
    assert len(row.tokens) == 20


def test_a_stop_string_is_looked_for_in_the_text_that_is_told() -> None:
    """Some tokenizers tidy blanks in front of punctuation when they decode; results and servers do not let them."""
    words = Tokenizer(WordLevel({"yes": 0, ".": 1, "no": 2}))
    tidy = PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=True)
    told = decode_text(tidy, [0, 1])
    assert (tidy.decode([0, 1]), told) == ("yes.", "yes .")
    for stop, ends in (("yes .", True), ("yes.", False)):
        rule = StopRule(Request(prompt=(2,), max_new_tokens=9, stop_strings=(stop,)), 9, tidy)
        assert rule.cut([0], [1, 2]) == ((1, FinishReason.STOP) if ends else (2, None))


class Plain:
    """A tokenizer that turns ids into text and takes no settings."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(("yes", ".", "no")[token] for token in ids)


@pytest.mark.parametrize("tokenizer", [Tokenizer(WordLevel({"yes": 0, ".": 1, "no": 2})), Plain()])
def test_tokenizers_with_fewer_settings_tell_and_stop(tokenizer: Any) -> None:
    assert decode_text(tokenizer, [0, 1, 2]) == "yes . no"
    rule = StopRule(Request(prompt=(2,), max_new_tokens=9, stop_strings=("yes .",)), 9, tokenizer)
    assert rule.cut([0], [1, 2]) == (1, FinishReason.STOP)


def test_stop_before_and_after_the_budget() -> None:
    place = next(place for place in PLACES if place % 5 == 2)
    stop = frozenset({answer()[place]})
    for budget, kept, reason in (
        (place + 2, place + 1, FinishReason.STOP),
        (place + 1, place + 1, FinishReason.STOP),
        (place, place, FinishReason.LENGTH),
    ):
        row = run(prophet(), stop_ids=stop, max_new_tokens=budget)
        assert (len(row.tokens), row.finish_reason) == (kept, reason)


@pytest.mark.parametrize("gamma", (1, 4, 7))
def test_budgets_are_met_exactly(gamma: int) -> None:
    for budget in (1, 2, gamma, gamma + 1, gamma + 2, 2 * gamma + 2):
        row = run(prophet(), gamma, max_new_tokens=budget)
        assert row.tokens == answer()[:budget]
        assert row.finish_reason is FinishReason.LENGTH


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("family", ("llama", "gpt2", "opt", "codegen"))
@pytest.mark.parametrize("length", (0, 5))
def test_the_context_ends_in_the_middle_of_a_draft(family: str, length: int) -> None:
    """32 positions: learned position tables have nothing past them, so one token too many would raise."""
    limit = "n_positions" if family in ("gpt2", "codegen") else "max_position_embeddings"
    model = tiny_model(family, **{limit: 32})
    prompt = PROMPT * 3
    wanted = tuple(plain_greedy(model, list(prompt), 32 - len(prompt)))
    drafter = Scripted(lambda history, room: list(wanted[len(history) - len(prompt) :][:room]))
    engine = Engine(Scorer(model), drafter, Constant(length))
    row = finish(engine, Request(prompt=prompt, max_new_tokens=100))[0]
    assert row.tokens == wanted
    assert row.finish_reason is FinishReason.LENGTH


def test_a_prompt_of_one_token() -> None:
    assert run(prophet(prompt=(9,)), prompt=(9,)).tokens == answer((9,))[:20]


def test_empty_drafts_are_plain_decoding() -> None:
    silent, plain = (run(drafter) for drafter in (Scripted(lambda history, room: []), None))
    assert silent.tokens == plain.tokens == answer()[:20]
    assert silent.stats.num_drafts == 0
    assert silent.stats.rounds == 20
    assert set(silent.origins) == set(plain.origins) == {Origin.PLAIN}, "a bonus comes after a whole draft"


def test_no_stop_before_the_minimum() -> None:
    model, stop = tiny_model("llama"), answer()[2]
    row = run(prophet(), stop_ids=frozenset({stop}), min_new_tokens=8)
    ids = torch.tensor([PROMPT])
    wanted = model.generate(
        ids, attention_mask=ids * 0 + 1, do_sample=False, max_new_tokens=20, min_new_tokens=8, eos_token_id=stop
    )
    assert list(row.tokens) == wanted[0, len(PROMPT) :].tolist()
    assert len(row.tokens) >= 8


@pytest.mark.parametrize("length", (0, 4))
def test_a_stop_string_before_the_minimum_counts_unless_it_is_not_to(length: int) -> None:
    """Transformers' minimum forbids end tokens alone; a server's forbids stop strings, too."""
    places = (2, 6)
    stops = tuple(f"<{answer()[place]}>" for place in places)
    assert all(answer().index(answer()[place]) == place for place in places)
    for minimum, early, end in ((6, True, 3), (6, False, 7), (2, False, 3), (3, False, 7), (20, False, 20)):
        row = run(prophet(), length, Spell(), stop_strings=stops, min_new_tokens=minimum, stops_early=early)
        assert row.tokens == answer()[:end], (minimum, early)


def test_long_texts_are_searched_at_their_end_only() -> None:
    """The window holds the longest stop string however it is cut into tokens."""
    request = Request(prompt=(1,), max_new_tokens=500, stop_strings=("<5><6>",))

    class Watched(Spell):
        longest = 0

        def decode(self, tokens: object, skip_special_tokens: bool = False, **_: Any) -> str:
            self.longest = max(self.longest, len(tokens))  # type: ignore[arg-type]
            return super().decode(tokens)  # type: ignore[arg-type]

    tokenizer = Watched()
    rule = StopRule(request, 500, tokenizer)
    assert rule.cut([1] * 300, [5, 6, 7]) == (2, FinishReason.STOP)
    assert tokenizer.longest <= rule.window < 50


def test_a_stop_string_that_begins_in_the_prompt_counts_unless_only_the_output_does() -> None:
    text = f"<{PROMPT[-1]}><{answer()[0]}>"
    assert run(prophet(), tokenizer=Spell(), stop_strings=(text,)).tokens == answer()[:1]
    row = run(prophet(), tokenizer=Spell(), stop_strings=(text,), stops_in_prompt=False)
    assert row.finish_reason is FinishReason.LENGTH and len(row.tokens) == 20
    later = f"<{answer()[4]}><{answer()[5]}>"
    assert run(prophet(), tokenizer=Spell(), stop_strings=(later,), stops_in_prompt=False).tokens == answer()[:6]


class Bytes:
    """As a user's own tokenizer may be: without the settings of transformers' own."""

    """A token a byte."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        return bytes(tokens).decode(errors="replace")


def test_a_stop_string_whose_every_byte_is_a_token() -> None:
    """Of characters that are four bytes each, behind others that the window cuts."""
    stop = "\N{GRINNING FACE}" * 7
    text = ("é" * 30 + stop + "!").encode()
    rule = StopRule(Request(prompt=(1,), max_new_tokens=500, stop_strings=(stop,)), 500, Bytes())
    end = len(text) - 1
    assert rule.cut(text[: end - 3], text[end - 3 :]) == (3, FinishReason.STOP)
    assert rule.cut([], text) == (end, FinishReason.STOP)
