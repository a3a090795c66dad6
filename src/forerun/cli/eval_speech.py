"""`forerun eval asr`: recordings instead of questions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forerun.cli.main import INTERRUPTED
from forerun.cli.options import typed_options
from forerun.config import num_ranks
from forerun.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.eval.speech.recordings import ReadManifest
    from forerun.eval.speech.report import SpeechResult
    from forerun.measure.record import Record

TASK = "asr"
BATCH_SIZES = (1, 4, 8)
MEANINGLESS = (
    "temperature", "top_p", "top_k", "seed", "max_new_tokens", "num_sequences", "max_time", "k", "window",
    "code_seconds", "confidence",
)  # fmt: skip
"""Options of other tasks. Nothing is ignored: they are refused here."""
ROUNDING = ("quantize", "quantize_head", "draft_quantize")
SPLITTING = ("tensor_parallel", "draft_split")
"""Options of text models."""


def evaluate_speech(
    tasks: tuple[str, ...],
    folder: Path | None,
    output: Path | None,
    form: str,
    options: dict[str, Any],
    console: Console,
) -> None:
    """Cheap mistakes first; then the model, all ways in turn, the record and its tables."""
    from forerun.cli.console import note, say
    from forerun.eval.speech.recordings import find
    from forerun.files import check_output
    from forerun.measure.record import default_path
    from forerun.measure.show import present

    _check(tasks)
    manifest = find(folder)
    for bad in manifest.bad[:3]:
        note(console, f"left out {bad.where}: {bad.why}")
    path = output or default_path(prefix="asr")
    check_output(path)
    record = _measure(manifest, path, options, console)
    if record.rows:
        present(record, partial(say, console), path, None, form)
    else:
        console.print("Stopped before all methods had transcribed everything once.")
    if not record.complete:
        raise click.exceptions.Exit(INTERRUPTED)


def _check(tasks: tuple[str, ...]) -> None:
    import importlib.util

    if set(tasks) != {TASK}:
        raise InvalidArgument(f"{TASK!r} listens with another model than the other tasks write with: run it by itself")
    if typed := typed_options(click.get_current_context(), MEANINGLESS):
        raise InvalidArgument(
            f"{typed[0]} means nothing to {TASK!r}, which decodes greedily and counts words: leave it out"
        )
    if typed := typed_options(click.get_current_context(), ROUNDING):
        raise InvalidArgument(f"{typed[0]}: a Whisper is run as it is stored; leave it out")
    if num_ranks() > 1 or typed_options(click.get_current_context(), SPLITTING):
        raise InvalidArgument(f"{TASK!r} is run by one process: transformers has no plan to split a Whisper")
    for package in ("jiwer", "soundfile", "soxr"):
        if importlib.util.find_spec(package) is None:
            raise InvalidArgument(f"{TASK!r} needs {package}; run: pip install 'forerun[eval,speech]'")


def _measure(manifest: ReadManifest, path: Path, options: dict[str, Any], console: Console) -> Record:
    from forerun.cli.transcribe import load_pair
    from forerun.eval.prepare import spread
    from forerun.eval.speech.report import PLAIN, SPECULATIVE, TRANSFORMERS, speech_record
    from forerun.eval.speech.run import evaluate
    from forerun.measure.progress import Bar
    from forerun.measure.provenance import provenance

    options = options | {"model": _model(options)}
    recordings = spread(manifest.recordings, options["limit"])
    sizes = (options["batch_size"],) if options["batch_size"] else BATCH_SIZES
    loaded, processor = load_pair(options, console)
    drafting = loaded.decoder()
    methods = {TRANSFORMERS: None, PLAIN: loaded.plain_decoder(), SPECULATIVE: drafting}
    notes = () if drafting.engine.lossy is None else (drafting.engine.lossy,)
    origin = provenance(loaded.model.device)
    settings = _settings(options, sizes, manifest.source)

    def save(results: Sequence[SpeechResult], complete: bool) -> Record:
        return speech_record(origin, settings, results, notes, complete).kept(path)

    with Bar(console) as bar:
        return evaluate(loaded.model, processor, methods, recordings, sizes, bar, save)


def _model(options: dict[str, Any]) -> str:
    """The default of `forerun eval` writes text; the one that listens takes its place."""
    from forerun.loading import EMBEDDED, WHISPER

    return WHISPER if options["model"] == EMBEDDED else str(options["model"])


def _settings(options: dict[str, Any], sizes: tuple[int, ...], source: str) -> dict[str, Any]:
    from forerun.measure.provenance import without_folders

    named = {name: without_folders(str(options[name])) for name in ("model", "draft", "policy", "rule")}
    return {**named, "batch_sizes": list(sizes), "limit": options["limit"], "data": source}
