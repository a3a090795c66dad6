"""Checks of single arguments: a plain Python value comes back, or an error with the name, the value and the remedy.

Scalars of numpy and tensors without dimensions count as the numbers they hold. True and False are no numbers, and a
float is no whole number, not even 3.0. Neither torch nor numpy is imported here: settings are read without them.
"""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NoReturn, TypeVar

from forerun.errors import InvalidArgument

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
FLOAT32_MAX = (2 - 2**-23) * 2.0**127  # logits are float32: what is larger is infinite there

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60


def shown(value: object) -> str:
    """`value` for a message: short whatever it is. Tensors and arrays are described, models and classes named."""
    if isinstance(value, type):
        return f"<class {value.__name__}>"
    if hasattr(value, "named_modules"):
        return f"<{type(value).__name__}>"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None and (len(shape) or _is_meta(value)):
        return f"<{type(value).__name__} of shape {tuple(shape)}, {dtype}>"
    try:
        return _short.repr(value)
    except Exception:  # of the value's own, or of an integer with too many digits
        return f"<{type(value).__name__}>"


def refuse(name: str, value: object, remedy: str) -> NoReturn:
    """Say that `value` cannot be honoured, and what can."""
    raise InvalidArgument(f"{name}={shown(value)}: {remedy}")


def integer(name: str, value: Any, low: int = INT64_MIN, high: int = INT64_MAX, remedy: str = "") -> int:
    """A whole number from `low` to `high`."""
    remedy = remedy or _range(low, high)
    if _is_bool(value) or not _is_scalar(value):
        refuse(name, value, f"must be a whole number; {remedy}")
    try:
        result = operator.index(value)
    except Exception:
        refuse(name, value, f"must be a whole number; {remedy}")
    if not low <= result <= high:
        refuse(name, value, remedy)
    return result


def number(name: str, value: Any, good: Callable[[float], bool] = lambda _: True, remedy: str = "") -> float:
    """A number for which `good` holds. NaN never is one."""
    complaint = f"must be a number; {remedy}" if remedy else "must be a number"
    if _is_bool(value) or isinstance(value, str | bytes) or not _is_scalar(value):
        refuse(name, value, complaint)
    try:
        plain = float(value)
    except Exception:  # no number, or too large for a float
        refuse(name, value, complaint)
    if math.isnan(plain) or not good(plain):
        refuse(name, value, remedy or complaint)
    return plain


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if not _is_bool(value) or not _is_scalar(value) or _is_meta(value):
        refuse(name, value, "must be True or False")
    return bool(value)


def at_least(settings: object, low: float, *names: str, remedy: str = "") -> None:
    """Raise unless these fields of a settings object, numbers or tuples of them, are >= `low`; None is no choice."""
    _check_fields(settings, names, lambda value: value >= low, f"must be at least {low}", remedy)


def above(settings: object, low: float, *names: str, remedy: str = "") -> None:
    """As `at_least`, where `low` itself is too little."""
    _check_fields(settings, names, lambda value: value > low, f"must be above {low}", remedy)


def finite(settings: object, *names: str) -> None:
    """Raise where one of these fields is without end: whoever has no limit leaves it out, or gives a large one."""
    _check_fields(settings, names, math.isfinite, "must be finite", "")


def header_key(name: str, key: str) -> str:
    """A key as a header can hold it, without the blanks around it that files leave. The message does not repeat it."""
    bare = key.strip()
    if not bare or not bare.isascii() or not bare.isprintable():
        raise InvalidArgument(f"{name}: must be letters, digits and signs of ASCII: clients cannot send anything else")
    return bare


def _check_fields(
    settings: object, names: Sequence[str], good: Callable[[float], bool], rule: str, remedy: str
) -> None:
    for name in names:
        value = getattr(settings, name)
        if isinstance(value, tuple) and not (value and all(map(good, value))):
            refuse(name, value, f"needs one or more, and each {rule}{remedy and '; ' + remedy}")
        if not isinstance(value, tuple) and value is not None and not good(value):
            refuse(name, value, f"{rule}{remedy and '; ' + remedy}")


def entries(value: Any) -> list[Any] | None:
    """What a list, tuple, range, or array or tensor of one dimension holds; None for anything else."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return list(value)
    if getattr(value, "ndim", None) == 1 and hasattr(value, "tolist"):
        try:
            return list(value.tolist())
        except Exception:  # without contents: a meta tensor
            return None
    return None


def list_of(name: str, value: Any, check: Callable[[str, Any], T], remedy: str) -> list[T]:
    """Each entry of a list, checked."""
    values = entries(value)
    if values is None:
        refuse(name, value, remedy)
    return [check(f"{name}[{place}]", entry) for place, entry in enumerate(values)]


def one_or_several(name: str, value: Any, check: Callable[[str, Any], T]) -> T | list[T]:
    """One value, or a list of them."""
    values = entries(value)
    if values is None:
        return check(name, value)
    return [check(f"{name}[{place}]", entry) for place, entry in enumerate(values)]


def choice(name: str, value: Any, kind: type[E]) -> E:
    """A member of an enumeration, or its name."""
    if not isinstance(value, str) or value not in list(kind):
        refuse(name, value, f"choose one of {', '.join(kind)}")
    return kind(value)


def mapping(name: str, value: Any, remedy: str) -> Mapping[Any, Any]:
    """A dictionary or its like."""
    if not isinstance(value, Mapping):
        refuse(name, value, remedy)
    return value


def methods(name: str, value: Any, verbs: Sequence[str], remedy: str) -> Any:
    """An object that has these methods. A class has them too, but wants to be called first."""
    if isinstance(value, type):
        refuse(name, value, f"is a class; give an object of it, {value.__name__}(...)")
    if isinstance(value, str | bytes) or not all(callable(getattr(value, verb, None)) for verb in verbs):
        refuse(name, value, remedy)
    return value


def check_whole(text: str, name: str) -> None:
    """Refuse half of a character, which has no UTF-8 and no tokens.

    JSON has it (\\ud83d alone), and Python makes it of bytes that are no text where the locale is C.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{name} holds half of a character (a surrogate, {text[error.start]!a}, at place {error.start + 1})"
        ) from error


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same, tensors in every element wherever they lie. What cannot be compared is not."""
    try:
        if hasattr(one, "shape") or hasattr(other, "shape"):
            first, second = (value.cpu() if hasattr(value, "cpu") else value for value in (one, other))
            return bool(first.shape == second.shape and (first == second).all())
        return bool(one == other)
    except Exception:  # of other types, or a comparison of the value's own
        return False


def _range(low: int, high: int) -> str:
    if (low, high) == (INT64_MIN, INT64_MAX):
        return "must fit 64 bits, sign included"
    return f"must be at least {low}" if high == INT64_MAX else f"must be from {low} to {high}"


def _is_bool(value: Any) -> bool:
    """Also numpy's and torch's."""
    dtype = getattr(value, "dtype", None)
    return isinstance(value, bool) or (dtype is not None and str(dtype) in ("bool", "torch.bool"))


def _is_scalar(value: Any) -> bool:
    """A tensor or array of one element in a list is a list."""
    return bool(getattr(value, "ndim", 0) == 0)


def _is_meta(value: Any) -> bool:
    return bool(getattr(value, "is_meta", False))
