"""A server in this process: a small random model, a byte tokenizer, HTTP over a real socket."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import httpx
import uvicorn

from forerun import PromptLookup, SpeculativeDecoder
from forerun.serve.apart.host import EngineHost
from forerun.serve.apart.remote import RemoteBackend
from forerun.serve.apart.wire import StartMessage, receive
from forerun.serve.app import create_app
from forerun.serve.backend import LocalBackend
from forerun.serve.direct import DirectMiddleware
from forerun.serve.model import ServedModel
from forerun.serve.patience import PatientProtocol
from forerun.serve.service import Service
from forerun.serve.settings import AddressSettings, ServiceSettings
from forerun.serve.speech import SpeechService
from forerun.serve.text import TextService
from support.folders import VOCAB, byte_tokenizer
from support.tiny import tiny_model

NAME = "tiny"
KEY = "sesame"


def make_decoder(**settings: Any) -> SpeculativeDecoder:
    """The rule under which a seed gives one text, whoever decodes beside it."""
    model = tiny_model("llama", vocab=VOCAB, eos_token_id=0, max_position_embeddings=2048)
    settings = {"rule": "coupled", "policy": 3, **settings}
    return SpeculativeDecoder(model, PromptLookup(), tokenizer=byte_tokenizer(), **settings)


class Server:
    """Somebody to call."""

    def __init__(self, service: Service, decoder: SpeculativeDecoder | None, url: str, key: str | None) -> None:
        self.service, self.decoder, self.url = service, decoder, url
        headers = {} if key is None else {"Authorization": f"Bearer {key.strip()}"}
        self.client = httpx.Client(base_url=url, headers=headers, timeout=60, verify=False)  # no certificate is read

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def chat(self, text: str, **body: Any) -> Any:
        answer = self.post("/v1/chat/completions", messages=[{"role": "user", "content": text}], **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def complete(self, prompt: Any, **body: Any) -> Any:
        answer = self.post("/v1/completions", prompt=prompt, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def is_idle(self, seconds: float = 20.0) -> bool:
        """Whether nobody decodes or waits, within so many seconds."""
        admission, end = self.service.admission, time.monotonic() + seconds
        assert self.decoder is not None
        while time.monotonic() < end:
            if not admission.num_running and not admission.num_waiting and self.decoder.engine.is_idle:
                return True
            time.sleep(0.01)
        return False


def connected(server: Server, received: int | None = None) -> socket.socket:
    """A connection, which holds so many bytes that were not read."""
    host, port = server.url.removeprefix("http://").split(":")
    one = socket.socket()
    if received is not None:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received)
    one.settimeout(30)
    one.connect((host, int(port)))
    return one


@contextmanager
def running(
    decoder: SpeculativeDecoder | None = None,
    key: str | None = None,
    tokenizer: Any = None,
    apart: bool = True,
    direct: bool = True,
    address: AddressSettings | None = None,
    **settings: Any,
) -> Iterator[Server]:
    """A server of text at a port of its own, until the block ends.

    Between the service and its engine is the socket that lies between two processes of `forerun serve`, unless they are
    not to be `apart`. Streams are written `direct` to connections, unless something is between, as in replicas.
    """
    decoder = decoder or make_decoder()
    limits = ServiceSettings(**{"timeout": 60.0, **settings})
    model = ServedModel.of(decoder, tokenizer or byte_tokenizer(), NAME, created=0, drafter_name="lookup")
    backend = LocalBackend(decoder)
    with (
        hosted(StartMessage(model, limits, AddressSettings(), backend.is_split), backend)
        if apart
        else nullcontext(TextService(model, backend, limits)) as service,
        listening(service, key, decoder, direct, address) as server,
    ):
        yield server


@contextmanager
def hosted(start: StartMessage, backend: LocalBackend) -> Iterator[TextService]:
    """A service as another process makes it, of what it is told over a socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        host = EngineHost(backend, start.model, ours)
        thread = threading.Thread(target=host.run, args=(start, print))
        thread.start()
        try:
            (told,) = receive(theirs).messages
            yield TextService(told.model, RemoteBackend(theirs, told.is_split), told.settings)
        finally:
            with suppress(OSError):
                ours.shutdown(socket.SHUT_RD)  # where the other side was never opened
            thread.join(60)
        assert not thread.is_alive() and not host.outlets and not backend.state.is_alive


@contextmanager
def listening(
    service: Service,
    key: str | None = None,
    decoder: SpeculativeDecoder | None = None,
    direct: bool = True,
    address: AddressSettings | None = None,
) -> Iterator[Server]:
    """The same of any service."""
    decoder = service.decoder if isinstance(service, SpeechService) else decoder
    app: Any = create_app(service, address or AddressSettings(api_key=key))
    app = DirectMiddleware(app) if direct else app
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(app, log_level="error", access_log=False, http=PatientProtocol)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        called = Server(service, decoder, f"http://127.0.0.1:{listening.getsockname()[1]}", key)
        try:
            yield called
        finally:
            called.client.close()
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive() and not service.is_alive
