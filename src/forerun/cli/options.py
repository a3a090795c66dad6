"""Options that several commands share, and a help page that shows them in groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])
OTHER = "Other"
LOSSLESS = ("token", "block", "coupled")
RULE_HELP = (
    "How drafts are judged. Lossless: 'token' one by one; 'block' accepts at least as much; 'coupled' gives the same "
    "tokens for a seed whatever the drafter, policy and batch. LOSSY, for studies: sampled text no longer follows the "
    "model, and the output says so: 'lenient:0.5', 'ensemble:0.5', 'sigmoid:alpha=-1e3,beta=1e3[,as_published]', "
    "'topk_importance:50'; see docs/exactness.md."
)
KERNELS = click.Choice(["auto", "on", "off"])
KERNELS_HELP = (
    "Compiled products on a CPU: 'auto' where they measure faster than torch's, 'on' wherever they fit, 'off' never. "
    "On a GPU Triton kernels for passes, draws and verification, unless 'off'. Numbers agree up to rounding."
)


def rule_text(value: str) -> str:
    """The text of a rule. Lossless ones are known by heart; the others are only looked at when one is named."""
    if value not in LOSSLESS:
        from forerun.errors import InvalidArgument
        from forerun.rules import parse

        try:
            parse(value)
        except InvalidArgument as error:
            raise click.BadParameter(str(error)) from error
    return value


class GroupedOption(click.Option):
    """An option that knows its heading."""

    def __init__(self, *arguments: Any, group: str = OTHER, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose help lists options under headings, in the order they were declared."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                groups.setdefault(getattr(param, "group", OTHER), []).append(record)
        for heading, records in sorted(groups.items(), key=lambda group: group[0] == OTHER):
            with formatter.section(heading):
                formatter.write_dl(records)


def option(group: str, *names: str, **settings: Any) -> Callable[[Function], Function]:
    """`click.option` under a heading. Defaults are shown (a flag is off); `show_default` may put them in words."""
    settings.setdefault("show_default", not settings.get("is_flag"))
    return click.option(*names, cls=GroupedOption, group=group, **settings)


def number(group: str, *names: str, least: int = 1, **settings: Any) -> Callable[[Function], Function]:
    """An option that takes a whole number of at least `least`."""
    settings.setdefault("metavar", "N")
    return option(group, *names, type=click.IntRange(min=least), **settings)


def _stack(*decorators: Callable[[Function], Function]) -> Callable[[Function], Function]:
    def apply(function: Function) -> Function:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


def model_options(function: Function) -> Function:
    """What is loaded, and where it runs."""
    group = "Model"
    model = option(group, "--model", "-m", default="embedded", metavar="NAME",
                   help="The target, whose text you want: a Hub name, a folder, a .gguf file, or 'embedded', the small "
                        "model that comes as a wheel.")  # fmt: skip
    return _stack(model, place_options(group))(function)


def place_options(group: str) -> Callable[[Function], Function]:
    """Where the target runs."""
    return _stack(
        option(group, "--device", metavar="DEVICE", show_default="a GPU where there is one, else cpu",
               help="cpu, cuda, cuda:0 ..."),
        option(group, "--dtype", metavar="TYPE", show_default="bfloat16 on a GPU, else float32",
               help="float32, bfloat16 or float16."),
        option(group, "--offline", is_flag=True, help="Use only what is on this machine."),
    )  # fmt: skip


def speculation_options(policy: str) -> Callable[[Function], Function]:
    """How drafts are made and judged. None of these changes the law of the text, but for a lossy rule."""
    group = "Speculation (changes the speed, never the law of the text, unless you ask for a lossy rule)"
    return _stack(
        option(group, "--draft", "-d", default="auto", metavar="DRAFTER",
               help="Who guesses: 'auto' is lookup, and the trained drafter that comes with Forerun where one fits; "
                    "'lookup' copies from the text so far; 'early:N' runs the target's first N layers; "
                    "'ngram:FILE' a counted table; a Hub name, folder or .gguf file a small model of its family, "
                    "'shared:NAME' one that reads with an encoder-decoder target's own encoder; a "
                    "folder that `forerun train draft` made; "
                    "'random' guesses blindly; 'none' decodes plainly. Several with commas: the first that has a "
                    "guess speaks."),
        option(group, "--tree", metavar="NODES[xWIDTH][:WAY]", show_default="none",
               help="Guess with a tree instead of a chain: at most NODES tokens and WIDTH alternatives each, such as "
                    "12x3. WAY is 'top', the most likely (default), or 'sampled', better where the text is sampled. "
                    "--policy is its depth. For draft models, trained drafters and early exits, also behind lookup."),
        option(group, "--draft-top-k", type=click.IntRange(min=1), metavar="K", show_default="off",
               help="Draw drafts from their K most likely tokens only. The text keeps its law."),
        option(group, "--policy", default=policy, metavar="POLICY",
               help="How long a draft is: 'auto' measures what pays here, and with a --seed goes by acceptance alone, "
                    "so that the text does not depend on time; a number is that length; 'hf' and 'bass' are published "
                    "rules of thumb."),
        option(group, "--rule", type=rule_text, metavar="RULE", default="token", help=RULE_HELP),
        option(group, "--attention", type=click.Choice(["auto", "pad", "split", "keys"]), default="auto",
               help="Rows of different lengths in one pass: padded to the longest, or one by one; 'keys' cuts long "
                    "rows over several programs of a GPU."),
        option(group, "--kernels", type=KERNELS, show_default="$FORERUN_KERNELS, else auto", help=KERNELS_HELP),
        option(group, "--compile/--no-compile", "compile", default=True,
               help="On a GPU, record rounds as CUDA graphs: seconds once, and little work for the host in every round "
                    "after."),
    )  # fmt: skip


def sampling_options(function: Function) -> Function:
    """What shapes the law. Nothing is given to the decoder that was not asked for."""
    group = "Sampling (the law of the text)"
    return _stack(
        option(group, "--temperature", "-t", type=float, show_default="0, greedy; 1 beside --top-k, --top-p or --min-p",
               help="Higher is freer; 0 always takes the most likely token."),
        option(group, "--top-k", type=int, metavar="K", show_default="off", help="Only the K most likely tokens."),
        option(group, "--top-p", type=float, show_default="1, off",
               help="Only the most likely tokens up to this mass."),
        option(group, "--min-p", type=float, show_default="0, off",
               help="Only tokens at least this fraction as likely as the likeliest."),
        option(group, "--repetition-penalty", type=float, show_default="1, off",
               help="Makes tokens of prompt and text less likely, as in transformers."),
        option(group, "--presence-penalty", type=float, show_default="0, off",
               help="Subtracted once from tokens of the text, as in OpenAI's API."),
        option(group, "--frequency-penalty", type=float, show_default="0, off",
               help="Subtracted for every time a token is in the text."),
        option(group, "--logit-bias", multiple=True, metavar="ID=VALUE", show_default="none",
               help="Add to one token's logit; -inf forbids it. May be given again."),
        option(group, "--seed", type=click.IntRange(min=0), metavar="N", show_default="drawn and reported",
               help="Same seed, prompts and settings: same text, up to rounding."),
    )(function)  # fmt: skip


def length_options(max_new_tokens: int) -> Callable[[Function], Function]:
    """Where the text ends."""
    group = "Length"
    return _stack(
        option(group, "--max-new-tokens", type=click.IntRange(min=1), metavar="N", default=max_new_tokens,
               help="At most so many tokens."),
        option(group, "--stop", multiple=True, metavar="TEXT", show_default="none",
               help="End with this text. May be given again. The model's own end token always counts."),
        option(group, "--max-time", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
               show_default="no limit", help="End with what there is after so many seconds."),
    )  # fmt: skip
