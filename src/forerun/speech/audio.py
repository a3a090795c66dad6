"""Sound from a file: one channel, 16 000 samples a second, whatever it was recorded with."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import UnreadableAudio

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RATE = 16_000
"""Samples a second, Whisper's own."""
SOUND = frozenset({".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aif", ".aiff", ".au", ".caf", ".w64"})
UNKNOWN_SIZE = frozenset({0, 0x7FFFFFFF, 0xFFFFFFFF})
"""What a WAV header says of its sound's length when it was written before that was known."""
SLOWEST, FASTEST = 1_000, 1_000_000
"""Samples a second of a recording. A header with less would make resampling blow a small file up to gigabytes."""
BLOCK = 1 << 18
"""Samples read at a time."""
SILENCE = 1e-3
"""60 decibels below full scale. Recorded silence has peaks around 4e-4, a quiet speaker's are forty times as high."""
INSTALL = "pip install 'forerun[speech]'"


@dataclass(frozen=True, slots=True)
class Clip:
    """One recording, ready for a model."""

    path: Path
    samples: NDArray[np.float32]  # [n] mono, at RATE
    note: str | None = None  # what the user should know, such as that the file ends early

    @property
    def seconds(self) -> float:
        return len(self.samples) / RATE

    @property
    def is_silent(self) -> bool:
        """Whether nothing in it is loud enough to be speech: a Whisper asked all the same makes something up."""
        return float(abs(self.samples).max()) < SILENCE


def read(path: Path) -> Clip:
    """A file as a clip; `UnreadableAudio` says what is wrong with it and what would help."""
    soundfile = _package("soundfile")
    check_file(path)
    try:
        with soundfile.SoundFile(path) as file:
            promised, rate = file.frames, file.samplerate
            sound = _samples(path, file)
    except soundfile.LibsndfileError as error:
        reason = str(error.error_string).strip().rstrip(".")
        raise UnreadableAudio(
            f"{path}: not a sound file that can be read ({reason}); give WAV or FLAC, or convert it first"
        ) from error
    except (ValueError, RuntimeError) as error:  # what soundfile itself thinks of an odd header
        raise UnreadableAudio(f"{path}: not a sound file that can be read ({error}); the file is damaged") from error
    if not len(sound):
        raise UnreadableAudio(f"{path}: there is no sound in it (0 samples); record it again, or leave it out")
    _check_numbers(path, sound)
    missing = _missing_seconds(path) + (promised - len(sound)) / rate
    samples = resampled(sound, rate)
    if not len(samples):
        raise UnreadableAudio(
            f"{path}: too short to hold sound ({len(sound)} samples at {rate} Hz); record it again, or leave it out"
        )
    return Clip(path, samples, _ends_early(missing))


def _samples(path: Path, file: Any) -> NDArray[np.float32]:
    """All channels as one, read a block at a time: a header may promise more than any memory holds."""
    import numpy as np

    rate = file.samplerate
    if not SLOWEST <= rate <= FASTEST:
        raise UnreadableAudio(f"{path}: {rate} samples a second is no recording's rate; the file is damaged")
    blocks = []
    while len(block := file.read(BLOCK, dtype="float32", always_2d=True)):
        blocks.append(block.mean(axis=1))
    return np.concatenate(blocks) if blocks else np.zeros(0, dtype=np.float32)


def duration(path: Path) -> float:
    """Seconds by the file's header, 0 where it cannot be read: for progress bars."""
    soundfile = _package("soundfile")
    try:
        return float(soundfile.info(path).duration) if path.is_file() else 0.0
    except (soundfile.LibsndfileError, ValueError, RuntimeError, ArithmeticError):
        return 0.0


def resampled(samples: NDArray[np.float32], rate: int) -> NDArray[np.float32]:
    """The same sound at RATE, what is above its new band filtered out."""
    if rate == RATE:
        return samples
    sound: NDArray[np.float32] = _package("soxr").resample(samples, rate, RATE)
    return sound


def check_packages() -> None:
    """Raise where recordings could not be read."""
    for name in ("soundfile", "soxr"):
        _package(name)


def _package(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnreadableAudio(f"sound files are read with {name}, which is not installed; run: {INSTALL}") from error


def check_file(path: Path) -> None:
    """Raise where nothing can be read, whatever it would be."""
    if path.is_dir():
        inside = sorted(file.suffix.lower() for file in path.iterdir() if file.suffix.lower() in SOUND)
        advice = f"give its {len(inside)} sound files: {path}/*{inside[0]}" if inside else "it holds no sound files"
        raise UnreadableAudio(f"{path}: a folder; {advice}")
    if not path.exists():
        raise UnreadableAudio(f"{path}: no such file; check the name")
    if not path.stat().st_size:
        raise UnreadableAudio(f"{path}: the file is empty; record it again, or leave it out")


def _check_numbers(path: Path, sound: Any) -> None:
    import numpy as np

    if not np.isfinite(sound).all():
        raise UnreadableAudio(f"{path}: some samples are not numbers (NaN or infinite); the file is damaged")


def _missing_seconds(path: Path) -> float:
    """How much sound a WAV's header promises beyond the end of the file, which libsndfile passes over in silence."""
    with path.open("rb") as file:
        if file.read(4) != b"RIFF" or file.read(8)[4:] != b"WAVE":
            return 0.0
        bytes_a_second = 0
        while len(head := file.read(8)) == 8:
            name, size = struct.unpack("<4sI", head)
            if name == b"data":
                there = path.stat().st_size - file.tell()
                known = size not in UNKNOWN_SIZE and bytes_a_second > 0
                return max(size - there, 0) / bytes_a_second if known else 0.0
            after = file.tell() + size + size % 2  # chunks begin at even places
            if name == b"fmt " and len(body := file.read(12)) == 12:
                bytes_a_second = struct.unpack_from("<I", body, 8)[0]
            file.seek(after)
    return 0.0


def _ends_early(seconds: float) -> str | None:
    if seconds < 0.1:
        return None
    return f"the file ends early: {seconds:.1f} more seconds were promised; what is there is transcribed"
