"""Prompts that begin alike meet the same replica, unless it is busier than others."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from forerun.serve.replicas.prefixes import BLOCK, MOST_BLOCKS, PrefixHolders, prefixes


def chat(*texts: str, **more: Any) -> list[str]:
    messages = [{"role": "user" if at % 2 else "system", "content": text} for at, text in enumerate(texts)]
    return prefixes(json.dumps({"model": "m", "messages": messages, **more}).encode())


def shared(one: list[str], other: list[str]) -> int:
    return len([0 for a, b in zip(one, other, strict=False) if a == b])


def test_a_chat_that_goes_on_keeps_its_beginning() -> None:
    first = chat("s" * 3 * BLOCK, "one")
    later = chat("s" * 3 * BLOCK, "one", "and its answer", "t" * BLOCK)
    assert len(first) >= 3 and len(later) > len(first)
    assert shared(first, later) == len(first)
    assert shared(first, chat("z" + "s" * 3 * BLOCK, "one")) == 0, "hashes of other beginnings are the same"


def test_what_stands_behind_the_difference_is_not_shared() -> None:
    one, other = (prefixes(json.dumps({"prompt": "a" * BLOCK + x + "b" * 3 * BLOCK}).encode()) for x in "xy")
    assert (len(one), shared(one, other)) == (4, 1)


def test_tools_come_first() -> None:
    assert shared(chat("s" * 2 * BLOCK, tools=[{"name": "a"}]), chat("s" * 2 * BLOCK, tools=[{"name": "b"}])) == 0


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"{}", b'{"prompt": ""}', b"\xff\xfe"])
def test_bodies_without_a_prompt(body: bytes) -> None:
    assert prefixes(body) == []


@pytest.mark.parametrize(("opened", "closed"), [(100_000, 0), (900, 900), (100_000, 100_000)])
def test_bodies_that_nest_too_deeply_are_left_to_the_application(opened: int, closed: int) -> None:
    """How deep is too deep is for Python's parser to say: what it can read is read rightly."""
    nested = b"[" * opened + b"]" * closed

    def deep(frames: int) -> list[str]:
        return deep(frames - 1) if frames else prefixes(b'{"messages": ' + nested + b"}")

    right = prefixes(json.dumps({"prompt": f"[{nested.decode()}]"}).encode()) if opened == closed else []
    assert deep(sys.getrecursionlimit() // 3) in ([], right)


def test_a_nested_body_that_can_be_read() -> None:
    assert prefixes(b'{"messages": [[["a"]]]}') == prefixes(json.dumps({"prompt": '[[[["a"]]]]'}).encode()) != []


def test_ids_short_prompts_and_long_ones() -> None:
    ids = prefixes(json.dumps({"prompt": [*range(900)]}).encode())
    assert len(ids) > 2 and ids == prefixes(json.dumps({"prompt": [*range(900)]}).encode())
    assert len(prefixes(b'{"prompt": "abc"}')) == 1
    assert len(prefixes(json.dumps({"prompt": "x" * (MOST_BLOCKS + 9) * BLOCK}).encode())) == MOST_BLOCKS


def test_the_longest_beginning_decides() -> None:
    holders: PrefixHolders[str] = PrefixHolders()
    holders.note(["a", "ab", "abc"], "left")
    holders.note(["a", "ax"], "right")
    loads = {"left": 0, "right": 0}
    assert holders.holder(["a", "ab", "abd"], loads, 4) == "left"
    assert holders.holder(["a", "ay"], loads, 4) == "right", "the last that was sent there"
    assert holders.holder(["b"], loads, 4) is None


def test_a_busy_home_or_a_dead_one_is_none() -> None:
    holders: PrefixHolders[str] = PrefixHolders()
    holders.note(["a", "ab"], "left")
    assert holders.holder(["a", "ab"], {"left": 3, "right": 0}, 4) == "left"
    assert holders.holder(["a", "ab"], {"left": 4, "right": 0}, 4) is None
    assert holders.holder(["a", "ab"], {"right": 0}, 4) is None


def test_what_was_not_asked_for_long_is_forgotten() -> None:
    holders: PrefixHolders[int] = PrefixHolders(most=2)
    for at, one in enumerate("aba"):
        holders.note([one], at)
    holders.note(["c"], 9)
    assert [holders.holder([one], {0: 0, 1: 0, 2: 0, 9: 0}, 1) for one in "abc"] == [2, None, 9]
