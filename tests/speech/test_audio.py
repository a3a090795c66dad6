"""Recordings as people have them: rates, channels, damage."""

from __future__ import annotations

import resource
import struct
from pathlib import Path

import numpy as np
import pytest

from forerun.errors import UnreadableAudio
from forerun.speech.audio import RATE, duration, read
from support.sound import Sound, babble, tone, write


def loudest(sound: Sound) -> float:
    """The pitch in it, in hertz."""
    return float(np.abs(np.fft.rfft(sound)).argmax() * RATE / len(sound))


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 44_100, 48_000])
@pytest.mark.parametrize("suffix", [".wav", ".flac"])
def test_any_rate_becomes_16000_and_keeps_its_pitch_and_length(tmp_path: Path, rate: int, suffix: str) -> None:
    clip = read(write(tmp_path / f"tone{suffix}", tone(2, rate), rate))
    assert clip.samples.dtype == np.float32
    assert abs(clip.seconds - 2) < 1e-3
    assert abs(loudest(clip.samples) - 440) < 1
    assert clip.note is None


def test_pitches_that_do_not_fit_are_filtered_out_and_do_not_come_back_as_others(tmp_path: Path) -> None:
    """10 kHz at 48 000 would be heard as 6 kHz at 16 000 if samples were simply dropped."""
    high = tone(1, 48_000, pitch=10_000)
    middle = read(write(tmp_path / "high.wav", high, 48_000)).samples[1_000:-1_000]
    assert np.abs(middle).max() < 0.003
    assert np.abs(high[::3]).max() > 0.2  # the control


def test_stereo_is_the_mean_of_its_channels(tmp_path: Path) -> None:
    left, right = tone(1), tone(1, pitch=1000)
    clip = read(write(tmp_path / "stereo.wav", np.stack([left, right], axis=1)))
    np.testing.assert_allclose(clip.samples, (left + right) / 2, atol=1e-4)


def test_a_truncated_wav_gives_what_is_there_and_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "cut.wav", tone(3))
    path.write_bytes(path.read_bytes()[: 44 + 2 * RATE])  # one second of sixteen bits
    clip = read(path)
    assert abs(clip.seconds - 1) < 1e-3
    assert clip.note is not None and "2.0 more seconds" in clip.note


def test_a_wav_whose_writer_did_not_know_its_length_is_whole(tmp_path: Path) -> None:
    """Programs that write to a pipe leave the largest number there is in the header."""
    path = write(tmp_path / "piped.wav", tone(1))
    content = bytearray(path.read_bytes())
    place = content.index(b"data") + 4
    content[place : place + 4] = struct.pack("<I", 0xFFFFFFFF)
    path.write_bytes(content)
    clip = read(path)
    assert abs(clip.seconds - 1) < 1e-3 and clip.note is None


def broken(folder: Path) -> dict[str, Path]:
    whole = write(folder / "whole.flac", tone(1)).read_bytes()
    assert len(whole) > 20
    files = {
        "text": b"I am a letter, not a sound.\n",
        "empty": b"",
        "header": whole[:20],
        "garbage": b"RIFF" + bytes(range(200)),
    }
    found = {name: folder / f"{name}.wav" for name in files}
    for name, content in files.items():
        found[name].write_bytes(content)
    found["nothing"] = write(folder / "nothing.wav", tone(0))
    found["one"] = write(folder / "one.wav", tone(1)[:1], 48_000)
    found["nan"] = write(folder / "nan.wav", np.full(100, np.nan, dtype=np.float32), subtype="FLOAT")
    found["missing"], found["folder"] = folder / "missing.wav", folder
    return found


WRONG = {
    "text": "not a sound file",
    "empty": "the file is empty",
    "header": "not a sound file",
    "garbage": "not a sound file",
    "nothing": "0 samples",
    "one": "too short to hold sound .1 samples at 48000 Hz",
    "nan": "not numbers",
    "missing": "no such file",
    "folder": "a folder; give its",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_recording_is_named_with_the_reason(tmp_path: Path, name: str) -> None:
    path = broken(tmp_path)[name]
    with pytest.raises(UnreadableAudio, match=WRONG[name]) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_durations_come_from_headers(tmp_path: Path) -> None:
    files = broken(tmp_path)
    assert duration(write(tmp_path / "tone.wav", tone(1.5, 8_000), 8_000)) == 1.5
    assert [duration(files[name]) for name in ("text", "missing", "folder")] == [0, 0, 0]


def test_silence_is_told_from_a_quiet_voice(tmp_path: Path) -> None:
    hiss = np.random.default_rng(0).uniform(-4e-4, 4e-4, RATE).astype(np.float32)
    assert read(write(tmp_path / "hiss.flac", hiss)).is_silent
    assert read(write(tmp_path / "zeros.wav", 0 * hiss)).is_silent
    assert not read(write(tmp_path / "quiet.wav", tone(1) / 10)).is_silent


def test_a_header_that_promises_gigabytes_costs_what_the_file_holds(tmp_path: Path) -> None:
    """64 GiB of samples in a file of a few kilobytes."""
    path = write(tmp_path / "vast.flac", babble(0.5, 1))
    content = bytearray(path.read_bytes())
    content[21] = (content[21] & 0xF0) | 0x3  # STREAMINFO's 36 bits of total samples: 2^34 of them, four bytes each
    content[22:26] = b"\xff\xff\xff\xff"
    path.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        assert len(read(path).samples) <= 0.6 * RATE
    except UnreadableAudio as error:
        assert "vast.flac" in str(error)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes


@pytest.mark.parametrize("rate", [1, 20, 4_000_000])
def test_a_rate_that_no_recording_has_is_refused(tmp_path: Path, rate: int) -> None:
    path = write(tmp_path / "odd.wav", babble(0.5, 1))
    content = bytearray(path.read_bytes())
    content[24:28] = rate.to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(UnreadableAudio, match=r"odd\.wav: .*samples a second"):
        read(path)


def test_a_chunk_that_promises_gigabytes_is_stepped_over(tmp_path: Path) -> None:
    path = write(tmp_path / "odd.wav", babble(0.5, 1))
    content = path.read_bytes()
    path.write_bytes(content[:12] + b"junk" + (0xFFFFFFF0).to_bytes(4, "little") + content[12:])
    try:
        read(path)
    except UnreadableAudio as error:
        assert "odd.wav" in str(error)
