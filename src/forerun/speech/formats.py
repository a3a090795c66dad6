"""Transcripts as files: plain text, SubRip and WebVTT subtitles, JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from enum import StrEnum

from forerun.speech.transcript import Segment, Transcript


class Format(StrEnum):
    """How a transcript is written; the value is also the file's ending, but for text."""

    TEXT = "text"
    SRT = "srt"
    VTT = "vtt"
    JSON = "json"

    @property
    def suffix(self) -> str:
        return ".txt" if self is Format.TEXT else f".{self}"

    @property
    def needs_times(self) -> bool:
        return self in (Format.SRT, Format.VTT)


def render(transcript: Transcript, form: Format, times: bool = False) -> str:
    """The transcript in that form; `times` puts each segment of plain text on a line that begins with its times."""
    if form is Format.TEXT:
        return _timed_text(transcript) if times else transcript.text + "\n"
    return WRITERS[form](transcript)


def srt(transcript: Transcript) -> str:
    """SubRip: numbered, hours always there, a comma before the milliseconds."""
    blocks = [
        f"{number}\n{clock(segment.start, ',')} --> {clock(segment.end, ',')}\n{_line(segment.text)}\n"
        for number, segment in enumerate(_spoken(transcript), start=1)
    ]
    return "\n".join(blocks)


def vtt(transcript: Transcript) -> str:
    """WebVTT, where `<` and `&` would begin markup."""
    blocks = [
        f"{clock(segment.start)} --> {clock(segment.end)}\n{_line(segment.text, markup=True)}\n"
        for segment in _spoken(transcript)
    ]
    return "\n".join(["WEBVTT\n", *blocks])


def as_json(transcript: Transcript) -> str:
    return json.dumps(transcript.as_dict(), indent=2, ensure_ascii=False) + "\n"


WRITERS: dict[Format, Callable[[Transcript], str]] = {Format.SRT: srt, Format.VTT: vtt, Format.JSON: as_json}


def clock(seconds: float, mark: str = ".") -> str:
    """00:01:02.345"""
    total = round(seconds * 1000)
    minutes, milliseconds = divmod(total, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}{mark}{milliseconds % 1000:03}"


def _timed_text(transcript: Transcript) -> str:
    return "".join(
        f"[{clock(segment.start)} --> {clock(segment.end)}] {_line(segment.text)}\n" for segment in _spoken(transcript)
    )


def _spoken(transcript: Transcript) -> Iterator[Segment]:
    return (segment for segment in transcript.segments if segment.text.strip())


def _line(text: str, markup: bool = False) -> str:
    """One line that no player takes for a time line."""
    line = " ".join(text.split()).replace("-->", "->")
    return line.replace("&", "&amp;").replace("<", "&lt;") if markup else line
