"""Listening until a signal ends it: the first lets requests under way end, the second does not."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from types import FrameType

import uvicorn

from forerun.files import allow_many_open_files
from forerun.serve.app import create_app
from forerun.serve.backend import SWITCH_SECONDS
from forerun.serve.direct import DirectMiddleware
from forerun.serve.patience import PatientProtocol
from forerun.serve.service import Service
from forerun.serve.settings import AddressSettings


class DrainingServer(uvicorn.Server):
    """uvicorn's server, with a service that stops taking requests at the first signal and ends at the second."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        on_ready: Callable[[str], None],
        takes_signals: bool = True,
    ) -> None:
        super().__init__(config)
        self.service, self._on_ready, self._takes_signals = service, on_ready, takes_signals

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        if not self._takes_signals:
            yield
            return
        with super().capture_signals():
            yield

    async def startup(self, sockets: object = None) -> None:
        await super().startup(sockets)  # type: ignore[arg-type]
        if not self.should_exit:
            self._on_ready(self.url)

    async def shutdown(self, sockets: object = None) -> None:
        await super().shutdown(sockets)  # type: ignore[arg-type]
        if self.force_exit:  # the application would be cancelled where it waits for its end, and complain of it
            self.service.close(drain=False)
            await self.lifespan.shutdown()

    @property
    def url(self) -> str:
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        scheme = "https" if self.config.is_ssl else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def end(self, at_once: bool = False) -> None:
        """New requests are not taken; those under way are answered, unless it is to end `at_once`."""
        self.service.is_draining = True
        self.force_exit = self.force_exit or at_once
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.end(at_once=self.should_exit)


def make_server(
    service: Service,
    address: AddressSettings,
    on_ready: Callable[[str], None],
    takes_signals: bool = True,
) -> DrainingServer:
    """What listens once it is run; `on_ready` is given the address."""
    config = uvicorn.Config(
        DirectMiddleware(create_app(service, address)),
        host=address.host,
        port=address.port,
        log_level=address.log_level,
        ssl_keyfile=address.ssl_keyfile,
        ssl_certfile=address.ssl_certfile,
        timeout_graceful_shutdown=max(1, round(service.settings.drain_seconds)),
        server_header=False,
        http=PatientProtocol,  # of h11, which bounds headers; faster parsers may be installed that do not
        ws="none",
    )
    if address.log_level == "info":  # which server process started where is `on_ready`'s to say
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    allow_many_open_files()
    sys.setswitchinterval(SWITCH_SECONDS)
    return DrainingServer(config, service, on_ready, takes_signals)


def serve(service: Service, address: AddressSettings, on_ready: Callable[[str], None]) -> bool:
    """Serve until a signal comes; `on_ready` is given the address. False where the address could not be had."""
    server = make_server(service, address, on_ready)
    try:
        with suppress(SystemExit):  # of an address that is taken; uvicorn has logged it
            server.run()
    finally:
        service.close(drain=False)
    return server.started
