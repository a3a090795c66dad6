"""Command-line options made from the library's dataclasses, and a help page that shows them in groups.

A settings dataclass is the one definition of a name, a type, a default and, in the docstring under the field, the help.
`options_from` turns its fields into options, `settings_from` the parsed options into an object of it:

    @click.command(cls=GroupedCommand)
    @options_from(TrainOptions, "Learning", "learning_rate", "steps", steps={"show_default": "one epoch"})
    def draft(**options):
        settings = settings_from(TrainOptions, options)

Only presentation is said at the command: the heading, a short form, a placeholder, a default in words. Ranges are
checked by the dataclass itself. Its module is imported for `--help`, so it should not need torch.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource

from forerun.config import LengthSettings, ModelSettings, SamplingParams, SpeculationSettings
from forerun.errors import ForerunError, InvalidArgument

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Function = TypeVar("Function", bound=Callable[..., Any])
Settings = TypeVar("Settings", bound="DataclassInstance")
OTHER = "Other"
LOSSLESS = ("token", "block", "coupled")
SPECULATION = "Speculation (only a lossy rule and --cache-dtype change the law of the text)"
SAMPLING = "Sampling (the law of the text)"


class GroupedOption(click.Option):
    """An option that knows its heading."""

    def __init__(self, *arguments: Any, group: str = OTHER, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.group = group


class NamesOptions(click.Command):
    """A command whose errors name its options: the library's name its fields, which nobody has typed."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ForerunError as error:
            if ctx.invoked_subcommand is None and error.args:
                error.args = (in_options(str(error.args[0]), self.params), *error.args[1:])
            raise


class GroupedCommand(NamesOptions):
    """A command whose help lists options under headings, in the order they were declared."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                groups.setdefault(getattr(param, "group", OTHER), []).append(record)
        for heading, records in sorted(groups.items(), key=lambda group: group[0] == OTHER):
            with formatter.section(heading):
                formatter.write_dl(records)


def in_options(message: str, params: Iterable[click.Parameter]) -> str:
    """`max_length=40: ...` as `--max-length 40: ...`, wherever it is an option of the command.

    A name right behind a colon, a comma, a dot or `Class(` is left as it is: a rule's values, or Python to be written.
    So is a part of a user's path, and the last word of a longer name, `files of the model=`.
    """
    options = {param.name: param for param in params if isinstance(param, click.Option)}

    def typed(match: re.Match[str]) -> str:
        if (option := options.get(match["name"])) is None:
            return match[0]
        flag = max(option.opts, key=len)
        if match["several"] is not None:
            return f"{flag} {','.join(part.strip() for part in match['several'].split(',') if part.strip())}"
        if match["flag"] is not None:
            flags = option.opts if match["flag"] == "True" else option.secondary_opts
            return flags[0] if flags else match[0]
        return f"{flag} "

    return _GIVEN.sub(typed, message)


_GIVEN = re.compile(
    r"(?<![\w.:,'/?&=\\-])(?<!\w\()(?<!\bthe )(?P<name>[a-z_]+)="
    r"(?:[(\[](?P<several>[\d., ]+)[)\]]|(?P<flag>True|False)\b|(?=[^\s,;:)]))"
)


def comma_separated(kind: type, *, repeats: bool = False) -> Callable[[str], tuple[Any, ...]]:
    """Reads a list such as `1,4,8` as a tuple; an entry that comes again is dropped, unless `repeats` keeps it."""

    def convert(text: str) -> tuple[Any, ...]:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if not parts:
            raise click.BadParameter(f"{text!r} names nothing; give one or more, separated by commas")
        try:
            values = [kind(part) for part in parts]
        except ValueError:
            raise click.BadParameter(
                f"{text!r}: give {_PLURALS[kind]} separated by commas, such as {_EXAMPLES[kind]}"
            ) from None
        return tuple(values if repeats else dict.fromkeys(values))

    return convert


_PLURALS = {int: "whole numbers", float: "numbers"}
_EXAMPLES = {int: "1,4,8", float: "0,0.7,1"}
_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


def option(group: str, *names: str, **settings: Any) -> Callable[[Function], Function]:
    """`click.option` under a heading. Defaults are shown (a flag is off); `show_default` may put them in words."""
    settings.setdefault("show_default", not settings.get("is_flag"))
    return click.option(*names, cls=GroupedOption, group=group, **settings)


def prompts_option(group: str, shown: str, text: str) -> Callable[[Function], Function]:
    """`--file`: prompts for the command, however it uses them."""
    kind = click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path)
    return option(group, "--file", "-f", type=kind, show_default=shown, help=f"{text} '-' reads standard input.")


def number(group: str, *names: str, least: int = 1, **settings: Any) -> Callable[[Function], Function]:
    """An option that takes a whole number of at least `least`."""
    settings.setdefault("metavar", "N")
    return option(group, *names, type=click.IntRange(min=least), **settings)


def _made_current(context: click.Context, parameter: click.Parameter, device: str | None) -> str | None:
    """A GPU that is named by its number becomes the process's: kernels and recordings go to the current one.

    What is no device is left to whoever loads the model, and says so.
    """
    kind, _, index = (device or "").partition(":")
    if kind == "cuda" and index.isdecimal():
        import torch  # not above: `--help` does without it

        if int(index) < torch.cuda.device_count():
            torch.cuda.set_device(int(index))
    return device


def options_from(
    kind: type[DataclassInstance], group: str, /, *names: str, given_only: bool = False, **changes: Mapping[str, Any]
) -> Callable[[Function], Function]:
    """Options for the named fields of a dataclass, or for all of them, under the heading `group`.

    `changes` holds, by field, settings of `click.option` that differ: `flags` for other or further names, `metavar`,
    `show_default` in words, `type`, `help`. With `given_only` an option that was not given is None, so that the library
    can tell it from one that was.
    """
    known = {field.name: field for field in fields(kind)}
    names = names or tuple(known)
    if unknown := (set(names) | changes.keys()) - known.keys():
        raise AttributeError(f"{kind.__name__} has no field {', '.join(sorted(unknown))}")
    hints, helps = get_type_hints(kind), field_docs(kind)
    decorators = []
    for name in names:
        settings = {"help": helps.get(name), **_click_type(hints[name]), "default": _default(known[name])}
        settings |= _flag(name, settings["default"]) if settings.get("type") is bool else {"flags": (_dashed(name),)}
        if given_only:
            settings |= {"default": None} | ({"show_default": str(d)} if (d := settings["default"]) is not None else {})
        settings |= changes.get(name, {})
        if name == "device":
            settings.setdefault("callback", _made_current)
        if settings.get("multiple"):
            settings["help"] = f"{settings['help']} May be given again."
        decorators.append(option(group, *settings.pop("flags"), name, **settings))
    return stack(*decorators)


def settings_from(kind: type[Settings], options: Mapping[str, Any], /, **more: Any) -> Settings:
    """An object of the dataclass, from those options that bear names of its fields, and from `more`.

    An option that is None leaves the field's own default.
    """
    hints = get_type_hints(kind)
    chosen = {
        field.name: _as_enum(hints[field.name], options[field.name])
        for field in fields(kind)
        if options.get(field.name) is not None
    }
    return kind(**{**chosen, **more})


def typed_options(ctx: click.Context, names: Collection[str] | None = None) -> list[str]:
    """Those options of the command, or of `names` among them, that stand on the command line."""
    return [
        param.opts[0]
        for param in ctx.command.params
        if param.name and (names is None or param.name in names)
        if ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
    ]


def stack(*decorators: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """One decorator that applies several; the first of them is shown first."""

    def apply(function: Function) -> Function:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


@cache
def field_docs(kind: type) -> dict[str, str]:
    """The docstring under each field of a class and of those it inherits from, on one line."""
    docs: dict[str, str] = {}
    for one in reversed(kind.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                docs[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return docs


def _default(field: Field[Any]) -> Any:
    """As it is shown: a tuple as it would be typed."""
    default = None if field.default is MISSING else field.default
    if field.default_factory is not MISSING:
        default = field.default_factory()
    if isinstance(default, StrEnum):
        return default.value
    if isinstance(default, tuple):
        return ",".join(f"{part:g}" if isinstance(part, float) else str(part) for part in default) or None
    return default


def _dashed(name: str) -> str:
    return "--" + name.replace("_", "-")


def _flag(name: str, default: Any) -> dict[str, Any]:
    """`--x` for what is off by default, `--x/--no-x` for what is on or undecided."""
    if default is False:
        return {"flags": (_dashed(name),), "is_flag": True, "type": None}
    return {"flags": (f"{_dashed(name)}/{_dashed('no_' + name)}",), "type": None}


def _without_none(hint: Any) -> Any:
    """X of `X | None`."""
    if get_origin(hint) not in (Union, UnionType):
        return hint
    (kind,) = (part for part in get_args(hint) if part is not NoneType)
    return kind


def _as_enum(hint: Any, value: Any) -> Any:
    kind = _without_none(hint)
    return kind(value) if isinstance(kind, type) and issubclass(kind, StrEnum) else value


def _click_type(hint: Any) -> dict[str, Any]:
    """What click needs to know of an annotation."""
    kind = _without_none(hint)
    if get_origin(kind) is Literal:
        return {"type": click.Choice(get_args(kind))}
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return {"type": click.Choice([member.value for member in kind])}
    if get_origin(kind) is tuple:
        part = get_args(kind)[0]
        return {"type": comma_separated(part), "metavar": f"{_METAVARS[part]},..."}
    if kind is bool:
        return {"type": bool}
    return {"type": kind, "metavar": _METAVARS[kind]} if kind in _METAVARS else {}  # the command says how to read it


def rule_text(value: str) -> str:
    """The text of a rule. Lossless ones are known by heart; the others are only looked at when one is named."""
    if value not in LOSSLESS:
        from forerun.rules import parse

        try:
            parse(value)
        except InvalidArgument as error:
            raise click.BadParameter(str(error)) from error
    return value


def model_options(function: Function) -> Function:
    """What is loaded, and where it runs."""
    model: Callable[[Function], Function] = options_from(
        ModelSettings, "Model", "model", model={"flags": ("--model", "-m"), "metavar": "NAME"}
    )
    return stack(model, place_options("Model", keeps_stored=True), quantize_options("Model"))(function)


def quantize_options(group: str) -> Callable[[Function], Function]:
    """Whether weights of the target and of a draft model are rounded."""
    shown = {"show_default": "not at all"}
    return options_from(
        ModelSettings, group, "quantize", "quantize_head", "draft_quantize", quantize=shown,
        quantize_head={"show_default": "as the device has it"}, draft_quantize=shown,
    )  # fmt: skip


def place_options(group: str, keeps_stored: bool = False) -> Callable[[Function], Function]:
    """Where the target runs, and in which type; `keeps_stored`, see `pair.stored_place`."""
    on_cpu = "as stored" if keeps_stored else "float32"
    return options_from(
        ModelSettings, group, "device", "dtype", "offline",
        device={"metavar": "DEVICE", "show_default": "a GPU where there is one, else cpu"},
        dtype={"metavar": "TYPE", "show_default": f"bfloat16 on a GPU, else {on_cpu}"},
    )  # fmt: skip


def parallel_options(group: str) -> Callable[[Function], Function]:
    """Over how many processes the target is split, and whether its draft model is."""
    return options_from(
        ModelSettings, group, "tensor_parallel", "draft_split",
        tensor_parallel={"type": click.IntRange(min=1), "metavar": "N"},
    )  # fmt: skip


def place_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """What `place_options` were given, as keywords of `load_model`."""
    return {name: options[name] for name in ("device", "dtype", "offline")}


RULE = {"type": rule_text, "metavar": "RULE"}


def speculation_options(policy: str = SpeculationSettings().policy) -> Callable[[Function], Function]:
    """How drafts are made and verified."""
    return options_from(
        SpeculationSettings, SPECULATION,
        draft={"flags": ("--draft", "-d"), "metavar": "DRAFTER"},
        tree={"metavar": "NODES[xWIDTH][:WAY]", "show_default": "none"},
        draft_top_k={"type": click.IntRange(min=1), "metavar": "K", "show_default": "off"},
        policy={"metavar": "POLICY", "default": policy},
        rule=RULE,
        kernels={"show_default": "$FORERUN_KERNELS, else auto"},
        cache_tokens={"type": click.IntRange(min=1), "metavar": "N", "show_default": "by the device"},
        cache_dtype={"show_default": "as the model"},
    )  # fmt: skip


def sampling_options(function: Function) -> Function:
    """What shapes the law. Nothing is given to the decoder that was not asked for."""
    parameters: Callable[[Function], Function] = options_from(
        SamplingParams, SAMPLING, given_only=True,
        temperature={
            "flags": ("--temperature", "-t"), "show_default": "0, greedy; 1 beside --top-k, --top-p or --min-p",
        },
        top_k={"metavar": "K", "show_default": "off"},
        top_p={"show_default": "1, off"},
        min_p={"show_default": "0, off"},
        repetition_penalty={"show_default": "1, off"},
        presence_penalty={"show_default": "0, off"},
        frequency_penalty={"show_default": "0, off"},
        logit_bias={"type": str, "multiple": True, "metavar": "ID=VALUE", "show_default": "none"},
    )  # fmt: skip
    seed: Callable[[Function], Function] = option(
        SAMPLING, "--seed", type=click.IntRange(min=0), metavar="N", show_default="drawn and reported",
        help="Same seed, prompts and settings: same text, up to rounding.",
    )  # fmt: skip
    return stack(parameters, seed)(function)


def length_options(max_new_tokens: int = LengthSettings().max_new_tokens) -> Callable[[Function], Function]:
    """Where the text ends."""
    return options_from(
        LengthSettings, "Length",
        max_new_tokens={"type": click.IntRange(min=1), "default": max_new_tokens},
        stop={"type": str, "multiple": True, "metavar": "TEXT", "show_default": "none"},
        max_time={
            "type": click.FloatRange(min=0, min_open=True), "metavar": "SECONDS", "show_default": "no limit",
        },
    )  # fmt: skip


# Option names that are also keywords of `SpeculativeDecoder.generate`.
KEYWORDS = (
    "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "max_time",
)  # fmt: skip


def generate_keywords(options: dict[str, Any]) -> dict[str, Any]:
    """Keywords for `generate`: only what was given, so that its defaults stay its own.

    Numbers that no row can be sampled with are refused here: loading a model first may take minutes.
    """
    keywords = {name: options[name] for name in KEYWORDS if options.get(name) is not None}
    if options.get("stop"):
        keywords["stop_strings"] = list(options["stop"])
    if options.get("logit_bias"):
        keywords["logit_bias"] = dict(map(_bias, options["logit_bias"]))
    settings_from(SamplingParams, keywords)
    return keywords


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise InvalidArgument(f"--logit-bias {text!r}: write ID=VALUE, such as 11=-2.5 or 11=-inf") from None
