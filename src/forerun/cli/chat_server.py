"""`forerun chat --server`: the same talk with a model behind OpenAI's HTTP interface. Nothing heavy is imported."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import click
from click.core import ParameterSource

from forerun.cli.options import KEYWORDS, generate_keywords, typed_options
from forerun.cli.talk import Talk
from forerun.client import ApiClient
from forerun.config import ModelSettings, SpeculationSettings, api_key
from forerun.errors import InvalidArgument, ServerError

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.types import Origin

PATH = "/v1/chat/completions"
NOT_SENT = {*ModelSettings.__dataclass_fields__, *SpeculationSettings.__dataclass_fields__, "max_time"} - {"model"}
"""Options for a model in this process."""
SHAPING = ("top_k", "top_p", "min_p")
"""Beside one of these the temperature is 1 unless it is given, as where the model runs here."""


def connect(ctx: click.Context, options: dict[str, Any], out: Console, err: Console) -> ServerTalk:
    """Find the server and its model before the first turn."""
    if refused := typed_options(ctx, NOT_SENT):
        raise InvalidArgument(f"{', '.join(refused)}: of a model in this process, not of one behind --server")
    client = ApiClient(options["server"], options["api_key"] or api_key())
    is_named = ctx.get_parameter_source("model") is ParameterSource.COMMANDLINE
    card = asyncio.run(_model(client, options["model"] if is_named else None))
    talk = ServerTalk(client, card, body_fields(options), options["system"], out, err)
    talk.say(f"{card['id']} at {client.url}")
    return talk


def body_fields(options: dict[str, Any]) -> dict[str, Any]:
    """Sampling and lengths in the interface's names; what was not asked for is not sent."""
    keywords = generate_keywords(options)
    fields = {name: keywords[name] for name in KEYWORDS if name in keywords and name != "max_new_tokens"}
    fields["max_tokens"] = keywords["max_new_tokens"]
    is_shaped = any(name in fields for name in SHAPING)
    fields.setdefault("temperature", 1.0 if is_shaped else 0.0)
    if stops := keywords.get("stop_strings"):
        fields["stop"] = stops
    if bias := keywords.get("logit_bias"):
        fields["logit_bias"] = {str(token): value for token, value in bias.items()}
    return fields


@dataclass(slots=True)
class Totals:
    """Of all answers; rounds and drafts where the server tells them."""

    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, usage: Mapping[str, Any]) -> None:
        self.tokens += usage.get("completion_tokens") or 0
        for choice in usage.get("speculation") or ():
            self.rounds += choice["rounds"]
            self.drafted += choice["num_draft_tokens"]
            self.accepted += choice["num_accepted_tokens"]

    def __str__(self) -> str:
        parts = [f"{self.tokens} tokens"]
        if self.rounds:
            parts.append(f"{self.tokens / self.rounds:.2f} a round")
        if self.drafted:
            parts.append(f"{self.accepted} of {self.drafted} drafted accepted")
        if self.seconds:
            parts.append(f"{self.tokens / self.seconds:.1f} a second")
        return ", ".join(parts)


class ServerTalk(Talk):
    """With a model of a server; of Forerun's, tokens are coloured by origin as they are here."""

    def __init__(
        self,
        client: ApiClient,
        card: Mapping[str, Any],
        fields: dict[str, Any],
        system: str | None,
        out: Console,
        err: Console,
    ) -> None:
        super().__init__(system, out, err)
        self.client = client
        self.fields = {"model": card["id"], **fields, "stream_options": {"include_usage": True}}
        if card.get("owned_by") == "forerun":
            self.fields["speculation"] = {"origins": True}
        self.messages: list[dict[str, str]] = []
        self.totals = Totals()

    def reset(self) -> None:
        self.messages.clear()

    def print_statistics(self) -> None:
        self.say(str(self.totals))

    def answer(self, question: str) -> None:
        start = [] if self.system is None else [{"role": "system", "content": self.system}]
        asked = {"role": "user", "content": question}
        said: list[str] = []
        this, started = Totals(), time.perf_counter()
        try:
            asyncio.run(self._stream([*start, *self.messages, asked], said, this))
        except KeyboardInterrupt:  # closes the connection, which ends the answer there
            pass
        except ServerError as error:
            self.refuse(f"{error} (/reset forgets the conversation)" if self.messages else error)
            return
        this.seconds = time.perf_counter() - started
        self.text.write("\n")
        self.messages += [asked, {"role": "assistant", "content": "".join(said)}]
        self.totals = _sum(self.totals, this)
        if self.text.is_terminal:
            self.say(str(this))

    async def _stream(self, messages: list[dict[str, str]], said: list[str], totals: Totals) -> None:
        try:
            async with aclosing(self.client.events(PATH, {**self.fields, "messages": messages})) as events:
                async for event in events:
                    totals.add(event.get("usage") or {})
                    for choice in event.get("choices") or ():
                        self._write(choice, said)
        finally:
            self.client.close()  # connections belong to this event loop

    def _write(self, choice: Mapping[str, Any], said: list[str]) -> None:
        text = (choice.get("delta") or {}).get("content") or ""
        said.append(text)
        if not choice.get("origins"):
            self.text.write(text)
        for piece in choice.get("origins") or ():
            self.text.write(piece["text"], cast("Origin", piece["origin"]))


async def _model(client: ApiClient, name: str | None) -> dict[str, Any]:
    try:
        return await client.model(name)
    finally:
        client.close()


def _sum(one: Totals, other: Totals) -> Totals:
    return Totals(*(getattr(one, name) + getattr(other, name) for name in Totals.__slots__))
