"""From options as typed to what the decoder takes."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from forerun.errors import InvalidArgument

if TYPE_CHECKING:
    from forerun.drafters.base import Drafter
    from forerun.policy.base import Policy

AUTO = "auto"  # known once the target is: see `forerun.drafters.default_drafter`
KINDS = ("auto", "lookup", "none", "random", "early:N", "ngram:FILE", "shared:NAME", "module:Class")
# Option names that are also keywords of `SpeculativeDecoder.generate`.
KEYWORDS = (
    "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "max_time",
)  # fmt: skip


def generate_keywords(options: dict[str, Any]) -> dict[str, Any]:
    """Keywords for `generate`: only what was given, so that its defaults stay its own."""
    keywords = {name: options[name] for name in KEYWORDS if options.get(name) is not None}
    if options.get("stop"):
        keywords["stop_strings"] = list(options["stop"])
    if options.get("logit_bias"):
        keywords["logit_bias"] = dict(map(_bias, options["logit_bias"]))
    return keywords


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise InvalidArgument(f"--logit-bias {text!r}: write ID=VALUE, such as 11=-2.5 or 11=-inf") from None


def make_policy(text: str) -> str | int | Policy:
    """'auto', a number, 'hf' or 'bass'."""
    from forerun.policy import BassHeuristic, Constant, HfHeuristic

    if text == "auto":
        return text
    if text == "hf":
        return HfHeuristic()
    if text == "bass":
        return BassHeuristic()
    try:
        return Constant(int(text))
    except ValueError:
        raise InvalidArgument(f"--policy {text!r}: give auto, hf, bass, or a draft length such as 4") from None


def make_tree(text: str | None) -> dict[str, Any] | None:
    """Settings of a tree from 'NODES', 'NODESxWIDTH', 'NODES:WAY' or 'NODESxWIDTH:WAY'."""
    from forerun.types import Siblings

    if text is None:
        return None
    found = re.fullmatch(r"(\d+)(?:x(\d+))?(?::(\w+))?", text.strip())
    if found is None or (found[3] is not None and found[3] not in tuple(Siblings)):
        raise InvalidArgument(f"--tree {text!r}: write NODES, NODESxWIDTH or NODESxWIDTH:sampled, such as 12x3")
    given = {"nodes": found[1] and int(found[1]), "width": found[2] and int(found[2]), "siblings": found[3]}
    return {name: value for name, value in given.items() if value is not None}


def shaped(drafter: Drafter | None, tree: dict[str, Any] | None, top_k: int | None) -> Drafter | None:
    """The drafter as --tree and --draft-top-k would have it."""
    if tree is None and top_k is None:
        return drafter
    if drafter is None:
        raise InvalidArgument("--tree and --draft-top-k need a drafter; --draft none has none")
    from forerun.drafters import TopK, with_trees

    grown = drafter if tree is None else with_trees(drafter, **tree)
    return grown if top_k is None else TopK(grown, top_k)


def make_drafter(text: str, as_model: Callable[[str, bool], Drafter] | None = None, **loading: Any) -> Drafter | None:
    """The drafter a name stands for; several with commas form a chain.

    `as_model` makes one of a model's name and whether it reads with the target's encoder; without it, `load_model`
    does, with `loading`.
    """
    from forerun.drafters import Chain

    names = [name.strip() for name in text.split(",")]
    if names == ["none"]:
        return None
    for word in ("none", AUTO):
        if word in names:
            raise InvalidArgument(f"--draft {text!r}: {word!r} stands alone; leave it out of the list")
    parts = [_one_drafter(name, as_model or partial(_text_model, **loading)) for name in names]
    return parts[0] if len(parts) == 1 else Chain(*parts)


def _text_model(name: str, shares_encoder: bool, **loading: Any) -> Drafter:
    from forerun.drafters import DraftModel
    from forerun.loading import load_model

    model, tokenizer = load_model(name, encoder_decoder=True, **loading)
    return DraftModel(model, tokenizer=tokenizer, shares_encoder=shares_encoder)


def _one_drafter(name: str, as_model: Callable[[str, bool], Drafter]) -> Drafter:
    from forerun.drafters import EarlyExit, NgramTable, PromptLookup, RandomDraft, from_folder
    from forerun.loading.drafter_folder import is_drafter_folder

    kind, _, rest = name.partition(":")
    if name == "lookup":
        return PromptLookup()
    if name == "random":
        return RandomDraft()
    if kind == "early":
        return EarlyExit(_layers(name, rest))
    if kind == "ngram":
        return NgramTable.load(rest or name)
    if is_drafter_folder(name):
        return from_folder(name)
    if kind == "shared" and rest:
        return as_model(rest, True)
    _refuse_misspelt(name, kind)
    return _drafter_of_class(name) or as_model(name, False)


def _drafter_of_class(name: str) -> Drafter | None:
    """A user's own class named `module:Class`, made without arguments; None for a name of any other form.

    The module may lie in the folder the command is run in, as with `python -m`.
    """
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
        return None
    module, _, made_by = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        drafter = getattr(importlib.import_module(module), made_by)()
    except (ImportError, AttributeError, TypeError) as error:
        raise InvalidArgument(
            f"--draft {name!r}: no drafter could be made of it ({error}); write module:Class, a class in a module that "
            "Python finds from here and that takes no arguments"
        ) from error
    if not callable(getattr(drafter, "propose", None)):
        raise InvalidArgument(f"--draft {name!r}: {made_by} has no method propose; see docs/drafters.md")
    return cast("Drafter", drafter)


def _layers(name: str, text: str) -> int:
    if not text.isdigit():
        raise InvalidArgument(f"--draft {name!r}: say how many layers, such as early:8")
    return int(text)


def _refuse_misspelt(name: str, kind: str) -> None:
    """A word close to a known kind is no model: better said now than after asking the Hub for it."""
    near = difflib.get_close_matches(kind, [known.partition(":")[0] for known in KINDS], n=1, cutoff=0.7)
    if near or not name:
        hint = f"did you mean {near[0]!r}?" if near else "it is empty;"
        raise InvalidArgument(
            f"--draft {name!r}: {hint} There are {', '.join(KINDS)}, or a model's name, folder or .gguf file"
        )
