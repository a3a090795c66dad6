"""`forerun transcribe`: recordings good and bad, and what a person, a player and a program get of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor, WhisperProcessor

from cli.command import Command
from forerun.loading import load_speech_model
from forerun.speech import SpeechSettings, Transcriber, Transcript
from support.sound import babble, write
from support.tiny import draft_of
from support.whisper import tiny_whisper, tokenizer


def save(folder: Path, model: Any) -> str:
    model.save_pretrained(folder)
    WhisperProcessor(WhisperFeatureExtractor(feature_size=8, chunk_length=1), tokenizer()).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("whisper"), tiny_whisper())


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("small"), draft_of(tiny_whisper()))


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings")
    write(folder / "short.wav", babble(0.7, 1))
    write(folder / "other.flac", babble(0.9, 2))
    write(folder / "long.wav", babble(2.3, 3))
    write(folder / "stereo.wav", np.stack([babble(0.8, 4), babble(0.8, 5)], axis=1))
    write(folder / "telephone.wav", babble(0.8, 6, rate=8_000), 8_000)
    write(folder / "studio.flac", babble(0.8, 7, rate=48_000), 48_000)
    write(folder / "silence.wav", np.zeros(16_000, dtype=np.float32))
    write(folder / "nothing.wav", np.zeros(0, dtype=np.float32))
    (folder / "letter.wav").write_text("Dear Sir or Madam, this is no sound.")
    cut = write(folder / "cut.wav", babble(0.9, 8))
    cut.write_bytes(cut.read_bytes()[:16_000])
    return folder


GREEDY = ("--temperature", "0", "--timestamps")
GOOD = ("short.wav", "other.flac", "long.wav", "stereo.wav", "telephone.wav", "studio.flac", "silence.wav", "cut.wav")


def by_transformers(whisper: str, folder: Path, names: tuple[str, ...]) -> dict[str, Transcript]:
    model, processor = load_speech_model(whisper, device="cpu", offline=True)
    transcriber = Transcriber(model, processor, None, SpeechSettings(temperature=(0.0,)))
    outcomes = transcriber.files([folder / name for name in names], batch_size=1)
    return {made.path.name: made for made in outcomes if isinstance(made, Transcript)}


def test_good_and_bad_files_together(transcribe: Command, whisper: str, small: str, recordings: Path) -> None:
    """The bad ones are named, each with its own reason; the others say what transformers makes of them one by one."""
    bad = {"nothing.wav": "0 samples", "letter.wav": "not a sound file", "gone.wav": "no such file"}
    names = ["nothing.wav", *GOOD[:4], "letter.wav", *GOOD[4:], "gone.wav"]
    paths = [str(recordings / name) for name in names]
    done = transcribe("-m", whisper, "-d", small, "-f", "json", *GREEDY, *paths, str(recordings))
    assert done.exit_code == 1
    entries = {Path(entry["file"]).name: entry for entry in json.loads(done.stdout)["files"]}
    for name, reason in bad.items():
        assert reason in entries[name]["error"] and reason in done.stderr
    assert "a folder; give its" in entries[recordings.name]["error"]
    expected = by_transformers(whisper, recordings, GOOD)
    assert {name: entries[name]["text"] for name in GOOD} == {name: expected[name].text for name in GOOD}
    assert [entries[name]["segments"] for name in GOOD] == [
        json.loads(json.dumps(expected[name].as_dict()["segments"])) for name in GOOD
    ]
    assert entries["silence.wav"]["segments"] == [] and "silence" in entries["silence.wav"]["note"]
    assert "ends early" in entries["cut.wav"]["note"]
    assert "8 of 12 files were transcribed" in done.stderr


def test_the_text_of_one_file_is_all_there_is_on_stdout(transcribe: Command, whisper: str, recordings: Path) -> None:
    done = transcribe("-m", whisper, "-d", "early:1", *GREEDY[:2], str(recordings / "long.wav"))
    assert done.exit_code == 0
    assert done.stdout == by_transformers(whisper, recordings, ("long.wav",))["long.wav"].text + "\n"
    assert "tokens" in done.stderr and "a round" in done.stderr


@pytest.mark.slow
def test_several_texts_are_told_apart_and_keep_their_order(transcribe: Command, whisper: str, recordings: Path) -> None:
    paths = [str(recordings / name) for name in ("long.wav", "silence.wav", "short.wav")]
    done = transcribe("-m", whisper, "-q", *GREEDY, *paths)
    headings = [line for line in done.stdout.splitlines() if line.startswith("==> ")]
    assert headings == [f"==> {path} <==" for path in paths]
    assert "[00:00:0" in done.stdout and done.stderr == ""


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(("form", "suffix"), [("text", "txt"), ("srt", "srt"), ("vtt", "vtt"), ("json", "json")])
def test_a_folder_gets_a_file_for_each_recording(
    transcribe: Command, whisper: str, recordings: Path, tmp_path: Path, form: str, suffix: str
) -> None:
    names = ("short.wav", "silence.wav")
    paths = [str(recordings / name) for name in names]
    done = transcribe("-m", whisper, "-t", "0", "-f", form, "-o", str(tmp_path / "new" / "folder"), *paths)
    assert done.exit_code == 0 and done.stdout == ""
    made = {path.name: path.read_text() for path in (tmp_path / "new" / "folder").iterdir()}
    assert set(made) == {f"{Path(name).stem}.{suffix}" for name in names}
    assert form in ("text", "json") or " --> " in made[f"short.{suffix}"]


def test_a_file_given_twice_is_transcribed_once(transcribe: Command, whisper: str, recordings: Path) -> None:
    path = recordings / "short.wav"
    done = transcribe(
        "-m", whisper, "-f", "json", str(path), str(recordings / "." / ".." / recordings.name / path.name)
    )
    assert len(json.loads(done.stdout)["files"]) == 1
    assert "more than once" in done.stderr


@pytest.mark.slow
def test_comparison_shows_the_same_words_and_where_the_time_went(
    transcribe: Command, whisper: str, small: str, recordings: Path
) -> None:
    paths = [str(recordings / name) for name in ("nothing.wav", "short.wav", "long.wav")]
    done = transcribe("-m", whisper, "-d", small, "--policy", "3", "--compare", "-f", "json", *GREEDY, *paths)
    assert done.exit_code == 1
    found = json.loads(done.stdout)["compare"]
    assert found["different"] == {"model.generate": [], "Forerun, plain": []}
    assert len(found["ways"]) == 3 and found["ways"][2]["tokens_per_round"] > 1
    for way in found["ways"]:
        assert way["seconds"] >= way["encoder_seconds"] + way["decoder_seconds"] > way["encoder_seconds"] > 0
    assert done.stderr.count("identical") == 2 and "encoder" in done.stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("-f", "srt", "--no-timestamps"), "made of times"),
        (("-f", "srt"), "give a folder with -o"),
        (("--language", "german"), "English"),
        (("--task", "translate"), "multilingual"),
        (("--temperature", "warm"), "numbers separated by commas"),
        (("--temperature", "-1"), "0 or above"),
        (("--seed", str(10**30)), "from 0 to 2**63 - 1"),
        (("-d", "lokup"), "did you mean 'lookup'"),
    ],
)
def test_mistakes_are_named(
    transcribe: Command, whisper: str, recordings: Path, options: tuple[str, ...], reason: str
) -> None:
    done = transcribe("-m", whisper, *options, str(recordings / "short.wav"), str(recordings / "long.wav"))
    assert done.exit_code == 2 and reason in done.stderr and "Traceback" not in done.stderr


def test_two_transcripts_in_one_place_are_refused_before_any_work(
    transcribe: Command, recordings: Path, tmp_path: Path
) -> None:
    twin = write(tmp_path / "short.flac", babble(0.2, 1))
    done = transcribe("-m", "nowhere", "-o", str(tmp_path), str(recordings / "short.wav"), str(twin))
    assert done.exit_code == 2 and "would both be written" in done.stderr


def test_files_that_are_all_missing_are_named_before_a_model_is_looked_for(
    transcribe: Command, recordings: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty.wav").touch()
    files = ("nowhere.wav", str(tmp_path), str(tmp_path / "empty.wav"))
    missing = transcribe("-m", "no/such/folder", *files, "-f", "json")
    assert missing.exit_code == 1
    for words in ("nowhere.wav: no such file", "a folder; give its 1 sound files", "the file is empty", "0 of 3 files"):
        assert words in missing.stderr
    assert [entry["file"] for entry in json.loads(missing.stdout)["files"]] == list(files)
    one_is_there = transcribe("-m", "no/such/folder", "nowhere.wav", str(recordings / "short.wav"))
    assert one_is_there.exit_code == 2 and "no folder" in one_is_there.stderr


def test_a_model_that_recognises_no_speech_is_refused(transcribe: Command, target: str, recordings: Path) -> None:
    refused = transcribe("-m", target, str(recordings / "short.wav"))
    assert refused.exit_code == 2
    assert "is a model of type 'llama', which recognises no speech" in " ".join(refused.stderr.split())


def test_a_missing_model_is_named_with_the_remedy(transcribe: Command, recordings: Path, tmp_path: Path) -> None:
    done = transcribe("-m", str(tmp_path / "no-model"), str(recordings / "short.wav"))
    assert done.exit_code == 2 and "no-model" in done.stderr


def test_help_teaches(transcribe: Command) -> None:
    text = transcribe("--help").stdout
    for word in ("--compare", "--condition-on-previous", "subtitles", "--no-speech-threshold"):
        assert word in text


@pytest.mark.slow
def test_a_dash_reads_standard_input(transcribe: Command, whisper: str, recordings: Path) -> None:
    sound = (recordings / "short.wav").read_bytes()
    arguments = ("-m", whisper, "-d", "none", *GREEDY)
    by_name = transcribe(*arguments, str(recordings / "short.wav"))
    piped = transcribe(*arguments, "-", stdin=sound)
    assert (piped.exit_code, piped.stdout) == (0, by_name.stdout)
    entry = json.loads(transcribe(*arguments, "-f", "json", "-", stdin=sound).stdout)["files"][0]
    assert entry["file"] == "standard input"


def test_standard_input_that_is_no_sound_is_named_so(transcribe: Command, whisper: str) -> None:
    pytest.importorskip("soundfile")
    result = transcribe("-m", whisper, "-d", "none", "-", stdin=b"no sound")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: standard input: not a sound file")


def test_control_c_keeps_what_was_transcribed(
    transcribe: Command, whisper: str, recordings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = Transcriber.batch, []

    def second_is_interrupted(self: Transcriber, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(self, *arguments)

    monkeypatch.setattr(Transcriber, "batch", second_is_interrupted)
    paths = [str(recordings / name) for name in ("short.wav", "stereo.wav")]
    result = transcribe("-m", whisper, "-d", "none", *GREEDY, "-b", "1", *paths)
    assert result.exit_code == 130
    assert "short.wav <==" in result.stdout
    assert "1 of 2 files were transcribed" in result.stderr
