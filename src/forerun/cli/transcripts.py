"""Where transcripts go: standard output in the order of the files, or one file each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forerun.cli.console import note, say
from forerun.errors import InvalidArgument
from forerun.files import check_output_folder, write_whole
from forerun.speech.formats import Format, render
from forerun.speech.transcribe import Failure, Outcome
from forerun.speech.transcript import Transcript

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(slots=True)
class Writer:
    """Takes outcomes as they come, in any order."""

    files: Sequence[Path]
    form: Format
    times: bool  # whether plain text shows them
    folder: Path | None
    console: Console
    piped: Path | None = None  # the file that holds what came through standard input
    outcomes: dict[Path, Outcome] = field(default_factory=dict)
    _places: dict[Path, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.form.needs_times and self.folder is None and len(self.files) > 1:
            raise InvalidArgument(
                f"--format {self.form} for {len(self.files)} files: subtitles of several cannot share standard output; "
                "give a folder with -o"
            )
        if self.folder is not None:
            self._places = _places(self.files, self.folder, self.form)
            check_output_folder(self.folder, "-o")

    def take(self, outcome: Outcome) -> None:
        """Write a transcript, or say at once what is wrong with a file."""
        self.outcomes[outcome.path] = outcome
        if isinstance(outcome, Failure):
            reason = outcome.reason.replace(str(outcome.path), self._name(outcome.path))
            self.outcomes[outcome.path] = replace(outcome, reason=reason)
            click.secho(f"Error: {reason}", fg="red", err=True)
        else:
            if outcome.note:
                note(self.console, f"{self._name(outcome.path)}: {outcome.note}")
            if outcome.path in self._places:
                self._write(outcome, self._places[outcome.path])

    def finish(self, facts: dict[str, Any]) -> bool:
        """What goes to standard output comes last, when no bar is in its way. Says whether every file succeeded."""
        failures = [outcome for outcome in self.outcomes.values() if isinstance(outcome, Failure)]
        if self.folder is None and self.form is Format.JSON:
            entries = [_entry(outcome) | {"file": self._name(outcome.path)} for outcome in self._ended()]
            click.echo(json.dumps({**facts, "files": entries}, indent=2, ensure_ascii=False))
        elif self.folder is None:
            self._show([outcome for outcome in self._ended() if isinstance(outcome, Transcript)])
        done = len(self.outcomes) - len(failures)
        if done < len(self.files) > 1:
            click.echo(f"{done} of {len(self.files)} files were transcribed.", err=True)
        return not failures

    def _ended(self) -> list[Outcome]:
        """In the order of the files; after Ctrl-C some are missing."""
        return [self.outcomes[path] for path in self.files if path in self.outcomes]

    def _name(self, path: Path) -> str:
        return "standard input" if path == self.piped else str(path)

    def _write(self, transcript: Transcript, place: Path) -> None:
        text = render(transcript, self.form, self.times)
        write_whole(place, lambda beside: beside.write_text(text, encoding="utf-8"))
        say(self.console, f"{self._name(transcript.path)} -> {place}", style="dim")

    def _show(self, transcripts: Sequence[Transcript]) -> None:
        """Several are told apart as `head` does it."""
        for place, transcript in enumerate(transcripts):
            if len(self.files) > 1:
                click.echo(f"{chr(10) if place else ''}==> {self._name(transcript.path)} <==")
            click.echo(render(transcript, self.form, self.times), nl=False)


def _places(files: Sequence[Path], folder: Path, form: Format) -> dict[Path, Path]:
    """Where each transcript goes; two in one place are refused before any work is done."""
    places: dict[Path, Path] = {}
    for path in files:
        place = folder / (path.stem + form.suffix)
        other = next((known for known, taken in places.items() if taken == place), None)
        if other is not None:
            raise InvalidArgument(f"{other} and {path} would both be written to {place}; transcribe them one by one")
        places[path] = place
    return places


def _entry(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, Failure):
        return {"file": str(outcome.path), "error": outcome.reason}
    return outcome.as_dict()
