"""Inside `model.generate`, what its caller gave is honoured: processors, stopping criteria and streamers."""

from __future__ import annotations

import time
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessor,
    MaxLengthCriteria,
    MaxTimeCriteria,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteria,
    StopStringCriteria,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TextIteratorStreamer,
    TopKLogitsWarper,
)

import forerun
from forerun.errors import InvalidArgument
from support.batches import padded_inputs
from support.seq2seq import batch_of, rows_of
from support.tiny import draft_of, plain_greedy, ragged_prompts, tiny_model

PROMPTS = ragged_prompts(3, 97, seed=51, longest=12)
TEXT = plain_greedy(tiny_model("llama"), PROMPTS[1], 14)
NEW = 14


def inside(family: str = "llama", **settings: Any) -> Any:
    model = tiny_model(family)
    ours = forerun.SpeculativeDecoder(model, forerun.DraftModel(draft_of(model)), policy=3, **settings)
    return ours.as_custom_generate()


def both(inputs: dict[str, Tensor], family: str = "llama", **keywords: Any) -> tuple[Any, Any]:
    """Tokens of `model.generate`, and those of Forerun inside it. Lists are made twice: objects may remember a call."""
    common = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, **keywords}
    made = []
    for custom in (None, inside(family)):
        given = {name: value() if callable(value) else value for name, value in common.items()}
        made.append(tiny_model(family).generate(**inputs, **given, custom_generate=custom).tolist())
    return made[0], made[1]


class ByLength(LogitsProcessor):
    """Looks at nothing but how long the text is, pads included."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.roll(input_ids.shape[1] % 7, dims=-1)


OWN: dict[str, Any] = {
    "repetition": lambda: [RepetitionPenaltyLogitsProcessor(1.8)],
    "n-grams": lambda: [NoRepeatNGramLogitsProcessor(1)],
    "bad words": lambda: [NoBadWordsLogitsProcessor([[TEXT[2]]])],
    "suppressed": lambda: [SuppressTokensLogitsProcessor([TEXT[1], TEXT[3]])],
    "suppressed first": lambda: [SuppressTokensAtBeginLogitsProcessor([TEXT[0]], 12)],
    "biased": lambda: [SequenceBiasLogitsProcessor([[[TEXT[1]], -4.0]])],
    "forced end": lambda: [ForcedEOSTokenLogitsProcessor(17, 5)],
    "least length": lambda: [MinNewTokensLengthLogitsProcessor(12, 9, TEXT[4])],
    "truncation": lambda: [TopKLogitsWarper(2), ByLength()],
    "by length": lambda: [ByLength()],
}


@pytest.mark.quick("repetition", "truncation")
@pytest.mark.parametrize("kind", OWN)
def test_processors_of_the_caller_are_applied_as_transformers_does(kind: str) -> None:
    """Their class is one that transformers also makes by itself; they see the padded batch."""
    wanted, got = both(padded_inputs(PROMPTS), logits_processor=OWN[kind])
    assert got == wanted
    if kind != "truncation":
        assert wanted != both(padded_inputs(PROMPTS))[0], "the processor changes nothing, so the test could not fail"


# What the configuration asks for would be seen in the text, were it applied as well.
REPLACED: list[dict[str, Any]] = [
    {"repetition_penalty": 0.3, "logits_processor": lambda: [RepetitionPenaltyLogitsProcessor(1.8)]},
    {"repetition_penalty": 1.8, "logits_processor": lambda: [RepetitionPenaltyLogitsProcessor(1.8)]},
    {"no_repeat_ngram_size": 1, "logits_processor": lambda: [NoRepeatNGramLogitsProcessor(3), ByLength()]},
    {
        "repetition_penalty": 1.4,
        "sequence_bias": [[[TEXT[1]], 30.0]],
        "logits_processor": lambda: [SequenceBiasLogitsProcessor([[[TEXT[0]], 3.0]])],
    },
    {"min_new_tokens": 6, "eos_token_id": TEXT[4], "stopping_criteria": lambda: [EosTokenCriteria(TEXT[6])]},
]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("keywords", REPLACED, ids=lambda k: "+".join(k))
def test_the_callers_take_the_place_of_the_configurations(keywords: dict[str, Any]) -> None:
    wanted, got = both(padded_inputs(PROMPTS[1:2]), **keywords)
    assert got == wanted


LIMITS: dict[str, Any] = {
    "end token": lambda: [EosTokenCriteria(TEXT[4])],
    "two end tokens": lambda: [EosTokenCriteria([TEXT[9]]), EosTokenCriteria(torch.tensor([TEXT[5]]))],
    "shorter": lambda: [MaxLengthCriteria(15)],
    "longer": lambda: [MaxLengthCriteria(30)],
}


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("kind", LIMITS)
def test_criteria_of_the_caller_are_honoured(kind: str) -> None:
    wanted, got = both(padded_inputs(PROMPTS[1:2]), stopping_criteria=LIMITS[kind])
    assert got == wanted
    assert wanted != both(padded_inputs(PROMPTS[1:2]))[0], "the criterion changes nothing, so the test could not fail"


def test_time_given_by_the_caller_is_honoured() -> None:
    began = time.time() - 100
    for criterion, is_over in ((MaxTimeCriteria(50, began), True), (MaxTimeCriteria(1e6, began), False)):
        out = tiny_model("llama").generate(
            **padded_inputs(PROMPTS[1:2]), do_sample=False, max_new_tokens=NEW, custom_generate=inside(),
            stopping_criteria=[criterion],
        )  # fmt: skip
        assert (out.shape[1] < 12 + NEW) == is_over


class Never(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


class MyEnd(EosTokenCriteria):
    """May mean anything."""


def test_what_cannot_be_honoured_is_refused() -> None:
    for criterion in (Never(), MyEnd(3)):
        with pytest.raises(InvalidArgument, match=type(criterion).__name__):
            both(padded_inputs(PROMPTS), stopping_criteria=[criterion])
    with pytest.raises(InvalidArgument, match="prefix_allowed_tokens_fn with 3 sequences"):
        inside_by_prefix(PROMPTS)
    out = inside_by_prefix(PROMPTS[:1])
    assert set(out[0, len(PROMPTS[0]) :].tolist()) <= {3, 4, 5}


def inside_by_prefix(prompts: list[list[int]]) -> Tensor:
    out: Tensor = tiny_model("llama").generate(
        **padded_inputs(prompts), do_sample=False, max_new_tokens=4, custom_generate=inside(),
        prefix_allowed_tokens_fn=lambda row, ids: [3, 4, 5],
    )  # fmt: skip
    return out


@pytest.mark.filterwarnings("ignore:.*such rounds decode plainly")
def test_counters_of_the_caller_are_still_noticed() -> None:
    class Counter(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            self.calls += 1
            return scores

    with pytest.raises(InvalidArgument, match="Counter changes its own state"):
        both(padded_inputs(PROMPTS), logits_processor=lambda: [Counter()])


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("kind", ("repetition", "n-grams", "by length"))
def test_an_encoder_decoders_caller_too(kind: str) -> None:
    inputs = batch_of("bart", rows_of("bart")[:3])
    wanted, got = both(inputs, "bart", logits_processor=OWN[kind])
    assert got == wanted


def test_sampled_processors_of_the_caller() -> None:
    """Temperature and truncation of the configuration come behind the caller's, and are ours to do."""
    text = tiny_model("llama").generate(
        **padded_inputs(PROMPTS), do_sample=True, temperature=0.7, top_k=9, top_p=0.9, max_new_tokens=8, pad_token_id=0,
        custom_generate=inside(), logits_processor=[SuppressTokensLogitsProcessor(list(range(50)))],
    )  # fmt: skip
    assert int(text[:, 12:].min()) >= 50


def letters() -> PreTrainedTokenizerFast:
    """Token t is the letter t, of bytes as GPT-2 writes them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:97]
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_stop_strings_of_the_caller_are_honoured() -> None:
    criterion = StopStringCriteria(letters(), [letters().decode([TEXT[5]])])
    with pytest.raises(InvalidArgument, match="tokenizer"):
        both(padded_inputs(PROMPTS[1:2]), stopping_criteria=[criterion])
    out = tiny_model("llama").generate(
        **padded_inputs(PROMPTS[1:2]), do_sample=False, max_new_tokens=NEW, stopping_criteria=[criterion],
        custom_generate=inside(tokenizer=letters()),
    )  # fmt: skip
    assert out[0, len(PROMPTS[1]) :].tolist() == TEXT[:6]


def heard_by_thread(**keywords: Any) -> tuple[str, list[BaseException]]:
    """What a thread gives to a consumer, which waits ten seconds for each piece, and what it ended with."""
    streamer, errors = TextIteratorStreamer(letters(), skip_prompt=True, timeout=10), []

    def produce() -> None:
        try:
            tiny_model("llama").generate(
                **padded_inputs(PROMPTS[1:2]), do_sample=False, max_new_tokens=NEW, streamer=streamer,
                custom_generate=inside(), **keywords,
            )  # fmt: skip
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=produce)
    thread.start()
    text = "".join(streamer)
    thread.join()
    return text, errors


def test_a_streamer_is_told_everything_and_the_end() -> None:
    text, errors = heard_by_thread()
    assert (text, errors) == (letters().decode(TEXT), [])


@pytest.mark.filterwarnings("ignore:.*such rounds decode plainly")
def test_a_streamer_hears_the_end_of_what_was_refused_or_failed() -> None:
    assert isinstance(heard_by_thread(output_attentions=True, return_dict_in_generate=True)[1][0], InvalidArgument)

    def fail(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] > 15:
            raise RuntimeError("halfway")
        return scores

    _, errors = heard_by_thread(logits_processor=[fail])
    assert [str(error) for error in errors] == ["halfway"]


def test_an_assistant_is_refused_not_ignored() -> None:
    model = tiny_model("llama")
    with pytest.raises(InvalidArgument, match="assistant_model"):
        model.generate(**padded_inputs(PROMPTS[:1]), assistant_model=draft_of(model), custom_generate=inside())


def test_a_filled_cache_is_refused_not_dropped() -> None:
    """transformers takes new ids alone beside it, and a mask of ones over everything, which does not arrive here."""
    model, before, new = tiny_model("llama"), torch.tensor([PROMPTS[1]]), torch.tensor([PROMPTS[0]])
    asked: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0, "custom_generate": inside()}
    cache = DynamicCache(config=model.config)
    empty = model.generate(new, past_key_values=cache, **asked)
    assert empty[0, new.shape[1] :].tolist() == plain_greedy(model, PROMPTS[0], 4)
    with torch.no_grad():
        model(before, past_key_values=cache)
    whole = torch.ones(1, before.shape[1] + new.shape[1], dtype=torch.long)
    with pytest.raises(InvalidArgument, match=f"past_key_values with {before.shape[1]} tokens"):
        model.generate(new, attention_mask=whole, past_key_values=cache, **asked)


def test_other_positions_are_refused_not_dropped() -> None:
    inputs = padded_inputs(PROMPTS)
    counted = inputs["attention_mask"].cumsum(-1) - 1  # -1 at pads, of which nobody asks
    plain, got = both(inputs | {"position_ids": counted.clamp(min=0)})
    assert got == plain
    for positions in (counted.clamp(min=0) * 3, counted.clamp(min=0) + 1):
        with pytest.raises(InvalidArgument, match="position_ids other than"):
            both(inputs | {"position_ids": positions})
