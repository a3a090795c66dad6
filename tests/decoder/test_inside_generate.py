"""`model.generate(custom_generate=...)` and what people already have: configurations, streamers, stop strings."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

import forerun
from forerun.errors import InvalidArgument, NonFiniteLogits
from support.batches import padded_inputs
from support.tiny import draft_of, plain_greedy, ragged_prompts, tiny_model

PROMPTS = ragged_prompts(3, 97, seed=51, longest=12)


class Bracketed:
    """Writes token t as `<t>`."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        return "".join(f"<{int(token)}>" for token in tokens)


def decoder(**settings: Any) -> forerun.SpeculativeDecoder:
    model = tiny_model("llama")
    return forerun.SpeculativeDecoder(model, forerun.DraftModel(draft_of(model)), policy=3, **settings)


class Shift(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.roll(1, dims=-1)


STOP = plain_greedy(tiny_model("llama"), PROMPTS[1], 6)[4]

SAME: list[dict[str, Any]] = [
    {"max_new_tokens": 14},
    {"max_length": 20},
    {"max_new_tokens": 14, "eos_token_id": STOP},
    {"max_new_tokens": 14, "eos_token_id": [STOP, 3]},
    {"max_new_tokens": 14, "min_new_tokens": 7, "eos_token_id": STOP},
    {"max_new_tokens": 14, "repetition_penalty": 1.3},
    {"max_new_tokens": 14, "no_repeat_ngram_size": 2},
    {"max_new_tokens": 14, "bad_words_ids": [[STOP]]},
    {"max_new_tokens": 14, "suppress_tokens": [STOP, 5]},
    {"max_new_tokens": 14, "begin_suppress_tokens": [STOP, 5]},
    {"max_new_tokens": 14, "forced_eos_token_id": 3},
    {"max_new_tokens": 14, "logits_processor": LogitsProcessorList([Shift()])},
    {
        "generation_config": GenerationConfig(
            max_new_tokens=9, repetition_penalty=1.2, eos_token_id=STOP, pad_token_id=0
        )
    },
]


@pytest.mark.parametrize("keywords", SAME, ids=lambda k: "+".join(k))
@pytest.mark.quick(every=4)
def test_inside_generate_equals_generate(keywords: dict[str, Any]) -> None:
    """Padding, lengths and all: the same tensor."""
    model, ours = tiny_model("llama"), decoder()
    common = keywords if "generation_config" in keywords else {"pad_token_id": 0, "do_sample": False, **keywords}
    wanted = model.generate(**inputs_for(keywords), **common)
    got = model.generate(**inputs_for(keywords), **common, custom_generate=ours.as_custom_generate())
    assert got.tolist() == wanted.tolist()


def inputs_for(keywords: dict[str, Any]) -> dict[str, Tensor]:
    """One prompt alone where history counts: transformers takes pads for text there, which Forerun does not."""
    if not {"repetition_penalty", "no_repeat_ngram_size", "generation_config"} & set(keywords):
        return padded_inputs(PROMPTS)
    ids = torch.tensor([PROMPTS[1]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("keywords", [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}], ids=str)
def test_pads_are_no_history(keywords: dict[str, Any]) -> None:
    """In a padded batch each row is what transformers says of the row alone."""
    out = decoder().generate(**padded_inputs(PROMPTS), max_new_tokens=14, **keywords)
    for prompt, new in zip(PROMPTS, out.new_tokens, strict=True):
        ids = torch.tensor([prompt])
        alone = tiny_model("llama").generate(
            ids, attention_mask=ids * 0 + 1, do_sample=False, max_new_tokens=14, **keywords
        )
        assert alone[0, len(prompt) :].tolist() == new


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"min_length": 30, "eos_token_id": 3}, "min_length=30"),
        ({"encoder_no_repeat_ngram_size": 3}, "encoder_no_repeat_ngram_size=3"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
    ],
)
def test_what_cannot_be_honoured_inside_is_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        tiny_model("llama").generate(
            **padded_inputs(PROMPTS),
            do_sample=False,
            max_new_tokens=4,
            custom_generate=decoder().as_custom_generate(),
            **keywords,
        )


def test_foreign_criteria_and_models_are_refused_inside() -> None:
    ours = decoder().as_custom_generate()
    with pytest.raises(InvalidArgument, match="<lambda>"):
        tiny_model("llama").generate(
            **padded_inputs(PROMPTS),
            do_sample=False,
            max_new_tokens=4,
            custom_generate=ours,
            stopping_criteria=[lambda ids, scores: False],
        )
    with pytest.raises(InvalidArgument, match="another model"):
        tiny_model("gpt2").generate(**padded_inputs(PROMPTS), do_sample=False, max_new_tokens=4, custom_generate=ours)


def test_sampled_copies_inside_generate() -> None:
    """transformers has made the copies by the time it calls: they are not multiplied again, and they differ."""
    out = tiny_model("llama").generate(
        **padded_inputs(PROMPTS), do_sample=True, temperature=1.5, top_k=0, max_new_tokens=8, num_return_sequences=2,
        custom_generate=decoder().as_custom_generate(),
    )  # fmt: skip
    assert out.shape[0] == 6
    assert len({tuple(row) for row in out.tolist()}) == 6


def test_the_whole_result_inside_generate() -> None:
    result: Any = tiny_model("llama").generate(
        **padded_inputs(PROMPTS), do_sample=False, max_new_tokens=5, return_dict_in_generate=True,
        custom_generate=decoder().as_custom_generate(),
    )  # fmt: skip
    assert result.stats.num_emitted_tokens == 15
    assert result.sequences.shape == (3, 12 + 5)


def test_stop_strings_of_a_configuration() -> None:
    """transformers keeps `tokenizer` from a `custom_generate` and then misses it: its own words say so."""
    model, wanted = tiny_model("llama"), plain_greedy(tiny_model("llama"), PROMPTS[1], 20)
    ours = decoder(tokenizer=Bracketed())
    stop = f"{wanted[3]}><{wanted[4]}><{wanted[5]}"
    assert ours.generate(torch.tensor([PROMPTS[1]]), max_new_tokens=20, stop_strings=stop).new_tokens == [wanted[:6]]
    config = GenerationConfig(max_new_tokens=20, stop_strings=[stop], pad_token_id=0)
    found = ours.as_custom_generate()(model, torch.tensor([PROMPTS[1]]), generation_config=config)
    assert found[0, len(PROMPTS[1]) :].tolist() == wanted[:6]
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(
            torch.tensor([PROMPTS[1]]), stop_strings=[stop], tokenizer=Bracketed(), max_new_tokens=20, pad_token_id=0,
            custom_generate=ours.as_custom_generate(),
        )  # fmt: skip


def test_no_end_token_means_none() -> None:
    """`eos_token_id=None` overrides the model's own end, as in transformers; left out, the model's counts."""
    model = copy.deepcopy(tiny_model("llama"))
    model.generation_config.eos_token_id = STOP
    ours, ids = forerun.SpeculativeDecoder(model, None), torch.tensor([PROMPTS[1]])
    asked: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    wanted = model.generate(ids, pad_token_id=0, **asked).tolist()
    assert len(wanted[0]) == len(PROMPTS[1]) + 12
    inside = model.generate(ids, pad_token_id=0, **asked, custom_generate=ours.as_custom_generate())
    assert inside.tolist() == wanted
    assert ours.generate(ids, **asked).sequences.tolist() == wanted


def test_a_row_that_fails_inside_is_not_passed_over() -> None:
    """A tensor has no place for an error; the whole result has."""
    bad = plain_greedy(tiny_model("llama"), PROMPTS[1], 6)[2]

    def nothing_left(ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf) if ids[0, -1] == bad else scores

    asked: dict[str, Any] = {
        **padded_inputs(PROMPTS), "do_sample": False, "max_new_tokens": 8, "pad_token_id": 0,
        "logits_processor": [nothing_left],
        "custom_generate": forerun.SpeculativeDecoder(tiny_model("llama"), None).as_custom_generate(),
    }  # fmt: skip
    result: Any = tiny_model("llama").generate(**asked, return_dict_in_generate=True)
    assert any(result.errors) and not all(result.errors)
    first = next(row for row, error in enumerate(result.errors) if error)
    with pytest.raises(NonFiniteLogits, match=f"row {first}: .*return_dict_in_generate"):
        tiny_model("llama").generate(**asked)


def test_seeds_govern_inside_generate() -> None:
    """One that is named, or else torch's own, as in transformers; greedy calls draw none."""
    ours = decoder().as_custom_generate()

    def text(**keywords: Any) -> list[Any]:
        asked: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 8, "pad_token_id": 0}
        made = tiny_model("llama").generate(**padded_inputs(PROMPTS), **asked | keywords, custom_generate=ours)
        return list(made.tolist())

    assert text(seed=1) == text(seed=1) != text(seed=2)
    torch.manual_seed(0)
    first, second = text(), text()
    torch.manual_seed(0)
    assert [text(), text()] == [first, second]
    assert first != second
    state = torch.get_rng_state()
    text(do_sample=False)
    assert torch.equal(torch.get_rng_state(), state)


def test_pads_behind_several_ends_are_the_first_given() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    model.generation_config.pad_token_id = None
    ours, ends = forerun.SpeculativeDecoder(model, None), sorted([STOP, 3 if STOP != 3 else 4], reverse=True)
    asked: dict[str, Any] = {**padded_inputs(PROMPTS), "do_sample": False, "max_new_tokens": 14, "eos_token_id": ends}
    wanted = model.generate(**asked)
    new = wanted[:, asked["input_ids"].shape[1] :]
    assert any(row[-2:].tolist() == [ends[0]] * 2 for row in new), "no row is padded, so the test could not fail"
    inside = model.generate(**asked, custom_generate=ours.as_custom_generate())
    assert inside[:, -new.shape[1] :].tolist() == new.tolist()
    assert ours.generate(**asked).sequences[:, -new.shape[1] :].tolist() == new.tolist()


def test_a_configuration_is_honoured_and_keywords_win() -> None:
    config = GenerationConfig(max_new_tokens=5, do_sample=True, temperature=0.5, top_k=7)
    out = decoder().generate(**padded_inputs(PROMPTS), generation_config=config, seed=1)
    assert [(p["temperature"], p["top_k"], p["max_new_tokens"]) for p in out.parameters] == [(0.5, 7, 5)] * 3
    out = decoder().generate(**padded_inputs(PROMPTS), generation_config=config, temperature=0.9, max_new_tokens=3)
    assert [(p["temperature"], p["top_k"], p["max_new_tokens"]) for p in out.parameters] == [(0.9, 7, 3)] * 3
    with pytest.raises(InvalidArgument, match="num_beams"):
        decoder().generate(**padded_inputs(PROMPTS), generation_config=GenerationConfig(num_beams=3))


def test_a_sampling_keyword_beside_a_greedy_configuration() -> None:
    """transformers warns and goes on greedily; what would change nothing may stand, as wrappers pass it along."""
    ours, inputs = forerun.SpeculativeDecoder(tiny_model("llama"), None), padded_inputs(PROMPTS[:1])
    config = GenerationConfig(do_sample=False, temperature=0.7, top_k=7, max_new_tokens=2)
    for neutral in ({}, {"temperature": 1.0, "top_p": 1.0}, {"temperature": 0.0, "top_k": 0, "min_p": 0.0}):
        keywords: dict[str, Any] = neutral
        assert ours.generate(**inputs, generation_config=config, **keywords).parameters[0]["temperature"] == 0
    with pytest.raises(
        InvalidArgument, match="do_sample=False of generation_config with temperature: pass do_sample=T"
    ):
        ours.generate(**inputs, generation_config=config, temperature=0.9)
    sampled = ours.generate(**inputs, generation_config=config, temperature=0.9, do_sample=True).parameters[0]
    assert sampled["temperature"] == 0.9
    with pytest.raises(InvalidArgument, match="do_sample=False with temperature"):
        ours.generate(**inputs, generation_config=config, do_sample=False, temperature=0.9)


def test_of_two_limits_neither_is_ignored() -> None:
    """transformers lets `max_new_tokens` win and warns; a configuration that holds both means what it means there."""
    model, ours = tiny_model("llama"), decoder()
    asked: dict[str, Any] = {"input_ids": torch.tensor([PROMPTS[1]]), "do_sample": False}
    both = GenerationConfig(max_new_tokens=5, max_length=30, pad_token_id=0)
    wanted = model.generate(**asked, generation_config=both)
    assert wanted.shape[1] == len(PROMPTS[1]) + 5
    assert ours.generate(**asked, generation_config=both).sequences.tolist() == wanted.tolist()
    longer = GenerationConfig(max_length=30, pad_token_id=0)
    assert ours.generate(**asked, generation_config=longer, max_new_tokens=5).sequences.tolist() == wanted.tolist()
    inside = ours.as_custom_generate()
    direct = {"max_new_tokens": 5, "max_length": 30, "pad_token_id": 0}
    assert model.generate(**asked, **direct, custom_generate=inside).tolist() == wanted.tolist()
    others: list[dict[str, Any]] = [{"max_new_tokens": 5}, {"generation_config": both}]
    for other in others:
        with pytest.raises(InvalidArgument, match="max_length=8 beside max_new_tokens=5"):
            ours.generate(**asked, max_length=8, **other)


class Recorder:
    def __init__(self) -> None:
        self.heard: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.heard.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_hears_everything_in_order() -> None:
    recorder = Recorder()
    out = decoder().generate(torch.tensor([PROMPTS[1]]), max_new_tokens=17, streamer=recorder)
    prompt, *rounds = recorder.heard
    assert prompt == PROMPTS[1]
    assert [token for tokens in rounds for token in tokens] == out.new_tokens[0]
    assert len(rounds) == out.stats.rounds < 17
    assert recorder.ended == 1
    with pytest.raises(InvalidArgument, match="takes one sequence"):
        decoder().generate(**padded_inputs(PROMPTS), streamer=Recorder())


def test_sequences_line_up_like_a_left_padded_batch() -> None:
    """Whichever side the input was padded on; outputs of different lengths are padded on the right."""
    ids, mask = padded_inputs(PROMPTS)["input_ids"], padded_inputs(PROMPTS)["attention_mask"]
    right = torch.stack([row.roll(-int((m == 0).sum())) for row, m in zip(ids, mask, strict=True)])
    holes = torch.stack([m.roll(-int((m == 0).sum())) for m in mask])
    for pair in ((ids, mask), (right, holes)):
        out = decoder().generate(*pair, max_new_tokens=[2, 6, 4], pad_token_id=0)
        assert out.sequences.shape == (3, 18)
        for row, (prompt, new) in enumerate(zip(PROMPTS, out.new_tokens, strict=True)):
            line = [*[0] * (12 - len(prompt)), *prompt, *new, *[0] * (6 - len(new))]
            assert out.sequences[row].tolist() == line


def test_ends_of_the_models_own_configuration_are_used() -> None:
    """Ids are the one thing read from the model itself."""
    model = copy.deepcopy(tiny_model("llama"))
    model.generation_config.eos_token_id = STOP
    out = forerun.SpeculativeDecoder(model, None).generate(torch.tensor([PROMPTS[1]]), max_new_tokens=20)
    assert out.new_tokens[0][-1] == STOP
    assert out.finish_reasons == ["stop"]
    out = forerun.SpeculativeDecoder(model, None).generate(
        torch.tensor([PROMPTS[1]]), max_new_tokens=20, eos_token_id=[]
    )
    assert len(out.new_tokens[0]) == 20


def test_by_hand_a_configuration_without_an_end_leaves_the_models() -> None:
    """Where no `model.generate` has put the two together."""
    model = copy.deepcopy(tiny_model("llama"))
    ids = torch.tensor([PROMPTS[1]])
    free = model.generate(ids, do_sample=False, max_new_tokens=14)[0, ids.shape[1] :].tolist()
    model.generation_config.eos_token_id = free[3]
    ours = forerun.SpeculativeDecoder(model, None).as_custom_generate()
    made = ours(model, ids, generation_config=GenerationConfig(max_new_tokens=14))
    assert made[0, ids.shape[1] :].tolist() == free[: free.index(free[3]) + 1]
