"""What was said, and when."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of speech between two timestamps of the model, or a whole window where it gave none."""

    start: float  # seconds from the beginning of the file
    end: float
    text: str
    tokens: tuple[int, ...]  # as the model wrote them, timestamps included


@dataclass(frozen=True, slots=True)
class Transcript:
    """One file's words."""

    path: Path
    seconds: float  # of sound
    segments: tuple[Segment, ...]
    note: str | None = None  # about the file, for the user
    language: str | None = None  # its code: as asked for, or as the model found out; None where nobody speaks

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for segment in self.segments for token in segment.tokens)

    def as_dict(self) -> dict[str, Any]:
        shown = [asdict(segment) | {"text": segment.text.strip()} for segment in self.segments]
        return {
            "file": str(self.path),
            "seconds": round(self.seconds, 3),
            "language": self.language,
            "text": self.text,
            "segments": shown,
            "note": self.note,
        }
