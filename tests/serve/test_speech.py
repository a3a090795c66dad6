"""Recordings over HTTP: the transcripts of a `Transcriber`, in the forms that OpenAI's clients ask for."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from forerun import DraftModel, SpeculativeDecoder
from forerun.serve.model import Card
from forerun.serve.settings import ServiceSettings
from forerun.serve.speech import SpeechService
from forerun.speech import Clip, Format, SpeechSettings, Transcriber, render
from forerun.speech.audio import RATE
from serve.serving import Server, listening
from support.sound import babble
from support.tiny import draft_of
from support.whisper import Processor, tiny_whisper

soundfile = pytest.importorskip("soundfile")
PATH = "/v1/audio/transcriptions"
MODEL = tiny_whisper()
SECONDS = 0.75
ONE_TRY = {"temperature": "0"}


def make_decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(MODEL, DraftModel(draft_of(MODEL)), policy=3)


@pytest.fixture(scope="module")
def speech_server() -> Iterator[Server]:
    service = SpeechService(make_decoder(), Processor(), Card("ears", 0, "draft"), ServiceSettings(timeout=60.0))
    with listening(service) as server:
        yield server


def wav(seed: int = 0) -> bytes:
    written = io.BytesIO()
    soundfile.write(written, babble(SECONDS, seed), RATE, format="WAV", subtype="FLOAT")
    return written.getvalue()


def ask(server: Server, data: bytes | None = None, **fields: Any) -> Any:
    sent = {"file": ("a.wav", wav() if data is None else data)}
    return server.client.post(PATH, files=sent, data={**ONE_TRY, **fields})


def expected(seed: int = 0, timestamps: bool = False) -> Any:
    settings = SpeechSettings(temperature=(0.0,), timestamps=timestamps)
    clip = Clip(Path("recording"), babble(SECONDS, seed))
    return Transcriber(MODEL, Processor(), make_decoder(), settings).batch([clip])[0]


def test_a_transcript_and_its_usage(speech_server: Server) -> None:
    answer = ask(speech_server, model="ears").json()
    assert answer == {"text": expected().text, "usage": {"type": "duration", "seconds": SECONDS}}
    assert "spec_decode_num_draft_tokens_total" in speech_server.client.get("/metrics").text


@pytest.mark.slow
def test_a_language_that_was_left_empty_is_not_given(speech_server: Server) -> None:
    assert ask(speech_server, language="").json()["text"] == expected().text


def test_any_error_of_a_recording_is_told_and_counted(speech_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("as transformers raises them")

    def counted(reason: str) -> float:
        lines = speech_server.client.get("/metrics").text.splitlines()
        found = (line for line in lines if line.startswith("vllm:request_success_total") and f'"{reason}"' in line)
        return sum(float(line.split()[-1]) for line in found)

    monkeypatch.setattr(Transcriber, "batch", fail)
    before = counted("error"), counted("abort")
    answer = ask(speech_server)
    error = answer.json()["error"]
    assert answer.status_code == 500 and error["code"] == "engine_error" and "transformers" not in error["message"]
    assert (counted("error"), counted("abort")) == (before[0] + 1, before[1])


def test_segments_and_their_times(speech_server: Server) -> None:
    timed = expected(timestamps=True)
    whole = ask(speech_server, response_format="verbose_json", **{"timestamp_granularities[]": "segment"}).json()
    assert whole["text"] == timed.text and whole["duration"] == SECONDS and whole["language"] == "english"
    assert [segment["end"] for segment in whole["segments"]] == [segment.end for segment in timed.segments]


@pytest.mark.slow
@pytest.mark.parametrize("form", ("text", "srt", "vtt"))
def test_other_forms(speech_server: Server, form: str) -> None:
    written = render(expected(timestamps=form != "text"), Format(form))
    assert ask(speech_server, response_format=form).text == written


@pytest.mark.slow
def test_several_at_once_are_each_their_own(speech_server: Server) -> None:
    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(lambda seed: ask(speech_server, wav(seed)).json()["text"], range(2)))
    assert texts == [expected(seed).text for seed in range(2)]
    assert speech_server.is_idle()


def test_silence_has_no_words(speech_server: Server) -> None:
    written = io.BytesIO()
    soundfile.write(written, babble(0.5, 0) * 0, RATE, format="WAV")
    assert ask(speech_server, written.getvalue()).json()["text"] == ""


@pytest.mark.parametrize(
    ("fields", "status", "param", "message"),
    (
        ({"language": "de"}, 400, None, "multilingual"),
        ({"response_format": "xml"}, 400, "response_format", "verbose_json"),
        ({"prompt": "names"}, 400, "prompt", "no such field"),
        ({"stream": "true"}, 400, "stream", "false"),
        ({"seed": str(10**30)}, 400, "seed", "less than"),
        ({"temperature": "2"}, 400, "temperature", "less than"),
        ({"timestamp_granularities[]": "word"}, 400, "timestamp_granularities.0", "segment"),
        ({"timestamp_granularities[]": "segment"}, 400, "timestamp_granularities", "verbose_json"),
        ({"model": "other"}, 404, "model", "ears"),
    ),
)
def test_what_cannot_be_honoured_is_named(
    speech_server: Server, fields: dict[str, str], status: int, param: str | None, message: str
) -> None:
    answer = ask(speech_server, **fields)
    error = answer.json()["error"]
    assert answer.status_code == status and error["param"] == param and message in error["message"], error


def test_what_is_no_recording(speech_server: Server) -> None:
    for data in (b"", b"RIFF", b"no sound" * 9, wav()[:30]):
        answer = ask(speech_server, data)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "file" and "/tmp" not in answer.text, error
    assert speech_server.client.post(PATH, data={"file": "text"}).status_code == 400
    assert speech_server.post(PATH, file="text").status_code == 400
    assert speech_server.client.post("/v1/audio/translations").json()["error"]["code"] == "not_offered"


def test_servers_say_what_they_are(speech_server: Server, server: Server) -> None:
    assert speech_server.client.get("/v1/models").json()["data"][0]["id"] == "ears"
    assert speech_server.client.get("/v1/models/ears").status_code == 200
    assert speech_server.client.get("/ready").status_code == 200
    form = speech_server.client.get("/openapi.json").json()["paths"][PATH]["post"]["requestBody"]["content"]
    assert "file" in form["multipart/form-data"]["schema"]["properties"]
    assert speech_server.post("/v1/completions", prompt="x").status_code == 404
    error = ask(server).json()["error"]
    assert error["code"] == "not_offered" and "Whisper" in error["message"]
