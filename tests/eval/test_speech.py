"""`forerun eval asr`: word errors counted right, every way heard on the same files, records that read back."""

from __future__ import annotations

import json
import math
import os
import struct
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import forerun
from forerun.cli.main import cli
from forerun.errors import InvalidArgument
from forerun.eval.prepare import spread
from forerun.eval.speech.recordings import Recording, find
from forerun.eval.speech.report import PLAIN, SPECULATIVE, TRANSFORMERS, SpeechResult, speech_record
from forerun.eval.speech.run import evaluate as evaluate_turns
from forerun.eval.speech.words import Words, count
from forerun.loading import whisper
from forerun.measure.progress import Silent
from forerun.measure.provenance import provenance
from forerun.measure.record import Record, load
from forerun.speech.audio import RATE
from forerun.speech.transcribe import Transcriber
from support.data import data_folder, needs
from support.whisper import Processor, tiny_whisper

for package in ("jiwer", "soundfile", "soxr"):
    pytest.importorskip(package)


@pytest.mark.parametrize(
    ("said", "written", "words"),
    [("Mr. Smith paid twenty dollars!", "mister smith paid $20", Words(4, 0)),
     ("the cat sat", "the cat sat down", Words(3, 1)),
     ("the cat sat", "cat sad", Words(3, 2)),
     ("um", "hello there", Words(0, 2))],
)  # fmt: skip
def test_word_errors(said: str, written: str, words: Words) -> None:
    """Numbers, titles and fillers are no mistakes; words put in, left out and replaced are."""
    assert count(said, written) == words


def test_rates_are_of_sums() -> None:
    assert (Words(3, 1) + Words(1, 1)).error_rate == 0.5
    assert Words(0, 2).error_rate == 1.0


def tone(path: Path, hertz: float, seconds: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = [int(9000 * math.sin(2 * math.pi * hertz * i / 16000)) for i in range(int(16000 * seconds))]
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(struct.pack(f"<{len(samples)}h", *samples))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five tones and two bad rows."""
    tmp_path = tmp_path_factory.mktemp("data")
    rows: list[Any] = []
    for i in range(5):
        name = f"{'low' if i < 3 else 'high'}/{i}.wav"
        tone(tmp_path / "speech" / name, 200 + 150 * i, 0.3 + 0.1 * i)
        rows.append({"audio": name, "text": "some words"})
    rows += [{"audio": "gone.wav", "text": "w1"}, {"text": "w1"}]
    (tmp_path / "speech/manifest.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_recordings_are_found_and_bad_rows_named(folder: Path) -> None:
    listed = find(folder)
    assert [r.source for r in listed.recordings] == ["low"] * 3 + ["high"] * 2
    assert [bad.why for bad in listed.bad] == ["there is no file 'gone.wav' beside the manifest", "has no field audio"]
    for wrong in (None, folder / "speech/low"):
        with pytest.raises(InvalidArgument, match=r"manifest\.jsonl"):
            find(wrong)


def test_a_limit_takes_every_other_line() -> None:
    """Half of the lines are the even ones: those no shipped draft was trained on."""
    every = tuple(Recording(Path(str(i)), "", "") for i in range(120))
    assert [int(r.path.name) for r in spread(every, 60)] == list(range(0, 120, 2))
    assert spread(every, None) == spread(every, 500) == list(every)


def evaluate(*arguments: Any) -> list[SpeechResult]:
    return evaluate_turns(*arguments, Silent(), lambda results, complete: list(results))


def ways(model: Any) -> dict[str, Any]:
    return {
        TRANSFORMERS: None,
        PLAIN: forerun.SpeculativeDecoder(model, None),
        SPECULATIVE: forerun.SpeculativeDecoder(model, forerun.DraftModel(model, shares_encoder=True), policy=3),
    }


@pytest.fixture(scope="module")
def found(folder: Path) -> list[SpeechResult]:
    model = tiny_whisper()
    return evaluate(model, Processor(), ways(model), find(folder).recordings, (1, 3))


@pytest.mark.slow
def test_every_way_hears_everything_and_says_the_same(found: list[SpeechResult]) -> None:
    assert [(one.method, one.batch) for one in found] == [
        (w, b) for b in (1, 3) for w in (TRANSFORMERS, PLAIN, SPECULATIVE)
    ]
    assert len({(one.total, one.tokens, one.identical, one.files) for one in found}) == 1
    for one in found:
        assert (one.identical, one.files, one.total.spoken) == (5, 5, 10)
        assert one.audio_seconds == pytest.approx(2.5, abs=0.01)
        assert 0 < one.encoder_seconds < one.seconds
        assert {source: words.spoken for source, words in one.words.items()} == {"low": 6, "high": 4}
    assert found[2].tokens_per_round > 2 > found[1].tokens_per_round == 1  # a draft that is the target itself


def test_a_way_that_says_something_else_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One transcript of each batch is lost on the way with drafts."""
    real = Transcriber.batch

    def forgetful(self: Transcriber, clips: Any, *rest: Any) -> list[Any]:
        made = real(self, clips, *rest)
        return made if self.windows is None else [replace(made[0], segments=()), *made[1:]]

    monkeypatch.setattr(Transcriber, "batch", forgetful)
    model = tiny_whisper()
    decoders = {TRANSFORMERS: None, SPECULATIVE: forerun.SpeculativeDecoder(model, None)}
    first, second = evaluate(model, Processor(), decoders, find(folder).recordings, (3,))
    assert (first.identical, second.identical) == (5, 3)
    assert second.total != first.total


@pytest.mark.slow
def test_short_and_long_recordings_are_no_batch(tmp_path: Path) -> None:
    """A batch of the list as it stands would have both kinds."""
    window = Processor().feature_extractor.n_samples / RATE
    for name, seconds in (("a", 0.3), ("b", 1.5 * window), ("c", 0.4)):
        tone(tmp_path / "speech" / f"{name}.wav", 300, seconds)
    rows = [{"audio": f"{name}.wav", "text": "some words"} for name in "abc"]
    (tmp_path / "speech/manifest.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = tiny_whisper()
    found = evaluate(model, Processor(), ways(model), find(tmp_path).recordings, (3,))
    assert [(one.identical, one.files) for one in found] == [(3, 3)] * 3


def record_of(found: list[SpeechResult]) -> Record:
    settings = {"model": "m", "draft": "d", "rule": "token"}
    return speech_record(provenance("cpu", ["forerun", "eval", "asr"]), settings, found)


def test_records_read_back_and_say_it_in_a_line(found: list[SpeechResult], tmp_path: Path) -> None:
    record = record_of(found)
    record.save(tmp_path / "asr.json")
    again = load(tmp_path / "asr.json", "asr")
    assert again == record
    assert "same transcripts every way" in again.headline[0]
    assert [row[:2] for row in again.tables[0].rows] == [(one.method, str(one.batch)) for one in found]
    assert [row[0] for row in again.tables[1].rows] == ["low", "high"]
    assert again.rows[0]["word_error_rate"] == found[0].total.error_rate
    worse = record_of([*found[:2], replace(found[2], identical=4)])
    assert worse.headline == ("Transcripts DIFFER: speculative at batch 1 has 4 of 5 the same.",)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["asr", "gsm8k"], "by itself"), (["asr", "--temperature", "1"], "--temperature means nothing"),
     (["asr", "--num-sequences", "2"], "--num-sequences means nothing")],
)  # fmt: skip
def test_what_means_nothing_here_is_refused(folder: Path, arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(cli, ["eval", *arguments, "--data", str(folder)])
    assert done.exit_code != 0
    assert words in " ".join(f"{done.output} {done.exception}".split())


@pytest.mark.skipif(whisper.WHEEL.find() is None, reason=f"needs the wheel {whisper.WHEEL.distribution}")
@needs("speech/manifest.jsonl")
@pytest.mark.slow
def test_the_real_pair_on_two_real_clips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command as a user runs it: both transcripts right, every way the same, drafts accepted at every size."""
    monkeypatch.setattr("forerun.cli.eval_speech.BATCH_SIZES", (1, 2))
    place = tmp_path / "data/speech"
    place.mkdir(parents=True)
    names = ("speechbrain/spk1_snt1.wav", "ljspeech/LJ001-0002.wav")
    rows = (data_folder() / "speech/manifest.jsonl").read_text(encoding="utf-8").splitlines()
    for name in names:
        (place / name).parent.mkdir(exist_ok=True)
        os.symlink(data_folder() / "speech" / name, place / name)
    (place / "manifest.jsonl").write_text("\n".join(row for row in rows if json.loads(row)["audio"] in names))
    arguments = ["eval", "asr", "--data", str(place.parent), "-o", str(tmp_path / "asr.json"), "-q"]
    done = CliRunner().invoke(cli, [*arguments, "--kernels", "off", "--policy", "3"])
    assert done.exit_code == 0, done.output
    rows = load(tmp_path / "asr.json").rows
    assert [one["identical"] for one in rows] == [2] * 6
    assert rows[0]["word_error_rate"] < 0.1
    assert all(one["tokens_per_round"] > 1.2 for one in rows if one["method"] == SPECULATIVE)


@pytest.mark.parametrize("option", ["--quantize int4", "--no-quantize-head", "--draft-quantize int8"])
def test_what_a_recogniser_cannot_be_asked_is_refused(option: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["eval", "asr", *option.split(), "--data", str(tmp_path)])
    assert result.exit_code == 2 and "a Whisper is run as it is stored" in result.output, result.output
