"""Drafters by name, the same names in Python and on the command line."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from transformers import PreTrainedModel

from forerun import loading as models
from forerun.drafters.base import Drafter
from forerun.drafters.chain import Chain
from forerun.drafters.choose import default_drafter, from_folder
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.early_exit import EarlyExit
from forerun.drafters.ngram import NgramTable
from forerun.drafters.prompt_lookup import PromptLookup
from forerun.drafters.random_draft import RandomDraft
from forerun.drafters.self_draft import SelfDraft
from forerun.errors import InvalidArgument, kind_and_line
from forerun.loading.drafter_folder import is_drafter_folder

AUTO = "auto"
OFF = ("off", "none")
NAMES = ("auto", "lookup", "off", "none", "random", "early:N", "self:BITS", "ngram:FILE", "shared:NAME", "module:Class")

# Makes a drafter of a model's name, and of whether it reads with the target's encoder.
LoadDraftModel = Callable[[str, bool], Drafter]
LoadModel = Callable[..., models.LoadedModel]  # as `loading.load_model`


def named_drafter(
    name: str,
    target: PreTrainedModel | None = None,
    load: LoadDraftModel | None = None,
    *,
    option: str = "drafter",
    load_model: LoadModel | None = None,
    **loading: Any,
) -> Drafter | None:
    """The drafter that a name stands for; several with commas form a chain, "off" and "none" are no drafter.

    "auto" needs the `target`. A model is loaded with `loading` (device, dtype, offline, quantize) by `load_model`
    (`loading.load_model`), or by `load`. `option` is what error messages call the name.
    """
    if loading.get("quantize") is None:
        loading.pop("quantize", None)
    elif not draft_models(name):
        raise InvalidArgument(f"{option} {name!r}: only a draft model's weights can be quantised; leave that out")
    names = [part.strip() for part in name.split(",")]
    if len(names) == 1 and names[0] in OFF:
        return None
    if names == [AUTO] and target is not None:
        return default_drafter(target)
    for word in (*OFF, AUTO):
        if word in names:
            raise InvalidArgument(f"{option} {name!r}: {word!r} stands alone; leave it out of the list")
    load = load or partial(_load_text_model, load_model or models.load_model, **loading)
    parts = [_single(part, load, option, loading) for part in names]
    return parts[0] if len(parts) == 1 else Chain(*parts)


def draft_models(name: str) -> list[str]:
    """Those of one or several names, with commas, that may be a model's."""
    return [part.strip() for part in name.split(",") if _is_model(part)]


def is_draft_model(name: str) -> bool:
    """Whether a name is that of one model and of nothing else: no chain, no encoder's sharer, no class of a user's."""
    return draft_models(name) == [name] and not name.startswith("shared:") and not _is_class(name)


def _is_model(name: str) -> bool:
    """Whether a name may be that of a model: not a drafter without one, not one that was trained for its target."""
    kind = name.strip().partition(":")[0]
    known = {each.partition(":")[0] for each in NAMES if each not in ("shared:NAME", "module:Class")}
    return kind not in known and not is_drafter_folder(name.strip())


def _load_text_model(load_model: LoadModel, name: str, shares_encoder: bool, **loading: Any) -> Drafter:
    model, tokenizer = load_model(name, encoder_decoder=True, **loading)
    return DraftModel(model, tokenizer=tokenizer, shares_encoder=shares_encoder)


def _single(name: str, load: LoadDraftModel, option: str, loading: dict[str, Any]) -> Drafter:
    kind, _, rest = name.partition(":")
    if name == "lookup":
        return PromptLookup()
    if name == "random":
        return RandomDraft()
    if kind == "early":
        if not rest.isdecimal():
            raise InvalidArgument(f"{option} {name!r}: say how many layers, such as early:8")
        return EarlyExit(int(rest))
    if kind == "self":
        if rest not in ("", "8", "4"):
            raise InvalidArgument(f"{option} {name!r}: say how many bits, self:8 or self:4")
        return SelfDraft(int(rest or 8))
    if kind == "ngram":
        return NgramTable.load(rest or name)
    if is_drafter_folder(name):
        return from_folder(name, **{key: value for key, value in loading.items() if key != "quantize"})
    if kind == "shared" and rest:
        return load(rest, True)
    is_class = _is_class(name)
    if not (is_class and _is_module(kind)):
        refuse_misspelt(name, option)
    return _drafter_of_class(name, option) if is_class else load(name, False)


def _is_class(name: str) -> bool:
    """Whether it is written as one: `module:Class`."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) is not None


def _is_module(name: str) -> bool:
    """Whether Python finds a module of that name; it may lie in the current folder, as with `python -m`."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, AttributeError, ValueError):  # no package in front of a dot, or an empty part
        return False
    except Exception:  # its package is there and fails: whoever imports it says so
        return True


def _drafter_of_class(name: str, option: str) -> Drafter:
    """A user's own class named `module:Class`, made without arguments."""
    module, _, kind = name.partition(":")
    try:
        drafter = getattr(importlib.import_module(module), kind)()
    except Exception as error:  # whatever the user's module does
        raise InvalidArgument(
            f"{option} {name!r}: no drafter could be made of it ({kind_and_line(error)}); write module:Class, a class "
            "in a module that Python finds from here and that takes no arguments"
        ) from error
    if not callable(getattr(drafter, "propose", None)):
        raise InvalidArgument(f"{option} {name!r}: {kind} has no method propose; see docs/own-drafter.md")
    return cast("Drafter", drafter)


def refuse_misspelt(name: str, option: str) -> None:
    """A word close to a known name is no model: better said now than after asking the Hub for it."""
    kind = name.partition(":")[0]
    words = [known.partition(":")[0] for known in NAMES if known != "module:Class"]
    near = difflib.get_close_matches(kind, words, n=1, cutoff=0.7)
    if near or not name:
        hint = f"did you mean {near[0]!r}?" if near else "it is empty."
        raise InvalidArgument(
            f"{option} {name!r}: {hint} There are {', '.join(NAMES)}, or a model's name, folder or .gguf file"
        )
