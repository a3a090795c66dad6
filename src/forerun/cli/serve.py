"""`forerun serve`: OpenAI's HTTP interface over one model, with speculation for every request."""

from __future__ import annotations

import importlib.util
import time
from dataclasses import replace
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
from forerun.config import api_key
from forerun.errors import InvalidArgument
from forerun.serve.settings import AddressSettings, ReplicaSettings, ServiceSettings

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.serve.service import Service
    from forerun.serve.speech import SpeechService

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "llguidance", "python_multipart")
WARM_UP = ((1, 2, 3, 4),)
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
@options_from(ReplicaSettings, "Replicas", replicas={"show_default": "one process"}, max_replicas={"metavar": "M"})
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
    options["api_key"] = options["api_key"] or api_key()
    address, limits = settings_from(AddressSettings, options), settings_from(ServiceSettings, options)
    replicas = settings_from(ReplicaSettings, options)
    from forerun.cli.console import err_console, plain_warnings
    from forerun.serve.run import serve as serve_until_ended

    console = err_console()
    with plain_warnings(console):
        console.print(f"loading {options['model']} ...", style="dim", markup=False, highlight=False)
        if replicas.replicas is not None:
            from forerun.cli.replicas import serve_replicas

            serve_replicas(options, address, limits, replicas, console)
            return
        service = make_service(options, limits, console)
        if not serve_until_ended(service, address, lambda url: _say_ready(service, url, console)):
            raise InvalidArgument(f"--port {address.port}: cannot listen at {address.host}; choose another, or 0")
        service.check_ranks()


def _check_installed() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidArgument(f"serving needs {', '.join(missing)}: pip install 'forerun[serve]'")


def _is_whisper(options: dict[str, Any]) -> bool:
    from forerun.loading.load import model_type

    return model_type(options["model"], offline=options["offline"]) == "whisper"


def make_service(
    options: dict[str, Any], limits: ServiceSettings, console: Console, engine: str = "0"
) -> Service | SpeechService:
    """The service that the options ask for; its metrics bear the label `engine`."""
    make = _make_speech_service if _is_whisper(options) else _make_service
    return make(options, limits, console, engine)


def _make_service(options: dict[str, Any], limits: ServiceSettings, console: Console, engine: str) -> Service:
    """Load the model and compile what rounds use: the first request should not wait for it."""
    from forerun.cli.console import busy
    from forerun.cli.pair import load
    from forerun.cli.run import ready_decoder
    from forerun.drafters import with_predictions
    from forerun.serve.model import ServedModel
    from forerun.serve.service import Service

    loaded = load(options, console)
    if loaded.drafter is not None:
        on_gpu = loaded.model.device.type == "cuda"
        loaded = replace(loaded, drafter=with_predictions(loaded.drafter, on_gpu))
    decoder = ready_decoder(loaded, console, WARM_UP, {}, keep_rows=options["keep_rows"])
    with busy(console, "compiling and recording rounds"):
        decoder.engine.warm_up(limits.rows(decoder.target.device.type))
    model = ServedModel(decoder, loaded.tokenizer, served_name(options, limits), int(time.time()), options["draft"])
    return Service(model, limits, engine)


def _make_speech_service(
    options: dict[str, Any], limits: ServiceSettings, console: Console, engine: str
) -> SpeechService:
    """Load a Whisper, and compile what its decoder uses."""
    from forerun.cli.pair import is_split
    from forerun.cli.run import told_of_compiling
    from forerun.cli.transcribe import load_pair
    from forerun.serve.speech import SpeechService

    if is_split(options["tensor_parallel"]):
        raise InvalidArgument("--tensor-parallel: a Whisper is served by one process; leave it out")
    for name in ("quantize", "draft_quantize"):
        if options[name] is not None:
            option = f"--{name.replace('_', '-')} {options[name]}"
            raise InvalidArgument(f"{option}: a Whisper is served as it is stored; leave it out")
    loaded, processor = load_pair(options, console)
    with told_of_compiling(console):
        decoder = loaded.decoder(options["keep_rows"])
    return SpeechService(
        decoder, processor, served_name(options, limits), int(time.time()), options["draft"], limits, engine
    )


def served_name(options: dict[str, Any], limits: ServiceSettings) -> str:
    name: str = options["model"]
    return limits.served_model_name or name.rstrip("/").rsplit("/", 1)[-1]


def _say_ready(service: Service | SpeechService, url: str, console: Console) -> None:
    from forerun.cli.console import say

    decoder, rows = service.decoder, service.admission.max_rows
    drafter = "no drafter" if decoder.drafter is None else f"drafter {service.drafter_name}"
    target = decoder.target
    say(
        console,
        f"Serving {service.name} at {url}: {target.device.type}, {str(target.dtype).removeprefix('torch.')}, "
        f"{drafter}, rule {decoder.engine.rule}, {rows} sequences at a time; "
        f"keys: {decoder.cache}; recorded: {decoder.recorded}",
    )
