"""Errors as OpenAI's clients read them: `{"error": {message, type, param, code}}` and a status they act upon."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from forerun.errors import EngineClosed, ForerunError, InvalidArgument, RankLost

log = logging.getLogger("forerun.serve")
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
}
SERVER_ERROR = "server_error"
RETRY_AFTER = 1  # seconds, where nothing says how long it will take
MOST_REPEATED = 64  # characters of a name that a client gave: it may have given megabytes
NOT_OFFERED = {
    "suffix": "models here only continue a text",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "modalities": "text is all there is",
    "audio": "text is all there is",
    "reasoning_effort": "say it in a message, as the model was trained to read it",
    "store": "nothing is stored",
    "metadata": "nothing is stored",
    "service_tier": "all requests are served alike",
    "chat_template": "the model's own is used",
    "use_beam_search": "beam search is not sampling",
}
"""Fields of OpenAI's and vLLM's that clients send, and what to do without them."""


class ApiError(ForerunError):
    """What a client is told instead of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, SERVER_ERROR if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def shutting_down() -> ApiError:
    return ApiError(503, "this server is shutting down", code="shutting_down", retry_after=RETRY_AFTER)


def api_error_of(error: Exception) -> ApiError:
    """An error of the engine, in words that hold no path and no trace; the log has both."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidArgument):
        return ApiError(400, str(error))
    if isinstance(error, EngineClosed):
        return shutting_down()
    if isinstance(error, RankLost):
        return ApiError(503, "a process that holds a part of the model was lost", code="rank_lost", retry_after=10)
    log.error("a request failed", exc_info=error)
    return ApiError(500, f"the model failed on this request: {type(error).__name__}", code="engine_error")


def shortened(text: str) -> str:
    """A name that a client gave, as it is repeated to the client."""
    return text if len(text) <= MOST_REPEATED else f"{text[:MOST_REPEATED]}..."


def refused(param: str, reason: str, code: str | None = None) -> ApiError:
    """A field that cannot be honoured."""
    return ApiError(400, f"{param}: {reason}", param=param, code=code)


def from_validation(errors: Sequence[Any]) -> ApiError:
    """The first complaint of pydantic about a body. Values are not repeated: they may be prompts."""
    place = _names(errors[0])
    # Of a union every member complains. Whichever came furthest into the same place is the one that was meant.
    error = max((each for each in errors if _names(each)[: len(place)] == place), key=_depth)
    names = _names(error)
    param, kind = ".".join(names), error["type"]
    if kind == "value_error":  # of a check of ours, which names the fields
        return ApiError(400, f"{error['msg'].removeprefix('Value error, ')}", param=param or None)
    is_unknown = kind == "extra_forbidden"
    if kind == "json_invalid" or not names or (param.isdigit() and not is_unknown):  # the place in the text
        message = f"the body must be a JSON object, sent as Content-Type: application/json: {error['msg']}"
        return ApiError(400, message, code="invalid_json")
    if names[0] in NOT_OFFERED and kind in ("extra_forbidden", "literal_error"):
        return ApiError(400, f"{param} is not offered: {NOT_OFFERED[names[0]]}", param=param, code="not_offered")
    if is_unknown:
        return ApiError(400, f"{param}: there is no such field here", param=param, code="unknown_field")
    return ApiError(400, f"{param}: {error['msg']}", param=param, code=kind)


def _depth(error: Any) -> tuple[int, ...]:
    """How far into a body a complaint came; behind all items where it is of their number."""
    names = _names(error)
    return error["type"] == "too_long", len(names), *(int(name) for name in names if name.isdecimal())


def _names(error: Any) -> list[str]:
    """Where in a body. Of a union pydantic names the member that failed, too: those are not parts of the body. The last
    part of an unknown field is its name, whatever that is."""
    parts = [str(part) for part in error["loc"]]
    last = parts[-1:] if error["type"] == "extra_forbidden" else []
    outer = [part for part in parts[: len(parts) - len(last)] if part != "body" and not _is_kind(part)]
    return [shortened(part) for part in outer + last]


def _is_kind(part: str) -> bool:
    is_class = part[:1].isupper() and part.isalpha()
    return is_class or "[" in part or part.startswith("constrained-") or part in ("str", "int", "float", "bool", "none")
