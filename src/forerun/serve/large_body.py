"""Large bodies, read beside the event loop and in pieces: others' tokens go out meanwhile.

A thread alone is not enough. The interpreter goes from one thread to another between two of its own steps, and for the
JSON parser and for pydantic millions of numbers are one step, which takes half a second.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from json.decoder import JSONArray, JSONDecodeError, JSONDecoder  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

from fastapi import HTTPException
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from forerun.serve.errors import ApiError, from_validation

LARGE = 2**15  # bytes: less is read sooner than a thread wakes
MANY_VALUES = 20_000  # that the parser reads in some milliseconds; of numbers it is given no more at a time
PIECE = 2**16  # characters of a list of numbers
NUMBERS = re.compile(r"[\d\s,]*")


class LargeBodyRoute(APIRoute):
    """A route whose large bodies are read by a thread."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        model = None if self.body_field is None else self.body_field.field_info.annotation

        async def read_and_handle(request: Request) -> Response:
            return await handle(_ReadBeside(request, model))

        return read_and_handle


class InvalidBody(HTTPException):
    """What is wrong with a body that was read by a thread."""

    def __init__(self, answer: ApiError) -> None:
        super().__init__(answer.status, answer.message)
        self.answer = answer


class _ReadBeside(Request):
    """A request whose `json()` is its body, validated already where it is large."""

    def __init__(self, request: Request, model: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model

    async def json(self) -> Any:
        body = await self.body()
        is_model = isinstance(self._model, type) and issubclass(self._model, BaseModel)
        if len(body) <= LARGE or not is_model:
            return await super().json()
        return await asyncio.to_thread(read, body, self._model)


def read(body: bytes, model: type[BaseModel]) -> BaseModel:
    """For a thread beside others."""
    try:
        return model.model_validate(parse(body))
    except ValidationError as error:
        raise InvalidBody(from_validation(error.errors(include_url=False))) from error


def parse(body: bytes) -> Any:
    """As `json.loads` does, and where there are many values step by step."""
    text = body.decode(json.detect_encoding(body), "surrogatepass")
    if text.count(",") < MANY_VALUES:
        return json.loads(text)
    return _StepwiseDecoder().decode(text)


class _StepwiseDecoder(JSONDecoder):
    """The standard library's, in Python but for strings and lists of numbers."""

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=_object)
        self.parse_array = _array
        self.scan_once = py_make_scanner(self)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = {}
    for name, value in pairs:  # as a loop, since dict(pairs) would be one step
        fields[name] = value
    return fields


def _array(at: tuple[str, int], scan_once: Any, *rest: Any) -> tuple[list[Any], int]:
    """Behind an opening bracket: its values, and where it ends."""
    text, place = at
    values: list[Any] = []
    while (end := _last_comma(text, place)) is not None:
        try:
            values += json.loads(f"[{text[place:end]}]")
        except JSONDecodeError as error:
            raise JSONDecodeError(error.msg, text, place + error.pos - 1) from error
        place = end + 1
    others, end = JSONArray((text, place), scan_once, *rest)
    if values and not others:
        raise JSONDecodeError("Expecting value", text, place)
    return [*values, *others], end


def _last_comma(text: str, place: int) -> int | None:
    """Of a piece of numbers that begins here; None where that is short, or something else is."""
    numbers = NUMBERS.match(text, place, place + PIECE)
    if numbers is None or numbers.end() - place < PIECE // 2:
        return None
    comma = text.rfind(",", place, numbers.end())
    return comma if comma > place else None


def list_of_numbers(numbers: list[int]) -> str:
    """As JSON, in steps."""
    pieces = (numbers[start : start + MANY_VALUES] for start in range(0, len(numbers), MANY_VALUES))
    return f"[{','.join(','.join(map(str, piece)) for piece in pieces)}]"
