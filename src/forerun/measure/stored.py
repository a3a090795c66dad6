"""Stored JSON as the dataclass it was written from: the annotations say what is expected, the error what differs.

One reader for all of them, so that a new field is checked without anybody writing a check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from forerun.arguments import flag, integer, list_of, mapping, refuse


def read(kind: Any, value: Any, name: str) -> Any:
    """`value` as a field annotated with `kind` holds it; `name` is its place in the file."""
    origin, inside = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _dataclass(kind, value, name)
    if origin is UnionType:  # only ever with None
        return None if value is None else read(inside[0], value, name)
    if origin is tuple:
        return _tuple(inside, value, name)
    if origin is not None and issubclass(origin, Mapping):
        content = mapping(name, value, "must be an object")
        return {key: read(inside[1], each, f"{name}[{key!r}]") for key, each in content.items()}
    if origin is not None:
        return list_of(name, value, lambda place, each: read(inside[0], each, place), "must be a list")
    return value if kind is Any else SCALARS[kind](name, value)


def _dataclass(kind: Any, value: Any, name: str) -> Any:
    content, hints = mapping(name, value, "must be an object"), get_type_hints(kind)
    for field in fields(kind):
        if field.name not in content and field.default is MISSING and field.default_factory is MISSING:
            refuse(name, value, f"lacks {field.name!r}")
    for key in content:
        if key not in hints:
            refuse(name, key, f"is no name it may hold; those are {', '.join(hints)}")
    return kind(**{key: read(hints[key], each, f"{name}.{key}") for key, each in content.items()})


def _tuple(inside: tuple[Any, ...], value: Any, name: str) -> tuple[Any, ...]:
    values = list_of(name, value, lambda place, each: read(inside[0], each, place), "must be a list")
    if inside[-1] is not Ellipsis and len(values) != len(inside):
        refuse(name, value, f"must hold {len(inside)} entries")
    return tuple(values)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        refuse(name, value, "must be text")
    return value


def _number(name: str, value: Any) -> float:
    """As it is: 4 stays 4. NaN is one: what could not be measured leaves a gap in a picture."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(name, value, "must be a number")
    if isinstance(value, int):
        integer(name, value)  # one of hundreds of digits is no float
    return value


SCALARS: Mapping[Any, Callable[[str, Any], Any]] = {str: _text, int: integer, float: _number, bool: flag}
