"""Recordings through a Transcriber: batches, silence, failures, progress, and what real speech says."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import forerun
from forerun.errors import InvalidArgument, UnsupportedModel
from forerun.models.scorer import Scorer
from forerun.models.seq2seq import Seq2SeqScorer
from forerun.speech import Clip, Failure, SpeechSettings, Transcriber, Transcript, read
from support.data import data_folder, needs
from support.sound import babble
from support.tiny import draft_of, tiny_model
from support.whisper import END, Processor, tiny_whisper

GREEDY = SpeechSettings(temperature=(0.0,))


def transcriber(model: Any, settings: SpeechSettings = GREEDY, policy: int = 3) -> Transcriber:
    drafter = forerun.DraftModel(draft_of(model))
    return Transcriber(model, Processor(), forerun.SpeculativeDecoder(model, drafter, policy=policy), settings)


def clips(*lengths: float) -> list[Clip]:
    return [Clip(Path(f"{seed}.wav"), babble(seconds, seed)) for seed, seconds in enumerate(lengths)]


def test_a_recording_is_written_down_alike_alone_and_among_others() -> None:
    model, together = tiny_whisper(), clips(1.3, 2.4, 1.7)
    batch = transcriber(model).batch(together)
    assert batch == [transcriber(model).batch([clip])[0] for clip in together]
    assert batch == Transcriber(model, Processor(), None, GREEDY).batch(together)


@pytest.mark.slow
def test_sampled_second_tries_do_not_depend_on_the_neighbours_either() -> None:
    settings = SpeechSettings(temperature=(0.0, 0.8), compression_ratio_threshold=0.1, seed=3)
    model, together = tiny_whisper(), clips(0.8, 0.6)
    batch = transcriber(model, settings).batch(together)
    assert batch[1] == transcriber(model, settings).batch(together[1:])[0]
    other = SpeechSettings(temperature=(0.0, 0.8), compression_ratio_threshold=0.1, seed=4)
    assert batch[1] != transcriber(model, other).batch(together[1:])[0]


def judged_by_words(
    model: Any, text: Tensor, outputs: Any, place: int, processors: Any, config: Any, vocab: int, temperature: float
) -> tuple[bool, bool]:
    """Whether a window is tried again and whether it is left out: each for a third of all texts, and what is drawn at
    a second try is left out whatever it is: rounding has a part in it."""
    if temperature:
        return False, True
    number = zlib.crc32(bytes(token for token in text.tolist() if token != END)) % 3
    return number == 0, number == 1


@pytest.mark.slow
def test_verdicts_about_windows_that_are_tried_again_stay_with_their_recordings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last of three is tried again, alone, and left out then; the first keeps its words."""
    settings, model, together = SpeechSettings(temperature=(0.0, 0.4), seed=3), tiny_whisper(), clips(0.8, 0.6, 0.9)
    monkeypatch.setattr(type(model), "_need_fallback", judged_by_words)
    used = transcriber(model, settings)
    batch, num_sampled = used.batch(together), used.windows.num_sampled if used.windows else 0
    assert [bool(made.segments) for made in batch] == [True, False, False] and num_sampled == 1
    assert batch == [used.batch([clip])[0] for clip in together]
    assert model._need_fallback.__func__ is judged_by_words, "the model is left as it was"


@pytest.mark.slow
@pytest.mark.parametrize("by_transformers", [False, True], ids=["drafts", "transformers"])
def test_the_text_before_a_window_does_not_depend_on_the_first_recording(
    by_transformers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose first window is left out, so that it has none; and it has ended when the other goes on."""
    settings = SpeechSettings(temperature=(0.0,), condition_on_previous=True)
    model, together = tiny_whisper(), clips(1.2, 2.3, 1.4)[::2]
    monkeypatch.setattr(type(model), "_need_fallback", judged_by_words)
    used = Transcriber(model, Processor(), None, settings) if by_transformers else transcriber(model, settings)
    alone = [used.batch([clip])[0] for clip in together]
    assert [len(made.segments) for made in alone] == [1, 4]
    assert used.batch(together) == alone


@pytest.mark.slow
def test_many_windows() -> None:
    """Six times as long as a window: the whole recording is dealt with, told as it goes, in times that only grow."""
    model, told = tiny_whisper(), list[float]()
    clip = clips(6.0)[0]
    made = transcriber(model).batch([clip], told.append)[0]
    assert made == Transcriber(model, Processor(), None, GREEDY).batch([clip])[0]
    assert len(made.segments) > 6 and made.segments[-1].end > 5
    starts = [segment.start for segment in made.segments]
    assert starts == sorted(starts)
    assert len(told) > 6 and abs(sum(told) - 6) < 1e-6


@pytest.mark.slow
def test_one_that_cannot_be_decoded_takes_nobody_along(monkeypatch: pytest.MonkeyPatch) -> None:
    good = transcriber(tiny_whisper())
    together = clips(0.5, 0.6, 0.7)
    alone = good.batch

    def fails(group: Any, on_audio: Any) -> Any:
        if any(clip.path.name == "1.wav" for clip in group):
            raise InvalidArgument("the logits are not numbers")
        return alone(group, on_audio)

    monkeypatch.setattr(good, "batch", fails)
    found = list(good._survived(together, lambda seconds: None))
    assert [type(outcome) for outcome in found] == [Transcript, Failure, Transcript]
    assert found[1] == Failure(Path("1.wav"), "1.wav: the logits are not numbers")


@pytest.mark.slow
def test_seconds_of_a_batch_that_failed_are_not_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    good, told = transcriber(tiny_whisper()), list[float]()
    together, alone = clips(0.5, 0.6, 0.7), good.batch

    def fails(group: Any, on_audio: Any) -> Any:
        if len(group) > 1:
            on_audio(1.0)
            raise InvalidArgument("the logits are not numbers")
        return alone(group, on_audio)

    monkeypatch.setattr(good, "batch", fails)
    assert len(list(good._survived(together, told.append))) == 3
    assert min(told) > 0 and abs(sum(told) - sum(clip.seconds for clip in together)) < 1e-6


def test_no_recordings_are_no_transcripts() -> None:
    assert transcriber(tiny_whisper()).batch([]) == []


def test_recordings_of_one_window_and_longer_ones_are_refused_in_one_batch() -> None:
    """The message names the remedy: `files` gathers them apart."""
    with pytest.raises(InvalidArgument, match=r"1\.wav.*31 s.*0\.wav.*0\.5 s.*files"):
        transcriber(tiny_whisper()).batch(clips(0.5, 31.0))


@pytest.mark.slow
def test_listening_to_the_encoder_is_no_change_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or everything that was made from it, recorded rounds and copies of the weights included, is made anew."""
    made, renewals, renew = transcriber(tiny_whisper()), list[Scorer](), Seq2SeqScorer.renew
    monkeypatch.setattr(Seq2SeqScorer, "renew", lambda scorer: (renewals.append(scorer), renew(scorer)))
    for number in range(2):
        made.batch([clips(0.5, 0.6)[number]])
    assert not renewals
    made.model.get_encoder().register_forward_hook(lambda *call: None)
    made.batch(clips(0.5))
    assert len(renewals) == 1, "a hook of somebody else's is one"


def test_time_is_told_apart() -> None:
    counted = transcriber(tiny_whisper())
    counted.batch(clips(0.5, 0.6))
    spent = counted.spent
    assert abs(spent.audio_seconds - 1.1) < 1e-3
    assert 0 < spent.encoder_seconds < spent.seconds
    assert spent.decoder_seconds <= spent.seconds - spent.encoder_seconds
    assert spent.stats.rounds > 0 and spent.real_time_factor == spent.seconds / spent.audio_seconds
    counted.restart()
    assert counted.spent.seconds == counted.spent.stats.rounds == 0


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"temperature": ()}, "one or more"),
        ({"temperature": (-0.1,)}, "0 or above"),
        ({"task": "sing"}, "transcribe or translate"),
        ({"logprob_threshold": None}, "needs a logprob_threshold"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        SpeechSettings(**settings)


def test_languages_are_checked_before_anything_is_read() -> None:
    model = tiny_whisper(multilingual=True)
    with pytest.raises(InvalidArgument, match=r"language='klingon': .* de, en"):
        transcriber(model, SpeechSettings(language="klingon"))
    with pytest.raises(InvalidArgument, match="language=''"):
        transcriber(model, SpeechSettings(language=""))
    made = {
        name: transcriber(model, SpeechSettings(language=name, temperature=(0.0,))).batch(clips(0.7))[0].tokens
        for name in ("german", "de", "english")
    }
    assert made["german"] == made["de"] != made["english"]


def test_the_language_that_was_heard_is_told_or_the_one_that_was_asked_for() -> None:
    model, together = tiny_whisper(3, multilingual=True), clips(0.5, 0.55, 0.6)
    made = transcriber(model).batch(together)
    assert [each.language for each in made] == ["de", "en", "de"] and made[1].as_dict()["language"] == "en"
    alone = [Transcriber(model, Processor(), None, GREEDY).batch([clip])[0].language for clip in together]
    assert alone == ["de", "en", "de"], "each its own, whoever is transcribed beside it"
    asked = transcriber(model, SpeechSettings(language="english", temperature=(0.0,))).batch(together[:1])
    assert asked[0].language == "en", "nobody was to find out"
    assert "detect_language" not in vars(model) and transcriber(tiny_whisper()).batch(together[:1])[0].language == "en"


def test_other_models_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="load a Whisper"):
        Transcriber(tiny_model("llama"), Processor(), None)


@pytest.fixture(scope="module")
def real() -> tuple[Any, Any]:
    from forerun.loading import load_speech_model, whisper

    if whisper.WHEEL.find() is None:
        pytest.skip(f"whisper-tiny.en is not installed; run: {whisper.WHEEL.install}")
    pytest.importorskip("soundfile")
    pytest.importorskip("soxr")
    return load_speech_model(device="cpu")


def real_clips(count: int) -> list[Clip]:
    folder = data_folder() / "speech"
    lines = (folder / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    return [read(folder / json.loads(line)["audio"]) for line in lines[:count]]


@pytest.mark.model
@pytest.mark.slow
@needs("speech/manifest.jsonl")
def test_real_speech_is_written_down_as_transformers_does_it(real: tuple[Any, Any]) -> None:
    """A short clip without timestamps, and a minute and more of several with the text before each window."""
    model, processor = real
    speech = real_clips(11)
    long = Clip(Path("long.wav"), np.concatenate([clip.samples for clip in speech]))
    assert long.seconds > 70
    cases = [
        (speech[1:2], SpeechSettings(timestamps=False)),
        ([long], SpeechSettings(condition_on_previous=True)),
    ]
    for group, settings in cases:
        decoder = forerun.SpeculativeDecoder(model, forerun.EarlyExit(3), policy=2)
        ours, theirs = Transcriber(model, processor, decoder, settings), Transcriber(model, processor, None, settings)
        assert ours.batch(group) == theirs.batch(group)
        assert ours.spent.stats.num_accepted_tokens > 0
