"""Prompts that begin alike belong to the same replica, which has the keys of what they share.

A prompt is told by hashes of its beginnings, the shortest first: of its first block of text, its first two, and so on.
Two prompts share as many hashes as blocks, and nobody who routes has to see the texts.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

BLOCK = 256  # characters: some 64 tokens, less than that is computed again in no time
MOST_BLOCKS = 32  # of a prompt: whoever shares 8192 characters will rarely be told apart by more
MOST_KNOWN = 100_000  # beginnings remembered, some 20 MB
DIGEST_BYTES = 8

Replica = TypeVar("Replica", bound=Hashable)


def prefixes(body: bytes) -> list[str]:
    """Hashes of the beginnings of the prompt in a request's body; none where there is no prompt to be seen."""
    try:
        asked = json.loads(body)
        text = _text(asked) if isinstance(asked, dict) else ""
    except (ValueError, RecursionError):  # nested too deeply: the application says so
        return []
    hashes, running = [], hashlib.blake2b(digest_size=DIGEST_BYTES)
    for block in _blocks(text):
        running.update(block)
        hashes.append(running.hexdigest())
    return hashes


def _text(asked: Mapping[str, Any]) -> str:
    """The prompt as one text in which nothing comes before what the model reads first."""
    prompt = asked.get("messages", asked.get("prompt"))
    if isinstance(prompt, str) or prompt is None:
        return prompt or ""
    tools = asked.get("tools")  # which templates put in front of the messages
    return json.dumps([*(tools if isinstance(tools, list) else ()), prompt], ensure_ascii=False)


def _blocks(text: str) -> Iterator[bytes]:
    """Whole blocks; a text that is shorter than one is a block of its own, so that it meets itself."""
    whole = min(len(text) // BLOCK, MOST_BLOCKS)
    for at in range(whole):
        yield text[at * BLOCK : (at + 1) * BLOCK].encode("utf-8", "surrogatepass")
    if text and not whole:
        yield text.encode("utf-8", "surrogatepass")


class PrefixHolders(Generic[Replica]):
    """Where beginnings were sent last."""

    def __init__(self, most: int = MOST_KNOWN) -> None:
        self._replicas: OrderedDict[str, Replica] = OrderedDict()
        self._most = most

    def note(self, hashes: Sequence[str], replica: Replica) -> None:
        for one in hashes:
            self._replicas[one] = replica
            self._replicas.move_to_end(one)
        while len(self._replicas) > self._most:
            self._replicas.popitem(last=False)

    def holder(self, hashes: Sequence[str], loads: Mapping[Replica, int], slack: int) -> Replica | None:
        """The replica that has the longest beginning of these, unless it has `slack` requests more than the one that
        has fewest; None where that is so or nobody has any. `loads` are requests under way, by replica that lives."""
        for one in reversed(hashes):
            replica = self._replicas.get(one)
            if replica in loads:
                assert replica is not None
                return replica if loads[replica] - min(loads.values()) < slack else None
        return None
