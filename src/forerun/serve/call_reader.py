"""An answer with calls of tools in it, read as it grows: text to show, and calls with their arguments."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.serve.answer_text import TextPiece, overlap
from forerun.serve.call_formats import Tools

ID_LETTERS = string.ascii_letters + string.digits
ID_LENGTH = 9  # what Mistral's templates want of the ids that they are shown again; to others any will do


@dataclass(slots=True)
class ToolCall:
    """One call, as far as it is known."""

    id: str
    name: str
    arguments: str = ""
    is_complete: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(slots=True)
class Part:
    """What some pieces have added: text, and to each call by its place a name or more arguments."""

    content: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)

    def begin(self, place: int, call: ToolCall) -> None:
        self.calls[place] = {"index": place, **call.as_dict()}

    def extend(self, place: int, arguments: str) -> None:
        entry = self.calls.setdefault(place, {"index": place, "function": {"arguments": ""}})
        entry["function"]["arguments"] += arguments


class CallReader:
    """Pieces in, parts out. The grammar has seen to the shape of everything behind the first mark of a call."""

    def __init__(self, tools: Tools) -> None:
        self.calls: list[ToolCall] = []
        self._tools = tools
        self._held = ""  # text that may be the beginning of a mark, or of a call
        self._is_text = True  # no call has begun
        self._has_text = False
        self._object = _ObjectEnd()

    @property
    def has_called(self) -> bool:
        """Whether all calls that were begun have come to their end, and there are some."""
        return bool(self.calls) and all(call.is_complete for call in self.calls)

    def push(self, pieces: Sequence[TextPiece]) -> Part:
        part = Part()
        for piece in pieces:
            if self._is_text and piece.token == self._tools.mark_token:
                self._is_text = False
            elif self._is_text:
                self._read_text(piece.text, part)
            else:
                self._read_calls(piece.text, part)
        return part

    def finish(self) -> Part:
        """Text that was held back and has not become a call."""
        held, self._held = self._held, ""
        return Part(held if self._is_text else "")

    def _read_text(self, text: str, part: Part) -> None:
        """A mark that is a token of its own is never looked for in the text: a model may write about it."""
        form, self._held = self._tools.format, self._held + text
        may_begin = self._tools.mark_token is None and (form.anywhere or not self._has_text)
        begins = may_begin and (form.mark in self._held if form.anywhere else self._held.startswith(form.mark))
        if begins:
            end = self._held.index(form.mark)
        else:
            end = len(self._held) - (overlap(self._held, (form.mark,)) if may_begin else 0)
        part.content += self._held[:end]
        self._held, self._has_text = self._held[end:], self._has_text or end > 0
        if begins:
            self._is_text = False
            self._read_calls("", part)

    def _read_calls(self, text: str, part: Part) -> None:
        self._held += text
        while self._held:
            if not self.calls or self.calls[-1].is_complete:
                head = self._tools.format.head.search(self._held)
                if head is None:
                    return
                self._held = self._held[head.end() :]
                self.calls.append(ToolCall(_new_id(), head[1]))
                part.begin(len(self.calls) - 1, self.calls[-1])
                self._object = _ObjectEnd()
            call, end = self.calls[-1], self._object.find(self._held)
            arguments, self._held = self._held[:end], self._held[end:]
            call.arguments += arguments
            call.is_complete = self._object.is_found
            part.extend(len(self.calls) - 1, arguments)


class _ObjectEnd:
    """Looks for the brace that closes a JSON object, in texts that follow each other."""

    def __init__(self) -> None:
        self.is_found = False
        self._depth = 0
        self._in_string = self._is_escaped = False

    def find(self, text: str) -> int:
        """How much of `text` belongs to the object."""
        for place, char in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped, self._in_string = char == "\\", char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    self.is_found = True
                    return place + 1
        return len(text)


def _new_id() -> str:
    return "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))
