"""Answers as OpenAI's clients read them, whole and in chunks."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from json.encoder import encode_basestring
from typing import Any, ClassVar

from forerun.engine import Stats
from forerun.engine.row import TokenLogprob
from forerun.serve.answer_text import TextPiece
from forerun.serve.call_formats import Tools
from forerun.serve.call_reader import CallReader
from forerun.serve.model import ServedModel
from forerun.serve.text import Choice, Gain
from forerun.version import __version__

Answer = dict[str, Any]
WRITER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # json.dumps makes a new one for every chunk
LEAST_LOGPROB = -9999.0  # what OpenAI's API says of very unlikely tokens: JSON has no infinity
PIECE = 2**20  # characters that are made bytes in one step


def event(answer: Answer) -> bytes:
    """One of a stream."""
    return f"data: {WRITER.encode(answer)}\n\n".encode()


class AnswerFormat(ABC):
    """One answer: its identity, its choices, its usage."""

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    text_part: ClassVar[str]
    """A choice of a chunk that tells text and nothing else, as most do: its index and its text are left open."""

    def __init__(self, model: ServedModel, *, logprobs: bool, origins: bool) -> None:
        self.model, self.logprobs, self.origins = model, logprobs, origins
        self.id, self.created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())

    @property
    def by_token(self) -> bool:
        """Whether it tells something of each token, and not of the text alone."""
        return self.logprobs or self.origins

    @abstractmethod
    def whole_choice(self, index: int, choice: Choice) -> Answer:
        """A choice of an answer in one piece."""

    @abstractmethod
    def part(self, index: int, pieces: Sequence[TextPiece], finish_reason: str | None) -> Answer:
        """A choice of a chunk."""

    def opening(self, index: int) -> str | None:
        """A choice of the first chunk, written, where there is one before any text."""
        return None

    def news(self, gain: Gain) -> str | None:
        """A choice of a chunk, written, where one is worth sending: in the middle of a character there is no text."""
        if gain.finish_reason is None and not self.by_token:
            text = "".join(piece.text for piece in gain.pieces)
            return self.text_part % (gain.choice.index, encode_basestring(text)) if text else None
        part = self.part(gain.choice.index, gain.pieces, gain.finish_reason)
        wants_tokens = bool(gain.pieces) and (self.logprobs or self.origins)
        is_worth_it = gain.finish_reason is not None or wants_tokens or self.says_something(part)
        return self._writer.encode(part) if is_worth_it else None

    @abstractmethod
    def says_something(self, part: Answer) -> bool:
        """Whether it adds to the answer."""

    def whole(self, choices: Sequence[Choice], usage: Answer) -> bytes:
        """An answer in one piece, written. Choice by choice: a thread that does it beside others makes many steps."""
        listed = [_utf8(self._writer.encode(self.whole_choice(*each))) for each in enumerate(choices)]
        head, tail = WRITER.encode(self._head(self.kind)), WRITER.encode(usage)
        return b'%s,"choices":[%s],"usage":%s}' % (head[:-1].encode(), b",".join(listed), tail.encode())

    def chunk(self, choice: str = "", usage: str | None = None) -> bytes:
        """As an event, of what is written already. What all chunks of an answer begin with is written once."""
        tail = "" if usage is None else f',"usage":{usage}'
        return f"{self._chunk_head}{choice}]{tail}}}\n\n".encode()

    @cached_property
    def _writer(self) -> json.JSONEncoder:
        """Asks for log-probabilities as it comes to them: it then neither holds all of them at once as dictionaries,
        through which the collector of garbage would look again and again, nor writes them in one step."""
        return json.JSONEncoder(
            ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=self.written_logprob
        )

    @abstractmethod
    def written_logprob(self, entry: TokenLogprob) -> Answer:
        """What is told of one token."""

    @cached_property
    def _chunk_head(self) -> str:
        return event({**self._head(self.chunk_kind), "choices": []}).decode().removesuffix("]}\n\n")

    def _head(self, kind: str) -> Answer:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": f"forerun-{__version__}",
        }

    def _extras(self, pieces: Sequence[TextPiece]) -> Answer:
        if not self.origins:
            return {}
        return {"origins": [{"text": piece.text, "origin": piece.origin} for piece in pieces if not piece.is_end]}

    def _token(self, token: int) -> str:
        return self.model.token_bytes(token).decode("utf-8", "replace")


class ChatFormat(AnswerFormat):
    """Of `/v1/chat/completions`."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    text_part = '{"index":%d,"delta":{"content":%s},"logprobs":null,"finish_reason":null}'

    def __init__(self, model: ServedModel, *, logprobs: bool, origins: bool, tools: Tools | None = None) -> None:
        super().__init__(model, logprobs=logprobs, origins=origins)
        self._tools = tools
        self._readers: dict[int, CallReader] = {}  # of each choice, where it may call tools

    @property
    def by_token(self) -> bool:
        return super().by_token or self._tools is not None

    def opening(self, index: int) -> str | None:
        delta = {"role": "assistant", "content": ""}
        return WRITER.encode({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def whole_choice(self, index: int, choice: Choice) -> Answer:
        message: Answer = {"role": "assistant", "content": choice.text, "refusal": None}
        if self._tools is not None:
            reader = self._readers[index] = CallReader(self._tools)
            message["content"] = (reader.push(choice.pieces).content + reader.finish().content) or None
            if reader.calls:
                message["tool_calls"] = [call.as_dict() for call in reader.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.pieces),
            "finish_reason": self._reason(index, choice.finish_reason),
            **self._extras(choice.pieces),
        }

    def part(self, index: int, pieces: Sequence[TextPiece], finish_reason: str | None) -> Answer:
        return {
            "index": index,
            "delta": self._delta(index, pieces, finish_reason is not None),
            "logprobs": self._logprobs(pieces) if pieces else None,
            "finish_reason": self._reason(index, finish_reason),
            **self._extras(pieces),
        }

    def says_something(self, part: Answer) -> bool:
        return any(part["delta"].values())

    def _delta(self, index: int, pieces: Sequence[TextPiece], is_last: bool) -> Answer:
        """Text, and calls: each begins with its id and name, and its arguments follow as they come."""
        if self._tools is None:
            text = "".join(piece.text for piece in pieces)
            return {"content": text} if text or not is_last else {}
        reader = self._readers.setdefault(index, CallReader(self._tools))
        part = reader.push(pieces)
        content = part.content + (reader.finish().content if is_last else "")
        delta: Answer = {"content": content} if content else {}
        return delta | ({"tool_calls": list(part.calls.values())} if part.calls else {})

    def _reason(self, index: int, finish_reason: str | None) -> str | None:
        has_called = index in self._readers and self._readers[index].has_called
        return "tool_calls" if has_called and finish_reason == "stop" else finish_reason

    def _logprobs(self, pieces: Sequence[TextPiece]) -> Answer | None:
        if not self.logprobs:
            return None
        entries = [piece.logprob for piece in pieces if piece.logprob is not None and not piece.is_end]
        return {"content": entries, "refusal": None}

    def written_logprob(self, entry: TokenLogprob) -> Answer:
        return {**self._entry(entry.token, entry.logprob), "top_logprobs": [self._entry(*top) for top in entry.top]}

    def _entry(self, token: int, logprob: float) -> Answer:
        written = self.model.token_bytes(token)
        return {"token": self._token(token), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(written)}


class CompletionFormat(AnswerFormat):
    """Of `/v1/completions`."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    text_part = '{"index":%d,"text":%s,"logprobs":null,"finish_reason":null}'

    def __init__(self, model: ServedModel, *, logprobs: bool, origins: bool) -> None:
        super().__init__(model, logprobs=logprobs, origins=origins)
        self._sent: dict[int, int] = defaultdict(int)  # characters of each choice

    def whole_choice(self, index: int, choice: Choice) -> Answer:
        return self.part(index, choice.pieces, choice.finish_reason)

    def part(self, index: int, pieces: Sequence[TextPiece], finish_reason: str | None) -> Answer:
        logprobs = self._logprobs(pieces, self._sent[index])
        text = "".join(piece.text for piece in pieces)
        self._sent[index] += len(text)
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            **self._extras(pieces),
        }

    def says_something(self, part: Answer) -> bool:
        return bool(part["text"])

    def _logprobs(self, pieces: Sequence[TextPiece], start: int) -> Answer | None:
        if not self.logprobs:
            return None
        offsets, end = [], start
        for piece in pieces:
            if piece.is_token:
                offsets.append(end)
            end += len(piece.text)
        listed = [piece for piece in pieces if piece.is_token]
        entries = [piece.logprob for piece in listed]
        return {
            "tokens": [self._token(piece.token) for piece in listed],
            "token_logprobs": [None if entry is None else max(entry.logprob, LEAST_LOGPROB) for entry in entries],
            "top_logprobs": entries,
            "text_offset": offsets,
        }

    def written_logprob(self, entry: TokenLogprob) -> Answer:
        return {self._token(token): max(value, LEAST_LOGPROB) for token, value in reversed(entry.top)}


def _utf8(text: str) -> bytes:
    """In steps."""
    return b"".join([text[start : start + PIECE].encode() for start in range(0, len(text), PIECE)])


def usage(num_prompt_tokens: int, choices: Sequence[Choice], returned: Sequence[Choice] | None = None) -> Answer:
    """Tokens, what became of the client's own prediction, and what speculation did for each choice.

    An answer in one piece has those that are `returned`, in its order; others that were decoded come last, without an
    index.
    """
    completion = sum(choice.num_tokens for choice in choices)
    predicted = sum(choice.stats.num_predicted_tokens for choice in choices)
    accepted = sum(choice.stats.num_accepted_predicted_tokens for choice in choices)
    entries: list[tuple[int | None, Choice]] = [(choice.index, choice) for choice in choices]
    if returned is not None:
        kept = {choice.index for choice in returned}
        entries = [*enumerate(returned), *((None, choice) for choice in choices if choice.index not in kept)]
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": num_prompt_tokens + completion,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": predicted - accepted,
        },
        "speculation": [{"index": index, **_speculation(choice.stats)} for index, choice in entries],
    }


def _speculation(stats: Stats) -> Answer:
    return {
        "rounds": stats.rounds,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "num_draft_tokens_per_pos": stats.num_draft_tokens_per_pos,
        "num_accepted_tokens_per_pos": stats.num_accepted_tokens_per_pos,
        "tokens_per_round": round(stats.tokens_per_round, 3),
    }
