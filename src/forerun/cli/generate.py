"""`forerun generate`: continue prompts, show where the tokens came from, and compare with plain decoding."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forerun.cli.main import INTERRUPTED
from forerun.cli.options import (
    GroupedCommand,
    generate_keywords,
    length_options,
    model_options,
    option,
    parallel_options,
    prompts_option,
    sampling_options,
    speculation_options,
)
from forerun.errors import InvalidArgument, NonFiniteLogits

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.cli.compare import TextComparison
    from forerun.cli.console import TextOut
    from forerun.cli.pair import LoadedPair
    from forerun.decoder import GenerateResult
    from forerun.engine import Progress, RowResult
    from forerun.prompts import Prompt

PROMPT, OUTPUT = "Prompt", "Output"
SETTINGS = ("model", "draft", "tree", "draft_top_k", "policy", "rule", "attention", "kernels", "compile")


@click.command(cls=GroupedCommand)
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@prompts_option(
    PROMPT, "none",
    "More prompts: one a line, or JSONL with a field prompt, text, question, instruction, turns or messages.",
)  # fmt: skip
@option(
    PROMPT,
    "--chat/--no-chat",
    default=None,
    show_default="on where the model has a template",
    help="Give the prompt as a user's message, in the model's chat template, or as bare text to continue.",
)
@option(
    PROMPT, "--system", metavar="TEXT", show_default="the template's own", help="System message of the chat template."
)
@option(
    PROMPT,
    "--task",
    metavar="NAME",
    show_default="none",
    help="What an encoder-decoder model such as T5 is asked to do with the prompt: a name of its own configuration "
    "(summarization, translation_en_to_de ...), whose prefix is put in front.",
)
@model_options
@parallel_options("Model")
@speculation_options()
@sampling_options
@length_options()
@option(
    OUTPUT,
    "--n",
    type=click.IntRange(min=1),
    metavar="N",
    default=1,
    help="Texts for each prompt, printed the best mean log-probability first.",
)
@option(
    OUTPUT,
    "--compare",
    is_flag=True,
    help="Decode three ways (transformers, Forerun without and with drafts) and print the times side by side; on a "
    "CPU with float32 weights unless --dtype says otherwise.",
)
@option(
    OUTPUT,
    "--json",
    "as_json",
    is_flag=True,
    help="One JSON document: texts, token ids, where each token came from, settings, statistics.",
)
@option(OUTPUT, "--quiet", "-q", is_flag=True, help="Only the text.")
def generate(prompts: tuple[str, ...], file: Path | None, **options: Any) -> None:
    """Continue one or many PROMPTs at once, faster; '-' or a pipe reads one from standard input.

    An encoder-decoder model (T5, BART, Marian ...) answers them instead: summaries, translations.
    On a terminal colours show which tokens were drafted. Elsewhere only the text goes to standard output, texts
    separated by an empty line; use --json to tell them apart. Ctrl-C ends the texts with what they have.
    """
    from forerun.cli.console import err_console, out_console, plain_warnings
    from forerun.cli.prompts import check_template, encode_placed, read_placed, with_task_prefix

    console = err_console(options["quiet"])
    with plain_warnings(console):
        places, asked = zip(*read_placed(prompts, file), strict=True)
        texts: Sequence[Prompt] = asked
        keywords = _keywords(generate_keywords(options), options["n"])
        from forerun.cli.pair import load

        loaded = load(options, console, encoder_decoder=True, keeps_stored=not options["compare"])
        if options["task"] is not None:
            texts = with_task_prefix(loaded.model, options["task"], texts, console)
        template = check_template(loaded.tokenizer, options["chat"], options["system"], texts)
        encoded = encode_placed(loaded.tokenizer, texts, places, template, options["system"])
        show = _Show(loaded, texts, out_console(), console)
        if options["compare"]:
            done, comparison = show.compared(encoded, keywords, options["as_json"])
        else:
            done, comparison = show.decoded(encoded, keywords, live=not options["as_json"]), None
        if options["as_json"]:
            settings = {name: options[name] for name in SETTINGS}
            document = settings | _document(texts, done, comparison)
            click.echo(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))
    _fail_on_errors(done)
    if any(row.finish_reason.value == "abort" for row in done.rows):
        console.print("Stopped by Ctrl-C: texts that were not finished end where they were.", style="yellow")
        raise click.exceptions.Exit(INTERRUPTED)


def _keywords(keywords: dict[str, Any], copies: int) -> dict[str, Any]:
    from forerun.keywords import is_sampled

    if copies == 1:
        return keywords
    if not is_sampled(keywords):
        raise InvalidArgument(f"--n {copies}: greedy texts are all the same; give a --temperature above 0")
    return keywords | {"num_return_sequences": copies}


class _Show:
    """Decoding, with whoever watches kept informed."""

    def __init__(self, loaded: LoadedPair, prompts: Sequence[Prompt], out: Console, err: Console) -> None:
        from forerun.cli.console import TextOut

        self.loaded, self.prompts, self.err = loaded, prompts, err
        self.text = TextOut(out)

    def decoded(self, prompts: Sequence[Sequence[int]], keywords: dict[str, Any], live: bool) -> GenerateResult:
        """Run; one text on a terminal is shown as it comes, several after a progress bar."""
        from forerun.cli.run import ready_decoder, run, stop_on_interrupt

        decoder = ready_decoder(self.loaded, self.err, prompts, keywords)
        rows = len(prompts) * keywords.get("num_return_sequences", 1)
        is_streamed = live and self.text.is_terminal and rows == 1
        watching = self.text.streamed(self.loaded.tokenizer) if is_streamed else self._bar(rows, keywords)
        with stop_on_interrupt() as stopped, watching as show:
            done = run(decoder, prompts, keywords, show, stopped)
        if live and not is_streamed:
            self._print_texts(done)
        if live:
            self._print_statistics(done)
        return done

    def compared(
        self, prompts: Sequence[Sequence[int]], keywords: dict[str, Any], as_json: bool
    ) -> tuple[GenerateResult, TextComparison]:
        from forerun.cli.compare import compare, comparison_table, explanations
        from forerun.measure.progress import Bar
        from forerun.measure.table import print_tables

        with Bar(self.err) as bar:
            try:
                comparison = compare(self.loaded, prompts, keywords, bar)
            except KeyboardInterrupt:
                self.err.print("Stopped by Ctrl-C: the comparison was not finished.", style="yellow")
                raise click.exceptions.Exit(INTERRUPTED) from None
        if not as_json:
            self._print_texts(comparison.speculative)
            self._print_statistics(comparison.speculative)
            print_tables([comparison_table(comparison)], self.err)
            for line in explanations(comparison):
                self.err.print(line, markup=False)
        return comparison.speculative, comparison

    @contextmanager
    def _bar(self, rows: int, keywords: dict[str, Any]) -> Iterator[Callable[[Progress], None]]:
        """For `run`: a bar over the tokens all rows may have; one that ends has none left."""
        from forerun.measure.progress import Bar

        budget: int = keywords["max_new_tokens"]
        left = [budget] * rows
        with Bar(self.err) as bar:
            bar.start(f"{rows} text{'s' * (rows > 1)}", total=budget * rows)

            def show(progress: Progress) -> None:
                gained = len(progress.tokens) if progress.finish_reason is None else left[progress.row]
                left[progress.row] -= gained
                bar.advance(gained)

            yield show

    def _print_texts(self, done: GenerateResult) -> None:
        first = True
        for number, rows in enumerate(done.ranking):
            for rank, row in enumerate(rows, start=1):
                if not first:
                    self.text.write("\n")
                first = False
                if self.text.is_terminal and len(done.rows) > 1:
                    click.secho(
                        _heading(self.prompts[number], number, rank, done.num_return_sequences, done.rows[row]),
                        bold=True,
                    )
                _print_row(self.text, self.loaded.tokenizer, done.rows[row])

    def _print_statistics(self, done: GenerateResult) -> None:
        from forerun.cli.console import legend
        from forerun.cli.statistics import statistics_table

        self.err.print()
        legend(self.err)
        self.err.print(statistics_table(done.stats, done.seconds))
        ends = sorted({row.finish_reason.value for row in done.rows})
        params = done.rows[0].request.params
        seed = "greedy" if params.is_greedy else f"seed {done.rows[0].request.seed}"
        self.err.print(f"ended by {', '.join(ends)}; {seed}", style="dim")


def _heading(prompt: Prompt, number: int, rank: int, copies: int, row: RowResult) -> str:
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    short = " ".join(text.split())
    short = short if len(short) <= 60 else short[:57] + "..."
    score = f" ({rank} of {copies}, mean log-probability {row.mean_logprob or 0:.2f})" if copies > 1 else ""
    return f"[{number + 1}] {short}{score}"


def _print_row(out: TextOut, tokenizer: Any, row: RowResult) -> None:
    from forerun.text import pieces

    for piece, origin in zip(pieces(tokenizer, row.tokens), row.origins, strict=True):
        out.write(piece, origin)
    out.write("\n")


def _document(prompts: Sequence[Prompt], done: GenerateResult, comparison: TextComparison | None) -> dict[str, Any]:
    """Everything about a run, ready for JSON."""
    entries = list(map(_entry, done.rows, done.texts, done.parameters))
    document = {
        "prompts": [
            {"prompt": prompts[number], "texts": [entries[row] for row in rows]}
            for number, rows in enumerate(done.ranking)
        ],
        "lossy": done.lossy,
        "seconds": done.seconds,
        "statistics": done.stats.as_dict(),
    }
    return document | ({} if comparison is None else {"compare": comparison.as_dict()})


def _entry(row: RowResult, text: str, parameters: dict[str, Any]) -> dict[str, Any]:
    biases = {
        str(token): str(bias) if bias == float("-inf") else bias for token, bias in parameters["logit_bias"].items()
    }
    return {
        "text": text,
        "token_ids": list(row.tokens),
        "origins": [origin.value for origin in row.origins],
        "finish_reason": row.finish_reason.value,
        "mean_logprob": row.mean_logprob,
        "error": row.error,
        "parameters": parameters | {"logit_bias": biases},
        "statistics": row.stats.as_dict(),
    }


def _fail_on_errors(done: GenerateResult) -> None:
    if errors := [row.error for row in done.rows if row.error]:
        raise NonFiniteLogits(f"{len(errors)} of {len(done.rows)} texts ended early: {errors[0]}")
