"""Damage of the kinds that files really suffer, and of the kinds that somebody with time on their hands would try."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

ODD_VALUES: tuple[Any, ...] = (None, True, -1, 0, 3.5, 1e308, "", "x", "\ud800", [], {}, [[]], {"a": 1}, ["a", 2])
ODD_WORDS = (
    b"\xff" * 8, b"\x00" * 8, b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80", b"\x01" + b"\x00" * 7,
    b"\x00" * 7 + b"\x10",
)  # fmt: skip


def damaged(content: bytes, seed: int) -> bytes:
    """The same bytes with something wrong with them."""
    rng = random.Random(seed)
    kinds: list[Callable[[bytes, random.Random], bytes]] = [_cut, _flip, _flip_early, _overwrite, _insert, _remove]
    if content[:1] in (b"{", b"["):
        kinds += [_odd_value] * 6
    return rng.choice(kinds)(content, rng)


def _cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def _flip(content: bytes, rng: random.Random) -> bytes:
    return _flipped(content, rng, len(content))


def _flip_early(content: bytes, rng: random.Random) -> bytes:
    """Headers come first."""
    return _flipped(content, rng, min(len(content), 256))


def _flipped(content: bytes, rng: random.Random, end: int) -> bytes:
    made = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        made[rng.randrange(end)] ^= 1 << rng.randrange(8)
    return bytes(made)


def _overwrite(content: bytes, rng: random.Random) -> bytes:
    """A size or an offset that points anywhere."""
    word, at = rng.choice(ODD_WORDS), rng.randrange(min(len(content), 512))
    return (content[:at] + word + content[at + len(word) :])[: len(content)]


def _insert(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content))
    return content[:at] + rng.randbytes(rng.randint(1, 16)) + content[at:]


def _remove(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content))
    return content[:at] + content[at + rng.randint(1, 16) :]


def _odd_value(content: bytes, rng: random.Random) -> bytes:
    """A JSON file with one value of another type, or one entry gone; the first line of many."""
    first, *others = content.split(b"\n") if content.count(b"\n{") else [content]
    try:
        value = json.loads(first)
    except ValueError:
        return content[:-1]
    places = list(_places(value))
    if not places:
        return content[:-1]
    holder, key = rng.choice(places)
    if rng.random() < 0.2:
        del holder[key]
    elif rng.random() < 0.1:
        return content.replace(json.dumps(str(key)).encode() + b":", json.dumps(str(key)).encode() + b":" + b"[" * 9999)
    else:
        holder[key] = rng.choice(ODD_VALUES)
    return b"\n".join([json.dumps(value).encode(), *others])


def _places(value: Any) -> Any:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from _places(value[key])
