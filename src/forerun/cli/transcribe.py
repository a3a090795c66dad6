"""`forerun transcribe`: sound files to text and subtitles, many at a time."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forerun.cli.options import (
    GroupedCommand,
    number,
    option,
    options_from,
    place_of,
    place_options,
    settings_from,
    speculation_options,
)
from forerun.config import ModelSettings
from forerun.errors import InvalidArgument
from forerun.speech.settings import BATCH_SIZE, SpeechSettings

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.cli.pair import LoadedPair
    from forerun.cli.transcripts import Writer
    from forerun.drafters.base import Drafter
    from forerun.speech.transcribe import TranscribeSeconds

MODEL, SPEECH, AGAIN, OUTPUT = "Model", "Speech", "When a window goes wrong", "Output"
SOME_FAILED = 1
"""The exit code where a file could not be transcribed; the others were."""


@click.command(cls=GroupedCommand)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@options_from(
    ModelSettings,
    MODEL,
    "model",
    model={
        "flags": ("--model", "-m"),
        "metavar": "NAME",
        "default": "whisper-tiny.en",
        "help": "A Whisper: a Hub name, a folder, or 'whisper-tiny.en', the small English one that comes as a wheel.",
    },
)
@place_options(MODEL)
@options_from(
    SpeechSettings,
    SPEECH,
    "language",
    "task",
    "timestamps",
    "condition_on_previous",
    language={"flags": ("--language", "-l"), "metavar": "NAME", "show_default": "found out, file by file"},
    task={"show_default": "transcribe"},
    timestamps={"default": None, "show_default": "on for srt, vtt and json, else off"},
    condition_on_previous={"flags": ("--condition-on-previous/--no-condition-on-previous",), "is_flag": None},
)
@options_from(
    SpeechSettings, AGAIN, "temperature", "compression_ratio_threshold", "logprob_threshold", "no_speech_threshold",
    "seed",
    temperature={"flags": ("--temperature", "-t"), "metavar": "T[,T...]"},
    no_speech_threshold={"metavar": "P"},
    seed={"type": click.IntRange(min=0)},
)  # fmt: skip
@speculation_options()
@option(
    OUTPUT,
    "--format",
    "-f",
    "form",
    type=click.Choice(["text", "srt", "vtt", "json"]),
    default="text",
    help="Plain text, SubRip or WebVTT subtitles, or JSON with times and token ids.",
)
@option(
    OUTPUT,
    "--output",
    "-o",
    "folder",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    show_default="standard output",
    help="Write one file for each recording there, under its name.",
)
@number(OUTPUT, "--batch-size", "-b", default=BATCH_SIZE, help="Recordings decoded together.")
@option(
    OUTPUT,
    "--compare",
    is_flag=True,
    help="Transcribe three ways (transformers, Forerun without and with drafts): are the words the same, and what did "
    "encoder and decoder cost?",
)
@option(OUTPUT, "--quiet", "-q", is_flag=True, help="Only transcripts and errors.")
def transcribe(files: tuple[Path, ...], **options: Any) -> None:
    """Write down what is said in FILEs: WAV, FLAC and what else libsndfile reads, any rate, mono or stereo.

    '-' reads standard input. All files go through the model as ragged batches. One that cannot be read is reported,
    the others are still transcribed, and the exit code is 1. After Ctrl-C you get what was finished.

    \b
    forerun transcribe interview.wav                 the text
    forerun transcribe *.flac -f srt -o subtitles    subtitles, one file each
    forerun transcribe talk.wav --compare            with and without drafts
    """
    from forerun.cli.console import err_console, plain_warnings
    from forerun.cli.transcripts import Writer
    from forerun.loading.load import quiet
    from forerun.speech.audio import check_packages
    from forerun.speech.formats import Format

    console = err_console(options["quiet"])
    with plain_warnings(console), _standard_input(files) as piped:
        form = Format(options["form"])
        times = _timestamps(options["timestamps"], form)
        recordings = _once([piped if piped and str(path) == "-" else path for path in files], console)
        writer = Writer(recordings, form, bool(options["timestamps"]), options["folder"], console, piped)
        settings = settings_from(SpeechSettings, options | {"timestamps": times})
        about = {"model": options["model"], "draft": options["draft"]}
        check_packages()
        if _none_is_there(recordings, writer):  # said before a model is loaded
            writer.finish(about)
            raise click.exceptions.Exit(SOME_FAILED)
        loaded, processor = load_pair(options, console)
        run = _compared if options["compare"] else _transcribed
        try:
            with quiet():  # transformers warns of its own keywords
                facts = run(loaded, processor, settings, writer, options["batch_size"])
        except KeyboardInterrupt:
            writer.finish(about)  # what was transcribed is worth keeping
            raise
        whole = writer.finish(about | facts)
    if not whole:
        raise click.exceptions.Exit(SOME_FAILED)


@contextmanager
def _standard_input(files: Sequence[Path]) -> Iterator[Path | None]:
    """A file with what comes through the pipe, where '-' asks for it: sound is read from places in a file."""
    if Path("-") not in files:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="forerun-") as folder:
        path = Path(folder) / "stdin"
        with path.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield path


def _timestamps(asked: bool | None, form: Any) -> bool:
    if form.needs_times and asked is False:
        raise InvalidArgument(f"--format {form} is made of times; leave out --no-timestamps, or write --format text")
    return str(form) != "text" if asked is None else asked


def _once(files: Sequence[Path], console: Console) -> list[Path]:
    """Each file once, in order, however it is spelt."""
    from forerun.cli.console import note

    first: dict[Path, Path] = {}
    for path in files:
        if first.setdefault(path.resolve(), path) is not path:
            note(console, f"{path} was given more than once; it is transcribed once")
    return list(first.values())


def _none_is_there(files: Sequence[Path], writer: Writer) -> bool:
    """Whether no file can be read because each is missing, empty or a folder; the writer is told why."""
    from forerun.errors import UnreadableAudio
    from forerun.speech.audio import check_file
    from forerun.speech.transcribe import Failure

    failures = []
    for path in files:
        try:
            check_file(path)
        except UnreadableAudio as error:
            failures.append(Failure(path, str(error)))
    if len(failures) < len(files):
        return False
    for failure in failures:
        writer.take(failure)
    return True


def load_pair(options: dict[str, Any], console: Console) -> tuple[LoadedPair, Any]:
    """The target with its drafter, and the processor."""
    from forerun.cli.pair import loaded_with, loading

    place = place_of(options)
    with loading(options, console):
        from forerun.drafters import named_drafter
        from forerun.loading import load_speech_model

        model, processor = load_speech_model(options["model"], **place)
        load = partial(_draft_whisper, target=model, place=place)
        drafter = named_drafter(options["draft"], model, load, option="--draft")
    return loaded_with(options, model, processor.tokenizer, drafter), processor


def _draft_whisper(name: str, shares_encoder: bool, target: Any, place: dict[str, Any]) -> Drafter:
    """A smaller Whisper. One whose encoder is the target's, such as a distilled one, reads what that has read."""
    import torch

    from forerun.drafters import DraftModel
    from forerun.loading import load_speech_model

    model, processor = load_speech_model(name, **place)
    ours, theirs = (one.get_encoder().state_dict() for one in (model, target))
    same = ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    return DraftModel(model, tokenizer=processor.tokenizer, shares_encoder=shares_encoder or same)


def _transcribed(
    loaded: LoadedPair, processor: Any, settings: SpeechSettings, writer: Writer, batch_size: int
) -> dict[str, Any]:
    from forerun.cli.run import told_of_compiling
    from forerun.measure.progress import Bar
    from forerun.speech.transcribe import Transcriber

    with told_of_compiling(writer.console):
        decoder = loaded.decoder()
    transcriber = Transcriber(loaded.model, processor, decoder, settings)
    with Bar(writer.console) as bar:
        bar.start("transcribing", total=total(writer.files))
        for outcome in transcriber.files(writer.files, batch_size, bar.advance):
            writer.take(outcome)
    spent = transcriber.spent
    if spent.audio_seconds:
        writer.console.print(summary(spent), style="dim")
    return {"seconds": spent.seconds, "statistics": spent.stats.as_dict()}


def _compared(
    loaded: LoadedPair, processor: Any, settings: SpeechSettings, writer: Writer, batch_size: int
) -> dict[str, Any]:
    from forerun.cli.transcribe_compare import compare, comparison_table, explanations
    from forerun.measure.progress import Bar
    from forerun.measure.table import print_tables

    with Bar(writer.console) as bar:
        bar.start("comparing", total=3 * total(writer.files))
        comparison = compare(loaded, processor, settings, writer, batch_size, bar.advance)
    print_tables([comparison_table(comparison)], writer.console)
    for line in explanations(comparison):
        writer.console.print(line, markup=False)
    return {"compare": comparison.as_dict()}


def summary(spent: TranscribeSeconds) -> str:
    """One line: how much sound, how long it took, what drafts gained."""
    speed = f"{1 / spent.real_time_factor:.1f} times as fast as it was spoken"
    shares = f"encoder {spent.encoder_seconds:.1f}, decoder {spent.decoder_seconds:.1f}"
    tokens = f"{spent.stats.num_emitted_tokens} tokens, {spent.stats.tokens_per_round:.2f} a round"
    lossy = "; LOSSY" if spent.stats.lossy else ""
    return f"{spent.audio_seconds:.1f} s of sound in {spent.seconds:.1f} s ({shares}), {speed}; {tokens}{lossy}"


def total(files: Sequence[Path]) -> float:
    """Seconds of sound in all of them."""
    from forerun.speech.audio import duration

    return sum(map(duration, files))
