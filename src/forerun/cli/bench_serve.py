"""`forerun bench serve`: latencies, throughput and acceptance of a server under load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forerun.bench.settings import ServeSettings
from forerun.cli.bench import output_options, questions_option
from forerun.cli.options import GroupedCommand, option, options_from, settings_from
from forerun.client import is_address
from forerun.config import api_key as key_of_environment
from forerun.errors import InvalidArgument

if TYPE_CHECKING:
    from forerun.measure.progress import Reporter
    from forerun.measure.record import Record

ASKED = (
    "endpoint", "prompt_length", "shortest_prompt", "max_new_tokens", "shortest_answer", "ignore_eos", "temperature",
    "speculation", "seed",
)  # fmt: skip
LOAD = ("concurrency", "ramp", "rates", "requests", "seconds", "goodput")


@click.command(cls=GroupedCommand)
@click.argument("target", nargs=-1, metavar="[URL | -- SERVE ARGUMENTS]")
@options_from(
    ServeSettings, "Load", *LOAD,
    concurrency={"show_default": "1,8 unless --rates is given"},
    ramp={"metavar": "SECONDS", "show_default": "all at once"},
    rates={"show_default": "none"},
    seconds={"metavar": "SECONDS"},
    goodput={"metavar": "NAME:MS,...", "show_default": "not counted"},
)  # fmt: skip
@options_from(
    ServeSettings, "What is asked", *ASKED,
    prompt_length={"show_default": "texts"},
    shortest_prompt={"show_default": "all of one length"},
    shortest_answer={"show_default": "all of one length"},
    temperature={"flags": ("--temperature", "-t")},
    speculation={"metavar": "MODE,...", "show_default": "the server decides"},
)  # fmt: skip
@questions_option("What is asked")
@option("Server", "--model", "-m", metavar="NAME", show_default="the first it lists", help="As the server calls it.")
@option(
    "Server", "--api-key", metavar="KEY", show_default="$FORERUN_API_KEY, else none",
    help="Sent as `Authorization: Bearer KEY`.",
)  # fmt: skip
@output_options("Draw latencies and throughput by load, too.")
def serve(
    target: tuple[str, ...],
    output: Path | None,
    picture: Path | None,
    model: str | None,
    api_key: str | None,
    data: Path | None,
    **options: Any,
) -> None:
    """Measure any server that speaks OpenAI's HTTP interface, as its clients see it.

    URL is its address, such as http://127.0.0.1:8000. Without one, `forerun serve` is started in a process of its own
    with what follows `--`, for example `forerun bench serve -- MODEL --max-rows 8`; without that, with the embedded
    model. Ctrl-C keeps what was measured.
    """
    from forerun.bench.serve.run import run
    from forerun.measure.show import measure

    if len(target) > 1 and is_address(target[0]):
        raise InvalidArgument(f"{' '.join(target[1:])!r} follows the address: options come before it, and nothing else")
    settings = settings_from(ServeSettings, options)
    key = api_key or key_of_environment()

    def run_it(path: Path, reporter: Reporter) -> Record:
        return run(settings, target, path, reporter, model=model, api_key=key, data=data)

    status = measure("serve", output, picture, run_it)
    click.get_current_context().exit(status)
