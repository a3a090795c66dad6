"""`forerun plan`: will speculation pay here, with which drafter, with drafts how long?"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forerun.cli.main import INTERRUPTED
from forerun.cli.options import (
    GroupedCommand,
    number,
    option,
    options_from,
    place_of,
    place_options,
    prompts_option,
    settings_from,
    typed_options,
)
from forerun.config import SpeculationSettings, num_ranks
from forerun.errors import InvalidArgument
from forerun.plan.devices import DeviceSettings
from forerun.plan.settings import PlanSettings

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.drafters.base import Drafter
    from forerun.measure.record import Record
    from forerun.plan.rounds import Prompt

MODEL, PROMPTS, MEASURE, DEVICES, OUTPUT = "Model", "Prompts", "Measuring", "Devices", "Output"
OWN = "own"  # the draft that belongs to a synthetic target
DEFAULTS = ("auto", "lookup")
FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(cls=GroupedCommand)
@click.argument("target", default="embedded")
@option(
    MODEL,
    "--draft",
    "-d",
    "drafts",
    multiple=True,
    metavar="DRAFTER",
    show_default="auto and lookup",
    help="A drafter to compare, as in `forerun generate`: auto, lookup, early:N, self:BITS, ngram:FILE, random, a "
    "model, a folder, or several with commas as a chain; 'own' is the draft of a synthetic pair. May be given again.",
)
@place_options(MODEL, keeps_stored=True)
@options_from(SpeculationSettings, MODEL, "kernels", kernels={"show_default": "$FORERUN_KERNELS, else auto"})
@prompts_option(
    PROMPTS, "Spec-Bench in $FORERUN_DATA, else our own",
    "Your prompts, one a line, or JSONL: acceptance depends on them, so the plan does.",
)  # fmt: skip
@number(
    PROMPTS,
    "--prompts",
    "num_prompts",
    show_default="6, or one for each row of the largest batch",
    help="How many are decoded.",
)
@number(
    PROMPTS,
    "--prompt-tokens",
    least=2,
    default=256,
    show_default="256; no bound for those of --file",
    help="Leave out prompts longer than this; of a synthetic pair's random prompts, half of it is the length.",
)
@options_from(
    PlanSettings,
    MEASURE,
    temperatures={"default": None, "show_default": "0, greedy; 1 for a synthetic pair"},
    contexts={"show_default": "none"},
    check_prompts={"show_default": "all"},
)
@options_from(
    DeviceSettings,
    DEVICES,
    devices={"default": None, "metavar": "N", "show_default": "none: measure here"},
    rate={"metavar": "REQUESTS", "show_default": "no simulation"},
)
@option(OUTPUT, "--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@option(OUTPUT, "--output", "-o", type=FILE, show_default="none", help="Write the record to a file.")
@option(
    OUTPUT,
    "--plot",
    "picture",
    type=FILE,
    show_default="none",
    help="Draw Leviathan's figures with your drafters on top, and the curve of each.",
)
def plan(target: str, picture: Path | None, output: Path | None, as_json: bool, **options: Any) -> None:  # fmt: skip
    """Predict which drafter and which draft length are fastest on this machine, then check it.

    Measures what each drafter gets accepted on your prompts and what its rounds cost, predicts the speed of every draft
    length from that, runs those around the best, and recommends a drafter, or none. TARGET is a Hub name, a folder, a
    .gguf file, 'embedded', or a synthetic pair such as synthetic:6.7b+0.33b@0.87: random weights, the sizes of real
    models, and a draft whose tokens are kept 87 % of the time.

    \b
    forerun plan                                       two minutes, embedded model
    forerun plan MODEL -d DRAFT -d lookup -d early:8   which of these?
    forerun plan MODEL --batch-sizes 1,8 --temperatures 0,1 --plot plan.png
    forerun plan MODEL --devices 8 --rate 20           split it, or copy it?
    """
    if options["devices"] is None:
        names = {field.name for field in fields(DeviceSettings)}
        if typed := typed_options(click.get_current_context(), names):
            raise InvalidArgument(f"{', '.join(typed)}: of a prediction for --devices N; give that, too")
    else:
        from forerun.cli.plan_devices import plan_devices

        plan_devices(target, options, as_json)
        return
    from forerun.cli.console import err_console, plain_warnings, say
    from forerun.files import check_output
    from forerun.measure.plot import check_plot
    from forerun.measure.show import present

    if picture is not None:
        check_plot(picture)
    if output is not None:
        check_output(output)
    err = err_console()
    with plain_warnings(err):
        record = _measure(target, options, output, err)
    picture = picture if record.figure is not None else None  # an interrupted run may have nothing to draw
    present(record, partial(say, err), output, picture, "json" if as_json else "table")
    if not record.complete:
        raise click.exceptions.Exit(INTERRUPTED)


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What the names on the command line stand for."""

    model: Any
    tokenizer: Any
    drafters: dict[str, Drafter]
    notes: tuple[str, ...] = ()


def _measure(target: str, options: dict[str, Any], output: Path | None, err: Console) -> Record:
    """Saved after every part, so that a run that is killed leaves what it had."""
    from forerun.config import Kernels
    from forerun.measure.progress import Bar
    from forerun.measure.provenance import busy_note, provenance, without_folders
    from forerun.plan.report import plan_record
    from forerun.plan.results import PlanResults
    from forerun.plan.rounds import EngineRunner
    from forerun.plan.run import make_plan

    settings = _settings(target, options)
    with Bar(err) as bar:
        bar.start(f"loading {without_folders(target)}")
        busy = busy_note()
        loaded = _load(target, options)
        prompts, source = _prompts(loaded, settings, options)
        origin = provenance(loaded.model.device)
        use = None if options["kernels"] is None else Kernels(options["kernels"])
        plain = EngineRunner("plain", loaded.model, None, use)
        runners = [EngineRunner(name, loaded.model, drafter, use) for name, drafter in loaded.drafters.items()]
        shown = {
            "target": without_folders(target),
            "drafts": list(loaded.drafters),
            "prompts": source,
            "num_prompts": len(prompts),
            "prompt_tokens": sum(map(len, prompts)),
            "dtype": str(loaded.model.dtype),
            **asdict(settings),
        }

        def save(results: PlanResults) -> Record:
            disturbed = busy_note("ended") if results.complete else None
            notes = [note for note in (*loaded.notes, busy, disturbed) if note]
            record = plan_record(origin, shown, results, notes)
            if output is not None:
                record.save(output)
            return record

        return make_plan(plain, runners, prompts, settings, bar, save)


def _settings(target: str, options: dict[str, Any]) -> PlanSettings:
    from forerun.bench.synthetic import is_synthetic

    usual = {"temperatures": (1.0,)} if options["temperatures"] is None and is_synthetic(target) else {}
    return settings_from(PlanSettings, options, **usual)


def _load(target: str, options: dict[str, Any]) -> PlanInputs:
    from forerun.bench.synthetic import is_synthetic
    from forerun.cli.pair import is_split, load_split, stored_place
    from forerun.drafters.named import OFF
    from forerun.loading import load_model

    where = place_of(options)
    wanted = list(dict.fromkeys(name.strip() for name in options["drafts"]))
    for name in wanted:
        if name in OFF:
            raise InvalidArgument(f"--draft {name}: plain decoding is always measured; leave it out")
        if name == OWN and not is_synthetic(target):
            raise InvalidArgument(f"--draft own: only synthetic pairs have a draft of their own, {target!r} is none")
    if is_synthetic(target):
        if num_ranks() > 1:
            raise InvalidArgument(f"{target!r} is made whole, and not split over processes: start it without torchrun")
        return _synthetic(target, wanted, where)
    if is_split(1):
        model, tokenizer = load_split(target, 1, where)
    else:
        where = stored_place(options)  # as `forerun generate` would run it
        model, tokenizer = load_model(target, **where)
    return PlanInputs(model, tokenizer, _drafters(wanted or list(DEFAULTS), model, where, chosen=bool(wanted)))


def _synthetic(target: str, wanted: list[str], where: dict[str, Any]) -> PlanInputs:
    from forerun.bench.synthetic import build_pair
    from forerun.drafters import DraftModel

    pair = build_pair(target, device=where["device"], dtype=where["dtype"])
    note = f"the draft's noise is {pair.noise:.4f}, for alpha {pair.alpha:.3f} at temperature 1"
    others = _drafters([name for name in wanted if name != OWN], pair.target, where, chosen=True)
    drafters: dict[str, Drafter] = {OWN: DraftModel(pair.draft)} if OWN in wanted or not wanted else {}
    return PlanInputs(pair.target, None, drafters | others, (note,))


def _drafters(wanted: list[str], model: Any, where: dict[str, Any], chosen: bool) -> dict[str, Drafter]:
    """By name, numbered where only folders tell two apart. Where nobody chose, 'auto' is left out if it is nothing
    but lookup."""
    from itertools import chain, count

    from forerun.drafters import PromptLookup, named_drafter
    from forerun.measure.provenance import without_folders

    drafters: dict[str, Drafter] = {}
    for name in wanted:
        drafter = named_drafter(name, model, option="--draft", **where)
        assert drafter is not None
        if chosen or name != "auto" or not isinstance(drafter, PromptLookup):
            short = without_folders(name)
            numbered = (f"{short} ({number})" for number in count(2))
            drafters[next(each for each in chain([short], numbered) if each not in drafters)] = drafter
    return drafters


def _prompts(loaded: PlanInputs, settings: PlanSettings, options: dict[str, Any]) -> tuple[list[Prompt], str]:
    """Prompts that fit the context, and where they come from."""
    from forerun.models.families import context_length

    wanted = options["num_prompts"] or max(6, *settings.batch_sizes)
    if loaded.tokenizer is None:
        return _random(loaded.model.config.vocab_size, wanted, options["prompt_tokens"] // 2, settings.seed)
    room = context_length(loaded.model.config.get_text_config(decoder=True)) or sys.maxsize
    room -= settings.max_new_tokens + settings.max_length + 1
    if settings.contexts and max(settings.contexts) > room:
        raise InvalidArgument(f"--contexts {max(settings.contexts)}: the target has room for {room} tokens before them")
    if options["file"] is not None:
        prompts, source = _from_file(options["file"], loaded.tokenizer), options["file"].name
    else:
        prompts, source = _questions(loaded.tokenizer)
    # Prompts of your own are bounded where you say so, those that were chosen for you always.
    is_bounded = options["file"] is None or typed_options(click.get_current_context(), ("prompt_tokens",))
    longest = min(room, options["prompt_tokens"]) if is_bounded else room
    fitting = [prompt for prompt in dict.fromkeys(prompts) if len(prompt) <= longest][:wanted]
    if len(fitting) < max(settings.batch_sizes):
        raise InvalidArgument(
            f"a batch of {max(settings.batch_sizes)} needs as many different prompts, and {len(fitting)} of {source} "
            f"have at most {longest} tokens; give more with --file, a larger --prompt-tokens, or smaller --batch-sizes"
        )
    return fitting, source


def _from_file(file: Path, tokenizer: Any) -> list[Prompt]:
    from forerun.cli.prompts import check_template, encode_placed, read_placed

    places, texts = zip(*read_placed((), file), strict=True)
    template = check_template(tokenizer, None, None, texts)
    return [tuple(row) for row in encode_placed(tokenizer, texts, places, template)]


def _questions(tokenizer: Any) -> tuple[list[Prompt], str]:
    """The categories in turn, so that the first few prompts are of every kind."""
    from itertools import chain, zip_longest

    from forerun.bench.prompts import encode, find_questions

    questions = find_questions()
    kinds = [encode(tokenizer, questions.of(category)) for category in questions.categories]
    mixed = chain.from_iterable(zip_longest(*kinds))
    return [prompt for prompt in mixed if prompt is not None], questions.source


def _random(vocab: int, count: int, length: int, seed: int) -> tuple[list[Prompt], str]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, vocab, (count, length), generator=generator).tolist()
    return [tuple(row) for row in ids], f"{count} random prompts of {length} tokens"
