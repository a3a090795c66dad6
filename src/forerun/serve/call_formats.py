"""How models write calls of tools: found out from the chat template, and kept to by a grammar.

A template writes the calls of earlier turns in the format that the model was trained to write. What may be called, and
with which arguments, is the request's: names and schemas become the grammar of that format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from forerun.errors import InvalidArgument
from forerun.inputs import render_chat
from forerun.serve.errors import refused
from forerun.serve.schemas import ChatBody, Function

PROBE = "probe_the_format"
WRITTEN_LIKE_TEMPLATES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Spaces as `tojson` writes them: a grammar that allows any number of them lets small models write nothing else."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Calls are `opening`, then `before NAME after ARGUMENTS tail` with `between` in between, then `closing`."""

    name: str
    mark: str  # what no answer but a call holds; `opening` and `before` begin with it
    before: str
    after: str
    tail: str
    between: str | None  # None: the model was trained to call one tool at a time
    opening: str = ""
    closing: str = ""
    anywhere: bool = True  # whether text may come before the first call

    @property
    def head(self) -> re.Pattern[str]:
        """What is read between two calls' arguments, without special tokens, which may have no text."""
        key = re.search(r'"(arguments|parameters)": $', self.after)
        if key is None:
            return re.compile(r"([\w.:-]+)(?:\[ARGS\])?(?=\{)")
        return re.compile(rf'"name": "([^"]*)", "{key[1]}": (?=\{{)')


FORMATS = (
    CallFormat(
        "hermes", "<tool_call>", before='<tool_call>\n{"name": "', after='", "arguments": ', tail="}\n</tool_call>",
        between="\n",
    ),
    *(
        CallFormat(
            "mistral", "[TOOL_CALLS]", opening=f"[TOOL_CALLS]{space}[", before='{"name": "', after='", "arguments": ',
            tail="}", between=", ", closing="]",
        )
        for space in (" ", "")
    ),
    CallFormat("mistral", "[TOOL_CALLS]", before="[TOOL_CALLS]", after="[ARGS]", tail="", between=""),
    CallFormat(
        "llama3", "{", before='{"name": "', after='", "parameters": ', tail="}", between=None, anywhere=False,
    ),
)  # fmt: skip
"""The first that a template writes is taken: what a later one looks for may be a part of an earlier one."""


def find_format(tokenizer: Any) -> CallFormat | None:
    """The format that the chat template writes calls in; None where it knows no tools, or another format."""
    tool = {"type": "function", "function": {"name": PROBE, "description": "", "parameters": _no_parameters()}}
    question = {"role": "user", "content": "?"}
    # An id as Mistral's templates want it.
    call = {"id": "a23456789", "type": "function", "function": {"name": PROBE, "arguments": {"x": 1}}}
    turns: list[dict[str, Any]] = [
        question,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": PROBE, "tool_call_id": "a23456789", "content": "1"},
    ]
    try:
        asked, called = render_chat(tokenizer, [question], [tool]), render_chat(tokenizer, turns, [tool])
    except InvalidArgument:
        return None
    if PROBE not in asked:
        return None
    return next((f for f in FORMATS if f"{f.opening}{f.before}{PROBE}{f.after}" + '{"x": 1}' in called), None)


@dataclass(frozen=True, slots=True)
class Tools:
    """What a request may call, and how its model writes that."""

    format: CallFormat
    functions: Sequence[Function]
    must_call: bool
    may_repeat: bool
    tokens: Mapping[str, int]  # of the format's texts, those that are a single token of the vocabulary

    @property
    def mark_token(self) -> int | None:
        return self.tokens.get(self.format.mark)

    def grammar(self, stop_ids: frozenset[int]) -> str:
        """What the answer may be: up to the first call the model's own text, then calls and nothing else."""
        form, lark = self.format, self._lark
        first = f"{form.opening}{form.before}"[len(form.mark) :]
        more = "" if form.between is None or not self.may_repeat else f"({lark(form.between + form.before)} call)*"
        rules = [
            f"start: {self._beginning(stop_ids)}",
            f"calls: {lark(first)} call {more} {lark(form.closing)}",
            "call: " + " | ".join(f"call_{number}" for number in range(len(self.functions))),
        ]
        for number, function in enumerate(self.functions):
            rules.append(f"call_{number}: {lark(function.name + form.after)} arguments_{number} {lark(form.tail)}")
            rules.append(f"arguments_{number}: %json {json.dumps(arguments_schema(function))}")
        return LLMatcher.grammar_from_lark("\n".join(rules))

    def _beginning(self, stop_ids: frozenset[int]) -> str:
        """Everything up to and with the mark of the first call, and the text that has none."""
        mark, token = self._lark(self.format.mark), self.mark_token
        if self.must_call:
            return f"{mark} calls"
        if not self.format.anywhere:
            return f"TEXT | {mark} calls\nTEXT: /([^{re.escape(self.format.mark)}](.|\\n)*)?/"
        if token is not None:  # any token but this one, so that nothing else of the model's law changes
            others = ",".join(map(str, sorted({token, *stop_ids})))
            return f"other* | other* {mark} calls\nother: <[^{others}]>"
        return f"TEXT | marked calls\nmarked[lazy]: TEXT {mark}\nTEXT: /(.|\\n)*/"

    def _lark(self, text: str) -> str:
        """As a grammar has it: special tokens by number, the rest as strings."""
        if not text:
            return ""
        names = sorted(self.tokens, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
        written = (f"<[{self.tokens[part]}]>" if part in self.tokens else json.dumps(part) for part in parts if part)
        return " ".join(written)


def asked_tools(body: ChatBody, form: CallFormat | None, tokenizer: Any) -> Tools | None:
    """What the request lets the model call; None where that is nothing."""
    choice = body.tool_choice or ("auto" if body.tools else "none")
    if not body.tools:
        if body.tool_choice not in (None, "none"):
            raise refused("tool_choice", "there are no tools to choose from: give tools")
        if body.parallel_tool_calls is not None:
            raise refused("parallel_tool_calls", "there are no tools to call: give tools")
        return None
    functions = [tool.function for tool in body.tools]
    if len({function.name for function in functions}) < len(functions):
        raise refused("tools", "two of them have the same name")
    if choice == "none":
        return None
    if form is None:
        raise refused(
            "tools", "this model's chat template knows no tools, or writes calls in a format that is not known here",
            "not_offered",
        )  # fmt: skip
    if not isinstance(choice, str):
        functions = [function for function in functions if function.name == choice.function.name]
        if not functions:
            raise refused("tool_choice", "there is no tool of this name")
    tokens = tokenizer.get_added_vocab()
    texts = "".join((form.opening, form.before, form.after, form.tail, form.between or "", form.closing))
    return Tools(
        form,
        functions,
        must_call=choice != "auto",
        may_repeat=body.parallel_tool_calls is not False,
        tokens={text: token for text, token in tokens.items() if text in texts},
    )


def arguments_schema(function: Function) -> dict[str, Any]:
    """Of the object that a function is called with; without parameters it is empty, as in OpenAI's API."""
    schema = _no_parameters() if function.parameters is None else {"type": "object", **function.parameters}
    if schema["type"] != "object":
        raise refused("tools", f"the parameters of {function.name} must be an object: a schema of type object")
    return {**schema, "x-guidance": WRITTEN_LIKE_TEMPLATES}


def _no_parameters() -> dict[str, Any]:
    return {"type": "object", "properties": {}, "additionalProperties": False}
