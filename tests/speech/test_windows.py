"""Whisper's `generate` with our windows inside says what it says by itself, token for token and second for second."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    LogitsProcessor,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)
from transformers.generation.logits_process import WhisperNoSpeechDetection

import forerun
from forerun.checks.chi_square import fit
from forerun.errors import InvalidArgument
from forerun.models.cross_attention import Sources
from forerun.speech import EncoderMonitor, Windows
from forerun.speech.encoder_monitor import worth_reading
from forerun.speech.windows import _numbers
from forerun.types import Source
from support.sound import babble
from support.tiny import draft_of
from support.whisper import END, FIRST_TIME, STEPS, VOCAB, Processor, tiny_whisper

PROCESSOR = Processor()
SHORT = (0.4, 1.0, 0.8, 0.1, 0.9, 0.5, 0.7, 0.3)
LONG = (1.4, 2.3, 2.9, 1.2)


def heard(lengths: tuple[float, ...], seed: int = 0) -> dict[str, Tensor]:
    sounds = [babble(seconds, seed + place) for place, seconds in enumerate(lengths)]
    how: dict[str, Any] = {"truncation": False, "padding": "longest"} if max(lengths) > 1 else {}
    made = PROCESSOR.feature_extractor(
        sounds, sampling_rate=16_000, return_tensors="pt", return_attention_mask=True, **how
    )
    return {"input_features": made.input_features, "attention_mask": made.attention_mask}


def windows(model: Any, drafter: Any = "draft", **settings: Any) -> Windows:
    drafter = forerun.DraftModel(draft_of(model), shares_encoder=True) if drafter == "draft" else drafter
    settings.setdefault("policy", 3)
    return Windows(forerun.SpeculativeDecoder(model, drafter, **settings).engine, seed=1)


def said(made: Any) -> list[list[tuple[float, float, list[int]]]]:
    return [[(float(s["start"]), float(s["end"]), s["tokens"].tolist()) for s in row] for row in made["segments"]]


def both(model: Any, inputs: dict[str, Tensor], inside: Windows, **keywords: Any) -> tuple[Any, Any]:
    if not keywords.get("return_timestamps"):  # asked for none, a random model gives some, and may never get on
        keywords["suppress_tokens"] = [*model.generation_config.suppress_tokens, *range(FIRST_TIME, VOCAB)]
    theirs = said(model.generate(**inputs, return_segments=True, **keywords))
    return theirs, said(model.generate(**inputs, return_segments=True, custom_generate=inside, **keywords))


JUDGED: dict[str, Any] = {"logprob_threshold": -1.5, "compression_ratio_threshold": 1.35, "no_speech_threshold": 0.02}
CASES: dict[str, tuple[tuple[float, ...], dict[str, Any]]] = {
    "one": (SHORT[:1], {}),
    "three": (SHORT[:3], {}),
    "eight": (SHORT, {}),
    "timed one": (SHORT[:1], {"return_timestamps": True}),
    "timed eight": (SHORT, {"return_timestamps": True}),
    "long one": (LONG[2:3], {"return_timestamps": True}),
    "long four": (LONG, {"return_timestamps": True}),
    "long, text before": (LONG, {"return_timestamps": True, "condition_on_prev_tokens": True}),
    "judged": (SHORT[:3], {"temperature": 0.0, **JUDGED}),
    "judged, timed": (SHORT[:3], {"temperature": 0.0, "return_timestamps": True, **JUDGED}),
    "judged, long": (LONG, {"temperature": 0.0, "return_timestamps": True, "condition_on_prev_tokens": True, **JUDGED}),
    "short budget": (SHORT[:3], {"max_new_tokens": 5}),
    "prompted": (SHORT[:3], {"prompt_ids": torch.tensor([46, 3, 4, 5])}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick(every=18)
def test_greedy_transcripts_are_transformers_own(name: str) -> None:
    lengths, keywords = CASES[name]
    model = tiny_whisper()
    inside = windows(model)
    theirs, ours = both(model, heard(lengths), inside, **keywords)
    assert ours == theirs
    assert inside.stats.num_accepted_tokens > 0, "nothing was drafted, so nothing was tested"


@pytest.mark.slow
@pytest.mark.parametrize(
    "keywords",
    [
        {"language": "de"},
        {"language": ["de", "en", "de"], "task": "translate"},
        {"return_timestamps": True},  # the language is found out
        {"language": "en", "return_timestamps": True, "temperature": 0.0, **JUDGED},
    ],
    ids=["language", "languages and task", "detected", "judged"],
)
def test_languages_and_tasks(keywords: dict[str, Any]) -> None:
    model = tiny_whisper(1, multilingual=True)
    theirs, ours = both(model, heard(SHORT[:3]), windows(model), **keywords)
    assert ours == theirs


DRAFTERS: dict[str, Any] = {
    "none": lambda model: None,
    "own encoder": lambda model: forerun.DraftModel(draft_of(model)),
    "early exit": lambda model: forerun.EarlyExit(1),
    "random": lambda model: forerun.RandomDraft(),
    "tree": lambda model: forerun.Tree(forerun.DraftModel(draft_of(model), shares_encoder=True), nodes=6, width=2),
}


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.slow
def test_drafters_of_all_kinds(name: str) -> None:
    model, monitor = tiny_whisper(), EncoderMonitor()
    inside = windows(model, DRAFTERS[name](model))
    inside.monitor = monitor
    with monitor.of(model):
        theirs, ours = both(model, heard(SHORT[:2]), inside, return_timestamps=True, temperature=0.0, **JUDGED)
    assert ours == theirs
    assert name == "none" or inside.stats.num_draft_tokens > 0


class Favour(LogitsProcessor):
    """Counts positions from the left edge of the batch, as all of transformers' own do."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        favoured = scores.clone()
        favoured[:, 3 + input_ids.shape[1] % 7] += 4.0
        return favoured


def test_what_is_worth_reading_ends_with_the_sound() -> None:
    """Forty hundredths of a second of a window of one, and a little; silence is not nothing; a full window is whole."""
    made = heard((0.4, 1.0))["input_features"]
    assert 20 <= worth_reading(made[0], 50) <= 24
    assert worth_reading(made[1], 50) == 50
    assert worth_reading(torch.zeros(8, 100), 50) == 2


def test_drafts_skip_a_windows_padding_and_the_target_does_not() -> None:
    model, monitor = tiny_whisper(), EncoderMonitor()
    inside = windows(model)
    inside.monitor = monitor
    read: list[list[int]] = []
    put = Sources.put

    def noting(self: Sources, states: Any, layers: Any, *rest: Any) -> None:
        read.append([len(one) for one in states])
        put(self, states, layers, *rest)

    with pytest.MonkeyPatch.context() as patch, monitor.of(model):
        patch.setattr(Sources, "put", noting)
        theirs, ours = both(model, heard((0.4, 0.8)), inside)
    assert ours == theirs
    (targets, drafts) = read
    assert targets == [STEPS, STEPS]
    assert drafts[0] < 25 < drafts[1] < STEPS


@pytest.mark.slow
def test_processors_of_others_see_what_transformers_shows_them() -> None:
    model = tiny_whisper()
    keywords: dict[str, Any] = {"return_timestamps": True, "condition_on_prev_tokens": True}
    plain = said(model.generate(**heard(LONG), return_segments=True, **keywords))
    theirs, ours = both(model, heard(LONG), windows(model), logits_processor=[Favour()], **keywords)
    assert ours == theirs != plain


def test_scores_are_those_of_transformers() -> None:
    model = tiny_whisper()
    asked = {"return_dict_in_generate": True, "output_scores": True, "force_unique_generate_call": True}
    inputs = heard(SHORT[:3])
    theirs = model.generate(**inputs, **asked)
    inside = windows(model)
    ours = model.generate(**inputs, **asked, custom_generate=inside)
    assert torch.equal(ours.sequences, theirs.sequences)
    for row, text in enumerate(theirs.sequences[:, 2:].tolist()):
        length = text.index(END) + 1 if END in text else len(text)
        for step in range(length):
            torch.testing.assert_close(ours.scores[step][row], theirs.scores[step][row], rtol=1e-3, atol=1e-3)


def test_scores_of_a_sampled_window_are_those_of_transformers() -> None:
    """Of its first token, which nothing was drawn before."""
    model, inputs = tiny_whisper(), heard(SHORT[:3])
    asked: dict[str, Any] = {
        "return_dict_in_generate": True, "output_scores": True, "force_unique_generate_call": True,
        "temperature": 0.7, "top_k": 9,
    }  # fmt: skip
    theirs, ours = (
        model.generate(**inputs, **asked, custom_generate=inside).scores[0] for inside in (None, windows(model))
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert (theirs > -torch.inf).sum() == 3 * 9


class Overheard:
    """Notes what each batch of windows told of silence, whoever decodes it."""

    def __init__(self, inside: Any = None) -> None:
        self.inside, self.chances = inside, list[Tensor]()

    def __call__(self, model: Any, input_ids: Tensor, logits_processor: Any, **more: Any) -> Any:
        by_transformers = partial(type(model)._sample, model, synced_gpus=False)
        decode = by_transformers if self.inside is None else partial(self.inside, model)
        made = decode(input_ids, logits_processor=logits_processor, **more)
        self.chances += [p.no_speech_prob for p in logits_processor if isinstance(p, WhisperNoSpeechDetection)]
        return made


@pytest.mark.parametrize("multilingual", [False, True], ids=["english", "multilingual"])
@pytest.mark.parametrize("name", ["judged", "judged, timed", "judged, long"])
@pytest.mark.quick(every=6)
def test_chances_of_silence_are_those_of_transformers(name: str, multilingual: bool) -> None:
    lengths, keywords = CASES[name]
    model = tiny_whisper(multilingual=multilingual)
    keywords = {**keywords, "no_speech_threshold": 1.0, **({"language": "de"} if multilingual else {})}
    if not keywords.get("return_timestamps"):
        keywords["suppress_tokens"] = [*model.generation_config.suppress_tokens, *range(FIRST_TIME, VOCAB)]
    theirs, ours = Overheard(), Overheard(windows(model))
    for overheard in (theirs, ours):
        model.generate(**heard(lengths[:2]), custom_generate=overheard, **keywords)
    assert len(ours.chances) == len(theirs.chances) > 0
    for one, other in zip(ours.chances, theirs.chances, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_scores_are_given_back_when_nobody_needs_them() -> None:
    """A `Transcriber`, which has a monitor, does not; a caller of `model.generate` may have asked for them."""
    for monitor in (EncoderMonitor(), None):
        model = tiny_whisper()
        inside = windows(model)
        inside.monitor = monitor
        made = model.generate(
            **heard(LONG[1:2]), return_segments=True, return_timestamps=True, temperature=0.0, custom_generate=inside,
            **JUDGED,
        )  # fmt: skip
        inside.forget()
        kept = [row for segment in made["segments"][0] for row in segment["result"]["scores"]]
        assert len(made["segments"][0]) > 1 and inside.num_calls > 1
        assert all((row.untyped_storage().nbytes() == 0) == (monitor is not None) for row in kept)


REPEATS = {"temperature": (0.0, 0.7), "compression_ratio_threshold": 0.1, "return_timestamps": True}


def sampled(model: Any, lengths: tuple[float, ...], seed: int) -> Any:
    monitor = EncoderMonitor()
    inside = windows(model)
    inside.seed, inside.monitor = seed, monitor
    with monitor.of(model):
        made = model.generate(**heard(lengths), return_segments=True, custom_generate=inside, **REPEATS)
    assert inside.num_sampled > 0, "no window was tried again"
    return said(made)


@pytest.mark.slow
def test_second_tries_are_drawn_by_the_seed_and_not_by_the_neighbours() -> None:
    model = tiny_whisper()
    alone, again, other = (sampled(model, SHORT[:1], seed) for seed in (1, 1, 2))
    assert alone == again != other
    assert sampled(model, SHORT[:3], 1)[0] == alone[0]


def test_keys_of_random_numbers_are_the_sounds() -> None:
    sound = torch.arange(80.0 * 10).view(80, 10)
    known = [Source(states=torch.zeros(3, 4), features=features) for features in (sound, sound + 1, sound.clone())]
    alone = [_numbers(0.4, [source], calls)[0] for calls, source in enumerate(known)]
    assert _numbers(0.4, known, 7) == alone and len(set(alone)) == 2
    assert not set(alone) & set(_numbers(0.6, known, 7))
    unknown = [Source(states=torch.zeros(3, 4))] * 3
    assert len({*_numbers(0.4, unknown, 1), *_numbers(0.4, unknown, 2)}) == 6


@pytest.mark.slow
def test_a_recording_twice_in_a_batch_is_drawn_as_it_is_alone() -> None:
    """Its random numbers are keyed by its sound, which does not depend on who stands beside it."""
    model, monitor = tiny_whisper(), EncoderMonitor()
    inside = windows(model)
    inside.monitor = monitor
    one = heard(SHORT[:1])
    twice = {name: torch.cat([tensor, tensor]) for name, tensor in one.items()}
    with monitor.of(model):
        alone, both_of_them = (
            said(model.generate(**inputs, return_segments=True, custom_generate=inside, **REPEATS))
            for inputs in (one, twice)
        )
    assert inside.num_sampled > 0, "no window was tried again"
    assert both_of_them == [alone[0], alone[0]]


def test_a_recording_twice_in_a_batch_in_two_languages_has_two_texts() -> None:
    """One sound is one key of random numbers, which says nothing of what is asked of it."""
    model, monitor = tiny_whisper(multilingual=True), EncoderMonitor()
    inside = windows(model)
    inside.monitor = monitor
    twice = {name: torch.cat([tensor, tensor]) for name, tensor in heard(SHORT[:1]).items()}
    with monitor.of(model):
        theirs, ours = both(model, twice, inside, language=["en", "de"], task="transcribe")
    assert theirs[0] != theirs[1], "control"
    assert ours == theirs


@pytest.mark.slow
def test_without_a_monitor_every_call_and_every_window_draw_anew() -> None:
    """As transformers does."""
    model = tiny_whisper()
    inside = forerun.SpeculativeDecoder(model, forerun.EarlyExit(1), policy=2).as_custom_generate()
    assert isinstance(inside, Windows)
    inside.seed = 1
    asked: Any = {"temperature": 1.0, "do_sample": True, "return_timestamps": True, "custom_generate": inside}
    calls = {tuple(model.generate(**heard(SHORT[4:5]), **asked)[0].tolist()) for _ in range(3)}
    assert len(calls) > 1
    numbers: list[int] = []
    decode = inside.engine.add
    inside.engine.add = lambda request: (numbers.append(request.request_id), decode(request))[1]  # type: ignore[method-assign]
    model.generate(**heard(LONG[2:3]), **asked)
    assert len(numbers) > 1 and len(set(numbers)) == len(numbers)


def first_two(model: Any, features: Tensor, temperature: float) -> Tensor:
    """[V * V] the law of a window's first two tokens, from the model's logits and transformers' own processors."""
    found: list[Any] = []

    def look(model: Any, input_ids: Tensor, logits_processor: Any, **more: Any) -> Tensor:
        states = more["encoder_outputs"]
        joint = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
        first = _law(model, states, input_ids, logits_processor)
        for token in first.nonzero().flatten().tolist():
            follows = _law(model, states, torch.cat([input_ids, torch.tensor([[token]])], 1), logits_processor)
            joint[token] = first[token] * follows
            if token == END:
                joint[token] = 0
                joint[token, END] = first[token]
        found.append(joint.flatten())
        return torch.cat([input_ids, torch.tensor([[END]])], 1)

    model.generate(features, temperature=temperature, custom_generate=look, return_timestamps=True)
    return torch.as_tensor(found[0])


def _law(model: Any, states: Any, ids: Tensor, processors: Any) -> Tensor:
    logits = model(encoder_outputs=states, decoder_input_ids=ids).logits[:, -1]
    return torch.softmax(processors(ids, logits)[0].double(), dim=-1)


@pytest.mark.slow
def test_sampled_windows_follow_transformers_law() -> None:
    """Counts of the first two tokens of many windows, against the law; at another temperature they must not fit."""
    torch.manual_seed(0)
    model, copies = tiny_whisper(), 1000
    features = heard(SHORT[:1])["input_features"]
    made = model.generate(
        features.expand(copies, -1, -1), temperature=0.7, max_new_tokens=2, return_timestamps=True,
        force_unique_generate_call=True, return_dict_in_generate=True, custom_generate=windows(model, policy=1),
    )  # fmt: skip
    texts = [row[1:] + [END] * (3 - len(row)) for row in made.sequences.tolist()]
    counts: dict[int, int] = {}
    for one, two in texts:
        counts[one * VOCAB + two] = counts.get(one * VOCAB + two, 0) + 1
    assert fit(counts, first_two(model, features, 0.7)).p_value > 1e-3
    assert fit(counts, first_two(model, features, 1.0)).p_value < 1e-6  # the control


@pytest.mark.slow
def test_it_is_what_a_whispers_decoder_offers() -> None:
    model = tiny_whisper()
    decoder = forerun.SpeculativeDecoder(model, forerun.EarlyExit(1), policy=2)
    inputs = heard(SHORT[:3])
    theirs = model.generate(**inputs, return_timestamps=True)
    assert torch.equal(
        model.generate(**inputs, return_timestamps=True, custom_generate=decoder.as_custom_generate()), theirs
    )


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"typical_p": 0.5, "temperature": 0.5}, "TypicalLogitsWarper"),
        ({"max_time": 1.0}, "max_time="),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
    ],
)
def test_what_cannot_be_honoured_is_refused(keywords: dict[str, Any], reason: str) -> None:
    model = tiny_whisper()
    with pytest.raises(InvalidArgument, match=reason):
        model.generate(**heard(SHORT[:1]), custom_generate=windows(model), **keywords)


@pytest.mark.parametrize("criterion", (EosTokenCriteria(5), MaxLengthCriteria(9)), ids=lambda c: type(c).__name__)
def test_other_ends_of_the_caller_are_refused(criterion: Any) -> None:
    """Their classes are those that transformers makes by itself."""
    model = tiny_whisper()
    with pytest.raises(InvalidArgument, match="stopping_criteria with"):
        model.generate(**heard(SHORT[:1]), custom_generate=windows(model), stopping_criteria=[criterion])


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(
    "processor", (RepetitionPenaltyLogitsProcessor(1.9), TemperatureLogitsWarper(0.01)), ids=lambda p: type(p).__name__
)
def test_processors_of_the_caller_are_applied_in_windows(processor: Any) -> None:
    """A temperature in a greedy call changes no token, but the scores."""
    model = tiny_whisper()
    asked: dict[str, Any] = {
        "logits_processor": [processor], "return_dict_in_generate": True, "output_scores": True,
        "force_unique_generate_call": True,
    }  # fmt: skip
    theirs = model.generate(**heard(SHORT[:1]), **asked)
    ours = model.generate(**heard(SHORT[:1]), **asked, custom_generate=windows(model))
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    torch.testing.assert_close(ours.scores[0], theirs.scores[0], rtol=1e-4, atol=1e-3)


def test_a_streamer_is_refused_and_hears_the_end() -> None:
    class Listener:
        ended = 0

        def put(self, tokens: Tensor) -> None:
            pass

        def end(self) -> None:
            self.ended += 1

    listener, model = Listener(), tiny_whisper()
    with pytest.raises(InvalidArgument, match="streamer"):
        model.generate(**heard(SHORT[:1]), custom_generate=windows(model), streamer=listener)
    assert listener.ended == 1


def test_windows_belong_to_one_model() -> None:
    with pytest.raises(InvalidArgument, match="another model"):
        tiny_whisper(1).generate(**heard(SHORT[:1]), custom_generate=windows(tiny_whisper()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["three", "judged, timed", "judged, long"])
def test_greedy_transcripts_are_transformers_own_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_KERNELS", "auto")
    lengths, keywords = CASES[name]
    model = tiny_whisper().cuda()
    inputs = {key: value.cuda() for key, value in heard(lengths).items()}
    theirs, ours = both(model, inputs, windows(model), **keywords)
    assert ours == theirs
