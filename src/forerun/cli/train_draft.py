"""`forerun train draft`: from a target and its text to a drafter folder."""

from __future__ import annotations

from dataclasses import asdict
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
    typed_options,
)
from forerun.cli.train_progress import TrainingBar, held_out
from forerun.config import rank_and_size
from forerun.errors import InvalidArgument
from forerun.train.options import KINDS, EvaluateOptions, TrainOptions

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.plan.costs import RoundCosts
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
    "--file",
    "-p",
    "-f",
    "prompts",
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
def draft(
    ctx: click.Context,
    /,
    target: str,
    data: Path | None,
    prompts: tuple[Path, ...],
    output: Path,
    resume: bool,
    evaluate: Path | None,
    limit: int | None,
    save_dtype: str,
    measure_cost: bool,
    **options: Any,
) -> None:
    """Train a drafter for TARGET and leave it in OUTPUT, a folder every command takes as --draft.

    It learns from text the target wrote (`forerun train data`). What counts is how often the target keeps what the
    draft says; that is what the default loss measures, and what is reported.

    Several GPUs: `accelerate launch -m forerun train draft ...`.
    """
    import torch

    from forerun.cli.console import busy, err_console, plain_warnings
    from forerun.files import check_output_folder
    from forerun.loading import load_model
    from forerun.measure.provenance import provenance
    from forerun.train.loop import check_data, check_folder, check_run, train_draft
    from forerun.train.processes import Processes
    from forerun.train.shards import Shards

    console = err_console()
    config = None if options["config"] is None else str(options["config"])
    settings = settings_from(TrainOptions, options, config=config)  # mistakes are found before anything is loaded
    _check_used(typed_options(ctx), settings, has_data=data is not None, evaluates=evaluate is not None)
    check_output_folder(output, "-o")
    check_folder(output, resume)  # before hours of writing data, too
    place = place_of(options)
    shards = Shards(data or _write_data(ctx, target, prompts, output, place))
    with plain_warnings(console):
        check_run(shards, settings, output, resume)
        processes = Processes()
        with busy(console, f"loading {target}"):
            model, tokenizer = load_model(target, **place | {"device": place["device"] or processes.device})
        check_data(shards, model)
        costs = None
        if processes.is_main:
            size = f"{shards.num_sequences:,} sequences, {shards.num_tokens:,} tokens"
            console.print(f"{size}; {settings.kind} draft, loss {settings.mixture}")
            costs = _costs(model, tokenizer, settings, shards) if measure_cost else None
        with TrainingBar(console, costs) as bar:
            trained = train_draft(
                model,
                shards,
                settings,
                output,
                resume=resume,
                special_tokens=special_tokens(model, tokenizer),
                provenance=asdict(provenance(model.device)),
                save_dtype=getattr(torch, save_dtype),
                report=bar.report,
                processes=processes,
            )
        if not processes.is_main:
            return
        _print(trained, console)
        if evaluate is not None:
            from forerun.cli.train_eval import run_evaluation

            run_evaluation(model, tokenizer, trained.folder, evaluate, EvaluateOptions(limit=limit), console)


def _check_used(typed: list[str], settings: TrainOptions, has_data: bool, evaluates: bool) -> None:
    """Refuse options that this run would not look at."""
    begun = settings.layers is not None or settings.start is not None or settings.config is not None
    unused = {
        "--heads": (settings.kind != "parallel", f"a {settings.kind} draft has none"),
        "--unroll": (settings.kind != "feature", f"a {settings.kind} draft is not unrolled"),
        "--num-layers": (begun, "--layers, --from or --config says how many"),
        "--rollout-length": (not settings.rollout_share, "--rollout-share is 0"),
        "--prompts": (has_data, "--data holds what is learnt from"),
        "--limit": (not evaluates, "it bounds the prompts of --evaluate, and there are none"),
    }
    for name, (is_unused, reason) in unused.items():
        if is_unused and name in typed:
            raise InvalidArgument(f"{name}: {reason}; leave it out")


def _write_data(
    ctx: click.Context, target: str, prompts: tuple[Path, ...], output: Path, place: dict[str, Any]
) -> Path:
    import gc

    import torch

    from forerun.cli.train_data import data
    from forerun.train.init_student import check_trainable

    if not prompts:
        raise InvalidArgument("give --data FOLDER, or --prompts FILE to let the target write the data first")
    if (size := rank_and_size()[1]) > 1:
        raise InvalidArgument(
            f"--prompts: {size} processes were started, and each would write all the data; write it first with "
            "`forerun train data` in one process, and give its folder with --data"
        )
    ctx.invoke(data, target=target, prompts=prompts, output=output / "data", check=check_trainable, **place)
    gc.collect()  # the target that has written it, before it is loaded again to be learnt from
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return output / "data"


def special_tokens(target: Any, tokenizer: Any) -> set[int]:
    """Ids a draft must be able to say: without the end token no draft ever ends."""
    from forerun.train.writing import stop_ids

    return {*stop_ids(target), *(getattr(tokenizer, "all_special_ids", None) or ())}


def _costs(target: Any, tokenizer: Any, options: TrainOptions, data: Any) -> RoundCosts:
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
        return measure_costs(target, Path(place), [prompt], EvaluateOptions())


def _print(trained: Trained, console: Console) -> None:
    import importlib.util

    from forerun.cli.console import say

    amount = f"{trained.num_parameters:,} weights on {trained.tokens:,} tokens in {trained.steps} steps"
    say(console, f"trained {amount}, {trained.seconds:.0f} s; the drafter is in {trained.folder}")
    if trained.proxy is not None:
        say(console, held_out(trained.proxy, None))
    if importlib.util.find_spec("matplotlib") is None:
        say(console, "no curves were drawn: matplotlib is not installed; run: pip install 'forerun[train]'")
