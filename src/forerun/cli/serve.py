"""`forerun serve`: OpenAI's HTTP interface over one model, with speculation for every request."""

from __future__ import annotations

import errno
import importlib.util
import socket
import ssl
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from forerun.cli.options import (
    GroupedCommand,
    number,
    options_from,
    parallel_options,
    place_options,
    quantize_options,
    settings_from,
    speculation_options,
)
from forerun.cli.replicas import serve_replicas
from forerun.cli.service import is_whisper, load_model, make_speech_service
from forerun.config import api_key
from forerun.errors import InvalidArgument
from forerun.serve.settings import AddressSettings, ReplicaSettings, ServiceSettings

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.decoder import SpeculativeDecoder

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "llguidance", "python_multipart")
FILE = click.Path(exists=True, dir_okay=False)


@click.command(cls=GroupedCommand)
@click.argument("model", default="embedded")
@options_from(
    AddressSettings, "Address",
    host={"metavar": "HOST"},
    api_key={"metavar": "KEY", "show_default": "$FORERUN_API_KEY, else none"},
    cors_origin={"type": str, "multiple": True, "metavar": "ORIGIN", "show_default": "none"},
    ssl_keyfile={"metavar": "FILE", "type": FILE},
    ssl_certfile={"metavar": "FILE", "type": FILE},
    log_level={"type": click.Choice(("critical", "error", "warning", "info", "debug")), "metavar": "LEVEL"},
)  # fmt: skip
@options_from(
    ServiceSettings, "Limits",
    served_model_name={"metavar": "NAME", "show_default": "MODEL, without its folders"},
    max_rows={"show_default": "128 on a GPU, 16 on a CPU"},
    timeout={"metavar": "SECONDS"},
    drain_seconds={"metavar": "SECONDS"},
)  # fmt: skip
@options_from(
    ReplicaSettings, "Replicas",
    replicas={"show_default": "one, without Ray"},
    max_replicas={"metavar": "M"},
    round_seconds={"metavar": "SECONDS", "show_default": "60, at most --timeout; that for a Whisper"},
)  # fmt: skip
@place_options("Model", keeps_stored=True)
@quantize_options("Model")
@parallel_options("Model")
@speculation_options()
@number(
    "Model", "--keep-rows", least=0, default=0,
    help="Keep the keys of so many finished sequences, so that the next turn of a chat starts there.",
)  # fmt: skip
def serve(**options: Any) -> None:
    """Serve MODEL to OpenAI's clients: chat, completions, streams. Without MODEL, the embedded one.

    MODEL is a Hub name, a folder or a .gguf file; a Whisper is served for transcriptions. Every request may bound its
    drafts or switch them off, and is told what they did. SIGTERM or Ctrl-C lets requests under way end; once more ends
    at once.
    """
    _check_installed()
    if options["api_key"] == "":
        raise InvalidArgument("--api-key is empty, which guards nothing: give a key, or leave it out")
    options["api_key"] = options["api_key"] or api_key()
    address, limits = settings_from(AddressSettings, options), settings_from(ServiceSettings, options)
    replicas = settings_from(ReplicaSettings, options)
    if replicas.round_seconds is not None and replicas.replicas is None:
        raise InvalidArgument(
            "--round-seconds: nobody replaces a server that is alone; say --replicas N, or leave it out"
        )
    from forerun.cli.console import err_console, plain_warnings

    console = err_console()
    with plain_warnings(console):
        console.print(f"loading {options['model']} ...", style="dim", markup=False, highlight=False)
        check_address(address)
        if replicas.replicas is not None:
            serve_replicas(options, address, limits, replicas, console)
            return
        if not (_serve_speech if is_whisper(options) else _serve_text)(options, address, limits, console):
            raise InvalidArgument(f"--port {address.port}: cannot listen at {address.host}; choose another, or 0")


def check_address(address: AddressSettings) -> None:
    """Refuse where the server could not listen, or not by https: a large model takes minutes to load before it does."""
    if (error := _why_not_there(address.host, address.port)) is not None:
        raise InvalidArgument(
            f"--host {address.host} --port {address.port}: cannot listen there ({error.strerror or error}); "
            "choose another address, or --port 0 for any that is free"
        ) from error
    if address.ssl_certfile is not None:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(address.ssl_certfile, address.ssl_keyfile, password="")
        except (OSError, ValueError) as error:
            raise InvalidArgument(
                f"--ssl-certfile {address.ssl_certfile!r}, --ssl-keyfile {address.ssl_keyfile!r}: no certificate and "
                f"its key in PEM form, without a passphrase ({error})"
            ) from error


def _why_not_there(host: str, port: int) -> OSError | None:
    """What keeps a server from listening; None where it can, by all addresses of the name that this machine has."""
    failed, is_there = None, False
    try:
        places = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return error
    for family, kind, _, _, where in places:  # of localhost the second may be one that this machine has
        try:
            with socket.socket(family, kind) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:  # as asyncio does
                    trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                trial.bind(where)
            is_there = True
        except OSError as error:
            if error.errno == errno.EADDRINUSE:  # asyncio wants all of them
                return error
            failed = failed or error
    return None if is_there else failed


def _serve_text(options: dict[str, Any], address: AddressSettings, limits: ServiceSettings, console: Console) -> bool:
    """With HTTP in a process of its own, which the interpreter that decodes need not wait for."""
    from forerun.serve.apart.process import FrontProcess
    from forerun.serve.apart.run import serve_apart

    with FrontProcess() as front:
        decoder, model = load_model(options, limits, console)
        rows = limits.rows(model.device)
        say_ready = partial(_say_ready, decoder, model.name, model.drafter_name, rows, console)
        return serve_apart(front, decoder, model, limits, address, say_ready)


def _serve_speech(options: dict[str, Any], address: AddressSettings, limits: ServiceSettings, console: Console) -> bool:
    from forerun.serve.run import serve as serve_until_ended

    service = make_speech_service(options, limits, console)
    rows = service.admission.max_rows
    say_ready = partial(_say_ready, service.decoder, service.card.name, service.card.drafter_name, rows, console)
    return serve_until_ended(service, address, say_ready)


def _check_installed() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidArgument(f"serving needs {', '.join(missing)}: pip install 'forerun[serve]'")


def _say_ready(
    decoder: SpeculativeDecoder, name: str, drafter_name: str, rows: int, console: Console, url: str
) -> None:
    from forerun.cli.console import say

    drafter = "no drafter" if decoder.drafter is None else f"drafter {drafter_name}"
    target = decoder.target
    say(
        console,
        f"Serving {name} at {url}: {target.device.type}, {str(target.dtype).removeprefix('torch.')}, "
        f"{drafter}, rule {decoder.engine.rule}, {rows} sequences at a time; "
        f"keys: {decoder.cache}; recorded: {decoder.recorded}",
    )
