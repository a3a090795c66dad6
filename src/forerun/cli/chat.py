"""`forerun chat`: talk to a model. What was said stays in its cache, so every turn only reads what is new."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from forerun.cli.options import (
    GroupedCommand,
    generate_keywords,
    length_options,
    model_options,
    option,
    parallel_options,
    sampling_options,
    speculation_options,
)
from forerun.cli.talk import Talk
from forerun.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.cli.pair import LoadedPair
    from forerun.decoder import GenerateResult

LEAST_ANSWER = 64  # tokens of the context kept free for an answer
WARM_UP = ((1, 2, 3, 4),)
"""Any prompt will do to compile what rounds use."""


@click.command(cls=GroupedCommand)
@option("Prompt", "--system", metavar="TEXT", show_default="the template's own", help="System message.")
@option(
    "Server", "--server", metavar="URL", show_default="none, the model runs here",
    help="Talk to a model of this server, which speaks OpenAI's HTTP interface; --model is its name there.",
)  # fmt: skip
@option("Server", "--api-key", metavar="KEY", show_default="$FORERUN_API_KEY, else none", help="For the server.")
@model_options
@parallel_options("Model")
@speculation_options()
@sampling_options
@length_options(max_new_tokens=512)
@option("Output", "--quiet", "-q", is_flag=True, help="Only the answers.")
@click.pass_context
def chat(ctx: click.Context, /, **options: Any) -> None:
    """Talk to a model. /help lists commands; Ctrl-C stops an answer, Ctrl-D leaves.

    From a pipe every line is a turn, and only the answers go to standard output. A turn that does not fit the model's
    context or --cache-tokens, one that its template refuses, and an unknown command, is answered by an empty line;
    standard error says why, and the exit code is 1. So it is where a model's numbers fail in an answer, which ends
    there.
    """
    from forerun.cli.console import err_console, out_console

    console = err_console(options["quiet"])
    if options["server"] is not None:
        from forerun.cli.chat_server import connect

        connect(ctx, options, out_console(), console).run()
        return
    if options["api_key"] is not None:
        raise InvalidArgument("--api-key is for a --server: give its address, too")
    _talk_here(options, console)


def _talk_here(options: dict[str, Any], console: Console) -> None:
    from forerun.cli.console import note, out_console, plain_warnings
    from forerun.cli.pair import load
    from forerun.prompts import uses_template

    keywords = generate_keywords(options)
    with plain_warnings(console):
        loaded = load(options, console)
        if not uses_template(loaded.tokenizer):
            raise InvalidArgument(
                f"{options['model']!r} has no chat template, so it cannot be talked to: continue texts with "
                "`forerun generate`, or choose a model that was trained for chats"
            )
        session = Session(loaded, keywords, options["system"], out_console(), console)
        if (lossy := session.decoder.engine.lossy) is not None:
            note(console, f"{lossy}.")
        session.run()


class Session(Talk):
    """With a model in this process."""

    def __init__(
        self, loaded: LoadedPair, keywords: dict[str, Any], system: str | None, out: Console, err: Console
    ) -> None:
        from forerun.cli.conversation import Conversation
        from forerun.cli.run import ready_decoder
        from forerun.engine import Stats

        super().__init__(system, out, err)
        self.keywords = keywords
        self.decoder = ready_decoder(loaded, err, WARM_UP, keywords, keep_rows=1)
        self.conversation = Conversation(loaded.tokenizer, system)
        self.stats, self.seconds = Stats(), 0.0

    def reset(self) -> None:
        self.conversation.system = self.system
        self.conversation.reset()

    def answer(self, question: str) -> None:
        limit, longest = self._limit(), self.keywords["max_new_tokens"]
        reserve = min(longest, LEAST_ANSWER)
        try:
            self.conversation.ask(question)
            prompt, dropped = self.conversation.fit(limit, reserve)
        except InvalidArgument as error:
            self.refuse(error)
            return
        if dropped:
            self.say(
                f"The context of {limit} tokens is full: the oldest {dropped} turns were dropped. /reset starts anew."
            )
        room = longest if limit is None else min(longest, limit - len(prompt))
        self._finish(self._stream(prompt, self.keywords | {"max_new_tokens": room}))

    def _limit(self) -> int | None:
        """Tokens that a conversation may have: as many as the model's context and the caches hold."""
        engine = self.decoder.engine
        caches = [engine.target.cache, *(() if engine.drafting.drafter is None else engine.drafting.drafter.caches)]
        limits = [engine.target.context_length, *(cache.num_tokens for cache in caches)]
        return min((limit for limit in limits if limit is not None), default=None)

    def _stream(self, prompt: list[int], keywords: dict[str, Any]) -> GenerateResult:
        from forerun.cli.run import run, stop_on_interrupt

        with stop_on_interrupt() as stopped, self.text.streamed(self.conversation.tokenizer) as show:
            return run(self.decoder, [prompt], keywords, show, stopped)

    def _finish(self, done: GenerateResult) -> None:
        from forerun.cli.statistics import one_line

        row = done.rows[0]
        self.conversation.answer(row.tokens)
        self.stats, self.seconds = self.stats.plus(done.stats), self.seconds + done.seconds
        if row.error:
            self.refuse(row.error, has_line=True)
        elif self.text.is_terminal:
            self.err.print(f"{one_line(done.stats, done.seconds)}; ended by {row.finish_reason.value}", style="dim")

    def print_statistics(self) -> None:
        from forerun.cli.console import legend
        from forerun.cli.statistics import statistics_table

        legend(self.err)
        self.err.print(statistics_table(self.stats, self.seconds))
