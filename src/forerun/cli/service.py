"""What `forerun serve` serves: a model, its drafter and all that rounds use, loaded and compiled as the options say."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from forerun.errors import InvalidArgument
from forerun.serve.settings import ServiceSettings

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.decoder import SpeculativeDecoder
    from forerun.engine import Engine
    from forerun.serve.model import ServedModel
    from forerun.serve.speech import SpeechService

WARM_UP = ((1, 2, 3, 4),)
QUARTERS = 4


def load_model(
    options: dict[str, Any], limits: ServiceSettings, console: Console
) -> tuple[SpeculativeDecoder, ServedModel]:
    """Load the model and compile what rounds use: the first request should not wait for it."""
    from forerun.cli.pair import load
    from forerun.cli.run import ready_decoder
    from forerun.drafters import with_predictions
    from forerun.serve.model import ServedModel

    loaded = load(options, console)
    if loaded.drafter is not None:
        on_gpu = loaded.model.device.type == "cuda"
        loaded = replace(loaded, drafter=with_predictions(loaded.drafter, on_gpu))
    decoder = ready_decoder(loaded, console, WARM_UP, {}, keep_rows=options["keep_rows"])
    warm_up(decoder.engine, limits.rows(decoder.target.device.type), console)
    name = served_name(options, limits)
    return decoder, ServedModel.of(decoder, loaded.tokenizer, name, int(time.time()), options["draft"])


def warm_up(engine: Engine, rows: int, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
    """Compile and record all that rounds use: a bar on a terminal, elsewhere a line at every quarter."""
    from forerun.measure.progress import Bar

    started = clock()
    with Bar(console) as bar:
        bar.start("compiling")

        def report(done: int, total: int) -> None:
            if done == 1:
                bar.start("recording", total=total)
            bar.advance()
            spent = f"{clock() - started:.0f} s"
            bar.start(f"recording rounds: {done} of {total}, {spent}" if done < total else f"reading prompts, {spent}")
            if not console.is_terminal and QUARTERS * done // total > QUARTERS * (done - 1) // total:
                bar.say(f"recorded {done} of {total} rounds in {spent}")

        warmed = engine.warm_up(rows, report=report)
        if warmed.num_rounds:
            compiled = f", {warmed.num_compiled} kernels compiled" if warmed.num_compiled else ""
            bar.say(f"ready after {warmed.seconds:.0f} s: {warmed.num_rounds} rounds recorded{compiled}")


def make_speech_service(
    options: dict[str, Any], limits: ServiceSettings, console: Console, engine: str = "0"
) -> SpeechService:
    """Load a Whisper, and compile what its decoder uses."""
    from forerun.cli.run import told_of_compiling
    from forerun.cli.transcribe import load_pair
    from forerun.serve.model import Card
    from forerun.serve.speech import SpeechService

    check_whisper(options)
    loaded, processor = load_pair(options, console)
    with told_of_compiling(console):
        decoder = loaded.decoder(options["keep_rows"])
    card = Card(served_name(options, limits), int(time.time()), options["draft"])
    return SpeechService(decoder, processor, card, limits, engine)


def check_whisper(options: dict[str, Any]) -> None:
    """Refuse what a Whisper does not take, and a machine that cannot read recordings."""
    from forerun.cli.pair import is_split
    from forerun.speech.audio import check_packages

    if is_split(options["tensor_parallel"]):
        raise InvalidArgument("--tensor-parallel: a Whisper is served by one process; leave it out")
    unset: dict[str, str | None] = {
        "quantize": None,
        "quantize_head": None,
        "draft_quantize": None,
        "draft_split": "auto",
    }
    for name, default in unset.items():
        if options[name] != default:
            option = f"--{name.replace('_', '-')} {options[name]}"
            raise InvalidArgument(f"{option}: a Whisper is served as it is stored; leave it out")
    check_packages()


def served_name(options: dict[str, Any], limits: ServiceSettings) -> str:
    name: str = options["model"]
    return limits.served_model_name or name.rstrip("/").rsplit("/", 1)[-1]


def is_whisper(options: dict[str, Any]) -> bool:
    from forerun.loading.load import model_type

    return model_type(options["model"], offline=options["offline"]) == "whisper"
