"""Published verification rules that bend the target's law. Never a default, and every result says which one it used.

Each is a value with parameters, and can be written as text: `lenient:0.5`, `sigmoid:alpha=-1e3,beta=1e3,as_published`.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from forerun.errors import InvalidArgument
from forerun.math.lossy import LossyRule
from forerun.math.ratio import Ensemble, Lenient
from forerun.math.sigmoid import Sigmoid
from forerun.math.topk_importance import TopKImportance

__all__ = ["EXAMPLES", "RULES", "Ensemble", "Lenient", "LossyRule", "Sigmoid", "TopKImportance", "parse"]

RULES: dict[str, type[Any]] = {
    "sigmoid": Sigmoid,
    "topk_importance": TopKImportance,
    "lenient": Lenient,
    "ensemble": Ensemble,
}
EXAMPLES = "sigmoid:alpha=-1e3,beta=1e3, topk_importance:50, lenient:0.5, ensemble:0.5"
WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def parse(text: str) -> LossyRule:
    """A rule from its text: one of the names of `RULES`, and behind a colon its values, by name or in order."""
    name, _, rest = text.partition(":")
    kind = RULES[name]
    values = _values(kind, text, [part.strip() for part in rest.split(",")] if rest else [])
    missing = [field.name for field in fields(kind) if field.default is MISSING and field.name not in values]
    if missing:
        raise InvalidArgument(f"rule={text!r}: say {' and '.join(missing)}, as in {EXAMPLES}")
    try:
        rule: LossyRule = kind(**values)
    except InvalidArgument as error:
        raise InvalidArgument(f"rule={text!r}: {error}") from None
    return rule


def _values(kind: type[Any], text: str, parts: list[str]) -> dict[str, Any]:
    """`0.5`, `factor=0.5` or, for what is true or false, its name alone."""
    types = {field.name: str(field.type) for field in fields(kind)}
    values: dict[str, Any] = {}
    for place, part in enumerate(parts):
        name, equals, value = part.partition("=")
        if not equals and types.get(part) == "bool":
            value = "true"
        elif not equals:
            name, value = list(types)[min(place, len(types) - 1)], part
        if name not in types:
            raise InvalidArgument(f"rule={text!r}: {name!r} is not one of its values: {', '.join(types)}")
        if name in values:
            raise InvalidArgument(f"rule={text!r}: {name} is given twice")
        values[name] = _value(types[name], name, value, text)
    return values


def _value(kind: str, name: str, value: str, text: str) -> Any:
    try:
        return WORDS[value.lower()] if kind == "bool" else {"int": int, "float": float}[kind](value)
    except (ValueError, KeyError):
        wanted = {"bool": "true or false", "int": "a whole number", "float": "a number"}[kind]
        raise InvalidArgument(f"rule={text!r}: {name}={value!r} is not {wanted}") from None
