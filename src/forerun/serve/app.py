"""The server's routes: OpenAI's, those that vLLM's users know, and what machines ask."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.engine import Request as EngineRequest
from forerun.serve.call import Call
from forerun.serve.call_formats import Tools
from forerun.serve.errors import ApiError, from_validation
from forerun.serve.foreign_pages import ForeignPageMiddleware
from forerun.serve.formats import ChatFormat, CompletionFormat
from forerun.serve.grammar import wants_grammar
from forerun.serve.large_body import InvalidBody, LargeBodyRoute, list_of_numbers
from forerun.serve.model import Card, ServedModel
from forerun.serve.schemas import ChatBody, CompletionBody, DetokenizeBody, Generation, TokenizeBody
from forerun.serve.service import Service
from forerun.serve.settings import AddressSettings
from forerun.serve.speech import SpeechService
from forerun.serve.speech_routes import add_speech
from forerun.serve.text import Asked, TextService
from forerun.serve.translate import (
    chat_prompt,
    chat_requests,
    chat_tools,
    completion_prompts,
    completion_requests,
    num_sequences,
)
from forerun.version import __version__

T = TypeVar("T")
log = logging.getLogger("forerun.serve")
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version", "/metrics"})
"""What needs no key: nothing here reads or writes text."""
PAGE = Path(__file__).with_name("page.html")
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src data:; "
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'; frame-ancestors 'none'"
}
"""The page talks to its own server and to nobody else."""
BODY_SECONDS = 30.0  # between two parts of a body
SMALL_BODY = 4096  # bytes: some thousand tokens, which are encoded within a millisecond
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_app(service: Service, address: AddressSettings) -> FastAPI:
    """The application; ending it ends the service."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.open()
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(title="Forerun", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.router.route_class = LargeBodyRoute
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _failed)
    settings = service.settings
    app.add_middleware(BodyLimitMiddleware, most=settings.max_body_bytes, seconds=settings.timeout)
    if address.api_key:
        app.add_middleware(ApiKeyMiddleware, key=address.api_key)
    elif not address.allow_anyone:
        app.add_middleware(ForeignPageMiddleware, allowed=address.cors_origin)
    if address.cors_origin:
        app.add_middleware(CORSMiddleware, allow_origins=address.cors_origin, allow_methods=["*"], allow_headers=["*"])
    if isinstance(service, SpeechService):
        add_speech(app, service)
    if isinstance(service, TextService):
        _add_generation(app, service)
        _add_tokens(app, service.model)
        _add_page(app)
    _add_models(app, service.card)
    _add_status(app, service)
    return app


def _add_generation(app: FastAPI, service: TextService) -> None:
    model, card = service.model, service.card

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatBody, http: Request) -> Response:
        """Answer a conversation."""
        card.check_name(body.model)
        service.admission.check_number(body.n or 1)

        def prepare() -> tuple[Tools | None, list[int], list[EngineRequest]]:
            tools = chat_tools(body, model)
            prompt = chat_prompt(body.messages, body.tools if tools else None, model)
            return tools, prompt, chat_requests(body, prompt, tools, model)

        tools, prompt, requests = await _prepared(prepare, body, http)
        written = ChatFormat(model, logprobs=bool(body.logprobs), origins=_wants_origins(body), tools=tools)
        n, asked = body.n or 1, Asked(written.by_token)
        return await Call(requests, written, len(prompt), asked, best_of=n, n=n).answer(service, http, body)

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, http: Request) -> Response:
        """Continue one prompt, or several."""
        card.check_name(body.model)
        service.admission.check_number(num_sequences(body))

        def prepare() -> tuple[list[list[int]], list[EngineRequest]]:
            prompts = completion_prompts(body, model)
            return prompts, completion_requests(body, prompts, model)

        prompts, requests = await _prepared(prepare, body, http)
        written = CompletionFormat(model, logprobs=body.logprobs is not None, origins=_wants_origins(body))
        n, number = body.n or 1, sum(map(len, prompts))
        asked = Asked(
            written.by_token,
            continues=True,
            echo=bool(body.echo),
            alternatives=body.logprobs,
            only_echo=body.max_tokens == 0,
        )
        return await Call(requests, written, number, asked, best_of=body.best_of or n, n=n).answer(service, http, body)


def _add_tokens(app: FastAPI, model: ServedModel) -> None:
    card = model.card

    def tokenized(body: TokenizeBody) -> str:
        if body.messages is not None:
            tokens = chat_prompt(body.messages, body.tools, model)
        else:
            tokens = model.encode(body.prompt or "", body.add_special_tokens is not False)
        rest = json.dumps({"count": len(tokens), "max_model_len": model.context_length})
        return f'{{"tokens": {list_of_numbers(tokens)}, {rest[1:]}'

    def detokenized(body: DetokenizeBody) -> str:
        model.check_tokens("tokens", body.tokens)
        return json.dumps({"prompt": model.decode(body.tokens, False)}, ensure_ascii=False)

    @app.post("/tokenize", response_model=dict[str, Any])
    async def tokenize(body: TokenizeBody) -> Response:
        """Token ids of a text, or of a chat as the model reads it."""
        card.check_name(body.model)
        return Response(await asyncio.to_thread(tokenized, body), media_type="application/json")

    @app.post("/detokenize", response_model=dict[str, Any])
    async def detokenize(body: DetokenizeBody) -> Response:
        """The text of token ids, special ones included."""
        card.check_name(body.model)
        return Response(await asyncio.to_thread(detokenized, body), media_type="application/json")


def _add_page(app: FastAPI) -> None:
    @app.get("/", response_class=HTMLResponse)
    async def page() -> Response:
        """A page to try it."""
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=PAGE_HEADERS)

    @app.post("/v1/audio/transcriptions", response_model=None)
    @app.post("/v1/audio/translations", response_model=None)
    async def audio() -> Response:
        """Of a server whose model is a Whisper."""
        raise ApiError(400, "this model reads text: recordings need a server of a Whisper", code="not_offered")


def _add_models(app: FastAPI, card: Card) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model there is."""
        return {"object": "list", "data": [card.as_dict()]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        """The same by its name."""
        card.check_name(name)
        return card.as_dict()


def _add_status(app: FastAPI, service: Service) -> None:
    @app.head("/health", include_in_schema=False)  # load balancers that ask for no more than the status
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the engine lives."""
        if not await service.look():
            raise ApiError(503, "the engine has ended: restart the server", code="engine_dead")
        return {"status": "ok"}

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """Whether new requests are taken."""
        service.check_is_open()
        return await health()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """For Prometheus, under vLLM's names."""
        await service.look()
        return Response(service.metrics.text(), media_type=METRICS_TYPE)


class ApiKeyMiddleware:
    """Refuses calls without the key, before anything of them is read."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._has_key(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        error = ApiError(401, "this server needs an API key: Authorization: Bearer KEY", code="invalid_api_key")
        headers = {"WWW-Authenticate": "Bearer"}
        await JSONResponse(error.body, error.status, headers=headers)(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), self._key)


class BodyLimitMiddleware:
    """Refuses bodies that are too large, by their announced size, else as soon as too much has come; those of which
    nothing more comes; and those that take longer than requests may."""

    def __init__(self, app: ASGIApp, most: int, seconds: float) -> None:
        self.app, self.most, self.seconds = RequestBodyLimitMiddleware(app, max_body_size=most), most, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = Headers(scope=scope).get("content-length", "0") if scope["type"] == "http" else "0"
        if not size.isdigit() or int(size) <= self.most:
            await self.app(scope, _patient(receive, self.seconds), send)
            return
        error = ApiError(413, f"the body is larger than {self.most} bytes", code="body_too_large")
        await JSONResponse(error.body, error.status)(scope, receive, send)


def _patient(receive: Receive, seconds: float) -> Receive:
    """The same, but a client that stops in the middle of a body, or takes `seconds` for it, is answered with 408."""
    is_whole, end = False, time.monotonic() + seconds

    async def receive_in_time() -> Message:
        nonlocal is_whole
        try:
            async with asyncio.timeout(None if is_whole else min(BODY_SECONDS, end - time.monotonic())):
                message = await receive()
        except TimeoutError as error:
            raise HTTPException(408, "the rest of the body has not come") from error
        is_whole = is_whole or not message.get("more_body", False)
        return message

    return receive_in_time


async def _prepared(prepare: Callable[[], T], body: Generation, http: Request) -> T:
    """Beside the loop where it may take long: what is small and has no grammar is done sooner than a thread wakes."""
    size = http.headers.get("content-length", "")
    if size.isdigit() and int(size) <= SMALL_BODY and not wants_grammar(body):
        return prepare()
    return await asyncio.to_thread(prepare)


def _wants_origins(body: Generation) -> bool:
    return body.speculation is not None and bool(body.speculation.origins)


async def _refused(http: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, headers=error.headers)


async def _invalid(http: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return await _refused(http, from_validation(error.errors()))


async def _http_error(http: Request, error: Exception) -> Response:
    """Of the framework's own: no such path or method, a body that is too large or cannot be read."""
    assert isinstance(error, HTTPException)
    answer = error.answer if isinstance(error, InvalidBody) else ApiError(error.status_code, str(error.detail))
    return JSONResponse(answer.body, answer.status, headers=error.headers)


async def _failed(http: Request, error: Exception) -> Response:
    """A fault of ours; the log has the trace."""
    return await _refused(http, ApiError(500, "the server failed on this request", code="internal_error"))
