"""Every rule by which drafts can be judged, and how to write one down.

The lossless ones are `Rule`; the others are values with parameters, each a published method that bends the target's
law. All are written as text in one way: `token`, `lenient:0.5`, `sigmoid:alpha=-1e3,beta=1e3,as_published`.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import Any

from forerun.arguments import refuse
from forerun.errors import InvalidArgument
from forerun.math.ensemble import Ensemble
from forerun.math.lenient import Lenient
from forerun.math.lossy import LossyRule
from forerun.math.sigmoid import Sigmoid
from forerun.math.topk_importance import TopKImportance
from forerun.types import Rule

__all__ = ["AnyRule", "Ensemble", "Lenient", "LossyRule", "Rule", "Sigmoid", "TopKImportance", "parse", "warning"]

AnyRule = Rule | LossyRule
LOSSY: dict[str, type[Any]] = {
    "sigmoid": Sigmoid,
    "topk_importance": TopKImportance,
    "lenient": Lenient,
    "ensemble": Ensemble,
}
EXAMPLES = "sigmoid:alpha=-1e3,beta=1e3, topk_importance:50, lenient:0.5, ensemble:0.5"
WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def parse(rule: AnyRule | str) -> AnyRule:
    """A rule from its text: a name, and behind a colon its values, by name or in order. A rule stays what it is."""
    if isinstance(rule, Rule | LossyRule):
        return rule
    if not isinstance(rule, str):
        refuse("rule", rule, "give a Rule, a lossy rule of forerun.rules, or the text of one")
    name, colon, rest = rule.partition(":")
    if name in LOSSY:
        return _make(LOSSY[name], rule, rest)
    if name in list(Rule) and not colon:
        return Rule(name)
    if name in list(Rule):
        raise InvalidArgument(f"rule={rule!r}: {name!r} takes no values; leave out {':' + rest!r}")
    near = get_close_matches(name, [*Rule, *LOSSY], n=1)
    hint = f"did you mean {str(near[0])!r}? " if near else ""
    raise InvalidArgument(
        f"rule={rule!r}: {hint}choose one of {', '.join(Rule)} (lossless), or a lossy one: {EXAMPLES}"
    )


def warning(rule: AnyRule) -> str | None:
    """None for a lossless rule; else the sentence that says that the text does not follow the target."""
    return rule.warning if isinstance(rule, LossyRule) else None


def _make(kind: type[Any], text: str, rest: str) -> LossyRule:
    given = _values(kind, text, [part.strip() for part in rest.split(",")] if rest else [])
    missing = [field.name for field in fields(kind) if field.default is MISSING and field.name not in given]
    if missing:
        raise InvalidArgument(f"rule={text!r}: say {' and '.join(missing)}, as in {EXAMPLES}")
    try:
        made: LossyRule = kind(**given)
    except InvalidArgument as error:
        raise InvalidArgument(f"rule={text!r}: {error}") from None
    return made


def _values(kind: type[Any], text: str, parts: list[str]) -> dict[str, Any]:
    """`0.5`, `factor=0.5` or, for what is true or false, its name alone."""
    types = {field.name: str(field.type) for field in fields(kind)}
    found: dict[str, Any] = {}
    for place, part in enumerate(parts):
        name, equals, value = part.partition("=")
        if not equals and types.get(part) == "bool":
            value = "true"
        elif not equals:
            name, value = list(types)[min(place, len(types) - 1)], part
        if name not in types:
            raise InvalidArgument(f"rule={text!r}: {name!r} is not one of its values: {', '.join(types)}")
        if name in found:
            raise InvalidArgument(f"rule={text!r}: {name} is given twice")
        found[name] = _value(types[name], name, value, text)
    return found


def _value(kind: str, name: str, value: str, text: str) -> Any:
    try:
        return WORDS[value.lower()] if kind == "bool" else {"int": int, "float": float}[kind](value)
    except (ValueError, KeyError):
        wanted = {"bool": "true or false", "int": "a whole number", "float": "a number"}[kind]
        raise InvalidArgument(f"rule={text!r}: {name}={value!r} is not {wanted}") from None
