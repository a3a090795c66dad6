"""`forerun train draft`: from a target and its text to a drafter folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forerun.cli.options import (
    GroupedCommand,
    comma_separated,
    number,
    option,
    options_from,
    place_of,
    place_options,
    settings_from,
)
from forerun.cli.train_progress import TrainingBar, held_out
from forerun.errors import InvalidArgument
from forerun.train.options import KINDS, EvaluateOptions, TrainOptions

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.train.costs import StepCosts
    from forerun.train.loop import Trained

SHAPE, DATA, LEARNING, RUN, MACHINE = "The draft", "Data", "Learning", "The run", "Machine"
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command(cls=GroupedCommand)
@click.argument("target")
@options_from(
    TrainOptions,
    SHAPE,
    *("kind", "num_layers", "layers", "start", "config", "share", "draft_vocabulary", "heads"),
    kind={"type": click.Choice(KINDS)},
    layers={"type": comma_separated(int, repeats=True), "show_default": "random weights"},
    start={"flags": ("--from",), "metavar": "FOLDER", "show_default": "none"},
    config={"type": FILE, "metavar": "FILE", "show_default": "the target's, with fewer layers"},
    draft_vocabulary={"show_default": "all tokens"},
    heads={"metavar": "K"},
)
@option(
    DATA,
    "--data",
    type=FOLDER,
    metavar="FOLDER",
    show_default="written first, from --prompts",
    help="Shards of `forerun train data`. May grow between runs, not between a kill and --resume.",
)
@option(
    DATA,
    "--prompts",
    "-p",
    multiple=True,
    type=FILE,
    metavar="FILE",
    show_default=False,
    help="Without --data: what the target is asked, to write the data first (into OUTPUT/data).",
)
@options_from(TrainOptions, DATA, "hold_out", "max_length")
@options_from(
    TrainOptions,
    LEARNING,
    *("loss", "unroll", "depth_decay", "rollout_share", "rollout_length", "learning_rate", "warm_up", "weight_decay"),
    *("clip", "batch_tokens", "steps", "epochs", "max_minutes", "seed"),
    loss={"metavar": "MIX"},
    unroll={"metavar": "S"},
    steps={"show_default": "one epoch"},
    epochs={"metavar": "N", "show_default": "1, or any number beside --steps or --max-minutes"},
    max_minutes={"metavar": "M", "show_default": "no limit"},
)
@option(RUN, "--output", "-o", type=FOLDER, required=True, show_default=False, help="The drafter folder to make.")
@option(RUN, "--resume", is_flag=True, help="Go on with the run in OUTPUT after a kill: same weights in the end.")
@options_from(
    TrainOptions,
    RUN,
    *("checkpoint_minutes", "checkpoint_every", "evaluate_every", "log_every"),
    checkpoint_every={"show_default": "by minutes alone"},
)
@option(
    RUN,
    "--evaluate",
    type=FILE,
    metavar="FILE",
    show_default="none",
    help="Prompts to decode at the end, none of them trained on: writes eval.json, as `forerun train eval` does.",
)
@number(RUN, "--limit", show_default="all", help="With --evaluate: at most N prompts of each category.")
@option(
    RUN, "--save-dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", help="Of the folder's weights."
)
@option(
    RUN,
    "--measure-cost/--no-measure-cost",
    default=True,
    help="First measure what a step of such a draft costs here, to say early whether it can pay.",
)
@options_from(TrainOptions, MACHINE, "chunk")
@place_options(MACHINE)
@click.pass_context
def draft(ctx: click.Context, /, target: str, **given: Any) -> None:  # fmt: skip
    """Train a drafter for TARGET and leave it in OUTPUT, a folder every command takes as --draft.

    It learns from text the target wrote (`forerun train data`). What counts is how often the target keeps what the
    draft says; that is what the default loss measures, and what is reported.

    Several GPUs: `accelerate launch -m forerun train draft ...`.
    """
    from forerun.cli.console import err_console, plain_warnings
    from forerun.files import check_output_folder

    console = err_console()
    config = None if given["config"] is None else str(given["config"])
    options = settings_from(TrainOptions, given, config=config)  # mistakes are found before anything is loaded
    check_output_folder(given["output"], "-o")
    if given["data"] is None:
        given["data"] = _write_data(ctx, target, given)
    with plain_warnings(console):
        trained = _train(target, options, given, console)
        if given["is_main"]:
            _finish(trained, given, console)


def _write_data(ctx: click.Context, target: str, given: dict[str, Any]) -> Path:
    from forerun.cli.train_data import data

    if not given["prompts"]:
        raise InvalidArgument("give --data FOLDER, or --prompts FILE to let the target write the data first")
    folder: Path = given["output"] / "data"
    ctx.invoke(data, target=target, prompts=given["prompts"], output=folder, **place_of(given))
    return folder


def _train(name: str, options: TrainOptions, given: dict[str, Any], console: Console) -> Trained:
    import torch

    from forerun.cli.console import busy
    from forerun.loading import load_model
    from forerun.train.loop import check_data, check_run, train_draft
    from forerun.train.processes import Processes
    from forerun.train.shards import Shards

    data = Shards(given["data"])
    check_run(data, options, given["output"], given["resume"])
    processes = Processes()
    with busy(console, f"loading {name}"):
        device = given["device"] or processes.device
        target, tokenizer = load_model(name, device=device, dtype=given["dtype"], offline=given["offline"])
    check_data(data, target)
    given["loaded"], given["is_main"] = (target, tokenizer), processes.is_main
    if processes.is_main:
        console.print(
            f"{data.num_sequences:,} sequences, {data.num_tokens:,} tokens; {options.kind} draft, "
            f"loss {options.mixture}"
        )
    wanted = processes.is_main and given["measure_cost"]
    with TrainingBar(console, _costs(target, tokenizer, options, data) if wanted else None) as bar:
        return train_draft(
            target,
            data,
            options,
            given["output"],
            resume=given["resume"],
            special_tokens=special_tokens(target, tokenizer),
            provenance=_provenance(target),
            save_dtype=getattr(torch, given["save_dtype"]),
            report=bar.report,
            processes=processes,
        )


def special_tokens(target: Any, tokenizer: Any) -> set[int]:
    """Ids a draft must be able to say: without the end token no draft ever ends."""
    ends = getattr(target.generation_config, "eos_token_id", None)
    found = {ends} if isinstance(ends, int) else set(ends or ())
    return found | set(getattr(tokenizer, "all_special_ids", None) or ())


def _provenance(target: Any) -> dict[str, Any]:
    from dataclasses import asdict

    from forerun.measure.provenance import provenance

    return asdict(provenance(target.device, ["forerun", *sys.argv[1:]]))


def _costs(target: Any, tokenizer: Any, options: TrainOptions, data: Any) -> StepCosts | None:
    """What a step of this draft costs here, measured on its untrained shape: an early answer to whether it can pay."""
    import tempfile

    from forerun.train.evaluate import measure_costs
    from forerun.train.init_student import init_student
    from forerun.train.loop import draft_shape
    from forerun.train.run_folder import write_drafter

    initial = init_student(target, options, draft_shape(options, data, special_tokens(target, tokenizer)))
    text = data.sequence(0)
    prompt = text.tokens[: max(text.prompt_length, 1)].tolist()
    with tempfile.TemporaryDirectory() as place:
        write_drafter(Path(place), target, initial, {}, target.dtype)
        timing = EvaluateOptions(max_new_tokens=24)
        return measure_costs(target, tokenizer, Path(place), [prompt] * 3, timing)


def _finish(trained: Trained, given: dict[str, Any], console: Console) -> None:
    import importlib.util

    console.print(
        f"trained {trained.num_parameters:,} weights on {trained.tokens:,} tokens in {trained.steps} steps, "
        f"{trained.seconds:.0f} s; the drafter is in {trained.folder}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    if trained.proxy is not None:
        console.print(held_out(trained.proxy, None), markup=False, soft_wrap=True)
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no curves were drawn: matplotlib is not installed; run: pip install 'forerun[train]'")
    if given["evaluate"] is not None:
        from forerun.cli.train_eval import run_evaluation

        target, tokenizer = given["loaded"]
        settings = EvaluateOptions(limit=given["limit"])
        run_evaluation(target, tokenizer, trained.folder, given["evaluate"], settings, console)
