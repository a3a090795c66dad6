"""`forerun serve`: OpenAI's HTTP interface over one model, with speculation for every request."""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING, Any

import click

from forerun.cli.options import (
    GroupedCommand,
    number,
    options_from,
    parallel_options,
    place_options,
    settings_from,
    speculation_options,
)
from forerun.config import api_key
from forerun.errors import InvalidArgument
from forerun.serve.settings import AddressSettings, ServiceSettings

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.serve.service import Service

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "llguidance")
WARM_UP = ((1, 2, 3, 4),)


@click.command(cls=GroupedCommand)
@click.argument("model", default="embedded")
@options_from(
    AddressSettings, "Address",
    host={"metavar": "HOST"},
    api_key={"metavar": "KEY", "show_default": "$FORERUN_API_KEY, else none"},
    cors_origin={"type": str, "multiple": True, "metavar": "ORIGIN", "show_default": "none"},
    ssl_keyfile={"metavar": "FILE"},
    ssl_certfile={"metavar": "FILE"},
    log_level={"type": click.Choice(("critical", "error", "warning", "info", "debug")), "metavar": "LEVEL"},
)  # fmt: skip
@options_from(
    ServiceSettings, "Limits",
    served_model_name={"metavar": "NAME", "show_default": "MODEL, without its folders"},
    max_rows={"show_default": "128 on a GPU, 16 on a CPU"},
    timeout={"metavar": "SECONDS"},
    drain_seconds={"metavar": "SECONDS"},
)  # fmt: skip
@place_options("Model")
@parallel_options("Model")
@speculation_options()
@number(
    "Model", "--keep-rows", least=0, default=0,
    help="Keep the keys of so many finished sequences, so that the next turn of a chat starts there.",
)  # fmt: skip
def serve(**options: Any) -> None:
    """Serve MODEL to OpenAI's clients: chat, completions, streams. Without MODEL, the embedded one.

    MODEL is a Hub name, a folder or a .gguf file. Every request may bound its drafts or switch them off, and is told
    what they did. SIGTERM or Ctrl-C lets requests under way end; once more ends at once.
    """
    _check_installed()
    options["api_key"] = options["api_key"] or api_key()
    address, limits = settings_from(AddressSettings, options), settings_from(ServiceSettings, options)
    from forerun.cli.console import err_console, plain_warnings
    from forerun.serve.run import serve as serve_until_ended

    console = err_console()
    with plain_warnings(console):
        service = _make_service(options, limits, console)
        if not serve_until_ended(service, address, lambda url: _say_ready(service, url, console)):
            raise InvalidArgument(f"--port {address.port}: cannot listen at {address.host}; choose another, or 0")
        service.check_ranks()


def _check_installed() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidArgument(f"serving needs {', '.join(missing)}: pip install 'forerun[serve]'")


def _make_service(options: dict[str, Any], limits: ServiceSettings, console: Console) -> Service:
    """Load the model and compile what rounds use: the first request should not wait for it."""
    from forerun.cli.console import busy
    from forerun.cli.pair import load
    from forerun.cli.run import ready_decoder
    from forerun.serve.model import ServedModel
    from forerun.serve.service import Service, default_rows

    console.print(f"loading {options['model']} ...", style="dim", markup=False, highlight=False)
    loaded = load(options, console)
    decoder = ready_decoder(loaded, console, WARM_UP, {}, keep_rows=options["keep_rows"])
    rows = limits.max_rows or default_rows(decoder.target.device.type)
    with busy(console, "compiling and recording rounds"):
        decoder.engine.warm_up(rows)
    name = limits.served_model_name or options["model"].rstrip("/").rsplit("/", 1)[-1]
    model = ServedModel(decoder, loaded.tokenizer, name, int(time.time()), options["draft"])
    return Service(model, limits)


def _say_ready(service: Service, url: str, console: Console) -> None:
    from forerun.cli.console import say

    decoder, rows = service.model.decoder, service.admission.max_rows
    drafter = "no drafter" if decoder.drafter is None else f"drafter {service.model.drafter_name}"
    target = decoder.target
    say(
        console,
        f"Serving {service.model.name} at {url}: {target.device.type}, {str(target.dtype).removeprefix('torch.')}, "
        f"{drafter}, rule {decoder.engine.rule}, {rows} sequences at a time; "
        f"keys: {decoder.cache}; recorded: {decoder.recorded}",
    )
