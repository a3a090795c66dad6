"""Subtitles that players read, and text that people do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.speech.formats import Format, clock, render
from forerun.speech.transcript import Segment, Transcript

TALK = Transcript(
    Path("talk.wav"),
    3725.5,
    (
        Segment(0.0, 2.5, " Hello, Tom & Ann <3.", (1, 2)),
        Segment(2.5, 2.5, " ", (3,)),
        Segment(3661.25, 3725.5, " Left --> right\n\nand on.", (4,)),
    ),
)


def test_subrip() -> None:
    assert render(TALK, Format.SRT) == (
        "1\n00:00:00,000 --> 00:00:02,500\nHello, Tom & Ann <3.\n\n"
        "2\n01:01:01,250 --> 01:02:05,500\nLeft -> right and on.\n"
    )


def test_webvtt() -> None:
    assert render(TALK, Format.VTT) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nHello, Tom &amp; Ann &lt;3.\n\n"
        "01:01:01.250 --> 01:02:05.500\nLeft -> right and on.\n"
    )


def test_json_holds_times_and_tokens() -> None:
    found = json.loads(render(TALK, Format.JSON))
    assert found["text"] == TALK.text and found["seconds"] == 3725.5
    assert found["segments"][2] == {
        "start": 3661.25, "end": 3725.5, "text": "Left --> right\n\nand on.", "tokens": [4],
    }  # fmt: skip


def test_text_with_and_without_times() -> None:
    assert render(TALK, Format.TEXT) == "Hello, Tom & Ann <3.  Left --> right\n\nand on.\n"
    assert render(TALK, Format.TEXT, times=True).splitlines() == [
        "[00:00:00.000 --> 00:00:02.500] Hello, Tom & Ann <3.",
        "[01:01:01.250 --> 01:02:05.500] Left -> right and on.",
    ]


@pytest.mark.parametrize("form", list(Format))
def test_silence_is_an_empty_file_of_its_kind(form: Format) -> None:
    made = render(Transcript(Path("silence.wav"), 4.0, ()), form)
    expected = {Format.TEXT: "\n", Format.SRT: "", Format.VTT: "WEBVTT\n"}
    assert made == expected.get(form, made)
    assert form is not Format.JSON or json.loads(made)["segments"] == []


def test_the_clock_carries_over() -> None:
    assert clock(59.9996) == "00:01:00.000"
    assert clock(3599.9996, ",") == "01:00:00,000"
