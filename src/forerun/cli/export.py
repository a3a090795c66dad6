"""`forerun export`: a trained causal draft as an ordinary transformers model."""

from __future__ import annotations

from pathlib import Path

import click

from forerun.cli.options import GroupedCommand, option

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(cls=GroupedCommand)
@click.argument("folder", type=FOLDER)
@click.argument("output", type=click.Path(file_okay=False, path_type=Path))
@option(
    "Target",
    "--target",
    metavar="NAME",
    show_default="the one it was trained for",
    help="Where the shared embedding, head and tokenizer come from.",
)
@option("Target", "--offline", is_flag=True, help="Use only what is on this machine.")
def export(folder: Path, output: Path, target: str | None, offline: bool) -> None:  # fmt: skip
    """Write the draft in FOLDER to OUTPUT as a standalone model that `transformers` loads.

    Only causal drafts stand alone: feature and parallel drafts read the hidden states of their target.
    """
    from forerun.cli.console import busy, err_console, note, say
    from forerun.files import check_output_folder
    from forerun.loading import load_model
    from forerun.loading.drafter_folder import load_drafter
    from forerun.train.export import check_exportable, check_fresh
    from forerun.train.export import export as write

    console = err_console()
    manifest = load_drafter(folder)[0]
    check_exportable(manifest, folder)
    check_fresh(output)
    check_output_folder(output.absolute().parent, "OUTPUT")
    name = target or str(manifest.target["name"])
    with busy(console, f"loading {name}"):
        model, tokenizer = load_model(name, device="cpu", offline=offline)
    if write(folder, output, model, tokenizer):
        note(console, "its vocabulary was reduced; the standalone model can say every token.")
    say(console, f"a model of its own is in {output}")
