"""`/v1/audio/transcriptions`, as OpenAI's clients send recordings and read transcripts."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from forerun.serve.call import unless_left
from forerun.serve.errors import ApiError, from_validation, refused
from forerun.serve.speech import SpeechService, read_clip
from forerun.speech import Format, SpeechSettings, Transcript, render
from forerun.speech.languages import language_name
from forerun.speech.settings import TEMPERATURES

TIMED = ("verbose_json", "srt", "vtt")
MOST_FIELDS = 32


class TranscriptionForm(BaseModel):
    """`POST /v1/audio/transcriptions`, beside the file. Nothing is ignored."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = Field(None, description="As /v1/models names it.")
    language: str | None = Field(None, description="Such as de or german; found out unless given.")
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = "json"
    temperature: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Unless given 0, and higher where a window goes wrong."
    )
    timestamp_granularities: list[Literal["segment"]] | None = None
    stream: Literal["false"] | None = Field(None, description="Not offered: transcripts are given whole.")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @property
    def settings(self) -> SpeechSettings:
        return SpeechSettings(
            language=self.language or None,  # forms send a field that was left empty
            timestamps=self.response_format in TIMED,
            temperature=TEMPERATURES if self.temperature is None else (self.temperature,),
            seed=self.seed,
        )


def _described() -> dict[str, Any]:
    """For the OpenAPI schema: the form with its file."""
    schema = TranscriptionForm.model_json_schema()
    file = {"type": "string", "format": "binary", "description": "WAV, FLAC, and what else libsndfile reads."}
    schema["properties"] = {"file": file, **schema["properties"]}
    schema["required"] = ["file"]
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def add_speech(app: FastAPI, service: SpeechService) -> None:
    @app.post("/v1/audio/transcriptions", response_model=None, openapi_extra=_described())
    async def transcriptions(http: Request) -> Response:
        """Write down what is said in a recording."""
        async with http.form(max_files=1, max_fields=MOST_FIELDS) as sent:
            form, file = _fields(sent), sent.get("file")
            if not isinstance(file, UploadFile):
                raise refused("file", "must be a recording, sent as multipart/form-data")
            data = await file.read()
        service.card.check_name(form.model)
        with tempfile.TemporaryDirectory(prefix="forerun-") as folder:
            clip = await asyncio.to_thread(read_clip, data, Path(folder))

        async def work() -> Response:
            return _written(await service.transcribe(clip, form.settings), form)

        return await unless_left(http, work())

    @app.post("/v1/audio/translations", response_model=None)
    async def translations() -> Response:
        """Not offered."""
        raise ApiError(400, "translations are not offered here: use /v1/audio/transcriptions", code="not_offered")


def _fields(sent: FormData) -> TranscriptionForm:
    """All but the file; OpenAI's clients write a list as fields whose names end with []."""
    fields: dict[str, Any] = {}
    for name, value in sent.multi_items():
        if name == "file":
            continue
        if name.endswith("[]"):
            fields.setdefault(name.removesuffix("[]"), []).append(value)
        else:
            fields[name] = value
    try:
        form = TranscriptionForm.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error.errors()) from error
    if form.timestamp_granularities and form.response_format not in TIMED:
        raise refused(
            "timestamp_granularities", f"{form.response_format} tells no times: ask for response_format verbose_json"
        )
    return form


def _written(transcript: Transcript, form: TranscriptionForm) -> Response:
    if form.response_format == "json":
        used = {"type": "duration", "seconds": round(transcript.seconds, 3)}
        return JSONResponse({"text": transcript.text, "usage": used})
    if form.response_format == "verbose_json":
        segments = [
            {"id": number, "start": each.start, "end": each.end, "text": each.text, "tokens": list(each.tokens)}
            for number, each in enumerate(transcript.segments)
        ]
        return JSONResponse(
            {
                "task": "transcribe",
                "language": transcript.language and language_name(transcript.language),
                "duration": round(transcript.seconds, 3),
                "text": transcript.text,
                "segments": segments,
            }
        )
    return PlainTextResponse(render(transcript, Format(form.response_format)))
